"""What an opened checkpoint is, whoever wrote it: leaves, where their bytes are, and an account of the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jax_ucp.layout.box import Box
from jax_ucp.metadata import Group, Leaf
from jax_ucp.storage.checks import Check, Extent, verdicts
from jax_ucp.storage.source import ArraySource

Fate = Literal["mapped", "extra", "skipped"]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a checkpoint stores, and what becomes of it.

    `where` is the file and the place in it; `reason` says what it became, or why it was left.
    """

    where: str
    what: str
    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a leaf, and where it is stored: block `target` of the leaf is block `source` of `item` in `file`.

    Both blocks hold the same elements in row-major order; `source` has one axis where the item is flat. A file
    that is one block of the leaf, a chunk, has no items. Where a mapping forms the leaf, its `rule` says in which
    order: then `target` is the smallest block of the leaf around the elements.
    """

    file: str
    item: str
    source: Box
    target: Box
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.file}{':' * bool(self.item)}{self.item}{self.source}"


@dataclass(frozen=True)
class Contents:
    """A checkpoint of any format, opened: nothing but metadata has been read.

    `leaves` name arrays of `arrays`. `account` has every stored item once. `groups` say what the optimizer of a
    trainer was told for each parameter, where the checkpoint names them. `source` says what a universal
    checkpoint was imported from. `checks(extent)` are the proofs that its files allow, of a sample or of all that
    they hold, each with the leaves that rest on it. `where(leaf)` says which files hold the leaf's bytes.
    """

    format: str
    path: str
    leaves: Sequence[Leaf]
    arrays: ArraySource
    account: Sequence[Item] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    notes: Sequence[str] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    checks: Callable[[Extent], Iterable[Check]] = lambda extent: ()
    where: Callable[[Leaf], Sequence[Piece]] = lambda leaf: ()

    def proofs(self, leaves: Collection[str], extent: Extent) -> Iterator[Check]:
        """The checks on which any of the leaves with these names rests. Raises ValueError for another extent."""
        if extent not in get_args(Extent):
            raise ValueError(f'verify={extent!r} is neither "sample" nor "full"')
        return (check for check in self.checks(extent) if not check.leaves.isdisjoint(leaves))

    def verify(self) -> Iterator[tuple[str, str | None]]:
        """Compare all that is stored twice or has a checksum: (what was looked at, what is wrong with it or None)."""
        return verdicts(self.checks("full"))
