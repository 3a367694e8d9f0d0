"""Files of torch.save as checkpoints: a model's state dict, or what a trainer saves;
`weight_folder` has folders.

Which tensor is a weight and which an optimizer's state follows from where it lies in the nested
dicts, by the rules of `state_paths`. `torch.optim.Optimizer.state_dict` numbers the parameters;
which number is which parameter is stored only if the optimizer was given names (`param_names` in
its groups). Without them the states are kept by number, under `other`, unless shapes prove the
pairing or the user says it: the order of `model.parameters()` is not that of a state dict, which
has buffers and tied weights too. Everything that is no tensor is an extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.huggingface.weight_files import (
    finish,
    index_save,
    keep_index,
    refuse_part,
    refuse_stand_in,
    tensors_of,
)
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import TorchFile, cannot_be_read, is_torch_file
from jax_ucp.formats.torch_save.opaque import (
    WeightsPlace,
    closed_tensors,
    tensor_holders,
    weights_place,
)
from jax_ucp.formats.torch_save.optimizer_dicts import Steps
from jax_ucp.formats.torch_save.state_pairing import Stored, is_trainable
from jax_ucp.formats.torch_save.tensor_names import StoredTensor, unreadable
from jax_ucp.formats.torch_save.unpickle import Name, walk
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents

INDEX_SUFFIX = ".bin.index.json"  # what `transformers` calls the index of several files
BARE = "tensor"  # what a tensor is called that is all its file holds

# DeepSpeed's and Megatron's files hold one rank's part, which looks like a whole model's state
# dict.
_RANK_FILE = re.compile(
    r"(mp_rank_|zero_pp_rank_|layer_|expp_rank_)\d.*_states\.pt|model_optim_rng\.pt|distrib_optim\.pt"
)


def recognise(path: FilePath) -> bool:
    return path.is_file() and (path.name.endswith(INDEX_SUFFIX) or is_torch_file(path))


def open_torch(path: FilePath, options: Options) -> Contents:
    """The tensors of a file, or of the files that an index names.

    Raises FormatError, naming the file, where one holds what is no data, and for a file that is a
    part of a model.
    """
    if path.name.endswith(INDEX_SUFFIX):
        index, names = index_save(path)
        found = read_weights(path, path.parent, names, options)
        keep_index(found, path, index, tensors_of(found))
    else:
        refuse_part(path)
        found = read_weights(path, path.parent, [path.name], options)
    return finish(found)


def read_weights(
    path: FilePath, folder: FilePath, names: Sequence[str], options: Options
) -> Import:
    """The tensors of files in a folder, each under the state that it is, and as extras what is no
    tensor.

    Raises as `open_torch`.
    """
    for name in names:
        refuse_stand_in(folder / name)
    files = {name: TorchFile(folder / name, lenient=True) for name in names}
    found = Import("torch", path, Combined.of_files(files))
    for name, file in files.items():
        if _RANK_FILE.search(name) or (isinstance(file.tree, dict) and "ds_version" in file.tree):
            raise FormatError(
                f"{file.path} is what one rank wrote of a checkpoint: open {_whole(file.path)}"
            )
        _extras(found, name, file)
    _tensors(found, files, options)
    found.unknown |= {name for file in files.values() for name in file.unknown}
    return found


def _whole(path: FilePath) -> FilePath:
    """The folder of the checkpoint that a rank's file is of: Megatron has one inside it for each
    rank.
    """
    return path.parent.parent if path.parent.name.startswith("mp_rank_") else path.parent


@dataclass
class _Tree:
    """What the nested dicts and lists of the files hold, by path: `stored` are tensors with their
    keys, by the path joined by dots, which `paths` have.
    """

    stored: dict[str, tuple[str, StoredTensor]] = field(default_factory=dict)
    paths: dict[str, Steps] = field(default_factory=dict)
    objects: dict[Steps, tuple[TorchFile, object]] = field(default_factory=dict)

    def add(self, found: Import, name: str, file: TorchFile) -> None:
        for path, node in _leaves(file.tree, ()):
            if not isinstance(node, StoredTensor):
                self.objects[path] = file, node
                continue
            label = _label(path)
            if label in self.stored:
                raise FormatError(
                    f"{file.path}: {label!r} would be two tensors, of which one is"
                    f" {self.stored[label][0]}"
                )
            self.stored[label] = f"{name}:{node.key}", node
            self.paths[label] = path or (0,)
            if node.attributes:
                found.extra(name, f"attributes of {label}", node.attributes)


def _label(path: Steps) -> str:
    return ".".join(map(str, path)) or BARE


def _tensors(found: Import, files: Mapping[str, TorchFile], options: Options) -> None:
    tree = _Tree()
    for name, file in files.items():
        tree.add(found, name, file)
    values = {path: node for path, (_, node) in tree.objects.items()}
    tensors = {
        label: _stored(tree.paths[label], key, tensor)
        for label, (key, tensor) in tree.stored.items()
    }
    places = found.placed(tensors, values, options)
    aside = weights_place(tree.paths, places.at, places.in_optimizers)
    _check_aside(found, tree.objects, aside)
    left = places.in_optimizers if options.weights_only else frozenset[str]()
    for label, (key, tensor) in tree.stored.items():
        state, name = places.at[label]
        what = f"{state} of {name}"
        if label in left:
            found.leave(key, "", f"{what}: only weights were asked for")
            continue
        reason = what if state != "other" else "a tensor beside the model"
        found.parameter(state, name, Consolidated(Unique().join([tensor.shape]), [key]), reason)
    found.notes += places.notes


def _check_aside(
    found: Import, objects: Mapping[Steps, tuple[TorchFile, object]], where: WeightsPlace
) -> None:
    """Raise FormatError where what cannot be read may be a weight: unreadable tensors, objects
    of unknown classes.
    """
    needed: dict[FilePath, dict[str, str]] = {}
    for path, (file, node) in objects.items():
        label = _label(path)
        reason = next(filter(None, (unreadable(inner) for _, inner in walk(node))), "")
        aside = where.is_aside(path)
        if reason and aside:
            found.skip(f"{file.path.name}:{label}", "tensor", reason)
            found.notes.append(f"{label} of {file.path.name} was left out: {reason}")
        elif reason:
            needed.setdefault(file.path, {})[label] = reason
        elif not aside:
            for holder in tensor_holders(node):
                raise FormatError(closed_tensors(holder))
    for path, reasons in needed.items():
        raise FormatError(f"{path}: {cannot_be_read(reasons)}")


def _stored(path: Steps, key: str, tensor: StoredTensor) -> Stored:
    file = key.partition(":")[0]
    tie = file, tensor.storage, tensor.offset, tensor.shape, tensor.strides
    return Stored(path, tensor.shape, is_trainable(tensor.dtype), tie)


def _extras(found: Import, name: str, file: TorchFile) -> None:
    """Everything of a file that is no tensor in nested dicts and lists."""
    tree = (
        file.tree
        if _entries(file.tree) is not None and isinstance(file.tree, dict)
        else {"object": file.tree}
    )
    for key, value in tree.items():
        rest = _rest(value)
        if rest is not _GONE:
            found.extra(name, str(key), rest)


def _entries(node: object) -> list[tuple[str | int, object]] | None:
    """What a dict or list of a state dict holds; None of anything else."""
    if isinstance(node, dict):
        return list(node.items()) if all(type(key) in (str, int) for key in node) else None
    return list(enumerate(node)) if isinstance(node, list | tuple) else None


def _leaves(node: object, path: Steps) -> Iterator[tuple[Steps, object]]:
    entries = _entries(node)
    if entries is None:
        yield path, node
    for step, value in entries or ():
        yield from _leaves(value, (*path, step))


_GONE = Name("a tensor, which is an array of the tree")


def _rest(node: object) -> object:
    """What is left of a node without the tensors that `_leaves` finds in it; _GONE if there is
    nothing.
    """
    entries = _entries(node)
    if entries is None:
        return _GONE if isinstance(node, StoredTensor) else node
    rest = {step: _rest(value) for step, value in entries}
    kept = {step: value for step, value in rest.items() if value is not _GONE}
    if rest and not kept:
        return _GONE
    if isinstance(node, dict):
        return kept
    return list(rest.values()) if isinstance(node, list) else tuple(rest.values())
