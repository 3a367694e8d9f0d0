"""Files to be written, decided byte by byte before any byte moves, and the writing of them.

A file is literal bytes and arrays of the checkpoint, each at its offset. Arrays are written block
by block within a budget; what depends on their bytes, such as the CRCs in a zip directory, comes
after them.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jax_ucp.errors import CorruptData, fault_lines
from jax_ucp.files.crc import Part, crc_of
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.protocol import Files
from jax_ucp.layout.blocks import OUTER_BYTES, SMALL_BYTES, grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sources.budget import batches, threads
from jax_ucp.sources.protocol import ArrayInfo, ArraySource
from jax_ucp.sources.work import TASK_BOXES, TASK_BYTES, Coordinator, Job, OpenedJob
from jax_ucp.universal.copy import COPIES_IN_FLIGHT, block_cost

Bytes = tuple[int, bytes]
Tail = Callable[[Sequence[int]], Sequence[Bytes]]

FAULTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as a target stores it: `key` is its name in the source, `dtype` what it becomes.

    `flat` is for targets that store it with one axis; `shape` is that of the array all the same.
    """

    key: str
    shape: Shape
    dtype: np.dtype
    flat: bool = False

    @property
    def size(self) -> int:
        return Box.whole(self.shape).size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Section:
    """A run of a file: `tensors` and `literals` at their offsets in the file; `tail`, if there is
    one, computes the rest from the CRC-32 of each tensor.
    """

    tensors: Sequence[tuple[int, Tensor]] = ()
    literals: Sequence[Bytes] = ()
    tail: Tail | None = None

    def rest(self, crcs: Sequence[int]) -> Sequence[Bytes]:
        """All but the tensors, whose CRC-32 are given."""
        return [*self.literals, *(self.tail(crcs) if self.tail else ())]


@dataclass(frozen=True)
class File:
    """A file: sections that follow one another, zeros where nothing is.

    What is no tensor is written to a disk when the tensors of all files are, so that what was begun
    and not completed has no header, or no directory, and is not taken for a file of its format.
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
class TensorTask:
    """Blocks of a tensor, which follow one another in its row-major bytes, to be written to `file`
    of a folder from byte `at` on. Of one that `is_shared`, other processes write other bytes.
    """

    job: Job
    folder: str
    file: str
    place: tuple[int, int]  # which tensor of which file
    at: int
    tensor: Tensor
    boxes: Sequence[Box]
    cost: int
    is_shared: bool

    @property
    def nbytes(self) -> int:
        return sum(box.size for box in self.boxes) * self.tensor.dtype.itemsize

    def run(self, opened: OpenedJob) -> int:
        """Write the blocks, no more once a proof has failed. Returns the CRC-32 of their bytes,
        which are durable in a shared file.
        """
        proofs, crc = opened.proofs, 0
        # NFS writes whole pages, with what other machines had written to them before, unless the
        # file is open for writing only and each write waits. Source: Linux, `fs/nfs/file.c`,
        # `nfs_want_read_modify_write`, and `write.c`, `nfs_can_extend_write`.
        flags = os.O_WRONLY | (os.O_DSYNC if self.is_shared else 0)
        with open(os.open(Path(self.folder, self.file), flags), "wb", buffering=0) as out:
            out.seek(self.at)
            for box in self.boxes:
                raw = block_bytes(opened.contents.arrays, self.tensor, box)
                proofs.require_sound_so_far()
                crc = zlib.crc32(raw, crc)
                while raw:
                    raw = raw[out.write(raw) :]
        return crc


def write_files(
    folder: Path,
    files: Sequence[File],
    coordinator: Coordinator,
    budget_bytes: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write `files` into `folder`, durably; `progress` is called with bytes of tensors.

    At most about `budget_bytes` of blocks are in memory at once.
    """
    written: dict[tuple[int, int], list[Part]] = defaultdict(list)

    def finish(task: TensorTask, crc: int) -> None:
        written[task.place].append(Part(task.at, task.at + task.nbytes, crc))
        progress(task.nbytes)

    for file in files:
        create(folder / file.name, file.size)
    is_shared = not coordinator.is_here
    tasks = tensor_tasks(folder, files, coordinator, budget_bytes, is_shared)
    coordinator.run(tasks, finish, budget_bytes)
    complete_files(folder, files, written)


def complete_files(
    folder: Path, files: Sequence[File], written: Mapping[tuple[int, int], Sequence[Part]]
) -> None:
    """Write what is no tensor, durably, when all tensors are there: `written` has, by place, the
    CRC-32 of their parts.
    """
    for f, file in enumerate(files):
        numbers = itertools.count()
        with open(folder / file.name, "r+b") as out:
            for section in file.sections:
                crcs = [crc_of(sorted(written[f, next(numbers)])) for _ in section.tensors]
                for at, data in section.rest(crcs):
                    out.seek(at)
                    out.write(data)
            out.flush()
            os.fsync(out.fileno())


