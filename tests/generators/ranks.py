"""Processes of training runs: one of its own for each case, and a fork of it for each rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MEGATRON = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "PYTORCH_JIT": "0",
    "TORCHDYNAMO_DISABLE": "1", "NVTE_TORCH_COMPILE": "0", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_alone(arguments: Sequence[object], source: Path, log: Path, **settings: str) -> int:
    """The exit code of a Python that finds Megatron's `source`; all that it leaves is ended."""
    settings |= {"MASTER_PORT": str(free_port())}
    settings |= {"PYTHONPATH": f"{source.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, arguments)],
            env=os.environ | MEGATRON | settings,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(400)
        except subprocess.TimeoutExpired:
            code = -1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Megatron leaves processes of its own behind
    return code


def write_case(folder: Path, arguments: Sequence[object], source: Path, **settings: str) -> bool:
    """Whether a process of its own wrote a case; of one that did not, the end of its log."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log"
    code = run_alone(arguments, source, log, **settings)
    written = not code and (folder / "case.json").is_file()
    print(f"{folder.name}: {'written' if written else 'FAILED'}", flush=True)
    if written:
        log.unlink()
    else:
        print("   ", "\n    ".join(log.read_text().splitlines()[-14:]), flush=True)
    return written


def forked(world: int, seconds: float, work: Callable[..., None], *about: Any) -> None:
    """Do the work in forks of this process, one for each rank. Raises what one of them raises, or
    that it takes too long, and ends the others.
    """
    from torch import multiprocessing

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {name: str(world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    how = {"nprocs": world, "join": False, "start_method": "fork"}
    processes = multiprocessing.start_processes(_as_rank, (work, *about), **how)
    until = time.monotonic() + seconds
    while not processes.join(1):
        if time.monotonic() > until:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"not done in {seconds} seconds")


def _as_rank(rank: int, work: Callable[..., None], *about: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    work(*about)


def on_ranks(world: int, work: Callable[[], None]) -> NoReturn:
    """Do the work in `world` processes, of which this is the first; an error ends all of them."""
    os.environ["WORLD_SIZE"] = str(world)
    rank, children = 0, []
    for number in range(1, world):
        child = os.fork()
        if not child:
            rank, children = number, []
            break
        children.append(child)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    sys.stdout.flush()
    os._exit(0)
