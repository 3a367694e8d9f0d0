"""Hostile inputs, each made from a random generator alone: pickles, zip files, headers, tables of
contents.

They keep the structure of what they imitate. Noise is refused at the first byte; what finds faults
is a file that is right but for one thing: an opcode, a field of a zip header, a value in a JSON
text.
"""

from __future__ import annotations

import json
import math
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import google_crc32c
import msgpack
import yaml

from gguf_writer import Tensor, Written
from hostile.files import sealed
from jax_ucp.codecs.tensor_names import NAMES
from safetensors_writer import file_of

# A name that must never be called; `fuzz.py` puts a module there that takes note if it is.
TRAP = "ucp_trap.spring"
DANGEROUS = (
    TRAP, "os.system", "builtins.eval", "builtins.exec", "__builtin__.eval", "builtins.__import__", "io.open",
    "subprocess.Popen", "importlib.import_module", "pickle.loads", "operator.attrgetter", "numpy.load",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 65_535, 65_536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
    1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 70,
    -(1 << 63), 1 << 4000,
)  # fmt: skip
TEXTS = (
    "", ".", "..", "../x", "/etc/passwd", "\0", "a\0b", "a/b", "x" * 3000, "\ud800", "é", "0", "weight",
    "torch", "a/../../x", "a//b", "./a", "a\\..\\x", "%2e%2e", "ucp.json", "_METADATA", "zarr.json",
    "ucp.pack_0", r"(\w|.)+!", "(a*)*b", "(?=a)", "[/a]", "\x1b]52;c;eA==\x07", "\u202etxt", "a\nb",
    "!array", "float32", "object",
)  # fmt: skip


# Pickles, assembled by hand: nothing here is called either.


@dataclass(frozen=True, eq=False)
class Global:
    dotted: str


@dataclass(frozen=True, eq=False)
class Made:
    """An instance of a class, or with `call` what a function returns; `state` is left out where
    it is None.
    """

    dotted: str
    state: Any = None
    args: tuple[Any, ...] = ()
    call: bool = False


@dataclass(frozen=True, eq=False)
class Persistent:
    id: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Pairs:
    """A dict whose keys need not be hashable here."""

    items: Sequence[tuple[Any, Any]]


def pickled(value: Any) -> bytes:
    """The value as a pickle of protocol 2."""
    return b"\x80\x02" + opcodes(value) + b"."


