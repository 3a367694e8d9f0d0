"""Checkpoints whose files are damaged, exchanged, or of another rank, step or run: each row of
`damage_rows.TABLE` comes to its verdict.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from random import Random

import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case
from damage_rows import PLAIN, RIGHT, ROUNDED, SHOWN, SKIPPED, TABLE, TOLD, UNSEEN, Verdict
from damages import Damage, with_changes
from folders import read_folder, write_folder
from helpers import faults_of, in_lanes
from jax_ucp.errors import CorruptData, UCPError

SOME, MOST = 5, 6  # files that a pattern names, changes of a row: always the same of many
ROWS = in_lanes([(case, *row) for case, rows in TABLE.items() for row in rows])
DOORS: dict[str, Callable[[ucp.Checkpoint, Path], object]] = {
    "open": lambda checkpoint, out: None,
    "weights": lambda checkpoint, out: None,
    "restore": lambda checkpoint, out: checkpoint.restore(),
    "full": lambda checkpoint, out: checkpoint.restore(verify="full"),
    "verify": lambda checkpoint, out: raise_faults(checkpoint),
    "save": lambda checkpoint, out: checkpoint.save(out),
}


@pytest.mark.parametrize(
    ("case", "damage", "verdict", "words"),
    ROWS,
    ids=[f"{row.values[0]}: {row.values[1]}, {row.values[2]}" for row in ROWS],
)
def test_a_damage_comes_to_its_verdict(
    case: str, damage: Damage, verdict: Verdict, words: str, tmp_path: Path
):
    files = read_folder(Case(case).path)
    every = list(damage.changes(files, SOME))
    assert every
    for i, changes in enumerate(Random(0).sample(every, min(MOST, len(every)))):
        at = tmp_path / str(i) / Case(case).path.name
        write_folder(with_changes(files, changes), at)
        for door in verdict.doors:
            judge(Case(case), at, [*changes], door, verdict.what, words)
        shutil.rmtree(tmp_path / str(i))


def judge(case: Case, at: Path, changed: list[str], door: str, what: object, words: str) -> None:
    names = [PurePosixPath(name).name for name in changed]
    for word, name in zip(("FILE", "OTHER"), names, strict=False):
        words = words.replace(word, re.escape(name))
    words = words.replace("FOLDER", re.escape(PurePosixPath(changed[0]).parent.name))
    weights = {"weights_only": True} if door == "weights" else {}
    if isinstance(what, type):
        with pytest.raises(what, match=words or None) as refused:
            DOORS[door](case.open(at, **weights), at.parent / "out")
        assert not (at.parent / "out").exists()
        if door == "open":
            followed = remedies(case, at, str(refused.value))
            assert [fault for how in followed for fault in how] == []
        return
    if what == PLAIN:
        assert words not in refusal_or_faults(case, at, **weights)
        return
    if what == TOLD:
        told = refusal_or_faults(case, at)
        known = [part for name in names for part in (name, re.sub(r"\d+", "*", name, count=1))]
        if told:
            assert any(name in told for name in known), told
        elif wrong(case, case.open(at)):
            assert all(re.search(f"({words or 'no file'})$", name) for name in changed), changed
        return
    checkpoint = case.open(at, **weights)
    faults = faults_of(checkpoint)
    if what == SHOWN:
        assert re.search(words, "\n".join(faults)), faults
        with pytest.raises(CorruptData, match="contradicts itself"):
            checkpoint.save(at.parent / "out")
        return
    if what == UNSEEN:
        checkpoint.restore()
        with pytest.raises(UCPError, match=words):
            checkpoint.restore(verify="full")
        return
    assert what in (RIGHT, SKIPPED, ROUNDED)
    assert not faults
    assert wrong(case, checkpoint, bool(weights), what != RIGHT) == []
    said = list(checkpoint.notes)
    if what == SKIPPED:
        items = [item for item in checkpoint.inventory if changed[0].endswith(item.where)]
        assert [item.status for item in items] == ["skipped"]
        said += [item.reason for item in items]
    assert not words or any(re.search(words, text) for text in said), said


def remedies(case: Case, at: Path, message: str) -> Iterator[list[str]]:
    """What is not the truth if one does as a message says, of each thing that it says."""
    if re.search(r"weights_only (opens|leaves)", message):
        yield wrong(case, case.open(at, weights_only=True), weights=True, rounded=True)
    if "(spec=, --spec)" in message:
        spec = at.with_name("mine.yaml")
        spec.write_text(spec_of(case))
        yield wrong(case, case.open(at, spec=spec, sizes={"vocab": 101}))
    if "vocab=" in message:
        yield wrong(case, case.open(at, sizes={"vocab": 101}))


def spec_of(case: Case) -> str:
    """A rule for each parameter, by what the case says of how it was cut."""
    padded = {"sharded": 0, "padded": {"axis": 0, "to": "vocab"}}
    kinds = {
        "vocab": padded,
        "replicated": "replicated",
        "column": {"sharded": 0},
        "row": {"sharded": 1},
    }
    params = case.about["parameters"]
    shards = [{"param": p["name"], "pattern": kinds[p["layout"]["kind"]]} for p in params]
    return json.dumps({"shards": shards})


def raise_faults(checkpoint: ucp.Checkpoint) -> None:
    if faults := faults_of(checkpoint):
        raise CorruptData("\n".join(faults))


def refusal_or_faults(case: Case, at: Path, **options: bool) -> str:
    """What says that something is wrong: the error, or what `verify` finds."""
    try:
        raise_faults(case.open(at, **options))
    except UCPError as error:
        return str(error)
    return ""


def wrong(case: Case, checkpoint: ucp.Checkpoint, weights=False, rounded=False) -> list[str]:
    """The labels of arrays that are missing, too many, or not the live ones."""
    want = case.truth()
    if weights:
        want = {label: x for label, x in want.items() if label.startswith(("param/", "buffer/"))}
    found = {leaf.label for leaf in checkpoint.leaves if leaf.has_array}

    def same(label: str) -> bool:
        got = np.asarray(checkpoint.read(label))
        return case.equal(got, want[label].astype(got.dtype) if rounded else want[label], label)

    return sorted(found ^ want.keys()) + [x for x in found & want.keys() if not same(x)]
