"""A weight with what adapters add to it: `weight + scale * (B @ A)`, rounded once.

The rule, for every element: in float64, the products `B[i, k] * A[k, j]` are summed in the order of
`k`, the sum is multiplied by the scale and added to the weight, adapter after adapter, and the
result is rounded once to the dtype of the weight. Products of float32 are exact in float64. A
library's matrix product sums in an order of its own, which depends on the shape of the block and on
the machine; what it gives is taken where the error that it can have does not reach another rounded
number, and other elements are summed as the rule says. So a box is that box of the whole, whoever
computes it.

DoRA divides each output's row of that sum by the row's norm, and multiplies it by a stored
magnitude: the row is read whole, whichever part of it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_ucp.arrays.dequantized import WeightPart
from jax_ucp.arrays.rounding import round_into
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box

# scale, B and A
Factor = tuple[float, np.ndarray, np.ndarray]
Factors = Sequence[Factor]

WEIGHT, MAGNITUDE = "weight", "magnitude"

# The unit of rounding of float64, and what no sum of products of smaller floats is beneath.
_ROUNDING = 2.0**-53
_TINY = 1e-300

# What a norm is computed of at once: elements of float64.
_ROW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Term:
    """The product that one adapter adds: `scale * B @ A`. `b` and `a` are the roles of the parts;
    without `a` it is `scale * b`, a vector.
    """

    scale: float
    b: str
    a: str = ""


@dataclass(frozen=True)
class MergedWeight:
    """How a weight is made of the base's and of what adapters store.

    `out_axis` is the axis of the outputs, which are the rows of B; all others are inputs, the
    columns of A. With `experts` the first axis is neither: part A is `(experts, rank, inputs)`,
    part B `(outputs, rank, experts)`. Elsewhere they are `(rank, *inputs)` and `(outputs, rank)`.
    With the part `magnitude`, a number for each output, it is merged as DoRA says.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Mapping[str, WeightPart]
    terms: Sequence[Term] = ()
    out_axis: int = 0
    experts: bool = False
    scheme: str = "an adapter"
    # the norms of the rows that were asked for last, by where these begin and end
    _known_norms: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, compare=False)

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of the weight and, of each pair of factors, the rows and the columns."""
        wanted = self._whole_rows(box) if MAGNITUDE in self.parts else box
        boxes = {WEIGHT: wanted}
        rows = Box((wanted.start[self.out_axis],), (wanted.stop[self.out_axis],))
        if MAGNITUDE in self.parts:
            boxes[MAGNITUDE] = rows
        for term in self.terms:
            boxes |= self._factor_boxes(term, wanted, rows)
        return boxes

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The merged numbers as float64, which rounded to the dtype are those of the rule."""
        if MAGNITUDE in self.parts:
            length = parts[MAGNITUDE] / self._row_norms(box, parts)
            return self._merged(*self._cut(box, parts), length)
        factors = [self._factors(term, parts) for term in self.terms]
        if not self.experts:
            return self._merged(parts[WEIGHT], factors)
        merged = np.empty(box.shape)
        for i, expert in enumerate(parts[WEIGHT]):
            merged[i] = self._merged(expert, [(scale, b[:, :, i], a[i]) for scale, b, a in factors])
        return merged

    def _merged(
        self, weight: np.ndarray, factors: Factors, length: np.ndarray | None = None
    ) -> np.ndarray:
        axis = self.out_axis - self.experts
        rows = np.moveaxis(weight, axis, 0)
        merged = _summed(*_matrices(rows, factors), self.dtype, length)
        return np.moveaxis(merged.reshape(rows.shape), 0, axis)

    def _row_norms(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The norm of each row, computed once for all pieces of the same rows."""
        rows = box.start[self.out_axis], box.stop[self.out_axis]
        norms = self._known_norms.get(rows)
        if norms is None:
            factors = [self._factors(term, parts) for term in self.terms]
            weight = np.moveaxis(parts[WEIGHT], self.out_axis, 0)
            norms = np.concatenate(list(_norms(*_matrices(weight, factors))))
            self._known_norms.clear()
            self._known_norms[rows] = norms
        return norms

    def _cut(self, box: Box, parts: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Factors]:
        """Of parts for whole rows, the weight and the factors of a box of them."""
        inside = box.relative_to(self._whole_rows(box)).index
        columns = (slice(None), *(inside[i] for i in self._in_axes))
        factors = [self._factors(term, parts) for term in self.terms]
        return parts[WEIGHT][inside], [(scale, b, a[columns]) for scale, b, a in factors]

    @property
    def _in_axes(self) -> list[int]:
        return [i for i in range(self.experts, len(self.shape)) if i != self.out_axis]

    def _whole_rows(self, box: Box) -> Box:
        start, stop = [0] * box.ndim, list(self.shape)
        start[self.out_axis], stop[self.out_axis] = (
            edge[self.out_axis] for edge in (box.start, box.stop)
        )
        return Box(tuple(start), tuple(stop))

    def _factor_boxes(self, term: Term, box: Box, rows: Box) -> Iterator[tuple[str, Box]]:
        if not term.a:
            yield term.b, rows
            return
        start = tuple([box.start[i] for i in self._in_axes])
        stop = tuple([box.stop[i] for i in self._in_axes])
        if not self.experts:
            rank = self.parts[term.a].shape[0]
            yield term.a, Box((0, *start), (rank, *stop))
            yield term.b, Box((*rows.start, 0), (*rows.stop, rank))
            return
        rank = self.parts[term.a].shape[1]
        first, last = box.start[0], box.stop[0]
        yield term.a, Box((first, 0, *start), (last, rank, *stop))
        yield term.b, Box((*rows.start, 0, first), (*rows.stop, rank, last))

    def _factors(self, term: Term, parts: Mapping[str, np.ndarray]) -> Factor:
        b = parts[term.b].astype(np.float64)
        if not term.a:
            return term.scale, b[:, None], np.ones((1, 1))
        return term.scale, b, parts[term.a].astype(np.float64)


def _matrices(rows: np.ndarray, factors: Factors) -> tuple[np.ndarray, Factors]:
    """The weight and the factors as matrices of float64, of a weight whose first axis is that of
    outputs.
    """
    flat = [(scale, b, a.reshape(len(a), -1)) for scale, b, a in factors]
    return rows.reshape(len(rows), -1).astype(np.float64), flat


def _summed(
    weight: np.ndarray, factors: Factors, dtype: np.dtype, length: np.ndarray | None = None
) -> np.ndarray:
    """The sum of a matrix and scaled products, its rows times `length`, as float64: rounded to
    `dtype` it is the sum in the order of the rule.
    """
    total, slack = weight.copy(), np.abs(weight)
    operations = 4
    for scale, b, a in factors:
        total += scale * (b @ a)
        norms = np.outer(np.linalg.norm(b, axis=1), np.linalg.norm(a, axis=0))
        slack += abs(scale) * norms
        operations += 2 * len(a) + 4
    if length is not None:
        total *= length[:, None]
        slack *= np.abs(length[:, None])
    # both sums are at most this far from the exact one, with room for the sum of the bounds
    slack *= 2 * operations * _ROUNDING
    slack += _TINY
    unsure = _bits(total - slack, dtype) != _bits(total + slack, dtype)
    if unsure.any():
        rows, columns = np.nonzero(unsure)
        exact = _in_order(weight, factors, rows, columns)
        total[rows, columns] = exact if length is None else exact * length[rows]
    return total + 0.0  # no zero is negative


def _in_order(
    weight: np.ndarray, factors: Factors, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """The elements at rows and columns, summed as the rule says."""
    total = weight[rows, columns]
    for scale, b, a in factors:
        product = np.zeros(total.shape)
        for k in range(len(a)):
            product += b[rows, k] * a[k, columns]
        total += scale * product
    return total


def _norms(weight: np.ndarray, factors: Factors) -> Iterator[np.ndarray]:
    """The norms of rows of a sum that is computed in the order of the rule, in float64."""
    for block in row_boxes(weight.shape, 8, _ROW_BYTES):
        rows = slice(block.start[0], block.stop[0])
        total = np.ascontiguousarray(weight[rows])
        for scale, b, a in factors:
            product = np.zeros(total.shape)
            for k in range(len(a)):
                product += np.multiply.outer(b[rows, k], a[k])
            total = total + scale * product
        yield np.sqrt(np.sum(total * total, axis=1))


def _bits(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    rounded = np.empty(values.shape, dtype)
    round_into(rounded, values)
    return rounded.view(f"u{dtype.itemsize}")
