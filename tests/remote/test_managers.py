"""Orbax's own step logic on buckets, v0 and v1; stock Orbax reads what is there."""

import itertools
import random
import time
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint import v1

import jax_ucp as ucp
from jax_ucp.errors import UnsupportedPath
from jax_ucp.files.path import file_path
from joined import Joined
from servers.stores import Store

# s3fs and gcsfs leave their sessions to the garbage collector
OTHERS = (
    "ignore::DeprecationWarning", "ignore:Sharding info not provided",
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings(*OTHERS)


def tree(step: int) -> dict:
    weights = np.random.default_rng(step).normal(size=(64, 32)).astype(np.float32)
    return {"w": jax.numpy.asarray(weights), "step": step, "name": f"step {step}"}


def check(restored: dict, step: int) -> None:
    want = tree(step)
    np.testing.assert_array_equal(np.asarray(restored["w"]), np.asarray(want["w"]))
    assert int(restored["step"]) == step
    assert restored["name"] == want["name"]


def manager(root: str) -> ocp.CheckpointManager:
    options = ucp.in_bucket(ocp.CheckpointManagerOptions(max_to_keep=3))
    return ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler(), options=options)


@pytest.fixture(params=["s3", "ministack", "gcs", pytest.param("azure", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


def test_a_manager_without_in_bucket_is_told_of_it(s3):
    handler = ucp.CheckpointHandler()
    with ocp.CheckpointManager(f"{s3.url}/run", item_handlers=handler) as manager:
        manager.save(0, args=ucp.args.Save(tree(0)))
        with pytest.raises(UnsupportedPath, match=r"renamed by Orbax.*options=ucp\.in_bucket\("):
            manager.wait_until_finished()
    context = ucp.orbax_context()
    with pytest.raises(UnsupportedPath, match=r"v1 the context ucp\.in_b"), context:
        v1.save(f"{s3.url}/v1/0", {"w": np.ones(3)})


def test_a_manager_keeps_the_last_steps_and_restores_them(store):
    root = f"{store.url}/run"
    with manager(root) as first:
        for step in range(5):
            first.save(step, args=ucp.args.Save(tree(step)))
    with manager(root) as second:
        assert list(second.all_steps()) == [2, 3, 4]
        check(second.restore(4), 4)
        second.save(5, args=ucp.args.Save(tree(5)))
        second.wait_until_finished()
        assert list(second.all_steps()) == [3, 4, 5]
    check(ucp.open(root).restore(), 5)
    names = [file.name for file in file_path(root).folder().walk()]
    assert not [name for name in names if name.endswith("ucp.writer.json")]


def test_a_checkpointer_of_v1_keeps_the_last_steps(store):
    context = ucp.in_bucket(ucp.orbax_context())
    policies = v1.training.preservation_policies, v1.training.save_decision_policies
    options = {"context": context, "preservation_policy": policies[0].LatestN(3)}
    options["save_decision_policy"] = policies[1].FixedIntervalPolicy(1)
    with v1.training.Checkpointer(f"{store.url}/run", **options) as checkpointer:
        for step in range(5):
            checkpointer.save_checkpointables_async(step, {"model": tree(step)})
        checkpointer.wait()
        assert [each.step for each in checkpointer.checkpoints] == [2, 3, 4]
        check(checkpointer.load_checkpointables(4)["model"], 4)


def test_stock_orbax_reads_what_is_on_google_cloud_storage(gcs):
    root = f"{gcs.url}/run"
    with manager(root) as ours:
        ours.save(0, args=ucp.args.Save(tree(0)))
    with ocp.CheckpointManager(root) as stock:
        restored = stock.restore(0, args=ocp.args.PyTreeRestore(tree(1)))
    check(restored, 0)


def test_tensorstore_reads_what_is_on_s3(s3):
    ucp.CheckpointHandler().save(f"{s3.url}/item", ucp.args.Save(tree(0)))
    kvstore = file_path(f"{s3.url}/item/w").files.spec(file_path(f"{s3.url}/item/w").key)
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    np.testing.assert_array_equal(array.read().result(), np.asarray(tree(0)["w"]))


def train(root: str, steps: int, kill_after: float | None) -> list[str]:
    """What process 0 said; both are killed so many seconds after the first step that it began."""
    with Joined(2, "bucket_run.py", root, steps) as workers:
        if kill_after is not None:
            workers.wait_for(lambda said: any(line[0].isdigit() for line in said))
            time.sleep(kill_after)
            workers.kill()
        codes, said = workers.codes(), workers.printed(0)
        assert codes[0] == -9 or said[-1].startswith("kept"), workers.errors(0)
        return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_two_processes_that_are_killed_take_up_where_they_were(kind, request):
    """20 steps, saved in the background, of which three are kept."""
    store = request.getfixturevalue(kind)
    root, dice = f"{store.url}/run", random.Random(7)
    for turn in itertools.count():
        said = train(root, 20, dice.uniform(0.1, 3) if turn < 3 else None)
        if said[-1].startswith("kept"):
            break
    assert said[-1] == "kept 17 18 19"
    want = np.random.default_rng(19).normal(size=(4096, 16)).astype(np.float32)
    restored = ucp.open(root).restore()
    np.testing.assert_array_equal(restored["w"], want)
    if kind == "gcs":
        with ocp.CheckpointManager(root) as stock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the devices of the two processes are not here
            target = {"w": np.zeros((4096, 16), np.float32), "step": 0}
            restored = stock.restore(19, args=ocp.args.StandardRestore(target))
        np.testing.assert_array_equal(restored["w"], want)
