"""On whatever terminal, in a pipe, and when somebody presses Ctrl-C."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp

CASE = Path(__file__).parents[1] / "data" / "deepspeed" / "z2_bf16_dp3"
COMMAND = [sys.executable, "-m", "jax_ucp"]
COMMANDS = {
    "inspect": ("inspect", CASE),
    "plan": ("plan", CASE, "--mesh", "x=2"),
    "diff": ("diff", CASE, CASE.with_name("z1_bf16_dp2")),
}


def on_a_terminal(*args: object, columns: int, **environment: str) -> str:
    """What a command writes to a terminal so wide."""
    near, far = pty.openpty()
    settings = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"} | environment
    files = {"stdout": far, "stderr": far, "stdin": far}
    process = subprocess.Popen([*COMMAND, *map(str, args)], env=settings, **files)
    os.close(far)
    written = b""
    while True:
        try:
            part = os.read(near, 1 << 16)
        except OSError:  # the terminal's other side is closed
            break
        if not part:
            break
        written += part
    process.wait()
    os.close(near)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_a_table_is_wider_than_the_terminal(command, columns):
    out = on_a_terminal(*COMMANDS[command], columns=columns, NO_COLOR="1")
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)
    table = re.split(r"\nparam(?:eter|[a-z_, ]* of) ", out)[-1]
    lines = [line for line in table.splitlines() if "  " in line]
    assert len(lines) > 5
    assert max(map(len, lines)) <= columns


def test_a_terminal_is_given_a_bold_head_and_no_color_where_it_wants_none():
    assert "\x1b[" in on_a_terminal("inspect", CASE, columns=120, NO_COLOR="")
    plain = on_a_terminal("inspect", CASE, columns=120, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|38|48)m", plain)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_given_plain_text_a_line_each_row(command):
    arguments = [*COMMAND, *map(str, COMMANDS[command])]
    out = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert out.returncode in (0, 1)
    assert "\x1b" not in out.stdout
    assert not out.stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint whose conversion takes a while."""
    tree = {f"w{i}": np.full((512, 1024), i, np.float32) for i in range(48)}
    folder = tmp_path_factory.mktemp("large") / "c"
    return Path(ucp.Checkpoint.of({"param": tree}).save(folder).path)


def interrupted(*args: object, when: Path) -> tuple[int, str, str]:
    """The exit code and what is written, of a command that is sent SIGINT once `when` is there."""
    # what a shell runs in the background ignores SIGINT, and so would what is begun here
    command = ["env", "--default-signal=INT", *COMMAND, *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(when.parent.glob(f"*{when.name}*")):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_ctrl_c_ends_a_conversion_with_what_to_run_again_and_that_goes_on(large, tmp_path):
    target = tmp_path / "out"
    arguments = ("convert", large, target, "--budget", "1MiB")
    code, _, err = interrupted(*arguments, when=target)
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopped: TARGET is not a checkpoint yet; run the same command again" in err
    assert not (target / "ucp.json").exists()
    again = subprocess.run([*COMMAND, *map(str, arguments)], timeout=240)
    assert again.returncode == 0
    assert ucp.diff(large, target).same


def test_ctrl_c_ends_an_export_with_nothing_at_its_target(large, tmp_path):
    target = tmp_path / "out"
    arguments = ("export", large, target, "--format", "dcp", "--budget", "1MiB")
    code, _, err = interrupted(*arguments, when=target)
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopped: nothing was written to TARGET; the same command starts over" in err
    assert not target.exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(tmp_path):
    """As docs/command-line.md says: what click prints is what bash is told."""
    program = "import sys; sys.argv[0] = 'jax-ucp'; from jax_ucp.cli.main import main; main()"
    shim = f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n'
    (tmp_path / "jax-ucp").write_text(shim)
    (tmp_path / "jax-ucp").chmod(0o755)
    script = (
        'eval "$(_JAX_UCP_COMPLETE=bash_source jax-ucp)";'
        " COMP_WORDS=(jax-ucp insp); COMP_CWORD=1; _jax_ucp_completion jax-ucp insp;"
        ' echo "${COMPREPLY[@]}";'
        " COMPREPLY=(); COMP_WORDS=(jax-ucp report --ag); COMP_CWORD=2; _jax_ucp_completion jax-ucp --ag;"
        ' echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    how = {"capture_output": True, "text": True, "timeout": 120}
    out = subprocess.run(["bash", "-c", script], env=environment, **how)
    assert out.stdout.split() == ["inspect", "--against"], out.stderr
