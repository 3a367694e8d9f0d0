"""`ucp.json` gives back every leaf that it was given, and says once what leaves share."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_ucp.tree import Key, Leaf, SavedSharding, folded_name, leaf_names
from jax_ucp.universal.metadata import ArrayRecord, Metadata, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
PLACES = st.integers(0, 1 << 50)
KEYS = st.one_of(
    st.builds(Key, st.sampled_from(["dict", "attr"]), TEXT | st.integers(-9, 1 << 40)),
    st.builds(Key, st.sampled_from(["list", "tuple"]), st.integers(0, 99)),
)
AXES = st.lists(st.none() | TEXT | st.lists(TEXT, max_size=2).map(tuple), max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
NUMBERS = st.lists(st.integers(0, 9), max_size=2).map(tuple)
SHARDINGS = st.none() | st.builds(SavedSharding, st.just(("x",)), SHAPES, AXES, NUMBERS)
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
PAIRS = st.lists(st.tuples(PLACES, PLACES)).map(tuple)
STORED = st.builds(ArrayRecord, SHAPES, SHAPES, st.just(("0123456789abcdef",)), PAIRS)


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


# What names are escaped with, numbers, and letters whose case or whose spelling differs between
# names that some file systems take for one.
LETTERS = "aA.%/ 1iI\u0131\u0130\xdf\u017fKk\xe9\u212a\u0301e\ufe0f\xc5\u212b\uff05"
ALIKE = st.text(st.sampled_from("a0#%./~i")) | st.text(st.sampled_from(LETTERS), max_size=4)
ALIKE |= st.integers(0, 12)


@given(st.lists(st.lists(ALIKE, min_size=1, max_size=3).map(tuple), unique=True))
@example([(0,), ("0",)])
@example([("c",), ("c/d",)])
def test_no_file_system_takes_the_names_of_two_leaves_for_one(paths):
    # what is above a leaf is no leaf
    leaves = [path for path in paths if not {path[:n] for n in range(len(path))} & {*paths}]
    names = leaf_names([tuple(Key("dict", name) for name in path) for path in leaves])
    folded = [folded_name(name) for name in names]
    assert len(set(folded)) == len(folded), names
    assert not any(a != b and b.startswith(f"{a}/") for a in folded for b in folded), names


@pytest.mark.parametrize(("one", "other"), [
    ("W", "w"), ("\u00e9", "e\u0301"), ("\u212a", "k"), ("straße", "STRASSE"), ("a\ufe0f", "a"), ("w", "w. "),
    ("A/b", "a"),
])  # fmt: skip
def test_names_that_a_file_system_would_merge_are_both_escaped_and_others_keep_theirs(one, other):
    names = leaf_names([(Key("dict", name),) for name in (one, other, "kept")])
    assert [name.startswith("%") for name in names] == [True, True, False]
    assert [leaf_names([(Key("dict", name),)]) for name in (one, other)] == [[one], [other]]


@pytest.mark.parametrize(
    "name", ["_metadata", "UCP.json", "Manifest.OCDBT", "_Sharding", "Ucp.pack_0"]
)
def test_a_leaf_does_not_take_the_name_of_a_file_of_ours_in_other_letters(name):
    assert leaf_names([(Key("dict", name),)]) == ["%" + name.replace(".", "%2E")]
