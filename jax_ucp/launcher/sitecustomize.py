"""Patches Orbax, as `jax-ucp run` does, in each Python that starts with this folder in PYTHONPATH.

Another `sitecustomize`, which this one hides, is run before.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from jax_ucp.orbax_import import patch_orbax

_FOLDER = Path(__file__).parent
sys.path[:] = [entry for entry in sys.path if Path(entry) != _FOLDER]
_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
patch_orbax()
