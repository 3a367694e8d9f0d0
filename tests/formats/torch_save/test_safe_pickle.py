"""The pickle interpreter agrees with Python's on data, and refuses the rest at once."""

import argparse
import collections
import contextlib
import io
import math
import pathlib
import pickle
import struct
import tracemalloc
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.pickle_names import NAMES
from jax_ucp.codecs.unpickle import MAX_DEPTH, Name, Opaque, Record, label, walk
from jax_ucp.errors import FormatError, UnsafePickle


def load(data: bytes) -> Any:
    return safe_pickle.load(data, NAMES)


PROTOCOLS = st.integers(2, 5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
SCALARS |= st.text() | st.binary() | st.complex_numbers(allow_nan=False)
DATA = st.recursive(
    SCALARS
    | st.frozensets(SCALARS, max_size=3)
    | st.sets(SCALARS, max_size=3)
    | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS | st.tuples(SCALARS, SCALARS), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(DATA, PROTOCOLS)
def test_plain_data_comes_back_as_python_pickled_it(data, protocol):
    loaded = load(pickle.dumps(data, protocol))
    assert loaded == data
    assert repr(type(loaded)) == repr(type(data))


@given(
    st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"\x80\x02" + tail + b".")
)
def test_random_bytes_are_refused_or_read_but_raise_nothing_else(data):
    with contextlib.suppress(FormatError):
        load(data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_subclasses_of_dict_become_dicts(protocol):
    ordered = collections.OrderedDict(b=1, a=2)
    vars(ordered)["_metadata"] = {"": {"version": 1}}  # as torch does with a state_dict
    counter, default = collections.Counter("aab"), collections.defaultdict(list, x=[1])
    loaded = load(pickle.dumps([ordered, counter, default], protocol))
    assert loaded == [{"b": 1, "a": 2}, {"a": 2, "b": 1}, {"x": [1]}]
    assert [type(one) for one in loaded] == [dict, dict, dict]
    assert list(loaded[0]) == ["b", "a"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [
    np.float64(0.25),
    np.int32(-7),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 3), np.float16),
    np.array(5, np.int8),
], ids=repr)  # fmt: skip
def test_numpy_numbers_and_arrays_keep_dtype_shape_and_bytes(value, protocol):
    # numpy pickles contiguous arrays at protocol 5 out of band, which torch.save never asks for.
    state = pickle.dumps(value, 4 if isinstance(value, np.ndarray) else protocol)
    loaded = load(state)
    assert type(loaded) is type(value)
    assert loaded.dtype == value.dtype
    np.testing.assert_array_equal(loaded, value, strict=True)


def test_the_array_of_a_random_state_is_the_same_object_wherever_it_is_held():
    array = np.arange(3)
    loaded = load(pickle.dumps([array, array], 2))
    assert loaded[0] is loaded[1]


@pytest.mark.parametrize(
    "array", [np.array(["a", "bcd"]), np.array([b"a", b"bcd"]), np.array("é")], ids=repr
)
def test_arrays_of_text_are_text(array):
    loaded = load(pickle.dumps([array, array], 2))
    assert loaded[0] is loaded[1]
    np.testing.assert_array_equal(loaded[0], array, strict=True)


@pytest.mark.parametrize("array", [
    np.array([None, {"a": 1}, 2.5], dtype=object),
    np.arange(3, dtype=">i4"),
    np.array(["2026-01-02"], "M8[s]"),
    np.zeros(2, [("a", "f4")]),
], ids=["object", "big-endian", "time", "fields"])  # fmt: skip
def test_an_array_of_anything_but_numbers_and_text_stays_closed_wherever_it_is_held(array):
    first, again, (inner,), number = load(pickle.dumps([array, array, (array,), 7], 2))
    assert isinstance(first, Opaque)
    assert first is again
    assert first is inner
    assert first.type == "numpy.ndarray"
    assert number == 7
    _, shape, dtype, _, data = first.state
    assert (shape, dtype.type) == (array.shape, "numpy.dtype")
    assert data == (array.tolist() if array.dtype.hasobject else array.tobytes())


