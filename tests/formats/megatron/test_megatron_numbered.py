"""Whose a state of Megatron's numbered optimizers is: one way to fill the groups, or none."""

import numpy as np
import pytest

from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.files.path import file_path
from jax_ucp.formats.megatron.model import EMBEDDING
from jax_ucp.formats.megatron.numbered import Module, ModuleState, numbered_states
from jax_ucp.states.pairing import Undecided

WHERE = file_path("/run/model_optim_rng.pt")
LINEAR = "decoder.layers.0.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def tensor(key, *shape, dtype=np.float32):
    return StoredTensor(key, shape, np.dtype(dtype), "", 0, ())


def module(local, *shape, dtype=np.float32):
    return Module(local, tensor(local, *shape, dtype=dtype), [])


def optimizer(*groups, **settings):
    """One group for each list of states, numbered through."""
    state, listed = {}, []
    for group in groups:
        numbers = range(len(state), len(state) + len(group))
        state |= dict(zip(numbers, group, strict=True))
        listed.append({"params": [*numbers], **settings})
    return {"state": state, "param_groups": listed}


def owners(optimizers, modules, muon=False):
    found = numbered_states(WHERE, optimizers, modules, muon)
    return {state.key: owner.local for owner, state in found if state.key}


def test_muon_has_the_matrices_that_are_no_embedding_and_adam_the_rest():
    modules = [module(EMBEDDING, 8, 4), module(LINEAR, 8, 4), module(NORM, 4)]
    muon = optimizer([{"momentum_buffer": tensor("m", 8, 4)}])
    adam = optimizer([{"exp_avg": tensor("a", 8, 4)}], [{"exp_avg": tensor("b", 4)}])
    assert owners([muon, adam], modules, muon=True) == {"m": LINEAR, "a": EMBEDDING, "b": NORM}
    with pytest.raises(Undecided):
        owners([muon, adam], modules)


def test_the_group_of_experts_has_experts():
    modules = [module(LINEAR, 8, 4), module(EXPERT, 8, 4)]
    dense = optimizer([{"exp_avg": tensor("a", 8, 4)}], is_expert_parallel=False)
    experts = optimizer([{"exp_avg": tensor("b", 8, 4)}], is_expert_parallel=True)
    assert owners([dense, experts], modules) == {"a": LINEAR, "b": EXPERT}
    with pytest.raises(Undecided):
        owners([dense, dense], modules)


def test_experts_that_share_a_group_with_the_rest_are_found_by_shape():
    modules = [module(LINEAR, 8, 4), module(EXPERT, 4, 8)]
    states = [{"exp_avg": tensor("a", 8, 4)}], [{"exp_avg": tensor("b", 4, 8)}]
    states = [optimizer(*states, is_expert_parallel=False)]
    assert owners(states, modules) == {"a": LINEAR, "b": EXPERT}


def test_masters_are_of_the_16_bit_weights_of_their_group():
    half = {"dtype": np.float16}
    modules = [module(LINEAR, 8, 4, **half), module(NORM, 4, **half)]
    inner = optimizer([{"exp_avg": tensor("a", 8, 4)}], [{"exp_avg": tensor("b", 4)}], step=3)
    masters = [[tensor("p", 8, 4)], [tensor("q", 4)]]
    wrapped = {"optimizer": inner, "fp32_from_fp16_params": masters}
    assert owners([wrapped], modules) == {"a": LINEAR, "b": NORM, "p": LINEAR, "q": NORM}
    steps = [s for _, s in numbered_states(WHERE, [wrapped], modules, False) if s.state == "step"]
    assert steps == [ModuleState("step", value=3)] * 2
    wrapped["fp32_from_fp16_params"] = masters[:1]
    with pytest.raises(FormatError, match="not a list of 2 groups"):
        owners([wrapped], modules)


def test_what_never_stepped_has_no_states_and_a_state_of_no_group_is_refused():
    modules = [module(LINEAR, 8, 4)]
    assert owners([optimizer([{}])], modules) == {}
    stray = optimizer([{"exp_avg": tensor("a", 8, 4)}])
    stray["state"][7] = {"exp_avg": tensor("b", 8, 4)}
    with pytest.raises(FormatError, match=r"states of \[7\], which no group holds"):
        owners([stray], modules)


def test_fewer_numbers_than_parameters_decide_nothing():
    modules = [module(LINEAR, 8, 4), module(NORM, 4)]
    with pytest.raises(Undecided, match="1 parameters have numbers, but the model has 2"):
        owners([optimizer([{"exp_avg": tensor("a", 8, 4)}])], modules)
