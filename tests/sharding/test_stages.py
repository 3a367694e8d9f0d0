"""Saves of which the host holds a part at a time, with CPU devices taken for ones with a memory of
their own: the bound holds, each part is copied once, and all are there before training goes on.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import mesh_of, numbered
from jax_ucp.files.path import file_path
from jax_ucp.handler import at_exit
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.layout.blocks import Chunks, grid_boxes
from jax_ucp.sharding import save
from jax_ucp.universal import packs, stacks
from jax_ucp.universal.store import ZarrStore

SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y"))]
PART = 64 * 96 * 4  # bytes of the largest


class Host:
    """Host memory that counts what copies hold of it, now and at most, and what was copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.held = self.most = self.copied = 0
        self.ahead = threading.Event()
        self._begun = False
        self._lock = threading.RLock()  # a finalizer may run while it is held
        monkeypatch.setattr(save, "host_bytes", self.bytes_of)
        monkeypatch.setattr(save, "to_host", self._copies)

    @staticmethod
    def bytes_of(part: np.ndarray | jax.Array) -> int:
        return part.nbytes if isinstance(part, jax.Array) else 0

    def _copies(self, parts: Sequence[jax.Array]) -> list[np.ndarray]:
        with self._lock:  # two may begin at once
            if self._begun:
                self.ahead.set()
            self._begun = True
        copies = [np.array(part) for part in parts]
        for copy in copies:
            self._hold(copy.nbytes)
            weakref.finalize(copy, self._hold, -copy.nbytes)
        return copies

    def _hold(self, nbytes: int) -> None:
        with self._lock:
            self.held += nbytes
            self.most = max(self.most, self.held)
            self.copied += max(0, nbytes)


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


def tree(small: int = 0) -> dict[str, Any]:
    """Arrays in all kinds of pieces, values of the host, and so many small arrays."""
    mesh, arrays = mesh_of(4, 2, names="xy"), {}
    for i, spec in enumerate(SPECS):
        array = numbered((64, 96), np.float32) + i
        arrays[f"w{i}"] = jax.device_put(array, NamedSharding(mesh, spec))
    for i in range(small):
        arrays[f"s{i}"] = jax.device_put(np.full((8,), i, np.int32), jax.devices()[i % 2])
    return {"params": arrays, "host": np.arange(5), "name": "run", "empty": np.zeros((0, 3))}


def total(saved: dict[str, Any]) -> int:
    """The bytes that one process copies: each element once."""
    return sum(array.nbytes for array in saved["params"].values())