def opcodes(value: Any) -> bytes:
    match value:
        case Global(dotted):
            module, _, name = dotted.rpartition(".")
            return f"c{module}\n{name}\n".encode("utf-8", "surrogatepass")
        case Made(dotted, state, args, call):
            made = opcodes(Global(dotted)) + opcodes(args) + (b"R" if call else b"\x81")
            return made if state is None else made + opcodes(state) + b"b"
        case Persistent(id):
            return opcodes(id) + b"Q"
        case Pairs(items):
            return b"}(" + b"".join(opcodes(k) + opcodes(v) for k, v in items) + b"u"
        case dict():
            return opcodes(Pairs(list(value.items())))
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case _:
            return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def tensor(key: str, shape: tuple[int, ...], kind: str = "torch.FloatStorage") -> Made:
    """A tensor over the whole of storage `key`."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    stored = Persistent(("storage", Global(kind), key, "cpu", math.prod(shape)))
    args = stored, 0, shape, strides, False, Made("collections.OrderedDict", call=True)
    return Made("torch._utils._rebuild_tensor_v2", None, args, call=True)


def spoilt(rng: Random, value: Any) -> Any:
    """The value with one thing changed, somewhere inside it."""
    match value:
        case Made(state=state, args=args):
            what = rng.random()
            if what < 0.1:
                return replace(value, dotted=rng.choice([*DANGEROUS, *NAMES]))
            if args and (state is None or what < 0.3):
                return replace(value, args=_spoilt_tuple(rng, args))
            return replace(value, state=spoilt(rng, state))
        case Persistent(id):
            return Persistent(_spoilt_tuple(rng, id))
        case Global():
            return Global(rng.choice([*DANGEROUS, *NAMES, "torch.Nothing"]))
        case dict():
            return _spoilt_pairs(rng, list(value.items()), dict)
        case Pairs(items):
            return _spoilt_pairs(rng, list(items), Pairs)
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        items = list(value)
        at = rng.randrange(len(items))
        items[at : at + 1] = rng.choice([[], [items[at]] * 2, *[[spoilt(rng, items[at])]] * 8])
        return type(value)(items)
    return _another(rng, value)


def _spoilt_tuple(rng: Random, value: tuple[Any, ...]) -> tuple[Any, ...]:
    changed = spoilt(rng, value)
    return changed if isinstance(changed, tuple) else (changed,)


def _spoilt_pairs(rng: Random, items: list[tuple[Any, Any]], kind: Callable[[Any], Any]) -> Any:
    if not items or rng.random() < 0.05:
        return _another(rng, dict(items) if kind is dict else None)
    at, other = rng.randrange(len(items)), rng.randrange(len(items))
    (key, value), way = items[at], rng.random()
    if way < 0.1:
        del items[at]
    elif way < 0.2:
        items[at], items[other] = (key, items[other][1]), (items[other][0], value)
    elif way < 0.3:
        new = spoilt(rng, key)
        items[at] = (new if kind is Pairs or isinstance(new, str | int | float) else "key"), value
    else:
        items[at] = key, spoilt(rng, value)
    return kind(items)


def _another(rng: Random, value: Any) -> Any:
    """Something else in the place of a value: near to it, or of another kind."""
    if type(value) is int and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, -value, value * 2, *NUMBERS])
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice([value + "x", value[:-1], value.upper(), *TEXTS])
    deep: Any = []
    for _ in range(rng.choice([1, 3, 150])):
        deep = [deep]
    alone = [None, True, 0.5, math.nan, math.inf, -1, "text", [], {}]
    return rng.choice([*alone, [value], [value] * 300, deep])


def mutated_pickle(rng: Random, data: bytes) -> bytes:
    """A pickle with some opcodes removed, repeated, exchanged, or given another argument."""
    starts = [at for _, _, at in pickletools.genops(data)]
    codes = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, other, way = rng.randrange(len(codes)), rng.randrange(len(codes)), rng.random()
        if way < 0.1:
            codes[at] = b""
        elif way < 0.2:
            codes[at] *= rng.choice([2, 3, 50])
        elif way < 0.35:
            codes[at], codes[other] = codes[other], codes[at]
        elif way < 0.45:
            codes[at] = codes[other]
        elif way < 0.6:
            codes[at] = opcode(rng)
        else:
            codes[at] = _other_argument(rng, codes[at])
    return b"".join(codes)


def _other_argument(rng: Random, code: bytes) -> bytes:
    """An opcode of the same kind with another argument, or a value of another kind."""
    if rng.random() < 0.3:
        others = [None, True, 0.5, math.nan, "text", b"raw", (), [], {}, [1], {"a": 1}, ("x",)]
        return opcodes(rng.choice(others))
    match code[:1]:
        case b"K" | b"M" | b"J" | b"\x8a":
            return opcodes(rng.choice(NUMBERS))
        case b"X" | b"\x8c":
            return opcodes(rng.choice(TEXTS))
        case b"c":
            return opcodes(Global(rng.choice([*DANGEROUS, *NAMES])))
    if len(code) > 1:
        at = rng.randrange(1, len(code))
        return code[:at] + bytes([code[at] ^ 1 << rng.randrange(8)]) + code[at + 1 :]
    return opcode(rng)


# Every way there is to call something.
CALLS = [
    opcodes(Made(TRAP, None, ("x",), True)), opcodes(Made(TRAP)), opcodes(Made(TRAP, {"a": 1}, (), True)),
    b"\x8c\x08ucp_trap\x8c\x06spring\x93)R", b"(iucp_trap\nspring\n", b"(cucp_trap\nspring\no",
    b"cucp_trap\nspring\n)}\x92", b"ccollections\ndefaultdict\ncucp_trap\nspring\n\x85R",
    b"c__builtin__\ngetattr\ncucp_trap\nspring\nX\x08\0\0\0__call__\x86R)R",
]  # fmt: skip
_MAKERS = [b"R", b"\x81", b"b", b"o", b"\x93", b"Q", b"\x92", b")", b"\x85", b"\x86", b"(", b"t"]
_ALL = [op for op in pickletools.opcodes if op.name != "STOP"]
_WIDTHS = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}
# What an opcode leaves on the stack, less what it takes; of others it is 1.
_DEPTH = {b"R": -1, b"\x81": -1, b"b": -1, b"\x93": -1, b"\x86": -1, b"s": -2, b"a": -1}


def opcode(rng: Random) -> bytes:
    """Any opcode of any protocol with some argument, mostly those that make objects and calls."""
    often = rng.random()
    if often < 0.05:
        return rng.choice(CALLS)
    if often < 0.25:
        return opcodes(Global(rng.choice([*DANGEROUS, *NAMES])))
    if often < 0.5:
        return rng.choice(_MAKERS)
    if often < 0.6:
        return opcodes(rng.choice([*NUMBERS, *TEXTS, *DANGEROUS]))
    op = rng.choice(_ALL)
    code = op.code.encode("latin1")
    if op.arg is None:
        return code
    if op.arg.name in _WIDTHS:
        return code + rng.randbytes(_WIDTHS[op.arg.name])
    if op.arg.n < 0 and op.arg.name.endswith(("nl", "pair")):
        return code + rng.choice([b"os\nsystem\n", b"1\n", b"'x'\n", b"ucp_trap\nspring\n"])
    width = 4 if op.arg.name.endswith("4") else 8 if op.arg.name.endswith("8") else 1
    body = rng.randbytes(rng.randrange(6))
    claimed = len(body) if rng.random() < 0.8 else rng.choice(NUMBERS) % (1 << 8 * width)
    return code + claimed.to_bytes(width, "little") + body


def program(rng: Random) -> bytes:
    """A pickle made of opcodes drawn one by one; most of them find what they need on the stack."""
    body, depth = b"", 0
    for _ in range(rng.randrange(1, 60)):
        while depth < 2:
            body += opcodes(rng.choice([1, "a", None, 0.5, (), [], {}, "os", "system"]))
            depth += 1
        code = opcode(rng)
        body += code
        depth += _DEPTH.get(code[:1], 1)
    return b"\x80" + bytes([rng.choice([2, 2, 3, 4, 5])]) + body + b"."


_CHEAP = [b"N", b"]", b"}", b"\x8f", b")", b"N\x94", b"]\x94", b"\x8f\x94", b"K\x00", b"N\x85"]
_CHEAP += [b"C\x00", b"h\x00", b"h\x00h\x00\x86"]
_AROUND = [
    (b"](", b"e"), (b"(", b"t"), (b"}(", b"u"), (b"\x8f(", b"\x90"), (b"(", b"\x91"), (b"", b""),
]  # fmt: skip


def bomb(rng: Random, nbytes: int) -> bytes:
    """A cheap opcode, or a few, repeated: what costs most for each byte of the file."""
    unit = rng.choice([*_CHEAP, bytes(rng.choices(b"N]})(\x8f\x94\x85\x86\x87at", k=4))])
    start, end = rng.choice(_AROUND)
    return b"\x80\x04]q\x00" + start + unit * (nbytes // len(unit)) + end + b"\x86."


# Zip files: every field of every header by itself, so that any one of them can lie.


@dataclass
class Header:
    """A record of a zip file: fields of the widths in `form`."""

    form: str
    fields: list[int]

    def __bytes__(self) -> bytes:
        return struct.pack(f"<{self.form}", *self.fields)


def zip_records(
    members: Sequence[tuple[str | bytes, bytes]],
    wide: bool = False,
    deflated: bool = False,
    extra: bytes = b"",
) -> list[Header | bytes]:
    """A zip file as torch writes them; `wide` with 64-bit lengths, members with an `extra`."""
    local, central, at = list[Header | bytes](), list[Header | bytes](), 0
    for name, data in members:
        raw = zlib.compress(data, 9)[2:-4] if deflated else data
        method, crc, sizes = 8 if deflated else 0, zlib.crc32(data), [len(raw), len(data)]
        near, far, where = extra, b"", at
        if wide:
            near, sizes = struct.pack("<HHQQ", 1, 16, len(data), len(raw)), [0xFFFFFFFF] * 2
            far, where = b"\1\0\x18\0" + near[4:] + struct.pack("<Q", at), 0xFFFFFFFF
        title = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
        same = [0, method, 0, 0, crc, *sizes, len(title)]
        start = Header("LHHHHHLLLHH", [0x04034B50, 45, *same, len(near)])
        entry = [0x02014B50, 45, 45, *same, len(far), 0, 0, 0, 0, where]
        local += [start, title + near, raw]
        central += [Header("LHHHHHHLLLHHHHHLL", entry), title + far]
        at += len(bytes(start)) + len(title + near) + len(raw)
    length, count = sum(len(bytes(record)) for record in central), len(members)
    records = [*local, *central]
    if wide:
        records += [Header("LQHHLLQQQQ", [0x06064B50, 44, 45, 45, 0, 0, count, count, length, at])]
        records += [Header("LLQL", [0x07064B50, 0, at + length, 1])]
    counts = [min(count, 0xFFFE)] * 2
    return [*records, Header("LHHHHLLH", [0x06054B50, 0, 0, *counts, length, at, 0])]


def zip_file(rng: Random, members: Sequence[tuple[str, bytes]], lies: int) -> bytes:
    """A zip file as torch writes them, or as other tools do, in which `lies` fields are wrong."""
    records = zip_records(members, wide=rng.random() < 0.3, deflated=rng.random() < 0.2)
    headers = [record for record in records if isinstance(record, Header)]
    end = headers[-1].fields[5] + headers[-1].fields[6]
    for _ in range(lies):
        header = rng.choice(headers)
        at = rng.randrange(len(header.fields))
        value, bits = header.fields[at], 8 * struct.calcsize(f"<{header.form[at]}")
        others = [value + 1, value - 1, rng.randrange(end + 1), *NUMBERS]
        header.fields[at] = rng.choice(others) % (1 << bits)
    return b"".join(map(bytes, records))


def noise(rng: Random, data: bytes) -> bytes:
    """Bytes flipped, cut off, added, zeroed or copied over others."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, length, way = rng.randrange(len(out) + 1), rng.choice([1, 4, 8, 64, 1000]), rng.random()
        if way < 0.5 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif way < 0.6:
            del out[at:]
        elif way < 0.7:
            del out[at : at + length]
        elif way < 0.8:
            out[at:at] = rng.randbytes(length)
        elif way < 0.9:
            out[at : at + length] = bytes(length)
        else:
            start = rng.randrange(len(out) + 1)
            out[at : at + length] = out[start : start + length]
    return bytes(out)


