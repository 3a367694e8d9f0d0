"""Text that came from outside, as it may be printed.

It may hold what a terminal obeys: escape sequences that change its title, its colours or the
clipboard, and characters that turn the direction of writing round.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

# What `str.isprintable` calls unprintable: control and format characters (bidirectional ones among
# them), surrogates, separators other than a space, and code points that mean nothing.
_RUNS = re.compile(r"[^\x20-\x7e]+")


def visible(text: str) -> str:
    r"""The text on one line, with what is not printable as Python writes it in a string.

    >>> print(visible("w\x1b[31m\u202e é\n"))
    w\x1b[31m\u202e é\n
    """
    return _RUNS.sub(lambda run: "".join(map(_shown, run[0])), text)


def is_encodable(text: str) -> bool:
    r"""Whether a file can hold the text: half of a surrogate pair is in no UTF-8.

    >>> is_encodable("a\u00e9"), is_encodable("a\ud800")
    (True, False)
    """
    return text.isascii() or text == text.encode(errors="replace").decode()


def visible_lines(text: str) -> str:
    r"""A message that may have several lines. All but the first are indented: no name can pass for
    a line of ours.

    >>> print(visible_lines("2 faults:\n  a\n0 faults"))
    2 faults:
      a
      0 faults
    """
    first, *others = map(visible, text.split("\n"))
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in others)])


def listed(names: Sequence[str], shown: int = 8) -> str:
    """The first `shown` names, and the number of the others.

    >>> listed(["a", "b", "c"], shown=2), listed(["a", "b"], shown=2)
    ('a, b and 1 more', 'a, b')
    """
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first


def fault_lines(faults: Sequence[str], shown: int = 20) -> str:
    """The first `shown` faults, each on a line of its own after the title that they belong to.

    >>> print("3 faults:" + fault_lines(["a is missing", "b is missing", "c is missing"], shown=2))
    3 faults:
      a is missing
      b is missing
      ... and 1 more
    """
    more = [f"... and {len(faults) - shown} more"] if len(faults) > shown else []
    return "".join(f"\n  {line}" for line in (*faults[:shown], *more))


def html_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], shown: int = 500
) -> str:
    """The HTML of a table's first `shown` rows, with its title above it, as notebooks show it."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag} style='text-align:left'>{html.escape(visible(value))}</{tag}>"
            for value in values
        )

    if len(rows) > shown:
        title += f", the first {shown} of {len(rows)} rows"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows[:shown])
    return f"<b>{html.escape(visible(title))}</b><table><tr>{cells('th', heads)}</tr>{body}</table>"


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
