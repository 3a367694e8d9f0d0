"""Time and memory of every parser against the bytes of its input, over sizes: `python -m
hostile.growth` in `tests/`; `--family json` measures one parser alone.

An input is a head and a unit, repeated until it has so many bytes: what a unit costs beyond the
bytes it takes shows in the growth. The first unit of an input may be large and what follows refer
to it, which is how a small file asks for much. Each input is read at two sizes in this process,
whose memory has a limit; one whose cost grows faster than its bytes fails, or one that costs more
for each of them than `SECONDS_PER_BYTE` and `MEMORY_PER_BYTE`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

import jax_ucp as ucp
from gguf_writer import Tensor, Written
from hostile import fuzz, inputs
from hostile.files import STOCK, saved, sealed
from jax_ucp.codecs import unpickle
from jax_ucp.codecs.json_values import as_json
from jax_ucp.errors import UCPError
from jax_ucp.formats.dcp.metadata import _NAMES as PICKLE_NAMES
from jax_ucp.inspection.report import inspection
from jax_ucp.mapping.rules import Mapping
from jax_ucp.name_patterns import NamePatterns
from jax_ucp.shard_spec.notation import parse
from safetensors_writer import file_of

SIZES = 40_000, 320_000
MEMORY_BYTES = 1 << 30
# So much more than these at the smaller size as there are bytes more, is not looked at more closely.
LEAST_SECONDS, LEAST_MEMORY = 0.05, 8 << 20
SECONDS_PER_BYTE, MEMORY_PER_BYTE = 40e-6, 1_000
# What may be taken whatever the bytes are: a pickle's `FREE_BYTES`, a tree of 65,536 leaves.
ANY_SECONDS, ANY_MEMORY = 4.0, 160 << 20
GROWTH = 2.5  # times what the bytes account for; a square is 8
TRIES = 3

Make = Callable[[int], bytes]
Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Cost:
    seconds: float
    memory: int


@dataclass(frozen=True)
class Family:
    """A parser: what reads an input, and inputs by name, each for any number of bytes."""

    read: Read
    inputs: dict[str, Make]


def repeated(unit: bytes, before: bytes = b"", after: bytes = b"") -> Make:
    return lambda size: before + unit * (size // len(unit) + 1) + after


def counted(item: str, before: str = "", after: str = "", joint: str = ",") -> Make:
    """An input of different items; `%(i)d` in one is its number, `%(last)d` that of the one before."""

    def make(size: int) -> bytes:
        count = size // (len(item % {"i": 1000, "last": 999}) + len(joint)) + 1
        items = [item % {"i": i, "last": max(i - 1, 0)} for i in range(count)]
        return (before + joint.join(items) + after).encode()

    return make


def lines(item: str, before: str = "", after: str = "") -> Make:
    return counted(item, before, after, "\n")


# Pickles


def storage(persistent_id: Any) -> object:
    return fuzz.storage(persistent_id, 1 << 40)


def read_pickle(data: bytes) -> None:
    """All that is done with the object of a pickle, and what its JSON is written as."""
    tree = unpickle.load(data, PICKLE_NAMES, storage)
    for _ in unpickle.walk(tree):
        pass
    repr(tree)
    msgspec.json.encode(as_json(tree, "file", lambda key, box: (_ for _ in ()).throw(UCPError())))


text = inputs.opcodes


def name(dotted: str) -> bytes:
    return inputs.opcodes(inputs.Global(dotted))


def large_values(size: int) -> dict[str, bytes]:
    """Values that take so many bytes of a pickle."""
    numbers = [b"J" + struct.pack("<i", i) for i in range(size // 5)]
    long = [b"\x8a\x10" + (i * ((1 << 61) - 1)).to_bytes(16, "little") for i in range(size // 18)]
    return {
        "list": b"](" + b"".join(numbers) + b"e",
        "tuple": b"(" + b"".join(numbers) + b"t",
        "dict": b"}(" + b"".join(number + b"N" for number in numbers) + b"u",
        "set": b"\x8f(" + b"".join(numbers) + b"\x90",
        "bytes": b"B" + struct.pack("<I", size) + bytes(size),
        "text": text("a" * size),
        "alike": b"](" + b"".join(long) + b"e",
        "dict alike": b"}(" + b"".join(key + b"N" for key in long) + b"u",
        "lists": b"(" + b"]" * (size - 2) + b"t",
    }


# What the second half of a pickle repeats: the large value is memo 1, a tuple of it memo 2.
OPERANDS = [b"", b"h\x01", b"h\x01" * 2, b"h\x02", b"h\x01h\x02", b"(", b"(h\x01", b"(h\x01N"]
OPERANDS += [b"h\x03h\x01", b"h\x03h\x02", b"h\x03", b"h\x03Nh\x01", b"}h\x01", b"}(Nh\x01"]
OPERANDS += [b"](h\x01", b"]h\x01", b"\x8f(h\x01", b"h\x01N\x86", b"X\1\0\0\0ah\x01"]
OPERANDS += [text("a") + text("b"), name("a.B") + b")", name("a.B") + b"h\x02"]
OPERANDS += [name("a.B") + b")R}", name("a.B") + b")Rh\x01"]
KIND = name("torch.FloatStorage")
OPERANDS.append(b"(" + text("storage") + KIND + text("0") + text("cpu") + b"K\x04t")


def opcode_inputs() -> dict[str, Make]:
    """Each opcode of the table, again and again, with each kind of large value below it."""
    codes = {opcode: bytes([code]) for code, opcode in enumerate(unpickle._OPCODES)}
    made: dict[str, Make] = {}
    for title, opcode in unpickle._KNOWN.items():
        number = 0 if opcode.value else 1  # of no bytes, or the first memo
        code = codes[opcode]
        code += number.to_bytes(opcode.number.size, "little") if opcode.number else b""
        code += b"a\nB\n" if title == "GLOBAL" else b""
        for kind, operands in itertools.product(large_values(100), OPERANDS):
            made[f"{title} {kind} {operands!r}"] = with_large(kind, operands + code)
    # what ends a pickle, and what is in one once
    return those_that_go_on(made, unpickle._KNOWN.keys() - {"STOP", "PROTO", "FRAME"})


def those_that_go_on(made: dict[str, Make], each: Collection[str]) -> dict[str, Make]:
    """Those inputs that are not refused at once. Each of these names has one: a new opcode or
    constructor fails here until there is an input that it takes.
    """
    found = {title: make for title, make in made.items() if goes_on(make)}
    measured = {title.partition(" ")[0] for title in found}
    assert measured >= {*each}, f"no input is taken by {sorted({*each} - measured)}"
    return found


def goes_on(make: Make) -> bool:
    """Whether a pickle is refused at its end, if it is: what is refused before costs nothing."""
    data = make(1_000)
    machine = unpickle._Machine(PICKLE_NAMES, storage)
    with suppress(UCPError):
        machine.run(data, len(data))
    return machine.at > 0.9 * len(data)


def with_large(kind: str, unit: bytes, head: bytes = b"") -> Make:
    """A pickle of a large value, half of its bytes, and a unit repeated, all in a tuple."""

    def make(size: int) -> bytes:
        large = large_values(size // 2)[kind]
        before = b"\x80\x04(" + large + b"q\x01\x85q\x02" + name("a.B") + b")Rq\x03" + head
        return before + unit * (size // 2 // len(unit)) + b"t."

    return make


# Arguments that constructors take, the large value in them wherever it can be; `STORED` is a
# storage, `VIEW` a tensor.
STORED = b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
SHAPE = b"K\x01\x85"
VIEW_ARGS = b"(" + STORED + b"K\x00" + SHAPE + SHAPE + b"\x89}t"
REBUILD = name("torch._utils._rebuild_tensor_v2")
VIEW = REBUILD + VIEW_ARGS + b"R"
DTYPE = name("numpy.dtype") + text("S9") + b"\x89\x88\x87R"
L, T = b"h\x01", b"h\x02"
GENERIC = [b")", T, L + L + b"\x86", L + text("latin1") + b"\x86", L + b"K\x01\x86"]
GENERIC += [b"](e\x85", L, b"G" + bytes(8) + b"G" + bytes(8) + b"\x86", b"N\x85"]
FLOAT = name("torch.float32")
STATEFUL = L, L + L + b"\x86", b"}"
PARTICULAR: dict[str, list[bytes]] = {
    "_rebuild_tensor": [b"(" + STORED + b"K\x00" + L + L + b"t", b"(" + STORED + b"K\x00))t"],
    "_rebuild_tensor_v2": [b"(" + STORED + b"K\x00" + L + L + b"\x89}t",
        b"(" + STORED + b"K\x00" + SHAPE + SHAPE + b"\x89}" + L + b"t", VIEW_ARGS],
    "_rebuild_tensor_v3": [
        b"(" + STORED + b"K\x00" + axes + axes + b"\x89}" + FLOAT + b"t" for axes in (L, SHAPE)
    ],
    "_rebuild_parameter": [VIEW + b"\x89" + L + b"\x87"],
    "_rebuild_parameter_with_state": [b"(" + VIEW + b"\x89}" + state + b"t" for state in STATEFUL],
    "_rebuild_device_tensor_from_cpu_tensor": [b"(" + VIEW + FLOAT + L + b"\x89t"],
    "_rebuild_from_type_v2": [
        b"(" + REBUILD + name("torch.Tensor") + VIEW_ARGS + state + b"t" for state in STATEFUL
    ],
    "scalar": [DTYPE + b"C\x09" + bytes(9) + b"\x86"],
    "_reconstruct": [name("numpy.ndarray") + b"K\x00\x85C\x01b\x87"],
    "dtype": [text("f4") + b"\x89\x88\x87", L + b"\x89\x88\x87"],
    "getattr": [name("a.B") + text("c") + b"\x86", name("a.B") + L + b"\x86"],
    "Size": [L + b"\x85"],
}  # fmt: skip
STATES = [b"", L + b"b", L + L + b"\x86b", b"(K\x01" + SHAPE + DTYPE + b"\x89" + L + b"tb"]
STATES += [b"(K\x01" + L + DTYPE + b"\x89" + L + b"tb", b"(K\x03" + text("<") + b"NNN" + L + b"tb"]


MENTIONED = [STORED, SHAPE, DTYPE, *map(name, {**PICKLE_NAMES, "a.B": None})]


def constructors() -> dict[str, unpickle.Constructor]:
    """The constructors of the table; of those that make records and nothing else, the first."""
    found: dict[str, unpickle.Constructor] = {}
    for dotted, value in PICKLE_NAMES.items():
        if not isinstance(value, unpickle.Constructor):
            continue
        is_record = value.inert and value.build is unpickle._give_state
        if not is_record or not any(known.inert for known in found.values()):
            found[dotted] = value
    return found


def calls(dotted: str) -> Iterator[bytes]:
    """What calls a constructor with arguments of each kind, and gives states to what it makes."""
    arguments = [*GENERIC, *PARTICULAR.get(dotted.rpartition(".")[2], ())]
    for given, state in itertools.product(arguments, STATES):
        yield name(dotted) + given + b"R" + state


def constructor_inputs() -> dict[str, Make]:
    """Each constructor of the table, with all arguments and states that it takes."""
    made: dict[str, Make] = {}
    for dotted in constructors():
        for number, call in enumerate(calls(dotted)):
            for kind in large_values(100):
                made[f"{dotted} {kind} {number}"] = _memoised(kind, call)
    return those_that_go_on(made, constructors())


def _memoised(kind: str, call: bytes) -> Make:
    """The call repeated, in which memos stand for what it mentions: so it takes few bytes."""
    head = b""
    for memo, part in enumerate((part for part in MENTIONED if part in call), 10):
        call = call.replace(part, b"h" + bytes([memo]))
        head += part + b"q" + bytes([memo])
    return with_large(kind, call, head)


# Other formats, each input a file


def opened(folder: Path, file: str) -> Read:
    """What is done with a checkpoint of which one file is the input."""

    def read(data: bytes) -> None:
        (folder / file).write_bytes(data)
        checkpoint = ucp.open(folder)
        json.dumps(inspection(checkpoint))
        for _ in checkpoint.verify():
            pass

    return read


def one_file(path: Path) -> Read:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        json.dumps(inspection(ucp.open(path)))

    return read


def zip_file(members: list[tuple[bytes, bytes]], extra: int = 0) -> bytes:
    """A zip file of stored members with extra fields of so many bytes."""
    field = struct.pack("<2H", 0x4246, extra) + bytes(extra) if extra else b""
    return b"".join(map(bytes, inputs.zip_records(members, extra=field)))


ONE_TENSOR = inputs.pickled({"w": inputs.tensor("0", (2,))})


def members(size: int, title: int = 8) -> list[tuple[bytes, bytes]]:
    others = [(b"a/data/%0*d" % (title, i), b"") for i in range(1, size // (76 + 2 * title))]
    return [(b"a/data.pkl", ONE_TENSOR), (b"a/data/0", bytes(8)), *others]


def among_many(size: int) -> bytes:
    return zip_file([*members(size // 2), (b"a/" + b"x" * min(size // 4, 60_000), b"")])


def named_again(size: int) -> bytes:
    tree = inputs.pickled([inputs.tensor("0", (2,))] * (size // 120))
    return zip_file([(b"a/data.pkl", tree), (b"a/data/0", bytes(8))])


ZIPS: dict[str, Make] = {
    "empty members": lambda size: zip_file(members(size)),
    "a long name among many": among_many,
    "long names": lambda size: zip_file(members(size, 5_000)),
    "extra fields": lambda size: zip_file(members(size // 20), 1_000),
    "a storage named again and again": named_again,
}

EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
HEADERS: dict[str, Make] = {
    "tensors": counted('"w%(i)06d":' + EMPTY, "{", "}"),
    "dotted names": counted(f'"{"a." * 60}%(i)06d":{EMPTY}', "{", "}"),
    "layers": counted(f'"m.layers.%(i)d.w":{EMPTY}', "{", "}"),
    "metadata": counted('"k%(i)06d":"v"', '{"__metadata__":{', f'}},"w":{EMPTY}}}'),
    "spaces": lambda size: b'{"w":' + EMPTY.encode() + b" " * size + b"}",
    "axes": lambda size: b'{"w":{"dtype":"F32","shape":[' + b"1," * (size // 2) + b"0]}}",
}

JSON_VALUES: dict[str, Make] = {
    "digits": lambda size: b"1" * size,
    "digits of a fraction": lambda size: b"0." + b"7" * size,
    "an exponent": lambda size: b"1e" + b"9" * size,
    "a text": lambda size: b'"' + b"a" * size + b'"',
    "escapes": repeated(b"\\u00e9", b'"', b'"'),
    "surrogates": repeated(b"\\ud83d\\ude00", b'"', b'"'),
    "letters": lambda size: b'"' + "\u00e9".encode() * (size // 2) + b'"',
    "one wide letter": lambda size: b'"' + b"a" * size + "\U0001f600".encode() + b'"',
    "nested": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "nested a little": repeated(b"[" * 90 + b"]" * 90 + b",", b"[", b"0]"),
    "unclosed": lambda size: b"[" * size,
    "names": counted('"%(i)05d":0', "{", "}"),
    "one name": repeated(b'"a":0,', b"{", b'"b":1}'),
}
for unit in (b"{},", b"[],", b"0,", b'"",', b"null,", b"1e9,", b'{"a":1},', b"-1.5,", b"NaN,"):
    JSON_VALUES[f"list of {unit.decode()}"] = repeated(unit, b"[", b"0]")


def in_an_object(make: Make) -> Make:
    return lambda size: b'{"model_type": "llama", "x": ' + make(size) + b"}"


PACKED = {
    "maps": b"\x80", "lists": b"\x90", "nothing": b"\xc0", "numbers": b"\x01", "texts": b"\xa1a",
    "empty texts": b"\xa0", "bytes": b"\xc4\x00", "tuples": b"\xc7\x01\x04\x90",
    "complex": b"\xc7\x03\x02\x92\x00\x00", "arrays": b"\xc7\x0b\x01\x93\x91\x00\xa5int32\xc4\x00",
    "scalars": b"\xc7\x0a\x03\x93\x90\xa4int8\xc4\x01a",
}  # fmt: skip


def packed_list(unit: bytes) -> Make:
    def make(size: int) -> bytes:
        count = size // len(unit)
        return b"\x81\xa6params\xdd" + count.to_bytes(4, "big") + unit * count

    return make


def packed_names(size: int) -> bytes:
    keys = [b"\xa6%06d\xc0" % i for i in range(size // 8)]
    return b"\x81\xa6params\xdf" + len(keys).to_bytes(4, "big") + b"".join(keys)


def packed_axes(size: int) -> bytes:
    shape = b"\xdd" + (size // 2).to_bytes(4, "big") + b"\x01" * (size // 2)
    body = b"\x93" + shape + b"\xa5int32\xc4\x00"
    return b"\x81\xa1a\xc9" + len(body).to_bytes(4, "big") + b"\x01" + body


MSGPACK: dict[str, Make] = {title: packed_list(unit) for title, unit in PACKED.items()}
MSGPACK["deep"] = lambda size: b"\x81\xa1a" * (size // 3)
MSGPACK |= {"names": packed_names, "axes": packed_axes}


def gguf(
    values: Callable[[int], dict[str, Any]] = lambda size: {},
    tensors: Callable[[int], list[Tensor]] = lambda size: [],
) -> Make:
    head = {"general.architecture": ("str", "llama")}
    return lambda size: Written({**head, **values(size)}, tensors(size)).data()


GGUF = {
    "tensors": gguf(tensors=lambda n: [Tensor(f"t{i:05}", [0], 0, b"", 0) for i in range(n // 42)]),
    "keys": gguf(lambda size: {f"k{i:05}": ("u8", 1) for i in range(size // 19)}),
    "texts": gguf(lambda size: {"x": (["str"], [""] * (size // 8))}),
    "numbers": gguf(lambda size: {"x": (["u8"], [1] * size)}),
    "booleans": gguf(lambda size: {"x": (["bool"], [True] * size)}),
    "a text": gguf(lambda size: {"x": ("str", "a" * size)}),
    "a name": gguf(lambda size: {"a" * size: ("u8", 1)}),
}


def dcp(rows: int) -> bytes:
    """A table of a tensor in so many chunks."""
    files = {f"w{i}": ("__0_0.distcp", i, 1) for i in range(rows)}
    files["epoch"] = "__0_0.distcp", 0, 1
    return inputs.pickled(inputs.dcp_metadata(files, (rows, 3), (1,) * rows))


DCP: dict[str, Make] = {"chunks": lambda size: dcp(size // 300 + 1), "few": lambda size: dcp(2)}


def nothing(name: str, *path: str) -> dict[str, Any]:
    return {"path": [*path, name], "name": name, "kind": "none"}


def universal_inputs(folder: Path) -> dict[str, Make]:
    """A `ucp.json` of the checkpoint in a folder, with more in one of its tables."""
    content = json.loads((folder / "ucp.json").read_bytes())
    mesh = {"axis_names": ["x"], "axis_sizes": [1], "spec": ["x"], "device_ids": [0]}
    deep = json.loads("[" * 300 + "0" + "]" * 300)
    array, stored = next(iter(content["arrays"].items()))

    def of(key: str, change: Callable[[int], Any]) -> Make:
        def make(size: int) -> bytes:
            old, new = content[key], change(size)
            changed = {**content, key: old + new if isinstance(old, list) else {**old, **new}}
            text = json.dumps(changed | {"digest": ""}, separators=(",", ":"))
            return sealed(text.encode())

        return make

    return {
        "leaves": of("leaves", lambda size: [nothing(f"n{i}") for i in range(size // 45)]),
        "shardings": of("shardings", lambda size: [mesh] * (size // 70)),
        "extras": of("extras", lambda size: {"a": {"b": [[]] * (size // 3)}}),
        "deep": of("extras", lambda size: {"a": {"b": [deep] * (size // 600)}}),
        "digests": of(
            "arrays", lambda size: {array: stored | {"digests": ["0" * 16] * (size // 19)}}
        ),
        "paths": of("leaves", lambda n: [nothing(f"n{i}", *["d"] * 200) for i in range(n // 850)]),
    }


def stock_inputs(file: Path) -> dict[str, Make]:
    content = json.loads(file.read_bytes())
    value = {"value_type": "None", "skip_deserialize": True}

    def entry(name: str) -> dict[str, Any]:
        return {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value}

    def entries(size: int) -> bytes:
        made = {f"n{i}": entry(f"n{i}") for i in range(size // len(json.dumps(entry("?"))))}
        return json.dumps({**content, "tree_metadata": content["tree_metadata"] | made}).encode()

    return {"entries": entries}


# Texts of people: mappings, specs, patterns

YAML_ATOMS = (
    b"- param: a\n  leaf: b\n", b"  ", b"- ", b"? ", b"a: ", b"a: 1\n", b"[", b"{", b"]", b"}", b",", b'"',
    b"'", b"\n", b"#x\n", b"|\n", b">\n", b"&a ", b"*a", b"!!int ", b"1:1", b"%", b"{a}", b"{a}.", b"x",
    b"\\u00e9", b"~", b"---\n", b"...\n", b"\t", b"sizes:\n", b"a*",
)  # fmt: skip


def yaml_inputs(section: str) -> dict[str, Make]:
    def placeholders(size: int) -> bytes:
        many = "{a}." * (size // 8)
        return f'{section}:\n- param: "{many}w"\n  leaf: "{many}w"\n'.encode()

    def axes(size: int) -> bytes:
        deep = "(a + " * (size // 8) + "b" + ")" * (size // 8)
        return f'{section}:\n- param: w\n  axes: "{deep}"\n'.encode()

    def sums(size: int) -> bytes:
        lines = (b"  s%d: %sa\n" % (i, b"a + " * 2_000) for i in range(size // 8_000))
        return b"sizes:\n" + b"".join(lines)

    rule = "- param: a{i}.b%(i)05d\n  leaf: x{i}.b%(i)05d"
    return {
        **{repr(atom): repeated(atom) for atom in YAML_ATOMS},
        "sizes": lines("  s%(i)05d: 1", "sizes:\n", "\n"),
        "sizes of sizes": lines("  s%(i)05d: s%(last)05d", "sizes:\n", "\n"),
        "a product": lambda size: b"sizes:\n  a: 2\n  b: " + b"a*" * (size // 2) + b"a\n",
        "sums": sums,
        "rules": lines(rule, f"{section}:\n", "\n"),
        "placeholders": placeholders,
        "axes": axes,
        "long texts": repeated(b"- " + b"1:" * 4_900 + b"1\n"),
    }


def match_patterns(data: bytes) -> None:
    patterns = NamePatterns(data.decode().split("\n"), "the input")
    for i in range(len(data) // 16):
        patterns.matching(f"layers.{i}.weight")


def dots(size: int) -> bytes:
    made = [f"{i:016b}".replace("1", ".").replace("0", "l") for i in range(size // 17 + 1)]
    return "\n".join(made).encode()


PATTERNS: dict[str, Make] = {
    "many": lines(r"layers\.%(i)d\.weight"),
    "whole names": lines(r"^layers\.%(i)d\.weight$"),
    "ends of names": lines(r"(.*\.)?(%(i)d.weight)$"),
    "numbers": lines(r"layers\.\d+%(i)d"),
    "dots anywhere": dots,
    "states": lines(r"(.*[al]){9}%(i)d"),
    "empty steps": lines(r"(\w*){300}%(i)d"),
    "repetitions": lines(r"(\w|.){1,900}%(i)d"),
    "alternatives": lambda size: b"|".join([b"a"] * 400 + [b""]) + b"\na" * (size // 2),
}


def mapped(folder: Path) -> Read:
    """Names that a mapping's placeholders could part in many ways."""

    def read(data: bytes) -> None:
        (folder / "m.safetensors").write_bytes(file_of(data))
        for pattern in ("{a}.{b}.{c}.{d}.w", "{a}{b}x"):
            rule = {"param": pattern, "leaf": pattern}
            ucp.open(folder / "m.safetensors").map(Mapping.from_dict({"leaves": [rule]}))

    return read


