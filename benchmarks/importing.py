"""A torch trainer's checkpoint into JAX, beside the tool that its trainer comes with.

The Python with torch needs deepspeed and megatron-core too: it makes the checkpoints, in the folder
of work, where they stay for the next time. Every contestant is a process of its own, so what it
takes includes starting: importing torch or JAX. `cp` reads and writes the source's bytes once, and
in its second row waits for the disk, as a conversion does; a restore needs fewer bytes than a
conversion, and writes none. What a restore takes where JAX has started is in tables of its own,
beside one copy of the bytes that it needs; and what of that its proofs take, in others: the same
restore without them, with a sample of all that is stored twice compared, which is the default, and
with all of it compared.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ucp
from benchmarks.child import ChildSample, folder_bytes, run_child
from benchmarks.limit import copy_in, write_flat
from benchmarks.race import Contestant, Options, Table, compared, race
from jax_ucp.arrays.checks import Extent
from jax_ucp.arrays.contents import Contents

HERE = Path(__file__).parent
CASES = HERE.parent / "tests/data/megatron"
COMMON = CASES / "dist_tp1_pp1_fp32/ckpt/iter_0000003/common.pt"
COMMON_BF16 = CASES / "dist_tp2_pp1_bf16/ckpt/iter_0000003/common.pt"
OURS, RESTORED = "jax-ucp convert", "jax_ucp, open and restore onto 8 devices"
UNPROVED, SAMPLED, FULL = (
    "restored without a proof",
    "a sample compared",
    "all compared, and summed",
)
# What a sample takes is little beside what other programs on the machine take: so many runs tell
# them apart.
PROOF_RUNS = 31
LAYERS, HIDDEN, RANKS = "12", "1024", "2"

# Every array in 8 parts on its first axis, where that divides; replicated elsewhere.
RESTORE = """
import sys, jax, numpy as np, jax_ucp
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
rules = [("", jax.sharding.PartitionSpec("all"))]
jax.block_until_ready(jax_ucp.open(sys.argv[1]).restore(mesh=mesh, rules=rules))
"""
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def run(options: Options) -> Iterator[Table]:
    """DeepSpeed ZeRO-1 and 3 beside ds_to_universal, Megatron's torch_dist beside megatron-core's
    load, FSDP2's DCP beside torch's load.
    """
    if not options.torch_python:
        raise RuntimeError("the peers of this benchmark need --torch-python")
    options.work.mkdir(parents=True, exist_ok=True)
    python = options.torch_python
    for stage in ("1", "3"):
        source = options.work / f"deepspeed_zero{stage}"
        _make(
            [python, str(HERE / "deepspeed_worker.py"), str(source), stage, LAYERS, HIDDEN, RANKS],
            source,
        )
        tag, universal = (
            source / (source / "latest").read_text().strip(),
            options.work / "ds_universal",
        )
        peer = [python, "-m", "deepspeed.checkpoint.ds_to_universal"]
        peer += ["--input_folder", str(tag), "--output_folder", str(universal)]
        yield from _compete(
            f"DeepSpeed ZeRO-{stage}, bf16, AdamW",
            source,
            "ds_to_universal",
            peer,
            universal,
            options,
        )

    source, worker = options.work / "megatron", str(HERE / "megatron_worker.py")
    _make([python, worker, "save", str(source), str(COMMON), "fp32", LAYERS, HIDDEN, RANKS], source)
    peer = [python, worker, "load", str(next(source.glob("iter_*"))), LAYERS, HIDDEN]
    name = "megatron.core.dist_checkpointing.load"
    yield from _compete("Megatron torch_dist, fp32, Adam", source, name, peer, None, options)
    source = options.work / "megatron_bf16"
    _make(
        [python, worker, "save", str(source), str(COMMON_BF16), "bf16", LAYERS, HIDDEN, RANKS],
        source,
    )
    yield _proved(f"Megatron torch_dist, bf16 with masters, {RANKS} ranks", source, options)

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
        Contestant(
            "limit: cp -r, synced",
            lambda _: run_child(["sh", "-c", f"{copy} && sync -f {copied}"], copied),
        ),
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
    yield _proved(f"{what}, {RANKS} ranks", source, options)


def _started(title: str, source: Path, options: Options) -> Table:
    """Opening and restoring, without starting Python and JAX."""
    nbytes = jax_ucp.open(source).plan(**_onto_8_devices()).read_bytes
    flat = write_flat(options.work / "flat", nbytes)
    contestants = [
        Contestant("limit: one copy of the bytes", lambda _: copy_in(flat)),
        Contestant(RESTORED, lambda _: _restore(jax_ucp.open(source))),
        Contestant("jax_ucp, restore alone", _restore, functools.partial(jax_ucp.open, source)),
    ]
    samples = race(contestants, options.runs)
    flat.unlink()
    return compared(f"{title}, {nbytes / (1 << 20):,.0f} MiB needed", samples, RESTORED)


def _proved(title: str, source: Path, options: Options) -> Table:
    """What proofs take of a restore: medians over those of a restore that proves nothing, which
    no user can ask for.
    """
    contestants = [
        Contestant(UNPROVED, _restore, lambda: _unproved(jax_ucp.open(source))),
        Contestant(SAMPLED, _restore, lambda: jax_ucp.open(source)),
        Contestant(FULL, functools.partial(_restore, verify="full"), lambda: jax_ucp.open(source)),
    ]
    samples = race(contestants, max(options.runs, PROOF_RUNS))
    contents = jax_ucp.open(source)._contents
    nbytes = {
        UNPROVED: 0,
        SAMPLED: _proof_bytes(contents, "sample"),
        FULL: _proof_bytes(contents, "full"),
    }
    walls, cpus = (
        {
            who: statistics.median(getattr(sample, name) for sample in some)
            for who, some in samples.items()
        }
        for name in ("wall_s", "cpu_s")
    )
    rows = {
        who: {
            "wall s": round(walls[who], 4),
            "CPU s": round(cpus[who], 4),
            "wall / without": round(walls[who] / walls[UNPROVED], 3),
            "CPU / without": round(cpus[who] / cpus[UNPROVED], 3),
            "KiB read to prove": round(nbytes[who] / 1024),
        }
        for who in samples
    }
    return Table(f"{title}, what proofs cost", rows, samples=samples)


def _unproved(checkpoint: jax_ucp.Checkpoint) -> jax_ucp.Checkpoint:
    return jax_ucp.Checkpoint(replace(checkpoint._contents, claims=()))


def _proof_bytes(contents: Contents, extent: Extent) -> int:
    return sum(
        check.nbytes for check in contents.proofs({leaf.name for leaf in contents.leaves}, extent)
    )


def _onto_8_devices() -> dict[str, Any]:
    return {
        "mesh": Mesh(np.array(jax.devices()[:8]), ("all",)),
        "rules": [("", PartitionSpec("all"))],
    }


def _restore(checkpoint: jax_ucp.Checkpoint, **options: Any) -> object:
    return jax.block_until_ready(checkpoint.restore(**_onto_8_devices(), **options))


def _more(samples: list[ChildSample]) -> dict[str, int]:
    return {
        "peak MiB": round(statistics.median(sample.memory_mib for sample in samples)),
        "spare disk MiB": round(statistics.median(sample.spare_disk_mib for sample in samples)),
    }
