"""Folded rows say exactly the rows that they stand for."""

import itertools
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.inspection.fold import Folded, fold, fold_states, with_moments

PARTS = st.sampled_from(["layers.", ".w", ".", "a", "x007y", "/", "{", ""])
NAMES = st.lists(st.tuples(PARTS, st.integers(0, 3)), min_size=1, max_size=3).map(
    lambda parts: "".join(f"{text}{number}" for text, number in parts)
)
ROWS = st.lists(st.tuples(NAMES, st.sampled_from(["[8]", "[8, 8]"])), max_size=40)
BRACES = re.compile(r"\{([\d.,]+)\}")


def numbers(text: str) -> list[str]:
    runs = [run.split("..") for run in text.split(",")]
    return [str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]


def unfolded(row: Folded) -> list[tuple[str, ...]]:
    texts, sets = BRACES.split(row.name)[::2], BRACES.split(row.name)[1::2]
    names = []
    for chosen in itertools.product(*map(numbers, sets)):
        pieces = itertools.zip_longest(texts, chosen, fillvalue="")
        names.append("".join(itertools.chain(*pieces)))
    return [(name, *row.cells) for name in names]


@given(ROWS)
def test_what_is_folded_unfolds_to_the_same_rows(rows):
    folded = fold(rows)
    assert Counter(itertools.chain(*map(unfolded, folded))) == Counter(rows)
    for row in folded:
        assert [rows[place] for place in row.rows] == unfolded(row)
    assert sorted(place for row in folded for place in row.rows) == list(range(len(rows)))


@given(ROWS)
def test_rows_come_in_the_order_of_their_first_names(rows):
    kinds = [(re.sub(r"\d+", "#", name), cells) for name, cells in rows]
    folded = [(re.sub(r"\{[\d.,]+\}|\d+", "#", row.name), *row.cells) for row in fold(rows)]
    assert list(dict.fromkeys(folded)) == list(dict.fromkeys(kinds))


def test_layers_of_a_model_are_one_row():
    rows = [("embed", "[9]"), *((f"layers.{i}.mlp.w", "[8]") for i in range(4)), ("norm", "[8]")]
    counts = [(row.name, row.count) for row in fold(rows)]
    assert counts == [("embed", 1), ("layers.{0..3}.mlp.w", 4), ("norm", 1)]


def test_layers_of_other_shapes_are_rows_of_their_own():
    rows = [(f"layers.{i}.w", "[8]" if i % 2 else "[4]") for i in range(6)]
    assert [row.name for row in fold(rows)] == ["layers.{0,2,4}.w", "layers.{1,3,5}.w"]


def test_numbers_that_are_not_each_with_each_are_not_folded_as_if_they_were():
    rows = [("a.0.0", ""), ("a.0.1", ""), ("a.1.0", "")]
    assert [row.name for row in fold(rows)] == ["a.0.{0,1}", "a.1.0"]


MOMENTS = st.lists(st.sampled_from(["mu", "nu", "{mu,nu}", "w", "0", "1"]), min_size=1, max_size=4)
LABELS = st.lists(MOMENTS.map(lambda parts: "/".join(["opt", *parts])), max_size=8)


@given(LABELS)
def test_both_moments_are_one_row_where_they_are_both(labels):
    rows = [(label, "") for label in labels]
    for row in with_moments(fold(rows)):
        before = fold([rows[place] for place in row.rows])
        names = {row.name.replace("{mu,nu}", each, 1) for each in ("mu", "nu")}
        assert row.name in {one.name for one in before} or {one.name for one in before} == names
        assert row.count == sum(one.count for one in before)
    placed = sorted(place for row in with_moments(fold(rows)) for place in row.rows)
    assert placed == list(range(len(rows)))


STATES = st.sampled_from(["param", "exp_avg", "step"])
ARRAYS = st.tuples(STATES, st.sampled_from(["w", "b", "a/w"]), st.sampled_from(["[8]", "[4]"]))


@given(st.lists(ARRAYS, max_size=12))
def test_folded_states_unfold_to_the_same_rows(arrays):
    rows = [(f"{state}/{name}", cell) for state, name, cell in arrays]
    folded = fold_states(rows)
    if folded is not None:
        usual, parameters = folded
        unfolded = [
            (f"{state}/{name}", cell)
            for name, cell, states in parameters
            for state in (states or usual).split(", ")
        ]
        assert Counter(unfolded) == Counter(rows)
