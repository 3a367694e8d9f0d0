"""Conditions on a model's config: `first(attention_bias, false) == false and hidden_act == "silu"`.

    condition    a comparison, or a key that is true or false; joined by `and`, `or`, `not` and ()
                 repeats(key, literal, ...): the key's list is these over and over
    comparison   two values with == != < <= > >=, or a value `in` or `not in` a list of literals
    value        a key, a literal, or first(value, value, ...)
    literal      a number, "text", true, false, null, or [], the list with nothing in it
    key          a name in the config; `a.b` is the name b in what a holds

Defaults are written down: `first` is the first of its values that the config has. A key that it
does not have decides nothing, so a condition that needs it is not met; it is read from left to
right. null is a value. Nothing is converted: 1 is not true, and only numbers are less or greater.
"""

from __future__ import annotations

import ast
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jax_ucp.errors import SpecError

_MAX_LENGTH = 1000
_SHOWN = 60
_WORDS = {"true": True, "false": False, "null": None}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FORMS = (
    'write `key == "text"`, `key in [1, 2]`, `key < 8`, and, or, not, first(key, default),'
    " repeats(key, 0, 1)"
)


class Undecided(Exception):
    """The config lacks a key of the condition, or its value cannot be compared."""


def check_condition(text: object) -> None:
    """Raise SpecError where a text is not a condition."""
    _parsed(text)


@lru_cache(maxsize=4096)
def keys_in(text: str) -> tuple[str, ...]:
    """The keys that a condition names, each once, in order.

    >>> keys_in('first(rope_scaling.type, "default") == "yarn" or not use_cache')
    ('rope_scaling.type', 'use_cache')
    """
    return tuple(dict.fromkeys(_keys(_parsed(text))))


def holds(text: str, config: Mapping[str, Any]) -> bool:
    """Whether a config meets a condition. Raises Undecided where it lacks what decides that.

    >>> holds("first(attention_bias, false) == false", {})
    True
    """
    return _truth(_parsed(text), config)


def unmet(text: str, config: Mapping[str, Any]) -> str:
    """The part of a condition that a config does not meet, and what it has there; "" if all is met.

    >>> unmet('tie and hidden_act in ["silu", "swish"]', {"tie": True, "hidden_act": "gelu"})
    '`hidden_act in ["silu", "swish"]` is needed, and the config has hidden_act = "gelu"'
    """
    tree = _parsed(text)
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    for part in parts:
        try:
            if _truth(part, config):
                continue
            has = values_of(_keys(part), config)
        except Undecided as error:
            has = str(error)
        return f"`{ast.get_source_segment(text, part)}` is needed, and the config has {has}"
    return ""


def values_of(keys: Iterable[str], config: Mapping[str, Any]) -> str:
    """The keys that a config has, with their values; of keys that it has none of, that."""
    listed = tuple(dict.fromkeys(keys))
    values = [f"{key} = {_shown(value)}" for key in listed for value in _lookup(key, config)]
    return ", ".join(values) or _none_of(listed)


def _none_of(keys: Iterable[str]) -> str:
    listed = list(keys)
    return f"no {listed[0]}" if len(listed) == 1 else f"none of {', '.join(listed)}"


def _parsed(text: object) -> ast.expr:
    if not isinstance(text, str):
        raise SpecError(f"a condition is a text, not {text!r}; {_FORMS}")
    return _parsed_text(text)


