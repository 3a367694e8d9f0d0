import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from importlib.metadata import version

import pytest
from hypothesis import settings

# Programs that tests start in processes of their own, and one that needs torch to write cases anew.
collect_ignore = ["data", "generators", "workers", "write_pairing_cases.py"]

settings.register_profile("default", deadline=None, max_examples=100)
settings.load_profile("default")

pytest_plugins = ["servers.fixtures"]

TESTS = Path(__file__).parent

# Integers, texts and small files in memory: under a minute in all.
FAST = ("layout/", "shard_spec/", "mapping/", "arrays/", "universal/", "files/")
FAST += tuple(f"hostile/test_{name}.py" for name in ("name_patterns", "servers", "visible", "yaml"))
# Campaigns: kills, faults, hostile inputs, mistakes.
SLOW = ("export/test_export_faults.py", "test_faults.py", "hostile/test_fuzz.py")
SLOW += ("test_save_faults.py", "test_temptations.py")
# What whole conversions take.
SLOW += ("test_memory.py", "formats/quantized/test_memory.py", "test_linear.py")
# Whole runs: training that is resumed, several processes, pages and notebooks that are executed.
SLOW += ("test_examples.py", "test_processes.py", "test_reference_transformer.py")
SLOW += ("test_notebooks.py", "test_screens.py", "test_tutorials.py", "test_docs_migrating.py")
# Neither: checkpoints of thousands of arrays, or of every format.
DEFAULT = ("universal/test_shares.py", "universal/test_small_arrays.py", "universal/test_copy.py")


ORBAX = tuple(map(int, version("orbax-checkpoint").split(".")[:2]))


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., dict[str, Any]]]:
    """What stock Orbax makes of a path, in a process without jax_ucp: `arrays` or `error`."""
    command = [sys.executable, "-W", "ignore", str(TESTS / "workers" / "stock.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:

        def restore(path: Path, mesh: Sequence[int] = (), api: str = "v0") -> dict[str, Any]:
            asked = {"path": str(path), "mesh": mesh, "api": api}
            print(json.dumps(asked), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield restore
        process.stdin.close()


def pytest_configure(config: pytest.Config) -> None:
    """Say what older releases of Orbax leave behind."""
    if ORBAX < (0, 12):  # event loops that are not closed
        for kind in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in its lane, by the file that it is in; the slow lane comes first."""
    for item in items:
        inside = item.path.is_relative_to(TESTS)
        place = item.path.relative_to(TESTS).as_posix() if inside else ""
        if place.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        elif place.startswith(FAST) and place not in DEFAULT:
            item.add_marker(pytest.mark.fast)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
