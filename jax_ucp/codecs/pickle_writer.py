"""Pickles as torch reads them, written without torch: names instead of classes.

`torch.load` reads them with `weights_only=True` too, as far as it allows the names. Opcodes of
protocol 2: `Lib/pickletools.py`; tensors: `_rebuild_tensor_v2`, `_rebuild_tensor_v3`
(`torch/_utils.py`) and `persistent_id` (`torch/serialization.py`).
"""

from __future__ import annotations

import itertools
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
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
        """Append the opcodes that make values. Raises TypeError for a class that has none."""
        for value in values:
            self._write(value)

    def _write(self, value: Any) -> None:
        match value:
            case None:
                self.out += pickle.NONE
            case bool():
                self.out += pickle.NEWTRUE if value else pickle.NEWFALSE
            case int() if -(1 << 31) <= value < 1 << 31:
                self.out += pickle.BININT + struct.pack("<i", value)
            case int():
                data = pickle.encode_long(value)
                if len(data) > _MAX_LONG1:
                    self.out += pickle.LONG4 + struct.pack("<i", len(data)) + data
                else:  # the only one of the two that `torch.load` with `weights_only` takes
                    self.out += pickle.LONG1 + bytes([len(data)]) + data
            case float():
                self.out += pickle.BINFLOAT + struct.pack(">d", value)
            case str():
                data = value.encode("utf-8", "surrogatepass")
                self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
            case tuple():
                self.out += pickle.MARK
                self.write(*value)
                self.out += pickle.TUPLE
            case list():
                self.out += pickle.EMPTY_LIST + pickle.MARK
                self.write(*value)
                self.out += pickle.APPENDS
            case dict():
                self.out += pickle.EMPTY_DICT + pickle.MARK
                self.write(*itertools.chain.from_iterable(value.items()))
                self.out += pickle.SETITEMS
            case complex():
                self.write(Call(Global("builtins", "complex"), (value.real, value.imag)))
            case bytes():
                self.write(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))
            case set():
                self.write(Call(Global("builtins", "set"), (sorted(value, key=repr),)))
            case Global():
                self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
            case Call():
                self.write(value.function, value.args)
                self.out += pickle.REDUCE
            case Instance():
                self.write(value.of, ())
                self.out += pickle.NEWOBJ
                self.write(value.state)
                self.out += pickle.BUILD
            case Tensor() | np.ndarray():
                self._write_tensor(value)
            case _:
                raise TypeError(f"{type(value).__name__} has no pickle here")

    def _write_tensor(self, value: Tensor | np.ndarray) -> None:
        """Append torch's call for a tensor of a typed storage, or of an untyped one and a dtype."""
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
        self.write(rebuild)
        self.out += pickle.MARK
        self.write(("storage", kind, self.storage(value), "cpu", count))
        self.out += pickle.BINPERSID
        self.write(*view)
        self.out += pickle.TUPLE + pickle.REDUCE
