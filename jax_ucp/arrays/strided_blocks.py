"""Where the elements of an array expression lie in files, as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.extents import StoredArray
from jax_ucp.arrays.value import Array, Computed, Constant, Joined, Stored
from jax_ucp.errors import LayoutError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo
from jax_ucp.layout.box import Box, row_major_strides
from jax_ucp.layout.parts import Part
from jax_ucp.layout.runs import StridedBlock

# An array in more blocks is one of short runs.
MOST_BLOCKS = 1 << 16

Blocks = Sequence[StridedBlock]


class StridedBlocks:
    """The strided blocks of array expressions, and the files that these number.

    What several arrays rest on is looked at once.
    """

    def __init__(self) -> None:
        self.files: list[tuple[FilePath, FileInfo]] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Array, Blocks]] = {}

    def of(self, array: Array) -> Blocks:
        """The blocks that tile the array; of what is stored twice, those of one copy.

        Raises LayoutError, with the reason, where elements are not in files as they are.
        """
        if id(array) not in self._known:
            blocks = list(itertools.islice(self._blocks(array), MOST_BLOCKS + 1))
            if len(blocks) > MOST_BLOCKS:
                raise LayoutError(f"its elements lie in more than {MOST_BLOCKS} blocks")
            self._known[id(array)] = array, blocks
        return self._known[id(array)][1]

    def _blocks(self, array: Array) -> Iterator[StridedBlock]:
        match array:
            case Stored():
                yield from self._stored(array)
            case Constant():
                raise LayoutError("no file has its numbers as an array")
            case Joined():
                yield from self._joined(array)
            case Computed(rule):
                raise LayoutError(f"it is computed ({rule.scheme or type(rule).__name__.lower()})")

    def _stored(self, array: Stored) -> Iterator[StridedBlock]:
        if isinstance(array.source, Evaluated):
            yield from self.of(array.source.values[array.item])
            return
        stored, itemsize = array.source.stored(array.item), array.info.dtype.itemsize
        if not isinstance(stored, StoredArray):
            raise LayoutError(
                "no file has its bytes as they are"
                if stored is None
                else "no file has its numbers as an array"
            )
        if stored.file.swapped and itemsize > 1:
            raise LayoutError("its bytes are in the other order")
        place = stored.file.data.place
        if place is None:
            raise LayoutError("its bytes are compressed, or not one after the other")
        path, info, offset = place
        number = self._numbers.setdefault(str(path), len(self.files))
        if number == len(self.files):
            self.files.append((path, info))
        shape = array.info.shape
        steps = row_major_strides(shape) if stored.strides is None else stored.strides
        sides = tuple(step * itemsize for step in steps)
        yield StridedBlock(Box.whole(shape), number, offset + stored.offset, sides)

    def _joined(self, array: Joined) -> Iterator[StridedBlock]:
        if array.layout.averaged:
            raise LayoutError("it is a mean of copies")
        if array.layout.padded:
            raise LayoutError("it has zeros that no file has")
        for part, *_ in array.layout.replicas.values():
            back, whole = part.inverse(), array.inputs[part.input]
            for block in self.of(whole):
                for indices in back.inside(block.box):
                    yield from _placed(part, block, indices)


def _placed(part: Part, block: StridedBlock, indices: Box) -> Iterator[StridedBlock]:
    """Blocks of the target with the elements of a box of indices, all of one block of the source.

    On an axis of the target neighbours stay together as far as they are at even distances in the
    file too; of the other indices each is a block of its own.
    """
    steps = [block.strides[axis] * stride for axis, stride in part.source.steps]
    lengths = indices.shape
    begin = block.at(part.source.hull(indices).start)
    sides: list[tuple[int, int]] = []  # of each axis of the target, the length and the distance
    apart: list[int] = []
    for axis in range(len(part.target.offset)):
        length, step = 1, 0
        for index in reversed(part.target.on_axis(axis)):
            if lengths[index] == 1:
                continue
            stride = part.target.steps[index][1]
            if stride == length and (length == 1 or steps[index] == step * length):
                step = steps[index] if length == 1 else step
                length *= lengths[index]
            else:
                apart.append(index)
        sides.append((length, step))
    start = part.target.hull(indices).start
    for place in itertools.product(*(range(lengths[index]) for index in apart)):
        corner, offset = list(start), begin
        for index, n in zip(apart, place, strict=True):
            offset += n * steps[index]
            axis, stride = part.target.steps[index]
            corner[axis] += n * stride
        stop = tuple(a + n for a, (n, _) in zip(corner, sides, strict=True))
        distances = tuple(step for _, step in sides)
        yield StridedBlock(Box(tuple(corner), stop), block.file, offset, distances)
