"""Pickles read by an interpreter of our own: known names only, bounded, nothing run.

Python's `Unpickler` with a `find_class` of one's own is not enough: it still allocates gigabytes
for one memo index, and builds objects that no walk, hash or `repr` survives. Here an opcode is a
short method of `_Machine`; a name means what the caller's table says, or stands for itself and what
is made by it stays closed (`Unknown`, `Opaque`); and what is returned is a tree that a plain
recursive walk can visit: no cycles, at most `MAX_DEPTH` deep, bounded in nodes.

The opcodes are those that Python writes for data at protocols 2 to 5 (`Lib/pickle.py`,
`Lib/pickletools.py`). No length is taken beyond the input.
"""

from __future__ import annotations

import builtins
import pickletools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from jax_ucp.errors import FormatError, UnsafePickle

T = TypeVar("T")

# What objects may take in memory, roughly counted: this, and so much for each byte of the file. Of
# our cases none takes more than 33 bytes for one of the file; an opcode that makes an empty set
# takes 224.
FREE_BYTES = 32 << 20
BYTES_PER_BYTE = 96
# How many nodes a walk may meet, shared ones every time: these, and one for each two bytes of the
# file. A text counts as another node for each so many of its bytes: what is made of a tree, as JSON
# or a message, has all of it wherever it is mentioned.
FREE_NODES = 100_000
BYTES_PER_NODE = 128
BITS_PER_NODE = 3 * BYTES_PER_NODE
MAX_DEPTH = 100
MAX_MARKS = 1_000
MAX_INT_BITS = 8_192  # Python refuses to print integers of more than 4,300 digits
MAX_KEY_NODES = 64
MAX_KEYS_ALIKE = 16
MAX_LABEL = 256
MAX_GLOBAL = 256


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules of Python, of any release, that run, open or import things, or reach into objects: no data
# is made of them. No promise hangs on this list, for nothing is ever called: a file that names one
# of these is an attack, and is called so.
_ACTING_PACKAGES = _words(
    """
    os ctypes importlib multiprocessing asyncio urllib unittest xmlrpc distutils setuptools pip
    ensurepip venv idlelib lib2to3
    """
)
_ACTING_MODULES = _words(
    """
    posix nt sys subprocess shutil pty commands popen2 site _ctypes _frozen_importlib imp runpy
    pkgutil zipimport code codeop ast compileall pickle _pickle cPickle pickletools marshal
    shelve io _io codecs _codecs tempfile fileinput glob pdb bdb trace timeit profile cProfile
    doctest gc atexit thread _thread socket _socket socketserver select ssl urllib2 ftplib
    smtplib telnetlib poplib imaplib webbrowser cgi compiler new dl antigravity
    """
)
_BUILTINS = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type))


@dataclass(frozen=True, slots=True)
class Name:
    """A global that stands for itself: a class that is not called, or a constant."""

    name: str

    def __str__(self) -> str:
        return self.name


Build = Callable[[Any, object], object]


@dataclass(frozen=True, slots=True)
class Constructor(Name):
    """A global that a pickle may call; what it makes is up to our own `call`.

    `call` takes the tuple of arguments and returns NotImplemented where they do not fit. `build`
    receives the state of a BUILD and says the same, or returns an Opaque in place of the object.
    Instances of `inert` classes become records; `holds_keys`: the argument lists what must be
    hashed.
    """

    call: Callable[[tuple], object]
    build: Build | None = None
    inert: bool = False
    holds_keys: bool = False


class ObjectNode:
    """A value with children, besides Python's containers. As a key it equals itself alone."""

    __slots__ = ()
    __hash__ = object.__hash__

    def children(self) -> Iterable[tuple[object, object]]:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Record(ObjectNode):
    """An instance of a class known by name: what it was made from, never the class."""

    type: str
    args: tuple = ()
    state: object = None

    @property
    def fields(self) -> dict[str, object]:
        """The attributes of the instance: its state, or both parts if there are slots too."""
        parts = (
            self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        )
        return {
            name: value for part in parts if isinstance(part, dict) for name, value in part.items()
        }

    def children(self) -> list[tuple[object, object]]:
        state = children(self.state) if isinstance(self.state, dict) else [("state", self.state)]
        return [*children(self.args), *state]

    def __str__(self) -> str:
        return self.type

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Record)
        return same and (self.type, self.args, self.state) == (other.type, other.args, other.state)

    __hash__ = ObjectNode.__hash__


