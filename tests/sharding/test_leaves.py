"""What can be a leaf, what it comes back as, and where target and checkpoint may differ."""

import enum
import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx
from flax.core.meta import Partitioned
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import memory, mesh_of, require_memory
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import ShardingWarning, TreeMismatch, UnsupportedLeaf
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.jax_versions import enable_x64, set_mesh
from jax_ucp.tree import Key, leaf_names

MESH = mesh_of(4, 2)


class Point(NamedTuple):
    x: Any
    y: Any


@flax.struct.dataclass
class Train:
    step: Any
    params: Any


def save(path, tree) -> ucp.Checkpoint:
    ocp.Checkpointer(ucp.CheckpointHandler()).save(path, args=ucp.args.Save(tree))
    return ucp.open(path)


def same(a: Any, b: Any) -> bool:
    """Equal as a person means it: the same type, and the same bits."""
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        return type(a) is type(b) and same_bits(np.asarray(a), np.asarray(b))
    return type(a) is type(b) and a == b


DTYPES = [
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64,
    np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.int4,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
# What TensorStore has in its newer releases.
NEW_DTYPES = (ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn)
DTYPES += [dtype for dtype in NEW_DTYPES if hasattr(tensorstore, np.dtype(dtype).name)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    rng = np.random.default_rng(0)
    # Positive powers of two up to 4: values that every dtype here has.
    array = np.asarray(2.0 ** rng.integers(0, 3, size=shape)).astype(dtype)
    tree = {"numpy": array}
    if np.dtype(dtype).itemsize < 8:  # the others need jax_enable_x64
        tree["jax"] = jnp.asarray(array)
    got = save(tmp_path / "c", tree).restore(dict.fromkeys(tree, array) | tree)
    for name, value in tree.items():
        assert same(value, got[name]), name


VALUES = {
    "int": -3,
    "big": 2**62,
    "float": 0.1,
    "nan": float("inf"),
    "complex": 1 + 2j,
    "true": True,
    "text": "größe\n",
    "none": None,
    "scalar": np.float32(0.1),
    "np_bool": np.bool_(True),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "device": jnp.arange(4.0),
    "sharded": jax.device_put(np.arange(16.0, dtype=np.float32).reshape(8, 2),
        NamedSharding(MESH, P("data", "model"))),
    "key": jax.random.key(7),
    "rbg": jax.random.key(7, impl="rbg"),
    "keys": jax.random.split(jax.random.key(1), 4),
    "list": [1, [2.0, None], []],
    "tuple": (1, (), ({},)),
    "point": Point(np.zeros(2), None),
    "train": Train(3, {"w": jnp.ones(2)}),
    "adam": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": jnp.ones(3, jnp.bfloat16)}),
    "masked": optax.masked(optax.adam(1e-3),
        {"w": True, "b": False}).init({"w": jnp.ones(2), "b": jnp.ones(1)}),
    "dotted": {"a": {"b": np.float32(1)}, "a.b": np.float32(2), "a/b": {"c": np.ones(1)}, "": 3},
    "numbers": {0: np.ones(1), 10: np.ones(2)},
}  # fmt: skip


def test_every_kind_of_leaf_comes_back_as_what_it_was(tmp_path):
    got = save(tmp_path / "c", VALUES).restore(VALUES)
    assert jax.tree.structure(got) == jax.tree.structure(VALUES)
    pairs = zip(jax.tree.leaves_with_path(VALUES), jax.tree.leaves(got), strict=True)
    for (path, want), value in pairs:
        assert same(want, value), jax.tree_util.keystr(path)


def test_without_a_target_the_containers_of_python_come_back_and_others_as_dicts(tmp_path):
    got = save(tmp_path / "c", VALUES).restore()
    for name in (
        "int", "big", "float", "nan", "complex", "true", "text", "none", "scalar", "array", "list",
        "tuple",
    ):  # fmt: skip
        assert jax.tree.structure(got[name]) == jax.tree.structure(VALUES[name]), name
        assert all(map(same, jax.tree.leaves(VALUES[name]), jax.tree.leaves(got[name]))), name
    assert list(got["point"]) == ["x", "y"]
    assert list(got["train"]["params"]) == ["w"]
    assert list(got["numbers"]) == [0, 10]
    assert same(np.asarray(VALUES["sharded"]), got["sharded"])


def test_an_nnx_state_comes_back_as_one_with_keys_and_counts(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
            self.layers = getattr(nnx, "List", list)(layers)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def state(seed: int) -> nnx.State:
        model = Model(nnx.Rngs(seed))
        return nnx.state((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))

    want, other = state(0), state(1)
    got = save(tmp_path / "c", want).restore(other)
    assert isinstance(got, nnx.State)
    leaves = list(zip(*map(jax.tree.leaves, (want, got, other)), strict=True))
    assert all(same(a, b) for a, b, _ in leaves)
    assert not all(same(a, c) for a, _, c in leaves)


def test_a_mesh_in_scope_does_not_disturb_a_restore(tmp_path):
    checkpoint = save(tmp_path / "c", VALUES)
    with set_mesh(MESH):
        got = checkpoint.restore(VALUES)
    assert same(VALUES["key"], got["key"])
    assert same(VALUES["sharded"], got["sharded"])
    assert got["sharded"].sharding == VALUES["sharded"].sharding


def test_names_that_stock_would_confuse_are_not_confused(tmp_path):
    tree = {"a": {"b": np.zeros(2)}, "a.b": np.ones(2)}
    tree |= {"c": np.full(2, 2.0), "c/d": np.full(2, 3.0)}
    checkpoint = save(tmp_path / "c", tree)
    got = checkpoint.restore()
    assert same(got["a"]["b"], tree["a"]["b"])
    assert same(got["a.b"], tree["a.b"])
    assert same(got["c"], tree["c"])
    assert same(got["c/d"], tree["c/d"])
    # No directory has a name that stock would read for either.
    assert not (tmp_path / "c" / "a.b").exists()


def test_leaf_names_are_unique_and_plain_wherever_they_can_be():
    def path(*names):
        return tuple(Key("dict", name) for name in names)

    assert leaf_names([path("params", "w"), path("params", "b/c")]) == ["params.w", "params.b/c"]
    assert leaf_names([path("_METADATA"), path(".."), path("")]) == ["%_METADATA", "%%2E%2E", "%"]
    long = leaf_names([path("x" * 300), path("x" * 300 + "y")])
    assert len(set(long)) == 2
    assert max(map(len, long)) < 255


def test_a_label_that_two_leaves_have_is_refused_with_both_paths(tmp_path):
    checkpoint = save(tmp_path / "c", {"a": {"b": np.zeros(1)}, "a/b": np.ones(5)})
    with pytest.raises(KeyError, match=r"2 arrays 'a/b', at \['a', 'b'\] and \['a/b'\]"):
        checkpoint.read("a/b")


class Colour(enum.StrEnum):
    RED = "red"


def test_a_tree_with_enum_keys_or_big_endian_arrays_is_restorable_into_itself(tmp_path):
    tree = {Colour.RED: np.arange(3, dtype=">f4"), "other": np.ones(2)}
    got = save(tmp_path / "c", tree).restore(tree)
    np.testing.assert_array_equal(got[Colour.RED], tree[Colour.RED])


@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host"])
def test_arrays_and_keys_go_to_the_kind_of_memory_that_the_target_has(tmp_path, memory_kind):
    require_memory(memory_kind)
    sharding = NamedSharding(MESH, P("data"), memory_kind=memory_kind)
    tree = {"w": jax.device_put(np.arange(8.0, dtype=np.float32), sharding)}
    got = save(tmp_path / "c", tree).restore(tree)["w"]
    assert got.sharding == sharding
    np.testing.assert_array_equal(np.asarray(got), np.arange(8.0))


OTHER = mesh_of(2, 4)
ON_OTHER = {
    "by the saved spec": {"mesh": OTHER},
    "by a rule": {"mesh": OTHER, "rules": [("", P("model"))]},
    "with shared reads": {"mesh": OTHER, "share_reads": True},
    "on the same axes": {"mesh": Mesh(MESH.devices[::-1], MESH.axis_names)},
    "cast": {"mesh": OTHER, "cast": jnp.bfloat16},
}


@pytest.mark.parametrize("how", ON_OTHER)
@pytest.mark.parametrize("of", ["a mesh", "a device", "an abstract mesh"])
def test_the_kind_of_memory_of_a_target_is_kept_on_another_mesh(tmp_path, how, of):
    require_memory("pinned_host")
    homes = {
        "a mesh": NamedSharding(MESH, P("data"), memory_kind="pinned_host"),
        "a device": SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
        "an abstract mesh": NamedSharding(MESH.abstract_mesh, P("data"), memory_kind="pinned_host"),
    }
    data, keys = np.arange(16.0, dtype=np.float32), jax.random.split(jax.random.key(0), 8)
    at = NamedSharding(MESH, P("data"))
    checkpoint = save(tmp_path / "c", jax.device_put({"w": data, "usual": data, "k": keys}, at))
    like = partial(jax.ShapeDtypeStruct, sharding=homes[of])
    target = {"w": like(data.shape, data.dtype), "k": like(keys.shape, keys.dtype)}
    target["usual"] = jax.device_put(data, at)
    got = checkpoint.restore(target, **ON_OTHER[how])
    usual = jax.devices()[0].default_memory().kind
    kinds = [got["w"], got["usual"], jax.random.key_data(got["k"])]
    assert [leaf.sharding.memory_kind for leaf in kinds[:2]] == ["pinned_host", usual]
    assert checkpoint.plan(target, **ON_OTHER[how])["k"].sharding.memory_kind == "pinned_host"
    assert got["w"].sharding.mesh == ON_OTHER[how]["mesh"]
    np.testing.assert_array_equal(np.asarray(got["w"]), data)
    assert same(got["k"], keys)


def test_a_kind_of_memory_that_the_devices_do_not_have_is_refused(tmp_path, monkeypatch):
    checkpoint = save(tmp_path / "c", {"w": jnp.arange(8.0)})
    own = NamedSharding(MESH.abstract_mesh, P("data"))
    target = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=own)}
    # as of an accelerator's memory, where there is none
    monkeypatch.setattr(NamedSharding, "memory_kind", property(lambda sharding: "vmem"))
    with pytest.raises(TreeMismatch, match="w: the target is in memory of the kind 'vmem', which"):
        checkpoint.plan(target, mesh=MESH)


def test_a_target_on_the_same_axes_of_another_kind_keeps_its_spec(tmp_path):
    w = jax.device_put(np.ones((8, 8)), NamedSharding(MESH, P("data", "model")))
    checkpoint = save(tmp_path / "c", {"w": w})
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    abstract = NamedSharding(explicit.abstract_mesh, P("model", "data"))
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=abstract)}
    sharding = NamedSharding(explicit, P("model", "data"))
    assert checkpoint.restore(target, mesh=explicit)["w"].sharding == sharding
    with pytest.raises(TreeMismatch, match="no sharding on devices, the first w: give mesh="):
        checkpoint.restore(target)


