"""What the statistics say of arrays is what numpy says of them whole, however they are read."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jax_ucp as ucp
from helpers import MemoryStore
from jax_ucp.arrays.budget import fair_share
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.inspection.moments import together
from jax_ucp.inspection.statistics import (
    AdamStep,
    Statistics,
    Together,
    block_statistics,
    statistics_of,
)
from jax_ucp.layout.box import Box
from jax_ucp.tree import Key, Leaf

DATA = Path(__file__).parents[1] / "data"
CASE = DATA / "deepspeed" / "z1_bf16_dp2"
DTYPES = ("float32", "float16", "float64", "int32", "uint8", "bool", "complex64", "bfloat16")
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=7)


def leaf_of(name: str, array: np.ndarray) -> Leaf:
    path = Key("dict", "param"), Key("dict", name)
    return Leaf(path, name, "array", array.shape, str(array.dtype))


def look(array: np.ndarray, budget: int = 1 << 30, most: int = 1 << 40, chunk=None) -> Statistics:
    """The statistics of an array, read as they are of a checkpoint."""
    store = MemoryStore({"x": array})
    infos = {"x": ArrayInfo(array.shape, array.dtype, chunk)}
    groups = [Together((leaf_of("x", array),))]
    limits = {"max_read_bytes": most, "budget_bytes": budget}
    return statistics_of(groups, infos, lambda leaf, box: store.read(leaf.name, box), **limits)["x"]


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    values = st.floats(-1e4, 1e4, width=16) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])
    wide = draw(hnp.arrays(np.float64, draw(SHAPES), elements=values))
    if dtype in ("int32", "uint8", "bool"):
        wide = np.nan_to_num(wide, posinf=7, neginf=-7)
    with np.errstate(invalid="ignore"):
        return wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def close(got: float, want: float, size: float = 0.0) -> bool:
    """Equal but for single precision, for what is made of elements of that `size`."""
    return got == pytest.approx(want, rel=1e-5, abs=1e-6 * size + 1e-40)


def rms(finite: np.ndarray) -> float:
    """The root of the mean of the squares."""
    return float(np.sqrt(np.mean(finite**2)))


@given(arrays(), st.integers(64, 4000), st.data())
def test_statistics_are_those_of_the_whole_array_in_whatever_blocks_it_is_read(array, budget, data):
    chunk = data.draw(st.none() | st.tuples(*(st.integers(1, max(1, n)) for n in array.shape)))
    found = look(array, budget, chunk=chunk)
    wide = (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    assert (found.elements, found.seen, found.finite) == (wide.size, wide.size, finite.size)
    assert found.nans == np.isnan(wide).sum()
    assert found.infinities == np.isinf(wide).sum()
    assert found.least == finite.min(initial=np.inf)
    assert found.greatest == finite.max(initial=-np.inf)
    if finite.size:
        assert close(found.mean, finite.mean(), rms(finite))
        assert close(found.deviation, finite.std(), rms(finite))
        assert close(found.norm, np.linalg.norm(finite))


@given(arrays(), st.integers(1, 20))
def test_two_parts_of_an_array_are_together_what_it_is(array, at):
    flat = array.reshape(-1)
    both = block_statistics(flat[:at]) + block_statistics(flat[at:])
    whole = block_statistics(flat)
    assert both.finite == whole.finite
    assert (both.least, both.greatest) == (whole.least, whole.greatest)
    size = whole.norm / max(1, whole.finite) ** 0.5
    assert close(both.mean, whole.mean, size)
    assert close(both.deviation, whole.deviation, size)


@given(
    hnp.arrays(np.float32, (6, 5), elements=st.sampled_from([0.0, -0.0, 1.0, math.nan])),
    st.integers(64, 4000),
)
def test_every_row_of_zeros_is_counted_and_no_other(array, budget):
    dead = (array == 0).all(axis=1).sum()
    found = look(array, budget)
    if found.rows:  # where a row fits in a block
        assert (found.rows, found.dead_rows) == (6, dead)
    large = look(array)
    assert (large.rows, large.dead_rows) == (6, dead)


@pytest.mark.parametrize("size", [1, 1023, 1025, 65535, 65536, 65537, 200_003])
def test_more_elements_than_are_summed_at_once_are_summed_all(size):
    array = np.random.default_rng(size).normal(3, 1, size).astype(np.float32)
    found = look(array)
    wide = array.astype(np.float64)
    assert found.finite == size
    assert close(found.mean, wide.mean())
    assert close(found.deviation, wide.std(), 1e-3)
    assert close(found.norm, np.linalg.norm(wide))


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1e-12, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("mean", [0, 1, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_right_of_elements_whose_squares_float32_does_not_hold(dtype, mean, scale):
    if mean * scale > 1e38:
        return
    wide = np.random.default_rng(0).normal(mean, 1, 70_000) * scale
    array = wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found, wide = look(array), array.astype(np.float64)
    assert (found.least, found.greatest) == (wide.min(), wide.max())
    assert close(found.mean, wide.mean(), rms(wide))
    assert close(found.deviation, wide.std(), 1e-3 * wide.std())
    assert close(found.norm, np.linalg.norm(wide))


def test_what_varies_in_its_last_bits_alone_is_seen_to():
    array = np.random.default_rng(0).normal(1e4, 0.01, 70_000).astype(np.float32)
    found, wide = look(array), array.astype(np.float64)
    assert found.deviation == pytest.approx(wide.std(), rel=1e-5)
    assert found.mean == pytest.approx(wide.mean(), rel=1e-9)


def test_a_constant_deviates_from_nothing_however_large_it_is():
    assert look(np.full(70_000, 0.1, np.float32)).deviation < 1e-15
    assert look(np.full((300, 300), 1e8, np.float32)).deviation == 0


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 4000))
def test_what_is_read_together_is_about_what_was_allowed_and_all_where_that_is_enough(sizes, total):
    most = fair_share(sizes, total)
    read = sum(min(size, most) for size in sizes)
    assert read <= max(total, len(sizes))
    if sum(sizes) <= total:
        assert read == sum(sizes)
    else:
        assert read > total - len(sizes)


def test_a_large_array_is_sampled_evenly_and_a_small_one_read_whole():
    large = np.arange(1 << 16, dtype=np.float32).reshape(-1, 16)
    store = MemoryStore({"large": large, "small": np.ones(64, np.float32)})
    groups = [Together((leaf_of(name, array),)) for name, array in store.data.items()]
    limits = {"max_read_bytes": 32 << 10, "budget_bytes": 1 << 30}
    found = statistics_of(
        groups, store.arrays(), lambda leaf, box: store.read(leaf.name, box), **limits
    )
    assert found["small"].seen == 64
    sampled = found["large"]
    assert 16 << 10 <= sampled.seen * 4 <= 32 << 10
    assert sampled.mean == pytest.approx(large.mean(), rel=0.1)
    assert sampled.norm == pytest.approx(np.linalg.norm(large), rel=0.1)
    rows = [(box.start[0], box.stop[0]) for key, box in store.reads if key == "large"]
    assert (min(rows)[0], max(rows)[1]) == (0, 4096)


@given(
    hnp.arrays(np.float32, 9, elements=st.floats(-1, 1, width=16)),
    st.integers(1, 100),
    st.sampled_from([1e-8, 0.0, 0.1]),
)
def test_a_step_is_the_one_that_adam_makes(m, count, eps):
    v = (m * m + 0.25).astype(np.float32)
    step = AdamStep(0.01, 1 - 0.9**count, 1 - 0.95**count, eps)
    wide = m.astype(np.float64), v.astype(np.float64)
    want = 0.01 * (wide[0] / step.first) / (np.sqrt(wide[1] / step.second) + eps)
    found = step.squares(m, v)
    assert found == pytest.approx(np.dot(want, want), rel=1e-4, abs=1e-12)


def test_what_never_moved_makes_no_step():
    zeros = np.zeros(4, np.float32)
    assert AdamStep().squares(zeros, zeros) == 0


def test_the_steps_of_a_trainers_run_are_those_of_its_moments_and_settings():
    checkpoint = ucp.open(CASE)
    settings = {name: group.settings for group in checkpoint.groups for name in group.params}
    groups = together(checkpoint.leaves, checkpoint.params, settings)
    [each] = [group for group in groups if group.leaves[0].label == "param/head.weight"]
    labels = [leaf.label for leaf in each.leaves[1:]]
    assert labels == ["exp_avg/head.weight", "exp_avg_sq/head.weight"]
    lr, eps, (b1, b2) = (settings["head.weight"][key] for key in ("lr", "eps", "betas"))
    assert each.step == AdamStep(lr, 1 - b1**5, 1 - b2**5, eps)
    m, v = (checkpoint.read(leaf.label).astype(float) for leaf in each.leaves[1:])
    want = lr * (m / each.step.first) / (np.sqrt(v / each.step.second) + eps)
    arrays = checkpoint._contents.arrays.arrays()

    def read(leaf, box):
        return checkpoint.read(leaf.label, box)

    found = statistics_of(groups, arrays, read, max_read_bytes=1 << 40, budget_bytes=1 << 20)
    assert found[each.leaves[0].name].update == pytest.approx(np.linalg.norm(want), rel=1e-5)
    assert len(found) == sum(leaf.has_array for leaf in checkpoint.leaves)


def test_moments_of_optax_go_to_the_parameter_with_their_path():
    array = np.ones(3, np.float32)
    tree = {
        "params": {"a": {"kernel": array}, "b": array},
        "opt_state": {"0": {"mu": {"a": {"kernel": array}, "b": array}, "nu": {"a": {"kernel": array},
            "b": array}}},
    }  # fmt: skip
    checkpoint = ucp.Checkpoint.of(tree)
    groups = together(checkpoint.leaves, checkpoint.params, {})
    labels = [[leaf.label for leaf in group.leaves] for group in groups]
    assert labels == [
        ["params/a/kernel", "opt_state/0/mu/a/kernel", "opt_state/0/nu/a/kernel"],
        ["params/b", "opt_state/0/mu/b", "opt_state/0/nu/b"],
    ]


def test_moments_that_could_be_of_two_parameters_are_of_none():
    array = np.ones(3, np.float32)
    tree = {"params": {"w": array}, "ema": {"w": array}}
    tree["opt"] = {"mu": {"w": array}, "nu": {"w": array}}
    checkpoint = ucp.Checkpoint.of(tree)
    groups = together(checkpoint.leaves, checkpoint.params, {})
    assert all(len(group.leaves) == 1 for group in groups)


def test_an_array_that_cannot_be_read_says_why_and_the_others_are_read():
    good, bad = np.ones(4, np.float32), np.zeros(4, np.float32)
    store = MemoryStore({"good": good, "bad": bad})

    def read(leaf: Leaf, box: Box) -> np.ndarray:
        if leaf.name == "bad":
            raise ucp.errors.CorruptData("bad: its bytes are not what was written")
        return store.read(leaf.name, box)

    groups = [Together((leaf_of(name, array),)) for name, array in store.data.items()]
    limits = {"max_read_bytes": 1 << 40, "budget_bytes": 1 << 20}
    found = statistics_of(groups, store.arrays(), read, **limits)
    assert found["good"].norm == 2
    assert found["bad"].unread == "bad: its bytes are not what was written"
    assert found["bad"].is_fault


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_doubles_whose_squares_are_none_have_a_norm(dtype):
    found = look(np.full((3, 3), 1e200, dtype))
    assert found.norm == pytest.approx(3e200)
    assert (found.mean, found.deviation) == (1e200, 0)
    assert look(np.array([1e200, -1e200], dtype)).norm > 1e200


def test_a_complex_number_is_finite_where_its_parts_are():
    found = look(np.array([3e38 + 3e38j, np.inf + 0j, np.nan + 0j], np.complex64))
    assert (found.finite, found.infinities, found.nans) == (1, 1, 1)
    assert found.greatest == pytest.approx(3e38 * math.sqrt(2))
