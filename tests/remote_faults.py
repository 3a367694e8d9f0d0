"""Saves, restores, conversions and verifications of a bucket that fails: `python
tests/remote_faults.py --count 2000 --kills 200`.

Every run ends in the right bits, or in one error of ours, within its time. A wrong value, another
error, a checkpoint that opens and is wrong, and a run that hangs are findings; the seed of a finding
does it again: `--count 1 --seed N`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import jax_ucp as ucp
from helpers import faults_of
from jax_ucp.errors import NotACheckpoint, UCPError
from jax_ucp.files import object_store, remote
from servers import stores
from servers.fault_proxy import KINDS, FaultProxy, Faults
from servers.stores import Store

RUN_S = 300  # after so long a run is said to hang
OURS = (UCPError, FileExistsError, FileNotFoundError)


def tree(seed: int) -> dict[str, Any]:
    """A few small arrays: one of several chunks, integers, a scalar, a text."""
    dice = np.random.default_rng(seed)
    kernel = dice.normal(size=(96, 80)).astype(np.float32)
    table = dice.integers(-128, 128, (31, 7), np.int8)
    return {"kernel": kernel, "table": table, "step": np.int64(seed), "name": f"run {seed}"}


def is_right(restored: Any, seed: int) -> bool:
    want = tree(seed)
    return set(restored) == set(want) and all(
        np.asarray(restored[key]).dtype == np.asarray(want[key]).dtype
        and np.array_equal(restored[key], want[key])
        for key in want
    )


@dataclass
class Result:
    """How runs ended, and what was found."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0
    faults: Counter[str] = field(default_factory=Counter)


def random_faults(seed: int) -> Faults:
    """Some kinds of faults, each rarely or often, and sometimes more often than anybody asks."""
    dice = random.Random(seed)
    kinds = dice.sample(sorted(KINDS), dice.randint(1, 4))
    rate = dice.choice([0.05, 0.2, 0.5, 0.95]) / len(kinds)
    at_most = dice.choice([1, 2, 4, 100])
    return Faults(seed, rates=dict.fromkeys(kinds, rate), at_most=at_most, slow_s=0.2)


class Campaign:
    """Runs against one bucket, seen through a proxy with faults, and directly."""

    def __init__(self, store: Store, proxy: FaultProxy):
        self._store, self._proxy = store, proxy
        self.result = Result()

    def run(self, what: str, seed: int) -> None:
        """One run: what is needed is made without faults; what happens is looked at without."""
        url = f"{self._store.url}/{what}-{seed}"
        with self._directly():
            if what != "save":
                ucp.CheckpointHandler().save(f"{url}/source", ucp.args.Save(tree(seed)))
        self._proxy.set(random_faults(seed))
        begin = time.monotonic()
        faulthandler.dump_traceback_later(RUN_S, exit=True)
        with self._through_faults():
            end = self._end_of(what, seed, url)
        faulthandler.cancel_dump_traceback_later()
        self.result.slowest_s = max(self.result.slowest_s, time.monotonic() - begin)
        self.result.faults += Counter({k: self._proxy.met[k] for k in KINDS})
        with self._directly():
            fault = self._look(what, seed, url, end)
        self.result.ends[f"{what}: {end}"] += 1
        if fault:
            self.result.findings.append(f"{what} --seed {seed}: {fault}")

    def _end_of(self, what: str, seed: int, url: str) -> str:
        try:
            return "right" if DO[what](url, seed) else "WRONG VALUE"
        except OURS as error:
            return type(error).__name__
        except Exception as error:
            return f"ANOTHER ERROR {type(error).__name__}: {error}"[:300]

    def _look(self, what: str, seed: int, url: str, end: str) -> str | None:
        """What is wrong with how a run ended, or with what it left."""
        if end.startswith(("WRONG", "ANOTHER")):
            return end
        target = f"{url}/target"
        try:
            checkpoint = ucp.open(target if what in ("save", "convert") else f"{url}/source")
            right = is_right(checkpoint.restore(), seed)
            faults = faults_of(checkpoint)
        except NotACheckpoint:
            return "it succeeded, and there is no checkpoint" if end == "right" else None
        except Exception as error:
            return f"what it left opens, and: {type(error).__name__}: {error}"[:300]
        return None if right and not faults else f"what it left is wrong: {faults}"

    @contextlib.contextmanager
    def _directly(self) -> Iterator[None]:
        os.environ.update(self._store.env)
        yield

    @contextlib.contextmanager
    def _through_faults(self) -> Iterator[None]:
        os.environ.update(self._store.behind(self._proxy.endpoint).env)
        yield


def save(url: str, seed: int) -> bool:
    ucp.CheckpointHandler().save(f"{url}/target", ucp.args.Save(tree(seed)))
    return True