def file_names(folder: Path) -> Read:
    """A folder with a file for each line: names of ranks, layers and steps."""

    def read(data: bytes) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for line in dict.fromkeys(data.decode().split("\n")):
            (folder / line).touch()
        ucp.open(folder)

    return read


FILE_NAMES: dict[str, Make] = {
    "ranks of ZeRO": lines("bf16_zero_pp_rank_%(i)d_mp_rank_00_optim_states.pt"),
    "ranks": lines("mp_rank_%(i)02d_model_states.pt"),
    "layers": lines("layer_%(i)02d-model_00-model_states.pt"),
    "experts": lines("layer_0_expert_%(i)d_mp_rank_00_model_states.pt"),
    "shards": lines("model-%(i)05d-of-99999.safetensors"),
    "parts of shards": lines("shard-%(i)05d-model-00001-of-00001.safetensors"),
    "ranks of FSDP": lines("model_world_size_9999_rank_%(i)d.pt"),
    "steps": lines("checkpoint_%(i)d"),
    "iterations": lines("iter_%(i)07d"),
    "rank metadata": lines("__%(i)d.metadata"),
    "digits": lines("%(i)d" + "9" * 150),
    "dashes": lines("-" * 150 + "%(i)d.safetensors"),
}


def families(work: Path, wanted: Sequence[str] = ()) -> dict[str, Family]:
    """The parsers that are wanted, or every one, with inputs; files lie in `work`."""

    def folder(title: str, file: str = "", data: bytes = b"") -> Path:
        (work / title).mkdir()
        if file:
            (work / title / file).write_bytes(data)
        return work / title

    weights = file_of(f'{{"w":{EMPTY}}}'.encode())
    ours = saved(work / "ours", {"a": [1.0, 2.0]})
    stock = Path(shutil.copytree(STOCK / "plain", work / "stock"))
    zarr = min(stock.rglob(".zarray")).relative_to(stock)
    index = folder("index", "model.safetensors", weights)
    (index / "config.json").write_text("{}")
    names = counted('"w%(i)05d":"model.safetensors"', '{"weight_map":{', "}}")
    objects = {title: in_an_object(make) for title, make in JSON_VALUES.items()}
    headers = {t: lambda size, m=make: file_of(m(size)) for t, make in HEADERS.items()}
    config = opened(folder("config", "model.safetensors", weights), "config.json")
    adapter = folder("adapter", "adapter_model.safetensors", weights)
    table = opened(folder("dcp", "__0_0.distcp", bytes(1 << 20)), ".metadata")
    found = {
        "zip": Family(one_file(work / "x.pt"), ZIPS),
        "safetensors": Family(one_file(work / "x.safetensors"), headers),
        "json": Family(config, objects),
        "adapter": Family(opened(adapter, "adapter_config.json"), objects),
        "index": Family(opened(index, "model.safetensors.index.json"), {"names": names}),
        "msgpack": Family(one_file(work / "x.msgpack"), MSGPACK),
        "gguf": Family(one_file(work / "x.gguf"), GGUF),
        "dcp": Family(table, DCP),
        "universal": Family(opened(ours, "ucp.json"), universal_inputs(ours)),
        "orbax": Family(opened(stock, "_METADATA"), stock_inputs(stock / "_METADATA")),
        "zarr": Family(opened(stock, str(zarr)), objects),
        "mappings": Family(lambda data: Mapping.parse(data.decode()), yaml_inputs("leaves")),
        "specs": Family(lambda data: parse(data.decode()), yaml_inputs("shards")),
        "patterns": Family(match_patterns, PATTERNS),
        "mapped names": Family(mapped(folder("mapped")), HEADERS),
        "file names": Family(file_names(work / "names"), FILE_NAMES),
    }
    # found by trying thousands of pickles
    for title, find in {"opcodes": opcode_inputs, "constructors": constructor_inputs}.items():
        if title in wanted or not wanted:
            found = {title: Family(read_pickle, find()), **found}
    return found


