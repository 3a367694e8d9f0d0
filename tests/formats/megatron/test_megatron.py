"""Real checkpoints of Megatron, of every format, against the state of the live processes."""

import pytest

import jax_ucp as ucp
from cases import CORRUPTED, Case, names_of
from jax_ucp.arrays.dtypes import same_bits

EVERY = names_of("megatron")
CASES = [case for case in EVERY if case != CORRUPTED]


@pytest.mark.parametrize("case", CASES)
def test_without_a_vocabulary_the_padded_rows_stay_and_a_note_says_so(case):
    live = Case(f"megatron/{case}")
    checkpoint, want = ucp.open(live.path), live.truth()
    (note,) = [note for note in checkpoint.notes if "padded rows" in note]
    padded = live.about["model"]["padded_vocab_size"]
    assert f"all {padded} padded rows" in note
    for label in (f"{state}/embedding.word_embeddings.weight" for state in ("param", "exp_avg")):
        array = checkpoint.read(label)
        assert array.shape[0] == padded
        assert same_bits(array[:101], want[label])