# safetensors: headers, indexes, configs, and what other libraries write in them.

HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [34, 34]},
}
INDEX = {
    "metadata": {"total_size": 34},
    "weight_map": dict.fromkeys(("a.weight", "b"), "model.safetensors"),
}
CONFIG = {
    "model_type": "toy",
    "transformers_weights": "model.safetensors",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
}
TWICE = b',"b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}}'


def json_text(value: Any, **more: Any) -> bytes:
    return json.dumps(value, **more).encode("utf-8", "surrogatepass")


def safetensors_file(rng: Random) -> bytes:
    """Two tensors and metadata, whose header may lie, be no JSON, or have another length."""
    header: Any = HEADER
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        header = spoilt(rng, header)
    text = json_text(header, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.15:
        numbers = b"2" + b"4" * 5000, b"24.0", b"1e999", b"-0"
        others = [b"[" * 50_000, b'{"a":' * 20_000, text[:-1] + TWICE, text + b" " * 1000]
        others += [noise(rng, text), *(text.replace(b"24", number) for number in numbers)]
        text = rng.choice(others)
    length = None
    if rng.random() > 0.9:
        length = rng.choice([len(text) + 1, len(text) - 1, *NUMBERS]) % (1 << 64)
    data = bytes(range(34)) if rng.random() < 0.9 else rng.randbytes(rng.choice([0, 33, 35]))
    return file_of(text, data, length)


def safetensors_index(rng: Random) -> bytes:
    text = json_text(spoilt(rng, INDEX) if rng.random() < 0.8 else INDEX)
    return text if rng.random() < 0.9 else noise(rng, text)


def weights_config(rng: Random) -> bytes:
    return json_text(spoilt(rng, spoilt(rng, CONFIG)))


_MOST_JSON = 1 << 20  # copies of copies of everything are beyond


def quantized_files(rng: Random, file: bytes, config: bytes) -> tuple[bytes, bytes]:
    """A file of quantised weights and the config beside it, one of which is spoilt: the header with
    what it says of single weights, the settings of the quantisation, or bytes of parts.
    """
    way = rng.random()
    if way < 0.4:
        said = json.loads(config)
        said["quantization_config"] = spoilt(rng, spoilt(rng, said["quantization_config"]))
        return file, _text(said, config)
    return _spoilt_file(rng, file, way < 0.8), config


def adapter_files(rng: Random, file: bytes, config: bytes) -> tuple[bytes, bytes]:
    """An adapter's file and its config, one of which is spoilt."""
    way = rng.random()
    if way < 0.5:
        said = json.loads(config)
        for _ in range(rng.choice([1, 1, 2])):
            said = spoilt(rng, said)
        return file, _text(said, config)
    return _spoilt_file(rng, file, way < 0.9), config


def _text(said: Any, otherwise: bytes) -> bytes:
    text = json_text(said)
    return text if len(text) < _MOST_JSON else otherwise


def _spoilt_file(rng: Random, file: bytes, in_header: bool) -> bytes:
    """A file of safetensors, whose header lies, or whose data has other bytes."""
    start = 8 + int.from_bytes(file[:8], "little")
    if not in_header:
        data = bytearray(file)
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(start, len(data))] = rng.choice([0, 127, 128, 255])
        return bytes(data)
    header = json.loads(file[8:start])
    name = rng.choice(sorted(header))
    entry = header[name]
    if all(isinstance(item, str) for item in entry.values()):  # of metadata, texts that are JSON
        entry = {key: json.loads(x) if x[:1] in "{[" else x for key, x in entry.items()}
    entry = spoilt(rng, entry)
    header |= {name: entry} | ({rng.choice(sorted(header)): entry} if rng.random() < 0.3 else {})
    if isinstance(entry, dict) and name == "__metadata__":
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in entry.items()}
        header[name] = texts
    return file_of(_text(header, b"{}"), file[start:])


