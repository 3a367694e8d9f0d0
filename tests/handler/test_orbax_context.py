"""Orbax v1 keeps bare pytrees in our format by the context alone, and stock Orbax loads them."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
from handler_cases import MESH, OTHER, abstract, check, needs_v1, stock_warns, tree
from jax_ucp.errors import TreeMismatch
from programs import python

pytestmark = needs_v1


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def checkpointer(path) -> v1.training.Checkpointer:
    return v1.training.Checkpointer(path, context=ucp.orbax_context())


NAMES = ("state", "pytree", "items", "model_params", "optimizer_state")


@pytest.mark.parametrize("name", NAMES)
def test_a_bare_tree_is_kept_in_our_format_under_any_name(tmp_path, name):
    with checkpointer(tmp_path) as manager:
        manager.save_checkpointables(3, {name: tree()}, custom_metadata={"run": 1})
        assert (tmp_path / "3" / name / "ucp.json").is_file()
        check(manager.load_checkpointables(3)[name])
        check(manager.load_checkpointables(3, {name: tree()})[name])
        found = manager.load_checkpointables(3, {name: abstract(OTHER, P("data"))})[name]
        assert found["params"]["w"].sharding.is_equivalent_to(NamedSharding(OTHER, P("data")), 2)
        check(manager.load(3, checkpointable_name=name))
        assert manager.checkpointables_metadata(3).custom_metadata == {"run": 1}


def test_a_tree_comes_back_on_the_devices_it_was_saved_from(tmp_path):
    with checkpointer(tmp_path) as manager:
        manager.save_async(0, tree()).result()
        found = manager.load(0)
        assert found["params"]["w"].sharding == NamedSharding(MESH, P("data", "model"))
        assert found["params"]["layers"][0].devices() == {jax.devices()[0]}
        target = {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32)}
        context = ucp.orbax_context()
        context.pytree.loading.partial_load = True
        with context:
            part = v1.load(tmp_path / "0", {"params": target})
        assert part["params"]["w"].sharding == NamedSharding(MESH, P("data", "model"))


@pytest.mark.parametrize("module", [False, True])
def test_states_of_nnx_come_back_as_what_they_are(tmp_path, module):
    model = Model(nnx.Rngs(0))
    value = model if module else nnx.state(model)
    with checkpointer(tmp_path) as manager:
        manager.save_checkpointables(0, {"model_params": value})
        found = manager.load_checkpointables(0, {"model_params": value})["model_params"]
    assert type(found) is type(value)
    assert jax.tree.structure(found) == jax.tree.structure(value)
    got, want = (nnx.state(x, nnx.Param) if module else x for x in (found, value))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def test_the_dtype_of_a_target_is_that_of_the_result(tmp_path):
    with ucp.orbax_context():
        v1.save(tmp_path / "s", {"w": jnp.arange(4.0)})
        found = v1.load(tmp_path / "s", {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)})
    assert found["w"].dtype == jnp.bfloat16


def test_a_target_that_does_not_fit_is_refused(tmp_path):
    with ucp.orbax_context():
        v1.save(tmp_path / "s", {"w": jnp.arange(4.0), "v": jnp.zeros(2)})
        with pytest.raises(Exception, match="v: in the checkpoint, but not in the target") as error:
            v1.load(tmp_path / "s", {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})
    causes = [error.value, error.value.__cause__]
    assert any(isinstance(cause, TreeMismatch) for cause in causes)


def test_what_is_no_tree_is_left_to_its_own_handler(tmp_path):
    class Iterator:
        position = 7

        async def save(self, directory):
            async def write():
                (await directory.await_creation() / "position").write_text(str(self.position))

            return write()

        async def load(self, directory):
            async def read():
                self.position = int((directory / "position").read_text())

            return read()

    with checkpointer(tmp_path) as manager:
        manager.save_checkpointables(0, {"data": Iterator(), "state": tree()})
        fresh = Iterator()
        fresh.position = 0
        manager.load_checkpointables(0, {"data": fresh, "state": None})
    assert fresh.position == 7
    assert not (tmp_path / "0" / "data" / "ucp.json").exists()


def test_options_of_the_context_that_is_copied_stay():
    context = v1.Context()
    context.pytree.loading.partial_load = True
    assert ucp.orbax_context(context).pytree.loading.partial_load
    assert not ucp.orbax_context().pytree.loading.partial_load


def test_a_budget_of_the_context_bounds_saves_and_loads(tmp_path):
    context = ucp.orbax_context()
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = 1
    with context:
        v1.save(tmp_path / "s", tree())
        check(v1.load(tmp_path / "s"))


@stock_warns
def test_programs_without_us_load_what_was_saved(tmp_path):
    with checkpointer(tmp_path) as manager:
        manager.save(5, {"w": tree()["params"]["w"], "step": 3})
    stock = textwrap.dedent(f"""
        import sys
        import numpy
        from orbax.checkpoint import v1
        with v1.training.Checkpointer({str(tmp_path)!r}) as manager:
            found = manager.load(5)
            print(found["w"].sharding.spec, found["step"], "jax_ucp" in sys.modules)
            print(numpy.asarray(found["w"]).tobytes().hex())
    """)
    printed = python("-c", stock)
    want = np.asarray(tree()["params"]["w"]).tobytes().hex()
    assert printed.split("\n")[:2] == ["P('data', 'model') 3 False", want]


def test_a_context_of_ours_loads_what_stock_orbax_saved(tmp_path):
    v1.save(tmp_path / "stock", tree()["params"])
    with ucp.orbax_context():
        check(v1.load(tmp_path / "stock"), tree()["params"])


OURS, ORBAX = "import jax_ucp as ucp\n", "from orbax.checkpoint import v1\n"
ORDERS = {"us first": OURS + ORBAX, "orbax first": ORBAX + OURS}


@pytest.mark.parametrize("order", ORDERS)
def test_importing_is_enough_whatever_the_order(tmp_path, order):
    program = ORDERS[order] + textwrap.dedent(f"""
        manager = v1.training.Checkpointer({str(tmp_path)!r})  # before anything of ours is named
        manager.save_checkpointables(0, {{"m": ucp.args.Save({{"n": 3}})}})
        print(manager.load_checkpointables(0, {{"m": ucp.args.Restore()}}))
    """)
    assert python("-c", program).strip() == "{'m': {'n': 3}}"


def test_importing_us_brings_in_neither_jax_nor_orbax():
    program = "import jax_ucp, sys; print('jax' in sys.modules, 'orbax' in sys.modules)"
    assert python("-c", program).strip() == "False False"


def test_devices_that_are_not_here_are_asked_for(tmp_path):
    tree = {"w": jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("data")))}
    with checkpointer(tmp_path) as manager:
        manager.save(0, tree)
    program = textwrap.dedent(f"""
        import jax_ucp as ucp
        from jax_ucp.errors import TreeMismatch
        try:
            ucp.open({str(tmp_path / "0" / "state")!r}).restore(mesh="saved")
        except TreeMismatch as error:
            print(error)
    """)
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = "w was saved on a mesh of {'data': 4, 'model': 2}, not all of whose devices"
    assert words in python("-c", program, env=env)
