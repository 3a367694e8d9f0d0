"""A conversion by processes that know nothing of one another."""

import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from commands import run, run_json
from helpers import digests, memory
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.files import local
from jax_ucp.files.path import file_path
from jax_ucp.jobs import run as jobs
from jax_ucp.jobs.ledger import LEDGER_FILE, Share
from jax_ucp.jobs.run import share_groups
from jax_ucp.universal import copy as copying
from jax_ucp.universal.copy import UniversalTarget, plan_copy, require_target
from jax_ucp.universal.packs import PACK_FROM
from jax_ucp.universal.store import ZarrStore
from large_sources import SOURCES, in_two_minds, made
from share_jobs import Job

DATA = Path(__file__).parents[1] / "data"
REAL = ["deepspeed/tp2_dp2_z1_bf16_swiglu", "torch/dcp_zstd/ckpt"]
REAL.append("megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt")
BUDGET = 4 << 20  # many blocks


@pytest.fixture
def job(tmp_path) -> Job:
    """Of two arrays, each a block."""
    tree = {"param": {"v": np.ones((64, 64)), "w": np.ones((64, 64))}}
    memory(tree).export(tmp_path / "source", "dcp")
    job = Job(tmp_path / "source", tmp_path / "out", tmp_path / "whole")
    job.by_one()
    return job


@given(
    st.lists(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4), max_size=40),
    st.integers(1, 9),
)
def test_groups_are_shared_out_in_their_order_and_evenly(sizes, count):
    groups = [[copying.CopyBlock("a", None, n, 0) for n in group] for group in sizes]
    shares = [share_groups(groups, Share(index, count))[0] for index in range(count)]
    assert [numbered for share in shares for numbered in share] == list(enumerate(groups))
    total, largest = sum(map(sum, sizes)), max(map(sum, sizes), default=0)
    for share in shares:
        assert sum(block.nbytes for _, group in share for block in group) <= total / count + largest


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_every_block_and_every_array_is_of_one_part(count, arrays, packed):
    names = [f"w{i}" for i in range(arrays + PACK_FROM * packed)]
    tree = {name: np.zeros((i % 7, 300), np.float32) for i, name in enumerate(names)}
    contents = memory({"param": tree})._contents
    plan = plan_copy(contents, BUDGET)
    groups = UniversalTarget(contents, plan, file_path("none")).groups(count)
    parts = [share_groups(groups, Share(index, count)) for index in range(count)]
    blocks = [block for part, _ in parts for _, group in part for block in group]
    assert sorted(blocks, key=repr) == sorted(plan.blocks, key=repr)
    [owners, *others] = [owners for _, owners in parts]
    assert all(owners == other for other in others)
    assert owners.keys() == {block.key for block in plan.blocks}
    for index, (part, _) in enumerate(parts):
        keys = {block.key for _, group in part for block in group}
        assert {key for key, owner in owners.items() if owner == index} <= keys
    assert bool(plan.packed) == packed


@pytest.fixture(scope="module", params=[*REAL, *SOURCES])
def source(request, tmp_path_factory) -> Path:
    if request.param in REAL:
        return DATA / request.param
    return made(request.param, tmp_path_factory.mktemp("source"), SOURCES)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_in_any_order_the_shares_make_what_one_process_makes(source, count, tmp_path):
    job = Job(source, tmp_path / "out", tmp_path / "whole")
    job.by_one(budget_bytes=BUDGET)
    order = random.Random(count).sample(range(count), count)
    for index in order[:-1]:
        assert job.share(index, count, budget_bytes=BUDGET) is None
        with pytest.raises(NotACheckpoint, match="unfinished conversion"):
            ucp.open(job.out)
    made = job.share(order[-1], count, budget_bytes=BUDGET)
    assert made is not None
    assert job.is_whole
    assert not any(item.status == "skipped" for item in made.inventory)
    before = digests(job.out)
    for index in range(count):  # any may be run again
        assert job.share(index, count, budget_bytes=BUDGET) is not None
    assert digests(job.out) == before


