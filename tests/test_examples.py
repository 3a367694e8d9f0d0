"""The examples, run as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 96
TABLE_ROW = re.compile(r"^ +\d+  \(\d, \d\) +\d\.\d+ +\d\.\d+ +-?\d\.\de[-+]\d+$", re.MULTILINE)


def elastic_training(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "elastic_training.py", "--steps", str(STEPS), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_killed_and_continued_on_three_other_meshes_agrees_with_one_that_was_never_interrupted():
    run = elastic_training()
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("killed") == 3
    assert len(TABLE_ROW.findall(run.stdout)) == STEPS
    assert run.stdout.endswith("The runs agree.\n")


def test_forgetting_the_moments_of_adam_on_restore_makes_the_runs_part():
    run = elastic_training("--negative-control")
    assert run.returncode == 1, run.stdout + run.stderr
    assert len(TABLE_ROW.findall(run.stdout)) == STEPS
    assert "The runs part" in run.stdout
    spread, largest = (
        float(re.search(rf"{name}.*: +(\S+)", run.stdout)[1]) for name in ("spread of", "largest")
    )
    assert largest > 1000 * spread
