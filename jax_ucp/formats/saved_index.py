"""Index of a checkpoint: what its files answered while it was opened, in one file.

It has bytes of headers and lists of names, which the readers of the formats check again, so that an
index can say nothing that a checkpoint could not. Opening one asks whether the files are still
those.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec

from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import CorruptData, FormatError, UCPError
from jax_ucp.files.listing import ListedFiles, Listing
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import OWN_BYTES, require_small
from jax_ucp.files.source_files import opening
from jax_ucp.options import Options

SUFFIX = ".ucp-index"
MAGIC = b"ucp-index 1\n"
# An index is inflated to no more than so many times its size, or to so many bytes if it is small.
MAX_RATIO, SMALL_BYTES = 64, 64 << 20

# Opens a checkpoint at a place, as `registry.open_contents` does.
Open = Callable[[str, Options, FilePath], Contents]


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """URL or path of the checkpoint, and the encoded listing of its files."""

    path: str
    listing: bytes


def recognise(path: FilePath) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def encoded_index(path: str, options: Options, open_contents: Open) -> tuple[Contents, bytes]:
    """The checkpoint at a path, opened with these options, and the bytes of an index of it."""
    at = file_path(path)
    listing = Listing(is_shared=True)
    contents = open_contents(str(at), options, FilePath(ListedFiles(at.files, listing), at.key))
    body = msgspec.msgpack.encode(_Body(str(at), listing.encode()))
    listing.close()
    deflated = zlib.compress(body)
    if len(body) > _most(len(deflated)):
        deflated = zlib.compress(body, 0)
    return contents, MAGIC + deflated


def open_index(path: FilePath, options: Options, open_contents: Open) -> Contents:
    """The checkpoint of an index. Raises FormatError, CorruptData if a file has changed."""
    body = _read(path)
    try:
        at = file_path(body.path)
        if path.files.is_remote and not at.files.is_remote:
            raise FormatError("it is behind a network, and of files on a disk")
        if at.suffix == SUFFIX:
            raise FormatError(f"it is of {at}, which is an index")
        listing = Listing.decode(body.listing)
    except (UCPError, ValueError) as error:
        raise FormatError(f"{path} is not an index of a checkpoint: {error}") from error
    listed = FilePath(ListedFiles(at.files, listing), at.key)
    with opening() as files:
        opened: Contents | UCPError
        try:
            opened = open_contents(str(at), options, listed)
        except UCPError as error:
            opened = error
        except FileNotFoundError as error:
            opened = FormatError(
                f"{path} says of {error.filename} that it is there, and that it is not. Make the"
                " index again (jax-ucp index)."
            )
        listing.close()
        if changes := list(files.changes()):
            title = f"{path} is an index of files that have changed since: {len(changes)} of them"
            remedy = "Make the index again (jax-ucp index)."
            cause = opened if isinstance(opened, UCPError) else None
            raise CorruptData(title, changes, remedy=remedy) from cause
    if isinstance(opened, UCPError):
        raise opened
    return opened


def _read(path: FilePath) -> _Body:
    """The body of an index, which is not noted as a file of the checkpoint."""
    file = path.file()
    require_small(path.files, file, OWN_BYTES)
    data = path.read_unnoted(file)
    if not data.startswith(MAGIC):
        raise FormatError(
            f"{path} is not an index of this version of jax_ucp: it does not begin with {MAGIC!r}."
            " Make it again (jax-ucp index)"
        )
    most = _most(len(data))
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(memoryview(data)[len(MAGIC) :], most)
        if not inflater.eof or inflater.unused_data:
            raise FormatError(f"{path} is cut short, or has more than {most:,} bytes")
        return msgspec.msgpack.decode(body, type=_Body)
    except (zlib.error, msgspec.DecodeError) as error:
        raise FormatError(f"{path} is not an index of a checkpoint: {error}") from None


def _most(size: int) -> int:
    return min(OWN_BYTES, max(SMALL_BYTES, MAX_RATIO * size))
