"""Models of the hub: ranges of their files, of one commit, and nothing on disk."""

import json
from pathlib import Path

import pytest

import jax_ucp as ucp
from cases import DATA, Case, bits_of
from helpers import faults_of, flip_bit
from jax_ucp.errors import CorruptData, StoreError, UnsupportedPath
from jax_ucp.files import remote
from jax_ucp.files.path import file_path
from servers import web

MODEL = DATA / "torch" / "hf_llama"


@pytest.fixture
def model(tmp_path):
    return Case("torch/hf_llama").copied(tmp_path / "model")


@pytest.fixture
def at_hub(monkeypatch):
    def enter(address: str, token: str = "hf_t") -> None:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)

    return enter


@pytest.mark.parametrize("how", [{}, {"uses": 2}, {"busy": 2}])
def test_a_model_of_the_hub_is_what_its_files_are(model, at_hub, how, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with web.hub(model, **how) as address:
        at_hub(address)
        got = bits_of(ucp.open("hf://org/name"))
    assert got == bits_of(ucp.open(model))
    assert not (tmp_path / "home").exists()


def test_a_revision_is_the_commit_that_it_named_when_it_was_opened(model, at_hub):
    with web.hub(model) as address:
        at_hub(address)
        opened = ucp.open("hf://org/name@main")
        assert opened.path == f"hf://org/name@{web.commit(model)}"
        assert bits_of(ucp.open(opened.path)) == bits_of(opened)
        (model / "config.json").write_text(json.dumps({"model_type": "other"}))
        with pytest.raises(StoreError, match=r"config\.json"):
            (file_path(opened.path) / "config.json").read_bytes()


def test_what_the_hub_does_not_have_is_named(model, at_hub):
    with web.hub(model) as address:
        at_hub(address)
        for url in ("hf://org/other", "hf://org/name@v9"):
            with pytest.raises(StoreError, match=url):
                ucp.open(url)
        at_hub(address, token="wrong")
        with pytest.raises(StoreError, match="hf://org/name"):
            ucp.open("hf://org/name")


def test_a_hub_that_does_not_answer_is_one_error(at_hub, monkeypatch):
    at_hub("http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"hf://org/name@main was asked for"):
        ucp.open("hf://org/name")


@pytest.mark.parametrize("url", ["hf://", "hf://name", "hf://datasets/org/name"])
def test_what_names_no_model_is_refused(url):
    with pytest.raises(UnsupportedPath):
        ucp.open(url)


SHARD = "model-00002-of-00004.safetensors"


def test_files_of_the_hub_are_compared_with_its_hashes(model, at_hub, monkeypatch):
    with web.hub(model) as address:
        at_hub(address)
        labels = [label for label, fault in ucp.open("hf://org/name").verify() if fault is None]
        assert [label for label in labels if f"{SHARD} against its hash" in label]
        assert [label for label in labels if "config.json against its hash" in label]
        said = web.stored(model / SHARD)
        commit = web.commit(model)
        flip_bit(model / SHARD)  # it keeps its size and, for the hub, its hash
        monkeypatch.setattr(web, "commit", lambda root: commit)
        real = web.stored
        monkeypatch.setattr(web, "stored", lambda path: said if path.name == SHARD else real(path))
        opened = ucp.open("hf://org/name")
        faults = faults_of(opened)
        assert [said["lfs"]["sha256"] in fault for fault in faults] == [True]
        opened.restore()
        with pytest.raises(CorruptData, match=f"{SHARD} has the hash .* that were up"):
            opened.restore(verify="full")


def test_blobs_of_a_cache_are_compared_with_their_names(model, tmp_path):
    """Files of a snapshot are links: to SHA-256 of large ones, and to git's hash of others."""
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        said = web.stored(path)
        digest = said["lfs"]["sha256"] if "lfs" in said else said["blobId"]
        (blobs / digest).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    found = dict(ucp.open(snapshot).verify())
    hashed = [label for label in found if label.endswith("against its hash")]
    assert {Path(label.partition(" ")[0]).name for label in hashed} >= {SHARD, "config.json"}
    assert not any(found.values())
    flip_bit(snapshot / SHARD)
    with (snapshot / "config.json").open("a") as config:
        config.write(" ")
    text = "\n".join(fault for _, fault in ucp.open(snapshot).verify() if fault)
    assert f"{SHARD} has the hash" in text
    assert "config.json has the hash" in text
