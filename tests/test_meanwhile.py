"""What others do to the files of a save, conversion, export or restore is not overlooked."""

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import jax_ucp as ucp
from helpers import faults_of, memory, mesh_of, tree_differences
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.export import folder
from jax_ucp.files import local as directories
from jax_ucp.files.local import LocalFiles
from jax_ucp.jobs.ledger import LEDGER_FILE
from jax_ucp.sharding import restore as restoring
from jax_ucp.universal.store import Commit, open_store

MESH = mesh_of(4, 2)
EXPORTS = ("safetensors", "dcp", "deepspeed")


def tree(seed: int, packed: bool = False) -> dict:
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(MESH, P("data", "model"))
    kernel = jax.device_put(rng.random((64, 32), np.float32), sharding)
    small = {f"s{i:04}": rng.random(3, np.float32) for i in range(1000 if packed else 2)}
    return {"kernel": kernel, "small": small, "name": f"run {seed}"}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


# What happens to which file before `ucp.json` is written.
UNDER_A_SAVE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a folder deleted": ("kernel", remove),
    "a chunk deleted": ("kernel/c.0.0", remove),
    "a chunk cut short": ("kernel/c.0.0", cut),
    "a chunk too long": ("small.s0001/c.0", lengthen),
    "zarr.json deleted": ("small.s0000/zarr.json", remove),
    "zarr.json changed": ("kernel/zarr.json", lengthen),
    "all of it deleted": (".", remove),
    "a pack deleted": ("ucp.pack_0", remove),
    "a pack cut short": ("ucp.pack_0", cut),
}


def after(call: Callable, do: Callable[[], object]) -> Callable:
    """The call, and then something that another program does."""

    def both(*args, **options):
        result = call(*args, **options)
        do()
        return result

    return both


@pytest.mark.parametrize(
    ("what", "asynchronous"), [(what, i % 2 > 0) for i, what in enumerate(UNDER_A_SAVE)]
)
def test_what_disappears_under_a_save_ends_it(tmp_path, monkeypatch, what, asynchronous):
    name, happens = UNDER_A_SAVE[what]
    packed = name == "ucp.pack_0"
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=asynchronous)
    write = Commit.write

    def meanwhile(commit, store, is_shared):
        happens(Path(store.directory.root, name))
        return write(commit, store, is_shared)

    with ocp.CheckpointManager(
        tmp_path, item_handlers=ucp.CheckpointHandler(), options=options
    ) as manager:

        def save(step: int) -> None:
            manager.save(step, args=ucp.args.Save(tree(step, packed)))
            manager.wait_until_finished()

        def is_there(step: int) -> None:
            assert manager.all_steps(read=True) == [step]
            restored = manager.restore(step, args=ucp.args.Restore(mesh=MESH))
            assert tree_differences(restored, tree(step, packed)) == []

        save(1)
        with monkeypatch.context() as patched:
            patched.setattr(Commit, "write", meanwhile)
            with pytest.raises(CorruptData, match=r"(?s)Something else deletes or writes") as error:
                save(2)
        assert name.partition("/c.")[0].lstrip(".") in str(error.value)
        is_there(1)
        save(3)
        is_there(3)


@pytest.mark.parametrize("happens", [remove, cut, lengthen])
def test_what_disappears_under_a_conversion_ends_it_and_the_same_call_completes(tmp_path, happens):
    source = memory({"param": {"a": np.arange(6.0), "b": np.ones((3, 4), np.float32)}})

    def meanwhile(block):
        if block.key == "param.a":
            happens(tmp_path / "out" / "param.a" / "c.0")

    with pytest.raises(CorruptData, match=r"(?s)has lost what was just written.*param\.a.*c\.0"):
        source.save(tmp_path / "out", progress=meanwhile)
    with pytest.raises(NotACheckpoint, match="unfinished conversion"):
        ucp.open(tmp_path / "out")
    result = source.save(tmp_path / "out")
    assert faults_of(result) == []
    np.testing.assert_array_equal(result.read("param/a"), np.arange(6.0))


def add(path: Path) -> None:
    (path.parent / "model-00002-of-00002.safetensors").write_bytes(b"")


