"""The version of the installed Orbax, and whether it has v1."""

from __future__ import annotations

import orbax.checkpoint as ocp


def _has_v1() -> bool:
    """Whether there is a v1 whose contexts name the handlers of checkpointables."""
    try:
        from orbax.checkpoint import v1
    except ImportError:
        return False
    return hasattr(v1, "save") and hasattr(v1.Context, "checkpointables")


HAS_V1 = _has_v1()
ORBAX_VERSION = ocp.__version__
