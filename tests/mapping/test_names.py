"""Names with placeholders: what they stand for and back, blocks, offsets, and what is no name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.mapping.binding import bind
from jax_ucp.mapping.names import parse_name, values_in
from jax_ucp.mapping.rules import Mapping, shipped

COUNTS = st.integers(0, 50)
STRIDES = st.integers(1, 12)


@given(block=COUNTS, place=COUNTS, stride=STRIDES, offset=COUNTS)
def test_a_number_is_one_block_and_one_place_in_it(block, place, stride, offset):
    place %= stride
    name = parse_name(f"h.{{{stride}*block+i+{offset}}}.w")
    filled = name.filled({"block": str(block), "i": str(place)})
    assert filled == f"h.{stride * block + place + offset}.w"
    assert values_in(str(name), filled) == {"block": str(block), "i": str(place)}


@given(number=st.integers(0, 200), stride=STRIDES, offset=COUNTS)
def test_a_stride_without_a_place_stands_for_every_so_manieth_number(number, stride, offset):
    values = values_in(f"h.{{{stride}*block+{offset}}}.w", f"h.{number}.w")
    above = number - offset
    matches = above >= 0 and above % stride == 0
    assert values == ({"block": str(above // stride)} if matches else None)


@given(dense=st.integers(0, 6), layers=st.integers(0, 9))
def test_ranges_that_meet_claim_every_number_once(dense, layers):
    sizes = {"dense": dense, "sparse": layers}
    names = (parse_name(text) for text in ("{dense}", "{sparse+dense}"))
    low, high = (str(name.with_numbers(sizes)) for name in names)
    for number in range(dense + layers + 3):
        claims = [values_in(pattern, str(number), sizes) for pattern in (low, high)]
        assert sum(claim is not None for claim in claims) == (number < dense + layers)


@pytest.mark.parametrize("text", [
    "{}", "{3}", "{+3}", "{+a}", "{a*b*c}", "{6*block+}", "{6*block+block}", "{a+b+c}", "{a b}", "{*b}", "{a",
    "a}", "{é}",
])  # fmt: skip
def test_what_is_no_placeholder_is_refused(text):
    with pytest.raises(SpecError, match=r"placeholder|brace"):
        parse_name(text)


def test_two_placeholders_have_a_dot_or_a_slash_between_them():
    parse_name("{a}.{b}/{c}")
    with pytest.raises(SpecError, match="two placeholders in one part"):
        parse_name("h.{a}_{b}.w")


def test_a_name_that_is_no_number_is_in_no_block():
    for name in ("h.x.w", "h.03.w", "h.-1.w", "h.1000000000.w", "h.٣.w"):
        assert values_in("h.{2*block+i}.w", name) is None


@pytest.mark.parametrize("cycle", [0, 10**9])
def test_a_stride_that_cannot_be_is_a_fault(cycle):
    text = "sizes: {cycle: N}\nleaves:\n- {param: 'h.{cycle*block+i}', leaf: 'b{i}/{block}'}"
    with pytest.raises(LayoutError, match=r"counts by"):
        bind(Mapping.parse(text.replace("N", str(cycle))), {"h.0": (2,)}, {}, {})


def test_a_size_that_a_name_counts_from_must_be_known():
    mapping = Mapping.parse("leaves:\n- {param: 'h.{layer+dense}', leaf: 'b/{layer}'}")
    with pytest.raises(LayoutError, match=r"counts from dense, which has no length"):
        bind(mapping, {"h.0": (2,)}, {}, {})
    assert bind(mapping, {"h.3": (2,)}, {"dense": 3}, {}).leaves.keys() == {"b/0"}


CYCLES = """\
sizes: {over: layers % 3, scanned: layers - over, block: scanned // 3}
leaves:
- param: h.{3*block+i}.w
  axes: a b
  leaf: {"blocks/{i}/w": b block a}
- param: h.{over+scanned}.w
  axes: a b
  leaf: {"over/{over}/w": b a}
"""


PERIODS = """\
sizes: {i: 3}
leaves:
- {param: "h.{4*block+i}.w", axes: a, leaf: {"local/w": a block i}}
- {param: "h.{4*block+3}.v", axes: a, leaf: {"global/w": a block}}
"""


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_first_places_of_a_block_are_stacked_in_it(blocks):
    mapping = Mapping.parse(PERIODS)
    names = [f"h.{n}.{'v' if n % 4 == 3 else 'w'}" for n in range(4 * blocks)]
    bound = bind(mapping, dict.fromkeys(names, (5,)), {}, {})
    shapes = {name: form.layout.shape for name, form in bound.leaves.items()}
    assert shapes == {"local/w": (5, blocks, 3), "global/w": (5, blocks)}
    assert bind(mapping.inverse(), shapes, {}, {}).leaves.keys() == {*names}
    for missing in names:
        with pytest.raises(LayoutError):
            bind(mapping, dict.fromkeys(filter(missing.__ne__, names), (5,)), {}, {"block": blocks})
    with pytest.raises(LayoutError, match=r"has blocks of 4, but i = 5 in sizes"):
        bind(mapping, dict.fromkeys(names, (5,)), {"i": 5}, {})


@given(layers=st.integers(1, 14))
def test_stacks_of_a_cycle_and_layers_over_go_there_and_back(layers):
    mapping = Mapping.parse(CYCLES)
    names = [f"h.{i}.w" for i in range(layers)]
    bound = bind(mapping, dict.fromkeys(names, (2, 5)), {}, {"layers": layers})
    shapes = {name: form.layout.shape for name, form in bound.leaves.items()}
    blocks = {f"blocks/{i}/w": (5, layers // 3, 2) for i in range(3 if layers >= 3 else 0)}
    assert shapes == blocks | {f"over/{i}/w": (5, 2) for i in range(layers % 3)}
    back = bind(mapping.inverse(), shapes, {}, {"layers": layers})
    found = {name: form.layout.shape for name, form in back.leaves.items()}
    assert found == dict.fromkeys(names, (2, 5))


@pytest.mark.parametrize("missing", range(7))
def test_a_layer_that_is_missing_from_a_cycle_is_a_fault(missing):
    names = [f"h.{i}.w" for i in range(7) if i != missing]
    with pytest.raises(LayoutError):
        bind(Mapping.parse(CYCLES), dict.fromkeys(names, (2, 5)), {}, {"layers": 7})


def test_a_layer_too_many_is_claimed_by_no_rule():
    names = [f"h.{i}.w" for i in range(8)]
    with pytest.raises(LayoutError, match=r"h\.7\.w \[2, 5\]: claimed by no rule"):
        bind(Mapping.parse(CYCLES), dict.fromkeys(names, (2, 5)), {}, {"layers": 7})


def test_a_rule_for_layers_of_which_there_are_none_needs_no_parameter():
    mapping = Mapping.parse(
        "sizes: {dense: 0}\nleaves:\n- {param: 'h.{dense}.a', leaf: 'd/{dense}'}\n"
        "- {param: 'h.{sparse+dense}.b', leaf: 's/{sparse}'}"
    )
    assert bind(mapping, {"h.0.b": (2,)}, {}, {}).leaves.keys() == {"s/0"}
    with pytest.raises(LayoutError, match=r"dense = 1, of 2"):
        bind(mapping, {"h.0.a": (2,), "h.2.b": (2,)}, {"dense": 2}, {})


def test_what_nothing_claims_is_skipped_where_the_rest_is():
    mapping = Mapping.parse("leaves:\n- {param: a, leaf: a}\nskip: rest")
    bound = bind(mapping, {"a": (2,), "b.c": (3,)}, {}, {})
    assert bound.skipped == {"b.c": "no rule of the mapping claims it"}
    assert Mapping.from_dict(mapping.to_dict()) == mapping
    with pytest.raises(SpecError, match="skip should be a list, or rest"):
        Mapping.parse("leaves: []\nskip: everything")


def test_an_axis_of_a_billion_does_not_become_so_many_leaves():
    mapping = Mapping.parse("leaves:\n- {param: w, axes: layer e, leaf: {'h/{layer}': e}}")
    with pytest.raises(LayoutError, match="would be 1000000000 leaves"):
        bind(mapping, {"w": (10**9, 1)}, {}, {})


UNSTACKED = """\
leaves:
- {param: 'h.{layer}.a', leaf: 'x/{layer}/a'}
- {param: 'h.{layer}.e.{expert}.b', leaf: 'x/{layer}/{expert}/b'}
- {param: 'h.{layer}.e.{expert}.c', leaf: 'x/{layer}/{expert}/c'}
- {param: 'h.{layer}.d', optional: true, leaf: 'x/{layer}/d'}
"""
BLOCK = ("a", "e.0.b", "e.0.c", "e.1.b", "e.1.c")


@pytest.mark.parametrize("missing", BLOCK)
def test_a_layer_that_lacks_what_others_have_is_refused_though_each_is_a_leaf(missing):
    names = {f"h.{layer}.{part}": (2,) for layer in range(3) for part in BLOCK} | {"h.1.d": (2,)}
    assert len(bind(Mapping.parse(UNSTACKED), names, {}, {}).leaves) == len(names)
    del names[f"h.1.{missing}"]
    name = missing[:-2].replace("e", ".e")
    with pytest.raises(LayoutError, match=rf"finds no parameter at h\.1{name}, but"):
        bind(Mapping.parse(UNSTACKED), names, {}, {})


def test_layers_of_other_names_may_be_others():
    rules = ("{param: 'encoder.{i}.w', leaf: 'e/{i}'}", "{param: 'decoder.{i}.w', leaf: 'd/{i}'}")
    mapping = Mapping.parse("leaves:\n- " + "\n- ".join(rules))
    assert len(bind(mapping, {"encoder.0.w": (2,), "decoder.1.w": (2,)}, {}, {}).leaves) == 2


@pytest.mark.parametrize("name", shipped())
def test_every_mapping_of_a_hugging_face_model_counts_its_layers(name):
    """Otherwise a file without the last layers would be a whole model of fewer."""
    mapping = Mapping.load(name)
    indices = set[str]().union(*(parse_name(p).indices for r in mapping.rules for p in r.params))
    counts = {"num_hidden_layers", "num_layers", "n_layer"}
    # of a vision model `text_config` has the number, and the mapping after it counts the layers
    uncounted = name.startswith(("deepspeed-", "vlm-"))
    assert uncounted or "layer" not in indices or mapping.sizes["layer"] in counts
