"""Regular expressions that come out of a checkpoint, matched in time that is linear in the name.

DeepSpeed's `universal_checkpoint_info` says with patterns for Python's `re.match` which parameters
are cut how. Python tries all ways in which a pattern could match: `(\\w|.)+!` takes twice as long
for every letter of a name. RE2 does not. What RE2 lacks (lookaround, references to groups), or
reads otherwise than Python, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import re2

from jax_ucp.errors import FormatError

# Patterns that trainers write have some tens of characters.
MAX_PATTERN_LENGTH = 1000

# What a compiled pattern may take, and the states that RE2 keeps of it. It has no repetition of
# more than 1,000.
PATTERN_BYTES = 1 << 18

# Every pattern is tried on every name, at about a microsecond each. A model of 2,000 parameters
# with a pattern for each, as AutoTP writes them, takes 4 million.
MAX_TRIES = 1 << 24

_REMEDY = "Say in a spec how slices form parameters (spec=, --spec)"

# Where RE2 sees plain text or a POSIX class, Python sees a repetition or a set of characters.
_OTHERWISE = re.compile(r"\{,|\{0\d|\{\d*,0\d|\[:")


class NamePatterns:
    """The patterns that the file `where` has. Raises FormatError, with a remedy, for one that
    cannot be matched as Python would.
    """

    def __init__(self, patterns: Iterable[str], where: str, remedy: str = _REMEDY):
        self._where, self._remedy = where, remedy
        self._compiled = {pattern: _compiled(pattern, where, remedy) for pattern in patterns}
        self._matching: dict[str, frozenset[str]] = {}

    def matching(self, name: str) -> frozenset[str]:
        """Those that match at the beginning of a name, as `re.match` does. Raises FormatError
        for too many names.
        """
        if name not in self._matching:
            self._matching[name] = frozenset(self._match(name)) if self._compiled else frozenset()
        return self._matching[name]

    def _match(self, name: str) -> Iterable[str]:
        # Python's \w has letters of all alphabets, and its $ is before a last line break too.
        if not (name.isascii() and name.isprintable()):
            raise FormatError(
                f"{self._where} has patterns, which are only matched with names of printable ASCII,"
                f" not with {name!r:.200}. {self._remedy}"
            )
        if len(self._compiled) * (len(self._matching) + 1) > MAX_TRIES:
            raise FormatError(
                f"{self._where} has {len(self._compiled)} patterns, each to be tried on more than"
                f" {len(self._matching)} names: more than {MAX_TRIES} in all. {self._remedy}"
            )
        return (pattern for pattern, compiled in self._compiled.items() if compiled.match(name))


def pattern_list(said: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    """The patterns under a key; none where it is not there. Raises FormatError unless they are a
    list of texts.
    """
    patterns = said.get(key) or ()
    if not isinstance(patterns, list | tuple) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise FormatError(f"{where}: {key} should be a list of patterns, but is {patterns!r:.80}")
    return patterns


def _compiled(pattern: str, where: str, remedy: str) -> Any:
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise FormatError(
            f"{where} has a pattern of {len(pattern)} characters; {MAX_PATTERN_LENGTH} are the most"
        )
    fault = "it is not ASCII" if not pattern.isascii() else None
    if found := _OTHERWISE.search(pattern):
        fault = f"{found[0]!r} means something else to RE2 than to Python"
    options = re2.Options()
    options.max_mem, options.log_errors = PATTERN_BYTES, False
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
