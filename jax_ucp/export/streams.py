"""Files written from first byte to last, as buckets require: several at once, read ahead."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from jax_ucp.arrays.budget import in_order
from jax_ucp.arrays.digests import CHECKSUMS, checksums
from jax_ucp.errors import CorruptData, StoreError
from jax_ucp.export.files import (
    ExportTarget,
    File,
    Section,
    Tensor,
    as_written,
    block_bytes,
    blocks_of,
    check_free,
    lost,
    no_progress,
    require_whole,
    require_written,
)
from jax_ucp.files.crc import SummedBytes, crc32, crc_of
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.protocol import Files, file_size, read_bytes
from jax_ucp.jobs.ledger import (
    LEDGER_FILE,
    RESULT_FILE,
    Blocks,
    Ledger,
    Written,
    claimed,
    clear,
    is_noted,
    require_unclaimed,
)
from jax_ucp.jobs.run import Work
from jax_ucp.jobs.work import OpenedJob
from jax_ucp.layout.box import Box
from jax_ucp.universal.copy import require_outside

# At most this many large files share the budget; each is several requests at once. Fewer files
# share a small budget, because a store takes no part of a file below 5 MiB.
FILES_AT_ONCE, LEAST_BYTES = 4, 32 << 20
READ_BYTES = 16 << 20  # at once, of a file that another process wrote

Buffers = list[tuple[int, bytes | memoryview]]  # by their offsets in the file
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Upload:
    """A whole file to be uploaded, which takes `cost` bytes of memory."""

    file: File
    cost: int

    @property
    def keys(self) -> Iterator[str]:
        return (tensor.key for _, tensor in self.file.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.file.tensors)

    @property
    def place(self) -> tuple[str, Box]:
        return self.file.name, Box((0,), (self.file.size,))


@dataclass(frozen=True)
class UploadTask:
    """A file to be written in `max_bytes` of memory, unless the folder has it as noted; the result
    has its CRC-32. `on_bytes` is called with numbers of tensor bytes.
    """

    folder: str
    block: Upload
    noted: tuple[Written | None, ...]
    max_bytes: int
    on_bytes: OnBytes

    @property
    def blocks(self) -> tuple[Upload]:
        return (self.block,)

    @property
    def cost(self) -> int:
        return self.block.cost

    def run(self, opened: OpenedJob) -> list[Written]:
        folder, file, [noted] = opened.files(self.folder), self.block.file, self.noted
        if noted is not None and _crc_of(folder, file) == noted:
            return [noted]
        parts = file_parts(opened, file, self.max_bytes, self.on_bytes)
        return [as_written(write_parts(folder, file, parts, self.max_bytes))]


def _crc_of(folder: Files, file: File) -> Written | None:
    """The CRC-32 of a file as it is; None if it is missing or has another size."""
    info = folder.find(file.name)
    if info is None or info.size != file.size:
        return None
    crc = 0
    for start in range(0, file.size, READ_BYTES):
        data = read_bytes(folder, info, start, min(start + READ_BYTES, file.size))
        crc = crc32(data, crc)
    return as_written(crc)


class BucketTarget(ExportTarget[Upload]):
    """An export into a folder of a bucket; the last file commits it, when all is proved, and the
    CRC-32s of all files follow it.
    """

    _reports_here = False

    def groups(self, count: int) -> Sequence[Sequence[Upload]]:
        infos = self.contents.arrays.arrays()
        others = self._files[:-1]
        most = share_of(self._budget, others)

        def cost(file: File) -> int:
            blocks = (blocks_of(tensor, infos[tensor.key], most)[1] for _, tensor in file.tensors)
            return min(2 * file.size + max(blocks, default=0), most)

        return [[Upload(file, cost(file))] for file in others]

    def require_free(self, is_shared: bool) -> None:
        require_outside(self.path, self.contents)
        if is_shared:
            if (self.path / LEDGER_FILE).is_file():
                return
            require_unclaimed(self.path.folder())
        check_free(self.path)

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        """Context that reserves the folder for this writer, and on an error deletes its files; not
        after FileExistsError, because another writer may have written them.

        A killed writer leaves its files, and `ucp.writer.json`, which names it.
        """
        check_free(self.path)
        folder, names = self.path.folder(), [file.name for file in self._files]
        with claimed(folder):
            check_free(self.path)
            try:
                yield Ledger()
            except FileExistsError:
                raise FileExistsError(
                    f"{self.path} was written by another meanwhile: its files may be of both."
                    " Delete it, and export again, one writer to each path"
                ) from None
            except BaseException:
                with suppress(StoreError):
                    folder.delete(names[-1])
                    each_file(folder, folder.delete, names[:-1])
                raise

    def progress(self, block: Upload, is_found: bool) -> None:
        if is_found or not self._reports_here:
            super().progress(block, is_found)

    def write(self, work: Work[Upload]) -> None:
        """Upload files, each whole or not at all, in about the budget, or a store's least part."""
        self._opened = work.coordinator.opened
        folder = self._opened.files(str(self.path))
        if work.share is not None:
            # an export by one process first reserves the folder, and then looks for the ledger
            try:
                require_unclaimed(folder)
            except FileExistsError:
                clear(folder, work.share)
                raise
        # tasks in threads of this process report their progress themselves
        self._reports_here = work.coordinator.is_here
        tasks = (
            UploadTask(
                folder.url(),
                upload,
                work.noted([upload]),
                share_of(self._budget, self._files[:-1]),
                self._on_bytes if self._reports_here else no_progress,
            )
            for _, [upload] in work.groups
        )
        work.run(tasks, self._budget, folder, is_durable=True)

    def commit(self, written: Blocks, prove: Callable[[], None], note: bytes | None) -> None:
        *others, last = self._files
        opened, room = self._opened, share_of(self._budget, [last])
        folder = opened.files(str(self.path))

        def sound_parts() -> Iterator[bytes | memoryview]:
            yield from file_parts(opened, last, room, self._on_bytes)
            prove()
            require_written(folder, others)

        if note is not None:
            folder.write(RESULT_FILE, [note], durable=True)
        crcs = {
            name: int(whole.digest, 16)
            for name, blocks in written.items()
            for whole in blocks.values()
        }
        if last.tensors:
            crcs[last.name] = write_parts(folder, last, sound_parts(), room)
        else:
            folder.create(last.name, data := b"".join(sound_parts()))
            crcs[last.name] = crc32(data)
        folder.write(CHECKSUMS, [checksums(crcs)], durable=True)

    def is_result(self, identity: str) -> bool:
        folder = self.path.folder()
        if not is_noted(folder, identity):
            return False
        if lost(folder, self._files) and file_size(folder, LEDGER_FILE) is not None:
            return False  # the note is written before the last file
        require_whole(folder, self._files)
        return True


