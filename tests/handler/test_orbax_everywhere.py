"""Frameworks that build stock Orbax's managers, contexts and handlers inside themselves: within
`orbax_everywhere` they keep our format. Each framework's calls are written down here, so that no
test needs it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from handler_cases import MESH, OTHER, abstract, check, needs_v1, stock_warns, tree
from jax_ucp.errors import TreeMismatch

NUMBERS = ("params", "opt")


def numbers(whole):
    return {name: whole[name] for name in NUMBERS}


def pytree_manager(path) -> ocp.CheckpointManager:
    """As tunix 0.1 and MaxText build theirs of v0, with arguments of stock Orbax's."""
    handlers = {"model_params": ocp.PyTreeCheckpointHandler(use_zarr3=True)}
    return ocp.CheckpointManager(path, item_handlers=handlers)


@stock_warns
def test_a_manager_with_handlers_of_its_own_keeps_our_format(tmp_path):
    saved = numbers(tree())
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), saved)
    target = numbers(abstract(OTHER, P("data")))
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    with ucp.orbax_everywhere(), pytree_manager(tmp_path) as manager:
        items = ocp.args.Composite(model_params=ocp.args.PyTreeSave(saved, save_args=save_args))
        manager.save(3, args=items, custom_metadata={"run": 1})
        manager.wait_until_finished()
        assert (tmp_path / "3" / "model_params" / "ucp.json").is_file()
        asked = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
        found = manager.restore(3, args=ocp.args.Composite(model_params=asked))["model_params"]
        assert manager.metadata(3).custom_metadata == {"run": 1}
    check(found, saved)
    assert found["params"]["w"].sharding == NamedSharding(OTHER, P("data"))
    with pytree_manager(tmp_path) as stock:
        asked = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
        check(stock.restore(3, args=ocp.args.Composite(model_params=asked))["model_params"], saved)


@stock_warns
@pytest.mark.parametrize("make", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_checkpointers_keep_our_format(tmp_path, make):
    saved = numbers(tree())
    with ucp.orbax_everywhere(), make() as checkpointer:
        checkpointer.save(tmp_path / "c", saved)
        if make is ocp.StandardCheckpointer:
            checkpointer.wait_until_finished()
        assert (tmp_path / "c" / "ucp.json").is_file()
        check(checkpointer.restore(tmp_path / "c", numbers(abstract(OTHER, P("data")))), saved)


def test_weights_alone_are_restored_as_maxtext_asks_for_them(tmp_path):
    saved = numbers(tree())
    want = {"params": {**saved["params"], "extra": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    how = ocp.checkpoint_utils.construct_restore_args(want)
    with ucp.orbax_everywhere(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", saved)
        found = checkpointer.restore(tmp_path / "c", item=want, transforms={}, restore_args=how)
    assert found["params"].pop("extra") is want["params"]["extra"]
    check(found, {"params": saved["params"]})


def test_outside_of_it_stock_is_as_it_was(tmp_path):
    before = {name: vars(ocp.PyTreeCheckpointHandler)[name] for name in ("save", "restore")}
    with pytest.raises(KeyError), ucp.orbax_everywhere():
        raise KeyError
    assert all(vars(ocp.PyTreeCheckpointHandler)[name] is value for name, value in before.items())
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", numbers(tree()))
    assert not (tmp_path / "c" / "ucp.json").exists()


def test_contexts_that_overlap_leave_stock_as_it_was():
    """As two threads have them: the first to begin need not be the last to end."""
    before = vars(ocp.PyTreeCheckpointHandler)["save"]
    first, second = ucp.orbax_everywhere(), ucp.orbax_everywhere()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(ocp.PyTreeCheckpointHandler)["save"] is not before
    second.__exit__(None, None, None)
    assert vars(ocp.PyTreeCheckpointHandler)["save"] is before


def test_what_every_host_saves_for_itself_stays_with_stock(tmp_path):
    options = ocp.options.MultiprocessingOptions(primary_host=None)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ucp.orbax_everywhere():
        handler.save(tmp_path / "c", args=ocp.args.PyTreeSave({"w": np.arange(4.0)}))
    assert list(tmp_path.rglob("ucp.json")) == []


@needs_v1
@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpointer_with_a_context_of_its_own_keeps_our_format(tmp_path, in_background):
    """As tunix and MaxText build theirs: a context from scratch, policies, bare states."""
    from orbax.checkpoint import v1

    context = v1.Context()
    context.array.saving.use_zarr3 = True
    context.pytree.loading.partial_load = True
    policies = v1.training
    saved = nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with ucp.orbax_everywhere():
        manager = policies.Checkpointer(
            tmp_path,
            context=context,
            save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(2),
            preservation_policy=policies.preservation_policies.LatestN(2),
        )
        for step in range(7):
            if in_background:
                manager.save_checkpointables_async(step, {"model_params": saved})
            else:
                manager.save_checkpointables(step, {"model_params": saved})
            manager.wait()
        assert [each.step for each in manager.checkpoints] == [4, 6]
        assert (tmp_path / "6" / "model_params" / "ucp.json").is_file()
        found = manager.load_checkpointables(6, {"model_params": saved})["model_params"]
        manager.close()
    assert type(found) is type(saved)
    check(nnx.to_pure_dict(found), nnx.to_pure_dict(saved))


@needs_v1
def test_what_a_partial_load_lacks_stays_as_the_target_has_it(tmp_path):
    from orbax.checkpoint import v1

    rows = NamedSharding(MESH, P("data"))
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows), "left": ...}
    target |= {"rngs": jax.ShapeDtypeStruct((2,), jnp.uint32), "head": jnp.ones(3)}
    with ucp.orbax_everywhere():
        v1.save(tmp_path / "s", {"w": jnp.arange(8.0), "left": jnp.ones(2), "other": jnp.ones(2)})
        assert (tmp_path / "s" / "state" / "ucp.json").is_file()
        context = v1.Context()
        context.pytree.loading.partial_load = True
        with context:
            found = v1.load(tmp_path / "s", target)
        with pytest.raises(Exception, match="rngs: in the target, but not") as error:
            v1.load(tmp_path / "s", target)
    assert isinstance(error.value.__cause__ or error.value, TreeMismatch)
    assert found["rngs"] is target["rngs"]
    assert found["left"] is ...
    assert found["head"] is target["head"]
    np.testing.assert_array_equal(found["w"], np.arange(8.0))
    assert found["w"].sharding == target["w"].sharding
