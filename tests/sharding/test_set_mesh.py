"""Abstract targets without devices go on the mesh that is set, by whatever way of restoring."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core.meta import Partitioned
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import mesh_of
from jax_ucp.errors import ShardingWarning
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.sharding.jax_versions import set_mesh

SAVED_ON = mesh_of(4, 2)
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {"w": P("model", "data"), "b": P("data"), "scale": P(), "key": P()}


def mesh_of(kind: str) -> Mesh:
    """Of other devices than the arrays were saved on."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(TYPES[kind],) * 2)


def state() -> dict[str, Any]:
    specs = {"w": P("data", "model"), "b": P(), "scale": P(), "key": P()}
    values = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    values |= {"scale": jnp.float32(3), "key": jax.random.key(5)}
    placed = {name: NamedSharding(SAVED_ON, spec) for name, spec in specs.items()}
    return {name: jax.device_put(values[name], own) for name, own in placed.items()}


def by_manager(path: Path, target: Any) -> Any:
    with ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler()) as manager:
        return manager.restore(0, args=ucp.args.Restore(target))


def by_registry(args: Callable[[Any], Any]) -> Callable[[Path, Any], Any]:
    def restore(path: Path, target: Any) -> Any:
        with ocp.CheckpointManager(path, handler_registry=ucp.handler_registry()) as manager:
            return manager.restore(0, args=args(target))

    return restore


def everywhere(path: Path, target: Any) -> Any:
    with ucp.orbax_everywhere(), ocp.CheckpointManager(path) as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(target))


def by_v1(path: Path, target: Any) -> Any:
    from orbax.checkpoint import v1

    with ucp.orbax_context():
        return v1.load(path / "0", target, checkpointable_name="default")


WAYS: dict[str, Callable[[Path, Any], Any]] = {
    "open": lambda path, target: ucp.open(path, step=0).restore(target),
    "shared": lambda path, target: ucp.open(path, step=0).restore(target, share_reads=True),
    "manager": by_manager,
    "StandardRestore": by_registry(ocp.args.StandardRestore),
    "PyTreeRestore": by_registry(ocp.args.PyTreeRestore),
    "restore_args": by_registry(
        lambda target: ocp.args.PyTreeRestore(
            target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
        )
    ),
    "everywhere": everywhere,
}
if HAS_V1:
    WAYS["context"] = by_v1


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(0, args=ucp.args.Save(state()))
        manager.wait_until_finished()
    return path


def abstract(mesh: Mesh) -> dict[str, Any]:
    """What `jax.eval_shape` gives within a mesh, with specs of its own."""
    placed = {name: NamedSharding(mesh.abstract_mesh, spec) for name, spec in SPECS.items()}
    arrays = state().items()
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed[n]) for n, x in arrays}


def check(got: dict[str, Any], mesh: Mesh, specs: dict[str, P]) -> None:
    for name, want in state().items():
        sharding = got[name].sharding
        assert (sharding.mesh, sharding.mesh.axis_types) == (mesh, mesh.axis_types), name
        assert sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), want.ndim), name
        assert (got[name] == jax.device_put(want, got[name].sharding)).all(), name


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_target_on_an_abstract_mesh_goes_on_the_one_that_is_set_as_it_says(run, way, kind):
    mesh = mesh_of(kind)
    with set_mesh(mesh):
        check(WAYS[way](run, abstract(mesh)), mesh, SPECS)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"restore_args"}))  # they say numpy then
def test_a_target_without_shardings_goes_on_the_mesh_that_is_set_by_the_saved_specs(run, way, kind):
    mesh = mesh_of(kind)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())
    with set_mesh(mesh):
        check(WAYS[way](run, target), mesh, {**SPECS, "w": P("data", "model"), "b": P()})


@pytest.mark.parametrize("way", WAYS)
def test_a_target_on_an_abstract_mesh_of_other_axes_than_the_one_set_is_refused(run, way):
    """And never goes on the mesh of the file. Orbax v1 itself looks at the one that is set."""
    target = abstract(mesh_of("explicit"))
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    refused = r"no sharding on devices.*set a mesh|not found in mesh"
    with pytest.raises(Exception, match=refused):
        WAYS[way](run, target)
    with set_mesh(other), pytest.raises(Exception, match=refused):
        WAYS[way](run, target)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)


@pytest.mark.parametrize("kind", TYPES)
def test_an_abstract_model_of_flax_is_restored_by_its_own_names(tmp_path, kind):
    with set_mesh(SAVED_ON):
        saved = nnx.state(Model(nnx.Rngs(0)))
    path = tmp_path / "run"
    with ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(0, args=ucp.args.Save(saved))
    mesh = mesh_of(kind)
    with set_mesh(mesh):
        target = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(1))))
        for name, way in WAYS.items():
            got = way(path, target)
            kernel = got["linear"]["kernel"][...]
            assert kernel.sharding == NamedSharding(mesh, P("data", "model")), name
            assert got["linear"]["bias"][...].sharding.mesh == mesh, name
            assert np.array_equal(kernel, saved["linear"]["kernel"][...]), name


def test_boxes_of_linen_without_shardings_go_by_their_names_and_logical_ones_by_what_was_saved(run):
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    mesh = mesh_of("auto")
    with set_mesh(mesh):
        for names, spec in ((("model", None), P("model")), (("embed", "mlp"), P("data", "model"))):
            target = {"w": Partitioned(leaf, names=names)}
            got = ucp.open(run, step=0).restore(target, partial=True)["w"].value
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), names


def test_what_eval_shape_leaves_to_the_compiler_is_no_spec(run):
    """Of an array on automatic axes it says none, which is not that every device has all of it."""
    mesh = mesh_of("auto")
    own = NamedSharding(mesh.abstract_mesh, P())
    target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=own)}
    checkpoint, want = ucp.open(run, step=0), NamedSharding(mesh, P("data", "model"))
    assert checkpoint.restore(target, mesh=mesh, partial=True)["w"].sharding == want
    with set_mesh(mesh):
        assert checkpoint.restore(target, partial=True)["w"].sharding == want


def test_a_restore_without_a_target_is_on_the_mesh_that_is_set_only_if_it_is_the_saved_one(run):
    checkpoint = ucp.open(run, step=0)
    same = Mesh(SAVED_ON.devices, SAVED_ON.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with set_mesh(same):
        want = NamedSharding(same, P("data", "model"))
        assert checkpoint.restore(mesh="saved")["w"].sharding == want
    words = "w: it is on the mesh that it was saved from, not"
    with set_mesh(mesh_of("explicit")), pytest.warns(ShardingWarning, match=words):
        got = checkpoint.restore(mesh="saved")["w"]
    assert got.sharding == NamedSharding(SAVED_ON, P("data", "model"))


def test_an_optimizer_state_goes_on_the_mesh_that_is_set_as_its_parameters_say():
    checkpoint = ucp.open(Path(__file__).parents[1] / "data" / "deepspeed" / "z1_bf16_dp2")
    mesh = mesh_of("explicit")
    params = checkpoint.restore()["param"]
    with set_mesh(mesh):
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        for spec in (None, P()):
            own = spec and NamedSharding(mesh.abstract_mesh, spec)
            like = partial(jax.ShapeDtypeStruct, sharding=own)
            target = {name: like(x.shape, x.dtype) for name, x in plain.items()}
            got = checkpoint.plan_optimizer(optax.adam(1e-3), target, check=False).restore()
            meshes = {leaf.sharding.mesh for leaf in jax.tree.leaves(got)}
            assert meshes == {mesh}
