"""Files of GGUF with any content; and ggml's blocks, element by element with Python's integers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.formats.quantized import ggml

NUMBERS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6}
NUMBERS |= {"bool": 7, "u64": 10, "i64": 11, "f64": 12}
STRUCT = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f"}
STRUCT |= {"bool": "?", "u64": "Q", "i64": "q", "f64": "d"}
TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int32): 26}


@dataclass
class Tensor:
    """A tensor: lengths with the axis first on which elements lie side by side, and its bytes."""

    name: str
    lengths: Sequence[int]
    type: int
    data: bytes
    offset: int | None = None

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Tensor:
        return cls(name, array.shape[::-1], TYPES[array.dtype], array.tobytes())


@dataclass
class Written:
    """A file; `values` are (type, value) by key, of arrays ([type], values)."""

    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    version: int = 3
    alignment: int = 32
    counts: tuple[int, int] | None = None
    magic: bytes = b"GGUF"

    def head(self) -> bytes:
        tensors, keys = self.counts or (len(self.tensors), len(self.values))
        head = self.magic + struct.pack("<Iqq", self.version, tensors, keys)
        for key, (type, value) in self.values.items():
            head += string(key) + typed(type, value)
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            at = self._aligned(at + len(tensor.data))
            head += string(tensor.name) + struct.pack("<I", len(tensor.lengths))
            head += b"".join(struct.pack("<q", n) for n in tensor.lengths)
            head += struct.pack("<IQ", tensor.type, offset)
        return head

    def data(self) -> bytes:
        file = bytearray(self._padded(self.head()))
        for tensor in self.tensors:
            file += self._padded(tensor.data)
        return bytes(file)

    def _aligned(self, at: int) -> int:
        return -(-at // self.alignment) * self.alignment

    def _padded(self, data: bytes) -> bytes:
        return data.ljust(self._aligned(len(data)), b"\0")


def string(text: str | bytes) -> bytes:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def typed(type: Any, value: Any) -> bytes:
    """A type and a value of it."""
    if isinstance(type, list):
        elements = b"".join(typed(type[0], item)[4:] for item in value)
        return struct.pack("<II", 9, _number(type[0])) + struct.pack("<Q", len(value)) + elements
    if type == "str":
        return struct.pack("<I", 8) + string(value)
    return struct.pack("<I", _number(type)) + struct.pack(f"<{STRUCT[type]}", value)


def _number(type: str) -> int:
    return 8 if type == "str" else NUMBERS[type]


# Blocks. Facts: `dequantize_row_*` of ggml's `ggml-quants.c`, one element at a time.

NL4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
FP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]

f32 = np.float32


def half(block: bytes, at: int) -> np.float32:
    return f32(np.frombuffer(block, "<f2", 1, at)[0])


def nibble(block: bytes, at: int, i: int, run: int = 16) -> int:
    """Code `i` of four bits: of each `run` bytes first the low halves."""
    group, place = divmod(i, 2 * run)
    byte = block[at + group * run + place % run]
    return byte >> 4 if place >= run else byte & 15


def bit(block: bytes, at: int, i: int) -> int:
    return block[at + i // 8] >> i % 8 & 1


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def scale_min(block: bytes, j: int) -> tuple[int, int]:
    """`get_scale_min_k4`."""
    q = block[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, q[j + 4] >> 4 | (q[j] >> 6) << 4


def q4_0(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32(nibble(b, 2, i) - 8)


def q4_1(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32(nibble(b, 4, i)) + half(b, 2)


def q5_0(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32((nibble(b, 6, i) | bit(b, 2, i) << 4) - 16)


def q5_1(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32(nibble(b, 8, i) | bit(b, 4, i) << 4) + half(b, 2)


def q8_0(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32(signed(b[2 + i]))


def q2_k(b: bytes, i: int) -> np.float32:
    code = b[16 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
    scale = b[i // 16]
    return half(b, 80) * f32(scale & 15) * f32(code) - half(b, 82) * f32(scale >> 4)


def q3_k(b: bytes, i: int) -> np.float32:
    code = b[32 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
    code -= 0 if b[i % 32] >> i // 32 & 1 else 4
    j = i // 16
    low = b[96 + j % 8] >> 4 * (j // 8) & 15
    high = b[104 + j % 4] >> 2 * (j // 4) & 3
    return half(b, 108) * f32((low | high << 4) - 32) * f32(code)


def q4_k(b: bytes, i: int) -> np.float32:
    scale, minimum = scale_min(b, i // 32)
    return half(b, 0) * f32(scale) * f32(nibble(b, 16, i, 32)) - half(b, 2) * f32(minimum)


def q5_k(b: bytes, i: int) -> np.float32:
    scale, minimum = scale_min(b, i // 32)
    code = nibble(b, 48, i, 32) | (b[16 + i % 32] >> i // 32 & 1) << 4
    return half(b, 0) * f32(scale) * f32(code) - half(b, 2) * f32(minimum)


def q6_k(b: bytes, i: int) -> np.float32:
    high = b[128 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
    code = (nibble(b, 0, i, 64) | high << 4) - 32
    return half(b, 208) * f32(signed(b[192 + i // 16])) * f32(code)


def iq4_nl(b: bytes, i: int) -> np.float32:
    return half(b, 0) * f32(NL4[nibble(b, 2, i)])


def iq4_xs(b: bytes, i: int) -> np.float32:
    j = i // 32
    low = b[4 + j // 2] >> 4 * (j % 2) & 15
    high = int.from_bytes(b[2:4], "little") >> 2 * j & 3
    return half(b, 0) * f32((low | high << 4) - 32) * f32(NL4[nibble(b, 8, i)])


def mxfp4(b: bytes, i: int) -> np.float32:
    return f32(np.ldexp(1.0, b[0] - 128)) * f32(FP4[nibble(b, 1, i)])


Rule = Callable[[bytes, int], np.float32]
# By name: the number in files, elements and bytes of a block, where its float16 are, the rule; of
# the last types the package's own is taken, which is compared with gguf-py's by SHA-256.
BLOCKS: Mapping[str, tuple[int, int, int, Sequence[int], Rule | None]] = {
    "Q4_0": (2, 32, 18, (0,), q4_0),
    "Q4_1": (3, 32, 20, (0, 2), q4_1),
    "Q5_0": (6, 32, 22, (0,), q5_0),
    "Q5_1": (7, 32, 24, (0, 2), q5_1),
    "Q8_0": (8, 32, 34, (0,), q8_0),
    "Q2_K": (10, 256, 84, (80, 82), q2_k),
    "Q3_K": (11, 256, 110, (108,), q3_k),
    "Q4_K": (12, 256, 144, (0, 2), q4_k),
    "Q5_K": (13, 256, 176, (0, 2), q5_k),
    "Q6_K": (14, 256, 210, (208,), q6_k),
    "IQ4_NL": (20, 32, 18, (0,), iq4_nl),
    "IQ4_XS": (23, 256, 136, (0,), iq4_xs),
    "MXFP4": (39, 32, 17, (), mxfp4),
    "IQ2_XXS": (16, 256, 66, (0,), None),
    "IQ2_XS": (17, 256, 74, (0,), None),
    "IQ3_XXS": (18, 256, 98, (0,), None),
    "IQ1_S": (19, 256, 50, (0,), None),
    "IQ3_S": (21, 256, 110, (0,), None),
    "IQ2_S": (22, 256, 82, (0,), None),
    "IQ1_M": (29, 256, 56, (54,), None),
    "TQ1_0": (34, 256, 54, (52,), None),
    "TQ2_0": (35, 256, 66, (64,), None),
    "NVFP4": (40, 64, 36, (), None),
}


def random_blocks(rng: np.random.Generator, type: str, rows: Sequence[int], n: int) -> np.ndarray:
    """Rows of `n` blocks of any bits but for scales that are no finite numbers."""
    nbytes = BLOCKS[type][2]
    blocks = with_finite_scales(type, rng.integers(0, 256, (*rows, n, nbytes), np.uint8))
    return blocks.reshape(*rows, n * nbytes)


FIXED = 1024


def fixed_blocks(type: str) -> np.ndarray:
    """`FIXED` blocks of bits that are the same in every release of numpy."""
    nbytes = BLOCKS[type][2]
    bits = np.frombuffer(hashlib.shake_128(type.encode()).digest(FIXED * nbytes), np.uint8)
    return with_finite_scales(type, bits.reshape(FIXED, nbytes).copy())


def with_finite_scales(type: str, blocks: np.ndarray) -> np.ndarray:
    for at in BLOCKS[type][3]:  # an exponent below the largest
        blocks[..., at + 1] &= 0xBB
    if type == "MXFP4":
        blocks[..., 0] %= 255
    elif type == "NVFP4":
        blocks[..., :4] %= 127
    return blocks


def values_of(type: str, stored: np.ndarray) -> np.ndarray:
    """The numbers of rows of blocks, by the rule of one element."""
    _, elements, nbytes, _, rule = BLOCKS[type]
    if rule is None:
        values = ggml.TYPES[type].values(stored.reshape(-1, nbytes))
        return values.reshape(*stored.shape[:-1], -1)
    blocks = [bytes(block) for block in stored.reshape(-1, nbytes)]
    with np.errstate(over="ignore"):
        values = [rule(block, i) for block in blocks for i in range(elements)]
    n = stored.shape[-1] // nbytes * elements
    return np.array(values, np.float32).reshape(*stored.shape[:-1], n)