def tensor_tasks(
    folder: Path,
    files: Sequence[File],
    coordinator: Coordinator,
    budget_bytes: int,
    is_shared: bool,
) -> Iterator[TensorTask]:
    """What writes the tensors of all files, in their order."""
    infos = coordinator.opened.contents.arrays.arrays()
    for f, file in enumerate(files):
        for t, (at, tensor) in enumerate(file.tensors):
            boxes, cost = blocks_of(tensor, infos[tensor.key], budget_bytes)
            for together in _together(boxes, tensor, infos[tensor.key]):
                task = TensorTask(
                    coordinator.job,
                    str(folder),
                    file.name,
                    (f, t),
                    at,
                    tensor,
                    together,
                    cost,
                    is_shared,
                )
                yield task
                at += task.nbytes


def _together(boxes: Sequence[Box], tensor: Tensor, info: ArrayInfo) -> Iterator[Sequence[Box]]:
    """The boxes of a tensor in their order, as many together as one task writes: all, where two
    may be of one stored chunk.
    """
    chunk = info.chunk or (1,) * len(tensor.shape)
    if not all(a % c == 0 for box in boxes for a, c in zip(box.start, chunk, strict=True)):
        yield boxes
        return
    size = tensor.dtype.itemsize
    yield from batches(boxes, lambda box: box.size * size, TASK_BYTES, TASK_BOXES)


def create(path: Path, size: int, is_shared: bool = False) -> None:
    """Make a file of `size` zeros. One that `is_shared` may be there, with what others wrote."""
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


def require_written(folder: Files, files: Sequence[File], beside: Collection[str] = ()) -> None:
    """Raise CorruptData unless the folder has exactly these files, each with its size, and those
    `beside` them.
    """
    names = [file.name for file in files]
    others = {file.name for file in folder.walk()}.difference(names, beside)
    faults = [*lost(folder, files), *(f"{name} is not a file of this export" for name in others)]
    if faults:
        lines = fault_lines(faults, FAULTS_SHOWN)
        raise CorruptData(
            f"{folder} is not as this export wrote it:\n  {lines}\nSomething else deletes or writes"
            " files there: keep it away while an export is running, and export again."
        )


def lost(folder: Files, files: Sequence[File]) -> list[str]:
    """Which files are missing, or have another size."""
    faults: list[str] = []
    for file, found in zip(files, stat_all(folder, [file.name for file in files]), strict=True):
        if found is None or found.kind != "file":
            faults.append(f"{file.name} is missing")
        elif found.size != file.size:
            faults.append(
                f"{file.name} has {found.size} bytes, not the {file.size} that were written"
            )
    return faults


def peak_bytes(files: Sequence[File], source: ArraySource, budget_bytes: int) -> int:
    """The most memory that blocks in flight can take."""
    infos = source.arrays()
    tensors = (tensor for file in files for _, tensor in file.tensors)
    costs = sorted((blocks_of(t, infos[t.key], budget_bytes)[1] for t in tensors), reverse=True)
    return min(sum(costs[: threads()]), max(budget_bytes, *costs[:1], 0))


def blocks_of(tensor: Tensor, info: ArrayInfo, budget_bytes: int) -> tuple[Sequence[Box], int]:
    """The blocks in which a tensor is written, and the memory that one of them takes."""
    size = max(info.dtype.itemsize, tensor.dtype.itemsize)
    max_bytes = max(SMALL_BYTES, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    boxes = list(row_major_boxes(tensor.shape, info.chunk, size, max_bytes))
    return boxes, max((block_cost(box, info.chunk or (), size) for box in boxes), default=0)


def block_bytes(source: ArraySource, tensor: Tensor, box: Box) -> memoryview:
    """The bytes of a block as a target stores them."""
    data = source.read(tensor.key, box).astype(tensor.dtype, copy=False)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def row_major_boxes(
    shape: Shape, chunk: Shape | None, itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Blocks in the row-major order of the array's elements, each of at most `max_bytes`.

    Where they can be, they are made of whole stored chunks, so that no chunk is read twice.

    >>> [str(box) for box in row_major_boxes((4, 6), None, 1, 12)]
    ['[0:2, 0:6]', '[2:4, 0:6]']
    >>> [str(box) for box in row_major_boxes((2, 6), None, 1, 4)]
    ['[0:1, 0:4]', '[0:1, 4:6]', '[1:2, 0:4]', '[1:2, 4:6]']
    """
    block = rows_of_chunks(shape, chunk or (1,) * len(shape), itemsize, max_bytes)
    if not _follow(shape, block):
        block = rows_of_chunks(shape, (1,) * len(shape), itemsize, max_bytes)
    return grid_boxes(shape, block)


def _follow(shape: Shape, block: Shape) -> bool:
    """Whether blocks of a grid are runs: at most one axis is cut, and those before it to 1."""
    cut = [axis for axis, (n, b) in enumerate(zip(shape, block, strict=True)) if b < n]
    return not cut or all(b == 1 for b in block[: cut[-1]])