@pytest.mark.parametrize(("rule", "spec"), [
    (("w", "data"),                    r"PartitionSpec('data')"),
    (("w", ("data", "model")),         r"PartitionSpec('data', 'model')"),
    (("w$", None),                     r"PartitionSpec(None)"),
    (("w", (None, "data")),            r"PartitionSpec(None, 'data')"),
    (("v", [("data", "model"), None]), r"PartitionSpec(('data', 'model'), None)"),
], ids=str)  # fmt: skip
def test_a_rule_with_a_tuple_or_a_string_for_a_spec_is_refused(rule, spec, tmp_path):
    checkpoint = ucp.Checkpoint.of({"w": jnp.ones((8, 8))})
    for call in (
        lambda: checkpoint.restore(mesh=MESH, rules=[rule]),
        lambda: checkpoint.restore({"w": jnp.ones((8, 8))}, mesh=MESH, rules=[rule]),
        lambda: checkpoint.save(tmp_path / "c", mesh=MESH, rules=[rule]),
        lambda: checkpoint.plan_reads(MESH, rules=[rule]),
    ):
        words = rf"where\ a\ spec\ is\ meant.*{re.escape(spec)}"
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "c").exists()


def test_rules_of_a_family_name_logical_axes_that_a_model_does_not_have(tmp_path):
    """`embed` matches a label and is no axis of this model; a pattern can be no axis."""
    with set_mesh(MESH):
        tree = {"embed": nnx.Param(jnp.zeros((8, 4)), out_sharding=("data", None))}
    abstract = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)
    rules = [("data", "model"), ("embed", "data")]
    unused = "no leaf has the logical axis 'embed'"
    plain = ucp.Checkpoint.of({"embed": {"value": np.zeros((8, 4), np.float32)}})
    for checkpoint, target in ((save(tmp_path / "c", tree), None), (plain, abstract)):
        with pytest.warns(ShardingWarning, match=unused):
            got = checkpoint.restore(target, mesh=MESH, rules=rules)
        leaf = got["embed"]["value"] if target is None else got["embed"][...]
        assert leaf.sharding.spec == P("model", None)
        with pytest.raises(ValueError, match=r"where a spec is meant, write PartitionSpec\('data"):
            checkpoint.restore(target, mesh=MESH, rules=[("data", "model"), ("emb.*", "data")])


