"""The files that a checkpoint is read from, and the check that they have not changed since.

A file that is replaced after the metadata was read belongs to another save. So the size and version
of every file are recorded before it is first read, and compared at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

from jax_ucp.errors import CorruptData
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.listing import Asked, outermost
from jax_ucp.files.protocol import FileInfo, Files


class SourceFiles:
    """The files of a checkpoint with their sizes and versions before the first read, and the
    requests (`asked`) that opening it took over a network.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Files, FileInfo]] = {}
        self.asked = Asked()

    @classmethod
    def together(cls, several: Iterable[SourceFiles]) -> SourceFiles:
        """The files of several checkpoints that are read as one."""
        files = cls()
        for other in several:
            files._seen = {**other._seen, **files._seen}
        return files

    def note(self, files: Files, file: FileInfo) -> None:
        """Record the size and version of a file, unless it is recorded already."""
        self._seen.setdefault(files.url(file.name), (files, file))

    @property
    def is_remote(self) -> bool:
        return any(files.is_remote for files, _ in self.seen)

    @property
    def seen(self) -> list[tuple[Files, FileInfo]]:
        return list(self._seen.values())

    def identities(self) -> list[tuple[str, int, str]]:
        return sorted((url, file.size, file.version) for url, (_, file) in self._seen.items())

    def changes(self) -> Iterator[str]:
        """A message for each file that has changed."""
        # files of one root behind a network are looked up at once; on a disk each root has its own
        # boundary
        together: dict[object, list[int]] = defaultdict(list)
        seen = self.seen
        for i, (files, _) in enumerate(seen):
            together[files.url() if files.is_remote else files].append(i)
        infos: dict[int, FileInfo | None] = {}
        for places in together.values():
            names = [seen[i][1].name for i in places]
            infos |= zip(places, stat_all(seen[places[0]][0], names), strict=True)
        for i, (url, (_, before)) in enumerate(self._seen.items()):
            now = infos[i]
            if now is None:
                yield f"{url} is gone"
            elif now.size != before.size:
                yield (
                    f"{url} is not the file that was opened: it has {now.size} bytes, and had"
                    f" {before.size}"
                )
            elif now != before:
                yield (
                    f"{url} is not the file that was opened: it was replaced, or written to (its"
                    f" version is {now.version}, and was {before.version})"
                )

    def require_unchanged(self) -> None:
        """Raise CorruptData with the names of files that have changed since they were opened."""
        changes = list(self.changes())
        if not changes:
            return
        title = (
            "the checkpoint changed while it was read, so that what was read may be of two:"
            f" {len(changes)} files"
        )
        raise CorruptData(title, changes, remedy="Open it again when nothing writes to it.")


def opening() -> AbstractContextManager[SourceFiles]:
    """Context that records the files that readers `note`; a nested one gives the outer record."""
    return outermost(_opening, SourceFiles)


def note(files: Files, file: FileInfo) -> None:
    """Record a file that is about to be read, if a checkpoint is being opened."""
    if (seen := _opening.get()) is not None:
        seen.note(files, file)


_opening: ContextVar[SourceFiles | None] = ContextVar("opening", default=None)
