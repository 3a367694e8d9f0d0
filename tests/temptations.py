"""Every mistake of `temptation_mistakes` with every checkpoint of `temptation_subjects`, by the
thousand: `python tests/temptations.py --count 3000`; with `--format dcp` of one format alone.

Each attempt is opened, restored, converted and restored from that. What comes out is the truth,
with everything that is stored accounted for, or a refusal: never another value. The attempts of a
format are the same in every run, and any first part of them is spread over mistakes and checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

if __name__ == "__main__":  # as conftest.py does for the tests
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import jax_ucp as ucp
from cases import RULES
from damages import with_changes
from folders import Folder, write_folder
from helpers import comparable, mesh_of
from jax_ucp.errors import UCPError
from jax_ucp.sharding.jax_versions import enable_x64
from temptation_invisible import invisible, is_another_whole, other_in
from temptation_mistakes import MISTAKES, Attempt
from temptation_subjects import FORMATS, Subject, subjects

SECONDS = 60
WRONG = "wrong"


# What a checkpoint gives.


@dataclass(frozen=True)
class Result:
    """Every leaf by its path, and what is told beside them."""

    leaves: Mapping[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: str = ""
    items: frozenset[tuple[str, str]] = frozenset()
    told: str | None = None


def leaves_of(tree: Any) -> dict[str, Any]:
    """Every leaf by its path; of a typed key its numbers, with its type in the path."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in found}
    keys = {name: leaf for name, leaf in leaves.items() if _is_key(leaf)}
    data = {f"{name} {key.dtype}": jax.random.key_data(key) for name, key in keys.items()}
    return {name: leaf for name, leaf in leaves.items() if name not in keys} | data


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def result_of(checkpoint: ucp.Checkpoint, tree: Any) -> Result:
    items = frozenset((item.where, item.status) for item in checkpoint.inventory)
    reasons = [f"{item.where} {item.reason}" for item in checkpoint.inventory]
    groups = repr([(group.params, group.settings) for group in checkpoint.groups])
    told = "\n".join([*checkpoint.notes, *reasons])
    return Result(leaves_of(tree), dict(checkpoint.extras), groups, items, told)


