"""Specs parsed from YAML into rules and patterns; errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jax_ucp.errors import SpecError
from jax_ucp.layout.patterns import Averaged, Fused, Padded, Pattern, Replicated, Sharded, Unique
from jax_ucp.shard_spec.document import document, fields
from jax_ucp.shard_spec.rules import Sentence, Spec, UnboundPattern, regex_of

_PLAIN: dict[str, Pattern] = {
    "replicated": Replicated(),
    "averaged": Averaged(),
    "unique": Unique(),
}
_SECTIONS = {"extends", "sizes", "shards"}
_SPECS = resources.files("jax_ucp.shard_spec") / "specs"


def load(given: Path | Spec) -> Spec:
    """The spec itself, or the one in a file. Raises SpecError with every fault and its line."""
    if isinstance(given, Spec):
        return given
    try:
        text = given.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{given} cannot be read as a spec: {error}") from error
    return parse(text, str(given))


def built_in(name: str) -> Spec:
    """A spec that comes with the package, such as `megatron`."""
    known = sorted(
        Path(entry.name).stem for entry in _SPECS.iterdir() if entry.name.endswith(".yaml")
    )
    if name not in known:
        raise SpecError(f"there is no spec {name!r} in the package; there are {', '.join(known)}")
    return parse((_SPECS / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def parse(text: str, file: str = "spec") -> Spec:
    """The spec in a text; `file` is its name in errors.

    >>> parse("shards: [{param: '*.weight', pattern: {sharded: 0}}]").own[0].pattern
    Sharded(axes=(0,), grid=None)
    """
    top = document(text, file)
    top.refuse_other_sections(_SECTIONS, "a spec has extends, sizes and shards")
    sizes = top.sizes()
    own = top.items("shards", _sentence, "a list of rules")
    base = None
    if "extends" in top.content:
        name = str(top.content["extends"])
        base = top.attempt(lambda: built_in(name), top.place("extends"))
    top.raise_faults(f"{file} is not in the universal checkpoint language:")
    return Spec(tuple(own), sizes, base)


def pattern_of(node: object, size: Callable[[object], int]) -> Pattern:
    """The pattern in a piece of YAML; `size` gives the numbers for its sizes."""
    if isinstance(node, str) and node in _PLAIN:
        return _PLAIN[node]
    if not isinstance(node, dict):
        raise SpecError(
            f"{node!r} is not a pattern; there are {', '.join(_PLAIN)}, sharded and fused"
        )
    rest: dict[Any, Any] = dict(node)
    padded = _listed(rest.pop("padded", []))
    kinds = list(filter(rest.__contains__, ("sharded", "fused", *_PLAIN)))
    if len(kinds) != 1:
        raise SpecError(
            f"a pattern is one of {', '.join(_PLAIN)}, sharded and fused, not"
            f" {list(rest) or 'nothing'}"
        )
    (kind,) = kinds
    if kind == "sharded":
        fields(rest, "sharded", {"sharded"}, {"grid"})
        grid = tuple(map(size, _list(rest["grid"], "grid"))) if "grid" in rest else None
        pattern = Sharded(*map(_axis, _listed(rest["sharded"])), grid=grid)
    elif kind == "fused":
        pattern = _fused(rest, size)
    else:
        fields(rest, kind, {kind}, set())
        if rest[kind] not in (None, {}):
            raise SpecError(f"{kind} says nothing more, but here {rest[kind]!r}")
        pattern = _PLAIN[kind]
    for outer in padded:
        content = fields(outer, "padded", {"axis", "to"}, {"from"})
        full = size(content["from"]) if "from" in content else None
        pattern = Padded(pattern, _axis(content["axis"]), size(content["to"]), full)
    return pattern


def _fused(node: dict[Any, Any], size: Callable[[object], int]) -> Fused:
    fields(node, "fused", {"fused"}, set())
    inner = fields(node["fused"], "fused", {"axis", "parts"}, {"whole", "groups"})
    if not isinstance(inner["parts"], dict) or not inner["parts"]:
        raise SpecError(f"parts should be a mapping of names to sizes, not {inner['parts']!r}")
    parts: dict[str, int | tuple[int, ...]] = {}
    for name, rows in inner["parts"].items():
        parts[str(name)] = tuple(map(size, rows)) if isinstance(rows, list) else size(rows)
    whole = frozenset(map(str, _list(inner.get("whole", []), "whole")))
    groups = size(inner["groups"]) if "groups" in inner else None
    return Fused(_axis(inner["axis"]), parts, whole, groups)


def _sentence(item: object, place: str) -> Sentence:
    content = fields(item, "a rule", {"param", "pattern"}, {"when"})
    param, when = content["param"], str(content.get("when", ""))
    if not isinstance(param, str):
        raise SpecError(f"param should be a name, not {param!r}")
    regex_of(param)
    if "when" in content and not (when.removeprefix("not ").strip().isidentifier()):
        raise SpecError(f"when should be a name, or `not` and a name; it is {when!r}")
    unbound = UnboundPattern(content["pattern"], pattern_of)
    pattern = unbound if unbound.names() else unbound.bind({})
    return Sentence(param, pattern, when, place)


def _axis(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"an axis is a number from 0, not {value!r}")
    return value


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _list(value: object, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise SpecError(f"{what} should be a list, not {value!r}")
    return value
