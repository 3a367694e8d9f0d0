"""Quantised weights as bfloat16, or float16 where scales are: gigabytes of result a second on one
thread, for each scheme, beside the library whose rule it is.

Codes and scales are random, in files in the page cache; both read them from the file.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jax_ucp
from benchmarks.race import Contestant, Options, Sample, Table, now, race
from jax_ucp.formats.safetensors.reader import DTYPES

WORKER = Path(__file__).with_name("quantized_worker.py")
BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_RNG = np.random.default_rng(0)
Made = tuple[dict[str, np.ndarray], dict[str, Any]]


def _codes(dtype: Any, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return _RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def _scales(dtype: Any, *shape: int) -> np.ndarray:
    return _RNG.uniform(0.001, 2, shape).astype(dtype)


def _group(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def block_fp8(n: int) -> Made:
    codes = _RNG.standard_normal((n, n), np.float32).astype(FP8)
    parts = {"w.weight": codes, "w.weight_scale_inv": _scales(np.float32, n // 128, n // 128)}
    return parts, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def ct_int8(n: int) -> Made:
    parts = {"w.weight": _codes(np.int8, n, n), "w.weight_scale": _scales(BF16, n, 1)}
    said = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return parts, _group("int-quantized", **said)


def ct_int4(n: int) -> Made:
    parts = {
        "w.weight_packed": _codes(np.int32, n, n // 8),
        "w.weight_scale": _scales(BF16, n, n // 128),
        "w.weight_shape": np.array([n, n]),
    }
    said = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return parts, _group("pack-quantized", **said, group_size=128)


def ct_nvfp4(n: int) -> Made:
    parts = {
        "w.weight_packed": _codes(np.uint8, n, n // 2),
        "w.weight_scale": _scales(FP8, n, n // 16),
        "w.weight_global_scale": _scales(np.float32, 1),
    }
    said = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
    return parts, _group("nvfp4-pack-quantized", **said, group_size=16)


def mxfp4(n: int) -> Made:
    scales = _RNG.integers(100, 140, (1, n, n // 32), np.uint8)
    parts = {"w_blocks": _codes(np.uint8, 1, n, n // 32, 16), "w_scales": scales}
    return parts, {"quant_method": "mxfp4"}


def gptq(n: int) -> Made:
    parts = {
        "w.qweight": _codes(np.int32, n // 8, n),
        "w.qzeros": _codes(np.int32, n // 128, n // 8),
        "w.scales": _scales(np.float16, n // 128, n),
        "w.g_idx": (np.arange(n) // 128).astype(np.int32),
    }
    return parts, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}


def awq(n: int) -> Made:
    parts = {
        "w.qweight": _codes(np.int32, n, n // 8),
        "w.qzeros": _codes(np.int32, n // 128, n // 8),
        "w.scales": _scales(np.float16, n // 128, n),
    }
    return parts, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def bnb_nf4(n: int) -> Made:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, n]}
    parts = {
        "w.weight": _codes(np.uint8, n * n // 2, 1),
        "w.weight.absmax": _scales(np.float32, n * n // 64),
        "w.weight.quant_map": _scales(np.float32, 16),
        "w.weight.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }
    return parts, {"quant_method": "bitsandbytes", "load_in_4bit": True}


SCHEMES: Mapping[str, tuple[Callable[[int], Made], str]] = {
    "fp8 in blocks": (block_fp8, "bfloat16"),
    "compressed-tensors int8": (ct_int8, "bfloat16"),
    "compressed-tensors int4": (ct_int4, "bfloat16"),
    "compressed-tensors NVFP4": (ct_nvfp4, "bfloat16"),
    "MXFP4": (mxfp4, "bfloat16"),
    "GPTQ": (gptq, "float16"),
    "AWQ": (awq, "float16"),
    "bitsandbytes nf4": (bnb_nf4, "bfloat16"),
}


def run(options: Options) -> Iterator[Table]:
    n = max(512, int((options.mib << 20) ** 0.5 / 1.5) // 512 * 512)
    for title, (make, dtype) in SCHEMES.items():
        folder = options.work / make.__name__
        _write(folder, *make(n))
        contestants = [Contestant("jax_ucp", lambda _, f=folder, d=dtype: _ours(f, d))]
        if options.torch_python:
            python = options.torch_python
            contestants.append(
                Contestant("its library", lambda _, f=folder, p=python: _theirs(p, f))
            )
        samples = race(contestants, options.runs)
        rows = {name: _row(found, 2 * n * n) for name, found in samples.items()}
        yield Table(f"{title}, {n} x {n} to {dtype}", rows, samples=samples)


def _ours(folder: Path, dtype: Any) -> Sample:
    """The second of two in one process, as the library's is."""
    _once(folder, dtype)
    return _once(folder, dtype)


def _once(folder: Path, dtype: Any) -> Sample:
    begin = now()
    checkpoint = jax_ucp.open(folder, dequantize=dtype)
    (leaf,) = checkpoint.leaves
    checkpoint.read(leaf.label)
    return now().since(begin)


def _theirs(python: str, folder: Path) -> Sample:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(WORKER), folder.name, str(folder)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return Sample(**json.loads(text.splitlines()[-1]))


def _row(samples: list[Sample], nbytes: int) -> dict[str, object]:
    best = min(sample.cpu_s for sample in samples)
    return {"CPU s": round(best, 3), "GB/s of result": round(nbytes / best / 1e9, 2)}


def _write(folder: Path, parts: dict[str, np.ndarray], quantization: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, array in parts.items():
        offsets = [end, end + array.nbytes]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in parts.values():
            file.write(array.tobytes())
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
