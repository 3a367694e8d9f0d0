"""Files of torch.save, read lazily, without torch and without running what they pickle.

Since torch 1.6 a file is a zip with one root folder: `data.pkl`, the pickled object with a
persistent id for each storage, and `data/<key>`, the bytes of each storage, stored as they are
(`torch/serialization.py`, `_save`). Opening reads the zip directory and `data.pkl`; the bytes of
storages are read when they are asked for. The CRC that the zip directory has of each storage is
therefore not compared by reads, but by `checks`. `legacy` has the format before, which has no CRC.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np

from jax_ucp.errors import CorruptData, FormatError, fault_lines
from jax_ucp.files.crc import Part, Summed, Tally
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.ranges import ByteRange, EdgesInMemory, FileRange, MemoryRange
from jax_ucp.files.strided import read_strided
from jax_ucp.formats.huggingface.stand_ins import stand_in, why_missing
from jax_ucp.formats.torch_save import legacy as torch_legacy
from jax_ucp.formats.torch_save import unpickle as safe_pickle
from jax_ucp.formats.torch_save.coded_states import CodedState
from jax_ucp.formats.torch_save.tensor_names import (
    NAMES,
    Storage,
    StorageClass,
    StoredTensor,
    not_a_storage,
    unreadable,
)
from jax_ucp.formats.torch_save.unpickle import Opaque, Record, Unknown
from jax_ucp.formats.torch_save.zip_members import Member, member_bytes, zip_members, zip_names
from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import SAMPLE_BYTES, Alarm, Check, Extent, Note
from jax_ucp.sources.protocol import ArrayInfo, ArraySource

__all__ = ["Record", "StoredTensor", "TorchFile", "TreeContents", "is_torch_file"]

MAX_PICKLE_BYTES = 1 << 28
# torch never deflates; another tool may have rewritten the file
MAX_INFLATED_PICKLE_BYTES = 1 << 25
MAX_PATH = 1024
# How files of torch.save are named as a rule; a name alone makes none.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
ALIKE_BYTES, ALIKE_KEPT = 1 << 10, 1 << 10
REASONS_SHOWN = 10
VERIFY_BYTES = 1 << 20  # so little stays in a core's cache until it is summed


def is_torch_file(path: FilePath) -> bool:
    """Whether it is a file of torch.save by its content, or is named as one and begins as one,
    and is damaged.
    """
    head = path.read_range(0, torch_legacy.HEAD_BYTES)
    if torch_legacy.is_legacy(head) or head[:4] != b"PK\3\4":
        return torch_legacy.is_legacy(head)
    try:
        names = zip_names(EdgesInMemory(FileRange(path)))
        return any(name.endswith("/data.pkl") for name in names)
    except FormatError:
        return path.suffix in SUFFIXES


class TorchFile(ArraySource):
    """The object of a torch.save file, and an ArraySource of its tensors.

    In `tree` a tensor or Parameter is a StoredTensor; OrderedDict, defaultdict and Counter are
    dict; torch.Size is tuple; a dtype is the np.dtype; a device, layout or path is str; an instance
    of an allow-listed class is a Record, that of any other an Opaque; a class or constant only
    mentioned, or a dtype numpy lacks, is a Name. A plain recursive walk ends. `unknown` are the
    names, of classes and functions, that are in no list.

    `offset` and `length` select a file that lies inside another, as the objects in DCP's `.distcp`
    files do; `file` is that file as it was looked at. `data` are its bytes where they had to be
    inflated; `path` then only names them. `alike` keeps tensors that are all of a file, by what
    they were made from, for the many files of one tensor that have the same pickle. `equal` keeps
    whole objects so, for ranks that wrote the same but for the bytes of tensors: nobody may change
    those. A tensor that cannot be read refuses the file, unless it is `lenient`: then it stays in
    the tree, and `unreadable` of it says why. With `may_be_coded` the whole object may be a state
    of torchao's optimizers, a CodedState.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | FilePath,
        *,
        offset: int = 0,
        length: int | None = None,
        file: FileInfo | None = None,
        data: bytes | None = None,
        alike: dict[Hashable, StoredTensor] | None = None,
        equal: dict[Hashable, TreeContents] | None = None,
        lenient: bool = False,
        may_be_coded: bool = False,
    ):
        self.path = file_path(path)
        self.in_memory = len(data or b"")  # bytes of it that are held in memory
        with self._naming_file(), self._naming_what_is_instead():
            self._bytes: ByteRange = (
                FileRange(self.path, offset, length, file) if data is None else MemoryRange(data)
            )
            self._swapped = False
            self._watching: dict[str, list[Tally]] = {}
            file_bytes = EdgesInMemory(self._bytes)
            self.saved_as = ""  # the name that torch.save was given, without its suffix, if any
            if torch_legacy.is_legacy(file_bytes.read(0, torch_legacy.HEAD_BYTES)):
                tree, self._storages = torch_legacy.load(file_bytes)
                contents = TreeContents(tree, self.path)
            else:
                archive = _archive(file_bytes)
                self.saved_as = archive.root
                self._storages, self._swapped = archive.storages, archive.big_endian
                contents = self._contents(archive, {} if alike is None else alike, equal)
            if file_bytes.is_remote:
                self._bytes = file_bytes
            self.tree = contents.tree
            self._tensors, self._infos = contents.tensors, contents.infos
            self.unknown = frozenset(contents.unknown)
            is_coded = may_be_coded and isinstance(self.tree, CodedState)
            if contents.refused and not lenient and not is_coded:
                raise cannot_be_read(contents.refused)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._infos

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its array: what lies in one run straight from the file."""
        self.read_summed(key, boxes, outs, self._watching.get(self._tensors[key].storage, ()))

    def read_summed(
        self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray], tallies: Sequence[Tally]
    ) -> None:
        """The same, where tallies of the tensor's storage see all bytes that are read."""
        tensor = self._tensors[key]
        self._check_boxes(key, boxes)
        buffers: list[np.ndarray] = []
        for box, out in zip(boxes, outs, strict=True):
            is_as_stored = out.dtype == tensor.dtype and not self._swapped
            buffers.append(out if is_as_stored else np.empty(box.shape, tensor.dtype))
        with self._naming_file():
            stored, start = self._storage_bytes(self._storages[tensor.storage])
            stored = Summed(stored, tallies) if tallies else stored
            start += tensor.offset * tensor.dtype.itemsize
            read_strided(stored, start, tensor.strides, boxes, buffers)
        for buffer, out in zip(buffers, outs, strict=True):
            if buffer is not out:
                out[...] = _swapped(buffer) if self._swapped else buffer

    def _check_boxes(self, key: str, boxes: Sequence[Box]) -> None:
        shape = self._tensors[key].shape
        whole = Box.whole(shape)
        for box in boxes:
            if len(box.start) != len(shape) or not box.within(whole):
                raise ValueError(f"{self.path}: box {box} does not lie in {key!r} of shape {shape}")

    def _storage_bytes(self, member: Member) -> tuple[ByteRange, int]:
        """Bytes, and where in them the storage begins."""
        if member.deflated:
            return MemoryRange(member_bytes(self._bytes, member)), 0
        return self._bytes, member.offset

    def checks(self, extent: Extent) -> Iterator[Check]:
        """For each storage that has a CRC in the zip directory, whether its bytes have that."""
        tensors: dict[str, list[str]] = {}
        for key, tensor in self._tensors.items():
            tensors.setdefault(tensor.storage, []).append(key)
        for key, member in self._storages.items():
            is_wanted = extent == "full" or member.size <= SAMPLE_BYTES
            if not is_wanted or not _summed(member):
                continue
            about = f"{self.path.name}: storage {key}", frozenset(tensors.get(key, ()))
            if extent == "sample":
                yield Check(*about, member.size, partial(self.fault, key))
                continue
            summing = _Summing(self, key)
            yield Check(*about, member.size, summing.fault, summing)

    def tally(
        self, storage: str, alarm: Alarm = lambda: None, note: Note = lambda part: None
    ) -> Tally | None:
        """The sum of a storage's bytes, of which nothing is seen yet; None where no CRC is recorded
        that could be compared.
        """
        member = self._storages[storage]
        end = member.offset + member.size
        return Tally(member.offset, end, member.crc, alarm, note) if _summed(member) else None

    @contextmanager
    def watch(self, storage: str, tally: Tally) -> Iterator[None]:
        """While this lasts, a tally sees what is read of a storage."""
        self._watching[storage] = [*self._watching.get(storage, ()), tally]
        try:
            yield
        finally:
            left = [other for other in self._watching.pop(storage) if other is not tally]
            if left:
                self._watching[storage] = left

    def checksums(self) -> tuple[tuple[int, int], ...]:
        """The size and the CRC of every storage in order, as the zip directory has them; () where
        one with bytes has no CRC.
        """
        members = list(self._storages.values())
        summed = all(member.crc for member in members if member.size)
        return tuple((member.size, member.crc) for member in members) if summed else ()

    def fault(self, storage: str, tally: Tally | None = None) -> str | None:
        """What is wrong with the bytes of a storage, by the CRC of the zip directory, if that
        has one. Reads what a tally has not seen.
        """
        tally = tally or self.tally(storage)
        if tally is None:
            return None
        for start, stop in tally.gaps():
            self._tally_rest(tally, start, stop)
        if tally.agrees():
            return None
        return (
            f"{self.path}: the bytes of storage {storage} do not have the CRC that the file records"
            " for them"
        )

    def _tally_rest(self, tally: Tally, start: int, stop: int) -> None:
        room = np.empty(min(VERIFY_BYTES, stop - start), np.uint8)
        with self._naming_file():
            for at in range(start, stop, VERIFY_BYTES):
                Summed(self._bytes, [tally]).read_into([(at, room[: stop - at])])

    def _contents(
        self,
        archive: _Archive,
        alike: dict[Hashable, StoredTensor],
        equal: dict[Hashable, TreeContents] | None,
    ) -> TreeContents:
        """The object of data.pkl. That of an equal file is taken, unless it has an object of a
        class that is not known, which names its file.
        """
        if equal is None:
            return TreeContents(self._loaded(archive, alike), self.path)
        sizes = tuple([(key, member.size) for key, member in archive.storages.items()])
        made_from = sha256(archive.pickled).digest(), archive.pickled_size, sizes
        if made_from not in equal:
            contents = TreeContents(self._unpickled(archive), self.path)
            if contents.unknown:
                return contents
            equal[made_from] = contents
        return equal[made_from]

    def _loaded(self, archive: _Archive, alike: dict[Hashable, StoredTensor]) -> object:
        """The object of data.pkl: it depends on the bytes, on what the file spends on them, and
        on storages' sizes.
        """
        if len(archive.pickled) > ALIKE_BYTES:
            return self._unpickled(archive)
        sizes = tuple((key, member.size) for key, member in archive.storages.items())
        made_from = archive.pickled, archive.pickled_size, sizes
        if made_from in alike:
            return alike[made_from]
        tree = self._unpickled(archive)
        if isinstance(tree, StoredTensor) and len(alike) < ALIKE_KEPT:
            alike[made_from] = tree
        return tree

    def _unpickled(self, archive: _Archive) -> object:
        return safe_pickle.load(archive.pickled, NAMES, self._storage, archive.pickled_size)

    def _storage(self, persistent_id: object) -> Storage:
        """The storage that a persistent id names: ('storage', class, key, location, number of
        elements).
        """
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
        """Errors of a file that only stands for another, or of a link that leads nowhere, say
        so.
        """
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

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            raise type(error)(f"{self.path}: {error}") from error


