"""Every mistake of `temptation_mistakes` with every checkpoint of `temptation_subjects`, by the
thousand.

    python tests/temptations.py --count 3000            the first 3,000 attempts, spread over formats and mistakes
    python tests/temptations.py --format dcp --all      every attempt with one format
    python tests/temptations.py --only 17 --keep DIR    one again; the folder as the mistake leaves it is kept

Each attempt is opened, restored, converted and restored from that. What comes out is the truth,
with everything that is stored accounted for, or a refusal: never another value. Attempt
number i is the same in every run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from click.testing import CliRunner

import jax_ucp as ucp
import temptation_formats  # noqa: F401 - its mistakes are added to MISTAKES, and those of:
import temptation_options  # noqa: F401
from cases import RULES
from folders import Folder, write_folder
from jax_ucp.cli.main import main as cli
from jax_ucp.errors import UCPError
from jax_ucp.sharding.jax_versions import enable_x64
from temptation_invisible import TOLD, Case, another_whole, invisible, shown_by
from temptation_mistakes import MISTAKES, Attempt, Beside
from temptation_subjects import FORMATS, Subject, mesh, subjects

SECONDS = 60
OUTCOMES = ("right", "refused", "noted", "invisible", "sampled", "unaccounted", "raw", "wrong")
FAULTS = ("unaccounted", "raw", "wrong")


# What a checkpoint gives.


@dataclass(frozen=True)
class Result:
    """Every leaf by its path, and what is told beside them."""

    leaves: Mapping[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: str = ""
    items: frozenset[tuple[str, str]] = frozenset()
    told: str = ""
    read: frozenset[str] = frozenset()


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
    told = "\n".join([*checkpoint.notes, *reasons])
    there = [item.where for item in checkpoint.inventory if not _left_aside(item)]
    read = frozenset(where.partition(":")[0] for where in there)
    groups = repr([(group.params, group.settings) for group in checkpoint.groups])
    return Result(leaves_of(tree), dict(checkpoint.extras), groups, items, told, read)


def _left_aside(item: Any) -> bool:
    how = re.search("weights_only|asked for|says how", item.reason)
    return item.status == "skipped" and bool(how)


def same_value(got: Any, want: Any) -> bool:
    """The same bits of the same type and shape, on a device or not."""
    if not hasattr(want, "shape") or not hasattr(got, "shape"):
        return type(got) is type(want) and got == want
    got, want = np.asarray(got), np.asarray(want)
    return (got.dtype, got.shape) == (want.dtype, want.shape) and got.tobytes() == want.tobytes()


def differences(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    found = [f"{name} is not there" for name in want if name not in got]
    found += [f"{name} should not be there" for name in got if name not in want]
    both = [name for name in want if name in got]
    return found + [f"{name} is other" for name in both if not same_value(got[name], want[name])]


def _rounded(want: Any, got: Any) -> Any:
    """A floating array in the dtype of another of 16 bits, if that is one."""
    arrays = isinstance(want, np.ndarray | jax.Array) and isinstance(got, np.ndarray | jax.Array)
    if not arrays or got.dtype.name not in ("bfloat16", "float16"):
        return want
    return np.asarray(want).astype(got.dtype)


def check(subject: Subject, tree: Mapping[str, Mapping[str, Any]]) -> None:
    """What is restored of the valid checkpoint is the live state that its writer recorded."""
    assert subject.truth is not None
    assert subject.equal is not None
    for label, array in subject.truth.items():
        state, _, name = label.partition("/")
        assert subject.equal(tree[state][name], array, label), (subject.name, label)


# How a checkpoint is read.


@dataclass(frozen=True)
class Way:
    """What an attempt is made with beside its mistake."""

    mesh: bool = False
    weights_only: bool = False
    cli: bool = False


def way_of(number: int, attempt: Attempt) -> Way:
    rng = Random(f"way {number}")
    if attempt.act is not None or attempt.options:
        return Way()
    return Way(rng.random() < 0.15, rng.random() < 0.12, rng.random() < 0.15)


def of_weights(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options to open weights alone, without what is said of the optimizer and so is refused."""
    kept = {name: value for name, value in options.items() if name != "optimizer_groups"}
    return kept | {"weights_only": True}