def share_of(budget_bytes: int, files: Sequence[File]) -> int:
    """The bytes of a budget for one large file, if several of these files are written at once."""
    large = sum(file.size > LEAST_BYTES for file in files)
    at_once = max(1, min(FILES_AT_ONCE, large))
    return min(budget_bytes, max(LEAST_BYTES, budget_bytes // at_once))


def write_parts(
    folder: Files, file: File, parts: Iterator[bytes | memoryview], max_bytes: int
) -> int:
    """The CRC-32 of a file, written from its parts; half of `max_bytes` is for those in flight."""
    crc = 0

    def summed() -> Iterator[bytes | memoryview]:
        nonlocal crc
        for part in parts:
            crc = crc32(part, crc)
            yield part

    folder.write_large(file.name, summed(), file.size, max_bytes // 2)
    return crc


def file_parts(
    opened: OpenedJob, file: File, max_bytes: int, on_bytes: OnBytes = no_progress
) -> Iterator[bytes | memoryview]:
    """The bytes of a file in order; those before which a CRC-32 lies are held, or read twice."""
    reader = _SectionReader(opened, max_bytes // 2, on_bytes)
    end = 0
    for at, data in reader.read(file.sections):
        yield bytes(at - end)
        yield data
        end = at + len(data)
    yield bytes(file.size - end)


@dataclass(frozen=True)
class _PlacedBlock:
    """A block of a tensor that is contiguous in the file, from byte `at` on."""

    at: int
    tensor: Tensor
    box: Box
    cost: int

    @property
    def nbytes(self) -> int:
        return self.box.size * self.tensor.dtype.itemsize


class _SectionReader:
    """A reader of the tensors of sections, which stops once a proof has failed."""

    def __init__(self, opened: OpenedJob, budget_bytes: int, on_bytes: OnBytes):
        self._arrays, self._proofs = opened.contents.arrays, opened.proofs
        self._infos = self._arrays.arrays()
        self._remote = opened.contents.files.is_remote
        self._budget, self._on_bytes = budget_bytes, on_bytes

    def read(self, sections: Sequence[Section]) -> Iterator[tuple[int, bytes | memoryview]]:
        """The bytes of the sections in order, by their offsets, without the zeros between them."""
        jobs = itertools.chain.from_iterable(map(self._jobs, sections))
        for buffers in in_order(jobs, self._budget, self._remote):
            yield from buffers

    def _jobs(self, section: Section) -> Iterator[tuple[int, Callable[[], Buffers]]]:
        """Jobs that read a section, with their memory; one job if a tail and the budget allow."""
        tensors = [self._blocks(at, tensor) for at, tensor in section.tensors]
        blocks = list(itertools.chain.from_iterable(tensors))
        held = sum(b.nbytes for b in blocks) + max((b.cost for b in blocks), default=0)
        if section.tail is not None and held <= self._budget:
            yield held, partial(self._at_once, section, tensors)
        else:
            # a job for each block and literal; for a tail all blocks are first read for their CRC
            sums = [self._sums(blocks) for blocks in tensors] if section.tail else []
            known = {part.start: part.crc for part in itertools.chain.from_iterable(sums)}
            rest = section.rest([crc_of(parts) for parts in sums])
            jobs = [(at, len(data), partial(list, [(at, data)])) for at, data in rest]
            for block in itertools.chain.from_iterable(tensors):
                jobs.append((block.at, block.cost, partial(self._one, block, known.get(block.at))))
            for _, cost, job in sorted(jobs, key=operator.itemgetter(0)):
                yield cost, job

    def _blocks(self, at: int, tensor: Tensor) -> list[_PlacedBlock]:
        boxes, cost = blocks_of(tensor, self._infos[tensor.key], self._budget)
        blocks: list[_PlacedBlock] = []
        for box in boxes:
            blocks.append(_PlacedBlock(at, tensor, box, cost))
            at += blocks[-1].nbytes
        return blocks

    def _at_once(self, section: Section, tensors: Sequence[Sequence[_PlacedBlock]]) -> Buffers:
        buffers: Buffers = []
        crcs: list[int] = []
        for blocks in tensors:
            data = [self._data(block) for block in blocks]
            crcs.append(functools.reduce(lambda crc, some: crc32(some, crc), data, 0))
            buffers += zip((block.at for block in blocks), data, strict=True)
        self._on_bytes(sum(len(data) for _, data in buffers))
        return sorted([*buffers, *section.rest(crcs)], key=operator.itemgetter(0))

    def _one(self, block: _PlacedBlock, crc: int | None) -> Buffers:
        """A block at its offset. Raises CorruptData if its CRC-32 was another before."""
        data = self._data(block)
        if crc is not None and crc32(data) != crc:
            raise CorruptData(
                f"{block.tensor.key}: {block.box} was read twice, and was not the same; something"
                " else writes to the source, or its disk or its network fails"
            )
        self._on_bytes(len(data))
        return [(block.at, data)]

    def _sums(self, blocks: Sequence[_PlacedBlock]) -> list[SummedBytes]:
        def summed(block: _PlacedBlock) -> SummedBytes:
            return SummedBytes(block.at, block.at + block.nbytes, crc32(self._data(block)))

        jobs = ((block.cost, partial(summed, block)) for block in blocks)
        return list(in_order(jobs, self._budget, self._remote))

    def _data(self, block: _PlacedBlock) -> memoryview:
        data = block_bytes(self._arrays, block.tensor, block.box)
        self._proofs.require_sound_so_far()
        return data
