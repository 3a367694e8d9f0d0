"""Targets without arrays: shardings, specs, and the abstract tree that a restore would give."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import mesh_of
from jax_ucp.errors import TreeMismatch
from jax_ucp.sharding.jax_versions import set_mesh

MESH, OTHER = mesh_of(4, 2), mesh_of(2, 4)
RULES = [("w$", P("model", "data"))]


def tree() -> dict:
    on_mesh = NamedSharding(MESH, P("data", "model"))
    return {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), on_mesh),
        "b": jax.device_put(np.ones(8, np.float32), NamedSharding(MESH, P("data"))),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(0), 4), NamedSharding(MESH, P("data"))
        ),
        "host": np.arange(3),
        "step": 7,
        "name": "run",
        "none": None,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> ucp.Checkpoint:
    path = tmp_path_factory.mktemp("run") / "step"
    return ucp.Checkpoint.of(tree()).save(path)


def on_devices(restored: dict) -> dict:
    return {name: leaf.sharding for name, leaf in restored.items() if isinstance(leaf, jax.Array)}


@pytest.mark.parametrize(
    "how", [{"mesh": OTHER}, {"mesh": OTHER, "rules": RULES}, {"mesh": "saved"}]
)
def test_the_abstract_tree_is_that_of_the_restore(checkpoint, how):
    abstract, restored = checkpoint.abstract(**how), checkpoint.restore(**how)
    assert jax.tree.structure(abstract) == jax.tree.structure(restored)
    for name, leaf in restored.items():
        assert getattr(leaf, "shape", None) == getattr(abstract[name], "shape", None)
        assert getattr(leaf, "dtype", None) == getattr(abstract[name], "dtype", None)
    for name, sharding in on_devices(restored).items():
        assert abstract[name].sharding.is_equivalent_to(sharding, restored[name].ndim), name
        assert abstract[name].sharding.mesh == sharding.mesh
    compiled = jax.jit(lambda state: state["w"] * 2).lower({"w": abstract["w"]}).compile()
    np.testing.assert_array_equal(compiled({"w": restored["w"]}), 2 * np.asarray(tree()["w"]))
    again = checkpoint.restore(abstract)
    assert on_devices(again) == on_devices(restored)
    np.testing.assert_array_equal(again["host"], restored["host"])


def test_an_abstract_tree_without_a_mesh_has_no_shardings(checkpoint):
    assert checkpoint.abstract()["w"].sharding is None
    with pytest.raises(ValueError, match="rules= are for a mesh"):
        checkpoint.abstract(rules=RULES)


@pytest.mark.parametrize("as_specs", [False, True])
def test_shardings_and_specs_are_a_target(checkpoint, as_specs):
    specs = {"w": P("model"), "b": P(), "keys": P("data"), "host": P(None)}
    target = {n: spec if as_specs else NamedSharding(OTHER, spec) for n, spec in specs.items()}
    options = {"mesh": OTHER} if as_specs else {}
    restored = checkpoint.restore(target, partial=True, narrow_integers=True, **options)
    for name, spec in specs.items():
        sharding = NamedSharding(OTHER, spec)
        assert restored[name].sharding.is_equivalent_to(sharding, restored[name].ndim), name
    np.testing.assert_array_equal(restored["w"], np.asarray(tree()["w"]))
    np.testing.assert_array_equal(restored["host"], tree()["host"])
    assert jax.numpy.array_equal(restored["keys"], tree()["keys"])


def test_a_sharding_for_more_axes_than_an_array_has_is_refused_by_its_name(checkpoint):
    with pytest.raises(TreeMismatch, match=r"^b: .* is for 2 axes or more, and the array has 1"):
        checkpoint.restore({"b": NamedSharding(MESH, P("data", "model"))}, partial=True)


def test_specs_go_on_the_mesh_that_is_set_and_are_refused_without_one(checkpoint):
    with pytest.raises(TreeMismatch, match=r"w: the target has .*no mesh for it: give mesh="):
        checkpoint.restore({"w": P("data")}, partial=True)
    with set_mesh(jax.make_mesh((8,), ("x",))):
        restored = checkpoint.restore({"w": P("x")}, partial=True)
    assert restored["w"].sharding.spec == P("x")


def test_a_sharding_is_no_value_to_keep(checkpoint):
    target = {"w": NamedSharding(MESH, P()), "head": NamedSharding(MESH, P())}
    with pytest.raises(TreeMismatch, match=r"head: not in the checkpoint, and .* no value to keep"):
        checkpoint.restore(target, partial=True, missing="keep")


def test_the_target_on_the_same_mesh_wins_and_on_another_the_rules_do(checkpoint):
    own = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(OTHER, P("data")))
    restored = checkpoint.restore({"w": own}, partial=True, mesh=OTHER, rules=RULES)
    assert restored["w"].sharding.spec == P("data")
    elsewhere = jax.make_mesh((8,), ("x",))
    restored = checkpoint.restore({"w": own}, partial=True, mesh=elsewhere, rules=[("w", P("x"))])
    assert restored["w"].sharding.spec == P("x")


def test_what_cannot_be_a_target_is_said_in_words_of_a_restore(checkpoint):
    with pytest.raises(TreeMismatch, match="w: the target has a object; it may have an array") as e:
        checkpoint.restore({"w": object()}, partial=True)
    assert "save" not in str(e.value)
    with pytest.raises(ValueError, match=r"mesh= is an AbstractMesh, .* plan_reads takes a mesh"):
        checkpoint.restore(mesh=AbstractMesh((8,), ("x",)))
    with pytest.raises(ValueError, match=r"mesh= is \{'data': 8\}, .* plan_reads takes a mesh"):
        checkpoint.plan(mesh={"data": 8}, rules=RULES)
