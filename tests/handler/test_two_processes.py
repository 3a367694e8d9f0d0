"""Two real processes save and restore by stock Orbax's arguments, in the universal format: trees of
every kind come back as they were, and what one process cannot do both refuse.
"""

import json

import pytest

from joined import said_by

SECONDS = {"quick": 150, "all": 500}  # some ten times what they take alone on a machine


@pytest.fixture(scope="module")
def said(request, tmp_path_factory) -> list[dict]:
    """What each process met, of all that is tried in the slow lane; who waits long is ended."""
    how = "all" if not request.config.option.markexpr else "quick"
    arguments = "handlers.py", tmp_path_factory.mktemp(how), how
    return [json.loads(each) for each in said_by(2, *arguments, seconds=SECONDS[how])]


@pytest.mark.timeout(600)
def test_every_tree_is_saved_in_our_format_and_restored_as_it_was_without_a_trace_of_the_save(said):
    """Typed keys among them, of which stock Orbax wants a word from every process."""
    for each in said:
        for what, found in each.items():
            if what not in ("failed", "versions"):
                step, ours = found["kept"]
                assert (step, found["same"]) == ("1", True), what
                assert ours.startswith("1/"), what


@pytest.mark.timeout(600)
def test_what_one_process_cannot_save_both_refuse_and_the_next_save_is_sound(said):
    for rank, each in enumerate(said):
        for way, found in each["failed"].items():
            kind = "UnsupportedLeaf" if rank else "SaveFailed"
            assert kind in found["error"], way
            assert "bad is a" in found["error"], way
            assert found["seconds"] < 30, way
            assert found["whole"] == [], way
            assert found["same"], way
            # between them, of older releases of Orbax, the temporary folder of the one that failed
            assert [found["kept"][0], found["kept"][-1][:2]] == ["1", "1/"], way


@pytest.mark.timeout(600)
def test_processes_of_different_versions_save_and_read_nothing_together_and_say_so(said):
    for rank, each in enumerate(said):
        found = each["versions"]
        assert found["saved"].startswith("SaveFailed")
        words = "process 1 has the version of jax_ucp as 0.0.1, process 0 as "
        assert words in found["saved"], found["saved"]
        for what in ("opened", "restored"):
            words = (
                f"TreeMismatch: processes [{1 - rank}] have another version of jax_ucp than this"
            )
            assert found[what].startswith(words), found[what]
        assert found["whole"] == []