def test_small_arrays_are_packed_as_one_process_packs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "PACK_BLOCKS", 300)
    tree = {f"w{i}": np.full(3, i, np.float32) for i in range(PACK_FROM + 5)}
    tree["large"] = np.ones((512, 300), np.float32)
    memory({"param": tree}).save(tmp_path / "source")
    job = Job(tmp_path / "source", tmp_path / "out", tmp_path / "whole")
    job.by_one()
    for index in (1, 2, 0):
        job.share(index, 3)
    assert job.is_whole


def test_a_share_that_is_none_is_refused():
    for index, count in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="there is no share"):
            Share(index, count)


def test_another_number_of_shares_or_another_source_is_refused(job, tmp_path):
    memory({"param": {"w": np.zeros((64, 64))}}).export(tmp_path / "other", "dcp")
    assert job.share(0) is None
    with pytest.raises(FormatError, match="in another number of shares"):
        job.share(0, 3)
    with pytest.raises(FormatError, match="unfinished conversion of another source or spec"):
        ucp.open(tmp_path / "other").save_share(job.out, (1, 2))
    with pytest.raises(FormatError):
        ucp.open(job.source).save(job.out)
    assert job.share(1) is not None
    for how in ((0, 3), (0, 1)):
        with pytest.raises(FileExistsError, match="is a checkpoint already"):
            job.share(*how)


@pytest.mark.parametrize("do", ["save_share", "export_share"])
def test_a_machine_that_cuts_otherwise_is_refused_and_one_that_cuts_alike_is_not(
    do, tmp_path, monkeypatch
):
    """Blocks are cut for as many as are in memory at once, at most for eight processors."""
    monkeypatch.setattr("jax_ucp.export.files.TASK_BYTES", 1 << 18)
    w = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    memory({"param": {"w": w, "v": -w}}).export(tmp_path / "source", "dcp")
    source, out = ucp.open(tmp_path / "source"), tmp_path / "out"

    def share(index: int, processors: int):
        monkeypatch.setattr(os, "cpu_count", lambda: processors)
        format = ["safetensors"] * (do == "export_share")
        return getattr(source, do)(out, *format, (index, 2), budget_bytes=4 << 20)

    assert share(0, 2) is None
    with pytest.raises(FormatError, match="another number of processors"):
        share(1, 8)
    assert share(1, 2) is not None
    shutil.rmtree(out)
    assert share(0, 8) is None
    made = share(1, 64)
    assert (made.read("param/w") == w).all()
    assert (made.read("param/v") == -w).all()


def test_one_share_has_one_process_at_a_time(job):
    heard = []

    def meanwhile(block):
        with pytest.raises(FormatError, match="another conversion is writing"):
            job.share(0, 1)
        heard.append(block)

    assert job.share(0, 1, progress=meanwhile) is not None
    assert heard


def test_a_share_begins_while_another_makes_the_ledger(tmp_path, monkeypatch):
    """The other has its file there under the name that it has until it is whole."""
    contents, target = memory({"param": {"w": np.ones(3)}})._contents, file_path(tmp_path / "x")
    link = local._link

    def looked(first: str, path: str) -> None:
        if path.endswith(LEDGER_FILE):
            require_target(contents, target)
        link(first, path)

    monkeypatch.setattr(local, "_link", looked)
    memory({"param": {"w": np.ones(3)}}).save_share(tmp_path / "x", (0, 1))
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes.__lock").write_text("mine")
    with pytest.raises(FileExistsError, match="not those of an unfinished copy"):
        require_target(contents, file_path(tmp_path / "y"))


def test_two_that_commit_at_once_make_one_checkpoint(job, monkeypatch):
    """The second sees all shares done, and the first clears away what it is about to read."""
    job.share(0)
    commit = UniversalTarget.commit

    def committed_by_another(*args):
        monkeypatch.undo()
        commit(*args)
        return commit(*args)

    monkeypatch.setattr(UniversalTarget, "commit", committed_by_another)
    assert job.share(1) is not None
    assert job.is_whole


@pytest.mark.parametrize("ours", [0, 1])
def test_who_is_overtaken_by_anothers_commit_has_the_checkpoint_too(ours, job, monkeypatch):
    """Between its last word and its look at those of the others another has cleared all away. Or,
    where it was done already and is run again, before its last word, of which nothing is left.
    """
    job.share(0)
    write_complete = jobs.write_complete

    def overtaken(*args):
        monkeypatch.undo()
        if ours:
            write_complete(*args)
        assert job.share(1 - ours) is not None
        if not ours:
            write_complete(*args)

    monkeypatch.setattr(jobs, "write_complete", overtaken)
    assert job.share(ours) is not None
    assert job.is_whole


