"""Hashes of whole files that the place states in which they lie: the Hugging Face hub, and its
cache on a disk, whose blobs are named by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from jax_ucp.arrays.checks import CHECK_BYTES, Check
from jax_ucp.files.protocol import FileInfo, Files, read_bytes
from jax_ucp.files.source_files import SourceFiles

_SHA256_DIGITS = 64  # of what the hub stores as large files; others have git's hash of a blob


@dataclass(frozen=True)
class FileDigest:
    """The hash that a file of `files` should have, in hexadecimal digits."""

    files: Files
    file: FileInfo
    digest: str

    def fault(self) -> str | None:
        """The fault of the bytes of the file, all of which are read; None if there is none."""
        size = self.file.size
        made = hashlib.sha256()
        if len(self.digest) != _SHA256_DIGITS:
            made = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for start in range(0, size, CHECK_BYTES):
            made.update(read_bytes(self.files, self.file, start, min(start + CHECK_BYTES, size)))
        if made.hexdigest() == self.digest:
            return None
        return (
            f"{self.files.url(self.file.name)} has the hash {made.hexdigest()}, and the hub says"
            f" {self.digest}: its bytes are not those that were uploaded. Download it again"
        )


def digest_checks(files: SourceFiles, leaves: frozenset[str]) -> Iterator[Check]:
    """The comparison of each file with its hash, where one is stated; `leaves` rest on it."""
    for place, file in files.seen:
        if digest := place.digest(file):
            stated = FileDigest(place, file, digest)
            label = f"{place.url(file.name)} against its hash"
            yield Check(label, leaves, file.size, stated.fault)
