"""An export by processes that know nothing of one another."""

import fcntl
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from commands import run
from helpers import digests, memory
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.export import files, folder
from jax_ucp.files.local import LocalFiles
from jax_ucp.jobs import run as jobs
from jax_ucp.jobs.ledger import Share, write_complete
from large_sources import STATES, in_two_minds

DATA = Path(__file__).parents[1] / "data"
CASES = [
    ("deepspeed/tp2_dp2_z1_bf16_swiglu", "safetensors"),
    ("deepspeed/tp2_dp2_z1_bf16_swiglu", "deepspeed"),
    ("megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt", "dcp"),
    ("torch/hf_llama/ckpt", "safetensors"),
]
BUDGET = 4 << 20  # many blocks


def written(folder: Path) -> dict[str, str]:
    files = digests(folder)
    assert files.pop("ucp.conversion.json")
    assert not list(folder.parent.glob(".*"))
    return files


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Several tasks of one share."""
    monkeypatch.setattr("jax_ucp.export.files.TASK_BYTES", 1 << 20)
    memory(STATES).export(tmp_path / "source", "dcp")
    return tmp_path / "source"


@pytest.mark.parametrize(("case", "format"), CASES)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_in_any_order_the_shares_make_what_one_process_makes(case, format, count, tmp_path):
    ucp.open(DATA / case).export(tmp_path / "whole", format)
    out, order = tmp_path / "out", random.Random(count).sample(range(count), count)
    for index in order[:-1]:
        assert ucp.open(DATA / case).export_share(out, format, (index, count)) is None
        assert not out.exists()
    made = ucp.open(DATA / case).export_share(out, format, (order[-1], count))
    assert made is not None
    assert written(out) == digests(tmp_path / "whole") != {}
    for index in range(count):  # any may be run again
        assert ucp.open(DATA / case).export_share(out, format, (index, count)) is not None
    assert written(out) == digests(tmp_path / "whole")


def test_of_a_stopped_share_what_is_on_disk_is_not_written_again(source, tmp_path, monkeypatch):
    ucp.open(source).export(tmp_path / "whole", "dcp")
    heard = []

    def stop(nbytes):
        heard.append(nbytes)
        if len(heard) == 9:
            raise KeyboardInterrupt

    how = {"share": (0, 1), "budget_bytes": BUDGET}
    with pytest.raises(KeyboardInterrupt):
        ucp.open(source).export_share(tmp_path / "out", "dcp", progress=stop, **how)
    # of what is on disk one byte is changed by something else
    ledger = tmp_path / ".out.partial" / "files" / "ucp-ledger_0_of_1.jsonl"
    ledger = ledger.read_text().splitlines()
    boxes = [line.split('"box":"[')[1].split("]")[0].split(":") for line in ledger[1:]]
    done = [int(stop) - int(start) for start, stop in boxes]
    assert len(done) >= 8
    with open(tmp_path / ".out.partial" / "files" / "__0_0.distcp", "r+b") as file:
        file.seek(int(boxes[0][0]))
        byte = file.read(1)[0]
        file.seek(int(boxes[0][0]))
        file.write(bytes([byte ^ 1]))
    block_bytes, again = files.block_bytes, []

    def counted(*args):
        again.append(len(data := block_bytes(*args)))
        return data

    monkeypatch.setattr(files, "block_bytes", counted)
    made = ucp.open(source).export_share(tmp_path / "out", "dcp", **how)
    assert made is not None
    assert written(tmp_path / "out") == digests(tmp_path / "whole")
    stored = sum(array.nbytes for arrays in STATES.values() for array in arrays.values())
    assert sum(again) == stored - sum(done[1:])


def test_shares_at_once_make_one_folder(source, tmp_path):
    ucp.open(source).export(tmp_path / "whole", "dcp")
    for attempt in range(4):
        out = tmp_path / f"out {attempt}"

        def share(index, out=out):
            return ucp.open(source).export_share(out, "dcp", (index, 3))

        with ThreadPoolExecutor(3) as threads:
            made = list(threads.map(share, range(3)))
        assert any(one is not None for one in made)
        assert written(out) == digests(tmp_path / "whole")


@pytest.mark.parametrize("when", ["require_same_job", "complete_files"])
def test_who_is_overtaken_by_another_has_the_folder_too(when, source, tmp_path, monkeypatch):
    ucp.open(source).export(tmp_path / "whole", "dcp")
    out = tmp_path / "out"
    ucp.open(source).export_share(out, "dcp", (0, 2))
    module = folder if when == "complete_files" else jobs
    original = getattr(module, when)

    def overtaken(*args):
        monkeypatch.setattr(module, when, original)
        monkeypatch.setattr("fcntl.flock", lambda *args: None)  # the other ends before this one
        assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
        return original(*args)

    monkeypatch.setattr(module, when, overtaken)
    assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
    assert written(out) == digests(tmp_path / "whole")


def test_who_waited_while_another_made_the_folder_leaves_it_as_it_is(source, tmp_path, monkeypatch):
    """The other has not cleared away yet."""
    ucp.open(source).export(tmp_path / "whole", "dcp")
    out, flock = tmp_path / "out", fcntl.flock
    ucp.open(source).export_share(out, "dcp", (0, 2))

    def waited(handle, how):
        if how == fcntl.LOCK_EX:
            with monkeypatch.context() as other:
                other.setattr(fcntl, "flock", lambda *args: None)
                other.setattr("shutil.rmtree", lambda *args, **how: None)
                assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", waited)
    assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
    assert written(out) == digests(tmp_path / "whole")


@pytest.mark.parametrize("loss", [Path.unlink, lambda path: os.truncate(path, 9)])
def test_a_folder_that_has_lost_files_is_not_what_the_export_made(loss, tmp_path):
    """It says that it is; what lies beside is others'."""
    tree = {"v": np.ones((64, 64)), "w": np.ones((64, 64))}
    memory({"param": tree, "exp_avg": tree}).export(tmp_path / "source", "dcp")
    source, out = ucp.open(tmp_path / "source"), tmp_path / "out"
    for index in range(2):
        made = source.export_share(out, "deepspeed", (index, 2))
    assert made is not None
    (out / "README.md").write_text("mine")
    assert source.export_share(out, "deepspeed", (0, 2)) is not None
    loss(next(out.rglob("exp_avg.pt")))
    for index in range(2):
        with pytest.raises(CorruptData, match=r"is not whole any more:\n  .*exp_avg\.pt"):
            source.export_share(out, "deepspeed", (index, 2))