def restored(checkpoint: ucp.Checkpoint, way: Way, **more: Any) -> Any:
    if not way.mesh:
        return checkpoint.restore(**more)
    with enable_x64(True):
        return checkpoint.restore(mesh=mesh(), rules=_rules(checkpoint), **more)


def _rules(checkpoint: ucp.Checkpoint) -> Sequence[Any]:
    return RULES if any(re.search(RULES[0][0], leaf.label) for leaf in checkpoint.leaves) else ()


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


# One attempt.


@dataclass(frozen=True)
class Outcome:
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Try:
    """An attempt as it is made: the files that are there, and the warnings that came."""

    subject: Subject
    attempt: Attempt
    way: Way
    folder: Folder
    warned: list[Any]


class Campaign:
    """Makes attempts in a folder, and judges what comes of them."""

    def __init__(self, work: Path, found: Sequence[Subject], keep: Path | None = None):
        self.work, self.keep = work, keep
        self.subjects = {subject.name: subject for subject in found}
        self.notes: list[str] = []
        self.truths: dict[tuple[str, str, bool], Result] = {}
        self.refused_as_they_are: dict[str, str] = {}
        (work / "cwd").mkdir()
        os.chdir(work / "cwd")

    def truth(self, subject: Subject, which: str = "base", weights_only: bool = False) -> Result:
        """What a subject, or its sibling, or another subject holds."""
        key = subject.name, which, weights_only
        if key not in self.truths:
            folder = subject.folder if which == "base" else subject.as_saved(which)
            with self.placed(folder, "valid") as root:
                options = dict(subject.options)
                if weights_only:
                    options = of_weights(options)
                checkpoint = ucp.open(root / subject.entry, **options)
                tree = checkpoint.restore()
                self.truths[key] = result_of(checkpoint, tree)
                if which == "base" and not weights_only and subject.truth is not None:
                    check(subject, tree)
        return self.truths[key]

    @contextlib.contextmanager
    def placed(self, folder: Folder, name: str = "source") -> Iterator[Path]:
        root = self.work / name
        write_folder(folder, root)
        try:
            yield root
        finally:
            _remove(root)

    def opens_as_it_is(self, subject: Subject) -> bool:
        if subject.name in self.refused_as_they_are:
            return False
        try:
            self.truth(subject)
        except UCPError as error:
            self.refused_as_they_are[subject.name] = str(error)
            return False
        return True

    def make(self, subject: Subject, attempt: Attempt, way: Way) -> Outcome:
        folder = attempt.folder()
        write_folder(attempt.beside, self.work)
        before = sorted(p.name for p in (self.work / "cwd").iterdir())
        with self.placed(folder) as root, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if self.keep:
                shutil.copytree(root, self.keep, symlinks=True)
            try:
                with in_time():
                    outcome = self.judged(Try(subject, attempt, way, folder, warned), root)
            finally:
                for name in ("out", "a folder", "a file", "elsewhere"):
                    _remove(self.work / name)
            if not root.exists():
                return Outcome("wrong", f"the source is gone; {outcome.text}")
        left = [p for p in sorted((self.work / "cwd").iterdir()) if p.name not in before]
        for path in left:
            _remove(path)
        if left:
            names = [p.name for p in left]
            text = f"left behind in the working directory: {names}; {outcome.text}"
            return Outcome("wrong", text)
        return outcome

    def judged(self, one: Try, root: Path) -> Outcome:
        options = {**one.subject.options, **one.attempt.options}
        beside = {name: value for name, value in options.items() if isinstance(value, Beside)}
        options |= {name: self.work / value for name, value in beside.items()}
        if one.way.weights_only:
            options = of_weights(options)
        at = one.attempt.opened(root) if one.attempt.opened else root / one.subject.entry
        try:
            checkpoint = ucp.open(at, **options)
        except Exception as error:
            return self.refusal(one.attempt, error, "open")
        self.notes = list(checkpoint.notes)
        if one.attempt.act is not None:
            return self.acted(one, checkpoint)
        outcomes = []
        try:
            found = result_of(checkpoint, restored(checkpoint, one.way))
            outcomes.append(self.compared(one, found, "restore"))
            if outcomes[-1].kind == "wrong" and one.attempt.small:
                outcomes[-1] = self.in_full(one, checkpoint, outcomes[-1])
        except Exception as error:
            outcomes.append(self.refusal(one.attempt, error, "restore"))
        outcomes.append(self.converted(one, checkpoint, at, options))
        worst = max(outcomes, key=lambda outcome: OUTCOMES.index(outcome.kind))
        if worst.kind in FAULTS and outcomes[0].kind != outcomes[1].kind:
            return Outcome(worst.kind, " || ".join(f"{o.kind}: {o.text}" for o in outcomes))
        return worst

    def in_full(self, one: Try, checkpoint: Any, wrong: Outcome) -> Outcome:
        """What a restore says of few bytes that are other if it is asked to compare everything."""
        try:
            found = result_of(checkpoint, restored(checkpoint, one.way, verify="full"))
        except Exception as error:
            outcome = self.refusal(one.attempt, error, "restore in full")
            return Outcome("sampled", wrong.text) if outcome.kind == "refused" else outcome
        return self.compared(one, found, "restore in full")

    def converted(self, one: Try, checkpoint: Any, at: Any, options: Any) -> Outcome:
        out = self.work / "out"
        try:
            if one.way.cli:
                done = CliRunner().invoke(cli, ["convert", str(at), str(out), *_flags(options)])
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    return self.refusal(one.attempt, done.exception, "jax-ucp convert")
                if done.exit_code:
                    return self.refusal(one.attempt, UCPError(done.output), "jax-ucp convert")
                kept = ucp.open(out)
            else:
                kept = checkpoint.save(out)
            found = result_of(kept, restored(kept, Way()))
        except Exception as error:
            return self.refusal(one.attempt, error, "convert")
        return self.compared(one, found, "convert")

    def acted(self, one: Try, checkpoint: Any) -> Outcome:
        assert one.attempt.act is not None
        try:
            found = result_of(checkpoint, one.attempt.act(checkpoint, self.work))
        except Exception as error:
            return self.refusal(one.attempt, error, "restore")
        return self.compared(one, found, "restore")

    def compared(self, one: Try, found: Result, what: str) -> Outcome:
        """Whether a result is the truth, and all that is stored is accounted for."""
        want = self.as_noted(self.truth(one.subject, weights_only=one.way.weights_only), found)
        for which in one.attempt.also if not self.is_truth(found, want, one.folder) else ():
            if which in self.subjects and not self.opens_as_it_is(self.subjects[which]):
                continue
            truth = self.as_noted(self.other_truth(one.subject, which, one.way), found)
            if not self.is_truth(found, truth, one.folder):
                continue
            subject, leaves = one.subject, (found.leaves, want.leaves)
            case = Case(subject, subject.folder, _files(one.folder), *leaves)
            if which in one.subject.siblings and another_whole(case):
                return Outcome("invisible", "another whole checkpoint")
            want = truth
        faults = differences(found.leaves, want.leaves)
        kinds = [f"{len(faults)} of {len(want.leaves)} leaves, the first: {x}" for x in faults[:1]]
        if not (one.attempt.options or one.attempt.opened or one.attempt.act):
            different = _different_extras(found.extras, want.extras, one.folder)
            kinds += [f"extra {name}" for name in different]
            kinds += ["groups"] * (found.groups != want.groups)
        if kinds:
            if explained := self.explained(one, found, want):
                return explained
            return Outcome("wrong", f"{what}: {'; '.join(kinds[:4])}")
        if one.attempt.noticed:
            said = "\n".join([*self.notes, *(str(w.message) for w in one.warned)])
            if not re.search(one.attempt.noticed, said, re.IGNORECASE):
                text = f"{what}: what was said had no effect, and nothing tells so"
                return Outcome("wrong", text)
        # A conversion has an inventory of its own.
        has_inventory = one.attempt.act is None and what.startswith("restore")
        if has_inventory and (lacks := self.unaccounted(one, found, want)):
            return Outcome("unaccounted", f"{what}: {lacks}")
        return Outcome("right")

    def as_noted(self, truth: Result, found: Result) -> Result:
        """A truth without the extras of the optimizer's files, and of weights as the module has
        them, rounded, where a note says that the optimizer cannot be read.
        """
        if not any("no second copy proves them" in note for note in self.notes):
            return truth
        kept = [name for name in truth.extras if name in found.extras or "optim" not in name]
        extras = {name: truth.extras[name] for name in kept}
        leaves = {n: _rounded(leaf, found.leaves.get(n)) for n, leaf in truth.leaves.items()}
        return replace(truth, leaves=leaves, extras=extras)

    @staticmethod
    def is_truth(found: Result, truth: Result, folder: Folder) -> bool:
        extras = _different_extras(found.extras, truth.extras, folder)
        return not differences(found.leaves, truth.leaves) and not extras

    def explained(self, one: Try, found: Result, want: Result) -> Outcome | None:
        """What is wrong, if a note tells it, or a class of INVISIBLE says that nothing shows it."""
        if any(not isinstance(entry, bytes) for entry in one.folder.values()):
            return None  # a link or a folder where a file should be
        before, after = one.subject.folder, _files(one.folder)
        if one.way.weights_only:  # nothing else was read
            tables = {name for name in before if not _holds_data(name)}
            kept = [n for n in before if n in tables or _is_read(n, want.read)]
            before, after = ({n: f[n] for n in kept if n in f} for f in (before, after))
        case = Case(one.subject, before, after, found.leaves, want.leaves)
        if shown := shown_by(case):
            told = all(re.search(TOLD[name][1], "\n".join(self.notes)) for name in shown)
            return Outcome("noted", ", ".join(shown)) if told else None
        reason = invisible(case, one.attempt.what, one.way.weights_only)
        return Outcome("invisible", reason) if reason else None

    def other_truth(self, subject: Subject, which: str, way: Way) -> Result:
        if which in self.subjects:
            return self.truth(self.subjects[which], weights_only=way.weights_only)
        return self.truth(subject, which, way.weights_only)

    def unaccounted(self, one: Try, found: Result, want: Result) -> str:
        """What the inventory lacks of the valid checkpoint's, and of files that came to it."""
        other = one.attempt.options or one.attempt.opened or one.attempt.also
        if other or one.subject.entry in one.subject.folder:
            return ""
        gone = sorted(want.items - found.items)
        if gone and all(one.folder.get(name) == data for name, data in one.subject.folder.items()):
            return f"the inventory has no more {gone[0]}, and {len(gone) - 1} others"
        new = [name for name in one.folder if name not in one.subject.folder and _holds_data(name)]
        for name in new if not _in_another_step(new, one.subject) else ():
            path = PurePosixPath(name)
            parents = [part for part in path.parts[:-1] if len(part) > 2]
            inside = not one.subject.entry or name.startswith(f"{one.subject.entry}/")
            if inside and not any(part in found.told for part in (path.name, *parents)):
                return f"nothing tells of {name}"
        return ""

    def refusal(self, attempt: Attempt, error: Exception, what: str) -> Outcome:
        """Whether an error is one of ours, or of Python's for what it was given. What the message
        of a damage must have is in `damage_rows`.
        """
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        places = FileExistsError | NotADirectoryError | IsADirectoryError
        ours = isinstance(error, UCPError | places)
        said = attempt.act or attempt.options
        if ours or (said and isinstance(error, TypeError | ValueError | OSError)):
            return Outcome("refused", f"{what}: {text}")
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Outcome("raw", f"{what}: {type(error).__name__} at {place}: {text}")


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options of `open` as the command line has them; KeyError for one that no subject has."""
    found: list[str] = []
    for name, value in options.items():
        found += {
            "sizes": lambda sizes: [
                f for of in sizes.items() for f in ("--size", "{}={}".format(*of))
            ],
            "weights_only": lambda said: ["--weights-only"] * said,
            "dequantize": lambda dtype: ["--dequantize", dtype],
            "optimizer_groups": lambda how: ["--optimizer-groups", how],
            "model": lambda model: ["--model", model],
        }[name](value)
    return found


def _files(folder: Folder) -> dict[str, bytes]:
    return {name: entry for name, entry in folder.items() if isinstance(entry, bytes)}


Extras = Mapping[str, Any]


def _different_extras(found: Extras, want: Extras, folder: Folder) -> list[str]:
    """Extras that are other; those of files that are not there any more are not looked for."""
    there = [name for name in want if any(n.endswith(name) or f"{name}/" in n for n in folder)]
    found_in = [(file, name, value) for file in there for name, value in want[file].items()]
    got = {(f, name): repr(found.get(f, {}).get(name, "nothing")) for f, name, _ in found_in}
    return [f"{f}:{name}" for f, name, value in found_in if got[f, name] != repr(value)]


_POINTERS = {"latest", "latest_universal", "latest_checkpointed_iteration.txt"}


def _in_another_step(names: Sequence[str], subject: Subject) -> bool:
    """Whether files lie in folders of a run of which a pointer names another one."""
    tops = {name.partition("/")[0] for name in subject.folder if "/" in name}
    points = not _POINTERS.isdisjoint(subject.folder)
    return points and not any(name.partition("/")[0] in tops for name in names)


def _is_read(name: str, read: Collection[str]) -> bool:
    """Whether a file is among those that were read: an array's table, if a chunk of it is."""
    path = PurePosixPath(name)
    if path.name == ".zarray":
        return any(PurePosixPath(r).parent.name == path.parent.name for r in read)
    return any(name == r or name.endswith(f"/{r}") for r in read)


