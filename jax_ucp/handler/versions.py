"""The version of the installed Orbax, and whether it has v1."""

from __future__ import annotations

from contextlib import suppress

import orbax.checkpoint as ocp

ORBAX_VERSION = ocp.__version__
# whether there is a v1 whose contexts name the handlers of checkpointables
HAS_V1 = False
with suppress(ImportError):
    from orbax.checkpoint import v1

    HAS_V1 = hasattr(v1, "save") and hasattr(v1.Context, "checkpointables")
