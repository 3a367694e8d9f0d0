"""The workers of Dask, of MPI, of a pool, and shares: the same bytes as one process, whoever makes
them. Clusters are processes of this machine here.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import jax_ucp as ucp
from commands import run
from helpers import digests
from servers.stores import free_port
from worker_kills import COMMANDS, KINDS, MPIEXEC, Campaign, two_workers

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"
CASES = {
    "DeepSpeed": "deepspeed/tp2_dp2_z1_bf16_swiglu",
    "DCP": "torch/dcp_zstd/ckpt",
    "Megatron": "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt",
}
NOTE = "ucp.conversion.json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of sockets that Dask closes late
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with two_workers() as cluster:
        yield cluster


def mpiexec(*command: object, ranks: int = 3) -> str:
    """What so many ranks print. They are stopped when they take too long."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([MPIEXEC, "-n", str(ranks), *map(str, command)], **pipes)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.terminate()  # which ends the ranks too
        process.wait(timeout=30)
    assert process.returncode == 0, output
    return output


JAX_UCP = (sys.executable, "-m", "jax_ucp")
Command = Sequence[object]
HOW: dict[str, Callable[[Command, LocalCluster], object]] = {
    "Dask": lambda command, cluster: run(*command, "--scheduler", cluster.scheduler_address),
    "MPI": lambda command, _: mpiexec(*JAX_UCP, *command, "--scheduler", "mpi"),
    "processes": lambda command, _: run(*command, "--workers", 2),
    "shares": lambda command, _: [run(*command, "--worker", f"{i}/3") for i in (1, 2, 0)],
    "shares of ranks": lambda command, _: mpiexec(*JAX_UCP, *command, "--worker", "auto"),
}
TARGETS = ["convert", "export"]


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory) -> tuple[Path, Path]:
    """A source, and by command what one process makes of it."""
    source, folder = DATA / CASES[request.param], tmp_path_factory.mktemp("made")
    for command in TARGETS:
        run(command, source, folder / command)
    return source, folder


# Each two of a source, a way and a command meet once at least.
MET = [
    (source, how, command)
    for i, source in enumerate(CASES)
    for j, how in enumerate(HOW)
    for k, command in enumerate(TARGETS)
    if (i + j + k) % 2 == 0
]


@pytest.mark.parametrize(("made", "how", "command"), MET, indirect=["made"])
def test_the_bytes_are_those_of_one_process(made, how, command, cluster, tmp_path):
    source, whole = made
    HOW[how]([command, source, tmp_path / "out"], cluster)
    written = digests(tmp_path / "out")
    assert (NOTE in written) == how.startswith("shares")
    written.pop(NOTE, None)
    assert written == digests(whole / command) != {}


def test_dask_workers_verify_and_do_without_jax(made, cluster):
    checkpoint = ucp.open(made[0])
    with Client(cluster) as client:
        executor = client.get_executor(pure=False)
        assert list(checkpoint.verify(executor=executor)) == list(checkpoint.verify())
        modules = client.run(lambda: sorted(__import__("sys").modules))
    for loaded in modules.values():
        assert "jax_ucp.jobs.work" in loaded
        assert not {"jax", "torch"} & set(loaded)


def test_an_executor_of_mpi_writes_the_same_bytes_by_ranks_without_jax(made, tmp_path):
    source, whole = made
    script = Path(__file__).parent / "workers" / "mpi_executor.py"
    futures = (sys.executable, "-m", "mpi4py.futures")
    said = mpiexec(*futures, script, source, tmp_path / "convert", tmp_path / "export").split()
    assert said[0] == "2"
    assert "jax_ucp.jobs.work" in said
    assert not {"jax", "torch"} & set(said)
    for command in TARGETS:
        assert digests(tmp_path / command) == digests(whole / command) != {}


@pytest.mark.parametrize("made", ["DCP"], indirect=True)
def test_of_ranks_one_says_what_is_wrong(made, tmp_path):
    source, whole = made
    with pytest.raises(AssertionError) as refused:
        mpiexec(*JAX_UCP, "convert", source, whole / "convert", "--scheduler", "mpi")
    assert str(refused.value).count("is a checkpoint already") == 1


@pytest.mark.parametrize("made", ["DCP"], indirect=True)
def test_a_rank_that_is_alone_does_the_work_itself(made, tmp_path):
    source, whole = made
    mpiexec(*JAX_UCP, "convert", source, tmp_path / "out", "--scheduler", "mpi", ranks=1)
    assert digests(tmp_path / "out") == digests(whole / "convert")


@pytest.mark.parametrize("made", ["DCP"], indirect=True)
def test_the_scripts_for_clusters_work(made, tmp_path, monkeypatch):
    source, whole = made
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SOURCE": str(source), "PORT": str(free_port())}

    def run_script(name: str, **variables: str) -> None:
        command = ["timeout", "120", "bash", str(EXAMPLES / name)]
        subprocess.run(command, env={**environment, **variables}, check=True, timeout=150)

    run_script("dask.sh", TARGET=str(tmp_path / "dask"))
    run_script("mpi.sh", TARGET=str(tmp_path / "mpi"), RANKS="3")
    for i in range(2):
        task = {"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "2"}
        run_script("slurm.sh", TARGET=str(tmp_path / "slurm"), **task)
    (tmp_path / "slurm" / NOTE).unlink()
    for name in ("dask", "mpi", "slurm"):
        assert digests(tmp_path / name) == digests(whole / "convert"), name


@pytest.fixture(scope="module")
def kills(cluster, tmp_path_factory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("kills"), cluster)


@pytest.mark.parametrize("seed", range(len(KINDS) * len(COMMANDS)))
def test_whichever_worker_is_killed_the_job_ends_in_the_same_bytes(seed, kills):
    kills.run(seed)


def test_a_scheduler_that_does_not_answer_is_one_error(tmp_path, monkeypatch):
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        command = "convert", DATA / CASES["DCP"], tmp_path / "there"
        text = run(*command, "--scheduler", "tcp://127.0.0.1:9", code=1)
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in text
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("made", ["DCP"], indirect=True)
def test_a_scheduler_without_workers_is_waited_for_and_said_so(made, tmp_path):
    source, whole = made
    out = tmp_path / "out"
    with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=None) as cluster:
        command = [*JAX_UCP, "convert", source, out, "--scheduler", cluster.scheduler_address]
        line = list(map(str, command))
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "has no worker yet: waiting for the first" in process.stderr.readline()
            assert not out.exists()
            cluster.scale(1)
            process.communicate(timeout=300)
        assert process.returncode == 0
    assert digests(out) == digests(whole / "convert")
