"""What releases of JAX call otherwise, and 64-bit types, which a thread may have or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental
import numpy as np

enable_x64: Any
set_mesh: Any
try:
    enable_x64, set_mesh = jax.enable_x64, jax.set_mesh  # pyright: ignore
except AttributeError:  # before 0.8
    enable_x64, set_mesh = jax.experimental.enable_x64, jax.sharding.use_mesh  # pyright: ignore


def has_x64() -> bool:
    """Whether this thread has 64-bit types; `enable_x64` holds for one thread only."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64
