"""Values beside the arrays of a checkpoint, as JSON that never becomes code again."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_ucp.codecs.tensor_names import DTensor, RefusedTensor, Storage, StoredTensor, unreadable
from jax_ucp.codecs.unpickle import Opaque, Record, Unknown, each_node
from jax_ucp.layout.box import Box
from jax_ucp.text import is_encodable

# Extras are JSON; what has more tensors than this is data, not a setting.
MAX_EXTRA_BYTES = 1 << 24


def tensor_bytes(value: Any) -> int:
    return sum(nbytes for _, nbytes in _tensors(value))


def _tensors(value: Any) -> Iterator[tuple[str, int]]:
    for node in each_node(value):
        if isinstance(node, StoredTensor):
            yield node.storage, math.prod(node.shape) * node.dtype.itemsize


class MentionedTensors:
    """The tensors that extras mention: JSON has a copy of one wherever it is mentioned."""

    def __init__(self) -> None:
        self._storages: set[tuple[str, str]] = set()
        self._repeated = 0

    def refusal(self, file: str, value: Any) -> str:
        """Why a value is not an extra, by its tensors; "" if it is one: then they count."""
        tensors = list(_tensors(value))
        nbytes = sum(nbytes for _, nbytes in tensors)
        if nbytes > MAX_EXTRA_BYTES:
            return f"an object with {nbytes} bytes of tensors inside, which is data and no setting"
        repeated, storages = self._repeated, set[tuple[str, str]]()
        for storage, nbytes in tensors:
            is_known = (file, storage) in self._storages or (file, storage) in storages
            repeated += nbytes if is_known else 0
            storages.add((file, storage))
        if repeated > MAX_EXTRA_BYTES:
            return f"extras up to it repeat {repeated} bytes of tensors, which are stored once"
        self._repeated = repeated
        self._storages |= storages
        return ""


def as_json(value: Any, file: str, read: Callable[[str, Box], np.ndarray]) -> Any:
    """A value from a torch file as JSON; what JSON lacks is a dict with a key `!type`.

    Tensors and numpy arrays keep dtype, shape and bytes (base64, little-endian), as does a text
    with half of a surrogate pair; `read` reads the tensors of the file called `file`. Dicts with
    other keys than texts become lists of pairs. An object of an unknown class is `!opaque`, with
    what it was made from; a tensor that cannot be read is `!left_out`, the reason.
    """

    def convert(value: Any) -> Any:
        match value:
            case np.ndarray() | np.generic():  # of which some are a float, str or bytes too
                if value.dtype.kind in "US":
                    return convert(value.tolist())
                return _array(np.asarray(value))
            case None | bool() | int():
                return value
            case str():
                if is_encodable(value):
                    return value
                data = value.encode(errors="surrogatepass")
                return {"!wtf8": base64.b64encode(data).decode()}
            case float():
                return value if math.isfinite(value) else {"!float": repr(value)}
            case dict():
                if all(isinstance(key, str) and is_encodable(key) for key in value):
                    return {key: convert(item) for key, item in value.items()}
                return {"!dict": [[convert(key), convert(item)] for key, item in value.items()]}
            case list():
                return list(map(convert, value))
            case tuple():
                return {"!tuple": list(map(convert, value))}
            case set() | frozenset():
                return {"!set": list(map(convert, sorted(value, key=repr)))}
            case complex():
                return {"!complex": [value.real, value.imag]}
            case bytes() | bytearray():
                return {"!bytes": base64.b64encode(bytes(value)).decode()}
            case np.dtype():
                return {"!dtype": value.name}
            case StoredTensor():
                return _array(read(f"{file}:{value.key}", Box.whole(value.shape)))
            case RefusedTensor() | Storage() | DTensor():
                return {"!left_out": unreadable(value)}
            case Record():
                args, fields = convert(list(value.args)), convert(value.fields)
                return {"!record": value.type, "args": args, "fields": fields}
            case Opaque():
                parts = {"args": value.args, "state": value.state, "items": value.items}
                parts |= {"entries": value.entries, "left_out": value.closed}
                kept = {name: convert(part) for name, part in parts.items() if not _is_empty(part)}
                return {"!opaque": value.type, "args": [], **kept}
            case Unknown():
                return {"!opaque": value.name}
        return {"!text": str(value)}

    return convert(value)


def _is_empty(part: object) -> bool:
    return part is None or (isinstance(part, str | tuple | list | dict) and not part)


def _array(array: np.ndarray) -> dict[str, Any]:
    little = np.asarray(array, order="C").astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little.tobytes()).decode()
    return {"!array": data, "dtype": array.dtype.name, "shape": list(array.shape)}
