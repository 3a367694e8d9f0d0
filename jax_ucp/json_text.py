"""The reader for JSON from files whose types are not known in advance; msgspec decodes the others.

Python's own reader accepts deep nesting, and texts that cannot be encoded. Values that pass the
checks here can be walked recursively, printed, and written again.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Ten times the depth of any model's config.
MAX_JSON_DEPTH = 100
_TOO_DEEP = f"its values are nested more than {MAX_JSON_DEPTH} levels"

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def decode_json(text: bytes | str, *, unique_names: bool = False) -> Any:
    """The value of a JSON text, in UTF-8 if it is bytes.

    Raises ValueError for what is not JSON, is nested more than `MAX_JSON_DEPTH` levels, or has half
    of a surrogate pair in a text; with `unique_names` also where an object has a name twice.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_names else None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not is_shallow(value, MAX_JSON_DEPTH):
        raise ValueError(_TOO_DEEP)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a text has {half!a}, half of a surrogate pair") from None
    return value


def is_shallow(value: object, levels: int) -> bool:
    """Whether lists and dicts of a JSON value are nested at most so many levels.

    >>> is_shallow({"a": [1]}, 2), is_shallow({"a": [1]}, 1)
    (True, False)
    """
    level: list[object] = [value]
    for _ in range(levels + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values