@dataclass(frozen=True, slots=True)
class Unknown(Name):
    """A global that is in no table; what a pickle makes by it is an Opaque."""


@dataclass(slots=True, eq=False)
class Opaque(ObjectNode):
    """An object that a pickle makes by an unknown global: its name, and what it was made from.

    It can be kept, and that is all: taking it for a number, a list or a dict raises FormatError
    with its name and `where` it lies. `items` and `entries` are those of a list or dict that it is
    too. Once `closed`, which says why, it holds nothing: an object may hold itself, or be too large
    to walk.
    """

    type: str
    args: tuple = ()
    state: object = None
    items: list[object] = field(default_factory=list)
    entries: dict[object, object] = field(default_factory=dict)
    where: str = ""
    closed: str = ""

    def close(self, why: str) -> None:
        self.args, self.state, self.items, self.entries, self.closed = (), None, [], {}, why

    def children(self) -> Iterator[tuple[object, object]]:
        yield from enumerate(self.args)
        yield from children(self.state) if isinstance(self.state, dict) else [("state", self.state)]
        yield from enumerate(self.items)
        yield from self.entries.items()

    def __str__(self) -> str:
        return f"an object of {self.type}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self._content() == other._content()

    __hash__ = ObjectNode.__hash__

    def _content(self) -> tuple[object, ...]:
        return self.type, self.args, self.state, self.items, self.entries, self.closed

    def refuse(self, *_: object) -> NoReturn:
        """Raise FormatError: it is where a value of a kind known here is needed."""
        where = f"{self.where} is " if self.where else ""
        raise FormatError(
            f"{where}an object of {self.type}, which is not known here, so that nothing says what"
            " it means; a number, text, list, dict or tensor is needed there. Save the checkpoint"
            " with a plain value in its place"
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = refuse
    __int__ = __float__ = __index__ = __array__ = __lt__ = __gt__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


def _give_state(made: Any, state: object) -> None:
    made.state = state


def inert(name: str, build: Build = _give_state) -> Constructor:
    """The `Constructor` of a class by its dotted name: instances load as Records, no code runs."""
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
    `persistent` maps a persistent id to its object; without it they are refused. `stored_bytes` is
    what the file spends on a deflated pickle. Raises UnsafePickle for what a checkpoint never
    needs, FormatError for what is not a pickle.
    """
    value, end = load_first(data, names, persistent, stored_bytes)
    if end != len(data):
        raise FormatError(f"{len(data) - end} bytes follow the end of the pickle")
    return value


def load_first(
    data: bytes,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
    stored_bytes: int | None = None,
) -> tuple[object, int]:
    """The object of the pickle with which `data` begins, as `load`, and the byte after it."""
    machine = _Machine(names, persistent)
    most = len(data) if stored_bytes is None else stored_bytes
    end = machine.run(data, most)
    if len(machine.stack) != 1 or machine.below:
        raise FormatError("the pickle ends with an unfinished object")
    # A tree that a recursive walk would not leave is refused: cyclic, too deep, or shared
    # exponentially.
    _size(machine.stack[0], 0, FREE_NODES + min(end, most) // 2, {})
    return machine.stack[0], end


def each_node(tree: object) -> Iterator[object]:
    """Every node of a tree, parents first, shared nodes every time."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, _CONTAINERS):
            pending += [child for _, child in children(node)][::-1]


def walk(tree: object) -> Iterator[tuple[tuple[object, ...], object]]:
    """Every node of a tree, as in `each_node`, after the keys that lead to it."""
    pending: list[tuple[tuple[object, ...], object]] = [((), tree)]
    while pending:
        keys, node = pending.pop()
        yield keys, node
        if isinstance(node, _CONTAINERS):
            pending += [((*keys, key), child) for key, child in children(node)][::-1]


def children(node: object) -> Iterable[tuple[object, object]]:
    """The values in a node, each after its label: a dict's keys, a sequence's positions."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list | tuple | set | frozenset):
        return enumerate(node)
    return node.children() if isinstance(node, ObjectNode) else ()


def label(key: object) -> str:
    """A key as text, which is cut if it is long."""
    if isinstance(key, tuple):
        text = f"({', '.join(map(label, key))})"
    else:
        text = str(key[: MAX_LABEL + 1] if isinstance(key, str | bytes) else key)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


class _Machine:
    """A stack, those below marks, a memo, objects without a state; methods are opcodes."""

    def __init__(self, names: Mapping[str, object], persistent: Callable[[object], object] | None):
        self.names = names
        self.persistent = persistent
        self.stack: list = []
        self.below: list[list] = []
        # a dict: an index of 2**32 - 1 costs no more than any other
        self.memo: dict[object, object] = {}
        self.unbuilt: dict[int, _Unbuilt] = {}
        self.unknown: dict[str, Unknown] = {}
        self.keys: dict[int, list[object]] = {}  # those that are neither text nor small, by hash
        self.cost = 0
        self.paid = FREE_BYTES  # what it may cost, by the bytes that were read when it cost more
        self.at = 0  # the byte up to which the pickle has been read
        self.paying = 0  # bytes that the file spends on it

    def run(self, data: bytes, most: int) -> int:
        """The byte after STOP. `pickletools.genops` would do, but warns of invalid escapes."""
        at, step, stop = 0, None, len(data)
        self.paying = most
        while step is not _stop:
            if at >= stop:
                raise _damaged(at)
            step, number, value, cost = _OPCODES[data[at]]
            at, argument = at + 1, None
            if number is not None:
                if number.size > stop - at:
                    raise _damaged(at)
                (argument,) = number.unpack_from(data, at)
                at += number.size
            if value is not None:  # of as many bytes as the number says, or of two lines
                length = argument
                if length is None:
                    first = data.find(b"\n", at, stop) + 1
                    second = data.find(b"\n", first, stop) + 1 if first else 0
                    length = (second or stop + 1) - at  # more than there are if one does not end
                if not 0 <= length <= stop - at:
                    raise _damaged(at)
                argument, at = value(data[at : at + length]), at + length
            self.at = at
            self.cost += cost
            if self.cost > self.paid:  # as in `charge`, without a call for each opcode
                self.charge(0)
            step(self, argument)
        return at

    def charge(self, nbytes: int) -> None:
        """Count a cost. Raises UnsafePickle if the bytes read do not account for it."""
        self.cost += nbytes
        if self.cost <= self.paid:
            return
        self.paid = FREE_BYTES + BYTES_PER_BYTE * min(self.at, self.paying)
        if self.cost > self.paid:
            raise UnsafePickle(
                f"the objects in the pickle take too much memory for its first {self.at} bytes"
            )

    def push(self, argument: object) -> None:
        self.stack.append(argument)

    def push_long(self, argument: int) -> None:
        if argument.bit_length() > MAX_INT_BITS:
            raise UnsafePickle(f"an integer of {argument.bit_length()} bits in the pickle")
        self.stack.append(argument)

    def put(self, index: int) -> None:
        item = self.memo[index] = self.top()
        if unbuilt := self.unbuilt.get(id(item)):
            unbuilt.memo.append(index)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise FormatError(f"the pickle asks for memo {index}, which it never put there")
        self.stack.append(self.memo[index])

    def mark(self, _: None) -> None:
        if len(self.below) >= MAX_MARKS:
            raise UnsafePickle(f"more than {MAX_MARKS} open marks in the pickle")
        self.below.append(self.stack)
        self.stack = []

    def extend(self, items: list) -> None:
        target = self.top()
        (target.items if isinstance(target, Opaque) else self.top(list)).extend(items)

    def add_items(self, _: None) -> None:
        items = self.pop_to_mark()
        self.top(set).update(self.hashable(items))

    def hashable(self, items: Sequence[T]) -> Sequence[T]:
        """Items to be hashed. Raises UnsafePickle for what is no key, and for many of one hash."""
        self.charge(_ELEMENT * len(items))
        for item in items:
            if type(item) is str or (type(item) is int and -_INT_HASHES < item < _INT_HASHES):
                continue
            check_key(item)
            if isinstance(item, _SCATTERED):
                continue
            alike = self.keys.setdefault(hash(item), [])
            if any(item is other for other in alike) or item in alike:
                continue
            self.charge(_KEY)
            if len(alike) >= MAX_KEYS_ALIKE:
                raise UnsafePickle(
                    f"more than {MAX_KEYS_ALIKE} keys in the pickle have the same hash"
                )
            alike.append(item)
        return items

    def reduce(self, _: None) -> None:
        function, args = self.pop(2)
        self.stack.append(self.call(function, args))

    def new(self, _: None) -> None:
        function, args = self.pop(2)
        if isinstance(function, Constructor) and isinstance(args, tuple) and not function.inert:
            raise UnsafePickle(f"the pickle makes a {function.name} without its constructor")
        self.stack.append(self.call(function, args))

    def persist(self, _: None) -> None:
        if self.persistent is None:
            raise UnsafePickle(
                "the pickle refers to persistent objects, which this file cannot have"
            )
        id_ = self.pop(1)
        self.charge(_extent(id_))
        self.stack.append(self.persistent(*id_))

    def protocol(self, version: int) -> None:
        if version not in (2, 3, 4, 5):
            raise FormatError(f"pickle protocol {version}; torch.save writes 2 to 5")

    def pop(self, count: int) -> list:
        """The last `count` objects, off the stack; those below the last mark are out of reach."""
        floor = len(self.stack) - count
        if floor < 0:
            raise FormatError("the pickle takes more off its stack than it put there")
        items = self.stack[floor:]
        del self.stack[floor:]
        return items

    def pop_to_mark(self) -> list:
        if not self.below:
            raise FormatError("the pickle ends a group it never began")
        items, self.stack = self.stack, self.below.pop()
        return items

    def top(self, kind: type = object) -> Any:
        """The last object, which stays, and is of exactly `kind`, unless that is `object`."""
        if not self.stack:
            raise FormatError("the pickle takes more off its stack than it put there")
        item = self.stack[-1]
        if kind is not object and type(item) is not kind:
            raise UnsafePickle(
                f"the pickle fills a {type(item).__name__} as if it were a {kind.__name__}"
            )
        return item

    def set_items(self, items: list) -> None:
        if len(items) % 2:
            raise FormatError("the pickle sets a dict key without a value")
        target = self.top()
        pairs = zip(self.hashable(items[::2]), items[1::2], strict=True)
        (target.entries if isinstance(target, Opaque) else self.top(dict)).update(pairs)

    def find(self, module: object, name: object) -> object:
        """The entry of a global in the table; an Unknown for a harmless one in no table."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsafePickle(
                f"the pickle asks for {what_is(name)} of {what_is(module)}, where names of a module"
                " and of what is in it should be"
            )
        dotted = f"{module[:MAX_GLOBAL]}.{name[:MAX_GLOBAL]}"
        plain = "." not in name and len(module) + len(name) <= MAX_GLOBAL
        if plain and dotted in self.names:
            return self.names[dotted]
        if plain and dotted in self.unknown:
            return self.unknown[dotted]
        if not plain or not is_inert_global(module, name):
            raise UnsafePickle(
                f"the pickle asks for {dotted[:200]!r}, which no checkpoint needs: no data is made"
                " of that, and such names can run, open or import things. Nothing was imported or"
                " run. If you trust the file, load it with the library that wrote it and save its"
                " tensors alone."
            )
        return self.unknown.setdefault(dotted, Unknown(dotted))

    def call(self, function: object, args: object) -> object:
        """The object that a constructor of the table makes of `args`, or an Opaque for an unknown
        global. Raises UnsafePickle for anything else.
        """
        if isinstance(function, Unknown) and isinstance(args, tuple):
            made = Opaque(function.name, args)
            self.unbuilt[id(made)] = _Unbuilt(made, _OPAQUE)
            return made
        if not isinstance(function, Constructor) or not isinstance(args, tuple):
            what = repr(function.name) if isinstance(function, Name) else what_is(function)
            raise UnsafePickle(
                f"the pickle calls {what}, which is not a constructor that may be called"
            )
        self.charge(_extent(args))
        for items in args if function.holds_keys else ():
            self.hashable(items if isinstance(items, list) else [])
        made = function.call(args)
        if made is NotImplemented:
            kinds = ", ".join(map(what_is, args[:10]))
            raise UnsafePickle(
                f"the pickle calls {function.name} with arguments it does not take: ({kinds})"
            )
        if function.build is not None:
            self.unbuilt[id(made)] = _Unbuilt(made, function)
        return made

    def build(self, _: None) -> None:
        (state,) = self.pop(1)
        target = self.top()
        unbuilt = self.unbuilt.pop(id(target), None)
        if unbuilt is None or unbuilt.made is not target:
            raise UnsafePickle(
                f"the pickle gives a state to {what_is(target)} that cannot take one"
            )
        assert unbuilt.constructor.build is not None, "or it would not be here"
        self.charge(_extent((state,)))
        built = unbuilt.constructor.build(target, state)
        if built is NotImplemented:
            raise UnsafePickle(
                f"the pickle gives {unbuilt.constructor.name} a state of a kind it never has"
            )
        if isinstance(built, Opaque):
            self.stack[-1] = built
            self.memo.update(dict.fromkeys(unbuilt.memo, built))


