"""Quantised weights made element by element, with Python's integers, to compare with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import gguf_writer
from jax_ucp.arrays.contents import QuantizedWeight
from jax_ucp.arrays.dequantized import Dequantized, Dequantizer, dequantized
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.arrays.value import Computed, Constant
from jax_ucp.formats.quantized.schemes import dequantizer
from jax_ucp.formats.quantized.stored import StoredWeight

FP8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the i-th code of a word is that of this output


@dataclass
class Made:
    """The parts of a weight by role, what a config says of it, and the numbers it stands for."""

    method: str
    parts: dict[str, np.ndarray]
    want: np.ndarray
    settings: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    scheme: str = "a scheme"
    name: str = "w"

    def view(self, dtype: Any = np.float32, names: Sequence[str] | None = None) -> Evaluated:
        """The weight `w`, of the parts."""
        arrays = {role: Constant(part) for role, part in self.parts.items()}
        weight = QuantizedWeight(self.scheme, self.name, {role: role for role in self.parts})
        stored = StoredWeight(weight, arrays, self.settings, self.said)
        made = dequantizer(self.method, stored)
        return Evaluated({"w": dequantized("w", made, np.dtype(dtype))})


def weight_of(source: ArraySource, key: str) -> Dequantizer | None:
    """How a weight of a source is dequantised, if it is."""
    assert isinstance(source, Evaluated)
    array = source.values[key]
    if isinstance(array, Computed) and isinstance(array.rule, Dequantized):
        return array.rule.weight
    return None


def words(codes: Sequence[int], bits: int, width: int, order: Sequence[int] = ()) -> list[int]:
    """Codes as words, the first in the lowest bits."""
    if order:
        per_word = width // bits
        codes = [codes[i + place] for i in range(0, len(codes), per_word) for place in order]
    whole = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // width)
    return [whole >> (width * i) & ((1 << width) - 1) for i in range(count)]


def packed(codes: np.ndarray, bits: int, axis: int, dtype: Any = np.int32, order=()) -> np.ndarray:
    width = 8 * np.dtype(dtype).itemsize
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")

    def pack(line: np.ndarray) -> np.ndarray:
        return np.array(words(line.tolist(), bits, width, order), unsigned)

    return np.apply_along_axis(pack, axis, codes).view(dtype)


def spread(small: np.ndarray, block: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    index = np.indices(shape)
    return small[tuple(index[axis] // block[axis] for axis in range(len(shape)))]


def affine(codes: np.ndarray, zero: Any, scale: np.ndarray) -> np.ndarray:
    return (codes.astype(np.float32) - np.float32(1) * zero) * scale.astype(np.float32)


Draw = Callable[..., Any]
SIZES = st.integers(1, 40)
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])  # blocks, as libraries write them


def rng_of(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def small_scales(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    return (rng.uniform(0.001, 2, shape) * rng.choice([-1, 1], shape)).astype(dtype)


@st.composite
def block_fp8(draw: Draw) -> Made:
    rng, experts = rng_of(draw), draw(st.sampled_from([(), (1,), (3,)]))
    shape = (*experts, draw(SIZES), draw(SIZES))
    block = draw(POWERS), draw(POWERS)
    is_one = draw(st.booleans())  # one scale for all of a matrix
    block = shape[-2:] if is_one else block
    codes = rng.normal(size=shape).astype(FP8)
    grid = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
    scale = small_scales(rng, (*experts, *grid), draw(st.sampled_from([np.float32, BF16])))
    want = affine(codes, 0, spread(scale, ((1,) * len(experts)) + block, shape))
    parts = {"codes": codes, "scale_inv": scale}
    if draw(st.booleans()):  # AutoFP8, DeepSeek-V4
        parts = {"codes": codes, "scale": scale}
    return Made("fp8", parts, want, {"weight_block_size": None if is_one else list(block)})


@st.composite
def fp4_experts(draw: Draw) -> Made:
    """DeepSeek-V4: two codes in a byte, and an exponent for each 32 of a row."""
    rng, shape = rng_of(draw), (draw(SIZES), 32 * draw(st.integers(1, 4)))
    codes = rng.integers(0, 16, shape)
    table = np.array(E2M1 + [-x for x in E2M1], np.float32)
    stored = rng.integers(90, 160, (shape[0], shape[1] // 32)).astype(np.uint8)
    scale = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    role = draw(st.sampled_from(["scale", "scale_inv"]))
    parts: dict[str, np.ndarray] = {"codes": packed(codes, 4, 1, np.uint8).view(np.int8)}
    parts[role] = stored.view(ml_dtypes.float8_e8m0fnu)
    said: dict[str, Any] = {"weight_block_size": [128, 128]}
    said |= draw(st.sampled_from([{}, {"expert_dtype": "fp4"}]))
    want = table[codes] * spread(scale, (1, 32), shape)
    return Made("fp8", parts, want, said, name="layers.0.ffn.experts.3.w1.weight")


@st.composite
def row_fp8(draw: Draw) -> Made:
    """A scale for each output; of the experts of Llama 4, outputs are columns."""
    rng, rows = rng_of(draw), draw(SIZES)
    columns = rows if draw(st.booleans()) else draw(SIZES)
    name = draw(st.sampled_from(["weight", "gate_up_proj", "down_proj"]))
    shape = (rows, columns) if name == "weight" else (draw(st.integers(1, 3)), rows, columns)
    codes = rng.normal(size=shape).astype(FP8)
    small = (rows, 1) if name == "weight" else (shape[0], 1, columns)
    scale = small_scales(rng, small, np.float32)
    stored = scale.reshape(shape[0], columns, 1) if name == "down_proj" else scale
    parts = {"codes": codes, "scale": stored}
    return Made("fbgemm_fp8", parts, affine(codes, 0, scale), name=f"param/experts.{name}")


def group_settings(format: str, **weights: Any) -> dict[str, Any]:
    return {"format": format, "config_groups": {"group_0": {"weights": weights}}}


@st.composite
def packed_integers(draw: Draw) -> Made:
    """compressed-tensors: groups, channels, zero points, an order of inputs."""
    rng, bits, width = rng_of(draw), draw(st.integers(1, 8)), draw(st.integers(1, 12))
    groups, rows = draw(st.integers(1, 5)), draw(SIZES)
    shape = rows, width * groups
    codes = rng.integers(0, 1 << bits, shape)
    scale = small_scales(rng, (rows, groups), draw(st.sampled_from([np.float16, BF16])))
    order = np.arange(shape[1], dtype=np.int32) // width
    parts = {"codes": packed(codes, bits, 1), "scale": scale, "shape": np.array(shape, np.int64)}
    if draw(st.booleans()):
        rng.shuffle(order)
        parts["g_idx"] = order
    symmetric = draw(st.booleans())
    zero = np.full((rows, groups), 1 << (bits - 1))
    if not symmetric:
        zero = rng.integers(0, 1 << bits, (rows, groups))
        parts["zero_point"] = packed(zero, bits, 0)
    want = affine(codes, zero[:, order], scale[:, order])
    strategy = {"strategy": "group", "group_size": width}
    if groups == 1 and draw(st.booleans()):
        strategy = {"strategy": "channel", "group_size": None}
    more = {"type": "int", "symmetric": symmetric, **strategy}
    said = group_settings("pack-quantized", num_bits=bits, **more)
    return Made("compressed-tensors", parts, want, said)


@st.composite
def few_bits(draw: Draw) -> Made:
    """compressed-tensors: NVFP4 and MXFP4."""
    rng, is_nv = rng_of(draw), draw(st.booleans())
    group = 16 if is_nv else 32
    shape = draw(SIZES), group * draw(st.integers(1, 4))
    codes = rng.integers(0, 16, shape)
    table = np.array(E2M1 + [-x for x in E2M1], np.float32)
    small = shape[0], shape[1] // group
    parts = {"codes": packed(codes, 4, 1, np.uint8)}
    if is_nv:
        parts["scale"] = rng.uniform(0.1, 400, small).astype(FP8)
        parts["global_scale"] = rng.uniform(1, 3000, 1).astype(np.float32)
        scale = parts["scale"].astype(np.float32) / parts["global_scale"]
    else:
        parts["scale"] = rng.integers(90, 160, small).astype(np.uint8)
        scale = np.float32(2) ** (parts["scale"].astype(np.float32) - 127)
    want = table[codes] * spread(scale, (1, group), shape)
    format = "nvfp4-pack-quantized" if is_nv else "mxfp4-pack-quantized"
    said = group_settings(format, num_bits=4, type="float", strategy="group", group_size=group)
    return Made("compressed-tensors", parts, want, said)


@st.composite
def plain_codes(draw: Draw) -> Made:
    """compressed-tensors: int8 and fp8 by tensor, channel, group and block."""
    rng, is_float = rng_of(draw), draw(st.booleans())
    strategy = draw(st.sampled_from(["tensor", "channel", "group", "block"]))
    width = draw(st.integers(1, 9))
    shape = draw(SIZES), width * draw(st.integers(1, 5))
    block = {"tensor": shape, "channel": (1, shape[1]), "group": (1, width)}
    block = block.get(strategy) or (draw(POWERS), draw(POWERS))
    small = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    if is_float:
        codes = rng.normal(size=shape).astype(FP8)
    parts = {"codes": codes, "scale": small_scales(rng, small, BF16)}
    zero: Any = 0
    symmetric = is_float or draw(st.booleans())
    if not symmetric:
        parts["zero_point"] = rng.integers(-128, 128, small).astype(np.int8)
        zero = spread(parts["zero_point"].astype(np.float32), block, shape)
    want = affine(codes, zero, spread(parts["scale"], block, shape))
    if strategy == "tensor":
        flat = draw(st.sampled_from([(), (1,), (1, 1)]))
        parts |= {role: parts[role].reshape(flat) for role in parts if role != "codes"}
    said = group_settings(
        "float-quantized" if is_float else "int-quantized",
        num_bits=8,
        type="float" if is_float else "int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=width if strategy == "group" else None,
        block_structure=list(block) if strategy == "block" else None,
    )
    return Made("compressed-tensors", parts, want, said)


@st.composite
def dense(draw: Draw) -> Made:
    """compressed-tensors: numbers that are rounded to integers of a group when they are used."""
    rng, bits, width = rng_of(draw), draw(st.integers(1, 8)), draw(st.integers(1, 9))
    shape = draw(SIZES), width * draw(st.integers(1, 5))
    small = shape[0], shape[1] // width
    dtype = draw(st.sampled_from([np.float32, np.float16, BF16]))
    half = 1 << (bits - 1)
    parts = {"codes": (rng.normal(size=shape) * half).astype(dtype)}
    parts["scale"] = small_scales(rng, small, dtype)
    parts["zero_point"] = rng.integers(-half, half, small).astype(np.int8)
    scale, zero = (spread(parts[role], (1, width), shape) for role in ("scale", "zero_point"))
    with np.errstate(over="ignore"):
        codes = (parts["codes"] / scale + zero.astype(dtype)).astype(np.float32)
    codes = np.rint(codes.clip(-half, half - 1))
    want = affine(codes, zero.astype(np.float32), scale)
    args = {"num_bits": bits, "type": "int", "symmetric": False}
    said = group_settings("dense", **args, strategy="group", group_size=width)
    return Made("compressed-tensors", parts, want, said)


@st.composite
def gpt_oss(draw: Draw) -> Made:
    rng = rng_of(draw)
    experts, rows, groups = draw(st.integers(1, 3)), draw(SIZES), draw(st.integers(1, 4))
    codes = rng.integers(0, 16, (experts, rows, groups * 32))
    table = np.array(E2M1 + [-x for x in E2M1], np.float32)
    blocks = packed(codes, 4, 2, np.uint8).reshape(experts, rows, groups, 16)
    scales = rng.integers(0, 255, (experts, rows, groups)).astype(np.uint8)
    scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    with np.errstate(over="ignore"):
        want = table[codes] * spread(scale, (1, 1, 32), codes.shape)
    return Made("mxfp4", {"codes": blocks, "scales": scales}, want.swapaxes(1, 2))


@st.composite
def gptq(draw: Draw) -> Made:
    rng, bits, is_v2 = rng_of(draw), draw(st.sampled_from([2, 3, 4, 8])), draw(st.booleans())
    inputs, outputs = 32 * draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3))
    size, is_in_order = draw(POWERS), draw(st.booleans())
    order, groups = np.arange(inputs, dtype=np.int32) // size, -(-inputs // size)
    if not is_in_order:
        rng.shuffle(order)
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    stored = rng.integers(0, 1 << bits, (groups, outputs))
    zero = stored if is_v2 else (stored + 1) % (1 << bits)
    scale = small_scales(rng, (groups, outputs), np.float16)
    parts = {"codes": packed(codes, bits, 0), "qzeros": packed(stored, bits, 1), "scales": scale}
    if not is_in_order or draw(st.booleans()):
        parts["g_idx"] = order
    said = {"bits": bits, "checkpoint_format": "gptq_v2" if is_v2 else "gptq", "group_size": size}
    want = affine(codes, zero[order], scale[order])
    return Made("gptq", parts, np.ascontiguousarray(want.T), said)


@st.composite
def awq(draw: Draw) -> Made:
    rng, group, groups = rng_of(draw), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    inputs, outputs = group * groups, 8 * draw(st.integers(1, 6))
    codes = rng.integers(0, 16, (inputs, outputs))
    zero = rng.integers(0, 16, (groups, outputs))
    scale = small_scales(rng, (groups, outputs), np.float16)
    parts = {"codes": packed(codes, 4, 1, order=AWQ_ORDER), "scales": scale}
    parts["qzeros"] = packed(zero, 4, 1, order=AWQ_ORDER)
    index = np.arange(inputs) // group
    want = affine(codes, zero[index], scale[index])
    return Made("awq", parts, np.ascontiguousarray(want.T), {"bits": 4, "group_size": group})


@st.composite
def runs_of_four_bits(draw: Draw) -> Made:
    """bitsandbytes: nf4 or fp4, also where rows are not whole runs, and of any number of axes."""
    rng, block = rng_of(draw), draw(st.sampled_from([4, 8, 64]))
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    if draw(st.booleans()):
        shape = draw(SIZES), block * draw(st.integers(1, 3))
    size, kind = int(np.prod(shape)), draw(st.sampled_from(["nf4", "fp4"]))
    codes = rng.integers(0, 16, size)
    swapped = np.append(codes, 0)[: size + size % 2].reshape(-1, 2)[:, ::-1].reshape(-1)
    table = rng.normal(size=16).astype(np.float32)
    runs = -(-size // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"codes": packed(swapped, 4, 0, np.uint8).reshape(-1, 1), "quant_map": table}
    parts["absmax"] = rng.uniform(0.1, 3, runs).astype(np.float32)
    absmax = parts["absmax"]
    if draw(st.booleans()):
        nested = draw(st.sampled_from([2, 256]))
        parts["absmax"] = rng.integers(0, 256, runs).astype(np.uint8)
        parts["nested_quant_map"] = rng.normal(size=256).astype(np.float32)
        parts["nested_absmax"] = rng.uniform(0.1, 3, -(-runs // nested)).astype(np.float32)
        state |= {"nested_blocksize": nested, "nested_offset": 0.25, "nested_dtype": "float32"}
        absmax = parts["nested_quant_map"][parts["absmax"]]
        absmax = absmax * parts["nested_absmax"][np.arange(runs) // nested] + np.float32(0.25)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts[f"quant_state.bitsandbytes__{kind}"] = text
    want = (table[codes] * absmax[np.arange(size) // block]).reshape(shape)
    return Made("bitsandbytes", parts, want)


@st.composite
def rows_of_int8(draw: Draw) -> Made:
    rng, shape = rng_of(draw), (draw(SIZES), draw(SIZES))
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.1, 3, shape[0]).astype(np.float32)
    want = codes.astype(np.float32) * scale[:, None] * np.float32(7.874015718698502e-3)
    return Made("bitsandbytes", {"codes": codes, "SCB": scale}, want)


@st.composite
def mlx(draw: Draw) -> Made:
    """Rows in groups, each with a scale and a bias, or with an exponent; of any number of bits."""
    rng, rows = rng_of(draw), tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    mode = draw(st.sampled_from(["affine", "mxfp4", "mxfp8", "nvfp4"]))
    bits, size = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}.get(mode, (0, 0))
    if mode == "affine":
        bits, size = draw(st.sampled_from([2, 3, 4, 5, 6, 8])), draw(st.sampled_from([32, 64]))
    small = *rows, draw(st.integers(1, 4))
    shape = *rows, small[-1] * size
    block = (*(1 for _ in rows), size)
    codes = rng.integers(0, 1 << bits, shape)
    if mode == "affine":
        dtypes = st.sampled_from([np.float16, BF16])
        scale, bias = (small_scales(rng, small, draw(dtypes)) for _ in "ab")
        parts = {"scales": scale, "biases": bias}
        want = affine(codes, 0, spread(scale, block, shape))
        want += spread(bias.astype(np.float32), block, shape)
    else:
        table = np.array(E2M1 + [-x for x in E2M1], np.float32)
        if mode == "mxfp8":
            codes = rng.normal(size=shape).astype(FP8).view(np.uint8).astype(np.int64)
            table = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
        parts = {"scales": rng.integers(90, 160, small).astype(np.uint8)}
        scale = np.ldexp(np.float32(1), parts["scales"].astype(np.int32) - 127)
        if mode == "nvfp4":
            parts["scales"] = small_scales(rng, small, FP8).view(np.uint8)
            scale = parts["scales"].view(FP8).astype(np.float32)
        want = table[codes] * spread(scale, block, shape)
    parts["codes"] = packed(codes, bits, len(rows), np.uint32)
    said = {"group_size": size, "bits": bits, "mode": mode}
    if draw(st.booleans()):  # settings of the module, beside those for all
        said = {"group_size": 128, "bits": 5, "w": said}
    return Made("MLX", parts, want, said)


@st.composite
def torchao(draw: Draw) -> Made:
    rng, block = rng_of(draw), (draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    small = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    shape = small[0] * block[0], small[1] * block[1]
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    zero = rng.integers(-128, 128, small).astype(np.int8)
    scale = small_scales(rng, small, BF16)
    want = affine(codes, spread(zero.astype(np.float32), block, shape), spread(scale, block, shape))
    said = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": list(block)}}
    said["_tensor_data_names"] = ["qdata", "scale", "zero_point"]
    parts = {"codes": codes, "scale": scale, "zero_point": zero}
    return Made("torchao", parts, want, said=said)


@st.composite
def tiled_nvfp4(draw: Draw) -> Made:
    """torchao: NVFP4 whose scales are in tiles of 128 rows and 4 columns."""
    rng = rng_of(draw)
    shape = draw(st.integers(1, 300)), 16 * draw(st.integers(1, 9))
    codes = rng.integers(0, 16, shape)
    table = np.array(E2M1 + [-x for x in E2M1], np.float32)
    small = shape[0], shape[1] // 16
    scale = rng.uniform(0.1, 400, small).astype(FP8)
    factor = rng.uniform(0.1, 3, ()).astype(np.float32)
    rows, columns = -(-small[0] // 128), -(-small[1] // 4)
    tiles = np.zeros((rows, columns, 512), FP8)
    for row, column in np.ndindex(small):
        at = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        tiles[row // 128, column // 4, at] = scale[row, column]
    want = table[codes] * spread(scale.astype(np.float32) * factor, (1, 16), shape)
    scale = tiles.reshape(32 * rows, 16 * columns)
    parts = {"codes": packed(codes, 4, 1, np.uint8), "scale": scale, "per_tensor_scale": factor}
    said = {"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": True}}
    said["_tensor_data_names"] = ["qdata", "scale", "per_tensor_scale"]
    return Made("torchao", parts, want, said=said)


@st.composite
def ggml(draw: Draw) -> Made:
    """Rows of ggml's blocks, of any of its types; also of experts in one array."""
    rng, type = rng_of(draw), draw(st.sampled_from(sorted(gguf_writer.BLOCKS)))
    rows = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=2)))
    stored = gguf_writer.random_blocks(rng, type, rows, draw(st.integers(1, 3)))
    want = gguf_writer.values_of(type, stored)
    return Made("", {"codes": stored}, want, scheme=f"ggml {type}")