def _holds_data(name: str) -> bool:
    path = PurePosixPath(name)
    tables = (".zarray", "zarr.json")
    suffixes = (".pt", ".bin", ".pth", ".ckpt", ".safetensors", ".distcp")
    return (path.suffix in suffixes or path.name in tables) and path.name[:2] != "._"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


# The campaign.


@dataclass(frozen=True)
class Trial:
    subject: Subject
    mistake: str
    attempt: Attempt


def trials(found: Sequence[Subject], only: Sequence[str] = ()) -> Iterator[Trial]:
    """Every attempt, in an order in which any first part of it is spread over formats and
    mistakes, then over checkpoints. Those that are not asked for are not made.
    """
    formats: dict[str, list[Subject]] = defaultdict(list)
    for subject in found:
        formats[subject.format].append(subject)
    yield from in_turn([
        _of_one_mistake(name, group)
        for group in formats.values()
        for name in MISTAKES
        if not only or name in only
    ])  # fmt: skip


def _of_one_mistake(name: str, group: Sequence[Subject]) -> Iterator[Trial]:
    rng = Random(f"order {group[0].format} {name}")
    yield from in_turn([
        _of_one_subject(name, subject, group) for subject in rng.sample(group, len(group))
    ])  # fmt: skip


def _of_one_subject(name: str, subject: Subject, group: Sequence[Subject]) -> Iterator[Trial]:
    made = list(MISTAKES[name](subject, group))
    Random(f"order {subject.name} {name}").shuffle(made)
    for attempt in made:
        yield Trial(subject, name, attempt)