_OPAQUE = Constructor("of a class that is not known", lambda args: NotImplemented, _give_state)


@dataclass(slots=True)
class _Unbuilt:
    """An object that may receive its state, by what made it, and where in the memo it is."""

    made: object
    constructor: Constructor
    memo: list[int] = field(default_factory=list)


def is_inert_global(module: str, name: str) -> bool:
    """Whether a global that is in no table may stand for itself: a class or a function of some
    library, as a rule.

    Nothing is imported or called in any case. What is refused has no place in a checkpoint, and a
    file that asks for it is an attack, or damaged: names that reach into an object, and those of
    modules that act.

    >>> is_inert_global("transformers.training_args", "TrainingArguments"), is_inert_global("os",
    ...     "system")
    (True, False)
    """
    parts = module.split(".")
    if len(module) + len(name) > MAX_GLOBAL or not all(
        part.isidentifier() for part in [*parts, name]
    ):
        return False
    if module in ("builtins", "__builtin__"):
        return name in _BUILTINS
    return parts[0] not in _ACTING_PACKAGES and module not in _ACTING_MODULES


def is_plain_name(name: str) -> bool:
    """Whether a name is one that people give, not one of Python's own such as `__globals__`."""
    return name.isidentifier() and not name.startswith("__")


def what_is(value: object) -> str:
    """The type of a value, for a message, or the name of an unknown global.

    >>> what_is({}), what_is(Opaque("a.B"))
    ('a dict', 'an object of a.B, which is not known here')
    """
    if isinstance(value, Opaque):
        return f"an object of {value.type}, which is not known here"
    if isinstance(value, Name):
        return f"the name {value}"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeio" else "a"
    return f"{article} {kind}"


