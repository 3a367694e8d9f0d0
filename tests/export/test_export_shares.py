"""An export by processes that know nothing of one another."""

import fcntl
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from commands import run
from helpers import memory
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.export import files, folder
from jax_ucp.files.local import LocalFiles
from jax_ucp.jobs import run as jobs
from jax_ucp.jobs.ledger import Share, write_complete
from large_sources import STATES, in_two_minds
from share_jobs import Job

DATA = Path(__file__).parents[1] / "data"
CASES = [
    ("deepspeed/tp2_dp2_z1_bf16_swiglu", "safetensors"),
    ("deepspeed/tp2_dp2_z1_bf16_swiglu", "deepspeed"),
    ("megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt", "dcp"),
    ("torch/hf_llama/ckpt", "safetensors"),
]
BUDGET = 4 << 20  # many blocks


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    """Several tasks of one share."""
    monkeypatch.setattr("jax_ucp.export.files.TASK_BYTES", 1 << 20)
    memory(STATES).export(tmp_path / "source", "dcp")
    job = Job(tmp_path / "source", tmp_path / "out", tmp_path / "whole", "dcp")
    job.by_one()
    return job


@pytest.mark.parametrize(("case", "format"), CASES)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_in_any_order_the_shares_make_what_one_process_makes(case, format, count, tmp_path):
    job = Job(DATA / case, tmp_path / "out", tmp_path / "whole", format)
    job.by_one()
    order = random.Random(count).sample(range(count), count)
    for index in order[:-1]:
        assert job.share(index, count) is None
        assert not job.out.exists()
    assert job.share(order[-1], count) is not None
    assert job.is_whole
    for index in range(count):  # any may be run again
        assert job.share(index, count) is not None
    assert job.is_whole


def test_of_a_stopped_share_what_is_on_disk_is_not_written_again(job, tmp_path, monkeypatch):
    heard = []

    def stop(nbytes):
        heard.append(nbytes)
        if len(heard) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.share(0, 1, budget_bytes=BUDGET, progress=stop)
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
    assert job.share(0, 1, budget_bytes=BUDGET) is not None
    assert job.is_whole
    stored = sum(array.nbytes for arrays in STATES.values() for array in arrays.values())
    assert sum(again) == stored - sum(done[1:])


def test_shares_at_once_make_one_folder(job, tmp_path):
    for attempt in range(4):
        again = replace(job, out=tmp_path / f"out {attempt}")
        with ThreadPoolExecutor(3) as threads:
            made = list(threads.map(partial(again.share, count=3), range(3)))
        assert any(one is not None for one in made)
        assert again.is_whole


@pytest.mark.parametrize("when", ["require_same_job", "complete_files"])
def test_who_is_overtaken_by_another_has_the_folder_too(when, job, monkeypatch):
    job.share(0)
    module = folder if when == "complete_files" else jobs
    original = getattr(module, when)

    def overtaken(*args):
        monkeypatch.setattr(module, when, original)
        monkeypatch.setattr("fcntl.flock", lambda *args: None)  # the other ends before this one
        assert job.share(1) is not None
        return original(*args)

    monkeypatch.setattr(module, when, overtaken)
    assert job.share(1) is not None
    assert job.is_whole


def test_who_waited_while_another_made_the_folder_leaves_it_as_it_is(job, monkeypatch):
    """The other has not cleared away yet."""
    flock = fcntl.flock
    job.share(0)

    def waited(handle, how):
        if how == fcntl.LOCK_EX:
            with monkeypatch.context() as other:
                other.setattr(fcntl, "flock", lambda *args: None)
                other.setattr("shutil.rmtree", lambda *args, **how: None)
                assert job.share(1) is not None
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", waited)
    assert job.share(1) is not None
    assert job.is_whole


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


def test_another_export_is_refused_and_destroys_nothing(job, tmp_path):
    memory({"param": {"w": np.zeros((64, 64))}}).export(tmp_path / "other", "dcp")
    other_format = replace(job, format="safetensors")
    assert job.share(0) is None
    with pytest.raises(FormatError, match="in another number of shares"):
        job.share(0, 3)
    with pytest.raises(FormatError, match="unfinished conversion of another source"):
        replace(job, source=tmp_path / "other").share(1)
    with pytest.raises(FormatError):
        other_format.share(1)
    with pytest.raises(FileExistsError, match="run all of them, or delete that folder"):
        ucp.open(job.source).export(job.out, "dcp")
    assert job.share(1) is not None
    for again, share in ((job, (0, 3)), (job, (0, 1)), (other_format, (0, 2))):
        with pytest.raises(FileExistsError, match="is in use"):
            again.share(*share)
    with pytest.raises(FileExistsError, match="lies in the source"):
        replace(job, out=job.source / "x").share(0)


def left_uncleared(job: Job, monkeypatch) -> None:
    """Two shares made the folder, and who made it was killed before the rest was cleared away."""
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *args, **how: None)
        killed.setattr(jobs, "clear", lambda *args: None)
        assert job.share(0) is None
        with pytest.raises(NotACheckpoint, match="unfinished"):  # it is opened at the end
            job.share(1)
    assert (job.out / Share(1, 2).complete).is_file()


def test_what_a_kill_leaves_in_the_folder_is_cleared_by_any_share(job, monkeypatch):
    left_uncleared(job, monkeypatch)
    assert job.share(0) is not None
    assert job.is_whole


def test_shares_of_files_that_are_gone_are_not_complete(job, monkeypatch):
    left_uncleared(job, monkeypatch)
    shutil.rmtree(job.out)
    assert job.share(0) is None
    assert job.share(1) is not None
    assert job.is_whole


@pytest.mark.parametrize("word", ["of another conversion or export", "damaged"])
def test_the_word_of_a_share_is_of_one_export(word, job, tmp_path):
    """Who commits says which share is to be run again."""
    assert job.share(0) is None
    share, place = Share(1, 2), tmp_path / ".out.partial" / "files"
    if word == "damaged":
        (place / share.complete).write_bytes(b"{")
    else:
        write_complete(LocalFiles(place), share, "another", {})
    with pytest.raises(CorruptData, match=rf"(?s)complete.jsonl.* {word}.*run share 1/2 again"):
        job.share(0)
    assert job.share(1) is not None
    assert job.is_whole


@pytest.mark.parametrize("by_one", [False, True])
def test_one_share_has_one_process_at_a_time_and_joins_no_export_by_one(job, by_one):
    refused = FileExistsError if by_one else FormatError
    heard = []

    def meanwhile(nbytes):
        with pytest.raises(refused, match=r"another (conversion|export) is writing"):
            job.share(0, 1 if by_one else 2)
        heard.append(nbytes)

    if by_one:
        ucp.open(job.source).export(job.out, "dcp", progress=meanwhile)
    else:
        job.share(0, progress=meanwhile)
    assert heard


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
