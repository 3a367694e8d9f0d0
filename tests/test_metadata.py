"""`ucp.json` gives back every leaf that it was given, and says once what many leaves have in common."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.metadata import Key, Leaf, Metadata, SavedSharding, StoredArray, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
PLACES = st.integers(0, 1 << 50)
KEYS = st.one_of(
    st.builds(Key, st.sampled_from(["dict", "attr"]), TEXT | st.integers(-9, 1 << 40)),
    st.builds(Key, st.sampled_from(["list", "tuple"]), st.integers(0, 99)),
)
AXES = st.lists(st.none() | TEXT | st.lists(TEXT, max_size=2).map(tuple), max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SHARDINGS = st.none() | st.builds(
    SavedSharding, st.just(("x",)), SHAPES, AXES, st.lists(st.integers(0, 9), max_size=2).map(tuple)
)
LEAVES = st.builds(
    Leaf,
    st.lists(KEYS, max_size=3).map(tuple),
    TEXT,
    st.sampled_from(["jax", "array", "prng_key", "bool", "str", "none", "empty"]),
    SHAPES,
    st.sampled_from(["", "float32", "bfloat16"]),
    st.none() | TEXT,
    TEXT,
    SHARDINGS,
    st.none() | AXES,
)
STORED = st.builds(
    StoredArray, SHAPES, SHAPES, st.just(("0123456789abcdef",)), st.lists(st.tuples(PLACES, PLACES)).map(tuple)
)


@given(st.lists(LEAVES, max_size=6), st.dictionaries(TEXT, STORED, max_size=4))
def test_what_is_decoded_is_what_was_encoded(leaves, arrays):
    metadata = Metadata(tuple(leaves), arrays, {"a": "b"}, {"name": "x"}, {"y": [1, None]})
    assert decode(encode(metadata), "ucp.json") == metadata


def test_a_mesh_of_many_devices_is_there_once_for_all_leaves():
    sharding = SavedSharding(("data",), (4096,), ("data",), tuple(range(4096)))
    leaf = Leaf((Key("dict", "w"),), "w", "jax", (8,), "float32", sharding=sharding)
    leaves = [replace(leaf, name=f"w{i}") for i in range(1000)]
    one, all_of_them = (len(encode(Metadata(tuple(some), {}))) for some in (leaves[:1], leaves))
    assert all_of_them - one < 100 * len(leaves)
