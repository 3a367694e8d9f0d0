"""Conversions, exports and verifications by any executor: the same bytes, the same refusals."""

import multiprocessing
import pickle
import shutil
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jax_ucp as ucp
from helpers import MemoryStore, digests, flip_bit, memory
from jax_ucp import errors
from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import CorruptData, NotACheckpoint, WorkerError
from jax_ucp.jobs import work
from jax_ucp.jobs.work import _portable
from jax_ucp.tree import Key, Leaf
from large_sources import SOURCES, STATES, made
from programs import python
from test_read_once import files_of, reads_of
from workers.executor import die_at_write, log_reads

SPAWN = multiprocessing.get_context("spawn")
DATA = Path(__file__).parent / "data"


EXECUTORS = "threads", "processes"


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request):
    threads = request.param == "threads"
    with ThreadPoolExecutor(3) if threads else ProcessPoolExecutor(2, SPAWN) as executor:
        yield executor


@pytest.fixture(scope="module", params=SOURCES)
def source(request, tmp_path_factory) -> Path:
    return made(request.param, tmp_path_factory.mktemp("source"), SOURCES)


SMALL = 24 << 20  # many blocks
TARGETS = {
    "save": lambda source, target, how: source.save(target, **how),
    "save in small blocks": lambda source, target, how: source.save(
        target, budget_bytes=SMALL, **how
    ),
    "export dcp": lambda source, target, how: source.export(target, "dcp", **how),
    "export safetensors": lambda source, target, how: source.export(target, "safetensors", **how),
}


# Each two of a source, an executor and a job meet once at least.
MET = [
    (source, executor, job)
    for i, source in enumerate(SOURCES)
    for j, executor in enumerate(EXECUTORS)
    for k, job in enumerate(TARGETS)
    if (i + j + k) % 2 == 0
]
indirect = ["source", "executor"]
in_pairs = pytest.mark.parametrize(("source", "executor", "job"), MET, indirect=indirect)


