"""Exports into buckets: the files of the local export, byte for byte, and whole or not there."""

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import boto3
import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case, bits_of
from commands import run
from helpers import contents_of, memory, numbered, tree_of_files
from jax_ucp.arrays.checks import LeafClaim
from jax_ucp.arrays.proof import Zeros
from jax_ucp.arrays.value import Constant
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import (
    CorruptData,
    FormatError,
    NotACheckpoint,
    StoreError,
    UCPError,
    UnsupportedPath,
)
from jax_ucp.export import streams
from jax_ucp.export.streams import BucketTarget
from jax_ucp.files.object_store import Bucket
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import read_file
from jax_ucp.formats import exporting
from jax_ucp.formats.exporting import EXPORT_FORMATS
from jax_ucp.jobs import run as jobs
from jax_ucp.jobs.ledger import RESULT_FILE, WRITER_FILE, Share, claimed
from remote_faults import hurry, random_faults
from servers.fault_proxy import Faults
from servers.stores import BUCKET, Store

STATES = {
    "param": {"w": numbered((700, 900), np.float32), "b": numbered((5,), np.float32)},
    "exp_avg": {"w": numbered((700, 900), np.float32) + 1, "b": numbered((5,), np.float32)},
    "buffer": {"table": numbered((3, 4), np.int64), "empty": np.zeros((0, 3), np.float32)},
}
CONFIG = {"model_type": "llama", "dtype": "float32"}
FORMATS = [format for format in EXPORT_FORMATS if format != "megatron"]  # which has its own names


def source(folder):
    """A folder of a model with its config and what goes with it."""
    memory(STATES, {"config.json": {"config": CONFIG}}).save(folder / "source")
    return ucp.open(folder / "source")


def objects(url: str) -> dict[str, bytes]:
    files = file_path(url).folder()
    return {file.name: read_file(files, file.name) for file in files.walk()}


CASES = [(format, {}) for format in FORMATS]
CASES += [("safetensors", {"max_shard_bytes": 10_000}), ("deepspeed", {"zero_stage": 3})]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_an_export_into_a_bucket_has_the_bytes_of_the_local_one(format, options, store, tmp_path):
    checkpoint = source(tmp_path)
    here = checkpoint.export(tmp_path / "out", format, **options)
    there = checkpoint.export(f"{store.url}/out", format, **options)
    assert objects(f"{store.url}/out") == tree_of_files(tmp_path / "out")
    assert there.path.startswith(store.url)
    assert bits_of(there) == bits_of(here)


def test_an_export_to_megatron_into_a_bucket_is_named_by_its_tracker_last(store, tmp_path):
    checkpoint = Case("megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16").open()
    here = checkpoint.export(tmp_path / "out", "megatron")
    there = checkpoint.export(f"{store.url}/out", "megatron")
    assert objects(f"{store.url}/out") == tree_of_files(tmp_path / "out")
    assert bits_of(there) == bits_of(here)
    assert checkpoint.plan_export("megatron").files[-1].name == "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(("format", "options"), CASES)
def test_shares_write_to_a_bucket_what_one_process_writes(format, options, store, tmp_path):
    """In any order, and any may be run again; until all are done nothing there can be opened."""
    checkpoint, out = source(tmp_path), f"{store.url}/out"
    checkpoint.export(tmp_path / "out", format, **options)
    for index in (2, 0):
        assert checkpoint.export_share(out, format, (index, 3), **options) is None
        with pytest.raises(NotACheckpoint, match="unfinished"):
            ucp.open(out)
    with pytest.raises(FileExistsError, match="is in use"):
        checkpoint.export(out, format, **options)
    with pytest.raises(FormatError, match="in another number of shares"):
        checkpoint.export_share(out, format, (0, 2), **options)
    for index in (1, 0):
        assert checkpoint.export_share(out, format, (index, 3), **options) is not None
        written = objects(out)
        assert RESULT_FILE in written
        assert without_note(written) == tree_of_files(tmp_path / "out")
    file_path(out).folder().delete(checkpoint.plan_export(format, **options).files[-1].name)
    with pytest.raises(CorruptData, match=r"is not whole any more:\n .* is missing"):
        checkpoint.export_share(out, format, (0, 3), **options)


def without_note(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != RESULT_FILE}


