"""The expressions of specs and mappings: sizes, conditions and settings.

    size         names, numbers, + - * // % and parentheses: `(heads + 2 * groups) * head_dim`;
                 a name may be one in a section of the config: `text_config.num_hidden_layers`

    condition    a comparison, or a key that is true or false; joined by `and`, `or`, `not` and ()
                 repeats(key, literal, ...): the key's list is these over and over
    comparison   two values with == != < <= > >=, or a value `in` or `not in` a list of literals
    value        a key, a literal, or first(value, value, ...)
    literal      a number, "text", true, false, null, or [], the list with nothing in it
    key          a name in a model's config; `a.b` is the name b in what a holds

    setting      a value, a condition, or `A if CONDITION else B` of settings: for the config that
                 a mapping makes for its leaves

Sizes divide without remainder, and are not negative. A condition that needs a key which the config
lacks is not met; it is evaluated from left to right. `first` gives the first of its values that the
config has, by which a condition states a default. null is a value. Nothing is converted: 1 is not
true, and only numbers can be less or greater.
"""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from jax_ucp.errors import SpecError

Size = int | str
Config = Mapping[str, Any]
Test = Callable[[Config], bool]

MAX_SIZE = 1 << 62
_SIZE = "size: write names, numbers, + - * // % and parentheses"
_CONDITION = (
    'condition: write `key == "text"`, `key in [1, 2]`, `key < 8`, and, or, not,'
    " first(key, default), repeats(key, 0, 1)"
)
_SETTING = 'setting: write a key, a number, "text", a condition, or `A if CONDITION else B`'
_MAX_LENGTH = {_SIZE: 200, _CONDITION: 1200, _SETTING: 1000}
_SHOWN = 60
_NOT_LITERAL = object()
_WORDS = {"true": True, "false": False, "null": None}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class UndecidedCondition(Exception):
    """The config lacks a key of the condition, or has a value that cannot be compared."""


class _NoExpression(Exception):
    """A node is not in the language; the message is the reason, if there is a special one."""


@lru_cache(maxsize=4096)
def _parsed(text: str, language: str) -> ast.expr:
    """The syntax tree of a text. Raises SpecError if it is too long, or Python cannot parse it."""
    if len(text) > _MAX_LENGTH[language]:
        kind = language.partition(":")[0]
        raise SpecError(f"a {kind} of {len(text)} characters; {_MAX_LENGTH[language]} are enough")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecError(f"{text!r} is not a {language}") from None


def size_of(expression: object, sizes: Mapping[str, int]) -> int:
    """The value of a size.

    Raises SpecError for a name without a number, a remainder, and anything that is not a size.

    >>> size_of("(heads + 2 * groups) * head_dim", {"heads": 4, "groups": 2, "head_dim": 8})
    64
    """
    text = _size_text(expression)
    value = _size(_parsed(text, _SIZE), sizes, text)
    if not 0 <= value <= MAX_SIZE:
        raise SpecError(f"the size {expression} is {value}, where a size is 0 to {MAX_SIZE}")
    return value


def names_in(expression: object) -> set[str]:
    """The names in a size, with their sections. Raises SpecError if it is not a size."""
    text = _size_text(expression)
    tree = _parsed(text, _SIZE)
    _size(tree, None, text)
    return set(_keys(tree))


def _size_text(expression: object) -> str:
    """The text of a size. Raises SpecError for what is neither a number nor a text."""
    if isinstance(expression, bool) or not isinstance(expression, int | str):
        raise SpecError(f"a size is a number or an expression of names, not {expression!r}")
    return str(expression)


def _size(node: ast.expr, sizes: Mapping[str, int] | None, text: str) -> int:
    """The value of a node; without `sizes` only its syntax is checked."""
    match node:
        case ast.Constant(value=int(n)) if not isinstance(n, bool):
            return n
        case ast.Name() | ast.Attribute() if name := _key(node):
            if sizes is not None and name not in sizes:
                of = "" if name == text else f"the size {text!r}: "
                raise SpecError(f"{of}{name!r} has no number; give it in sizes")
            return 1 if sizes is None else sizes[name]
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            left, right = _size(node.left, sizes, text), _size(node.right, sizes, text)
            if sizes is None:
                return 1
            divides = isinstance(op, ast.FloorDiv | ast.Mod)
            if divides and (right == 0 or (isinstance(op, ast.FloorDiv) and left % right)):
                raise SpecError(f"in the size {text!r}, {left} is not divisible by {right}")
            return _OPERATORS[type(op)](left, right)
    raise SpecError(f"{text!r} is not a {_SIZE}")


