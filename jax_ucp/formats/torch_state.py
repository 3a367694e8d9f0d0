"""Files of torch.save as checkpoints: a model's state dict, or what a trainer saves with it; folders of such files.

Which tensor is a weight and which an optimizer's state follows from where it lies in the nested dicts, by the rules of
`state_paths`. `torch.optim.Optimizer.state_dict` numbers the parameters; which number is which parameter is stored only
if the optimizer was given names (`param_names` in its groups). Without them the states are kept by number, under
`other`, unless shapes prove the pairing or the user says it: the order of `model.parameters()` is not that of a state
dict, which has buffers and tied weights too. Everything that is no tensor is an extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats import extras
from jax_ucp.formats.extras import tensor_bytes
from jax_ucp.formats.importing import Import
from jax_ucp.formats.optimizer_dicts import Steps
from jax_ucp.formats.options import Options
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.safe_pickle import Name, walk
from jax_ucp.formats.state_pairing import Stored, is_trainable
from jax_ucp.formats.state_paths import places
from jax_ucp.formats.torch_file import StoredTensor, TorchFile, is_torch_file
from jax_ucp.formats.weight_files import keep_config, keep_index, read_index, skip_others
from jax_ucp.layout.patterns import Unique
from jax_ucp.storage.consolidated import Consolidated
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.joined import Joined

# The names that `transformers` gives to weights, and to the index of several files of them.
WEIGHTS = "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
BARE = "tensor"  # what a tensor is called that is all its file holds

# DeepSpeed's and Megatron's files hold one rank's part, which looks like a whole model's state dict.
_RANK_FILE = re.compile(
    r"(mp_rank_|zero_pp_rank_|layer_|expp_rank_)\d.*_states\.pt|model_optim_rng\.pt|distrib_optim\.pt"
)


def recognise(path: Path) -> bool:
    if path.is_dir():
        return (path / WEIGHTS).is_file() or (path / INDEX).is_file()
    return path.name.endswith(".bin.index.json") or is_torch_file(path)


def open_torch(path: Path, options: Options) -> Contents:
    """The tensors of a file, of the files that an index names, or of a folder that has either.

    Raises FormatError, naming the file, where one holds what is no data, and for one rank's file of a checkpoint.
    """
    index_path, index, names = _files(path)
    folder = path if path.is_dir() else path.parent
    files = {name: TorchFile(folder / name) for name in names}
    found = Import("torch", path, Joined(files))
    for name, file in files.items():
        if _RANK_FILE.search(name) or (isinstance(file.tree, dict) and "ds_version" in file.tree):
            raise FormatError(f"{file.path} is what one rank wrote of a checkpoint: open its folder")
        _extras(found, name, file)
    _tensors(found, files, options)
    if index is not None:
        there = [(name, key) for name, file in files.items() for key in file.arrays()]
        keep_index(found, index_path, index, there)
    if path.is_dir():
        keep_config(found, folder)
        skip_others(found, {*files, INDEX}, ".bin", {})
    return found.contents()


def _files(path: Path) -> tuple[Path, Mapping[str, Any] | None, list[str]]:
    """The index and its place, if there is one, and the names of the files."""
    index_path = path / INDEX if path.is_dir() else path
    if path.is_dir() and (path / WEIGHTS).is_file():
        if index_path.is_file():
            raise FormatError(f"{path} has {WEIGHTS} and {INDEX}, of which either is a checkpoint: open the one meant")
        return index_path, None, [WEIGHTS]
    if not index_path.name.endswith(".index.json"):
        return index_path, None, [index_path.name]
    return index_path, *read_index(index_path)


def _tensors(found: Import, files: Mapping[str, TorchFile], options: Options) -> None:
    stored: dict[str, tuple[str, StoredTensor]] = {}
    paths: dict[str, Steps] = {}
    objects: dict[Steps, object] = {}
    for name, file in files.items():
        for path, node in _leaves(file.tree, ()):
            if not isinstance(node, StoredTensor):
                objects[path] = node
                continue
            label = ".".join(map(str, path)) or BARE
            if label in stored:
                raise FormatError(f"{file.path}: {label!r} would be two tensors, of which one is {stored[label][0]}")
            stored[label] = f"{name}:{node.key}", node
            paths[label] = path or (0,)
            if node.attributes:
                found.extra(name, f"attributes of {label}", node.attributes)
    tensors = {label: _stored(paths[label], key, tensor) for label, (key, tensor) in stored.items()}
    try:
        where = places(tensors, objects, options)
    except Undecided as error:
        raise FormatError(f"{found.path}: optimizer_groups does not fit: {error}") from None
    if where.used and options.optimizer_groups is not None:
        found.said["optimizer_groups"] = options.optimizer_groups
    for name, settings in where.settings:
        found.hyperparameters(name, settings)
    for label, (key, tensor) in stored.items():
        state, name = where.at[label]
        if options.weights_only and label in where.in_optimizers:
            found.skip(key, "", f"{state} of {name}: only weights were asked for")
        else:
            reason = f"{state} of {name}" if state != "other" else "a tensor beside the model"
            found.parameter(state, name, Consolidated(Unique().join([tensor.shape]), [key]), reason)
    found.notes += where.notes


def _stored(path: Steps, key: str, tensor: StoredTensor) -> Stored:
    file = key.partition(":")[0]
    tie = file, tensor.storage, tensor.offset, tensor.shape, tensor.strides
    return Stored(path, tensor.shape, is_trainable(tensor.dtype), tie)


def _extras(found: Import, name: str, file: TorchFile) -> None:
    """Everything of a file that is no tensor in nested dicts and lists."""
    tree = file.tree if _entries(file.tree) is not None and isinstance(file.tree, dict) else {"object": file.tree}
    for key, value in tree.items():
        rest = _rest(value)
        if rest is _GONE:
            continue
        if (held := tensor_bytes(rest)) > extras.MAX_EXTRA_BYTES:
            reason = f"an object with {held} bytes of tensors inside, which is data and no setting"
            found.skip(f"{name}:{key}", type(value).__name__, reason)
            for node in (node for _, node in walk(rest) if isinstance(node, StoredTensor)):
                found.skip(f"{name}:{node.key}", "", reason)
            found.notes.append(f"{key} in {name} was left out: {reason}")
        else:
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
    """What is left of a node without the tensors that `_leaves` finds in it; _GONE if there is nothing."""
    entries = _entries(node)
    if entries is None:
        return _GONE if isinstance(node, StoredTensor) else node
    rest = [(step, _rest(value)) for step, value in entries]
    if rest and all(value is _GONE for _, value in rest):
        return _GONE
    if isinstance(node, dict):
        return {step: value for step, value in rest if value is not _GONE}
    return [value for _, value in rest] if isinstance(node, list) else tuple(value for _, value in rest)
