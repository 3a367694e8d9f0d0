"""Why the masters of a checkpoint may not be those of its weights.

Two kinds of state lie in their places by assumption. Flat buffers name no parameters, so a wrong
order of modules would give each parameter another's elements. And releases of megatron-core up to
0.19 that write `fully_reshardable` from several buckets take padded offsets for those of a vector
without padding: what lies behind a bucket's padding is moved by it, and its end is lost
(`megatron/core/optimizer/distrib_optimizer.py` of core_v0.16.1; corrected by Megatron-LM pull
request 5077). In both cases every element of a parameter is in another place, so that the sample
that a restore compares of each stored chunk shows it, at its end at the latest: there a moved
parameter has elements of the next one, or zeros.

With `--use-precision-aware-optimizer` TransformerEngine keeps masters in its own way. By default
they are the low 16 bits of each (`store_param_remainders`), as int16, widened to fp32 where ranks'
parts are put together: `sources.remainders` joins them with the weights, of which they are no copy,
so that nothing compares them; therefore an order of modules that is one of several possible ones is
refused for them. With `--main-params-dtype fp16` masters are rounded to fp16 with a scale for each
tensor, after the weights were made of them: both then differ in the last digit.
(`megatron/core/optimizer/__init__.py` and `optimizer_config.py` of core_v0.13.0 to core_v0.19.0.)
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jax_ucp.formats.megatron.files import Args

_WEIGHTS_ALONE = "Its weights can be opened alone with weights_only"
BF16 = np.dtype(ml_dtypes.bfloat16)


def are_remainders(args: Args, stored: np.dtype, weight: np.dtype) -> bool:
    """Whether what is stored as masters of weights are the low 16 bits of these."""
    if weight != BF16:
        return False
    if stored == np.int16:
        return True
    return stored == np.float32 and keeps_masters(args) and not _rounds_masters(args)


def are_rounded(args: Args) -> bool:
    """Whether masters were rounded, after their weights were made of them."""
    return keeps_masters(args) and _rounds_masters(args)


def keeps_masters(args: Args) -> bool:
    """Whether TransformerEngine's optimizer keeps the masters, and not Megatron's.

    It does not for fp8 weights that are scaled as the optimizer steps, nor where that is on the
    CPU.
    """
    if not args.optional("use_precision_aware_optimizer") or args.optional("optimizer_cpu_offload"):
        return False
    scaled = args.optional("fp8") and args.optional("fp8_recipe") not in (None, "delayed")
    return _rounds_masters(args) or not scaled


def _rounds_masters(args: Args) -> bool:
    dtype = args.optional("main_params_dtype")
    return isinstance(dtype, np.dtype) and dtype == np.float16


def unproved_order() -> str:
    return (
        "the modules may lie in several orders in its flat buffers, which all fit the sizes that"
        " are stored, and of the low 16 bits of masters, which the precision-aware optimizer keeps,"
        f" none can be proved. {_WEIGHTS_ALONE}"
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
