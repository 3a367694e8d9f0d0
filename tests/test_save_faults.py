"""Two real processes save, and something fails in one: both end with an error and go on."""

import json
import re

import pytest

from joined import said_by

WAYS = (
    "v0", "v0 in the background", "v0 without a manager", "v1", "v1 in the background",
    "v0 in stages", "v1 in stages",
)  # fmt: skip
NO_SPACE = "[Errno 28] No space left on device: 'a file'"
UNSUPPORTED = (
    "bad is a builtins.object, which is not an array, number, string or None. "
    "Leave it out of the tree, or save it beside the checkpoint."
)
FAULTS = {
    "process 1 has a full disk": (1, "OSError", NO_SPACE),
    "process 0 has a full disk": (0, "OSError", NO_SPACE),
    "process 0 cannot commit": (0, "OSError", NO_SPACE),
    "process 1 has no memory for a copy": (1, "MemoryError", "no room for a copy"),
    "process 1 has what cannot be saved": (1, "UnsupportedLeaf", UNSUPPORTED),
    "process 0 has what cannot be saved": (0, "UnsupportedLeaf", UNSUPPORTED),
}
# What both processes say where each could save what it has, and it is not the same.
DISAGREEMENTS = {
    "process 1 has another tree": "  process 1 has more, process 0 has not",
    "process 0 has another tree": "  process 0 has more, process 1 has not",
    "process 1 has another shape": (
        r"  process 1 has host as numpy int8 \[4\], .*, process 0 as numpy int8 \[3\], .*"
    ),
    "process 1 has another sharding": (
        r"  process 1 has w as .* as \(\) on .*, process 0 as .* as \('x',\) on .*"
    ),
}
ELSEWHERE = "process 1 is at another step"


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    """What each process met, by the way of saving and the fault; who waits long is ended."""
    saves = tmp_path_factory.mktemp("saves")
    return [json.loads(each) for each in said_by(2, "failing_save.py", saves, seconds=300)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_in_one_process_ends_the_save_in_all_by_its_name_and_words(said, way, fault):
    process, kind, words = FAULTS[fault]
    own, other = (said[rank][f"{way}, {fault}"]["error"] for rank in (process, 1 - process))
    assert own[:2] == [kind, words]
    assert own[2].endswith(f"was not done: process {process} could not do its part")
    assert other[0] == "SaveFailed"
    assert other[2:] == [f"  process {process}: {kind}: {words}"]


@pytest.mark.parametrize("fault", DISAGREEMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_processes_that_would_not_save_the_same_write_nothing_and_say_where(said, way, fault):
    for each in said:
        kind, title, words = each[f"{way}, {fault}"]["error"]
        assert kind == "SaveFailed"
        assert title.endswith("was not done, for not all would save the same:")
        assert re.fullmatch(DISAGREEMENTS[fault], words), words


@pytest.mark.parametrize("way", WAYS)
def test_processes_that_save_to_different_places_both_name_them(said, way):
    for rank, each in enumerate(said):
        kind, *lines = each[f"{way}, {ELSEWHERE}"]["error"]
        text = "\n".join(lines)
        if way.startswith("v1"):  # Orbax itself compares the directories there
            assert "Directory path mismatch" in text
            continue
        assert kind == "SaveFailed"
        assert f"process {1 - rank} saves to " in text
        assert all(f"/{step}" in text for step in (3, 8)), text


def test_nothing_looks_like_a_checkpoint_then_and_the_next_saves_are_sound(said):
    for each in said:
        assert len(each) == len(WAYS) * (len(FAULTS) + len(DISAGREEMENTS) + 1)
        assert [found for one in each.values() for found in one["whole"] + one["wrong"]] == []
