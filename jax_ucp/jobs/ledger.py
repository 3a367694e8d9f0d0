"""The control files of a job, which is a conversion, an export or a save that several calls or
several processes may make together.

- A ledger names the job of a folder, and has a line for each block that is on disk:
  `ucp-ledger.jsonl`, or of share I of N `ucp-ledger_I_of_N.jsonl`.
- When all blocks of a share or a process are on disk, one file has the same lines:
  `ucp-ledger_I_of_N.complete.jsonl`.
- `ucp.conversion.json` stays in the result, and names its job, like a ledger's first line.
- `ucp.writer.json` reserves a folder of a bucket for one writer; no other process continues it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from jax_ucp.arrays.budget import in_threads
from jax_ucp.errors import CorruptData, FormatError, StoreError
from jax_ucp.files.in_flight import FILES, each_file
from jax_ucp.files.local import UNFINISHED, remove
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, file_size, read_file
from jax_ucp.layout.box import Box

LEDGER_FILE = "ucp-ledger.jsonl"
RESULT_FILE = "ucp.conversion.json"
WRITER_FILE = "ucp.writer.json"

Place = tuple[int, int]  # number of a pack, offset in it


class Written(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The record of a block on disk: the digest of its elements, or the CRC-32 of its bytes. That
    of an outer chunk also has the crc32c of each inner chunk, if they are recorded, and its place
    if it is packed.
    """

    digest: str
    crcs: bytes = b""
    place: Place | None = None


# By the name of an array or a file, and by the box of the block in it.
Blocks = Mapping[str, Mapping[str, Written]]


