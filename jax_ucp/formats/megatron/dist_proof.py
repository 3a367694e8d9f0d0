"""Why the masters of a checkpoint may not be those of its weights.

Two kinds of state lie in their places by assumption. Flat buffers name no parameters, so a wrong
order of modules would give each parameter another's elements. And releases of megatron-core up to
0.19 that write `fully_reshardable` from several buckets take padded offsets for those of a vector
without padding: what lies behind a bucket's padding is moved by it, and its end is lost
(`megatron/core/optimizer/distrib_optimizer.py` of core_v0.16.1; corrected by Megatron-LM pull
request 5077). In both cases every element of a parameter is in another place, so that the sample
that a restore compares of each stored chunk shows it, at its end at the latest: there a moved
parameter has elements of the next one, or zeros.

A third kind is no master at all: with `--use-precision-aware-optimizer` Megatron stores what
TransformerEngine keeps in its place, as a rule the low 16 bits (`store_param_remainders`), widened
to fp32 where ranks' parts are put together.
"""

from __future__ import annotations

from jax_ucp.formats.megatron.files import Args

_WEIGHTS_ALONE = "Its weights can be opened alone with weights_only"


def precision_aware(args: Args) -> str:
    """What is likely where a master of a precision-aware optimizer differs; empty of other runs."""
    if not args.fields.get("use_precision_aware_optimizer"):
        return ""
    return (
        "the run's args have use_precision_aware_optimizer, with which Megatron stores the low 16"
        " bits of each master in its place (TransformerEngine's store_param_remainders), or masters"
        f" of less precision; they are not put together here. {_WEIGHTS_ALONE}"
    )


def moved_by_padding(elements: int | None) -> str:
    """What is likely of a master behind so many elements of padding; None where they are not
    known.
    """
    return (
        f"its optimizer state lies behind {elements or 'some'} elements of padding between gradient"
        " buckets, by which megatron-core up to 0.19 moves what it saves as fully_reshardable"
        " (Megatron-LM pull request 5077); its master and moments were lost when the checkpoint"
        f" was written. {_WEIGHTS_ALONE}"
    )


def not_of_weights() -> str:
    """What is likely where masters in flat buffers are not those of the weights."""
    return (
        "the flat buffers belong to another run or step, hold something else than masters under"
        " that name, or have the modules in another order than the one known here."
        f" {_WEIGHTS_ALONE}"
    )
