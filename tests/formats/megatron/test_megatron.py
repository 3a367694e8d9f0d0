"""Real checkpoints of Megatron, of every format, against the state of the live processes before
the save.
"""

import pytest
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from cases import CORRUPTED, Case, flat, names_of
from helpers import mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.layout.box import Box

EVERY = names_of("megatron")
CASES = [case for case in EVERY if case != CORRUPTED]
MESH = mesh_of(4, 2)
RULES = [(r"(linear_.*|router)\.weight$", P("data", "model"))]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_moment_equals_the_live_state_however_it_is_read(case, tmp_path):
    live = Case(f"megatron/{case}")
    checkpoint, want = live.open(), live.truth()
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    straight = flat(restored_on(MESH, checkpoint, RULES))
    converted = checkpoint.save(tmp_path / "converted")  # which verifies first
    kept = flat(restored_on(MESH, converted, RULES))
    for label, array in want.items():
        assert live.equal(checkpoint.read(label), array, label), label
        assert live.equal(straight[label], array, label), label
        assert live.equal(kept[label], array, label), label
    assert straight["param/decoder.layers.0.self_attention.linear_proj.weight"].sharding.spec == P(
        "data", "model"
    )
    assert converted.extras == checkpoint.extras


@pytest.mark.parametrize("case", CASES)
def test_any_box_equals_that_of_the_whole(case):
    live = Case(f"megatron/{case}")
    checkpoint, want = live.open(), live.truth()
    for label, array in want.items():
        box = Box(
            tuple(n // 3 for n in array.shape), tuple(n // 3 + (n + 1) // 2 for n in array.shape)
        )
        assert live.equal(checkpoint.read(label, box), array[box.index], label), label


@pytest.mark.parametrize("case", CASES)
def test_without_a_vocabulary_the_padded_rows_stay_and_a_note_says_so(case):
    live = Case(f"megatron/{case}")
    checkpoint, want = ucp.open(live.path), live.truth()
    (note,) = [note for note in checkpoint.notes if "padded rows" in note]
    padded = live.about["model"]["padded_vocab_size"]
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
    live = Case(f"megatron/{case}")
    checkpoint, want = live.open(weights_only=True), live.truth()
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
    root = Case(f"megatron/{case}").path
    assert ucp.open(root).path == ucp.open(root / "iter_0000003").path
