"""What the user says of a checkpoint that it does not say itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from jax_ucp.errors import SpecError

MODULE_ORDER: Final = "module-order"
OptimizerGroups = Literal["module-order"] | tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Options:
    """`sizes` are lengths by name (`vocab`); `spec` is a file in the universal checkpoint language that says how
    shards form parameters; `weights_only` leaves the optimizer aside. `believe` says which of two stored copies is
    right where they differ, `master` or `copy`: then they are not compared. The master is also the first of several
    replicas; a copy is what the model computed with, in its dtype. `optimizer_groups` says which parameters each
    group of an optimizer has, where states go by numbers.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    spec: Path | None = None
    weights_only: bool = False
    believe: Literal["master", "copy"] | None = None
    optimizer_groups: OptimizerGroups | None = None


def optimizer_groups(value: str | Sequence[Sequence[str]] | None) -> OptimizerGroups | None:
    """The user's word on optimizer groups, checked for its form: `module-order`, or lists of names.

    Raises SpecError for anything else, and for a name that is said twice.

    >>> optimizer_groups([["a.weight"], []])
    (('a.weight',), ())
    """
    if value is None:
        return None
    if value == MODULE_ORDER:
        return MODULE_ORDER
    if isinstance(value, str) or not _is_lists_of_names(value):
        raise SpecError(
            f"optimizer_groups={_short(value)}: say {MODULE_ORDER!r}, or a list for each group with the names of its "
            "parameters in order"
        )
    seen: set[str] = set()
    for name in (name for group in value for name in group):
        if name in seen:
            raise SpecError(f"optimizer_groups says {_short(name)} twice; an optimizer has a parameter once")
        seen.add(name)
    return tuple(tuple(group) for group in value)


def word_note(groups: OptimizerGroups) -> str:
    """What a checkpoint says of states that were given to parameters by the user's word."""
    how = "every group in the order of the model" if groups == MODULE_ORDER else "the names of each group"
    return f"optimizer states were given to parameters as optimizer_groups says, {how}: nothing in the files proves it"


def remedy(sizes: str, example: str, ordered: bool) -> str:
    """How the user says whose states are; `sizes` of the groups, a name as lists have it, whether the order decides."""
    order = (
        f"optimizer_groups={MODULE_ORDER!r} (--optimizer-groups {MODULE_ORDER}) if every group lists its parameters in "
        "the order of the model, as an optimizer made of model.parameters() does; else "
    )
    return (
        f"to map them, say which parameters the optimizer was given: {order if ordered else ''}"
        "optimizer_groups=[[...], ...] (--optimizer-groups FILE.json), for each group the names of its parameters in "
        f"its order, such as {example!r} (in torch, names are those of model.named_parameters()): {sizes}"
    )


def _is_lists_of_names(value: Any) -> bool:
    groups = list(value) if isinstance(value, list | tuple) else [None]
    return bool(groups) and all(
        isinstance(group, list | tuple) and all(isinstance(name, str) for name in group) for group in groups
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
