"""Tables of text in columns, of a hundred thousand rows too, which rich's own take a minute for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import TextWrapper

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from jax_ucp.text import visible

_GAP = "  "
_ALIGNED = 170  # characters; wider tables are for programs, and have no blanks between columns
_WIDEST = 2  # what a character takes on a terminal; no column is narrower


class TextTable:
    """Rows of text below headings, a line each where the console is wide enough; where it is not,
    long cells are folded.
    """

    def __init__(self, heads: Sequence[str], rows: Iterable[Sequence[str]]):
        self._rows = [tuple(map(visible, row)) for row in (heads, *rows)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(*self._rows, strict=True)
        needed = [max(map(_width, column)) for column in columns]
        widths = fitted_widths(needed, options.max_width - len(_GAP) * (len(needed) - 1))
        if not console.is_terminal and sum(needed) > _ALIGNED:
            heads, *rows = ([_GAP.join(row).rstrip(" ")] for row in self._rows)
        else:
            heads, *rows = (_lines(row, widths, console) for row in self._rows)
        yield Segment("\n".join(heads), console.get_style("table.header"))
        yield Segment("\n")
        yield Segment("".join(f"{line}\n" for lines in rows for line in lines))


def fitted_widths(needed: Sequence[int], room: int) -> list[int]:
    """The widths of columns that together take no more than `room`: the widest are cut alike.

    >>> fitted_widths([4, 30, 50], 44)
    [4, 20, 20]
    """
    left = room
    for columns_left, width in zip(range(len(needed), 0, -1), sorted(needed), strict=True):
        share = max(_WIDEST, left // columns_left)
        if width > share:
            return [min(n, share) for n in needed]
        left -= width
    return list(needed)


def _lines(row: Sequence[str], widths: Sequence[int], console: Console) -> list[str]:
    """A row as it is printed: one line, or as many as its longest cell takes."""
    cells = list(zip(row, widths, strict=True))
    if all(_width(cell) <= width for cell, width in cells):
        return [_GAP.join([_padded(cell, width) for cell, width in cells]).rstrip(" ")]
    folded = [_wrapped(cell, width, console) for cell, width in cells]
    lines = zip_longest(*folded, fillvalue="")
    return [_GAP.join(map(_padded, line, widths)).rstrip(" ") for line in lines]


class _Wrapper(TextWrapper):
    """Breaks lines at spaces, and after the punctuation of names."""

    wordsep_re = re.compile(r"( +|(?<=[./,:_-])(?=[^ ]))")


def _wrapped(cell: str, width: int, console: Console) -> list[str]:
    """A cell in lines of at most `width`."""
    if cell.isascii():
        return _Wrapper(width).wrap(cell)
    return [line.plain for line in Text(cell).wrap(console, width, overflow="fold")]


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(cell: str) -> int:
    return len(cell) if cell.isascii() else cell_len(cell)
