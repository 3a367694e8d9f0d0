"""ggml's blocks, as GGUF stores quantised weights: each row is blocks of 32 or 256 elements, in
which codes, scales and minima lie side by side.

Rule: code * scale - minimum, in float32; a scale of a part of a block is an integer times the
float16 of the block. Facts: `ggml-common.h` and `dequantize_row_*` in `ggml-quants.c` of ggml 0.25;
the order of the arithmetic is that of `gguf/quants.py` in gguf-py 0.19.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.errors import CorruptData
from jax_ucp.formats.quantized.bits import FP8_E4M3, exponents
from jax_ucp.formats.quantized.names import GGML
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.layout.box import Box

# What the schemes are called: this, and ggml's name of the type.

_NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the numbers of E2M1, the second zero without a sign.
_TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Of some blocks, each a row of bytes.
_Part = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks of `elements` in `nbytes`: codes, and scales and minima of parts."""

    elements: int
    nbytes: int
    codes: _Part
    scales: _Part
    minima: _Part | None = None

    def values(self, blocks: np.ndarray) -> np.ndarray:
        """The numbers of blocks. Raises _NotFinite where a scale is infinite or no number."""
        scales = self.scales(blocks)
        values = np.empty((*scales.shape, self.elements // scales.shape[1]), np.float32)
        values[...] = self.codes(blocks).reshape(values.shape)
        _require_finite(scales)
        values *= scales[..., None]
        if self.minima is not None:
            minima = self.minima(blocks)
            _require_finite(minima)
            values -= minima[..., None]
        return values.reshape(len(blocks), self.elements)


class _NotFinite(Exception):
    """The error for a block at a place: its scale or minimum is infinite or no number."""

    def __init__(self, block: int):
        self.block = block


def _require_finite(scales: np.ndarray) -> None:
    finite = np.isfinite(scales)
    if not finite.all():
        raise _NotFinite(int(np.argwhere(~finite)[0, 0]))


def _float16(at: int) -> _Part:
    """The scale of a whole block: the float16 at a byte of it, as float32."""

    def read(blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)

    return read


def _scaled(at: int, part: _Part) -> _Part:
    """The scales of parts: numbers times the float16 at a byte of the block."""
    return lambda blocks: _float16(at)(blocks) * part(blocks)


def _halved(count: int, numbers: np.ndarray) -> _Part:
    """Scales for doubled codes: half of the number for each of the first `count` bytes; NaN for a
    byte that has no number.
    """
    table = np.full(256, np.nan, np.float32)
    table[: len(numbers)] = numbers * np.float32(0.5)
    return lambda blocks: table[blocks[:, :count]]


def _planes(blocks: np.ndarray, start: int, stop: int, bits: int, run: int) -> np.ndarray:
    """Codes of `bits` bits in bytes `start` to `stop`: of each run of `run` bytes, the lowest bits
    of all bytes, then the next ones.
    """
    packed = blocks[:, start:stop].reshape(len(blocks), -1, run)
    codes = np.empty((*packed.shape[:2], 8 // bits, run), np.uint8)
    for place in range(8 // bits):
        np.right_shift(packed, bits * place, out=codes[:, :, place])
    codes &= (1 << bits) - 1
    return codes.reshape(len(blocks), -1)


def _less(codes: np.ndarray, offset: int) -> np.ndarray:
    """The codes, minus `offset` in place, as int8."""
    codes -= np.uint8(offset)
    return codes.view(np.int8)


def _bits(*planes: tuple[int, int, int, int], less: int = 0) -> _Part:
    """Codes, minus `less`, whose bits are in several planes, the lowest bits in the first.

    A plane has the arguments of `_planes`: start, stop, bits of a code, and length of runs.
    """

    def read(blocks: np.ndarray) -> np.ndarray:
        first, *others = planes
        codes, shift = _planes(blocks, *first), first[2]
        for plane in others:
            codes |= _planes(blocks, *plane) << shift
            shift += plane[2]
        return _less(codes, less)

    return read


def _by_table(start: int, table: tuple[int, ...], run: int = 16) -> _Part:
    """The numbers in `table` for codes of four bits, from byte `start` on."""
    numbers = np.array(table, np.int8).tobytes().ljust(256, b"\0")

    def read(blocks: np.ndarray) -> np.ndarray:
        codes = _planes(blocks, start, blocks.shape[1], 4, run)
        return np.frombuffer(codes.tobytes().translate(numbers), np.int8)

    return read


def _six_bits(first: int, shift: int) -> _Part:
    """Eight 6-bit numbers of Q4_K and Q5_K: the low bits of four bytes from `first` on, then four
    whose upper two bits are the upper bits of those bytes, and the others in bytes 12 to 15.
    """

    def read(blocks: np.ndarray) -> np.ndarray:
        own = blocks[:, first : first + 4]
        halves = blocks[:, 12:16] >> shift & 15
        return np.concatenate([own & 63, halves | own >> 2 & 48], axis=1)

    return read


# IQ1 to IQ3: a code is the number of four or eight elements together, in a table of ggml's.

# Of each byte the signs of eight elements, the first in its lowest bit.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = 1 - 2 * _SIGNS.view(np.int8)
# Seven bits of signs: the eighth makes their number even.
_EVEN = np.array([s | s.bit_count() % 2 << 7 for s in range(128)], np.uint8)


@cache
def _grid(name: str) -> np.ndarray:
    """The codebook `name` of ggml, int8 of shape (codes, elements of a code).

    Facts: `ggml-common.h`, MIT.
    """
    tables = files("jax_ucp.formats.quantized").joinpath("ggml_grids.json").read_text()
    grids = json.loads(tables)[name]
    packed = np.frombuffer(base64.b85decode(grids["codes"]), np.uint8)
    codes = _planes(packed[None], 0, len(packed), grids["bits"], 1)
    return np.array(grids["numbers"], np.int8)[codes].reshape(-1, grids["elements"])


def _signed(name: str, codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The elements of codes in a codebook, int8 of shape (*signs.shape, 8).

    A byte of `signs` is of eight elements; those are negated whose bit is set, the lowest is the
    first's.
    """
    elements = _grid(name)[codes].reshape(*signs.shape, 8)
    elements *= _SIGNS[signs]
    return elements


def _words(blocks: np.ndarray, start: int, stop: int, type: str) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(type)


def _fields(words: np.ndarray, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """The bits of `mask` in each word shifted right by each of `shifts`, a row for each block."""
    fields = words[..., None] >> np.array(shifts, words.dtype) & words.dtype.type(mask)
    return fields.reshape(len(words), -1)


def _wide(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes of more than 8 bits, whose upper bits are stored elsewhere."""
    return high.astype(np.uint16) << 8 | low


def _seven_signs(words: np.ndarray) -> np.ndarray:
    """The bytes of signs in words of four bytes: four times seven bits, below a 4-bit scale."""
    return _EVEN[_fields(words, (0, 7, 14, 21), 127)]


def _odd(
    blocks: np.ndarray, numbers: np.ndarray, unit: float, scale: np.ndarray | None = None
) -> np.ndarray:
    """Scales of parts: (2 * number + 1) * unit times `scale`, or the block's first float16. All are
    exact.
    """
    multiples = (2 * numbers.astype(np.float32) + 1) * np.float32(unit)
    return (_float16(0)(blocks) if scale is None else scale) * multiples


def _iq1(low: np.ndarray, high: np.ndarray, is_less: np.ndarray) -> np.ndarray:
    """Eight times the elements: the codebook's, minus an eighth where `is_less`, else plus it."""
    elements = _grid("IQ1_S")[_wide(low, high)] * np.int8(8)
    elements += np.where(is_less, np.int8(-1), np.int8(1))[..., None]
    return elements


def _iq1_m_scales(blocks: np.ndarray) -> np.ndarray:
    """Scales of parts of IQ1_M, whose float16 is in the upper four bits of four words."""
    words = _words(blocks, 48, 56, "<u2")
    whole = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    scale = whole.astype("<u2").view("<f2").astype(np.float32)[:, None]
    return _odd(blocks, _fields(words, (0, 3, 6, 9), 7), 0.125, scale)


def _tq1_0_codes(blocks: np.ndarray) -> np.ndarray:
    """The codes -1, 0 and 1: a byte over 256 is a fraction with up to five digits in base 3, of
    which the first is most significant. Codes are in the order of digits, then of bytes.
    """
    codes = [
        blocks[:, None, start:stop] * np.array(powers, np.uint8)[:, None]
        for start, stop, powers in (
            (0, 32, (1, 3, 9, 27, 81)),
            (32, 48, (1, 3, 9, 27, 81)),
            (48, 52, (1, 3, 9, 27)),
        )
    ]
    digits = np.concatenate([part.reshape(len(blocks), -1) for part in codes], axis=1)
    return _less((digits.astype(np.uint16) * 3 >> 8).astype(np.uint8), 1)


def _added(part: _Part) -> _Part:
    """A minimum that is added; others are subtracted."""
    return lambda blocks: -part(blocks)


# Of Q4_K and Q5_K.
_K = _scaled(0, _six_bits(4, 0)), _scaled(2, _six_bits(8, 4))

# The elements of a block, its bytes, its codes, the scales of its parts, and their minima.
TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, _bits((2, 18, 4, 16), less=8), _float16(0)),
    "Q4_1": BlockType(32, 20, _bits((4, 20, 4, 16)), _float16(0), _added(_float16(2))),
    "Q5_0": BlockType(32, 22, _bits((6, 22, 4, 16), (2, 6, 1, 1), less=16), _float16(0)),
    "Q5_1": BlockType(32, 24, _bits((8, 24, 4, 16), (4, 8, 1, 1)), _float16(0),
                      _added(_float16(2))),
    "Q8_0": BlockType(32, 34, lambda b: b[:, 2:].view(np.int8), _float16(0)),
    "Q2_K": BlockType(256, 84, _bits((16, 80, 2, 32)), _scaled(80, lambda b: b[:, :16] & 15),
                      _scaled(82, lambda b: b[:, :16] >> 4)),
    # the third bit is stored inverted: where it is not set, the code is four less
    "Q3_K": BlockType(256, 110, _bits((32, 96, 2, 32), (0, 32, 1, 32), less=4),
                      _scaled(108, _bits((96, 104, 4, 8), (104, 108, 2, 4), less=32))),
    "Q4_K": BlockType(256, 144, _bits((16, 144, 4, 32)), *_K),
    "Q5_K": BlockType(256, 176, _bits((48, 176, 4, 32), (16, 48, 1, 32)), *_K),
    "Q6_K": BlockType(256, 210, _bits((0, 128, 4, 64), (128, 192, 2, 32), less=32),
                      _scaled(208, lambda b: b[:, 192:208].view(np.int8))),
    "IQ4_NL": BlockType(32, 18, _by_table(2, _NL4), _float16(0)),
    "IQ4_XS": BlockType(256, 136, _by_table(8, _NL4),
                        _scaled(0, _bits((4, 8, 4, 1), (2, 4, 2, 1), less=32))),
    "MXFP4": BlockType(32, 17, _by_table(1, _TWICE_FP4),
                       _halved(1, exponents(np.arange(255, dtype=np.uint8)))),
    "IQ2_XXS": BlockType(256, 66,
                         lambda b: _signed("IQ2_XXS",
                                           b[:, 2:].reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32),
                                           _seven_signs(_words(b, 2, 66, "<u4")[:, 1::2])),
                         lambda b: _odd(b, _words(b, 2, 66, "<u4")[:, 1::2] >> 28, 0.125)),
    "IQ2_XS": BlockType(256, 74,
                        lambda b: _signed("IQ2_XS", _words(b, 2, 66, "<u2") & 511,
                                          _EVEN[_words(b, 2, 66, "<u2") >> 9]),
                        lambda b: _odd(b, _fields(b[:, 66:74], (0, 4), 15), 0.125)),
    "IQ2_S": BlockType(256, 82,
                       lambda b: _signed("IQ2_S",
                                         _wide(b[:, 2:34], _fields(b[:, 66:74], (0, 2, 4, 6), 3)),
                                         b[:, 34:66]),
                       lambda b: _odd(b, _fields(b[:, 74:82], (0, 4), 15), 0.125)),
    "IQ3_XXS": BlockType(256, 98,
                         lambda b: _signed("IQ3_XXS", b[:, 2:66],
                                           _seven_signs(_words(b, 66, 98, "<u4"))),
                         lambda b: _odd(b, _words(b, 66, 98, "<u4") >> 28, 0.25)),
    "IQ3_S": BlockType(256, 110,
                       lambda b: _signed("IQ3_S",
                                         _wide(b[:, 2:66], _fields(b[:, 66:74], (*range(8),), 1)),
                                         b[:, 74:106]),
                       lambda b: _odd(b, _fields(b[:, 106:110], (0, 4), 15), 1)),
    "IQ1_S": BlockType(256, 50,
                       lambda b: _iq1(b[:, 2:34],
                                      _fields(_words(b, 34, 50, "<u2"), (0, 3, 6, 9), 7),
                                      np.repeat(_words(b, 34, 50, "<u2") >> 15, 4, axis=1)),
                       lambda b: _odd(b, _words(b, 34, 50, "<u2") >> 12 & 7, 0.125)),
    "IQ1_M": BlockType(256, 56,
                       lambda b: _iq1(b[:, :32], _fields(b[:, 32:48], (0, 4), 7),
                                      _fields(b[:, 32:48], (0, 4), 8)), _iq1_m_scales),
    "TQ1_0": BlockType(256, 54, _tq1_0_codes, _float16(52)),
    "TQ2_0": BlockType(256, 66, _bits((0, 64, 2, 32), less=1), _float16(64)),
    # E4M3 without a sign; the last one is no number
    "NVFP4": BlockType(64, 36, _by_table(4, _TWICE_FP4, 8), _halved(4, FP8_E4M3[:128])),
}  # fmt: skip


def blocks(stored: StoredWeight) -> Dequantizer:
    """The weight of rows of blocks. Raises FormatError if its parts do not fit."""
    stored.require_only("codes", "scale")
    type = TYPES[stored.weight.scheme.removeprefix(GGML)]
    rows = stored.info("codes").shape
    if not rows or rows[-1] % type.nbytes:
        label = stored.weight.parts["codes"]
        stored.fault(f"{label} has rows of {rows[-1:]} bytes, and blocks have {type.nbytes}")
    shape = (*rows[:-1], rows[-1] // type.nbytes * type.elements)
    codes, scale = stored.part("codes", rows, ("uint8",)), None
    if stored.has("scale"):
        count = 1 if stored.info("scale").shape in ((), (1,)) else rows[0]
        scale = stored.scale("scale", (count,) if len(rows) == 3 else (1,), ("float32",))
    return _Rows(stored.name, stored.weight.scheme, shape, codes, scale)


@dataclass(frozen=True)
class _Rows:
    """A weight whose rows are blocks. NVFP4 may have a scale for all of it, or for each expert."""

    name: str
    scheme: str
    shape: tuple[int, ...]
    codes: WeightPart
    scale: WeightPart | None

    @property
    def parts(self) -> Mapping[str, WeightPart]:
        return {"codes": self.codes} | ({"scale": self.scale} if self.scale else {})

    @property
    def _type(self) -> BlockType:
        return TYPES[self.scheme.removeprefix(GGML)]

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The bytes of the whole blocks around the box, and its scales."""
        type, first, last = self._type, box.start[-1], box.stop[-1]
        start = first // type.elements * type.nbytes
        stop = -(-last // type.elements) * type.nbytes
        boxes = {"codes": Box((*box.start[:-1], start), (*box.stop[:-1], max(start, stop)))}
        if self.scale:
            is_one = self.scale.shape == (1,)
            boxes["scale"] = Box((0,), (1,)) if is_one else Box(box.start[:1], box.stop[:1])
        return boxes

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        type, codes = self._type, parts["codes"]
        try:
            values = type.values(np.ascontiguousarray(codes).reshape(-1, type.nbytes))
        except _NotFinite as error:
            raise CorruptData(
                f"{self.name} ({self.scheme}): a scale of {self._place(box, error.block)} should be"
                " a finite number, and is none"
            ) from None
        first = box.start[-1] % type.elements
        rows = values.reshape(*codes.shape[:-1], -1)
        if self.scale:
            rows *= parts["scale"].reshape(-1, *[1] * (rows.ndim - 1))
        return rows[..., first : first + box.shape[-1]]

    def _place(self, box: Box, block: int) -> str:
        """The place in the weight of one of the blocks that a box needs."""
        around = self.boxes(box)["codes"]
        blocks = (*around.shape[:-1], around.shape[-1] // self._type.nbytes)
        *row, column = (int(i) for i in np.unravel_index(block, blocks))
        at = [i + start for i, start in zip(row, box.start[:-1], strict=True)]
        return f"block {column + box.start[-1] // self._type.elements} of row {at}"
