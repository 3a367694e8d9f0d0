"""A torch trainer's checkpoint into JAX, beside the tool that its trainer comes with.

The Python with torch needs deepspeed and megatron-core too: it makes the checkpoints, in the folder of work, where they
stay for the next time. Every contestant is a process of its own, so what it takes includes starting: importing torch or
JAX. `cp` reads and writes the source's bytes once, and in its second row waits for the disk, as a conversion does; a
restore needs fewer bytes than a conversion, and writes none. What a restore takes where JAX has started is in tables of
its own, beside one copy of the bytes that it needs.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ucp
from benchmarks.child import ChildSample, folder_bytes, run_child
from benchmarks.limit import copy_in, write_flat
from benchmarks.race import Contestant, Options, Table, compared, race

HERE = Path(__file__).parent
COMMON = HERE.parent / "tests/data/megatron/dist_tp1_pp1_fp32/ckpt/iter_0000003/common.pt"
OURS, RESTORED = "jax-ucp convert", "jax_ucp, open and restore onto 8 devices"
LAYERS, HIDDEN, RANKS = "12", "1024", "2"

# Every array in 8 parts on its first axis, where that divides; replicated elsewhere.
RESTORE = """
import sys, jax, numpy as np, jax_ucp
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
jax.block_until_ready(jax_ucp.open(sys.argv[1]).restore(mesh=mesh, rules=[("", jax.sharding.PartitionSpec("all"))]))
"""
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def run(options: Options) -> Iterator[Table]:
    """DeepSpeed ZeRO-1 and 3 beside ds_to_universal, Megatron's torch_dist beside megatron-core's load, FSDP2's DCP
    beside torch's load.
    """
    if not options.torch_python:
        raise RuntimeError("the peers of this benchmark need --torch-python")
    options.work.mkdir(parents=True, exist_ok=True)
    python = options.torch_python
    for stage in ("1", "3"):
        source = options.work / f"deepspeed_zero{stage}"
        _make([python, str(HERE / "deepspeed_worker.py"), str(source), stage, LAYERS, HIDDEN, RANKS], source)
        tag, universal = source / (source / "latest").read_text().strip(), options.work / "ds_universal"
        peer = [python, "-m", "deepspeed.checkpoint.ds_to_universal"]
        peer += ["--input_folder", str(tag), "--output_folder", str(universal)]
        yield from _compete(f"DeepSpeed ZeRO-{stage}, bf16, AdamW", source, "ds_to_universal", peer, universal, options)

    source, worker = options.work / "megatron", str(HERE / "megatron_worker.py")
    _make([python, worker, "save", str(source), str(COMMON), LAYERS, HIDDEN, RANKS], source)
    peer = [python, worker, "load", str(next(source.glob("iter_*"))), LAYERS, HIDDEN]
    name = "megatron.core.dist_checkpointing.load"
    yield from _compete("Megatron torch_dist, fp32, Adam", source, name, peer, None, options)

    source, worker = options.work / "dcp", str(HERE / "dcp_worker.py")
    _make([python, worker, "save", str(source), LAYERS, HIDDEN, RANKS], source)
    peer = [python, worker, "load", str(source), RANKS]
    name = f"torch.distributed.checkpoint.load, {RANKS} processes"
    yield from _compete("PyTorch DCP of FSDP2, fp32, AdamW", source, name, peer, None, options)


def _make(command: list[str], folder: Path) -> None:
    """Let a peer write a checkpoint to `folder`, unless it is there."""
    if not folder.exists():
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _compete(
    what: str, source: Path, name: str, peer: list[str], writes: Path | None, options: Options
) -> Iterator[Table]:
    copied, converted = options.work / "copied", options.work / "converted"
    convert = [sys.executable, "-m", "jax_ucp", "convert", str(source), str(converted)]
    restore = [sys.executable, "-c", RESTORE, str(source)]
    copy = f"cp -r {source} {copied}"
    contestants = [
        Contestant("limit: cp -r", lambda _: run_child(["sh", "-c", copy], copied)),
        Contestant("limit: cp -r, synced", lambda _: run_child(["sh", "-c", f"{copy} && sync -f {copied}"], copied)),
        Contestant(OURS, lambda _: run_child(convert, converted)),
        Contestant("jax_ucp, straight onto 8 devices", lambda _: run_child(restore, **DEVICES)),
        Contestant(name, lambda _: run_child(peer, writes)),
    ]
    samples = race(contestants, options.runs)
    title = f"{what}, {RANKS} ranks, {folder_bytes(source) / (1 << 20):,.0f} MiB"
    table = compared(title, samples, OURS)
    rows = {who: {**row, **_more(samples[who])} for who, row in table.rows.items()}
    yield Table(title, rows, samples=samples)
    yield _started(f"{what}, {RANKS} ranks, in a process that has started", source, options)


def _started(title: str, source: Path, options: Options) -> Table:
    """Opening and restoring, without starting Python and JAX."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("all",))
    rules = [("", PartitionSpec("all"))]
    nbytes = jax_ucp.open(source).plan(mesh=mesh, rules=rules).read_bytes
    flat = write_flat(options.work / "flat", nbytes)

    def restore(checkpoint: jax_ucp.Checkpoint) -> object:
        return jax.block_until_ready(checkpoint.restore(mesh=mesh, rules=rules))

    contestants = [
        Contestant("limit: one copy of the bytes", lambda _: copy_in(flat)),
        Contestant(RESTORED, lambda _: restore(jax_ucp.open(source))),
        Contestant("jax_ucp, restore alone", restore, functools.partial(jax_ucp.open, source)),
    ]
    samples = race(contestants, options.runs)
    flat.unlink()
    return compared(f"{title}, {nbytes / (1 << 20):,.0f} MiB needed", samples, RESTORED)


def _more(samples: list[ChildSample]) -> dict[str, int]:
    return {
        "peak MiB": round(statistics.median(sample.memory_mib for sample in samples)),
        "spare disk MiB": round(statistics.median(sample.spare_disk_mib for sample in samples)),
    }
