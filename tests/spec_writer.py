"""A spec as YAML: what reading it is checked against."""

from __future__ import annotations

from typing import Any

from jax_ucp.layout.patterns import Fused, Padded, Pattern, Sharded
from jax_ucp.shard_spec.document import dumped
from jax_ucp.shard_spec.rules import Spec, UnboundPattern


def to_yaml(spec: Spec) -> str:
    """The text of the rules and sizes of a spec itself, without those of the spec it extends."""
    items = []
    for sentence in spec.own:
        is_unbound = isinstance(sentence.pattern, UnboundPattern)
        said = sentence.pattern.node if is_unbound else node_of(sentence.pattern)
        when = {"when": sentence.when} if sentence.when else {}
        items.append({"param": sentence.param, **when, "pattern": said})
    sizes = {"sizes": dict(spec.sizes)} if spec.sizes else {}
    return dumped({**sizes, "shards": items})


def node_of(pattern: Pattern) -> str | dict[str, Any]:
    """What YAML says of a pattern; `pattern_of` gives the pattern again."""
    match pattern:
        case Sharded():
            axes = list(pattern.axes)
            said = {"sharded": axes if len(axes) > 1 else axes[0]}
            return {**said, "grid": list(pattern.grid)} if pattern.grid else said
        case Fused():
            return {"fused": _fused_node(pattern)}
        case Padded(pattern=inner):
            node = node_of(inner)
            said = node if isinstance(node, dict) else {node: {}}
            padded = {"axis": pattern.axis, "to": pattern.size, "from": pattern.padded}
            return {**said, "padded": [*said.get("padded", []), _present(padded)]}
        case _:
            return type(pattern).__name__.lower()


def _fused_node(pattern: Fused) -> dict[str, Any]:
    sizes = pattern.parts.items()
    parts = {name: list(rows) if isinstance(rows, tuple) else rows for name, rows in sizes}
    whole = sorted(pattern.whole) or None
    axis, groups = pattern.axis, pattern.groups
    return _present({"axis": axis, "parts": parts, "whole": whole, "groups": groups})


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
