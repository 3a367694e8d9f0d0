"""The universal format in buckets: one writer, commits by condition, conversions taken up again."""

import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import numpy as np
import pytest

import jax_ucp as ucp
from helpers import faults_of, memory, numbered
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.files import protocol
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import read_file
from jax_ucp.jobs.ledger import LEDGER_FILE, WRITER_FILE, claimed
from jax_ucp.universal.store import METADATA_FILE, ZarrStore
from remote_faults import campaign, kills
from servers.fault_proxy import Faults, depth

BUDGET = 1 << 20  # small, so that there are many blocks


def tree(first: int = 0) -> dict:
    arrays = {
        "large": numbered((512, 1024), np.float32) + first,
        "small": numbered((3, 5), np.int16),
    }
    return arrays | {"key": jax.random.key(first), "name": f"from {first}", "none": None}


def check(url: str, want: dict) -> None:
    checkpoint = ucp.open(url)
    restored = checkpoint.restore()
    for name in ("large", "small"):
        np.testing.assert_array_equal(restored[name], want[name])
    found, key = (jax.random.key_data(one["key"]).tolist() for one in (restored, want))
    assert found == key
    assert restored["name"] == want["name"]
    assert faults_of(checkpoint) == []


def save(url: str, want: dict) -> None:
    ucp.CheckpointHandler().save(url, ucp.args.Save(want))


def names(url: str) -> set[str]:
    return {file.name for file in file_path(url).folder().walk()}


def test_saves_and_conversions_give_the_same_bits(store, tmp_path):
    """Disk to bucket, bucket to bucket, bucket to disk."""
    save(f"{store.url}/saved", tree())
    check(f"{store.url}/saved", tree())
    ucp.open(f"{store.url}/saved").save(f"{store.url}/copy")
    check(f"{store.url}/copy", tree())
    ucp.open(f"{store.url}/copy").save(tmp_path / "local")
    check(str(tmp_path / "local"), tree())
    ucp.open(tmp_path / "local").save(f"{store.url}/again")
    here, there = (tmp_path / "local", file_path(f"{store.url}/again").folder())
    for name in names(f"{store.url}/again") - {METADATA_FILE}:
        assert read_file(there, name) == (here / name).read_bytes(), name


def test_thousands_of_small_arrays_are_few_requests(faulty_s3):
    store, proxy = faulty_s3
    want = {f"w{i:05}": np.full((4, i % 5 + 1), i, np.float32) for i in range(2_000)}
    save(store.url, want)
    assert proxy.met["PUT"] < 20
    before = proxy.met["GET"] + proxy.met["HEAD"]
    restored = ucp.open(store.url).restore()
    assert proxy.met["GET"] + proxy.met["HEAD"] < before + 40
    assert all(np.array_equal(restored[name], want[name]) for name in want)


@pytest.mark.slow
def test_few_requests_wait_for_one_another(faulty_s3):
    """However many arrays there are. By their order: claim, is it a checkpoint, chunks and what is
    beside them, the file that stock Orbax goes by, a look at all, commit, the claim's end.
    """
    store, proxy = faulty_s3
    want = {f"w{i}": numbered((8, 8), np.float32) + i for i in range(24)}

    def asked(do: Callable[[], object], waits: int) -> int:
        proxy.set(Faults(latency_s=0.15))
        do()
        assert depth(proxy.seen) <= waits
        return len(proxy.seen)

    def look(root: str) -> None:
        saved, converted = f"{root}/saved", f"{root}/converted"
        assert asked(lambda: save(saved, want), 7 + 1) <= 2 * 24 + 10
        puts = [request.path for request in proxy.seen if request.method == "PUT"]
        order = [path.rpartition("/")[2] for path in puts]
        assert order[0] == WRITER_FILE
        assert order[-2:] == [METADATA_FILE, "_METADATA"]
        assert asked(lambda: ucp.open(saved), 3 + 1) <= 6
        opened = ucp.open(saved)
        assert asked(lambda: opened.save(converted), 15 + 2) <= 5 * 24 + 30

    for _ in range(2):  # requests that need not wait do so where threads are slow to begin
        with contextlib.suppress(AssertionError):
            return look(f"{store.url}/{uuid.uuid4().hex}")
    look(f"{store.url}/last")


