import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from helpers import Consolidated, MemoryStore, boxes_in, by_hand, cut_by, evaluated, numbered
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.proof import Replicas
from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Part, Place, box_part, straight
from jax_ucp.layout.patterns import (
    Averaged,
    Fused,
    Padded,
    Pattern,
    Replicated,
    Sharded,
    Unique,
    flat_layouts,
    partitioned_layouts,
)


def test_the_public_patterns_are_the_classes_that_specs_take():
    from jax_ucp import patterns

    classes = {name: getattr(patterns, name) for name in patterns.__all__ if name != "Pattern"}
    assert set(classes.values()) == set(get_args(patterns.Pattern))
    made = [
        *(classes[name]() for name in ("Unique", "Replicated", "Averaged")),
        *(classes["Sharded"](0), classes["Fused"](0, {"q": 2, "k": 2})),
        classes["Padded"](classes["Sharded"](0), axis=0, size=3),
    ]
    assert {type(pattern) for pattern in made} == set(classes.values())
    spec = ucp.Spec.of({f"{i}.*": pattern for i, pattern in enumerate(made)})
    assert [sentence.pattern for sentence in spec.own] == made


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Pattern, tuple[int, ...], int]:
    """A pattern, the shape of a parameter it fits, and a number of ranks."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    ranks = draw(st.integers(1, 5))
    axis = draw(st.integers(0, len(shape) - 1))
    kinds = ["unique", "copies", "sharded", "grid", "fused", "groups", "padded"]
    kind = draw(st.sampled_from(kinds))
    if kind == "unique":
        return Unique(), shape, 1
    if kind == "copies":
        return Replicated(), shape, ranks
    if kind == "grid":
        axes = tuple(draw(st.permutations(range(len(shape)))))
        grid = tuple(draw(st.integers(1, 3)) for _ in axes)
        return Sharded(*axes, grid=grid), shape, int(np.prod(grid))
    if kind == "fused":
        parts, whole = {}, set()
        for name in draw(st.lists(st.sampled_from("qkvgu"), min_size=1, max_size=4, unique=True)):
            if draw(st.booleans()):
                parts[name] = tuple(draw(st.integers(0, 3)) for _ in range(ranks))
            else:
                parts[name] = draw(st.integers(1, 3)) * ranks
                whole |= {name} if draw(st.booleans()) else set()
        rows = sum(n if isinstance(n, int) else sum(n) for n in parts.values())
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
        return Fused(axis, parts, frozenset(whole)), shape, ranks
    if kind == "groups":
        groups = draw(st.integers(1, 4))
        parts = {name: groups * draw(st.integers(1, 3)) for name in "qkv"}
        shape = (*shape[:axis], sum(parts.values()), *shape[axis + 1 :])
        return Fused(axis, parts, groups=groups), shape, ranks
    inner = draw(st.sampled_from([Sharded(axis), Replicated()]))
    padded = shape[axis] + draw(st.integers(0, 9))
    if kind == "padded":
        return Padded(inner, axis, shape[axis], padded), shape, ranks
    return Sharded(axis), shape, ranks


def view_of(layout: ParamLayout, shards: list[np.ndarray]) -> Evaluated:
    source = MemoryStore({str(i): shard for i, shard in enumerate(shards)})
    return evaluated(source, {"w": Consolidated(layout, list(source.data))})


@given(patterns())
def test_shards_cut_by_hand_are_joined_to_the_original(case):
    pattern, shape, ranks = case
    whole = numbered(shape)
    shards = by_hand(pattern, whole, ranks)
    layout = pattern.join([shard.shape for shard in shards])
    for ours, theirs in zip(cut_by(layout, whole), shards, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(view_of(layout, shards).read("w", Box.whole(shape)), whole)


@given(patterns(), st.data())
def test_reading_a_box_equals_slicing_the_whole(case, data):
    pattern, shape, ranks = case
    whole = numbered(shape)
    box = data.draw(boxes_in(shape))
    shards = by_hand(pattern, whole, ranks)
    view = view_of(pattern.join([shard.shape for shard in shards]), shards)
    np.testing.assert_array_equal(view.read("w", box), whole[box.index])


@given(st.lists(patterns(), min_size=1, max_size=3), st.data())
def test_flat_partitions_of_tensor_parallel_shards_read_as_before_through_two_views(cases, data):
    ranks = min(ranks for _, _, ranks in cases)
    params = {f"p{i}": case[:2] for i, case in enumerate(cases) if case[2] == ranks}
    whole = {name: numbered(shape) for name, (_, shape) in params.items()}
    whole = {name: array + 1000 * i for i, (name, array) in enumerate(whole.items())}
    dp = data.draw(st.integers(1, 4))
    gaps = {name: data.draw(st.integers(0, 3)) for name in params}
    partitions, zero_views = {}, {}
    for tp in range(ranks):
        cut = {n: by_hand(pattern, whole[n], ranks) for n, (pattern, _) in params.items()}
        shards = {name: some[tp] for name, some in cut.items()}
        parts = [np.append(s.ravel(), np.full(gaps[name], -1)) for name, s in shards.items()]
        flat = np.concatenate(parts)
        flat = np.append(flat, np.full(-len(flat) % (2 * dp), -1))
        keys = [f"tp{tp}/dp{r}" for r in range(dp)]
        partitions |= dict(zip(keys, np.split(flat, dp), strict=True))
        shapes = {name: shard.shape for name, shard in shards.items()}
        layouts = flat_layouts(shapes, [len(flat) // dp] * dp, gaps)
        views = {f"{name}/tp{tp}": layout for name, layout in layouts.items()}
        zero_views |= {name: Consolidated(layout, keys) for name, layout in views.items()}
    outer = {}
    for name, (pattern, shape) in params.items():
        keys = [f"{name}/tp{tp}" for tp in range(ranks)]
        shapes = [zero_views[key].layout.shape for key in keys]
        outer[name] = Consolidated(pattern.join(shapes), keys)
        assert outer[name].layout.shape == shape
    view = evaluated(MemoryStore(partitions), zero_views, outer)
    for name, (_, shape) in params.items():
        box = data.draw(boxes_in(shape))
        np.testing.assert_array_equal(view.read(name, box), whole[name][box.index])


def test_an_averaged_parameter_is_the_mean_of_its_copies():
    copies = [np.array([[1, 2], [3, 4]], np.float32), np.array([[3, 2], [5, 8]], np.float32)]
    view = view_of(Averaged().join([(2, 2)] * 2), copies)
    np.testing.assert_array_equal(view.read("w", Box((0, 0), (2, 1))), [[2], [4]])


def covered_once(layout: ParamLayout) -> bool:
    """Brute force: every element in exactly one distinct block, no shard element claimed twice."""
    count = np.zeros(layout.shape, int)
    for box in {f.target_box for f in layout.parts}:
        count[box.index] += 1
    claims = [np.zeros(shape, int) for shape in layout.shards]
    for f in layout.parts:
        claims[f.input][f.source_box.index] += 1
    return bool((count == 1).all()) and all((c <= 1).all() for c in claims)


@given(patterns(), st.data())
def test_check_accepts_exactly_what_counting_every_element_accepts(case, data):
    pattern, shape, ranks = case
    layout = pattern.join([shard.shape for shard in by_hand(pattern, numbered(shape), ranks)])
    parts = list(layout.parts)
    change = data.draw(st.sampled_from(["none", "drop", "retarget", "resource"]))
    if parts and change != "none":
        f = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        box = Box.whole(layout.shape if change == "retarget" else layout.shards[f.input])
        old = f.target_box if change == "retarget" else f.source_box
        room = [n - k for n, k in zip(box.shape, old.shape, strict=True)]
        start = tuple(data.draw(st.integers(0, r)) for r in room)
        moved = Box(start, tuple(a + k for a, k in zip(start, old.shape, strict=True)))
        if change != "drop":
            source, target = f.source_box, f.target_box
            source, target = (source, moved) if change == "retarget" else (moved, target)
            parts.append(box_part(f.input, source, target))
    changed = ParamLayout(layout.shape, layout.shards, tuple(parts))
    if covered_once(changed):
        changed.check()
    else:
        with pytest.raises(LayoutError, match=r"hole|overlap|double claim"):
            changed.check()


@given(st.data(), st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=3))
def test_blocks_of_a_grid_are_an_array_in_any_order_if_each_is_there_once(data, cuts):
    """`cuts` are the lengths of blocks along each axis; a block may be lost, twice, or moved."""
    shape = tuple(map(sum, cuts))
    edges = [list(itertools.pairwise(itertools.accumulate(axis, initial=0))) for axis in cuts]
    boxes = data.draw(st.permutations([Box.spanning(at) for at in itertools.product(*edges)]))
    change = data.draw(st.sampled_from(["none", "lost", "twice", "moved"]))
    if change != "none":
        last = boxes.pop()
        by = data.draw(st.tuples(*(st.integers(-1, 1) for _ in shape)))
        boxes += {"lost": [], "twice": [last, last], "moved": [last.shift(by)]}[change]
    parts = [box_part(i, Box.whole(box.shape), box) for i, box in enumerate(boxes)]
    layout = ParamLayout(shape, tuple(box.shape for box in boxes), tuple(parts))
    inside = all(box.within(Box.whole(shape)) for box in boxes)
    if change == "twice" or (inside and covered_once(layout)):
        layout.check()  # a second one is a replica
    else:
        with pytest.raises(LayoutError):
            layout.check()


def test_check_names_every_fault_at_once():
    half = Box((0, 0), (2, 4))
    parts = box_part(0, half, half), box_part(1, half, Box((1, 0), (3, 4)))
    layout = ParamLayout((4, 4), ((2, 4), (2, 4)), parts)
    with pytest.raises(LayoutError) as error:
        layout.check()
    assert "overlap: [0:2, 0:4] of shard 0 and [1:3, 0:4] of shard 1" in str(error.value)
    assert "hole: [3:4, 0:4] is in no shard" in str(error.value)


@pytest.mark.parametrize("steps", [((0, 1), (0, 1)), ((0, 1), (0, 3)), ((0, 3), (0, 1))])
def test_a_part_that_has_an_element_twice_or_leaves_one_out_is_refused(steps):
    """The box around its elements is that of a range of the shard."""
    whole = Place((0, 0), straight(2))
    twice = Part(0, (2, 2), Place((0,), steps), whole)
    with pytest.raises(LayoutError, match=r"shard 0 has not all of \[0:"):
        ParamLayout((2, 2), ((5,),), (twice,)).check()
    with pytest.raises(LayoutError, match=r"claims not all of \[0:"):
        ParamLayout((5,), ((2, 2),), (twice.inverse(),)).check()


def test_a_part_may_turn_an_array():
    turned = Part(0, (2, 3), Place((0, 0), straight(2)), Place((0, 0), straight(2)[::-1]))
    layout = ParamLayout((3, 2), ((2, 3),), (turned,))
    layout.check()
    whole = numbered((2, 3))
    np.testing.assert_array_equal(view_of(layout, [whole]).read("w", Box.whole((3, 2))), whole.T)


@pytest.mark.parametrize(("pattern", "shards", "message"), [
    (Unique(), [(2,), (2,)], "Unique needs 1 shard, found 2"),
    (Replicated(), [(2,), (3,)], r"shard 1 has shape \(3,\), but its replica, shard 0, has \(2,\)"),
    (Sharded(0), [(2, 4), (2, 5)], r"shard 1 has shape \(2, 5\) where its neighbours leave \(2, 4\)"),
    (Sharded(2), [(2, 4)], "there is no axis 2"),
    (Sharded(0, 1, grid=(2, 2)), [(2, 4)], "needs 4 shards, found 1"),
    (Fused(0, {"q": 4, "k": 2}), [(3, 8), (2, 8)], r"needs 3 rows on axis 0 of shard 1.*\(2, 8\).*whole"),
    (Fused(0, {"q": 4, "k": 1}), [(3, 8)] * 2, "1 rows of k cannot be cut evenly over 2 ranks"),
    (Padded(Sharded(0), 0, 101), [(50, 2), (50, 2)], r"the shards hold \(100, 2\), .*\(101, 2\)"),
    (Padded(Sharded(0), 0, 9, 12), [(5, 2), (5, 2)], "the shards have 10 rows"),
])  # fmt: skip
def test_shards_that_do_not_fit_are_refused_with_the_numbers(pattern, shards, message):
    with pytest.raises(LayoutError, match=message):
        pattern.join(shards)


def test_a_missing_partition_is_named_by_the_parameter_it_cuts_off():
    with pytest.raises(LayoutError, match=r"b: ends at element 42 .* 1 partitions hold 24"):
        flat_layouts({"w": (5, 4), "b": (22,)}, [24])


def test_a_view_refuses_shards_of_different_dtypes():
    store = MemoryStore({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float16)})
    with pytest.raises(LayoutError, match=r"w: the shards differ in dtype.*float16"):
        evaluated(store, {"w": Consolidated(Sharded(0).join([(2,), (2,)]), ["a", "b"])})


def test_replicas_that_differ_in_one_bit_are_both_named():
    store = MemoryStore({"r0": np.array([0.0, 1.0]), "r1": np.array([-0.0, 1.0])})
    view = evaluated(store, {"w": Consolidated(Replicated().join([(2,), (2,)]), ["r0", "r1"])})
    proof, last, whole = Replicas("w", view.values["w"]), Box((1,), (2,)), Box((0,), (2,))
    assert proof.fault_in([last], view.read("w", last)) is None
    fault = proof.fault_in([whole], view.read("w", whole)) or ""
    assert "w: [0:2] differs between r0 and r1, which should be replicas" in fault


@st.composite
def damaged_layouts(draw) -> ParamLayout:
    """The layout of a parameter in flat shards, of which one number of one part may be another."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    layout = partitioned_layouts({"a": (2,), "w": shape}, draw(st.integers(1, 5)))["w"]
    parts = list(layout.parts)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] = damaged(draw, parts[at])
    elif draw(st.booleans()):
        parts = draw(st.permutations(parts))
    return replace(layout, parts=tuple(parts))


