"""The tensors of a torch_dist checkpoint that have shapes of the model's tensors, or are parts of
such: weights, and the masters and moments that are stored in the same way.

Facts: `megatron/core/dist_checkpointing/` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_names import (
    Run,
    bare_name,
    check_stacks,
    flattened_runs,
    gate_and_up,
    is_flat,
    stacked_halves,
    state_of,
    unstacked,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.protocol import ArrayInfo

# By parameter its shape, and the runs that it is made of.
_Blocks = dict[str, tuple[Shape, Sequence[Run]]]


@dataclass(frozen=True)
class TensorStates:
    """By parameter and state how it is stored; `weight` is what the model computes with.

    `dtypes` are those of the weights. `cuts` are parts of stored tensors, by the names under which
    states are made of them. `left` are the stored tensors of the optimizer, where weights alone
    are opened.
    """

    states: Mapping[str, Mapping[str, Consolidated]]
    dtypes: Mapping[str, str]
    cuts: Mapping[str, Run]
    left: Sequence[str]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: states["weight"].layout.shape for name, states in self.states.items()}


def tensor_states(files: DistFiles, weights_only: bool) -> TensorStates:
    """The states that are stored as tensors of the model's shapes.

    Raises FormatError where one is of a tensor that the model has not, is stored twice, or is cut
    otherwise than a run of these args cuts it.
    """
    models = {key: state_of(key) for key in itertools.filterfalse(is_flat, files.tensors)}
    weights = {key: place for key, place in models.items() if place[0] == "weight"}
    kept = weights if weights_only else models
    left = files.tensors.keys() - weights.keys() if weights_only else ()
    _require_models(files, kept, weights.keys())
    blocks = {key: _unstacked(files, key, model) for key, (_, model) in kept.items()}
    states, cuts = _consolidated(files.source.arrays(), _by_state(files, kept, blocks))
    chunks = [run.key for key in left for run in files.tensors[key].runs]
    return TensorStates(states, _dtypes(files, weights, blocks), cuts, chunks)


def _dtypes(
    files: DistFiles, weights: Iterable[str], blocks: Mapping[str, _Blocks]
) -> dict[str, str]:
    dtypes = {name: files.tensors[key].dtype.name for key in weights for name in blocks[key]}
    return dtypes | {name: dtypes[gate] for name, (gate, _) in gate_and_up(dtypes).items()}


def _require_models(
    files: DistFiles, keys: Mapping[str, tuple[str, str]], models: Collection[str]
) -> None:
    for key, (_, model) in keys.items():
        if model not in models:
            raise FormatError(
                f"{files.folder}: {key} is a state of {model}, but the model has no such"
                " tensor: a part of the checkpoint is missing, or is of another run"
            )


def _by_state(
    files: DistFiles, keys: Mapping[str, tuple[str, str]], blocks: Mapping[str, _Blocks]
) -> dict[str, _Blocks]:
    by_state: dict[str, _Blocks] = {}
    for key, (state, _) in keys.items():
        params = by_state.setdefault(state, {})
        if twice := params.keys() & blocks[key].keys():
            raise FormatError(
                f"{files.folder}: {state} of {min(twice)} is stored twice, in {key} too"
            )
        params |= blocks[key]
    return by_state


def _unstacked(files: DistFiles, key: str, model: str) -> _Blocks:
    """The parameters in the tensor `key`: the model's tensor `model`, or a state of it."""
    tensor, shape = files.tensors[key], files.tensors[model].shape
    try:
        runs = (
            tensor.runs
            if tensor.shape == shape
            else list(flattened_runs(shape, tensor.shape, tensor.runs))
        )
    except FormatError as error:
        raise FormatError(f"{files.folder}: {key}: {error}") from None
    layers = files.args.get("num_layers") if bare_name(model).startswith("decoder.") else None
    check_stacks(model, shape, {"layers": layers, "experts": files.args.get("num_experts")})
    return {**unstacked(model, shape, runs)}


def _consolidated(
    stored: Mapping[str, ArrayInfo], by_state: Mapping[str, _Blocks]
) -> tuple[Mapping[str, Mapping[str, Consolidated]], Mapping[str, Run]]:
    """Parameters as chunks that are stored, or cut out of such; and these cuts."""
    states: dict[str, dict[str, Consolidated]] = {}
    cuts: dict[str, Run] = {}
    layout = cache(_layout)  # experts by the thousand have few, each of which is proved once
    for state, blocks in by_state.items():
        for name, shape, runs in _whole(blocks):
            keys = [_key(run, stored[run.key].shape) for run in runs]
            cuts |= {key: run for key, run in zip(keys, runs, strict=True) if key != run.key}
            states.setdefault(name, {})[state] = Consolidated(
                layout(tuple(shape), tuple(run.target for run in runs)), keys
            )
    return states, cuts


def _whole(blocks: _Blocks) -> Iterator[tuple[str, Shape, Sequence[Run]]]:
    """Parameters, gate and up as the one that they are in the model."""
    halves = gate_and_up(blocks)
    parts = {part for pair in halves.values() for part in pair}
    yield from ((name, *block) for name, block in blocks.items() if name not in parts)
    for name, (gate, up) in halves.items():
        yield name, *stacked_halves(blocks[gate], blocks[up])


def _key(run: Run, stored: Shape) -> str:
    """The name of a chunk, or of the part of one that a run is."""
    if run.start == 0 and stored == run.target.shape:
        return run.key
    return f"{run.key}[{run.start}:{run.start + run.target.size}]"


def _layout(shape: Shape, boxes: Sequence[Box]) -> ParamLayout:
    fragments = [Fragment(i, Box.whole(box.shape), box) for i, box in enumerate(boxes)]
    return ParamLayout(shape, tuple(box.shape for box in boxes), tuple(fragments))
