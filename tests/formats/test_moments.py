"""The states that bitsandbytes' optimizers keep, in files of torch.save and in a Trainer's folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import assert_accounted_for
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError
from safetensors_writer import write_safetensors
from torch_writer import save

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
ADEMAMIX = {"betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "alpha": 5.0}
NAMES = {1: [["exp_avg"], ["exp_avg_sq"]], 2: [["exp_avg_fast", "exp_avg_slow"], ["exp_avg_sq"]]}
SHAPES = st.lists(st.integers(1, 20), max_size=3).map(tuple)


def blocks_of(array: np.ndarray) -> int:
    return -(-array.size // 256)


def coded(state: str, moments: list[np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A state's codes, table and scales as bitsandbytes keeps them; fills in what they mean."""
    number, table = state[-1], rng.standard_normal(256, dtype=np.float32)
    codes = [rng.integers(0, 256, one.shape).astype(np.uint8) for one in moments]
    scales = [rng.random(blocks_of(one), np.float32) for one in moments]
    for one, code, scale in zip(moments, codes, scales, strict=True):
        each = np.repeat(scale, 256)[: one.size].reshape(one.shape)
        one[...] = table[code] * each
    stacked = np.stack if len(moments) == 2 else lambda arrays: arrays[0]
    return {state: stacked(codes), f"qmap{number}": table, f"absmax{number}": stacked(scales)}


def bnb_state(shape, moments: int, is_coded: bool, seed: int):
    """A parameter's state as bitsandbytes saves it, and its moments by name."""
    rng = np.random.default_rng(seed)
    stored, meant = {}, {}
    for state, names in zip(("state1", "state2"), NAMES[moments], strict=True):
        arrays = [np.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in names]
        if is_coded:
            stored |= coded(state, arrays, rng)
        else:
            stored[state] = np.stack(arrays) if len(arrays) == 2 else arrays[0]
        meant |= dict(zip(names, arrays, strict=True))
    return {"step": 3, "__bnb_optimizer_quant_state__": stored}, stored, meant


def run(path: Path, shapes, states, settings, named: bool = False) -> None:
    model = {f"p{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    group = {**settings, "params": [*range(len(shapes))]}
    group |= {"param_names": list(model)} if named else {}
    optim = {"state": dict(enumerate(states)), "param_groups": [group]}
    save({"model": model, "optim": optim}, path)


def read(checkpoint: ucp.Checkpoint) -> dict[str, np.ndarray]:
    leaves = (leaf.label for leaf in checkpoint.leaves)
    return {label: checkpoint.read(label) for label in leaves if label.split("/")[0] != "param"}


@given(st.lists(SHAPES, min_size=1, max_size=3), st.sampled_from([1, 2]), st.data())
def test_moments_are_read_from_numbers_and_from_codes(tmp_path_factory, shapes, moments, data):
    named = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 99))
    # those of small parameters are numbers
    is_coded = [data.draw(st.booleans()) for _ in shapes]
    made = [
        bnb_state(shape, moments, one, seed) for shape, one in zip(shapes, is_coded, strict=True)
    ]
    path = tmp_path_factory.mktemp("t") / "run.pt"
    settings = ADEMAMIX if moments == 2 else ADAM
    run(path, shapes, [state for state, _, _ in made], settings, named)
    said = {} if named else {"optimizer_groups": "module-order"}
    plain = ucp.open(path, **said)
    decoded = ucp.open(path, dequantize="float32", **said)
    as_stored, as_meant = {}, {}
    for i, ((_, stored, meant), one) in enumerate(zip(made, is_coded, strict=True)):
        keep_numbers = moments == 2 and not one
        as_stored |= {f"{s}/p{i}": x for s, x in (meant if keep_numbers else stored).items()}
        as_meant |= {f"{s}/p{i}": x for s, x in meant.items()}
    for checkpoint, want in ((plain, as_stored), (decoded, as_meant)):
        found = read(checkpoint)
        assert found.keys() == want.keys()
        assert [label for label in want if not same_bits(found[label], want[label])] == []
        assert_accounted_for(checkpoint)
    assert decoded.source.get("dequantize") == ("float32" if any(is_coded) else None)


def test_moments_are_read_in_the_folder_of_a_trainer(tmp_path):
    shapes = [(30, 20), (4,)]
    made = [
        bnb_state(shape, 2, is_coded, 7) for shape, is_coded in zip(shapes, (1, 0), strict=True)
    ]
    weights = {f"p{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    write_safetensors(tmp_path / "model.safetensors", weights)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    states = {i: state for i, (state, _, _) in enumerate(made)}
    groups = [{**ADEMAMIX, "params": [0]}, {**ADEMAMIX, "params": [1]}]
    save({"state": states, "param_groups": groups}, tmp_path / "optimizer.pt")
    checkpoint = ucp.open(tmp_path, optimizer_groups=[["p0"], ["p1"]], dequantize="float32")
    want = {f"{s}/p{i}": x for i, (_, _, meant) in enumerate(made) for s, x in meant.items()}
    found = read(checkpoint)
    assert {label for label in found if not label.startswith("step")} == {*want}
    assert [label for label in want if not same_bits(found[label], want[label])] == []
    assert_accounted_for(checkpoint)


UNFIT = {
    "one first moment too many": lambda state: state.update(state1=np.zeros((3, 4), np.float32)),
    "no second moment": lambda state: state.pop("state2"),
    "a second moment of another shape": lambda s: s.update(state2=np.zeros((2, 4), np.float32)),
}


@pytest.mark.parametrize("change", UNFIT)
def test_states_of_other_shapes_than_the_parameters_are_refused(tmp_path, change):
    state, stored, _ = bnb_state((4,), 2, False, 1)
    UNFIT[change](stored)
    run(tmp_path / "run.pt", [(4,)], [state], ADEMAMIX)
    with pytest.raises(FormatError, match="optimizer_groups does not fit"):
        ucp.open(tmp_path / "run.pt", optimizer_groups="module-order")


def test_codes_with_scales_of_one_moment_for_two_stay_as_they_are(tmp_path):
    state, stored, _ = bnb_state((300,), 2, True, 1)
    stored["absmax1"] = stored["absmax1"][0]
    run(tmp_path / "run.pt", [(300,)], [state], ADEMAMIX)
    said = {"optimizer_groups": "module-order", "dequantize": "float32"}
    found = read(ucp.open(tmp_path / "run.pt", **said))
    assert {label.split("/")[0] for label in found} == {"state1", "qmap1", "absmax1", "exp_avg_sq"}
    assert same_bits(found["state1/p0"], stored["state1"])