def known(value: T) -> T:
    """The value, which decides something. Raises FormatError if it is an Opaque."""
    if isinstance(value, Opaque):
        value.refuse()
    return value


def _damaged(at: int) -> FormatError:
    return FormatError(
        f"not a pickle, or a damaged one: it ends inside what starts before byte {at}"
    )


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(f"not a pickle, or a damaged one: {error.reason} in a text") from error


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


class _Opcode(NamedTuple):
    """The action of an opcode, and its argument.

    `number` follows the opcode. With `value` the argument is made of as many bytes as that number
    says, or of two lines. `cost` is what it adds to memory, by CPython's sizes.
    """

    step: Callable[[_Machine, Any], None]
    number: struct.Struct | None = None
    value: Callable[[bytes], object] | None = None
    cost: int = 8


def _pushes(make: Callable[[], object], cost: int = 8) -> _Opcode:
    return _Opcode(lambda machine, _: machine.stack.append(make()), cost=cost)


def _tuples(count: int) -> _Opcode:
    return _Opcode(lambda machine, _: machine.stack.append(tuple(machine.pop(count))), cost=64)


def _refused(code: int) -> _Opcode:
    what = _NAMES.get(code, repr(bytes([code])))

    def step(machine: _Machine, _: None) -> None:
        raise UnsafePickle(
            f"pickle opcode {what}, which torch.save never writes (protocols 2 to 5)"
        )

    return _Opcode(step)


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_U1, _U2, _U4, _U8, _I4 = (struct.Struct(f"<{kind}") for kind in "BHIQi")


