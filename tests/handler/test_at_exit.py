"""A program that does not wait for its last save in the background: the save is finished, or its loss
is said and is the exit code.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from handler_cases import needs_v1
from jax_ucp.handler.at_exit import NotedLoop

WORKER = Path(__file__).parents[1] / "workers" / "ends.py"
SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("everywhere", "checkpointer")]
WAYS = [pytest.param("manager"), *SLOW, pytest.param("v1", marks=needs_v1)]


def ended(root: Path, way: str, how: str) -> tuple[int, list[str]]:
    """The exit code, and what we said."""
    command = [sys.executable, str(WORKER), str(root), way, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    return done.returncode, [line for line in lines if line.startswith("jax_ucp: ")]


@pytest.mark.parametrize(("way", "how", "code"), [
    *(pytest.param(*way.values, "slow", 0, marks=way.marks) for way in WAYS),
    ("manager", "exits", 3),
])  # fmt: skip
def test_a_save_that_nobody_waited_for_is_finished_and_that_is_said(tmp_path, way, how, code):
    found, said = ended(tmp_path, way, how)
    assert found == code
    assert [line.split(" while ")[0] for line in said] == ["jax_ucp: the program ends"]
    assert f"{tmp_path}/1" in said[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    got = ucp.open(tmp_path, step=1).restore()
    assert all((got[f"w{i}"] == np.full((300, 300), i)).all() for i in range(3))


@pytest.mark.parametrize("way", WAYS)
def test_a_save_that_is_lost_at_the_end_is_named_and_is_the_exit_code(tmp_path, way):
    code, said = ended(tmp_path, way, "fails")
    assert code == 1
    assert said[1].startswith(f"jax_ucp: LOST: {tmp_path}/1")
    assert "No space left on device" in said[1]
    assert list(tmp_path.rglob("ucp.json")) == []


@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]])
def test_of_a_save_that_was_waited_for_nothing_is_said(tmp_path, way):
    assert ended(tmp_path, way, "waits") == (0, [])


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.timeout(30)
def test_a_loop_that_stops_while_it_is_asked_is_not_waited_for(closed, monkeypatch):
    async def save() -> None:
        pass

    noted = NotedLoop("run/1")
    asyncio.run(noted.run(save()))
    noted._loop = loop = asyncio.new_event_loop()
    if closed:
        loop.close()
    looked_at = [True, False]  # it runs when it is looked at, and no more when it is asked
    with monkeypatch.context() as patch:
        patch.setattr(loop, "is_running", lambda: looked_at.pop(0))
        noted.wait()
    loop.close()
