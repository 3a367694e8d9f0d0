"""The head of a GGUF file: a version, keys with values, and what there is of each tensor.

Every count and length is compared with the bytes that the file has left before anything is made of
it. Facts: `docs/gguf.md` of ggml 0.25, and `gguf.cpp` where that is silent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.ranges import ByteRange

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
# A vocabulary of 300,000 tokens with its merges takes some 20 MB.
MAX_HEAD_BYTES = 100_000_000
_MAX_AXES = 4
_FIRST_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_KINDS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"}
_KINDS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_NUMBERS: Mapping[int, np.dtype] = {code: np.dtype(kind) for code, kind in _KINDS.items()}
# The least that a key with its value, and a tensor, take.
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor by the header: the fastest axis first; `offset` is from the first tensor."""

    name: str
    lengths: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class Head:
    """The header of a file, whose tensors begin at byte `data`.

    Values are plain, lists, or arrays of numbers; a string that is no UTF-8 is bytes.
    """

    version: int
    values: Mapping[str, Any]
    tensors: Sequence[GGUFTensor]
    alignment: int
    data: int


def read_head(file: ByteRange) -> Head:
    """The head of a file. Raises FormatError where it breaks a rule of the format."""
    reader = _HeaderReader(file)
    magic, version = reader.number("4s"), reader.number("<I")
    if magic != MAGIC:
        raise FormatError(
            f"it begins with {magic!r}, and not with {MAGIC!r}: it is not a GGUF file"
        )
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise FormatError(
                "it is big-endian, which is not read here: convert it with gguf_convert_endian of"
                " gguf-py"
            )
        raise FormatError(f"it is of version {version}; versions 2 and 3 are read")
    tensors, keys = reader.number("<q"), reader.number("<q")
    reader.require_room(tensors, _LEAST_TENSOR, "tensors")
    reader.require_room(keys, _LEAST_KEY, "keys")
    names = (reader.name("key") for _ in range(keys))
    pairs = ((name, reader.value(reader.number("<I"), f"{name!r:.80}")) for name in names)
    values = _unique(pairs, "the key")
    entries = _unique((_tensor(reader) for _ in range(tensors)), "the tensor")
    alignment = values.get(ALIGNMENT, 32)
    is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power:
        raise FormatError(f"{ALIGNMENT} is {alignment!r:.80}, and no power of two")
    data = aligned(reader.at, alignment)
    return Head(version, values, list(entries.values()), alignment, data)


def aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


class _HeaderReader:
    """Values one after the other, from a window that is doubled when more is wanted."""

    def __init__(self, file: ByteRange):
        self.at = 0
        self._file = file
        self._data = file.read(0, _FIRST_BYTES)

    def _need(self, count: int) -> int:
        """Where the next bytes begin. Raises FormatError where there are not so many."""
        start, stop = self.at, self.at + count
        if stop > self._file.size:
            raise FormatError(
                f"the head goes on to byte {stop} at least, but the file has {self._file.size}: it"
                " is cut short, its download has not ended"
            )
        if stop > len(self._data):
            if stop > MAX_HEAD_BYTES:
                raise FormatError(f"the head has more than {MAX_HEAD_BYTES} bytes")
            end = max(stop, 2 * len(self._data))
            self._data += self._file.read(len(self._data), end)
        self.at = stop
        return start

    def require_room(self, count: int, least: int, what: str) -> None:
        if not 0 <= count <= (self._file.size - self.at) // least:
            raise FormatError(
                f"it counts {count} {what} at byte {self.at}, of {self._file.size} in all"
            )

    def number(self, format: str) -> Any:
        start = self._need(struct.calcsize(format))
        return struct.unpack_from(format, self._data, start)[0]

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        self.require_room(count, dtype.itemsize, "numbers")
        start = self._need(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, start).copy()

    def string(self) -> str | bytes:
        start = self._need(8)
        length = int.from_bytes(self._data[start : start + 8], "little")
        start = self._need(length)
        data = self._data[start : start + length]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def name(self, what: str) -> str:
        """A string that names something: text."""
        name = self.string()
        if not name or isinstance(name, bytes):
            raise FormatError(
                f"the {what} before byte {self.at} is called {name!r:.80}, which should be a text:"
                " the head is damaged"
            )
        return name

    def value(self, type: int, key: str) -> Any:
        """A value of a type; of an array all that is in it."""
        if type == _STRING:
            return self.string()
        if type == _BOOL:
            return self._booleans(1, key)[0]
        if type in _NUMBERS:
            return self.numbers(_NUMBERS[type], 1)[0].item()
        if type != _ARRAY:
            raise FormatError(f"{key} has the type {type}, which GGUF does not have")
        return self._array(key)

    def _array(self, key: str) -> Any:
        type, count = self.number("<I"), self.number("<Q")
        if type in _NUMBERS:
            return self.numbers(_NUMBERS[type], count)
        if type == _BOOL:
            return self._booleans(count, key)
        if type != _STRING:
            raise FormatError(f"{key} is an array of the type {type}, which ggml does not read")
        self.require_room(count, 8, "strings")
        return [self.string() for _ in range(count)]

    def _booleans(self, count: int, key: str) -> list[bool]:
        values = self.numbers(np.dtype("u1"), count)
        if np.any(values > 1):
            raise FormatError(f"{key} has a boolean that is neither 0 nor 1")
        return values.astype(bool).tolist()


def _tensor(reader: _HeaderReader) -> tuple[str, GGUFTensor]:
    name = reader.name("tensor")
    axes = reader.number("<I")
    if axes > _MAX_AXES:
        raise FormatError(f"{name!r:.80} has {axes} axes, and GGUF has at most {_MAX_AXES}")
    lengths = tuple(reader.number("<q") for _ in range(axes))
    return name, GGUFTensor(name, lengths, reader.number("<I"), reader.number("<Q"))


def _unique(pairs: Iterable[tuple[str, Any]], what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise FormatError(f"{what} {name!r:.80} is there twice")
        values[name] = value
    return values
