"""An export into a folder of a disk, which appears whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path

from jax_ucp.arrays.contents import Contents
from jax_ucp.export.atomic_folder import (
    being_written,
    check_free,
    new_folder,
    partial_folder,
    put_in_place,
    shared_folder,
)
from jax_ucp.export.files import (
    BlockRun,
    File,
    TensorTask,
    complete_files,
    create,
    identity_of,
    plan_runs,
    require_whole,
    require_written,
)
from jax_ucp.files.local import LocalFiles
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.jobs.ledger import RESULT_FILE, Blocks, Ledger, is_noted
from jax_ucp.jobs.run import Target, Work
from jax_ucp.jobs.work import Coordinator
from jax_ucp.universal.copy import require_outside


class FolderTarget(Target[BlockRun]):
    """An export into a new folder, written hidden beside it; shares write inside that one."""

    def __init__(
        self,
        contents: Contents,
        files: Sequence[File],
        budget_bytes: int,
        path: FilePath,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ):
        self.contents, self.path = contents, path
        self.again = f"Nothing is at {path}: export again, with a new executor."
        self._target = Path(str(path))
        self.place = file_path(shared_folder(self._target))
        self._files, self._budget, self._on_bytes = files, budget_bytes, on_bytes

    @cached_property
    def _runs(self) -> Sequence[BlockRun]:
        return list(plan_runs(self._files, self.contents.arrays, self._budget))

    def identity(self) -> str:
        return identity_of(self.contents, self._files, self._runs)

    def groups(self, count: int) -> Sequence[Sequence[BlockRun]]:
        return [[run] for run in self._runs]

    def require_free(self, is_shared: bool) -> None:
        require_outside(self.path, self.contents)
        check_free(self.path)

    @contextmanager
    def alone(self) -> Iterator[Ledger]:
        with new_folder(self._target):
            yield Ledger()

    def joined(self) -> AbstractContextManager[object]:
        """Context that keeps an export by one process away."""
        return being_written(partial_folder(self._target), self._target, fcntl.LOCK_SH)

    def progress(self, block: BlockRun, is_found: bool) -> None:
        self._on_bytes(block.nbytes)

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

    def commit(
        self,
        coordinator: Coordinator,
        written: Blocks,
        require_sound: Callable[[], None],
        note: bytes | None,
    ) -> None:
        """Write all bytes but tensors'; `alone` or this call renames the folder to the target."""
        folder = self._folder(note is not None)
        if note is None:
            complete_files(folder, self._files, self._runs, written)
            require_sound()
            require_written(LocalFiles(folder), self._files)
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            for file in self._files:
                create(folder / file.name, file.size, is_shared=True)
            complete_files(folder, self._files, self._runs, written)
            require_sound()
            LocalFiles(folder).write(RESULT_FILE, [note], durable=True)
            require_written(LocalFiles(folder), self._files)
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

    def clear(self, count: int) -> None:
        super().clear(count)
        shutil.rmtree(partial_folder(self._target), ignore_errors=True)
