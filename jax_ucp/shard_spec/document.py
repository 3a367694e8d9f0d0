"""YAML documents with the line of everything in them, for errors that say where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.shard_spec.expressions import MAX_SIZE, names_in

T = TypeVar("T")

# The package's mappings have some 5,000 characters each; one with a rule for each tensor of a large
# model would have 200,000. PyYAML reads a million in some ten seconds.
MAX_TEXT = 1_000_000
# libyaml, which wheels of PyYAML contain, parses ten times as fast as PyYAML alone.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
# PyYAML parses a number with colons, in base 60, in time that is quadratic in its length.
MAX_SCALAR = 10_000
# Sections, lists of rules, rules, patterns in patterns: some ten levels.
MAX_DEPTH = 32


@dataclass
class Document:
    """The sections of a YAML file with their line numbers, and the faults found in them so far.

    `item_lines` has the line of each item of a section that is a list.
    """

    file: str
    content: dict[Any, Any]
    lines: Mapping[str, int]
    item_lines: Mapping[str, Sequence[int]]
    faults: list[str] = field(default_factory=list[str])

    def refuse_other_sections(self, known: Collection[str], hint: str) -> None:
        """Add a fault for each section that is not `known`."""
        for key in itertools.filterfalse(known.__contains__, self.content):
            self.faults.append(f"{self.place(key)}: {key!r} is not a section; {hint}")

    def place(self, section: str) -> str:
        """The file and the line of a section, for errors."""
        return f"{self.file}:{self.lines[section]}"

    def attempt(self, read: Callable[[], T], place: str) -> T | None:
        """The result of `read`; if it raises an error, None, and a fault is added."""
        try:
            return read()
        except (SpecError, LayoutError) as error:
            self.faults.append(f"{place}: {error}")
            return None

    def sizes(self) -> dict[str, Any]:
        """The section `sizes`: names with numbers or expressions of names."""
        sizes: Any = self.content.get("sizes") or {}
        if not isinstance(sizes, dict):
            self.faults.append(
                f"{self.place('sizes')}: sizes should be a mapping of names to sizes"
            )
            return {}
        for name, expression in sizes.items():
            place = self.place("sizes")
            if not isinstance(name, str) or not name.isidentifier():
                self.faults.append(f"{place}: {name!r} is not a name for a size")
            self.attempt(lambda e=expression: names_in(e), f"{place}: sizes: {name}")
        return sizes

    def items(
        self, section: str, read: Callable[[object, str], T], kind: str = "a list"
    ) -> list[T]:
        """The items of a list section, each given to `read` with its place, without faulty ones."""
        items = self.content.get(section) or []
        if not isinstance(items, list):
            self.faults.append(f"{self.place(section)}: {section} should be {kind}")
            return []
        values: list[T] = []
        for item, line in zip(items, self.item_lines.get(section, ()), strict=False):
            place = f"{self.file}:{line}"
            value = self.attempt(lambda i=item, p=place: read(i, p), place)
            if value is not None:
                values.append(value)
        return values

    def raise_faults(self, title: str) -> None:
        """Raise SpecError with every fault, if there are any."""
        if self.faults:
            raise SpecError(title, self.faults)


def document(text: str, file: str) -> Document:
    """The sections of a text in YAML; `file` is its name in errors.

    Raises SpecError if the text is not YAML, has a key twice, is very long, is nested deeply, or
    has aliases, which may stand for any number of copies.
    """
    try:
        _refuse_bombs(text, file)
        loader = _Loader(text)
        try:
            return _loaded(loader, file)
        finally:
            loader.dispose()
    except SpecError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        marks = _quote(error, text, file)
        begins = [mark.line for mark in marks]
        hint = ""
        if any("{" in line for at in begins for line in text.splitlines()[at : at + 1]):
            hint = (
                "; quote a name that has braces itself, if it begins with one or stands between"
                " some, and a condition between braces that has brackets or commas"
            )
        raise SpecError(f"{file} is not YAML: {error}{hint}") from error


def _quote(error: Exception, text: str, file: str) -> list[yaml.Mark]:
    """The places that an error of YAML names; they quote their lines, which libyaml's do not."""
    marks: list[yaml.Mark] = []
    for name in ("context_mark", "problem_mark"):
        if at := getattr(error, name, None):
            marks.append(yaml.Mark(file, at.index, at.line, at.column, f"{text}\0", at.index))
            setattr(error, name, marks[-1])
    return marks


def _refuse_bombs(text: str, file: str) -> None:
    """Raise SpecError for a text that would take too much time or memory, before it is loaded."""
    if len(text) > MAX_TEXT:
        raise SpecError(f"{file} has {len(text)} characters; {MAX_TEXT} are the most")
    depth = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(
                f"{file}:{line}: *{event.anchor} is an alias, which this language does not have:"
                " write it out"
            )
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise SpecError(
                f"{file}:{line}: a text of {len(event.value)} characters; {MAX_SCALAR} are the most"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise SpecError(f"{file}:{line}: nested more than {MAX_DEPTH} deep")


def _loaded(loader: Any, file: str) -> Document:
    """The sections that a loader gives. Raises SpecError for anything but a mapping."""
    root = loader.get_single_node()
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{file} should be a mapping of sections")
    _refuse_repeats(root, file)
    lines: dict[str, int] = {}
    item_lines: dict[str, list[int]] = {}
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode):
            lines[key.value] = _line(key)
            items = value.value if isinstance(value, yaml.SequenceNode) else ()
            item_lines[key.value] = [_line(item) for item in items]
    content: Any = loader.construct_document(root)
    if not isinstance(content, dict) or _has_huge_numbers(content):
        raise SpecError(f"{file} should be a mapping of sections, with no number beyond {MAX_SIZE}")
    for key in itertools.filterfalse(lines.__contains__, content):
        raise SpecError(f"{file} has the section {key!r:.80}; a section has a name")
    return Document(file, content, lines, item_lines)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _has_huge_numbers(value: object) -> bool:
    """Whether a number in a value has so many digits that it cannot even be printed."""
    if isinstance(value, dict):
        return any(map(_has_huge_numbers, itertools.chain(value, value.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_has_huge_numbers, value))
    return isinstance(value, int) and abs(value) > MAX_SIZE


def _refuse_repeats(node: yaml.Node, file: str) -> None:
    """Raise SpecError for a repeated key, of which PyYAML would silently keep the last."""
    items = node.value if isinstance(node, yaml.CollectionNode) else ()
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in items:
            if str(key.value) in seen:
                raise SpecError(f"{file}:{_line(key)}: {key.value!r:.80} is there twice")
            seen.add(str(key.value))
        items = [value for _, value in items]
    for item in items:
        _refuse_repeats(item, file)


def dumped(content: Mapping[str, Any]) -> str:
    """The content as YAML, without aliases."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False)


class _Dumper(_SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def fields(node: object, what: str, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    """The node, a mapping. Raises SpecError if it is none, or lacks or has other fields."""
    if not isinstance(node, dict):
        raise SpecError(
            f"{what} should be a mapping with {', '.join(sorted(needed))}, not {node!r:.80}"
        )
    if missing := needed - set(node):
        raise SpecError(f"{what} lacks {', '.join(sorted(missing))}")
    if strays := list(itertools.filterfalse((needed | allowed).__contains__, node)):
        listed = ", ".join(f"{key!r:.80}" for key in strays)
        raise SpecError(f"{what} has no field {listed}; it has {sorted(needed | allowed)}")
    return node
