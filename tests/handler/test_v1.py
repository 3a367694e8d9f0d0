"""Orbax v1 drives us, sync and async, beside its own items; stock v1 and v0 read the result."""

import threading
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
from handler_cases import MESH, OTHER, abstract, check, needs_v1, stock_warns, tree
from helpers import faults_of
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.universal.store import ZarrStore

ARGS = ucp.args
pytestmark = needs_v1


def save(path, asynchronous: bool) -> None:
    items = {"model": ARGS.Save(tree()), "config": {"layers": 2}}
    if asynchronous:
        v1.save_checkpointables_async(path, items).result()
    else:
        v1.save_checkpointables(path, items)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_v1_saves_it_loads_on_another_mesh_beside_items_of_its_own(tmp_path, asynchronous):
    save(tmp_path / "step", asynchronous)
    targets = {"model": ARGS.Restore(mesh=OTHER), "config": None}
    found = v1.load_checkpointables(tmp_path / "step", targets)
    check(found["model"])
    assert found["model"]["params"]["w"].sharding == NamedSharding(OTHER, P("data", "model"))
    target = abstract(MESH, P("data"))
    found = v1.load_checkpointables(tmp_path / "step", {"model": ARGS.Restore(target)})
    sharding = found["model"]["params"]["w"].sharding
    assert sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 2)
    assert faults_of(ucp.open(tmp_path / "step" / "model")) == []


def test_an_async_save_of_v1_has_its_own_copy_of_the_data(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(MESH, P("data", "model")))
    saves = []
    for i in range(3):
        args = {"model": ARGS.Save({"x": x})}
        saves.append(v1.save_checkpointables_async(tmp_path / str(i), args))
        x = step(x)
    for i, each in enumerate(saves):
        each.result()
        found = v1.load_checkpointables(tmp_path / str(i), {"model": ARGS.Restore()})
        assert (found["model"]["x"] == i).all()


@stock_warns
def test_stock_handlers_of_v0_and_v1_read_the_item(tmp_path):
    save(tmp_path / "step", False)
    check(ocp.PyTreeCheckpointer().restore(tmp_path / "step" / "model"))
    check(v1.load(tmp_path / "step", checkpointable_name="model"))


def test_the_metadata_of_an_item_is_that_of_stock_orbax(tmp_path):
    save(tmp_path / "step", False)
    found = v1.checkpointables_metadata(tmp_path / "step").metadata["model"]
    stock = v1.metadata(tmp_path / "step", checkpointable_name="model").metadata
    for metadata in (found, stock):
        assert metadata["params"]["w"].shape == (8, 6)
        assert metadata["params"]["w"].dtype == np.float32
        sharding = metadata["params"]["w"].sharding_metadata.to_jax_sharding()
        assert sharding == NamedSharding(MESH, P("data", "model"))


def test_64_bits_asked_for_in_the_callers_thread_alone_are_loaded(tmp_path):
    with enable_x64(True):
        want = {"n": jax.device_put(np.arange(8) + (1 << 40), NamedSharding(MESH, P("data")))}
        v1.save_checkpointables(tmp_path / "step", {"model": ARGS.Save(want)})
        found = v1.load_checkpointables(tmp_path / "step", {"model": ARGS.Restore(want)})
        assert found["model"]["n"].dtype == np.int64
        assert (found["model"]["n"] == want["n"]).all()


@pytest.fixture
def in_flight(monkeypatch, at_once) -> Counter:
    """The most calls of a method of our store that ran at once. Where several may, the first waits
    for a second one.
    """
    most, lock = Counter(), threading.Lock()

    def counted(name: str) -> None:
        method, second = getattr(ZarrStore, name), threading.Event()
        now = [0]

        def call(*args: Any, **options: Any) -> Any:
            with lock:
                now[0] += 1
                most[name] = max(most[name], now[0])
                if now[0] > 1:
                    second.set()
            second.wait(30 if at_once > 1 else 0.005)
            try:
                return method(*args, **options)
            finally:
                with lock:
                    now[0] -= 1

        monkeypatch.setattr(ZarrStore, name, call)

    counted("write")
    counted("read_into")
    return most


@pytest.mark.parametrize(
    ("budget_bytes", "at_once"), [(None, 2), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_a_budget_bounds_what_a_save_and_a_load_have_in_flight(
    tmp_path, in_flight, budget_bytes, at_once
):
    want = {f"w{i}": jnp.full((800, 1000), i, jnp.float32) for i in range(6)}
    args = {"model": ARGS.Save(want, budget_bytes=budget_bytes)}
    v1.save_checkpointables(tmp_path / "step", args)
    args = {"model": ARGS.Restore(budget_bytes=budget_bytes)}
    found = v1.load_checkpointables(tmp_path / "step", args)
    check(found["model"], want)
    handler = ucp.CheckpointHandler(budget_bytes=1 << 40)
    with ocp.CheckpointManager(tmp_path / "v0", item_handlers=handler) as manager:
        manager.save(0, args=ARGS.Save(want, budget_bytes=budget_bytes))
        check(manager.restore(0, args=ARGS.Restore(budget_bytes=budget_bytes)), want)
    at_most_two = {name: min(most, 2) for name, most in in_flight.items()}
    assert at_most_two == {"write": at_once, "read_into": at_once}
