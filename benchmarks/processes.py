"""One state in one, two and four processes that share eight devices: saved by rows, restored by
rows and by columns, and by processes that have restored nothing before.
"""

from __future__ import annotations

import math
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.group import Group, GroupSample
from benchmarks.limit import copy_in, copy_out, write_flat
from benchmarks.peers import OURS, fresh
from benchmarks.race import Contestant, Options, Table, compared, race

ARRAYS = 64
PROCESSES = (1, 2, 4)
PEERS = (
    OURS,
    "Orbax v0, default",
    "Orbax v0, no compression",
    "Orbax v0, no compression, no OCDBT",
)


def run(options: Options) -> Iterator[Table]:
    options.work.mkdir(parents=True, exist_ok=True)
    side = math.isqrt(options.mib * (1 << 20) // ARRAYS // 4) // 16 * 16
    nbytes = 4 * ARRAYS * side * side
    title = f"{ARRAYS} arrays, {nbytes / (1 << 20):,.0f} MiB"
    flat, data = options.work / "flat", np.ones(nbytes, np.uint8)
    paths = {peer: options.work / f"peer_{i}" for i, peer in enumerate(PEERS)}
    for count in PROCESSES:
        with Group(_commands(count)) as group:

            def asked(peer: str, do: str, axis: int, group: Group = group) -> GroupSample:
                return group.ask(do=do, peer=peer, path=str(paths[peer]), axis=axis, side=side)

            of = f"in {count} process{'es' * (count > 1)}: {title}"
            contestants = [
                Contestant("limit: one copy of the bytes, synced", lambda _: copy_out(data, flat))
            ]
            for peer in PEERS:
                contestants.append(
                    Contestant(
                        peer,
                        lambda _, peer=peer: asked(peer, "save", 0),
                        lambda peer=peer: fresh(paths[peer]),
                    )
                )
            yield compared(f"Save {of}", race(contestants, options.runs), OURS)
            write_flat(flat, nbytes)
            for axis, onto in enumerate(("the same devices", "the same devices, transposed")):
                contestants = [Contestant("limit: one copy of the bytes", lambda _: copy_in(flat))]
                for peer in PEERS:
                    contestants.append(
                        Contestant(
                            peer, lambda _, peer=peer, axis=axis: asked(peer, "restore", axis)
                        )
                    )
                samples = race(contestants, options.runs)
                table = compared(f"Restore onto {onto}, {of}", samples, OURS)
                rows = {who: {**row, **_reads(samples[who])} for who, row in table.rows.items()}
                yield Table(table.title, rows, samples=samples)

    def first(peer: str) -> GroupSample:
        with Group(_commands(1)) as group:
            return group.ask(do="restore", peer=peer, path=str(paths[peer]), axis=0, side=side)

    contestants = [Contestant(peer, lambda _, peer=peer: first(peer)) for peer in PEERS]
    yield compared(
        f"The first restore of a process: {title}", race(contestants, options.runs), OURS
    )


def _commands(count: int) -> list[list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = [sys.executable, "-m", "benchmarks.process_worker"]
    return [[*worker, str(rank), str(count), str(port)] for rank in range(count)]


def _reads(samples: Sequence[object]) -> dict[str, str]:
    """Bytes read over bytes needed of each process, the medians of its runs."""
    answers = [sample.answers for sample in samples if isinstance(sample, GroupSample)]
    ratios = [
        statistics.median(each["read"] / each["needed"] for each in rank)
        for rank in zip(*answers, strict=True)
    ]
    return (
        {"read / needed, by process": ", ".join(f"{ratio:.3f}" for ratio in ratios)}
        if ratios
        else {}
    )