class _First(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a ledger: its job."""

    identity: str


class _BlockLine(msgspec.Struct, forbid_unknown_fields=True):
    """Any other line: a block that was written, and its record."""

    key: str
    box: str
    written: Written


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`, from 0 on.

    >>> str(Share(2, 8)), Share(2, 8).ledger
    ('2/8', 'ucp-ledger_2_of_8.jsonl')
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"there is no share {self}: shares are 0/{self.count} to"
                f" {self.count - 1}/{self.count}"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def ledger(self) -> str:
        return f"ucp-ledger_{self.index}_of_{self.count}.jsonl"

    @property
    def complete(self) -> str:
        """The file that exists when the whole share is on disk."""
        return f"ucp-ledger_{self.index}_of_{self.count}.complete.jsonl"


def is_control_file(name: str) -> bool:
    """Whether a file of a folder is a control file of a job.

    >>> [is_control_file(name) for name in ("ucp-ledger_0_of_2.3.jsonl", "model.safetensors")]
    [True, False]
    """
    return name.startswith("ucp-ledger") or name in (RESULT_FILE, WRITER_FILE)


class Ledger:
    """The blocks written so far, one line each, in the folder of an unfinished job.

    `done` has those of a process that was stopped, `written` those of this one. A line is written
    after its block is durable, so that a block without a line is merely written again. A line has
    the digest of the block; the process that continues checks that the block still has it. A ledger
    that is not opened keeps nothing for another process.

    On a disk only one process at a time has a ledger open. A bucket has no locks: two processes
    that continue one job there do the same work, and write the same bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resumed = False
        self.done: Blocks = {}
        self.written: defaultdict[str, dict[str, Written]] = defaultdict(dict)

    @staticmethod
    def open(directory: FilePath, identity: str, name: str = LEDGER_FILE) -> Ledger:
        """The ledger of a job, whose identity names the source and the plan.

        Raises FormatError for a ledger of another job, or if another process has it open.
        """
        files, path = directory.folder(), directory / name
        ledger = BucketLedger(files, name) if files.is_remote else LocalLedger(Path(str(path)))
        try:
            lines = ledger.begin(result_note(identity) + b"\n")
            if lines:
                ledger.resumed = True
                try:
                    recorded, ledger.done = _decode(lines)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FormatError(
                        f"{path} is damaged ({error}); delete the directory"
                    ) from None
                if recorded != identity:
                    raise FormatError(
                        f"{path} belongs to a conversion of another source or spec, of files that"
                        " were replaced since, with another budget or mesh, or by a machine with"
                        " another number of processors. Delete the directory, or give another one."
                    )
        except BaseException:
            ledger.close()
            raise
        return ledger

    def note(self, blocks: Iterable[tuple[str, Box]]) -> None:
        """Record that these blocks, which are in `written`, are on disk."""
        lines = [_BlockLine(key, str(box), self.written[key][str(box)]) for key, box in blocks]
        with self._lock:
            self.append(msgspec.json.Encoder().encode_lines(lines))

    def append(self, lines: bytes) -> None:
        """Add whole lines at the end."""

    def remove(self) -> None:
        """Remove the ledger of a job whose result is committed: there is nothing to continue."""

    def discard(self) -> None:
        """Remove all that a failed job wrote: the files beside the ledger, then the ledger, then a
        directory that was made for the job. A job that is stopped before that is continued, and
        fails again.
        """

    def close(self) -> None:
        """Let another process open the ledger."""


def _decode(lines: bytes) -> tuple[str, Blocks]:
    """The identity in the first line, and the blocks in the others."""
    first, _, others = lines.partition(b"\n")
    identity = msgspec.json.decode(first, type=_First).identity
    if b"\n\n" in lines:
        raise msgspec.DecodeError("it has an empty line")
    blocks: defaultdict[str, dict[str, Written]] = defaultdict(dict)
    for block in msgspec.json.Decoder(_BlockLine).decode_lines(others):
        blocks[block.key][block.box] = block.written
    return identity, blocks


def require_same_job(files: Files, identity: str) -> None:
    """Make the folder one of this job. Raises FormatError if it belongs to another job."""
    line = result_note(identity) + b"\n"
    try:
        files.create(LEDGER_FILE, line)
    except FileExistsError:
        if read_file(files, LEDGER_FILE) != line:
            raise FormatError(
                f"{files} has an unfinished conversion of another source or spec, of files that"
                " were replaced since, with other options (budget, mesh; of an export its format,"
                " dtype, size of files or config), in another number of shares, or by a machine"
                " with another number of processors."
                " Delete the directory, or give another one."
            ) from None


def result_note(identity: str) -> bytes:
    """The content of `ucp.conversion.json`."""
    return msgspec.json.encode(_First(identity))


def is_noted(files: Files, identity: str) -> bool:
    """Whether the folder's `ucp.conversion.json` names this job."""
    return read_file(files, RESULT_FILE) == result_note(identity)


def write_complete(files: Files, share: Share, identity: str, written: Blocks) -> None:
    """Write the file that marks a share complete, with the records of all its durable blocks."""
    lines: list[_First | _BlockLine] = [_First(identity)]
    for key, blocks in written.items():
        lines += [_BlockLine(key, box, block) for box, block in blocks.items()]
    data = msgspec.json.Encoder().encode_lines(lines)
    files.write(share.complete, [data], durable=True)


def read_complete(files: Files, share: Share, identity: str, again: str) -> Blocks:
    """The records of the blocks of a complete share. Raises CorruptData, with the advice `again`,
    if its file is missing, damaged or of another job.
    """
    name = f"{files}/{share.complete}"
    data = read_file(files, share.complete)
    if data is None:
        raise CorruptData(f"{name} is missing, which process {share.index} wrote last. {again}")
    try:
        recorded, blocks = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(
            f"{name}, which process {share.index} wrote last, is damaged ({error}). {again}"
        ) from None
    if recorded != identity:
        raise CorruptData(f"{name} is of another conversion or export. {again}")
    return blocks


def are_complete(files: Files, count: int) -> bool:
    """Whether all shares are complete. The files are looked up in small batches up to the first
    missing one: a process that is not among the last to finish soon finds it.
    """
    for first in range(0, count, FILES):
        names = [Share(i, count).complete for i in range(first, min(first + FILES, count))]
        if None in each_file(files, lambda name: file_size(files, name), names):
            return False
    return True


def clear(files: Files, share: Share) -> None:
    """Remove the ledgers of a committed job in shares, that of the whole job last. The share's own
    may have been written after another process had removed all.
    """

    def clear_share(share: Share) -> None:
        files.delete(share.complete)
        if files.is_remote:
            log = BucketLedger(files, share.ledger)
            log.read()
            log.remove()
        else:
            files.delete(share.ledger)

    clear_share(share)
    if file_size(files, LEDGER_FILE) is None:
        return
    shares = [partial(clear_share, Share(index, share.count)) for index in range(share.count)]
    deque(in_threads(shares, files.is_remote), maxlen=0)
    files.delete(LEDGER_FILE)


@contextmanager
def committing(directory: FilePath) -> Iterator[None]:
    """Context in which other shares do not commit. In a bucket they may: its objects are whole, and
    every process writes the same bytes.

    Raises FileNotFoundError if another process has removed the ledger.
    """
    if directory.files.is_remote:
        yield
        return
    handle = os.open(str(directory / LEDGER_FILE), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def claimed(directory: Files) -> Iterator[None]:
    """Context that reserves a folder of a bucket for one writer: two would write over each other's
    chunks, even if only one of them commits.

    Raises FileExistsError if another writer has reserved it, even if that was killed. On a disk
    nothing is reserved: a save makes the folder itself.
    """
    if not directory.is_remote:
        yield
        return
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    writer = {"writer": uuid.uuid4().hex, "host": socket.gethostname(), "begun": begun}
    try:
        directory.create(WRITER_FILE, msgspec.json.encode(writer))
    except FileExistsError:
        require_unclaimed(directory)
        raise
    try:
        yield
    finally:
        with suppress(StoreError):  # the save itself is done
            directory.delete(WRITER_FILE)


def require_unclaimed(directory: Files) -> None:
    """Raise FileExistsError if a writer has reserved a folder of a bucket."""
    if (writer := read_file(directory, WRITER_FILE)) is not None:
        other = writer.decode(errors="replace")
        raise FileExistsError(
            f"{directory} is being written by another save or export, or was left by one that was"
            f" killed: {WRITER_FILE} there says {other:.200}. Give another path, or delete the"
            " folder"
        ) from None


class LocalLedger(Ledger):
    """A ledger in a file of the local disk, which one process at a time has open."""

    def __init__(self, path: Path):
        super().__init__()
        self._path, directory = path, path.parent
        # a directory that was made for a conversion is removed with it
        self._is_new = not directory.exists() or self._path.is_file()
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.fdopen(os.open(path, flags, 0o666), "ab")
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FormatError(
                    f"{path} is a link, which no conversion makes; give another path"
                ) from None
            raise
        try:
            # released when the process ends, however it ends
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            self._file.close()
            raise FormatError(
                f"another conversion is writing to {directory}; give another path"
            ) from None

    def begin(self, lines: bytes) -> bytes:
        """The lines of the ledger; empty if it is new, in which case `lines` are added."""
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a kill in the middle of a line leaves half of it
        if len(whole) != len(data):
            os.truncate(self._path, len(whole))
        if not whole:
            self.append(lines)
        return whole

    def append(self, lines: bytes) -> None:
        self._file.write(lines)
        self._file.flush()

    def remove(self) -> None:
        # remains of files that killed processes were creating
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


class BucketLedger(Ledger):
    """A ledger in objects of a bucket, which cannot be appended to: the first line is one object,
    and each addition is another, by number. They are found by name, not by listing.
    """

    def __init__(self, files: Files, name: str):
        super().__init__()
        self._files, self._name = files, name
        self._count = 0

    def begin(self, lines: bytes) -> bytes:
        try:
            self._files.create(self._name, lines)
        except FileExistsError:
            if recorded := self.read():
                return recorded
            raise FormatError(
                f"another conversion is writing to {self._files}; give another path"
            ) from None
        return b""

    def read(self) -> bytes:
        parts = [read_file(self._files, self._name) or b""]
        while parts[0]:
            names = [self._part_name(self._count + i) for i in range(1, FILES + 1)]
            contents = each_file(self._files, lambda name: read_file(self._files, name), names)
            existing = list(itertools.takewhile(lambda content: content is not None, contents))
            parts += filter(None, existing)
            self._count += len(existing)
            if len(existing) < len(contents):
                break
        return b"".join(parts)

    def append(self, lines: bytes) -> None:
        while True:
            self._count += 1
            try:
                self._files.create(self._part_name(self._count), lines)
                return
            except FileExistsError:
                continue  # it is of another process, which does the same work

    def remove(self) -> None:
        each_file(self._files, self._files.delete, self._part_names())
        self._files.delete(self._name)

    def discard(self) -> None:
        own = {self._name, *self._part_names()}
        others = [file.name for file in self._files.walk() if file.name not in own]
        each_file(self._files, self._files.delete, others)
        self.remove()

    def _part_names(self) -> list[str]:
        return [self._part_name(number) for number in range(1, self._count + 1)]

    def _part_name(self, number: int) -> str:
        return f"{self._name.removesuffix('.jsonl')}.{number}.jsonl"