class _Summing:
    """The CRC of a storage, of what others read and of the rest."""

    def __init__(self, file: TorchFile, storage: str):
        self.name = f"CRC of storage {storage} of {file.path}"
        self._file, self._storage = file, storage
        self._tally: Tally | None = None

    @contextmanager
    def watch(self, alarm: Alarm, note: Note) -> Iterator[None]:
        self._tally = self._file.tally(self._storage, alarm, note)
        assert self._tally is not None, "there are checks of storages with a CRC only"
        with self._file.watch(self._storage, self._tally):
            yield

    def add(self, seen: Iterable[Part]) -> None:
        if self._tally:
            self._tally.join(seen)

    def fault(self) -> str | None:
        return self._file.fault(self._storage, self._tally)


def _summed(member: Member) -> bool:
    """Whether it has a CRC that no read compares: what is deflated is compared whenever it is
    inflated.
    """
    return bool(member.crc) and not member.deflated


_EMPTY = Member("", offset=0, size=0, stored_size=0, crc=0, deflated=False)


@dataclass(frozen=True, slots=True)
class _Archive:
    """A zip file of torch.save: its root folder; the members that hold storages, by storage key;
    the bytes of data.pkl, and how many the file spends on them; whether storages are big-endian.
    """

    root: str
    storages: Mapping[str, Member]
    pickled: bytes
    pickled_size: int
    big_endian: bool


