"""DeepSpeed's universal folder, from which a run with `load_universal` resumes.

The folder is that of one process: each rank that loads it cuts the parameters for itself. The
information that a run with tensor parallelism needs for that is in each atom, and comes from the
`universal_checkpoint_info` of the source.

Facts: `ds_to_universal.py` (`merge_tp_slices`, `_save_optimizer_state`) and
`universal_checkpoint.py` (`load_hp_checkpoint_state`) in `checkpoint/`, `base_optimizer.py`,
`zero/stage3.py` and `engine.py` (`_load_checkpoint`) in `runtime/` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from jax_ucp.arrays.optimizer_groups import plain_settings
from jax_ucp.codecs.pickle_writer import Call, Global, Instance, has_dtype
from jax_ucp.codecs.zip_writer import torch_file
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.export.files import File, Tensor
from jax_ucp.export.parameters import (
    CAST_FIRST,
    Parameters,
    is_floating,
    one_step,
    torch_groups,
    untold,
)
from jax_ucp.formats.deepspeed.tensor_parallel import (
    AVERAGED,
    EXPERTS,
    HALVES,
    REPLICATED,
    ROWS,
    SUB_PARAMS,
    VOCABULARY,
    TensorParallel,
)
from jax_ucp.formats.nested import as_dict
from jax_ucp.layout.fragments import Shape

# The version whose format this is; the loader refuses folders that name none.
DS_VERSION = "0.19.8"

# The loader walks the groups of the run and those of the folder side by side and stops silently at
# the end of the shorter list. We write more groups than any run has, so that all parameters are
# loaded. A group that is not known has no settings, and the run keeps its own.
GROUPS = 256

_MODEL = re.compile(r"(zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(
    r"zero/optimizer_state\.pt|(bf16_)?zero_pp_rank_0_mp_rank_00_optim_states\.pt"
)
# Keys whose values differ between a folder of one process, which cuts nothing, and the ranks that
# wrote the source; and the converter's own.
_OWN_MODEL_KEYS = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "optimizer")
_OPTIMIZER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")
_MADE_ANEW = ("zero_stage", "ds_config", "partition_count", "group_paddings")

Extras = Mapping[str, Mapping[str, Any]]


def plan_files(
    params: Parameters, extras: Extras, steps: Mapping[str, np.ndarray], zero_stage: int | None
) -> list[File]:
    """The files of a save directory: `latest_universal`, and the folder that it names.

    Parameters with a state besides `param` are the optimizer's (all of them, where none has any)
    and become atoms; the others, and buffers, go into the module. `steps` has the step of each
    parameter that has one. `zero_stage` is that of the run to be resumed; None is that of the
    source, or 1.

    Raises UnsupportedLeaf, naming every parameter, for dtypes that torch lacks, names that a folder
    cannot have, and steps that differ in a group of the loader, or in ZeRO-3 at all.
    """
    of_buffers = {name: {"buffer": tensor} for name, tensor in params.buffers.items()}
    named = chain(params.states.items(), of_buffers.items())
    if problems := [fault for name, states in named for fault in _faults(name, states)]:
        remedy = f"{CAST_FIRST}; rename what has another fault."
        title = "DeepSpeed's universal folder cannot hold:"
        raise UnsupportedLeaf(title, problems, remedy=remedy)
    model, optimizer = _rank_0(extras, _MODEL), _rank_0(extras, _OPTIMIZER)
    stage = zero_stage if zero_stage is not None else max(1, int(_zero(model).get("stage", 1)))
    owned = _owned(params)
    groups = _groups(params, model, optimizer)
    frozen = {name: states["param"] for name, states in params.states.items() if name not in owned}
    for group in groups:
        own = {name: steps[name] for name in group["params"] if name in steps}
        why = "DeepSpeed loads no group whose parameters differ in their step"
        one_step(own, why, "Export to another format.")
    why = "ZeRO-3 has one step for all parameters"
    step = one_step(steps, why, "Export for ZeRO-1 or 2.") if stage == 3 else None
    counted = model.get("global_steps")
    global_steps = counted if type(counted) is int else int(max(steps.values(), default=0))
    tag = f"global_step{global_steps}_universal"
    # a file for each state of each parameter, but for the step of ZeRO-3
    info, files = _cutting(model), list[File]()
    instances = info.get(SUB_PARAMS) or ()
    plain = [sub.state if isinstance(sub, Instance) else sub for sub in instances]
    rules = TensorParallel({**info, SUB_PARAMS: plain}, 1, "universal_checkpoint_info", {})
    for name, states in owned.items():
        cut = _how_to_cut(rules, name, states["param"].shape)
        for state, tensor in states.items():
            path = f"{tag}/zero/{name}/{'fp32' if state == 'param' else state}.pt"
            if state != "step":
                files.append(torch_file(path, {"param": tensor, **cut}))
            elif stage != 3:
                files.append(torch_file(path, _number(steps[name])))
    files.append(
        torch_file(
            f"{tag}/zero/optimizer_state.pt", _optimizer_state(optimizer, groups, step, stage)
        )
    )
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    shapes = [{name: owned[name]["param"].shape for name in group["params"]} for group in groups]
    states = _model_states(model, shapes, frozen, params.buffers, global_steps, stage)
    files.append(torch_file(f"{tag}/{prefix}mp_rank_00_model_states.pt", states))
    return [*files, File.literal("latest_universal", tag.encode())]


def _owned(params: Parameters) -> dict[str, Mapping[str, Tensor]]:
    """The parameters that have optimizer states; without any states, all floating ones."""
    if params.moments:
        return {name: states for name, states in params.states.items() if len(states) > 1}
    return {n: states for n, states in params.states.items() if is_floating(states["param"].dtype)}


def _groups(
    params: Parameters, model: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The optimizer groups in the order of the loader, which is that of a source from DeepSpeed."""
    groups = list(optimizer.get("param_groups", model.get("optimizer/param_groups")) or ())
    while groups and not groups[-1].keys() - {"params"}:
        groups.pop()  # an export wrote these for groups that are not known
    return torch_groups(params.groups, _owned(params), groups)


