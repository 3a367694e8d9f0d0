"""The head of a file, its tensors, and its parts: read, or refused by name."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from gguf_writer import BLOCKS, NUMBERS, Tensor, Written, random_blocks, string, values_of
from helpers import faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, QuantizedWeights, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.formats.gguf.file import GGUFFile
from jax_ucp.layout.box import Box

RNG = np.random.default_rng(0)


def tensors(*names: str) -> list[Tensor]:
    return [Tensor.of(name, RNG.normal(size=(3, 5)).astype(np.float32)) for name in names]


def saved(folder: Path, written: Written | bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(written if isinstance(written, bytes) else written.data())
    return path


TYPES_OF_NUMBERS = st.sampled_from(sorted(NUMBERS))
SCALARS = TYPES_OF_NUMBERS.flatmap(lambda type: st.tuples(st.just(type), value_of(type)))
STRINGS = st.text(max_size=20)


def value_of(type: str) -> st.SearchStrategy[Any]:
    if type == "bool":
        return st.booleans()
    if type[0] == "f":
        return st.floats(width=int(type[1:]), allow_nan=False, allow_infinity=False)
    bits = int(type[1:])
    low = 0 if type[0] == "u" else -(1 << (bits - 1))
    return st.integers(low, low + (1 << bits) - 1)


@st.composite
def values(draw: Callable[..., Any]) -> tuple[Any, Any]:
    """A type, and a value of it: a number, a string, or a list of either."""
    if draw(st.booleans()):
        return draw(st.one_of(SCALARS, st.tuples(st.just("str"), STRINGS)))
    type = draw(st.sampled_from([*sorted(NUMBERS), "str"]))
    elements = STRINGS if type == "str" else value_of(type)
    return [type], draw(st.lists(elements, max_size=5))


@given(
    st.dictionaries(st.text(min_size=1, max_size=12), values(), max_size=6), st.sampled_from([2, 3])
)
def test_every_key_has_the_value_that_was_written(tmp_path_factory, said, version):
    said = {f"x.{key}": value for key, value in said.items()}
    path = saved(tmp_path_factory.mktemp("g"), Written(said, tensors("w"), version))
    file = GGUFFile(file_path(path))
    assert file.head.version == version
    assert file.head.values.keys() == said.keys()
    for key, (_, want) in said.items():
        got = file.head.values[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == want


@given(st.data())
def test_tensors_come_in_row_major_order_at_any_alignment(tmp_path_factory, data):
    alignment = data.draw(st.sampled_from([1, 8, 32, 64]))
    shapes = data.draw(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4))
    dtypes = st.sampled_from([np.float32, np.float16, np.int32])
    made = [RNG.normal(size=shape).astype(data.draw(dtypes)) for shape in shapes]
    arrays = {f"w{i}": array for i, array in enumerate(made)}
    stored = [Tensor.of(name, np.asarray(array)) for name, array in arrays.items()]
    said = {"general.alignment": ("u32", alignment)}
    path = saved(tmp_path_factory.mktemp("g"), Written(said, stored, alignment=alignment))
    checkpoint = ucp.open(path)
    for name, want in arrays.items():
        assert same_bits(checkpoint.read(f"param/{name}"), np.asarray(want))
    assert faults_of(checkpoint) == []


@pytest.mark.parametrize("type", BLOCKS)
def test_blocks_are_refused_as_weights_unless_they_are_asked_for(tmp_path, type):
    number, elements, _, _, _ = BLOCKS[type]
    stored = random_blocks(RNG, type, (3,), 2)
    blocks = Tensor("w", (2 * elements, 3), number, stored.tobytes())
    path = saved(tmp_path, Written({}, [blocks, *tensors("n")]))
    with pytest.raises(QuantizedWeights, match=f"param/w .ggml {type}"):
        ucp.open(path).restore()
    assert same_bits(ucp.open(path, dequantize="float32").read("param/w"), values_of(type, stored))
    parts = ucp.open(path, dequantize=False)
    assert same_bits(parts.read("stored/w"), stored)
    assert same_bits(parts.read("param/n"), ucp.open(path, dequantize="bfloat16").read("param/n"))


def test_a_type_that_is_not_dequantised_is_refused_by_its_name(tmp_path):
    path = saved(tmp_path, Written({}, [Tensor("w", (128,), 41, bytes(18)), *tensors("n")]))
    with pytest.raises(QuantizedWeights, match="Q1_0 is not dequantised here"):
        ucp.open(path, dequantize="bfloat16")
    with pytest.raises(QuantizedWeights, match="Q1_0"):
        ucp.open(path).restore()
    assert ucp.open(path, dequantize=False).read("stored/w").shape == (18,)


@pytest.mark.parametrize(
    ("rows", "scale"), [((3,), [0.3]), ((2, 3), [0.3]), ((2, 3), [0.3, 7.0]), ((2, 3), 0.3)]
)
def test_nvfp4_is_multiplied_by_the_scale_of_the_whole_or_of_each_expert(tmp_path, rows, scale):
    stored, factor = random_blocks(RNG, "NVFP4", rows, 2), np.array(scale, np.float32)
    blocks = Tensor("w.weight", (128, *rows[::-1]), 40, stored.tobytes())
    activations = Tensor.of("w.input_scale", np.float32([3]))
    path = saved(tmp_path, Written({}, [blocks, Tensor.of("w.scale", factor), activations]))
    checkpoint = ucp.open(path, dequantize="float32")
    factors = factor.reshape(-1, *[1] * len(rows)) if len(rows) == 2 else factor
    want = values_of("NVFP4", stored) * factors
    assert same_bits(checkpoint.read("param/w.weight"), want)
    box = Box((want.shape[0] - 1, *[0] * (want.ndim - 2), 70), want.shape)
    assert same_bits(checkpoint.read("param/w.weight", box), want[box.index].copy())
    assert list(checkpoint) == ["param/w.weight"]
    assert len(ucp.open(path, dequantize=False).leaves) == 3


def test_what_is_called_as_a_scale_is_no_part_of_other_blocks(tmp_path):
    stored, scale = random_blocks(RNG, "Q8_0", (3,), 2), np.ones(64, np.float32)
    blocks = Tensor("w.weight", (64, 3), 8, stored.tobytes())  # as a router of Gemma 4 has one
    path = saved(tmp_path, Written({}, [blocks, Tensor.of("w.scale", scale)]))
    checkpoint = ucp.open(path, dequantize="float32")
    assert same_bits(checkpoint.read("param/w.weight"), values_of("Q8_0", stored))
    assert same_bits(checkpoint.read("param/w.scale"), scale)


@pytest.mark.parametrize("scale", [np.ones(3), np.ones((3, 1)), np.float32([np.inf])])
def test_a_scale_of_nvfp4_that_llama_cpp_has_not_is_refused(tmp_path, scale):
    stored = random_blocks(RNG, "NVFP4", (3,), 2)
    blocks = Tensor("w.weight", (128, 3), 40, stored.tobytes())
    factor = Tensor.of("w.scale", np.asarray(scale, np.float32))
    path = saved(tmp_path, Written({}, [blocks, factor]))
    with pytest.raises((FormatError, CorruptData), match=r"w\.scale"):
        ucp.open(path, dequantize="float32").read("param/w.weight")


@pytest.mark.parametrize("type", sorted(BLOCKS))
def test_a_scale_that_is_no_finite_number_is_refused_with_its_place(tmp_path, type):
    number, elements, nbytes, halves, _ = BLOCKS[type]
    stored = random_blocks(RNG, type, (2, 3), 4)
    block = stored.reshape(2, 3, 4, nbytes)[1, 2, 3]
    if type == "IQ1_M":
        block[53], block[55] = 0xC0, 0x70  # infinity, in the upper halves of bytes
    elif halves:
        block[halves[-1] : halves[-1] + 2] = 0, 0x7C  # infinity
        block[4:16] |= 0x11  # of which no scale is a multiple by zero
    else:
        block[0] = 255
    tensor = Tensor("w", (4 * elements, 3, 2), number, stored.tobytes())
    checkpoint = ucp.open(saved(tmp_path, Written({}, [tensor])), dequantize="float32")
    with pytest.raises(CorruptData, match=r"w .*: a scale of block 3 of row \[1, 2\] should be"):
        checkpoint.read("param/w")


def test_a_string_that_is_no_utf_8_is_kept_as_bytes(tmp_path):
    said = {"a": ("str", b"\xff\x00x"), "b": (["str"], [b"\xfe", "y"])}
    checkpoint = ucp.open(saved(tmp_path, Written(said, tensors("w"))))
    assert checkpoint.extras["m.gguf"] == {"a": {"!bytes": "/wB4"}, "b": [{"!bytes": "/g=="}, "y"]}


def test_a_large_vocabulary_is_read_fast_and_saved(tmp_path):
    tokens = [f"token {i} é" for i in range(150_000)]
    said = {"tokenizer.ggml.tokens": (["str"], tokens)}
    said["tokenizer.ggml.scores"] = ["f32"], [0.5] * len(tokens)
    path = saved(tmp_path, Written(said, tensors("w")))
    start = time.process_time()
    checkpoint = ucp.open(path)
    assert time.process_time() - start < 10  # a fraction of a second; what is slow takes minutes
    assert checkpoint.extras["m.gguf"]["tokenizer.ggml.tokens"] == tokens
    again = checkpoint.save(tmp_path / "saved")
    assert again.extras == checkpoint.extras


W = Tensor.of("w", np.ones((2, 8), np.float32))
KEY = string("k")


def keyed(keys: bytes, count: int = 1) -> bytes:
    """A head with so many keys, which are these bytes."""
    return Written({}, [W], counts=(1, count)).head()[:24] + keys + bytes(200)


FAULTS: dict[str, tuple[bytes, str]] = {
    "no magic": (Written({}, [W], magic=b"GGML").data(), "begins with b'GGML'"),
    "version 1": (Written({}, [W], version=1).data(), "of version 1"),
    "version 4": (Written({}, [W], version=4).data(), "of version 4"),
    "big-endian": (Written({}, [W], version=3 << 24).data(), "it is big-endian"),
    "many keys": (Written({}, [W], counts=(1, 1 << 40)).data(), f"counts {1 << 40} keys"),
    "minus one key": (Written({}, [W], counts=(1, -1)).data(), "counts -1 keys"),
    "many tensors": (Written({}, [W], counts=(1 << 60, 0)).data(), f"counts {1 << 60} tensors"),
    "a long key": (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 20, "cut short"),
    "a key twice": (keyed(2 * (KEY + b"\0\0\0\0\1"), 2), "the key 'k' is there twice"),
    "an empty key": (Written({"": ("u8", 1)}, [W]).data(), "is called ''"),
    "a key of bytes": (Written({b"\xff": ("u8", 1)}, [W]).data(), "is called b'"),
    "a tensor twice": (Written({}, [W, W]).data(), "the tensor 'w' is there twice"),
    "a type that is none": (keyed(KEY + b"\x0d\0\0\0"), "has the type 13"),
    "an array in an array": (keyed(KEY + b"\x09\0\0\0\x09\0\0\0"), "an array of the type 9"),
    "an array of many": (keyed(KEY + b"\x09\0\0\0\x0a\0\0\0" + b"\xff" * 7), "counts [0-9]+ numbers"),
    "strings of many": (keyed(KEY + b"\x09\0\0\0\x08\0\0\0" + b"\xff" * 5), "counts [0-9]+ strings"),
    "a boolean of 2": (keyed(KEY + b"\x07\0\0\0\2"), "neither 0 nor 1"),
    "no alignment": (Written({"general.alignment": ("u32", 0)}, [W]).data(), "no power of two"),
    "an odd alignment": (Written({"general.alignment": ("u32", 24)}, [W]).data(), "no power of"),
    "a text as alignment": (Written({"general.alignment": ("str", "8")}, [W]).data(), "is '8'"),
    "a huge alignment": (Written({"general.alignment": ("u32", 1 << 31)}, [W]).data(), "cut short"),
    "five axes": (Written({}, [Tensor("w", (1,) * 5, 0, bytes(4))]).data(), "has 5 axes"),
    "a length of 0": (Written({}, [Tensor("w", (0, 2), 0, b"")]).data(), r"has the shape \[2, 0\]"),
    "a length below": (Written({}, [Tensor("w", (-4,), 0, b"")]).data(), r"has the shape \[-4\]"),
    "an array beyond all": (Written({}, [Tensor("w", (1 << 62, 4), 0, b"")]).data(), "no array is"),
    "an unknown type": (Written({}, [Tensor("w", (4,), 99, bytes(16))]).data(), "has the type 99"),
    "a removed type": (Written({}, [Tensor("w", (32,), 4, bytes(16))]).data(), "has the type 4,"),
    "half a block": (Written({}, [Tensor("w", (48, 2), 2, bytes(54))]).data(), "not whole blocks"),
    "a block of no axis": (Written({}, [Tensor("w", (), 2, bytes(18))]).data(), "not whole blocks"),
    "not aligned": (Written({}, [W, Tensor("v", (4,), 0, bytes(16), 68)]).data(), "and begins at byte"),
    "an overlap": (Written({}, [W, Tensor("v", (4,), 0, bytes(16), 0)]).data(), "and begins at byte"),
    "a gap": (Written({}, [W, Tensor("v", (4,), 0, bytes(16), 128)]).data(), "and begins at byte 128"),
    "far away": (Written({}, [Tensor("w", (4,), 0, bytes(16), 1 << 63)]).data(), "and begins at byte"),
    "bytes behind": (Written({}, [W]).data() + bytes(40), "has 40 bytes more"),
    "no tensors": (Written({"k": ("u8", 1)}).data(), "has no tensors"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    "a page": (b"<!DOCTYPE html><html><body>404</body></html>", "it is a web page"),
    "a part": (Written({"split.count": ("u16", 3)}, [W]).data(), "one of 3 parts by its split.co"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_a_rule_is_refused_by_name(tmp_path, fault):
    data, message = FAULTS[fault]
    with pytest.raises((FormatError, CorruptData), match=message) as error:
        ucp.open(saved(tmp_path, data))
    assert "m.gguf" in str(error.value)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = Written({"k": (["str"], ["a", "b"])}, [W]).data()
    for length in range(1, len(data)):
        with pytest.raises(UCPError):
            ucp.open(saved(tmp_path, data[:length]))


def test_it_is_known_by_its_first_bytes_whatever_its_name(tmp_path):
    checkpoint = ucp.open(saved(tmp_path, Written({}, tensors("w")), "sha256-6a0746a1ec1a"))
    assert checkpoint.format == "gguf"
    with pytest.raises(NotACheckpoint):
        ucp.open(saved(tmp_path, b"GG", "short"))


# Split files.


def split(folder: Path, parts: int = 3, counts: Any = None, total: int = 3) -> Path:
    """A model in parts with a tensor each; `counts` are other values of a part's keys."""
    for part in range(parts):
        said: dict[str, Any] = {"split.no": ("u16", part), "split.count": ("u16", parts)}
        said |= {"split.tensors.count": ("i32", total)} | (counts or {}).get(part, {})
        written = Written(said, tensors(f"w{part}"))
        saved(folder, written, f"m-{part + 1:05}-of-{parts:05}.gguf")
    return folder / f"m-00001-of-{parts:05}.gguf"


