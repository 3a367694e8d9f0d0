"""Which parameter a numbered state belongs to: what every way of counting leaves is decided."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import SpecError
from jax_ucp.options import MODULE_ORDER, checked_groups
from jax_ucp.states import pairing
from jax_ucp.states.pairing import (
    Contradicted,
    Undecided,
    contradiction,
    only_division,
    only_filling,
    only_pairing,
    tells_shape,
)

NAMES = "abcde"


def or_undecided(function, *args):
    try:
        return function(*args)
    except Undecided as error:
        return str(error)


@given(st.lists(st.sets(st.sampled_from(NAMES)), max_size=5))
def test_a_pairing_is_found_just_where_there_is_one(candidates):
    numbers = dict(enumerate(candidates))
    orders = [dict(enumerate(names)) for names in itertools.permutations(NAMES, len(numbers))]
    every = [order for order in orders if all(n in numbers[i] for i, n in order.items())]
    found = or_undecided(only_pairing, numbers)
    if len(every) == 1:
        assert found == every[0]
    else:
        assert isinstance(found, str)
        # with no way at all, a number may still have several candidates
        assert "several" in found or not every


def divisions(sizes: dict[str, int], ends: list[int], fits) -> Iterator[dict[str, tuple[int, int]]]:
    for groups in itertools.product([None, *range(len(ends))], repeat=len(sizes)):
        at, found = [0] * len(ends), {}
        for (name, size), group in zip(sizes.items(), groups, strict=True):
            if group is not None:
                found[name] = group, at[group]
                at[group] += size
        if at == ends and all(fits(name, group, place) for name, (group, place) in found.items()):
            yield found


@given(st.data())
def test_a_division_in_order_is_found_just_where_there_is_one(data):
    sizes = {name: data.draw(st.integers(1, 3)) for name in NAMES[: data.draw(st.integers(0, 5))]}
    ends = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=2))
    allowed = {name: data.draw(st.sets(st.integers(0, 3))) for name in sizes}

    def fits(name: str, group: int, place: int) -> bool:
        return (group * 2 + place) % 4 in allowed[name]

    every = list(divisions(sizes, ends, fits))
    found = or_undecided(only_division, sizes, ends, fits)
    assert found == every[0] if len(every) == 1 else ("several" if every else "in no way") in found


@given(st.data())
def test_a_filling_in_any_order_is_found_just_where_there_is_one(data):
    sizes = {name: data.draw(st.integers(0, 3)) for name in NAMES[: data.draw(st.integers(0, 5))]}
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    allowed = {name: data.draw(st.sets(st.integers(0, 3))) for name in sizes}

    def fits(name: str, buffer: int, offset: int) -> bool:
        return (buffer * 2 + offset) % 4 in allowed[name]

    orders = itertools.permutations({name: size for name, size in sizes.items() if size}.items())
    every: list[dict[str, tuple[int, int]]] = []
    for order in orders:
        every += [found for found in divisions(dict(order), lengths, fits) if found not in every]

    def candidates(buffer, offset):
        return [name for name in sizes if fits(name, buffer, offset)]

    found = or_undecided(only_filling, sizes, lengths, candidates)
    assert found == every[0] if len(every) == 1 else ("several" if every else "in no way") in found
    if not every:
        with pytest.raises(Contradicted):
            only_filling(sizes, lengths, candidates)


def test_a_search_that_would_not_end_decides_nothing(monkeypatch):
    monkeypatch.setattr(pairing, "MAX_STEPS", 50)
    many = {f"p{i}": 1 for i in range(20)}
    with pytest.raises(Undecided, match="too many ways"):
        only_filling(many, [21], lambda buffer, offset: [*many])
    with pytest.raises(Undecided, match="too many ways"):
        only_division(many, [9, 9], lambda name, group, place: True)


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple))
def test_states_of_torchs_optimizers_have_the_shape_of_their_parameter_and_no_other(shape):
    adam = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    assert contradiction(adam, shape) is None
    assert contradiction(adam, (*shape, 5)) == "exp_avg"
    assert tells_shape(adam)
    assert not tells_shape({"step": ()})
    assert not tells_shape({**adam, "preconditioner": (3, 3)})
    assert not tells_shape({"z": shape or (1,)})


@pytest.mark.parametrize("factors", [
    lambda shape: {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]},
    lambda shape: {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])},
])  # fmt: skip
@given(st.data())
def test_adafactors_factors_tell_the_matrix_and_never_a_vector(factors, data):
    shape = data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=3).map(tuple))
    other = data.draw(st.lists(st.integers(2, 4), min_size=0, max_size=3).map(tuple))
    states = {"step": (), **factors(shape)}
    assert tells_shape(states)
    assert (contradiction(states, other) is None) == (shape == other)


def test_the_users_word_is_an_order_or_lists_of_names():
    assert checked_groups(None) is None
    assert checked_groups("module-order") == MODULE_ORDER
    assert checked_groups([["a"], ("b", "c"), []]) == (("a",), ("b", "c"), ())
    names = "module_order", "", [], ["a"]
    for wrong in (*names, [["a"], "bc"], [[1]], {"a": ["b"]}, [["a"], None], 3):
        with pytest.raises(SpecError, match=r"say 'module-order', 'hf-decay', or a list for each"):
            checked_groups(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="says 'a' twice"):
        checked_groups([["a"], ["b", "a"]])
