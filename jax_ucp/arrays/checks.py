"""Claims, values of what a checkpoint's files state twice, and the checks of them: pieces of work,
on a sample or on all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from jax_ucp.arrays.budget import in_threads
from jax_ucp.arrays.watched import Watcher, watching
from jax_ucp.errors import CorruptData
from jax_ucp.garbage import gc_paused

# A sample is a few kilobytes of each thing that is stored twice. A checksum needs all that it sums,
# so a sample has only those of single numbers, such as steps.
Extent = Literal["sample", "full"]
SAMPLE_BYTES = 64

# What a check reads at once of each of two copies, where it reads more.
CHECK_BYTES = 2 << 20


@dataclass(frozen=True)
class Check:
    """A comparison of something that is stored twice, or has a checksum.

    `label` says what is compared, `leaves` name the leaves that rest on it, `nbytes` is about how
    much `run` reads. `run` returns the fault, or None; it does not read again the elements that a
    `watcher` has seen without a fault.
    """

    label: str
    leaves: frozenset[str]
    nbytes: int
    run: Callable[[], str | None]
    watcher: Watcher | None = None

    @property
    def memory(self) -> int:
        """About how many bytes a run holds at once: of two copies, and of one of them rounded."""
        return min(self.nbytes, 4 * CHECK_BYTES)


class Provable(Protocol):
    """A statement about a checkpoint that reading it proves: a value that travels with it."""

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        """The work of proving it, of a sample or of all there is; `leaves` rest on it."""
        ...


class LeafClaim(NamedTuple):
    """A statement, and the leaves that rest on it."""

    statement: Provable
    leaves: frozenset[str]


class Claims:
    """Claims that are made when somebody asks for them: at the latest when they are pickled."""

    def __init__(self, make: Callable[[], Iterable[LeafClaim]]):
        self._make = make

    def __iter__(self) -> Iterator[LeafClaim]:
        return iter(self._make())

    def __reduce__(self) -> tuple[type, tuple[list[LeafClaim]]]:
        return list, (list(self),)


def checks_of(claims: Iterable[LeafClaim], extent: Extent) -> Iterator[Check]:
    """The work of proving claims, of a sample or of all there is."""
    for statement, leaves in claims:
        yield from statement.checks(leaves, extent)


def passed_on(claims: Iterable[LeafClaim], users: Mapping[str, Collection[str]]) -> Claims:
    """The claims of a source as those of what is made of it; `users` are by array the leaves."""

    def make() -> Iterator[LeafClaim]:
        for statement, leaves in claims:
            using = frozenset(leaf for name in leaves for leaf in users.get(name, ()))
            yield LeafClaim(statement, using)

    return Claims(make)


def require(check: Check) -> None:
    """Raises CorruptData if the check finds a fault."""
    if fault := check.run():
        raise CorruptData(
            f"{fault.removesuffix('.')}. `verify` (jax-ucp verify) lists every such place"
        )


def verdicts(checks: Iterable[Check], remote: bool = False) -> Iterator[tuple[str, str | None]]:
    """The label of each check with its fault, or None; several run at once, and each sees the
    elements that the others read.
    """
    with gc_paused():
        checks = list(checks)
    with watching(filter(None, (check.watcher for check in checks))):
        faults = faults_of(checks, remote)
    yield from zip((check.label for check in checks), faults, strict=True)


def faults_of(checks: Sequence[Check], remote: bool = False) -> Sequence[str | None]:
    """The fault of each check, or None. Checksums of files come first in a list of checks and run
    last: by then they have seen the bytes that the others read.
    """
    return list(in_threads([check.run for check in reversed(checks)], remote))[::-1]
