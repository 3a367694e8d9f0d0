"""Processes that JAX joins over loopback, with two virtual CPU devices each, that run a program of
`workers/`.

Each is a fork of one that has imported JAX and Orbax and started nothing: to import them takes
longer than what most of these programs do.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.stores import free_port

WORKERS = Path(__file__).parent / "workers"
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["jax", "optax", "orbax.checkpoint", "jax_ucp.checkpoint"])


class Joined:
    """So many processes with a program and its arguments, which are killed on exit."""

    def __init__(self, processes: int, program: str, *arguments: object, seconds: float = 300):
        self._folder = TemporaryDirectory()
        self._end = time.monotonic() + seconds
        words, port = [program, *map(str, arguments)], free_port()
        own = [(words, port, processes, rank, self._log(rank)) for rank in range(processes)]
        more = os.environ.copy(), seconds
        self._processes = [FORKS.Process(target=_run, args=(*each, *more)) for each in own]

    def __enter__(self) -> Joined:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, str(rank))

    def printed(self, rank: int) -> list[str]:
        """The lines that a process has printed so far."""
        log = self._log(rank)
        return log.read_text().splitlines() if log.exists() else []

    def errors(self, rank: int) -> str:
        """The end of what a process said of what is wrong."""
        return f"process {rank}:\n{self._log(rank).with_suffix('.err').read_text()[-4000:]}"

    def wait_for(self, has_come: Callable[[list[str]], bool]) -> None:
        """Return once this is true of what process 0 has printed, or it has ended."""
        while self._processes[0].is_alive() and not has_come(self.printed(0)):
            assert time.monotonic() < self._end, self.errors(0)
            time.sleep(0.01)

    def codes(self) -> list[int | None]:
        """The exit code of each, which is waited for."""
        for process in self._processes:
            process.join(max(0, self._end - time.monotonic()))
        return [process.exitcode for process in self._processes]

    def kill(self) -> None:
        """SIGKILL to all that still run."""
        for process in self._processes:
            process.kill()
            process.join()


def said_by(processes: int, program: str, *arguments: object, seconds: float = 300) -> list[str]:
    """The last line that each process printed, by rank. One that fails shows its own words."""
    with Joined(processes, program, *arguments, seconds=seconds) as joined:
        for rank, code in enumerate(joined.codes()):
            assert code == 0, joined.errors(rank)
        return [joined.printed(rank)[-1] for rank in range(processes)]


def _run(
    words: Sequence[str],
    port: int,
    processes: int,
    rank: int,
    log: Path,
    environment: Mapping[str, str],
    seconds: float,
) -> None:
    for to, path in ((1, log), (2, log.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), to)
    faulthandler.dump_traceback_later(0.8 * seconds, exit=True)  # of one that waits for ever, where
    os.environ.update(environment, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    sys.argv = list(words)
    sys.path.insert(0, str(WORKERS))
    runpy.run_path(str(WORKERS / words[0]), run_name="__main__")
    sys.stdout.flush()
    if processes > 1:
        jax.distributed.shutdown()  # as at the exit of a program: the others may still need it
