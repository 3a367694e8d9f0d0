"""The axes notation: what the axes of an array mean, so that one array can be said to form another.

    (group (q + k + v) head_dim) embed

One item for each axis of the array. A name is an axis of that length. A product in parentheses is
one axis on which the inner ones are nested, the last running fastest. A sum in parentheses is parts
side by side. `1` is an axis of length one, and `...` stands for all axes that are not spelled out.
Two arrays that name the same axes hold the same elements, each where its own expression puts them.
A name that begins with `_` is padding. Rotary embeddings turn features in pairs: `head_dim:halves`
is an axis on which the two of a pair lie half its length apart, `head_dim:pairs` one on which they
are neighbours.

Three stages, each with errors of its own: `parse` turns text into an `Expression`, and knows no
shapes; `infer` finds the lengths of axes from shapes, and knows no data; `components` gives for
each choice of parts where its elements lie, as an affine map from the indices of the axes.
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

# What a person writes of an array is a line. Parts in products multiply: `(a + b) (c + d)` are four
# pieces, and of a thousand nobody knows what they mean.
MAX_LENGTH, MAX_DEPTH, MAX_COMPONENTS = 500, 16, 1024

# What is wrong with a token where no axis can be of it.
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
    """Axes nested on one, the last running fastest; of none, an axis of length one."""

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
    """An axis of features that are turned in pairs, with the two of a pair apart, or neighbours."""

    name: str
    order: str

    def __str__(self) -> str:
        return f"{self.name}:{self.order}"

    @property
    def terms(self) -> tuple[str, str]:
        """The indices on it: which of the pair, and which pair; the outer first."""
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
        """The axes of which it says how pairs of features lie."""
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
        """The shape of an array of which this is said."""
        return tuple(_length(dim, sizes) for dim in self.dims)


def parse(text: str) -> Expression:
    """Parse an expression. Raises SpecError, with the place, where it is not in the notation.

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
    """Recursive descent over tokens."""

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
        """The node that a token is, which opens no parenthesis."""
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
    """How many components a node has."""
    match node:
        case Axis() | Rotated():
            return 1
        case Product(parts=parts):
            return math.prod(map(_choices, parts))
        case Sum(parts=parts):
            return sum(map(_choices, parts))


@dataclass(frozen=True, slots=True)
class Line:
    """Where elements lie on an array's axis: at `offset`, plus index times stride per term.

    `terms` come outermost first: what follows a term never reaches over one stride of it.
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
        """The axes that it has several times."""
        counts = Counter(name for line in self.lines for name, _ in line.terms)
        return sorted(name for name, count in counts.items() if count > 1)

    @property
    def padding(self) -> bool:
        """Whether nothing of another array is here."""
        return any(map(is_padding, self.names))


def is_padding(axis: str) -> bool:
    """Whether an axis is padding, which its name says."""
    return axis.startswith("_")


def components(expression: Expression, sizes: Mapping[str, int]) -> list[Component]:
    """Every choice of parts, and where its elements lie. Together they are each element once.

    >>> for component in components(parse("(a (q + k))"), {"a": 2, "q": 3, "k": 1}):
    ...     print(component.lines[0])
    Line(offset=0, terms=(('a', 4), ('q', 1)))
    Line(offset=3, terms=(('a', 4), ('k', 1)))
    """
    lines_of_dims = [_lines(dim, 1, sizes) for dim in expression.dims]
    return [Component(lines) for lines in itertools.product(*lines_of_dims)]


def _lines(node: Node, stride: int, sizes: Mapping[str, int]) -> list[Line]:
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
    """The lengths of axes that are known so far, and what contradicts them."""

    def __init__(self, known: Mapping[str, Known]):
        self.known = dict(known)
        self.sizes = {name: one.length for name, one in known.items()}
        self.faults: list[str] = []

    def unknown(self, dim: Node) -> list[str]:
        """The axes of a node of which no length is known, each once."""
        return list(dict.fromkeys(a.name for a in _axes(dim) if a.name not in self.sizes))


def infer(claims: Sequence[Claim], known: Mapping[str, Known]) -> Lengths:
    """The length of every axis: those given, and those that follow from the shapes.

    An axis follows where it is the only unknown one of an array's axis. What does not fit, and what
    nothing says, is in the faults; nothing is guessed.
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
    """Whether one axis of an array is settled: its lengths are known by now, or it has a fault."""
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
    """A message: an expression contradicts the length of an axis; where lengths come from."""
    known = {a.name: lengths.known[a.name] for a in _axes(dim) if a.name in lengths.known}
    origins = ", ".join(f"{name} = {one.length} ({one.origin})" for name, one in known.items())
    whole = "" if lengths.unknown(dim) else f" = {_length(dim, lengths.sizes)}"
    return (
        f"axis {axis} is `{dim}`{whole} with {origins or 'no length known'}, but the array has"
        f" {length} there"
    )


def _length(node: Node, sizes: Mapping[str, int]) -> int:
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
    """The axes of a node; one in several parts of a sum comes as often."""
    if isinstance(node, Axis | Rotated):
        yield node
    else:
        for part in node.parts:
            yield from _axes(part)


def index_size(name: str, sizes: Mapping[str, int]) -> int:
    """How many values an index of a line has: an axis has its length, of pairs there are half."""
    if name in sizes:
        return sizes[name]
    axis, _, part = name.rpartition(":")
    return {"half": 2, "pair": sizes[axis] // 2}[part]


class _Ones(dict[str, int]):
    """Every axis has length one: for looking at names alone."""

    def __missing__(self, key: str) -> int:
        return 1


ONES: Mapping[str, int] = _Ones()
