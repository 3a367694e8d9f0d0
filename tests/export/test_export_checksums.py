"""The CRC-32s beside an export: of every file, compared by `verify`, and of no harm as input."""

import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case
from commands import run, run_json
from helpers import flip_bit, memory, tree_of_files
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.export.files import File, Section, complete_files, create
from jax_ucp.formats.exporting import EXPORT_FORMATS

NAME = "ucp.checksums.sfv"
SOURCES = {
    "safetensors": "torch/hf_llama_bf16_tied",
    "dcp": "deepspeed/z1_fp16_dp2",
    "deepspeed": "deepspeed/z1_fp16_dp2",
    "megatron": "megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16",
}


def lines_of(folder: Path) -> dict[str, str]:
    lines = (folder / NAME).read_text().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith(";"))


def faults_of(folder: Path) -> list[str]:
    return [fault for _, fault in ucp.open(folder).verify() if fault]


@pytest.fixture(scope="module", params=EXPORT_FORMATS)
def exported(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "out"
    options = {"max_shard_bytes": 10_000} if request.param == "safetensors" else {}
    Case(SOURCES[request.param]).open().export(folder, request.param, **options)
    return folder


def test_every_file_of_an_export_is_listed_with_the_crc_of_its_bytes(exported):
    files = {name: data for name, data in tree_of_files(exported).items() if name != NAME}
    files = {name: f"{zlib.crc32(data):08x}" for name, data in files.items()}
    assert len(files) > 1
    assert lines_of(exported) == files
    assert faults_of(exported) == []
    assert run_json("verify", exported)["checks"] >= len(files)


def test_a_byte_that_changed_in_any_file_is_found_by_verify_or_before(exported, tmp_path):
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    for name in lines_of(exported):
        flip_bit(copy / name, (copy / name).stat().st_size // 2)
        try:
            found = faults_of(copy)
        except UCPError:
            found = [f"{name} has the hash"]  # what no reader opens needs no checksum
        assert any(f"{name} has the hash" in fault for fault in found), (name, found)
        shutil.copy(exported / name, copy / name)
    assert faults_of(copy) == []


def test_a_file_that_is_gone_and_one_that_was_put_back_are_told_apart(tmp_path):
    folder = tmp_path / "out"
    Case(SOURCES["safetensors"]).open().export(folder, "safetensors")
    before = (folder / "generation_config.json").read_bytes()
    (folder / "generation_config.json").unlink()
    (fault,) = faults_of(folder)
    assert fault == f"{folder}/generation_config.json is missing, which {NAME} names"
    assert fault in run("verify", folder, code=1)
    (folder / "generation_config.json").write_bytes(before)
    assert faults_of(folder) == []


def test_bytes_that_no_section_of_a_file_has_are_summed_as_zeros(tmp_path):
    file = File("f", 12, [Section(literals=[(6, b"cd"), (1, b"ab")])])
    create(tmp_path / "f", file.size)
    crcs = complete_files(tmp_path, [file], [], {})
    assert (tmp_path / "f").read_bytes() == b"\0ab\0\0\0cd\0\0\0\0"
    assert crcs == {"f": zlib.crc32((tmp_path / "f").read_bytes())}


@pytest.fixture
def weights(tmp_path) -> Path:
    memory({"param": {"w": np.arange(4.0)}}).export(tmp_path / "out", "safetensors")
    return tmp_path / "out"


def test_upper_case_comments_and_line_ends_of_other_tools_are_read(weights):
    ((name, crc),) = lines_of(weights).items()
    (weights / NAME).write_bytes(f"; rhash\r\n\r\n{name} {crc.upper()}\r\n".encode())
    assert faults_of(weights) == []
    (weights / NAME).write_bytes(f"{name} 00000000".encode())
    assert len(faults_of(weights)) == 1


@pytest.mark.parametrize(
    "line",
    [b"model.safetensors", b"model.safetensors 123", b"00000000", b"\xff\xfe\x00", b"a 0000000g",
     b"../secret 00000000", b"/etc/passwd 00000000", b"a//b 00000000",
     b"m 00000000\nm 00000000"],
)  # fmt: skip
def test_lines_that_are_none_or_lead_elsewhere_are_refused(weights, line):
    (weights.parent / "secret").write_bytes(b"secret")
    (weights / NAME).write_bytes(line)
    with pytest.raises(FormatError):
        faults_of(weights)
    run("verify", weights, code=1)


def test_a_list_that_is_no_file_or_names_none_harms_nobody(weights):
    os.mkfifo(weights / "pipe")
    (weights / "folder").mkdir()
    (weights / NAME).write_bytes(b"pipe 00000000\nfolder 00000000\n")
    assert [fault.split()[1:3] for fault in faults_of(weights)] == [["is", "missing,"]] * 2
    (weights / NAME).unlink()
    os.mkfifo(weights / NAME)
    assert faults_of(weights) == []
    (weights / NAME).unlink()
    with open(weights / NAME, "wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(FormatError, match="is read whole"):
        faults_of(weights)
    (weights / NAME).unlink()
    (weights.parent / "elsewhere").write_bytes(b"model.safetensors 00000000")
    (weights / NAME).symlink_to(weights.parent / "elsewhere")
    with pytest.raises(FormatError, match="link"):
        faults_of(weights)
