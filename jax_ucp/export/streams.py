"""Files written from their first byte to their last, as buckets take them: several at once, each
with reads ahead of it, within a budget.
"""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from jax_ucp.errors import CorruptData
from jax_ucp.export.files import File, Section, Tensor, block_bytes, blocks_of
from jax_ucp.files.crc import Part, crc_of
from jax_ucp.files.protocol import Files
from jax_ucp.layout.box import Box
from jax_ucp.sources.budget import in_order
from jax_ucp.sources.work import Coordinator, Job, OpenedJob

# So many large files share the budget, each of which is several requests at once; fewer share a
# small one, because a store takes no part of a file below 5 MiB.
FILES_AT_ONCE, LEAST_BYTES = 4, 32 << 20

Buffers = list[tuple[int, bytes | memoryview]]  # by their offsets in the file
Heard = Callable[[int], None]


def unheard(nbytes: int) -> None:
    """Nobody asks how far it is."""


@dataclass(frozen=True)
class FileTask:
    """A file to be written to `folder`, in `max_bytes` of memory; `heard` is called with bytes of
    tensors.
    """

    job: Job
    folder: str
    file: File
    cost: int
    max_bytes: int
    heard: Heard = unheard

    def run(self, opened: OpenedJob) -> None:
        parts = file_parts(opened, self.file, self.max_bytes, self.heard)
        write_parts(opened.files(self.folder), self.file, parts, self.max_bytes)


def upload_files(
    folder: Files,
    files: Sequence[File],
    coordinator: Coordinator,
    budget_bytes: int,
    progress: Heard,
) -> None:
    """Write files, each of which is whole or not there; `progress` is called with bytes of tensors,
    by several threads.

    What is in memory at once takes at most about `budget_bytes`, or the least that a store takes as
    a part of a file.
    """
    is_here = coordinator.is_here

    def finish(task: FileTask, result: None) -> None:
        if not is_here:
            progress(sum(tensor.nbytes for _, tensor in task.file.tensors))

    heard = progress if is_here else unheard
    most = share_of(budget_bytes, files)
    tasks = (
        FileTask(coordinator.job, folder.url(), file, _cost(file, coordinator, most), most, heard)
        for file in files
    )
    coordinator.run(tasks, finish, budget_bytes, remote=True)


