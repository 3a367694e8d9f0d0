"""Files of torch.save, read lazily, without torch and without running what they pickle.

Since torch 1.6 a file is a zip with one root folder: `data.pkl`, the pickled object with a
persistent id for each storage, and `data/<key>`, the bytes of each storage, stored as they are
(`torch/serialization.py`, `_save`). Opening reads the zip directory and `data.pkl`; the bytes of
storages are read when they are asked for. The CRC that the zip directory has of each storage is
therefore not compared by reads, but by `checks`. `legacy` has the format before, which has no CRC.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from jax_ucp.arrays.extents import (
    ExtentTable,
    Region,
    StoredArray,
    StoredFile,
    SummedArrays,
    naming,
)
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs import torch_legacy as torch_legacy
from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.coded_states import CodedState
from jax_ucp.codecs.tensor_names import (
    NAMES,
    DTensor,
    Storage,
    StorageClass,
    StoredTensor,
    not_a_storage,
    unreadable,
)
from jax_ucp.codecs.unpickle import Opaque, Record, Unknown
from jax_ucp.codecs.zip_members import Member, member_bytes, zip_members, zip_names
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.placeholders import stand_in, why_missing
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.ranges import ByteRange, EdgesInMemory, FileRange, MemoryRange
from jax_ucp.layout.box import Box

__all__ = ["Record", "StoredTensor", "TorchFile", "TreeContents", "has_dtensors", "is_torch_file"]

MAX_PICKLE_BYTES = 1 << 28
# torch never deflates; another tool may have rewritten the file
MAX_INFLATED_PICKLE_BYTES = 1 << 25
MAX_PATH = 1024
# How files of torch.save are named as a rule; a name alone makes none.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
EQUAL_KEPT = 1 << 10


def is_torch_file(path: FilePath) -> bool:
    """Whether it is a file of torch.save, by content, or a damaged one by its name."""
    head = path.read_range(0, torch_legacy.HEAD_BYTES)
    if torch_legacy.is_legacy(head) or head[:4] != b"PK\3\4":
        return torch_legacy.is_legacy(head)
    try:
        names = zip_names(EdgesInMemory(FileRange(path)))
        return any(name.endswith("/data.pkl") for name in names)
    except FormatError:
        return path.suffix in SUFFIXES


def has_dtensors(path: FilePath) -> bool:
    """Whether a file of torch.save has DTensors, parts of tensors of which others have the rest."""
    with contextlib.suppress(FormatError):
        tree = TorchFile(path, lenient=True).tree
        return any(isinstance(node, DTensor) for node in safe_pickle.each_node(tree))
    return False


class TorchFile(ExtentTable):
    """The object of a torch.save file, and the table of its tensors.

    In `tree` a tensor or Parameter is a StoredTensor; OrderedDict, defaultdict and Counter are
    dict; torch.Size is tuple; a dtype is the np.dtype; a device, layout or path is str; an instance
    of an allow-listed class is a Record, that of any other an Opaque; a class or constant only
    mentioned, or a dtype numpy lacks, is a Name. `unknown` are names that are in no list.

    `offset` and `length` select a file inside `file`, as in DCP's `.distcp` files. `data` are its
    bytes where they had to be inflated; `path` then only names them. `equal` keeps objects by what
    they were made from, for other files of the same pickle. A tensor that cannot be read refuses
    the file, unless it is `lenient`: then it stays in the tree, with its reason. With
    `may_be_coded` the object may be a CodedState.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | FilePath,
        *,
        offset: int = 0,
        length: int | None = None,
        file: FileInfo | None = None,
        data: bytes | None = None,
        equal: dict[Hashable, TreeContents] | None = None,
        lenient: bool = False,
        may_be_coded: bool = False,
    ):
        self.path = file_path(path)
        self.in_memory = len(data or b"")  # bytes of it that are held in memory
        with naming(self.path), self._naming_what_is_instead():
            file_bytes: ByteRange = (
                FileRange(self.path, offset, length, file) if data is None else MemoryRange(data)
            )
            edges = EdgesInMemory(file_bytes)
            self.saved_as = ""  # the name that torch.save was given, without its suffix, if any
            swapped = False
            if torch_legacy.is_legacy(edges.read(0, torch_legacy.HEAD_BYTES)):
                tree, self._storages = torch_legacy.load(edges)
                contents = TreeContents(tree, self.path)
            else:
                archive = _archive(edges)
                self.saved_as = archive.root
                self._storages, swapped = archive.storages, archive.big_endian
                contents = self._contents(archive, equal)
            kept = edges if edges.is_remote else file_bytes
            self._file = StoredFile(self.path, kept, swapped)
            self.tree = contents.tree
            self._tensors = contents.tensors
            super().__init__(contents.infos)
            self.unknown = frozenset(contents.unknown)
            is_coded = may_be_coded and isinstance(self.tree, CodedState)
            if contents.refused and not lenient and not is_coded:
                raise cannot_be_read(contents.refused)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tree": None}  # its tensors are in the table

    def tensor(self, node: StoredTensor) -> np.ndarray:
        """The elements of a tensor of the tree."""
        return self.read(node.key, Box.whole(node.shape))

    def stored(self, key: str) -> StoredArray:
        """Where a tensor is stored. What is deflated is inflated here, and its CRC compared."""
        tensor = self._tensors[key]
        member = self._storages[tensor.storage]
        offset = tensor.offset * tensor.dtype.itemsize
        if member.deflated:
            with naming(self.path):
                data = MemoryRange(member_bytes(self._file.data, member))
            return StoredArray(self._file._replace(data=data), offset, tensor.strides)
        region = _region(tensor.storage, member)
        return StoredArray(
            self._file, member.offset + offset, tensor.strides, region, tensor.storage
        )

    def sums(self) -> Iterator[SummedArrays]:
        """Each storage that has a CRC in the zip directory."""
        tensors: dict[str, list[str]] = {}
        for key, tensor in self._tensors.items():
            tensors.setdefault(tensor.storage, []).append(key)
        for storage, member in self._storages.items():
            if _region(storage, member):
                label = f"{self.path.name}: storage {storage}"
                yield SummedArrays(label, member.size, tensors.get(storage, ()), [storage])

    def regions(self, place: str) -> Sequence[tuple[StoredFile, Region]]:
        region = _region(place, self._storages[place])
        return [(self._file, region)] if region else []

    def checksums(self) -> tuple[tuple[int, int], ...]:
        """The size and the CRC of every storage in order; () if one with bytes has no CRC."""
        members = list(self._storages.values())
        summed = all(member.crc for member in members if member.size)
        return tuple((member.size, member.crc) for member in members) if summed else ()

    def _contents(
        self, archive: _Archive, equal: dict[Hashable, TreeContents] | None
    ) -> TreeContents:
        """The contents of data.pkl, or of an equal file; none with an Opaque are shared."""
        made_from = None
        if equal is not None:
            sizes = tuple([(key, member.size) for key, member in archive.storages.items()])
            made_from = sha256(archive.pickled).digest(), archive.pickled_size, sizes
            if made_from in equal:
                return equal[made_from]
        loaded = safe_pickle.load(archive.pickled, NAMES, self._storage, archive.pickled_size)
        contents = TreeContents(loaded, self.path)
        if equal is not None and not contents.unknown and len(equal) < EQUAL_KEPT:
            equal[made_from] = contents
        return contents

    def _storage(self, persistent_id: object) -> Storage:
        """The storage of ('storage', class, key, location, number of elements)."""
        match persistent_id:
            case ("storage", StorageClass() as kind, str(key), str(location), int(numel)):
                pass
            case _:
                raise not_a_storage(persistent_id)
        if location == "meta":
            return Storage(
                key, kind, refusal="it is on the meta device, so the file holds no data for it"
            )
        if kind.dtype is None:
            return Storage(key, kind, refusal=f"its {kind} has no numpy dtype")
        if key not in self._storages:
            raise CorruptData(
                f"data.pkl refers to storage {key[:80]!r}, which the file does not hold"
            )
        if self._storages[key].size != numel * kind.dtype.itemsize:
            raise CorruptData(
                f"storage {key!r} should be {numel} elements of {kind}, but has"
                f" {self._storages[key].size} bytes"
            )
        return Storage(key, kind, self._storages[key].size)

    @contextmanager
    def _naming_what_is_instead(self) -> Iterator[None]:
        """A context that explains a file that only stands for another, or a broken link."""
        try:
            yield
        except FileNotFoundError as error:
            if why := why_missing(self.path.parent, self.path.name):
                raise FormatError(why) from error
            raise
        except FormatError as error:
            why = stand_in(self.path) if not self.in_memory and self.path.is_file() else None
            if not why:
                raise
            raise FormatError(why) from error


