"""Patterns that come out of files match what Python's `re.match` matches, in bounded time, or
are refused.
"""

import re
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
import torch_writer
from jax_ucp import name_patterns
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed.tensor_parallel import TensorParallel
from jax_ucp.name_patterns import MAX_TRIES, NamePatterns

pytestmark = pytest.mark.timeout(60)

CASE = Path(__file__).parent / "data" / "deepspeed" / "tp2_dp1_z1_bf16"
SLOW = [
    r"(\w|.)+!",
    r"(a*)*b",
    r"(a|aa)+$",
    r"(.*)*x",
    r"((a+)+)+!",
    r"(.*a){20}!",
    r"\w*\w*\w*\w*\w*\w*\w*!",
]
PIECES = [
    "a",
    "b",
    ".",
    r"\.",
    r"\d",
    r"\w+",
    "(",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2}",
    "{,2}",
    "{02}",
    "{1,}",
    "^",
    "$",
]
PIECES += [
    "[ab]",
    "[^a]",
    "[[:alpha:]]",
    "[a-",
    "]",
    "(?:",
    "(?i)",
    r"\b",
    r"\Z",
    r"\1",
    "(?=a)",
    "(?P<n>",
    "*+",
    r"\s",
]
PIECES += ["{", "}", "-", "\\"]


@settings(max_examples=1000)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.text("abA01._ -{,2}:lph", max_size=8), min_size=1, max_size=5),
)
def test_what_is_matched_is_what_python_matches(pattern, names):
    """A pattern that Python does not compile, DeepSpeed would not have got past either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = re.compile(pattern)
        except re.error:
            assume(False)
    try:
        patterns = NamePatterns([pattern], "f")
    except FormatError:
        return
    for name in names:
        assert patterns.matching(name) == ({pattern} if compiled.match(name) else frozenset())


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_takes_no_longer_for_every_letter(pattern):
    assert NamePatterns([pattern], "f").matching("a" * 10_000 + "b.c") <= {pattern}


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", r"(a)\1", "a{,3}", "a{1001}", "[[:alpha:]]", "((a{90}){90}){90}", "a" * 1001],
)
@pytest.mark.parametrize(
    "place", ["tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"]
)
def test_a_pattern_that_cannot_be_matched_so_is_refused_with_the_way_out(pattern, place):
    with pytest.raises(FormatError, match=r"f has (the|a) pattern"):
        TensorParallel({place: [pattern]}, 2, "f", {})


@pytest.mark.parametrize("said", ["norm", {"norm": 1}, [1], ["norm", None], 7])
def test_what_is_no_list_of_patterns_is_refused(said):
    with pytest.raises(FormatError, match="should be a list of patterns"):
        TensorParallel({"tp_replicated_parameter_patterns": said}, 2, "f", {})


@pytest.mark.parametrize("name", ["wé", "w\n", "w\x1b[0m", "w\u202e"])
def test_names_for_which_the_two_differ_are_refused(name):
    with pytest.raises(FormatError, match="only matched with names of printable ASCII"):
        NamePatterns(["w"], "f").matching(name)
    assert NamePatterns([], "f").matching(name) == frozenset()


def test_patterns_are_not_tried_on_names_without_end(monkeypatch):
    assert MAX_TRIES >= 4_000_000  # of a model with 2,000 parameters and a pattern for each
    monkeypatch.setattr(name_patterns, "MAX_TRIES", 100)
    patterns = NamePatterns(["a"] + [f"b{i}" for i in range(9)], "f")
    for i in range(10):
        patterns.matching(f"a{i}")
    with pytest.raises(FormatError, match="more than 100 in all"):
        patterns.matching("b")


@pytest.mark.parametrize("pattern", SLOW[:2])
def test_a_checkpoint_with_a_slow_pattern_is_opened_or_refused_and_exported(tmp_path, pattern):
    """The export says anew how a parameter is cut, by the same patterns."""
    shutil.copytree(CASE, tmp_path / "c")
    for file in (tmp_path / "c").rglob("mp_rank_*_model_states.pt"):
        torch_writer.rewrite(
            file,
            lambda name, data: _with_pattern(data, pattern) if name.endswith("data.pkl") else data,
        )
    with pytest.raises(FormatError, match="patterns that match no parameter"):
        ucp.open(tmp_path / "c")
    out = ucp.open(CASE).save(tmp_path / "ours")
    found = out.extras["mp_rank_00_model_states.pt"]["universal_checkpoint_info"]
    found["tp_replicated_parameter_patterns"].insert(0, pattern)
    out.plan_export("deepspeed")


def _with_pattern(pickled: bytes, pattern: str) -> bytes:
    """The pickle with a pattern in place of the first of those for replicated parameters."""
    key = b"tp_replicated_parameter_patterns"
    at = pickled.index(key) + len(key)
    start = pickled.index(b"X", at)
    length = int.from_bytes(pickled[start + 1 : start + 5], "little")
    new = pattern.encode()
    return (
        pickled[: start + 1] + len(new).to_bytes(4, "little") + new + pickled[start + 5 + length :]
    )