@pytest.mark.parametrize("happens", [remove, cut, lengthen, add])
@pytest.mark.parametrize("format", EXPORTS)
def test_what_happens_to_the_files_of_an_export_ends_it(tmp_path, monkeypatch, format, happens):
    source = memory({"param": {"a": np.arange(6.0), "b": np.ones((3, 4), np.float32)}})

    def meanwhile():
        happens(max(path for path in tmp_path.rglob("*") if path.is_file()))

    with monkeypatch.context() as patched:
        patched.setattr(folder, "complete_files", after(folder.complete_files, meanwhile))
        with pytest.raises(CorruptData, match=r"(?s)is not as this export wrote it.*Something"):
            source.export(tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []
    exported = source.export(tmp_path / "out", format)
    np.testing.assert_array_equal(exported.read("param/a"), np.arange(6.0))


# Sources that change.


def write_orbax(path: Path, arrays: dict) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, arrays)


def write_universal(path: Path, arrays: dict) -> None:
    ucp.Checkpoint.of(arrays).save(path)


WRITERS: dict[str, Callable[[Path, dict], object]] = {
    "universal": write_universal,
    "orbax": write_orbax,
    **{
        name: lambda path, arrays, name=name: ucp.Checkpoint.of(arrays).export(path, name)
        for name in EXPORTS
    },
}


@pytest.fixture(params=WRITERS)
def versions(request, tmp_path) -> tuple[Path, Callable[[], object]]:
    """A checkpoint, and another program that writes the next step over it, of the same size."""
    for seed in (1, 2):
        arrays = {f"w{i}": np.full((128, 128), seed, np.float32) for i in range(8)}
        WRITERS[request.param](tmp_path / f"v{seed}", {"param": arrays})
    first, second = tmp_path / "v1", tmp_path / "v2"
    return first, lambda: shutil.copytree(second, first, dirs_exist_ok=True)


def once(do: Callable[[], object]) -> Callable[[object], None]:
    """A callback that does it when it is first called."""
    left = [do]
    return lambda _: left.pop()() if left else None


CHANGED = (
    r"(?s)v1.*(has changed since it was opened|is not the file that was opened|is gone|"
    r"written over since the checkpoint was opened)"
)


def test_a_source_that_is_written_over_during_a_conversion_is_not_converted(versions, tmp_path):
    source, overwrite = versions
    with pytest.raises(CorruptData, match=CHANGED):
        ucp.open(source).save(tmp_path / "out", budget_bytes=1 << 16, progress=once(overwrite))
    with pytest.raises(NotACheckpoint, match="unfinished conversion"):
        ucp.open(tmp_path / "out")
    with pytest.raises(FormatError, match="of files that were replaced since"):
        ucp.open(source).save(tmp_path / "out", budget_bytes=1 << 16)


@pytest.mark.parametrize("format", EXPORTS)
def test_a_source_that_is_written_over_during_an_export_is_not_exported(versions, tmp_path, format):
    source, overwrite = versions
    with pytest.raises(CorruptData, match=CHANGED):
        ucp.open(source).export(tmp_path / "out", format, progress=once(overwrite))
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::jax_ucp.errors.ShardingWarning")
@pytest.mark.parametrize("change", ["overwrite", "remove", "replace", "touch"])
def test_what_a_restore_read_of_files_that_changed_is_not_handed_out(versions, monkeypatch, change):
    source, overwrite = versions
    files = (path for path in source.rglob("*") if path.is_file())
    file = max(files, key=lambda path: path.stat().st_size)

    def replace():
        """The same bytes, time and size: another file all the same."""
        shutil.copy2(file, source.parent / "copy")
        os.replace(source.parent / "copy", file)

    do = {"overwrite": overwrite, "remove": file.unlink, "replace": replace}
    do = (do | {"touch": lambda: os.utime(file)})[change]
    checkpoint = ucp.open(source)
    monkeypatch.setattr(restoring, "run_restore", after(restoring.run_restore, do))
    with pytest.raises(CorruptData, match=CHANGED):
        checkpoint.restore(mesh=MESH)