def differences(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    found = [f"{name} is not there" for name in want if name not in got]
    found += [f"{name} should not be there" for name in got if name not in want]
    both = [name for name in want if name in got]
    return found + [
        f"{name} is other" for name in both if comparable(got[name]) != comparable(want[name])
    ]


def rounded(want: Any, got: Any) -> Any:
    """A floating array in the dtype of another of 16 bits, if that is one."""
    arrays = isinstance(want, np.ndarray | jax.Array) and isinstance(got, np.ndarray | jax.Array)
    if not arrays or got.dtype.name not in ("bfloat16", "float16"):
        return want
    return np.asarray(want).astype(got.dtype)


# One attempt.


@dataclass(frozen=True)
class Way:
    """What an attempt is made with beside its mistake."""

    mesh: bool = False
    weights_only: bool = False

    def restored(self, checkpoint: ucp.Checkpoint, **more: Any) -> Any:
        if not self.mesh:
            return checkpoint.restore(**more)
        meets = any(re.search(RULES[0][0], leaf.label) for leaf in checkpoint.leaves)
        with enable_x64(True):
            rules = RULES if meets else ()
            return checkpoint.restore(mesh=mesh_of(4, 2), rules=rules, **more)

    def options(self, subject: Subject) -> dict[str, Any]:
        """Those of weights alone are without what is said of the optimizer, and so is refused."""
        if not self.weights_only:
            return dict(subject.options)
        kept = {name: x for name, x in subject.options.items() if name != "optimizer_groups"}
        return kept | {"weights_only": True}


@dataclass(frozen=True)
class Trial:
    subject: Subject
    mistake: str
    attempt: Attempt
    way: Way = Way()


@dataclass(frozen=True)
class Outcome:
    """`right`, `refused`, `sampled` where only a restore in full sees it, `invisible` or `wrong`."""

    kind: str
    text: str = ""


class Late(Exception):
    """An attempt takes too long. It is no OSError, as a TimeoutError is, which would look like
    one of a file.
    """


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises Late after `SECONDS` of this process's own time, whatever else the machine does."""

    def late(*_: object) -> None:
        raise Late(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Campaign:
    """Makes attempts in a folder, and judges what comes of them."""

    def __init__(self, work: Path, found: Sequence[Subject]):
        self.work = work
        self.subjects = {subject.name: subject for subject in found}
        self.truths: dict[tuple[str, str, bool], Result] = {}

    def truth(self, subject: Subject, which: str, way: Way) -> Result:
        """What a subject holds, where `which` is its own name, or its sibling or another subject."""
        subject = self.subjects.get(which, subject)
        key = subject.name, which, way.weights_only
        if key not in self.truths:
            folder = subject.folder if which == subject.name else subject.as_saved(which)
            with self.placed(folder, "valid") as root:
                checkpoint = ucp.open(root / subject.entry, **way.options(subject))
                self.truths[key] = result_of(checkpoint, checkpoint.restore())
        return self.truths[key]

    @contextlib.contextmanager
    def placed(self, folder: Folder, name: str) -> Iterator[Path]:
        write_folder(folder, self.work / name)
        try:
            yield self.work / name
        finally:
            shutil.rmtree(self.work / name, ignore_errors=True)

    def outcome(self, trial: Trial) -> Outcome:
        self.truth(trial.subject, trial.subject.name, trial.way)  # which is no mistake's refusal
        folder = with_changes(trial.subject.folder, trial.attempt.changes)
        with self.placed(folder, "source") as root, warnings.catch_warnings(), in_time():
            warnings.simplefilter("ignore")
            try:
                outcome = self.judged(trial, root, folder)
            except Exception as error:
                outcome = refusal(error)
            if not root.exists():
                return Outcome(WRONG, f"the source is gone; {outcome.text}")
        return outcome

    def judged(self, trial: Trial, root: Path, folder: Folder) -> Outcome:
        attempt, way = trial.attempt, trial.way
        entry = trial.subject.entry if attempt.opened is None else attempt.opened
        checkpoint = ucp.open(root / entry, **way.options(trial.subject))
        try:
            found = result_of(checkpoint, way.restored(checkpoint))
            restored = self.compared(trial, folder, found)
            if restored.kind == WRONG and attempt.small:
                restored = self.in_full(trial, folder, checkpoint, restored)
        except Exception as error:
            restored = refusal(error)
        converted = self.converted(trial, folder, checkpoint)
        return max(restored, converted, key=lambda outcome: outcome.kind == WRONG)

    def in_full(
        self, trial: Trial, folder: Folder, checkpoint: ucp.Checkpoint, wrong: Outcome
    ) -> Outcome:
        """What a restore says of few bytes that are other if it is asked to compare everything."""
        try:
            found = result_of(checkpoint, trial.way.restored(checkpoint, verify="full"))
        except Exception as error:
            outcome = refusal(error)
            return Outcome("sampled", wrong.text) if outcome.kind == "refused" else outcome
        return self.compared(trial, folder, found)

    def converted(self, trial: Trial, folder: Folder, checkpoint: ucp.Checkpoint) -> Outcome:
        """The inventory of a conversion is one of its own."""
        notes = "\n".join(checkpoint.notes)
        try:
            kept = checkpoint.save(self.work / "out")
            found = result_of(kept, kept.restore())
        except Exception as error:
            return refusal(error)
        finally:
            shutil.rmtree(self.work / "out", ignore_errors=True)
        return self.compared(trial, folder, replace(found, told=None), notes)

    def compared(
        self, trial: Trial, folder: Folder, found: Result, notes: str | None = None
    ) -> Outcome:
        """Whether a result is the truth, and all that is stored is accounted for."""
        subject, attempt, way = trial.subject, trial.attempt, trial.way
        notes = found.told or "" if notes is None else notes
        want = as_noted(self.truth(subject, subject.name, way), found, notes)
        faults = faults_of(found, want, folder)
        for which in attempt.also if faults else ():
            truth = as_noted(self.truth(subject, which, way), found, notes)
            if not faults_of(found, truth, folder):
                return Outcome("right", "it is another whole checkpoint")
        if attempt.opened:  # extras and groups are those of other files
            faults = differences(found.leaves, want.leaves)
        if faults:
            other = other_in(found.leaves, want.leaves)
            what = f"{trial.mistake}: {attempt.what}"
            reason = invisible(subject.name, what, other, notes, way.weights_only)
            if not reason and is_another_whole(subject, folder):
                reason = "another whole checkpoint"
            if reason:
                return Outcome("invisible", reason)
            return Outcome(WRONG, f"{other}: {'; '.join(faults[:4])}")
        lacks = "" if found.told is None else unaccounted(trial, folder, found, want)
        return Outcome(WRONG if lacks else "right", lacks)


def faults_of(found: Result, want: Result, folder: Folder) -> list[str]:
    """What of a result is not as it should be, but for extras of files that are not there."""
    there = [
        name for name in want.extras if any(n.endswith(name) or f"{name}/" in n for n in folder)
    ]
    faults = differences(found.leaves, want.leaves)
    for file in there:
        got = found.extras.get(file, {})
        said = want.extras[file].items()
        faults += [f"extra {file}:{n}" for n, x in said if repr(got.get(n, "nothing")) != repr(x)]
    return faults + ["groups"] * (found.groups != want.groups)


def as_noted(truth: Result, found: Result, notes: str) -> Result:
    """A truth without the extras of the optimizer's files, and of weights as the module has them,
    rounded, where a note says that the optimizer cannot be read.
    """
    if "no second copy proves them" not in notes:
        return truth
    kept = [name for name in truth.extras if name in found.extras or "optim" not in name]
    leaves = {name: rounded(leaf, found.leaves.get(name)) for name, leaf in truth.leaves.items()}
    return replace(truth, leaves=leaves, extras={name: truth.extras[name] for name in kept})


def refusal(error: Exception) -> Outcome:
    """An error is one of ours. What the message of a damage must have is in `damage_rows`."""
    if isinstance(error, UCPError | FileExistsError | NotADirectoryError | IsADirectoryError):
        return Outcome("refused", str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return Outcome(WRONG, f"{type(error).__name__} at {place}: {error}")


def unaccounted(trial: Trial, folder: Folder, found: Result, want: Result) -> str:
    """What the inventory lacks of the valid checkpoint's, and of files that came to it."""
    subject = trial.subject
    if trial.attempt.opened or trial.attempt.also or subject.entry in subject.folder:
        return ""
    gone = sorted(want.items - found.items)
    if gone and all(folder.get(name) == data for name, data in subject.folder.items()):
        return f"the inventory has no more {gone[0]}, and {len(gone) - 1} others"
    new = [name for name in folder if name not in subject.folder and _holds_data(name)]
    for name in new if not _in_another_step(new, subject) else ():
        path = PurePosixPath(name)
        parents = [part for part in path.parts[:-1] if len(part) > 2]
        inside = not subject.entry or name.startswith(f"{subject.entry}/")
        if inside and not any(part in (found.told or "") for part in (path.name, *parents)):
            return f"nothing tells of {name}"
    return ""


_POINTERS = {"latest", "latest_universal", "latest_checkpointed_iteration.txt"}


def _in_another_step(names: Sequence[str], subject: Subject) -> bool:
    """Whether files lie in folders of a run of which a pointer names another one."""
    tops = {name.partition("/")[0] for name in subject.folder if "/" in name}
    points = not _POINTERS.isdisjoint(subject.folder)
    return points and not any(name.partition("/")[0] in tops for name in names)


def _holds_data(name: str) -> bool:
    path = PurePosixPath(name)
    suffixes = (".pt", ".bin", ".pth", ".ckpt", ".safetensors", ".distcp")
    holds = path.suffix in suffixes or path.name in (".zarray", "zarr.json")
    return holds and path.name[:2] != "._"


# Many.


def trials(found: Sequence[Subject], mistakes: Sequence[str] = tuple(MISTAKES)) -> Iterator[Trial]:
    """Every attempt with checkpoints of one format, in turns of mistakes and then of checkpoints."""
    return in_turn([_of_one_mistake(name, found) for name in mistakes])


def _of_one_mistake(name: str, group: Sequence[Subject]) -> Iterator[Trial]:
    order = Random(f"order {group[0].format} {name}").sample(group, len(group))
    return in_turn([_of_one_subject(name, subject, group) for subject in order])


def _of_one_subject(name: str, subject: Subject, group: Sequence[Subject]) -> Iterator[Trial]:
    made, rng = list(MISTAKES[name](subject, group)), Random(f"order {subject.name} {name}")
    for attempt in rng.sample(made, len(made)):
        way = Way(rng.random() < 0.15, rng.random() < 0.12)
        yield Trial(subject, name, attempt, way if attempt.opened is None else Way())


def in_turn(several: Sequence[Iterator[Trial]]) -> Iterator[Trial]:
    """The first of each, the second of each, and so on."""
    left = deque(several)
    while left:
        for trial in islice(left[0], 1):
            yield trial
            left.append(left[0])
        left.popleft()


def run(format: str, count: int, work: Path) -> tuple[Counter[str], list[str]]:
    """How many attempts with a format came to what, and those that came out wrong."""
    found = subjects((format,))
    campaign, kinds, wrong = Campaign(work, found), Counter[str](), list[str]()
    for trial in islice(trials(found), count):
        outcome = campaign.outcome(trial)
        kinds[outcome.kind] += 1
        if outcome.kind == WRONG:
            about = f"{trial.subject.name}, {trial.mistake}, {trial.attempt.what}, {trial.way}"
            wrong.append(f"{about}: {outcome.text}")
    return kinds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--format", choices=FORMATS, action="append")
    said = parser.parse_args()
    faults = 0
    formats = said.format or FORMATS
    for format in formats:
        with tempfile.TemporaryDirectory() as work:
            kinds, wrong = run(format, said.count // len(formats), Path(work))
        print(f"{format:20} {kinds.total():>6} attempts", dict(sorted(kinds.items())), flush=True)
        print(*wrong, sep="\n")
        faults += len(wrong)
    return 1 if faults else 0


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.ERROR)
    sys.exit(main())
