"""The items of a DCP checkpoint as arrays: each chunk is a torch.save file of one tensor inside
a `.distcp` file.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.crc import Part, Tally
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo
from jax_ucp.formats.dcp.metadata import (
    Chunk,
    DcpMetadata,
    Span,
    TensorEntry,
    of_another_serialisation,
    too_short,
)
from jax_ucp.formats.torch_save.coded_states import CodedState
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.formats.torch_save.unpickle import what_is
from jax_ucp.formats.zstd import inflate
from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import SAMPLE_BYTES, Alarm, Check, Extent, Note
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.protocol import ArrayInfo, ArraySource

ZSTD = "stream.zstd/1"
KEPT_FILES = 1024
KEPT_BYTES = 1 << 28
MAX_OBJECT_BYTES = 1 << 28
# What a torch.save file of one tensor has besides its elements: a few members, aligned to 64 bytes
# or to a page.
_OVERHEAD = 1 << 20


class DcpSource(ArraySource):
    """An ArraySource of the chunks of a DCP checkpoint: `file:fqn@byte`, read from the items
    themselves.

    An item is opened when it is first read, and must hold one tensor of the dtype and sizes of its
    chunk. Items do not say their own names: of two files in which all items have equal sizes,
    nothing tells that they were exchanged. A compressed item is inflated whole.
    """

    def __init__(self, metadata: DcpMetadata):
        self.folder = metadata.folder
        self._tensors = metadata.tensors
        self._paths = {
            name: metadata.folder / name for name in {span.file for _, span in metadata.spans()}
        }
        self._chunks: dict[str, tuple[TensorEntry, Chunk]] = {
            chunk_key(fqn, chunk): (tensor, chunk)
            for fqn, tensor in metadata.tensors.items()
            for chunk in tensor.chunks
        }
        # Too short for their tensors: they must be codes of torchao's optimizers.
        self.coded = {chunk_key(fqn, chunk) for fqn, chunk in metadata.short}
        self._files: OrderedDict[Span, TorchFile] = OrderedDict()
        self._opened_files: dict[str, FileInfo] = {}
        self._alike: dict[Hashable, StoredTensor] = {}
        self._watching: dict[str, list[_Summing]] = {}
        self._inflated = 0
        self._lock = Lock()
        self._require_coded(metadata.short)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {
            key: ArrayInfo(
                chunk.sizes,
                tensor.dtype,
                chunk.sizes if chunk.span.transforms or key in self.coded else None,
            )
            for key, (tensor, chunk) in self._chunks.items()
        }

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        file, stored = self._checked(key)
        if isinstance(stored, CodedState):
            values = _values(file, stored)
            for box, out in zip(boxes, outs, strict=True):
                out[...] = values[box.index]
            return
        with self._lock:
            sums = [summing.tally(file, stored) for summing in self._watching.get(key, ())]
        file.read_summed(stored.key, boxes, outs, [tally for tally in sums if tally])

    def checks(self, extent: Extent) -> Iterator[Check]:
        """For each tensor, whether its items are the tensor declared, and their bytes have the
        CRC that they record.
        """
        for fqn, tensor in self._tensors.items():
            nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            if extent == "full" or nbytes <= SAMPLE_BYTES:
                keys = [chunk_key(fqn, chunk) for chunk in tensor.chunks]
                sums = _Sums(fqn, self, {key: _Summing(key) for key in keys})
                yield Check(
                    fqn, frozenset(keys), nbytes, partial(self._first_fault, sums.by_chunk), sums
                )

    @contextmanager
    def watch(self, sums: Mapping[str, _Summing], alarm: Alarm, note: Note) -> Iterator[None]:
        """While this lasts, chunks are summed when they are read, whether or not their item stays
        open.
        """
        for key, summing in sums.items():
            summing.alarm, summing.note = alarm, note
            self._watching[key] = [*self._watching.get(key, ()), summing]
        try:
            yield
        finally:
            for key, summing in sums.items():
                self._watching[key] = [s for s in self._watching[key] if s is not summing]

    def _first_fault(self, sums: Mapping[str, _Summing]) -> str | None:
        faults = (self._fault(key, summing.seen) for key, summing in sums.items())
        return next(filter(None, faults), None)

    def _fault(self, key: str, tally: Tally | None) -> str | None:
        if tally is not None and tally.agrees():
            return None
        try:
            file, stored = self._checked(key)
            if isinstance(stored, CodedState):
                faults = (file.fault(part.storage) for part in stored.parts.values())
                return next(filter(None, faults), None)
            return file.fault(stored.storage, tally)
        except FormatError as error:
            return str(error)

    def _require_coded(self, short: Sequence[tuple[str, Chunk]]) -> None:
        """Raise CorruptData where an item is shorter than its tensor, and not codes of it."""
        for fqn, chunk in short:
            try:
                is_coded = isinstance(self._checked(chunk_key(fqn, chunk))[1], CodedState)
            except CorruptData:
                is_coded = False
            if not is_coded:
                raise too_short(self.folder, fqn, self._tensors[fqn].dtype, chunk)

    def _checked(self, key: str) -> tuple[TorchFile, StoredTensor | CodedState]:
        tensor, chunk = self._chunks[key]
        file = self._open(
            chunk.span, Box.whole(chunk.sizes).size * tensor.dtype.itemsize + _OVERHEAD, key
        )
        stored = file.tree
        if not isinstance(stored, StoredTensor | CodedState):
            raise FormatError(f"{self.folder}/{key} should be a tensor, but is {what_is(stored)}")
        if (stored.shape, stored.dtype) != (chunk.sizes, tensor.dtype):
            raise CorruptData(
                f"{self.folder}/{key} should be {tensor.dtype} {list(chunk.sizes)}, but is"
                f" {stored.dtype} {list(stored.shape)}: the file belongs to another save, or the"
                " metadata is damaged"
            )
        return file, stored

    def object(self, fqn: str, span: Span) -> TorchFile:
        """The torch.save file of an object that is no tensor; `span` is where it lies."""
        return self._open(span, MAX_OBJECT_BYTES, f"{span.file}:{fqn}@{span.offset}")

    def open_ahead(self, spans: Iterable[Span]) -> None:
        """Open objects that are wanted next, many at once where they lie behind a network."""

        def attempt(span: Span) -> None:
            with suppress(FormatError, OSError):  # which whoever wants it is told
                self._open(span, MAX_OBJECT_BYTES, span.file)

        if self.folder.files.is_remote:
            each_file(self.folder.files, attempt, itertools.islice(spans, KEPT_FILES))

    def _open(self, span: Span, max_bytes: int, key: str) -> TorchFile:
        with self._lock:
            file = self._files.get(span)
        if file is not None:
            return file
        try:
            file = self._opened(span, max_bytes)
        except FormatError as error:
            if why := of_another_serialisation(self._paths[span.file]):
                raise FormatError(why) from error
            raise type(error)(
                f"{error} (while reading {key}; the file may be of another rank or save)"
            ) from error
        with self._lock:
            return self._keep(span, file)

    def _keep(self, span: Span, file: TorchFile) -> TorchFile:
        """Keep an opened item, or take the one that another thread has opened meanwhile."""
        if span in self._files:
            return self._files[span]
        self._inflated += file.in_memory
        self._files[span] = file
        while len(self._files) > KEPT_FILES or (
            self._inflated > KEPT_BYTES and len(self._files) > 1
        ):
            self._inflated -= self._files.popitem(last=False)[1].in_memory
        return file

    def _opened(self, span: Span, max_bytes: int) -> TorchFile:
        path = self._paths[span.file]
        if not span.transforms:
            if span.file not in self._opened_files:
                self._opened_files[span.file] = path.file()
            return TorchFile(
                path,
                offset=span.offset,
                length=span.length,
                file=self._opened_files[span.file],
                alike=self._alike,
                may_be_coded=True,
            )
        if span.transforms != (ZSTD,):
            raise FormatError(
                f"{path}: an item was written through {list(span.transforms)}; only {ZSTD!r} is"
                " read"
            )
        data = _inflated(path, span, max_bytes)
        return TorchFile(path, data=data, alike=self._alike, may_be_coded=True)


def _values(file: TorchFile, state: CodedState) -> np.ndarray:
    """What the codes of an item stand for, all of them."""
    parts = {name: file.read(part.key, Box.whole(part.shape)) for name, part in state.parts.items()}
    return state.values(parts)


@dataclass
class _Summing:
    """The CRC of a chunk that others read: what they saw of it, once they have opened its item."""

    key: str
    alarm: Alarm = lambda: None
    note: Note = lambda seen: None
    seen: Tally | None = None

    def tally(self, file: TorchFile, stored: StoredTensor) -> Tally | None:
        self.seen = self.seen or file.tally(stored.storage, self.alarm, self._summed)
        return self.seen

    def _summed(self, part: Part) -> None:
        assert self.seen is not None, "what sums is what was made here"
        self.note((self.key, self.seen.start, self.seen.stop, self.seen.crc, part))

    def join(self, start: int, stop: int, crc: int, part: Part) -> None:
        """Take over what was seen of the chunk in another process, which had opened its item."""
        self.seen = self.seen or Tally(start, stop, crc, self.alarm)
        self.seen.join([part])


@dataclass(frozen=True)
class _Sums:
    """The CRCs of the chunks of a tensor."""

    name: str
    source: DcpSource
    by_chunk: Mapping[str, _Summing]

    def watch(self, alarm: Alarm, note: Note) -> AbstractContextManager[None]:
        return self.source.watch(self.by_chunk, alarm, note)

    def add(self, seen: Iterable[tuple[str, int, int, int, Part]]) -> None:
        for key, start, stop, crc, part in seen:
            self.by_chunk[key].join(start, stop, crc, part)


def _inflated(path: FilePath, span: Span, max_bytes: int) -> bytes:
    data = path.read_range(span.offset, span.offset + span.length)
    try:
        return inflate(data, max_bytes)
    except FormatError as error:
        raise type(error)(
            f"{path}: the item of {span.length} bytes at {span.offset}: {error}"
        ) from error


def chunk_key(fqn: str, chunk: Chunk) -> str:
    return f"{chunk.span.file}:{fqn}@{chunk.span.offset}"


def consolidated(fqn: str, tensor: TensorEntry) -> Consolidated:
    """A tensor of the checkpoint as a parameter over a DcpSource."""
    return Consolidated(tensor.layout(), [chunk_key(fqn, chunk) for chunk in tensor.chunks])