def test_an_optimizer_state_of_files_that_changed_is_not_handed_out(tmp_path, monkeypatch):
    from jax_ucp.optimizers import plan as planning

    states = "param", "exp_avg", "exp_avg_sq"
    moments = {name: {"w": np.ones((4, 3), np.float32)} for name in states}
    memory({**moments, "step": {"w": np.float32([5]).reshape(())}}).export(tmp_path / "v1", "dcp")
    params = {"w": jax.device_put(moments["param"]["w"], NamedSharding(MESH, P()))}
    plan = ucp.open(tmp_path / "v1").plan_optimizer(optax.adam(1e-3), params)
    touch = after(planning.run_restore, lambda: os.utime(tmp_path / "v1" / ".metadata"))
    monkeypatch.setattr(planning, "run_restore", touch)
    with pytest.raises(CorruptData, match=CHANGED):
        plan.restore()


def test_verify_says_so_where_the_files_are_no_longer_those_that_were_opened(versions):
    source, overwrite = versions
    found = ucp.open(source).verify()
    overwrite()
    try:
        faults = [fault for _, fault in found if fault]
    except CorruptData as error:  # a file that says so itself, whoever reads it
        faults = [str(error)]
    assert any("opened" in fault for fault in faults), faults


def test_what_lies_beside_a_source_may_change(tmp_path):
    """The trainer goes on: the next step is written, `latest` names it, and folders come and go."""
    shutil.copytree(cases.DATA / "deepspeed" / "z2_bf16_dp3", tmp_path / "run")

    def train(block):
        (tmp_path / "run" / "latest").write_text("global_step6")
        (tmp_path / "run" / "global_step6").mkdir()
        (tmp_path / "run" / "log.txt").write_text("step 6")

    source = ucp.open(tmp_path / "run")
    result = source.save(tmp_path / "out", progress=once(lambda: train(None)))
    again = ucp.open(tmp_path / "run" / "global_step5").save(tmp_path / "again")
    assert result.leaves == again.leaves


# A copy that is taken up.


def stopped(source: ucp.Checkpoint, target: Path, after_blocks: int) -> None:
    """A copy of which some blocks are in the ledger."""
    left = [after_blocks]

    def stop(block):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.save(target, progress=stop)


@pytest.fixture
def half(tmp_path) -> tuple[ucp.Checkpoint, Path]:
    """A stopped conversion with all its blocks on disk and in the ledger, but for the last."""
    rngs = {name: np.random.default_rng(list(name.encode())) for name in "abcd"}
    arrays = {name: rng.random((40, 50), np.float32) for name, rng in rngs.items()}
    memory({"param": arrays}).export(tmp_path / "source", "safetensors")
    stopped(ucp.open(tmp_path / "source"), tmp_path / "out", 4)
    assert len((tmp_path / "out" / LEDGER_FILE).read_bytes().splitlines()) == 5
    return ucp.open(tmp_path / "source"), tmp_path / "out"


def exchange(out: Path) -> None:
    """Each is valid, with good checksums; only its digest tells which one it is."""
    one, other = out / "param.a" / "c.0.0", out / "param.b" / "c.0.0"
    one.rename(out / "c")
    other.rename(one)
    (out / "c").rename(other)


