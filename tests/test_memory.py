"""What a save and a restore hold beside the state: their peaks, counted by the kernel."""

import json
from pathlib import Path

import pytest

from programs import python

ROOT = Path(__file__).parent.parent
BUDGET_MIB, BEYOND_MIB = 16, 64
# more than budget and the rest together: what takes a second copy of the state is found out
MIB = 144


# CPU devices taken for devices with a memory of their own.
ACCELERATOR = "from jax_ucp.sharding.output_buffers import ReadRequest as R; R.in_place = False"


def measured(before: str = "", **request) -> dict:
    """A state of `count` float32 arrays on 8 devices by rows, saved or restored as asked."""
    script = f"{before}\nfrom benchmarks.memory_worker import main\nmain({request!r})"
    env = {"PYTHONPATH": str(ROOT)}
    if before:  # the arrays are XLA's then, and malloc must not keep what they give back
        env["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    return json.loads(python("-c", script, env=env, cwd=ROOT).splitlines()[-1])


@pytest.fixture(scope="module")
def one_array(tmp_path_factory) -> dict:
    """A request for a state of one large array, which is saved; and what its save took."""
    path = str(tmp_path_factory.mktemp("memory") / "one")
    request = {"path": path, "shape": [6144, 6144], "count": 1, "times": 1}
    request |= {"peer": "jax_ucp", "budget": BUDGET_MIB << 20}
    request |= {"onto": "columns", "dtype": "float32"}
    return request | {"took": measured(**request, do="save")}


def test_a_save_makes_no_copy_of_the_state(one_array):
    assert one_array["took"]["peak_mib"] < BUDGET_MIB + BEYOND_MIB


@pytest.mark.parametrize("before", ["", ACCELERATOR], ids=["cpu", "accelerator"])
@pytest.mark.parametrize(("dtype", "result_mib"), [("float32", MIB), ("bfloat16", MIB // 2)])
def test_a_restore_holds_its_arrays_and_the_budget(one_array, dtype, result_mib, before):
    took = measured(before, **one_array | {"do": "restore", "dtype": dtype})
    assert result_mib <= took["peak_mib"] + 8  # the measure itself sees the arrays
    assert took["peak_mib"] < result_mib + BUDGET_MIB + BEYOND_MIB


def test_arrays_that_are_released_are_given_back(tmp_path):
    request = {"path": str(tmp_path / "many"), "shape": [2048, 2048], "count": 8}
    request |= {"peer": "jax_ucp", "dtype": "float32"}
    request |= {"budget": 8 << 20, "onto": "columns"}
    measured(**request, do="save")
    left = measured(**request, do="restore", times=12)["left_mib"]
    assert max(left) < 24