def test_one_share_has_one_process_at_a_time(source, tmp_path):
    refusals = []

    def meanwhile(nbytes):
        with pytest.raises(FormatError, match="another conversion is writing") as refused:
            ucp.open(source).export_share(tmp_path / "out", "dcp", (0, 2))
        refusals.append(refused)

    ucp.open(source).export_share(tmp_path / "out", "dcp", (0, 2), progress=meanwhile)
    assert refusals


def test_another_export_is_refused_and_destroys_nothing(source, tmp_path):
    memory({"param": {"w": np.zeros((64, 64))}}).export(tmp_path / "other", "dcp")
    out = tmp_path / "out"
    assert ucp.open(source).export_share(out, "dcp", (0, 2)) is None
    with pytest.raises(FormatError, match="in another number of shares"):
        ucp.open(source).export_share(out, "dcp", (0, 3))
    with pytest.raises(FormatError, match="unfinished conversion of another source"):
        ucp.open(tmp_path / "other").export_share(out, "dcp", (1, 2))
    with pytest.raises(FormatError):
        ucp.open(source).export_share(out, "safetensors", (1, 2))
    with pytest.raises(FileExistsError, match="run all of them, or delete that folder"):
        ucp.open(source).export(out, "dcp")
    assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
    for format, share in (("dcp", (0, 3)), ("dcp", (0, 1)), ("safetensors", (0, 2))):
        with pytest.raises(FileExistsError, match="is in use"):
            ucp.open(source).export_share(out, format, share)
    with pytest.raises(FileExistsError, match="lies in the source"):
        ucp.open(source).export_share(source / "x", "dcp", (0, 2))


