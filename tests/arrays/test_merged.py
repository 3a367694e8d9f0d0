"""What adapters add to a weight: each element is the sum of the rule, rounded once, in any box."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import MemoryStore
from jax_ucp.arrays.dequantized import WeightPart, dequantized
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.merged import MAGNITUDE, WEIGHT, MergedWeight, Term
from jax_ucp.arrays.rounding import round_into
from jax_ucp.arrays.value import Constant
from jax_ucp.layout.box import Box

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FACTOR_DTYPES = {**DTYPES, "float64": np.float64}


def part(role: str, array: np.ndarray) -> WeightPart:
    return WeightPart(role, Constant(array), array.shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[MergedWeight, dict[str, np.ndarray]]:
    """A weight with one to three adapters, plain, turned, of convolutions, of experts, or DoRA."""
    kind = draw(st.sampled_from(["plain", "turned", "convolution", "experts", "dora", "vector"]))
    sides = st.integers(1, 9)
    shape = tuple(draw(st.lists(sides, min_size=2, max_size=2)))
    experts = kind == "experts"
    if experts:
        shape = draw(sides), *shape
    elif kind == "convolution":
        shape += draw(st.integers(1, 3)), draw(st.integers(1, 3))
    elif kind == "vector":
        shape = shape[:1]
    turned = kind == "turned" or draw(st.booleans())
    out_axis = int(experts) + (turned and len(shape) - experts == 2)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    # of few values, sums lie between two numbers, and ones that cancel are common
    coarse = draw(st.booleans())

    def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        values = rng.integers(-4, 5, shape) / 8 if coarse else rng.standard_normal(shape)
        return np.asarray(values, FACTOR_DTYPES[dtype])

    dtype = draw(st.sampled_from(sorted(DTYPES)))
    arrays = {WEIGHT: numbers(shape, dtype)}
    parts = {WEIGHT: part(WEIGHT, arrays[WEIGHT])}
    terms: list[Term] = []
    columns = tuple(shape[i] for i in range(experts, len(shape)) if i != out_axis)
    for i in range(1 if kind == "dora" else draw(st.integers(1, 3))):
        rank, factor = draw(st.integers(1, 12)), draw(st.sampled_from(sorted(FACTOR_DTYPES)))
        a = (shape[0], rank, *columns) if experts else (rank, *columns)
        b = (shape[out_axis], rank, shape[0]) if experts else (shape[out_axis], rank)
        b = shape if kind == "vector" else b
        roles = {f"B {i}": b} if kind == "vector" else {f"A {i}": a, f"B {i}": b}
        arrays |= {role: numbers(of, factor) for role, of in roles.items()}
        parts |= {role: part(role, arrays[role]) for role in roles}
        scale = draw(st.sampled_from([1.0, 0.5, 2 / 3, -1.75, 16 / np.sqrt(rank)]))
        terms.append(Term(scale, f"B {i}", "" if kind == "vector" else f"A {i}"))
    if kind == "dora":
        arrays[MAGNITUDE] = numbers((shape[out_axis],), "float32")
        parts[MAGNITUDE] = part(MAGNITUDE, arrays[MAGNITUDE])
    merged = MergedWeight(shape, np.dtype(DTYPES[dtype]), parts, terms, out_axis, experts)
    return merged, arrays


def by_the_rule(merged: MergedWeight, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Every element by itself, in float64, one operation after the other."""
    total = np.empty(merged.shape)
    for place in np.ndindex(merged.shape):
        value = np.float64(arrays[WEIGHT][place])
        out = place[merged.out_axis]
        rest = tuple(n for i, n in enumerate(place) if i != merged.out_axis)
        for term in merged.terms:
            b = arrays[term.b].astype(np.float64)
            if not term.a:
                value = value + term.scale * b[out]
                continue
            a = arrays[term.a].astype(np.float64)
            a = a[(rest[0], slice(None), *rest[1:])] if merged.experts else a[(slice(None), *rest)]
            row = b[out, :, place[0]] if merged.experts else b[out]
            product = np.float64(0)
            for x, y in zip(row, a, strict=True):
                product = product + x * y
            value = value + term.scale * product
        total[place] = value
    if MAGNITUDE in arrays:
        rows = np.moveaxis(total, merged.out_axis, 0)
        norms = np.sqrt(np.sum(np.square(rows.reshape(len(rows), -1)), axis=1))
        with np.errstate(all="ignore"):
            length = arrays[MAGNITUDE] / norms
            rows *= length.reshape(-1, *[1] * (total.ndim - 1))
    return total


def view_of(merged: MergedWeight) -> Evaluated:
    return Evaluated({"w": dequantized("w", merged, merged.dtype)})


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    edges = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]

    def box(pairs):
        return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    return st.tuples(*edges).map(box)


@given(st.data())
@settings(max_examples=300)
def test_a_merged_box_is_that_box_of_the_sum_by_the_rule_rounded_once(data):
    merged, arrays = data.draw(cases())
    want = np.empty(merged.shape, merged.dtype)
    with np.errstate(all="ignore"):
        round_into(want, by_the_rule(merged, arrays) + 0.0)
        wanted = data.draw(st.lists(boxes(merged.shape), min_size=1, max_size=3))
        outs = [np.empty(box.shape, merged.dtype) for box in wanted]
        view_of(merged).read_into("w", wanted, outs)
    for box, out in zip(wanted, outs, strict=True):
        # NaN of bfloat16 is not equal to itself for numpy's test
        np.testing.assert_array_equal(out.astype(np.float32), want[box.index].astype(np.float32))