def test_what_is_given_up_of_a_sharding_is_a_warning_where_restore_was_called(tmp_path):
    sharding = NamedSharding(MESH, P("data", "model"))
    checkpoint = save(tmp_path / "c", {"w": jax.device_put(np.ones((8, 8)), sharding)})
    other = Mesh(np.array(jax.devices()), ("data",))
    with pytest.warns(ShardingWarning, match=r"\n  w: axis 1 of 8 is not cut over model") as warned:
        checkpoint.restore(mesh=other)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("have", "want"), [(3.7, np.int32(0)), (1 + 2j, np.float32(0)), (np.int64(2**40), np.bool_(0))]
)
def test_a_cast_that_loses_more_than_digits_is_refused(tmp_path, have, want):
    checkpoint = save(tmp_path / "c", {"x": np.asarray([have])})
    with pytest.raises(TreeMismatch, match=r"x: .* cannot be cast to .* without loss"):
        checkpoint.restore({"x": np.asarray([want])}, cast=True)


@pytest.mark.parametrize(("have", "want"), [
    (np.array([1, 2**40]), np.int32),
    (np.array([1, 2**31], np.uint32), np.int32),
    (np.array([3, -1], np.int16), np.uint16),
    (np.array([3, 255], np.uint8), np.int8),
    (np.array([0, -8], ml_dtypes.int4), ml_dtypes.uint4),
    (np.array([1, 127], np.int8), ml_dtypes.float8_e3m4),
    (np.array([1, 0], np.uint8), ml_dtypes.float8_e8m0fnu),
    (np.array([1, 65535], np.uint16), np.float16),
    (np.array([1, 2**24 + 1]), np.complex64),
])  # fmt: skip
def test_integers_that_do_not_fit_are_refused_when_they_are_read(tmp_path, have, want):
    checkpoint = save(tmp_path / "c", {"fits": have[:1], "x": have})
    target = {"fits": np.zeros(1, want), "x": np.zeros(2, want)}
    with pytest.raises(TreeMismatch, match=f"x: values of {have.dtype} do not fit"):
        checkpoint.restore(target, cast=True)
    del target["x"]
    restored = checkpoint.restore(target, cast=True, partial=True)
    assert same_bits(restored["fits"], have[:1].astype(np.float64).astype(want))


