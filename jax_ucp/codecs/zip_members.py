"""Where the members of a zip file lie, so strictly that no two readers see different files.

`torch.save` writes zip files with miniz (`caffe2/serialize/inline_container.cc`, `miniz.c`):
members stored, sizes and CRC in the central directory only (flag bit 3), zip64 where a number needs
it. Python's `zipfile` forgives more than a checkpoint needs (overlaps, bytes before the archive,
headers that disagree) and does not tell where a stored member's bytes begin.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.crc import crc32
from jax_ucp.files.ranges import ByteRange

# signature, disk, directory's disk, entries here, entries, size, offset, comment
END = struct.Struct("<4s4H2LH")
# ... record size, versions, disks, entries here, entries, size, offset
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR64 = struct.Struct("<4sLQL")  # signature, disk, offset of the zip64 end record, disks
CENTRAL = struct.Struct("<4s4H2H3L5H2L")
LOCAL = struct.Struct("<4s3H2H3L2H")
# What is read of the last two: flags, method, CRC, sizes, lengths of name and extra field; and of
# the first the length of the comment, the disk and where the local header is.
_IN_CENTRAL = struct.Struct("<8x2H4x3L4H6xL")
_IN_LOCAL = struct.Struct("<6x2H4x3L2H")
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF

_STORED, _DEFLATED = 0, 8
_SIZES_FOLLOW = 0x0008  # flag bit 3: sizes and CRC of the local header may be zero
# deflate level, utf-8 names; all others encrypt or patch
_KNOWN_FLAGS = _SIZES_FOLLOW | 0x0006 | 0x0800

# Deflate cannot do better than 1032:1. One member is inflated at a time, and only when it is read.
_MAX_RATIO = 1032
_MAX_INFLATED = 1 << 30

# What is read of extra fields with each local header: torch pads them so that storages begin at a
# multiple of 64 bytes.
_EXTRA_BYTES = 96
_NAME_BYTES = 256


class Member(NamedTuple):
    """A file of the archive: `stored_size` bytes from `offset`, `size` bytes once inflated."""

    name: str
    offset: int
    size: int
    stored_size: int
    crc: int  # of the inflated bytes; 0 where torch was told not to compute it
    deflated: bool


class _ZipEntry(NamedTuple):
    """An entry of the central directory."""

    name: bytes
    flags: int
    method: int
    crc: int
    stored_size: int
    size: int
    header: int


def zip_members(file: ByteRange) -> dict[str, Member]:
    """Every member by name, in the order of the directory, of a zip file that is all of `file`.

    Refused: a directory or a member that does not lie in the file, overlaps another or is named
    twice, encryption, other methods, several disks, a local header that disagrees with the
    directory.
    """
    start, entries = _directory(file)
    members: dict[str, Member] = {}
    spans: list[tuple[int, int, str]] = []
    # A member begins with its local header, read with name and extra field where they are short:
    # one long name does not make all of them long.
    longest = min(max((len(entry.name) for entry in entries), default=0), _NAME_BYTES)
    head_bytes = LOCAL.size + longest + _EXTRA_BYTES
    headers = file.read_heads([entry.header for entry in entries], head_bytes)
    for entry, head in zip(entries, headers, strict=True):
        # a member's local header, with which `head` begins, agrees with its directory entry
        name, at = _text(entry.name), entry.header
        if len(head) < LOCAL.size or not head.startswith(b"PK\3\4"):
            raise FormatError(f"zip member {name!r} has no local header at byte {at}")
        flags, method, crc, stored_size, size, name_length, extra_length = _IN_LOCAL.unpack_from(
            head
        )
        extra_at = LOCAL.size + name_length
        length = extra_at + extra_length
        offset = at + length
        if offset + entry.stored_size > file.size:
            raise FormatError(
                f"zip member {name!r} runs past the end of the file: it is truncated or damaged"
            )
        if length > len(head):
            head = file.read(at, offset)
        if size == MAX32 or stored_size == MAX32:
            extra = head[extra_at:length]
            size, stored_size = _widened((size, stored_size), extra, entry.name)
        if flags & _SIZES_FOLLOW:  # which allows zeros for sizes and CRC
            crc, stored_size = crc or entry.crc, stored_size or entry.stored_size
            size = size or entry.size
        if entry != (head[LOCAL.size : extra_at], flags, method, crc, stored_size, size, at):
            raise FormatError(
                f"zip member {name!r}: its local header and the zip directory disagree"
            )
        if name in members:
            raise FormatError(f"zip member {name!r} occurs twice")
        members[name] = Member(name, offset, size, stored_size, crc, method == _DEFLATED)
        spans.append((at, offset + stored_size, name))
    free = 0
    for begin, end, name in sorted(spans):
        if begin < free or end > start:
            raise FormatError(
                f"zip member {name!r} overlaps another or runs past byte {start}, where members end"
            )
        free = end
    return members


def zip_names(file: ByteRange) -> list[str]:
    """The names in the directory of a zip file, of which no member is looked at."""
    return [_text(entry.name) for entry in _directory(file)[1]]


def member_bytes(file: ByteRange, member: Member, max_bytes: int = _MAX_INFLATED) -> bytes:
    """The member's bytes, inflated if need be; a CRC that the file has is verified."""
    if member.size > max_bytes:
        raise FormatError(
            f"zip member {member.name!r} has {member.size} bytes, more than the {max_bytes} allowed"
        )
    data = file.read(member.offset, member.offset + member.stored_size)
    if member.deflated:
        if member.size > _MAX_RATIO * member.stored_size:
            raise FormatError(
                f"zip member {member.name!r} would inflate {member.stored_size} bytes to"
                f" {member.size}"
            )
        inflater = zlib.decompressobj(wbits=-15)
        try:
            data = inflater.decompress(data, member.size + 1)
        except zlib.error as error:
            raise CorruptData(f"zip member {member.name!r} cannot be inflated: {error}") from error
        if len(data) != member.size or not inflater.eof or inflater.unused_data:
            raise CorruptData(
                f"zip member {member.name!r} does not inflate to the {member.size} bytes it claims"
            )
    if member.crc and crc32(data) != member.crc:
        raise CorruptData(
            f"the bytes of zip member {member.name!r} differ from their CRC: the file is damaged"
        )
    return data


