"""The notation for the meaning of an array's axes, by which a rule says how arrays form another.

    (group (q + k + v) head_dim) embed

There is one item for each axis of the array. A name is an axis. A product in parentheses is one
axis of several nested ones, of which the last runs fastest. A sum in parentheses is one axis of
parts side by side. `1` is an axis of length one, and `...` stands for all axes that are not listed.
Two arrays whose expressions have the same names hold the same elements, in different places. A name
that begins with `_` is padding. Rotary embeddings rotate pairs of features: on the axis
`head_dim:halves` the two of a pair lie half the length apart, and on `head_dim:pairs` they are
neighbours.

There are three stages, each with its own errors: `parse` makes an `Expression` of a text; `infer`
finds the lengths of axes from shapes; `components` gives, for each choice of parts, the places of
its elements as an affine map from the indices of the axes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.errors import LayoutError, SpecError

REST = "..."

# Limits that no expression written by a person reaches. Parts in products multiply: `(a + b) (c +
# d)` has four components.
MAX_LENGTH, MAX_DEPTH, MAX_COMPONENTS = 500, 16, 1024

# Messages for tokens that cannot stand where an axis is expected.
_FAULTS = {
    REST: "`...` stands for whole axes, so it cannot be in parentheses",
    "+": "parts side by side stand in parentheses: (q + k)",
    ")": "a parenthesis is closed that was not opened",
}

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*(?::\w+)?|\d+|[()+]|\S)")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with a name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Product:
    """Axes nested on one axis, of which the last runs fastest; without axes, its length is one."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.parts))})" if self.parts else "1"


@dataclass(frozen=True, slots=True)
class Sum:
    """Parts side by side on one axis."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return f"({' + '.join(map(str, self.parts))})"


@dataclass(frozen=True, slots=True)
class Rotated:
    """An axis of features that are rotated in pairs, in the order `halves` or `pairs`."""

    name: str
    order: str

    def __str__(self) -> str:
        return f"{self.name}:{self.order}"

    @property
    def terms(self) -> tuple[str, str]:
        """The names of its two indices, position in a pair and pair, the outer one first."""
        half, pair = f"{self.name}:half", f"{self.name}:pair"
        return (half, pair) if self.order == "halves" else (pair, half)


Node = Axis | Product | Sum | Rotated


@dataclass(frozen=True, slots=True)
class Expression:
    """The meaning of each axis of an array."""

    dims: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.dims))

    @property
    def names(self) -> frozenset[str]:
        """The axes that it names."""
        return frozenset(axis.name for dim in self.dims for axis in _axes(dim)) - {REST}

    @property
    def rotated(self) -> frozenset[str]:
        """The axes whose features are rotated in pairs."""
        axes = (axis for dim in self.dims for axis in _axes(dim))
        return frozenset(axis.name for axis in axes if isinstance(axis, Rotated))

    def spread(self, axes: Sequence[str]) -> Expression:
        """The expression with the axes called `axes` in place of `...`."""
        dims = [(Axis(name) for name in axes) if dim == Axis(REST) else (dim,) for dim in self.dims]
        return Expression(tuple(node for some in dims for node in some))

    @property
    def rest(self) -> bool:
        """Whether it has `...`."""
        return Axis(REST) in self.dims

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of an array with these axes."""
        return tuple(_length(dim, sizes) for dim in self.dims)


def parse(text: str) -> Expression:
    """The expression in a text. Raises SpecError, with the place, if it is not in the notation.

    >>> parse("(group (q + k + v) head_dim) embed").dims[1]
    Axis(name='embed')
    """
    if len(text) > MAX_LENGTH:
        raise SpecError(
            f"axes of {len(text)} characters, {text[:40]!r}...; {MAX_LENGTH} are the most"
        )
    tokens = [(match.group(1), match.start(1)) for match in _TOKEN.finditer(text)]
    reader = _Tokens(text, tokens)
    dims = reader.items(depth=0)
    if sum(dim == Axis(REST) for dim in dims) > 1:
        raise SpecError(f"in {text!r}: `...` can be there only once")
    expression = Expression(tuple(dims))
    if math.prod(map(_choices, dims)) > MAX_COMPONENTS:
        raise SpecError(f"in {text!r}: more than {MAX_COMPONENTS} choices of parts")
    for component in components(expression, ONES):
        if component.repeated:
            repeated = ", ".join(component.repeated)
            raise SpecError(
                f"in {text!r}: {repeated} is there twice; each axis of an array has its own name"
            )
    return expression