@pytest.mark.parametrize("step", ["write_complete", "committing", "clear"])
def test_a_share_that_is_stopped_is_done_by_the_same_call(step, s3, tmp_path, monkeypatch):
    """What it wrote is read again, and written only where it is not what it was."""
    checkpoint, out = source(tmp_path), f"{s3.url}/out"
    checkpoint.export(tmp_path / "out", "deepspeed")
    checkpoint.export_share(out, "deepspeed", (0, 2))

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(jobs, step, stop)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.export_share(out, "deepspeed", (1, 2))
    damaged = [name for name in objects(out) if name.endswith("exp_avg.pt")][-1]
    if step != "clear":  # else nobody looks at it again
        file_path(out).folder().write(damaged, [b"damaged"], durable=True)
    written, write_large = [], Bucket.write_large

    def counted(files, name, *how):
        written.append(name)
        write_large(files, name, *how)

    monkeypatch.setattr(Bucket, "write_large", counted)
    assert checkpoint.export_share(out, "deepspeed", (1, 2)) is not None
    assert without_note(objects(out)) == tree_of_files(tmp_path / "out")
    assert written == [damaged] * (step != "clear")


def test_a_share_and_an_export_by_one_process_keep_out_of_each_others_way(s3, tmp_path):
    checkpoint, out = source(tmp_path), f"{s3.url}/out"
    with claimed(file_path(out).folder()):
        with pytest.raises(FileExistsError, match="another save or export"):
            checkpoint.export_share(out, "dcp", (0, 2))
        assert objects(out).keys() == {WRITER_FILE}
    # the claim is made after the share has looked for one
    plan = checkpoint.plan_export("dcp")
    target = exporting.export_target(checkpoint._contents, plan, file_path(out))
    free, target.require_free = target.require_free, lambda is_shared: None
    with claimed(file_path(out).folder()), pytest.raises(FileExistsError, match="another save"):
        jobs.run_share(target, Share(0, 2))
    assert objects(out) == {}
    free(True)


def large(rows: int = 3000) -> dict[str, dict[str, np.ndarray]]:
    """Two arrays of 12 MB, each of two parts of a file at least."""
    return {"param": {name: numbered((rows, 1000), np.float32) + n for n, name in enumerate("ab")}}


class Counting:
    """Reads of a checkpoint in memory, in bytes; the array of a key may change between two."""

    def __init__(self, checkpoint: ucp.Checkpoint, monkeypatch: pytest.MonkeyPatch):
        arrays = checkpoint._contents.arrays
        read = arrays.read
        self.nbytes, self.changes = 0, False
        lock = threading.Lock()

        def counted(key, box):
            data = read(key, box)
            with lock:
                self.nbytes += data.nbytes
                return data + (self.changes and self.nbytes > 12_000_000)

        monkeypatch.setattr(arrays, "read", counted, raising=False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("budget", [1 << 20, 512 << 20])
def test_what_a_header_sums_is_held_or_read_twice(format, budget, s3, tmp_path, monkeypatch):
    checkpoint = memory(large())
    checkpoint.export(tmp_path / "out", format)
    counting = Counting(checkpoint, monkeypatch)
    heard: list[int] = []
    checkpoint.export(s3.url, format, budget_bytes=budget, progress=heard.append)
    assert objects(s3.url) == tree_of_files(tmp_path / "out")
    twice = format != "safetensors" and budget == 1 << 20
    assert counting.nbytes == (2 if twice else 1) * checkpoint.nbytes
    assert sum(heard) == checkpoint.nbytes
    assert uploads(s3) == []


def uploads(store: Store) -> list:
    """What was begun to be uploaded in parts, and not ended."""
    client = boto3.client("s3", endpoint_url=f"http://{store.endpoint}")
    prefix = store.url.removeprefix(f"s3://{BUCKET}/")
    return client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])


def test_an_array_that_changes_between_two_reads_is_refused(s3, monkeypatch):
    checkpoint = memory(large())
    Counting(checkpoint, monkeypatch).changes = True
    with pytest.raises(CorruptData, match="was read twice, and was not the same"):
        checkpoint.export(s3.url, "dcp", budget_bytes=1 << 20)
    assert objects(s3.url) == {}
    assert uploads(s3) == []


@pytest.mark.parametrize("format", FORMATS)
def test_no_more_than_the_budget_is_in_memory(format, s3):
    """Beside the least that a store takes as a part: 5 MiB, of which there are three."""
    checkpoint = memory({"param": {str(n): large()["param"]["a"] + n for n in range(8)}})
    budget = 32 << 20
    tracemalloc.start()
    try:
        checkpoint.export(s3.url, format, budget_bytes=budget)
        assert tracemalloc.get_traced_memory()[1] < budget < checkpoint.nbytes / 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nbytes", [1, 50 << 30, 1 << 40])
