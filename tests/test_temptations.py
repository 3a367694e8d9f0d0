"""Mistakes that people make give the truth or a refusal; and the campaign that says so can see."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
import temptations
from folders import OTHER_RUN, STEP_LATER, other_values, read_folder, sibling, write_folder
from helpers import faults_of
from jax_ucp.files import object_store, remote
from safetensors_writer import safetensors
from temptation_invisible import INVISIBLE, Case, invisible, shown_by
from temptation_mistakes import MISTAKES
from temptation_subjects import FORMATS, Subject, subjects
from temptations import Campaign, Outcome, Way, trials

TESTS = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # what a mistake warns of, the campaign records
ATTEMPTS = 438  # each mistake with a checkpoint of each format once
# Stock Orbax names its files by chance, so that attempts with them are others in every run.
REPEATABLE = [format for format in FORMATS if not format.startswith("orbax")]


@pytest.fixture
def campaign(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """The exit code of a campaign with some arguments, and what it prints; no bucket is waited for."""
    monkeypatch.chdir(tmp_path)  # the campaign has a working directory of its own
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    brief = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=1)}
    monkeypatch.setitem(object_store._RETRY, "backoff", brief)

    def campaign(*arguments: object) -> tuple[int, str]:
        return temptations.main(list(map(str, arguments))), capsys.readouterr().out

    return campaign


def test_mistakes_give_the_truth_or_a_refusal(campaign):
    formats = [word for format in REPEATABLE for word in ("--format", format)]
    code, said = campaign(*formats, "--count", ATTEMPTS)
    assert code == 0, said


def restoring(change: Callable[[str, dict], object], of: str = "source") -> dict[str, Callable]:
    """A restore that does something else too, with the path and the arrays of a checkpoint."""
    plain = ucp.Checkpoint.restore

    def restore(self: ucp.Checkpoint, *args: object, **more: object) -> dict:
        tree = plain(self, *args, **more)
        if of in self.path:
            change(self.path, tree["param"])
        return tree

    return {"restore": restore}


def zeros(path: str, params: dict) -> None:
    params[next(iter(params))] = np.zeros(3)


# What would be a fault, each seen by its kind. Harmless mistakes with one format are made, so that
# nothing else is one.
BROKEN = {
    "a bit of a leaf": (restoring(zeros), "is other"),
    "a leaf that is not there": (restoring(lambda path, params: params.popitem()), "is not there"),
    "an extra that is not there": (
        {"extras": property(lambda self: {} if "source" in self.path else self._contents.extras)},
        "restore: extra ",
    ),
    "an inventory that is empty": (
        {"inventory": property(lambda self: () if "source" in self.path else self._contents.inventory)},
        "the inventory has no more",
    ),
    "an error that is not ours": (restoring(lambda *_: {}["README.md"]), "raw: restore: KeyError"),
    "a file left behind": (restoring(lambda *_: Path("behind").touch()), "left behind"),
    "a source that is gone": (restoring(lambda path, _: shutil.rmtree(path)), "the source is gone"),
}  # fmt: skip
HARMLESS = ("--format", "safetensors", "--mistake", "clutter beside", "--count", 12)


@pytest.mark.parametrize("what", BROKEN)
def test_the_campaign_sees(what, campaign, monkeypatch):
    broken, seen = BROKEN[what]
    for name, value in broken.items():
        monkeypatch.setattr(ucp.Checkpoint, name, value)
    code, said = campaign(*HARMLESS)
    assert code == 1, said
    assert seen in said


def test_the_campaign_sees_a_valid_checkpoint_that_is_not_read_as_it_is(campaign, monkeypatch):
    monkeypatch.setattr(ucp.Checkpoint, "restore", restoring(zeros, of="valid")["restore"])
    with pytest.raises(AssertionError):
        campaign(*HARMLESS)


def test_nothing_is_seen_where_nothing_is_broken(campaign):
    code, said = campaign("--format", "safetensors", "--mistake", "bytes appended", "--count", 12)
    assert code == 0, said


def test_every_mistake_is_made_with_some_format_and_every_format_meets_mistakes():
    some = subjects(("deepspeed-universal", "megatron-dist", "safetensors"))
    made = {trial.mistake for trial in islice(trials(some), 150)}
    written = [path.read_text() for path in TESTS.glob("temptation_*.py")]
    assert len(MISTAKES) == sum(text.count("\n@mistake\n") for text in written)
    assert made == set(MISTAKES)
    assert {subject.format for subject in subjects()} == set(FORMATS)


_LISTED = f"""
import hashlib, itertools, sys
sys.path.insert(0, {str(TESTS)!r})
from temptations import trials
from temptation_subjects import subjects

for trial in itertools.islice(trials(subjects(("dcp", "safetensors"))), 90):
    folder = hashlib.sha256(repr(sorted(trial.attempt.folder().items())).encode()).hexdigest()
    print(trial.subject.name, trial.mistake, trial.attempt.what, folder)
