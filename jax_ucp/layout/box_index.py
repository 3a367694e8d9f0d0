"""An index of boxes, to find those that overlap a box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_ucp.layout.box import Box

LEAF_BOXES = 8


@dataclass(frozen=True, slots=True)
class _BoxNode:
    """A bounding box: around `children`, or around the boxes at the positions `members`."""

    bounds: Box
    children: tuple[_BoxNode, ...] = ()
    members: tuple[int, ...] = ()


class BoxIndex:
    """An index of a sequence of boxes, to find the positions of those that overlap a box.

    It is a tree of bounding boxes, divided at the median of the axis on which the boxes spread
    most. For boxes that tile an array, the time of a query is the logarithm of their number plus
    the hits.

    >>> index = BoxIndex([Box((0, 0), (2, 4)), Box((2, 0), (4, 4))])
    >>> list(index.meeting(Box((1, 1), (2, 2))))
    [0]
    """

    def __init__(self, boxes: Sequence[Box]):
        self._boxes = boxes
        filled = [i for i, box in enumerate(boxes) if box.size]
        self._roots = [self._node(filled)] if filled else []

    def meeting(self, box: Box) -> Iterator[int]:
        """The positions of the boxes that share an element with `box`, which has some."""
        nodes = self._roots.copy()
        while nodes:
            node = nodes.pop()
            if node.bounds.meets(box):
                nodes.extend(node.children)
                yield from (i for i in node.members if self._boxes[i].meets(box))

    def _node(self, members: list[int]) -> _BoxNode:
        boxes = self._boxes
        if len(members) <= LEAF_BOXES:
            return _BoxNode(Box.around([boxes[i] for i in members]), members=tuple(members))
        starts = [boxes[i].start for i in members]
        extents = [max(column) - min(column) for column in zip(*starts, strict=True)]
        axis = extents.index(max(extents))
        members.sort(key=lambda i: boxes[i].start[axis])
        middle = len(members) // 2
        children = self._node(members[:middle]), self._node(members[middle:])
        return _BoxNode(Box.around([child.bounds for child in children]), children)
