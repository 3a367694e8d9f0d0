"""Files to be written, decided byte by byte before any byte moves, and the writing of them.

A file consists of literal bytes and arrays of the checkpoint, each at its offset. Bytes that depend
on arrays, such as the CRCs in a zip directory, are written after them.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jax_ucp.arrays.budget import batches, threads
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.digests import CHECKSUMS
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource
from jax_ucp.errors import CorruptData
from jax_ucp.files.crc import SummedBytes, combined, crc32, crc_of
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files
from jax_ucp.jobs.ledger import WRITER_FILE, Blocks, Written, is_control_file
from jax_ucp.jobs.run import AnyBlock, Target
from jax_ucp.jobs.work import TASK_BOXES, TASK_BYTES, OpenedJob
from jax_ucp.layout.blocks import OUTER_BYTES, SMALL_BYTES, grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.universal.copy import COPIES_IN_FLIGHT, block_cost
from jax_ucp.universal.metadata import digest

Bytes = tuple[int, bytes]
Tail = Callable[[Sequence[int]], Sequence[Bytes]]

_READ_BYTES = 1 << 20


def no_progress(nbytes: int) -> None:
    """The default progress callback: does nothing."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as a target stores it: `key` names it in the source, `dtype` is the target's.

    `stored` is its shape in the target, if that is another than the array's.
    """

    key: str
    shape: Shape
    dtype: np.dtype
    stored: Shape | None = None

    @property
    def target_shape(self) -> Shape:
        return self.shape if self.stored is None else self.stored

    @property
    def size(self) -> int:
        return Box.whole(self.shape).size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Section:
    """A run of a file; `tail` computes its last parts from the CRC-32 of each tensor."""

    tensors: Sequence[tuple[int, Tensor]] = ()
    literals: Sequence[Bytes] = ()
    tail: Tail | None = None

    def rest(self, crcs: Sequence[int]) -> Sequence[Bytes]:
        return [*self.literals, *(self.tail(crcs) if self.tail else ())]


@dataclass(frozen=True)
class File:
    """A file of sections that follow one another; bytes that no section has are zero.

    On a disk, bytes of tensors are written first: a file begun and not completed has no header, or
    no directory, and is not taken for a file of its format.
    """

    name: str
    size: int
    sections: Sequence[Section]

    @classmethod
    def literal(cls, name: str, data: bytes) -> File:
        return cls(name, len(data), [Section(literals=[(0, data)])])

    @cached_property
    def tensors(self) -> Sequence[tuple[int, Tensor]]:
        return list(itertools.chain.from_iterable(section.tensors for section in self.sections))


@dataclass(frozen=True)
class BlockRun:
    """Blocks that follow one another in `file` from `at` on; each takes at most `cost` bytes."""

    file: str
    number: tuple[int, int]  # which tensor of which file
    at: int
    tensor: Tensor
    boxes: Sequence[Box]
    cost: int

    @property
    def keys(self) -> tuple[str]:
        return (self.tensor.key,)

    @property
    def nbytes(self) -> int:
        return sum(box.size for box in self.boxes) * self.tensor.dtype.itemsize

    @property
    def place(self) -> tuple[str, Box]:
        return self.file, Box((self.at,), (self.at + self.nbytes,))


@dataclass(frozen=True)
class TensorTask:
    """A run for a file of `folder`; others may write other bytes of it if `is_shared`."""

    folder: str
    block: BlockRun
    noted: tuple[Written | None, ...]
    is_shared: bool

    @property
    def blocks(self) -> tuple[BlockRun]:
        return (self.block,)

    @property
    def cost(self) -> int:
        return self.block.cost

    def run(self, opened: OpenedJob) -> list[Written]:
        """The CRC-32 of the blocks, written unless the file has them, durably if shared."""
        part, [noted] = self.block, self.noted
        path = Path(self.folder, part.file)
        if noted is not None and as_written(_crc_of(path, part.at, part.nbytes)) == noted:
            return [noted]
        proofs, crc = opened.proofs, 0
        # NFS writes whole pages, with what other machines had written to them before, unless the
        # file is open for writing only and each write waits. Source: Linux, `fs/nfs/file.c`,
        # `nfs_want_read_modify_write`, and `write.c`, `nfs_can_extend_write`.
        flags = os.O_WRONLY | (os.O_DSYNC if self.is_shared else 0)
        with open(os.open(path, flags), "wb", buffering=0) as out:
            out.seek(part.at)
            for box in part.boxes:
                raw = block_bytes(opened.contents.arrays, part.tensor, box)
                proofs.require_sound_so_far()
                crc = crc32(raw, crc)
                while raw:
                    raw = raw[out.write(raw) :]
        return [as_written(crc)]


def as_written(crc: int) -> Written:
    """The ledger's record of a run: the CRC-32 of its bytes, in hex."""
    return Written(f"{crc:08x}")