@pytest.mark.parametrize("last", ["require_target", "require_same_job", "share_groups"])
def test_who_begins_when_another_commits_writes_nothing_again(last, job, monkeypatch):
    """A share that is done is run again. Chunks of a checkpoint that are written again are half of
    it meanwhile, and stay so after a kill.
    """
    assert job.share(0) is None
    module = copying if last == "require_target" else jobs
    step = getattr(module, last)

    def overtaken(*args):
        monkeypatch.undo()
        result = step(*args)
        assert job.share(1) is not None
        monkeypatch.setattr(ZarrStore, "write", lambda *args, **how: pytest.fail("written again"))
        return result

    monkeypatch.setattr(module, last, overtaken)
    assert job.share(0) is not None
    assert job.is_whole


def test_those_that_are_last_together_commit_one_after_the_other(job, monkeypatch):
    """They write files of the same names, which are there at once."""
    are_complete, commit_copy = jobs.are_complete, UniversalTarget.commit
    last, inside = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=1)
    together = []

    def both_done(*args):
        last.wait()
        return are_complete(*args)

    def commit(*args):
        with suppress(threading.BrokenBarrierError):
            together.append(inside.wait())
        return commit_copy(*args)

    monkeypatch.setattr(jobs, "are_complete", both_done)
    monkeypatch.setattr(UniversalTarget, "commit", commit)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(job.share, range(2)))
    assert together == []


def test_of_a_source_that_contradicts_itself_there_is_no_checkpoint(tmp_path):
    in_two_minds(tmp_path / "source")
    ends = []
    for index in range(3):
        try:
            made = ucp.open(tmp_path / "source").save_share(tmp_path / "out", (index, 3))
            ends.append("not committed" if made is None else "committed")
        except CorruptData as error:
            ends.append(str(error).split(" in ")[0].rpartition(" ")[2])
    assert set(ends) == {"not committed", "itself"}
    with pytest.raises(NotACheckpoint):
        ucp.open(tmp_path / "out")


@pytest.mark.parametrize("leave", ["all", "ledgers"])
def test_what_a_kill_after_the_commit_leaves_is_cleared_by_the_next(job, monkeypatch, leave):
    def stop(*args):
        raise KeyboardInterrupt

    job.share(0)
    with monkeypatch.context() as patched:
        if leave == "all":
            patched.setattr(jobs, "clear", stop)
        else:
            patched.setattr(local.LocalFiles, "delete", stop)
        with pytest.raises(KeyboardInterrupt):
            job.share(1)
    assert ucp.open(job.out).read("param/w").all()
    assert job.share(0) is not None
    assert job.is_whole


def test_the_share_is_taken_from_the_scheduler(job, monkeypatch):
    def convert(share: str, environment: dict[str, str]) -> dict[str, object]:
        for name in list(os.environ):
            if name.startswith(("SLURM", "JOB_", "OMPI", "PMI")):
                monkeypatch.delenv(name)
        return run_json("convert", job.source, job.out, "--worker", share, env=environment)

    slurm = {"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_TASK_MIN": "10"}
    slurm["SLURM_ARRAY_TASK_COUNT"] = "6"
    assert convert("auto", slurm)["share"] == [2, 6]
    shutil.rmtree(job.out)
    assert convert("auto/4", {"JOB_COMPLETION_INDEX": "3"})["share"] == [3, 4]
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert convert("auto", mpi)["share"] == [1, 4]
    assert convert("auto", {"PMI_RANK": "0", "PMI_SIZE": "4"})["share"] == [0, 4]
    made = convert("2/4", {})
    assert made["format"] == "universal"


@pytest.mark.parametrize("share", ["3/3", "1", "auto", "x/2", "-1/2", "1/2/3", "/2"])
def test_a_worker_that_is_none_is_a_usage_error(share, tmp_path):
    unclear = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "x"}
    assert "is not a share" in run("convert", "a", "b", "--worker", share, code=2, env=unclear)