def test_complex_numbers_round_and_may_be_nan(tmp_path):
    stored = np.array([1 / 3 + 1j, np.nan])
    checkpoint = save(tmp_path / "c", {"x": stored})
    restored = checkpoint.restore({"x": np.zeros(2, np.complex64)}, cast=True)
    assert same_bits(restored["x"], stored.astype(np.complex64))


def test_numbers_of_few_bits_are_cast_to_one_another(tmp_path):
    few = (ml_dtypes.int4, ml_dtypes.float8_e5m2)
    checkpoint = save(tmp_path / "c", {np.dtype(kind).name: np.ones(2, kind) for kind in few})
    for kind in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu):
        restored = checkpoint.restore({np.dtype(k).name: np.zeros(2, kind) for k in few}, cast=True)
        for array in restored.values():
            assert same_bits(array, np.ones(2, kind))


@pytest.mark.parametrize(("spec", "shape", "mesh", "fitted"), [
    (("a", "b"),         (8, 6), {"a": 4, "b": 2}, ("a", "b")),
    ((("a", "b"),),      (8,),   {"a": 4, "b": 2}, (("a", "b"),)),
    ((("a", "b"),),      (12,),  {"a": 4, "b": 2}, ("a",)),
    ((("a", "b"),),      (6,),   {"a": 4, "b": 2}, ("b",)),
    (("a", "a"),         (8, 8), {"a": 2},         ("a", None)),
    (("x", "a"),         (8, 8), {"a": 2},         (None, "a")),
    (("a", None),        (7, 8), {"a": 2},         (None, None)),
    ((None, ("c", "a")), (4, 8), {"a": 2, "c": 2}, (None, ("c", "a"))),
    (("a",),             (0,),   {"a": 4},         ("a",)),
    (("a",),             (),     {"a": 4},         ()),
])  # fmt: skip
def test_a_spec_is_fitted_as_written_here(spec, shape, mesh, fitted):
    assert fit_spec(spec, shape, mesh).spec == fitted


