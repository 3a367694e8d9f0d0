"""The arrays of a checkpoint that has stacks, by the names of its leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece, Want
from jax_ucp.layout.box import Box
from jax_ucp.universal.stacks import Stacks, member_info
from jax_ucp.universal.store import ZarrStore


class Unstacked(ArraySource):
    """Each array of a store, those of a stack separately."""

    def __init__(self, store: ZarrStore, stacks: Stacks):
        self._store = store
        self._homes = {
            name: (stack, i) for stack, names in stacks.items() for i, name in enumerate(names)
        }
        stored = store.arrays()
        infos = {stack: member_info(stored[stack]) for stack in stacks}
        self._arrays = {key: info for key, info in stored.items() if key not in stacks}
        self._arrays |= {name: infos[stack] for name, (stack, _) in self._homes.items()}
        # an array of a stack has the stack's chunks here
        self.chunks = {key: store.chunks[self._homes.get(key, (key, 0))[0]] for key in self._arrays}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def lies_in(self, key: str) -> str:
        if key in self._homes:
            stack, _ = self._homes[key]
            return stack
        return self._store.lies_in(key)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        self.read_each([(key, boxes, outs)])

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays; those of one stack are read together."""
        stored: dict[str, tuple[list[Box], list[np.ndarray]]] = defaultdict(lambda: ([], []))
        for key, boxes, outs in wants:
            stack, number = self._homes.get(key, (key, None))
            all_boxes, all_outs = stored[stack]
            all_boxes += [_in_stack(box, number) for box in boxes]
            all_outs += outs if number is None else [out[None] for out in outs]
        self._store.read_each([(key, *wanted) for key, wanted in stored.items()])

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """The outer chunks that a box meets; of a stack's chunk, the part of the array."""
        if key not in self._homes:
            yield from self._store.locate(key, box)
            return
        stack, number = self._homes[key]
        whole = Box.whole(self._arrays[key].shape)
        for piece in self._store.locate(stack, _in_stack(box, number)):
            target = Box(piece.target.start[1:], piece.target.stop[1:])
            own = _in_stack(target, number - piece.target.start[0])
            origin = Box((0, *target.start), (0, *target.start))
            assert target.within(whole)
            yield Piece(piece.file, key, own.relative_to(origin), target)


def _in_stack(box: Box, number: int | None) -> Box:
    """The box in a stack of a box of array `number`; the box itself if that is None."""
    if number is None:
        return box
    return Box((number, *box.start), (number + 1, *box.stop))
