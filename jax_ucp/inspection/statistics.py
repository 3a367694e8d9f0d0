"""Statistics of a checkpoint's arrays, such as norms, extremes and counts of NaN, in one pass with
bounded memory.

Counts are exact. Floats of 32 bits and fewer are summed in single precision, 1,024 at a time, and
those sums in doubles: norms, deviations and means are then within some 1e-6 of the norm. Other
dtypes are summed in doubles. Adam's two moments are read together with their parameter, block by
block, to compute the size of the step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jax_ucp.arrays.budget import fair_share, run_bounded, threads
from jax_ucp.arrays.protocol import BLOCK_BYTES, ArrayInfo
from jax_ucp.errors import QuantizedWeights, UCPError
from jax_ucp.layout.box import Box
from jax_ucp.tree import Leaf

# If a checkpoint has more bytes, its large arrays are sampled by default.
MAX_READ = 64 << 30

# The number of elements that stay in a core's cache while several sums are made of them.
_CACHED = 1 << 16
# The number of products that are summed in single precision.
_RUN = 1 << 10
_ONES = np.ones(_RUN, np.float32)
# Largest magnitudes whose squares, and a run of them, are neither lost nor infinite in 32 bits.
_SQUARED = 2.0**-20, 2.0**40
# The number of evenly spread blocks that are read of an array that is sampled.
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of an array's elements; complex ones are taken by their magnitude.

    `seen` of its `elements` were read: all of them, or evenly spread blocks. `mean`, `deviation`,
    `norm`, `least` and `greatest` are of the finite ones. A row has one index of the first axis,
    and a dead row is all zeros; `rows` is 0 if rows were not counted. `deviations` is the sum of
    squared deviations from the mean, and `steps` that of the squared step which follows from Adam's
    moments. `unread` is the reason if the array could not be read, and `is_fault` tells whether
    that is a fault of the checkpoint.
    """

    elements: int
    seen: int = 0
    nans: int = 0
    infinities: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    rows: int = 0
    dead_rows: int = 0
    steps: float = 0.0
    unread: str = ""
    is_fault: bool = False

    @property
    def finite(self) -> int:
        """The number of finite elements among those that were read."""
        return self.seen - self.nans - self.infinities

    @property
    def deviation(self) -> float:
        """The standard deviation of these elements, not that of a larger population."""
        return math.sqrt(self.deviations / self.finite) if self.finite else 0.0

    @property
    def norm(self) -> float:
        """The Euclidean norm; if a sample was read, the estimate for the whole array."""
        size = math.hypot(math.sqrt(self.deviations), math.sqrt(self.finite) * self.mean)
        return size * self._scale

    @property
    def update(self) -> float:
        """The norm of the step which follows from Adam's moments, estimated as `norm` is."""
        return math.sqrt(self.steps) * self._scale

    @property
    def _scale(self) -> float:
        return math.sqrt(self.elements / self.seen) if self.seen else 1.0

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of two parts of one array together (Chan, Golub and LeVeque 1979)."""
        finite = self.finite + other.finite
        apart = other.mean - self.mean
        share = other.finite / finite if finite else 0.0
        return Statistics(
            self.elements,
            self.seen + other.seen,
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.mean + apart * share,
            self.deviations + other.deviations + (apart * self.finite) * (apart * share),
            min(self.least, other.least),
            max(self.greatest, other.greatest),
            self.rows + other.rows,
            self.dead_rows + other.dead_rows,
            self.steps + other.steps,
            self.unread or other.unread,
            self.is_fault or other.is_fault,
        )


@dataclass(frozen=True, slots=True)
class AdamStep:
    """A step of Adam from its moments: `rate * (m / first) / (sqrt(v / second) + eps)`.

    `first` and `second` correct the bias of moments that began as zeros: `1 - beta ** step`.
    """

    rate: float = 1.0
    first: float = 1.0
    second: float = 1.0
    eps: float = 0.0

    @np.errstate(all="ignore")
    def squares(self, m: np.ndarray, v: np.ndarray) -> float:
        """The sum of the squares of the step, whose elements have single precision at least."""
        m, v = m.reshape(-1), v.reshape(-1)
        # one buffer for all blocks: new memory would cost more than the arithmetic
        memory = np.empty(min(_CACHED, m.size), np.result_type(m.dtype, v.dtype, np.float32))
        # m / (sqrt(v / second) + eps) = sqrt(second) * m / (sqrt(v) + eps * sqrt(second))
        root = math.sqrt(self.second)
        eps = memory.dtype.type(self.eps * root)
        factor = self.rate * root / self.first
        total = 0.0
        for i in range(0, m.size, _CACHED):
            step = memory[: m.size - i]
            np.sqrt(v[i : i + _CACHED], out=step, casting="unsafe")
            if eps:
                step += eps
            elif step.min() == 0:
                step[step == 0] = np.inf
            np.divide(m[i : i + _CACHED], step, out=step, casting="unsafe")
            total += _products(step, step) * factor * factor
        return total


@dataclass(frozen=True, slots=True)
class Together:
    """Arrays of one shape that are read together: a parameter, and Adam's two moments of it."""

    leaves: tuple[Leaf, ...]
    step: AdamStep | None = None