def check(path: Any, want: dict[str, Any]) -> None:
    got = ucp.open(path).restore()
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("bound", [1, 3 * PART, 5 * PART // 2])
@pytest.mark.parametrize("kind", ["chunks", "packs", "stacks"])
def test_the_host_holds_what_it_may_and_copies_all_once(tmp_path, monkeypatch, host, kind, bound):
    if kind != "chunks":
        monkeypatch.setattr(packs, "PACK_FROM", 100 if kind == "packs" else 1 << 30)
        monkeypatch.setattr(stacks, "STACK_FROM", 100 if kind == "stacks" else 1 << 30)
    if kind == "stacks":
        monkeypatch.setattr(stacks, "SMALL_BYTES", 8)
    want = tree(0 if kind == "chunks" else 120)
    ucp.CheckpointHandler(snapshot_bytes=bound).save(tmp_path / "saved", ucp.args.Save(want))
    check(tmp_path / "saved", want)
    assert host.copied == total(want)
    assert host.most <= max(bound, PART)
    assert host.held == 0
    assert [*(tmp_path / "saved").glob("*stack*")] or kind != "stacks"


def test_parts_of_which_a_process_writes_rows_in_turn_are_copied_once(tmp_path, host):
    """As where it has cells beside one another."""
    sharding = NamedSharding(mesh_of(4, 2, names="xy"), P(None, "y"))
    array = jax.device_put(numbered((64, 96), np.float32), sharding)
    taken = save.take_snapshot(save.describe({"w": array}), 1)
    chunks = Chunks(outer=(16, 48), inner=(16, 48))
    blocks = [("w", box) for box in grid_boxes(array.shape, chunks.outer)]
    assert [box.start for _, box in blocks[:3]] == [(0, 0), (0, 48), (16, 0)]
    taken = replace(taken, chunks={"w": chunks}, blocks=blocks)
    save.commit_snapshot(save.write_snapshot(taken, file_path(tmp_path / "w").folder()))
    np.testing.assert_array_equal(ucp.open(tmp_path / "w")["w"][:], array)
    assert (host.copied, host.most) == (array.nbytes, array.nbytes // 2)


def test_what_fits_is_copied_before_anything_is_written(tmp_path, host, monkeypatch):
    want, write = tree(), ZarrStore.write

    def written(store: ZarrStore, *args: Any, **options: Any) -> None:
        assert host.copied == total(want)
        write(store, *args, **options)

    monkeypatch.setattr(ZarrStore, "write", written)
    handler = ucp.CheckpointHandler(snapshot_bytes=1)
    handler.save(tmp_path / "saved", ucp.args.Save(want, snapshot_bytes=total(want)))
    check(tmp_path / "saved", want)


def by_v0(path: Any, bound: int, want: Any) -> Any:
    handler = ucp.CheckpointHandler(snapshot_bytes=bound)
    manager = ocp.CheckpointManager(path, item_handlers=handler)
    manager.save(1, args=ucp.args.Save(want))
    return manager.wait_until_finished


def by_registry(path: Any, bound: int, want: Any) -> Any:
    registry = ucp.handler_registry(snapshot_bytes=bound)
    manager = ocp.CheckpointManager(path, handler_registry=registry)
    manager.save(1, args=ocp.args.StandardSave({**want, "name": 0}))
    return manager.wait_until_finished


def by_stock_handler(path: Any, bound: int, want: Any) -> Any:
    stock = ocp.PyTreeCheckpointHandler(save_device_host_concurrent_gb=1)
    assert stock._save_device_host_concurrent_bytes == 10**9
    stock._save_device_host_concurrent_bytes = bound
    with ucp.orbax_everywhere():
        manager = ocp.CheckpointManager(path, item_handlers=stock)
        manager.save(1, args=ocp.args.PyTreeSave(want))

    def finish() -> None:
        with ucp.orbax_everywhere():
            manager.wait_until_finished()

    return finish


def by_v1(path: Any, bound: int, want: Any) -> Any:
    from orbax.checkpoint import v1

    memory = v1.options.MemoryOptions(transfer_concurrent_bytes=bound)
    with ucp.orbax_context(v1.Context(memory_options=memory)):
        return v1.save_async(path / "1", want).result


HAS_BOUND = "save_device_host_concurrent_gb" in signature(ocp.PyTreeCheckpointHandler).parameters
WAYS = [by_v0, by_registry, *[by_stock_handler] * HAS_BOUND, *[by_v1] * HAS_V1]


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_when_all_was_copied_and_may_donate(tmp_path, host, monkeypatch, way):
    want, write, done = tree(), ZarrStore.write, threading.Event()
    kept = jax.tree.map(np.array, want)

    def written(store: ZarrStore, *args: Any, **options: Any) -> None:
        assert host.ahead.wait(60)  # the next stage is copied meanwhile
        if host.copied == total(kept):
            assert done.wait(60)
        write(store, *args, **options)

    monkeypatch.setattr(ZarrStore, "write", written)
    finish = way(tmp_path, 3 * PART, want)
    assert host.copied == total(kept)
    assert not (tmp_path / "1").exists()
    for array in want["params"].values():
        array.delete()
    done.set()
    finish()
    got = ucp.open(tmp_path, step=1).restore()
    jax.tree.map(np.testing.assert_array_equal, got["params"], kept["params"])
    assert host.most <= 3 * PART


@pytest.mark.parametrize("way", WAYS)
def test_an_error_between_stages_ends_a_save_but_not_the_next(host, monkeypatch, way, tmp_path):
    want, write, calls = tree(), ZarrStore.write, itertools.count()

    def full(store: ZarrStore, *args: Any, **options: Any) -> None:
        if next(calls) == 4:
            raise OSError(28, "No space left on device")
        write(store, *args, **options)

    monkeypatch.setattr(ZarrStore, "write", full)
    with pytest.raises(Exception, match="No space left"):
        way(tmp_path / "a", 1, want)()
    assert host.copied < total(want)
    way(tmp_path / "b", 1, want)()
    check(tmp_path / "b" / "1", want) if way is by_v0 else ucp.open(
        tmp_path / "b", step=1
    ).restore()


@pytest.mark.skipif(not HAS_V1, reason="this Orbax has no v1, or an early one")
def test_a_save_that_has_no_folder_to_begin_in_is_not_waited_for_at_the_end(tmp_path, host):
    """By the program's last look at saves in the background."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Exception, match=r"Not a directory|File exists"):
        by_v1(tmp_path / "file", 1, tree())
    assert all(each.is_over() for each in at_exit._saves)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ValueError, match=r"snapshot_bytes=.* should be a whole number"):
        ucp.args.Save({}, snapshot_bytes=bound)
    with pytest.raises(ValueError, match=r"snapshot_bytes=.* should be a whole number"):
        ucp.CheckpointHandler(snapshot_bytes=bound)
