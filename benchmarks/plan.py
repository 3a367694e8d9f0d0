"""A trillion parameters with optimizer, planned from 4,096 to 16,384 devices and back, on one
core.
"""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.race import Options, Table
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.blocks import chunk_shapes, stack_chunks
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.reads import HostMesh, PlannedArray, planned_cell, planned_reads
from jax_ucp.tree import Axes
from jax_ucp.universal.stacks import stacks_of

STATES, ITEMSIZE = 3, 4  # the parameter and Adam's two moments, in fp32
LAYERS, EXPERTS, EMBED, HIDDEN, HEADS, VOCAB = 96, 384, 6144, 1536, 8192, 131_072
DEVICES_PER_HOST = 8
MESHES = {
    devices: HostMesh.of({"data": data, "fsdp": fsdp, "model": 8}, devices // DEVICES_PER_HOST)
    for devices, data, fsdp in ((4096, 64, 8), (16_384, 128, 16))
}


def parameters() -> Iterator[tuple[tuple[int, ...], tuple[Axes, ...]]]:
    """Shape and wanted spec of every parameter of a mixture of experts, each expert's matrices
    for themselves.
    """
    yield (VOCAB, EMBED), ("model", "fsdp")
    for _ in range(LAYERS):
        yield (EMBED,), (None,)
        yield from [((EMBED, HEADS), ("fsdp", "model"))] * 3
        yield (HEADS, EMBED), ("model", "fsdp")
        yield (EMBED, EXPERTS), ("fsdp", None)
        for _ in range(EXPERTS):
            yield from [((EMBED, HIDDEN), (("fsdp", "data"), "model"))] * 2
            yield (HIDDEN, EMBED), ("model", ("fsdp", "data"))


def saved(mesh: HostMesh) -> Iterator[tuple[PlannedArray, tuple[Axes, ...]]]:
    """How a save from the mesh writes every array, or stack of arrays, and the spec it is wanted
    by.
    """
    alike = Counter(
        (shape, wanted, fit_spec(wanted, shape, mesh.sizes).spec) for shape, wanted in parameters()
    )
    info = {shape: ArrayInfo(shape, np.dtype(np.float32)) for shape, _, _ in alike}
    cells = {(shape, spec): planned_cell(shape, ITEMSIZE, spec, mesh) for shape, _, spec in alike}
    pieces = {
        f"{i} {j}": (info[shape], cells[shape, spec], (shape, wanted, spec))
        for i, ((shape, wanted, spec), count) in enumerate(alike.items())
        for j in range(count * STATES)
    }
    stacks = stacks_of(pieces).values()
    stacked = {pieces[names[0]][2]: len(names) for names in stacks}
    for (shape, wanted, spec), count in alike.items():
        cell = cells[shape, spec]
        if members := stacked.get((shape, wanted, spec)):
            chunks = stack_chunks(members, shape, ITEMSIZE, cell)
            yield PlannedArray(shape, ITEMSIZE, chunks, spec, count=members), wanted
        else:
            chunks = chunk_shapes(shape, ITEMSIZE, cell)
            yield from [(PlannedArray(shape, ITEMSIZE, chunks, spec), wanted)] * (count * STATES)


def _files(stored: PlannedArray) -> int:
    """How many files an array has, or a stack."""
    count = (stored.count,) * stored.chunks.is_stack
    sides = zip((*count, *stored.shape), stored.chunks.outer, strict=True)
    return math.prod(-(-n // c) for n, c in sides)


def run(options: Options) -> Iterator[Table]:
    rows: dict[str, dict[str, object]] = {}
    for source, target in ((4096, 16_384), (16_384, 4096)):
        begun, cpu = time.perf_counter(), time.process_time()
        arrays = [
            replace(stored, spec=fit_spec(wanted, stored.shape, MESHES[target].sizes).spec)
            for stored, wanted in saved(MESHES[source])
        ]
        elements = sum(stored.count * math.prod(stored.shape) for stored in arrays) / STATES
        reads = planned_reads(arrays, MESHES[target])
        rows[f"{source:,} to {target:,} devices"] = {
            "parameters": f"{elements / 1e12:.2f}e12",
            "arrays": sum(stored.count for stored in arrays),
            "files": sum(map(_files, arrays)),
            "TB": round(elements * STATES * ITEMSIZE / 1e12, 1),
            "GiB needed per host": round(float(reads.needed.mean()) / (1 << 30), 2),
            "read / needed": round(reads.amplification, 3),
            "files per host": int(reads.files.mean()),
            "requests per host": int(reads.requests.mean()),
            "most requests": int(reads.requests.max()),
            "most / mean": round(reads.balance, 3),
            "plan wall s": round(time.perf_counter() - begun, 1),
            "plan CPU s": round(time.process_time() - cpu, 1),
            "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
    yield Table("A trillion parameters with optimizer, planned", rows)
