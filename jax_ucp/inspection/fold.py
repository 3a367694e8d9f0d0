"""Tables in which rows that differ only in numbers in their names are folded into one.

>>> rows = [(f"layers.{i}.w{j}", "[8, 8]") for i in range(32) for j in (1, 3)]
>>> [row] = fold(rows)
>>> row.name, row.cells, row.count
('layers.{0..31}.w{1,3}', ('[8, 8]',), 64)
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

# Numbers without leading zeros: `007` is part of a name.
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,17})(?!\d)")
_MOMENT = re.compile(r"(?<=/)[mn]u(?=/)")

_Numbers = tuple[int, ...]
_Sets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """A row that stands for the rows at the positions `rows`, which have equal `cells`; in its name
    `{0..31}` stands for the numbers 0 to 31.
    """

    name: str
    cells: tuple[str, ...]
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.rows)


def fold(rows: Iterable[Sequence[str]]) -> list[Folded]:
    """The rows (name, *cells), folded if they differ only in numbers in their names."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[_Numbers, list[int]]] = {}
    for place, (name, *cells) in enumerate(rows):
        parts = _NUMBER.split(name)
        same = alike.setdefault((tuple(parts[::2]), tuple(cells)), {})
        same.setdefault(tuple(map(int, parts[1::2])), []).append(place)
    return [
        folded
        for (texts, cells), places in alike.items()
        for folded in _folded(texts, cells, places)
    ]


def with_moments(rows: Iterable[Folded]) -> list[Folded]:
    """The rows, with one row for both moments of optax's Adam if these have equal cells.

    >>> [row] = with_moments(fold([("opt/mu/w", "[8]"), ("opt/nu/w", "[8]")]))
    >>> row.name, row.count
    ('opt/{mu,nu}/w', 2)
    """
    alike: dict[tuple[str, tuple[str, ...]], list[Folded]] = {}
    for row in rows:
        name = row.name  # which may have the braces itself
        if "{mu,nu}" not in name:
            name = _MOMENT.sub("{mu,nu}", name, count=1)
        alike.setdefault((name, row.cells), []).append(row)
    merged: list[Folded] = []
    for (name, cells), several in alike.items():
        moments = [match[0] for row in several if (match := _MOMENT.search(row.name))]
        if len(several) == 2 and sorted(moments) == ["mu", "nu"]:
            merged.append(Folded(name, cells, several[0].rows + several[1].rows))
        else:
            merged += several
    return merged


def fold_states(rows: Sequence[Sequence[str]]) -> tuple[str, list[tuple[str, ...]]] | None:
    """The usual states, and rows of parameters, of a trainer's tree `{state: {parameter: array}}`;
    None for any other tree.

    Given are rows (label, *cells). A row (parameter, *cells, states) stands for all states of the
    parameter that have these cells. The usual states are those of most weights, and `states` is
    empty in a row that has these.

    >>> fold_states([("param/w", "[8]"), ("exp_avg/w", "[8]"), ("step/w", "[]")])
    ('param, exp_avg', [('w', '[8]', ''), ('w', '[]', 'step')])
    """
    states: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for label, *cells in rows:
        state, _, name = label.partition("/")
        states[name, *cells].append(state)
    for several in states.values():
        several.sort(key=lambda state: state != "param")  # which people look for first
    weights = [several for several in states.values() if "param" in several]
    has_names = all(name for name, *_ in states)
    if not has_names or not weights:
        return None
    usual = Counter(map(", ".join, weights)).most_common(1)[0][0]
    named = [(row, ", ".join(several)) for row, several in states.items()]
    return usual, [(*row, "" if names == usual else names) for row, names in named]


def _folded(
    texts: tuple[str, ...], cells: tuple[str, ...], places: Mapping[_Numbers, Sequence[int]]
) -> Iterator[Folded]:
    """Folded rows of rows that differ only in numbers, whose positions are given by the numbers."""
    for sets in _products(list(places)):
        first = tuple(places[numbers][0] for numbers in itertools.product(*sets))
        yield Folded(_name(texts, sets), cells, first)
    for numbers, (_, *again) in places.items():
        name = _name(texts, tuple((n,) for n in numbers))
        yield from (Folded(name, cells, (place,)) for place in again)


def _products(numbers: Sequence[_Numbers]) -> list[_Sets]:
    """Products of sets of numbers that together are these distinct tuples of equal length."""
    if not numbers[0]:
        return [()]
    rests: dict[int, list[_Numbers]] = defaultdict(list)
    for first, *rest in numbers:
        rests[first].append(tuple(rest))
    same: dict[tuple[_Numbers, ...], list[int]] = defaultdict(list)
    for first, rest in rests.items():
        same[tuple(sorted(rest))].append(first)
    return [
        (tuple(sorted(firsts)), *sets) for rest, firsts in same.items() for sets in _products(rest)
    ]


def _name(texts: tuple[str, ...], sets: _Sets) -> str:
    first, *others = texts
    return first + "".join(_set(numbers) + text for numbers, text in zip(sets, others, strict=True))


def _set(numbers: tuple[int, ...]) -> str:
    """Numbers as a text: a single one, or ranges in braces.

    >>> _set((0, 1, 2, 3, 7)), _set((5,))
    ('{0..3,7}', '5')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(texts) + "}"