@dataclass(frozen=True)
class Condition:
    """A condition as parts that must all hold: the text of each, its keys, and its test."""

    parts: tuple[tuple[str, tuple[str, ...], Test], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it uses, each once, in order."""
        return tuple(dict.fromkeys(key for _, keys, _ in self.parts for key in keys))


def condition(text: object) -> Condition:
    """The condition in a text. Raises SpecError for a text that is not a condition."""
    if not isinstance(text, str):
        raise SpecError(f"a condition is a text, not {text!r}; it is a {_CONDITION}")
    return _condition(text)


@lru_cache(maxsize=4096)
def _condition(text: str) -> Condition:
    tree = _parsed(text, _CONDITION)
    nodes = [tree]
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        nodes = tree.values
    try:
        parts = tuple(
            (ast.get_source_segment(text, node) or "", tuple(_keys(node)), _test(node))
            for node in nodes
        )
    except _NoExpression as reason:
        why = str(reason) or _CONDITION.partition(": ")[2]
        raise SpecError(f"{text!r} is not a condition: {why}") from None
    except (RecursionError, MemoryError):
        raise SpecError(f"{text!r} is not a {_CONDITION}") from None
    if not any(keys for _, keys, _ in parts):
        raise SpecError(f"{text!r} names no key of a config")
    return Condition(parts)


def within(section: str, text: str) -> str:
    """The text of a condition whose keys are in a section of the config.

    >>> within("text_config", 'first(rope.type, "none") == "none" and not tie')
    'first(text_config.rope.type, "none") == "none" and not text_config.tie'
    """
    line = re.sub(r"[\r\n]", " ", text)  # which no literal has
    nodes, written = _key_nodes(_parsed(line, _CONDITION)), line.encode()
    for at in sorted((node.col_offset for node in nodes), reverse=True):  # in bytes
        written = written[:at] + f"{section}.".encode() + written[at:]
    return written.decode()


def holds(text: str, config: Config) -> bool:
    """Whether a config meets a condition. Raises UndecidedCondition if it lacks a key for that.

    >>> holds("first(attention_bias, false) == false", {})
    True
    """
    return all(test(config) for _, _, test in condition(text).parts)


def unmet(text: str, config: Config) -> str:
    """A message with the part of a condition that a config does not meet; "" if it is met.

    >>> unmet('tie and hidden_act in ["silu", "swish"]', {"tie": True, "hidden_act": "gelu"})
    '`hidden_act in ["silu", "swish"]` is needed, and the config has hidden_act = "gelu"'
    """
    for part, keys, test in condition(text).parts:
        try:
            if test(config):
                continue
            has = values_of(keys, config)
        except UndecidedCondition as error:
            has = str(error)
        return f"`{_with_keys_of(config, part)}` is needed, and the config has {has}"
    return ""


def _with_keys_of(config: Config, part: str) -> str:
    """The condition with each `first` replaced by one of its keys: the one that the config has.

    >>> _with_keys_of({"b": 2}, 'first(a, b, 1) == 1 and first(c, d) in ["x"]')
    'b == 1 and c in ["x"]'
    """
    calls: dict[str, str] = {}
    for node in ast.walk(_parsed(part, _CONDITION)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            keys = [key for value in node.args if (key := _key(value))]
            if node.func.id == "first" and keys:
                of_config = (key for key in keys if values_of([key], config) != _none_of([key]))
                calls[ast.get_source_segment(part, node) or ""] = next(of_config, keys[0])
    for call, key in calls.items():
        part = part.replace(call, key)
    return part


def values_of(keys: Iterable[str], config: Config) -> str:
    """The values of these keys in a config, in words."""
    distinct = tuple(dict.fromkeys(keys))
    values: list[str] = []
    for key in distinct:
        with suppress(UndecidedCondition):
            values.append(f"{key} = {_shown(_at(key, config))}")
    return ", ".join(values) or _none_of(distinct)


@dataclass(frozen=True)
class Setting:
    """A setting: its text, the keys that it uses, and a function of a config for its value."""

    text: str
    keys: tuple[str, ...]
    value: Callable[[Config], Any]

    def of(self, config: Config) -> Any:
        """The value for a config. Raises SpecError if the config lacks a key for it.

        >>> setting('"llama3" if scaled else "default"').of({"scaled": False})
        'default'
        """
        try:
            return self.value(config)
        except UndecidedCondition as error:
            raise SpecError(f"`{self.text}` is needed, and the config has {error}") from None


@lru_cache(maxsize=4096)
def setting(text: str) -> Setting:
    """The setting in a text. Raises SpecError for a text that is not a setting."""
    tree = _parsed(text, _SETTING)
    try:
        return Setting(text, tuple(dict.fromkeys(_keys(tree))), _setting(tree))
    except _NoExpression as reason:
        why = str(reason) or _SETTING.partition(": ")[2]
        raise SpecError(f"{text!r} is not a setting: {why}") from None
    except (RecursionError, MemoryError):
        raise SpecError(f"{text!r} is not a {_SETTING}") from None


def _setting(node: ast.expr) -> Callable[[Config], Any]:
    """A function of a config for the value of a setting. Raises _NoExpression for other nodes."""
    match node:
        case ast.IfExp(test=test, body=body, orelse=orelse):
            is_met, first, second = _test(test), _setting(body), _setting(orelse)
            return lambda config: first(config) if is_met(config) else second(config)
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.Compare():
            return _test(node)
    return _value(node)


def is_number(value: object) -> bool:
    """Whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _test(node: ast.expr) -> Test:
    """The test of a node. Raises _NoExpression for a node that is not a condition."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            tests, every = list(map(_test, parts)), all if isinstance(op, ast.And) else any
            return lambda config: every(test(config) for test in tests)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            test = _test(inner)
            return lambda config: not test(config)
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            if not isinstance(right, ast.List):
                raise _NoExpression("what stands after `in` is a list of literals")
            value, items, is_in = _value(left), _literals(right.elts), isinstance(op, ast.In)
            return lambda config: any(map(partial(_equal, value(config)), items)) == is_in
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _comparison(node, left, op, right)
        case ast.Call(func=ast.Name(id="repeats"), args=[left, *more], keywords=[]) if more:
            value, items = _value(left), _literals(more)
            return lambda config: _repeats(value(config), items)
    if _literal(node) is not _NOT_LITERAL:
        raise _NoExpression
    value = _value(node)

    def is_true(config: Config) -> bool:
        truth = value(config)
        if not isinstance(truth, bool):
            raise UndecidedCondition(
                f"{ast.unparse(node)} = {_shown(truth)}, which is neither true nor false"
            )
        return truth

    return is_true


def _comparison(node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
    """The test of `left op right`. Raises _NoExpression if that is not in the language."""
    sides = _value(left), _value(right)
    if isinstance(op, ast.Eq | ast.NotEq):
        return lambda config: _equal(*(side(config) for side in sides)) == isinstance(op, ast.Eq)
    if type(op) not in _ORDERS:
        raise _NoExpression
    for literal in (_literal(left), _literal(right)):
        if literal is not _NOT_LITERAL and not is_number(literal):
            raise _NoExpression("only numbers are less or greater")

    def compare(config: Config) -> bool:
        values = [side(config) for side in sides]
        for value in values:
            if not is_number(value):
                raise UndecidedCondition(
                    f"{_shown(value)} in `{ast.unparse(node)}`, which is not a number"
                )
        return _ORDERS[type(op)](*values)

    return compare


def _value(node: ast.expr) -> Callable[[Config], Any]:
    """A function of a config for the value of a node. Raises _NoExpression for other nodes."""
    literal = _literal(node)
    if literal is not _NOT_LITERAL:
        return lambda config: literal
    if key := _key(node):
        return lambda config: _at(key, config)
    match node:
        case ast.Call(func=ast.Name(id="first"), args=[_, _, *_] as args, keywords=[]):
            values, keys = list(map(_value, args)), tuple(_keys(node))
        case _:
            raise _NoExpression

    def first(config: Config) -> Any:
        for value in values:
            with suppress(UndecidedCondition):
                return value(config)
        raise UndecidedCondition(_none_of(keys))

    return first


def _literals(nodes: Iterable[ast.expr]) -> list[Any]:
    """The values of literals. Raises _NoExpression for other nodes."""
    literals = list(map(_literal, nodes))
    if any(literal is _NOT_LITERAL for literal in literals):
        raise _NoExpression
    return literals


def _literal(node: ast.expr) -> Any:
    """The value of a literal; _NOT_LITERAL for any other node."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str) or is_number(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value if is_number(value) else _NOT_LITERAL
        case ast.Name(id=name):
            return _WORDS.get(name, _NOT_LITERAL)
        case ast.List(elts=[]):
            return []
    return _NOT_LITERAL


def _key(node: ast.AST) -> str:
    """The key of a node, as names with dots between them; empty if it is not a key."""
    match node:
        case ast.Name(id=name) if name not in _WORDS:
            return name
        case ast.Attribute(value=above, attr=name) if _key(above):
            return f"{_key(above)}.{name}"
    return ""


def _keys(node: ast.AST) -> Iterator[str]:
    """The keys in an expression, in order; a key may come several times."""
    return map(_key, _key_nodes(node))


def _key_nodes(node: ast.AST) -> Iterator[ast.expr]:
    """The nodes of the keys in an expression, in order."""
    if isinstance(node, ast.expr) and _key(node):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Call) and child is node.func):
            yield from _key_nodes(child)


def _at(key: str, config: Config) -> Any:
    """The value at a key with dots. Raises UndecidedCondition if the config has none."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise UndecidedCondition(_none_of((key,)))
        value = value[name]
    return value


def _none_of(keys: Sequence[str]) -> str:
    """Words for a config that has none of these keys."""
    return f"no {keys[0]}" if len(keys) == 1 else f"none of {', '.join(keys)}"


def _equal(left: Any, right: Any) -> bool:
    """Whether values are equal without conversion; 1 equals 1.0, but not true."""
    if is_number(left) and is_number(right):
        return left == right
    return type(left) is type(right) and left == right


def _repeats(value: Any, items: Sequence[Any]) -> bool:
    """Whether a list is a repetition of the items, of which the last may be incomplete."""
    if not isinstance(value, list):
        raise UndecidedCondition(f"{_shown(value)}, which is not a list")
    return all(map(_equal, value, itertools.cycle(items)))


def _shown(value: object) -> str:
    """A value of a config as JSON in one line, shortened if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(repr(value)[:_SHOWN])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
