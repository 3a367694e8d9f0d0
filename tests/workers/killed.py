"""Saves, also to a bucket, converts and exports that SIGKILL ends: `python killed.py ARGUMENTS`, those
of `main` in JSON.

It prints what `main` returns.

A process that has imported everything and started nothing forks one child for each kill. That is
sound as long as it has a single thread, which it checks: JAX's backend and TensorStore's threads
begin in the children.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp
from jax_ucp.cli.main import main as jax_ucp_command
from jax_ucp.files.local import LocalFiles
from jax_ucp.formats.exporting import EXPORT_FORMATS
from jax_ucp.jobs.ledger import LocalLedger
from jax_ucp.sharding import save as sharding_save
from jax_ucp.universal.store import ZarrStore

STEPS = (1, 2)
# of the converts, in bytes: small, so that there are many blocks to be stopped between
BUDGET = 1 << 20

_SYSTEM_CALLS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
_METHODS = (
    (LocalFiles, ("write", "create", "delete")),
    (ZarrStore, ("create", "write")),
    (LocalLedger, ("note", "remove")),
)


def tree_of_step(step: int) -> Any:
    """A tree of all kinds of leaves, whose arrays are other ones at every step."""
    rng = np.random.default_rng(step)
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def put(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "params": {
            "kernel": put(rng.standard_normal((1024, 512), np.float32), "data", "model"),
            "embedding": put(
                rng.standard_normal((100, 36), np.float32).astype(ml_dtypes.bfloat16), None, "model"
            ),
            "table": rng.integers(-128, 128, (90, 70), np.int8),
        },
        "opt": (put(rng.standard_normal((8, 3), np.float32)), [np.arange(step, step + 5)], None),
        "rng": jax.random.key(step),
        "name": f"step {step}",
        "step": step,
    }


def small_tree(seed: int) -> dict[str, Any]:
    """A few small arrays: one of several chunks, integers, a scalar, a text."""
    dice = np.random.default_rng(seed)
    kernel = dice.normal(size=(96, 80)).astype(np.float32)
    table = dice.integers(-128, 128, (31, 7), np.int8)
    return {"kernel": kernel, "table": table, "step": np.int64(seed), "name": f"run {seed}"}


def saving(root: str, source: str, bound: int | None = None) -> Callable[[], None]:
    """Asynchronous saves of all `STEPS` with `CheckpointManager`; the trees are made before. With a
    bound in stages, as from devices with a memory of their own.
    """
    trees = {step: tree_of_step(step) for step in STEPS}
    if bound:
        sharding_save.host_bytes = lambda part: part.nbytes

    def save() -> None:
        handler = ucp.CheckpointHandler(snapshot_bytes=bound)
        manager = ocp.CheckpointManager(root, item_handlers=handler)
        for step, tree in trees.items():
            manager.save(step, args=ucp.args.Save(tree))
        manager.wait_until_finished()

    return save


def saving_to_a_bucket(url: str, source: str) -> Callable[[], None]:
    return lambda: ucp.CheckpointHandler().save(url, ucp.args.Save(small_tree(0)))


def converting(root: str, source: str) -> Callable[[], None]:
    """`jax-ucp convert SOURCE ROOT/converted`."""
    command = ["convert", source, f"{root}/converted", "--budget", str(BUDGET), "--json"]
    return lambda: jax_ucp_command(command, standalone_mode=False)


def exporting(root: str, source: str, format: str) -> Callable[[], None]:
    """`jax-ucp export SOURCE ROOT/out`."""
    cut = ["--max-shard", "48"] if format == "safetensors" else []
    command = ["export", source, f"{root}/out", "--format", format, *cut, "--json"]
    return lambda: jax_ucp_command(command, standalone_mode=False)


JOBS = {
    "save": saving,
    "save in stages": functools.partial(saving, bound=1 << 19),
    "save to a bucket": saving_to_a_bucket,
    "convert": converting,
}
JOBS |= {f"export {name}": functools.partial(exporting, format=name) for name in EXPORT_FORMATS}


class Moments:
    """Says and counts what happens to the files below `root`, and ends the process by SIGKILL at
    one count.

    A moment is just before Python makes, opens to write, renames or removes a file, and just before
    and after a call of our store.
    """

    def __init__(self, root: str, say: Callable[[str], object], stop_at: int):
        self._root, self._say, self._left = root, say, stop_at

    def watch(self) -> None:
        for owner, names in _METHODS:
            for name in names:
                announced = self._announced(getattr(owner, name), f"{owner.__name__}.{name}")
                setattr(owner, name, announced)
        sys.addaudithook(self._audit)

    def passed(self, what: str) -> None:
        self._say(what)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, call: str, args: tuple[Any, ...]) -> None:
        if call in _SYSTEM_CALLS and str(args[0]).startswith(self._root):
            if call == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
                return
            self.passed(f"{call} {str(args[0]).removeprefix(self._root)}")

    def _announced(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            what = f"{name} {args[0] if args else ''}"
            self.passed(f"before {what}")
            result = method(owner, *args, **kwargs)
            self.passed(f"after {what}")
            return result

        return wrapper


class Child:
    """A fork that does the job, and then waits to be killed."""

    def __init__(self, job: str, root: str, source: str, stop_at: int = 0):
        (self._says, says), (lifeline, self._lifeline) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._says)
            os.close(self._lifeline)
            _be_child(job, root, source, stop_at, says, lifeline)
        os.close(says)
        os.close(lifeline)
        self.said: list[str] = []
        self._lines = os.fdopen(self._says)

    def listen(self, until: str) -> None:
        """Read what the child says, up to a line or to its end."""
        for line in self._lines:
            self.said.append(line.rstrip("\n"))
            if self.said[-1] == until:
                return

    def kill(self) -> None:
        """SIGKILL. Raises if that is not what ended the child."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.listen("")
        self._lines.close()
        os.close(self._lifeline)
        if os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"the child ended by itself with status {status}: {self.said[-1:]}")


