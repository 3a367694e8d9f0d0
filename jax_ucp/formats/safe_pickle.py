"""Pickles read by an interpreter of our own: known names only, bounded, nothing imported and nothing run.

Python's `Unpickler` with a `find_class` of one's own is not enough: it still allocates gigabytes for one memo
index, and builds objects that no walk, hash or `repr` survives. Here an opcode is a few lines in `_Machine.step`; a
name means what the caller's table says or the pickle is refused; and what is returned is a tree that a plain
recursive walk can visit: no cycles, at most `MAX_DEPTH` deep, at most `MAX_NODES` nodes.

The opcodes are those that Python writes for data at protocols 2 to 5 (`Lib/pickle.py`, `Lib/pickletools.py`). No
length is believed beyond the input, and no opcode's argument is read before the opcode is known to be one of them.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any, TypeVar

from jax_ucp.errors import FormatError, UnsafePickle

T = TypeVar("T")

# What objects may take in memory, roughly counted: this, and so much for each byte of the file. Of our cases none
# takes more than 33 bytes for one of the file; an opcode that makes an empty set takes 224.
FREE_BYTES = 32 << 20
BYTES_PER_BYTE = 96
# How many nodes a walk may meet, shared ones every time: these, and one for each two bytes of the file.
FREE_NODES = 100_000
MAX_DEPTH = 100
MAX_MARKS = 1_000
MAX_INT_BITS = 8_192  # Python refuses to print integers of more than 4,300 digits
MAX_KEY_NODES = 64
MAX_LABEL = 256

_OPCODES = {opcode.code.encode("latin1"): opcode.name for opcode in pickletools.opcodes}
_NUMBERS = {
    "BININT": struct.Struct("<i"),
    "BINFLOAT": struct.Struct(">d"),
    "FRAME": struct.Struct("<Q"),
    **dict.fromkeys(("BININT1", "BINPUT", "BINGET", "PROTO"), struct.Struct("<B")),
    **dict.fromkeys(("BININT2",), struct.Struct("<H")),
    **dict.fromkeys(("LONG_BINPUT", "LONG_BINGET"), struct.Struct("<I")),
}
_LENGTHS = {
    "LONG4": struct.Struct("<i"),
    **dict.fromkeys(("LONG1", "SHORT_BINUNICODE", "SHORT_BINBYTES"), struct.Struct("<B")),
    **dict.fromkeys(("BINUNICODE", "BINBYTES"), struct.Struct("<I")),
    **dict.fromkeys(("BINUNICODE8", "BINBYTES8", "BYTEARRAY8"), struct.Struct("<Q")),
}
_VALUES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
# What an opcode adds to memory, by CPython's sizes, besides the bytes of its argument; the others add a pointer.
_COSTS = {
    **dict.fromkeys(_VALUES | {"LONG1", "LONG4"}, 48),
    **{"EMPTY_LIST": 64, "EMPTY_DICT": 72, "EMPTY_SET": 224, "FROZENSET": 224, "BINPERSID": 192},
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 64),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT", "SETITEM"), 96),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "BUILD"), 192),
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}


@dataclass(frozen=True, slots=True)
class Name:
    """A global that stands for itself: a class mentioned but never called, a constant of another library."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Constructor(Name):
    """A global that a pickle may call; what it makes is up to our own `call`.

    `call` takes the tuple of arguments and returns NotImplemented where they do not fit. `build` receives the state
    of a BUILD, once per object made, and says the same. `inert` marks classes whose instances become records.
    """

    call: Callable[[tuple], object]
    build: Callable[[object, object], object] | None = None
    inert: bool = False


class Node:
    """What the walk looks into besides the containers of Python."""

    __slots__ = ()

    def children(self) -> Iterable[tuple[str, object]]:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Record(Node):
    """An inert stand-in for an instance of a class we know by name: what it was made from, never the class."""

    type: str
    args: tuple = ()
    state: object = None

    @property
    def fields(self) -> dict[str, object]:
        """The attributes the instance would have: its state, or both parts of it where there are slots too."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}

    def children(self) -> list[tuple[str, object]]:
        state = children(self.state) if isinstance(self.state, dict) else [("state", self.state)]
        return [*children(self.args), *state]

    def __str__(self) -> str:
        return self.type


def inert(name: str) -> Constructor:
    """The table's entry for a class whose instances become records."""

    def build(record: object, state: object) -> None:
        assert isinstance(record, Record)
        record.state = state

    return Constructor(name, lambda args: Record(name, args), build, inert=True)