class _Tokens:
    """A recursive descent parser of tokens."""

    def __init__(self, text: str, tokens: Sequence[tuple[str, int]]):
        self.text, self.tokens, self.at = text, tokens, 0

    def items(self, depth: int) -> list[Node]:
        nodes: list[Node] = []
        while self.at < len(self.tokens):
            token, place = self.tokens[self.at]
            if depth and token in (")", "+"):
                break
            self.at += 1
            nodes.append(
                self.group(depth, place) if token == "(" else self.item(token, depth, place)
            )
        return nodes

    def item(self, token: str, depth: int, place: int) -> Node:
        """The node for a token other than an opening parenthesis."""
        if token == "1":
            return Product(())
        if token.isidentifier() or (token == REST and not depth):
            return Axis(token)
        name, _, order = token.partition(":")
        if order in ("halves", "pairs"):
            return Rotated(name, order)
        if token.isdigit():
            raise self.fault(
                f"an axis of length {token} needs a name; give the name its length in sizes", place
            )
        fault = _FAULTS.get(
            token, f"{token!r} is not an axis; there are names, 1, ..., parentheses and +"
        )
        raise self.fault(fault, place)

    def group(self, depth: int, opened: int) -> Node:
        if depth == MAX_DEPTH:
            raise self.fault(f"parentheses are nested more than {MAX_DEPTH} deep", opened)
        alternatives: list[Node] = []
        while True:
            inner = self.items(depth + 1)
            if not inner:
                raise self.fault(
                    "there is nothing to the left of this, where an axis should be", self.place()
                )
            alternatives.append(inner[0] if len(inner) == 1 else Product(tuple(inner)))
            if self.at == len(self.tokens):
                raise self.fault("this parenthesis is never closed", opened)
            token, _ = self.tokens[self.at]
            self.at += 1
            if token == ")":
                return alternatives[0] if len(alternatives) == 1 else Sum(tuple(alternatives))

    def place(self) -> int:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)

    def fault(self, what: str, place: int) -> SpecError:
        return SpecError(f"in {self.text!r}, at character {place + 1}: {what}")


def _choices(node: Node) -> int:
    """The number of components of a node."""
    match node:
        case Axis() | Rotated():
            return 1
        case Product(parts=parts):
            return math.prod(map(_choices, parts))
        case Sum(parts=parts):
            return sum(map(_choices, parts))


@dataclass(frozen=True, slots=True)
class Line:
    """The places of elements on an array's axis: `offset` plus, for each term, index times stride.

    The outermost term is first: the terms after a term stay within one stride of it.
    """

    offset: int
    terms: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Component:
    """A choice of one part from every sum of an expression: a line for each axis of the array."""

    lines: tuple[Line, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for line in self.lines for name, _ in line.terms)

    @property
    def repeated(self) -> list[str]:
        """The axes that occur more than once."""
        counts = Counter(name for line in self.lines for name, _ in line.terms)
        return sorted(name for name, count in counts.items() if count > 1)

    @property
    def padding(self) -> bool:
        """Whether its elements are padding."""
        return any(map(is_padding, self.names))


def is_padding(axis: str) -> bool:
    """Whether an axis is padding, by its name."""
    return axis.startswith("_")


def components(expression: Expression, sizes: Mapping[str, int]) -> list[Component]:
    """A component for every choice of parts. Together they have each element of the array once.

    >>> for component in components(parse("(a (q + k))"), {"a": 2, "q": 3, "k": 1}):
    ...     print(component.lines[0])
    Line(offset=0, terms=(('a', 4), ('q', 1)))
    Line(offset=3, terms=(('a', 4), ('k', 1)))
    """
    lines_of_dims = [_lines(dim, 1, sizes) for dim in expression.dims]
    return [Component(lines) for lines in itertools.product(*lines_of_dims)]


def _lines(node: Node, stride: int, sizes: Mapping[str, int]) -> list[Line]:
    """The lines of a node whose last axis has this stride, for each choice of parts."""
    match node:
        case Axis(name=name):
            return [Line(0, ((name, stride),))]
        case Rotated(terms=(outer, inner)):
            return [Line(0, ((outer, stride * index_size(inner, sizes)), (inner, stride)))]
        case Product(parts=parts):
            lines = [Line(0)]
            for part in reversed(parts):
                nested = itertools.product(_lines(part, stride, sizes), lines)
                lines = [Line(a.offset + b.offset, (*a.terms, *b.terms)) for a, b in nested]
                stride *= _length(part, sizes)
            return lines
        case Sum(parts=parts):
            lines: list[Line] = []
            before = 0
            for part in parts:
                shift = before * stride
                inner = _lines(part, stride, sizes)
                lines += [Line(line.offset + shift, line.terms) for line in inner]
                before += _length(part, sizes)
            return lines


@dataclass(frozen=True, slots=True)
class Known:
    """The length of an axis, and its origin."""

    length: int
    origin: str


@dataclass(frozen=True, slots=True)
class Claim:
    """An array of `shape` with the axes of `expression`; `name` is its name in errors."""

    name: str
    expression: Expression
    shape: tuple[int, ...]


