"""Values beside the arrays of a checkpoint, as JSON that never becomes code again."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from functools import singledispatch
from types import NoneType
from typing import Any

import numpy as np

from jax_ucp.codecs.tensor_names import DTensor, RefusedTensor, Storage, StoredTensor, unreadable
from jax_ucp.codecs.unpickle import Opaque, Record, Unknown, walk
from jax_ucp.layout.box import Box
from jax_ucp.text import is_encodable

# Extras are JSON; what has more tensors than this is data, not a setting.
MAX_EXTRA_BYTES = 1 << 24


def tensor_bytes(value: Any) -> int:
    return sum(nbytes for _, nbytes in _tensors(value))


def _tensors(value: Any) -> Iterator[tuple[str, int]]:
    for _, node in walk(value):
        if isinstance(node, StoredTensor):
            yield node.storage, math.prod(node.shape) * node.dtype.itemsize


class MentionedTensors:
    """The tensors that extras mention: JSON has a copy of one wherever it is mentioned."""

    def __init__(self) -> None:
        self._storages: set[tuple[str, str]] = set()
        self._repeated = 0

    def refusal(self, file: str, value: Any) -> str:
        """Why a value is not an extra, by its tensors; "" if it is one: then they count."""
        nbytes = tensor_bytes(value)
        if nbytes > MAX_EXTRA_BYTES:
            return f"an object with {nbytes} bytes of tensors inside, which is data and no setting"
        repeated, storages = self._repeated, set[tuple[str, str]]()
        for storage, nbytes in _tensors(value):
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

    def read_whole(tensor: StoredTensor) -> np.ndarray:
        return read(f"{file}:{tensor.key}", Box.whole(tensor.shape))

    return _json(value, read_whole)


Read = Callable[[StoredTensor], np.ndarray]


@singledispatch
def _json(value: Any, read: Read) -> Any:
    return {"!text": str(value)}


@_json.register(NoneType)
@_json.register(bool)
@_json.register(int)
def _(value: Any, read: Read) -> Any:
    return value


@_json.register
def _(value: str, read: Read) -> Any:
    if is_encodable(value):
        return value
    return {"!wtf8": base64.b64encode(value.encode(errors="surrogatepass")).decode()}


@_json.register
def _(value: float, read: Read) -> Any:
    return value if math.isfinite(value) else {"!float": repr(value)}


@_json.register
def _(value: complex, read: Read) -> Any:
    return {"!complex": [value.real, value.imag]}


@_json.register(bytes)
@_json.register(bytearray)
def _(value: bytes | bytearray, read: Read) -> Any:
    return {"!bytes": base64.b64encode(bytes(value)).decode()}


@_json.register
def _(value: dict, read: Read) -> Any:
    if all(isinstance(key, str) and is_encodable(key) for key in value):
        return {key: _json(item, read) for key, item in value.items()}
    return {"!dict": [[_json(key, read), _json(item, read)] for key, item in value.items()]}


@_json.register
def _(value: list, read: Read) -> Any:
    return [_json(item, read) for item in value]


@_json.register
def _(value: tuple, read: Read) -> Any:
    return {"!tuple": [_json(item, read) for item in value]}


@_json.register(set)
@_json.register(frozenset)
def _(value: set | frozenset, read: Read) -> Any:
    return {"!set": [_json(item, read) for item in sorted(value, key=repr)]}


@_json.register(np.ndarray)
@_json.register(np.generic)
@_json.register(np.str_)  # which is a str first, as np.bytes_ is bytes
@_json.register(np.bytes_)
def _(value: np.ndarray | np.generic, read: Read) -> Any:
    if value.dtype.kind in "US":
        return _json(value.tolist(), read)
    return _array(np.asarray(value))


@_json.register
def _(value: np.dtype, read: Read) -> Any:
    return {"!dtype": value.name}


@_json.register
def _(value: StoredTensor, read: Read) -> Any:
    return _array(read(value))


@_json.register(RefusedTensor)
@_json.register(Storage)
@_json.register(DTensor)
def _(value: RefusedTensor | Storage | DTensor, read: Read) -> Any:
    return {"!left_out": unreadable(value)}


@_json.register
def _(value: Record, read: Read) -> Any:
    args = _json(list(value.args), read)
    return {"!record": value.type, "args": args, "fields": _json(value.fields, read)}


@_json.register
def _(value: Opaque, read: Read) -> Any:
    parts = {"args": value.args, "state": value.state, "items": value.items}
    parts |= {"entries": value.entries, "left_out": value.closed}
    kept = {name: _json(part, read) for name, part in parts.items() if not _is_empty(part)}
    return {"!opaque": value.type, "args": [], **kept}


@_json.register
def _(value: Unknown, read: Read) -> Any:
    return {"!opaque": value.name}


def _is_empty(part: object) -> bool:
    return part is None or (isinstance(part, str | tuple | list | dict) and not part)


def _array(array: np.ndarray) -> dict[str, Any]:
    little = np.asarray(array, order="C").astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little.tobytes()).decode()
    return {"!array": data, "dtype": array.dtype.name, "shape": list(array.shape)}
