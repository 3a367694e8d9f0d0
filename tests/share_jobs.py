"""A conversion or an export by shares, beside the same by one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax_ucp as ucp
from helpers import digests


@dataclass(frozen=True)
class Job:
    """What the shares of a source make in `out`, and one process in `whole`; of an export with a
    format.
    """

    source: Path
    out: Path
    whole: Path
    format: str | None = None

    def by_one(self, **how: Any) -> None:
        """Make `whole`."""
        source = ucp.open(self.source)
        source.export(self.whole, self.format) if self.format else source.save(self.whole, **how)

    def share(self, index: int, count: int = 2, **how: Any) -> ucp.Checkpoint | None:
        """What comes of a share that a process makes for itself: all of it, after the last one."""
        source, share = ucp.open(self.source), (index, count)
        if self.format:
            return source.export_share(self.out, self.format, share, **how)
        return source.save_share(self.out, share, **how)

    @property
    def is_whole(self) -> bool:
        """Whether the shares made what one process makes, and left the note that they did, alone."""
        files, whole = digests(self.out), digests(self.whole)
        assert files.pop("ucp.conversion.json")
        return files == whole != {} and not list(self.out.parent.glob(".*"))
