"""What can be proved of a checkpoint by reading it: pieces of work, on a sample or on all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from jax_ucp.errors import CorruptData
from jax_ucp.garbage import uncollected
from jax_ucp.sources.budget import in_threads

# A sample is a few kilobytes of each thing that is stored twice. A checksum needs all that it sums,
# so a sample has only those of single numbers, such as steps.
Extent = Literal["sample", "full"]
SAMPLE_BYTES = 64

# What a check reads at once of each of two copies, where it reads more.
CHECK_BYTES = 2 << 20

# Called when a fault shows while somebody else reads; and with what was seen without one, a small
# value that can be pickled.
Alarm = Callable[[], None]
Note = Callable[[Any], None]


class Watcher(Protocol):
    """What a check has seen of what others read, here and in other processes.

    `name` is that of no other watcher of the checkpoint, and the same in every process.
    """

    @property
    def name(self) -> str: ...

    def watch(self, alarm: Alarm, note: Note) -> AbstractContextManager[None]:
        """While this lasts, what others read is looked at: a fault sounds the alarm, and what was
        seen without one is noted.
        """
        ...

    def add(self, seen: Iterable[Any]) -> None:
        """What the watcher of that name noted in another process."""
        ...


@dataclass(frozen=True)
class Check:
    """Something that is stored twice, or has a checksum, and what compares it.

    `label` says what is looked at, `leaves` name the leaves that rest on it, `nbytes` is about what
    `run` reads. It returns what is wrong, or None. Of what passed a `watcher` without a fault,
    `run` reads nothing again.
    """

    label: str
    leaves: frozenset[str]
    nbytes: int
    run: Callable[[], str | None]
    watcher: Watcher | None = None

    @property
    def name(self) -> str:
        """What another process finds it by, if no other check has that name too."""
        return f"{self.label}; {self.watcher.name}" if self.watcher else self.label

    @property
    def memory(self) -> int:
        """About how many bytes a run holds at once: of two copies, and of one of them rounded."""
        return min(self.nbytes, 4 * CHECK_BYTES)


def passed_on(checks: Iterable[Check], users: Mapping[str, Collection[str]]) -> Iterator[Check]:
    """The checks of a source as those of a view; `users` are by array the leaves made of it."""
    for check in checks:
        yield replace(
            check, leaves=frozenset(leaf for name in check.leaves for leaf in users.get(name, ()))
        )


def require(check: Check) -> None:
    """Raises CorruptData if the check finds a fault."""
    if fault := check.run():
        raise CorruptData(
            f"{fault.removesuffix('.')}. `verify` (jax-ucp verify) lists every such place"
        )


def verdicts(checks: Iterable[Check], remote: bool = False) -> Iterator[tuple[str, str | None]]:
    """What each check looks at, and what is wrong with it or None; several run at once, and each
    sees what the others read.
    """
    with ExitStack() as stack:
        with uncollected():
            checks = list(checks)
            for watcher in filter(None, (check.watcher for check in checks)):
                stack.enter_context(watcher.watch(_alarm, _note))
        faults = faults_of(checks, remote)
    yield from zip((check.label for check in checks), faults, strict=True)


def faults_of(checks: Sequence[Check], remote: bool = False) -> Sequence[str | None]:
    """What each check finds. Those that a file has of itself come first in a list of checks, and
    run last: then they have seen what the others read.
    """
    return list(in_threads([check.run for check in reversed(checks)], remote))[::-1]


def _alarm() -> None:
    """Every check is run to its end, whatever another finds."""


def _note(seen: object) -> None:
    """What was seen is for this process alone."""
