"""A conversion that can be taken up again: which blocks of it are already on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from jax_ucp.errors import FormatError
from jax_ucp.files.local import remove
from jax_ucp.layout.box import Box
from jax_ucp.universal.store import Written

LEDGER_FILE = "ucp-ledger.jsonl"


class _First(msgspec.Struct, forbid_unknown_fields=True):
    """The first line: of which conversion the ledger is."""

    identity: str


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    """Any other line: a block that was on disk, and what was written."""

    key: str
    box: str
    written: Written


class Ledger:
    """The blocks written so far, one line each, in the directory of an unfinished conversion.

    `identity` names the source and the plan: a ledger of another conversion is refused. A line is
    written after its block is on disk, so that a block without a line is merely written again. A
    line says what the block was; whether it still is, who takes it up looks. Only one process at a
    time has the ledger of a directory open.
    """

    def __init__(self, directory: Path, identity: str):
        self._path = directory / LEDGER_FILE
        self._lock = threading.Lock()
        self.done: dict[tuple[str, str], Written] = {}
        # a directory that was made for a conversion goes with it
        self._is_new = not directory.exists() or self.begun(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(_open_ledger(self._path), "ab")
        try:
            # gone with the process, however it ends
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._path.exists() or not os.path.samestat(
                self._path.stat(), os.fstat(self._file.fileno())
            ):
                raise BlockingIOError
        except BlockingIOError:
            self._file.close()
            raise FormatError(
                f"another conversion is writing to {directory}; give another path"
            ) from None
        try:
            self._read(identity)
        except BaseException:
            self._file.close()
            raise
        self.resumed = bool(self._path.stat().st_size)
        if not self.resumed:
            self._append([_First(identity)])

    @staticmethod
    def begun(directory: Path) -> bool:
        """Whether the directory holds an unfinished conversion."""
        return (directory / LEDGER_FILE).is_file()

    def note(self, blocks: Iterable[tuple[str, Box, Written]]) -> None:
        """Say that these blocks are on disk: array, box, and what was written."""
        self._append(_Block(key, str(box), written) for key, box, written in blocks)

    def remove(self) -> None:
        """The conversion is complete: its checkpoint is committed, and there is nothing to take
        up.
        """
        self._path.unlink()

    def discard(self) -> None:
        """The conversion has failed: remove all that it wrote. The ledger goes last, so that one
        that is stopped before that is taken up, and fails again.
        """
        directory = self._path.parent
        for path in directory.iterdir():
            if path != self._path:
                remove(path)
        self.remove()
        if self._is_new:
            directory.rmdir()

    def close(self) -> None:
        self._file.close()

    def _append(self, entries: Iterable[_First | _Block]) -> None:
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        with self._lock:
            self._file.write(lines)
            self._file.flush()

    def _read(self, identity: str) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a kill in the middle of a line leaves half of it
        if whole:
            self._read_lines(whole.split(b"\n")[:-1], identity)
        if len(whole) != len(data):
            os.truncate(self._path, len(whole))

    def _read_lines(self, lines: Sequence[bytes], identity: str) -> None:
        try:
            recorded = msgspec.json.decode(lines[0], type=_First).identity
            blocks = [msgspec.json.decode(line, type=_Block) for line in lines[1:]]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{self._path} is damaged ({error}); delete the directory") from None
        if recorded != identity:
            raise FormatError(
                f"{self._path} belongs to a conversion of another source, of files that were"
                " replaced since, or with another budget or mesh. Delete the directory, or give"
                " another one."
            )
        self.done = {(block.key, block.box): block.written for block in blocks}


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