@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
def test_a_file_has_no_more_parts_than_a_store_takes(nbytes, max_bytes, s3, monkeypatch):
    taken = []

    def noted(files, name, parts, size, at_once):
        return taken.append((size, at_once))

    monkeypatch.setattr(Bucket, "_write", noted)
    file_path(s3.url).folder().write_large("a", [], nbytes, max_bytes)
    ((part_bytes, at_once),) = taken
    assert part_bytes >= 5 << 20
    assert nbytes <= 10_000 * part_bytes
    assert at_once == 1 or (at_once + 2) * part_bytes <= max_bytes


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_there_is_not_written_over(format, store, tmp_path):
    checkpoint = source(tmp_path)
    written = checkpoint.export(f"{store.url}/out", format)
    before = objects(store.url)
    with pytest.raises(FileExistsError, match="is in use"):
        checkpoint.export(f"{store.url}/out", format)
    with pytest.raises(FileExistsError, match="is in use"):
        checkpoint.export(f"{store.url}/out/{min(before)[4:]}", format)
    with pytest.raises(FileExistsError, match="lies in the source"):
        written.export(f"{written.path}/below", format)
    assert objects(store.url) == before


@pytest.mark.parametrize("format", FORMATS)
def test_the_second_of_two_exports_writes_nothing(format, store, tmp_path):
    checkpoint = source(tmp_path)
    with claimed(file_path(store.url).folder()):
        with pytest.raises(FileExistsError, match=r"another save or export.*writer.*begun"):
            checkpoint.export(store.url, format)
        assert objects(store.url).keys() == {WRITER_FILE}
    checkpoint.export(store.url, format)
    assert WRITER_FILE not in objects(store.url)


@pytest.mark.parametrize("format", FORMATS)
def test_who_ends_second_is_told_and_deletes_nothing(format, s3, tmp_path, monkeypatch):
    """A writer that nothing keeps away ends first."""
    checkpoint = source(tmp_path)
    last = checkpoint.plan_export(format).files[-1].name
    files = file_path(s3.url).folder()
    monkeypatch.setattr(streams, "require_written", lambda *args: files.create(last, b"another's"))
    with pytest.raises(FileExistsError, match="was written by another meanwhile"):
        checkpoint.export(s3.url, format)
    assert objects(s3.url)[last] == b"another's"
    assert len(objects(s3.url)) == len(checkpoint.plan_export(format).files)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3000])
def test_a_source_that_contradicts_itself_leaves_nothing(format, rows, s3):
    """Known when all was read: the last file must not be there before."""
    zeros = Zeros("a copy", Constant(np.ones(1)), "differs")
    checkpoint = Checkpoint(contents_of(large(rows), claims=[LeafClaim(zeros, frozenset())]))
    with pytest.raises(CorruptData, match=r"a copy:.*differs"):
        checkpoint.export(s3.url, format)
    assert objects(s3.url) == {}
    assert uploads(s3) == []


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_lost_or_changed_meanwhile_leaves_nothing(format, s3, tmp_path, monkeypatch):
    checkpoint = source(tmp_path)
    files = file_path(s3.url).folder()
    upload = BucketTarget.write

    def lost(target, work):
        upload(target, work)
        files.write("another", [b"x"], durable=True)

    with monkeypatch.context() as patched:
        patched.setattr(BucketTarget, "write", lost)
        with pytest.raises(CorruptData, match="another is not a file of this export"):
            checkpoint.export(s3.url, format)
    files.delete("another")
    for path in (tmp_path / "source").rglob("c*"):
        path.write_bytes(path.read_bytes())
    with pytest.raises(CorruptData, match="the checkpoint changed while it was read"):
        checkpoint.export(s3.url, format)
    assert objects(s3.url) == {}


def test_an_error_of_the_source_is_that_of_the_export(s3, monkeypatch):
    """And not taken for one of the store."""
    checkpoint = memory(large())
    read = checkpoint._contents.arrays.read

    def failing(key, box):
        if key.endswith("b") and box.stop[0] > 2500:  # in the second part of the file
            raise FileNotFoundError(f"{key} of the source")
        return read(key, box)

    monkeypatch.setattr(checkpoint._contents.arrays, "read", failing, raising=False)
    with pytest.raises(FileNotFoundError, match="of the source"):
        checkpoint.export(s3.url, "safetensors", budget_bytes=64 << 20)
    assert objects(s3.url) == {}
    assert uploads(s3) == []


