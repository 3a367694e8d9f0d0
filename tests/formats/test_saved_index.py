"""Saved indexes: a checkpoint is opened again without asking its files, or is refused."""

import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import facts
from commands import run
from jax_ucp.errors import CorruptData, FormatError, UCPError, UnsupportedPath
from jax_ucp.files.listing import Listing
from jax_ucp.files.protocol import FileInfo
from jax_ucp.formats import saved_index
from remote_files import counted
from safetensors_writer import write_safetensors

DATA = Path(__file__).parents[1] / "data"


def shards(folder: Path, count: int) -> Path:
    """A model of so many files."""
    folder.mkdir()
    index = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        write_safetensors(folder / name, {f"w{i}": np.full((4,), i, np.float32)})
        index[f"w{i}"] = name
    text = msgspec.json.encode({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_bytes(text)
    return folder


def test_the_files_of_an_index_are_checked_by_one_list(tmp_path):
    folder = shards(tmp_path / "model", 60)
    with counted() as files:
        ucp.open(f"counted://{folder}").save_index(tmp_path / "a.ucp-index")
        files.asked.clear()
        checkpoint = ucp.open(tmp_path / "a.ucp-index")
        assert dict(files.asked) == {"list": 1}
        assert checkpoint.read("param/w59").tolist() == [59] * 4


def test_a_file_that_has_changed_is_named_with_what_it_was_and_is(tmp_path):
    folder = shards(tmp_path / "model", 3)
    index, file = tmp_path / "a.ucp-index", folder / "model-00002-of-00003.safetensors"
    ucp.open(folder).save_index(index)
    ucp.open(index)
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    with pytest.raises(CorruptData, match=rf"{file.name} .*its version is .*, and was "):
        ucp.open(index)
    file.write_bytes(file.read_bytes() + b" ")
    size = before.st_size
    with pytest.raises(CorruptData, match=rf"{file.name} .*has {size + 1} bytes, and had {size}"):
        ucp.open(index)
    file.unlink()
    with pytest.raises(CorruptData, match=rf"{file.name} is gone[^$]*Make the index again"):
        ucp.open(index)


def test_an_index_takes_the_options_of_open(tmp_path):
    case, index = DATA / "deepspeed/z1_bf16_dp2", tmp_path / "a.ucp-index"
    ucp.open(case).save_index(index)
    weights = ucp.open(index, weights_only=True)
    assert facts(weights) == facts(ucp.open(case, weights_only=True))
    with pytest.raises(FormatError, match="not a run with steps"):
        ucp.open(index, step=3)


def test_what_is_no_opened_checkpoint_has_no_index(tmp_path):
    index = tmp_path / "a.ucp-index"
    with pytest.raises(UnsupportedPath, match="made in memory"):
        ucp.Checkpoint.of({"w": np.ones(2, np.float32)}).save_index(index)
    with pytest.raises(UnsupportedPath, match="ends in"):
        ucp.open(DATA / "deepspeed/z1_bf16_dp2").save_index(tmp_path / "a.idx")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_an_index_that_other_commands_read(tmp_path):
    case, index = DATA / "deepspeed/z1_bf16_dp2", tmp_path / "a.ucp-index"
    run("index", case, index)
    run("diff", "--headers", case, index)
    assert ".ucp-index" in run("index", case, tmp_path / "b", code=1)


def index_of(path: str, listing: Listing) -> bytes:
    body = msgspec.msgpack.encode({"path": path, "listing": listing.encode()})
    return saved_index.MAGIC + zlib.compress(body)


def test_a_damaged_index_is_refused_or_is_what_it_was(tmp_path):
    folder = shards(tmp_path / "model", 2)
    index = tmp_path / "a.ucp-index"
    ucp.open(folder).save_index(index)
    whole, want = index.read_bytes(), facts(ucp.open(folder))
    random = Random(1)
    for _ in range(150):
        damaged = bytearray(whole)
        if random.random() < 0.3:
            del damaged[random.randrange(len(damaged)) :]
        else:
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        index.write_bytes(damaged)
        with suppress(UCPError):
            assert facts(ucp.open(index)) == want


@pytest.mark.parametrize("listing", [
    Listing(found={"/a": FileInfo("a", -1, "")}),
    Listing(infos={"/a": FileInfo("a", 1, "", "door")}),
    Listing(folders={"/a": {"../etc/passwd": FileInfo("a", 1, "")}}),
    Listing(folders={"/a": {"b/c": FileInfo("a/b/c", 1, "")}}),
    Listing(folders={"/a": {"..": FileInfo("a", 1, "")}}),
    Listing(below={"/a": [FileInfo("a/../../b", 1, "")]}),
    Listing(below={"/": [FileInfo("/etc/passwd", 1, "")]}),
    Listing(ranges={("/a", "", 0, 8): b"short"}),
])  # fmt: skip
def test_an_answer_that_no_files_give_is_refused(listing, tmp_path):
    (tmp_path / "a.ucp-index").write_bytes(index_of(str(tmp_path), listing))
    with pytest.raises(FormatError, match=r"a\.ucp-index is not an index"):
        ucp.open(tmp_path / "a.ucp-index")


def test_an_index_whose_answers_disagree_is_refused(tmp_path):
    folder, index = DATA / "torch" / "dcp_named_optimizer" / "ckpt", tmp_path / "a.ucp-index"
    ucp.open(folder).save_index(index)
    body = msgspec.msgpack.decode(zlib.decompress(index.read_bytes()[len(saved_index.MAGIC) :]))
    listing = Listing.decode(body["listing"])
    del listing.folders[str(folder)]["__0_0.distcp"]  # and it was asked for by itself, too
    index.write_bytes(index_of(str(folder), listing))
    with pytest.raises(FormatError, match=r"distcp that it is there, and that it is not"):
        ucp.open(index)


def test_an_index_that_inflates_to_too_much_is_refused(tmp_path):
    bomb = saved_index.MAGIC + zlib.compress(bytes(saved_index.SMALL_BYTES + 1))
    (tmp_path / "a.ucp-index").write_bytes(bomb)
    with pytest.raises(FormatError, match="has more than"):
        ucp.open(tmp_path / "a.ucp-index")
    (tmp_path / "a.ucp-index").write_bytes(b"not one")
    with pytest.raises(FormatError, match="does not begin with"):
        ucp.open(tmp_path / "a.ucp-index")


def test_an_index_behind_a_network_reads_no_file_of_this_disk(tmp_path):
    folder = shards(tmp_path / "model", 2)
    ucp.open(folder).save_index(tmp_path / "a.ucp-index")
    with counted(), pytest.raises(FormatError, match="of files on a disk"):
        ucp.open(f"counted://{tmp_path / 'a.ucp-index'}")


def test_an_index_of_an_index_is_refused_as_no_checkpoint(tmp_path):
    folder = shards(tmp_path / "model", 2)
    first, second = tmp_path / "a.ucp-index", tmp_path / "b.ucp-index"
    second.write_bytes(index_of(str(second), Listing()))
    with pytest.raises(FormatError, match="index"):
        ucp.open(second)
    ucp.open(folder).save_index(first)
    shutil.rmtree(folder)
    with pytest.raises(CorruptData, match="gone"):
        ucp.open(first)


names = st.text("abc/.", min_size=1, max_size=4)
infos = st.builds(FileInfo, names, st.integers(0, 9), st.just("v"))


@given(
    st.builds(
        Listing,
        infos=st.dictionaries(names, st.none() | infos, max_size=2),
        folders=st.dictionaries(names, st.dictionaries(names, infos, max_size=2), max_size=2),
    )
)
def test_a_listing_comes_back_as_it_was_or_is_refused(listing):
    try:
        assert Listing.decode(listing.encode()) == listing
    except FormatError:
        return
    for entries in listing.folders.values():
        assert not any("/" in name or name == ".." for name in entries)