class Lengths:
    """The lengths of axes that are known so far, and messages about contradictions."""

    def __init__(self, known: Mapping[str, Known]):
        self.known = dict(known)
        self.sizes = {name: one.length for name, one in known.items()}
        self.faults: list[str] = []

    def unknown(self, dim: Node) -> list[str]:
        """The axes of a node of which no length is known, each once."""
        return list(dict.fromkeys(a.name for a in _axes(dim) if a.name not in self.sizes))


def infer(claims: Sequence[Claim], known: Mapping[str, Known]) -> Lengths:
    """The length of every axis: given ones, and those that follow from the shapes.

    A length follows if it is the only unknown one on an axis of an array. Contradictions, and axes
    whose lengths do not follow, are in the faults; nothing is guessed.
    """
    lengths = Lengths(known)
    waiting: list[tuple[Claim, int]] = []
    for claim in claims:
        count, ndim = len(claim.expression.dims), len(claim.shape)
        if count == ndim:
            waiting += [(claim, axis) for axis in range(ndim)]
            continue
        lengths.faults.append(
            f"{claim.name} has {ndim} axes, {list(claim.shape)}, but `{claim.expression}` names"
            f" {count}"
        )
    progress = True
    while progress:
        left = [item for item in waiting if not _settle(*item, lengths)]
        progress, waiting = len(left) < len(waiting), left
    for claim, axis in waiting:
        dim = claim.expression.dims[axis]
        lengths.faults.append(
            f"{claim.name}: axis {axis} has length {claim.shape[axis]} and is `{dim}`, which leaves"
            f" the length of {' and '.join(sorted(lengths.unknown(dim)))} open; give it in sizes"
        )
    return lengths


def _settle(claim: Claim, axis: int, lengths: Lengths) -> bool:
    """Whether one axis of an array is done: a length that follows, or a fault, is added."""
    dim, length = claim.expression.dims[axis], claim.shape[axis]
    unknown = lengths.unknown(dim)
    if len(unknown) > 1:
        return False
    if not unknown:
        if _length(dim, lengths.sizes) != length:
            lengths.faults.append(f"{claim.name}: {_contradiction(dim, axis, length, lengths)}")
        return True
    # The length of a dim is linear in its one unknown: base + rate * unknown.
    (name,) = unknown
    base = _length(dim, {**lengths.sizes, name: 0})
    rate = _length(dim, {**lengths.sizes, name: 1}) - base
    if rate == 0 or length < base or (length - base) % rate:
        contradiction = _contradiction(dim, axis, length, lengths)
        lengths.faults.append(f"{claim.name}: {contradiction}; no length of {name} makes that fit")
        return True
    origin = f"axis {axis} of {claim.name}, {list(claim.shape)}"
    lengths.known[name] = Known((length - base) // rate, origin)
    lengths.sizes[name] = lengths.known[name].length
    return True


def _contradiction(dim: Node, axis: int, length: int, lengths: Lengths) -> str:
    """A message that an expression contradicts the length of an axis, with the lengths' origins."""
    known = {a.name: lengths.known[a.name] for a in _axes(dim) if a.name in lengths.known}
    origins = ", ".join(f"{name} = {one.length} ({one.origin})" for name, one in known.items())
    whole = "" if lengths.unknown(dim) else f" = {_length(dim, lengths.sizes)}"
    return (
        f"axis {axis} is `{dim}`{whole} with {origins or 'no length known'}, but the array has"
        f" {length} there"
    )


def _length(node: Node, sizes: Mapping[str, int]) -> int:
    """The length of a node's axis. Raises LayoutError if it needs an unknown length."""
    match node:
        case Axis(name=name) | Rotated(name=name):
            try:
                return sizes[name]
            except KeyError:
                raise LayoutError(f"the length of {name} is not known; give it in sizes") from None
        case Product(parts=parts):
            return math.prod(_length(part, sizes) for part in parts)
        case Sum(parts=parts):
            return sum(_length(part, sizes) for part in parts)


def _axes(node: Node) -> Iterator[Axis | Rotated]:
    """The axes of a node, repeated if they are in several parts of a sum."""
    if isinstance(node, Axis | Rotated):
        yield node
    else:
        for part in node.parts:
            yield from _axes(part)


def index_size(name: str, sizes: Mapping[str, int]) -> int:
    """The number of values of an index: 2 in a pair, half of the axis for pairs, or all of it."""
    if name in sizes:
        return sizes[name]
    axis, _, part = name.rpartition(":")
    return {"half": 2, "pair": sizes[axis] // 2}[part]


class _Ones(dict[str, int]):
    """Lengths that are one for every axis, for functions whose result has only names."""

    def __missing__(self, key: str) -> int:
        return 1


ONES: Mapping[str, int] = _Ones()
