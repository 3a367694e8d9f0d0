"""Leaves read through a mapping are what numpy makes of the parameters, box by box, and back."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import Consolidated, MemoryStore, boxes_in, contents_of, evaluated, grids, numbered
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.gather import read_boxes
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import CorruptData, LayoutError, TreeMismatch
from jax_ucp.layout.box import Box
from jax_ucp.layout.patterns import Sharded
from jax_ucp.mapping.binding import bind
from jax_ucp.mapping.mapped_tree import map_contents
from jax_ucp.mapping.rules import Mapping
from jax_ucp.mapping.states import states_of


def rng(shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


LAYERS, EXPERTS, HEADS, GROUPS, DIM, EMBED, MLP = 3, 2, 4, 2, 3, 5, 7
PARAMS = {
    "embed": rng((11, EMBED)),
    "wpe": rng((6, EMBED)),
    "norm": rng((EMBED,)),
    **{f"h.{i}.q": rng((HEADS * DIM, EMBED), i) for i in range(LAYERS)},
    **{f"h.{i}.qkv": rng((GROUPS * 4 * DIM, EMBED), i) for i in range(LAYERS)},
    **{f"h.{i}.c_attn": rng((EMBED, 3 * HEADS * DIM), i) for i in range(LAYERS)},
    **{f"h.{i}.{n}": rng((MLP, EMBED), 9 * i + ord(n)) for i in range(LAYERS) for n in "gu"},
    **{f"h.{i}.e.{j}.w": rng((MLP, EMBED), 9 * i + j) for i in range(LAYERS) for j in range(EXPERTS)},
    "stacked": rng((LAYERS, EMBED, MLP)),
    "conv": rng((EMBED, 1, MLP)),
}  # fmt: skip
RULES = """\
sizes: {groups: 2, q: 2, k: 1, v: 1, gate: 1, up: 1, three_q: 1, three_k: 1, three_v: 1, _more: 5}
leaves:
- {param: embed, axes: vocab embed, leaf: {embed: embed (vocab + _more)}}
- {param: wpe, leaf: position/embedding}
- {param: norm, leaf: norm/scale}
- {param: "h.{layer}.q", axes: (heads dim) embed, leaf: {q: layer embed heads dim}}
- param: h.{layer}.qkv
  axes: (groups (q + k + v) dim) embed
  leaf:
    h/{layer}/q: embed (groups q) dim
    h/{layer}/k: embed (groups k) dim
    h/{layer}/v: (groups v) dim embed
- param: h.{layer}.c_attn
  axes: embed ((three_q + three_k + three_v) heads dim)
  leaf:
    three/q: embed (layer three_q) heads dim
    three/k: embed layer three_k heads dim
    three/v: heads dim embed (layer three_v)
- param:
    h.{layer}.g: (gate mlp) embed
    h.{layer}.u: (up mlp) embed
  leaf: {wi: layer embed ((gate + up) mlp)}
