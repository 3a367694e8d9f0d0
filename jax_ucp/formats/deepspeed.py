"""DeepSpeed checkpoints: ZeRO-1 and ZeRO-2 without model parallelism.

Each data-parallel rank holds its partition of one flat buffer per parameter group. The order of parameters
in the buffer is that of `param_shapes` in the model states; `param_slice_mappings` is not used, because
DeepSpeed 0.19.8 writes it wrong under `round_robin_gradients`. Where padding lies is computed from lengths,
because `group_paddings` is not the same thing in every optimizer wrapper.

Facts: `runtime/engine.py`, `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.formats.deepspeed_files import Rank, expect_dict, is_checkpoint, open_files, tag_folder
from jax_ucp.formats.extras import as_json
from jax_ucp.formats.torch_file import StoredTensor, TorchFile
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated, Unique, flat_layouts
from jax_ucp.metadata import Key, Leaf, leaf_names
from jax_ucp.metadata import Path as TreePath
from jax_ucp.storage.consolidated import Consolidated, ConsolidatedView, same_bits
from jax_ucp.storage.contents import Contents, Item, Piece
from jax_ucp.storage.source import ArrayInfo, ArraySource, Joined

VERIFY_BYTES = 16 << 20

# Model-state entries that are the tensors of the tree, or describe them; everything else there is an extra.
_DESCRIBED = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "buffer_names",
    "shared_params",
)
# Optimizer-state entries that are tensors of the tree, or say how they lie.
_LAYOUT = ("base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings", "partition_count")
_LAYOUT += ("param_slice_mappings", "param_alignment_paddings", "zero_stage", "base_optimizer_state_step")


def recognise(path: Path) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_deepspeed(path: Path) -> Contents:
    """The checkpoint in a save directory (with `latest`), or in the folder of one tag.

    Raises FormatError, naming the file, for a rank that is missing or of another run, and for layouts not
    read yet.
    """
    folder = tag_folder(path) or path
    if not folder.is_dir():
        raise NotACheckpoint(f"{path / 'latest'} names {folder.name}, but there is no such folder beside it")
    model, ranks = open_files(folder)
    return _Reader(folder, model, ranks).contents()


class _Reader:
    """Puts the pieces of one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, folder: Path, model: TorchFile, ranks: Sequence[Rank]):
        self.folder, self.model, self.ranks = folder, model, ranks
        self.states: dict[str, Any] = expect_dict(model.tree, model.path, "the file")
        self.module: dict[str, Any] = dict(self.states.get("module") or {})
        self.files = Joined({model.path.name: model, **{rank.name: rank.file for rank in ranks}})
        self.params: dict[TreePath, Consolidated] = {}
        self.constants: dict[TreePath, np.ndarray] = {}
        self.fate: dict[str, tuple[str, str]] = {}
        self.twins: list[tuple[TreePath, str]] = []

    def contents(self) -> Contents:
        groups = self._groups()
        for index, shapes in enumerate(groups):
            self._optimizer_group(index, shapes)
        owned = {name for shapes in groups for name in shapes}
        self._module(owned)
        paths = [*self.params, *self.constants]
        names = dict(zip(paths, leaf_names(paths), strict=True))
        view = ConsolidatedView(self.files, {names[path]: param for path, param in self.params.items()})
        constants = {names[path]: value for path, value in self.constants.items()}
        arrays = _WithConstants(view, constants)
        infos = arrays.arrays()
        leaves = [Leaf(path, name, "array", infos[name].shape, infos[name].dtype.name) for path, name in names.items()]
        extras = self._extras()

        def where(leaf: Leaf) -> list[Piece]:
            if leaf.path in self.constants:
                return [Piece(self.ranks[0].name, f"optimizer_state_dict ({leaf.path[0]})", Box((), ()), Box((), ()))]
            found: list[Piece] = []
            for key, fragment in view.where(leaf.name):
                file, _, item = key.partition(":")
                found.append(Piece(file, item, fragment.source, fragment.target))
            return found

        def verify() -> Iterator[tuple[str, str | None]]:
            for path, param in self.params.items():
                label = "/".join(map(str, path))
                yield from _compared(label, view, names[path], None, param)
            for path, key in self.twins:
                label = "/".join(map(str, path))
                yield from _compared(label, view, names[path], (self.files, key), None)

        return Contents(
            "deepspeed",
            str(self.folder),
            leaves,
            arrays,
            account=self._account(extras),
            extras=extras,
            notes=self._check_mappings(),
            verify=verify,
            where=where,
        )

    def _groups(self) -> list[dict[str, Shape]]:
        """The parameters of each group, in the order in which they lie in its flat buffer."""
        shapes = self.states.get("param_shapes")
        if not isinstance(shapes, list):
            raise FormatError(
                f"{self.model.path} has no param_shapes, so that nothing says which parameters the flat buffers hold"
            )
        groups = [{str(name): tuple(shape) for name, shape in group.items()} for group in shapes]
        for rank in self.ranks:
            have = len(rank.state["single_partition_of_fp32_groups"])
            if have != len(groups):
                raise FormatError(
                    f"{rank.file.path} has {have} parameter groups, but {self.model.path.name} describes "
                    f"{len(groups)}; one of the files belongs to another run"
                )
        return groups

    def _optimizer_group(self, index: int, shapes: Mapping[str, Shape]) -> None:
        """Masters and optimizer state of one group: flat partitions, and values for the whole group."""
        flat = {"param": [rank.state["single_partition_of_fp32_groups"][index] for rank in self.ranks]}
        states = [_group_state(rank, index) for rank in self.ranks]
        names = list(states[0])
        for rank, state in zip(self.ranks, states, strict=True):
            if list(state) != names:
                raise FormatError(f"{rank.file.path}: group {index} has the states {list(state)}, rank 0 has {names}")
        scalars: dict[str, list[Any]] = {}
        for name in names:
            values = [state[name] for state in states]
            if all(isinstance(v, StoredTensor) and len(v.shape) == 1 for v in values):
                flat[name] = values
            else:
                scalars[name] = values
        gaps = self._gaps(index, shapes)
        length = self._partition_length(index, shapes, gaps, flat)
        for state, tensors in flat.items():
            self._flat_state(state, tensors, shapes, gaps, length)
        for state, values in scalars.items():
            for name in shapes:
                self._group_scalar((Key("dict", state), Key("dict", name)), values)

    def _gaps(self, index: int, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Elements of padding after each parameter, under `parameter_alignment`."""
        paddings = self.ranks[0].state.get("param_alignment_paddings")
        if not paddings or not paddings[index]:
            return {}
        return dict(zip(shapes, map(int, paddings[index]), strict=True))

    def _partition_length(
        self,
        index: int,
        shapes: Mapping[str, Shape],
        gaps: Mapping[str, int],
        flat: Mapping[str, Sequence[StoredTensor]],
    ) -> int:
        """Elements in each rank's partition of the padded buffer, masters and moments alike.

        Masters, and in elastic checkpoints moments too, are stored without the padding at the end.
        """
        ranks = len(self.ranks)
        total = sum(map(math.prod, shapes.values())) + sum(gaps.values())
        length = max(tensor.shape[0] for tensors in flat.values() for tensor in tensors)
        # The buffer is padded to a multiple of 2 * ranks (nccl_start_alignment_factor, stage_1_and_2.py).
        if not total <= length * ranks < total + 2 * ranks:
            raise FormatError(
                f"{self.folder}: group {index} has {total} elements by {self.model.path.name}, but {ranks} partitions "
                f"of {length} hold {length * ranks}; files of another run, or world size, are among them"
            )
        for state, tensors in flat.items():
            for rank, tensor in zip(self.ranks, tensors, strict=True):
                real = min(length, max(0, total - rank.dp * length))
                if tensor.shape[0] not in (real, length):
                    raise FormatError(
                        f"{rank.file.path}: {state} of group {index} has {tensor.shape[0]} elements, where the "
                        f"partition of rank {rank.dp} has {real}, or {length} with its padding"
                    )
        return length

    def _flat_state(
        self,
        state: str,
        tensors: Sequence[StoredTensor],
        shapes: Mapping[str, Shape],
        gaps: Mapping[str, int],
        length: int,
    ) -> None:
        stored = tuple(tensor.shape for tensor in tensors)
        keys = [rank.key(tensor) for rank, tensor in zip(self.ranks, tensors, strict=True)]
        for name, layout in flat_layouts(shapes, [length] * len(tensors), gaps).items():
            self.params[Key("dict", state), Key("dict", name)] = _touched(replace(layout, shards=stored), keys)
        for key in keys:
            self.fate[key] = ("mapped", f"{state} of {len(shapes)} parameters")

    def _group_scalar(self, path: TreePath, values: Sequence[Any]) -> None:
        """A value that a group has once, such as its step: every parameter of the group gets it."""
        if isinstance(values[0], StoredTensor):
            keys = [rank.key(tensor) for rank, tensor in zip(self.ranks, values, strict=True)]
            found = [self.files.read(key, Box.whole(tensor.shape)) for key, tensor in zip(keys, values, strict=True)]
            self.params[path] = Consolidated(Replicated().join([tensor.shape for tensor in values]), keys)
            self.fate |= {key: ("mapped", f"{path[0]} of every parameter of its group") for key in keys}
        else:
            # A Python int has no dtype; optax counts in int32.
            found = [np.asarray(value, np.int32 if isinstance(value, int) else None) for value in values]
            self.constants[path] = found[0]
        for rank, value in zip(self.ranks, found, strict=True):
            if not same_bits(np.asarray(value), np.asarray(found[0])):
                raise FormatError(
                    f"{rank.file.path}: {path[0]} is {value}, but {found[0]} in {self.ranks[0].name}; "
                    "the files are not of one step"
                )

    def _module(self, owned: set[str]) -> None:
        """The module's own tensors: copies of masters, tied names, buffers, and parameters without a master."""
        shared = {str(alias): str(owner) for alias, owner in (self.states.get("shared_params") or {}).items()}
        buffers = set(map(str, self.states.get("buffer_names") or ()))
        for name, tensor in self.module.items():
            if not isinstance(tensor, StoredTensor):
                continue
            key = f"{self.model.path.name}:{tensor.key}"
            path = Key("dict", "param"), Key("dict", name)
            if name in owned or shared.get(name) in owned:
                owner = path if name in owned else (Key("dict", "param"), Key("dict", shared[name]))
                self.twins.append((owner, key))
                what = f"a copy of {owner[1]}'s master in {tensor.dtype}, compared with it by verify"
                self.fate[key] = ("skipped", what if name in owned else f"tied to {owner[1]}: {what}")
                continue
            if name in buffers:
                path = Key("dict", "buffer"), Key("dict", name)
                self.fate[key] = ("mapped", "a buffer of the model")
            else:
                self.fate[key] = ("mapped", "a parameter that the optimizer does not own (frozen)")
            self.params[path] = Consolidated(Unique().join([tensor.shape]), [key])
        for name, tensor in (self.states.get("frozen_param_fragments") or {}).items():
            if not isinstance(tensor, StoredTensor):
                continue
            key = f"{self.model.path.name}:{tensor.key}"
            frozen = Key("dict", "param"), Key("dict", str(name))
            if key in self.fate:
                continue
            if frozen in self.params:
                self.twins.append((frozen, key))
                self.fate[key] = ("skipped", f"a second copy of {name}, compared with the first by verify")
            else:
                self.params[frozen] = Consolidated(Unique().join([tensor.shape]), [key])
                self.fate[key] = ("mapped", "a parameter that the optimizer does not own (frozen)")

    def _extras(self) -> dict[str, Any]:
        """Everything else, by file: schedulers, counters, client state, loss scaler, hyper-parameters."""
        read = self.files.read
        extras: dict[str, Any] = {}
        name = self.model.path.name
        extras[name] = {k: as_json(v, name, read) for k, v in self.states.items() if k not in _DESCRIBED}
        for rank in self.ranks:
            top = expect_dict(rank.file.tree, rank.file.path, "the file")
            rest = {k: v for k, v in top.items() if k != "optimizer_state_dict"}
            rest |= {k: v for k, v in rank.state.items() if k not in _LAYOUT}
            base = rank.state.get("base_optimizer_state")
            if isinstance(base, dict) and "param_groups" in base:
                rest["param_groups"] = base["param_groups"]
            extras[rank.name] = {k: as_json(v, rank.name, read) for k, v in rest.items()}
        return extras

    def _account(self, extras: Mapping[str, Any]) -> list[Item]:
        items: list[Item] = []
        tensors = self.files.arrays()
        for key, info in tensors.items():
            fate, reason = self.fate.get(key, ("extra", "a tensor in an extra, kept with it"))
            items.append(Item(key, f"{info.dtype} {list(info.shape)}", fate, reason))  # pyright: ignore[reportArgumentType]
        for file, found in extras.items():
            for name, value in found.items():
                if f"{file}:{name}" not in tensors:
                    items.append(Item(f"{file}:{name}", type(value).__name__, "extra", "kept as JSON"))
        for name in _DESCRIBED[1:]:
            if name in self.states:
                what = "says which tensor is which; its content is in the tree's names and shapes"
                items.append(Item(f"{self.model.path.name}:{name}", "layout", "skipped", what))
        for rank in self.ranks:
            for name in _LAYOUT[2:]:
                if name in rank.state:
                    what = "says how partitions lie; consolidated parameters have no such thing"
                    items.append(Item(f"{rank.name}:{name}", "layout", "skipped", what))
        return items

    def _check_mappings(self) -> list[str]:
        """Compare each file's `param_slice_mappings` with the walk over `param_shapes`; what to tell the user.

        Raises FormatError where a file's mappings are those of another rank: it was renamed.
        """
        expected: list[dict[str, tuple[int, int]]] = [{} for _ in self.ranks]
        names = [rank.name for rank in self.ranks]
        for (state, name), param in self.params.items():
            for fragment in param.layout.fragments if state.name == "param" else ():
                file = param.keys[fragment.shard].partition(":")[0]
                if file in names:
                    mine = expected[names.index(file)]
                    start, numel = mine.get(str(name), (fragment.source.start[0], 0))
                    mine[str(name)] = start, numel + fragment.source.size
        differ = []
        for rank, own in zip(self.ranks, expected, strict=True):
            addresses = {}
            for mapping in rank.state.get("param_slice_mappings") or []:
                addresses |= {str(name): (at.fields["start"], at.fields["numel"]) for name, at in mapping.items()}
            if addresses and addresses != own:
                if addresses in expected:
                    other = self.ranks[expected.index(addresses)].dp
                    raise FormatError(
                        f"{rank.file.path} holds what rank {other} should hold, by its own param_slice_mappings: "
                        "the file was renamed, or belongs to another run"
                    )
                differ.append(rank.name)
        if not differ:
            return []
        return [
            f"param_slice_mappings of {', '.join(differ)} describe another order than the flat buffers have "
            "(DeepSpeed writes them so under round_robin_gradients); the order of param_shapes was used"
        ]


@dataclass(frozen=True)
class _WithConstants:
    """A source with some more arrays that are in memory."""

    source: ArraySource
    constants: Mapping[str, np.ndarray]

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {**self.source.arrays(), **{key: ArrayInfo(a.shape, a.dtype) for key, a in self.constants.items()}}

    def read(self, key: str, box: Box) -> np.ndarray:
        if key in self.constants:
            return self.constants[key][box.index].copy()
        return self.source.read(key, box)


def _group_state(rank: Rank, index: int) -> dict[str, Any]:
    """The optimizer's state of one group, by name; elastic checkpoints have a list where others have a dict."""
    base = rank.state["base_optimizer_state"]
    if isinstance(base, list):
        return dict(base[index])
    state = expect_dict(base, rank.file.path, "base_optimizer_state").get("state") or {}
    return dict(state.get(index) or {})


def _touched(layout: ParamLayout, keys: Sequence[str]) -> Consolidated:
    """The parameter with only those shards that hold a part of it."""
    used = sorted({fragment.shard for fragment in layout.fragments})
    place = {shard: i for i, shard in enumerate(used)}
    fragments = tuple(replace(f, shard=place[f.shard]) for f in layout.fragments)
    return Consolidated(
        replace(layout, shards=tuple(layout.shards[i] for i in used), fragments=fragments), [keys[i] for i in used]
    )


def _compared(
    label: str,
    view: ConsolidatedView,
    name: str,
    twin: tuple[ArraySource, str] | None,
    param: Consolidated | None,
) -> Iterator[tuple[str, str | None]]:
    """Compare a parameter with its twin, cast to the twin's dtype; or its replicas with each other."""
    info = view.arrays()[name]
    if param is not None and len(param.layout.replicas) == len(param.layout.fragments):
        return
    fault = None
    for box in row_boxes(info.shape, info.dtype.itemsize, VERIFY_BYTES):
        try:
            if twin is None:
                view.compare_replicas(name, box)
                continue
        except CorruptData as error:
            fault = str(error)
            break
        source, key = twin
        copy = source.read(key, box)
        if not same_bits(view.read(name, box).astype(copy.dtype), np.asarray(copy)):
            fault = f"{label}: the master, rounded to {copy.dtype}, is not the copy at {key} in {box}"
            break
    yield label, fault