@pytest.mark.parametrize(("tree", "message"), [
    ({"a": [1, {"b": object()}]}, r"a/1/b is a builtins\.object, which is not an array"),
    ({"a": 2**70}, "a .*no 64-bit array holds"),
    ({"a": np.array(["x"])}, "a has dtype <U1, which zarr v3"),
    ({"a": b"bytes"}, r"a is a builtins\.bytes"),
    ({(1, 2): 1}, r"the tree has the key .*strings and integers"),
    (OrderedDict([(0, 1), ("0", 2)]), "differ only in type"),
    ({"a": {0: 1, "0": 2}}, "a has keys that JAX cannot sort"),
    ({"a": jax.ShapeDtypeStruct((2,), np.float32)}, "a is abstract"),
    ({"a": np.ma.masked_array([1.0, 2.0], mask=[0, 1])}, r"a is a numpy\.ma\.MaskedArray"),
    ({"a": {"b": "x"}, "a.b": "y"}, r"two strings would have one name on disk, 'a\.b'"),
    ({"a": "\ud800"}, r"'a' has a key or a value that is not text"),
])  # fmt: skip
def test_what_cannot_be_restored_as_what_it_was_is_refused_with_the_reason(tree, message):
    with pytest.raises(UnsupportedLeaf, match=message):
        ucp.args.Save(tree)


