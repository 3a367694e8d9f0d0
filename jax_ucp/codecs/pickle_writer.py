"""Pickles as torch reads them, written without torch: names instead of classes.

`torch.load` reads them with `weights_only=True` too, as far as it allows the names. Opcodes of
protocol 2: `Lib/pickletools.py`; tensors: `_rebuild_tensor_v2`, `_rebuild_tensor_v3`
(`torch/_utils.py`) and `persistent_id` (`torch/serialization.py`).
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np

from jax_ucp.codecs.tensor_names import DTYPES, STORAGE_DTYPES
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.export.files import Tensor

_MAX_LONG1 = 255  # bytes
# The storage classes of the dtypes that have one.
_STORAGES = {dtype: kind for kind, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its name, which torch imports."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of a function or class for some arguments."""

    function: Global
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object made without `__init__`, and its attributes or `__setstate__` argument."""

    of: Global
    state: Any


def has_dtype(dtype: np.dtype) -> bool:
    return dtype.name in DTYPES


def torch_dtype(dtype: np.dtype) -> Global:
    """The name of a dtype. Raises UnsupportedLeaf if torch has none."""
    if not has_dtype(dtype):
        raise UnsupportedLeaf(f"torch has no dtype {dtype}; export with another dtype")
    return Global("torch", dtype.name)


Storage = Callable[[Tensor | np.ndarray], str]


def _none(tensor: Tensor | np.ndarray) -> str:
    raise TypeError("a tensor in a pickle that is not in a file of torch.save")


def dumps(value: Any, storage: Storage = _none) -> bytes:
    """The pickle of a value; `storage` gives the key of a tensor's storage, whole and row-major."""
    writer = _Pickler(storage)
    writer.write(value)
    return bytes(writer.out + pickle.STOP)


class _Pickler:
    """The bytes of a pickle so far, and what gives the keys of storages."""

    def __init__(self, storage: Storage):
        self.out = bytearray(b"\x80\x02")
        self.storage = storage

    def write(self, *values: Any) -> None:
        for value in values:
            _write(value, self)


@singledispatch
def _write(value: Any, to: _Pickler) -> None:
    """Append the opcodes that make a value. Raises TypeError for a class that has none."""
    raise TypeError(f"{type(value).__name__} has no pickle here")


@_write.register
def _(value: None, to: _Pickler) -> None:
    to.out += pickle.NONE


@_write.register
def _(value: bool, to: _Pickler) -> None:
    to.out += pickle.NEWTRUE if value else pickle.NEWFALSE


@_write.register
def _(value: int, to: _Pickler) -> None:
    if -(1 << 31) <= value < 1 << 31:
        to.out += pickle.BININT + struct.pack("<i", value)
    else:
        data = pickle.encode_long(value)
        if len(data) > _MAX_LONG1:
            to.out += pickle.LONG4 + struct.pack("<i", len(data)) + data
        else:  # the only one of the two that `torch.load` with `weights_only` takes
            to.out += pickle.LONG1 + bytes([len(data)]) + data


@_write.register
def _(value: float, to: _Pickler) -> None:
    to.out += pickle.BINFLOAT + struct.pack(">d", value)


@_write.register
def _(value: complex, to: _Pickler) -> None:
    to.write(Call(Global("builtins", "complex"), (value.real, value.imag)))


@_write.register
def _(value: str, to: _Pickler) -> None:
    data = value.encode("utf-8", "surrogatepass")
    to.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data


@_write.register
def _(value: bytes, to: _Pickler) -> None:
    to.write(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))


@_write.register
def _(value: tuple, to: _Pickler) -> None:
    to.out += pickle.MARK
    to.write(*value)
    to.out += pickle.TUPLE


@_write.register
def _(value: list, to: _Pickler) -> None:
    to.out += pickle.EMPTY_LIST + pickle.MARK
    to.write(*value)
    to.out += pickle.APPENDS


@_write.register
def _(value: dict, to: _Pickler) -> None:
    to.out += pickle.EMPTY_DICT + pickle.MARK
    for key, item in value.items():
        to.write(key, item)
    to.out += pickle.SETITEMS


@_write.register
def _(value: set, to: _Pickler) -> None:
    to.write(Call(Global("builtins", "set"), (sorted(value, key=repr),)))


@_write.register
def _(value: Global, to: _Pickler) -> None:
    to.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()


@_write.register
def _(value: Call, to: _Pickler) -> None:
    to.write(value.function, value.args)
    to.out += pickle.REDUCE


@_write.register
def _(value: Instance, to: _Pickler) -> None:
    to.write(value.of, ())
    to.out += pickle.NEWOBJ
    to.write(value.state)
    to.out += pickle.BUILD


@_write.register(Tensor)
@_write.register(np.ndarray)
def _(value: Tensor | np.ndarray, to: _Pickler) -> None:
    """torch's call for a tensor of a typed storage, or of an untyped one and a dtype."""
    shape = tuple(value.target_shape if isinstance(value, Tensor) else value.shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    view = (0, shape, strides, False, Call(Global("collections", "OrderedDict")))
    dtype = torch_dtype(value.dtype)
    if typed := _STORAGES.get(value.dtype.name):
        rebuild = Global("torch._utils", "_rebuild_tensor_v2")
        kind, count = Global("torch", f"{typed}Storage"), value.size
    else:
        rebuild = Global("torch._utils", "_rebuild_tensor_v3")
        kind, count = Global("torch.storage", "UntypedStorage"), value.nbytes
        view += (dtype,)
    to.write(rebuild)
    to.out += pickle.MARK
    to.write(("storage", kind, to.storage(value), "cpu", count))
    to.out += pickle.BINPERSID
    to.write(*view)
    to.out += pickle.TUPLE + pickle.REDUCE
