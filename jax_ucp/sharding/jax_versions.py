"""What releases of JAX call otherwise, and 64-bit types, which a thread may have or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental
import numpy as np


def _since(release: Any, name: str, before: Any) -> Any:
    """The function of a release of JAX, or where this one is older what it was before."""
    return getattr(release, name) if hasattr(release, name) else before()


enable_x64: Any = _since(jax, "enable_x64", lambda: jax.experimental.enable_x64)  # pyright: ignore
set_mesh: Any = _since(jax, "set_mesh", lambda: jax.sharding.use_mesh)  # pyright: ignore


def has_x64() -> bool:
    """Whether this thread has 64-bit types; `enable_x64` holds for one thread only."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64
