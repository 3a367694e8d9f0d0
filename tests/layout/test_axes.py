"""The axes notation: text, lengths, and index maps like numpy's reshape and transpose."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import boxes_in, numbered
from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.layout.axes import Axis, Claim, Known, Product, Sum, components, infer, parse
from jax_ucp.layout.box import Box
from jax_ucp.layout.parts import MOST_READ, affine_part


@pytest.mark.parametrize(("text", "fault"), [
    ("a (b c",        r"character 3: this parenthesis is never closed"),
    ("a) b",          r"character 2: a parenthesis is closed that was not opened"),
    ("a + b",         r"character 3: parts side by side stand in parentheses"),
    ("(a + )",        r"character 6: there is nothing to the left of this"),
    ("()",            r"character 2: there is nothing to the left of this"),
    ("(a ...)",       r"character 4: `\.\.\.` stands for whole axes"),
    ("... a ...",     r"`\.\.\.` can be there only once"),
    ("heads 2 half",  r"character 7: an axis of length 2 needs a name"),
    ("a, b",          r"character 2: ',' is not an axis"),
    ("a (b a)",       r"a is there twice"),
    ("((q d) + k) d", r"d is there twice"),
])  # fmt: skip
def test_what_is_not_in_the_notation_is_refused_with_its_place(text, fault):
    with pytest.raises(SpecError, match=fault):
        parse(text)


def test_one_name_may_be_in_several_parts_of_a_sum():
    assert parse("((q d) + (k d)) e").names == {"q", "k", "d", "e"}


KIND = st.sampled_from([Product, Sum])


def deeper(inner):
    return st.tuples(KIND, st.lists(inner, min_size=1, max_size=3))


ATOMS = st.recursive(st.just(None), deeper, max_leaves=5)


@st.composite
def nodes(draw, names):
    """A node whose axes have names of their own."""

    def build(shape):
        if shape is None:
            return Axis(next(names))
        kind, parts = shape
        made = tuple(build(part) for part in parts)
        return kind(made) if len(made) > 1 else made[0]

    return build(draw(ATOMS))


@given(st.data())
def test_an_expression_is_what_its_text_says(data):
    names = (f"a{i}" for i in itertools.count())
    dims = data.draw(st.lists(nodes(names), max_size=3))
    text = " ".join(map(str, dims))
    assert " ".join(map(str, parse(text).dims)) == text


def test_a_sum_in_a_product_is_a_reshape_and_a_concatenation():
    sizes = {"group": 2, "q": 3, "k": 1, "head_dim": 2, "embed": 5}
    q, k = numbered((2, 3, 2, 5)), 1000 + numbered((2, 1, 2, 5))
    fused = np.concatenate([q, k], axis=1).reshape(16, 5)
    found = components(parse("(group (q + k) head_dim) embed"), sizes)
    for component, want in zip(found, (q, k), strict=True):
        own = {"q", "k"} & component.names
        target = components(parse(f"group {own.pop()} head_dim embed"), sizes)[0]
        got = moved(affine_part(0, component, target, sizes, {}), fused, want.shape)
        np.testing.assert_array_equal(got, want)


def steps_of(part, box, limit):
    """The indices of the elements in a box of the target, as they are read; and what is read."""
    for indices in part.inside(box):
        for slab in part.slabs(indices, limit):
            for piece in part.dense(slab):
                yield piece, part.source.hull(piece)


def position(place, index):
    at = list(place.offset)
    for (axis, stride), i in zip(place.steps, index, strict=True):
        at[axis] += stride * i
    return tuple(at)


def moved(of, source, shape, box=None, limit=1 << 20):
    """A box of the target of a part, read step by step; what no step has stays -1."""
    box = box or Box.whole(shape)
    out = np.full(box.shape, -1, source.dtype)
    for indices, read in steps_of(of, box, limit):
        data = source[read.index]
        for index in itertools.product(*map(range, indices.start, indices.stop)):
            at, to = position(of.source, index), position(of.target, index)
            place = tuple(i - start for i, start in zip(at, read.start, strict=True))
            assert Box(tuple(to), tuple(i + 1 for i in to)).within(box)
            out[tuple(i - start for i, start in zip(to, box.start, strict=True))] = data[place]
    return out


@st.composite
def rearrangements(draw):
    """Axes with lengths, nested on two arrays in two ways: what reshape and transpose can do."""
    count = draw(st.integers(1, 4))
    sizes = {f"a{i}": draw(st.integers(1, 4)) for i in range(count)}

    def grouped(names):
        cuts = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
        groups = [names[a:b] for a, b in itertools.pairwise([0, *cuts, count])]
        texts = (f"({' '.join(g)})" if len(g) > 1 else "".join(g) or "1" for g in groups)
        return " ".join(texts), groups

    names = list(sizes)
    source, source_groups = grouped(names)
    order = draw(st.permutations(names))
    target, target_groups = grouped(list(order))
    return sizes, (source, source_groups), (target, order, target_groups)


def shape_of(groups, sizes):
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


@settings(max_examples=300)
@given(rearrangements(), st.data())
def test_any_box_of_a_rearrangement_is_that_of_reshape_and_transpose(case, data):
    sizes, (source, source_groups), (target, order, target_groups) = case
    array = numbered(shape_of(source_groups, sizes))
    shape = shape_of(target_groups, sizes)
    axes = [list(sizes).index(name) for name in order]
    want = array.reshape([*sizes.values()]).transpose(axes).reshape(shape)
    (a,), (b,) = components(parse(source), sizes), components(parse(target), sizes)
    assert parse(target).shape(sizes) == shape
    forth = affine_part(0, a, b, sizes, {})
    box = data.draw(boxes_in(shape))
    limit = data.draw(st.integers(1, 100))
    np.testing.assert_array_equal(moved(forth, array, shape, box, limit), want[box.index])
    back = forth.inverse()
    np.testing.assert_array_equal(moved(back, want, array.shape), array)
    steps = list(steps_of(forth, box, limit))
    assert sum(indices.size for indices, _ in steps) == box.size
    assert sum(read.size for _, read in steps) <= MOST_READ * box.size
    row = math.prod(array.shape[1:])
    assert all(read.size <= max(limit, MOST_READ * row) for _, read in steps)


@settings(max_examples=300)
@given(st.data())
def test_parts_of_a_sum_are_read_out_of_the_whole_and_joined_to_it(data):
    names = (f"a{i}" for i in itertools.count())
    dims = data.draw(st.lists(nodes(names), min_size=1, max_size=2))
    said = parse(" ".join(map(str, dims)))
    sizes = {name: data.draw(st.integers(1, 3)) for name in sorted(said.names)}
    whole = numbered(said.shape(sizes))
    found = components(said, sizes)
    box = data.draw(boxes_in(whole.shape))
    rebuilt = np.full(box.shape, -1)
    for component in found:
        order = sorted(component.names)
        (alone,) = components(parse(" ".join(order)), sizes)
        shape = tuple(sizes[name] for name in order)
        out = affine_part(0, component, alone, sizes, {})
        piece = moved(out, whole, shape)
        assert -1 not in piece
        into = moved(out.inverse(), piece, whole.shape, box)
        rebuilt = np.where(into >= 0, into, rebuilt)
        inner = data.draw(boxes_in(shape))
        np.testing.assert_array_equal(moved(out, whole, shape, inner), piece[inner.index])
        steps = list(steps_of(out, inner, 1 << 20))
        wanted = sum(indices.size for indices, _ in steps)
        assert sum(read.size for _, read in steps) <= MOST_READ * wanted
    np.testing.assert_array_equal(rebuilt, whole[box.index])


def test_far_parts_are_read_one_by_one_and_near_ones_together():
    sizes = {"group": 4, "q": 6, "k": 1, "d": 8, "e": 3}
    q, k = components(parse("(group (q + k) d) e"), sizes)
    for component, own, reads in ((q, "q", 1), (k, "k", 4)):
        (alone,) = components(parse(f"group {own} d e"), sizes)
        one = affine_part(0, component, alone, sizes, {})
        assert len(list(steps_of(one, Box.whole(alone_shape(own, sizes)), 1 << 20))) == reads


def alone_shape(own, sizes):
    return sizes["group"], sizes[own], sizes["d"], sizes["e"]


def test_a_layer_of_a_stack_is_at_its_place():
    sizes = {"layer": 3, "a": 2}
    (source,), (target,) = components(parse("a"), sizes), components(parse("layer a"), sizes)
    for i in range(3):
        one = affine_part(i, source, target, sizes, {"layer": i})
        assert one.target_box == Box((i, 0), (i + 1, 2))


def claim(name, text, shape):
    return Claim(name, parse(text), shape)


def test_lengths_follow_from_shapes_in_any_order():
    claims = [claim("q", "(heads head_dim) embed", (32, 16)), claim("norm", "head_dim", (8,))]
    for order in itertools.permutations(claims):
        found = infer(order, {})
        assert not found.faults
        assert found.sizes == {"heads": 4, "head_dim": 8, "embed": 16}


def test_a_part_of_a_sum_follows_from_the_others():
    lengths = {"group": one(2), "k": one(1), "v": one(1), "d": one(4)}
    found = infer([claim("qkv", "(group (q + k + v) d)", (48,))], lengths)
    assert found.sizes["q"] == 4


def one(length):
    return Known(length, "given")


@pytest.mark.parametrize(("claims", "known", "fault"), [
    ([claim("w", "a b", (2, 3, 4))], {}, r"w has 3 axes, \[2, 3, 4\], but `a b` names 2"),
    ([claim("w", "(a b)", (12,))], {}, r"w: axis 0 has length 12 .* leaves the length of a and b open"),
    ([claim("w", "(a b)", (12,))], {"a": one(5)},
     r"axis 0 is `\(a b\)` with a = 5 \(given\), but .* has 12 there"),
    ([claim("w", "(a + b)", (3,))], {"a": one(5)}, r"no length of b makes that fit"),
    ([claim("w", "a", (3,)), claim("v", "a", (4,))], {},
     r"v: axis 0 is `a` = 3 with a = 3 \(axis 0 of w, \[3\]\)"),
])  # fmt: skip
def test_lengths_that_do_not_fit_are_told_with_where_they_come_from(claims, known, fault):
    faults = infer(claims, known).faults
    assert len(faults) == 1
    assert re.search(fault, faults[0]), faults[0]


def test_a_length_that_nothing_says_is_an_error_where_it_is_needed():
    with pytest.raises(LayoutError, match="the length of a is not known"):
        parse("a").shape({})