# Measuring


def trimmed() -> None:
    """Give memory back that is free, so that what is asked for next can be seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return int(line.split()[1]) << 10


def cost(read: Read, data: bytes) -> Cost:
    """What reading takes. Raises whatever is not an error of ours, with the input's number."""
    trimmed()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, begin = _status("VmRSS"), time.process_time()
    with suppress(UCPError):
        read(data)
    return Cost(time.process_time() - begin, max(0, _status("VmHWM") - before))


def fault(family: Family, make: Make) -> str | None:
    """What is wrong with the growth of an input's cost, measured several times; None if it is as
    that of its bytes.
    """
    found = None
    small_input, large_input = map(make, SIZES)
    for _ in range(TRIES):
        large = cost(family.read, large_input)
        found = _verdict(Cost(0, 0), large, len(small_input), len(large_input))
        if found is not None:
            small = cost(family.read, small_input)
            found = _verdict(small, large, len(small_input), len(large_input))
        if found is None:
            return None
    return found


def _verdict(small: Cost, large: Cost, small_bytes: int, large_bytes: int) -> str | None:
    times = large_bytes / small_bytes * GROWTH
    said = (
        f"{small_bytes} bytes: {small.seconds:.2f} s, {small.memory >> 20} MiB;"
        f" {large_bytes} bytes: {large.seconds:.2f} s, {large.memory >> 20} MiB"
    )
    if large.seconds > ANY_SECONDS + SECONDS_PER_BYTE * large_bytes:
        return f"too slow: {said}"
    if large.memory > ANY_MEMORY + MEMORY_PER_BYTE * large_bytes:
        return f"too large: {said}"
    if large.seconds > times * max(LEAST_SECONDS, small.seconds):
        return f"time grows faster than the bytes: {said}"
    if large.memory > times * max(LEAST_MEMORY, small.memory):
        return f"memory grows faster than the bytes: {said}"
    return None


def run(names: list[str], seed: int = 0, sample: int = 0) -> int:
    """Measure, print what fails, and return how many inputs did."""
    faults = measured = 0
    with tempfile.TemporaryDirectory() as work:
        known = families(Path(work), names)
        ucp.open(Path(work) / "ours")
        fuzz.limit_memory(MEMORY_BYTES)
        for title in names or known:
            family = known[title]
            chosen = family.inputs
            if 0 < sample < len(chosen):
                chosen = {kind: chosen[kind] for kind in Random(seed).sample([*chosen], sample)}
            begin = time.monotonic()
            for kind, make in chosen.items():
                measured += 1
                try:
                    said = fault(family, make)
                except Exception as error:
                    said = f"{type(error).__name__}: {error!s:.200}"
                if said:
                    faults += 1
                    print(f"{title}: {kind:.200}: {said}", flush=True)
            seconds = time.monotonic() - begin
            print(f"{title:14} {len(chosen):>6} inputs, {seconds:.0f} s", flush=True)
    print(f"{measured} inputs, {faults} faults")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="so many inputs of each parser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", default=[])
    said = parser.parse_args()
    return 1 if run(said.family, said.seed, said.sample) else 0


if __name__ == "__main__":
    sys.exit(main())