def in_turn(several: Sequence[Iterator[Trial]]) -> Iterator[Trial]:
    """The first of each, the second of each, and so on."""
    left = deque(several)
    while left:
        for trial in islice(left[0], 1):
            yield trial
            left.append(left[0])
        left.popleft()


@dataclass
class Table:
    """What came of each format and each mistake."""

    formats: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    mistakes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self.formats[trial.subject.format][outcome.kind] += 1
        self.mistakes[trial.mistake][outcome.kind] += 1
        if outcome.kind in ("invisible", "noted"):
            self.reasons[f"{outcome.kind}, {outcome.text}"] += 1

    @property
    def faults(self) -> int:
        return sum(counts[kind] for counts in self.formats.values() for kind in FAULTS)

    def __str__(self) -> str:
        lines = []
        for title, rows in (("format", self.formats), ("mistake", self.mistakes)):
            width = max(map(len, [title, *rows]), default=0)
            heads = "".join(f"{kind:>12}" for kind in OUTCOMES)
            lines.append(f"{title:{width}} {'tried':>7}{heads}")
            total: Counter[str] = Counter()
            for name, counts in sorted(rows.items()):
                total += counts
                lines.append(_row(name, counts, width))
            lines += [_row("all", total, width), ""]
        lines += [f"{name}: {n}" for name, n in sorted(self.reasons.items())]
        return "\n".join(lines)


