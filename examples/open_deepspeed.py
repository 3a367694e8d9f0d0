"""A real DeepSpeed checkpoint, written by two ranks of a PyTorch job, in JAX: opened, planned,
converted, verified, and restored with its optimizer onto a mesh of eight devices. No torch, and
nothing is unpickled.

    python examples/open_deepspeed.py [CHECKPOINT]
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp

SHIPPED = Path(__file__).parent.parent / "tests" / "data" / "deepspeed" / "z1_bf16_dp2"


def main(path: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    rules = [(r"(attention|mlp)\..*\.weight$", P("data", "model"))]

    checkpoint = ucp.open(path)
    print(
        f"{checkpoint.format}: {len(checkpoint.params)} parameters, {checkpoint.nbytes:,} bytes"
        " with their states"
    )
    name, param = max(checkpoint.params.items(), key=lambda item: len(item[1].where()))
    print(f"{name} {param.shape} is stored in {len(param.where())} pieces:")
    for piece in param.where():
        print(f"    {piece.target} is {piece}")

    plan = checkpoint.plan(mesh=mesh, rules=rules)
    print(
        f"onto {dict(mesh.shape)}: {plan.read_bytes:,} bytes to read, {len(plan.notes)} axes that"
        " do not divide"
    )
    straight = checkpoint.restore(mesh=mesh, rules=rules)

    with tempfile.TemporaryDirectory() as directory:
        converted = checkpoint.save(Path(directory) / "universal")
        checks = list(converted.verify())
        print(
            f"converted and verified: {len(checks)} checks,"
            f" {sum(fault is not None for _, fault in checks)} faults"
        )
        kept = converted.restore(mesh=mesh, rules=rules)

    same = [
        np.array_equal(straight[state][name], kept[state][name])
        for state in straight
        for name in straight[state]
    ]
    print(
        f"restored straight from the ranks' files and from the conversion: {sum(same)} of"
        f" {len(same)} arrays equal"
    )
    for state, arrays in straight.items():
        array = next(iter(arrays.values()))
        print(
            f"    {state}: {len(arrays)} arrays, the first of {array.dtype} {array.shape} as"
            f" {array.sharding.spec}"
        )
    if not all(same):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
