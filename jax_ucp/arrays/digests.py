"""Hashes of whole files that the place states in which they lie: the Hugging Face hub, its cache on
a disk, whose blobs are named by them, and an export, by a file of CRC-32s in its folder.

That file is `ucp.checksums.sfv`, in the format of `cksfv` and `rhash`: lines with a name, a space
and 8 hexadecimal digits; lines that begin with `;` are comments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax_ucp.arrays.checks import CHECK_BYTES, Check
from jax_ucp.errors import FormatError
from jax_ucp.files.crc import crc32
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo, Files, read_bytes
from jax_ucp.files.source_files import SourceFiles

CHECKSUMS = "ucp.checksums.sfv"

# Digits of a CRC-32, and of what the hub stores as large files; others have git's hash of a blob.
_CRC_DIGITS, _SHA256_DIGITS = 8, 64
_LINE = re.compile(r"(.+) ([0-9a-fA-F]{8})\r?")


class _Crc32:
    """A CRC-32 with the methods of `hashlib`'s objects."""

    _crc = 0

    def update(self, data: bytes) -> None:
        self._crc = crc32(data, self._crc)

    def hexdigest(self) -> str:
        return f"{self._crc:08x}"


@dataclass(frozen=True)
class FileDigest:
    """The hash that a file of `files` should have, in hexadecimal digits."""

    files: Files
    file: FileInfo
    digest: str

    def fault(self) -> str | None:
        """The fault of the bytes of the file, all of which are read; None if there is none."""
        size, digits = self.file.size, len(self.digest)
        made = _Crc32() if digits == _CRC_DIGITS else hashlib.sha256()
        if digits not in (_CRC_DIGITS, _SHA256_DIGITS):
            made = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for start in range(0, size, CHECK_BYTES):
            made.update(read_bytes(self.files, self.file, start, min(start + CHECK_BYTES, size)))
        if made.hexdigest() == self.digest:
            return None
        found = f"{self.files.url(self.file.name)} has the hash {made.hexdigest()}, and"
        if digits == _CRC_DIGITS:
            return (
                f"{found} {CHECKSUMS} says {self.digest}: its bytes are not those that were"
                " exported. Export again; if you changed the file, delete its line there"
            )
        return (
            f"{found} the hub says {self.digest}: its bytes are not those that were uploaded."
            " Download it again"
        )


def digest_checks(files: SourceFiles, leaves: frozenset[str]) -> Iterator[Check]:
    """The comparison of each file with its hash, where one is stated; `leaves` rest on it."""
    for place, file in files.seen:
        if digest := place.digest(file):
            yield _check(FileDigest(place, file, digest), leaves)


def checksum_checks(folder: FilePath) -> Iterator[Check]:
    """The comparison of each file of an exported folder with its CRC-32, where the folder has them.

    Raises FormatError where their file is not what `checksums` gives, or names one file twice.
    """
    listed = folder / CHECKSUMS
    if not listed.is_file():
        return
    files, crcs = folder.folder(), dict[str, str]()
    for line in listed.read_text().split("\n"):
        match = _LINE.fullmatch(line)
        if line.strip() and not line.startswith(";") and (match is None or match[1] in crcs):
            raise FormatError(
                f"{listed} has the line {line!r:.200}, where a name that no other line has and the"
                " 8 digits of a CRC-32 should be"
            )
        if match is not None and not line.startswith(";"):
            crcs[match[1]] = match[2].lower()
    for (name, crc), file in zip(crcs.items(), stat_all(files, list(crcs)), strict=True):
        if file is not None:
            yield _check(FileDigest(files, file, crc), frozenset())
        else:
            fault = f"{files.url(name)} is missing, which {CHECKSUMS} names"
            yield Check(fault, frozenset(), 0, lambda fault=fault: fault)


def checksums(crcs: Mapping[str, int]) -> bytes:
    """The content of `ucp.checksums.sfv` for files of these CRC-32s. A name with a line break,
    which only the folder of a parameter can have, is left out.
    """
    lines = [f"{name} {crc:08x}\n" for name, crc in sorted(crcs.items()) if "\n" not in name]
    return "".join(["; CRC-32 of each file of the export\n", *lines]).encode()


def _check(stated: FileDigest, leaves: frozenset[str]) -> Check:
    label = f"{stated.files.url(stated.file.name)} against its hash"
    return Check(label, leaves, stated.file.size, stated.fault)