def test_everything_in_which_target_and_checkpoint_differ_is_in_one_error(tmp_path):
    tree = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    tree |= {"n": 1, "s": "x", "old_scale": np.ones(2)}
    target = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(3, np.float16)}
    target |= {"n": None, "s": np.zeros(2), "old_scales": np.ones(2)}
    with pytest.raises(TreeMismatch) as error:
        save(tmp_path / "c", tree).restore(target)
    text = str(error.value)
    assert "does not fit the checkpoint in 6 leaves" in text
    shapes = "w: the target has shape (3, 2), the checkpoint (2, 3)"
    assert f"{shapes} (the target may be transposed)" in text
    assert "b: the target has dtype float16, the checkpoint float32; to convert, cast=True" in text
    assert "n: the target has None, the checkpoint an int" in text
    assert "s: the target has an array of float64 (2,), the checkpoint a str" in text
    assert "old_scales: in the target, but not in the checkpoint; the checkpoint has old_" in text
    assert "old_scale: in the checkpoint, but not in the target" in text
    assert "partial=True" in text


def test_a_partial_restore_leaves_out_only_what_the_target_lacks(tmp_path):
    checkpoint = save(tmp_path / "c", {"params": {"w": np.ones(2)}, "opt": {"mu": np.zeros(2)}})
    assert set(checkpoint.restore({"params": {"w": np.zeros(2)}}, partial=True)) == {"params"}
    with pytest.raises(TreeMismatch, match="v: in the target, but not in the checkpoint"):
        checkpoint.restore({"params": {"w": np.zeros(2), "v": np.zeros(2)}}, partial=True)


def test_what_the_checkpoint_lacks_keeps_the_value_of_the_target(tmp_path):
    checkpoint = save(tmp_path / "c", {"base": {"w": jnp.ones(2)}, "step": 3})
    lora = jax.device_put(jnp.full(4, 7.0), NamedSharding(MESH, P("data")))
    target = {"a": "own", "base": {"lora": lora, "w": jnp.zeros(2)}, "step": 0, "z": None}
    found = checkpoint.restore(target, mesh=MESH, missing="keep")
    assert found["a"] == "own"
    assert found["base"]["lora"] is lora
    assert same(np.asarray(found["base"]["w"]), np.ones(2, np.float32))
    assert found["step"] == 3
    plan = checkpoint.plan(target, mesh=MESH, missing="keep")
    assert [node.label for node in plan.kept] == ["a", "base/lora", "z"]


