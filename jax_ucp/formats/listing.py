"""Names in a message: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], shown: int) -> str:
    """The first `shown` names, and the number of the others.

    >>> listed(["a", "b", "c"], shown=2), listed(["a", "b"], shown=2)
    ('a, b and 1 more', 'a, b')
    """
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first
