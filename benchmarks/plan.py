"""A trillion parameters with optimizer, planned from 4,096 to 16,384 devices and back, on one
core.
"""

from __future__ import annotations

import functools
import math
import resource
import time
from collections.abc import Iterator

from benchmarks.race import Options, Table
from jax_ucp.layout.blocks import Chunks, chunk_shapes
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.reads import HostMesh, Stored, planned_cell, planned_reads
from jax_ucp.tree import Axes

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


@functools.lru_cache(maxsize=1024)
def saved_chunks(shape: tuple[int, ...], spec: tuple[Axes, ...], mesh: HostMesh) -> Chunks:
    """The chunks that a save from the mesh writes."""
    return chunk_shapes(shape, ITEMSIZE, planned_cell(shape, ITEMSIZE, spec, mesh))


def run(options: Options) -> Iterator[Table]:
    rows: dict[str, dict[str, object]] = {}
    for source, target in ((4096, 16_384), (16_384, 4096)):
        begun, cpu = time.perf_counter(), time.process_time()
        arrays, elements = [], 0
        for shape, spec in parameters():
            parts = fit_spec(spec, shape, MESHES[source].sizes).spec
            chunks = saved_chunks(shape, parts, MESHES[source])
            arrays += [
                Stored(shape, ITEMSIZE, chunks, fit_spec(spec, shape, MESHES[target].sizes).spec)
            ] * STATES
            elements += math.prod(shape)
        reads = planned_reads(arrays, MESHES[target])
        rows[f"{source:,} to {target:,} devices"] = {
            "parameters": f"{elements / 1e12:.2f}e12",
            "arrays": len(arrays),
            "TB": round(elements * STATES * ITEMSIZE / 1e12, 1),
            "GiB needed per host": round(float(reads.needed.mean()) / (1 << 30), 2),
            "read / needed": round(reads.amplification, 3),
            "files per host": int(reads.files.mean()),
            "most / mean": round(reads.balance, 3),
            "plan wall s": round(time.perf_counter() - begun, 1),
            "plan CPU s": round(time.process_time() - cpu, 1),
            "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
    yield Table("A trillion parameters with optimizer, planned", rows)
