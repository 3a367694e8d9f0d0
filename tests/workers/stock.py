"""Stock Orbax, in a process that knows nothing of jax_ucp: restores each path on stdin, answers in
JSON on stdout.

An answer is {"arrays": {name: sha256 of its bytes}} or {"error": messages of the error and of its
causes}. It is a process also because stock Orbax, when one read fails, abandons the others, which
complain later wherever they are.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


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


def answer(path: str) -> dict[str, Any]:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return {"arrays": digests(checkpointer.restore(path))}
    except Exception as error:
        return {"error": "\n".join(messages(error))}


def messages(error: BaseException | None) -> list[str]:
    return [] if error is None else [str(error), *messages(error.__cause__ or error.__context__)]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line.rstrip("\n"))) + "\n")
        sys.stdout.flush()
