"""No name in a checkpoint, and no link, leads out of it, for reads or for writes."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from commands import run
from helpers import changed_json, faults_of, tree_of_files
from hostile.files import renamed, resealed, saved, stock, stock_entry, write_database
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.local import LocalFiles, name_fault

OUTSIDE = [
    "../victim/a", "a/../../victim/a", "/{victim}/a", "../../{name}/victim/a", "..", ".", "", "a//b", "./a",
    "a\\b", "ucp.json", "_METADATA", "ucp.pack_0", "ucp-ledger.jsonl", "manifest.ocdbt/a", "a\0b", "x" * 300,
    "a.__lock",
]  # fmt: skip
REFUSED = ["..", ".", "", "\\", "\0", "\ud800", "x" * 256]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another checkpoint beside everything that a test makes."""
    return saved(tmp_path / "victim", {"a": np.arange(2, dtype=np.float32)})


@given(st.lists(st.sampled_from(["a", "a b", "é", "~", "...", "c.0.0", *REFUSED])))
def test_a_name_leads_down_or_is_refused(parts):
    """What is joined to the path of a directory stays below it, whatever the parts are."""
    name = "/".join(parts)
    if name_fault(name) is None:
        assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
        assert name
    else:
        assert not parts or {*parts} & {*REFUSED}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_leaf_of_ours_with_such_a_name_is_refused_before_anything_is_read(tmp_path, victim, name):
    hostile = saved(tmp_path / "hostile", {"a": np.full(2, 666, np.float32)})
    renamed(hostile, "a", name.format(victim=str(victim)[1:], name=tmp_path.name))
    with pytest.raises(UCPError):
        ucp.open(hostile)


@pytest.mark.parametrize("name", ["../victim/ucp.json", "/etc/hostname", "a/../../victim/ucp.json"])
def test_a_side_file_of_ours_with_such_a_name_is_refused(tmp_path, victim, name):
    hostile = saved(tmp_path / "hostile", {"a": np.ones(2, np.float32)})
    resealed(hostile, lambda content: content["files"].update({name: "0" * 16}))
    with pytest.raises(FormatError, match="is not a name of a file inside a checkpoint"):
        ucp.open(hostile)


@pytest.mark.parametrize(
    "name", ["../victim/a", "..", "a/../../victim/a", "d", "ucp.json", "ucp-ledger.jsonl"]
)
@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_conversion_of_stock_s_checkpoint_writes_into_its_target_only(
    tmp_path, victim, name, ocdbt
):
    """In an OCDBT database any name is a key; on disk it would be another checkpoint's file, or
    one of our own.
    """
    before = tree_of_files(victim)
    hostile = tmp_path / "hostile"
    stock(hostile, "plain")
    files = tree_of_files(hostile / "params.kernel")
    changed_json(hostile / "_METADATA", lambda content: _one_leaf(content, name, ocdbt))
    if ocdbt:
        write_database(hostile, {f"{name}/{key}": data for key, data in files.items()})
    run("convert", hostile, tmp_path / "out", code=0 if ocdbt else 1)
    assert tree_of_files(victim) == before
    assert {path.name for path in tmp_path.iterdir()} - {"out"} == {"hostile", "victim"}
    if ocdbt:
        copy = ucp.open(tmp_path / "out")
        assert faults_of(copy) == []
        want = np.arange(24, dtype=np.float32).reshape(6, 4)
        np.testing.assert_array_equal(copy.restore()[name], want)


def _one_leaf(content: dict, name: str, ocdbt: bool) -> None:
    entry = stock_entry(content, "kernel")
    entry["key_metadata"] = [{"key": name, "key_type": 2}]
    content |= {"tree_metadata": {str((name,)): entry}, "use_ocdbt": ocdbt}


@pytest.mark.parametrize(
    "file", ["../victim/a/c.0", "/etc/hostname", "x/../../victim/a/c.0", "link/a/c.0"]
)
def test_a_database_whose_values_lie_outside_is_refused(tmp_path, victim, file):
    hostile = stock(tmp_path / "hostile", "ocdbt")
    shutil.rmtree(hostile / "d")
    write_database(hostile, {"params.kernel/.zarray": bytes(12)}, file)
    if file.startswith("link"):
        (hostile / "link").symlink_to(victim)
    with pytest.raises(UCPError):
        ucp.open(hostile)


def test_a_directory_writes_through_no_link(tmp_path, victim):
    """Whatever a conversion finds in the directory that it takes up again."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(victim / "a")
    before = tree_of_files(victim)
    directory = LocalFiles(tmp_path / "out")
    for name in ("a/c.0", "a", "../victim/a/c.0"):
        with pytest.raises(FormatError):
            directory.write(name, [b"x"], durable=False)
        with pytest.raises(FormatError):
            directory.delete(name)
    assert tree_of_files(victim) == before


def test_two_leaves_of_stock_that_share_one_array_are_refused(tmp_path):
    """Orbax writes `{"a": {"b": x}}` and `{"a.b": y}` to one place, and keeps one of them."""
    hostile = stock(tmp_path / "hostile")

    def change(content: dict) -> None:
        path = [{"key": "params.kernel", "key_type": 2}]
        again = stock_entry(content, "kernel") | {"key_metadata": path}
        content["tree_metadata"]["again"] = again

    changed_json(hostile / "_METADATA", change)
    with pytest.raises(FormatError, match=r"params\.kernel is the name of two leaves"):
        ucp.open(hostile)


@pytest.mark.parametrize("name", ["../victim", "a/b", "..", "", "x" * 300])
def test_an_export_makes_no_folder_of_such_a_name(tmp_path, victim, name):
    before = tree_of_files(victim)
    checkpoint = ucp.Checkpoint.of({"param": {name: np.ones(2, np.float32)}})
    with pytest.raises(UCPError, match="is not a name of a folder"):
        checkpoint.export(tmp_path / "out", "deepspeed")
    assert tree_of_files(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim"]