def test_what_was_written_is_looked_at_by_its_version(s3, monkeypatch):
    """What is beside the arrays is not read again, unless it is not what was written."""
    from jax_ucp.universal.store import Commit

    write = Commit.write

    def meanwhile(commit, held, is_shared):
        held.directory.write("large/zarr.json", [b"another's"], durable=True)
        return write(commit, held, is_shared)

    monkeypatch.setattr(Commit, "write", meanwhile)
    with pytest.raises(CorruptData, match=r"large/zarr.json is damaged"):
        save(s3.url, tree())
    with pytest.raises(NotACheckpoint):
        ucp.open(s3.url)


def test_what_is_a_checkpoint_is_not_written_over(store):
    save(store.url, tree())
    before = names(store.url)
    with pytest.raises(FileExistsError, match="is a checkpoint already"):
        save(store.url, tree(1))
    with pytest.raises(FileExistsError, match="is a checkpoint already"):
        ucp.open(store.url).save(store.url)
    assert names(store.url) == before
    check(store.url, tree())


def test_the_second_of_two_writers_is_told_before_it_writes(store):
    with claimed(file_path(store.url).folder()):
        with pytest.raises(FileExistsError, match=r"written by another save.*writer.*begun"):
            save(store.url, tree(1))
        assert names(store.url) == {WRITER_FILE}
    save(store.url, tree())
    check(store.url, tree())
    assert WRITER_FILE not in names(store.url)


def test_who_commits_second_is_told_and_nothing_is_written_over(s3, monkeypatch):
    """A writer that no claim keeps away commits first."""
    from jax_ucp.universal import store as store_module

    files = file_path(s3.url).folder()
    verify_files = store_module.verify_files

    def meanwhile(*args):
        files.create(METADATA_FILE, b"another's")
        return verify_files(*args)

    monkeypatch.setattr(store_module, "verify_files", meanwhile)
    with pytest.raises(FileExistsError, match="by another writer while this one wrote"):
        save(s3.url, tree())
    assert read_file(files, METADATA_FILE) == b"another's"


def test_a_save_that_fails_can_be_done_again(s3, monkeypatch):
    from jax_ucp.files.object_store import Bucket

    write = Bucket.write

    def failing(files, name, parts, *, durable):
        if name.startswith("large/c"):
            raise OSError("no more")
        write(files, name, parts, durable=durable)

    monkeypatch.setattr(Bucket, "write", failing)
    with pytest.raises(OSError, match="no more"):
        save(s3.url, tree())
    monkeypatch.undo()
    for key, value in s3.env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(NotACheckpoint):
        ucp.open(s3.url)
    save(s3.url, tree())
    check(s3.url, tree())


def stopped_after(blocks: int):
    seen = []

    def progress(block) -> None:
        seen.append(block)
        if len(seen) == blocks:
            raise KeyboardInterrupt

    return progress


def test_a_conversion_that_was_stopped_is_taken_up(faulty_s3, tmp_path, monkeypatch):
    monkeypatch.setattr("jax_ucp.jobs.run.GROUP_BYTES", 1)
    store, _ = faulty_s3
    save(str(tmp_path / "source"), tree())
    source = ucp.open(tmp_path / "source")
    with pytest.raises(KeyboardInterrupt):
        source.save(store.url, budget_bytes=BUDGET, progress=stopped_after(5))
    with pytest.raises(NotACheckpoint):
        ucp.open(store.url)
    done = {name for name in names(store.url) if "/c" in name}
    written = []
    write = _noting(written, ZarrStore.write)
    monkeypatch.setattr("jax_ucp.universal.store.ZarrStore.write", write)
    ucp.open(tmp_path / "source").save(store.url, budget_bytes=BUDGET)
    check(store.url, tree())
    assert len(done) >= 5
    assert 0 < len(written) <= len({n for n in names(store.url) if "/c" in n}) - 5
    assert not any(name.startswith("ucp-ledger") for name in names(store.url))