@in_pairs
def test_a_flipped_bit_is_refused_with_the_same_words(source, job, executor, tmp_path):
    copied = tmp_path / "source"
    (shutil.copy if source.is_file() else shutil.copytree)(source, copied)
    tensors = [path for path in files_of(copied) if path.stat().st_size > 1 << 14]
    path = max(tensors, key=lambda path: path.stat().st_size)
    if path.suffix == ".safetensors":
        return  # without checksums
    flip_bit(path, 2 * path.stat().st_size // 5, bit=4)
    texts = []
    for how in ({}, {"executor": executor}):
        with pytest.raises(CorruptData, match=r"contradicts itself in [12] places") as refused:
            TARGETS[job](ucp.open(copied), tmp_path / "out", how)
        texts.append(str(refused.value))
        assert not (tmp_path / "out").exists()
    assert texts[0] == texts[1]
    assert list(ucp.open(copied).verify(executor=executor)) == list(ucp.open(copied).verify())


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """An executor of processes that log what they read, and the log."""
    log = tmp_path_factory.mktemp("reads") / "log"
    with ProcessPoolExecutor(2, mp_context=SPAWN, initializer=log_reads, initargs=[log]) as pool:
        yield pool, log


@pytest.mark.parametrize("job", TARGETS)
def test_every_byte_is_read_once_over_all_processes(source, job, logged, tmp_path):
    executor, log = logged
    checkpoint = ucp.open(source)
    before = log.stat().st_size if log.exists() else 0
    with reads_of(source) as counts:
        TARGETS[job](checkpoint, tmp_path / "out", {"executor": executor})
    here = sum(int(count.sum()) for count in counts.values())
    lines = [line.split("\t") for line in log.read_text()[before:].splitlines()]
    there = sum(int(n) for file, _, n in lines if Path(file).is_relative_to(source.resolve()))
    stored = sum(path.stat().st_size for path in files_of(source))
    # safetensors have the weights alone, of which masters are a part; the rest is proved here
    assert there > (0.3 if job.endswith("safetensors") else 0.96) * stored
    assert 0.98 < (here + there) / stored <= 1.02


def _trained() -> ucp.Checkpoint:
    """The weights of a training run in memory, with the states of its optimizer."""
    tx, params = optax.adam(1e-3), {"w": np.arange(8, dtype=np.float32)}
    tree = {"params": params, "opt_state": jax.tree.map(np.asarray, tx.init(params))}
    return ucp.Checkpoint.of(tree).torch_states(tx, params)


def _dequantized() -> ucp.Checkpoint:
    return ucp.open(DATA / "quantized_models/deepseek_v3_fp8/ckpt", dequantize="bfloat16")


MADE = {
    "mapped": lambda: ucp.open(DATA / "torch/hf_llama/ckpt").map(
        "hf-llama-to-tunix", assume=["rope_theta"]
    ),
    "in memory": lambda: ucp.Checkpoint.of({"param": {"w": np.arange(6).reshape(2, 3)}}),
    "of a training run": _trained,
    "dequantised": _dequantized,
    "weights": lambda: ucp.open(DATA / "torch/hf_llama/ckpt").weights("param"),
}


@pytest.mark.parametrize("made", MADE)
def test_whatever_a_checkpoint_was_made_of_is_sent_and_gives_the_same_bytes(
    made, executor, tmp_path
):
    checkpoint, heard = MADE[made](), []
    checkpoint.save(tmp_path / "here" / "ours")
    checkpoint.save(tmp_path / "there" / "ours", executor=executor, progress=heard.append)
    for format in ("dcp", "safetensors") if made != "mapped" else ():
        checkpoint.export(tmp_path / "here" / format, format)
        checkpoint.export(tmp_path / "there" / format, format, executor=executor)
    assert digests(tmp_path / "there") == digests(tmp_path / "here") != {}
    assert heard
    assert list(checkpoint.verify(executor=executor)) == list(checkpoint.verify())


def test_what_cannot_be_sent_is_refused_before_anything_is_written(tmp_path):
    class Own(MemoryStore):
        """A class that another process does not find."""

    leaf = Leaf((Key("dict", "param"), Key("dict", "w")), "w", "array", (4,), "float32")
    own = Own({"w": np.ones(4, np.float32)})
    made = ucp.Checkpoint(Contents("memory", "in memory", [leaf], own))
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        for job in (
            lambda: made.save(tmp_path / "out", executor=processes),
            lambda: made.export(tmp_path / "out", "dcp", executor=processes),
            lambda: list(made.verify(executor=processes)),
        ):
            with pytest.raises(WorkerError, match=r"cannot be sent.*can be pickled \(.*Own"):
                job()
    assert list(tmp_path.iterdir()) == []
    with ThreadPoolExecutor(2) as threads:
        assert made.save(tmp_path / "out", executor=threads).read("param/w").sum() == 4
    with pytest.raises(TypeError, match=r"executor='threads' should be a concurrent\.futures"):
        made.save(tmp_path / "again", executor="threads")


def test_arrays_in_memory_beyond_a_bound_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "MAX_MESSAGE_BYTES", 1 << 10)
    made = ucp.Checkpoint.of({"param": {"w": np.ones(1 << 10)}})
    refused = pytest.raises(WorkerError, match="arrays in memory among them")
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes, refused:
        made.save(tmp_path / "out", executor=processes)
    assert not (tmp_path / "out").exists()


class Counting(ProcessPoolExecutor):
    """Counts the messages that have contents."""

    sent = all = 0

    def submit(self, work, *args):
        self.all += 1
        self.sent += isinstance(work, partial) and work.args[-1] is not None
        return super().submit(work, *args)


@pytest.mark.parametrize("at_once", [16, 1])
def test_contents_are_sent_with_first_tasks_and_to_who_lacks_them(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "SENT_AT_ONCE", at_once)
    monkeypatch.setattr(work, "TASKS_A_PROCESS", 1)
    monkeypatch.setattr(work, "TASK_BOXES", 1)
    monkeypatch.setattr(work, "TASK_BYTES", 1)
    checkpoint = ucp.open(DATA / "deepspeed/tp2_dp2_z1_bf16_swiglu")
    with Counting(2, mp_context=SPAWN) as processes:
        there = list(checkpoint.verify(executor=processes))
        assert there == list(checkpoint.verify())
        assert processes.all > 100
        assert at_once <= processes.sent <= 20 < len(there)


