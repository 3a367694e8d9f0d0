"""Flax's msgpack, read by ranges: plain values, and of arrays where their bytes are.

What a file says is hostile: lengths end where the bytes do, and depth, the number of values and the
bytes of texts have limits.

Facts: the msgpack specification; `flax/serialization.py` of flax 0.12.7 (`_ndarray_to_bytes`,
`_MsgpackExtType`, `_chunk`); `msgpack_utils.py` of orbax-checkpoint 0.5.20, which adds tuples.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_ucp.arrays.dtypes import named_dtype
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.ranges import ByteRange
from jax_ucp.tree import MAX_TREE_DEPTH
from jax_ucp.universal.validation import is_dtype

# No tree of a model has so many leaves and keys, nor so much text. A leaf takes 1,300 bytes here:
# values outside arrays may be so many, and one more for each so many bytes.
MAX_VALUES = 1 << 21
FREE_VALUES, BYTES_PER_VALUE = 1 << 16, 8
MAX_TEXT_BYTES = 1 << 26

_CHUNKED = "__msgpack_chunked_array__"
_NDARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
_TEXT_8 = 0xD9
# A map, and the code of its first key with the length, where that has a byte of its own.
_MAP_OF_NAMES = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)", re.DOTALL)
# Bytes that are read at once: few where an array was passed over, more while values follow.
_FIRST_WINDOW, _LAST_WINDOW = 1 << 10, 1 << 18


@dataclass(frozen=True, slots=True)
class PackedArray:
    """An array in the file, row-major from byte `start` on; or a numpy scalar."""

    start: int
    info: ArrayInfo
    is_scalar: bool = False


@dataclass(frozen=True, slots=True)
class ChunkedArray:
    """An array whose elements, row-major, are those of one-dimensional arrays in the file."""

    info: ArrayInfo
    chunks: tuple[PackedArray, ...]


def decode(file: ByteRange, where: str) -> Any:
    """The value of a file: plain Python values, arrays. Raises FormatError, naming `where`."""
    reader = _Decoder(file)
    try:
        value = reader.value(0)
        if reader.at != file.size:
            raise _Fault(f"{file.size - reader.at} bytes follow its value")
    except (_Fault, CorruptData) as error:
        raise FormatError(
            f"{where} is not a msgpack file as Flax writes them: at byte {reader.at}, {error}"
        ) from None
    return value


def is_map_of_names(head: bytes) -> bool:
    """Whether a file that begins so is a msgpack map whose first key is a text: one byte for the
    map, and up to 4 for its length; so for the text.

    >>> is_map_of_names(bytes.fromhex("82a6706172616d73")), is_map_of_names(b"PK")
    (True, False)
    """
    match = _MAP_OF_NAMES.match(head)
    if match is None:
        return False
    code = match[1][0]
    length = match[1][1] if code == _TEXT_8 else code & 0x1F
    name = head[match.end() : match.end() + length]
    return bool(name) and name.decode(errors="replace").isprintable()


class _Fault(Exception):
    """A fault at the present byte."""


class _Decoder:
    """A msgpack file from its beginning to its end."""

    def __init__(self, file: ByteRange):
        self._file, self.at = file, 0
        self._end = file.size  # of the value that is being read
        self._window, self._window_at, self._window_bytes = b"", 0, _FIRST_WINDOW
        self._values, self._text_bytes, self._skipped = 0, 0, 0

    def value(self, depth: int) -> Any:
        self._values += 1
        most = min(MAX_VALUES, FREE_VALUES + (self.at - self._skipped) // BYTES_PER_VALUE)
        if self._values > most:
            raise _Fault(f"there are more than {most} values in {self.at - self._skipped} bytes")
        if depth > MAX_TREE_DEPTH:
            raise _Fault(f"values are more than {MAX_TREE_DEPTH} levels deep")
        code = self._byte()
        if code in _FIXED:
            return _FIXED[code]
        if code in _NUMBERS:
            packed = _NUMBERS[code]
            return packed.unpack(self._take(packed.size))[0]
        form, length = self._form(code)
        return form(self, length, depth)

    def _form(self, code: int) -> tuple[Callable[[_Decoder, int, int], Any], int]:
        """The method that reads the value of a code, and the length of the value."""
        for first, last, form in _SHORT:
            if first <= code <= last:
                return form, code - first
        if code in _EXTENSIONS:
            return _Decoder._extension, _EXTENSIONS[code]
        if code not in _LONG:
            raise _Fault(f"the code {code:#x} is none of msgpack's")
        form, width = _LONG[code]
        return form, int.from_bytes(self._take(width), "big")

    def _map(self, count: int, depth: int) -> dict[str, Any] | ChunkedArray:
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise _Fault(f"a key is {key!r:.80}, and no text")
            if key in result:
                raise _Fault(f"the key {key!r:.80} is there twice")
            result[key] = self.value(depth + 1)
        # with numbered chunks in it, it is no node whose third key happens to be another
        is_like = len(result) == 3 and "shape" in result and type(result.get("chunks")) is dict
        return _unchunked(result) if _CHUNKED in result or is_like else result

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _text(self, length: int, depth: int) -> str:
        try:
            return self._bytes(length, depth).decode()
        except UnicodeDecodeError:
            raise _Fault("a text is not in UTF-8") from None

    def _bytes(self, length: int, depth: int) -> bytes:
        self._text_bytes += length
        if self._text_bytes > MAX_TEXT_BYTES:
            raise _Fault(f"texts have more than {MAX_TEXT_BYTES} bytes")
        return self._take(length)

    def _extension(self, length: int, depth: int) -> Any:
        code = self._byte()
        outer, inner = self._end, self.at + length
        if inner > outer:
            raise _Fault(f"{length} bytes are said to follow, and {outer - self.at} do")
        self._end = inner
        if code in (_NDARRAY, _SCALAR):
            value: Any = self._array(code == _SCALAR, depth)
        elif code not in (_COMPLEX, _TUPLE):
            raise _Fault(f"the extension {code} is none of Flax's, nor of Orbax's")
        else:
            value = self.value(depth + 1)
            if not isinstance(value, list):
                raise _Fault(f"the extension {code} is not a list")
            is_pair = len(value) == 2 and all(isinstance(item, float | int) for item in value)
            if code == _COMPLEX and not is_pair:
                raise _Fault("a complex number is not two numbers")
            value = tuple(value) if code == _TUPLE else complex(*value)
        if self.at != inner:
            raise _Fault(f"{inner - self.at} bytes of an extension {code} are left over")
        self._end = outer
        return value

    def _array(self, is_scalar: bool, depth: int) -> PackedArray:
        """A list of shape, name of dtype and bytes; the bytes are passed over."""
        if self._byte() != 0x93:
            raise _Fault("an array is not a list of shape, dtype and bytes")
        # these are a list of numbers and a text: nothing may be nested in them
        inside = max(depth, MAX_TREE_DEPTH - 2) + 1
        shape, name = self.value(inside), self.value(inside)
        self._values -= 2 + len(shape) if isinstance(shape, list) else 2
        form, length = self._form(self._byte())
        if form is not _Decoder._bytes:
            raise _Fault("an array is not a list of shape, dtype and bytes")
        info = _array_info(shape, name)
        if info.nbytes != length:
            raise _Fault(f"an array of {info.dtype} {info.shape} has {length} bytes")
        start = self.at
        self._skip(length)
        return PackedArray(start, info, is_scalar)

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, length: int) -> bytes:
        self._require(length)
        first = self.at - self._window_at
        if not 0 <= first <= len(self._window) - length:
            stop = self.at + max(length, self._window_bytes)
            self._window, self._window_at, first = self._file.read(self.at, stop), self.at, 0
            self._window_bytes = min(2 * self._window_bytes, _LAST_WINDOW)
        self.at += length
        return self._window[first : first + length]

    def _skip(self, length: int) -> None:
        self._require(length)
        self.at += length
        self._skipped += length
        if length > self._window_bytes:
            self._window_bytes = _FIRST_WINDOW

    def _require(self, length: int) -> None:
        if length > self._end - self.at:
            raise _Fault(f"{length} bytes are said to follow, and {self._end - self.at} do")


def _array_info(shape: Any, name: Any) -> ArrayInfo:
    if not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise _Fault(f"{shape!r:.80} is not a shape")
    if not isinstance(name, str) or not is_dtype(name):
        raise _Fault(f"{name!r:.80} is not a dtype of arrays here")
    try:
        return ArrayInfo(tuple(shape), named_dtype(name))
    except FormatError as error:
        raise _Fault(str(error)) from None


def _unchunked(parts: dict[str, Any]) -> ChunkedArray:
    """The array that Flax wrote in chunks, because it has 2**30 bytes or more."""
    if parts.keys() != {_CHUNKED, "shape", "chunks"}:
        raise _Fault(f"an array in chunks has {', '.join(parts)!r:.80}")
    shape, chunks = _in_order(parts["shape"]), _in_order(parts["chunks"])
    if not chunks or not all(_is_flat(chunk, chunks[0]) for chunk in chunks):
        raise _Fault("an array in chunks has others than flat arrays of one dtype")
    info = _array_info(shape, chunks[0].info.dtype.name)
    if info.nbytes != sum(chunk.info.nbytes for chunk in chunks):
        raise _Fault(f"an array in chunks has {info.dtype} {info.shape}, but its chunks have not")
    return ChunkedArray(info, tuple(chunks))


def _in_order(numbered: Any) -> list[Any]:
    if not isinstance(numbered, dict):
        raise _Fault("an array in chunks has no numbered lengths or chunks")
    if numbered.keys() != {str(i) for i in range(len(numbered))}:
        raise _Fault("the lengths or chunks of an array in chunks are not numbered from 0")
    return [numbered[str(i)] for i in range(len(numbered))]


def _is_flat(chunk: Any, first: Any) -> bool:
    if not isinstance(chunk, PackedArray) or not isinstance(first, PackedArray):
        return False
    return len(chunk.info.shape) == 1 and chunk.info.dtype == first.info.dtype


_FIXED: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED |= {code: code for code in range(0x80)} | {256 + n: n for n in range(-32, 0)}
_NUMBERS = {code: struct.Struct(f">{kind}") for code, kind in zip(
    (0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3), "fdBHIQbhiq", strict=True
)}  # fmt: skip
_SHORT = ((0x80, 0x8F, _Decoder._map), (0x90, 0x9F, _Decoder._list), (0xA0, 0xBF, _Decoder._text))
# The code, what follows it, and how many bytes its length has.
_LONG = {
    **{0xC4 + i: (_Decoder._bytes, 1 << i) for i in range(3)},
    **{0xC7 + i: (_Decoder._extension, 1 << i) for i in range(3)},
    **{0xD9 + i: (_Decoder._text, 1 << i) for i in range(3)},
    **{0xDC + i: (_Decoder._list, 2 << i) for i in range(2)},
    **{0xDE + i: (_Decoder._map, 2 << i) for i in range(2)},
}
# Extensions of 1, 2, 4, 8 and 16 bytes.
_EXTENSIONS = {0xD4 + i: 1 << i for i in range(5)}
