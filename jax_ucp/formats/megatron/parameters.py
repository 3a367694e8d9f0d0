"""The parameters of a Megatron run, as all of its readers add them, and the settings that its
optimizer has for them.

A parameter is its master, if there is one, and else its weight. Weights beside masters are
duplicates.

TransformerEngine's precision-aware optimizer keeps masters in another way. By default
(`--use-precision-aware-optimizer`) they are the low 16 bits of each (`store_param_remainders`), as
int16, widened to fp32 where ranks' parts are put together: `arrays.remainders` joins them with the
weights, of which they are no copy, so that nothing compares them; therefore an order of modules
that is one of several possible ones is refused for them. With `--main-params-dtype fp16` masters
are rounded to fp16 with a scale for each tensor, after the weights were made of them: both then
differ in the last digit.

Facts: `megatron/core/optimizer/__init__.py` and `optimizer_config.py` of core_v0.13.0 to
core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.arrays.value import Array, Constant, items_of, joined, stated
from jax_ucp.errors import LayoutError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.megatron.model import BUFFERS, EMBEDDING, TIED, is_expert
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.patterns import Unique
from jax_ucp.options import Options

# The states of a parameter in files; `weight` is what the model computes with.
States = Mapping[str, Array]

# Reasons that several readers give in the inventory.
LEFT = "of the optimizer, which was to be left aside (weights_only)"
LAYOUT = "describes the layout of the flat buffers, which whole parameters do not need"
TRANSFORMER_ENGINE = "what a module of TransformerEngine keeps beside its weights"

NUMBERED_ALONE = (
    "optimizer states go by numbers, in Megatron's own order, which is that of the model's keys; no"
    " master in the files proves it"
)
BF16 = np.dtype(ml_dtypes.bfloat16)
# Arguments of which either, set, lets the norms of queries and keys decay.
_NORMS_DECAY = ("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type")
_NO_SETTINGS = ("step", "default_config")


def add_parameter(
    builder: ContentsBuilder,
    args: Args,
    name: str,
    states: States,
    copies: Sequence[Array] = (),
    cause: str = "",
    remainders: bool = True,
) -> None:
    """Add a parameter with its states, in their order.

    `copies` are all copies of the weight, `cause` why the master may be another parameter's.
    Without `remainders` every master is a whole one.
    """
    weight, master = states["weight"], states.get("param")
    if name.endswith(BUFFERS):
        builder.parameter("buffer", name, weight, "a buffer of the model")
        return
    if master is None or isinstance(master, Constant):
        builder.parameter("param", name, weight, f"the parameter {name}")
    elif not (remainders and has_remainders(args, states)):
        builder.parameter("param", name, master, f"the master of {name}")
        reason = (
            f"the weight that the model computes with, a copy of the master of {name}; verify"
            " compares"
        )
        for copy in copies or [weight]:
            builder.duplicate("param", name, copy, reason, cause, are_rounded(args))
    elif builder.on_conflict == "copy":
        builder.parameter("param", name, weight, f"the weight {name}, as asked")
        for key in items_of(master):
            builder.skip(key, "", "the rest of a master: its weight is taken, as asked")
    else:
        reason = f"a half of the master of {name}: the 16-bit weight, or the low 16 bits beside it"
        builder.remainders(name, master, weight, reason)
    for state, value in states.items():
        if state not in ("weight", "param") or isinstance(value, Constant):
            what = "how often the optimizer stepped" if state == "step" else f"{state} of {name}"
            builder.parameter(state, name, value, what)


def number(value: int | float, where: str) -> Constant:
    return stated(np.asarray(value, np.int32 if isinstance(value, int) else None), where)


def has_remainders(args: Args, states: States) -> bool:
    """Whether the low 16 bits of a parameter's master are stored, and not all of it."""
    stored, weight = states.get("param"), states["weight"]
    return stored is not None and are_remainders(args, stored.info.dtype, weight.info.dtype)