@st.composite
def modelopt(draw: Draw) -> Made:
    algos = ["FP8", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"]
    rng, algo = rng_of(draw), draw(st.sampled_from(algos))
    shape = draw(SIZES), 32 * draw(st.integers(1, 3))
    codes = rng.normal(size=shape).astype(FP8)
    said: dict[str, Any] = {"quant_algo": algo}
    small = {"FP8": (1, 1), "FP8_PER_CHANNEL_PER_TOKEN": (shape[0], 1)}.get(algo)
    if small:
        scale = small_scales(rng, small, np.float32)
        stored = scale.reshape(shape[0] if small[0] > 1 else ())
    elif algo == "FP8_BLOCK_SCALES":
        shape = draw(st.sampled_from([1, 64, 128, 200, 256])), draw(st.sampled_from([96, 256]))
        codes = rng.normal(size=shape).astype(FP8)
        stored = small_scales(rng, [-(-n // 128) for n in shape], np.float32)
        scale = spread(stored, (128, 128), shape)
        if draw(st.booleans()):
            stored = stored[:, None, :, None]
    else:
        stored = rng.integers(90, 160, (shape[0], shape[1] // 32)).astype(np.uint8)
        exponents = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        scale = spread(exponents, (1, 32), shape)
    parts = {"codes": codes, "scale": stored}
    if draw(st.booleans()):  # settings of the module, beside those of others
        others = {"v": {"quant_algo": "NVFP4", "group_size": 16}}
        said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {**others, "w": said}}
    return Made("modelopt", parts, affine(codes, 0, scale), said)


@st.composite
def modelopt_nvfp4(draw: Draw) -> Made:
    rng, shape = rng_of(draw), (draw(SIZES), 16 * draw(st.integers(1, 4)))
    codes = rng.integers(0, 16, shape)
    table = np.array(E2M1 + [0.0] + [-x for x in E2M1[1:]], np.float32)
    small = shape[0], shape[1] // 16
    parts = {"codes": packed(codes, 4, 1, np.uint8)}
    parts["scale"] = rng.uniform(0.1, 400, small).astype(FP8)
    parts["scale_2"] = rng.uniform(0.001, 3, ()).astype(np.float32)
    scale = parts["scale"].astype(np.float32) * parts["scale_2"]
    want = table[codes] * spread(scale, (1, 16), shape)
    return Made("modelopt", parts, want, {"quant_algo": "NVFP4", "group_size": 16})


SCHEMES = {
    "block fp8": block_fp8(),
    "fp4 of DeepSeek": fp4_experts(),
    "row fp8": row_fp8(),
    "packed integers": packed_integers(),
    "NVFP4 and MXFP4": few_bits(),
    "plain codes": plain_codes(),
    "numbers with scales": dense(),
    "gpt-oss": gpt_oss(),
    "GPTQ": gptq(),
    "ggml": ggml(),
    "AWQ": awq(),
    "MLX": mlx(),
    "bitsandbytes, 4 bits": runs_of_four_bits(),
    "bitsandbytes, int8": rows_of_int8(),
    "ModelOpt": modelopt(),
    "ModelOpt, NVFP4": modelopt_nvfp4(),
    "torchao": torchao(),
    "torchao, in tiles": tiled_nvfp4(),
}
