"""What the user says of a checkpoint that it does not say itself."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from jax_ucp.arguments import local_path, switch, whole_number
from jax_ucp.errors import SpecError
from jax_ucp.shard_spec.rules import Spec

MODULE_ORDER: Final = "module-order"
DECODED: Final = "float32"
Dequantize = Literal[False, "float32"] | None
OptimizerGroups = Literal["module-order"] | tuple[tuple[str, ...], ...]

NOTHING_TWICE = "nothing is stored twice here, so that on_conflict={!r} changes nothing"


class Sizes(Mapping[str, int]):
    """Lengths by name, which remember the names they were asked for: the others mean nothing to the
    checkpoint.

    Raises SpecError for a length that is no whole number from 1. A name that says whether something
    is there, as `when` in a spec has it, may be 0.
    """

    def __init__(self, given: Mapping[str, int]):
        if not isinstance(given, Mapping):
            raise SpecError(
                f"sizes={given!r:.80} should be lengths by name, such as {{'vocab': 50257}}"
            )
        if strange := [name for name in given if not isinstance(name, str)]:
            raise SpecError(
                f"sizes has the name {strange[0]!r:.80}, which is no string: names are such as"
                " 'vocab'"
            )
        self.asked: set[str] = set()
        self._given = {name: _whole(name, n, least=0) for name, n in given.items()}

    def __getitem__(self, name: str) -> int:
        self.asked.add(name)
        return _whole(name, self._given[name])

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def of(self, lengths: Collection[str], switches: Collection[str] = ()) -> dict[str, int]:
        """What is given of some names, all of which count as asked for; `switches` may be 0."""
        self.asked.update(lengths, switches)
        given = {name: self._given[name] for name in switches if name in self}
        return given | {name: self[name] for name in lengths if name in self}

    def unused(self) -> list[str]:
        """The names that nothing asked for."""
        return [name for name in self._given if name not in self.asked]


@dataclass(frozen=True)
class Options:
    """What the user says of a checkpoint.

    `sizes` are lengths by name (`vocab`); `spec` is one in the universal checkpoint language, or
    its file: it says how shards form parameters; `weights_only` leaves the optimizer aside.
    `on_conflict` says which of two stored copies is right where they differ, `master` or `copy`:
    then they are not compared. The master is also the first of several replicas; a copy is what
    the model computed with, in its dtype. `dequantize=False` keeps quantised weights as the parts
    that are stored; None refuses to hand them out; "float32" decodes the states of 8-bit
    optimizers. `optimizer_groups` says which parameters each
    group of an optimizer has, where states go by numbers.
    """

    sizes: Sizes = field(default_factory=lambda: Sizes({}))
    spec: Path | Spec | None = None
    weights_only: bool = False
    on_conflict: Literal["master", "copy"] | None = None
    dequantize: Dequantize = None
    optimizer_groups: OptimizerGroups | None = None

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int] | None = None,
        spec: str | os.PathLike[str] | Spec | None = None,
        weights_only: bool = False,
        on_conflict: Literal["master", "copy"] | None = None,
        dequantize: Dequantize = None,
        optimizer_groups: str | Sequence[Sequence[str]] | None = None,
    ) -> Options:
        """The options as callers give them.

        Raises SpecError, UnsupportedPath or ValueError for what cannot be meant.
        """
        if on_conflict not in (None, "master", "copy"):
            raise ValueError(f"on_conflict={on_conflict!r} should be 'master' or 'copy'")
        if dequantize not in (None, DECODED) and dequantize is not False:
            raise ValueError(
                f"dequantize={dequantize!r}: quantised weights are refused (None) or kept as parts"
                " (False), states of 8-bit optimizers kept as codes (None) or decoded ('float32')"
            )
        rules = spec if spec is None or isinstance(spec, Spec) else local_path(spec)
        groups = checked_groups(optimizer_groups)
        return cls(
            Sizes(sizes or {}),
            rules,
            switch("weights_only", weights_only),
            on_conflict,
            dequantize,
            groups,
        )


def _whole(name: str, n: object, least: int = 1) -> int:
    try:
        return whole_number(f"sizes: {name}", n, least)
    except ValueError as error:
        raise SpecError(str(error)) from None


def require_used(sizes: Sizes, path: str, elsewhere: Collection[str] = ()) -> None:
    """Raise SpecError for a length that opening the checkpoint at `path` had no use for.

    `elsewhere` are names that have a use all the same, in a mapping.
    """
    strays = [name for name in sizes.unused() if name not in elsewhere]
    if not strays:
        return
    known = sorted({*sizes.asked, *elsewhere})
    takes = (
        f"the names it takes are {', '.join(known)}" if known else "it records all lengths itself"
    )
    near = difflib.get_close_matches(strays[0], known, n=1)
    hint = f"; perhaps {near[0]} is meant" if near else ""
    raise SpecError(f"{path} has no use for {', '.join(strays)} in sizes: {takes}{hint}")


def checked_groups(value: str | Sequence[Sequence[str]] | None) -> OptimizerGroups | None:
    """The user's word on optimizer groups, checked for its form: `module-order`, or lists of names.

    Raises SpecError for anything else, and for a name that is said twice.

    >>> checked_groups([["a.weight"], []])
    (('a.weight',), ())
    """
    if value is None:
        return None
    if value == MODULE_ORDER:
        return MODULE_ORDER
    if isinstance(value, str) or not _is_lists_of_names(value):
        raise SpecError(
            f"optimizer_groups={_short(value)}: say {MODULE_ORDER!r}, or a list for each group with"
            " the names of its parameters in order"
        )
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(value):
        if name in seen:
            raise SpecError(
                f"optimizer_groups says {_short(name)} twice; an optimizer has a parameter once"
            )
        seen.add(name)
    return tuple(tuple(group) for group in value)


def word_note(groups: OptimizerGroups) -> str:
    """What a checkpoint says of states that were given to parameters by the user's word."""
    how = "the names of each group"
    if groups == MODULE_ORDER:
        how = "every group in the order of the model"
    return (
        f"optimizer states were given to parameters as optimizer_groups says, {how}: nothing in the"
        " files proves it"
    )


def remedy(sizes: str, example: str, ordered: bool) -> str:
    """How the user says whose states are; `sizes` of the groups, a name as lists have it,
    whether the order decides.
    """
    order = (
        f"optimizer_groups={MODULE_ORDER!r} (--optimizer-groups {MODULE_ORDER}) if every group"
        " lists its parameters in the order of the model, as an optimizer made of"
        " model.parameters() does; else "
    )
    return (
        "to map them, say which parameters the optimizer was given:"
        f" {order if ordered else ''}optimizer_groups=[[...], ...] (--optimizer-groups FILE.json),"
        f" for each group the names of its parameters in its order, such as {example!r} (in torch,"
        f" names are those of model.named_parameters()): {sizes}"
    )


def _is_lists_of_names(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(group, list | tuple) and _are_strings(group) for group in value)


def _are_strings(items: Sequence[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
