"""The tensors of a torch_dist checkpoint that are the model's, its masters and moments.

Facts: `megatron/core/dist_checkpointing/` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from jax_ucp.arrays.value import Array, cut, joined
from jax_ucp.errors import FormatError, naming
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_names import (
    bare_name,
    flattened_runs,
    is_flat,
    stacks_of,
    state_of,
    unstacked,
)
from jax_ucp.formats.megatron.model import Blocks, StoredRun, gate_and_up, join_gated
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import block_layout
from jax_ucp.layout.parts import Shape


@dataclass(frozen=True)
class TensorStates:
    """The arrays by parameter and state; `weight` is the one that the model computes with.

    `boxes` are the blocks in which each weight was written, `dtypes` those of weights. `left` are
    the keys of the optimizer's tensors, if weights alone are opened.
    """

    states: Mapping[str, Mapping[str, Array]]
    boxes: Mapping[str, Sequence[Box]]
    dtypes: Mapping[str, str]
    left: Sequence[str]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: states["weight"].info.shape for name, states in self.states.items()}


def tensor_states(builder: ContentsBuilder, files: DistFiles, weights_only: bool) -> TensorStates:
    """The states that are stored as tensors of the model's shapes. Raises FormatError for a state
    of another shape, or of no tensor of the model.
    """
    models = {key: state_of(key) for key in itertools.filterfalse(is_flat, files.tensors)}
    weights = {key: place for key, place in models.items() if place[0] == "weight"}
    by_state: dict[str, Blocks] = {}
    dtypes: dict[str, str] = {}
    for key, (state, model) in (weights if weights_only else models).items():
        if model not in weights:
            raise FormatError(
                f"{files.folder}: {key} is a state of {model}, but the model has no such"
                " tensor: a part of the checkpoint is missing, or is of another run"
            )
        blocks = _unstacked(files, key, model)
        params = by_state.setdefault(state, {})
        if twice := params.keys() & blocks.keys():
            raise FormatError(
                f"{files.folder}: {state} of {min(twice)} is stored twice, in {key} too"
            )
        params |= blocks
        if state == "weight":
            dtypes |= dict.fromkeys(blocks, files.tensors[key].dtype.name)
    dtypes |= {name: dtypes[gate] for name, (gate, _) in gate_and_up(dtypes).items()}

    states: dict[str, dict[str, Array]] = {}
    boxes: dict[str, Sequence[Box]] = {}
    layout = cache(block_layout)  # experts by the thousand have few, each of which is proved once
    for state, params in by_state.items():
        for name, (shape, runs) in join_gated(params).items():
            arrays = [  # a stored tensor, or a part of one
                cut(f"{run.key} from {run.start}", array, run.start, run.target.shape)
                for run, array in ((run, builder.array(run.key)) for run in runs)
            ]
            targets = tuple(run.target for run in runs)
            whole = joined(f"{state}.{name}", layout(tuple(shape), targets), arrays)
            states.setdefault(name, {})[state] = whole
            if state == "weight":
                boxes[name] = targets
    left = files.tensors.keys() - weights.keys() if weights_only else ()
    runs_left = [run.key for key in left for run in files.tensors[key].runs]
    return TensorStates(states, boxes, dtypes, runs_left)


def _unstacked(files: DistFiles, key: str, model: str) -> Blocks:
    """The parameters in the tensor `key` of `model`. Raises FormatError for its shape."""
    tensor, shape = files.tensors[key], files.tensors[model].shape
    runs: Sequence[StoredRun] = tensor.runs
    if tensor.shape != shape:
        with naming(files.folder, key):
            runs = list(flattened_runs(shape, tensor.shape, tensor.runs))
    layers = files.args.get("num_layers") if bare_name(model).startswith("decoder.") else None
    counts = {"layers": layers, "experts": files.args.get("num_experts")}
    for axis, what in enumerate(stacks_of(model)):  # on leading axes, where args tell of them
        if counts.get(what) not in (None, shape[axis] if axis < len(shape) else 0):
            raise FormatError(
                f"{model} has shape {list(shape)}, but axis {axis} should count the {counts[what]}"
                f" {what} that args in common.pt tell of: that file or the others are of another"
                " run, or the metadata is damaged"
            )
    return unstacked(model, shape, runs)
