"""Trees of other libraries, saved by v1's checkpointer in our format and loaded as what they are: boxes
of Linen's, PRNG keys, and modules of Equinox and Penzai where those are installed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from handler_cases import OTHER, needs_v1, tree


def v1_round_trip(path, value, target):
    from orbax.checkpoint import v1

    with v1.training.Checkpointer(path, context=ucp.orbax_context()) as checkpointer:
        checkpointer.save_checkpointables(0, {"model": value})
        assert (path / "0" / "model" / "ucp.json").is_file()
        return checkpointer.load_checkpointables(0, {"model": target})["model"]


@needs_v1
def test_boxes_of_linen_come_back_as_boxes(tmp_path):
    box = linen.Partitioned(jnp.arange(8.0), names=("data",))
    found = v1_round_trip(tmp_path, {"w": box}, {"w": box})["w"]
    assert isinstance(found, linen.Partitioned)
    assert found.names == ("data",)
    np.testing.assert_array_equal(found.value, box.value)


@needs_v1
def test_keys_come_back_by_the_metadata_of_what_was_saved(tmp_path):
    from orbax.checkpoint import v1

    saved = {"key": jax.random.key(3), "many": jax.random.split(jax.random.key(4), 8), "n": 3}
    with v1.training.Checkpointer(tmp_path, context=ucp.orbax_context()) as checkpointer:
        checkpointer.save(0, saved)
        for target in (None, checkpointer.metadata(0).metadata):
            found = checkpointer.load(0, target)
            assert found["n"] == 3
            for name in ("key", "many"):
                assert found[name].dtype == saved[name].dtype
                assert (jax.random.key_data(found[name]) == jax.random.key_data(saved[name])).all()


def test_the_metadata_of_an_item_has_no_values(tmp_path):
    numbers = {name: tree()[name] for name in ("params", "opt", "step")}
    stock = ocp.CheckpointManager(tmp_path / "stock", item_handlers=ocp.PyTreeCheckpointHandler())
    ours = ocp.CheckpointManager(tmp_path / "ours", item_handlers=ucp.CheckpointHandler())
    stock.save(0, args=ocp.args.PyTreeSave(numbers))
    ours.save(0, args=ucp.args.Save(numbers))
    said = []
    for manager in (stock, ours):
        manager.wait_until_finished()
        item = manager.item_metadata(0).tree
        leaves = jax.tree.leaves(item, is_leaf=lambda leaf: hasattr(leaf, "dtype"))
        said.append([(type(leaf), getattr(leaf, "shape", None), leaf.dtype) for leaf in leaves])
        manager.close()
    assert said[0] == said[1]
    assert not any(issubclass(kind, np.ndarray | jax.Array | int) for kind, _, _ in said[1])


@needs_v1
def test_modules_of_equinox_are_trees(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    fresh = eqx.filter(eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(1)), eqx.is_array)
    found = v1_round_trip(tmp_path, arrays, fresh)
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(eqx.combine(found, static)(x), model(x))
    sharding = NamedSharding(OTHER, P())

    def like(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    target = jax.tree.map(like, arrays)
    moved = ucp.open(tmp_path / "0" / "model").restore(target)
    assert moved.layers[0].weight.sharding == sharding


@needs_v1
def test_models_of_penzai_are_trees(tmp_path):
    pz = pytest.importorskip("penzai.pz")
    from penzai.models import simple_mlp

    how = {"init_base_rng": jax.random.key(0), "feature_sizes": [8, 16, 4]}
    model = simple_mlp.MLP.from_config(name="mlp", **how)
    _, values = pz.unbind_params(model, freeze=True)
    found = v1_round_trip(tmp_path, values, values)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(found) == jax.tree.structure(values)
