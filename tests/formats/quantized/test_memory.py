"""A conversion of a quantised weight holds its budget, and neither the weight nor its codes."""

import sys
from pathlib import Path

import pytest

from benchmarks.quantized import _write, block_fp8, bnb_nf4, gptq
from programs import python

ROOT = Path(__file__).parents[3]
N, BUDGET_MIB, BEYOND_MIB = 6144, 8, 16  # the weight has 72 MiB, as float32 144
SCRIPT = """
import sys, jax_ucp
def peak():
    with open("/proc/self/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("VmHWM"))) << 10
source, target, dtype, budget = sys.argv[1:]
checkpoint = jax_ucp.open(source, dequantize=dtype)
before = peak()
checkpoint.save(target, budget_bytes=int(budget))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is counted by Linux")
@pytest.mark.parametrize(
    ("make", "dtype"), [(block_fp8, "bfloat16"), (gptq, "float16"), (bnb_nf4, "bfloat16")]
)
def test_a_conversion_holds_its_budget_and_not_the_weight(make, dtype, tmp_path):
    _write(tmp_path / "source", *make(N))
    arguments = [tmp_path / "source", tmp_path / "target", dtype, BUDGET_MIB << 20]
    assert int(python("-c", SCRIPT, *arguments, cwd=ROOT)) < (BUDGET_MIB + BEYOND_MIB) << 20
