"""What parsers take is measured, and what grows faster than its bytes is seen."""

import subprocess
import sys
from pathlib import Path

import pytest

from hostile.growth import Family, fault
from jax_ucp.errors import FormatError

TESTS = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what memory a process has")


def measured(*arguments: object) -> str:
    """What the measuring says, in a process whose memory has a limit."""
    command = [sys.executable, "-m", "hostile.growth", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@linux
@pytest.mark.timeout(900)
def test_a_sample_of_every_parser_takes_what_the_bytes_of_its_input_account_for():
    """All of them take hours: `python -m hostile.growth`. Every opcode and constructor is among
    them, or it fails.
    """
    assert " 0 faults" in measured("--sample", 3)


def copies(data: bytes) -> list[bytes]:
    return [data[i:] for i in range(0, len(data), 200)]


def compares(data: bytes) -> int:
    pieces = [data[i : i + 40] for i in range(0, len(data), 40)]
    return sum(a is b for a in pieces for b in pieces)


def refuses(data: bytes) -> None:
    raise FormatError("no")


READERS = {
    "linear": (bytes.split, None),
    "refused": (refuses, None),
    "copies": (copies, "memory grows faster|too large"),
    "compares": (compares, "time grows faster"),
}


@linux
@pytest.mark.parametrize("kind", READERS)
def test_what_grows_faster_than_its_input_is_seen(kind):
    read, why = READERS[kind]
    said = fault(Family(read, {}), lambda size: bytes(size))
    if why is None:
        assert said is None
    else:
        assert any(part in str(said) for part in why.split("|")), said
