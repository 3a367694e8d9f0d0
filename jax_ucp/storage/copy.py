"""From a source to a store, block by block, within a budget of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from jax_ucp.layout.blocks import INNER_BYTES, OUTER_BYTES, Chunks, chunk_shapes, grid_boxes
from jax_ucp.layout.box import Box
from jax_ucp.storage.source import ArrayInfo, ArraySource
from jax_ucp.storage.zarr import ZarrStore

DEFAULT_BUDGET = 1 << 30

# A block in flight is held as read, as TensorStore encodes it, and where a flat shard gives whole rows
# as the rows that were read around it.
COPIES_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Block:
    """One read and one write: `box` of array `key`, `nbytes` of data."""

    key: str
    box: Box
    nbytes: int


def threads() -> int:
    """How many blocks are worth having in flight at once."""
    return min(8, (os.cpu_count() or 1) + 1)


def budgeted_chunks(arrays: Mapping[str, ArrayInfo], budget_bytes: int) -> dict[str, Chunks]:
    """Chunks for a copy by one process, small enough that `threads()` of them fit the budget together."""
    outer = max(1, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    return {
        key: chunk_shapes(info.shape, info.dtype.itemsize, inner_bytes=min(INNER_BYTES, outer), outer_bytes=outer)
        for key, info in arrays.items()
    }


def copy_blocks(arrays: Mapping[str, ArrayInfo], chunks: Mapping[str, Chunks]) -> list[Block]:
    """One block for each outer chunk of each array, in the order they are copied."""
    blocks: list[Block] = []
    for key, info in arrays.items():
        for box in grid_boxes(info.shape, chunks[key].outer):
            blocks.append(Block(key, box, box.size * info.dtype.itemsize))
    return blocks


def copy(
    source: ArraySource,
    store: ZarrStore,
    blocks: Iterable[Block],
    budget_bytes: int = DEFAULT_BUDGET,
    done: Callable[[Block], None] = lambda block: None,
) -> None:
    """Read each block from the source and write it to the store; `done` hears of each that is on disk.

    At most `budget_bytes` are in flight at any moment, counted `COPIES_IN_FLIGHT` times; a block larger
    than that goes alone.
    """

    def move(block: Block) -> None:
        store.write(block.key, block.box, source.read(block.key, block.box))
        done(block)

    run_bounded(((COPIES_IN_FLIGHT * block.nbytes, lambda block=block: move(block)) for block in blocks), budget_bytes)


def run_bounded(jobs: Iterable[tuple[int, Callable[[], object]]], budget_bytes: int) -> None:
    """Run (cost in bytes, job) pairs in threads, as many at once as the budget and `threads()` allow.

    The first job that raises stops those not yet begun, and its error is raised here.
    """
    running: dict[Future[object], int] = {}

    def settle() -> None:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            future.result()

    with ThreadPoolExecutor(threads()) as pool:
        for cost, job in jobs:
            while running and (sum(running.values()) + cost > budget_bytes or len(running) >= threads()):
                settle()
            running[pool.submit(job)] = cost
        while running:
            settle()