def are_remainders(args: Args, stored: np.dtype, weight: np.dtype) -> bool:
    """Whether the arrays stored as masters of weights are their low 16 bits."""
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

    It does not for fp8 weights scaled as the optimizer steps, nor on the CPU.
    """
    if not args.optional("use_precision_aware_optimizer") or args.optional("optimizer_cpu_offload"):
        return False
    scaled = args.optional("fp8") and args.optional("fp8_recipe") not in (None, "delayed")
    return _rounds_masters(args) or not scaled


def _rounds_masters(args: Args) -> bool:
    dtype = args.optional("main_params_dtype")
    return isinstance(dtype, np.dtype) and dtype == np.float16


def unpadded(name: str, states: States, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The states of a parameter; those of an embedding without rows of padding, if `sizes` has the
    vocabulary.
    """
    vocab, own = sizes.get("vocab"), dict(states)
    if vocab is None or name not in (EMBEDDING, TIED):
        return own
    for state, array in states.items():
        shape = array.info.shape
        if shape != ():
            try:
                layout = Unique().join([shape]).clip((vocab, *shape[1:]))
            except LayoutError as error:
                raise LayoutError(f"{name}, with vocab={vocab!s:.40} in sizes: {error}") from None
            own[state] = joined(name, layout, [array])
    return own


def keep_apart(builder: ContentsBuilder, tensors: Mapping[str, Array], reason: str) -> None:
    """Keep the optimizer's tensors under `other`, by their places in the files."""
    kept = f"kept apart, because nothing says whose it is: {reason}"
    for label, tensor in tensors.items():
        builder.parameter("other", label, tensor, kept)
    builder.notes.append(
        "the optimizer's masters and states are kept under `other`, because which parameters its"
        f" groups have is not stored, and their shapes do not tell ({reason}); the parameters are"
        " the model's weights"
    )


def add_notes(
    builder: ContentsBuilder,
    args: Args,
    options: Options,
    saved: bool,
    notes: Sequence[str],
    without_args: str = "",
) -> None:
    """Add the notes that people need on any Megatron checkpoint, and `notes` between them.

    `saved` is whether the files have an optimizer. `without_args` is the note on a checkpoint that
    has no args.
    """
    embeddings = [array for path, array in builder.params.items() if str(path[-1]) == EMBEDDING]
    if embeddings and "vocab" not in options.sizes:
        rows = embeddings[0].info.shape[0]
        builder.notes.append(
            f"Megatron does not record the true vocabulary: all {rows} padded rows of the"
            " embeddings are kept. Say it with sizes={'vocab': ...} (--size vocab=...) and the"
            " others are left out"
        )
    if options.weights_only:
        builder.notes.append("weights alone: of a 16-bit run these are not the fp32 masters")
    elif not saved:
        builder.notes.append("the checkpoint was saved without its optimizer")
    builder.notes += notes
    if without_args:
        builder.notes.append(without_args)
    elif args.absent:
        builder.notes.append(f"args lack {', '.join(args.absent)}; Megatron's defaults were taken")


def settings_of(
    args: Args, groups: Iterable[Mapping[Any, Any]], name: str, states: States
) -> dict[str, Any]:
    """The optimizer's settings of the parameter `name`: weight decay, betas and others, by name.

    No group names its parameters. The groups that may have this one follow from Megatron's own
    rule, and the settings on which they all agree are its settings. Megatron's training has AdamW
    alone: no argument sets `OptimizerConfig.decoupled_weight_decay`, which is true, and the groups
    of TransformerEngine's FusedAdam do not have it (core_v0.16.1 and core_v0.19.0).

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
    """Whether a parameter has weight decay. By default vectors and biases have none; an argument
    gives it to the norms of queries and keys.

    Facts: `_get_param_groups` and `get_standard_config_overrides` in
    `megatron/core/optimizer/__init__.py` of Megatron-LM core_v0.13.1 to core_v0.19.0;
    `--no-weight-decay-cond-type` in `megatron/training/arguments.py` of core_v0.15 and later.
    """
    of_norm = "q_layernorm." in name or "k_layernorm." in name
    if of_norm and any(map(args.optional, _NORMS_DECAY)):
        return True
    return ndim != 1 and not name.endswith(".bias")