def statistics_of(
    groups: Sequence[Together],
    arrays: Mapping[str, ArrayInfo],
    read: Callable[[Leaf, Box], np.ndarray],
    *,
    max_read_bytes: int,
    budget_bytes: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Statistics]:
    """The statistics of each leaf's array by name, sampled to read about `max_read_bytes`."""
    sums = {leaf.name: Statistics(math.prod(leaf.shape)) for each in groups for leaf in each.leaves}
    most = fair_share([arrays[name].nbytes for name in sums], max_read_bytes)
    lock = threading.Lock()

    def look(together: Together, box: Box) -> None:
        parts = _parts(together, box, read)
        with lock:
            for leaf, part in zip(together.leaves, parts, strict=True):
                sums[leaf.name] += part
                progress(part.seen * np.dtype(leaf.dtype).itemsize)

    def jobs() -> Iterator[tuple[int, Callable[[], None]]]:
        """Blocks, each with the memory that it takes: its elements, and doubles for a step."""
        for each in groups:
            itemsize = sum(np.dtype(leaf.dtype).itemsize for leaf in each.leaves)
            doubles = 8 * _CACHED * (1 + len(each.leaves))
            for box in _boxes(each, arrays, most, budget_bytes):
                yield box.size * itemsize + doubles, partial(look, each, box)

    run_bounded(jobs(), budget_bytes)
    return sums


