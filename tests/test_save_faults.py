"""Two real processes save, and something fails in one of them: both end with an error, and both go on."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "failing_save.py"
WAYS = ("v0", "v0 in the background", "v0 without a manager", "v1", "v1 in the background")
NO_SPACE = "[Errno 28] No space left on device: 'a file'"
FAULTS = {
    "process 1 has a full disk": (1, "OSError", NO_SPACE),
    "process 0 has a full disk": (0, "OSError", NO_SPACE),
    "process 0 cannot commit": (0, "OSError", NO_SPACE),
    "process 1 has no memory for a copy": (1, "MemoryError", "no room for a copy"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    """What each process met, by the way of saving and the fault. Those that wait for one another for long are ended."""
    root = tmp_path_factory.mktemp("saves")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [root / f"{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(WORKER), str(port), str(rank), str(root)]
        with log.open("wb") as errors:
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors))
    try:
        heard = [worker.communicate(timeout=90)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, log in zip(workers, logs, strict=True):
        assert worker.returncode == 0, log.read_text()[-4000:]
    return [json.loads(out.splitlines()[-1]) for out in heard]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_in_one_process_ends_the_save_in_all_by_its_name_and_words(said, way, fault):
    process, kind, words = FAULTS[fault]
    own, other = (said[rank][f"{way}, {fault}"]["error"] for rank in (process, 1 - process))
    assert own[:2] == [kind, words]
    assert own[2].endswith(f"was not done: process {process} could not do its part")
    assert other[0] == "SaveFailed"
    assert other[2:] == [f"  process {process}: {kind}: {words}"]


def test_nothing_looks_like_a_checkpoint_then_and_the_next_saves_are_sound(said):
    for each in said:
        assert len(each) == len(WAYS) * len(FAULTS)
        assert [found for one in each.values() for found in one["whole"] + one["wrong"]] == []
