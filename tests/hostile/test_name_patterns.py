"""Patterns out of files match what Python's `re.match` does, in bounded time, or are refused."""

import re
import shutil
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
import torch_writer
from cases import DATA
from jax_ucp import name_patterns
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed.tensor_parallel import TensorParallel
from jax_ucp.name_patterns import NamePatterns

pytestmark = pytest.mark.timeout(60)

CASE = DATA / "deepspeed" / "tp2_dp1_z1_bf16"
SLOW = [
    r"(\w|.)+!", r"(a*)*b", r"(a|aa)+$", r"(.*)*x", r"((a+)+)+!", r"(.*a){20}!", r"\w*\w*\w*\w*\w*\w*\w*!",
]  # fmt: skip
PIECES = [
    "a", "b", ".", r"\.", r"\d", r"\w+", "(", ")", "|", "*", "+", "?", "{2}", "{,2}", "{02}", "{1,}", "^",
    "$",
]  # fmt: skip
PIECES += [
    "[ab]", "[^a]", "[[:alpha:]]", "[a-", "]", "(?:", "(?i)", r"\b", r"\Z", r"\1", "(?=a)", "(?P<n>", "*+",
    r"\s",
]  # fmt: skip
PIECES += ["{", "}", "-", "\\", r"(.*\.)?(", ")$", "b.A", r"\-", "l.p"]


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


@pytest.mark.parametrize("said", ["norm", {"norm": 1}, [1], ["norm", None], 7, 0, "", {}, False])
def test_what_is_no_list_of_patterns_is_refused(said):
    with pytest.raises(FormatError, match="should be a list of patterns"):
        TensorParallel({"tp_replicated_parameter_patterns": said}, 2, "f", {})


@pytest.mark.parametrize("name", ["wé", "w\n", "w\x1b[0m", "w\u202e"])
def test_names_for_which_the_two_differ_are_refused(name):
    with pytest.raises(FormatError, match="only matched with names of printable ASCII"):
        NamePatterns(["w"], "f").matching(name)
    assert NamePatterns([], "f").matching(name) == frozenset()


PLAIN = {
    "as AutoTP writes it": lambda name: f"^{re.escape(name)}$",
    "a beginning": re.escape,
    "with dots": str,
    "as peft has it": lambda name: rf"(.*\.)?({name})$",
}


@settings(max_examples=500)
@given(
    st.sampled_from(sorted(PLAIN)),
    st.lists(st.text("ab.-\\ ", min_size=1, max_size=5), min_size=1, max_size=8),
    st.lists(st.text("ab.- ", max_size=9), min_size=1, max_size=5),
)
def test_texts_looked_up_together_match_what_each_does_in_python(kind, texts, names):
    made = [PLAIN[kind](text.replace("\\", r"\.")) for text in texts]
    patterns = NamePatterns(made, "f")
    for name in names:
        assert patterns.matching(name) == {each for each in made if re.match(each, name)}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_pattern_for_each_of_many_parameters_takes_no_longer_for_each(kind):
    names = [f"m.layers.{i}.mlp.experts.{i % 7}.w" for i in range(20_000)]
    made = [PLAIN[kind](name) for name in names]
    patterns = NamePatterns(made, "f")
    assert [patterns.matching(name) for name in names] == [{pattern} for pattern in made]


@pytest.mark.parametrize("pattern", [r"a+{i}\.w", r"(a|b)*{i}", r"(.*\.)?(a+{i})$"])
def test_patterns_are_not_tried_on_names_beyond_what_their_bytes_account_for(pattern, monkeypatch):
    monkeypatch.setattr(name_patterns, "FREE_STEPS", 1 << 22)
    patterns = NamePatterns([pattern.replace("{i}", str(i)) for i in range(400)], "f")
    names = [f"a{i}.w" for i in range(400)]
    with pytest.raises(FormatError, match=r"f has patterns that take more work.*400 with rep"):
        list(map(patterns.matching, names))


def test_texts_with_dots_in_places_of_their_own_are_bounded_too(monkeypatch):
    monkeypatch.setattr(name_patterns, "FREE_STEPS", 1 << 22)
    made = ["".join(".x"[i >> bit & 1] for bit in range(11)) for i in range(1 << 11)]
    patterns = NamePatterns(made, "f")
    names = [f"{i:013}" for i in range(1 << 11)]
    with pytest.raises(FormatError, match="f has patterns that take more work"):
        list(map(patterns.matching, names))


def test_patterns_whose_programs_are_large_are_refused():
    with pytest.raises(FormatError, match=r"pattern too large|take more work"):
        NamePatterns([rf"(\w|.){{1,900}}{i}" for i in range(1_000)], "f")


def test_the_patterns_of_a_large_model_are_tried_on_all_of_its_names():
    """Megatron-DeepSpeed's, with stages, layers and experts of a mixture."""
    patterns = NamePatterns([rf"\d+\.layers\.\d+\.part{i}\.(weight|bias)" for i in range(20)], "f")
    for i in range(30_000):
        name = f"{i % 8}.layers.{i}.part{i % 25}.weight"
        assert len(patterns.matching(name)) == (i % 25 < 20)


@pytest.mark.parametrize("pattern", SLOW[:2])
def test_a_checkpoint_with_a_slow_pattern_is_opened_or_refused_and_exported(tmp_path, pattern):
    """The export says anew how a parameter is cut, by the same patterns."""
    shutil.copytree(CASE, tmp_path / "c")
    for file in (tmp_path / "c").rglob("mp_rank_*_model_states.pt"):

        def other(name: str, data: bytes) -> bytes:
            return _with_pattern(data, pattern) if name.endswith("data.pkl") else data

        torch_writer.rewrite(file, other)
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
    length_of_new = len(new).to_bytes(4, "little")
    return pickled[: start + 1] + length_of_new + new + pickled[start + 5 + length :]
