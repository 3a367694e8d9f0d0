"""Optimizers and ways of sharding whose states are not flat partitions of floats."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import generated_cases
import jax_ucp as ucp
from helpers import MemoryStore
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.layout.box import Box
from jax_ucp.sources.decoded import block_of, decoded
from jax_ucp.sources.evaluate import Reader
from jax_ucp.sources.value import Stored
from torch_writer import change, edit

DATA = Path(__file__).parents[2] / "data" / "deepspeed_writers"
CASES = sorted(path.name for path in DATA.iterdir())


def opened(case: str, **options) -> ucp.Checkpoint:
    return ucp.open(DATA / case / "ckpt", **generated_cases.about(DATA / case)["options"] | options)


@pytest.mark.parametrize("case", CASES)
def test_every_state_equals_the_live_state(case):
    checkpoint, want = opened(case), generated_cases.truth(DATA / case)
    states = {leaf.label for leaf in checkpoint.leaves if leaf.path[0].name != "other"}
    assert states == set(want)
    for label, array in want.items():
        assert generated_cases.equal(checkpoint.read(label), array), label
    assert not [fault for _, fault in checkpoint.verify() if fault]


@pytest.mark.parametrize("case", CASES)
def test_everything_stored_is_accounted_for(case):
    inventory = opened(case).inventory
    assert len({item.where for item in inventory}) == len(inventory)
    assert all(item.reason != "not understood" for item in inventory)


def test_codes_are_decoded_where_that_is_asked_for():
    checkpoint = opened("bnb_adamw8bit_z2_dp3", dequantize="float32")
    meant = generated_cases.meant(DATA / "bnb_adamw8bit_z2_dp3")
    names = {"dequantized1": "exp_avg", "dequantized2": "exp_avg_sq"}
    assert len(meant) == 16
    for label, want in meant.items():
        state, _, name = label.partition("/")
        assert generated_cases.equal(checkpoint.read(f"{names[state]}/{name}"), want), label
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
    parts = [Stored(key, info) for key, info in store.arrays().items()]
    array, reader = decoded(*parts, block), Reader(store)
    want = (table[codes].ravel() * np.repeat(scales, block)[:count]).reshape(shape)
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    stop = tuple(data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    assert reader.read(array, box).tobytes() == want[box.index].tobytes()
    out = np.empty(box.shape, np.float32)
    reader.read_into(array, [box], [out])
    assert out.tobytes() == want[box.index].tobytes()


def test_codes_share_scales_in_blocks_of_256_or_in_old_versions_of_2048():
    assert [block_of(5000, scales) for scales in (20, 3, 4)] == [256, 2048, None]
    assert block_of(100, 1) == 256


def test_momentum_that_two_ranks_have_differently_is_refused_or_that_of_the_first(tmp_path):
    folder = _copy("muon_z2_odd_dp4", tmp_path)
    files = sorted(folder.glob("*/*_optim_states.pt"))

    key = "optimizer_state_dict/base_optimizer_state/state/0/momentum_buffer"
    first = opened("muon_z2_odd_dp4").read("momentum_buffer/m.weight")
    change(files[2], {key: lambda array: array.fill(0)})
    with pytest.raises(CorruptData, match="own momentum of a matrix that lies in two"):
        ucp.open(folder).restore(verify="full")
    kept = ucp.open(folder, on_conflict="master").read("momentum_buffer/m.weight")
    assert generated_cases.equal(kept, first)


def _copy(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / case / "ckpt", tmp_path / "ckpt"))


def test_a_swap_file_that_is_missing_or_cut_is_refused_by_name(tmp_path):
    folder = _copy("nvme_z3_small_dp2", tmp_path)
    file = sorted(folder.glob("*/offloaded_tensors/rank01/*.swp"))[0]
    data = file.read_bytes()
    file.write_bytes(data[:8])
    with pytest.raises(FormatError, match=rf"{file.name} has 8 bytes"):
        ucp.open(folder)
    file.unlink()
    with pytest.raises(FormatError, match=rf"{file.name} is missing"):
        ucp.open(folder)


@pytest.mark.parametrize(
    ("case", "files"),
    [
        ("deepspeed_writers/mics_shard2_dp4", "*_optim_states.pt"),
        ("deepspeed/z3_bf16_dp2_frozen_tied", "*_model_states.pt"),
        ("deepspeed/moe_ep2_dp2_z0_fp32", "expp_rank_*"),
    ],
)
def test_ranks_that_were_exchanged_are_refused_by_the_names_inside(case, files, tmp_path):
    source = DATA.parent / case
    source = source / "ckpt" if (source / "ckpt").exists() else source
    folder = Path(shutil.copytree(source, tmp_path / "ckpt"))
    first, second = sorted(folder.glob(f"*/{files}"))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    with pytest.raises(FormatError, match=rf"{first.name} was written as {second.name}"):
        ucp.open(folder)


def test_an_expert_parallel_ranks_optimizer_that_is_a_copy_is_refused(tmp_path):
    source = DATA.parent / "deepspeed" / "moe_ep2_dp2_z0_fp32"
    folder = Path(shutil.copytree(source, tmp_path / "ckpt"))
    first, second = sorted(folder.glob("*/expp_rank_*"))
    shutil.copy(first, second)
    with pytest.raises(FormatError, match=rf"{second.name} was written as {first.name}"):
        ucp.open(folder)


def test_an_expert_parallel_ranks_optimizer_without_the_others_states_is_refused(tmp_path):
    source = DATA.parent / "deepspeed" / "moe_ep2_dp2_z0_fp32"
    folder = Path(shutil.copytree(source, tmp_path / "ckpt"))
    (file,) = folder.glob("*/expp_rank_1_*")
    edit(file, lambda tree: tree["optimizer"]["state"].clear())
    with pytest.raises(FormatError, match=r"expp_rank_1.* are not those of expp_rank_0"):
        ucp.open(folder)
    edit(file, lambda tree: tree.pop("optimizer"))
    with pytest.raises(FormatError, match=r"expp_rank_1.* has no optimizer"):
        ucp.open(folder)


def test_zenflow_says_why_masters_and_weights_differ():
    checkpoint = ucp.open(DATA / "zenflow_z2" / "ckpt")
    assert any("ZenFlow" in note for note in checkpoint.notes)
    with pytest.raises(CorruptData, match="the run used ZenFlow"):
        checkpoint.restore(verify="full")
