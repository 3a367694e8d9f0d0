"""Training that DeepSpeed began goes on in JAX: the next losses are those that torch gives from the same state."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from resume_deepspeed import go_on, restored

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
# Each ZeRO stage, each precision, tensor parallelism with its variants of attention and MLP, and DeepSpeed's own trap.
CASES = ["z1_fp32_dp4", "z1_bf16_dp2", "z2_bf16_dp3", "z2_fp32_dp3_roundrobin", "z3_bf16_dp2", "z3_fp16_dp2_subgroups"]
CASES += ["tp2_dp1_z1_fp32_gqa", "tp2_dp2_z1_bf16_swiglu"]


def distance(losses: list[float], want: list[float]) -> float:
    return float(np.abs(np.array(losses) / np.array(want) - 1).max())


@pytest.mark.parametrize("case", CASES)
def test_the_next_losses_are_those_of_torch(case):
    run = restored(case, MESH)
    losses, recorded = go_on(run), run.about["dense_continuation"]
    # Torch going on in fp32 from the same state; a live run in 16 bits is as far from that as it was when recorded.
    assert distance(losses, recorded["losses_fp32"]) < 1e-5
    gap = distance(recorded["losses_fp32"], recorded["live_losses"])
    assert distance(losses, recorded["live_losses"]) <= gap + 1e-5


@pytest.mark.parametrize("wrong", ["moments", "step", "queries and keys"])
def test_a_state_that_is_wrong_gives_other_losses(wrong):
    run = restored("z1_fp32_dp4", MESH)
    clip, (adam, *rest) = run.opt_state
    if wrong == "moments":
        adam = adam._replace(mu=jax.tree.map(np.zeros_like, adam.mu))
    elif wrong == "step":
        adam = adam._replace(count=adam.count + 1)
    else:
        attention = run.params["layers"][0]["attention"]
        attention["q"], attention["k"] = attention["k"], attention["q"]
    losses = go_on(replace(run, opt_state=(clip, (adam, *rest))))
    assert distance(losses, run.about["dense_continuation"]["losses_fp32"]) > 1e-5