def _crc_of(path: Path, start: int, nbytes: int) -> int:
    """The CRC-32 of `nbytes` bytes of a file from `start` on, or of as many as it has."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(start)
        while data := file.read(min(nbytes, _READ_BYTES)):
            crc = crc32(data, crc)
            nbytes -= len(data)
    return crc


def plan_runs(files: Sequence[File], source: ArraySource, budget_bytes: int) -> Iterator[BlockRun]:
    """The runs in which the tensors of all files are written, in the order of the files."""
    infos = source.arrays()
    for f, file in enumerate(files):
        for t, (at, tensor) in enumerate(file.tensors):
            boxes, cost = blocks_of(tensor, infos[tensor.key], budget_bytes)
            for together in _together(boxes, tensor, infos[tensor.key]):
                yield (run := BlockRun(file.name, (f, t), at, tensor, together, cost))
                at += run.nbytes


def _together(boxes: Sequence[Box], tensor: Tensor, info: ArrayInfo) -> Iterator[Sequence[Box]]:
    """The boxes in batches for tasks; one batch if two may be of one stored chunk."""
    chunk = info.chunk or (1,) * len(tensor.shape)
    if not all(a % c == 0 for box in boxes for a, c in zip(box.start, chunk, strict=True)):
        yield boxes
        return
    size = tensor.dtype.itemsize
    yield from batches(boxes, lambda box: box.size * size, TASK_BYTES, TASK_BOXES)


def complete_files(
    folder: Path, files: Sequence[File], runs: Sequence[BlockRun], written: Blocks
) -> dict[str, int]:
    """The CRC-32 of each file, all bytes but tensors' of which are written here, durably. Raises
    CorruptData if a run was not written.
    """
    parts: dict[tuple[int, int], list[SummedBytes]] = defaultdict(list)
    for run in runs:
        name, box = run.place
        record = written.get(name, {}).get(str(box))
        if record is None:
            raise CorruptData(f"{folder / name}: bytes {box} were not written")
        parts[run.number].append(SummedBytes(run.at, run.at + run.nbytes, int(record.digest, 16)))
    crcs_of_files: dict[str, int] = {}
    for f, file in enumerate(files):
        numbers = itertools.count()
        summed = [part for t in range(len(file.tensors)) for part in parts[f, t]]
        with open(folder / file.name, "r+b") as out:
            for section in file.sections:
                crcs = [crc_of(sorted(parts[f, next(numbers)])) for _ in section.tensors]
                for at, data in section.rest(crcs):
                    out.seek(at)
                    out.write(data)
                    summed.append(SummedBytes(at, at + len(data), crc32(data)))
            out.flush()
            os.fsync(out.fileno())
        crc = end = 0
        for part in sorted([*summed, SummedBytes(file.size, file.size, 0)]):
            crc = crc32(bytes(part.start - end), crc)  # all bytes between parts are zero
            crc, end = combined(crc, part.crc, part.stop - part.start), part.stop
        crcs_of_files[file.name] = crc
    return crcs_of_files


def create(path: Path, size: int, is_shared: bool = False) -> None:
    """Make a file of `size` zeros; if `is_shared` it may exist, with bytes of others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "ab" if is_shared else "xb") as out:
            out.truncate(size)
    except FileExistsError:
        raise FileExistsError(
            f"{path} is there already, though nothing was: the file system takes the names of two"
            " files for one, as where upper and lower case are the same, or something else writes"
            " there. Export to another place"
        ) from None


def check_free(target: FilePath) -> None:
    """Raise FileExistsError unless `target` is free or empty but for `ucp.writer.json`."""
    is_empty = not any(child.name != WRITER_FILE for child in target.children())
    if target.link() is not None or (target.exists() and not (target.is_dir() and is_empty)):
        raise FileExistsError(f"{target} is in use; give another path")


