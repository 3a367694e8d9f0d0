"""The optimizer's settings of Megatron's parameters, whose groups name none.

Which group has a parameter follows from Megatron's own rule: vectors and biases do not decay, but
norms of queries and keys do where that was asked for. What all groups that may have it agree on is
its setting; the rest stays unsaid.

Facts: `_get_param_groups` and `get_standard_config_overrides` in
`megatron/core/optimizer/__init__.py` of Megatron-LM core_v0.13.1 to core_v0.19.0;
`--no-weight-decay-cond-type` in `megatron/training/arguments.py` of core_v0.15 and later. Its own
training has AdamW alone: no argument sets `OptimizerConfig.decoupled_weight_decay`, which is true,
and the groups of TransformerEngine's FusedAdam do not say it (core_v0.16.1 and core_v0.19.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax_ucp.formats.megatron.model import is_expert
from jax_ucp.formats.megatron.parameters import States
from jax_ucp.formats.megatron.run import Args

# Arguments of which either, set, lets the norms of queries and keys decay.
_NORMS_DECAY = ("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type")
_NO_SETTINGS = ("step", "default_config")


def settings_of(
    args: Args, groups: Iterable[Mapping[Any, Any]], name: str, states: States
) -> dict[str, Any]:
    """The optimizer's settings of the parameter `name`: weight decay, betas and others, by name.

    Args:
        args: the arguments of the run.
        groups: all parameter groups of all its optimizers.
        name: the parameter.
        states: what is stored of it; Adam's have `exp_avg`.
    """
    expert, is_adams = is_expert(name), "exp_avg" in states
    may_have = [
        group
        for group in groups
        if group.get("is_expert_parallel", expert) == expert and ("betas" in group) == is_adams
    ]
    if args.optional("weight_decay") is not None:  # else the run may have had a rule of its own
        does = is_decayed(args, name, len(states["weight"].info.shape))
        # Where there is one group alone, it has what does not decay too.
        may_have = [group for group in may_have if group_decays(group) == does] or may_have
    first, *others = may_have or [{}]
    settings = {
        str(key): value
        for key, value in first.items()
        if key not in _NO_SETTINGS and all(key in one and one[key] == value for one in others)
    }
    if is_adams and args.optional("weight_decay") is not None:
        is_decoupled = args.optional("decoupled_weight_decay") is not False
        settings.setdefault("decoupled_weight_decay", is_decoupled)
    return settings


def group_decays(group: Mapping[Any, Any]) -> bool:
    return group.get("wd_mult", group.get("pre_wd_mult", 1.0)) != 0


def is_decayed(args: Args, name: str, ndim: int) -> bool:
    """Whether a parameter has weight decay: vectors and biases have none, by default."""
    of_norm = "q_layernorm." in name or "k_layernorm." in name
    if of_norm and any(map(args.optional, _NORMS_DECAY)):
        return True
    return ndim != 1 and not name.endswith(".bias")
