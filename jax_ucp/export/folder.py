"""An export into a folder of a disk, which appears whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path

from jax_ucp.arrays.digests import CHECKSUMS, checksums
from jax_ucp.export.files import (
    BlockRun,
    ExportTarget,
    TensorTask,
    check_free,
    complete_files,
    create,
    plan_runs,
    require_whole,
    require_written,
)
from jax_ucp.files.local import LocalFiles, remove, sync_file_system, sync_folder
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.jobs.ledger import LEDGER_FILE, RESULT_FILE, Blocks, Ledger, Share, is_noted
from jax_ucp.jobs.run import Work
from jax_ucp.universal.copy import require_outside


class FolderTarget(ExportTarget[BlockRun]):
    """An export into a new folder, written hidden beside it; shares write inside that one."""

    @property
    def _target(self) -> Path:
        return Path(str(self.path))

    @property
    def place(self) -> FilePath:
        return file_path(shared_folder(self._target))

    @cached_property
    def _runs(self) -> Sequence[BlockRun]:
        return list(plan_runs(self._files, self.contents.arrays, self._budget))

    def groups(self, count: int) -> Sequence[Sequence[BlockRun]]:
        return [[run] for run in self._runs]

    def require_free(self, is_shared: bool) -> None:
        require_outside(self.path, self.contents)
        check_free(self.path)

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        with new_folder(self._target):
            yield Ledger()

    def joined(self) -> AbstractContextManager[object]:
        """Context that keeps an export by one process away."""
        return being_written(partial_folder(self._target), self._target, fcntl.LOCK_SH)

    def _folder(self, is_shared: bool) -> Path:
        return shared_folder(self._target) if is_shared else partial_folder(self._target)

    def write(self, work: Work[BlockRun]) -> None:
        is_shared = work.share is not None
        folder = self._folder(is_shared)
        runs = [run for _, group in work.groups for run in group]
        ours = {run.file for run in runs}
        for file in self._files:
            if not is_shared or file.name in ours:
                create(folder / file.name, file.size, is_shared)
        by_others = is_shared or not work.coordinator.is_here
        tasks = (TensorTask(str(folder), run, work.noted([run]), by_others) for run in runs)
        work.run(tasks, self._budget, LocalFiles(folder), is_durable=True)

    def commit(self, written: Blocks, prove: Callable[[], None], note: bytes | None) -> None:
        """Write all bytes but tensors'; `alone`, or of shares this call, renames the folder."""
        folder = self._folder(note is not None)
        handle = os.open(folder, os.O_RDONLY)
        try:
            for file in self._files if note is not None else ():
                create(folder / file.name, file.size, is_shared=True)
            crcs = complete_files(folder, self._files, self._runs, written)
            prove()
            LocalFiles(folder).write(CHECKSUMS, [checksums(crcs)], durable=True)
            if note is not None:
                LocalFiles(folder).write(RESULT_FILE, [note], durable=True)
            require_written(LocalFiles(folder), self._files)
            if note is not None:
                put_in_place(handle, folder, self._target)
        finally:
            os.close(handle)

    def is_result(self, identity: str) -> bool:
        """Whether the target is this export's result. Raises CorruptData if files are lost."""
        folder = self.path.folder()
        if not is_noted(folder, identity):
            return False
        require_whole(folder, self._files)
        return True

    def clear(self, share: Share) -> None:
        super().clear(share)
        shutil.rmtree(partial_folder(self._target), ignore_errors=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` at the end, durably; deleted on an error.

    Files that a killed process left in it are deleted by the next one.

    Raises FileExistsError if `target` or the folder is in use by another process or by shares,
    OSError if the disk refuses a write.
    """
    partial = partial_folder(target)
    with being_written(partial, target, fcntl.LOCK_EX) as handle:
        if (shared_folder(target) / LEDGER_FILE).exists():
            raise FileExistsError(
                f"{partial} has what shares of an export to {target} have written: run all of them,"
                " or delete that folder"
            )
        for path in partial.iterdir():
            remove(path)
        try:
            yield partial
            put_in_place(handle, partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def partial_folder(target: Path) -> Path:
    """The hidden folder in which `target` is written."""
    return target.parent / f".{target.name}.partial"


def shared_folder(target: Path) -> Path:
    """The folder in which shares write `target`, with their ledgers."""
    return partial_folder(target) / "files"


@contextmanager
def being_written(partial: Path, target: Path, lock: int) -> Iterator[int]:
    """A handle of the folder `partial` under a `lock` (flock). Raises FileExistsError if taken."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, lock | fcntl.LOCK_NB)  # released when the process ends
            if not partial.exists() or not os.path.samestat(partial.stat(), os.fstat(handle)):
                raise BlockingIOError
        except BlockingIOError:
            raise FileExistsError(
                f"another export is writing to {target}; give another path"
            ) from None
        yield handle
    finally:
        os.close(handle)


def put_in_place(handle: int, partial: Path, target: Path) -> None:
    """Make all files in `partial` durable, and rename it to `target`, which is free or empty.

    `handle` of `partial` was opened before the first write, so that it reports every disk error.
    """
    for folder, _, _ in os.walk(partial):
        sync_folder(folder)
    sync_file_system(handle, str(partial))
    os.rename(partial, target)
    sync_folder(target.parent)
