"""Files of Flax: what they say is checked, and their arrays are read where they lie."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs import msgpack as decoder
from jax_ucp.codecs.msgpack import decode
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.files.ranges import FileRange, MemoryRange
from jax_ucp.layout.box import Box

T5X = DATA / "jax" / "orbax05-t5x" / "ckpt" / "checkpoint_1000"
AGGREGATE = DATA / "jax" / "orbax05-aggregate_without_metadata" / "ckpt"
DTYPES = ("bfloat16", "float8_e4m3fn", "float32", "int8", "uint32", "bool", "complex64", "int4")


def written(tree: Any, path: Path) -> Path:
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    return path


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def array(shape: Any, dtype: Any, data: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, packed((shape, dtype, data)))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
numbers |= st.text(max_size=40) | st.complex_numbers()


@st.composite
def arrays(draw) -> np.ndarray:
    shape, name = draw(shapes), draw(st.sampled_from(DTYPES))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7
    return np.asarray(values, getattr(ml_dtypes, name, name))


def inner(x):
    return st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=300), x)


trees = st.recursive(numbers | arrays(), inner, max_leaves=12)


def shown(value: Any, file: MemoryRange) -> Any:
    """A decoded value with the bits of arrays in their place."""
    match value:
        case decoder.PackedArray(start, info):
            return info.dtype.name, info.shape, file.read(start, start + info.nbytes)
        case dict():
            return {key: shown(item, file) for key, item in value.items()}
        case list():
            return [shown(item, file) for item in value]
        case _:
            return repr(value)


def meant(value: Any) -> Any:
    match value:
        case np.ndarray():
            return value.dtype.name, value.shape, value.tobytes()
        case dict():
            return {key: meant(item) for key, item in value.items()}
        case list():
            return [meant(item) for item in value]
        case _:
            return repr(value)


@given(trees)
@settings(max_examples=300, deadline=None)
def test_what_flax_packs_is_what_is_decoded(tree):
    data = flax.serialization.msgpack_serialize({"tree": tree})
    file = MemoryRange(data)
    assert shown(decode(file, "f"), file) == {"tree": meant(tree)}


@given(trees, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_changed_or_missing_are_read_or_refused(tree, rng):
    data = bytearray(flax.serialization.msgpack_serialize({"tree": tree}))
    for _ in range(rng.choice([0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    cut = bytes(data[: rng.choice([len(data), rng.randrange(len(data) + 1)])])
    try:
        decode(MemoryRange(cut), "f")
    except FormatError:
        return


HOSTILE = {
    "deep lists": b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
    "deep extensions": b"\x81\xa1a"
    + b"".join(b"\xc9" + (n * 6).to_bytes(4, "big") + b"\x04" for n in range(400, 0, -1)),
    "deep arrays": b"\x81\xa1a"
    + b"".join(b"\xc9" + (n * 7 - 6).to_bytes(4, "big") + b"\x01\x93" for n in range(2000, 0, -1)),
    "a list longer than the file": b"\x81\xa1a\xdd\xff\xff\xff\xff\xc0",
    "a text longer than the file": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "an array that is not a list": packed({"a": msgpack.ExtType(1, b"\xc0")}),
    "more bytes than its shape": packed({"a": array([2], "float32", bytes(9))}),
    "fewer bytes than its shape": packed({"a": array([2], "float32", bytes(7))}),
    "a negative length": packed({"a": array([-2, -2], "float32", bytes(16))}),
    "a length that is not a number": packed({"a": array([True], "int8", b"a")}),
    "too many axes": packed({"a": array([1] * 40, "int8", b"a")}),
    "a shape beyond any array": packed({"a": array([2**62, 0], "int8", b"")}),
    "an object": packed({"a": array([1], "object", bytes(8))}),
    "a dtype of fields": packed({"a": array([1], "float32, int8", bytes(5))}),
    "another extension": packed({"a": msgpack.ExtType(7, b"\xc0")}),
    "an extension with more in it": packed({"a": msgpack.ExtType(2, packed((1.0, 2.0)) + b"\xc0")}),
    "a complex number of texts": packed({"a": msgpack.ExtType(2, packed(("1", "2")))}),
    "a key that is not text": packed({"a": {1: 2}}),
    "a key that is there twice": b"\x82\xa1a\x01\xa1a\x02",
    "two values": packed({"a": 1}) + packed({"b": 1}),
    "a code of none": b"\x81\xa1a\xc1",
    "chunks of other dtypes": packed({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 2},
        "chunks": {"0": array([1], "int8", b"a"), "1": array([1], "uint8", b"a")}}}),
    "chunks of another size": packed({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 3},
        "chunks": {"0": array([1], "int8", b"a")}}}),
    "chunks that are not numbered": packed({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 1},
        "chunks": {"1": array([1], "int8", b"a")}}}),
    "chunks whose mark is another": packed({"a": {"__msgpack_chunkee_array__": True, "shape": {},
        "chunks": {}}}),
    "chunks with something else": packed({"a": {"__msgpack_chunked_array__": True, "shape": {}, "chunks": {},
        "x": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_flax_does_not_write_is_refused_by_the_name_of_the_file(what, tmp_path):
    (tmp_path / "checkpoint_1").write_bytes(HOSTILE[what])
    with pytest.raises(FormatError, match="checkpoint_1 is not a msgpack file as Flax writes"):
        ucp.open(tmp_path / "checkpoint_1")


def test_values_and_texts_have_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_VALUES", 100)
    monkeypatch.setattr(decoder, "MAX_TEXT_BYTES", 50)
    for tree, words in ({"a": [None] * 100}, "than 100 values"), ({"a": "x" * 60}, "than 50 bytes"):
        with pytest.raises(FormatError, match=words):
            ucp.open(written(tree, tmp_path / "f.msgpack"))


@pytest.mark.parametrize("unit", [b"\x80", b"\x90", b"\xc0", b"\xa0", b"\x01"])
def test_values_that_take_a_byte_each_are_as_many_as_bytes_account_for(tmp_path, unit):
    def file(count: int) -> Path:
        body = b"\xdd" + count.to_bytes(4, "big") + unit * count
        (tmp_path / "f.msgpack").write_bytes(b"\x81\xa6params" + body)
        return tmp_path / "f.msgpack"

    assert len(ucp.open(file(10_000)).leaves) == 10_000
    with pytest.raises(FormatError, match=r"more than \d+ values in \d+ bytes"):
        ucp.open(file(80_000))


def test_a_file_may_have_any_number_of_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(decoder, "FREE_VALUES", 10)
    tree = {f"w{i}": np.ones((2, 3), np.float32) for i in range(1000)}
    assert len(ucp.open(written(tree, tmp_path / "f.msgpack")).leaves) == 1000


def test_opening_reads_little_and_a_box_its_own_bytes(tmp_path, monkeypatch):
    tree = {str(i): np.random.default_rng(i).random((512, 256)) for i in range(8)}
    path = written(tree, tmp_path / "f.msgpack")
    read = [0]
    before = FileRange.read_into

    def counted(self, reads):
        read[0] += sum(out.nbytes for _, out in reads)
        before(self, reads)

    monkeypatch.setattr(FileRange, "read_into", counted)
    checkpoint = ucp.open(path)
    assert read[0] < 20_000
    read[0] = 0
    box = Box((100, 0), (102, 256))
    assert same_bits(checkpoint.read("3", box), tree["3"][100:102])
    assert read[0] == 2 * 256 * 8


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_box_of_an_array_in_chunks_is_that_of_the_array(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    want = np.random.default_rng(0).random(shape, np.float32)
    path = tmp_path_factory.mktemp("c") / "f.msgpack"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flax.serialization, "MAX_CHUNK_SIZE", data.draw(st.integers(4, 40)))
        written({"a": want}, path)
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stops = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True))
    box = Box(starts, stops)
    checkpoint = ucp.open(path)
    assert same_bits(checkpoint.read("a", box), want[box.index])
    out = np.empty(box.shape[::-1], np.float32).T  # of other strides
    checkpoint._contents.arrays.read_into("a", [box], [out])
    assert same_bits(out, want[box.index])


class State(NamedTuple):
    params: dict
    opt_state: Any


def test_a_train_state_comes_back_onto_a_mesh_from_what_flax_saved(tmp_path):
    params = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = State(params, optimizer.init(params))
    (tmp_path / "checkpoint_7").write_bytes(flax.serialization.to_bytes(state))
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def like(x, own):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

    target = jax.tree.map(lambda x: like(x, spec if x.shape == (8, 4) else whole), state)
    got = ucp.open(tmp_path).restore(target)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert all(map(same_bits, jax.tree.leaves(got), jax.tree.leaves(state)))
    assert got.params["w"].sharding == spec


def test_bytes_are_an_extra_and_everything_is_accounted_for(tmp_path):
    checkpoint = ucp.open(written({"a": {"raw": b"\x00\xff"}, "b": 1}, tmp_path / "f.msgpack"))
    assert checkpoint.extras == {"f.msgpack": {"a/raw": {"!bytes": "AP8="}}}
    statuses = [(item.where, item.status) for item in checkpoint.inventory]
    assert statuses == [("b", "mapped"), ("a/raw", "extra")]


def test_a_file_that_is_cut_short_after_it_was_opened_is_corrupt(tmp_path):
    path = written({"a": np.ones(1000)}, tmp_path / "f.msgpack")
    checkpoint = ucp.open(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptData):
        checkpoint.read("a")


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"PK\3\4", b"model_checkpoint_path: x", b"\x81\x01\x02", b"\xdf\0\0\0\0"]
)
def test_what_does_not_begin_as_a_tree_of_names_is_not_one(data, tmp_path):
    (tmp_path / "checkpoint_1").write_bytes(data)
    with pytest.raises(NotACheckpoint):
        ucp.open(tmp_path / "checkpoint_1")


# Arrays that lie elsewhere


def changed(folder: Path, change: Any) -> None:
    """The msgpack file of a folder with another tree."""
    file = folder / "checkpoint"
    tree = msgpack.unpackb(file.read_bytes(), ext_hook=msgpack.ExtType)
    change(tree)
    file.write_bytes(packed(tree))


def _spec(tree: dict) -> dict:
    return tree["optimizer"]["target"]["layers_0"]["kernel"]


T5X_FAULTS = {
    "another shape": (lambda tree: _spec(tree)["metadata"].update(shape=[4, 4]), "they are of two saves"),
    "another dtype": (lambda tree: _spec(tree).update(dtype="bfloat16"), "they are of two saves"),
    "a path that leads out": (
        lambda tree: _spec(tree)["kvstore"].update(path="../x"),
        "not a name of a file",
    ),
    "an absolute path": (lambda tree: _spec(tree)["kvstore"].update(path="/etc"), "not a name of a file"),
    "another driver": (
        lambda tree: _spec(tree).update(driver="n5"),
        "checkpoint has a TensorStore spec that is of 'n5'",
    ),
    "no path": (
        lambda tree: _spec(tree)["kvstore"].pop("path"),
        "checkpoint has a TensorStore spec that is of 'zarr' at None",
    ),
    "no shape": (lambda tree: _spec(tree)["metadata"].pop("shape"), "is not as T5X writes it"),
    "a version that T5X no longer reads": (lambda tree: tree.update(version=1), "is of version 1"),
    "an array that is not there": (lambda tree: _spec(tree)["kvstore"].update(path="lost"), "lost"),
}  # fmt: skip


@pytest.mark.parametrize("what", T5X_FAULTS)
def test_arrays_of_t5x_are_what_its_file_says_of_them(what, tmp_path):
    change, words = T5X_FAULTS[what]
    folder = Path(shutil.copytree(T5X, tmp_path / "checkpoint_1000"))
    changed(folder, change)
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


def test_the_file_of_t5x_opens_as_its_folder():
    folder, file = ucp.open(T5X), ucp.open(T5X / "checkpoint")
    assert folder.format == file.format == "t5x"
    assert list(folder) == list(file)
    assert folder.where("target/layers_0/kernel")[0].file == "target.layers_0.kernel"


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../x", "lost"])
def test_placeholders_of_orbax_do_not_lead_out(name, tmp_path):
    folder = Path(shutil.copytree(AGGREGATE, tmp_path / "c"))
    for database in ("manifest.ocdbt", "d", "ocdbt.process_0"):
        path = folder / database
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    changed(folder, lambda tree: tree.update(step=f"PLACEHOLDER://{name}"))
    with pytest.raises(UCPError):
        ucp.open(folder)


def test_arrays_of_several_processes_lie_in_a_folder_beside_flaxs_file(tmp_path):
    """As `flax.training.checkpoints.save_checkpoint_multiprocess` leaves them without Orbax."""
    import tensorstore as ts

    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/checkpoint_3_gda/params/w/"}
    about = {"dtype": "<f4", "shape": [3, 4], "chunks": [3, 2], "compressor": {"id": "gzip"}}
    ts.open({**spec, "metadata": about}, create=True).result().write(want).result()
    tree = {"params": {"w": "//GDAPlaceholder:params/w", "b": np.ones(2)}, "text": "t"}
    written(tree, tmp_path / "checkpoint_3")
    for path in (tmp_path, tmp_path / "checkpoint_3"):
        checkpoint = ucp.open(path)
        assert same_bits(checkpoint.read("params/w"), want)
        assert same_bits(checkpoint.read("params/b"), np.ones(2))
    shutil.rmtree(tmp_path / "checkpoint_3_gda")
    with pytest.raises(FormatError, match="checkpoint_3_gda, which is missing"):
        ucp.open(tmp_path)


def test_file_paths_are_recognised_by_content_alone(tmp_path):
    path = written({"w": np.ones(2)}, tmp_path / "no-suffix")
    assert ucp.open(path).format == "flax"
    assert file_path(path).suffix == ""
