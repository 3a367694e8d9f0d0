"""Names with placeholders: what `{layer}` in a name of a mapping stands for.

    {layer}             one part of a name, in most cases a number
    {layer+1}           a number, counted from one
    {moe+dense}         a number from `dense`, a size of the mapping
    {6*block+i}         a number that is a block and a place in it: 0 <= i < 6
    {2*block+1}         every second number from 1

A placeholder stands for an index, or for two. Numbers from sizes are filled in (`with_numbers`)
before a name is matched.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax_ucp.errors import SpecError

_BRACES = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDER = re.compile(
    r"(?:(?P<stride>\w+)\*(?P<outer>[A-Za-z_]\w*))?"
    r"(?:(?:(?<!\{)\+|^)(?P<index>[A-Za-z_]\w*))?"
    r"(?:\+(?P<offset>\w+))?",
    re.ASCII,
)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)

# Every number of a stride or an offset is less.
MAX_COUNT = 10**9


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What is between braces: `stride * outer + index + offset`, with `outer`, `index` or both.

    `stride` and `offset` are numbers, or names of sizes. An index alone may stand for a word.
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
        """Its indices, the slower first."""
        return tuple(filter(None, (self.outer, self.index)))

    @property
    def sizes(self) -> set[str]:
        """The sizes that it names."""
        return {text for text in (self.stride, self.offset) if not _COUNT.fullmatch(text)}

    @property
    def is_word(self) -> bool:
        """Whether it may stand for any text."""
        return not self.outer and self.offset == "0"

    def with_numbers(self, sizes: Mapping[str, int]) -> Placeholder:
        """The same with numbers for the sizes. Raises SpecError where a number cannot be."""
        stride, offset = (
            int(text) if _COUNT.fullmatch(text) else sizes[text]
            for text in (self.stride, self.offset)
        )
        if not 0 < stride < MAX_COUNT or offset >= MAX_COUNT:
            raise SpecError(
                f"{self} counts by {stride} from {offset}: by 1 or more, and below {MAX_COUNT}"
            )
        return Placeholder(self.index, self.outer, str(stride), str(offset))

    def values(self, text: str) -> dict[str, str] | None:
        """The indices that a text stands for, if it does for any."""
        if self.is_word:
            return {self.index: text}
        number = int(text) - int(self.offset) if _NUMBER.fullmatch(text) else -1
        outer, index = divmod(number, int(self.stride)) if self.outer else (0, number)
        if number < 0 or (index and not self.index):
            return None
        values = {self.outer: str(outer), self.index: str(index)}
        return {name: values[name] for name in self.names}

    def text(self, values: Mapping[str, str]) -> str:
        """What stands for these indices; the placeholder itself where one is missing."""
        if not values.keys() >= {*self.names}:
            return str(self)
        if self.is_word:
            return values[self.index]
        outer, index = (int(values[name]) if name else 0 for name in (self.outer, self.index))
        return str(int(self.stride) * outer + index + int(self.offset))


@dataclass(frozen=True)
class Name:
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
        """The names that it stands for, or more: each placeholder is one part, and a group."""
        parts = map(re.escape, self.texts)
        return re.compile("([^./]+)".join(parts))

    def with_numbers(self, sizes: Mapping[str, int]) -> Name:
        return Name(self.texts, tuple(one.with_numbers(sizes) for one in self.placeholders))

    def filled(self, values: Mapping[str, str]) -> str:
        """The name with its placeholders replaced, as far as there are values for them."""
        filled = [one.text(values) for one in self.placeholders]
        pairs = itertools.zip_longest(self.texts, filled, fillvalue="")
        return "".join(itertools.chain.from_iterable(pairs))


@lru_cache(maxsize=4096)
def parse_name(text: str) -> Name:
    """The name that a text says. Raises SpecError for braces that hold no placeholder.

    >>> parse_name("blocks.{layer+1}.experts.{expert}.w").indices
    ('layer', 'expert')
    """
    parts = _BRACES.split(text)
    found: list[Placeholder] = []
    for part in parts[1::2]:
        match = _PLACEHOLDER.fullmatch(part)
        groups = match.groupdict() if match else {}
        fields: dict[str, str] = {key: one for key, one in groups.items() if one}
        counts = (fields[key] for key in ("stride", "offset") if key in fields)
        has_index = bool(fields.keys() & {"index", "outer"})
        if not has_index or not all(one.isidentifier() or _COUNT.fullmatch(one) for one in counts):
            raise SpecError(
                f"{{{part}}} in {text!r} is no placeholder; write a name in braces, {{name+1}},"
                " or {6*block+name}"
            )
        found.append(Placeholder(**fields))
    if any(brace in part for part in parts[::2] for brace in "{}"):
        raise SpecError(f"a brace in {text!r} is not closed, or was never opened")
    if not all(re.search(r"[./]", part) for part in parts[2:-1:2]):
        raise SpecError(f"{text!r} has two placeholders in one part; between them is a . or a /")
    return Name(tuple(parts[::2]), tuple(found))


@lru_cache(maxsize=4096)
def name_regex(name: str) -> re.Pattern[str]:
    """The names that a name with placeholders stands for, or more, compiled once."""
    return parse_name(name).regex


def values_in(
    pattern: str, name: str, lengths: Mapping[str, int] | None = None
) -> dict[str, str] | None:
    """What the indices of `pattern` are in `name`; None where that is another name.

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
        found = placeholder.values(text)
        if found is None or any(values.get(key, one) != one for key, one in found.items()):
            return None
        values |= found
    return (
        values if all(_is_below(values[key], (lengths or {}).get(key)) for key in values) else None
    )


def _is_below(value: str, length: int | None) -> bool:
    return length is None or (bool(_NUMBER.fullmatch(value)) and int(value) < length)