def test_an_export_that_the_store_ends_leaves_nothing(s3, tmp_path, monkeypatch):
    checkpoint = source(tmp_path)
    total = len(checkpoint.plan_export("deepspeed").files)
    for failing in range(1, total):
        count = itertools.count()
        write = Bucket._write

        def stopped(*args, write=write, count=count, failing=failing):
            if next(count) == failing:
                raise StoreError("no more")
            write(*args)

        with monkeypatch.context() as patched:
            patched.setattr(Bucket, "_write", stopped)
            if failing < total - 1:
                with pytest.raises(StoreError, match="no more"):
                    checkpoint.export(s3.url, "deepspeed")
                assert objects(s3.url) == {}


@pytest.mark.parametrize(("format", "options"), CASES)
def test_without_one_of_its_files_nothing_opens_with_other_bits(format, options, s3, tmp_path):
    """A kill leaves some of the files, and not the last."""
    whole = bits_of(source(tmp_path).export(tmp_path / "out", format, **options))
    written = tree_of_files(tmp_path / "out")
    for number, missing in enumerate(written):
        files = file_path(f"{s3.url}/{number}").folder()
        for name in written.keys() - {missing}:
            files.write(name, [written[name]], durable=True)
        try:
            opened = ucp.open(f"{s3.url}/{number}")
        except UCPError:
            continue
        assert bits_of(opened) == whole, missing


@pytest.mark.parametrize("url", ["hf://org/name", "https://host/x", "ftp://host/x"])
def test_where_nothing_can_be_written_an_export_is_refused(url, tmp_path):
    with pytest.raises(UnsupportedPath):
        memory(STATES).export(url, "dcp")


def test_the_command_exports_into_a_bucket(s3, tmp_path):
    source(tmp_path).export(tmp_path / "out", "safetensors")
    text = run("export", tmp_path / "source", f"{s3.url}/out")
    assert f"{s3.url}/out: 4 tensors" in text
    assert objects(f"{s3.url}/out") == tree_of_files(tmp_path / "out")
    assert "is in use" in run("export", tmp_path / "source", f"{s3.url}/out", code=1)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_processes_export_into_a_bucket(format, s3, tmp_path):
    checkpoint = source(tmp_path)
    checkpoint.export(tmp_path / "out", format)
    heard: list[int] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        checkpoint.export(s3.url, format, executor=executor, progress=heard.append)
    assert objects(s3.url) == tree_of_files(tmp_path / "out")
    assert sum(heard) == checkpoint.plan_export(format).write_bytes


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_azure(format, azure, tmp_path):
    checkpoint = source(tmp_path)
    checkpoint.export(tmp_path / "out", format)
    checkpoint.export(azure.url, format)
    assert objects(azure.url) == tree_of_files(tmp_path / "out")
    with pytest.raises(FileExistsError, match="is in use"):
        checkpoint.export(azure.url, format)


_EXPORT = """
import sys, jax_ucp as ucp
checkpoint = ucp.open(sys.argv[1])
print("begun", flush=True)
checkpoint.export(sys.argv[2], sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_export_leaves_nothing_that_opens_and_is_wrong(format, faulty_s3, tmp_path):
    store, proxy = faulty_s3
    proxy.set(Faults(latency_s=0.02))
    memory(large(300) | {"exp_avg": large(300)["param"]}).save(tmp_path / "source")
    whole = bits_of(ucp.open(tmp_path / "source").export(tmp_path / "out", format))
    dice, ends = random.Random(format), Counter()
    for number in range(6):
        url = f"{store.url}/{number}"
        command = [sys.executable, "-c", _EXPORT, str(tmp_path / "source"), url, format]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0, 0.6))
        process.kill()
        process.communicate()
        try:
            assert bits_of(ucp.open(url)) == whole
            ends["whole"] += 1
        except (UCPError, FileNotFoundError):
            ends["not there"] += 1
            if objects(url):
                with pytest.raises(FileExistsError, match=r"is in use|another save or export"):
                    ucp.open(tmp_path / "source").export(url, format)
    assert ends["not there"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_faults_of_a_store_end_in_the_right_bytes_or_an_error(seed, faulty_s3, tmp_path):
    store, proxy = faulty_s3
    format = EXPORT_FORMATS[seed % 3]
    memory(large(1500)).export(tmp_path / "out", format)
    hurry()
    proxy.set(random_faults(seed))
    try:
        memory(large(1500)).export(store.url, format)
        is_done = True
    except (UCPError, FileExistsError):
        is_done = False
    proxy.set(Faults())
    found, wanted = objects(store.url), tree_of_files(tmp_path / "out")
    found.pop(WRITER_FILE, None)
    if is_done:
        assert found == wanted
    else:
        assert found == wanted or not any(name in found for name in LAST)


LAST = (".metadata", "latest_universal", "model.safetensors")