def require_written(folder: Files, files: Sequence[File]) -> None:
    """Raise CorruptData unless the folder has these files, and control files of the job only."""
    names = {CHECKSUMS, *(file.name for file in files)}
    others = [file.name for file in folder.walk() if file.name not in names]
    strange = itertools.filterfalse(is_control_file, others)
    faults = [*lost(folder, files), *(f"{name} is not a file of this export" for name in strange)]
    if faults:
        raise CorruptData(
            f"{folder} is not as this export wrote it:",
            faults,
            remedy="Something else deletes or writes files there: keep it away while an export is"
            " running, and export again.",
        )


def require_whole(folder: Files, files: Sequence[File]) -> None:
    """Raise CorruptData if the folder, which this export made, has lost files since."""
    if faults := lost(folder, files):
        raise CorruptData(
            f"{folder} was made by this export, and is not whole any more:",
            faults,
            remedy="Delete it, and run all shares again.",
        )


class ExportTarget(Target[AnyBlock]):
    """Files in a new folder; `on_bytes` is called with numbers of tensor bytes that are written."""

    def __init__(
        self,
        contents: Contents,
        files: Sequence[File],
        budget_bytes: int,
        path: FilePath,
        on_bytes: Callable[[int], None] = no_progress,
    ):
        self.contents, self.path = contents, path
        self.again = f"Nothing is at {path}: export again, with a new executor."
        self._files, self._budget, self._on_bytes = files, budget_bytes, on_bytes

    def identity(self) -> str:
        """A digest of source, files and blocks, on which all processes of an export agree."""
        planned = [
            (file.name, file.size, section.tensors, section.literals)
            for file in self._files
            for section in file.sections
        ]
        places = [block.place for group in self.groups(1) for block in group]
        return digest(repr((self.contents.identity(), planned, places)).encode())

    def progress(self, block: AnyBlock, is_found: bool) -> None:
        self._on_bytes(block.nbytes)


def lost(folder: Files, files: Sequence[File]) -> list[str]:
    """A line for each file that is missing or has another size."""
    faults: list[str] = []
    for file, info in zip(files, stat_all(folder, [file.name for file in files]), strict=True):
        if info is None or info.kind != "file":
            faults.append(f"{file.name} is missing")
        elif info.size != file.size:
            faults.append(
                f"{file.name} has {info.size} bytes, not the {file.size} that were written"
            )
    return faults


def peak_bytes(files: Sequence[File], source: ArraySource, budget_bytes: int) -> int:
    """The most memory that blocks in flight can take, in bytes."""
    infos = source.arrays()
    tensors = (tensor for file in files for _, tensor in file.tensors)
    costs = sorted((blocks_of(t, infos[t.key], budget_bytes)[1] for t in tensors), reverse=True)
    return min(sum(costs[: threads()]), max(budget_bytes, *costs[:1], 0))


def blocks_of(tensor: Tensor, info: ArrayInfo, budget_bytes: int) -> tuple[Sequence[Box], int]:
    """The blocks in which a tensor is written, and the bytes of memory that the largest takes."""
    size = max(info.dtype.itemsize, tensor.dtype.itemsize)
    max_bytes = max(SMALL_BYTES, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    boxes = list(row_major_boxes(tensor.shape, info.chunk, size, max_bytes))
    return boxes, max((block_cost(box, info.chunk or (), size) for box in boxes), default=0)


def block_bytes(source: ArraySource, tensor: Tensor, box: Box) -> memoryview:
    data = source.read(tensor.key, box).astype(tensor.dtype, copy=False)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def row_major_boxes(
    shape: Shape, chunk: Shape | None, itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Blocks in the row-major order of the array's elements, each of at most `max_bytes`.

    If possible they are made of whole stored chunks, so that no chunk is read twice.

    >>> [str(box) for box in row_major_boxes((4, 6), None, 1, 12)]
    ['[0:2, 0:6]', '[2:4, 0:6]']
    >>> [str(box) for box in row_major_boxes((2, 6), None, 1, 4)]
    ['[0:1, 0:4]', '[0:1, 4:6]', '[1:2, 0:4]', '[1:2, 4:6]']
    """
    block = rows_of_chunks(shape, chunk or (1,) * len(shape), itemsize, max_bytes)
    # A block is contiguous if it has length 1 on every axis before the last one that is cut.
    cut = [axis for axis, (n, b) in enumerate(zip(shape, block, strict=True)) if b < n]
    if cut and any(b > 1 for b in block[: cut[-1]]):
        block = rows_of_chunks(shape, (1,) * len(shape), itemsize, max_bytes)
    return grid_boxes(shape, block)
