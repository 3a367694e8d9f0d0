"""What a checkpoint cannot say of its optimizer state is proved when it is opened: masters are compared with weights.

Two kinds of state need it. Flat buffers name no parameters, so a wrong order of modules would give each parameter
another's elements. And releases of megatron-core up to 0.19 that write `fully_reshardable` from several buckets take
padded offsets for those of a vector without padding: what lies behind a bucket's padding is moved by it, and its end
is lost (`megatron/core/optimizer/distrib_optimizer.py` of core_v0.16.1; corrected by Megatron-LM pull request 5077).
In both cases every element of a parameter is in another place, so that the end of each stored chunk shows it: there a
moved parameter has elements of the next one, or zeros. `verify` compares all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from jax_ucp.errors import CorruptData
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.storage.consolidated import Consolidated, ConsolidatedView, same_bits

WINDOW = 256
_REMEDY = "Its weights can be opened alone with weights_only"


def windows(layout: ParamLayout) -> Iterator[Box]:
    """The last elements of every fragment: at most WINDOW of its last row.

    >>> from jax_ucp.layout.fragments import Fragment
    >>> block = Box((0, 0), (4, 300))
    >>> [str(box) for box in windows(ParamLayout((4, 300), ((4, 300),), (Fragment(0, block, block),)))]
    ['[3:4, 44:300]']
    """
    for box in layout.replicas:
        last = box.stop[-1:]
        start = tuple(max(a, b - WINDOW) for a, b in zip(box.start[-1:], last, strict=True))
        yield Box((*(n - 1 for n in box.stop[:-1]), *start), box.stop)


def prove_masters(
    folder: Path,
    names: Iterable[str],
    states: Mapping[str, Mapping[str, Consolidated]],
    view: Callable[[Mapping[str, Consolidated]], ConsolidatedView],
    why: Callable[[str], str],
) -> None:
    """Compare the ends of the masters of `names` with those of the weights. Raises CorruptData where one differs.

    `why(name)` says what then is likely; `view` makes arrays of what the states are made of.
    """
    twins = {name: held for name in names if {"param", "weight"} <= (held := states[name]).keys()}
    masters = view({name: held["param"] for name, held in twins.items()})
    weights = view({name: held["weight"] for name, held in twins.items()})
    for name, held in twins.items():
        for box in windows(held["weight"].layout):
            weight = weights.read(name, box)
            if not same_bits(masters.read(name, box).astype(weight.dtype), weight):
                raise CorruptData(
                    f"{folder}: {name}: the master of the optimizer, rounded to {weight.dtype}, is not the weight of "
                    f"the model in {box} (the weight is {held['weight'].keys[0]}, the master "
                    f"{held['param'].keys[0]}): {why(name)}. {_REMEDY}"
                )


def moved_by_padding(elements: int | None) -> str:
    """What is likely of a master behind so many elements of padding; None where they are not known."""
    return (
        f"its optimizer state lies behind {elements or 'some'} elements of padding between gradient buckets, by which "
        "megatron-core up to 0.19 moves what it saves as fully_reshardable (Megatron-LM pull request 5077); its master "
        "and moments were lost when the checkpoint was written"
    )


def not_of_weights(precision_aware: bool) -> str:
    """What is likely where masters in flat buffers are not those of the weights."""
    if precision_aware:
        return (
            "args.use_precision_aware_optimizer is set, whose buffers keep masters in another form (what a 16-bit "
            "weight lacks, or a dtype of its own), or not at all; that form is not read here"
        )
    return (
        "the flat buffers belong to another run or step, hold something else than masters under that name, or have the "
        "modules in another order than the one known here"
    )
