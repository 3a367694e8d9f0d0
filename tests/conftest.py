import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
# Files of tests are in memory where there is room: disks took a tenth of the CPU, and waits.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("TMPDIR", "/dev/shm")
    tempfile.tempdir = None  # pytest has asked where it is before

from importlib.metadata import version

import pytest
from hypothesis import settings

# Programs that tests start in processes of their own, and one that needs torch to write cases anew.
collect_ignore = ["data", "generators", "workers", "write_pairing_cases.py"]

settings.register_profile("default", deadline=None, max_examples=100)
settings.register_profile("fast", deadline=None, max_examples=30)

pytest_plugins = ["servers.fixtures"]

TESTS = Path(__file__).parent

# Integers, texts and small files in memory: under a minute in all.
FAST = ("layout/", "shard_spec/", "mapping/", "arrays/", "universal/", "files/")
FAST += tuple(f"hostile/test_{name}.py" for name in ("servers", "visible", "yaml"))
# Of these folders, checkpoints of thousands of arrays, of every format, or of whole models.
DEFAULT = tuple(f"universal/test_{name}.py" for name in ("small_arrays", "copy", "links"))
DEFAULT += ("files/test_copying.py",)
DEFAULT += tuple(
    f"mapping/test_{name}.py"
    for name in (
        "chains",
        "config_keys",
        "mappings",
        "packed_experts",
        "text_of_vision_models",
        "vision_towers",
    )
)
# Campaigns: kills, faults, hostile inputs, mistakes.
SLOW = ("export/test_export_faults.py", "test_faults.py", "hostile/test_fuzz.py")
SLOW += ("test_save_faults.py", "test_temptations.py", "hostile/test_growth.py")
# What whole conversions take, by several processes and into buckets.
SLOW += ("test_memory.py", "formats/quantized/test_memory.py", "test_linear.py", "test_clusters.py")
SLOW += ("export/test_export_shares.py", "universal/test_shares.py", "remote/test_exports.py")
# Whole runs: training that is resumed, several processes, pages and notebooks that are executed.
SLOW += ("test_examples.py", "test_processes.py", "test_reference_transformer.py")
SLOW += ("test_notebooks.py", "test_screens.py", "test_tutorials.py", "test_docs_migrating.py")
SLOW += ("remote/test_managers.py",)

ORBAX = tuple(map(int, version("orbax-checkpoint").split(".")[:2]))


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., dict[str, Any]]]:
    """What stock Orbax makes of a path, in a process without jax_ucp: `arrays` or `error`."""
    command = [sys.executable, "-W", "ignore", str(TESTS / "workers" / "stock.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def restore(path: Path, mesh: Sequence[int] = (), api: str = "v0") -> dict[str, Any]:
            asked = {"path": str(path), "mesh": mesh, "api": api}
            print(json.dumps(asked), file=asks, flush=True)
            return json.loads(answers.readline())

        yield restore
        asks.close()


@pytest.fixture(scope="module")
def unoptimized() -> Iterator[None]:
    """XLA compiles models that are run once in half the time if it optimises little."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in the fast lane; say what older releases of Orbax leave behind."""
    settings.load_profile("fast" if config.option.markexpr == "fast" else "default")
    if ORBAX < (0, 12):  # event loops that are not closed
        for kind in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@functools.cache
def lane_of(path: Path) -> str:
    """The lane of the tests in a file: `fast`, `slow`, or none of these."""
    place = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    if place.startswith(SLOW):
        return "slow"
    return "fast" if place.startswith(FAST) and place not in DEFAULT else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file is of another lane than the one that is asked for: to import it takes long."""
    if collection_path.suffix != ".py":
        return None
    lane, asked = lane_of(collection_path), config.option.markexpr
    return (asked == "fast" and lane != "fast") or (asked == "not slow" and lane == "slow") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in its lane, by the file that it is in; the slow lane comes first, then files
    by their number of tests: workers take whole files, and those at the end should be short.
    """
    tests = Counter(item.path for item in items)
    for item in items:
        if lane := lane_of(item.path):
            item.add_marker(getattr(pytest.mark, lane))
    items.sort(key=lambda item: (not item.get_closest_marker("slow"), -tests[item.path]))


def pytest_collection_finish() -> None:
    """Keep modules and tests out of the garbage collector, which else spends a tenth of the CPU on
    looking through them.
    """
    gc.collect()
    gc.freeze()