def _region(storage: str, member: Member) -> Region | None:
    """The bytes of a storage whose CRC no read compares; inflating compares it."""
    if not member.crc or member.deflated:
        return None
    return Region(storage, member.offset, member.offset + member.size, member.crc)


_EMPTY = Member("", offset=0, size=0, stored_size=0, crc=0, deflated=False)


@dataclass(frozen=True, slots=True)
class _Archive:
    """A zip file of torch.save; `pickled_size` is what it spends on data.pkl."""

    root: str
    storages: Mapping[str, Member]
    pickled: bytes
    pickled_size: int
    big_endian: bool


def _archive(file: ByteRange) -> _Archive:
    members = zip_members(file)
    pickles = [name.partition("/") for name in members if name.endswith("/data.pkl")]
    roots = [root for root, _, name in pickles if name == "data.pkl"]
    if len(roots) != 1:
        raise FormatError(
            f"a zip file with {len(roots)} members <root>/data.pkl; a file of torch.save has one"
        )
    (root,) = roots
    if f"{root}/constants.pkl" in members:
        raise FormatError(
            "a TorchScript archive (constants.pkl), which holds code; save its state_dict() instead"
        )
    byteorder = members.get(f"{root}/byteorder")
    order = b"little" if byteorder is None else member_bytes(file, byteorder, 16)
    if order not in (b"little", b"big"):
        raise FormatError(f"byte order {order!r} is neither little nor big")
    prefix = f"{root}/data/"
    storages: dict[str, Member] = {}
    for name, member in members.items():
        if name.startswith(prefix):
            # ZeRO-3's ranks have thousands of empty ones each
            key = sys.intern(name[len(prefix) :])
            storages[key] = member if member.size or member.deflated else _EMPTY
    pickled = members[f"{root}/data.pkl"]
    max_bytes = MAX_INFLATED_PICKLE_BYTES if pickled.deflated else MAX_PICKLE_BYTES
    data = member_bytes(file, pickled, max_bytes)
    return _Archive(root, storages, data, pickled.stored_size, order == b"big")


