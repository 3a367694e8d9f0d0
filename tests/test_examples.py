"""The examples, run as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 32
TABLE_ROW = re.compile(r"^ +\d+  \(\d, \d\) +\d\.\d+ +\d\.\d+ +-?\d\.\de[-+]\d+$", re.MULTILINE)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """Where both runs keep what XLA has compiled, which optimises little: half of the time is that."""
    return tmp_path_factory.mktemp("compiled")


def elastic_training(compiled: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "elastic_training.py", "--steps", str(STEPS), *options]
    environment = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
    }
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_run_killed_and_continued_on_three_other_meshes_agrees_with_one_that_was_never_interrupted(
    compiled,
):
    run = elastic_training(compiled)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("killed") == 3
    assert len(TABLE_ROW.findall(run.stdout)) == STEPS
    assert run.stdout.endswith("The runs agree.\n")


def test_forgetting_the_moments_of_adam_on_restore_makes_the_runs_part(compiled):
    run = elastic_training(compiled, "--negative-control")
    assert run.returncode == 1, run.stdout + run.stderr
    assert len(TABLE_ROW.findall(run.stdout)) == STEPS
    assert "The runs part" in run.stdout
    spread, largest = (
        float(re.search(rf"{name}.*: +(\S+)", run.stdout)[1]) for name in ("spread of", "largest")
    )
    assert largest > 1000 * spread