def test_an_array_that_claims_more_elements_than_bytes_is_refused():
    honest = pickle.dumps(np.arange(3, dtype=np.uint8), 2)
    assert honest.count(b"K\x03\x85") == 1
    with pytest.raises(FormatError, match="numpy array"):
        load(honest.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_instance_of_a_known_class_becomes_a_record_of_its_fields(protocol):
    args = argparse.Namespace(lr=0.5, layers=[1, 2])
    record = load(pickle.dumps(args, protocol))
    assert isinstance(record, Record)
    assert record.type == "argparse.Namespace"
    assert record.fields == {"lr": 0.5, "layers": [1, 2]}
    assert load(pickle.dumps(pathlib.PosixPath("/a/b"), protocol)) == "/a/b"
    space = load(pickle.dumps(types.SimpleNamespace(a=1), protocol))
    assert space.fields == {"a": 1}
    held = load(pickle.dumps(io.BytesIO(b"abc"), protocol))
    assert held.state == (b"abc", 0, None)


def test_slots_are_fields_too():
    assert Record("T", (), ({"a": 1}, {"b": 2})).fields == {"a": 1, "b": 2}
    assert Record("T", (), (None, {"b": 2})).fields == {"b": 2}


def test_an_enum_is_a_record_by_value_and_by_name():
    """Python 3.11.0 to 3.11.3 pickle an enum as getattr(class, name), others as class(value)."""
    by_value = load(b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R.")
    by_name = b"cmegatron.core.enums\nModelType\nX\x01\x00\x00\x00A\x86R."
    by_name = load(b"\x80\x02c__builtin__\ngetattr\n" + by_name)
    assert (by_value.type, by_value.args) == ("megatron.core.enums.ModelType", (1,))
    assert (by_name.type, by_name.args) == ("megatron.core.enums.ModelType", ("A",))


def test_a_class_that_is_only_mentioned_is_its_name():
    loaded = load(b"\x80\x02cargparse\nNamespace\n.")
    assert isinstance(loaded, Name)
    assert str(loaded) == "argparse.Namespace"


def test_walk_leads_by_dict_keys_and_positions():
    tree = load(pickle.dumps({"a": [1, (2,)], (0, "b"): {3}}, 2))
    found = [
        ("/".join(map(label, keys)), node) for keys, node in walk(tree) if isinstance(node, int)
    ]
    assert found == [("a/0", 1), ("a/1/0", 2), ("(0, b)/0", 3)]


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


RUN = text("touch /tmp/jax_ucp_was_here")
NUMBERS = [b"J" + struct.pack("<i", i) for i in range(10_000)]
# Integers that differ by multiples of what Python takes hashes modulo.
ALIKE = [b"\x8a\x10" + (2**70 + i * (2**61 - 1)).to_bytes(16, "little") for i in range(20)]


HOSTILE = {
    "a call of os.system": (b"cos\nsystem\n" + RUN + b"\x85R.", "'os.system'"),
    "a call of builtins.eval": (b"c__builtin__\neval\n" + RUN + b"\x85R.", "'__builtin__.eval'"),
    "the same by STACK_GLOBAL": (text("os") + text("system") + b"\x93" + RUN + b"\x85R.", "'os.system'"),
    "a dotted name under a known module": (
        text("argparse") + text("Namespace.__init__.__globals__") + b"\x93.",
        "'argparse.Namespace.__init__.__globals__'",
    ),
    "a name split elsewhere than at its last dot": (
        text("megatron") + text("core.enums.ModelType") + b"\x93.",
        "asks for",
    ),
    "a name with an invalid escape": (b"cos\\q\nsystem\n)R.", r"'os\\\\q\.system'"),
    "a name that is not text": (b"K\x01K\x02\x93.", "asks for"),
    "getattr on anything but an enum": (
        b"c__builtin__\ngetattr\ncnumpy\nndarray\n" + text("dump") + b"\x86R.",
        "getattr with arguments it does not take",
    ),
    "a codec other than latin1": (b"c_codecs\nencode\n" + text("x") + text("rot13") + b"\x86R.",
        "_codecs.encode with arguments it does not take"),
    "INST": (b"(ios\nsystem\n.", "opcode INST"),
    "OBJ": (b"(cargparse\nNamespace\no.", "opcode OBJ"),
    "NEWOBJ_EX": (b"cargparse\nNamespace\n)}\x92.", "opcode NEWOBJ_EX"),
    "NEWOBJ on a function": (b"c_codecs\nencode\n)\x81.", "_codecs.encode without its constructor"),
    "REDUCE on data": (b"K\x01)R.", "calls an int"),
    "REDUCE without a tuple": (b"cargparse\nNamespace\n]R.", "calls 'argparse.Namespace'"),
    "REDUCE on a mentioned class": (b"cnumpy\nndarray\n)R.", "calls 'numpy.ndarray'"),
    "BUILD on a dict": (b"}}b.", "gives a state to a dict"),
    "BUILD on a constructor": (b"cargparse\nNamespace\n}b.", "gives a state to the name argparse.Namespace"),
    "BUILD twice": (b"cargparse\nNamespace\n)\x81}b}b.", "gives a state to a Record"),
    "EXT1": (b"\x82\x01.", "opcode EXT1"),
    "EXT4": (b"\x84\x01\x00\x00\x00.", "opcode EXT4"),
    "a textual persistent id": (b"P1\n.", "opcode PERSID"),
    "a persistent id where none can be": (b"K\x01Q.", "persistent"),
    "an out-of-band buffer": (b"\x97.", "opcode NEXT_BUFFER"),
    "SETITEM on a record": (b"cargparse\nNamespace\n)\x81K\x01K\x02s.", "fills a Record"),
    "APPEND on an array": (
        b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87RK\x01a.",
        "fills a ndarray",
    ),
    "a list as a dict key": (b"}]K\x01s.", "a list inside a dict key"),
    "a dict key that hashes 2**60 parts": (b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "64 or more parts"),
    "a set element that hashes 2**60 parts": (b"\x8f()" + b"q\x00h\x00\x86" * 60 + b"\x90.",
        "64 or more parts"),
    "a frozenset of lists": (b"(]\x91.", "a list inside a dict key or set"),
    "a frozenset that hashes 2**60 parts": (b"()" + b"q\x00h\x00\x86" * 60 + b"\x91.", "64 or more parts"),
    "a numpy scalar of two": (
        b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n"
        + text("f4")
        + b"\x89\x88\x87RC\x08abcdefgh\x86R.",
        "scalar with arguments it does not take",
    ),
    "a list that contains itself": (b"]q\x00h\x00a.", "contains itself"),
    "a tuple that contains itself": (b"]q\x00h\x00\x85a.", "contains itself"),
    "a record that contains itself": (b"cargparse\nNamespace\n)\x81q\x00}" + text("me") + b"h\x00sb.",
        "contains itself"),
    "lists nested 200,000 deep": (b"]" * 200_000 + b"a" * 199_999 + b".", "nested"),
    "tuples nested 200,000 deep": (b")" + b"\x85" * 200_000 + b".", "nested"),
    "tuples that share their way to 2**60 nodes": (b"]" + b"q\x00h\x00\x86" * 60 + b".",
        "counting shared ones wherever"),
    "a module of 2**60 parts": (b")" + b"q\x00h\x00\x86" * 60 + text("n") + b"\x93.",
        "asks for a str of a tuple"),
    "a module that is a list 3,000 deep": (b"]" * 3000 + b"a" * 2999 + text("n") + b"\x93.",
        "asks for a str of a list"),
    "a name that is a number": (text("m") + b"K\x01\x93.", "asks for an int of a str"),
    "a text of a megabyte that is mentioned 100,000 times": (
        b"](" + text("A" * (1 << 20)) + b"q\x01" + b"h\x01" * 100_000 + b"e.",
        "counting shared ones wherever",
    ),
    "a key of a megabyte that 20,000 dicts have": (
        b"](" + text("A" * (1 << 20)) + b"q\x01" + b"}h\x01Ns" * 20_000 + b"e.",
        "counting shared ones wherever",
    ),
    "an integer of 8,000 bits that is mentioned 100,000 times": (
        b"](\x8b"
        + struct.pack("<i", 1000)
        + b"\x01" * 1000
        + b"q\x01"
        + b"h\x01" * 200_000
        + b"e.",
        "counting shared ones wherever",
    ),
    "20 keys of a dict that have one hash": (b"}(" + b"N".join(ALIKE) + b"N" + b"u.", "same hash"),
    "20 elements of a set that have one hash": (b"\x8f(" + b"".join(ALIKE) + b"\x90.", "same hash"),
    "a set called on 20 elements that have one hash": (b"cbuiltins\nset\n](" + b"".join(ALIKE) + b"e\x85R.",
        "same hash"),
    "a frozenset of tuples that have one hash": (b"(" + b"\x85".join(ALIKE) + b"\x85" + b"\x91.",
        "same hash"),
    "a flood of marks": (b"(" * 1_000_000 + b".", "open marks"),
    "an integer of a megabyte": (b"\x8b\x40\x42\x0f\x00" + b"\x01" * 1_000_000 + b".", "integer of"),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_by_what_it_does(case):
    body, why = HOSTILE[case]
    with pytest.raises(UnsafePickle, match=why):
        load(b"\x80\x04" + body)
    assert not pathlib.Path("/tmp/jax_ucp_was_here").exists()


BROKEN = {
    "nothing": (b"", "damaged"),
    "no STOP": (b"\x80\x02}", "damaged"),
    "bytes after STOP": (b"\x80\x02}.}", "follow the end"),
    "an empty stack": (b"\x80\x02.", "unfinished"),
    "two objects": (b"\x80\x02}}.", "unfinished"),
    "an open mark": (b"\x80\x02(K\x01.", "unfinished"),
    "an append to nothing": (b"\x80\x02K\x01a.", "off its stack"),
    "a group that reaches below its mark": (b"\x80\x02]K\x01(a.", "off its stack"),
    "a group without a mark": (b"\x80\x02]e.", "never began"),
    "a key without a value": (b"\x80\x02}(K\x01u.", "without a value"),
    "a memo never put": (b"\x80\x02h\x05.", "memo 5"),
    "a string longer than the input": (b"\x80\x02X\xff\xff\xff\x7fab.", "damaged"),
    "bytes longer than the input": (b"\x80\x05\x8e" + b"\xff" * 8 + b"ab.", "damaged"),
    "protocol 9": (b"\x80\x09}.", "protocol 9"),
    "a name without an end": (b"\x80\x02cos\nsystem.", "damaged"),
    "a long of negative length": (b"\x80\x02\x8b\xff\xff\xff\xff.", "damaged"),
    "an unknown opcode": (b"\x80\x02\xff.", r"opcode b'\\xff'"),
    "text that is not utf-8": (b"\x80\x02X\x01\x00\x00\x00\xff.", "damaged"),
    "bytes that are not latin1": (
        b"\x80\x02c_codecs\nencode\n" + text("€") + text("latin1") + b"\x86R.",
        "not bytes",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pickle_is_refused_with_what_is_wrong(case):
    body, why = BROKEN[case]
    with pytest.raises(FormatError, match=why):
        load(body)


def test_a_memo_index_of_four_billion_costs_no_memory():
    bomb = b"\x80\x02K\x01r\xff\xff\xff\xff0."
    harmless = b"\x80\x02]r\xff\xff\xff\xff."
    tracemalloc.start()
    try:
        assert load(harmless) == []
        with pytest.raises(UnsafePickle, match="opcode POP"):
            load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


SHARED = {
    "Counter":   (b"ccollections\nCounter\n", b"}(" + b"".join(number + b"N" for number in NUMBERS) + b"u"),
    "set":       (b"cbuiltins\nset\n", b"](" + b"".join(NUMBERS) + b"e"),
    "bytearray": (b"cbuiltins\nbytearray\n", b"B" + struct.pack("<I", 50_000) + bytes(50_000)),
    "path":      (b"cpathlib\nPosixPath\n", text("a/" * 25_000)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
def test_what_a_call_copies_is_paid_for_by_bytes_however_often_it_is_called(kind):
    constructor, argument = SHARED[kind]
    begin = b"\x80\x04(" + constructor + b"q\x01" + argument + b"\x85q\x02"
    load(begin + b"h\x01h\x02R" * 2 + b"t.")
    tracemalloc.start()
    try:
        with pytest.raises(UnsafePickle, match="too much memory for its first"):
            load(begin + b"h\x01h\x02R" * 10_000 + b"t.")
        assert tracemalloc.get_traced_memory()[1] < 2 * safe_pickle.FREE_BYTES
    finally:
        tracemalloc.stop()


def test_an_object_may_be_put_into_the_memo_again_and_again():
    """Each index of it leads to what takes its place when it is given a state."""
    data = b"\x80\x04cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87R" + b"\x94" * 200_000
    state = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    made = load(data + state + b"j\x07\0\0\0\x86.")
    assert made[0] is made[1]


def test_nesting_up_to_the_limit_is_read():
    def nested(depth: int) -> object:
        data: object = 1
        for _ in range(depth):
            data = [data]
        return data

    assert load(pickle.dumps(nested(MAX_DEPTH), 2)) == nested(MAX_DEPTH)
    with pytest.raises(UnsafePickle, match="nested"):
        load(pickle.dumps(nested(MAX_DEPTH + 1), 2))


def test_memory_is_bounded_by_what_the_file_holds(monkeypatch):
    monkeypatch.setattr(safe_pickle, "FREE_BYTES", 1000)
    assert load(b"\x80\x02]" + b"Na" * 100 + b".") == [None] * 100

    def sets(count: int) -> bytes:
        return b"\x80\x04](" + b"\x8f" * count + b"e."

    assert load(sets(9)) == [set()] * 9
    with pytest.raises(UnsafePickle, match=r"too much memory for its first \d+ bytes"):
        load(sets(90))
    with pytest.raises(UnsafePickle, match="too much memory"):
        safe_pickle.load(sets(9), NAMES, stored_bytes=1)


def test_the_nodes_of_a_walk_are_bounded_by_what_the_file_holds(monkeypatch):
    monkeypatch.setattr(safe_pickle, "FREE_NODES", 20)
    twice = b"\x80\x02]q\x00(NNNNNNe" + b"h\x00\x86" * 2 + b"."
    assert len(list(walk(load(twice)))) == 23
    with pytest.raises(UnsafePickle, match="counting shared ones wherever"):
        load(twice.replace(b"h\x00\x86", b"h\x00\x86" * 2))
    with pytest.raises(UnsafePickle, match="counting shared ones wherever"):
        safe_pickle.load(b"\x80\x02](" + b"]" * 21 + b"e.", NAMES, stored_bytes=1)


def test_sharing_an_object_costs_no_copy():
    shared = ["x" * 1000]
    loaded = load(pickle.dumps([shared] * 10, 2))
    assert all(one is loaded[0] for one in loaded)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_bytes_and_bytearrays_keep_their_types(protocol):
    loaded = load(pickle.dumps([b"a\xff", bytearray(b"b\xff"), b"", bytearray()], protocol))
    assert [type(one) for one in loaded] == [bytes, bytearray, bytes, bytearray]
    assert loaded == [b"a\xff", b"b\xff", b"", b""]


def test_nan_and_infinities_are_kept():
    loaded = load(pickle.dumps([math.nan, math.inf, -math.inf, -0.0], 2))
    assert repr(loaded) == "[nan, inf, -inf, -0.0]"