@lru_cache(maxsize=4096)
def _parsed_text(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise SpecError(f"a condition of {len(text)} characters; {_MAX_LENGTH} are enough")
    try:
        tree = ast.parse(text, mode="eval").body
        _check(tree, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{text!r} is not a condition: {_FORMS}") from None
    if not any(_keys(tree)):
        raise SpecError(f"{text!r} names no key of a config")
    return tree


def _check(node: ast.expr, text: str) -> None:
    """Raise SpecError where a node is not a condition."""
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                _check(part, text)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            _check(inner, text)
        case ast.Compare(
            left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.List(elts=items)]
        ):
            _check_list(left, items, text)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if not isinstance(
            op, ast.Is | ast.IsNot
        ):
            _check_comparison(left, op, right, text)
        case ast.Call(func=ast.Name(id="repeats"), args=[left, *items], keywords=[]) if items:
            _check_list(left, items, text)
        case _:
            _check_value(node, text)
            if _is_literal(node):
                raise SpecError(f"{text!r} is not a condition: {_FORMS}")


def _check_list(value: ast.expr, items: Sequence[ast.expr], text: str) -> None:
    """Raise SpecError where a value is not one, or what it is compared with are not literals."""
    _check_value(value, text)
    for item in items:
        _check_literal(item, text)


def _check_comparison(left: ast.expr, op: ast.cmpop, right: ast.expr, text: str) -> None:
    if isinstance(op, ast.In | ast.NotIn):
        raise SpecError(
            f"{text!r} is not a condition: what stands after `in` is a list of literals"
        )
    for side in (left, right):
        _check_value(side, text)
        if type(op) not in _ORDERS or not _is_literal(side):
            continue
        if not is_number(_literal(side)):
            raise SpecError(f"{text!r} is not a condition: only numbers are less or greater")


def _check_value(node: ast.expr, text: str) -> None:
    match node:
        case ast.Call(func=ast.Name(id="first"), args=[_, _, *_] as args, keywords=[]):
            for arg in args:
                _check_value(arg, text)
        case ast.Attribute() | ast.Name() if _key(node):
            return
        case _:
            _check_literal(node, text)


def _check_literal(node: ast.expr, text: str) -> None:
    if not _is_literal(node):
        raise SpecError(f"{text!r} is not a condition: {_FORMS}")


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str) or is_number(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return is_number(value)
        case ast.Name(id=name):
            return name in _WORDS
        case ast.List(elts=items):
            return not items
    return False


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(operand=ast.Constant(value=int(value) | float(value))):
            return -value
        case ast.Name(id=name):
            return _WORDS[name]
        case ast.List():
            return []
    raise AssertionError(ast.dump(node))


def _key(node: ast.expr) -> str:
    """The key that a node is: names with dots between them; nothing where it is none."""
    match node:
        case ast.Name(id=name) if name not in _WORDS:
            return name
        case ast.Attribute(value=above, attr=name) if _key(above):
            return f"{_key(above)}.{name}"
    return ""


def _keys(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.expr) and _key(node):
        yield _key(node)
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Call) and child is node.func):
            yield from _keys(child)


def _truth(node: ast.expr, config: Mapping[str, Any]) -> bool:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_truth(part, config) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_truth(part, config) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _truth(inner, config)
        case ast.Compare(left=left, ops=[op], comparators=[ast.List(elts=items)]):
            is_listed = _is_listed(_value(left, config), items)
            return is_listed == isinstance(op, ast.In)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, node, _value(left, config), _value(right, config))
        case ast.Call(func=ast.Name(id="repeats"), args=[left, *items]):
            return _repeats(_value(left, config), list(map(_literal, items)))
    value = _value(node, config)
    if not isinstance(value, bool):
        raise Undecided(f"{ast.unparse(node)} = {_shown(value)}, which is neither true nor false")
    return value


def _is_listed(value: Any, items: Sequence[ast.expr]) -> bool:
    return any(_equal(value, _literal(item)) for item in items)


def _compared(op: ast.cmpop, node: ast.expr, left: Any, right: Any) -> bool:
    if isinstance(op, ast.Eq | ast.NotEq):
        return _equal(left, right) == isinstance(op, ast.Eq)
    for value in (left, right):
        if not is_number(value):
            raise Undecided(f"{_shown(value)} in `{ast.unparse(node)}`, which is not a number")
    return _ORDERS[type(op)](left, right)


def _repeats(value: Any, items: Sequence[Any]) -> bool:
    """Whether a list is the items over and over; the last time they may be cut short."""
    if not isinstance(value, list):
        raise Undecided(f"{_shown(value)}, which is not a list")
    return all(map(_equal, value, itertools.cycle(items)))


def _value(node: ast.expr, config: Mapping[str, Any]) -> Any:
    """What a key, a literal or `first` stands for."""
    if isinstance(node, ast.Call):
        for arg in node.args:
            try:
                return _value(arg, config)
            except Undecided:
                continue
        raise Undecided(_none_of(_keys(node)))
    key = _key(node)
    if not key:
        return _literal(node)
    for value in _lookup(key, config):
        return value
    raise Undecided(f"no {key}")


def _lookup(key: str, config: Mapping[str, Any]) -> Iterator[Any]:
    """The value at a key with dots, if the config has one."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return
        value = value[name]
    yield value


def _equal(left: Any, right: Any) -> bool:
    if is_number(left) and is_number(right):
        return left == right
    return type(left) is type(right) and left == right


def is_number(value: object) -> bool:
    """Whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value of a config as JSON, without control characters and not too long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(repr(value)[:_SHOWN])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
