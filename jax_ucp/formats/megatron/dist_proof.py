"""What a checkpoint cannot say of its optimizer state is proved when it is opened: masters are
compared with weights.

Two kinds of state need it. Flat buffers name no parameters, so a wrong order of modules would give
each parameter another's elements. And releases of megatron-core up to 0.19 that write
`fully_reshardable` from several buckets take padded offsets for those of a vector without padding:
what lies behind a bucket's padding is moved by it, and its end is lost
(`megatron/core/optimizer/distrib_optimizer.py` of core_v0.16.1; corrected by Megatron-LM pull
request 5077). In both cases every element of a parameter is in another place, so that a sample of
each stored chunk shows it, at its end at the latest: there a moved parameter has elements of the
next one, or zeros. `verify` compares all elements.

A third kind is no master at all: with `--use-precision-aware-optimizer` Megatron stores what
TransformerEngine keeps in its place, as a rule the low 16 bits (`store_param_remainders`), widened
to fp32 where ranks' parts are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.files import Args
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import sample_boxes
from jax_ucp.sources.consolidated import Consolidated, ConsolidatedView, same_bits
from jax_ucp.sources.contents import Contents

_REMEDY = "Its weights can be opened alone with weights_only"


def prove_masters(
    folder: FilePath,
    names: Iterable[str],
    states: Mapping[str, Mapping[str, Consolidated]],
    view: Callable[[Mapping[str, Consolidated]], ConsolidatedView],
    why: Callable[[str], str],
) -> None:
    """Compare samples of the masters of `names` with the weights. Raises CorruptData where one
    differs.

    `why(name)` says what then is likely; `view` makes arrays of what the states are made of.
    """
    both = [name for name in names if {"param", "weight"} <= states[name].keys()]
    masters = {name: states[name]["param"] for name in both}
    weights = {name: states[name]["weight"] for name in both}
    read_master, read_weight = view(masters).read, view(weights).read
    for name in both:
        for box in sample_boxes(_boxes(weights[name]), _boxes(masters[name])):
            weight = read_weight(name, box)
            if not same_bits(read_master(name, box).astype(weight.dtype), weight):
                raise CorruptData(
                    f"{folder}: {name}: the master of the optimizer, rounded to {weight.dtype}, is"
                    f" not the weight of the model in {box} (the weight is {weights[name].keys[0]},"
                    f" the master {masters[name].keys[0]}): {why(name)}. {_REMEDY}"
                )


def _boxes(param: Consolidated) -> list[Box]:
    return [fragment.target for fragment in param.layout.fragments]


def prove_precision_aware(contents: Contents) -> None:
    """Compare samples of what a precision-aware optimizer stores as masters. Raises FormatError
    where they are none.
    """
    for check in contents.checks("sample"):
        if fault := check.run():
            raise FormatError(
                f"{contents.path}: {precision_aware(check.label)}. {_REMEDY}. Found: {fault}"
            )


def is_precision_aware(args: Args) -> bool:
    return bool(args.fields.get("use_precision_aware_optimizer"))


def precision_aware(_: str) -> str:
    return (
        "the run's args have use_precision_aware_optimizer, with which Megatron stores the low 16"
        " bits of each master in its place (TransformerEngine's store_param_remainders), or masters"
        " of less precision; they are not put together here"
    )


def moved_by_padding(elements: int | None) -> str:
    """What is likely of a master behind so many elements of padding; None where they are not
    known.
    """
    return (
        f"its optimizer state lies behind {elements or 'some'} elements of padding between gradient"
        " buckets, by which megatron-core up to 0.19 moves what it saves as fully_reshardable"
        " (Megatron-LM pull request 5077); its master and moments were lost when the checkpoint"
        " was written"
    )


def not_of_weights(_: str) -> str:
    """What is likely where masters in flat buffers are not those of the weights."""
    return (
        "the flat buffers belong to another run or step, hold something else than masters under"
        " that name, or have the modules in another order than the one known here"
    )