def notes(params: Parameters, extras: Extras) -> Iterable[str]:
    """Notes for the user who resumes from the folder."""
    model, optimizer = _rank_0(extras, _MODEL), _rank_0(extras, _OPTIMIZER)
    if not params.moments:
        yield "there are no optimizer states: the run starts with those that its optimizer makes"
    if frozen := sorted(params.states.keys() - _owned(params).keys()):
        yield (
            f"{len(frozen)} parameters have no optimizer states, the first {frozen[0]}; they are in"
            " the model states, of which load_universal reads no weights: load them yourself"
        )
    groups = _groups(params, model, optimizer)
    yield from untold(groups, "the settings of the run's own groups stay")
    if params.groups and "param_groups" not in optimizer and "optimizer/param_groups" not in model:
        firsts = ", ".join(group["params"][0] for group in groups)
        yield (
            "DeepSpeed gives settings to groups in their order; those of the run must begin with"
            f" {firsts}"
        )
    if "lr_scheduler" not in model:
        yield (
            "there is no state of a learning rate scheduler: load with"
            " load_lr_scheduler_states=False"
        )
    if _zero(model).get("round_robin_gradients"):
        yield (
            "the source was trained with round_robin_gradients: turn it off in the run that"
            " resumes, for with it DeepSpeed puts what it loads in the wrong places, without a word"
        )
    if not model.get("universal_checkpoint_info"):
        yield (
            "nothing says how tensor parallelism cuts parameters: with more than one such rank"
            " DeepSpeed would cut all of them along axis 0, right or wrong"
        )


def carries(file: str, name: str) -> bool:
    """Whether the export has the extra `name` of the source's `file`, copied or made anew."""
    if _MODEL.fullmatch(file):
        return not name.startswith("optimizer/") or name == "optimizer/param_groups"
    return bool(_OPTIMIZER.fullmatch(file)) and name in (
        *_OPTIMIZER_KEYS,
        *_MADE_ANEW,
        "param_groups",
    )


def _number(step: np.ndarray) -> Any:
    """A step in the form that optimizers keep: a tensor in torch's, an int in DeepSpeed's."""
    return int(step) if step.dtype.kind in "iu" else step


def _rank_0(extras: Extras, pattern: re.Pattern[str]) -> Mapping[str, Any]:
    return next((values for file, values in extras.items() if pattern.fullmatch(file)), {})


def _zero(model: Mapping[str, Any]) -> Mapping[str, Any]:
    return as_dict(as_dict(model.get("ds_config")).get("zero_optimization"))