- {param: "h.{layer}.e.{expert}.w", axes: mlp embed, leaf: {experts: expert embed layer mlp}}
- {param: stacked, axes: i embed mlp, leaf: {"single/{i}": mlp embed}}
- {param: conv, axes: a 1 b, leaf: {conv: 1 b a 1}}
"""


def want():
    p = PARAMS

    def stack(name, axis=0):
        return np.stack([p[name.format(i)] for i in range(LAYERS)], axis)

    split = {i: p[f"h.{i}.qkv"].reshape(GROUPS, 4, DIM, EMBED) for i in range(LAYERS)}
    three = np.split(stack("h.{}.c_attn"), 3, axis=2)
    three = np.stack(three).reshape(3, LAYERS, EMBED, HEADS, DIM)
    wi = np.concatenate([stack("h.{}.g"), stack("h.{}.u")], axis=1)
    experts = np.stack([stack(f"h.{{}}.e.{j}.w") for j in range(EXPERTS)])
    return {
        "embed": np.pad(p["embed"].T, ((0, 0), (0, 5))),
        "position/embedding": p["wpe"],
        "norm/scale": p["norm"],
        "q": stack("h.{}.q").reshape(LAYERS, HEADS, DIM, EMBED).transpose(0, 3, 1, 2),
        **{
            f"h/{i}/q": split[i][:, :2].transpose(3, 0, 1, 2).reshape(EMBED, 2 * GROUPS, DIM)
            for i in split
        },
        **{f"h/{i}/k": split[i][:, 2].transpose(2, 0, 1) for i in split},
        **{f"h/{i}/v": split[i][:, 3] for i in split},
        "three/q": three[0].transpose(1, 0, 2, 3),
        "three/k": three[1].transpose(1, 0, 2, 3)[:, :, None],
        "three/v": three[2].transpose(2, 3, 1, 0),
        "wi": wi.transpose(0, 2, 1),
        "experts": experts.transpose(0, 3, 1, 2),
        **{f"single/{i}": p["stacked"][i].T for i in range(LAYERS)},
        "conv": p["conv"][:, 0].T[None, :, :, None],
    }


MAPPING = Mapping.parse(RULES)
WANT = want()


def mapped(tree, mapping=MAPPING, **more):
    return Checkpoint(contents_of(tree, **more)).map(mapping)


def test_every_leaf_is_what_numpy_makes_of_the_parameters():
    checkpoint = mapped({"param": PARAMS})
    shapes = {leaf.label: leaf.shape for leaf in checkpoint.leaves}
    assert shapes == {f"param/{name}": array.shape for name, array in WANT.items()}
    for name, array in WANT.items():
        np.testing.assert_array_equal(checkpoint.read(f"param/{name}"), array)


def test_there_and_back_is_the_identity_for_every_state():
    tree = {}
    for k, state in enumerate(("param", "exp_avg", "exp_avg_sq")):
        tree[state] = {name: array + k for name, array in PARAMS.items()}
    tree["step"] = {n: np.asarray(7, np.float32) for n in PARAMS}
    forth = mapped(tree)
    for name, array in WANT.items():
        whole = np.pad(np.ones_like(array[:, :11]), ((0, 0), (0, 5))) if name == "embed" else 1
        want = (array + whole).astype(np.float32)
        np.testing.assert_array_equal(forth.read(f"exp_avg/{name}"), want)
        assert forth.read(f"step/{name}") == 7
    back = forth.map(MAPPING.inverse())
    assert set(back) == {f"{state}/{name}" for state in tree for name in PARAMS}
    for state, arrays in tree.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(back.read(f"{state}/{name}"), array)


class Chunked(MemoryStore):
    """A store that is kept in chunks of at most two elements on every axis."""

    def arrays(self):
        return {k: ArrayInfo(a.shape, a.dtype, (2,) * a.ndim) for k, a in self.data.items()}


@given(st.sampled_from(sorted(WANT)), st.sampled_from([MemoryStore, Chunked]), st.data())
def test_reading_any_box_is_slicing_the_whole_and_reads_no_more_than_twice_of_it(name, kind, data):
    box = data.draw(boxes_in(WANT[name].shape))
    contents = contents_of({"param": PARAMS})
    store = kind(contents.arrays.data)
    got = Checkpoint(replace(contents, arrays=store)).map(MAPPING).read(f"param/{name}", box)
    np.testing.assert_array_equal(got, WANT[name][box.index])
    assert kind is Chunked or sum(read.size for _, read in store.reads) <= 2 * box.size


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex128]
)
@given(st.sampled_from(sorted(WANT)), st.sampled_from([MemoryStore, Chunked]), st.data())
def test_boxes_read_into_places_of_any_strides_are_slices_of_the_whole(dtype, name, store, data):
    boxes = [box for box in data.draw(grids(WANT[name].shape)) if box.size]
    order = data.draw(st.permutations(range(WANT[name].ndim)))
    contents = contents_of({"param": {n: a.astype(dtype) for n, a in PARAMS.items()}})
    apart = Checkpoint(replace(contents, arrays=store(contents.arrays.data)))
    view = apart.map(MAPPING)._contents.arrays
    places = [np.ones([*(box.shape[i] for i in order), 2], dtype) for box in boxes]
    outs = [place[..., 0].transpose(np.argsort(order)) for place in places]
    view.read_into(f"param.{name.replace('/', '.')}", boxes, outs)
    for box, out, place in zip(boxes, outs, places, strict=True):
        want = WANT[name].astype(dtype)[box.index]
        assert same_bits(np.ascontiguousarray(out), np.ascontiguousarray(want))
        assert (place[..., 1] == np.ones((), dtype)).all()


def test_boxes_that_share_stored_chunks_are_read_chunk_by_chunk():
    contents = contents_of({"param": {f"{i}.w": rng((8, 32), i) for i in range(2)}})
    store = Chunked(contents.arrays.data)
    text = "sizes: {dim: 2}\nleaves:\n- {param: '{i}.w', axes: (h dim) e, leaf: {w: i e h dim}}"
    rules = Mapping.parse(text)
    stored = replace(contents, arrays=store)
    view = map_contents(stored, states_of(stored), *bound(rules, contents)).arrays
    # each is half of a column of chunks
    boxes = [Box((0, e, 0, 0), (2, e + 1, 4, 2)) for e in range(32)]
    got = read_boxes(view, "param.w", boxes)
    assert all(box.start[1] % 2 == box.stop[1] % 2 == 0 for _, box in store.reads)
    assert sum(box.size for _, box in store.reads) == 2 * 8 * 32
    arrays = contents.arrays.data.values()
    whole = np.stack([a.reshape(4, 2, 32).transpose(2, 0, 1) for a in arrays])
    for box, data in zip(boxes, got, strict=True):
        np.testing.assert_array_equal(data, whole[box.index])


def bound(rules, contents):
    """What `map_contents` takes besides the checkpoint and its states."""
    found = bind(rules, {str(leaf.path[1]): leaf.shape for leaf in contents.leaves}, {}, {})
    return found.leaves, found.skipped, found.notes, {}


def test_a_device_slice_is_read_straight_out_of_the_shards():
    shards = MemoryStore({f"rank{r}": PARAMS["h.0.q"][6 * r : 6 * r + 6] for r in range(2)})
    contents = contents_of({"param": {"h.0.q": PARAMS["h.0.q"]}})
    whole = Consolidated(Sharded(0).join([(6, EMBED)] * 2), ["rank0", "rank1"])
    view = evaluated(shards, {contents.leaves[0].name: whole})
    rule = {"param": "h.{i}.q", "axes": "(heads dim) embed", "leaf": {"q": "i embed heads dim"}}
    rules = Mapping.from_dict({"sizes": {"dim": DIM}, "leaves": [rule]})
    box = Box((0, 1, 2, 0), (1, 3, 4, 3))
    got = Checkpoint(replace(contents, arrays=view)).map(rules).read("param/q", box)
    want = PARAMS["h.0.q"].reshape(4, 3, EMBED).transpose(2, 0, 1)
    np.testing.assert_array_equal(got[0], want[1:3, 2:4])
    assert shards.reads == [("rank1", Box((0, 1), (6, 3)))]


def test_a_step_that_differs_between_the_parameters_of_a_leaf_is_refused():
    tree = {"param": PARAMS, "step": {n: np.asarray(7.0) for n in PARAMS}}
    tree["step"]["h.1.g"] = np.asarray(8.0)
    checkpoint = mapped(tree)
    assert checkpoint.read("step/q") == 7
    with pytest.raises(CorruptData, match=r"h\.0\.g.* is 7\.0, but .*h\.1\.g is 8\.0"):
        checkpoint.read("step/wi")
    with pytest.raises(CorruptData, match="is 8"):
        checkpoint.restore()
    faults = [(what, fault) for what, fault in checkpoint.verify() if fault]
    assert [what for what, _ in faults] == ["step/wi"]


RULE = "{param: a, axes: x y, tied: {b: y x}, leaf: {w: y x}, cast: float16}"
TIED = Mapping.parse(f"leaves:\n- {RULE}")


def test_what_is_tied_is_compared_and_either_copy_is_enough():
    a = rng((2, 3))
    both = mapped({"param": {"a": a, "b": a.T.copy()}}, TIED)
    assert list(both.verify()) == [("param/w", None)]
    np.testing.assert_array_equal(both.read("param/w"), a.T.astype(np.float16))
    ((label, fault),) = mapped({"param": {"a": a, "b": a.T + 1}}, TIED).verify()
    assert label == "param/w"
    assert "differs between param.a and param.b, which the mapping says are tied" in fault
    for name, array in (("a", a), ("b", a.T.copy())):
        one = mapped({"param": {name: array}}, TIED)
        assert not list(one.verify())
        np.testing.assert_array_equal(one.read("param/w"), a.T.astype(np.float16))


def test_the_moments_of_what_is_tied_are_those_of_the_copy_that_has_them():
    a = rng((2, 3))
    for owner, moment in (("a", a), ("b", a.T.copy())):
        checkpoint = mapped({"param": {"a": a, "b": a.T.copy()}, "exp_avg": {owner: moment}}, TIED)
        np.testing.assert_array_equal(checkpoint.read("exp_avg/w"), a.T)
        assert [what for what, fault in checkpoint.verify() if not fault] == ["param/w"]


@pytest.mark.parametrize(
    ("stored", "how"), [("float32", "rounded"), ("bfloat16", "rounded"), ("float8_e5m2", "exact")]
)
def test_a_cast_says_whether_it_is_exact(stored, how):
    array = rng((2, 3)).astype(getattr(ml_dtypes, stored, None) or stored)
    checkpoint = mapped({"param": {"a": array}}, TIED)
    assert checkpoint.notes == [f"w is cast from {stored} to float16: {how}"]
    np.testing.assert_array_equal(checkpoint.read("param/w"), array.T.astype(np.float16))
    assert not mapped({"param": {"a": array.astype(np.float16)}}, TIED).notes


def test_a_leaf_with_a_copy_is_compared_on_the_way_back():
    rules = Mapping.parse("leaves:\n- {param: a, axes: x y, leaf: {embed: x y, head: y x}}")
    a = rng((2, 3))
    forth = mapped({"param": {"a": a}}, rules)
    back = forth.map(rules.inverse())
    np.testing.assert_array_equal(back.read("param/a"), a)
    assert [fault for _, fault in back.verify()] == [None]
    other = Checkpoint(contents_of({"param": {"embed": a, "head": a.T + 1}})).map(rules.inverse())
    assert "differs between" in next(iter(other.verify()))[1]


def test_a_cast_is_of_the_parameter_alone():
    checkpoint = mapped({"param": {"a": rng((2, 3))}, "exp_avg": {"a": rng((2, 3))}}, TIED)
    dtypes = {leaf.label: leaf.dtype for leaf in checkpoint.leaves}
    assert dtypes == {"param/w": "float16", "exp_avg/w": "float32"}


SCALED = Mapping.parse("leaves:\n- {param: a, leaf: b, scale: 2, add: 1}\n- {param: c, leaf: d}")


def test_a_scaled_parameter_leaves_its_moments_out_and_says_why():
    tree = {s: {n: rng((4,), k) for n in "ac"} for k, s in enumerate(("param", "exp_avg"))}
    checkpoint = mapped(tree, SCALED)
    np.testing.assert_array_equal(checkpoint.read("param/b"), tree["param"]["a"] * 2 + 1)
    assert list(checkpoint) == ["param/b", "param/d", "exp_avg/d"]
    assert any("exp_avg/b is left out: b is scaled" in note for note in checkpoint.notes)
    (item,) = checkpoint.inventory
    assert (item.where, item.status) == ("exp_avg/a", "skipped")
    back = mapped({"param": tree["param"]}, SCALED).map(SCALED.inverse())
    np.testing.assert_allclose(back.read("param/a"), tree["param"]["a"], atol=1e-6)
    np.testing.assert_array_equal(back.read("param/a"), (tree["param"]["a"] * 2 + 1 - 1) / 2)


def test_scaling_16_bit_numbers_rounds_once():
    rules = Mapping.parse("leaves:\n- {param: a, leaf: b, scale: 3, add: 1}")
    a = rng((64,)).astype(np.float16)
    got = mapped({"param": {"a": a}}, rules).read("param/b")
    np.testing.assert_array_equal(got, (a.astype(np.float32) * 3 + 1).astype(np.float16))


PLAIN = Mapping.parse("leaves:\n- {param: '{n}.w', axes: x, leaf: {w: n x}}")


@pytest.mark.parametrize(("tree", "fault"), [
    ({"param": {"0.w": rng((3,)), "1.w": rng((3,))}, "m": {"0.w": rng((3,))}},
     r"m/w: 0\.w has this state, but 1\.w not"),
    ({"param": {"0.w": rng((3,))}, "row": {"0.w": rng((2,))}},
     r"row of 0\.w has shape \[2\], the parameter \[3\]"),
    ({"param": {"0.w": rng((3,)), "1.w": rng((3,))}, "m": {"0.w": rng((3,)), "1.w": rng(())}},
     r"m of 1\.w has shape \[\], the parameter \[3\]"),
    ({"param": {"0.w": rng((3,)), "1.w": rng((3,)).astype(np.float16)}},
     r"param/w: its parameters differ in dtype, float16, float32"),
])  # fmt: skip
def test_states_that_cannot_be_mapped_are_refused_by_name(tree, fault):
    with pytest.raises(LayoutError, match=fault):
        mapped(tree, PLAIN)


def test_a_tree_without_parameters_is_refused():
    with pytest.raises(TreeMismatch, match="has no parameters"):
        mapped({"other": {"name": rng((3,))}}, PLAIN)


def test_a_tree_that_fits_under_another_name_is_refused_with_that_name():
    with pytest.raises(TreeMismatch, match=r"perhaps params='params' \(--params params\)"):
        mapped({"params": {"0.w": rng((3,))}}, PLAIN)


def test_only_the_mapping_that_undoes_another_knows_its_lengths():
    rules = Mapping.parse("leaves:\n- {param: {a: x, b: y}, leaf: {w: (x + y)}}")
    forth = mapped({"param": {"a": rng((2,)), "b": rng((3,))}}, rules)
    np.testing.assert_array_equal(forth.map(rules.inverse()).read("param/b"), rng((3,)))
    other = Mapping.parse("leaves:\n- {param: {w: (x + y)}, leaf: {b: x, a: y}}")
    with pytest.raises(LayoutError, match="leaves the length of x and y open"):
        forth.map(other)


def test_an_empty_part_is_nothing():
    rules = Mapping.parse("leaves:\n- {param: {a: x, b: y}, leaf: {w: (x + y)}}")
    checkpoint = mapped({"param": {"a": rng((0,)), "b": rng((3,))}}, rules)
    np.testing.assert_array_equal(checkpoint.read("param/w"), rng((3,)))


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "bfloat16", "float64", "bool", "int4", "complex128", "complex64"]
)
def test_every_dtype_is_moved_bit_for_bit(dtype):
    array = (rng((4, 6)) * 8).astype(getattr(ml_dtypes, dtype, None) or dtype)
    rules = Mapping.parse("leaves:\n- {param: a, axes: x y, leaf: {b: y x}}")
    got = mapped({"param": {"a": array}}, rules).read("param/b")
    assert same_bits(got, np.ascontiguousarray(array.T))


def test_a_rename_is_read_without_a_copy():
    array = numbered((4, 3))
    checkpoint = mapped({"param": {"a": array}}, Mapping.parse("leaves:\n- {param: a, leaf: b}"))
    assert np.shares_memory(checkpoint.read("param/b", Box((1, 0), (3, 2))), array)
