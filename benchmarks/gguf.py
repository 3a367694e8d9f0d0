"""Tensors of GGUF in each of ggml's types as float32: gigabytes of result a second on one thread,
beside gguf-py.

Blocks are random, in files in the page cache; both read them from the file.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import jax_ucp
from benchmarks.race import Contestant, Options, Sample, Table, now, race
from jax_ucp.formats.gguf.file import IN_BLOCKS
from jax_ucp.formats.quantized.ggml import TYPES

WORKER = Path(__file__).with_name("gguf_worker.py")
_NUMBERS = {name: number for number, (name, _, _) in IN_BLOCKS.items()}


def run(options: Options) -> Iterator[Table]:
    n = max(512, int((options.mib << 20) ** 0.5 / 2) // 512 * 512)
    options.work.mkdir(parents=True, exist_ok=True)
    for type in TYPES:
        file = options.work / f"{type}.gguf"
        _write(file, type, n)
        contestants = [Contestant("jax_ucp", lambda _, f=file: _ours(f))]
        if options.torch_python:
            python = options.torch_python
            contestants.append(Contestant("gguf-py", lambda _, f=file, p=python: _theirs(p, f)))
        samples = race(contestants, options.runs)
        rows = {name: _row(found, 4 * n * n) for name, found in samples.items()}
        yield Table(f"{type}, {n} x {n} to float32", rows, samples=samples)
        file.unlink()


def _ours(file: Path) -> Sample:
    """The second of two in one process, as gguf-py's is."""
    _once(file)
    return _once(file)


def _once(file: Path) -> Sample:
    begin = now()
    jax_ucp.open(file, dequantize="float32").read("param/w")
    return now().since(begin)


def _theirs(python: str, file: Path) -> Sample:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(WORKER), str(file)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return Sample(**json.loads(text.splitlines()[-1]))


def _row(samples: list[Sample], nbytes: int) -> dict[str, object]:
    best = min(sample.cpu_s for sample in samples)
    return {"CPU s": round(best, 3), "GB/s of result": round(nbytes / best / 1e9, 2)}


def _write(file: Path, type: str, n: int) -> None:
    """A file with one matrix, whose floats in blocks are all finite."""
    rule = TYPES[type]
    blocks = np.random.default_rng(0).integers(
        0, 256, (n * n // rule.elements, rule.nbytes), np.uint8
    )
    blocks &= 0xBB  # of no two bytes a float16 that is infinite, and no exponent of 255
    head = struct.pack("<4sIqq", b"GGUF", 3, 1, 0) + struct.pack("<Q", 1) + b"w"
    head += struct.pack("<IqqIQ", 2, n, n, _NUMBERS[type], 0)
    with file.open("wb") as out:
        out.write(head.ljust(-(-len(head) // 32) * 32, b"\0"))
        out.write(blocks.tobytes())
