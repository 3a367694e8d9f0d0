"""What is proved while it is read: the verdict is that of reading it twice, whoever reads what in
which order, and every element is read once.
"""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import MemoryStore, boxes_in, cut_by, faults_of, grids, numbered
from jax_ucp.arrays import proof
from jax_ucp.arrays.checks import BoxWatcher, watchers, watching
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.arrays.proved import Proofs, proved
from jax_ucp.errors import CorruptData
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.layout.box import Box
from jax_ucp.layout.patterns import Averaged, Replicated, Sharded, Unique

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


def stored(kind: str, shape: tuple[int, ...]) -> tuple[MemoryStore, Contents]:
    """A checkpoint of one parameter `w`, of which something is stored twice."""
    whole = numbered(shape, np.float32) + np.float32(0.3)
    if kind == "replicas":
        layout = Replicated().join([shape, shape])
        store = MemoryStore({f"f:{i}": whole.copy() for i in range(2)})
    elif kind == "sharded master":
        half = (-(-shape[0] // 2), *shape[1:]), (shape[0] // 2, *shape[1:])
        layout = Sharded(0).join(list(half)) if shape[0] > 1 else Unique().join([shape])
        parts = cut_by(layout, whole)
        store = MemoryStore({f"f:{i}": part for i, part in enumerate(parts)})
    elif kind == "mean":
        layout = Averaged().join([shape, shape])
        store = MemoryStore({f"f:{i}": whole + i for i in range(2)})
    else:
        layout = Unique().join([shape])
        store = MemoryStore({"f:0": whole})
    masters = list(store.data)
    if kind == "mean":
        mean = np.mean(list(store.data.values()), axis=0)
        store.data |= {f"f:c{i}": mean.astype(BF16) for i in range(2)}
    elif kind != "replicas":
        store.data["f:c"] = whole.astype(BF16)
    found = ContentsBuilder("memory", Path("nowhere"), store)
    if kind == "slice":
        whole = found.joined("f:slice", layout, masters)
        found.parameter("param", "w", whole, "")
        found.slice_duplicate(whole, "f:slice", found.array("f:c"))
    elif kind == "stored slice":
        found.parameter("param", "w", found.joined("w", layout, masters), "")
        found.slice_duplicate(found.array("f:0"), "f:0", found.array("f:c"))
    else:
        found.parameter("param", "w", found.joined("w", layout, masters), "")
        if kind == "mean":
            found.mean("param", "w", ["f:c0", "f:c1"])
        elif kind != "replicas":
            found.duplicate("param", "w", found.array("f:c"), "")
    return store, found.contents()


KINDS = ["master", "sharded master", "slice", "stored slice", "replicas", "mean"]


def flip(array: np.ndarray, element: int) -> None:
    """Flip a bit that no rounding hides: the sign."""
    raw = array.reshape(-1).view(f"u{array.itemsize}")
    raw[element % raw.size] ^= 1 << (8 * array.itemsize - 1)


def verdict(contents: Contents, reads: list[list[Box]], threads: int) -> str:
    """What is said of the checkpoint by whoever reads it box by box."""
    (leaf,) = contents.leaves

    def read(boxes: list[Box]) -> None:
        outs = [np.empty(box.shape, leaf.dtype) for box in boxes]
        contents.arrays.read_into(leaf.name, boxes, outs)

    try:
        with proved(Proofs(contents)), ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, reads))
    except CorruptData as error:
        return str(error)
    return ""


def twice(contents: Contents) -> list[str]:
    return faults_of(contents)


