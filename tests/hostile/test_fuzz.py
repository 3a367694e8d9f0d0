"""Hostile checkpoints are read or refused, call nothing, and cost little; and what watches over
that can see it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
INPUTS = 2500


def test_hostile_inputs_are_read_or_refused_and_nothing_in_them_is_called():
    command = [sys.executable, "-m", "hostile.fuzz", str(INPUTS)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{INPUTS} inputs, 0 faults" in done.stdout
    # each target both reads and refuses: neither all noise nor all harmless
    for line in done.stdout.splitlines()[:-1]:
        assert "'read'" in line, line
        assert "'refused'" in line, line


# What reads a pickle carelessly, and the words for what is then seen.
CARELESS = {
    "Unpickler(io.BytesIO(data)).load()": "the trap was called",
    "__import__('sched')":                "import ('sched'",
    "exec('1')":                          "exec (<code object",
    "open('written', 'w').close()":       "open ('written', 'w')",
    "{}['key']":                          "KeyError: 'key'",
    "bytes(300 << 20)":                   "MemoryError",
    "all(True for _ in iter(int, 1))":    "more than 2 seconds",
}  # fmt: skip

# Python's own unpickler is kept from all names but the trap's.
FUZZ_CARELESS = f"""
import io, pickle, sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
from hostile import fuzz

class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return sys.modules["ucp_trap"].spring if module == "ucp_trap" else dict
    def persistent_load(self, id):
        return id

fuzz.CASES, fuzz.SECONDS = (), 2
with tempfile.TemporaryDirectory() as work:
    fuzzed = fuzz.prepared(Path(work))
    for load in sys.argv[1:]:
        fuzz.safe_pickle.load = eval("lambda data, *more: " + load)
        fuzz.run(*fuzzed, range(100, 103 if "iter" in load else 160), "pickles")
        print(end="\f")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """What the fuzzer prints of each careless reader, which takes the place of `safe_pickle.load`
    once it watches.
    """
    command = [sys.executable, "-c", FUZZ_CARELESS, *CARELESS]
    folder = tmp_path_factory.mktemp("careless")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(CARELESS, done.stdout.split("\f"), strict=False))


@pytest.mark.parametrize("load", CARELESS)
def test_the_fuzzer_sees_what_must_not_happen(load, said):
    assert ", 0 faults" not in said[load]
    assert CARELESS[load] in said[load]