def _stop(machine: _Machine, _: None) -> None:
    pass


_KNOWN = {
    "PROTO": _Opcode(_Machine.protocol, _U1),
    "FRAME": _Opcode(lambda machine, _: None, _U8),
    "STOP": _Opcode(_stop),
    "NONE": _pushes(lambda: None),
    "NEWTRUE": _pushes(lambda: True),
    "NEWFALSE": _pushes(lambda: False),
    "BININT": _Opcode(_Machine.push, _I4, cost=48),
    "BININT1": _Opcode(_Machine.push, _U1, cost=48),
    "BININT2": _Opcode(_Machine.push, _U2, cost=48),
    "LONG1": _Opcode(_Machine.push_long, _U1, _long, cost=48),
    "LONG4": _Opcode(_Machine.push_long, _I4, _long, cost=48),
    "BINFLOAT": _Opcode(_Machine.push, struct.Struct(">d"), cost=48),
    "SHORT_BINUNICODE": _Opcode(_Machine.push, _U1, _text, cost=48),
    "BINUNICODE": _Opcode(_Machine.push, _U4, _text, cost=48),
    "BINUNICODE8": _Opcode(_Machine.push, _U8, _text, cost=48),
    "SHORT_BINBYTES": _Opcode(_Machine.push, _U1, bytes, cost=48),
    "BINBYTES": _Opcode(_Machine.push, _U4, bytes, cost=48),
    "BINBYTES8": _Opcode(_Machine.push, _U8, bytes, cost=48),
    "BYTEARRAY8": _Opcode(_Machine.push, _U8, bytearray, cost=48),
    "EMPTY_TUPLE": _pushes(tuple),
    "TUPLE1": _tuples(1),
    "TUPLE2": _tuples(2),
    "TUPLE3": _tuples(3),
    "TUPLE": _Opcode(lambda machine, _: machine.push(tuple(machine.pop_to_mark())), cost=64),
    "EMPTY_LIST": _pushes(list, 64),
    "APPEND": _Opcode(lambda machine, _: machine.extend(machine.pop(1))),
    "APPENDS": _Opcode(lambda machine, _: machine.extend(machine.pop_to_mark())),
    "EMPTY_DICT": _pushes(dict, 72),
    "SETITEM": _Opcode(lambda machine, _: machine.set_items(machine.pop(2)), cost=96),
    "SETITEMS": _Opcode(lambda machine, _: machine.set_items(machine.pop_to_mark())),
    "EMPTY_SET": _pushes(set, 224),
    "ADDITEMS": _Opcode(_Machine.add_items),
    "FROZENSET": _Opcode(
        lambda machine, _: machine.push(frozenset(machine.hashable(machine.pop_to_mark()))),
        cost=224,
    ),
    "MARK": _Opcode(_Machine.mark),
    "MEMOIZE": _Opcode(lambda machine, _: machine.put(len(machine.memo)), cost=96),
    "BINPUT": _Opcode(_Machine.put, _U1, cost=96),
    "LONG_BINPUT": _Opcode(_Machine.put, _U4, cost=96),
    "BINGET": _Opcode(_Machine.get, _U1),
    "LONG_BINGET": _Opcode(_Machine.get, _U4),
    "GLOBAL": _Opcode(
        lambda machine, lines: machine.push(machine.find(*lines.split("\n")[:2])),
        value=_text,
        cost=272,
    ),
    "STACK_GLOBAL": _Opcode(
        lambda machine, _: machine.push(machine.find(*machine.pop(2))), cost=272
    ),
    "REDUCE": _Opcode(_Machine.reduce, cost=400),
    "NEWOBJ": _Opcode(_Machine.new, cost=400),
    "BUILD": _Opcode(_Machine.build, cost=192),
    "BINPERSID": _Opcode(_Machine.persist, cost=192),
}
_OPCODES = [_KNOWN.get(_NAMES.get(code, "")) or _refused(code) for code in range(256)]