def _directory(file: ByteRange) -> tuple[int, list[_ZipEntry]]:
    """Where the central directory starts, and its entries. Comments are refused."""
    start, size, count = _end(file)
    if count * CENTRAL.size > size:
        raise FormatError(f"the zip directory claims {count} entries in {size} bytes")
    directory = file.read(start, start + size)
    entries, at = [], 0
    for _ in range(count):
        entry, at = _entry(directory, at, start)
        entries.append(entry)
    if at != len(directory):
        raise FormatError(f"the zip directory holds more than the {count} entries it claims")
    return start, entries


def _end(file: ByteRange) -> tuple[int, int, int]:
    """Where the central directory starts, how many bytes it has, and how many entries."""
    at = file.size - END.size
    record = file.read(max(at, 0), file.size)
    if at < 0 or record[:4] != b"PK\5\6":
        raise FormatError(
            "no zip end record at the end: the file is truncated, or no zip file of torch.save"
        )
    *numbers, comment = END.unpack(record)[1:]
    limit, (disk, start_disk, here, count, size, start) = _end64(file, at, numbers)
    if disk or start_disk or here != count or comment:
        raise FormatError(
            "the zip end record speaks of several disks or of a comment: no file of torch.save"
        )
    if start + size != limit:
        raise FormatError(
            f"the zip directory, {size} bytes from {start}, does not end at its end record, {limit}"
        )
    return start, size, count


def _end64(file: ByteRange, end: int, numbers: list[int]) -> tuple[int, list[int]]:
    """Where the end records begin, and the numbers of the zip64 one, if there is one.

    They are this disk, the directory's disk, entries here, entries, size and offset of the
    directory; those in the plain end record at `end` are the same or, where they do not fit, all
    ones.
    """
    at = end - LOCATOR64.size
    locator = file.read(max(at, 0), end)
    if at < 0 or locator[:4] != b"PK\6\7":
        return end, numbers
    _, disk, record, disks = LOCATOR64.unpack(locator)
    begin = file.read(record, record + END64.size) if record + END64.size <= at else b""
    if disk or disks > 1 or begin[:4] != b"PK\6\6":
        raise FormatError(f"no zip64 end record at byte {record}, where its locator points")
    _, length, _, _, *wide = END64.unpack(begin)
    if record + 12 + length != at:
        raise FormatError(
            f"the zip64 end record at byte {record} does not end at its locator, byte {at}"
        )
    full = (MAX16, MAX16, MAX16, MAX16, MAX32, MAX32)
    if any(n not in (w, most) for n, w, most in zip(numbers, wide, full, strict=True)):
        raise FormatError("the two end records of the zip file disagree")
    return record, wide


def _entry(directory: bytes, at: int, start: int) -> tuple[_ZipEntry, int]:
    """The entry at byte `at` of the directory, and where the next one starts."""
    name_at = at + CENTRAL.size
    if name_at > len(directory) or not directory.startswith(b"PK\1\2", at):
        raise FormatError(f"no zip directory entry at byte {start + at}")
    fields = _IN_CENTRAL.unpack_from(directory, at)
    flags, method, crc, stored_size, size, name_length, extra_length = fields[:7]
    comment_length, disk, header = fields[7:]
    extra_at = name_at + name_length
    stop = extra_at + extra_length + comment_length
    if stop > len(directory):
        raise FormatError(f"the zip directory entry at byte {start + at} runs past the directory")
    name = directory[name_at:extra_at]
    if MAX32 in (size, stored_size, header):
        extra = directory[extra_at : extra_at + extra_length]
        size, stored_size, header = _widened((size, stored_size, header), extra, name)
    if flags & ~_KNOWN_FLAGS or disk:
        raise FormatError(
            f"zip member {_text(name)!r} is encrypted or on another disk (flags {flags:#x})"
        )
    is_stored = method == _STORED and size == stored_size
    if not is_stored and method != _DEFLATED:
        raise FormatError(
            f"zip member {_text(name)!r}: method {method}, {stored_size} bytes stored for {size}"
        )
    return _ZipEntry(name, flags, method, crc, stored_size, size, header), stop


def _widened(numbers: Sequence[int], extra: bytes, name: bytes) -> Sequence[int]:
    """The numbers; in place of each that is the 32-bit mark for it the next one of the zip64 field
    (id 1) of an extra field, in which torch pads with another ("FB").
    """
    wide: Iterator[int] = iter(())
    at = 0
    while at + 4 <= len(extra):
        field, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if field == 1:
            count = min(length, len(extra) - at) // 8
            wide = iter(struct.unpack_from(f"<{count}Q", extra, at))
            break
        at += length
    try:
        return [next(wide) if number == MAX32 else number for number in numbers]
    except StopIteration:
        raise FormatError(f"zip member {_text(name)!r} lacks its zip64 sizes") from None


def _text(name: bytes) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"zip member {name[:80]!r}: the name is not utf-8") from error
