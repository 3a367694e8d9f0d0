"""Names with placeholders in mappings, such as `{layer}`, and the values in names that match them.

    {layer}             one part of a name, in most cases a number
    {layer+1}           a number, counted from one
    {moe+dense}         a number from `dense`, a size of the mapping
    {6*block+i}         a number that is a block and a place in it: 0 <= i < 6
    {2*block+1}         every second number from 1

A placeholder has one index or two. Sizes are replaced by numbers (`with_numbers`) before a name is
matched.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from jax_ucp.errors import SpecError

_BRACES = re.compile(r"\{([^{}]*)\}")
# A stride and an offset are numbers, or names of sizes.
_PLACEHOLDER = re.compile(
    r"(?:(?P<stride>\d{1,9}|[A-Za-z_]\w*)\*(?P<outer>[A-Za-z_]\w*))?"
    r"(?:(?(stride)\+)(?P<index>[A-Za-z_]\w*))?"
    r"(?:\+(?P<offset>\d{1,9}|[A-Za-z_]\w*))?",
    re.ASCII,
)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_BRACE = re.compile(r"[{}]")
_SEPARATOR = re.compile(r"[./]")
_NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)

# Every number of a stride or an offset is less.
MAX_COUNT = 10**9


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder: the number `stride * outer + index + offset`, with `outer`, `index` or both.

    `stride` and `offset` are numbers, or names of sizes. A single index may also stand for a word.
    """

    index: str = ""
    outer: str = ""
    stride: str = "1"
    offset: str = "0"

    def __str__(self) -> str:
        blocks = f"{self.stride}*{self.outer}" if self.outer else ""
        offset = self.offset if self.offset != "0" else ""
        return f"{{{'+'.join(filter(None, (blocks, self.index, offset)))}}}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its indices, the outer one first."""
        return tuple(filter(None, (self.outer, self.index)))

    @property
    def sizes(self) -> set[str]:
        """The sizes that it names."""
        return set(itertools.filterfalse(_COUNT.fullmatch, (self.stride, self.offset)))

    @property
    def is_word(self) -> bool:
        """Whether it is a single index, which may stand for any text."""
        return not self.outer and self.offset == "0"

    def with_numbers(self, sizes: Mapping[str, int]) -> Placeholder:
        """The placeholder with numbers for the sizes. Raises SpecError for impossible numbers."""
        stride, offset = _count(self.stride, sizes), _count(self.offset, sizes)
        if not 0 < stride < MAX_COUNT or offset >= MAX_COUNT:
            raise SpecError(
                f"{self} counts by {stride} from {offset}: by 1 or more, and below {MAX_COUNT}"
            )
        return Placeholder(self.index, self.outer, str(stride), str(offset))

    def values(self, text: str) -> dict[str, str] | None:
        """The values of its indices in a text; None if the text does not match."""
        if self.is_word:
            return {self.index: text}
        number = int(text) - int(self.offset) if _NUMBER.fullmatch(text) else -1
        if number < 0:
            return None
        numbers = divmod(number, int(self.stride)) if self.outer else (0, number)
        values = dict(zip((self.outer, self.index), map(str, numbers), strict=True))
        # an index that the placeholder does not have must be zero
        return values if values.pop("", "0") == "0" else None

    def text(self, values: Mapping[str, str]) -> str:
        """The text for these values of indices; the placeholder itself if a value is missing."""
        if not values.keys() >= {*self.names}:
            return str(self)
        if self.is_word:
            return values[self.index]
        numbers = {"": "0", **values}
        block, place = int(numbers[self.outer]), int(numbers[self.index])
        return str(int(self.stride) * block + place + int(self.offset))


def _count(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a stride or an offset."""
    return int(text) if _COUNT.fullmatch(text) else sizes[text]


@dataclass(frozen=True)
class NamePattern:
    """A name with placeholders: texts, and between them placeholders."""

    texts: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]

    def __str__(self) -> str:
        return self.filled({})

    @property
    def indices(self) -> tuple[str, ...]:
        """The indices of its placeholders, each once."""
        names = itertools.chain.from_iterable(one.names for one in self.placeholders)
        return tuple(dict.fromkeys(names))

    @property
    def sizes(self) -> set[str]:
        """The sizes that its placeholders name."""
        return set[str]().union(*(one.sizes for one in self.placeholders))

    @property
    def regex(self) -> re.Pattern[str]:
        """A regular expression for its names, and maybe others; each placeholder is a group."""
        parts = map(re.escape, self.texts)
        return re.compile("([^./]+)".join(parts))

    def with_numbers(self, sizes: Mapping[str, int]) -> NamePattern:
        return NamePattern(self.texts, tuple(one.with_numbers(sizes) for one in self.placeholders))

    def filled(self, values: Mapping[str, str]) -> str:
        """The name with values in place of its placeholders, as far as there are values."""
        filled = [one.text(values) for one in self.placeholders]
        pairs = itertools.zip_longest(self.texts, filled, fillvalue="")
        return "".join(itertools.chain.from_iterable(pairs))


@lru_cache(maxsize=4096)
def parse_name(text: str) -> NamePattern:
    """The parsed name. Raises SpecError for braces that hold no placeholder.

    >>> parse_name("blocks.{layer+1}.experts.{expert}.w").indices
    ('layer', 'expert')
    """
    parts = _BRACES.split(text)
    texts = parts[::2]
    placeholders: list[Placeholder] = []
    for inner in parts[1::2]:
        match = _PLACEHOLDER.fullmatch(inner)
        fields: dict[str, str] = match.groupdict() if match else {}
        placeholder = Placeholder(**dict(filter(operator.itemgetter(1), fields.items())))
        names = placeholder.names
        if not names or len({*names}) < len(names):
            raise SpecError(
                f"{{{inner}}} in {text!r} is not a placeholder; write a name in braces, {{name+1}},"
                " or {6*block+name}"
            )
        placeholders.append(placeholder)
    if _BRACE.search("".join(texts)):
        raise SpecError(f"a brace in {text!r} is not closed, or was never opened")
    if not all(map(_SEPARATOR.search, texts[1:-1])):
        raise SpecError(f"{text!r} has two placeholders in one part; between them is a . or a /")
    return NamePattern(tuple(texts), tuple(placeholders))


@lru_cache(maxsize=4096)
def name_regex(name: str) -> re.Pattern[str]:
    """A regular expression for a name with placeholders, which may match other names too."""
    return parse_name(name).regex


def values_in(
    pattern: str, name: str, lengths: Mapping[str, int] = MappingProxyType({})
) -> dict[str, str] | None:
    """The values of the indices of `pattern` in `name`; None if the name does not match.

    An index is a number below its length, where that is one of `lengths`.

    >>> values_in("blocks.{6*block+i}.w", "blocks.8.w")
    {'block': '1', 'i': '2'}
    >>> values_in("blocks.{layer}.w", "blocks.8.w", {"layer": 8})
    """
    match = name_regex(pattern).fullmatch(name)
    if match is None:
        return None
    values: dict[str, str] = {}
    for placeholder, text in zip(parse_name(pattern).placeholders, match.groups(), strict=True):
        of_placeholder = placeholder.values(text)
        # an index that is in several placeholders must have one value
        if of_placeholder is None or values | of_placeholder != of_placeholder | values:
            return None
        values |= of_placeholder
    limited = values.keys() & lengths.keys()
    return values if all(_is_below(values[key], lengths[key]) for key in limited) else None


def _is_below(value: str, length: int) -> bool:
    return bool(_NUMBER.fullmatch(value)) and int(value) < length