# GGUF

SMALL = [n for n in NUMBERS if -(1 << 63) <= n < 1 << 63]
COUNTS = [n for n in SMALL if n >= 0]
GGUF_VALUES: dict[str, tuple[Any, Any]] = {
    "general.architecture": ("str", "llama"), "general.file_type": ("u32", 2),
    "llama.block_count": ("u32", 1), "llama.embedding_length": ("u32", 32),
    "llama.attention.head_count": ("u32", 2), "llama.rope.freq_base": ("f32", 1e4),
    "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
    "tokenizer.ggml.tokens": (["str"], ["a", "b"]), "tokenizer.ggml.scores": (["f32"], [0.5, 1.5]),
}  # fmt: skip


def gguf_file(rng: Random) -> bytes:
    """A file with a few keys and tensors, of which one or two things are not as they should be:
    a value or a type of a key, a tensor's name, lengths, type or offset, counts, or bytes.
    """
    tensors = [
        Tensor("token_embd.weight", [32, 2], 0, rng.randbytes(256)),
        Tensor("blk.0.attn_q.weight", [32, 4], 2, rng.randbytes(72)),
        Tensor("blk.0.ffn_up.weight", [256], 12, rng.randbytes(144)),
        Tensor("rope_freqs.weight", [8], 0, struct.pack("<8f", *[1.0] * 6, 3.0, 8.0)),
    ]
    values = dict(GGUF_VALUES)
    written = Written(values, tensors, rng.choice([2, 3, 3, 3]))
    for _ in range(rng.choice([0, 1, 1, 2])):
        tensor = rng.choice(tensors)
        match rng.randrange(6):
            case 0:
                added = "general.alignment", "split.count", "llama.expert_count"
                key, integer = rng.choice([*values, *added]), rng.choice(COUNTS)
                text = rng.choice(TEXTS)
                number = rng.choice([math.nan, math.inf, -5.0, 1e300])
                others = ("u64", integer), ("str", text), (["i64"], [integer]), ("f64", number)
                values[key] = rng.choice(others)
            case 1:
                tensor.name = rng.choice([*TEXTS, tensors[0].name])
            case 2:
                tensor.lengths = rng.sample([*tensor.lengths, *SMALL], rng.randrange(1, 6))
            case 3:
                tensor.type = rng.choice([*range(42), 1 << 31])
            case 4:
                tensor.offset = rng.choice([*COUNTS, 32, 64, 288])
            case _:
                written.counts = rng.choice(SMALL), rng.choice([*SMALL, len(values)])
    data = written.data()
    return noise(rng, data) if rng.random() < 0.4 else data


