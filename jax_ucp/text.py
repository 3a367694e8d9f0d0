"""Text from files and users, made safe to print, and lists and tables of text.

Such text may contain escape sequences, by which a terminal changes its title, its colours or the
clipboard, and characters that reverse the direction of writing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Unprintable for `str.isprintable` are control and format characters (also bidirectional ones),
# surrogates, separators other than a space, and unassigned code points.
_RUNS = re.compile(r"[^\x20-\x7e]+")


def visible(text: str) -> str:
    r"""The text on one line, with unprintable characters escaped as in Python's strings.

    >>> print(visible("w\x1b[31m\u202e é\n"))
    w\x1b[31m\u202e é\n
    """
    return _RUNS.sub(lambda run: "".join(map(_shown, run[0])), text)


def is_encodable(text: str) -> bool:
    r"""Whether the text can be encoded in UTF-8, which half of a surrogate pair cannot.

    >>> is_encodable("a\u00e9"), is_encodable("a\ud800")
    (True, False)
    """
    return text.isascii() or text == text.encode(errors="replace").decode()


def visible_lines(text: str) -> str:
    r"""A message of one or more lines, made safe to print. All lines but the first are indented, so
    that no name in it looks like a line of ours.

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
    """The first `shown` faults, each on its own line, to be appended to a title.

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
    import html

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
