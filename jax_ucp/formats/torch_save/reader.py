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
from collections import defaultdict
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
from jax_ucp.formats.torch_save.optimizer_dicts import Steps, joined
from jax_ucp.formats.torch_save.state_pairing import Stored, is_trainable
from jax_ucp.formats.torch_save.state_paths import Places
from jax_ucp.formats.torch_save.tensor_names import DTensor, StoredTensor, unreadable
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
    r"(mp_rank_|zero_pp_rank_|layer_|expp_rank_)\d.*_states\.pt"
    r"|model_optim_rng\.pt|distrib_optim\.pt"
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
        imported = read_weights(path, path.parent, names, options)
        keep_index(imported, path, index, tensors_of(imported))
    else:
        refuse_part(path)
        imported = read_weights(path, path.parent, [path.name], options)
    return finish(imported)


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
    for name, file in files.items():
        _refuse_rank_file(name, file)
    imported = Import("torch", path, Combined.of_files(files))
    tree = _Tree()
    for name, file in files.items():
        _keep_extras(imported, name, file)
        tree.add(name, file)
        imported.unknown |= file.unknown
    _keep_attributes(imported, tree)
    places = imported.placed(*tree.described(), options)
    paths = {label: tensor.path for label, tensor in tree.tensors.items()}
    _check_objects(imported, tree.objects, weights_place(paths, places.at, places.in_optimizers))
    _place(imported, tree, places, options)
    return imported


def _refuse_rank_file(name: str, file: TorchFile) -> None:
    """Raise FormatError for a file of DeepSpeed or Megatron: it is one rank's part."""
    of_deepspeed = isinstance(file.tree, dict) and "ds_version" in file.tree
    if of_deepspeed or _RANK_FILE.search(name):
        raise FormatError(
            f"{file.path} is what one rank wrote of a checkpoint: open {_whole(file.path)}"
        )


def _whole(path: FilePath) -> FilePath:
    """The folder of the checkpoint that a rank's file is of: Megatron has one inside it for each
    rank.
    """
    return path.parent.parent if path.parent.name.startswith("mp_rank_") else path.parent


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor at a path in the nested dicts and lists of a file; `key` is `file:item`."""

    path: Steps
    file: str
    key: str
    node: StoredTensor

    def described(self) -> Stored:
        node = self.node
        tie = self.file, node.storage, node.offset, node.shape, node.strides
        return Stored(self.path, node.shape, is_trainable(node.dtype), tie)


@dataclass
class _Tree:
    """What the nested dicts and lists of the files hold: tensors by their paths joined by dots, and
    other objects by path, with their files.
    """

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: dict[Steps, tuple[TorchFile, object]] = field(default_factory=dict)

    def add(self, name: str, file: TorchFile) -> None:
        for path, node in nested_leaves(file.tree, ()):
            if not isinstance(node, StoredTensor):
                self.objects[path] = file, node
                continue
            label = _label(path)
            if label in self.tensors:
                raise FormatError(
                    f"{file.path}: {label!r} would be two tensors, of which one is"
                    f" {self.tensors[label].key}"
                )
            self.tensors[label] = _Tensor(path or (0,), name, f"{name}:{node.key}", node)

    def described(self) -> tuple[Mapping[str, Stored], Mapping[Steps, object]]:
        """The tensors and the other objects, as `Import.placed` takes them."""
        tensors = {label: tensor.described() for label, tensor in self.tensors.items()}
        return tensors, {path: node for path, (_, node) in self.objects.items()}


def _label(path: Steps) -> str:
    return joined(path) or BARE


def _keep_attributes(imported: Import, tree: _Tree) -> None:
    for label, tensor in tree.tensors.items():
        if tensor.node.attributes:
            imported.extra(tensor.file, f"attributes of {label}", tensor.node.attributes)


def _place(imported: Import, tree: _Tree, places: Places, options: Options) -> None:
    """Give every tensor its place, but those of optimizers where only weights are asked for."""
    left = places.in_optimizers if options.weights_only else frozenset[str]()
    for label, tensor in tree.tensors.items():
        state, name = places.at[label]
        what = f"{state} of {name}"
        if label in left:
            imported.leave(tensor.key, "", f"{what}: only weights were asked for")
            continue
        reason = what if state != "other" else "a tensor beside the model"
        whole = Consolidated(Unique().join([tensor.node.shape]), [tensor.key])
        imported.parameter(state, name, whole, reason)
    imported.notes += places.notes


def _check_objects(
    imported: Import, objects: Mapping[Steps, tuple[TorchFile, object]], place: WeightsPlace
) -> None:
    """Raise FormatError where what cannot be read may be a weight: unreadable tensors, objects
    of unknown classes.
    """
    unreadable_weights: dict[FilePath, dict[str, str]] = defaultdict(dict)
    for path, (file, node) in objects.items():
        label = _label(path)
        reason = next(filter(None, (unreadable(inner) for _, inner in walk(node))), "")
        match bool(reason), place.is_aside(path):
            case True, True:
                imported.skip(f"{file.path.name}:{label}", "tensor", reason)
                imported.notes.append(f"{label} of {file.path.name} was left out: {reason}")
            case True, False:
                unreadable_weights[file.path][label] = reason
            case False, False:
                for holder in tensor_holders(node):
                    raise FormatError(closed_tensors(holder))
    for path, reasons in unreadable_weights.items():
        raise FormatError(f"{path}: {cannot_be_read(reasons)}")


def _keep_extras(imported: Import, name: str, file: TorchFile) -> None:
    """Everything of a file that is no tensor in nested dicts and lists."""
    entries = _entries(file.tree) if isinstance(file.tree, dict) else None
    for key, value in [("object", file.tree)] if entries is None else entries:
        rest = without_tensors(value)
        if rest is not GONE:
            imported.extra(name, str(key), rest)


def _entries(node: object) -> list[tuple[str | int, object]] | None:
    """What a dict or list of a state dict holds; None of anything else."""
    match node:
        case dict():
            return list(node.items()) if {*map(type, node)} <= {str, int} else None
        case list() | tuple():
            return list(enumerate(node))
    return None


def nested_leaves(node: object, path: Steps) -> Iterator[tuple[Steps, object]]:
    """What nested dicts and lists hold, with the path to each."""
    entries = _entries(node)
    if entries is None:
        yield path, node
        return
    for step, value in entries:
        yield from nested_leaves(value, (*path, step))


GONE = Name("a tensor, which is an array of the tree")


def without_tensors(node: object) -> object:
    """What is left of a node without the tensors that `nested_leaves` finds in it; GONE if there is
    nothing.
    """
    entries = _entries(node)
    if entries is None:
        return GONE if isinstance(node, StoredTensor | DTensor) else node
    rest = {step: without_tensors(value) for step, value in entries}
    kept = {step: value for step, value in rest.items() if value is not GONE}
    if rest and not kept:
        return GONE
    match node:
        case dict():
            return kept
        case list():
            return list(rest.values())
    return tuple(rest.values())