def _faults(name: str, states: Mapping[str, Tensor]) -> Iterable[str]:
    """Reasons why the folder cannot hold a parameter: a dtype, a name, or a step."""
    for state, tensor in states.items():
        if not has_dtype(tensor.dtype):
            yield f"{state} of {name} has dtype {tensor.dtype}"
    reserved = name in ("", ".", "..", "optimizer_state.pt")
    if reserved or "/" in name or "\0" in name or len(name.encode()) > 255:
        yield f"{name!r} is not a name of a folder"
    for state in states:
        if state == "fp32" or not re.fullmatch(r"\w+", state):
            yield f"{state!r} of {name} is not a name of a state's file"
    if "step" in states and states["step"].size != 1:
        yield f"step of {name} has shape {list(states['step'].shape)}, and is not a number"


def _how_to_cut(rules: TensorParallel, name: str, shape: Shape) -> dict[str, Any]:
    """The fields of an atom by which ranks cut their slices, in the converter's order of
    precedence. Raises FormatError if sub-parameters do not fit the shape.
    """
    listed, (_, sub) = rules.lists_of(name), rules.sub_params_of(name)
    cut: dict[str, Any] = {"cat_dim": int(ROWS in listed)}
    if REPLICATED in listed or AVERAGED in listed:
        cut = {}
    elif HALVES in listed:
        cut = {"cat_dim": 0, "param_n_sub_params": 2}
    elif sub:
        # versions before 0.4 store a number of equal parts, others widths
        lengths = list(sub.shape)
        lengths[sub.axis] = tuple(sub.lengths([shape], f"the sub-parameters of {name}"))
        state = {"patterns": list(sub.patterns), "shape": tuple(lengths)}
        kind = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
        cut = {"sub_param_shape": Instance(kind, {**state, "partition_dim": sub.axis})}
    if VOCABULARY in listed:
        cut["vocab_tensor"] = True
    if EXPERTS in listed:
        cut |= {"is_expert_param": True, "ep_num_experts": shape[0]}
    return cut


def _cutting(model: Mapping[str, Any]) -> dict[str, Any]:
    """`universal_checkpoint_info` without the fields that concern only the source's ranks."""
    info = model.get("universal_checkpoint_info") or {}
    return {
        key: value
        for key, value in info.items()
        if key not in ("affine_map", "sub_param_shard_widths")
    }


def _optimizer_state(
    optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], step: Any, stage: int
) -> dict[str, Any]:
    state = {key: optimizer[key] for key in _OPTIMIZER_KEYS if key in optimizer}
    state.setdefault("ds_version", DS_VERSION)
    state["zero_stage"] = Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))
    state["param_groups"] = [{**group, "params": [number]} for number, group in enumerate(groups)]
    state["param_groups"] += [{"params": []} for _ in range(GROUPS - len(groups))]
    if stage == 3:
        counted = {} if step is None else {"step": _number(step)}
        # The loader of ZeRO-3 gives all groups of the run the settings of the first one here: those
        # in which all agree.
        plain = list(map(plain_settings, groups))
        common = dict(groups[0]) if groups else {}
        for other in plain[1:]:
            common = {k: v for k, v in common.items() if k in other and other[k] == plain[0].get(k)}
        alike = {**common, "params": []}
        numbers = range(max(1, len(groups)))
        state["optimizer_state_dict"] = {
            "state": dict.fromkeys(numbers, counted),
            "param_groups": [alike],
        }
    return state


def _model_states(
    model: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Shape]],
    frozen: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    global_steps: int,
    stage: int,
) -> dict[str, Any]:
    kept = {
        k: v
        for k, v in model.items()
        if k not in _OWN_MODEL_KEYS and not k.startswith("optimizer/")
    }
    if info := _cutting(model):
        kept["universal_checkpoint_info"] = info
    module, frozen_shapes, fragments = {**frozen, **buffers}, None, None
    if stage == 3:
        module = dict(buffers)
        frozen_shapes = {name: tensor.shape for name, tensor in frozen.items()}
        fragments = {
            name: replace(tensor, stored=(tensor.size,)) for name, tensor in frozen.items()
        }
    return {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": frozen_shapes,
        "shared_params": {},
        "frozen_param_fragments": fragments,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": global_steps,
        **kept,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": DS_VERSION,
    }