def damaged(draw, part: Part) -> Part:
    """The part with another number: of its sizes, or of where it lies at one of its two places."""
    by = draw(st.sampled_from([-5, -2, -1, 1, 2, 5]))

    def other(numbers: Sequence[int]) -> tuple[int, ...]:
        changed = list(numbers)
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] += by
        return tuple(changed)

    what = draw(st.sampled_from(["sizes", "offset", "steps"]))
    if what == "sizes":
        return part._replace(sizes=tuple(max(0, n) for n in other(part.sizes)))
    of = draw(st.sampled_from(["source", "target"]))
    place: Place = getattr(part, of)
    if what == "offset":
        return part._replace(**{of: place._replace(offset=other(place.offset))})
    axes, strides = [axis for axis, _ in place.steps], [stride for _, stride in place.steps]
    steps = tuple(zip(axes, other(strides), strict=True))
    return part._replace(**{of: place._replace(steps=steps)})


@given(damaged_layouts())
def test_what_is_found_in_order_at_once_has_no_fault_by_the_long_proof(layout):
    if layout._is_in_order:
        faults = [*layout._strays(), *layout._overlaps(), *layout._holes(False)]
        assert not [*faults, *layout._double_claims()]


def test_partitions_are_found_in_order():
    shapes = {"w": (5, 7), "b": (1,), "n": (), "t": (3, 2, 4)}
    for layouts in (partitioned_layouts(shapes, 3), flat_layouts(shapes, [30, 30, 9])):
        assert all(layout._is_in_order for layout in layouts.values())
