"""Rows of a table that repeat but for numbers in their names, one for all of them.

>>> rows = [(f"layers.{i}.w{j}", "[8, 8]") for i in range(32) for j in (1, 3)]
>>> fold(rows)
[Folded(name='layers.{0..31}.w{1,3}', cells=('[8, 8]',), count=64)]
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

# Numbers as a program counts: `007` is part of a name.
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,17})(?!\d)")

_Numbers = tuple[int, ...]
_Sets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """`count` rows with equal `cells`, whose names `name` says: `{0..31}` is each number from 0 to
    31, `{1,3}` is 1 and 3, and several braces are each with each.
    """

    name: str
    cells: tuple[str, ...]
    count: int


def fold(rows: Iterable[Sequence[str]]) -> list[Folded]:
    """The rows (name, *cells), those folded that differ in numbers of their names alone.

    Each name is in exactly one of the result, where the first name of it was. A name that is there
    twice is not folded with others.
    """
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[_Numbers]] = defaultdict(list)
    for name, *cells in rows:
        parts = _NUMBER.split(name)
        alike[tuple(parts[::2]), tuple(cells)].append(tuple(map(int, parts[1::2])))
    return [
        Folded(_name(texts, sets), cells, math.prod(map(len, sets)))
        for (texts, cells), numbers in alike.items()
        for sets in _distinct_products(numbers)
    ]


def _distinct_products(numbers: Sequence[_Numbers]) -> Iterable[_Sets]:
    """Products of sets that have each of the tuples once; a tuple that comes again is one by
    itself.
    """
    counts = Counter(numbers)
    yield from _products(list(counts))
    for repeated, count in counts.items():
        yield from [tuple((n,) for n in repeated)] * (count - 1)


def _products(numbers: Sequence[_Numbers]) -> list[_Sets]:
    """The tuples, which are distinct and equally long, as products of sets of numbers."""
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
    """Numbers as people write them.

    >>> _set((0, 1, 2, 3, 7)), _set((5,))
    ('{0..3,7}', '5')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return "{" + ",".join(map(_run, runs)) + "}"


def _run(numbers: Sequence[int]) -> str:
    if len(numbers) > 2:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers))
