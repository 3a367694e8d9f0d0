"""Things that the command line names: functions of the user's modules, trees of models."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax_ucp
from jax_ucp.arguments import local_path
from jax_ucp.errors import NotACheckpoint, TreeMismatch
from jax_ucp.files.path import file_path
from jax_ucp.inspection.mapping_report import tree_shapes
from jax_ucp.layout.fragments import Shape


def target_shapes(target: str) -> Mapping[str, Shape]:
    """The parameters of a model, by their names with slashes.

    `target` is `module:function`, which returns a tree of arrays or `ShapeDtypeStruct`s; what
    `inspect --json` printed of a checkpoint; or a checkpoint. Of a tree with `param` at the top,
    that part is meant.

    Raises TreeMismatch where it is none of these.
    """
    path = file_path(target)
    if path.suffix == ".json" and path.is_file():
        try:
            leaves = json.loads(path.read_bytes())["leaves"]
            shapes = {leaf["leaf"]: tuple(leaf["shape"]) for leaf in leaves if "shape" in leaf}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TreeMismatch(f"{target} is not what `inspect --json` prints: {error}") from error
    elif path.exists():
        shapes = {leaf.label: leaf.shape for leaf in jax_ucp.open(target).leaves if leaf.has_array}
    else:
        shapes = tree_shapes(imported(target, "tree"))
    params = [name for name in shapes if name.startswith("param/")]
    return {name.removeprefix("param/"): shapes[name] for name in params} or shapes


def imported(target: str, what: str) -> Any:
    """The result of the function `module:function`, of which `what` is expected.

    Raises NotACheckpoint where it is no name of a function, TreeMismatch where the function cannot
    be called.
    """
    local_path(target)
    module, colon, function = target.partition(":")
    if not colon:
        raise NotACheckpoint(
            f"{target} is neither a path that exists nor a function; write module:function"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise TreeMismatch(f"{target} gives no {what}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
