"""Tables of text in columns, fast enough for 100,000 rows, for which rich's own take a minute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import TextWrapper

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from jax_ucp.arrays.budget import fair_share
from jax_ucp.text import visible

_GAP = "  "
_ALIGNED = 170  # wider tables, in characters, are not aligned if the output is not a terminal
_WIDEST = 2  # cells of a terminal that a character may take; no column is narrower


class TextTable:
    """Rows of text below headings, one line each, or wrapped if the console is too narrow."""

    def __init__(self, heads: Sequence[str], rows: Iterable[Sequence[str]]):
        self._rows = [tuple(map(visible, row)) for row in (heads, *rows)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(*self._rows, strict=True)
        needed = [max(map(_width, column)) for column in columns]
        room = options.max_width - len(_GAP) * (len(needed) - 1)
        widest = max(_WIDEST, fair_share(needed, room))
        widths = [min(width, widest) for width in needed]
        if not console.is_terminal and sum(needed) > _ALIGNED:
            heads, *rows = ([_GAP.join(row).rstrip(" ")] for row in self._rows)
        else:
            heads, *rows = (_lines(row, widths, console) for row in self._rows)
        yield Segment("\n".join(heads), console.get_style("table.header"))
        yield Segment("\n")
        yield Segment("".join(f"{line}\n" for lines in rows for line in lines))


def _lines(row: Sequence[str], widths: Sequence[int], console: Console) -> list[str]:
    """The lines of a row: one, or as many as its longest cell takes."""
    cells = list(zip(row, widths, strict=True))
    if all(_width(cell) <= width for cell, width in cells):
        return [_GAP.join([_padded(cell, width) for cell, width in cells]).rstrip(" ")]
    folded = [
        _Wrapper(width).wrap(cell)
        if cell.isascii()
        else [line.plain for line in Text(cell).wrap(console, width, overflow="fold")]
        for cell, width in cells
    ]
    lines = zip_longest(*folded, fillvalue="")
    return [_GAP.join(map(_padded, line, widths)).rstrip(" ") for line in lines]


class _Wrapper(TextWrapper):
    """A wrapper that breaks lines at spaces, and after punctuation in names."""

    wordsep_re = re.compile(r"( +|(?<=[./,:_-])(?=[^ ]))")


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(cell: str) -> int:
    return len(cell) if cell.isascii() else cell_len(cell)
