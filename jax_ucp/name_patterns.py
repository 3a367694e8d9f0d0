"""Regular expressions from a checkpoint, matched in time that is linear in the bytes of patterns
and names.

DeepSpeed's `universal_checkpoint_info` has patterns for Python's `re.match` that select parameters
by how they are cut. Python tries all ways in which a pattern could match: `(\\w|.)+!` takes twice
as long for every letter of a name. RE2 does not. Patterns that RE2 does not support (lookaround,
references to groups), or reads differently from Python, are refused.

A trainer may write a pattern for each parameter: DeepSpeed's AutoTP (`^name$`, escaped), peft's
`rank_pattern` (names whose dots stand for any letter). Patterns of text and dots alone are not
tried one by one: those with dots in the same places are looked up together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import re2

from jax_ucp.errors import FormatError

# Patterns that trainers write have some tens of characters.
MAX_PATTERN_LENGTH = 1000

# The memory for a compiled pattern and the states that RE2 keeps for it: all share SHARED_BYTES,
# and each has some more for its length. RE2 allows no repetition of more than 1,000.
MAX_PATTERN_BYTES = 1 << 18
SHARED_BYTES = 1 << 24
BYTES_PER_LETTER = 512

# A step takes RE2 at most some 10 ns, mostly 1: it is an instruction of a pattern at a letter of a
# name. Megatron-DeepSpeed's twenty patterns take 1,000 for each letter.
FREE_STEPS = 1 << 26
STEPS_PER_BYTE = 4_000
_TRY_STEPS, _COMPILE_STEPS, _INSTRUCTION_STEPS, _GAP_STEPS = 200, 10_000, 100, 16

_REMEDY = "Say in a spec how slices form parameters (spec=, --spec)"

# Where RE2 sees plain text or a POSIX class, Python sees a repetition or a set of characters.
_OTHERWISE = re.compile(r"\{,|\{0\d|\{\d*,0\d|\[:")

# Patterns of text whose dots stand for any letter: for the beginning of a name, for all of it, or,
# in peft, for its end after a dot or for all of it.
_UNIT = re.compile(r"[\w/:,=@%&~ -]|\.|\\[^\w]", re.ASCII)
_TEXT = rf"((?:{_UNIT.pattern})+)"
_PLAIN = re.compile(rf"\^?{_TEXT}(\$?)|\(\.\*\\\.\)\?\({_TEXT}\)\$", re.ASCII)


@dataclass(frozen=True)
class _Place:
    """The place of `length` letters in a name: at its beginning or, if `tail`, at its end. `gaps`
    are the positions of letters that may be any.
    """

    tail: bool
    whole: bool
    length: int
    gaps: tuple[int, ...]

    def text(self, name: str) -> str | None:
        """A name's letters at the place, without the gaps; None if it has no such place."""
        start = len(name) - self.length if self.tail else 0
        end = start + self.length
        outside = start < 0 or end > len(name) or (self.whole and end < len(name))
        if outside or (start > 0 and name[start - 1] != "."):
            return None
        bounds = (start - 1, *(start + gap for gap in self.gaps), end)
        return "".join(name[before + 1 : after] for before, after in pairwise(bounds))


