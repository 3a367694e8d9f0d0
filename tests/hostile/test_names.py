"""No name in a checkpoint, and no link, leads out of it: neither what is read nor what is
written.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from dcp_writer import Writer
from hostile.files import changed_json, renamed, resealed, saved, stock, tree_of_files
from jax_ucp.cli.main import main
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.local import LocalFiles, name_fault
from jax_ucp.layout.box import Box
from jax_ucp.universal.ocdbt import MANIFEST_FILE, ValueRange, index_parts

OUTSIDE = [
    "../victim/a", "a/../../victim/a", "/{victim}/a", "../../{name}/victim/a", "..", ".", "", "a//b", "./a",
    "a\\b",
]  # fmt: skip
OUTSIDE += [
    "ucp.json", "_METADATA", "ucp.pack_0", "ucp-ledger.jsonl", "manifest.ocdbt/a", "a\0b", "x" * 300,
    "a.__lock",
]  # fmt: skip


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another checkpoint beside everything that a test makes."""
    return saved(tmp_path / "victim", {"a": np.arange(2, dtype=np.float32)})


@given(
    st.lists(
        st.sampled_from(
            ["a", "..", ".", "", "a b", "é", "~", "...", "c.0.0", "\\", "\0", "\ud800", "x" * 256]
        )
    )
)
def test_a_name_leads_down_or_is_refused(parts):
    """What is joined to the path of a directory stays below it, whatever the parts are."""
    name = "/".join(parts)
    if name_fault(name) is None:
        assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
        assert name
    else:
        assert (
            any(part in ("", ".", "..", "\\", "\0", "\ud800", "x" * 256) for part in parts)
            or not parts
        )


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


@pytest.mark.parametrize("linked", ["a", "a/c.0", "_METADATA", "a/zarr.json"])
def test_a_link_out_of_a_checkpoint_of_ours_is_refused(tmp_path, victim, linked):
    """The link leads to bytes that would be right: what would be read is another's, and not
    damaged.
    """
    hostile = saved(tmp_path / "hostile", {"a": np.arange(2, dtype=np.float32)})
    path = hostile / linked
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(victim / linked)
    with pytest.raises(FormatError, match=r"is a link to .*victim.*, outside the checkpoint"):
        ucp.open(hostile)


def test_links_inside_a_checkpoint_and_into_a_hub_s_blobs_are_followed(tmp_path):
    """A Hugging Face cache has nothing but links, from each snapshot to the blobs beside the
    snapshots.
    """
    tree = {"a": np.arange(6, dtype=np.float32), "b": np.ones(2, np.int8)}
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40) / "step"
    saved(snapshot, tree)
    (blobs := tmp_path / "hub" / "models--org--name" / "blobs").mkdir()
    for i, file in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        shutil.move(file, blobs / str(i))
        file.symlink_to(os.path.relpath(blobs / str(i), file.parent))
    np.testing.assert_array_equal(ucp.open(snapshot).restore()["a"], tree["a"])
    elsewhere = tmp_path / "secret"
    shutil.move(blobs / "0", elsewhere)
    (blobs / "0").symlink_to(elsewhere)
    with pytest.raises(FormatError, match="outside the checkpoint"):
        ucp.open(snapshot)


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
        entries, end = dict[str, ValueRange](), 0
        for key, data in files.items():
            entries[f"{name}/{key}"], end = ValueRange("data", end, len(data)), end + len(data)
        (hostile / "data").write_bytes(b"".join(files.values()))
        write_index(hostile, entries)
    result = CliRunner().invoke(main, ["convert", str(hostile), str(tmp_path / "out")])
    assert tree_of_files(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "out") == [
        "hostile",
        "victim",
    ]
    assert result.exit_code == 0 if ocdbt else isinstance(result.exception, SystemExit)
    if ocdbt:
        copy = ucp.open(tmp_path / "out")
        assert [fault for _, fault in copy.verify() if fault] == []
        np.testing.assert_array_equal(
            copy.restore()[name], np.arange(24, dtype=np.float32).reshape(6, 4)
        )