def left_uncleared(source: Path, out: Path, monkeypatch) -> None:
    """Two shares made the folder, and who made it was killed before the rest was cleared away."""
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *args, **how: None)
        killed.setattr(jobs, "clear", lambda *args: None)
        assert ucp.open(source).export_share(out, "dcp", (0, 2)) is None
        with pytest.raises(NotACheckpoint, match="unfinished"):  # it is opened at the end
            ucp.open(source).export_share(out, "dcp", (1, 2))
    assert (out / Share(1, 2).complete).is_file()


def test_what_a_kill_leaves_in_the_folder_is_cleared_by_any_share(source, tmp_path, monkeypatch):
    ucp.open(source).export(tmp_path / "whole", "dcp")
    out = tmp_path / "out"
    left_uncleared(source, out, monkeypatch)
    assert ucp.open(source).export_share(out, "dcp", (0, 2)) is not None
    assert written(out) == digests(tmp_path / "whole")


def test_shares_of_files_that_are_gone_are_not_complete(source, tmp_path, monkeypatch):
    ucp.open(source).export(tmp_path / "whole", "dcp")
    out = tmp_path / "out"
    left_uncleared(source, out, monkeypatch)
    shutil.rmtree(out)
    assert ucp.open(source).export_share(out, "dcp", (0, 2)) is None
    assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
    assert written(out) == digests(tmp_path / "whole")


@pytest.mark.parametrize("word", ["of another conversion or export", "damaged"])
def test_the_word_of_a_share_is_of_one_export(word, source, tmp_path):
    """Who commits says which share is to be run again."""
    ucp.open(source).export(tmp_path / "whole", "dcp")
    out, share = tmp_path / "out", Share(1, 2)
    assert ucp.open(source).export_share(out, "dcp", (0, 2)) is None
    place = tmp_path / ".out.partial" / "files"
    if word == "damaged":
        (place / share.complete).write_bytes(b"{")
    else:
        write_complete(LocalFiles(place), share, "another", {})
    with pytest.raises(CorruptData, match=rf"(?s)complete.jsonl.* {word}.*run share 1/2 again"):
        ucp.open(source).export_share(out, "dcp", (0, 2))
    assert ucp.open(source).export_share(out, "dcp", (1, 2)) is not None
    assert written(out) == digests(tmp_path / "whole")


def test_an_export_by_one_process_is_not_joined(source, tmp_path):
    refusals = []

    def meanwhile(nbytes):
        with pytest.raises(FileExistsError, match="another export is writing") as refused:
            ucp.open(source).export_share(tmp_path / "out", "dcp", (0, 1))
        refusals.append(refused)

    ucp.open(source).export(tmp_path / "out", "dcp", progress=meanwhile)
    assert refusals


@pytest.mark.parametrize("count", [1, 3])
def test_of_a_source_that_contradicts_itself_there_is_no_folder(count, tmp_path):
    in_two_minds(tmp_path / "source")
    for format in ("safetensors", "dcp"):  # one of which leaves out what is damaged
        refused = 0
        for index in range(count):
            try:
                source = ucp.open(tmp_path / "source")
                assert source.export_share(tmp_path / format, format, (index, count)) is None
            except CorruptData:
                refused += 1
        assert refused == 1
        assert not (tmp_path / format).exists()


def test_the_command_does_a_share(tmp_path):
    source, out = DATA / CASES[0][0], tmp_path / "out"
    assert '"committed": false' in run("export", source, out, "--worker", "1/2", "--json")
    assert "this share is done" in run("export", source, out, "--worker", "1/2")
    assert '"format": "safetensors"' in run("export", source, out, "--worker", "0/2", "--json")
    text = run("export", source, out, "--worker", "0/2", "--workers", 2, code=2)
    assert "goes with neither" in text
