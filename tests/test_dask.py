"""The workers of a Dask cluster, which are processes of this machine here."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

import jax_ucp as ucp
from helpers import digests
from jax_ucp.cli.main import main
from test_read_once import SOURCES

DATA = Path(__file__).parent / "data"
CASES = [
    "deepspeed/tp2_dp2_z1_bf16_swiglu",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt",
    "torch/dcp_zstd/ckpt",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of sockets that Dask closes late
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("case", CASES)
def test_dask_workers_write_the_same_bytes(case, cluster, tmp_path):
    checkpoint = ucp.open(DATA / case)
    checkpoint.save(tmp_path / "here")
    checkpoint.export(tmp_path / "weights here", "safetensors")
    with Client(cluster) as client:
        executor = client.get_executor(pure=False)
        checkpoint.save(tmp_path / "there", executor=executor)
        checkpoint.export(tmp_path / "weights there", "safetensors", executor=executor)
        assert list(checkpoint.verify(executor=executor)) == list(checkpoint.verify())
        modules = client.run(lambda: sorted(__import__("sys").modules))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert digests(tmp_path / "weights there") == digests(tmp_path / "weights here")
    for loaded in modules.values():
        assert "jax_ucp.checkpoint" in loaded
        assert not {"jax", "torch"} & set(loaded)


@pytest.mark.parametrize("after", [0.05, 0.3, 1.0])
def test_a_worker_that_is_killed_is_replaced_and_the_result_is_the_same(after, cluster, tmp_path):
    SOURCES["deepspeed"](tmp_path / "source")
    checkpoint = ucp.open(tmp_path / "source")
    checkpoint.save(tmp_path / "here", budget_bytes=4 << 20)
    with Client(cluster) as client:
        client.wait_for_workers(2)
        victim = next(iter(client.run(os.getpid).values()))
        kill = threading.Timer(after, os.kill, (victim, signal.SIGKILL))
        kill.start()
        checkpoint.save(
            tmp_path / "there", executor=client.get_executor(pure=False), budget_bytes=4 << 20
        )
        kill.join()
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


def test_a_command_has_its_work_done_by_a_scheduler(cluster, tmp_path):
    source = str(DATA / CASES[0])
    ucp.open(source).save(tmp_path / "here")
    command = ["convert", source, str(tmp_path / "there")]
    done = CliRunner().invoke(main, [*command, "--scheduler", cluster.scheduler_address])
    assert done.exit_code == 0, done.output
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


def test_a_scheduler_that_does_not_answer_is_one_error(tmp_path, monkeypatch):
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        command = ["convert", str(DATA / CASES[0]), str(tmp_path / "there")]
        done = CliRunner().invoke(main, [*command, "--scheduler", "tcp://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in done.stderr
    assert not (tmp_path / "there").exists()
