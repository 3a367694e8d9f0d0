"""A command as a contestant: what its processes took together, of memory and of disk too."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.race import Sample

EVERY_S = 0.02


@dataclass(frozen=True)
class ChildSample(Sample):
    """Also the most memory at once, a page that several processes map counted once, mapped files
    included; and the most disk in the folder written, beyond what was left there."""

    memory_mib: float
    spare_disk_mib: float


def run_child(command: Sequence[str], writes: Path | None = None, **env: str) -> ChildSample:
    """Run a command that makes the folder `writes`. Raises RuntimeError, with what it printed,
    if it fails.
    """
    if writes:
        shutil.rmtree(writes, ignore_errors=True)
    before, begun = os.times(), time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    watch = _Watch(process.pid, writes)
    watch.start()
    printed, _ = process.communicate()
    wall, after = time.perf_counter() - begun, os.times()
    watch.stop()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{printed[-2000:]}")
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    left = folder_bytes(writes) if writes else 0
    return ChildSample(wall, cpu, watch.memory / (1 << 20), max(0, watch.disk - left) / (1 << 20))


class _Watch(threading.Thread):
    """The most memory that a process and its descendants have at once, and the most bytes in a
    folder.
    """

    def __init__(self, pid: int, folder: Path | None):
        super().__init__(daemon=True)
        self.pid, self.folder = pid, folder
        self.memory = self.disk = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.memory = max(self.memory, sum(map(_memory, _family(self.pid))))
            if self.folder:
                self.disk = max(self.disk, folder_bytes(self.folder))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def folder_bytes(folder: Path) -> int:
    found = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                found += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return found
