"""Weights that transformers wrote, against the live model; and files that break a rule of the format."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.formats.safetensors import INDEX, SafetensorsFile
from jax_ucp.layout.box import Box
from jax_ucp.storage.consolidated import same_bits
from torch_cases import DATA, truth

CASES = sorted(path.name for path in DATA.glob("hf_*"))
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_equals_the_live_model_however_it_is_read(case, tmp_path):
    checkpoint, want = ucp.open(DATA / case / "ckpt"), truth(case)
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    straight = checkpoint.restore(mesh=MESH, rules=[("proj.weight$|wte", P("data", "model"))])["param"]
    converted = checkpoint.save(tmp_path / "converted")
    for label, array in want.items():
        name = label.removeprefix("param/")
        assert same_bits(checkpoint.read(label), array), label
        assert same_bits(np.asarray(straight[name]), array), label
        assert same_bits(converted.read(label), array), label
    assert all(item.reason != "not understood" for item in checkpoint.account)
    assert checkpoint.extras["config.json"]["config"]["model_type"] in case


def test_a_file_alone_and_a_folder_without_an_index_open_too(tmp_path):
    folder = DATA / "hf_gpt2" / "ckpt"
    one = ucp.open(next(folder.glob("*.safetensors")))
    assert 0 < len(one.leaves) < len(ucp.open(folder).leaves)
    shutil.copytree(folder, tmp_path / "c")
    (tmp_path / "c" / INDEX).unlink()
    assert {x.label for x in ucp.open(tmp_path / "c").leaves} == {x.label for x in ucp.open(folder).leaves}
    shutil.copy(next((tmp_path / "c").glob("*00001*")), tmp_path / "c" / "again.safetensors")
    with pytest.raises(FormatError, match="is stored twice"):
        ucp.open(tmp_path / "c")


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4, [4]), "b": entry(5, 8, [3])}, b"x" * 8, "b begins at byte 5 of the data, but 4"),
        ({"a": entry(0, 4, [4]), "b": entry(3, 8, [5])}, b"x" * 8, "b begins at byte 3"),
        ({"a": entry(0, 4, [3])}, b"x" * 4, "a of U8 .* which is not its size"),
        ({"a": entry(0, 4, [4])}, b"x" * 3, "has .* bytes, but its header describes"),
        ({"a": entry(0, 4, [4])}, b"x" * 5, "has .* bytes, but its header describes"),
        ({"a": entry(0, 4, [-4])}, b"x" * 4, r"a has shape \[-4\]"),
        ({"a": entry(0, 4, [8], "F4")}, b"x" * 4, "a has dtype F4"),
        ({"a": {"dtype": "U8"}}, b"", "a should have dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ should map strings to strings"),
        (b'{"a": 1, "a": 2}', b"", "a name occurs twice"),
        (b"[]", b"", "the header is no JSON object"),
        (b"{" * 60_000, b"", "the header is not as the format has it"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}}, b"", "holds parts of tensors"),
    ],
)
def test_a_file_that_breaks_a_rule_of_the_format_is_refused(tmp_path, header, data, message):
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=message):
        ucp.open(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100])
def test_a_file_cut_short_is_named(tmp_path, keep):
    data = next((DATA / "hf_gpt2" / "ckpt").glob("*.safetensors")).read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:keep])
    with pytest.raises(FormatError, match=r"short\.safetensors"):
        ucp.open(tmp_path / "short.safetensors")


def test_a_missing_file_and_one_of_another_checkpoint_are_named(tmp_path):
    shutil.copytree(DATA / "hf_gpt2" / "ckpt", tmp_path / "c")
    first, second = sorted((tmp_path / "c").glob("*.safetensors"))[:2]
    kept = first.read_bytes()
    shutil.copy(second, first)
    with pytest.raises(FormatError, match=r"is stored twice|not of one checkpoint"):
        ucp.open(tmp_path / "c")
    first.unlink()
    with pytest.raises(FormatError, match=f"names the file '{first.name}', which is not beside it"):
        ucp.open(tmp_path / "c")
    first.write_bytes(kept)
    assert ucp.open(tmp_path / "c").leaves


@given(st.data())
def test_a_changed_header_is_refused_or_describes_what_is_there(tmp_path_factory, data):
    whole = next((DATA / "hf_llama_bf16_tied" / "ckpt").glob("*.safetensors")).read_bytes()
    changed = bytearray(whole)
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("f") / "x.safetensors"
    path.write_bytes(bytes(changed))
    try:
        file = SafetensorsFile(path)
    except UCPError:
        return
    for key, info in file.arrays().items():
        assert file.read(key, Box.whole(info.shape)).nbytes == info.nbytes