def relabel(out: Path, what: str) -> None:
    lines = [json.loads(line) for line in (out / LEDGER_FILE).read_text().splitlines()]
    one, two = lines[1]["written"], lines[2]["written"]
    one[what], two[what] = two[what], one[what]
    (out / LEDGER_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def without_crcs(out: Path) -> None:
    ledger = (out / LEDGER_FILE).read_bytes()
    (out / LEDGER_FILE).write_bytes(re.sub(rb'"crcs":"[^"]*"', b'"crcs":""', ledger))


@pytest.mark.parametrize(
    "happens",
    [
        exchange,
        partial(relabel, what="digest"),
        partial(relabel, what="crcs"),
        without_crcs,
        lambda out: remove(out / "param.c" / "c.0.0"),
        lambda out: cut(out / "param.c" / "c.0.0"),
        lambda out: lengthen(out / "param.d" / "c.0.0"),
        lambda out: remove(out / "param.a"),
    ],
    ids=[
        "exchanged", "other digests", "other crcs", "no crcs", "deleted", "cut short", "too long",
        "folder deleted",
    ],
)  # fmt: skip
def test_a_block_that_is_not_as_the_ledger_has_it_is_written_again(half, happens):
    source, out = half
    happens(out)
    result = source.save(out)
    assert faults_of(result) == []
    assert all(stored.crcs for stored in open_store(out)[0].arrays.values())
    for leaf in source.leaves:
        np.testing.assert_array_equal(result.read(leaf.label), source.read(leaf.label))


@pytest.mark.parametrize("line", [
    b"{}", b"[]", b'"x"', b"null", b"", b"\xff", b'{"key": "a"}', b'{"key": 1, "box": 2, "written": 3}',
    b"[" * 9999,
], ids=lambda line: line[:20].decode(errors="replace"))  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_ledger_that_no_conversion_wrote_is_refused(half, line, place):
    source, out = half
    lines = (out / LEDGER_FILE).read_bytes().splitlines()
    lines.insert(place, line)
    (out / LEDGER_FILE).write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(FormatError, match=r"is damaged .*delete the directory"):
        source.save(out)


def test_a_ledger_that_is_a_link_is_not_written_through(half, tmp_path):
    source, out = half
    (out / LEDGER_FILE).rename(tmp_path / "victim")
    before = (tmp_path / "victim").read_bytes()
    (out / LEDGER_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(FormatError, match="is a link"):
        source.save(out)
    assert (tmp_path / "victim").read_bytes() == before


# File systems.


def test_leaves_whose_names_a_file_system_takes_for_one_are_both_there(tmp_path, monkeypatch):
    below = LocalFiles._below

    def folded(self, name):
        return below(self, unicodedata.normalize("NFC", name).lower())

    monkeypatch.setattr(LocalFiles, "_below", folded)
    want = {"W": np.ones(4), "w": np.zeros(4), "plain": np.ones(2)}
    want |= {"\xe9": np.full(4, 2.0), "e\u0301": np.full(4, 3.0)}
    ocp.Checkpointer(ucp.CheckpointHandler()).save(tmp_path / "saved", args=ucp.args.Save(want))
    copied = ucp.open(tmp_path / "saved").save(tmp_path / "copied")
    for checkpoint in (ucp.open(tmp_path / "saved"), copied):
        assert faults_of(checkpoint) == []
        found = checkpoint.restore()
        assert found.keys() == want.keys()
        assert all(found[name].tolist() == array.tolist() for name, array in want.items())


class OtherLibc:
    """A disk that failed once, as another program was told: open handles hear of it."""

    def __init__(self):
        self.failed_at = 0

    def syncfs(self, handle: int) -> int:
        return -1 if born[handle] < self.failed_at else 0


born: dict[int, int] = {}


def save(source: ucp.Checkpoint, target: Path) -> None:
    ocp.Checkpointer(ucp.CheckpointHandler()).save(target, args=ucp.args.Save(source.restore()))


JOBS: dict[str, Callable[[ucp.Checkpoint, Path], object]] = {
    "save": save,
    "convert": lambda source, target: source.save(target),
    **{f"export {name}": lambda source, target, name=name: source.export(target, name) for name in EXPORTS},
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_an_error_of_the_disk_that_another_was_told_first_ends_a_save(tmp_path, monkeypatch, job):
    disk, clock = OtherLibc(), iter(range(1, 1 << 30))
    source = memory({"param": {"a": np.arange(6.0)}})
    born.clear()
    open_, write, complete_files = os.open, LocalFiles.write, folder.complete_files

    def opened_now(*args, **options):
        handle = open_(*args, **options)
        born[handle] = next(clock)
        return handle

    def fail() -> None:
        disk.failed_at = next(clock)

    monkeypatch.setattr(os, "open", opened_now)
    monkeypatch.setattr(directories, "_libc", disk)
    monkeypatch.setattr(LocalFiles, "write", after(write, fail))
    monkeypatch.setattr(folder, "complete_files", after(complete_files, fail))
    with pytest.raises(OSError, match=str(tmp_path)):
        JOBS[job](source, tmp_path / "out")
    assert not list(tmp_path.rglob("ucp.json"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