def _row(name: str, counts: Counter[str], width: int) -> str:
    cells = [f"{name:{width}} {sum(counts.values()):>7}", *(f"{counts[k]:>12}" for k in OUTCOMES)]
    return "".join(cells)


def run(numbered: Iterable[tuple[int, Trial]], campaign: Campaign, log: Any = None) -> Table:
    """Make these attempts; `log` gets a line of JSON for each."""
    table = Table()
    for number, trial in numbered:
        if not campaign.opens_as_it_is(trial.subject):
            continue
        begin = time.monotonic()
        outcome = campaign.make(trial.subject, trial.attempt, way_of(number, trial.attempt))
        table.add(trial, outcome)
        if log:
            about = {"number": number, "subject": trial.subject.name, "mistake": trial.mistake}
            about |= {"what": trial.attempt.what, "kind": outcome.kind, "text": outcome.text}
            about |= {"seconds": round(time.monotonic() - begin, 2)}
            print(json.dumps(about), file=log, flush=True)
        if outcome.kind in FAULTS and not log:
            print(f"{number} {trial.subject.name}, {trial.mistake}, {trial.attempt.what}")
            print(f"  {outcome.kind}: {outcome.text}")
    for name, text in campaign.refused_as_they_are.items():
        print(f"not tried, refused as it is: {name}: {text[:150]}")
    return table


def main(arguments: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0, help="number of the first attempt")
    parser.add_argument("--all", action="store_true", help="every attempt there is")
    parser.add_argument("--only", type=int, help="number of the one attempt to make")
    parser.add_argument("--format", choices=FORMATS, action="append")
    one_of = "one of: " + ", ".join(MISTAKES)
    parser.add_argument("--mistake", action="append", default=[], help=one_of)
    parser.add_argument("--keep", type=Path, help="with --only: where the folder is kept")
    parser.add_argument("--log", type=argparse.FileType("w"), help="a file for a line of JSON each")
    said = parser.parse_args(arguments)
    found = subjects(tuple(said.format or FORMATS))
    start, stop = said.start, None if said.all else said.start + said.count
    if said.only is not None:
        start, stop = said.only, said.only + 1
    numbered = islice(enumerate(trials(found, said.mistake)), start, stop)
    where = os.getcwd()
    keep = said.keep.absolute() if said.keep else None
    with tempfile.TemporaryDirectory() as work:
        table = run(numbered, Campaign(Path(work), found, keep), said.log)
        os.chdir(where)
    print(table)
    return 1 if table.faults else 0


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.ERROR)
    sys.exit(main())
