"""Where the elements of an array expression lie in files, as they are."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.extents import StoredArray
from jax_ucp.arrays.value import Array, Computed, Constant, Cut, Joined, Rearranged, Stored
from jax_ucp.errors import LayoutError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.strided import row_major_strides
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, Shape
from jax_ucp.layout.runs import StridedBlock, row_major, row_major_blocks
from jax_ucp.layout.strided import Part, strides

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
        self._runs: dict[int, tuple[list[int], Blocks]] = {}

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
            case Cut(whole, start, shape, transposed):
                for block in self._range(whole, start, shape):
                    yield _transposed(block) if transposed else block
            case Joined():
                yield from self._joined(array)
            case Rearranged():
                yield from self._rearranged(array)
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

    def _range(self, whole: Array, start: int, shape: Shape) -> Iterator[StridedBlock]:
        """Consecutive elements of an array in row-major order, from `start` on, as an array."""
        itemsize, stop = whole.info.dtype.itemsize, start + math.prod(shape)
        firsts, runs = self._runs_of(whole)
        for i in range(max(0, bisect.bisect_right(firsts, start) - 1), len(runs)):
            first, block = firsts[i], runs[i]
            if first >= stop:
                return
            begin, end = max(start, first), min(stop, first + block.box.size)
            offset = block.offset + (begin - first) * itemsize
            yield from row_major_blocks(
                shape, begin - start, end - start, block.file, offset, itemsize
            )

    def _runs_of(self, whole: Array) -> tuple[list[int], Blocks]:
        """The blocks of an array of which each is a run, in its row-major order, and where each
        begins there, in elements.
        """
        if id(whole) not in self._runs:
            shape, itemsize = whole.info.shape, whole.info.dtype.itemsize
            steps = row_major(shape, 1)
            found: list[tuple[int, StridedBlock]] = []
            for block in self.of(whole):
                first = sum(a * step for a, step in zip(block.box.start, steps, strict=True))
                last = sum((b - 1) * step for b, step in zip(block.box.stop, steps, strict=True))
                if last - first + 1 != block.box.size or not block.is_run(itemsize):
                    raise LayoutError("a part of it is cut out of columns")
                found.append((first, block))
            found.sort(key=lambda run: run[0])
            self._runs[id(whole)] = [first for first, _ in found], [block for _, block in found]
        return self._runs[id(whole)]

    def _joined(self, array: Joined) -> Iterator[StridedBlock]:
        if array.layout.averaged:
            raise LayoutError("it is a mean of copies")
        for copies in array.layout.replicas.values():
            yield from self._fragment(array.inputs[copies[0].shard], copies[0])

    def _fragment(self, shard: Array, fragment: Fragment) -> Iterator[StridedBlock]:
        source, target = fragment.source, fragment.target
        if fragment.is_flat:
            for block in self._range(shard, source.start[0], target.shape):
                yield block.shift(target.start)
            return
        by = [t - s for s, t in zip(source.start, target.start, strict=True)]
        for block in self.of(shard):
            if (hit := block.box.intersect(source)) is not None:
                yield block.part(hit).shift(by)

    def _rearranged(self, array: Rearranged) -> Iterator[StridedBlock]:
        if array.layout.padding:
            raise LayoutError("it has zeros that no file has")
        for part in array.layout.parts:
            back = part.inverse(part.array)
            for block in self.of(array.inputs[part.array]):
                for indices in back.inside(block.box):
                    yield from _placed(part, block, indices)


def _placed(part: Part, block: StridedBlock, indices: Box) -> Iterator[StridedBlock]:
    """The elements of a box of indices, which all lie in a block of the source, in the target.

    On an axis of the target neighbours stay together as far as they are at even distances in the
    file too; of the other indices each is a block of its own.
    """
    by_index = strides(part.source, indices.ndim)
    steps = [block.strides[dim] * stride for dim, stride in by_index]
    lengths = indices.shape
    begin = block.at([run.span(indices)[0] for run in part.source])
    sides: list[tuple[int, int]] = []  # of each axis of the target, the length and the distance
    apart: list[int] = []
    for run in part.target:
        length, step = 1, 0
        for index, stride in sorted(run.terms, key=lambda term: term[1]):
            if lengths[index] == 1:
                continue
            if stride == length and (length == 1 or steps[index] == step * length):
                step = steps[index] if length == 1 else step
                length *= lengths[index]
            else:
                apart.append(index)
        sides.append((length, step))
    start = [run.span(indices)[0] for run in part.target]
    for place in itertools.product(*(range(lengths[index]) for index in apart)):
        corner, offset = list(start), begin
        for index, n in zip(apart, place, strict=True):
            offset += n * steps[index]
            for axis, run in enumerate(part.target):
                corner[axis] += sum(n * stride for i, stride in run.terms if i == index)
        stop = tuple(a + n for a, (n, _) in zip(corner, sides, strict=True))
        distances = tuple(step for _, step in sides)
        yield StridedBlock(Box(tuple(corner), stop), block.file, offset, distances)


def _transposed(block: StridedBlock) -> StridedBlock:
    box = Box(block.box.start[::-1], block.box.stop[::-1])
    return StridedBlock(box, block.file, block.offset, block.strides[::-1])