def share_of(budget_bytes: int, files: Sequence[File]) -> int:
    """What a large file may take of a budget, of which several of these are written at once."""
    large = sum(file.size > LEAST_BYTES for file in files)
    at_once = max(1, min(FILES_AT_ONCE, large))
    return min(budget_bytes, max(LEAST_BYTES, budget_bytes // at_once))


def _cost(file: File, coordinator: Coordinator, most: int) -> int:
    infos = coordinator.opened.contents.arrays.arrays()
    blocks = (blocks_of(tensor, infos[tensor.key], most)[1] for _, tensor in file.tensors)
    return min(2 * file.size + max(blocks, default=0), most)


def write_parts(
    folder: Files, file: File, parts: Iterator[bytes | memoryview], max_bytes: int
) -> None:
    """Write a file of parts, half of the memory for what is on its way."""
    folder.write_large(file.name, parts, file.size, max_bytes // 2)


def file_parts(
    opened: OpenedJob, file: File, max_bytes: int, heard: Heard = unheard
) -> Iterator[bytes | memoryview]:
    """The bytes of a file in their order, half of the memory for what is read ahead.

    Where a header has the CRC-32 of what follows, that is held until it is known; if it is too
    large for that, it is read twice.
    """
    reader = _Reader(opened, max_bytes // 2, heard)
    end = 0
    for at, data in reader.read(file.sections):
        yield bytes(at - end)
        yield data
        end = at + len(data)
    yield bytes(file.size - end)


@dataclass(frozen=True)
class _Block:
    """A block of a tensor that is one run of the file, from byte `at` on."""

    at: int
    tensor: Tensor
    box: Box
    cost: int

    @property
    def nbytes(self) -> int:
        return self.box.size * self.tensor.dtype.itemsize


class _Reader:
    """Reads the tensors of sections, no more once a proof has failed."""

    def __init__(self, opened: OpenedJob, budget_bytes: int, heard: Heard):
        self._arrays, self._proofs = opened.contents.arrays, opened.proofs
        self._infos = self._arrays.arrays()
        self._remote = opened.contents.files.is_remote
        self._budget, self._heard = budget_bytes, heard

    def read(self, sections: Sequence[Section]) -> Iterator[tuple[int, bytes | memoryview]]:
        """The bytes of the sections in their order, but the zeros between them."""
        jobs = itertools.chain.from_iterable(map(self._jobs, sections))
        for buffers in in_order(jobs, self._budget, self._remote):
            yield from buffers

    def _jobs(self, section: Section) -> Iterator[tuple[int, Callable[[], Buffers]]]:
        """What reads a section, with the memory that it takes."""
        tensors = [self._blocks(at, tensor) for at, tensor in section.tensors]
        blocks = list(itertools.chain.from_iterable(tensors))
        held = sum(b.nbytes for b in blocks) + max((b.cost for b in blocks), default=0)
        if section.tail is not None and held <= self._budget:
            yield held, partial(self._at_once, section, tensors)
        else:
            yield from self._one_by_one(section, tensors)

    def _one_by_one(
        self, section: Section, tensors: Sequence[Sequence[_Block]]
    ) -> Iterator[tuple[int, Callable[[], Buffers]]]:
        """What reads each block of a section, in the order of the file."""
        sums = [self._sums(blocks) for blocks in tensors] if section.tail else []
        known = {part.start: part.crc for part in itertools.chain.from_iterable(sums)}
        rest = section.rest([crc_of(parts) for parts in sums])
        jobs = [(at, len(data), partial(list, [(at, data)])) for at, data in rest]
        for block in itertools.chain.from_iterable(tensors):
            jobs.append((block.at, block.cost, partial(self._one, block, known.get(block.at))))
        for _, cost, job in sorted(jobs, key=operator.itemgetter(0)):
            yield cost, job

    def _blocks(self, at: int, tensor: Tensor) -> list[_Block]:
        boxes, cost = blocks_of(tensor, self._infos[tensor.key], self._budget)
        blocks: list[_Block] = []
        for box in boxes:
            blocks.append(_Block(at, tensor, box, cost))
            at += blocks[-1].nbytes
        return blocks

    def _at_once(self, section: Section, tensors: Sequence[Sequence[_Block]]) -> Buffers:
        buffers: Buffers = []
        crcs: list[int] = []
        for blocks in tensors:
            data = [self._data(block) for block in blocks]
            crcs.append(functools.reduce(lambda crc, some: zlib.crc32(some, crc), data, 0))
            buffers += zip((block.at for block in blocks), data, strict=True)
        self._heard(sum(len(data) for _, data in buffers))
        return sorted([*buffers, *section.rest(crcs)], key=operator.itemgetter(0))

    def _one(self, block: _Block, crc: int | None) -> Buffers:
        """A block, which has the CRC-32 that it had before, if it was read before."""
        data = self._data(block)
        if crc is not None and zlib.crc32(data) != crc:
            raise CorruptData(
                f"{block.tensor.key}: {block.box} was read twice, and was not the same; something"
                " else writes to the source, or its disk or its network fails"
            )
        self._heard(len(data))
        return [(block.at, data)]

    def _sums(self, blocks: Sequence[_Block]) -> list[Part]:
        def summed(block: _Block) -> Part:
            return Part(block.at, block.at + block.nbytes, zlib.crc32(self._data(block)))

        jobs = ((block.cost, partial(summed, block)) for block in blocks)
        return list(in_order(jobs, self._budget, self._remote))

    def _data(self, block: _Block) -> memoryview:
        data = block_bytes(self._arrays, block.tensor, block.box)
        self._proofs.require_sound_so_far()
        return data
