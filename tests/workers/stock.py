"""Stock Orbax, in a process that knows nothing of jax_ucp: restores what each line of stdin asks
for, in JSON: a `path`, and perhaps the axes of a `mesh` and the `api`, v0 or v1. It answers in JSON on
stdout.

An answer is {"arrays": {name: sha256 of its bytes}} or {"error": messages of the error and of its
causes}. It is a process also because stock Orbax, when one read fails, abandons the others, which
complain later wherever they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def digests(tree: Any) -> dict[str, str]:
    """The sha256 of every array of a tree, by its name: keys joined by dots."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, np.ndarray | jax.Array)
        and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def answer(path: str, mesh: Sequence[int] = (), api: str = "v0") -> dict[str, Any]:
    try:
        return {"arrays": digests(restored(path, mesh, api))}
    except Exception as error:
        return {"error": "\n".join(messages(error))}


def restored(path: str, axes: Sequence[int], api: str) -> Any:
    """The tree; on a mesh each array is cut by the last axes that the mesh's axes divide."""
    target = None
    if axes:
        jax.config.update("jax_enable_x64", True)  # files have what JAX would else make smaller
        devices = np.array(jax.devices()[: math.prod(axes)]).reshape(axes)
        mesh = Mesh(devices, [f"axis{i}" for i in range(len(axes))])

        def placed(array: Any) -> jax.ShapeDtypeStruct:
            spec: list[str | None] = [None] * len(array.shape)
            for axis in reversed(range(len(spec))):
                fits = (name for name, n in mesh.shape.items() if array.shape[axis] % n == 0)
                spec[axis] = next((name for name in fits if name not in spec), None)
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        described = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path))
        target = jax.tree.map(placed, getattr(described, "tree", described))
    if api == "v1":
        from orbax.checkpoint import v1

        return v1.load(path, target)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def messages(error: BaseException | None) -> list[str]:
    return [] if error is None else [str(error), *messages(error.__cause__ or error.__context__)]


if __name__ == "__main__":
    sys.modules["jax_ucp"] = None  # type: ignore[assignment]
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(**json.loads(line))) + "\n")
        sys.stdout.flush()
