"""Nested dicts and lists in files of torch.save: tensors, other objects, and extras; and the files
that a trainer leaves beside the weights, which are extras too and decide nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jax_ucp.arrays.checks import checks_of
from jax_ucp.codecs.tensor_names import DTensor, StoredTensor, unreadable
from jax_ucp.codecs.torch_file import TorchFile, cannot_be_read, is_torch_file
from jax_ucp.codecs.unpickle import Name, each_node
from jax_ucp.errors import CorruptData, FormatError, UnsafePickle
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.facts import COUNTS, Facts
from jax_ucp.formats.weight_files import read_json
from jax_ucp.states.opaque import WeightsPlace, require_known
from jax_ucp.states.optimizer_dicts import Steps, joined
from jax_ucp.states.state_pairing import StateTensor, is_trainable

_NUMBER = re.compile(r"\d+")
MAX_TEXT_BYTES = 1 << 20
_SAVED = (".pt", ".pth", ".bin", ".pkl")  # how trainers call files of torch.save
_TEXTS = (".yaml", ".yml", ".txt")
BARE = "tensor"  # what a tensor is called that is all its file holds


@dataclass(frozen=True, slots=True)
class TreeTensor:
    """A tensor at a path in the nested dicts and lists of a file; `key` is `file:item`."""

    path: Steps
    file: str
    key: str
    node: StoredTensor

    def described(self) -> StateTensor:
        node = self.node
        tie = self.file, node.storage, node.offset, node.shape, node.strides
        return StateTensor(self.path, node.shape, is_trainable(node.dtype), tie)


@dataclass
class Tree:
    """Nested dicts of files: tensors by dotted path, other objects by path, with files."""

    tensors: dict[str, TreeTensor] = field(default_factory=dict)
    objects: dict[Steps, tuple[TorchFile, object]] = field(default_factory=dict)

    def add(self, name: str, file: TorchFile, under: Steps = ()) -> None:
        """Add the content of the file `name` at `under`. Raises FormatError for two of one name."""
        for path, node in nested_leaves(file.tree, under):
            if not isinstance(node, StoredTensor):
                self.objects[path] = file, node
                continue
            label = _label(path)
            if label in self.tensors:
                raise FormatError(
                    f"{file.path}: {label!r} would be two tensors, of which one is"
                    f" {self.tensors[label].key}"
                )
            self.tensors[label] = TreeTensor(path or (0,), name, f"{name}:{node.key}", node)

    def described(self) -> tuple[Mapping[str, StateTensor], Mapping[Steps, object]]:
        """The tensors and the other objects, as `ContentsBuilder.placed` takes them."""
        tensors = {label: tensor.described() for label, tensor in self.tensors.items()}
        return tensors, {path: node for path, (_, node) in self.objects.items()}

    def numbers(self) -> dict[str, tuple[Steps, str, int | float]]:
        """Optimizers' states that are plain numbers, such as an old `step`: path, file, value."""
        numbers: dict[str, tuple[Steps, str, int | float]] = {}
        for path, (file, node) in self.objects.items():
            is_state = len(path) >= 4 and path[-3] == "state"
            # not bool, which is an int too
            if is_state and isinstance(node, int | float) and not isinstance(node, bool):
                numbers[_label(path)] = path, file.path.name, node
        return numbers

    def check(self, builder: ContentsBuilder, place: WeightsPlace) -> None:
        """Raise FormatError where something unreadable, not aside, may be a weight."""
        unreadable_weights: dict[FilePath, dict[str, str]] = defaultdict(dict)
        for path, (file, node) in self.objects.items():
            label = _label(path)
            reason = next(filter(None, (unreadable(inner) for inner in each_node(node))), "")
            match bool(reason), place.is_aside(path):
                case True, True:
                    builder.skip(f"{file.path.name}:{label}", "tensor", reason)
                    builder.notes.append(f"{label} of {file.path.name} was left out: {reason}")
                case True, False:
                    unreadable_weights[file.path][label] = reason
                case False, False:
                    require_known(node)
        for path, reasons in unreadable_weights.items():
            raise cannot_be_read(reasons).at(path)


def _label(path: Steps) -> str:
    return joined(path) or BARE


def keep_extras(builder: ContentsBuilder, name: str, file: TorchFile) -> None:
    """Keep everything of a file, in nested dicts and lists, that is not a tensor, as extras."""
    entries = _entries(file.tree) if isinstance(file.tree, dict) else None
    for key, value in [("object", file.tree)] if entries is None else entries:
        rest = without_tensors(value)
        if rest is not GONE:
            builder.extra(name, str(key), rest)


def keep_proved(
    builder: ContentsBuilder, name: str, file: TorchFile, source: TorchFile | None = None
) -> None:
    """Keep all of a file as extras, tensors too. Raises CorruptData where a CRC does not fit."""
    for fault in filter(None, (check.run() for check in checks_of(file.claims(), "full"))):
        raise CorruptData(fault, way_out="weights_only")
    tree = file.tree if isinstance(file.tree, dict) else {"object": file.tree}
    for key, value in tree.items():
        builder.extra(name, str(key), value, source)


def keep_beside(builder: ContentsBuilder, name: str, path: FilePath, facts: Facts) -> None:
    """Keep a file as extras of `name`, or as unread. Raises FormatError if it does not fit."""
    if path.suffix == ".json":
        builder.extra(name, "content", read_json(path))
    elif path.suffix in _TEXTS and path.size() <= MAX_TEXT_BYTES:
        builder.extra(name, "content", path.read_text())
    elif path.suffix in _SAVED or is_torch_file(path):
        try:
            file = TorchFile(path, lenient=True)
            keep_proved(builder, name, file, file)
        except UnsafePickle as error:
            builder.leave_out(name, name, error)
            return
        except FormatError as error:
            error.at(path, way_out="weights_only")
            raise
        facts.state_all(file, name, _NUMBER.sub("*", name), file.tree, only=("step", *COUNTS))
        builder.unknown |= file.unknown
    else:
        builder.skip(name, f"{path.size()} bytes", "lies beside the weights; not read")


def _entries(node: object) -> list[tuple[str | int, object]] | None:
    match node:
        case dict():
            return list(node.items()) if {*map(type, node)} <= {str, int} else None
        case list() | tuple():
            return list(enumerate(node))
    return None


def nested_leaves(node: object, path: Steps) -> Iterator[tuple[Steps, object]]:
    """Every leaf below nested dicts and lists, with the path to it."""
    entries = _entries(node)
    if entries is None:
        yield path, node
        return
    for step, value in entries:
        yield from nested_leaves(value, (*path, step))


GONE = Name("a tensor, which is an array of the tree")


def without_tensors(node: object) -> object:
    """The rest of a node without its tensors; GONE if there is nothing."""
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
