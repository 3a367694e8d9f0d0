"""Contestants in turn, in one process, and what they took: medians, ratios, JSON and a Markdown
table.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy", "safetensors")

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Options:
    """What every benchmark is told: where it may write, how often each contestant runs, and who
    the peers are.
    """

    work: Path
    runs: int = 5
    torch_python: str | None = None
    mib: int = 1024
    counts: Sequence[int] = ()
    ones: bool = False


@dataclass(frozen=True)
class Sample:
    """Seconds of wall clock and of CPU that one run took, and its page faults where they were
    counted: pages of memory that the process touched first, of 4 KiB or huge.
    """

    wall_s: float
    cpu_s: float
    page_faults: int | None = field(default=None, kw_only=True)

    def since(self, begin: Sample) -> Sample:
        """What passed between two readings of `now`."""
        faults = (self.page_faults or 0) - (begin.page_faults or 0)
        return Sample(self.wall_s - begin.wall_s, self.cpu_s - begin.cpu_s, page_faults=faults)


def now() -> Sample:
    """The clocks and the counter of this process."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Sample(time.perf_counter(), time.process_time(), page_faults=faults)


@dataclass(frozen=True)
class Contestant:
    """One way to do the thing measured.

    `run` is timed, unless it returns the Sample that another process took; `prepare` is called
    before every run, and its result given to `run`; it is not timed.
    """

    name: str
    run: Callable[[Any], Sample | object]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Table:
    """What a benchmark found. A row is a contestant's figures by column; `notes` say what a
    reader must know.
    """

    title: str
    rows: Mapping[str, Mapping[str, object]]
    notes: Sequence[str] = ()
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


def race(
    contestants: Sequence[Contestant], runs: int, touched_bytes: int = 0
) -> dict[str, list[Sample]]:
    """Every contestant once, and again, so that what else the machine does falls on all. The
    first round warms.

    Before each run so much memory is touched and given back: a virtual machine then has it, whose
    host takes free memory away and clears it again when it is touched.
    """
    found: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
    for turn in range(runs + 1):
        for contestant in contestants:
            prepared = contestant.prepare()
            _settle()
            _touch(touched_bytes)
            begin = now()
            result = contestant.run(prepared)
            sample = result if isinstance(result, Sample) else now().since(begin)
            del prepared, result
            if turn:
                found[contestant.name].append(sample)
    return found


def _settle() -> None:
    """Nothing that a contestant left, memory freed but kept or files not yet on the disk,
    burdens the next.
    """
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    os.sync()


def _touch(nbytes: int) -> None:
    if not nbytes:
        return
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            pages[at] = 1


def compared(
    title: str, samples: Mapping[str, Sequence[Sample]], ours: str, notes: Sequence[str] = ()
) -> Table:
    """The medians of a race; each contestant's time over ours, in wall clock and in CPU."""
    medians = {
        name: (statistics.median(s.wall_s for s in some), statistics.median(s.cpu_s for s in some))
        for name, some in samples.items()
    }
    our_wall, our_cpu = medians[ours]
    rows = {
        name: {
            "wall s": round(wall, 3),
            "CPU s": round(cpu, 3),
            "wall / ours": round(wall / our_wall, 2),
            "CPU / ours": round(cpu / our_cpu, 2),
            **_page_faults(samples[name]),
        }
        for name, (wall, cpu) in medians.items()
    }
    return Table(title, rows, notes, samples)


def _page_faults(samples: Sequence[Sample]) -> dict[str, int]:
    counted = [s.page_faults for s in samples if s.page_faults is not None]
    return {"page faults": round(statistics.median(counted))} if counted else {}


def write(name: str, tables: Sequence[Table], options: Options) -> str:
    """Write `name.json` and `name.md` to the folder of work; the Markdown."""
    about = {
        **machine(),
        "runs": options.runs,
        "warm": "page cache warm: the first round is not counted",
    }
    content = {"about": about, "tables": [asdict(table) for table in tables]}
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / f"{name}.json").write_text(json.dumps(content, indent=1))
    text = "\n\n".join([f"{name}: {_sentence(about)}", *map(_markdown, tables)]) + "\n"
    (options.work / f"{name}.md").write_text(text)
    return text


def machine() -> dict[str, Any]:
    """The machine and the versions that figures belong to."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "cores": os.cpu_count(),
        "memory GiB": memory,
        "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _sentence(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items())


def _markdown(table: Table) -> str:
    columns = list(dict.fromkeys(column for row in table.rows.values() for column in row))
    lines = [
        f"**{table.title}**",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in table.rows.items():
        lines.append(
            f"| {name} | " + " | ".join(str(row.get(column, "")) for column in columns) + " |"
        )
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])
