"""Conversions and exports whose workers are killed.

In every run SIGKILL ends a random worker at a random moment: of a Dask cluster, which starts
another; of `--workers`; a rank of MPI; one of the processes of `--worker`. The job must then end by
itself, or by the same command, with the bytes that one process writes; and no target that is wrong
can be opened meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from distributed import LocalCluster

import jax_ucp as ucp
from helpers import digests
from jax_ucp.errors import NotACheckpoint
from test_read_once import SOURCES

RUN_S = 300  # after so long a command is said to hang
ATTEMPTS = 4
SHARES = 3
NOTE = "ucp.conversion.json"
UNCLEARED = ("ucp-ledger",)  # what the same command clears away after a commit
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
COMMANDS = (("convert", "--budget", "4MiB"), ("export", "--format", "dcp", "--budget", "4MiB"))


@dataclass(frozen=True)
class How:
    """How a command gets workers: its processes, and those among which one is killed."""

    commands: Sequence[Sequence[str]]
    victims: Callable[[Sequence[subprocess.Popen[bytes]]], Sequence[int]]


def dask(command: Sequence[str], cluster: LocalCluster) -> How:
    cluster.wait_for_workers(2, timeout=RUN_S)  # one that was killed is started again
    workers = cluster.workers.values()
    line = [*command, "--scheduler", cluster.scheduler_address]
    return How([line], lambda processes: [nanny.pid for nanny in workers if nanny.pid])


def pool(command: Sequence[str], cluster: LocalCluster) -> How:
    return How([[*command, "--workers", "2"]], lambda processes: _below(processes, "spawn_main"))


def mpi(command: Sequence[str], cluster: LocalCluster) -> How:
    line = [MPIEXEC, "-n", "3", *command, "--scheduler", "mpi"]
    return How([line], lambda processes: _below(processes, "-m jax_ucp"))


def shares(command: Sequence[str], cluster: LocalCluster) -> How:
    lines = [[*command, "--worker", f"{i}/{SHARES}"] for i in range(SHARES)]
    return How(lines, lambda processes: [p.pid for p in processes if p.poll() is None])


KINDS: Mapping[str, Callable[[Sequence[str], LocalCluster], How]] = {
    "dask": dask, "processes": pool, "mpi": mpi, "shares": shares,
}  # fmt: skip


def _below(processes: Sequence[subprocess.Popen[bytes]], words: str) -> list[int]:
    """The processes that these have started, by words of their command lines."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in processes:
            below = psutil.Process(process.pid).children(recursive=True)
            found += [p.pid for p in below if words in " ".join(p.cmdline())]
    return found


def _wait_for_more(processes: Sequence[subprocess.Popen[bytes]], nbytes: float, out: Path) -> None:
    """Return once a target has more bytes on the disk, or all who write it have ended."""
    end = time.monotonic() + RUN_S
    while _disk_bytes(out) <= nbytes and any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing was written in {RUN_S} s")
        time.sleep(0.02)


def _disk_bytes(out: Path) -> int:
    """The bytes that the files of a target take, those that are not whole yet too."""
    found = 0
    for folder in (out, out.parent / f".{out.name}.partial"):
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_blocks * 512
    return found


def _is_there(out: Path) -> bool:
    """Whether a reader takes it for a checkpoint."""
    try:
        ucp.open(out)
    except (FileNotFoundError, NotACheckpoint):
        return False
    return True


class Campaign:
    """Runs on one source, of which one process has made what each run is to make."""

    def __init__(self, folder: Path, cluster: LocalCluster):
        self._folder, self._cluster = folder, cluster
        self._source = folder / "source"
        self._source.mkdir()
        SOURCES["deepspeed"](self._source)
        self._whole: dict[str, Mapping[str, str]] = {}
        self._sizes: dict[str, int] = {}
        for target in COMMANDS:
            self._attempt([self._command(target, "whole")])
            self._whole[target[0]] = digests(folder / "whole")
            self._sizes[target[0]] = _disk_bytes(folder / "whole")
            shutil.rmtree(folder / "whole")

    def run(self, seed: int) -> None:
        """Raises AssertionError where a run does not end as it should; the seed does it again."""
        kind = list(KINDS)[seed % len(KINDS)]
        target = COMMANDS[seed // len(KINDS) % len(COMMANDS)]
        for path in (*self._folder.glob("out*"), *self._folder.glob(".out*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        how = KINDS[kind](self._command(target, "out"), self._cluster)
        self._end(how, target[0], random.Random(seed))

    def _end(self, how: How, target: str, dice: random.Random) -> None:
        """Run the command, kill one of its workers, and run it again until all is done."""
        out = self._folder / "out"
        from_start = dice.random() < 0.2  # when its processes do not work yet
        # The moment is a share of the bytes, and not of the time that another run took.
        share, delay = dice.random() * self._sizes[target], dice.random()

        def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
            if from_start:
                time.sleep(delay)
            else:
                _wait_for_more(processes, share, out)
            for victim in dice.sample(victims, 1) if (victims := how.victims(processes)) else ():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(victim, signal.SIGKILL)

        left = self._attempt(how.commands, kill)
        attempts = 1
        while left and not self._is_whole(out, target):
            if attempts == ATTEMPTS:
                raise AssertionError(f"not done after {ATTEMPTS} attempts: {self._last_words()}")
            left = self._attempt(left)
            attempts += 1
        assert self._is_whole(out, target), "it is not there whole, or has something beside it"
        beside = sorted(path.name for path in out.parent.glob(".out*"))
        assert not beside, f"it left {beside}"

    def _command(self, target: Sequence[str], out: str) -> list[str]:
        what, *options = target
        paths = [str(self._source), str(self._folder / out)]
        return [sys.executable, "-m", "jax_ucp", what, *paths, *options]

    def _attempt(
        self,
        commands: Sequence[Sequence[str]],
        meanwhile: Callable[[Sequence[subprocess.Popen[bytes]]], None] = lambda processes: None,
    ) -> Sequence[Sequence[str]]:
        """Run commands at once. Returns those that failed."""
        with open(self._folder / "errors.txt", "wb") as errors:
            how = {"stdout": subprocess.DEVNULL, "stderr": errors}
            processes = [subprocess.Popen(command, **how) for command in commands]
            try:
                meanwhile(processes)
                codes = [process.wait(timeout=RUN_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        return [command for command, code in zip(commands, codes, strict=True) if code]

    def _is_whole(self, out: Path, target: str) -> bool:
        """Whether there is what one process makes, and nothing else. Raises AssertionError where
        something else can be opened.
        """
        if not _is_there(out):
            return False
        files = digests(out)
        files.pop(NOTE, None)
        written = {name: of for name, of in files.items() if not name.startswith(UNCLEARED)}
        assert written == self._whole[target], "it can be opened, and is not what one process makes"
        return written == files

    def _last_words(self) -> str:
        return (self._folder / "errors.txt").read_text(errors="replace")[-500:]


@contextlib.contextmanager
def two_workers() -> Iterator[LocalCluster]:
    """Two Dask workers, each of which is started again when it ends: by its nanny, or by the
    cluster where that gives up, as it does when the worker is killed while it starts.
    """
    how = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with LocalCluster(n_workers=2, silence_logs=60, **how) as workers:
        workers.adapt(minimum=2, maximum=2)
        yield workers
