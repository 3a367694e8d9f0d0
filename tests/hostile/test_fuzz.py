"""Hostile checkpoints are read or refused, call nothing, and cost little; and what watches over
that can see it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
INPUTS = 2500


def fuzz(*arguments: object, load: str = "") -> tuple[int, str]:
    """Run the fuzzer in a process of its own; `load` is what takes the place of
    `safe_pickle.load` once it watches.
    """
    program = f"import pickle, sys; sys.path.insert(0, {str(TESTS)!r})\nfrom hostile import fuzz\n"
    if load:
        program += f"limit = fuzz.limit_memory\nfuzz.CASES, fuzz.SECONDS = (), 2\n{UNPICKLER}"
        program += f"def load(data, *more):\n    return {load}\n"
        program += (
            "def late(nbytes):\n    limit(nbytes)\n    fuzz.safe_pickle.load ="
            " load\nfuzz.limit_memory = late\n"
        )
    program += "sys.exit(fuzz.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


# Python's own, kept from all names but the trap's.
UNPICKLER = """
import io
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return sys.modules["ucp_trap"].spring if module == "ucp_trap" else dict
    def persistent_load(self, id):
        return id
"""


def test_hostile_inputs_are_read_or_refused_and_nothing_in_them_is_called():
    code, said = fuzz(INPUTS)
    assert code == 0, said
    assert f"{INPUTS} inputs, 0 faults" in said
    # each target both reads and refuses: neither all noise nor all harmless
    for line in said.splitlines()[:-1]:
        assert "'read'" in line, line
        assert "'refused'" in line, line


@pytest.mark.parametrize(("load", "seen"), [
    ("Unpickler(io.BytesIO(data)).load()", "the trap was called"),
    ("__import__('sched')",                "import ('sched'"),
    ("exec('1')",                          "exec (<code object"),
    ("open('written', 'w').close()",       "open ('written', 'w')"),
    ("{}['key']",                          "KeyError: 'key'"),
    ("bytes(300 << 20)",                   "MemoryError"),
    ("all(True for _ in iter(int, 1))",    "more than 2 seconds"),
])  # fmt: skip
def test_the_fuzzer_sees_what_must_not_happen(load, seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = 3 if "iter" in load else 60
    code, said = fuzz(count, "--start", 100, "--family", "pickles", load=load)
    assert code == 1
    assert seen in said
