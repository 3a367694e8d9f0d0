"""Stock Orbax's arguments for pytrees, taken by our handler: done as asked, or refused."""

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from handler_cases import MESH, OTHER, abstract, check, stock_warns, tree

STOCK = {
    "standard": (ocp.args.StandardSave, ocp.args.StandardRestore),
    "pytree": (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
}


@stock_warns
@pytest.mark.parametrize("kind", STOCK)
def test_calls_that_say_stock_arguments_of_v0_are_ours_by_a_registry(tmp_path, kind):
    save, restore = STOCK[kind]
    registry = ucp.handler_registry()
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        items = ocp.args.Composite(model=save(tree()), config=ocp.args.JsonSave({"n": 1}))
        manager.save(0, args=items)
        manager.wait_until_finished()
        assert (tmp_path / "0" / "model" / "ucp.json").is_file()

        def restored(args):
            asked = ocp.args.Composite(model=args, config=ocp.args.JsonRestore())
            result = manager.restore(0, args=asked)
            assert result["config"] == {"n": 1}
            return result["model"]

        check(restored(restore()))
        check(restored(restore(abstract(OTHER, P("data")))))
        metadata = manager.item_metadata(0)["model"]
        sharding = metadata.tree["params"]["w"].sharding.to_jax_sharding()
        assert sharding == NamedSharding(MESH, P("data", "model"))
        check(restored(restore(metadata)))
    with ocp.CheckpointManager(tmp_path) as stock:
        check(stock.restore(0, args=ocp.args.Composite(model=ocp.args.PyTreeRestore()))["model"])


def test_restore_args_of_v0_say_where_and_as_what(tmp_path):
    params = tree()["params"]
    with ocp.CheckpointManager(tmp_path, handler_registry=ucp.handler_registry()) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(params))
        manager.wait_until_finished()
        how = ocp.checkpoint_utils.construct_restore_args(params)
        how["w"] = ocp.ArrayRestoreArgs(mesh=OTHER, mesh_axes=P("data"), dtype=jnp.bfloat16)
        how["b"] = ocp.RestoreArgs(restore_type=np.ndarray)
        found = manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=how))
    assert found["w"].sharding == NamedSharding(OTHER, P("data"))
    assert found["w"].dtype == jnp.bfloat16
    assert isinstance(found["b"], np.ndarray)


REFUSED = {
    "strict": ocp.args.StandardRestore(strict=False),
    "transforms": ocp.args.PyTreeRestore(item={"w": 1}, transforms={"w": ocp.Transform("v")}),
    "global_shape": ocp.args.PyTreeRestore(
        restore_args={"w": ocp.ArrayRestoreArgs(global_shape=(8,))}
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_stock_arguments_that_change_values_are_refused(tmp_path, what):
    with ocp.CheckpointManager(tmp_path, handler_registry=ucp.handler_registry()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.arange(4.0)}))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=f"{what}.*not done by jax_ucp"):
            manager.restore(0, args=REFUSED[what])


HALF = ocp.SaveArgs(dtype=np.dtype(np.float16))
CAST = ocp.args.PyTreeSave({"w": jnp.arange(4.0)}, save_args={"w": HALF})
NOTED = ocp.args.StandardSave({"w": jnp.arange(4.0)}, custom_metadata={"a": 1})


@pytest.mark.parametrize(("args", "why"), [(CAST, "dtype=float16"), (NOTED, "custom_metadata")])
def test_a_save_that_would_store_something_else_is_refused(tmp_path, args, why):
    with pytest.raises(ValueError, match=why):
        ucp.CheckpointHandler().save(tmp_path / "item", args)
