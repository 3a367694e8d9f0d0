"""The rest of a DeepSpeed checkpoint: schedulers, counters, client state, settings, other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_ucp.formats.deepspeed.files import StateFile
from jax_ucp.formats.deepspeed.slices import ASIDE, Slices
from jax_ucp.formats.deepspeed.stage0 import unwrapped
from jax_ucp.formats.nested import as_dict

# Model-state entries that describe the tensors of the tree.
_DESCRIBING = (
    *("param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("buffer_names", "shared_params"),
)
# Optimizer-state entries that are the tensors of the tree, and those that describe their layout.
_PARTITIONS = (
    *("base_optimizer_state", "single_partition_of_fp32_groups"),
    *("fp32_flat_groups", "optimizer_state_dict"),
)
_LAYOUT = (
    *("group_paddings", "partition_count", "param_slice_mappings"),
    *("param_alignment_paddings", "zero_stage", "ds_zero_partition_groups"),
)
OPTIMIZER_FILES = ("_optim_states.pt", ".tensor.swp")
_NAMES_AND_SHAPES = "says which tensor is which; its content is in the tree's names and shapes"
_OF_PARTITIONS = "describes the layout of the partitions, which whole parameters do not need"


def add_extras(slices: Slices) -> None:
    """Add all values that are not tensors of the tree as extras, by the file that has them."""
    for model in slices.files.all_models:
        values = {name: value for name, value in model.state.items() if name != "module"}
        if isinstance(values.get("optimizer"), dict):
            _add_of_optimizer(slices, model, values.pop("optimizer"))
        _add_entries(slices, model, values, _DESCRIBING, _NAMES_AND_SHAPES)
    for stored in slices.files.expert_optimizers.values():
        _add_of_optimizer(slices, stored, stored.state.get("optimizer") or {})
    for rank in slices.files.all_ranks:
        values = {**as_dict(rank.file.tree), **rank.state}
        base = as_dict(rank.base_optimizer)
        if "param_groups" in base:
            values["param_groups"] = base["param_groups"]
        others = {name: value for name, value in values.items() if name not in _PARTITIONS}
        _add_entries(slices, rank, others, _LAYOUT, _OF_PARTITIONS)


def _add_entries(
    slices: Slices, stored: StateFile, values: Mapping[str, Any], layout: Sequence[str], reason: str
) -> None:
    """Add the values in a file as extras, and skip those that `layout` names."""
    for name, value in values.items():
        if name in layout:
            slices.builder.skip(f"{stored.name}:{name}", "layout", reason)
        else:
            slices.builder.extra(stored.name, name, value)


def _add_of_optimizer(slices: Slices, stored: StateFile, optimizer: Mapping[str, Any]) -> None:
    inner, masters = unwrapped(optimizer)
    values, tensors = dict(optimizer), {"state"}
    if masters:
        tensors |= {masters, "optimizer_state_dict"}
        values |= as_dict(inner)
    for name in filter(lambda name: name not in tensors, values):
        slices.builder.extra(stored.name, f"optimizer/{name}", values[name])
    if slices.options.weights_only:
        for key in slices.builder.stored:
            if key.startswith(f"{stored.name}:optimizer/"):
                slices.builder.leave(key, "state", ASIDE)
