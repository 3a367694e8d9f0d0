"""Files of torch.save before torch 1.6, which later versions still write if they are asked to.

A file is five pickles, one after another: a magic number, the protocol's version, sizes of C types,
the object, and the list of storage keys. Then come the storages in the order of that list: the
number of elements, 8 bytes, and the elements, little-endian on every machine (`_legacy_save` and
`_legacy_load` in `torch/serialization.py`; `writeFileRaw` in `torch/csrc/serialization.cpp`). A
persistent id has one field more than in the zip format: None, or which part of its storage a view
is, as torch wrote for storages that were views until 0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.tensor_names import NAMES, Storage, StorageClass, not_a_storage
from jax_ucp.codecs.zip_members import Member
from jax_ucp.errors import CorruptData, FormatError, UnsafePickle
from jax_ucp.files.ranges import ByteRange

MAX_PICKLE_BYTES = 1 << 28
FIRST_BYTES = 1 << 16
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# How the pickle of the magic number begins, at protocol 2 to 5: the protocol, perhaps a frame, and
# the number.
_NUMBER = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
HEAD_BYTES = 2 + 9 + len(_NUMBER)


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins with `head`, of at least HEAD_BYTES, is one of these."""
    body = head[11:] if head[2:3] == b"\x95" else head[2:]
    return head[:1] == b"\x80" and body.startswith(_NUMBER)


def load(file: ByteRange) -> tuple[object, dict[str, Member]]:
    """The object of a file, and where storages lie. Raises FormatError or CorruptData."""
    at = 0
    for want, what in ((_MAGIC, "magic number"), (_PROTOCOL, "protocol")):
        number, at = _pickle(file, at, {})
        if number != want:
            raise FormatError(f"its {what} is {number!r:.40}, not {want}")
    _, at = _pickle(file, at, {})  # the sizes of C types: no storage depends on them
    storages = _Storages()
    tree, at = _pickle(file, at, NAMES, storages.named)
    keys, at = _pickle(file, at, {})
    return tree, storages.members(keys, file, at)


def _pickle(
    file: ByteRange,
    at: int,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
) -> tuple[object, int]:
    """The object of the pickle at a byte, and the byte after it, which only reading tells."""
    most = min(file.size - at, MAX_PICKLE_BYTES)
    window = FIRST_BYTES
    while True:
        data = file.read(at, at + min(window, most))
        try:
            tree, end = safe_pickle.load_first(data, names, persistent, most)
        except UnsafePickle:
            raise
        except FormatError:
            if window >= most:
                raise
            window *= 8
        else:
            return tree, at + end


class _Storages:
    """The storages that the object's persistent ids name, before it is known where they are."""

    def __init__(self):
        self.roots: dict[str, tuple[StorageClass, int]] = {}
        self.views: dict[str, tuple[str, int, int]] = {}

    def named(self, persistent_id: object) -> Storage:
        """The storage of ('storage', class, root key, location, number of elements, view)."""
        match persistent_id:
            case ("storage", StorageClass() as kind, str(root), str(), int(numel), view):
                pass
            case _:
                raise not_a_storage(persistent_id)
        if kind.dtype is None:
            raise FormatError(
                f"a {kind} has no numpy dtype, so where the storages after it begin cannot be said;"
                " save the file again with torch 1.6 or later"
            )
        size = numel * kind.dtype.itemsize
        known, known_numel = self.roots.setdefault(root, (kind, numel))
        if numel < 0 or known_numel * _itemsize(known) != size:
            raise CorruptData(
                f"storage {root[:80]!r} has {known_numel} elements of {known} and {numel} of {kind}"
                " at once"
            )
        if view is None:
            return Storage(root, kind, size)
        return self._view(root, kind, numel, view)

    def _view(self, root: str, kind: StorageClass, numel: int, view: object) -> Storage:
        match view:
            case (str(), int(offset), int(length)) if (
                min(offset, length) >= 0 and offset + length <= numel
            ):
                pass
            case _:
                raise FormatError(
                    f"{view!r:.80} is not part of storage {root[:80]!r} of {numel} elements"
                )
        key = f"{root}[{offset}:{offset + length}]"
        part = root, offset * _itemsize(kind), length * _itemsize(kind)
        if self.views.setdefault(key, part) != part:
            raise CorruptData(f"{key[:80]!r} is said to have two dtypes")
        return Storage(key, kind, part[2])

    def members(self, keys: Any, file: ByteRange, at: int) -> dict[str, Member]:
        """The place of each storage and view, by key, as a member of a zip file would be. From byte
        `at` on each storage's length comes before its elements.

        Raises CorruptData where `keys`, lengths and the file's end do not fit, FormatError for keys
        that are no list, or a view called like a storage.
        """
        members: dict[str, Member] = {}
        for key in self._checked(keys):
            kind, numel = self.roots[key]
            size = numel * _itemsize(kind)
            # 8 bytes before a storage are its number of elements
            head = file.read(at, at + 8)
            if len(head) < 8 or int.from_bytes(head, "little", signed=True) != numel:
                raise CorruptData(
                    f"storage {key[:80]!r} should be {numel} elements, but the file says"
                    f" {head.hex() or 'no'}"
                )
            members[key] = Member(key, at + 8, size, size, 0, False)
            at += 8 + size
            if at > file.size:
                raise CorruptData(
                    f"storage {key[:80]!r} runs past the end of the file: it is truncated"
                )
        if at != file.size:
            raise CorruptData(f"{file.size - at} bytes follow the last storage")
        for key, (root, first, length) in self.views.items():
            if key in self.roots:
                raise FormatError(f"storage {key[:80]!r} and a view of {root[:80]!r} have one name")
            members[key] = Member(key, members[root].offset + first, length, length, 0, False)
        return members

    def _checked(self, keys: Any) -> list[str]:
        """The file's list of storages, which must name each one of the object once."""
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise FormatError("the list of storages is not a list of keys")
        if len(set(keys)) != len(keys) or set(keys) != self.roots.keys():
            raise CorruptData("the list of storages does not name just those that the object has")
        return keys


def _itemsize(kind: StorageClass) -> int:
    assert kind.dtype is not None, "`named` refuses storages without a dtype"
    return kind.dtype.itemsize
