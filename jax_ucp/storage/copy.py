"""From any source into the universal format: block by block, within a budget of bytes, taken up where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.layout.blocks import INNER_BYTES, OUTER_BYTES, Chunks, chunk_shapes, grid_boxes, grid_place
from jax_ucp.layout.box import Box
from jax_ucp.metadata import Metadata, digest
from jax_ucp.storage.budget import DEFAULT_BUDGET, run_bounded, threads
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.directory import Directory
from jax_ucp.storage.ledger import Ledger
from jax_ucp.storage.orbax_tree import orbax_files
from jax_ucp.storage.source import ArrayInfo
from jax_ucp.storage.zarr import METADATA_FILE, Commit, ZarrStore, chunk_name, require_storable, write_part

# A block in flight is held as read, as TensorStore encodes it, and where a flat shard gives whole rows
# as the rows that were read around it.
COPIES_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Block:
    """One read and one write: `box` of array `key`, `nbytes` of data."""

    key: str
    box: Box
    nbytes: int

    @property
    def cost(self) -> int:
        return COPIES_IN_FLIGHT * self.nbytes


@dataclass(frozen=True)
class CopyPlan:
    """What a copy will do, decided before any byte moves: one block for each outer chunk of each array."""

    arrays: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: Sequence[Block]
    budget_bytes: int

    @property
    def write_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def peak_bytes(self) -> int:
        """The most memory that blocks in flight can take: the budget, unless all there is takes less."""
        costs = sorted((block.cost for block in self.blocks), reverse=True)
        return min(sum(costs[: threads()]), max(self.budget_bytes, *costs[:1], 0))


def plan_copy(contents: Contents, budget_bytes: int = DEFAULT_BUDGET) -> CopyPlan:
    """Chunks small enough that `threads()` blocks fit the budget together, and the blocks in their order.

    Raises UnsupportedLeaf for a dtype that the universal format does not have.
    """
    outer = max(1, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    arrays: dict[str, ArrayInfo] = {}
    chunks: dict[str, Chunks] = {}
    blocks: list[Block] = []
    for leaf in contents.leaves:
        if leaf.has_array:
            info = arrays[leaf.name] = ArrayInfo(leaf.shape, np.dtype(leaf.dtype))
            require_storable(leaf.label, info.dtype)
            size = info.dtype.itemsize
            chunks[leaf.name] = chunk_shapes(leaf.shape, size, None, min(INNER_BYTES, outer), outer)
            boxes = grid_boxes(leaf.shape, chunks[leaf.name].outer)
            blocks += [Block(leaf.name, box, box.size * size) for box in boxes if box.size]
    return CopyPlan(arrays, chunks, blocks, budget_bytes)


def copy(
    contents: Contents, plan: CopyPlan, target: Path, done: Callable[[Block], None] = lambda block: None
) -> Metadata:
    """Write the checkpoint to `target` by the plan; `done` hears of each block that is on disk.

    What the source stores twice is compared first. Stopped at any moment, it leaves no checkpoint at
    `target`; the same call takes up where it was stopped.

    Raises FileExistsError if `target` is a checkpoint already, CorruptData if the source contradicts itself,
    FormatError if `target` holds another unfinished copy.
    """
    # A copy stopped after its commit, while it cleared away, has a ledger still and is taken up like any other.
    if (target / METADATA_FILE).exists() and not Ledger.begun(target):
        raise FileExistsError(f"{target} is a checkpoint already; give another path")
    if target.is_dir() and any(target.iterdir()) and not Ledger.begun(target):
        raise FileExistsError(f"{target} has files in it that are no unfinished copy; give another path")
    if faults := [fault for _, fault in contents.verify() if fault]:
        raise CorruptData("\n  ".join([f"{contents.path} contradicts itself in {len(faults)} places:", *faults[:8]]))
    store = ZarrStore(Directory(target), plan.arrays, plan.chunks)
    ledger = Ledger(target, _identity(contents, plan))
    there = set(store.directory.files())
    left: list[Block] = []
    for block in plan.blocks:
        known = ledger.done.get((block.key, str(block.box)))
        file = f"{block.key}/{chunk_name(grid_place(block.box, plan.chunks[block.key].outer))}"
        if known is not None and file in there:
            store.digests[block.key][str(block.box)] = known
            done(block)
        else:
            left.append(block)

    def move(block: Block) -> None:
        store.write(block.key, block.box, contents.arrays.read(block.key, block.box))
        ledger.note(block.key, block.box, store.digests[block.key][str(block.box)])
        done(block)

    try:
        run_bounded(((0, lambda key=key: store.create(key)) for key in plan.arrays), plan.budget_bytes)
        run_bounded(((block.cost, lambda block=block: move(block)) for block in left), plan.budget_bytes)
    finally:
        ledger.close()
    write_part(store, 0)
    files = orbax_files(contents.leaves, {name: chunks.outer for name, chunks in plan.chunks.items()})
    source = contents.source or {"format": contents.format, "name": Path(contents.path).name}
    metadata = Commit(contents.leaves, files=files, source=source, extras=contents.extras).write(store)
    ledger.remove()
    return metadata


def _identity(contents: Contents, plan: CopyPlan) -> str:
    """What a ledger must agree with: the source's files as they are now, and how they are cut into blocks."""
    at = Path(contents.path)
    files = sorted(path for path in at.rglob("*") if path.is_file()) if at.is_dir() else [at]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return digest(repr((contents.format, stats, sorted(plan.chunks.items()))).encode())