@pytest.mark.parametrize("kind", KINDS)
@given(shape=SHAPES, data=st.data())
def test_any_reads_give_the_verdict_of_reading_it_twice(kind, shape, data):
    store, contents = stored(kind, shape)
    damaged = data.draw(st.sampled_from([None, *store.data]))
    if damaged:
        flip(store.data[damaged], data.draw(st.integers(0, 1000)))
    boxes = [box for box in data.draw(grids(shape)) if box.size]
    boxes = data.draw(st.permutations(boxes))
    boxes = boxes[: data.draw(st.integers(0, len(boxes)))]
    boxes += data.draw(st.lists(boxes_in(shape), max_size=3))  # which overlap others
    reads = [[box] for box in boxes]
    if data.draw(st.booleans()):  # several in one go
        reads = [boxes] if boxes else []
    threads = data.draw(st.sampled_from([1, 3]))
    size = data.draw(st.sampled_from([8, 64, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "CHECK_BYTES", size)
        faults = twice(contents)
        # a mean lies between its copies, and does not say by how much
        assert bool(faults) == bool(damaged) or (kind == "mean" and damaged)
        found = verdict(contents, reads, threads)
    assert found.splitlines()[1:] == [f"  {fault}" for fault in faults]


@pytest.mark.parametrize("kind", KINDS)
@given(shape=SHAPES, data=st.data())
def test_every_element_that_is_read_in_disjoint_boxes_is_read_once(kind, shape, data):
    store, contents = stored(kind, shape)
    boxes = [box for box in data.draw(grids(shape)) if box.size]
    some = boxes[: data.draw(st.sampled_from([0, len(boxes)]))]
    assert verdict(contents, [[box] for box in some], data.draw(st.sampled_from([1, 3]))) == ""
    read = Counter()
    for key, box in store.reads:
        read[key] += box.size
    assert read == {key: array.size for key, array in store.data.items()}


def test_what_was_not_read_is_read_at_the_end_and_no_more():
    store, contents = stored("master", (1000, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "CHECK_BYTES", 64 * 2 * 100)
        assert verdict(contents, [[Box((0, 0), (450, 64))]], 1) == ""
    read = Counter()
    for key, box in store.reads:
        read[key] += box.size
    # pieces of 100 rows: the one that was seen in part is compared as a whole
    assert read == {"f:0": 64 * 1050, "f:c": 64 * 1050}


def test_nothing_is_watched_any_more_when_it_ends_also_by_an_error():
    store, contents = stored("master", (4, 4))
    with pytest.raises(KeyboardInterrupt), proved(Proofs(contents)):
        raise KeyboardInterrupt
    (leaf,) = contents.leaves
    contents.arrays.read(leaf.name, Box.whole(leaf.shape))
    assert [key for key, _ in store.reads] == ["f:0"]


def test_a_fault_that_shows_stops_whoever_asks():
    store, contents = stored("master", (4, 4))
    flip(store.data["f:c"], 3)
    (leaf,) = contents.leaves
    steps = []

    def copy() -> None:
        proofs = Proofs(contents)
        with proved(proofs):
            for row in range(4):
                proofs.require_sound_so_far()
                steps.append(row)
                contents.arrays.read(leaf.name, Box((row, 0), (row + 1, 4)))

    with pytest.raises(CorruptData, match=r"contradicts itself in 1 places:\n.*the master at f:0"):
        copy()
    assert steps == [0]


def test_an_error_of_reading_that_no_check_explains_is_raised_as_it_is():
    _, contents = stored("master", (4, 4))
    with pytest.raises(CorruptData, match=r"^the disk is gone$"), proved(Proofs(contents)):
        raise CorruptData("the disk is gone")


def test_threads_that_watch_the_same_array_see_what_they_read_and_end_without_an_error():
    """Two verifications of one checkpoint, in threads that change places all the time."""
    key, interval = "the same array", sys.getswitchinterval()

    def watch(number: int) -> None:
        for _ in range(100):
            watcher = BoxWatcher(key)
            with watching([watcher]):
                assert all(watcher in watchers(key) for _ in range(30))
            assert watcher not in watchers(key)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(watch, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert not watchers(key)


@pytest.mark.parametrize("at", [0, 32_767, 32_768, 69_999])
def test_each_element_of_a_copy_is_compared_with_the_whole(at):
    """They are rounded 32,768 at once."""
    whole = np.arange(1, 70_001, dtype=np.float32) / 3
    copy = whole.astype(BF16)

    def fault() -> str | None:
        arrays = expressions(MemoryStore({"w": whole, "copy": copy}))
        duplicate = proof.Duplicate("w", arrays["w"], arrays["copy"], (), "copy")
        return duplicate.fault_in([Box.whole(whole.shape)], whole)

    assert fault() is None
    copy[at] *= -1
    assert f"[{at}]" in (fault() or "")
