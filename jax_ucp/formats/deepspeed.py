"""DeepSpeed checkpoints: ZeRO-1 and ZeRO-2 without model parallelism.

Each data-parallel rank holds its partition of one flat buffer per parameter group. The order of parameters
in the buffer is that of `param_shapes` in the model states; `param_slice_mappings` is not used, because
DeepSpeed 0.19.8 writes it wrong under `round_robin_gradients`. Where padding lies is computed from lengths,
because `group_paddings` is not the same thing in every optimizer wrapper.

Facts: `runtime/engine.py`, `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.formats.deepspeed_files import Rank, expect_dict, is_checkpoint, open_files, tag_folder
from jax_ucp.formats.importing import Import, touched
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_file import StoredTensor, TorchFile
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.patterns import Replicated, Unique, flat_layouts
from jax_ucp.metadata import Key
from jax_ucp.storage.consolidated import Consolidated, same_bits
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.source import Joined

# Model-state entries that are the tensors of the tree, or describe them; everything else there is an extra.
_DESCRIBED = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "buffer_names",
    "shared_params",
)
# Optimizer-state entries that are the tensors of the tree, and those that say how they lie.
_PARTITIONS = ("base_optimizer_state", "single_partition_of_fp32_groups")
_LAYOUT = ("group_paddings", "partition_count", "param_slice_mappings", "param_alignment_paddings", "zero_stage")

_FROZEN = "a parameter that the optimizer does not own (frozen)"


def recognise(path: Path) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_deepspeed(path: Path, options: Options) -> Contents:
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
        self.files = Joined({model.path.name: model, **{rank.name: rank.file for rank in ranks}})
        self.found = Import("deepspeed", folder, self.files)

    def contents(self) -> Contents:
        groups = self._groups()
        for index, shapes in enumerate(groups):
            self._optimizer_group(index, shapes)
        self._check_mappings()
        self._module({name for shapes in groups for name in shapes})
        self._frozen()
        self._extras()
        return self.found.contents()

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
            self._group_scalar(state, values, list(shapes))

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
            param = touched(replace(layout, shards=stored), keys)
            self.found.parameter(state, name, param, f"{state} of {len(shapes)} parameters")

    def _group_scalar(self, state: str, values: Sequence[Any], names: Sequence[str]) -> None:
        """A value that a group has once, such as its step: every parameter of the group gets it."""
        first = self.ranks[0]
        if isinstance(values[0], StoredTensor):
            keys = [rank.key(tensor) for rank, tensor in zip(self.ranks, values, strict=True)]
            read = [self.files.read(key, Box.whole(tensor.shape)) for key, tensor in zip(keys, values, strict=True)]
            layout = Replicated().join([tensor.shape for tensor in values])
            for name in names:
                self.found.parameter(
                    state, name, Consolidated(layout, keys), f"{state} of every parameter of its group"
                )
        else:
            # A Python int has no dtype; optax counts in int32.
            read = [np.asarray(value, np.int32 if isinstance(value, int) else None) for value in values]
            for name in names:
                self.found.constant(state, name, read[0], f"{first.name}:optimizer_state_dict ({state})")
        for rank, value in zip(self.ranks, read, strict=True):
            if not same_bits(np.asarray(value), np.asarray(read[0])):
                raise FormatError(
                    f"{rank.file.path}: {state} is {value}, but {read[0]} in {first.name}; "
                    "the files are not of one step"
                )

    def _module(self, owned: set[str]) -> None:
        """The module's own tensors: copies of masters, tied names, buffers, and parameters without a master."""
        shared = {str(alias): str(owner) for alias, owner in (self.states.get("shared_params") or {}).items()}
        buffers = set(map(str, self.states.get("buffer_names") or ()))
        for name, tensor in (self.states.get("module") or {}).items():
            if not isinstance(tensor, StoredTensor):
                continue
            key = f"{self.model.path.name}:{tensor.key}"
            owner = name if name in owned else shared.get(name)
            if owner in owned:
                tied = "" if owner == name else f"tied to {owner}: "
                reason = f"{tied}a copy of {owner}'s master in {tensor.dtype}, compared with it by verify"
                self.found.twin("param", owner, key, reason)
            elif name in buffers:
                self.found.parameter("buffer", name, self._one(tensor), "a buffer of the model")
            else:
                self.found.parameter(
                    "param", name, self._one(tensor), "a parameter that the optimizer does not own (frozen)"
                )

    def _frozen(self) -> None:
        """Frozen parameters, which ZeRO-2 saves a second time beside the module."""
        for name, tensor in (self.states.get("frozen_param_fragments") or {}).items():
            if not isinstance(tensor, StoredTensor):
                continue
            if (Key("dict", "param"), Key("dict", name)) in self.found.params:
                reason = f"a second copy of {name}, compared with the first by verify"
                self.found.twin("param", name, f"{self.model.path.name}:{tensor.key}", reason)
            else:
                self.found.parameter(
                    "param", name, self._one(tensor), "a parameter that the optimizer does not own (frozen)"
                )

    def _one(self, tensor: StoredTensor) -> Consolidated:
        return Consolidated(Unique().join([tensor.shape]), [f"{self.model.path.name}:{tensor.key}"])

    def _extras(self) -> None:
        """Everything else, by file: schedulers, counters, client state, loss scaler, hyper-parameters."""
        model = self.model.path.name
        for name, value in self.states.items():
            if name not in _DESCRIBED:
                self.found.extra(model, name, value)
            elif name != "module":
                what = "says which tensor is which; its content is in the tree's names and shapes"
                self.found.skip(f"{model}:{name}", "layout", what)
        for rank in self.ranks:
            top = expect_dict(rank.file.tree, rank.file.path, "the file")
            base = rank.state["base_optimizer_state"]
            groups = {"param_groups": base["param_groups"]} if isinstance(base, dict) and "param_groups" in base else {}
            for name, value in {**top, **rank.state, **groups}.items():
                if name in _LAYOUT:
                    what = "says how partitions lie; consolidated parameters have no such thing"
                    self.found.skip(f"{rank.name}:{name}", "layout", what)
                elif name not in ("optimizer_state_dict", *_PARTITIONS):
                    self.found.extra(rank.name, name, value)

    def _check_mappings(self) -> None:
        """Compare each file's `param_slice_mappings` with the walk over `param_shapes`, and note where they differ.

        Raises FormatError where a file's mappings are those of another rank: it was renamed.
        """
        expected: list[dict[str, tuple[int, int]]] = [{} for _ in self.ranks]
        names = [rank.name for rank in self.ranks]
        for (state, name), param in self.found.params.items():
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
        if differ:
            self.found.notes.append(
                f"param_slice_mappings of {', '.join(differ)} describe another order than the flat buffers have "
                "(DeepSpeed writes them so under round_robin_gradients); the order of param_shapes was used"
            )


def _group_state(rank: Rank, index: int) -> dict[str, Any]:
    """The optimizer's state of one group, by name; elastic checkpoints have a list where others have a dict."""
    base = rank.state["base_optimizer_state"]
    if isinstance(base, list):
        return dict(base[index])
    state = expect_dict(base, rank.file.path, "base_optimizer_state").get("state") or {}
    return dict(state.get(index) or {})
