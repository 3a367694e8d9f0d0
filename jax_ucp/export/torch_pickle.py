"""Pickles as torch reads them, written without torch: a few opcodes of protocol 2, names instead of classes.

`torch.load` reads them with `weights_only=True` too, as far as it allows the names. Opcodes: `Lib/pickletools.py`;
tensors: `_rebuild_tensor_v2`, `_rebuild_tensor_v3` (`torch/_utils.py`) and `persistent_id` (`torch/serialization.py`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.export.files import Tensor

# The dtypes that torch has by numpy's name for them, and the storage classes of those that have one.
_STORAGES = {
    **{"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16"},
    **{"int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool"},
    **{"complex128": "ComplexDouble", "complex64": "ComplexFloat"},
}
_UNTYPED = frozenset(
    [
        "uint16",
        "uint32",
        "uint64",
        *(f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")),
    ]
)


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its name, which torch imports."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a function or class returns for some arguments."""

    function: Global
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object made without its `__init__`, with a state: the dict of its attributes, or what `__setstate__` takes."""

    of: Global
    state: Any


def has_dtype(dtype: np.dtype) -> bool:
    """Whether torch has a dtype."""
    return dtype.name in _STORAGES or dtype.name in _UNTYPED


def torch_dtype(dtype: np.dtype) -> Global:
    """The name of a dtype. Raises UnsupportedLeaf if torch has none."""
    if not has_dtype(dtype):
        raise UnsupportedLeaf(f"torch has no dtype {dtype}; export with another dtype")
    return Global("torch", dtype.name)


Storage = Callable[[Tensor | np.ndarray], str]


def _none(tensor: Tensor | np.ndarray) -> str:
    raise TypeError("a tensor in a pickle that is not in a file of torch.save")


def dumps(value: Any, storage: Storage = _none) -> bytes:
    """The pickle of a value: None, numbers, strings, bytes, containers, tensors, and the classes above.

    `storage` is told of each tensor and gives the key of the storage that will hold it, whole and row-major.
    """
    out = bytearray(b"\x80\x02")
    _write(out, value, storage)
    return bytes(out + pickle.STOP)


def _write(out: bytearray, value: Any, storage: Storage) -> None:
    def sequence(items: Iterable[Any]) -> None:
        for item in items:
            _write(out, item, storage)

    match value:
        case None:
            out += pickle.NONE
        case bool():
            out += pickle.NEWTRUE if value else pickle.NEWFALSE
        case int() if -(1 << 31) <= value < 1 << 31:
            out += pickle.BININT + struct.pack("<i", value)
        case int():
            data = pickle.encode_long(value)
            out += pickle.LONG4 + struct.pack("<i", len(data)) + data
        case float():
            out += pickle.BINFLOAT + struct.pack(">d", value)
        case str():
            data = value.encode("utf-8", "surrogatepass")
            out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        case bytes():
            _write(out, Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")), storage)
        case tuple():
            out += pickle.MARK
            sequence(value)
            out += pickle.TUPLE
        case list():
            out += pickle.EMPTY_LIST + pickle.MARK
            sequence(value)
            out += pickle.APPENDS
        case dict():
            out += pickle.EMPTY_DICT + pickle.MARK
            sequence(part for item in value.items() for part in item)
            out += pickle.SETITEMS
        case set():
            _write(out, Call(Global("builtins", "set"), (sorted(value, key=repr),)), storage)
        case complex():
            _write(out, Call(Global("builtins", "complex"), (value.real, value.imag)), storage)
        case Global():
            out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        case Call():
            sequence((value.function, value.args))
            out += pickle.REDUCE
        case Instance():
            sequence((value.of, ()))
            out += pickle.NEWOBJ
            _write(out, value.state, storage)
            out += pickle.BUILD
        case Tensor() | np.ndarray():
            _tensor(out, value, storage)
        case _:
            raise TypeError(f"{type(value).__name__} has no pickle here")


def _tensor(out: bytearray, tensor: Tensor | np.ndarray, storage: Storage) -> None:
    flat = isinstance(tensor, Tensor) and tensor.flat
    dtype, shape = torch_dtype(tensor.dtype), (tensor.size,) if flat else tuple(tensor.shape)
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    typed = _STORAGES.get(tensor.dtype.name)
    kind = Global("torch", f"{typed}Storage") if typed else Global("torch.storage", "UntypedStorage")
    count = tensor.size if typed else tensor.nbytes
    hooks = Call(Global("collections", "OrderedDict"))
    _write(out, Global("torch._utils", f"_rebuild_tensor_v{2 if typed else 3}"), storage)
    out += pickle.MARK
    _write(out, ("storage", kind, storage(tensor), "cpu", count), storage)
    out += pickle.BINPERSID
    for item in (0, shape, strides, False, hooks) if typed else (0, shape, strides, False, hooks, dtype):
        _write(out, item, storage)
    out += pickle.TUPLE + pickle.REDUCE