def _archive(file: ByteRange) -> _Archive:
    members = zip_members(file)
    root = _root(members)
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
            key = sys.intern(name.removeprefix(prefix))
            storages[key] = member if member.size or member.deflated else _EMPTY
    pickled = members[f"{root}/data.pkl"]
    max_bytes = MAX_INFLATED_PICKLE_BYTES if pickled.deflated else MAX_PICKLE_BYTES
    data = member_bytes(file, pickled, max_bytes)
    return _Archive(root, storages, data, pickled.stored_size, order == b"big")


def _root(members: Iterable[str]) -> str:
    """The folder of the zip file in which everything lies."""
    roots = [name.partition("/")[0] for name in members if name.partition("/")[2] == "data.pkl"]
    if len(roots) != 1:
        raise FormatError(
            f"a zip file with {len(roots)} members <root>/data.pkl; a file of torch.save has one"
        )
    return roots[0]


def _swapped(array: np.ndarray) -> np.ndarray:
    """A big-endian array in this machine's order. The halves of a complex number are swapped one by
    one.
    """
    parts = 2 if array.dtype.kind == "c" else 1
    unit = f"u{array.dtype.itemsize // parts}"
    return array.view(unit).byteswap().view(array.dtype).reshape(array.shape)


def cannot_be_read(reasons: Mapping[str, str]) -> FormatError:
    """The error for tensors that cannot be read, by their paths."""
    faults = [f"{path!r}: {reason}" for path, reason in reasons.items()]
    return FormatError(f"tensors that cannot be read:\n  {fault_lines(faults, REASONS_SHOWN)}")


