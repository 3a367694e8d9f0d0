"""64-bit types, which a thread may have or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental
import numpy as np

# Since jax 0.8 it is `jax.enable_x64`; before, it was an experiment.
enable_x64: Any = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else getattr(jax.experimental, "enable_x64")  # noqa: B009
)


def has_x64() -> bool:
    """Whether this thread has 64-bit types; `enable_x64` holds for one thread only."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64