def test_a_process_that_dies_is_one_error_and_the_next_call_takes_up_what_is_done(tmp_path):
    memory(STATES).export(tmp_path / "source", "dcp")
    checkpoint = ucp.open(tmp_path / "source")
    with (
        ProcessPoolExecutor(
            2, mp_context=SPAWN, initializer=die_at_write, initargs=[3]
        ) as processes,
        pytest.raises(
            WorkerError, match=r"has ended before its work was done.*the same call.*continues it"
        ),
    ):
        checkpoint.save(tmp_path / "out", executor=processes, budget_bytes=4 << 20)
    with pytest.raises(NotACheckpoint, match="unfinished conversion"):
        ucp.open(tmp_path / "out")
    with ProcessPoolExecutor(2, mp_context=SPAWN) as processes:
        checkpoint.save(tmp_path / "out", executor=processes, budget_bytes=4 << 20)
    checkpoint.save(tmp_path / "here", budget_bytes=4 << 20)
    assert digests(tmp_path / "out") == digests(tmp_path / "here") != {}


class Lossy(ThreadPoolExecutor):
    """Loses what it was given, as a cluster does whose workers are gone."""

    def __init__(self, keeps: int):
        super().__init__(1)
        self._keeps = keeps

    def submit(self, work, *args):
        self._keeps -= 1
        if self._keeps >= 0:
            return super().submit(work, *args)
        lost = Future()
        lost.set_exception(ConnectionResetError("the scheduler is gone"))
        return lost


@pytest.mark.parametrize("keeps", [0, 1, 3])
def test_what_an_executor_raises_of_itself_is_a_worker_error(keeps, tmp_path):
    memory(STATES).export(tmp_path / "source", "dcp")
    checkpoint = ucp.open(tmp_path / "source")
    words = "ConnectionResetError: the scheduler is gone"
    with Lossy(keeps) as executor, pytest.raises(WorkerError, match=words):
        checkpoint.save(tmp_path / "out", executor=executor, budget_bytes=4 << 20)
    assert not (tmp_path / "out" / "ucp.json").exists()


def test_a_spec_is_that_of_the_opening_whatever_its_file_has_become(executor, tmp_path):
    spec = tmp_path / "mine.yaml"
    spec.write_text("extends: megatron")
    checkpoint = ucp.open(DATA / "megatron/legacy_tp2_dp2_distopt_bf16/ckpt", spec=spec)
    spec.write_text("shards: []")
    checkpoint.save(tmp_path / "there", executor=executor)
    ucp.open(checkpoint.path).save(tmp_path / "here")
    assert digests(tmp_path / "there") == digests(tmp_path / "here") != {}


def test_a_source_that_changed_before_a_process_opens_it_is_refused(tmp_path):
    memory(STATES).export(tmp_path / "source", "dcp")
    checkpoint = ucp.open(tmp_path / "source")
    (tmp_path / "source" / ".metadata").touch()
    refused = pytest.raises(CorruptData, match="is another checkpoint for this process")
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes, refused:
        checkpoint.save(tmp_path / "out", executor=processes)
    with pytest.raises(NotACheckpoint):
        ucp.open(tmp_path / "out")


@pytest.mark.parametrize("target", ["save", "export dcp", "verify"])
def test_processes_do_without_jax(target, tmp_path):
    checkpoint = ucp.open(DATA / "deepspeed/tp2_dp2_z3_bf16")
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        if target == "verify":
            assert list(checkpoint.verify(executor=processes))
        else:
            TARGETS[target](checkpoint, tmp_path / "out", {"executor": processes})
        modules = processes.submit(eval, "set(__import__('sys').modules)").result()
    assert "jax_ucp.jobs.work" in modules
    assert not {"jax", "orbax", "torch"} & modules


# A process of its own, which has no threads that a fork could break.
FORKING = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import jax_ucp as ucp
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
    try:
        ucp.open(sys.argv[1]).save(sys.argv[2], executor=executor)
    except ucp.errors.WorkerError as error:
        print(error)
"""


def test_processes_that_are_forked_are_refused(tmp_path):
    printed = python("-c", FORKING, DATA / "torch/hf_llama/ckpt", tmp_path / "x")
    assert "get_context('spawn')" in printed
    assert not (tmp_path / "x").exists()


def every_error(base: type = errors.UCPError) -> list[type]:
    return [base, *(each for below in base.__subclasses__() for each in every_error(below))]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_comes_back_from_a_process_as_it_was(kind):
    error = kind("a.pt: 3 is not 4")
    error.add_note("while reading b")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__notes__) == (kind, str(error), error.__notes__)


def test_an_error_that_cannot_come_back_does_so_as_its_text():
    class Odd(Exception):  # a class that another process does not find
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    assert str(_portable(Odd(1, 2))) == "Odd: 1 and 2"
    assert isinstance(_portable(Odd(1, 2)), WorkerError)
    same = OSError(28, "No space left on device", "/x")
    assert _portable(same) is same
