"""Real checkpoints of Megatron, of every format, against the state of the live processes before
the save.
"""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import restored_on
from jax_ucp.layout.box import Box
from jax_ucp.sources.consolidated import same_bits
from megatron_cases import CORRUPTED, DATA, EVERY, about, equal, flat, truth

CASES = [case for case in EVERY if case != CORRUPTED]
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
RULES = [(r"(linear_.*|router)\.weight$", P("data", "model"))]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_moment_equals_the_live_state_however_it_is_read(case, tmp_path):
    want = truth(case)
    checkpoint = ucp.open(DATA / case / "ckpt", sizes={"vocab": about(case)["model"]["vocab_size"]})
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    straight = flat(restored_on(MESH, checkpoint, RULES))
    converted = checkpoint.save(tmp_path / "converted")  # which verifies first
    kept = flat(restored_on(MESH, converted, RULES))
    for label, array in want.items():
        assert equal(checkpoint.read(label), array, label), label
        assert equal(straight[label], array, label), label
        assert equal(kept[label], array, label), label
    assert straight["param/decoder.layers.0.self_attention.linear_proj.weight"].sharding.spec == P(
        "data", "model"
    )
    assert converted.extras == checkpoint.extras


@pytest.mark.parametrize("case", CASES)
def test_any_box_equals_that_of_the_whole(case):
    checkpoint, want = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101}), truth(case)
    for label, array in want.items():
        box = Box(
            tuple(n // 3 for n in array.shape), tuple(n // 3 + (n + 1) // 2 for n in array.shape)
        )
        assert equal(checkpoint.read(label, box), array[box.index], label), label


@pytest.mark.parametrize("case", CASES)
def test_without_a_vocabulary_the_padded_rows_stay_and_a_note_says_so(case):
    checkpoint, want = ucp.open(DATA / case / "ckpt"), truth(case)
    (note,) = [note for note in checkpoint.notes if "padded rows" in note]
    padded = about(case)["model"]["padded_vocab_size"]
    assert f"all {padded} padded rows" in note
    for label in (
        "param/embedding.word_embeddings.weight",
        "exp_avg/embedding.word_embeddings.weight",
    ):
        array = checkpoint.read(label)
        assert array.shape[0] == padded
        assert same_bits(array[:101], want[label])


@pytest.mark.parametrize("case", EVERY)
def test_weights_alone_are_the_models_weights_and_nothing_of_the_optimizer(case):
    checkpoint, want = (
        ucp.open(DATA / case / "ckpt", sizes={"vocab": 101}, weights_only=True),
        truth(case),
    )
    assert {leaf.label for leaf in checkpoint.leaves} == {
        label for label in want if label.startswith(("param/", "buffer/"))
    }
    for param in checkpoint.params.values():
        assert same_bits(param.read(), want[f"param/{param.name}"].astype(param.dtype)), param.name
    assert [fault for _, fault in checkpoint.verify() if fault] == []
    assert all(item.reason != "not understood" for item in checkpoint.inventory)


@pytest.mark.parametrize(
    "case", ["dist_tp1_pp1_fp32", "old0153_tp2_zarr_fp32", "legacy_tp1_pp1_fp32"]
)
def test_the_save_directory_and_the_iteration_folder_are_the_same_checkpoint(case):
    root = DATA / case / "ckpt"
    assert ucp.open(root).path == ucp.open(root / "iter_0000003").path