def check_key(key: object) -> None:
    """Raise UnsafePickle if hashing takes many steps: it visits every path of nested tuples."""
    if type(key) in _ATOMS:
        return
    todo: list[object] = [key]
    for _ in range(MAX_KEY_NODES):
        if not todo:
            return
        item = todo.pop()
        if isinstance(item, tuple | frozenset):
            todo.extend(item)
        elif type(item).__hash__ is None:
            raise UnsafePickle(f"a {type(item).__name__} inside a dict key or set in the pickle")
    raise UnsafePickle(f"a dict key or set element of {MAX_KEY_NODES} or more parts in the pickle")


# What an element of a container takes, a key that is kept to be compared with others, and what each
# byte or character of a text does.
_ELEMENT, _KEY = 96, 192
_UNITS = {str: 4, bytes: 1, bytearray: 1}
_UNITS |= dict.fromkeys((list, tuple, dict, set, frozenset), _ELEMENT)
# Keys whose hash no file can choose, and below what integers are their own hash.
_SCATTERED = (str, bytes, ObjectNode, Name, bool, type(None))
_INT_HASHES = 1 << 60


def _extent(arguments: Sequence[Any]) -> int:
    """The bytes of a copy of arguments, and of the items of tuples among them."""
    nbytes = 0
    for part in arguments:
        if (kind := type(part)) in _UNITS:
            nbytes += _UNITS[kind] * len(part)
        if kind is tuple:
            nbytes += sum([_UNITS[type(item)] * len(item) for item in part if type(item) in _UNITS])
    return nbytes


