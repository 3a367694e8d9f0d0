"""Beside Orbax: it reads what we write, without us; we read what it writes; and its manager
drives us.
"""

import shutil
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
from handler_cases import MESH, NUMBERS, OTHER, abstract, check, needs_v1, stock_warns, tree
from programs import python


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    with ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(5, args=ucp.args.Save(tree()))
        manager.save(6, args=ucp.args.Save({name: tree()[name] for name in NUMBERS}))
    return root


@stock_warns
def test_the_stock_manager_restores_our_step_without_arguments(ours):
    with ocp.CheckpointManager(ours) as manager:
        check(manager.restore(5))


@stock_warns
@pytest.mark.parametrize("first", [True, False])
def test_a_stock_manager_takes_its_arguments_before_and_after_it_had_none(ours, first):
    target = {name: abstract(OTHER, P("data", "model"))[name] for name in NUMBERS}
    want = {name: tree()[name] for name in NUMBERS}
    calls = [None, ocp.args.StandardRestore(target), ocp.args.StandardRestore()]
    with ocp.CheckpointManager(ours) as manager:
        for args in calls if first else calls[::-1]:
            check(manager.restore(6, args=args), want)


def test_our_manager_without_arguments_gives_arrays_where_they_were_saved(ours):
    with ocp.CheckpointManager(ours, item_handlers=ucp.CheckpointHandler()) as manager:
        for found in (manager.restore(5), manager.restore(5, args=ucp.args.Restore())):
            check(found)
            assert found["params"]["w"].sharding == NamedSharding(MESH, P("data", "model"))
            assert isinstance(found["params"]["layers"][0], jax.Array)


@stock_warns
def test_stock_handlers_restore_our_item_with_and_without_a_target(ours):
    check(ocp.PyTreeCheckpointer().restore(ours / "5" / "default"))
    want = {name: tree()[name] for name in NUMBERS}
    with ocp.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(ours / "6" / "default"), want)
        target = {name: abstract(OTHER, P("data", "model"))[name] for name in NUMBERS}
        got = checkpointer.restore(ours / "6" / "default", target)
    check(got, want)
    assert got["params"]["w"].sharding == NamedSharding(OTHER, P("data", "model"))


@needs_v1
@stock_warns
@pytest.mark.filterwarnings("ignore:`load_pytree` is deprecated:DeprecationWarning")
def test_v1_loads_our_step_with_and_without_a_target(ours):
    check(v1.load(ours / "5"))
    got = v1.load(ours / "5", abstract(OTHER, P(None, "data")))
    check(got)
    assert got["params"]["w"].sharding.is_equivalent_to(NamedSharding(OTHER, P(None, "data")), 2)


def test_stock_reads_it_where_jax_ucp_cannot_be_imported(ours):
    program = f"""
        import sys
        sys.modules["jax_ucp"] = None
        import numpy as np, orbax.checkpoint as ocp
        with ocp.CheckpointManager({str(ours)!r}) as manager:
            tree = manager.restore(5)
        print(tree["step"], np.asarray(tree["params"]["w"]).tobytes().hex())
    """
    out = python("-W", "ignore", "-c", textwrap.dedent(program))
    assert out.split() == ["3", np.asarray(tree()["params"]["w"]).tobytes().hex()]


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_we_read_what_stock_v0_writes(tmp_path, ocdbt, zarr3):
    stock = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.CheckpointManager(tmp_path, item_handlers=stock) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree()))
    checkpoint = ucp.open(tmp_path / "1")
    assert checkpoint.format == "orbax"
    check(checkpoint.restore())
    got = checkpoint.restore(tree(), mesh=OTHER)
    assert jax.tree.structure(got) == jax.tree.structure(tree())
    check(got)
    assert got["params"]["w"].sharding == NamedSharding(OTHER, P("data", "model"))
    with ocp.CheckpointManager(tmp_path, item_handlers=ucp.CheckpointHandler()) as manager:
        check(manager.restore(1, args=ucp.args.Restore(abstract(OTHER, P(None, "data")))))


@needs_v1
def test_we_read_what_stock_v1_writes(tmp_path):
    v1.save(tmp_path / "step", tree())
    checkpoint = ucp.open(tmp_path / "step")
    check(checkpoint.restore())
    check(checkpoint.restore(mesh=OTHER))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_manager_keeps_the_last_steps_beside_items_of_other_kinds(tmp_path, asynchronous):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=asynchronous)
    handlers = {"state": ucp.CheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers, options=options) as manager:
        for step in range(4):
            state = {"w": jnp.full(4, step, jnp.float32)}
            config = ocp.args.JsonSave({"step": step})
            args = ocp.args.Composite(state=ucp.args.Save(state), config=config)
            assert manager.save(step, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        target = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
        mine = ucp.args.Restore(target, mesh=MESH)
        args = ocp.args.Composite(state=mine, config=ocp.args.JsonRestore())
        got = manager.restore(3, args=args)
        assert got["config"] == {"step": 3}
        np.testing.assert_array_equal(got["state"]["w"], np.full(4, 3, np.float32))
        metadata = manager.item_metadata(3)["state"]
        assert metadata.tree["w"].shape == (4,)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), metadata.tree)
        args = ocp.args.Composite(state=ucp.args.Restore(target, mesh=MESH))
        check(manager.restore(2, args=args)["state"], {"w": jnp.full(4, 2.0)})


def test_an_async_save_lets_training_donate_its_buffers(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(MESH, P("data", "model")))
    with ocp.CheckpointManager(tmp_path, item_handlers=ucp.CheckpointHandler()) as manager:
        for i in range(5):
            manager.save(i, args=ucp.args.Save({"x": x}))
            x = step(x)
        manager.wait_until_finished()
        for i in range(5):
            assert (manager.restore(i)["x"] == i).all()


def test_a_tree_that_cannot_be_saved_is_refused_before_orbax_begins(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=ucp.CheckpointHandler()) as manager:
        with pytest.raises(ucp.errors.UnsupportedLeaf, match=r"a/0 is a builtins\.object"):
            manager.save(0, args=ucp.args.Save({"a": [object()]}))
        assert manager.all_steps() == []


def test_a_checkpoint_of_ours_without_its_ucp_json_is_not_taken_for_one_of_orbax(ours, tmp_path):
    shutil.copytree(ours / "5", tmp_path / "5")
    (tmp_path / "5" / "default" / "ucp.json").unlink()
    for path in (tmp_path / "5", tmp_path / "5" / "default"):
        words = r"a universal checkpoint without its ucp\.json"
        with pytest.raises(ucp.errors.NotACheckpoint, match=words):
            ucp.open(path)