def write_index(folder: Path, entries: dict[str, ValueRange]) -> None:
    parts, manifest = index_parts("node", sorted((key.encode(), at) for key, at in entries.items()))
    (folder / "node").write_bytes(b"".join(parts))
    (folder / MANIFEST_FILE).write_bytes(manifest)


def _one_leaf(content: dict, name: str, ocdbt: bool) -> None:
    (entry,) = (
        e for e in content["tree_metadata"].values() if e["key_metadata"][-1]["key"] == "kernel"
    )
    entry["key_metadata"] = [{"key": name, "key_type": 2}]
    content |= {"tree_metadata": {str((name,)): entry}, "use_ocdbt": ocdbt}


@pytest.mark.parametrize(
    "linked", ["params.kernel", "params.kernel/0.0", "_sharding", "array_metadatas"]
)
def test_a_link_out_of_stock_s_checkpoint_is_refused(tmp_path, linked):
    hostile = stock(tmp_path / "hostile")
    shutil.move(hostile / linked, tmp_path / "elsewhere")
    (hostile / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=r"is a link to .*elsewhere, outside the checkpoint"):
        ucp.open(hostile)


@pytest.mark.parametrize(
    "file", ["../victim/a/c.0", "/etc/hostname", "x/../../victim/a/c.0", "link/a/c.0"]
)
def test_a_database_whose_values_lie_outside_is_refused(tmp_path, victim, file):
    hostile = stock(tmp_path / "hostile", "ocdbt")
    shutil.rmtree(hostile / "d")
    write_index(hostile, {"params.kernel/.zarray": ValueRange(file, 0, 12)})
    if file.startswith("link"):
        (hostile / "link").symlink_to(victim)
    with pytest.raises(UCPError):
        ucp.open(hostile)


@pytest.mark.parametrize("linked", ["__0_0.distcp", ".metadata"])
def test_dcp_s_files_may_be_links_into_a_hub_s_blobs_and_nowhere_else(tmp_path, linked):
    folder = tmp_path / "hub" / "snapshots" / "0"
    folder.parent.mkdir(parents=True)
    writer = Writer(folder)
    writer.tensor("w", np.arange(6, dtype=np.float32), [("__0_0.distcp", Box((0,), (6,)))])
    writer.finish()
    (tmp_path / "hub" / "blobs").mkdir()
    shutil.move(folder / linked, tmp_path / "hub" / "blobs" / "1")
    (folder / linked).symlink_to("../../blobs/1")
    np.testing.assert_array_equal(ucp.open(folder).read("param/w"), np.arange(6))
    shutil.move(tmp_path / "hub" / "blobs" / "1", tmp_path / "elsewhere")
    (tmp_path / "hub" / "blobs" / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="outside the checkpoint"):
        ucp.open(folder)


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
        (entry,) = (
            e for e in content["tree_metadata"].values() if e["key_metadata"][-1]["key"] == "kernel"
        )
        content["tree_metadata"]["again"] = {
            **entry,
            "key_metadata": [{"key": "params.kernel", "key_type": 2}],
        }

    changed_json(hostile / "_METADATA", change)
    with pytest.raises(FormatError, match=r"params\.kernel is the name of two leaves"):
        ucp.open(hostile)


@pytest.mark.parametrize("name", ["../victim", "a/b", "..", "", "x" * 300])
def test_an_export_makes_no_folder_of_such_a_name(tmp_path, victim, name):
    before = tree_of_files(victim)
    with pytest.raises(UCPError, match="is not a name of a folder"):
        ucp.Checkpoint.of({"param": {name: np.ones(2, np.float32)}}).export(
            tmp_path / "out", "deepspeed"
        )
    assert tree_of_files(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim"]
