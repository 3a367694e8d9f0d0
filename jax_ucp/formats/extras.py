"""What a checkpoint holds beside its arrays, as JSON: nothing is dropped, and nothing becomes code again."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_ucp.formats.safe_pickle import Opaque, Record, Unknown, walk
from jax_ucp.formats.torch_names import Refused, Storage, StoredTensor, unreadable
from jax_ucp.layout.box import Box

# Extras are JSON; what has more tensors than this is data, not a setting.
MAX_EXTRA_BYTES = 1 << 24


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value from a torch file."""
    tensors = (node for _, node in walk(value) if isinstance(node, StoredTensor))
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def as_json(value: Any, file: str, read: Callable[[str, Box], np.ndarray]) -> Any:
    """A value from a torch file as JSON: what JSON has as itself, anything else as a dict with one key `!type`.

    Tensors and numpy arrays keep dtype, shape and bytes (base64, little-endian), arrays of text are lists; `read` reads
    the tensors of the file called `file`. Dicts whose keys are not all strings become lists of pairs. An object of a
    class that is not known here is `!opaque`, its name, beside what it was made from; a class or function that is only
    mentioned has its name alone. A tensor that cannot be read is `!left_out`, the reason.
    """

    def go(x: Any) -> Any:
        match x:
            case np.ndarray() | np.generic():  # before float, int and str, which some numpy scalars also are
                return go(x.tolist()) if x.dtype.kind in "US" else _array(np.asarray(x))
            case None | bool() | int() | str():
                return x
            case float():
                return x if math.isfinite(x) else {"!float": repr(x)}
            case StoredTensor():
                return _array(read(f"{file}:{x.key}", Box.whole(x.shape)))
            case np.dtype():
                return {"!dtype": x.name}
            case Record():
                return {"!record": x.type, "args": go(list(x.args)), "fields": go(x.fields)}
            case Refused() | Storage():
                return {"!left_out": unreadable(x)}
            case Opaque():
                held = {"args": x.args, "state": x.state, "items": x.items, "entries": x.entries, "left_out": x.closed}
                parts = {name: go(part) for name, part in held.items() if not _is_empty(part)}
                return {"!opaque": x.type, "args": [], **parts}
            case Unknown():
                return {"!opaque": x.name}
            case dict() if all(isinstance(key, str) for key in x):
                return {key: go(item) for key, item in x.items()}
            case dict():
                return {"!dict": [[go(key), go(item)] for key, item in x.items()]}
            case list():
                return [go(item) for item in x]
            case tuple():
                return {"!tuple": [go(item) for item in x]}
            case set() | frozenset():
                return {"!set": [go(item) for item in sorted(x, key=repr)]}
            case bytes() | bytearray():
                return {"!bytes": base64.b64encode(bytes(x)).decode()}
            case complex():
                return {"!complex": [x.real, x.imag]}
            case _:
                return {"!text": str(x)}

    return go(value)


def _is_empty(part: object) -> bool:
    return part is None or (isinstance(part, str | tuple | list | dict) and not part)


def _array(array: np.ndarray) -> dict[str, Any]:
    little = np.asarray(array, order="C").astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little.tobytes()).decode()
    return {"!array": data, "dtype": array.dtype.name, "shape": list(array.shape)}
