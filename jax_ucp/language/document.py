"""YAML documents with the line of everything in them, for errors that say where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.language.arithmetic import MAX_SIZE

# The mappings that come with the package have some 5,000 characters, with a rule for each tensor a large model's would
# have 200,000. PyYAML reads a million in some ten seconds.
MAX_TEXT = 1_000_000
# PyYAML reads a number with colons, to the base of 60, in time that grows with the square of its length.
MAX_SCALAR = 10_000
# Sections, lists of rules, rules, patterns in patterns: some ten levels.
MAX_DEPTH = 32


def document(text: str, file: str) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
    """The top mapping, and lines: of each section by its name, of the items of a list under the key `(section,)`.

    Raises SpecError for what is not YAML, for a key that is there twice, and for more than a person would write:
    aliases, which may stand for any number of copies, deep nesting, a very long text.
    """
    try:
        _refuse_bombs(text, file)
        loader = yaml.SafeLoader(text)
        try:
            return _loaded(loader, file)
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        if isinstance(error, SpecError):
            raise
        hint = (
            "; quote a name that has braces itself, if it begins with one or stands between some"
            if "{" in str(error)
            else ""
        )
        raise SpecError(f"{file} is not YAML: {error}{hint}") from error


def _refuse_bombs(text: str, file: str) -> None:
    """Raise SpecError for what takes more time than its length allows; nothing is composed yet."""
    if len(text) > MAX_TEXT:
        raise SpecError(f"{file} has {len(text)} characters; {MAX_TEXT} are the most")
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(
                f"{file}:{line}: *{event.anchor} is an alias, which this language does not have: write it out"
            )
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise SpecError(f"{file}:{line}: a text of {len(event.value)} characters; {MAX_SCALAR} are the most")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(f"{file}:{line}: nested more than {MAX_DEPTH} deep")


def _loaded(loader: yaml.SafeLoader, file: str) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
    root = loader.get_single_node()
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{file} should be a mapping of sections")
    _refuse_repeats(root, file)
    lines: dict[Any, Any] = {key.value: key.start_mark.line + 1 for key, _ in _named(root)}
    for key, value in _named(root):
        if isinstance(value, yaml.SequenceNode):
            lines[(key.value,)] = [item.start_mark.line + 1 for item in value.value]
    content: Any = loader.construct_document(root)
    if not isinstance(content, dict) or _has_huge_numbers(content):
        raise SpecError(f"{file} should be a mapping of sections, with no number beyond {MAX_SIZE}")
    if strays := [key for key in content if key not in lines]:
        raise SpecError(f"{file} has the section {strays[0]!r:.80}; a section has a name")
    return content, lines


def _has_huge_numbers(value: object) -> bool:
    """Whether a number has too many digits even to be printed in an error."""
    if isinstance(value, dict):
        return any(_has_huge_numbers(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return any(map(_has_huge_numbers, value))
    return isinstance(value, int) and abs(value) > MAX_SIZE


def _named(root: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    return [(key, value) for key, value in root.value if isinstance(key, yaml.ScalarNode)]


def _refuse_repeats(node: yaml.Node, file: str) -> None:
    """YAML keeps the last of two equal keys; here that would lose a rule without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                raise SpecError(f"{file}:{key.start_mark.line + 1}: {key.value!r:.80} is there twice")
            seen.add(str(key.value))
            _refuse_repeats(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeats(item, file)


def dumped(content: Mapping[str, Any]) -> str:
    """The YAML of a content, without aliases."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def fields(node: object, what: str, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise SpecError(f"{what} should be a mapping with {', '.join(sorted(needed))}, not {node!r:.80}")
    if missing := needed - set(node):
        raise SpecError(f"{what} lacks {', '.join(sorted(missing))}")
    if stray := [key for key in node if key not in needed | allowed]:
        raise SpecError(
            f"{what} has no field {', '.join(f'{key!r:.80}' for key in stray)}; it has {sorted(needed | allowed)}"
        )
    return node


def faults_of(attempt: Callable[[], object], where: str) -> Iterator[str]:
    try:
        attempt()
    except (SpecError, LayoutError) as error:
        yield f"{where}: {error}"
