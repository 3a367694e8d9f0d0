"""The items of a DCP checkpoint as arrays: torch.save files of one tensor in `.distcp` files."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np

from jax_ucp.arrays.extents import ExtentTable, Region, StoredArray, StoredFile, SummedArrays
from jax_ucp.arrays.protocol import ArrayInfo, Piece
from jax_ucp.codecs.coded_states import CodedState
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile, TreeContents
from jax_ucp.codecs.unpickle import what_is
from jax_ucp.codecs.zstd import inflate
from jax_ucp.errors import CorruptData, FormatError, naming
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
from jax_ucp.layout.box import Box

ZSTD = "stream.zstd/1"
KEPT_FILES = 1024
KEPT_BYTES = 1 << 28
MAX_OBJECT_BYTES = 1 << 28
# What a torch.save file of one tensor has besides its elements: a few members, aligned to 64 bytes
# or to a page.
_OVERHEAD = 1 << 20


class DcpSource(ExtentTable):
    """The table of the chunks of a DCP checkpoint, `file:fqn@byte`, read from the items.

    An item is opened when it is first read, and must hold one tensor of the dtype and sizes of its
    chunk. It does not say its name: of two files with items of equal sizes, nothing tells that they
    were exchanged. A compressed item is inflated whole.
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
        self._equal: dict[Hashable, TreeContents] = {}
        self._inflated = 0
        self._lock = Lock()
        super().__init__(
            {
                key: ArrayInfo(
                    chunk.sizes,
                    tensor.dtype,
                    chunk.sizes if chunk.span.transforms or key in self.coded else None,
                )
                for key, (tensor, chunk) in self._chunks.items()
            }
        )
        # an item that is shorter than its tensor must be codes of it
        for fqn, chunk in metadata.short:
            try:
                is_coded = isinstance(self._checked(chunk_key(fqn, chunk))[1], CodedState)
            except CorruptData:
                is_coded = False
            if not is_coded:
                raise too_short(self.folder, fqn, self._tensors[fqn].dtype, chunk)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_files": OrderedDict(), "_equal": {}, "_inflated": 0, "_lock": None}
        return {**vars(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def stored(self, key: str) -> StoredArray | np.ndarray:
        """The place where a chunk is stored; of codes, all the values that they stand for."""
        file, item = self._checked(key)
        if isinstance(item, CodedState):
            return item.values({name: file.tensor(part) for name, part in item.parts.items()})
        return file.stored(item.key)._replace(place=key)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        span = self._chunks[key][1].span
        yield Piece(span.file, key.removeprefix(f"{span.file}:"), box, box)

    def sums(self) -> Iterator[SummedArrays]:
        """The items of each tensor, of which reads check dtype, sizes and CRC."""
        for fqn, tensor in self._tensors.items():
            nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            keys = [chunk_key(fqn, chunk) for chunk in tensor.chunks]
            yield SummedArrays(fqn, nbytes, keys, keys)

    def regions(self, place: str) -> Sequence[tuple[StoredFile, Region]]:
        file, item = self._checked(place)
        parts = item.parts.values() if isinstance(item, CodedState) else [item]
        return [region for part in parts for region in file.regions(part.storage)]

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
        """Open objects that are needed next, many at once if the files are behind a network."""

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
            error.at(item=f"{key} (whose file may be of another rank or save)")
            raise
        with self._lock:
            if span in self._files:  # another thread has opened it meanwhile
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
                equal=self._equal,
                may_be_coded=True,
            )
        if span.transforms != (ZSTD,):
            raise FormatError(
                f"{path}: an item was written through {list(span.transforms)}; only {ZSTD!r} is"
                " read"
            )
        data = _inflated(path, span, max_bytes)
        return TorchFile(path, data=data, equal=self._equal, may_be_coded=True)


def _inflated(path: FilePath, span: Span, max_bytes: int) -> bytes:
    data = path.read_range(span.offset, span.offset + span.length)
    with naming(path, f"the item of {span.length} bytes at {span.offset}"):
        return inflate(data, max_bytes)


def chunk_key(fqn: str, chunk: Chunk) -> str:
    return f"{chunk.span.file}:{fqn}@{chunk.span.offset}"
