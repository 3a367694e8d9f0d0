"""Programs that know nothing of jax_ucp save in the universal format where they are run by it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_ucp.cli.run import LAUNCHER

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX is not there yet
import orbax.checkpoint as ocp
import jax.numpy as jnp

folder, *args = sys.argv[1:]
with ocp.CheckpointManager(folder) as manager:
    manager.save(0, args=ocp.args.StandardSave({"w": jnp.arange(4.0)}))
print(__name__, sys.argv[0], args, os.path.exists(f"{folder}/0/default/ucp.json"))
sys.exit(7)
"""
PATCHED = (
    "keeps pytrees in the universal format in this process; patched are PyTreeCheckpointHandler"
)
RUN = ("-m", "jax_ucp", "run")


def python(work: Path, *args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    (work / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": f"{path}{ROOT}"}
    command = [sys.executable, "-W", "ignore", *args]
    how = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=work, env=environment, **how)


@pytest.mark.parametrize("program", [("program.py",), ("-m", "program")])
def test_a_program_or_a_module_is_run_with_its_arguments_and_exit_code(program, tmp_path):
    done = python(tmp_path, *RUN, *program, "run", "-m", "--help")
    assert done.returncode == 7
    assert done.stdout.endswith("['-m', '--help'] True\n")
    assert done.stdout.startswith("__main__ ")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("jax_ucp")]
    assert PATCHED in line
    assert done.stderr.startswith("jax_ucp")


def test_what_follows_a_module_is_its_own(tmp_path):
    (tmp_path / "shown.py").write_text("import sys; print(sys.argv[1:])")
    done = python(tmp_path, *RUN, "-m", "shown", "--help", "--launcher", "-m", "5")
    assert done.stdout == "['--help', '--launcher', '-m', '5']\n"


@pytest.mark.parametrize("error", ["OSError", "EOFError", "BrokenPipeError"])
def test_an_error_of_the_program_is_shown_as_by_python(error, tmp_path):
    (tmp_path / "failing.py").write_text(f"raise {error}('its own')")
    done = python(tmp_path, *RUN, "failing.py")
    assert done.returncode == 1
    assert done.stderr.endswith(f"{error}: its own\n")
    assert "Traceback" in done.stderr


def test_a_folder_in_the_environment_runs_every_program_so(tmp_path):
    """Another `sitecustomize` is run too."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('another')")
    path = f"{LAUNCHER}{os.pathsep}{tmp_path / 'site'}{os.pathsep}"
    done = python(tmp_path, "program.py", "run", path=path)
    assert done.returncode == 7
    assert done.stdout.startswith("another\n__main__ ")
    assert done.stdout.endswith("[] True\n")
    assert PATCHED in done.stderr


def test_without_orbax_nothing_is_patched_and_that_is_said(tmp_path):
    (tmp_path / "other.py").write_text("print('done')")
    done = python(tmp_path, *RUN, "other.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "did not import Orbax" in done.stderr
    assert python(tmp_path, *RUN).returncode == 2
    assert python(tmp_path, *RUN, "--launcher").stdout == f"{LAUNCHER}\n"