def _size(
    node: object, above: int, max_nodes: int, known: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """The nodes and depth of a container below `above` others; an endless Opaque is closed."""
    known[id(node)] = _INSIDE
    try:
        # what an object holds lies in one of its fields
        level = 2 if isinstance(node, ObjectNode) else 1
        nodes, depth = 1, 0
        for key, child in children(node):
            if type(key) is not int or abs(key) > _LIGHT:
                nodes += _weight(key)
            if type(child) is int and abs(child) <= _LIGHT:
                nodes, depth = nodes + 1, depth or level
                continue
            if not isinstance(child, _CONTAINERS):
                nodes, depth = nodes + 1 + _weight(child), depth or level
                continue
            size = _child_size(child, above + level, max_nodes, known)
            nodes, depth = nodes + size[0], max(depth, level + size[1])
            if nodes > max_nodes:
                break
        if above + depth > MAX_DEPTH:
            raise UnsafePickle(f"objects nested {above + depth} deep in the pickle")
        if nodes > max_nodes:
            raise UnsafePickle(
                f"{nodes} values in the pickle or more, counting shared ones wherever they are"
                f" mentioned and a text once for each {BYTES_PER_NODE} bytes of it; so many bytes"
                f" have {max_nodes} at most"
            )
        size = nodes, depth
    except UnsafePickle as error:
        if not isinstance(node, Opaque):
            raise
        node.close(str(error))
        size = 1, 0
    known[id(node)] = size
    return size


def _weight(value: Any) -> int:
    """The nodes that a text, number, array or key counts as besides its own, by its bytes."""
    if isinstance(value, int):
        return value.bit_length() // BITS_PER_NODE
    if isinstance(value, str | bytes | bytearray):
        return len(value) // BYTES_PER_NODE
    if isinstance(value, tuple | frozenset):
        return sum(map(_weight, value))
    return value.nbytes // BYTES_PER_NODE if isinstance(value, np.ndarray | np.generic) else 0


def _child_size(
    node: object, above: int, max_nodes: int, known: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """The size of a container in another one; the least, of one that is too deep to be walked."""
    size = known.get(id(node))
    if size is None:
        return (1, 1) if above > MAX_DEPTH else _size(node, above, max_nodes, known)
    # around this one, or seen to be so below an Opaque that was closed for it
    if size is _INSIDE:
        raise UnsafePickle(
            f"a {type(node).__name__} in the pickle contains itself, or is nested too deep"
        )
    return size


_CONTAINERS = (dict, list, tuple, set, frozenset, ObjectNode)
_ATOMS = frozenset((str, int, float, bool, bytes, type(None)))
_LIGHT = 1 << 62  # an integer up to it counts as no other node
_INSIDE = 0, -1
