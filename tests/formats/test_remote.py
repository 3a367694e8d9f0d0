"""Formats over a network: few requests, no byte too many. Equal bits are a law of every case."""

import re

import numpy as np
import pytest

import dcp_writer
import jax_ucp as ucp
from benchmarks import array_cases
from cases import Case, bits_of
from commands import run, run_json
from jax_ucp.errors import CorruptData, NotACheckpoint, StoreError, UnsupportedPath
from jax_ucp.files import remote
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import RangeRead, read_bytes
from jax_ucp.files.remote import plan_requests
from jax_ucp.layout.box import Box
from remote_files import counted
from servers import web
from servers.fault_proxy import depth


@pytest.mark.parametrize("pages", [403, 404])
def test_our_own_format_needs_no_page_of_its_folder(large, pages):
    folder, arrays = large
    with web.web(folder, pages) as (address, _):
        opened = ucp.open(f"{address}/universal")
        assert bits_of(opened) == {f"param/{key}": array.tobytes() for key, array in arrays.items()}
        with pytest.raises(NotACheckpoint if pages == 404 else StoreError):
            ucp.open(f"{address}/safetensors")


@pytest.mark.parametrize("url", ["https://user:secret@host/x", "https://host/x?signed=secret"])
def test_secrets_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UnsupportedPath) as error:
        ucp.open(url)
    assert "secret" not in str(error.value)


@pytest.fixture
def large(tmp_path):
    """Our own format, and safetensors, with arrays far larger than what describes them."""
    random = np.random.default_rng(0)
    arrays = {f"w{i}": random.standard_normal((256, 1024), np.float32) for i in range(24)}
    checkpoint = ucp.Checkpoint.of({"param": arrays})
    checkpoint.save(tmp_path / "universal")
    checkpoint.export(tmp_path / "safetensors", "safetensors", max_shard_bytes=4 << 20)
    return tmp_path, arrays


def test_opening_asks_as_often_whatever_the_arrays_hold(tmp_path):
    asked = []
    for rows in (8, 8192):
        tree = {"param": {f"w{i}": np.ones((rows, 64), np.float32) for i in range(4)}}
        ucp.Checkpoint.of(tree).export(tmp_path / str(rows), "safetensors")
        with counted() as files:
            ucp.open(f"counted://{tmp_path}/{rows}")
        asked.append((files.asked, files.nbytes < 20_000))
    assert asked[0] == asked[1]


MANY = 80  # files, or objects, of which none waits for another


def _safetensors(folder):
    tree = {"param": {f"w{i}": np.ones((64, 64), np.float32) for i in range(MANY)}}
    ucp.Checkpoint.of(tree).export(folder, "safetensors", max_shard_bytes=16 << 10)


def _deepspeed_universal(folder):
    states = ("param", "exp_avg", "exp_avg_sq")
    tree = {state: {f"w{i}": np.ones(8, np.float32) for i in range(MANY)} for state in states}
    ucp.Checkpoint.of(tree).export(folder, "deepspeed")


def _dcp(folder):
    writer = dcp_writer.Writer(folder)
    for i in range(MANY):
        array = np.ones((64, 64), np.float32)
        writer.tensor(f"w{i}", array, [(f"__{i}_0.distcp", Box.whole(array.shape))])
        writer.object(f"about{i}", f"__{i}_0.distcp", {"text": "x" * 20_000, "number": i})
    writer.finish()


def _zero_3(folder):
    array_cases.deepspeed(folder, 20, ranks=MANY)


@pytest.mark.parametrize("make", [_safetensors, _deepspeed_universal, _dcp, _zero_3])
def test_opening_does_not_wait_for_one_file_after_another(make, tmp_path):
    make(tmp_path / "many")
    with counted(latency=0.2) as files:
        opened = ucp.open(f"counted://{tmp_path}/many")
    assert len(list(opened)) >= 20
    assert sum(files.asked.values()) > MANY
    assert depth(files.seen) < MANY // 2


def test_numbers_that_are_stored_as_tensors_come_with_their_headers():
    """Each DTensor has its mesh, a tensor of four numbers."""
    case = Case("dtensors/tp_2x2_small")
    with counted() as files:
        case.open(f"counted://{case.path}")
    assert files.asked["fetch"] < 60


def test_faults_that_pass_are_not_seen(large, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    folder, arrays = large
    with counted(fault_every=5):
        restored = ucp.open(f"counted://{folder}/universal").restore()["param"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), array)


def test_what_is_never_answered_is_one_error_that_names_the_file(large, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    folder, _ = large
    with counted() as files:
        opened = ucp.open(f"counted://{folder}/universal")
        files.fault_every = 1
        with pytest.raises(StoreError, match=r"counted:///.*/c\.0\.0 was asked for 6 times"):
            opened.read("param/w0")


def test_a_file_that_is_another_since_it_was_opened_is_refused(large):
    folder, _ = large
    with counted():
        opened = ucp.open(f"counted://{folder}/safetensors")
        for path in (folder / "safetensors").glob("*.safetensors"):
            path.write_bytes(path.read_bytes())
        with pytest.raises(CorruptData, match="changed since"):
            opened.read("param/w0")


def test_near_ranges_are_one_request_and_long_ones_several(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 10 << 20, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    with counted() as files:
        file = file_path(f"counted://{tmp_path}/f").file()
        starts = [5, 40, 9000, 3 << 20]
        outs = [np.empty(7, np.uint8) for _ in starts]
        files.read_into([RangeRead(file, at, out) for at, out in zip(starts, outs, strict=True)])
        assert files.asked["fetch"] == 2
        for at, out in zip(starts, outs, strict=True):
            np.testing.assert_array_equal(out, data[at : at + 7])
        whole = np.empty((10 << 10, 2048), np.uint8)[:, ::2]
        files.read_into([RangeRead(file, 0, whole)])
        np.testing.assert_array_equal(whole.reshape(-1), data)
        with pytest.raises(CorruptData, match="ends at byte"):
            read_bytes(files, file, 0, (10 << 20) + 1)
    assert len(plan_requests([RangeRead(file, 0, whole)])) > 1


def test_a_plan_says_what_is_asked_of_a_network(large):
    folder, _ = large
    with counted() as files:
        ucp.open(f"counted://{folder}/universal")
        asked = {"requests": sum(files.asked.values()), "nbytes": files.nbytes}
    with counted():
        opening = run_json("plan", f"counted://{folder}/universal")["opening"]
        # Two questions run at once; the answer to one may come in time to answer the other too.
        assert opening["nbytes"] == asked["nbytes"]
        assert abs(opening["requests"] - asked["requests"]) <= 1
        text = run("plan", f"counted://{folder}/universal", "--mesh", "x=4", "--hosts", "2")
        assert re.search(r"by [34] requests, which brought", text)
        assert "requests: about 48 of all hosts, 24 of one" in text  # 24 files of 1 MiB
