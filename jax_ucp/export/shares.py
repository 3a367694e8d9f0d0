"""An export that several processes make, none of which leads: each does its share, and the last to
finish makes the folder.

Until then all of it is in the hidden folder beside the target: `ucp-ledger.jsonl` says which
export it is, a ledger of each share what is on disk of it, and `ucp-share_I.json` that a share is
complete. The files are in `files`, which becomes the target. Who is killed before the rest is
cleared away leaves shares that say they are complete, of files that are gone: nobody believes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from jax_ucp.errors import CorruptData, fault_lines
from jax_ucp.export.atomic_folder import being_written, check_free, partial_folder, put_in_place
from jax_ucp.export.files import (
    FAULTS_SHOWN,
    File,
    TensorTask,
    complete_files,
    create,
    lost,
    require_written,
    tensor_tasks,
)
from jax_ucp.files.crc import Part
from jax_ucp.files.local import LocalFiles
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import read_file
from jax_ucp.layout.box import Box
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.proved import proved
from jax_ucp.sources.work import HERE, Coordinator, shared_out
from jax_ucp.universal.copy import conversion_note, require_outside
from jax_ucp.universal.ledger import LEDGER_FILE, Ledger
from jax_ucp.universal.metadata import digest
from jax_ucp.universal.shares import Share, is_of, require_same_copy, shared_evenly
from jax_ucp.universal.store import CONVERSION_FILE, Written

_FILES = "files"
_READ_BYTES = 1 << 20


class _Run(msgspec.Struct, array_like=True, frozen=True):
    """What a task has written: bytes of a file, from `start` to `stop`, and their CRC-32."""

    place: tuple[int, int]
    file: str
    start: int
    stop: int
    crc: int

    @classmethod
    def of(cls, task: TensorTask, crc: int) -> _Run:
        return cls(task.place, task.file, task.at, task.at + task.nbytes, crc)

    @property
    def written(self) -> Written:
        return Written(f"{self.crc:08x}", b"")


class _Done(msgspec.Struct, frozen=True):
    """That a share of an export is complete, and what it has written."""

    identity: str
    runs: list[_Run]


def export_share(
    contents: Contents,
    files: Sequence[File],
    budget_bytes: int,
    target: Path,
    share: Share,
    progress: Callable[[int], None] = lambda nbytes: None,
    begin: Callable[[int], None] = lambda nbytes: None,
) -> bool:
    """Do a share of an export, and make the folder where all others are done. Whether `target` is
    there now. `begin` hears of the share's bytes before `progress` hears of any.

    Each process has the same files. A share that was stopped is taken up by the same call; one that
    is complete is looked at, and left as it is. A check is of the share that has the first run of
    an array that it proves.

    Raises what an export by one process raises, and FormatError where an unfinished one of
    something else is in the way.
    """
    folder = partial_folder(target)
    owners: dict[str, int] = {}
    with shared_out(contents, HERE, "", partial(is_of, owners, share)) as coordinator:
        tasks = list(tensor_tasks(folder / _FILES, files, coordinator, budget_bytes, True))
        shares = list(shared_evenly([[task] for task in tasks], share.count))
        for task, index in zip(tasks, shares, strict=True):
            owners.setdefault(task.tensor.key, index)
        ours = [task for task, index in zip(tasks, shares, strict=True) if index == share.index]
        work = _Work(
            coordinator,
            target,
            files,
            ours,
            share,
            _identity(contents, files, tasks, share.count),
        )
        if not work.is_result():
            require_outside(file_path(target), contents)
            check_free(file_path(target))
            begin(sum(task.nbytes for task in ours))
            try:
                work.do(budget_bytes, progress)
            except (FileExistsError, FileNotFoundError):
                if not work.is_result():
                    raise  # else another has made it meanwhile, and cleared away what was here
        is_result = work.is_result()
    if is_result:
        shutil.rmtree(folder, ignore_errors=True)
    return is_result


def _identity(
    contents: Contents, files: Sequence[File], tasks: Sequence[TensorTask], count: int
) -> str:
    """What all shares must agree on: the source as it was opened, the files, and the tasks."""
    planned = [
        (file.name, file.size, section.tensors, section.literals)
        for file in files
        for section in file.sections
    ]
    cut = [(task.file, task.at) for task in tasks]
    return digest(repr((contents.identity(), planned, cut, count)).encode())


class _Work:
    """A share of one export."""

    def __init__(
        self,
        coordinator: Coordinator,
        target: Path,
        files: Sequence[File],
        tasks: Sequence[TensorTask],
        share: Share,
        identity: str,
    ):
        self._coordinator, self._target, self._files = coordinator, target, files
        self._tasks, self._share, self._identity = tasks, share, identity
        self._folder = partial_folder(target)
        self._local = LocalFiles(self._folder)

    def is_result(self) -> bool:
        """Whether the target is what this export makes. Raises CorruptData where it was, and files
        of it are lost since.
        """
        target = LocalFiles(self._target)
        if read_file(target, CONVERSION_FILE) != conversion_note(self._identity):
            return False
        if faults := lost(target, self._files):
            lines = fault_lines(faults, FAULTS_SHOWN)
            raise CorruptData(
                f"{self._target} was made by this export, and is not whole any more:\n  {lines}\n"
                "Delete it, and run all shares again."
            )
        return True

    def do(self, budget_bytes: int, progress: Callable[[int], None]) -> None:
        with self._joined() as lock:
            if self.is_result():
                return  # made before this process joined
            opened = self._coordinator.opened
            with proved(opened.proofs):
                runs = self._write(budget_bytes, progress)
            opened.contents.files.require_unchanged()
            done = msgspec.json.encode(_Done(self._identity, runs))
            self._local.write(_done_name(self._share.index), [done], durable=True)
            if all(map(Path.is_file, self._all_done())):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.is_result():
                    self._complete()

    @contextmanager
    def _joined(self) -> Iterator[int]:
        """A lock that all have who write shares, and one alone who makes the folder."""
        with being_written(self._folder, self._target, fcntl.LOCK_SH):
            require_same_copy(self._local, self._identity)
            lock = os.open(self._folder / LEDGER_FILE, os.O_RDWR)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._forget_lost()  # alone: nobody makes these files meanwhile
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield lock
        finally:
            os.close(lock)

    def _forget_lost(self) -> None:
        """Shares that are complete are so no more where their files are not there."""
        folder, sizes = self._folder / _FILES, {file.name: file.size for file in self._files}
        there = {name for name, size in sizes.items() if _size(folder / name) == size}
        for path in filter(Path.is_file, self._all_done()):
            runs = self._runs(path)
            if runs is None or not there.issuperset(run.file for run in runs):
                path.unlink(missing_ok=True)

    def _all_done(self) -> list[Path]:
        return [self._folder / _done_name(index) for index in range(self._share.count)]

    def _write(self, budget_bytes: int, progress: Callable[[int], None]) -> list[_Run]:
        """Write what the ledger does not have, or what is not on disk as it has it."""
        sizes = {file.name: file.size for file in self._files}
        for name in dict.fromkeys(task.file for task in self._tasks):
            create(self._folder / _FILES / name, sizes[name], is_shared=True)
        path = file_path(str(self._folder))
        with closing(Ledger(path, self._identity, self._share.ledger)) as ledger:
            runs = list(self._on_disk(ledger))
            progress(sum(run.stop - run.start for run in runs))
            there = {(run.file, run.start) for run in runs}

            def finish(task: TensorTask, crc: int) -> None:
                runs.append(run := _Run.of(task, crc))
                ledger.note([(task.file, _box(task), run.written)])
                progress(task.nbytes)

            left = (task for task in self._tasks if (task.file, task.at) not in there)
            self._coordinator.run(left, finish, budget_bytes)
        return runs

    def _on_disk(self, ledger: Ledger) -> Iterator[_Run]:
        """What a process that was stopped has written of this share, and is still there."""
        for task in self._tasks:
            noted = ledger.done.get((task.file, str(_box(task))))
            if noted is not None:
                path = self._folder / _FILES / task.file
                run = _Run.of(task, _crc_of(path, task.at, task.nbytes))
                if run.written == noted:
                    yield run

    def _complete(self) -> None:
        """Write what is no tensor, and make the folder the target."""
        parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for path in self._all_done():
            runs = self._runs(path)
            if runs is None:
                raise CorruptData(f"{path} is damaged: delete it, and run that share again")
            for run in runs:
                parts[run.place].append(Part(run.start, run.stop, run.crc))
        folder = self._folder / _FILES
        for file in self._files:
            create(folder / file.name, file.size, is_shared=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            complete_files(folder, self._files, parts)
            note = conversion_note(self._identity)
            LocalFiles(folder).write(CONVERSION_FILE, [note], durable=True)
            require_written(LocalFiles(folder), self._files, beside=[CONVERSION_FILE])
            put_in_place(handle, folder, self._target)
        finally:
            os.close(handle)

    def _runs(self, path: Path) -> list[_Run] | None:
        """What a share has written; None where its word is damaged, or of another export."""
        try:
            done = msgspec.json.decode(path.read_bytes(), type=_Done)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return done.runs if done.identity == self._identity else None


def _box(task: TensorTask) -> Box:
    """Where in the file a task writes."""
    return Box((task.at,), (task.at + task.nbytes,))


def _done_name(index: int) -> str:
    return f"ucp-share_{index}.json"


def _size(path: Path) -> int:
    """Of a file, -1 where there is none."""
    return path.stat().st_size if path.is_file() else -1


def _crc_of(path: Path, start: int, nbytes: int) -> int:
    """The CRC-32 of bytes of a file, or of those that it has of them."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(start)
        while data := file.read(min(nbytes, _READ_BYTES)):
            crc = zlib.crc32(data, crc)
            nbytes -= len(data)
    return crc