def _noting(written, write):
    def noted(store, key, box, *args, **kwargs):
        written.append((key, box))
        return write(store, key, box, *args, **kwargs)

    return noted


def test_a_conversion_does_not_take_up_another(s3, tmp_path):
    for first in (0, 1):
        save(str(tmp_path / str(first)), tree(first))
    with pytest.raises(KeyboardInterrupt):
        ucp.open(tmp_path / "0").save(s3.url, budget_bytes=BUDGET, progress=stopped_after(2))
    with pytest.raises(FormatError, match=f"{LEDGER_FILE} belongs to a conversion of another"):
        ucp.open(tmp_path / "1").save(s3.url, budget_bytes=BUDGET)
    file_path(s3.url).folder().write("other/file", [b"x"], durable=True)
    with pytest.raises(FileExistsError, match="not those of an unfinished copy"):
        ucp.open(tmp_path / "1").save(f"{s3.url}/other")


def test_a_target_inside_the_source_is_refused(s3):
    save(f"{s3.url}/a", tree())
    with pytest.raises(FileExistsError, match="lies in the source"):
        ucp.open(f"{s3.url}/a").save(f"{s3.url}/a/b")
    ucp.open(f"{s3.url}/a").save(f"{s3.url}/ab")


@pytest.mark.slow
def test_an_executor_converts_from_bucket_to_bucket(s3):
    save(f"{s3.url}/a", tree())
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        ucp.open(f"{s3.url}/a").save(f"{s3.url}/b", budget_bytes=BUDGET, executor=executor)
    check(f"{s3.url}/b", tree())


@pytest.mark.slow
def test_azure(azure):
    save(f"{azure.url}/a", tree())
    check(f"{azure.url}/a", tree())
    ucp.open(f"{azure.url}/a").save(f"{azure.url}/b")
    check(f"{azure.url}/b", tree())
    with pytest.raises(FileExistsError):
        save(f"{azure.url}/b", tree())


@pytest.mark.slow
def test_faults_of_a_store_end_in_the_right_bits_or_an_error(s3):
    """A sample of `tests/remote_faults.py`."""
    result = campaign(s3, 40, seed=10_000)
    assert result.findings == []
    assert sum(result.ends.values()) == 40


@pytest.mark.slow
def test_killed_saves_leave_nothing_that_opens_and_is_wrong(s3):
    """A sample of `tests/remote_faults.py --kills`."""
    result = kills(s3, 10)
    assert result.findings == []
    assert sum(result.ends.values()) > 10


@pytest.mark.parametrize("name", ["ucp-ledger_1_of_2.complete.jsonl", "ucp-ledger_1_of_2.jsonl"])
def test_what_another_clears_away_while_it_is_read_is_gone(name, tmp_path, s3, monkeypatch):
    """Two commit at once; one finds a file that the other deletes before it is read."""
    memory({"param": {"w": np.ones((64, 64))}}).export(tmp_path / "source", "dcp")
    source, out = ucp.open(tmp_path / "source"), f"{s3.url}/{name}"
    source.save(tmp_path / "whole")
    source.save_share(out, (0, 2))
    read_bytes = protocol.read_bytes
    reads = []

    def deleted_before(files, file, *run):
        if file.name == name:
            reads.append(name)
            monkeypatch.setattr(protocol, "read_bytes", read_bytes)
            ucp.open(tmp_path / "source").save_share(out, (1, 2))
        return read_bytes(files, file, *run)

    monkeypatch.setattr(protocol, "read_bytes", deleted_before)
    assert source.save_share(out, (1, 2)) is not None
    assert reads
    assert [label for label, fault in ucp.open(out).verify() if fault] == []