def test_what_has_no_value_is_not_kept(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": jnp.ones(2), "v": jnp.ones(2)})
    target = {"w": jnp.zeros(2), "head": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(TreeMismatch) as error:
        checkpoint.restore(target, mesh=MESH, missing="keep")
    assert "head: not in the checkpoint, and the target has no value to keep" in str(error.value)
    assert "v: in the checkpoint, but not in the target" in str(error.value)
    with pytest.raises(ValueError, match="'yes' is none of refuse, keep, leave"):
        checkpoint.restore(target, mesh=MESH, missing="yes")
    with pytest.raises(ValueError, match="there is no target"):
        checkpoint.restore(missing="keep")


@pytest.mark.parametrize("missing", ["keep", "leave"])
def test_a_target_that_shares_no_leaf_is_refused_though_each_could_stay(tmp_path, missing):
    checkpoint = save(tmp_path / "c", {"params": {"w": jnp.arange(4.0)}})
    target = {"model": {"w": np.zeros(4)}}
    with pytest.raises(TreeMismatch, match=r"has model/w, the checkpoint params/w"):
        checkpoint.restore(target, missing=missing, partial=True)
    target = {"model": ...}  # the user's own word
    assert checkpoint.restore(target, missing=missing, partial=True) == target


def test_what_has_no_value_may_be_left_without_one(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": jnp.ones(2), "v": jnp.ones(2)})
    target = {"w": jnp.zeros(2), "head": jax.ShapeDtypeStruct((2,), np.float32), "n": 7}
    found = checkpoint.restore(target, mesh=MESH, missing="leave", partial=True)
    assert found["head"] is target["head"]
    assert found["n"] == 7
    assert same(np.asarray(found["w"]), np.ones(2, np.float32))


def test_a_leaf_that_is_dots_is_left_out(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": jnp.ones(2), "v": jnp.ones(2)})
    found = checkpoint.restore({"w": ..., "v": jnp.zeros(2)}, mesh=MESH)
    assert found["w"] is ...
    assert same(np.asarray(found["v"]), np.ones(2, np.float32))
    plan = checkpoint.plan({"w": ..., "v": jnp.zeros(2)})
    assert [placement.leaf.label for placement in plan.placements] == ["v"]


def test_the_value_of_an_nnx_variable_is_the_variable(tmp_path):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    kernel = np.arange(32, dtype=np.float32).reshape(8, 4)
    plain = {"kernel": kernel, "bias": np.ones(4, np.float32)}
    checkpoint = save(tmp_path / "plain", {"param": plain})
    found = checkpoint.restore({"param": nnx.state(model)}, mesh=MESH)["param"]
    assert isinstance(found, nnx.State)
    assert same(np.asarray(found["kernel"][...]), plain["kernel"])
    boxed = save(tmp_path / "boxed", {"param": found})
    back = boxed.restore({"param": jax.tree.map(np.zeros_like, plain)})["param"]
    assert same(back["kernel"], plain["kernel"])


def test_a_leaf_that_is_called_value_is_not_taken_for_a_variable(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": {"value": np.ones(2), "scale": np.ones(2)}})
    with pytest.raises(TreeMismatch):
        checkpoint.restore({"w": np.zeros(2)})


def test_a_target_without_shardings_needs_a_mesh(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": jnp.ones(4)})
    target = {"w": jax.ShapeDtypeStruct((4,), np.float32)}
    with pytest.raises(TreeMismatch, match="have no sharding on devices, the first w: give mesh="):
        checkpoint.restore(target)
    assert same(np.asarray(checkpoint.restore(target, mesh=MESH)["w"]), np.ones(4, np.float32))


def test_what_jax_would_truncate_is_refused_unless_it_is_asked_for(tmp_path):
    checkpoint = save(tmp_path / "c", {"n": np.arange(3), "f": np.ones(2)})
    target = {"n": jax.ShapeDtypeStruct((3,), np.int64)}
    target["f"] = jax.ShapeDtypeStruct((2,), np.float64)
    with pytest.raises(TreeMismatch, match="n: JAX would make int32 of its int64; set jax_enable"):
        checkpoint.restore(target, mesh=MESH)
    with pytest.warns(ShardingWarning, match="nothing goes on the mesh"):
        assert same(checkpoint.restore(mesh=MESH)["n"], np.arange(3))
    target = {"n": jax.ShapeDtypeStruct((3,), np.int32)}
    target["f"] = jax.ShapeDtypeStruct((2,), np.float32)
    got = checkpoint.restore(target, mesh=MESH, cast=True)["n"]
    assert same(got.addressable_data(0), jnp.arange(3))


@pytest.mark.parametrize("budget_bytes", [1, 100_000, 1 << 30])
def test_64_bits_asked_for_in_the_callers_thread_alone_are_restored(tmp_path, budget_bytes):
    with enable_x64(True):
        n = jnp.arange(1 << 15) + (1 << 40)
        tree = {"n": n, "f": jnp.linspace(0, 1, 1 << 14), "few": n[:8]}
        tree = jax.device_put(tree, NamedSharding(MESH, P("data")))
        restored = save(tmp_path / "c", tree).restore(tree, budget_bytes=budget_bytes)
        assert all(same(restored[name], tree[name]) for name in tree)


def test_casting_happens_only_where_it_is_asked_for(tmp_path):
    tree = {"w": np.linspace(0, 1, 5, dtype=np.float32), "n": np.arange(3)}
    tree["key"] = jax.random.key(0)
    checkpoint = save(tmp_path / "c", tree)
    half = checkpoint.restore(cast=jnp.bfloat16)
    assert same(half["w"], tree["w"].astype(jnp.bfloat16))
    assert same(half["n"], tree["n"])
    assert same(half["key"], tree["key"])
    target = tree | {"w": np.zeros(5, np.float16)}
    assert same(checkpoint.restore(target, cast=True)["w"], tree["w"].astype(np.float16))


def test_replicas_restored_from_one_read_do_not_share_what_training_may_overwrite(tmp_path):
    checkpoint = save(tmp_path / "c", {"w": np.zeros((256, 1024), np.float32)})
    target = {"w": jax.ShapeDtypeStruct((256, 1024), np.float32, sharding=NamedSharding(MESH, P()))}
    first, second = checkpoint.restore(target)["w"], checkpoint.restore(target)["w"]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(3):
        first = step(first)
    assert all((np.asarray(shard.data) == 3).all() for shard in first.addressable_shards)
    assert all((np.asarray(shard.data) == 0).all() for shard in second.addressable_shards)


def test_rules_go_by_label_first_then_by_logical_axes_then_by_what_was_saved(tmp_path):
    @dataclass
    class Sizes:
        rows: int = 8
        cols: int = 4

    with set_mesh(MESH):
        kernel = nnx.Param(jnp.zeros((Sizes.rows, Sizes.cols)), out_sharding=("data", None))
        bias = nnx.Param(jnp.zeros(Sizes.cols), out_sharding=("model",))
    other = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(MESH, P("model", None)))
    checkpoint = save(tmp_path / "c", {"kernel": kernel, "bias": bias, "other": other})
    rules = [("other", P(None, "data")), ("data", "model"), ("model", "data")]
    got = checkpoint.restore(mesh=MESH, rules=rules)
    assert got["kernel"]["value"].sharding.spec == P("model", None)
    assert got["bias"]["value"].sharding.spec == P("data")
    assert got["other"].sharding.spec == P(None, "data")
    assert checkpoint.restore(mesh=MESH)["other"].sharding.spec == P("model", None)


def test_where_nothing_else_says_it_the_axes_that_a_target_names_are_those_of_the_mesh(tmp_path):
    """A checkpoint of another framework has no specs; Flax's variables name axes of the mesh."""
    arrays = {name: np.arange(32, dtype=np.float32).reshape(8, 4) for name in ("w", "u", "v")}
    checkpoint = memory({"param": arrays})
    abstract = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    boxes = {"w": ("model", "data"), "u": ("embed", "data")}
    named = {name: Partitioned(abstract, names=names) for name, names in boxes.items()}
    target = {"param": {**named, "v": abstract}}

    def specs(**how):
        got = checkpoint.restore(target, mesh=MESH, **how)["param"]
        return [jax.tree.leaves(got[name])[0].sharding.spec for name in ("w", "u", "v")]

    assert specs() == [P("model", "data"), P(None, "data"), P()]
    assert specs(rules=[(r"w", P("data"))])[0] == P("data")
    rules = [("model", ("data", "model")), ("data", None)]
    assert specs(rules=rules)[0] == P(("data", "model"), None)
    with set_mesh(MESH):
        kept = jax.device_put(arrays["w"], NamedSharding(MESH, P("data")))
    saved = save(tmp_path / "saved", {"param": {**arrays, "w": kept}})
    got = saved.restore(target, mesh=MESH)["param"]
    assert jax.tree.leaves(got["w"])[0].sharding.spec == P("data")


def test_saving_takes_a_copy_of_what_the_caller_may_change(tmp_path):
    array = np.zeros(4)
    with ocp.CheckpointManager(tmp_path / "m", item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(0, args=ucp.args.Save({"w": array}))
        array += 1
        manager.wait_until_finished()
        assert same(manager.restore(0)["w"], np.zeros(4))
