"""Mistakes that people make give the truth or a refusal; and the campaign that says so can see."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
import temptations
from cases import every
from damages import flipped
from folders import OTHER_RUN, STEP_LATER, other_values, read_folder, sibling, write_folder
from helpers import faults_of
from temptation_invisible import INVISIBLE, invisible, is_another_whole, other_in
from temptation_mistakes import MISTAKES, Attempt
from temptation_subjects import FORMATS, Subject, format_of, subjects
from temptations import WRONG, Campaign, Outcome, Trial, Way, trials

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("format", FORMATS)
def test_each_mistake_with_a_checkpoint_of_each_format_gives_the_truth_or_a_refusal(
    format, tmp_path
):
    _, wrong = temptations.run(format, len(MISTAKES), tmp_path)
    assert wrong == []


# What the campaign sees.


@pytest.fixture
def outcome(tmp_path) -> Callable[..., Outcome]:
    """What comes of the first attempt of a mistake with a checkpoint that a pattern matches."""

    def outcome(format: str, name: str, mistake: str, what: str, **way: bool) -> Outcome:
        found = [subject for subject in subjects((format,)) if subject.name == name]
        first = next(x for x in trials(found, [mistake]) if re.search(what, x.attempt.what))
        return Campaign(tmp_path, found).outcome(
            Trial(found[0], mistake, first.attempt, Way(**way))
        )

    return outcome


def restoring(change: Callable[[str, dict], object]) -> dict[str, Callable]:
    """A restore that does something else too, with the path and the arrays of a checkpoint."""
    plain = ucp.Checkpoint.restore

    def restore(self: ucp.Checkpoint, *args: object, **more: object) -> dict:
        tree = plain(self, *args, **more)
        if "source" in self.path:
            change(self.path, tree["param"])
        return tree

    return {"restore": restore}


def of_source(name: str, value: object) -> dict[str, property]:
    """A property of checkpoints that the source has otherwise."""
    plain = getattr(ucp.Checkpoint, name).fget
    return {name: property(lambda self: value if "source" in self.path else plain(self))}


def zeros(path: str, params: dict) -> None:
    params[next(iter(params))] = np.zeros(3)


# What would be a fault, by what is then said of a harmless mistake.
BROKEN = {
    "is other": restoring(zeros),
    "is not there": restoring(lambda path, params: params.popitem()),
    "extra model-00001-of-00004.safetensors": of_source("extras", {}),
    "the inventory has no more": of_source("inventory", ()),
    "KeyError at": restoring(lambda *_: {}["README.md"]),
    "the source is gone": restoring(lambda path, _: shutil.rmtree(path)),
}
HARMLESS = "safetensors", "torch/hf_llama", "files too many", "^README"


@pytest.mark.parametrize("said", BROKEN)
def test_the_campaign_sees(said, outcome, monkeypatch):
    assert outcome(*HARMLESS) == Outcome("right")
    for name, value in BROKEN[said].items():
        monkeypatch.setattr(ucp.Checkpoint, name, value)
    seen = outcome(*HARMLESS)
    assert seen.kind == WRONG
    assert said in seen.text


@pytest.mark.parametrize(("small", "kind"), [(True, "sampled"), (False, WRONG)])
def test_a_wrong_value_is_seen_which_may_be_in_full_alone_where_few_bytes_are_other(
    small, kind, tmp_path
):
    found = [x for x in subjects(("deepspeed",)) if x.name == "deepspeed/z1_bf16_dp2"]
    damage = flipped("bf16_zero_pp_rank_1_*", "state/0/exp_avg$", 7)
    changes = next(damage.changes(found[0].folder, 1))
    trial = Trial(found[0], "a damage", Attempt("a bit", changes, small=small))
    assert Campaign(tmp_path, found).outcome(trial).kind == kind


def test_every_format_has_checkpoints_and_every_mistake_is_made():
    assert {"universal", *map(format_of, every())} == set(FORMATS) - {"folders"}
    some = [*subjects(("deepspeed-universal",)), *subjects(("dcp-hf",))]
    made = {name for name in MISTAKES for of in some if any(MISTAKES[name](of, some))}
    assert made == set(MISTAKES)


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
    "deepspeed/tp2_dp2_z3_bf16", "megatron/legacy_tp2_fp16_scaler/ckpt",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt", "torch/hf_llama/ckpt",
])  # fmt: skip
def test_a_sibling_is_a_whole_checkpoint_with_other_values(case, change, tmp_path):
    folder = read_folder(DATA / case)
    other = sibling(folder, change)
    assert {name: len(x) for name, x in other.items()} == {n: len(x) for n, x in folder.items()}
    if case.startswith("megatron") and change.steps:
        other = {name.replace("iter_0000003", "iter_0000004"): data for name, data in other.items()}
        other["latest_checkpointed_iteration.txt"] = b"4"
    found, plain = ucp.open(write_folder(other, tmp_path)), ucp.open(DATA / case)
    assert faults_of(found) == []
    labels = [leaf.label for leaf in plain.leaves if leaf.has_array]
    steps = [label for label in labels if label.startswith("step/")]
    assert all(int(found.read(x)) == int(plain.read(x)) + change.steps for x in steps)
    alike = [x for x in labels if found.read(x).tobytes() == plain.read(x).tobytes()]
    assert len(alike) <= 0.15 * len(labels) + len(steps) * (not change.steps)


# What no reader can see, and what only looks like it.

X, Y = (np.asarray(np.random.default_rng(i).standard_normal(64), np.float32) for i in range(2))
STEPS = {f"['step']['{name}']": np.float32(5) for name in "ab"}


@pytest.mark.parametrize(("found", "want", "other"), [
    ({"w": Y},                                {"w": X}, "values"),
    ({"w": X},                                {"w": X}, "settings"),
    ({"w": Y[:60]},                           {"w": X}, "shapes"),
    ({"w": Y.astype(np.float64)},             {"w": X}, "shapes"),
    ({"v": X},                                {"w": X}, "names"),
    ({},                                      {"w": X}, "names"),
    ({"['other']['0']": X},                   {"w": X}, "apart"),
    ({"['other']['0']": Y},                   {"w": X}, "names"),
    (STEPS | {"['step']['b']": np.float32(6)}, STEPS, "steps"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_what_of_a_result_is_other(found, want, other):
    assert other_in(found, want) == other


def test_a_result_is_invisible_by_its_checkpoint_mistake_what_is_other_and_what_is_noted():
    of_run = "gguf/some", "a is of another run"
    assert "each tensor is stored once" in invisible(*of_run, "values")
    assert invisible("gguf/some", "a is missing", "values") == ""
    assert invisible("universal/some", of_run[1], "values") == ""
    assert [invisible(*of_run, other) for other in ("names", "shapes", "steps")] == ["", "", ""]
    assert invisible(*of_run, "steps", notes="the steps differ between parameters")


def test_files_of_one_sibling_are_another_whole_checkpoint():
    some = Subject(
        "some", "gguf", {"a": b"1", "b": b"2"}, made=lambda which: {"a": b"3", "b": b"4"}
    )
    assert is_another_whole(some, {"a": b"3", "b": b"4", "latest": b""})
    assert not is_another_whole(some, {"a": b"3", "b": b"2"})


@pytest.mark.parametrize("name", ["deepspeed/z1_bf16_dp2", "deepspeed/z2_fp32_dp2", "universal/some",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16", "megatron/legacy_tp2_fp16_scaler"])  # fmt: skip
def test_of_what_is_stored_twice_nothing_is_invisible(name):
    rows = [row for row in INVISIBLE if re.fullmatch(row.subjects, name) and row.other == "values"]
    assert all(row.alone for row in rows)