# DCP: what `.metadata` says of the files beside it.

DCP = "torch.distributed.checkpoint."


def dcp_metadata(
    files: dict[str, tuple[str, int, int]], shape: tuple[int, int], rows: Sequence[int]
) -> Made:
    """The table of contents of a tensor `w`, cut into blocks of rows, and an object; `files` has
    what lies where.
    """

    def made(name: str, state: Any) -> Made:
        return Made(f"{DCP}{name}", state)

    def size(*n: int) -> Made:
        return Made("torch.Size", None, (n,), True)

    def entry(name: str, offset: Any, index: Any) -> tuple[Made, Made]:
        place = files[name if index is None else f"{name}{index}"]
        at = dict(zip(("relative_path", "offset", "length"), place, strict=True))
        said = {"fqn": name, "offset": offset, "index": index}
        return made("metadata.MetadataIndex", said), made("filesystem._StorageInfo", at)

    starts = [sum(rows[:i]) for i in range(len(rows))]
    spans = zip(starts, rows, strict=True)
    boxes = [{"offsets": size(a, 0), "sizes": size(n, shape[1])} for a, n in spans]
    layout = Made(f"{DCP}metadata._MEM_FORMAT_ENCODING", None, (0,), True)
    properties = Global("torch.float32"), "strided", False, layout, False
    chunks = [made("metadata.ChunkStorageMetadata", box) for box in boxes]
    about = {"properties": made("metadata.TensorProperties", properties), "size": size(*shape)}
    about["chunks"] = chunks
    epoch = made("metadata.BytesStorageMetadata", {})
    stored = [entry("w", size(a, 0), i) for i, a in enumerate(starts)]
    tables = {
        "state_dict_metadata": {"w": made("metadata.TensorStorageMetadata", about), "epoch": epoch},
        "planner_data": {"w": ("w",), "epoch": ("epoch",)},
        "storage_data": Pairs([*stored, entry("epoch", None, None)]),
        "storage_meta": None,
    }
    return made("metadata.Metadata", tables)