def cannot_be_read(reasons: Mapping[str, str]) -> FormatError:
    faults = [f"{path!r}: {reason}" for path, reason in reasons.items()]
    return FormatError("tensors that cannot be read:", faults)


class TreeContents:
    """The tensors of a tree by key, set here; names in no list; and unreadable ones by path."""

    def __init__(self, tree: object, file: FilePath):
        self.tree = tree
        self.tensors: dict[str, StoredTensor] = {}
        self.unknown: set[str] = set()
        self.refused: dict[str, str] = {}
        keyed: set[StoredTensor] = set()
        repeats: Counter[str] = Counter()
        for keys, node in safe_pickle.walk(tree):
            if isinstance(node, StoredTensor):
                if node not in keyed:
                    path = key = _path(keys)
                    while key in self.tensors:
                        repeats[path] += 1
                        key = f"{path}#{repeats[path] + 1}"
                    object.__setattr__(node, "key", key)
                    keyed.add(node)
                    self.tensors[key] = node
            elif (reason := unreadable(node)) and _path(keys[:-1]) not in self.refused:
                self.refused[_path(keys)] = reason
            if isinstance(node, Opaque):
                self.unknown.add(node.type)
                node.where = node.where or f"{file}: {_path(keys) or 'what it holds'}"
            elif isinstance(node, Unknown):
                self.unknown.add(node.name)

        self.infos = {
            key: ArrayInfo(tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()
        }


def _path(keys: tuple[object, ...]) -> str:
    path = "/".join(map(safe_pickle.label, keys))
    return path if len(path) <= MAX_PATH else "..." + path[3 - MAX_PATH :]
