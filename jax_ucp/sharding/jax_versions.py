"""Functions that releases of JAX name differently: 64-bit types and the mesh of a thread."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental
import numpy as np
from jax.sharding import Mesh

enable_x64: Any
try:
    enable_x64 = jax.enable_x64  # pyright: ignore
except AttributeError:  # before 0.8
    enable_x64 = jax.experimental.enable_x64  # pyright: ignore

set_mesh: Any
try:
    set_mesh = jax.set_mesh  # pyright: ignore
except AttributeError:  # before 0.7.1
    set_mesh = jax.sharding.use_mesh  # pyright: ignore

_get_mesh: Any
try:
    _get_mesh = jax.sharding.get_mesh  # pyright: ignore
except AttributeError:  # before 0.8.1
    from jax._src.mesh import get_concrete_mesh as _get_mesh


def has_x64() -> bool:
    """Whether this thread has 64-bit types; `enable_x64` holds for one thread only."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def mesh_in_scope() -> Mesh | None:
    mesh = _get_mesh()
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None
