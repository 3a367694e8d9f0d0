"""The data of a page for its script, as JSON in columns: 10,000 arrays take two megabytes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_ucp.arrays.protocol import ArrayInfo, Piece
from jax_ucp.inspection.diff import Difference
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.statistics import AdamStep, Statistics, Together
from jax_ucp.text import visible
from jax_ucp.tree import Leaf

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint

# The most pieces of one array, and of all arrays, whose places the page has, so that it stays
# small.
_PIECES_OF_ONE = 256
_PIECES = 8000
# Measures of an array: the key, and its name on the page.
_MEASURES = (
    ("norm", "norm"),
    ("rms", "root mean square"),
    ("mean", "mean"),
    ("deviation", "standard deviation"),
    ("least", "least"),
    ("greatest", "greatest"),
    ("update", "update / weight"),
    ("direction", "update / weight, of a rate of 1"),
    ("nans", "NaN"),
    ("infinities", "infinite"),
    ("dead_rows", "dead rows"),
    ("sampled", "share that was read"),
)


@dataclass(frozen=True)
class Findings:
    """Results that a page shows beside the checkpoint's own metadata; None if not asked for."""

    together: Sequence[Together]
    statistics: Mapping[str, Statistics] | None = None
    mesh: Report | None = None
    difference: Difference | None = None
    other: Checkpoint | None = None


def flags_of(leaf: Leaf, statistics: Statistics | None) -> str:
    """Warnings about an array, in words."""
    if statistics is None:
        return ""
    words = [f"{statistics.nans} NaN"] * (statistics.nans > 0)
    words += [f"{statistics.infinities} infinite"] * (statistics.infinities > 0)
    # In moments, rows of zeros are usual: of tokens that did not occur, and of experts not used.
    if statistics.dead_rows and _MOMENTS.isdisjoint(str(key) for key in leaf.path[:-1]):
        words.append(f"{statistics.dead_rows} of {statistics.rows} rows are zeros")
    words += ["not read"] * bool(statistics.unread)
    return ", ".join(words)


_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "mu", "nu", "opt_state"})


def page_data(
    leaves: Sequence[Leaf],
    arrays: Mapping[str, ArrayInfo],
    pieces: Mapping[str, Sequence[Piece]],
    findings: Findings,
    flags: Mapping[str, str],
) -> Report:
    """Data for the page's script; `flags` are warnings by the name of a leaf."""
    shapes, dtypes = _Distinct(), _Distinct()
    infos = [arrays[leaf.name] for leaf in leaves]
    columns: Report = {
        "label": _front_coded([visible(leaf.label) for leaf in leaves]),
        "shape": [shapes.place(info.shape) for info in infos],
        "dtype": [dtypes.place(leaf.dtype) for leaf in leaves],
        "chunk": [shapes.place(info.chunk) for info in infos],
        "bytes": [info.nbytes for info in infos],
    }
    if any(flags.values()):
        columns["flags"] = [visible(flags[leaf.name]) for leaf in leaves]
    if findings.mesh is not None:
        of_label = {leaf["leaf"]: leaf for leaf in findings.mesh["leaves"]}
        placed = [of_label[leaf.label] for leaf in leaves]
        columns["device"] = [shapes.place(leaf["device_shape"]) for leaf in placed]
        columns["spec"] = [visible(str(tuple(leaf["spec"]))) for leaf in placed]
    if findings.statistics is not None:
        columns |= _columns(leaves, findings.statistics, findings.together)
    rows = fold([(leaf.label, str(leaf.shape), leaf.dtype) for leaf in leaves])
    # pieces of one array of each folded row first, then of the others up to the limit
    names, left = _Distinct(), _PIECES
    shown: dict[int, list[Any]] = {}
    more: dict[int, int] = {}
    for i in dict.fromkeys([*(row.rows[0] for row in rows), *range(len(leaves))]):
        each = pieces[leaves[i].label]
        few = each[: min(_PIECES_OF_ONE, left)]
        if not few:
            continue
        left -= len(few)
        shown[i] = [
            (
                names.place(visible(piece.file)),
                visible(piece.item),
                str(piece.source),
                piece.target.start,
                piece.target.stop,
            )
            for piece in few
        ]
        if len(each) > len(few):
            more[i] = len(each) - len(few)
    return {
        "arrays": columns,
        "shapes": shapes.values,
        "dtypes": dtypes.values,
        "measures": _MEASURES,
        "has_states": any(leaf.state == "param" for leaf in leaves),
        # a row of one array has the array's own name, which is not repeated
        "folded": [
            {**({"name": visible(row.name)} if row.count > 1 else {}), "members": row.rows}
            for row in rows
        ],
        "files": _front_coded(names.values),
        "pieces": shown,
        "pieces_left_out": more,
        "changes": [
            {
                "label": visible(each.label),
                "share": _rounded(each.share),
                "largest": _rounded(each.largest),
                "relative": _rounded(each.relative),
                "turned": _rounded(1 - each.cosine),
            }
            for each in (findings.difference.values if findings.difference else ())
        ],
    }


def _front_coded(texts: Sequence[str]) -> list[tuple[int, str]]:
    """Each text as the length of the beginning that it shares with the text before, and the rest.
    Lengths are in units of UTF-16, as in JavaScript. This saves two thirds of the bytes of names.

    >>> _front_coded(["layers.0.w", "layers.1.w"])
    [(0, 'layers.0.w'), (7, '1.w')]
    """
    coded: list[tuple[int, str]] = []
    last = ""
    for text in texts:
        begin = len(os.path.commonprefix([last, text]))  # noqa: RUF071
        coded.append((len(text[:begin].encode("utf-16-le")) // 2, text[begin:]))
        last = text
    return coded


class _Distinct:
    """A list of distinct values, which are referred to by their positions."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def place(self, value: Any) -> int | None:
        if value is None:
            return None
        key = tuple(value) if isinstance(value, list | tuple) else value
        return self._places.setdefault(key, len(self._places))

    @property
    def values(self) -> list[Any]:
        return list(self._places)


def _columns(
    leaves: Sequence[Leaf], statistics: Mapping[str, Statistics], together: Sequence[Together]
) -> Report:
    """Columns of measures by key, without empty ones; None for an array that lacks a measure."""
    steps = {each.leaves[0].name: each.step for each in together if each.step is not None}
    rows = [_numbers(statistics[leaf.name], steps.get(leaf.name)) for leaf in leaves]
    columns = {key: [row.get(key) for row in rows] for key, _ in _MEASURES}
    return {
        key: values for key, values in columns.items() if any(value is not None for value in values)
    }


def _numbers(of: Statistics, step: AdamStep | None) -> Mapping[str, float | None]:
    """Rounded measures of an array by key, only counts if none is finite; a count of 0 is None."""
    counts = {
        "nans": of.nans or None,
        "infinities": of.infinities or None,
        "dead_rows": of.dead_rows or None,
    }
    if not of.finite:
        return counts
    values = {
        "norm": of.norm,
        "rms": of.norm / math.sqrt(of.elements),
        "mean": of.mean,
        "deviation": of.deviation,
        "least": of.least,
        "greatest": of.greatest,
    }
    if step is not None and of.norm:
        values["direction" if step == AdamStep() else "update"] = of.update / of.norm
    if of.seen < of.elements:
        values["sampled"] = of.seen / of.elements
    return counts | {key: _rounded(value) for key, value in values.items()}


def _rounded(value: float) -> float | None:
    """The number rounded to four digits; None if it is not finite, which JSON lacks."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
