"""Saves, restores, conversions and verifications of a bucket that fails: `python
tests/remote_faults.py --count 2000 --kills 200`.

Every run ends in the right bits, or in one error of ours, within its time. A wrong value, another
error, a checkpoint that opens and is wrong, and a run that hangs are findings; the seed of a finding
does it again: `--count 1 --seed N`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
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
from programs import killed
from servers import stores
from servers.fault_proxy import KINDS, FaultProxy, Faults
from servers.stores import Store
from workers.killed import small_tree

RUN_S = 300  # after so long a run is said to hang
OURS = (UCPError, FileExistsError, FileNotFoundError)


def is_right(restored: Any, seed: int) -> bool:
    want = small_tree(seed)
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
        url, through = f"{self._store.url}/{what}-{seed}", self._store.behind(self._proxy.endpoint)
        os.environ.update(self._store.env)
        if what != "save":
            ucp.CheckpointHandler().save(f"{url}/source", ucp.args.Save(small_tree(seed)))
        self._proxy.set(random_faults(seed))
        os.environ.update(through.env)
        begin = time.monotonic()
        faulthandler.dump_traceback_later(RUN_S, exit=True)
        end = self._end_of(what, seed, url)
        faulthandler.cancel_dump_traceback_later()
        self.result.slowest_s = max(self.result.slowest_s, time.monotonic() - begin)
        self.result.faults += Counter({k: self._proxy.met[k] for k in KINDS})
        os.environ.update(self._store.env)
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


def save(url: str, seed: int) -> bool:
    ucp.CheckpointHandler().save(f"{url}/target", ucp.args.Save(small_tree(seed)))
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


def kills(store: Store, count: int) -> Result:
    """Saves that SIGKILL ends at so many random times, and at each moment of one."""
    result = Result()
    os.environ.update(store.env)
    for url, moment in killed("save to a bucket", f"{store.url}/kills", times=count):
        end = _what_is_left(url)
        result.ends["kill: " + end] += 1
        if end not in SOUND or (moment == "done" and end != "a whole checkpoint"):
            result.findings.append(f"killed at {moment}: {end}")
    return result


SOUND = ("a whole checkpoint", "nothing, saved again", "nothing, kept for the writer")


def _what_is_left(url: str) -> str:
    """What a killed save left. Without a checkpoint, the same save is done again, or refused
    because of the writer that was killed.
    """
    try:
        return "a whole checkpoint" if _is_sound(url) else "WRONG"
    except NotACheckpoint:
        pass
    try:
        ucp.CheckpointHandler().save(url, ucp.args.Save(small_tree(0)))
    except FileExistsError as error:
        return "nothing, kept for the writer" if "ucp.writer.json" in str(error) else str(error)
    return "nothing, saved again" if _is_sound(url) else "WRONG when saved again"


def _is_sound(url: str) -> bool:
    checkpoint = ucp.open(url)
    return is_right(checkpoint.restore(), 0) and not faults_of(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with stores.moto() as store:
        found = [campaign(store, options.count, options.seed)]
    with stores.moto() as store:
        found += [kills(store, options.kills)] if options.kills else []
    for result in found:
        for end, count in sorted(result.ends.items()):
            print(f"{count:6} {end}")
        met = ", ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items()))
        print(f"faults met: {met or 'kills only'}; the slowest run took {result.slowest_s:.1f} s")
        print("\n".join(result.findings) or "no findings")
    sys.exit(any(result.findings for result in found))


if __name__ == "__main__":
    main()