"""


def test_attempts_are_the_same_in_every_process():
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _LISTED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) == 90


# Siblings.

HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


@given(st.lists(st.floats(width=32), min_size=1), st.integers(0, 5), st.sampled_from(HALVES))
def test_other_values_go_with_rounding(values, salt, half):
    plain = np.array(values, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = plain.astype(half)
        half_of, of_half = (other_values(x, salt, half).astype(half) for x in (plain, rounded))
    # as float32: of bfloat16, NumPy takes two NaN for unequal
    np.testing.assert_array_equal(half_of.astype(np.float32), of_half.astype(np.float32))


@pytest.mark.parametrize("change", [STEP_LATER, OTHER_RUN], ids=["step", "run"])
@pytest.mark.parametrize("case", [
    "deepspeed/z1_bf16_dp2", "deepspeed/tp2_dp2_z3_bf16",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt", "megatron/legacy_tp2_fp16_scaler/ckpt",
    "torch/fsdp2_dp4_uneven/ckpt", "torch/hf_llama/ckpt",
])  # fmt: skip
def test_a_sibling_is_a_whole_checkpoint_with_other_values(case, change, tmp_path):
    path = TESTS / "data" / case
    folder = read_folder(path)
    other = sibling(folder, change)
    assert set(other) == set(folder)
    assert all(len(other[name]) == len(folder[name]) for name in folder)
    if case.startswith("megatron") and change.steps:
        other = {name.replace("iter_0000003", "iter_0000004"): data for name, data in other.items()}
        other["latest_checkpointed_iteration.txt"] = b"4"
    found, plain = ucp.open(write_folder(other, tmp_path)), ucp.open(path)
    assert faults_of(found) == []
    labels = [leaf.label for leaf in plain.leaves if leaf.has_array]
    read, before = found.read, plain.read
    alike = [label for label in labels if read(label).tobytes() == before(label).tobytes()]
    wanted = 0 if change.steps else sum(label.startswith("step/") for label in labels)
    assert len(alike) <= wanted + 0.15 * len(labels)
    counted = [label for label in labels if label.startswith("step/")]
    steps = {label: (int(found.read(label)), int(plain.read(label))) for label in counted}
    assert all(other == one + change.steps for other, one in steps.values())


# What no reader can see, and what only looks like it.


SOME = Subject("gguf/some", "gguf", {"a": b"1"}, made=lambda which: {"a": which.encode()})
X, Y = (np.asarray(np.random.default_rng(i).standard_normal(64), np.float32) for i in range(2))


def why(found: dict, attempt: str = "a is of another run", after: bytes = b"2") -> str:
    return invisible(Case(SOME, SOME.folder, {"a": after}, found, {"w": X}), attempt)


def test_an_invisible_result_is_of_a_class_in_checkpoint_mistake_and_in_what_is_other():
    assert "each tensor is stored once" in why({"w": Y})
    assert why({"w": Y}, "a is missing") == ""
    for found in ({"w": Y[:60]}, {"w": Y.astype(np.float64)}, {"v": X}, {}, {"w": X}):
        assert why(found) == ""
    assert why({"w": Y}, "whatever", b"run") == "another whole checkpoint"


@pytest.mark.parametrize("name", ["deepspeed/z1_bf16_dp2", "deepspeed/z2_fp32_dp2", "universal/some",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16", "megatron/legacy_tp2_fp16_scaler"])  # fmt: skip
def test_of_what_is_stored_twice_nothing_is_invisible(name):
    rows = [row for row in INVISIBLE if re.fullmatch(row.subjects, name) and row.other == "values"]
    assert all(row.alone for row in rows)


INDEX = json.dumps({"metadata": {"total_size": 256}, "weight_map": {"w": "a.safetensors"}})


def tensors(values: np.ndarray) -> bytes:
    return safetensors({"w": values})


@pytest.mark.parametrize(("after", "shown"), [
    ({"a.safetensors": tensors(Y)},                    []),
    ({"a.safetensors": tensors(X)[:180] + bytes(400)}, ["half of a file is zeros"]),
    ({"a.safetensors": tensors(X[:60])},               ["a total size of another save"]),
], ids=["other values", "zeros", "a total"])  # fmt: skip
def test_what_a_note_must_tell_is_seen_in_the_files(after, shown):
    before = {"a.safetensors": tensors(X), "model.safetensors.index.json": INDEX.encode()}
    assert shown_by(Case(SOME, before, before | after, {}, {})) == shown


def test_parameters_that_are_of_two_steps_must_be_told():
    steps = {f"['step']['{name}']": np.float32(5) for name in "ab"}
    mixed = steps | {"['step']['b']": np.float32(6)}
    case = Case(SOME, {}, {}, mixed, steps)
    assert shown_by(case) == ["steps of several saves"]
    assert shown_by(replace(case, found=steps)) == []


# Weights alone.


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """What comes of an attempt with weights alone, by subject, mistake and a pattern of what it is."""
    monkeypatch.chdir(tmp_path)  # the campaign has a working directory of its own

    def judge(subject: str, mistake: str, what: str) -> Outcome:
        of = "megatron-dist" if subject.startswith("megatron") else "deepspeed"
        found = [each for each in subjects((of,)) if each.name == subject]
        trial = next(t for t in trials(found, [mistake]) if re.search(what, t.attempt.what))
        made = Campaign(tmp_path, found)
        assert made.opens_as_it_is(trial.subject)
        return made.make(trial.subject, trial.attempt, Way(weights_only=True))

    return judge


def test_what_is_said_of_the_optimizer_is_not_said_of_weights_alone(judged):
    seen = judged("deepspeed/z0_fp32_dp2", "clutter beside", r"README\.md is there")
    assert seen.kind == "right", seen.text


@pytest.mark.parametrize("of", ["/ is", "/[0.]+ is"], ids=["a folder", "a chunk"])
def test_weights_of_zarr_that_are_stored_once_are_invisible(judged, of):
    weight = rf"iter_0000003/(decoder|embedding)[^/ ]*weight{of}"
    seen = judged("megatron/old0153_tp2_zarr_fp32", "file of another step", weight)
    assert seen.kind == "invisible"
    assert seen.text.startswith("a folder of zarr")