class TreeContents:
    """What the tree of a file has: every tensor by its key, which is set here, where the path to it
    is known; the names that are in no list; and why other tensors cannot be read, by path.
    """

    def __init__(self, tree: object, file: FilePath):
        self.tree = tree
        self.tensors: dict[str, StoredTensor] = {}
        self.unknown: set[str] = set()
        self.refused: dict[str, str] = {}
        self._keyed: set[StoredTensor] = set()
        self._repeats: Counter[str] = Counter()
        for labels, node in safe_pickle.walk(tree):
            if isinstance(node, StoredTensor):
                self._add_tensor(labels, node)
            elif reason := unreadable(node):
                self._add_refused(labels, reason)
            if isinstance(node, Opaque):
                self.unknown.add(node.type)
                node.where = node.where or f"{file}: {_path(labels) or 'what it holds'}"
            elif isinstance(node, Unknown):
                self.unknown.add(node.name)

        self.infos = {
            key: ArrayInfo(tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()
        }

    def _add_tensor(self, labels: tuple[str, ...], tensor: StoredTensor) -> None:
        if tensor in self._keyed:
            return
        path = key = _path(labels)
        while key in self.tensors:
            self._repeats[path] += 1
            key = f"{path}#{self._repeats[path] + 1}"
        object.__setattr__(tensor, "key", key)
        self._keyed.add(tensor)
        self.tensors[key] = tensor

    def _add_refused(self, labels: tuple[str, ...], reason: str) -> None:
        if _path(labels[:-1]) not in self.refused:
            self.refused[_path(labels)] = reason


def _path(labels: tuple[str, ...]) -> str:
    path = "/".join(labels)
    return path if len(path) <= MAX_PATH else "..." + path[3 - MAX_PATH :]