def test_parts_are_one_checkpoint(tmp_path):
    checkpoint = ucp.open(split(tmp_path))
    assert list(checkpoint) == ["param/w0", "param/w1", "param/w2"]
    assert {item.reason for item in checkpoint.inventory} >= {"the parameter w2", "kept as JSON"}
    assert len(checkpoint.extras) == 3


@pytest.mark.parametrize(("counts", "message"), [
    ({1: {"split.no": ("u16", 2)}},            "00002-of-00003.gguf says split.no 2 of split.count 3"),
    ({2: {"split.count": ("u16", 4)}},         "00003-of-00003.gguf says split.no 2 of split.count 4"),
    ({0: {"split.count": ("u16", 2)}},         "is one of 2 parts by its split.count, and of 3 by its"),
    ({1: {"split.tensors.count": ("i32", 4)}}, "counts 4 tensors in all parts.* have 3"),
    ({0: {"split.count": ("str", "3")}},       "is one of '3' parts"),
])  # fmt: skip
def test_parts_of_several_splits_are_refused(tmp_path, counts, message):
    with pytest.raises(FormatError, match=message):
        ucp.open(split(tmp_path, counts=counts))


def test_a_part_that_is_missing_or_not_the_first_is_named(tmp_path):
    first = split(tmp_path)
    with pytest.raises(FormatError, match=r"open the first, m-00001-of-00003\.gguf"):
        ucp.open(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(FormatError, match=r"1 are not beside it: 'm-00003-of-00003\.gguf'"):
        ucp.open(first)


def test_a_whole_file_called_as_a_part_is_refused(tmp_path):
    path = saved(tmp_path, Written({}, [W]), "m-00001-of-00002.gguf")
    with pytest.raises(FormatError, match=r"is one of 0 parts by its split\.count, and of 2"):
        ucp.open(path)


def test_one_tensor_in_two_parts_is_refused(tmp_path):
    first = split(tmp_path, 2, total=2)
    said = {"split.no": ("u16", 1), "split.count": ("u16", 2)}
    saved(tmp_path, Written(said, tensors("w0")), "m-00002-of-00002.gguf")
    with pytest.raises(FormatError, match="w0 is stored twice"):
        ucp.open(first)


def test_a_folder_with_files_says_which_to_open(tmp_path):
    split(tmp_path)
    with pytest.raises(NotACheckpoint, match=r"holds m-00001-of-00003\.gguf: open one, "):
        ucp.open(tmp_path)
    saved(tmp_path, Written({}, [W]), "a.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NotACheckpoint, match=r"holds a\.gguf, m-00001-of-00003\.gguf: open one"):
        ucp.open(tmp_path)
