"""YAML documents with the line of everything in them, for errors that say where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from jax_ucp.errors import LayoutError, SpecError


def document(text: str, file: str) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
    """The top mapping, and lines: of each section by its name, of the items of a list under the key `(section,)`."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise SpecError(f"{file} should be a mapping of sections")
        _refuse_repeats(root, file)
        lines: dict[Any, Any] = {key.value: key.start_mark.line + 1 for key, _ in root.value}
        for key, value in root.value:
            if isinstance(value, yaml.SequenceNode):
                lines[(key.value,)] = [item.start_mark.line + 1 for item in value.value]
        return loader.construct_document(root), lines
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        hint = (
            "; quote a name that has braces itself, if it begins with one or stands between some"
            if "{" in str(error)
            else ""
        )
        raise SpecError(f"{file} is not YAML: {error}{hint}") from error
    finally:
        loader.dispose()


def _refuse_repeats(node: yaml.Node, file: str) -> None:
    """YAML keeps the last of two equal keys; here that would lose a rule without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                raise SpecError(f"{file}:{key.start_mark.line + 1}: {key.value!r} is there twice")
            seen.add(str(key.value))
            _refuse_repeats(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeats(item, file)


def fields(node: object, what: str, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise SpecError(f"{what} should be a mapping with {', '.join(sorted(needed))}, not {node!r}")
    if missing := needed - set(node):
        raise SpecError(f"{what} lacks {', '.join(sorted(missing))}")
    if stray := [key for key in node if key not in needed | allowed]:
        raise SpecError(f"{what} has no field {', '.join(map(repr, stray))}; it has {sorted(needed | allowed)}")
    return node


def faults_of(attempt: Callable[[], object], where: str) -> Iterator[str]:
    try:
        attempt()
    except (SpecError, LayoutError) as error:
        yield f"{where}: {error}"