def _be_child(job: str, root: str, source: str, stop_at: int, says: int, lifeline: int) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        run = JOBS[job](root, source)
        Moments(root, lambda line: os.write(says, f"{line}\n".encode()), stop_at).watch()
        os.write(says, b"begun\n")
        run()
        os.write(says, b"done\n")
        os.read(lifeline, 1)  # the parent kills us, or has ended itself
    except BaseException as error:
        os.write(says, f"{error!r}\n".encode())
    os._exit(1)


def main(job: str, root: str, source: str, times: int, seed: int) -> list[dict[str, str]]:
    """Let the job run whole, then kill it: at `times` times and before its first moment, and at
    each moment of its last commit.

    The times are drawn uniformly from its duration. Returns where each killed job wrote, and the
    last moment that it passed.
    """
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) != 1:
        raise RuntimeError(
            "this process has threads already, and would fork into an undefined state"
        )
    draw = random.Random(seed)
    whole = Child(job, f"{root}/whole", source)
    whole.listen("begun")
    begin = time.perf_counter()
    whole.listen("done")
    duration, passed = time.perf_counter() - begin, whole.said[1:-1]
    whole.kill()
    kills = []
    moments = [draw.uniform(0, duration) for _ in range(times)] + [1] * (times > 0)
    for n, moment in enumerate([*moments, *range(_commit(passed), len(passed) + 2)]):
        at = f"{root}/{n}"
        child = Child(job, at, source, moment if isinstance(moment, int) else 0)
        child.listen("begun")
        if isinstance(moment, float):
            time.sleep(moment)
        else:
            child.listen("done")
        child.kill()
        kills.append({"root": at, "last": child.said[-1]})
    return kills


def _commit(passed: list[str]) -> int:
    """The number of a moment before the last commit, at which most arrays are on disk: threads pass
    the last of them in another order each time. An export is all commit.
    """
    first = "before LocalFiles.write _METADATA"
    commits = (1 + i for i, what in enumerate(passed) if what.startswith(first))
    return max(1, max(commits, default=1) - 16)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