class NamePatterns:
    """The patterns in the file `where`. Raises FormatError, with a remedy, for a pattern that
    cannot be matched as Python would, and for more work than is proportional to the bytes.
    """

    def __init__(self, patterns: Iterable[str], where: str, remedy: str = _REMEDY):
        self._where, self._remedy = where, remedy
        self._plain: dict[_Place, dict[str, list[str]]] = {}
        self._compiled: dict[str, Any] = {}
        self._matching: dict[str, frozenset[str]] = {}
        self._steps = FREE_STEPS
        others = [pattern for pattern in dict.fromkeys(patterns) if not self._is_plain(pattern)]
        for pattern in others:
            compiled = _compiled(pattern, SHARED_BYTES // len(others), where, remedy)
            self._charge(
                _COMPILE_STEPS + _INSTRUCTION_STEPS * compiled.programsize, bytes_read=len(pattern)
            )
            self._compiled[pattern] = compiled
        self._each = _TRY_STEPS * (len(self._plain) + len(others))
        self._each += _GAP_STEPS * sum(len(place.gaps) for place in self._plain)
        self._letter = sum(compiled.programsize for compiled in self._compiled.values())
        self._letter += len(self._plain)

    def matching(self, name: str) -> frozenset[str]:
        """The patterns that match at the beginning of a name, as `re.match` does.

        Raises FormatError for too many names.
        """
        if name in self._matching:
            return self._matching[name]
        matching: set[str] = set()
        if self._compiled or self._plain:
            # Python's \w matches letters of all alphabets, and its $ also before a last line break
            if not (name.isascii() and name.isprintable()):
                raise FormatError(
                    f"{self._where} has patterns, which are only matched with names of printable"
                    f" ASCII, not with {name!r:.200}. {self._remedy}"
                )
            self._charge(self._each + self._letter * len(name), bytes_read=len(name))
            for place, texts in self._plain.items():
                text = place.text(name)
                patterns = texts.get(text, ()) if text is not None else ()
                self._charge(_TRY_STEPS * len(patterns))
                matching.update(patterns)
            matching.update(p for p, each in self._compiled.items() if each.match(name))
        self._matching[name] = frozenset(matching)
        return self._matching[name]

    def _is_plain(self, pattern: str) -> bool:
        """Whether a pattern has only text and dots; it is then kept for looking up."""
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise FormatError(
                f"{self._where} has a pattern of {len(pattern)} characters; {MAX_PATTERN_LENGTH}"
                " are the most"
            )
        if (match := _PLAIN.fullmatch(pattern)) is None:
            return False
        text, end, tail = match.groups()
        units = _UNIT.findall(text or tail)
        gaps = tuple(at for at, unit in enumerate(units) if unit == ".")
        place = _Place(tail is not None, bool(end), len(units), gaps)
        letters = "".join(unit[-1] for unit in units if unit != ".")
        self._plain.setdefault(place, {}).setdefault(letters, []).append(pattern)
        self._charge(0, bytes_read=len(pattern))
        return True

    def _charge(self, steps: int, bytes_read: int = 0) -> None:
        self._steps += STEPS_PER_BYTE * bytes_read - steps
        if self._steps < 0:
            raise FormatError(
                f"{self._where} has patterns that take more work, tried on each name, than their"
                f" bytes and those of the names account for: {len(self._compiled)} with"
                f" repetitions or choices, {len(self._matching)} names so far. {self._remedy}"
            )


def pattern_list(info: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    """The patterns under a key, if any. Raises FormatError unless they are a list of texts."""
    patterns = () if info.get(key) is None else info[key]
    if not isinstance(patterns, list | tuple) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise FormatError(f"{where}: {key} should be a list of patterns, but is {patterns!r:.80}")
    return patterns


def _compiled(pattern: str, shared: int, where: str, remedy: str) -> Any:
    """The pattern compiled by RE2, with its part of the memory that all share."""
    fault = "it is not ASCII" if not pattern.isascii() else None
    if other := _OTHERWISE.search(pattern):
        fault = f"{other[0]!r} means something else to RE2 than to Python"
    options = re2.Options()
    options.max_mem = min(MAX_PATTERN_BYTES, shared + BYTES_PER_LETTER * len(pattern))
    options.log_errors, options.never_capture = False, True
    try:
        compiled = None if fault else re2.compile(pattern, options)
    except re2.error as error:
        compiled, fault = None, str(error)
    if fault:
        raise FormatError(
            f"{where} has the pattern {pattern!r:.200}, which cannot be matched in bounded time:"
            f" {fault}. {remedy}"
        )
    return compiled