# What stock Orbax, Flax and we write: JSON, sealed by a digest, or in a database, and msgpack.

NO_JSON = [b"[" * 50_000, b'{"a":' * 20_000, b"[" * 900 + b"]" * 900]
NO_JSON += [b"", b"null", b"[]", b"\xff", b"1e999"]


def spoilt_json(rng: Random, data: bytes) -> bytes:
    """JSON that says something else in some places, nests deeply, or is JSON no more."""
    way = rng.random()
    if way < 0.08:
        return noise(rng, data)
    if way < 0.12:
        return rng.choice(NO_JSON)
    try:
        value = json.loads(data)
    except ValueError:  # it was spoilt before
        return noise(rng, data)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 4])):
        value = _spoilt_inside(rng, value)
    # What is not JSON is, to a reader of JSON, noise: most inputs should get further.
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":"))
    if rng.random() < 0.06:
        levels = rng.choice([90, 99, 101, 400, 900, 960])
        deep = rng.choice(["[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels])
        places = [match.span() for match in re.finditer(r'(?<=:)(\d+|"[^"\\]*"|null)', text)]
        first, last = rng.choice(places or [(0, len(text))])
        text = text[:first] + rng.choice([deep, r'"\ud800"', r'{"\udfff":1}']) + text[last:]
    return text.encode("utf-8", "surrogatepass")


def spoilt_metadata(rng: Random, data: bytes) -> bytes:
    """A `ucp.json` that says something else, with the digest of what it says."""
    data = spoilt_json(rng, data)
    bare = re.sub(rb'"digest":"[^"]*"}$', b'"digest":""}', data)
    return sealed(bare) if bare.endswith(b'""}') else data


def spoilt_msgpack(rng: Random, data: bytes) -> bytes:
    """A msgpack file of Flax that says something else in some places, also inside its arrays, or is
    none any more.
    """
    if rng.random() < 0.4:
        return noise(rng, data)
    try:
        tree = msgpack.unpackb(data, ext_hook=_opened, strict_map_key=False)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            tree = _spoilt_inside(rng, tree)
        return msgpack.packb(_closed(tree))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return noise(rng, data)


def _opened(code: int, data: bytes) -> dict[str, Any]:
    """An extension as a value that can be changed inside."""
    return {"!code": code, "inside": msgpack.unpackb(data)}


def _closed(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"!code", "inside"}:
        return msgpack.ExtType(value["!code"], msgpack.packb(_closed(value["inside"])))
    if isinstance(value, dict):
        return {key: _closed(item) for key, item in value.items()}
    return [_closed(item) for item in value] if isinstance(value, list) else value


def _spoilt_inside(rng: Random, value: Any) -> Any:
    """The value with one thing changed, in any place alike; also inside a text that is JSON, as
    in `_sharding`.
    """
    if _is_json(value):
        return spoilt_json(rng, value.encode()).decode("utf-8", "replace")
    weights = {key: _nodes(item) for key, item in _items(value)}
    if not weights or rng.random() < 1 / (1 + sum(weights.values())):
        return spoilt(rng, value)
    key = rng.choices(list(weights), list(weights.values()))[0]
    out = value.copy()
    out[key] = _spoilt_inside(rng, value[key])
    return out


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _nodes(value: Any) -> int:
    """How many values there are in a value, itself too."""
    return 20 if _is_json(value) else 1 + sum(_nodes(item) for _, item in _items(value))


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value[:1] == "{"


def spoilt_node(rng: Random, data: bytes) -> bytes:
    """A manifest or a node of an OCDBT database, in which bytes differ and the checksum is right
    all the same.
    """
    out = bytearray(noise(rng, data))
    if rng.random() < 0.8 and len(out) > 20:
        out[4:12] = len(out).to_bytes(8, "little")
        out[-4:] = google_crc32c.value(bytes(out[:-4])).to_bytes(4, "little")
    return bytes(out)


# YAML: mappings and specs.

NO_YAML = ["a: " + "[" * 5000, "- " * 5000, "a: 1" + ":1" * 5000, "? " * 900]


def spoilt_yaml(rng: Random, text: str) -> str:
    """A mapping or a spec that says something else somewhere, or more than a person would write."""
    way = rng.random()
    if way < 0.15:
        return noise(rng, text.encode()).decode("utf-8", "replace")
    if way < 0.25:
        return rng.choice([aliases(rng.randrange(1, 12)), *NO_YAML])
    value = yaml.safe_load(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = spoilt(rng, value)
    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=rng.random() < 0.5)
    # a number with more digits than Python prints
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def aliases(levels: int) -> str:
    """A list of lists of lists, each of which is ten times the one before."""
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *lines])
