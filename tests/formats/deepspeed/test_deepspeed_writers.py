"""Optimizers and ways of sharding whose states are not flat partitions of floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import Case
from helpers import MemoryStore
from jax_ucp.arrays.decoded import block_of, decoded
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import expressions, read, read_into
from jax_ucp.errors import CorruptData
from jax_ucp.layout.box import Box
from torch_writer import change


def opened(case: str, **options) -> ucp.Checkpoint:
    return Case(f"deepspeed_writers/{case}").open(**options)


DECODED = {"dequantized1": "exp_avg", "dequantized2": "exp_avg_sq"}
DECODED |= {"dequantized_fast": "exp_avg_fast", "dequantized_slow": "exp_avg_slow"}
CODED = {"bnb_adamw8bit_z2_dp3": 16, "bnb_ademamix8bit_z0_dp1": 24, "bnb_ademamix8bit_z1_dp2": 24}


@pytest.mark.parametrize("case", CODED)
def test_codes_are_decoded_where_that_is_asked_for(case):
    checkpoint, live = opened(case, dequantize="float32"), Case(f"deepspeed_writers/{case}")
    meant = {name: x for name, x in live.measured().items() if name.startswith("dequantized")}
    assert len(meant) == CODED[case]
    for label, want in meant.items():
        state, _, name = label.partition("/")
        assert live.equal(checkpoint.read(f"{DECODED[state]}/{name}"), want, label), label
    assert not any(leaf.label.startswith(("state", "other")) for leaf in checkpoint.leaves)
    assert checkpoint.source["dequantize"] == "float32"


def test_decoding_changes_nothing_where_nothing_is_coded():
    plain, asked = (opened("muon_z2_odd_dp4", **o) for o in ({}, {"dequantize": "float32"}))
    assert plain.leaves == asked.leaves
    assert "dequantize" not in asked.source


@settings(deadline=None)
@given(st.data())
def test_a_box_of_decoded_numbers_is_that_of_table_times_scale(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    count = int(np.prod(shape))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    block = data.draw(st.sampled_from([1, 3, 256]))
    codes = random.integers(0, 256, shape).astype(np.uint8)
    table = random.standard_normal(256, dtype=np.float32)
    scales = random.standard_normal(-(-count // block), dtype=np.float32)
    store = MemoryStore({"codes": codes, "table": table, "scales": scales})
    array = decoded(*expressions(store).values(), block)
    want = (table[codes].ravel() * np.repeat(scales, block)[:count]).reshape(shape)
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    stop = tuple(data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    assert read(array, box).tobytes() == want[box.index].tobytes()
    out = np.empty(box.shape, np.float32)
    read_into(array, [box], [out])
    assert out.tobytes() == want[box.index].tobytes()


def test_codes_share_scales_in_blocks_of_256_or_in_old_versions_of_2048():
    assert [block_of(5000, scales) for scales in (20, 3, 4)] == [256, 2048, None]
    assert block_of(100, 1) == 256


def test_momentum_that_two_ranks_have_differently_is_refused_or_that_of_the_first(copy_of):
    folder = copy_of("deepspeed_writers/muon_z2_odd_dp4")
    files = sorted(folder.glob("*/*_optim_states.pt"))

    key = "optimizer_state_dict/base_optimizer_state/state/0/momentum_buffer"
    first = opened("muon_z2_odd_dp4").read("momentum_buffer/m.weight")
    change(files[2], {key: lambda array: array.fill(0)})
    with pytest.raises(CorruptData, match="own momentum of a matrix that lies in two"):
        ucp.open(folder).restore(verify="full")
    kept = ucp.open(folder, on_conflict="master").read("momentum_buffer/m.weight")
    assert same_bits(kept, first)


def test_zenflow_says_why_masters_and_weights_differ():
    checkpoint = ucp.open(Case("deepspeed_writers/zenflow_z2").path)
    assert any("ZenFlow" in note for note in checkpoint.notes)
    with pytest.raises(CorruptData, match="the run used ZenFlow"):
        checkpoint.restore(verify="full")
