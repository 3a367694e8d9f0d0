"""The waist of the package: an array is whatever can be read one box at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jax_ucp.arrays.checks import LeafClaim
from jax_ucp.errors import FormatError
from jax_ucp.layout.blocks import grid_boxes, rows_of_chunks, whole_chunks
from jax_ucp.layout.box import Box
from jax_ucp.tree import MAX_ARRAY_BYTES, MAX_AXES

if TYPE_CHECKING:
    from jax_ucp.arrays.extents import StoredArray

BLOCK_BYTES = 32 << 20
# Limits of one read of arrays in the same storage unit: bytes, and number of arrays.
TOGETHER_BYTES, TOGETHER = 16 << 20, 4096

# The name of an array, boxes of it, and the output array of each box.
Want = tuple[str, Sequence[Box], Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """The shape, dtype and stored chunk of an array, known before any of its bytes are read.

    `chunk` is the shape of the stored blocks, if a part of a block costs as much to read as all of
    it; None if any box costs about its own bytes. `row` is the shape of what a row of a mapped
    array's input fills, if that has no chunks: a block that cuts it reads pieces of rows. Raises
    FormatError for a shape that no array can have: too many axes, a negative length, or too many
    bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...] | None = None
    row: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # numpy has no array without elements either whose other axes are beyond any array.
        nbytes = math.prod(n or 1 for n in self.shape) * self.dtype.itemsize
        if len(self.shape) > MAX_AXES or min(self.shape, default=0) < 0 or nbytes > MAX_ARRAY_BYTES:
            raise FormatError(
                f"no array is {self.dtype} {self.shape!s:.200}: what says so is damaged"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, boxes: Sequence[Box], max_bytes: int) -> Iterator[Box]:
        """Blocks of whole chunks, each of at most `max_bytes` or one chunk, that meet the boxes and
        together cover them. Without chunks they have whole rows, if one is not larger than that.

        At the high edge of the array they may extend past it.
        """
        is_small = self.row is not None and math.prod(self.row) * self.dtype.itemsize <= max_bytes
        chunk = self.chunk or (self.row if is_small else None) or (1,) * len(self.shape)
        around = whole_chunks(Box.around(boxes), chunk)
        step = rows_of_chunks(around.shape, chunk, self.dtype.itemsize, max_bytes)
        for block in grid_boxes(around.shape, step):
            block = block.shift(around.start)
            if any(box.intersect(block) for box in boxes):
                yield block


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a leaf, and where it is stored: block `target` of the leaf is block `source` of
    `item` in `file`.

    Both blocks hold the same elements in row-major order; `source` has one axis if the item is
    flat. `item` is empty if the file is one block of the leaf, a chunk. If a mapping forms the
    leaf, its `rule` gives the order of the elements, and `target` is the smallest block of the leaf
    around them.
    """

    file: str
    item: str
    source: Box
    target: Box
    rule: str = ""

    @property
    def name(self) -> str:
        """The stored item as `file:item`, or the file if it has no items."""
        return f"{self.file}:{self.item}" if self.item else self.file

    def __str__(self) -> str:
        return f"{self.name}{self.source}"


class ArraySource(Protocol):
    """Named arrays that can be read by box. Subclass this, and inherit the defaults that you do not
    override.
    """

    @abstractmethod
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """The shape, dtype and chunk of every array, by name. Reads no data."""
        ...

    @abstractmethod
    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its output array, of any strides; shared data is read once."""
        ...

    def lies_in(self, key: str) -> str:
        """The key of an array's storage unit; arrays with one key are best read in one call."""
        return key

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays. A source may read those of one storage unit together."""
        for key, boxes, outs in wants:
            self.read_into(key, boxes, outs)

    def read(self, key: str, box: Box) -> np.ndarray:
        """The elements of `box` of array `key`, in the shape of the box, in memory that the caller
        owns.
        """
        out = np.empty(box.shape, self.arrays()[key].dtype)
        self.read_into(key, [box], [out])
        return out

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """The blocks of files that hold a box of an array. The default is for stored arrays called
        `file:item`, one item each.
        """
        file, _, item = key.partition(":")
        yield Piece(file, item, box, box)

    def stored(self, key: str) -> StoredArray | np.ndarray | None:
        """Where an array lies in a file as it is, or its elements, if no file has them as an array;
        None where it has to be decoded.
        """
        return None

    def claims(self) -> Iterable[LeafClaim]:
        """Claims about the source's own arrays, such as checksums; none by default."""
        return ()


class MakesArrays(ArraySource):
    """A source whose `read` returns new arrays, decoded from chunks or computed."""

    @abstractmethod
    def read(self, key: str, box: Box) -> np.ndarray: ...

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its output array. Every chunk is read once: if eight devices want
        columns of one chunk, that is one read of it, not eight.
        """
        info = self.arrays()[key]
        if info.chunk is None or (len(boxes) == 1 and outs[0].nbytes <= BLOCK_BYTES):
            for box, out in zip(boxes, outs, strict=True):
                out[...] = self.read(key, box)
            return
        for block in info.blocks(boxes, BLOCK_BYTES):
            for sharing in _sharing(boxes, block, info.chunk):
                around = Box.around(hit for _, hit in sharing)
                data = self.read(key, around)
                for i, hit in sharing:
                    outs[i][hit.relative_to(boxes[i]).index] = data[hit.relative_to(around).index]


def _sharing(
    boxes: Sequence[Box], block: Box, chunk: Sequence[int]
) -> Iterable[list[tuple[int, Box]]]:
    """Groups of the boxes' intersections with a block, each with the index of its box; no two
    groups have a chunk in common.

    Data between two groups need not be read.
    """
    groups: dict[Box, list[tuple[int, Box]]] = {}
    for i, box in enumerate(boxes):
        if (hit := box.intersect(block)) is None:
            continue
        around, group = whole_chunks(hit, chunk), [(i, hit)]
        while meeting := [other for other in groups if other.intersect(around)]:
            around = Box.around([around, *meeting])
            group += [member for other in meeting for member in groups.pop(other)]
        groups[around] = group
    return groups.values()