def _boxes(
    together: Together, arrays: Mapping[str, ArrayInfo], most: int, budget_bytes: int
) -> Iterator[Box]:
    """The boxes to read of each of the arrays `together`, which have one shape: blocks of whole
    chunks that cover it, or if the first array has more than `most` bytes, evenly spread blocks of
    about so many bytes.
    """
    info = arrays[together.leaves[0].name]
    whole = Box.whole(info.shape)
    if not whole.size:
        return
    block_bytes = min(BLOCK_BYTES, budget_bytes // threads() // (4 * len(together.leaves)))
    if info.nbytes > most:
        block_bytes = min(block_bytes, most // _SAMPLES)
    boxes = list(info.blocks([whole], max(1, block_bytes)))
    if info.nbytes > most:
        count = max(1, len(boxes) * most // info.nbytes)
        boxes = [boxes[i] for i in np.linspace(0, len(boxes) - 1, count).astype(int)]
    for box in boxes:
        inside = box.intersect(whole)
        if inside is not None:
            yield inside


def _parts(
    together: Together, box: Box, read: Callable[[Leaf, Box], np.ndarray]
) -> list[Statistics]:
    """The statistics of a block of each array; those of the first, the parameter, have the step."""
    blocks: list[np.ndarray] = []
    parts: list[Statistics] = []
    for leaf in together.leaves:
        try:
            block = read(leaf, box)
        except UCPError as error:
            is_fault = not isinstance(error, QuantizedWeights)
            parts.append(Statistics(0, unread=str(error), is_fault=is_fault))
        else:
            blocks.append(block)
            has_whole_rows = len(leaf.shape) > 1 and box.shape[1:] == leaf.shape[1:]
            parts.append(block_statistics(block, has_whole_rows))
    if together.step is not None and len(blocks) == len(together.leaves):
        parts[0] += Statistics(0, steps=together.step.squares(*blocks[1:]))
    return parts


def block_statistics(block: np.ndarray, has_whole_rows: bool = False) -> Statistics:
    """The statistics of a block of an array, which has counts of rows if it `has_whole_rows`."""
    rows = block.reshape(len(block) if has_whole_rows else 1, -1)
    flat = rows.reshape(-1)
    # whether 32-bit floats represent every value; dtypes of ml_dtypes have no kind of their own
    dtype = block.dtype
    is_float = dtype.kind == "f" or dtype.name.startswith(("bf", "float"))
    is_single = dtype.itemsize <= 4 and is_float
    scratch = np.empty(min(_CACHED, flat.size), np.float32 if is_single else np.float64)
    look = _single_statistics if is_single else _double_statistics
    total = Statistics(0)
    for i in range(0, flat.size, _CACHED):
        part = flat[i : i + _CACHED]
        total += look(part, scratch[: part.size])
    if has_whole_rows and flat.size:
        # only rows that begin and end with a zero, which are few, are read whole
        ends = np.flatnonzero((rows[:, 0] == 0) & (rows[:, -1] == 0))
        dead_rows = sum(1 for row in ends if not rows[row].any())
        total += Statistics(0, rows=len(rows), dead_rows=dead_rows)
    return total


@np.errstate(all="ignore")
def _single_statistics(block: np.ndarray, scratch: np.ndarray) -> Statistics:
    """The statistics of a flat block of at most 32-bit floats; `scratch` has the same size."""
    if block.dtype != np.float32:
        np.copyto(scratch, block, casting="unsafe")  # exact, for these dtypes
        block = scratch
    least, greatest = float(block.min()), float(block.max())
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return _double_statistics(block, np.empty(block.size))
    # magnitudes that cannot be squared in 32 bits are first scaled by a power of two
    magnitude, scale = max(-least, greatest), 1.0
    if not _SQUARED[0] < magnitude < _SQUARED[1]:
        scale = 2.0 ** -min(126, max(-126, math.frexp(magnitude)[1]))
        block = np.multiply(block, np.float32(scale), out=scratch)
    total, squares = _total(block), _products(block, block)
    mean = total / block.size
    deviations = squares - total * mean
    if not deviations > squares / 16:  # they nearly cancel: summed again after subtracting the mean
        centred = np.subtract(block, np.float32(mean), out=scratch)
        total, squares = _total(centred), _products(centred, centred)
        rest = total / block.size
        mean, deviations = float(np.float32(mean)) + rest, max(0.0, squares - total * rest)
    mean, deviations = mean / scale, deviations / scale / scale
    return Statistics(0, block.size, 0, 0, mean, deviations, least, greatest)


def _total(a: np.ndarray) -> float:
    runs = a.size - a.size % _RUN
    whole = np.dot(a[:runs].reshape(-1, _RUN), _ONES).sum(dtype=np.float64)
    return float(whole + np.dot(a[runs:], _ONES[: a.size - runs]))


def _products(a: np.ndarray, b: np.ndarray) -> float:
    runs = a.size - a.size % _RUN
    whole = np.vecdot(a[:runs].reshape(-1, _RUN), b[:runs].reshape(-1, _RUN))
    return float(whole.sum(dtype=np.float64) + np.dot(a[runs:], b[runs:]))


@np.errstate(all="ignore")
def _double_statistics(block: np.ndarray, wide: np.ndarray) -> Statistics:
    """The statistics of a flat block; `wide` is memory for as many doubles."""
    sizes = np.abs(block, dtype=np.float64) if block.dtype.kind == "c" else block
    np.copyto(wide, sizes, casting="unsafe")
    least, greatest = float(wide.min()), float(wide.max())
    nans = infinities = 0
    if not (math.isfinite(least) and math.isfinite(greatest)):
        nans = int(np.count_nonzero(np.isnan(wide)))
        infinities = int(np.count_nonzero(np.isinf(wide)))
        wide = wide[np.isfinite(wide)]
        least, greatest = float(wide.min(initial=np.inf)), float(wide.max(initial=-np.inf))
    mean = float(wide.mean()) if wide.size else 0.0
    wide -= mean
    deviations = float(np.dot(wide, wide))
    return Statistics(0, block.size, nans, infinities, mean, deviations, least, greatest)
