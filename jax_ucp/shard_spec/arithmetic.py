"""Sizes as sums, products, quotients and remainders of names and numbers: `heads * head_dim`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from jax_ucp.errors import SpecError

Expression = int | str

_MAX_LENGTH = 200
MAX_SIZE = 1 << 62
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def size_of(expression: object, sizes: Mapping[str, int]) -> int:
    """The number an expression stands for. Quotients are exact, and no size is negative.

    Raises SpecError for a name without a size, a remainder, or anything but `+ - * // %` and
    parentheses.

    >>> size_of("(heads + 2 * groups) * head_dim", {"heads": 4, "groups": 2, "head_dim": 8})
    64
    """
    value = _value(_parsed(expression), sizes, str(expression))
    if not 0 <= value <= MAX_SIZE:
        raise SpecError(f"the size {expression} is {value}, where a size is 0 to {MAX_SIZE}")
    return value


def names_in(expression: object) -> set[str]:
    """The names of an expression. Raises SpecError where it is none."""
    tree = _parsed(expression)
    _value(tree, None, str(expression))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _parsed(expression: object) -> ast.expr:
    if isinstance(expression, bool) or not isinstance(expression, int | str):
        raise SpecError(f"a size is a number or an expression of names, not {expression!r}")
    text = str(expression)
    if len(text) > _MAX_LENGTH:
        raise SpecError(f"a size of {len(text)} characters; {_MAX_LENGTH} are enough")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecError(
            f"{text!r} is not a size: write names, numbers, + - * // % and parentheses"
        ) from None


def _value(node: ast.expr, sizes: Mapping[str, int] | None, text: str) -> int:
    """The value of a node; without `sizes` only its form is looked at."""
    match node:
        case ast.Constant(value=int(n)) if not isinstance(n, bool):
            return n
        case ast.Name(id=name):
            return 1 if sizes is None else _size_named(name, sizes, text)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            left, right = _value(node.left, sizes, text), _value(node.right, sizes, text)
            if sizes is None:
                return 1
            _check_division(op, left, right, text)
            return _OPERATORS[type(op)](left, right)
    raise SpecError(f"{text!r} is not a size: write names, numbers, + - * // % and parentheses")


def _check_division(op: ast.operator, left: int, right: int, text: str) -> None:
    if not isinstance(op, ast.FloorDiv | ast.Mod):
        return
    if right == 0 or (isinstance(op, ast.FloorDiv) and left % right):
        raise SpecError(f"in the size {text!r}, {left} is not divisible by {right}")


def _size_named(name: str, sizes: Mapping[str, int], text: str) -> int:
    if name not in sizes:
        of = "" if name == text else f"the size {text!r}: "
        raise SpecError(f"{of}{name!r} has no number; give it in sizes")
    return sizes[name]