def table(*names: Name) -> dict[str, Name]:
    return {name.name: name for name in names}


def load(
    data: bytes,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
    stored_bytes: int | None = None,
) -> object:
    """The object of a pickle that is the whole of `data`, made only by the constructors in `names`.

    `names` maps a dotted name to what it stands for; only a Constructor among them can be called.
    `persistent` maps a persistent id to the object it stands for; without it persistent ids are refused.
    `stored_bytes` is what the file spends on the pickle, if it is less than the pickle (deflated).
    Raises UnsafePickle for what a checkpoint never needs, FormatError for what is no pickle.
    """
    found, end = load_first(data, 0, len(data), names, persistent, stored_bytes)
    if end != len(data):
        raise FormatError(f"{len(data) - end} bytes follow the end of the pickle")
    return found


def load_first(
    data: bytes | mmap,
    start: int,
    stop: int,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
    stored_bytes: int | None = None,
) -> tuple[object, int]:
    """The object of the pickle that begins at byte `start` of `data`, as `load`, and the byte after it.

    Nothing from `stop` on is looked at.
    """
    machine, end = _Machine(names, persistent), start
    most = stop - start if stored_bytes is None else stored_bytes
    cost = 0
    for opcode, argument, at in _opcodes(data, start, stop):
        cost += _COSTS.get(opcode, 8)
        if cost > FREE_BYTES + BYTES_PER_BYTE * min(at - start, most):
            raise UnsafePickle(f"the objects in the pickle take too much memory for its first {at - start} bytes")
        machine.step(opcode, argument)
        end = at
    if len(machine.stack) != 1 or machine.marks:
        raise FormatError("the pickle ends with an unfinished object")
    _check_bounds(machine.stack[0], FREE_NODES + min(end - start, most) // 2)
    return machine.stack[0], end


def walk(tree: object, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every node of a loaded tree with the labels that lead to it, parents first, shared nodes every time."""
    yield labels, tree
    for label, child in children(tree):
        yield from walk(child, (*labels, label))


def children(node: object) -> Iterator[tuple[str, object]]:
    """What a node holds, with a label for each: a dict's keys, a sequence's positions."""
    if isinstance(node, dict):
        yield from ((_label(key), value) for key, value in node.items())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from ((str(i), value) for i, value in enumerate(node))
    elif isinstance(node, Node):
        yield from node.children()


def _label(key: object) -> str:
    text = f"({', '.join(map(_label, key))})" if isinstance(key, tuple) else str(key)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


def _opcodes(data: bytes | mmap, at: int, stop: int) -> Iterator[tuple[str, object, int]]:
    """Each opcode's name, its argument, and the byte after it; the last one is STOP.

    `pickletools.genops` would do, but interprets escapes in names, with warnings where they are invalid.
    """

    def take(count: int) -> bytes:
        nonlocal at
        if not 0 <= count <= stop - at:
            raise FormatError(f"not a pickle, or a damaged one: it ends inside what starts before byte {at}")
        at += count
        return data[at - count : at]

    opcode = ""
    while opcode != "STOP":
        code, argument = take(1), None
        opcode = _OPCODES.get(code, f"{code!r}")
        if opcode in _NUMBERS:
            (argument,) = _NUMBERS[opcode].unpack(take(_NUMBERS[opcode].size))
        elif opcode in _LENGTHS:
            (length,) = _LENGTHS[opcode].unpack(take(_LENGTHS[opcode].size))
            argument = _value(opcode, take(length))
        elif opcode == "GLOBAL":
            lines = [take(data.find(b"\n", at, stop) + 1 - at)[:-1] for _ in range(2)]
            argument = _value("BINUNICODE", b" ".join(lines))
        yield opcode, argument, at


def _value(opcode: str, raw: bytes) -> object:
    if opcode in ("LONG1", "LONG4"):
        return int.from_bytes(raw, "little", signed=True)
    if "UNICODE" not in opcode:
        return bytearray(raw) if opcode == "BYTEARRAY8" else raw
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(f"not a pickle, or a damaged one: {error.reason} in a text") from error


class _Machine:
    """A stack, where marks stand on it, a memo, and the objects that may still receive their state."""

    def __init__(self, names: Mapping[str, object], persistent: Callable[[object], object] | None):
        self.names = names
        self.persistent = persistent
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[object, object] = {}  # a dict: an index of 2**32 - 1 costs no more than any other
        self.unbuilt: dict[int, tuple[object, Constructor]] = {}

    def step(self, opcode: str, argument: object) -> None:
        push = self.stack.append
        if opcode in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.top()
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif opcode in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise FormatError(f"the pickle asks for memo {argument}, which it never put there")
            push(self.memo[argument])
        elif opcode in _VALUES:
            push(argument)
        elif opcode in ("LONG1", "LONG4"):
            assert isinstance(argument, int)
            if argument.bit_length() > MAX_INT_BITS:
                raise UnsafePickle(f"an integer of {argument.bit_length()} bits in the pickle")
            push(argument)
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode == "MARK":
            if len(self.marks) >= MAX_MARKS:
                raise UnsafePickle(f"more than {MAX_MARKS} open marks in the pickle")
            self.marks.append(len(self.stack))
        elif opcode in _TUPLES:
            push(tuple(self.pop(_TUPLES[opcode])))
        elif opcode == "TUPLE":
            push(tuple(self.pop_to_mark()))
        elif opcode == "APPEND":
            (item,) = self.pop(1)
            self.top(list).append(item)
        elif opcode == "APPENDS":
            items = self.pop_to_mark()
            self.top(list).extend(items)
        elif opcode == "SETITEM":
            self.set_items(self.pop(2))
        elif opcode == "SETITEMS":
            self.set_items(self.pop_to_mark())
        elif opcode == "ADDITEMS":
            items = self.pop_to_mark()
            self.top(set).update(map(check_key, items))
        elif opcode == "FROZENSET":
            push(frozenset(map(check_key, self.pop_to_mark())))
        elif opcode == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            push(self.find(module, name))
        elif opcode == "STACK_GLOBAL":
            push(self.find(*self.pop(2)))
        elif opcode in ("REDUCE", "NEWOBJ"):
            push(self.call(opcode, *self.pop(2)))
        elif opcode == "BUILD":
            (state,) = self.pop(1)
            self.build(self.top(), state)
        elif opcode == "BINPERSID":
            if self.persistent is None:
                raise UnsafePickle("the pickle refers to persistent objects, which this file cannot have")
            push(self.persistent(*self.pop(1)))
        elif opcode == "PROTO":
            if argument not in (2, 3, 4, 5):
                raise FormatError(f"pickle protocol {argument}; torch.save writes 2 to 5")
        elif opcode not in ("FRAME", "STOP"):
            raise UnsafePickle(f"pickle opcode {opcode}, which a checkpoint never needs")

    def pop(self, count: int) -> list:
        """The last `count` objects, off the stack; those below the last mark are out of reach."""
        floor = len(self.stack) - count
        if floor < (self.marks[-1] if self.marks else 0):
            raise FormatError("the pickle takes more off its stack than it put there")
        items = self.stack[floor:]
        del self.stack[floor:]
        return items

    def pop_to_mark(self) -> list:
        if not self.marks:
            raise FormatError("the pickle ends a group it never began")
        items = self.pop(len(self.stack) - self.marks[-1])
        self.marks.pop()
        return items

    def top(self, kind: type = object) -> Any:
        """The last object, which stays. It must be just of `kind`, or anything at all for `object`."""
        (item,) = self.pop(1)
        if kind is not object and type(item) is not kind:
            raise UnsafePickle(f"the pickle fills a {type(item).__name__} as if it were a {kind.__name__}")
        self.stack.append(item)
        return item

    def set_items(self, items: list) -> None:
        if len(items) % 2:
            raise FormatError("the pickle sets a dict key without a value")
        self.top(dict).update(zip(map(check_key, items[::2]), items[1::2], strict=True))

    def find(self, module: object, name: object) -> object:
        dotted = f"{module}.{name}"
        if not (isinstance(module, str) and isinstance(name, str)) or "." in name or dotted not in self.names:
            raise UnsafePickle(
                f"the pickle asks for {dotted[:200]!r}, which is not among the names a checkpoint needs; "
                "nothing was imported or run. If you trust the file, load it with the library that wrote it "
                "and save its tensors alone."
            )
        return self.names[dotted]

    def call(self, opcode: str, function: object, args: object) -> object:
        if not isinstance(function, Constructor) or not isinstance(args, tuple):
            what = function.name if isinstance(function, Name) else type(function).__name__
            raise UnsafePickle(f"the pickle calls {what!r}, which is no constructor we know")
        if opcode == "NEWOBJ" and not function.inert:
            raise UnsafePickle(f"the pickle makes a {function.name} without its constructor")
        made = function.call(args)
        if made is NotImplemented:
            kinds = ", ".join(type(arg).__name__ for arg in args[:10])
            raise UnsafePickle(f"the pickle calls {function.name} with arguments it does not take: ({kinds})")
        if function.build is not None:
            self.unbuilt[id(made)] = made, function
        return made

    def build(self, target: object, state: object) -> None:
        made, constructor = self.unbuilt.pop(id(target), (None, None))
        if made is not target or constructor is None or constructor.build is None:
            raise UnsafePickle(f"the pickle gives a state to a {type(target).__name__} that cannot take one")
        if constructor.build(target, state) is NotImplemented:
            raise UnsafePickle(f"the pickle gives {constructor.name} a state of a kind it never has")


def check_key(key: T) -> T:
    """The key, if a dict can hash it in a few steps: the hash of nested tuples visits every path through them."""
    todo: list[object] = [key]
    for _ in range(MAX_KEY_NODES):
        if not todo:
            return key
        item = todo.pop()
        if isinstance(item, tuple | frozenset):
            todo.extend(item)
        elif type(item).__hash__ is None:
            raise UnsafePickle(f"a {type(item).__name__} inside a dict key or set in the pickle")
    raise UnsafePickle(f"a dict key or set element of {MAX_KEY_NODES} or more parts in the pickle")


@dataclass(slots=True)
class _Inside:
    """A container on the way down, what of it is still to be looked at, and the size of the rest."""

    node: object
    left: Iterator[tuple[str, object]]
    nodes: int = 1
    depth: int = 0


def _check_bounds(tree: object, max_nodes: int) -> None:
    """Refuse a tree that a recursive walk would not leave: cyclic, too deep, or shared exponentially.

    Shared nodes count as often as a walk meets them, yet are looked at once: a number is kept for each container.
    """
    known: dict[int, int] = {id(tree): 0}  # id -> nodes << 8 | depth; 0 while inside
    path = [_Inside(tree, children(tree))]
    while True:
        here = path[-1]
        if (found := next(here.left, None)) is not None:
            child = found[1]
            size = known.get(id(child)) if isinstance(child, _CONTAINERS) else _LEAF
            if size is None:
                known[id(child)] = 0
                path.append(_Inside(child, children(child)))
                continue
            if size == 0:
                raise UnsafePickle(f"a {type(child).__name__} in the pickle contains itself")
        else:
            size = known[id(here.node)] = here.nodes << 8 | here.depth
            path.pop()
            if not path:
                return
            here = path[-1]
        here.nodes, here.depth = here.nodes + (size >> 8), max(here.depth, 1 + (size & 0xFF))
        if here.nodes > max_nodes or max(here.depth, len(path)) > MAX_DEPTH:
            raise UnsafePickle(
                f"objects nested {max(here.depth, len(path))} deep, or {here.nodes} counting shared ones, in the pickle"
            )


_CONTAINERS = (dict, list, tuple, set, frozenset, Node)
_LEAF = 1 << 8