def test_where_sums_cancel_the_order_of_the_rule_decides_and_not_that_of_a_library() -> None:
    # one adapter, and the same one taken away again in another order: what is left is rounding
    rng = np.random.default_rng(0)
    b, a = rng.standard_normal((24, 40)), rng.standard_normal((40, 30))
    factors = {"A 0": a, "B 0": b, "A 1": a[::-1], "B 1": b[:, ::-1]}
    arrays = {role: array.astype(np.float32) for role, array in factors.items()}
    arrays[WEIGHT] = np.zeros((24, 30), np.float32)
    parts = {role: part(role, array) for role, array in arrays.items()}
    terms = [Term(1.0, "B 0", "A 0"), Term(-1.0, "B 1", "A 1")]
    merged = MergedWeight((24, 30), np.dtype(np.float32), parts, terms)
    want = by_the_rule(merged, arrays).astype(np.float32)
    assert np.count_nonzero(want) > want.size // 2
    for box in (Box.whole((24, 30)), Box((3, 0), (4, 30)), Box((0, 7), (24, 9))):
        np.testing.assert_array_equal(view_of(merged).read("w", box), want[box.index])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_large_weight_is_the_same_in_pieces_and_on_columns(dtype):
    rng = np.random.default_rng(0)
    shape, rank = (700, 1100), 16
    arrays = {
        WEIGHT: rng.standard_normal(shape).astype(DTYPES[dtype]),
        "A 0": rng.standard_normal((rank, shape[1])).astype(np.float32),
        "B 0": rng.standard_normal((shape[0], rank)).astype(np.float32),
        MAGNITUDE: rng.standard_normal(shape[0]).astype(np.float32),
    }
    parts = {role: part(role, array) for role, array in arrays.items()}
    for without in ((), (MAGNITUDE,)):
        chosen = {role: part for role, part in parts.items() if role not in without}
        merged = MergedWeight(shape, np.dtype(DTYPES[dtype]), chosen, [Term(0.3, "B 0", "A 0")])
        view = view_of(merged)
        whole = view.read("w", Box.whole(shape))
        for box in (Box((3, 5), (640, 901)), Box((699, 0), (700, 1100)), Box((0, 7), (700, 8))):
            np.testing.assert_array_equal(view.read("w", box), whole[box.index])


@given(st.lists(st.floats(width=64, allow_nan=False), min_size=1), st.sampled_from(sorted(DTYPES)))
def test_float64_is_rounded_once_to_the_nearest_and_the_even(values, dtype):
    out = np.empty(len(values), DTYPES[dtype])
    with np.errstate(over="ignore"):
        round_into(out, np.array(values))
    for value, got in zip(values, out, strict=True):
        assert _is_nearest(value, got), (value, got)


@given(st.integers(-(1 << 20), 1 << 20), st.sampled_from([-1, 0, 1]))
def test_what_lies_beside_the_middle_of_two_numbers_is_rounded_to_its_side(
    odd: int, side: int
) -> None:
    # float32 would round it to the middle first, and then the other way
    middle = float(2 * odd + 1)
    value = middle + side * 2.0**-30
    out = np.empty(1, ml_dtypes.bfloat16)
    round_into(out, np.array([value]))
    assert _is_nearest(value, out[0])


def _is_nearest(value: float, got: np.generic) -> bool:
    """Whether no neighbour of a number is nearer, and of two as near it is the even one."""
    bits = np.array([got]).view("u2" if got.dtype.itemsize == 2 else "u4")
    if not np.isfinite(np.float64(got)):
        largest = bits - 1
        top, below = (Fraction(float(x.view(got.dtype)[0])) for x in (largest, largest - 1))
        edge = top + (top - below) / 2
        return not np.isfinite(value) or abs(Fraction(value)) >= abs(edge)
    distance = abs(Fraction(value) - Fraction(float(got)))
    for other in (bits + 1, bits - 1):
        near = np.float64(other.view(got.dtype)[0])
        if not np.isfinite(near):
            continue
        further = abs(Fraction(value) - Fraction(float(near)))
        if further < distance or (further == distance and int(bits[0]) % 2):
            return False
    return True


def test_nothing_but_the_rows_and_columns_of_a_box_is_read():
    rng = np.random.default_rng(0)
    shapes = {WEIGHT: (8, 6), "A 0": (2, 6), "B 0": (8, 2)}
    arrays = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    store = MemoryStore(arrays)
    stored = expressions(store)
    parts = {role: WeightPart(role, stored[role], a.shape) for role, a in arrays.items()}
    merged = MergedWeight((8, 6), np.dtype(np.float32), parts, [Term(1.0, "B 0", "A 0")])
    view = Evaluated({"w": dequantized("w", merged, merged.dtype)})
    view.read("w", Box((2, 1), (5, 3)))
    wanted = {("A 0", Box((0, 1), (2, 3))), ("B 0", Box((2, 0), (5, 2)))}
    wanted.add((WEIGHT, Box((2, 1), (5, 3))))
    assert set(store.reads) == wanted
