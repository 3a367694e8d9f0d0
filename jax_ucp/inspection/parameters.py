"""The parameters of an opened checkpoint, one by one; notebooks show them as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.contents import Contents, Piece, require_values
from jax_ucp.arrays.proved import ProvedReads
from jax_ucp.layout.box import Box
from jax_ucp.text import html_table, visible
from jax_ucp.tree import Leaf


@dataclass(frozen=True, repr=False)
class Parameter:
    """A parameter of an imported checkpoint, and its states (`param`, `exp_avg`, ...)."""

    name: str
    states: Mapping[str, Leaf]
    contents: Contents
    reads: ProvedReads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.states["param"].shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.states["param"].dtype)

    def where(self, state: str = "param") -> Sequence[Piece]:
        return self.contents.locate(self.states[state])

    def read(self, state: str = "param", box: Box | None = None) -> np.ndarray:
        """The array of a state, or a box of it, proved by a sample as `Checkpoint.read` does."""
        leaf = self.states[state]
        require_values(self.contents, [leaf])
        return self.reads.read(leaf, box)

    def __repr__(self) -> str:
        return f"<{visible(self.name)}: {self.dtype} {list(self.shape)}, {', '.join(self.states)}>"

    def _repr_html_(self) -> str:
        rows = [
            (state, leaf.dtype, str(list(leaf.shape)), str(piece.target), str(piece))
            for state, leaf in self.states.items()
            for piece in self.contents.locate(leaf)
        ]
        return html_table(self.name, ("state", "dtype", "shape", "block", "is stored in"), rows)


class ParameterTable(dict[str, Parameter]):
    """Parameters by name, in the checkpoint's order."""

    def _repr_html_(self) -> str:
        rows = [
            (p.name, str(p.dtype), str(list(p.shape)), ", ".join(p.states)) for p in self.values()
        ]
        return html_table(
            f"{len(rows)} parameters", ("parameter", "dtype", "shape", "states"), rows
        )
