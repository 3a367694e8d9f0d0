"""Tables of text look as rich's do where they fit, and lose nothing where they do not."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jax_ucp.arrays.budget import fair_share
from jax_ucp.cli.text_table import TextTable
from jax_ucp.text import visible

CELLS = st.text(alphabet="ab /.é漢\x1b\u202e", max_size=12)


def printed(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4))
def test_a_table_that_fits_is_what_rich_prints(rows):
    heads = ("leaf", "dtype", "stored in")
    rich = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        rich.add_row(*(Text(visible(cell)) for cell in row))
    lines = [line.rstrip(" ") for line in printed(rich, 1000).split("\n")]
    assert printed(TextTable(heads, rows), 1000).split("\n") == lines


@pytest.mark.parametrize("width", [10, 20, 31])
@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4))
def test_a_table_that_does_not_fit_is_folded_and_has_every_character(width, rows):
    text = printed(TextTable(("a", "b", "c"), rows), width)
    assert all(cell_len(line) <= width for line in text.split("\n"))
    for letter in "ab/.é漢":
        cells = ("a", "b", "c", *(visible(cell) for row in rows for cell in row))
        assert text.count(letter) == sum(cell.count(letter) for cell in cells)


@given(needed=st.lists(st.integers(1, 60), min_size=1, max_size=5), room=st.integers(10, 120))
def test_widths_fit_into_the_room_and_no_column_is_wider_than_it_needs(needed, room):
    widths = [min(width, fair_share(needed, room)) for width in needed]
    assert sum(widths) <= room
    assert all(1 <= width <= need for width, need in zip(widths, needed, strict=True))
    assert widths == needed or sum(needed) > room
