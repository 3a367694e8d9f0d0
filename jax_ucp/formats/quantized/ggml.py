"""ggml's blocks, as GGUF stores quantised weights: each row is blocks of 32 or 256 elements, in
which codes, scales and minima lie side by side.

Rule: code * scale - minimum, in float32; a scale of a part of a block is an integer times the
float16 of the block. Facts: `ggml-common.h` and `dequantize_row_*` in `ggml-quants.c` of ggml 0.25;
the order of the arithmetic is that of `gguf/quants.py` in gguf-py 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.errors import CorruptData
from jax_ucp.formats.quantized.bits import exponents
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.layout.box import Box

# What the schemes are called: this, and ggml's name of the type.
SCHEME = "ggml "

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
    """A scale or minimum of the block at a place is infinite or no number."""

    def __init__(self, block: int):
        self.block = block


def _require_finite(scales: np.ndarray) -> None:
    finite = np.isfinite(scales)
    if not finite.all():
        raise _NotFinite(int(np.argwhere(~finite)[0, 0]))


def _float16(at: int) -> _Part:
    """The float16 at a byte of each block, as float32: one scale for all of it."""

    def read(blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)

    return read


def _exponent(blocks: np.ndarray) -> np.ndarray:
    """E8M0 in the first byte, of codes that are twice the numbers. 255 is no number."""
    codes = blocks[:, :1]
    scales = exponents(codes) * np.float32(0.5)
    scales[codes == 255] = np.nan
    return scales


def _planes(blocks: np.ndarray, start: int, stop: int, bits: int, run: int) -> np.ndarray:
    """Codes of a few bits, of each run of bytes first the lowest, then the next ones."""
    packed = blocks[:, start:stop].reshape(len(blocks), -1, run)
    codes = np.empty((*packed.shape[:2], 8 // bits, run), np.uint8)
    for place in range(8 // bits):
        np.right_shift(packed, bits * place, out=codes[:, :, place])
    codes &= (1 << bits) - 1
    return codes.reshape(len(blocks), -1)


def _less(codes: np.ndarray, offset: int) -> np.ndarray:
    codes -= np.uint8(offset)
    return codes.view(np.int8)


def _nibbles(start: int, run: int, offset: int = 0) -> _Part:
    """Codes of four bits, from a byte to the end of the block."""
    return lambda blocks: _less(_planes(blocks, start, blocks.shape[1], 4, run), offset)


def _by_table(start: int, table: tuple[int, ...]) -> _Part:
    """Codes of four bits in runs of 16 bytes, by what they stand for."""
    numbers = np.array(table, np.int8).tobytes().ljust(256, b"\0")

    def read(blocks: np.ndarray) -> np.ndarray:
        codes = _planes(blocks, start, blocks.shape[1], 4, 16)
        return np.frombuffer(codes.tobytes().translate(numbers), np.int8)

    return read


def _five_bits(high: int, low: int, offset: int = 0) -> _Part:
    """Codes of five bits: the fifth are together, in the order of the elements."""

    def read(blocks: np.ndarray) -> np.ndarray:
        codes = _planes(blocks, low, blocks.shape[1], 4, 16)
        fifth = np.unpackbits(blocks[:, high : high + 4], axis=1, bitorder="little")
        return _less(codes | fifth << 4, offset)

    return read


def _q3_k_codes(blocks: np.ndarray) -> np.ndarray:
    """The third bit is stored inverted: where it is not set, the code is four less."""
    codes = _planes(blocks, 32, 96, 2, 32)
    codes |= _planes(blocks, 0, 32, 1, 32) << 2
    return _less(codes, 4)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    """Sixteen scales of six bits: eight bytes with their low halves, four with the rest."""
    scales = _planes(blocks, 96, 104, 4, 8)
    scales |= _planes(blocks, 104, 108, 2, 4) << 4
    return _float16(108)(blocks) * _less(scales, 32)


def _q5_k_codes(blocks: np.ndarray) -> np.ndarray:
    codes = _planes(blocks, 48, 176, 4, 32)
    codes |= _planes(blocks, 16, 48, 1, 32) << 4
    return codes


def _six_bits(first: int, shift: int) -> _Part:
    """Eight numbers of Q4_K and Q5_K: four in the low bits of four bytes, four split."""

    def read(blocks: np.ndarray) -> np.ndarray:
        own = blocks[:, first : first + 4]
        halves = blocks[:, 12:16] >> shift & 15
        return np.concatenate([own & 63, halves | own >> 2 & 48], axis=1)

    return read


def _k_scales(blocks: np.ndarray) -> np.ndarray:
    return _float16(0)(blocks) * _six_bits(4, 0)(blocks)


def _k_minima(blocks: np.ndarray) -> np.ndarray:
    return _float16(2)(blocks) * _six_bits(8, 4)(blocks)


def _q6_k_codes(blocks: np.ndarray) -> np.ndarray:
    codes = _planes(blocks, 0, 128, 4, 64)
    codes |= _planes(blocks, 128, 192, 2, 32) << 4
    return _less(codes, 32)


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    """Eight scales of six bits: four bytes with their low halves, two with the rest."""
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 8)
    return _float16(0)(blocks) * _less(low | high << 4, 32)


def _added(part: _Part) -> _Part:
    """A minimum that is added where others are subtracted."""
    return lambda blocks: -part(blocks)


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, _nibbles(2, 16, 8), _float16(0)),
    "Q4_1": BlockType(32, 20, _nibbles(4, 16), _float16(0), _added(_float16(2))),
    "Q5_0": BlockType(32, 22, _five_bits(2, 6, 16), _float16(0)),
    "Q5_1": BlockType(32, 24, _five_bits(4, 8), _float16(0), _added(_float16(2))),
    "Q8_0": BlockType(32, 34, lambda blocks: blocks[:, 2:].view(np.int8), _float16(0)),
    "Q2_K": BlockType(
        256,
        84,
        lambda blocks: _planes(blocks, 16, 80, 2, 32),
        lambda blocks: _float16(80)(blocks) * (blocks[:, :16] & 15),
        lambda blocks: _float16(82)(blocks) * (blocks[:, :16] >> 4),
    ),
    "Q3_K": BlockType(256, 110, _q3_k_codes, _q3_k_scales),
    "Q4_K": BlockType(
        256, 144, lambda blocks: _planes(blocks, 16, 144, 4, 32), _k_scales, _k_minima
    ),
    "Q5_K": BlockType(256, 176, _q5_k_codes, _k_scales, _k_minima),
    "Q6_K": BlockType(
        256,
        210,
        _q6_k_codes,
        lambda blocks: _float16(208)(blocks) * blocks[:, 192:208].view(np.int8),
    ),
    "IQ4_NL": BlockType(32, 18, _by_table(2, _NL4), _float16(0)),
    "IQ4_XS": BlockType(256, 136, _by_table(8, _NL4), _iq4_xs_scales),
    "MXFP4": BlockType(32, 17, _by_table(1, _TWICE_FP4), _exponent),
}


def blocks(stored: StoredWeight) -> Dequantizer:
    stored.only("codes")
    type = TYPES[stored.weight.scheme.removeprefix(SCHEME)]
    rows = stored.info("codes").shape
    if not rows or rows[-1] % type.nbytes:
        label = stored.weight.parts["codes"]
        stored.fault(f"{label} has rows of {rows[-1:]} bytes, and blocks have {type.nbytes}")
    shape = (*rows[:-1], rows[-1] // type.nbytes * type.elements)
    return _Rows(stored.name, stored.weight.scheme, shape, stored.part("codes", rows, ("uint8",)))


@dataclass(frozen=True)
class _Rows:
    """A weight whose rows are blocks."""

    name: str
    scheme: str
    shape: tuple[int, ...]
    codes: WeightPart

    @property
    def parts(self) -> Mapping[str, WeightPart]:
        return {"codes": self.codes}

    @property
    def _type(self) -> BlockType:
        return TYPES[self.scheme.removeprefix(SCHEME)]

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The bytes of whole blocks."""
        type, first, last = self._type, box.start[-1], box.stop[-1]
        start = first // type.elements * type.nbytes
        stop = -(-last // type.elements) * type.nbytes
        return {"codes": Box((*box.start[:-1], start), (*box.stop[:-1], max(start, stop)))}

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
        return rows[..., first : first + box.shape[-1]]

    def _place(self, box: Box, block: int) -> str:
        """Where the n-th block of those that a box needs is in the weight."""
        around = self.boxes(box)["codes"]
        blocks = (*around.shape[:-1], around.shape[-1] // self._type.nbytes)
        *row, column = (int(i) for i in np.unravel_index(block, blocks))
        at = [i + start for i, start in zip(row, box.start[:-1], strict=True)]
        return f"block {column + box.start[-1] // self._type.elements} of row {at}"
