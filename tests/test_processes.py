"""Real processes, joined by jax.distributed over loopback: saved by four, restored by four, three, two and one."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

import jax_ucp as ucp

WORKER = Path(__file__).parent / "workers" / "distributed.py"


def run(processes: int, what: str, directory: Path) -> list[dict]:
    """What each process printed last, by rank. A process that fails shows its own words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(WORKER), str(port), str(processes)]
    workers = [
        subprocess.Popen([*command, str(rank), what, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(processes)
    ]
    said = [worker.communicate(timeout=300) for worker in workers]
    for rank, (worker, (_, errors)) in enumerate(zip(workers, said, strict=True)):
        assert worker.returncode == 0, f"process {rank} of {processes}:\n{errors.decode()[-4000:]}"
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("four")
    run(4, "save", directory)
    return directory


def test_every_chunk_was_written_by_one_process_and_all_by_several(saved_by_four):
    item = saved_by_four / "0" / "default"
    checkpoint = ucp.open(item)
    assert [fault for _, fault in checkpoint.verify() if fault] == []
    assert not list(item.glob("ucp.process_*"))
    packs = sorted(item.glob("ucp.pack_*"))
    assert len(packs) == 4
    files = [*packs, *(file for file in item.rglob("c*") if (file.parent / "zarr.json").is_file())]
    assert checkpoint.nbytes <= sum(file.stat().st_size for file in files) <= checkpoint.nbytes * 1.02


def test_tensorstore_reads_an_array_whose_chunks_are_in_the_packs_of_several_processes(saved_by_four):
    item = saved_by_four / "0" / "default"
    checkpoint = ucp.open(item)
    assert len({piece.file for piece in checkpoint.where("small0007")}) == 4
    kvstore = {"driver": "ocdbt", "base": f"file://{item}/", "path": "small0007/"}
    found = ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
    np.testing.assert_array_equal(found, checkpoint.read("small0007"))


@pytest.mark.parametrize("processes", [3, 2, 1])
def test_fewer_processes_restore_what_four_saved(saved_by_four, processes):
    assert [said["rank"] for said in run(processes, "restore", saved_by_four)] == list(range(processes))


def test_a_transposed_restore_in_four_processes_reads_each_byte_once_in_all(saved_by_four):
    said = run(4, "restore", saved_by_four)
    read, needed = sum(each["read"] for each in said), sum(each["needed"] for each in said)
    # `needed` counts each distinct box once for each process that holds it: columns of one array, rows of another,
    # and a replica of a third in each process. Beside the data a read fetches the index of each file it opens.
    assert needed <= read <= needed * 1.02, (read, needed)
