"""Which tensor of a trainer's state dict is a weight, and which whose state: laws of any names."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.options import Options
from jax_ucp.states.optimizer_dicts import optimizer_dicts
from jax_ucp.states.pairing import Undecided
from jax_ucp.states.state_pairing import StateTensor
from jax_ucp.states.state_paths import Places, places

PARTS = st.sampled_from(("a", "b", "state", "model", "0", "layers", "weight"))
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
# A parameter's name is not a number alone: those are the ids that an optimizer's own state_dict()
# has.
PARAMS = st.sets(NAMES.filter(lambda name: not name.isdigit()), min_size=1, max_size=6)
GROUPS = {(optimizer, "param_groups", 0, "lr"): 0.1 for optimizer in ("optim", "first", "second")}
STATES = st.sets(st.sampled_from(("exp_avg", "exp_avg_sq", "step")), min_size=1)


def joined(*path: object) -> str:
    return ".".join(map(str, path))


def placed(paths: Iterable[tuple], objects: Mapping[Any, Any] = {}, **options: Any) -> Places:
    """The places of tensors that all have one shape, by their paths."""
    return places({joined(*path): StateTensor(path) for path in paths}, objects, Options(**options))


@given(PARAMS, STATES, st.booleans(), st.sampled_from(("model", "state_dict", "net", "")))
def test_every_state_goes_to_its_parameter_however_trainers_nest_it(params, states, flat, model):
    root = (model,) if model else ()
    want = {(*root, param): ("param", param) for param in params}
    for param in params:
        for state in states:
            own = [joined("state", param, state)] if flat else ["state", param, state]
            path = ("optim", *own)
            want[path] = state, param
    own = [joined("param_groups", min(params), "lr")] if flat else ["param_groups", 0, "lr"]
    group = ("optim", *own)
    want[group] = "other", joined(*group)
    found = placed(want)
    assert found.at == {joined(*path): place for path, place in want.items()}
    assert found.notes == []


@given(PARAMS, STATES, st.booleans(), st.booleans())
def test_a_copy_of_the_model_leaves_open_whose_states_they_are(params, states, flat, numbered):
    """An average, a teacher, a second model of the same class: names and shapes fit both."""
    paths = [("model", param) for param in params] + [("ema", param) for param in params]
    want = {("model", param): ("param", param) for param in params}
    want |= {("ema", param): ("other", joined("ema", param)) for param in params}
    order = sorted(params)
    objects = {("optim", "param_groups", 0, "params"): [*range(len(order))] if numbered else order}
    mine = {}
    for number, param in enumerate(order):
        for state in states:
            flattened = ("optim", joined("state", param, state))
            nested = ("optim", "state", number if numbered else param, state)
            mine[flattened if flat and not numbered else nested] = state, param
    if flat and not numbered:
        objects = {("optim", joined("param_groups", param, "lr")): 0.1 for param in order}
    apart = placed([*paths, *mine], objects)
    places = want | {path: ("other", joined(*path)) for path in mine}
    assert apart.at == {joined(*path): place for path, place in places.items()}
    first = next(param for param in params if ("model", param) == paths[0])
    assert f"{joined('model', first)!r}" in apart.notes[-1]
    assert "module-order" not in apart.notes[-1]
    word = tuple(joined("model", param) for param in order)
    said = placed([*paths, *mine], objects, optimizer_groups=(word,))
    assert said.at == {joined(*path): place for path, place in (want | mine).items()}
    assert said.said
    with pytest.raises(Undecided, match=r"ema and model have these names; say which is meant:"):
        placed([*paths, *mine], objects, optimizer_groups=(tuple(order),))


@given(PARAMS, STATES, st.booleans())
def test_a_state_that_names_no_parameter_keeps_its_optimizer_whole(params, states, flat):
    want = {("model", param): ("param", param) for param in params}
    for param in {*params, "gone"}:
        for state in states:
            own = [joined("state", param, state)] if flat else ["state", param, state]
            path = ("optim", *own)
            want[path] = "other", joined(*path)
    found = placed(want, {("optim", "param_groups", 0, "lr"): 0.1})
    assert found.at == {joined(*path): place for path, place in want.items()}
    (note,) = found.notes
    assert f"{len(states)} name no parameter of the model, the first optim.state.gone." in note


def test_numbers_are_ids_and_no_names_even_of_a_model_whose_names_are_numbers():
    paths = [
        ("model", "0"), ("model", "1"), ("optim", "state", "0", "step"),
        ("optim", "state", "1", "step"),
    ]  # fmt: skip
    found = placed(paths, GROUPS)
    want = {f"model.{n}": ("param", n) for n in "01"}
    steps = [f"optim.state.{n}.step" for n in "01"]
    assert found.at == want | {name: ("other", name) for name in steps}
    assert "they go by numbers" in found.notes[0]


@given(PARAMS, st.data(), st.booleans(), st.booleans())
def test_numbers_are_those_that_groups_give_names_however_they_are_kept(params, data, text, items):
    order = data.draw(st.permutations(sorted(params)))
    numbers = data.draw(st.permutations(range(len(order))))
    cut = data.draw(st.integers(0, len(order)))
    objects = {}
    for group, part in enumerate((slice(cut), slice(cut, None))):
        for key, values in (("params", numbers[part]), ("param_names", order[part])):
            path = ("optim", "param_groups", group, key)
            each = {(*path, i): value for i, value in enumerate(values)}
            objects |= each if items else {path: values}
    want = {("model", name): ("param", name) for name in params}
    for number, name in zip(numbers, order, strict=True):
        want["optim", "state", str(number) if text else number, "step"] = "step", name
    found = placed(want, objects)
    assert found.at == {joined(*path): place for path, place in want.items()}
    assert found.notes == []


def test_two_optimizers_of_one_model_share_it_but_not_a_state():
    paths = {("model", name): ("param", name) for name in "ab"}
    paths["first", "state", "a", "step"] = "step", "a"
    paths["second", "state", "b", "step"] = "step", "b"
    assert placed(paths, GROUPS).at == {joined(*p): place for p, place in paths.items()}
    again = ("second", "state", "a", "step")
    found = placed([*paths, again], GROUPS)
    assert {found.at[joined(*p)][0] for p in [*paths, again] if "state" in p} == {"other"}
    words = "another optimizer has states of the same parameters"
    assert all(words in note for note in found.notes)


def test_two_dicts_of_which_nothing_says_which_is_the_model_are_both_kept_aside():
    for paths in ([("generator", "w"), ("critic", "w")], [("model", "w"), ("module", "w")]):
        found = placed(paths)
        assert {state for state, _ in found.at.values()} == {"other"}
        assert len(found.notes) == 1
    states = [("optim", "state", "w", "step")]
    found = placed([("generator", "w"), ("critic", "w"), *states], GROUPS)
    assert {state for state, _ in found.at.values()} == {"other"}
    assert "several dicts could be the model" in found.notes[0]


def test_no_tensors_have_no_places():
    assert places({}).at == {}
    assert places({}).notes == []


def test_a_word_does_not_give_one_parameter_the_states_of_two_optimizers():
    objects = {("second", "param_groups", 0, "params"): [0]}
    objects["first", "param_groups", 0, "params"] = ["w"]
    paths = [("model", "w"), ("first", "state", "w", "step"), ("second", "state", 0, "step")]
    for word in ("module-order", (("w",),)):
        found = placed(paths, objects, optimizer_groups=word)
        assert {state for state, _ in found.at.values()} == {"param", "other"}
        words = [note.partition(": ")[2] for note in found.notes[:2]]
        assert words == ["another optimizer has states of the same parameters"] * 2


def test_groups_beside_an_optimizer_do_not_hide_its_states():
    objects = {("param_groups", 0, "lr"): 0.1, ("optim", "param_groups", 0, "lr"): 0.2}
    found = placed([("model", "w"), ("optim", "state", "w", "step")], objects)
    assert found.at == {"model.w": ("param", "w"), "optim.state.w.step": ("step", "w")}


@given(PARAMS, st.booleans())
def test_an_optimizer_that_keeps_nothing_says_what_it_was_told_of_its_one_model(params, copy):
    """SGD without momentum; of a copy of the model it says nothing, as nothing says whose."""
    group = ("optim", "param_groups", 0)
    objects = {(*group, "lr"): 0.1, (*group, "params"): sorted(params)}
    paths = [("model", param) for param in params] + [("ema", param) for param in params if copy]
    found = placed(paths, objects)
    told = {name: settings["lr"] for name, settings in found.settings}
    assert told == ({} if copy else dict.fromkeys(params, 0.1))
    if not copy:
        assert found.notes == []


@given(PARAMS)
def test_two_optimizers_that_are_told_different_things_of_one_parameter_say_nothing_of_it(params):
    objects = {}
    for optimizer, rate in (("first", 0.1), ("second", 0.2)):
        group = (optimizer, "param_groups", 0)
        objects |= {(*group, "lr"): rate, (*group, "params"): sorted(params)}
    found = placed([("model", param) for param in params], objects)
    assert found.settings == []


def test_states_of_bitsandbytes_have_their_own_names():
    state = ("optim", "state", 0, "__bnb_optimizer_quant_state__")
    paths = {name: (*state, name) for name in ("state1", "qmap1")}
    objects = {("optim", "param_groups", 0, "params", 0): 0}
    optimizer = optimizer_dicts(paths, objects)[("optim",)]
    assert optimizer.states == {"state1": ((0, "state1"),), "qmap1": ((0, "qmap1"),)}