def restore(url: str, seed: int) -> bool:
    return is_right(ucp.open(f"{url}/source").restore(), seed)


def convert(url: str, seed: int) -> bool:
    copy = ucp.open(f"{url}/source").save(f"{url}/target", budget_bytes=1 << 20)
    return is_right(copy.restore(), seed)


def verify(url: str, seed: int) -> bool:
    """What is sound may be called damaged only where the store sends what is not there: such a
    fault is an error of ours too.
    """
    faults = faults_of(ucp.open(f"{url}/source"))
    if faults:
        raise UCPError(faults[0])
    return True


DO: Mapping[str, Callable[[str, int], bool]] = {
    "save": save, "restore": restore, "convert": convert, "verify": verify,
}  # fmt: skip


def hurry() -> None:
    """Wait less between two requests than a program would."""
    remote.FIRST_WAIT_S, remote.LONGEST_WAIT_S = 0.01, 0.05
    brief = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20)}
    object_store._RETRY["backoff"] = brief


def campaign(store: Store, count: int, seed: int) -> Result:
    """So many runs, of each kind in turn."""
    hurry()
    with FaultProxy(store.endpoint) as proxy:
        runs = Campaign(store, proxy)
        for number in range(seed, seed + count):
            runs.run(list(DO)[number % len(DO)], number)
            if number % 50 == 49:
                print(number + 1, runs.result, file=sys.stderr, flush=True)
    return runs.result


def kills(store: Store, count: int, seed: int) -> Result:
    """Saves that SIGKILL ends, each at another moment."""
    result = Result()
    os.environ.update(store.env)
    dice = random.Random(seed)
    with savers() as saver:
        usual = max(saver.save(f"{store.url}/whole-{n}", n, RUN_S)[1] for n in range(3))
        for number in range(seed, seed + count):
            url = f"{store.url}/kill-{number}"
            done, _ = saver.save(url, number, dice.uniform(0, 1.2 * usual))
            end = _what_is_left(url, number)
            result.ends["kill: " + end] += 1
            if end not in SOUND or (done and end != "a whole checkpoint"):
                result.findings.append(f"kill --seed {number}: {end}, done: {done}")
    return result


SOUND = ("a whole checkpoint", "nothing, saved again", "nothing, kept for the writer")


def _what_is_left(url: str, seed: int) -> str:
    """What a killed save left. Without a checkpoint, the same save is done again, or refused
    because of the writer that was killed.
    """
    try:
        return "a whole checkpoint" if _is_sound(url, seed) else "WRONG"
    except NotACheckpoint:
        pass
    try:
        ucp.CheckpointHandler().save(url, ucp.args.Save(tree(seed)))
    except FileExistsError as error:
        return "nothing, kept for the writer" if "ucp.writer.json" in str(error) else str(error)
    return "nothing, saved again" if _is_sound(url, seed) else "WRONG when saved again"


def _is_sound(url: str, seed: int) -> bool:
    checkpoint = ucp.open(url)
    return is_right(checkpoint.restore(), seed) and not any(f for _, f in checkpoint.verify())


_SAVER = """
import os, sys
sys.path.insert(0, {tests!r})
import obstore
from remote_faults import tree, ucp
ucp.CheckpointHandler, ucp.args
for line in sys.stdin:
    url, seed = line.split()
    child = os.fork()
    if child == 0:
        ucp.CheckpointHandler().save(url, ucp.args.Save(tree(int(seed))))
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Saver:
    """A process that has imported everything, started no thread, and forks a child for each save."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def save(self, url: str, seed: int, kill_after: float) -> tuple[bool, float]:
        """Whether the save ended by itself, and after how many seconds."""
        self._process.stdin.write(f"{url} {seed}\n")
        self._process.stdin.flush()
        child, begin = int(self._process.stdout.readline()), time.monotonic()
        timer = threading.Timer(kill_after, _kill, [child])
        timer.start()
        status = int(self._process.stdout.readline())
        timer.cancel()
        return status == 0, time.monotonic() - begin


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def savers() -> Iterator[Saver]:
    source = _SAVER.format(tests=str(Path(__file__).parent))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", source], **pipes)
    try:
        yield Saver(process)
    finally:
        process.stdin.close()
        process.wait(RUN_S)
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with stores.moto() as store:
        found = [campaign(store, options.count, options.seed)]
    with stores.moto() as store:
        found += [kills(store, options.kills, options.seed)] if options.kills else []
    for result in found:
        for end, count in sorted(result.ends.items()):
            print(f"{count:6} {end}")
        met = ", ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items()))
        print(f"faults met: {met or 'kills only'}; the slowest run took {result.slowest_s:.1f} s")
        print("\n".join(result.findings) or "no findings")
    sys.exit(any(result.findings for result in found))


if __name__ == "__main__":
    main()
