"""Files that torch.save wrote, opened as checkpoints, against the values that torch had."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import assert_accounted_for
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs import json_values as extras
from jax_ucp.codecs.pickle_json import from_json
from jax_ucp.errors import FormatError, NotACheckpoint
from torch_writer import Instance, save

DATA = CASES_DATA / "torch"


def test_what_a_trainer_saved_beside_the_model_is_kept():
    checkpoint = ucp.open(DATA / "torchsave" / "trainer.pt")
    apart, remedy = checkpoint.notes
    assert apart.startswith(
        "36 optimizer states in optimizer are kept under `other`: they go by numbers, and nothing"
        " stored says which parameter has which number (there are 12 of them for"
    )
    assert "optimizer has 9 + 3" in remedy
    kept = checkpoint.extras["trainer.pt"]
    assert kept["epoch"] == 4
    groups = [group["params"] for group in kept["optimizer"]["param_groups"]]
    assert groups == [[*range(9)], [9, 10, 11]]
    weights = ucp.open(DATA / "torchsave" / "trainer.pt", weights_only=True)
    assert not [leaf.label for leaf in weights.leaves if "optimizer" in leaf.label]
    kept = ucp.open(DATA / "torchsave_exotic" / "tensor_with_attr.pt").extras["tensor_with_attr.pt"]
    assert [*kept] == ["attributes of t"]


NAME = st.sampled_from(["a", "b.weight", "b.bias", "c.0.weight", "0"])
NAMES = st.lists(NAME, min_size=1, unique=True)


@given(NAMES, st.data())
def test_states_by_number_go_to_their_parameters_if_groups_name_them(tmp_path_factory, names, data):
    numbers = data.draw(st.permutations(range(len(names))))
    cut = data.draw(st.integers(0, len(names)))
    named = data.draw(st.booleans())
    groups = [{"lr": 0.1, "params": numbers[:cut]}, {"lr": 0.2, "params": numbers[cut:]}]
    if named:
        groups[0]["param_names"], groups[1]["param_names"] = names[:cut], names[cut:]
    order = data.draw(st.permutations(names))
    model = {name: np.full(i + 1, i, np.float32) for i, name in enumerate(order)}
    state = {}
    for number, name in zip(numbers, names, strict=True):
        state[number] = {"exp_avg": model[name] + 1, "row": [model[name] + 2]}
    path = tmp_path_factory.mktemp("t") / "run.pt"
    save({"model": model, "optim": {"state": state, "param_groups": groups}}, path)
    checkpoint = ucp.open(path)
    # `row` is no state of which the shape is known; of one there is one pairing
    trusted = named or len(names) == 1
    for number, name in zip(numbers, names, strict=True):
        assert same_bits(checkpoint.read(f"param/{name}"), model[name])
        for label, add in (("exp_avg", 1), ("row.0", 2)):
            where = f"{label}/{name}" if trusted else f"other/optim.state.{number}.{label}"
            assert same_bits(checkpoint.read(where), model[name] + np.float32(add))
    assert (checkpoint.notes == []) == trusted
    told = {name: group.settings["lr"] for group in checkpoint.groups for name in group.params}
    rates = {name: 0.1 if i < cut else 0.2 for i, name in enumerate(names)}
    assert told == (rates if trusted else {})
    assert_accounted_for(checkpoint)


def test_names_that_do_not_fit_the_numbers_of_their_group_are_not_used(tmp_path):
    model = {name: np.ones(1, np.float32) for name in "abc"}
    state = {n: {"step": np.zeros(1, np.float32)} for n in range(3)}
    for groups in (
        [{"params": [0, 1], "param_names": ["a"]}, {"params": [2], "param_names": ["b", "c"]}],
        [{"params": [0, 1, 2], "param_names": ["a", "b", "b"]}],
        [{"params": [0, 0, 1], "param_names": ["a", "b", "c"]}],
        [{"params": [0, 1], "param_names": ["a", "b"]}, {"params": [2]}],
    ):
        optim = {"state": state, "param_groups": groups}
        save({"model": model, "optim": optim}, tmp_path / "run.pt")
        labels = set(ucp.open(tmp_path / "run.pt"))
        kept = {label for label in labels if "step" in label}
        assert kept == {f"other/optim.state.{n}.step" for n in range(3)}


def test_content_decides_and_not_the_name(tmp_path):
    for file in (DATA / "torchsave" / "tied.pt", DATA / "torchsave_legacy" / "tied.pt"):
        shutil.copy(file, tmp_path / "weights")
        assert len(ucp.open(tmp_path / "weights").leaves) == 2
    for content in (b"", b"garbage", b"PK"):
        (tmp_path / "model.pt").write_bytes(content)
        with pytest.raises(NotACheckpoint):
            ucp.open(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.pt: .*truncated"):
        ucp.open(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes((DATA / "torchsave" / "tied.pt").read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.pt: .*truncated"):
        ucp.open(tmp_path / "model.pt")


@pytest.mark.parametrize(("name", "tree"), [
    ("mp_rank_00_model_states.pt", {"module": {}}),
    ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", {}),
    ("layer_03-model_00-model_states.pt", {}),
    ("model_optim_rng.pt", {"model": {}}),
    ("renamed.pt", {"module": {}, "ds_version": "0.15"}),
])  # fmt: skip
def test_what_one_rank_wrote_of_a_checkpoint_is_none(tmp_path, name, tree):
    save({"w": np.zeros(2, np.float32), **tree}, tmp_path / name)
    with pytest.raises(FormatError, match=rf"{name} is what one rank wrote of a checkpoint: open"):
        ucp.open(tmp_path / name)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    save({"a.b": np.zeros(2, np.float32), "a": {"b": np.ones(2, np.float32)}}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: 'a\.b' would be two tensors"):
        ucp.open(tmp_path / "x.pt")


def test_an_object_made_of_data_is_left_out_and_noted(tmp_path, monkeypatch):
    held = Instance("argparse.Namespace", {"buffer": np.zeros(100, np.float32)})
    save({
        "w":     np.ones(2, np.float32),
        "run":   held,
        "small": Instance("argparse.Namespace", {"lr": 1}),
    }, tmp_path / "x.pt")  # fmt: skip
    assert ucp.open(tmp_path / "x.pt").extras["x.pt"]["run"]["fields"]["buffer"]["shape"] == [100]
    assert_accounted_for(ucp.open(tmp_path / "x.pt"))
    monkeypatch.setattr(extras, "MAX_EXTRA_BYTES", 399)
    checkpoint = ucp.open(tmp_path / "x.pt")
    assert [*checkpoint.extras["x.pt"]] == ["small"]
    what = "an object with 400 bytes of tensors inside, which is data and no setting"
    assert checkpoint.notes == [f"run in x.pt was left out: {what}"]
    assert_accounted_for(checkpoint)


def test_a_tensor_that_many_extras_mention_is_written_as_often_as_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "MAX_EXTRA_BYTES", 1000)
    shared, other = np.zeros(100, np.float32), np.ones(50, np.float32)
    tree = {f"run{i}": Instance("argparse.Namespace", {"x": shared}) for i in range(9)}
    tree |= {"w": np.ones(2, np.float32), "own": Instance("argparse.Namespace", {"x": other})}
    save(tree, tmp_path / "x.pt")
    checkpoint = ucp.open(tmp_path / "x.pt")
    assert [*checkpoint.extras["x.pt"]] == ["run0", "run1", "run2", "own"]
    what = "extras up to it repeat 1200 bytes of tensors, which are stored once"
    assert checkpoint.notes[0] == f"run3 in x.pt was left out: {what}"
    assert_accounted_for(checkpoint)


TEXTS = ["a\ud800", {"\udfff": 1, "b": 2}, Instance("argparse.Namespace", {"x\ud800": "\ud801"})]


@pytest.mark.parametrize("value", TEXTS, ids=["a text", "a name", "a field"])
def test_half_of_a_surrogate_pair_is_kept_by_its_bytes(tmp_path, value):
    save({"w": np.ones(2, np.float32), "x": value}, tmp_path / "x.pt")
    kept = ucp.open(tmp_path / "x.pt").extras["x.pt"]["x"]
    copy = ucp.open(tmp_path / "x.pt").save(tmp_path / "copy")
    assert ucp.open(copy.path).extras["x.pt"]["x"] == kept
    assert "!wtf8" in str(kept)
    if not isinstance(value, Instance):
        assert from_json(kept) == value


@pytest.mark.parametrize("name", ["w", "x"])
def test_a_name_that_no_file_can_hold_is_refused(tmp_path, name):
    tree = {"w": np.ones(2, np.float32), "x": 1}
    tree[f"{name}\ud800"] = tree.pop(name)
    save(tree, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt has the name .*half of a surrogate pair"):
        ucp.open(tmp_path / "x.pt")
