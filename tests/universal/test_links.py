"""Links: arrays that stay in the files of others, as stock Orbax and we read them."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
import links_table
from cases import Case
from handler_cases import stock_warns
from helpers import faults_of
from hostile.files import resealed
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.universal.validation import storable
from workers.stock import digests

LLAMA, FILE = Case("torch/hf_llama"), "model-00002-of-00004.safetensors"
# Of each format one, for what takes a second or more.
FEW = ["torch/hf_llama", "torch/dcp_zstd", "torch/fsdp2_tp_2x2", "deepspeed/tp2_pp2_dp1_z1_bf16"]
FEW += ["deepspeed/z3_bf16_dp2", "megatron/dist_ep2_moe_grouped_bf16", "gguf/llama_k"]
FEW += ["jax/orbax05-t5x", "dtensors/verl_llama"]
MESHES = [(1,), (2, 2), (2, 4)]


def wrong_in(answer: dict[str, Any], want: dict[str, str]) -> dict[str, str]:
    """What stock Orbax restored otherwise; numbers, which are no arrays here, may be so there."""
    found = answer.get("arrays", {})
    return {name: answer.get("error", "") for name in want if found.get(name) != want[name]}


def arrays_of(checkpoint: ucp.Checkpoint) -> dict[str, str]:
    """The sha256 of every array, by the name that stock Orbax has for it."""
    return digests(checkpoint.restore())


HAS_ALL = storable(np.dtype(ml_dtypes.float8_e8m0fnu))


@pytest.mark.parametrize("name", FEW)
def test_stock_orbax_restores_a_link_on_any_mesh(name, tmp_path, stock):
    link = Case(name).open().link(tmp_path / "link")
    assert (want := arrays_of(link))
    for mesh in MESHES:
        for api in ["v0", "v1"] if HAS_V1 else ["v0"]:
            assert not wrong_in(stock(tmp_path / "link", mesh, api), want)


def test_leaves_of_a_model_are_linked_stacked_transposed_and_split(tmp_path, stock):
    mapped = LLAMA.open().map("hf-llama2-to-maxtext")
    plan = mapped.plan_link(tmp_path / "link")
    assert set(plan.copied.values()) == {"it is computed (scaled)"}
    link = mapped.link(tmp_path / "link")
    want = arrays_of(mapped)
    assert arrays_of(link) == want
    assert not any(wrong_in(stock(tmp_path / "link", mesh), want) for mesh in MESHES)


def test_a_link_of_a_link_a_copy_of_it_and_one_with_states_are_checkpoints(tmp_path):
    case = Case("deepspeed/z3_bf16_dp2")
    link = case.open().link(tmp_path / "link")
    assert case.wrong(link.link(tmp_path / "again")) == []
    assert case.wrong(link.save(tmp_path / "whole")) == []
    shutil.rmtree(tmp_path / "link")
    assert case.wrong(ucp.open(tmp_path / "again")) == []
    assert not list((tmp_path / "whole").glob("ucp.linked_*"))


def test_a_folder_above_the_source_needs_no_symbolic_links(tmp_path, stock):
    LLAMA.copied(tmp_path / "models" / "hf")
    link = ucp.open(tmp_path / "models" / "hf").link(tmp_path / "models")
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_symlink()]
    (tmp_path / "models").rename(tmp_path / "moved")
    moved = ucp.open(tmp_path / "moved")
    assert LLAMA.wrong(moved) == []
    assert moved.path != link.path
    assert not wrong_in(stock(tmp_path / "moved"), arrays_of(moved))
    assert LLAMA.wrong(ucp.open(tmp_path / "moved" / "hf")) == []  # still what it is


def test_a_link_inside_the_source_or_where_something_is_is_refused(tmp_path):
    hf = LLAMA.copied(tmp_path / "hf")
    with pytest.raises(FileExistsError, match="lies in the source"):
        ucp.open(hf).link(hf / "link")
    (tmp_path / "other").write_text("mine")
    with pytest.raises(FileExistsError, match="has files in it that are not those"):
        ucp.open(hf).link(tmp_path)
    assert (tmp_path / "other").read_text() == "mine"


CHANGES = {
    "is gone": lambda path: path.unlink(),
    "was replaced or written to": lambda path: os.utime(path),
    "was replaced or written to since: it has 7 bytes": lambda path: path.write_bytes(b"another"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_files_that_are_not_those_that_were_linked_are_refused_by_name(said, tmp_path):
    hf = LLAMA.copied(tmp_path / "hf")
    ucp.open(hf).link(tmp_path / "link")
    CHANGES[said](hf / FILE)
    with pytest.raises(CorruptData, match=said) as caught:
        ucp.open(tmp_path / "link")
    assert FILE in str(caught.value)
    assert "link or convert its source again" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"), [("is gone", "Not enough data"), ("it has 7 bytes", "Requested byte range")]
)
def test_what_stock_orbax_says_of_a_file_that_is_lost(change, said, tmp_path, stock):
    hf = LLAMA.copied(tmp_path / "hf")
    ucp.open(hf).link(tmp_path / "link")
    (name,) = [name for name in CHANGES if name.endswith(change)]
    CHANGES[name](hf / FILE)
    assert said in stock(tmp_path / "link")["error"]


def test_a_bit_that_changes_under_the_version_is_found_by_the_checksum(tmp_path):
    hf = LLAMA.copied(tmp_path / "hf")
    file = hf / FILE
    ucp.open(hf).link(tmp_path / "link", checksum=True)
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as handle:
        handle.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    link = ucp.open(tmp_path / "link")
    faults = faults_of(link)
    assert len(faults) == 1
    assert FILE in faults[0]
    with pytest.raises(CorruptData, match="CRC"):
        link.save(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_what_is_stored_twice_and_differs_is_not_linked(tmp_path):
    case = Case("megatron/dist_pp2_dp2_distopt_buckets_fully_reshardable_fp32")
    with pytest.raises(CorruptData, match="the master at"):
        case.open().link(tmp_path / "link")
    assert not (tmp_path / "link").exists()


@stock_warns
def test_a_manager_goes_on_from_a_linked_step_and_deletes_only_the_link(tmp_path):
    hf, run = LLAMA.copied(tmp_path / "hf"), tmp_path / "run"
    before = digests_of(hf)
    LLAMA.open(hf).link(run, root="", step=0)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(run, options=options) as manager:
        assert manager.latest_step() == 0
        tree = manager.restore(0, args=ocp.args.PyTreeRestore())
        manager.save(1, args=ocp.args.PyTreeSave(jax.tree.map(jax.numpy.asarray, tree)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
    assert not (run / "0").exists()
    assert digests_of(hf) == before


def digests_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


HOSTILE = {
    "chunks of": lambda array, about: array.update(chunk=[0, 32]),
    "in 1 chunks": lambda array, about: array.update(places=array["places"] * 2),
    "outside the files": lambda array, about: array.update(places=[[0, 1 << 40]]),
    "outside the files that": lambda array, about: array.update(places=[[9, 0]]),
    "in chunks of": lambda array, about: array.update(order=[0, 0]),
    "no leaf": lambda array, about: about["linked"].update(stray=array),
    "a source file twice": lambda array, about: about.update(sources=about["sources"] * 2),
    "has version 1, and the content of 3": lambda array, about: about.update(version=1),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_link_that_no_writer_makes_is_refused(said, tmp_path):
    LLAMA.open().link(tmp_path / "link")
    change = HOSTILE[said]
    resealed(tmp_path / "link", lambda x: change(x["linked"]["param.lm_head.weight"], x))
    with pytest.raises(FormatError, match=said):
        ucp.open(tmp_path / "link")


@pytest.mark.parametrize("name", ["../hf/model.safetensors", "/etc/passwd", "ucp.linked_0/../x"])
def test_names_of_files_lead_only_down(name, tmp_path):
    LLAMA.copied(tmp_path / "hf")
    LLAMA.open(tmp_path / "hf").link(tmp_path / "link")
    resealed(tmp_path / "link", lambda about: about["sources"][0].update(name=name))
    with pytest.raises(FormatError, match="name"):
        ucp.open(tmp_path / "link")


def test_a_stopped_link_is_no_checkpoint_and_the_same_call_makes_it(tmp_path, monkeypatch):
    mapped = LLAMA.open().map("hf-llama2-to-maxtext")

    def stop(block):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped.link(tmp_path / "link", progress=stop)
    with pytest.raises(FileNotFoundError):
        ucp.open(tmp_path / "link")
    assert arrays_of(mapped.link(tmp_path / "link")) == arrays_of(mapped)


@pytest.mark.skipif(not HAS_ALL, reason="this TensorStore lacks a dtype")
def test_the_page_has_the_table_that_a_run_prints():
    page = links_table.PAGE.read_text()
    assert links_table.HEAD in page
    assert [row for row in links_table.rows() if row not in page] == []
