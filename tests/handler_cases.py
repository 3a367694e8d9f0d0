"""A state on a mesh, and what it must be when it comes back: for the tests of the handlers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import mesh_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.handler.versions import HAS_V1

MESH = mesh_of(4, 2)
OTHER = mesh_of(2, 3)

NUMBERS = "params", "opt", "step"  # StandardCheckpointer takes no strings

needs_v1 = pytest.mark.skipif(not HAS_V1, reason="this Orbax has no v1, or an early one")

NOT_SAID = "ignore:Sharding info not provided when restoring:UserWarning"
stock_warns = pytest.mark.filterwarnings(
    NOT_SAID, "ignore:`StandardCheckpoint.*:DeprecationWarning"
)


def tree() -> dict:
    rng = np.random.default_rng(0)
    params = {
        "w": jax.device_put(
            rng.normal(size=(8, 6)).astype(np.float32), NamedSharding(MESH, P("data", "model"))
        ),
        "b": jax.device_put(rng.normal(size=6).astype(jnp.bfloat16), NamedSharding(MESH, P())),
        "layers": [jnp.arange(3.0), jnp.arange(4, dtype=jnp.int32)],
    }
    opt = optax.adam(1e-3).init(params)
    return {"params": params, "opt": opt, "step": 3, "name": "run", "none": None}


def check(got, want=None) -> None:
    """The same leaves in the same places, whatever the containers became."""
    wanted = {names(path): leaf for path, leaf in jax.tree.leaves_with_path(want or tree())}
    found = {names(path): leaf for path, leaf in jax.tree.leaves_with_path(got)}
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        if isinstance(leaf, jax.Array):
            assert same_bits(np.asarray(found[name]), np.asarray(leaf)), name
        else:
            assert found[name] == leaf, name


def names(path) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None)))) for k in path)


def abstract(mesh: Mesh, spec: P):
    def leaf(x):
        if not isinstance(x, jax.Array):
            return x
        sharding = NamedSharding(mesh, spec if x.ndim == 2 else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree())
