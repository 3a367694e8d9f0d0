"""Megatron-Core's distributed checkpoints (`--ckpt-format torch_dist`, and zarr before core 0.16), any optimizer.

A tensor of the model is stored whole, whatever the parallelism was, with layers and experts on leading axes; masters
and moments are stored in the same way or in one that `megatron_dist_names` undoes. Weights beside masters are twins.
The vocabulary is padded; `sizes` says its true size.

Of two files whose items have equal sizes nothing in a checkpoint says that they were exchanged. Where there are
masters beside weights, `verify` finds it.

Facts: `megatron/core/dist_checkpointing/`, `megatron/core/optimizer/` and `megatron/training/checkpointing.py` of
Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, LayoutError, NotACheckpoint, UnsafePickle
from jax_ucp.formats.dcp_metadata import METADATA_FILE
from jax_ucp.formats.importing import Import
from jax_ucp.formats.megatron_dist_files import COMMON_FILE, CONFIG_FILE, Beside, DistFiles, is_checkpoint, open_files
from jax_ucp.formats.megatron_dist_names import (
    Run,
    check_stacks,
    flattened_runs,
    gate_and_up,
    is_flat,
    stacked_halves,
    state_of,
    unstacked,
)
from jax_ucp.formats.megatron_files import iteration_folder
from jax_ucp.formats.megatron_optim import BUFFERS, beside_tensors
from jax_ucp.formats.megatron_walk import EMBEDDING, TIED, is_expert
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout
from jax_ucp.layout.patterns import Unique
from jax_ucp.storage.consolidated import Consolidated
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.cuts import Cut

_LEFT = "of the optimizer, which was to be left aside (weights_only)"


def recognise(path: Path) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_megatron_dist(path: Path, options: Options) -> Contents:
    """The checkpoint in a save directory (with its tracker file), or in the folder of one iteration.

    Raises FormatError, naming file and tensor, where files are missing, damaged or of another run, and LayoutError
    where chunks do not form a tensor.
    """
    folder = iteration_folder(path)
    if not folder.is_dir():
        raise NotACheckpoint(f"{path} names {folder.name}, but there is no such folder in it")
    files = open_files(folder)
    try:
        contents = _Reader(files, options).contents()
    except LayoutError as error:
        raise LayoutError(f"{folder}: {error}") from None

    def verify() -> Iterator[tuple[str, str | None]]:
        yield from files.verify()
        yield from contents.verify()

    return replace(contents, verify=verify)


@dataclass(frozen=True)
class _State:
    """One state of a parameter (`weight` is what the model computes with), and the runs that it is made of."""

    shape: tuple[int, ...]
    runs: Sequence[Run]


class _Reader:
    """Puts one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, files: DistFiles, options: Options):
        self.files, self.args, self.options = files, files.args, options
        self.found = Import("megatron", files.folder, Beside({"": files.source, f"{COMMON_FILE}:": files.common}))
        self.states: dict[str, dict[str, _State]] = {}

    def contents(self) -> Contents:
        keys = {key: state_of(key) for key in self.files.tensors if not is_flat(key)}
        weights = {model: self.files.tensors[key] for key, (state, model) in keys.items() if state == "weight"}
        by_state: dict[str, dict[str, tuple[tuple[int, ...], Sequence[Run]]]] = {}
        for key, (state, model) in keys.items():
            tensor = self.files.tensors[key]
            if model not in weights:
                raise FormatError(f"{self.files.folder}: {key} is a state of {model}, but there is no such tensor")
            if state != "weight" and self.options.weights_only:
                for run in tensor.runs:
                    self.found.skip(run.key, "", _LEFT)
                continue
            shape, runs = weights[model].shape, tensor.runs
            if tensor.shape != shape:
                runs = self._flattened(key, shape)
            check_stacks(model, shape, {"layers": self._layers(model), "experts": self.args.get("num_experts")})
            params = by_state.setdefault(state, {})
            for name, (inner, own) in unstacked(model, shape, runs).items():
                if name in params:
                    raise FormatError(f"{self.files.folder}: {state} of {name} is stored twice, in {key} too")
                params[name] = inner, own
        for state, params in by_state.items():
            for name, (gate, up) in gate_and_up(params).items():
                params[name] = stacked_halves(params.pop(gate), params.pop(up))
            for name, (shape, runs) in params.items():
                self.states.setdefault(name, {})[state] = _State(shape, runs)
        if any(is_flat(key) for key in (*self.files.tensors, *self.files.objects)) and not self.options.weights_only:
            raise FormatError(f"{self.files.folder}: the optimizer's state is in flat buffers")
        self._check_layers()
        self._parameters()
        self._objects()
        self._common()
        self._other_files()
        self._notes()
        return self.found.contents()

    def _flattened(self, key: str, shape: Sequence[int]) -> list[Run]:
        tensor = self.files.tensors[key]
        try:
            return list(flattened_runs(shape, tensor.shape, tensor.runs))
        except FormatError as error:
            raise FormatError(f"{self.files.folder}: {key}: {error}") from None

    def _layers(self, model: str) -> int | None:
        return self.args.get("num_layers") if model.startswith("decoder.") else None

    def _check_layers(self) -> None:
        """Every layer is there, with a number of its own or on an axis."""
        found = {int(n) for name in self.states if (n := name.removeprefix("decoder.layers.").split(".")[0]).isdigit()}
        want = self.args.get("num_layers")
        if isinstance(want, int) and (odd := found ^ set(range(want))):
            raise FormatError(
                f"{self.files.folder}: args.num_layers is {want}, but of layer {min(odd)} there is "
                f"{'a tensor' if min(odd) in found else 'none'}: {COMMON_FILE} belongs to another run"
            )

    def _parameters(self) -> None:
        steps = {} if self.options.weights_only else self._steps()
        for expert in (False, True):
            mine = {name: states for name, states in self.states.items() if is_expert(name) == expert}
            every = {state for states in mine.values() for state in states if state != "weight"}
            for name, states in mine.items():
                have = {state for state in states if state != "weight"}
                # What has no state at all was frozen; a 16-bit run keeps what is fp32 in the model as its own master.
                if have and (lost := every - have - {"param"}):
                    raise FormatError(
                        f"{self.files.folder}: {min(lost)} of {name} is in no file, but that of other parameters is"
                    )
                self._parameter(name, states)
                if have:
                    self._step(name, steps)

    def _parameter(self, name: str, states: Mapping[str, _State]) -> None:
        weight = self._consolidated(name, states["weight"])
        if name.endswith(BUFFERS):
            self.found.parameter("buffer", name, weight, "a buffer of the model")
        elif "param" in states:
            reason = f"the weight that the model computes with, a copy of the master of {name}; verify compares"
            self.found.parameter("param", name, self._consolidated(name, states["param"]), f"the master of {name}")
            self.found.twin("param", name, weight, reason)
        else:
            self.found.parameter("param", name, weight, f"the parameter {name}")
        for state, held in states.items():
            if state not in ("weight", "param"):
                self.found.parameter(state, name, self._consolidated(name, held), f"{state} of {name}")

    def _consolidated(self, name: str, state: _State) -> Consolidated:
        """The runs as shards of the parameter: each is a stored chunk as it is, or lies inside one."""
        keys: list[str] = []
        for run in state.runs:
            shape, key = run.target.shape, run.key
            if run.start or self.found.stored[key].shape != shape:
                key = f"{run.key}[{run.start}:{run.start + run.target.size}]"
                self.found.cut(key, Cut(run.key, run.start, shape))
            keys.append(key)
        fragments = [Fragment(i, Box.whole(run.target.shape), run.target) for i, run in enumerate(state.runs)]
        layout = ParamLayout(state.shape, tuple(run.target.shape for run in state.runs), tuple(fragments))
        if name in (EMBEDDING, TIED) and (vocab := self.options.sizes.get("vocab")) is not None:
            try:
                layout = layout.clip((vocab, *state.shape[1:]))
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from None
        return Consolidated(layout, keys)

    def _steps(self) -> dict[bool, list[tuple[bool | None, Any, str]]]:
        """How often each optimizer stepped, that of experts under True: (group with decay or None for all, value,
        where it is)."""
        found: dict[bool, list[tuple[bool | None, Any, str]]] = {}
        optimizer = self.files.tree.get("optimizer")
        for i, part in enumerate(_parts(optimizer)):
            inner = part.get("optimizer", part)
            if not isinstance(inner, dict):
                raise FormatError(f"{self.files.common.path}: optimizer {i} is a {type(inner).__name__}, not a dict")
            steps = found.setdefault(bool(i), [])
            if (common := inner.get("state", {}).get("common_step")) is not None:
                steps.append((None, common, "optimizer (common_step)"))
            steps += _group_steps(inner.get("param_groups"), f"{COMMON_FILE}:optimizer (param_groups)")
        return found

    def _step(self, name: str, steps: Mapping[bool, Sequence[tuple[bool | None, Any, str]]]) -> None:
        """The step of the optimizer that has the parameter, which is that of its group, or common to all."""
        own = steps.get(is_expert(name) and True in steps, [])
        decays = len(self.states[name]["weight"].shape) != 1 and not name.endswith(".bias")
        values = [(value, where) for group, value, where in own if group in (None, decays)]
        if not values:
            raise FormatError(f"{self.files.common.path}: nothing says how often the optimizer of {name} stepped")
        (value, where), *others = values
        if any(other != value for other, _ in others):
            raise FormatError(f"{self.files.folder}: {name} stepped {value} times by {where}, {others[0][0]} elsewhere")
        if isinstance(value, StoredTensor):
            key = f"{COMMON_FILE}:{value.key}"
            self.found.parameter(
                "step", name, Consolidated(Unique().join([value.shape]), [key]), "how often the optimizer stepped"
            )
        else:
            array = np.asarray(value, np.int32 if isinstance(value, int) else np.float32)
            self.found.constant("step", name, array, where)

    def _objects(self) -> None:
        for key, stored in self.files.objects.items():
            where = f"{stored.file}:{key}"
            if "._extra_state/" in key:
                self.found.skip(where, "object", "what a module of TransformerEngine keeps beside its weights")
            elif self.options.weights_only and key.partition("/")[0].endswith(".optimizer"):
                self.found.skip(where, "object", _LEFT)
            else:
                self._extra(key, stored.file, where)

    def _extra(self, key: str, file: str, where: str) -> None:
        try:
            opened = self.files.objects[key].open()
        except UnsafePickle as error:
            self.found.skip(where, "object", f"not read, because it asks for more than data: {error}")
            self.found.notes.append(f"the object {key} was left out: {error}")
            return
        tree = opened.tree
        self.found.extra(file, key, tree[0] if isinstance(tree, list) and len(tree) == 1 else tree, opened)

    def _common(self) -> None:
        for name, value in self.files.tree.items():
            if name != "optimizer":
                self.found.extra(COMMON_FILE, name, value)
            elif self.options.weights_only:
                self.found.skip(f"{COMMON_FILE}:optimizer", "param_groups", _LEFT)
                for key in self.files.common.arrays():
                    if key.startswith("optimizer/"):
                        self.found.skip(f"{COMMON_FILE}:{key}", "", _LEFT)
            else:
                several = isinstance(value, dict) and 0 in value
                for label, part in beside_tensors(_parts(value) if several else value):
                    self.found.extra(COMMON_FILE, label, part)

    def _other_files(self) -> None:
        about = {CONFIG_FILE: "names the backend", METADATA_FILE: "says which chunk is where", COMMON_FILE: ""}
        for path in sorted(self.files.folder.iterdir()):
            if path.name in self.files.files or path.name == COMMON_FILE:
                continue
            if path.name in about:
                self.found.skip(path.name, "metadata", f"{about[path.name]}; the tree's names and shapes come from it")
            else:
                self.found.skip(path.name, f"{path.lstat().st_size} bytes", "nothing of the checkpoint lies in it")
                if path.suffix == ".distcp":
                    self.found.notes.append(f"{path.name} belongs to no tensor: it is left from another save")

    def _notes(self) -> None:
        if EMBEDDING in self.states and "vocab" not in self.options.sizes:
            rows = self.states[EMBEDDING]["weight"].shape[0]
            self.found.notes.append(
                f"Megatron does not record the true vocabulary: all {rows} padded rows of the embeddings are kept. "
                "Say it with sizes={'vocab': ...} (--size vocab=...) and the others are left out"
            )
        if self.options.weights_only:
            self.found.notes.append("weights alone: of a 16-bit run these are not the fp32 masters")
        elif all(states.keys() == {"weight"} for states in self.states.values()):
            self.found.notes.append("the checkpoint was saved without its optimizer")
        if self.options.spec:
            self.found.notes.append("the checkpoint says itself how its shards form parameters: the spec is not used")
        if self.args.absent:
            self.found.notes.append(f"args lack {', '.join(self.args.absent)}; Megatron's defaults were taken")


def _parts(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers: one, or of the dense parameters and of experts, under the numbers 0 and 1."""
    if not isinstance(optimizer, dict):
        return []
    numbered = [optimizer[i] for i in range(len(optimizer)) if i in optimizer]
    parts = numbered if len(numbered) == len(optimizer) else [optimizer]
    return [part for part in parts if isinstance(part, dict)]


def _group_steps(groups: Any, where: str) -> Iterable[tuple[bool | None, Any, str]]:
    for group in groups if isinstance(groups, list) else []:
        step = group.get("step") if isinstance(group, dict) else None
        if isinstance(step, int | float):
            yield group.get("wd_mult", 1.0) != 0, step, where
