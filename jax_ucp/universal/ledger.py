"""A conversion that can be taken up again: which blocks of it are already written."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from jax_ucp.errors import FormatError
from jax_ucp.files.in_flight import FILES, each_file
from jax_ucp.files.local import UNFINISHED, remove
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, read_file
from jax_ucp.layout.box import Box
from jax_ucp.universal.store import Written

LEDGER_FILE = "ucp-ledger.jsonl"


class _First(msgspec.Struct, forbid_unknown_fields=True):
    """The first line: of which conversion the ledger is."""

    identity: str


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    """Any other line: a block that was written, and what it was."""

    key: str
    box: str
    written: Written


class Ledger:
    """The blocks written so far, one line each, in the directory of an unfinished conversion.

    `identity` names the source and the plan: a ledger of another conversion is refused. A line is
    written after its block is durable, so that a block without a line is merely written again. A
    line says what the block was; whether it still is, who takes it up looks.

    On a disk only one process at a time has a ledger open. A bucket has no locks: there two that
    take up the same conversion do the same work, and write the same bytes.
    """

    def __init__(self, directory: FilePath, identity: str, name: str = LEDGER_FILE):
        self._path = directory / name
        self._lock = threading.Lock()
        self.done: dict[tuple[str, str], Written] = {}
        files = directory.folder()
        self._log: _Log = _Objects(files, name) if files.is_remote else _File(Path(str(self._path)))
        try:
            lines = self._log.read().split(b"\n")[:-1]
            self.resumed = bool(lines)
            if lines:
                self._read_lines(lines, identity)
            else:
                self._append([_First(identity)])
        except BaseException:
            self._log.close()
            raise

    def note(self, blocks: Iterable[tuple[str, Box, Written]]) -> None:
        self._append([_Block(key, str(box), written) for key, box, written in blocks])

    def remove(self) -> None:
        """The conversion is complete: its checkpoint is committed, and there is nothing to take
        up.
        """
        self._log.remove()

    def discard(self) -> None:
        """The conversion has failed: remove all that it wrote. The ledger goes last, so that one
        that is stopped before that is taken up, and fails again.
        """
        self._log.discard()

    def close(self) -> None:
        self._log.close()

    def _append(self, entries: Sequence[_First | _Block]) -> None:
        with self._lock:
            self._log.append(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def _read_lines(self, lines: Sequence[bytes], identity: str) -> None:
        ledger = self._path
        try:
            recorded = msgspec.json.decode(lines[0], type=_First).identity
            blocks = [msgspec.json.decode(line, type=_Block) for line in lines[1:]]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{ledger} is damaged ({error}); delete the directory") from None
        if recorded != identity:
            raise FormatError(
                f"{ledger} belongs to a conversion of another source or spec, of files that"
                " were replaced since, with another budget or mesh, or by a machine with another"
                " number of processors. Delete the directory, or give another one."
            )
        self.done = {(block.key, block.box): block.written for block in blocks}


def remove_ledger(files: Files, name: str) -> None:
    """Remove a ledger of what is complete, whoever wrote it."""
    if files.is_remote:
        log = _Objects(files, name)
        log.read()
        log.remove()
    else:
        files.delete(name)


class _Log(Protocol):
    """Whole lines, added at the end."""

    @abstractmethod
    def read(self) -> bytes: ...

    @abstractmethod
    def append(self, lines: bytes) -> None: ...

    @abstractmethod
    def remove(self) -> None: ...

    @abstractmethod
    def discard(self) -> None:
        """Remove what lies beside it, then the log, then the directory if it was made for it."""
        ...

    @abstractmethod
    def close(self) -> None: ...


class _File(_Log):
    """A file of the local disk, which one process at a time has open."""

    def __init__(self, path: Path):
        self._path, directory = path, path.parent
        # a directory that was made for a conversion goes with it
        self._is_new = not directory.exists() or self._path.is_file()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(_open_ledger(self._path), "ab")
        try:
            # gone with the process, however it ends
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            self._file.close()
            raise FormatError(
                f"another conversion is writing to {directory}; give another path"
            ) from None

    def read(self) -> bytes:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a kill in the middle of a line leaves half of it
        if len(whole) != len(data):
            os.truncate(self._path, len(whole))
        return whole

    def append(self, lines: bytes) -> None:
        self._file.write(lines)
        self._file.flush()

    def remove(self) -> None:
        # what kills left of files that were being created
        for unfinished in self._path.parent.glob(f"*{UNFINISHED}"):
            unfinished.unlink()
        self._path.unlink()

    def discard(self) -> None:
        directory = self._path.parent
        for path in directory.iterdir():
            if path != self._path:
                remove(path)
        self.remove()
        if self._is_new:
            directory.rmdir()

    def close(self) -> None:
        self._file.close()


class _Objects(_Log):
    """Objects of a bucket, which nothing is added to: the first line is one, and what is added at a
    time another, by number. None of them is looked for in a list.
    """

    def __init__(self, files: Files, name: str):
        self._files, self._name = files, name
        self._is_begun = False
        self._count = 0

    def read(self) -> bytes:
        parts = [read_file(self._files, self._name) or b""]
        self._is_begun = bool(parts[0])
        while self._is_begun:
            names = [self._part_name(self._count + i) for i in range(1, FILES + 1)]
            found = each_file(self._files, lambda name: read_file(self._files, name), names)
            some = list(itertools.takewhile(lambda part: part is not None, found))
            parts += filter(None, some)
            self._count += len(some)
            if len(some) < len(found):
                break
        return b"".join(parts)

    def append(self, lines: bytes) -> None:
        if not self._is_begun:
            self._begin(lines)
            return
        while True:
            self._count += 1
            try:
                self._files.create(self._part_name(self._count), lines)
                return
            except FileExistsError:
                continue  # of another that does the same work

    def _begin(self, lines: bytes) -> None:
        try:
            self._files.create(self._name, lines)
            self._is_begun = True
        except FileExistsError:
            raise FormatError(
                f"another conversion is writing to {self._files}; give another path"
            ) from None

    def remove(self) -> None:
        each_file(self._files, self._files.delete, self._part_names())
        self._files.delete(self._name)

    def discard(self) -> None:
        own = {self._name, *self._part_names()}
        others = [file.name for file in self._files.walk() if file.name not in own]
        each_file(self._files, self._files.delete, others)
        self.remove()

    def close(self) -> None:
        """Nothing is held open."""

    def _part_names(self) -> list[str]:
        return [self._part_name(number) for number in range(1, self._count + 1)]

    def _part_name(self, number: int) -> str:
        return f"{self._name.removesuffix('.jsonl')}.{number}.jsonl"


def _open_ledger(path: Path) -> int:
    """A handle to append to the ledger. Raises FormatError where it is a link, which no
    conversion left.
    """
    try:
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(
                f"{path} is a link, which no conversion makes; give another path"
            ) from None
        raise
