"""Real DeepSpeed checkpoints, against the state that was taken from the live processes."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed.files import _as_rank, _refuse_copies, _RunDegrees, open_stored
from jax_ucp.layout.box import Box
from torch_writer import Size, change, edit, save

DATA = CASES_DATA / "deepspeed"


def test_two_entries_of_a_module_that_come_to_one_name_are_refused(tmp_path):
    ckpt = Case("megatron_deepspeed/gpt2_tp2").copied(tmp_path / "ckpt")

    def twice(tree):
        word = tree["module"]["language_model"]["embedding"]["word_embeddings"]
        tree["module"]["language_model.embedding.word_embeddings.weight"] = word["weight"]

    edit(ckpt / "global_step3" / "mp_rank_00_model_states.pt", twice)
    with pytest.raises(FormatError, match=r"mp_rank_00.*: two entries of 'module' have one name"):
        ucp.open(ckpt)


def test_extras_keep_what_the_trainer_put_beside_the_model():
    extras = ucp.open(DATA / "z1_fp16_dp2").extras
    model = extras["mp_rank_00_model_states.pt"]
    about = Case("deepspeed/z1_fp16_dp2").about
    assert model["global_steps"] == about["counters"]["global_steps"] == 5
    assert model["skipped_steps"] == 3
    assert model["lr_scheduler"]["last_batch_iteration"] == 1
    rank = extras["zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert rank["loss_scaler"]["!record"] == "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
    assert rank["loss_scaler"]["fields"]["cur_scale"] == about["counters"]["loss_scale"]
    assert [group["lr"] for group in rank["param_groups"]] == about["counters"]["rates_at_save"]
    json.dumps(extras)


def test_a_conversion_says_what_its_source_was(tmp_path):
    checkpoint = ucp.open(DATA / "z1_fp16_dp2")
    converted = checkpoint.save(tmp_path / "c")
    about = {"writer": "DeepSpeed 0.19.8, ZeRO-1", "step": 5}
    degrees = {"parallelism": {"dp": 2, "tp": 1, "pp": 1}}
    named = {"format": "deepspeed", "name": "global_step5"}
    assert converted.source == named | about | degrees


def test_the_second_moment_that_lion_never_reads_is_left_out_with_its_reason():
    checkpoint = ucp.open(DATA / "z1_fp32_dp2_lion")
    left = [item for item in checkpoint.inventory if item.where.endswith("/exp_avg_sq")]
    assert len(left) == 4
    assert all(item.status == "skipped" and "Lion has one moment" in item.reason for item in left)
    assert "exp_avg_sq" not in {leaf.label.partition("/")[0] for leaf in checkpoint.leaves}


def test_a_wrong_order_recorded_by_deepspeed_is_noted_and_not_used():
    (note,) = ucp.open(DATA / "z2_fp32_dp3_roundrobin").notes
    assert "round_robin_gradients" in note
    assert ucp.open(DATA / "z2_bf16_dp3").notes == []
    about = ucp.open(DATA / "z2_bf16_dp3").about
    assert (about.writer, about.step) == ("DeepSpeed 0.19.8, ZeRO-2", 5)
    assert about.parallelism == {"dp": 3, "tp": 1, "pp": 1}


RANK_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("masters", [np.zeros(8), np.ones(8), np.arange(8)])
def test_ranks_whose_parts_are_of_one_value_may_be_alike(tmp_path, masters):
    ranks = []
    for dp in range(2):
        path = tmp_path / f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"
        flat = {"fp32_flat_groups": [masters.astype(np.float32)], "optimizer_state_dict": {}}
        save({"optimizer_state_dict": flat}, path)
        degrees = _RunDegrees("model_states.pt", 1, 1, 2, zero3=True)
        ranks.append(_as_rank(dp, open_stored(path), degrees))
    with pytest.raises(FormatError, match="one is a copy") if masters[-1] > 1 else nullcontext():
        _refuse_copies([(rank, rank.masters) for rank in ranks], "masters")


COPY = "mp_rank_00_model_states.pt"


@pytest.fixture
def in_two_minds(deepspeed_copy) -> Path:
    """A checkpoint with valid CRCs in which one weight of the module is not its master."""
    folder = deepspeed_copy("z1_bf16_dp2")

    def double(array: np.ndarray) -> None:
        array[3] = array[3] * 2 + 1

    change(folder / COPY, {"module/embed.word_embeddings.weight": double})
    return folder


def test_the_user_may_say_which_copy_to_believe(in_two_minds, tmp_path):
    live = Case("deepspeed/z1_bf16_dp2")
    want = live.truth()
    module = TorchFile(in_two_minds / COPY)
    master = ucp.open(in_two_minds, on_conflict="master").save(tmp_path / "master")
    copy = ucp.open(in_two_minds, on_conflict="copy").save(tmp_path / "copy")
    assert set(master) == set(copy) == set(want)
    for label, array in want.items():
        assert live.equal(master.read(label), array, label)
        state, _, name = label.partition("/")
        if state == "param":
            stored = module.read(f"module/{name}", Box.whole(array.shape))
            assert same_bits(copy.read(label), stored)
        else:
            assert live.equal(copy.read(label), array, label)
    head = copy.read("param/head.weight").astype(np.float32)
    assert not same_bits(head, want["param/head.weight"].astype(np.float32))


@pytest.mark.parametrize("on_conflict", ["master", "copy"])
def test_what_is_believed_is_noted_and_accounted_for(in_two_minds, on_conflict):
    checkpoint = ucp.open(in_two_minds, on_conflict=on_conflict)
    (note,) = checkpoint.notes
    assert f"the {on_conflict} is taken" in note
    statuses = {item.where: item.status for item in checkpoint.inventory}
    kept = "mapped" if on_conflict == "copy" else "skipped"
    assert statuses[f"{COPY}:module/embed.word_embeddings.weight"] == kept
    (master,) = {w for w in statuses if RANK_1 in w and w.endswith("partition_of_fp32_groups/0")}
    assert statuses[master] == ("skipped" if on_conflict == "copy" else "mapped")


def cut_of_0_14_5(partition: np.ndarray, padding: int) -> np.ndarray:
    """`_get_groups_without_padding` and `_get_state_without_padding` of DeepSpeed 0.14.5."""
    return partition[: len(partition) - padding]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("size", range(1, 9))
def test_a_group_shorter_than_its_padding_opens_as_it_was_cut_of_old(deepspeed_copy, size, elastic):
    """All padding is cut from the last rank, by a negative length where it has less."""
    folder, name = deepspeed_copy("z2_fp32_dp4_tinygroup"), "final_layernorm.gain"
    arrays = {state: np.arange(size, dtype=np.float32) + i for i, state in enumerate(STATES)}

    def edit_model(tree: dict) -> None:
        tree["param_shapes"][2][name] = Size((size,))
        tree["module"][name] = arrays["param"]

    edit(folder / "mp_rank_00_model_states.pt", edit_model)
    padding = -size % 8
    for rank in range(4):
        padded = {state: np.pad(array, (0, padding)) for state, array in arrays.items()}
        partitions = {s: array.reshape(4, -1)[rank].copy() for s, array in padded.items()}
        own_padding = padding if rank == 3 else 0

        def edit_rank(tree: dict, partitions=partitions, own_padding=own_padding) -> None:
            state = tree["optimizer_state_dict"]
            master = cut_of_0_14_5(partitions.pop("param"), own_padding)
            state["single_partition_of_fp32_groups"][2] = master
            state["param_slice_mappings"] = []
            moments = state["base_optimizer_state"]["state"]
            moments[2] |= partitions
            if elastic:
                moments[2] |= {k: cut_of_0_14_5(v, own_padding) for k, v in partitions.items()}
                state["base_optimizer_state"] = [*moments.values()]

        edit(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", edit_rank)
    checkpoint = ucp.open(folder)
    for state, array in arrays.items():
        assert same_bits(checkpoint.read(f"{state}/{name}"), array)
    assert faults_of(checkpoint) == []


STATES = ("param", "exp_avg", "exp_avg_sq")
