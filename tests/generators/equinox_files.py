"""Files that Equinox writes, with the leaves that it wrote.

`PYTHONPATH=. python tests/generators/equinox_files.py OUT [--only PART ...]`, by a Python that has equinox and jax. Each case is
`OUT/<case>/ckpt/model.eqx`, `truth.npz` (leaves by number) and `case.json`. Run with equinox 0.13.8, jax 0.10.2.
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import writing

ABOUT = {
    "mlp": "an MLP behind a line of JSON with its sizes, as Equinox's example writes it",
    "training": "a model with normalisation and dropout, in bfloat16, its Adam's moments, a count, a learning rate,"
    " arrays of numpy in both orders",
}


def mlp():
    sizes = {"in_size": 3, "out_size": 2, "width_size": 5, "depth": 2}
    return sizes, eqx.nn.MLP(**sizes, key=jax.random.key(0))


def training():
    keys = jax.random.split(jax.random.key(1), 3)
    layers = [
        eqx.nn.Linear(4, 6, key=keys[0]),
        eqx.nn.LayerNorm(6),
        eqx.nn.Dropout(0.25),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Linear(6, 2, use_bias=False, key=keys[1]),
    ]
    model = eqx.nn.Sequential(layers)
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    arrays = eqx.filter(model, eqx.is_array)
    moments = jax.tree.map(lambda x: jax.random.normal(keys[2], x.shape), arrays)
    table = np.arange(12, dtype=np.int16).reshape(3, 4)
    more = {"rows": table, "columns": np.asfortranarray(table), "on": True}
    return None, (model, moments, jnp.int32(7), 0.001, more)


def write(name: str, folder: Path) -> None:
    line, tree = CASES[name]()
    (folder / "ckpt").mkdir()
    with (folder / "ckpt" / "model.eqx").open("wb") as file:
        if line:
            file.write((json.dumps(line) + "\n").encode())
        eqx.tree_serialise_leaves(file, tree)
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_array_like(x)]
    about = {"about": ABOUT[name], "writer": writing.versions("equinox", "jax", "numpy")}
    about |= {"options": {}, "at": "ckpt/model.eqx", "others": {}}
    about["dtypes"] = {str(i): x.dtype.name for i, x in enumerate(leaves)}
    writing.write_case(folder, {str(i): x for i, x in enumerate(leaves)}, about)


CASES = {"mlp": mlp, "training": training}


if __name__ == "__main__":
    given = writing.arguments(__doc__).parse_args()
    sys.exit(len(writing.write_each(writing.chosen(CASES, given.only), given.out, write)))
