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
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import google_crc32c
import msgpack
import xxhash
import yaml

from gguf_writer import Tensor, Written
from jax_ucp.codecs.tensor_names import NAMES

# A name that must never be called; `fuzz.py` puts a module there that takes note if it is.
TRAP = "ucp_trap.spring"
DANGEROUS = (
    TRAP,
    "os.system",
    "builtins.eval",
    "builtins.exec",
    "__builtin__.eval",
    "builtins.__import__",
    "io.open",
)
DANGEROUS += (
    "subprocess.Popen",
    "importlib.import_module",
    "pickle.loads",
    "operator.attrgetter",
    "numpy.load",
)

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
)
NUMBERS += (
    1 << 53,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    1 << 70,
    -(1 << 63),
    1 << 4000,
)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "\0",
    "a\0b",
    "a/b",
    "x" * 3000,
    "\ud800",
    "é",
    "0",
    "weight",
    "torch",
)
TEXTS += (
    "a/../../x",
    "a//b",
    "./a",
    "a\\..\\x",
    "%2e%2e",
    "ucp.json",
    "_METADATA",
    "zarr.json",
    "ucp.pack_0",
)
TEXTS += (
    r"(\w|.)+!",
    "(a*)*b",
    "(?=a)",
    "[/a]",
    "\x1b]52;c;eA==\x07",
    "\u202etxt",
    "a\nb",
    "!array",
    "float32",
    "object",
)


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
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    match value:
        case Global(dotted):
            module, _, name = dotted.rpartition(".")
            return f"c{module}\n{name}\n".encode("utf-8", "surrogatepass")
        case Made(dotted, state, args, call):
            made = _opcodes(Global(dotted)) + _opcodes(args) + (b"R" if call else b"\x81")
            return made if state is None else made + _opcodes(state) + b"b"
        case Persistent(id):
            return _opcodes(id) + b"Q"
        case Pairs(items):
            return b"}(" + b"".join(_opcodes(k) + _opcodes(v) for k, v in items) + b"u"
        case dict():
            return _opcodes(Pairs(list(value.items())))
        case list():
            return b"](" + b"".join(map(_opcodes, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_opcodes, value)) + b"t"
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case _:
            return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def tensor(key: str, shape: tuple[int, ...], kind: str = "torch.FloatStorage") -> Made:
    """A tensor over the whole of storage `key`."""
    numel, strides = 1, []
    for n in reversed(shape):
        strides.append(numel)
        numel *= n
    stored = Persistent(("storage", Global(kind), key, "cpu", numel))
    hooks = Made("collections.OrderedDict", call=True)
    return Made(
        "torch._utils._rebuild_tensor_v2",
        None,
        (stored, 0, shape, tuple(strides[::-1]), False, hooks),
        True,
    )


def spoilt(rng: Random, value: Any) -> Any:
    """The value with one thing changed, somewhere inside it."""
    if isinstance(value, Made):
        what, args = rng.random(), value.args
        if what < 0.1:
            return Made(rng.choice([*DANGEROUS, *NAMES]), value.state, args, value.call)
        if args and (value.state is None or what < 0.3):
            args = spoilt(rng, args)
            return Made(
                value.dotted, value.state, args if isinstance(args, tuple) else (args,), value.call
            )
        return Made(value.dotted, spoilt(rng, value.state), args, value.call)
    if isinstance(value, Persistent):
        changed = spoilt(rng, value.id)
        return Persistent(changed if isinstance(changed, tuple) else (changed,))
    if isinstance(value, Global):
        return Global(rng.choice([*DANGEROUS, *NAMES, "torch.Nothing"]))
    if isinstance(value, dict | Pairs):
        return _spoilt_pairs(
            rng, list(value.items() if isinstance(value, dict) else value.items), type(value)
        )
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        items = list(value)
        at = rng.randrange(len(items))
        items[at : at + 1] = rng.choice([[], [items[at]] * 2, *[[spoilt(rng, items[at])]] * 8])
        return type(value)(items)
    return _another(rng, value)


def _spoilt_pairs(rng: Random, items: list[tuple[Any, Any]], kind: type) -> Any:
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
    return dict(items) if kind is dict else Pairs(items)


def _another(rng: Random, value: Any) -> Any:
    """Something else in the place of a value: near to it, or of another kind."""
    if type(value) is int and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, -value, value * 2, *NUMBERS])
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice([value + "x", value[:-1], value.upper(), *TEXTS])
    deep: Any = []
    for _ in range(rng.choice([1, 3, 150])):
        deep = [deep]
    kinds = [
        None,
        True,
        0.5,
        float("nan"),
        float("inf"),
        -1,
        "text",
        [],
        {},
        [value],
        [value] * 300,
        deep,
    ]
    return rng.choice(kinds)


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
        return _opcodes(
            rng.choice(
                [None, True, 0.5, float("nan"), "text", b"raw", (), [], {}, [1], {"a": 1}, ("x",)]
            )
        )
    if code[:1] in (b"K", b"M", b"J", b"\x8a"):
        return _opcodes(rng.choice(NUMBERS))
    if code[:1] in (b"X", b"\x8c"):
        return _opcodes(rng.choice(TEXTS))
    if code[:1] == b"c":
        return _opcodes(Global(rng.choice([*DANGEROUS, *NAMES])))
    if len(code) > 1:
        at = rng.randrange(1, len(code))
        return code[:at] + bytes([code[at] ^ 1 << rng.randrange(8)]) + code[at + 1 :]
    return opcode(rng)


# Every way there is to call something.
CALLS = [
    _opcodes(Made(TRAP, None, ("x",), True)),
    _opcodes(Made(TRAP)),
    _opcodes(Made(TRAP, {"a": 1}, (), True)),
]
CALLS += [
    b"\x8c\x08ucp_trap\x8c\x06spring\x93)R",
    b"(iucp_trap\nspring\n",
    b"(cucp_trap\nspring\no",
]
CALLS += [
    b"cucp_trap\nspring\n)}\x92",
    b"c__builtin__\ngetattr\ncucp_trap\nspring\nX\x08\0\0\0__call__\x86R)R",
]
CALLS += [b"ccollections\ndefaultdict\ncucp_trap\nspring\n\x85R"]

_ALL = [op for op in pickletools.opcodes if op.name != "STOP"]
_WIDTHS = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}


def opcode(rng: Random) -> bytes:
    """Any opcode of any protocol with some argument, those that make objects and calls more
    often.
    """
    often = rng.random()
    if often < 0.05:
        return rng.choice(CALLS)
    if often < 0.25:
        return _opcodes(Global(rng.choice([*DANGEROUS, *NAMES])))
    if often < 0.5:
        return rng.choice(
            [b"R", b"\x81", b"b", b"o", b"\x93", b"Q", b"\x92", b")", b"\x85", b"\x86", b"(", b"t"]
        )
    if often < 0.6:
        return _opcodes(rng.choice([*NUMBERS, *TEXTS, *DANGEROUS]))
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
            body, depth = (
                body + _opcodes(rng.choice([1, "a", None, 0.5, (), [], {}, "os", "system"])),
                depth + 1,
            )
        code = opcode(rng)
        body += code
        depth += {
            b"R": -1,
            b"\x81": -1,
            b"b": -1,
            b"\x93": -1,
            b"\x86": -1,
            b"s": -2,
            b"a": -1,
        }.get(code[:1], 1)
    return b"\x80" + bytes([rng.choice([2, 2, 3, 4, 5])]) + body + b"."


def bomb(rng: Random, nbytes: int) -> bytes:
    """A cheap opcode, or a few, repeated: what costs most for each byte of the file."""
    singles = (
        b"N",
        b"]",
        b"}",
        b"\x8f",
        b")",
        b"N\x94",
        b"]\x94",
        b"\x8f\x94",
        b"K\x00",
        b"N\x85",
        b"C\x00",
        b"h\x00",
    )
    unit = rng.choice(
        [*singles, b"h\x00h\x00\x86", bytes(rng.choices(b"N]})(\x8f\x94\x85\x86\x87at", k=4))]
    )
    start, end = rng.choice(
        [
            (b"](", b"e"),
            (b"(", b"t"),
            (b"}(", b"u"),
            (b"\x8f(", b"\x90"),
            (b"(", b"\x91"),
            (b"", b""),
        ]
    )
    return b"\x80\x04]q\x00" + start + unit * (nbytes // len(unit)) + end + b"\x86."


# Zip files: every field of every header by itself, so that any one of them can lie.

_LOCAL, _CENTRAL = "<L3H2H3L2H", "<L4H2H3L5H2L"
_END, _END64, _LOCATOR64 = "<L4H2LH", "<LQ2H2L4Q", "<LLQL"
_BITS = {"H": 16, "L": 32, "Q": 64}


def zip_file(rng: Random, members: Sequence[tuple[str, bytes]], lies: int) -> bytes:
    """A zip file as torch writes them, or as other tools do, in which `lies` fields are wrong."""
    wide, deflated = rng.random() < 0.3, rng.random() < 0.2
    records: list[tuple[str, list[int]] | bytes] = []
    central: list[tuple[str, list[int]] | bytes] = []
    at = 0
    for name, data in members:
        raw = zlib.compress(data, 9)[2:-4] if deflated else data
        crc, method, extra = zlib.crc32(data), 8 if deflated else 0, b""
        sizes = [len(raw), len(data)]
        if wide:
            extra, sizes = struct.pack("<2H2Q", 1, 16, len(data), len(raw)), [0xFFFFFFFF] * 2
        title = name.encode("utf-8", "surrogatepass")
        records += [
            (_LOCAL, [0x04034B50, 45, 0, method, 0, 0, crc, *sizes, len(title), len(extra)])
        ]
        records += [title + extra, raw]
        more = extra[:2] + b"\x18\0" + extra[4:] + struct.pack("<Q", at) if wide else b""
        where = 0xFFFFFFFF if wide else at
        central += [
            (
                _CENTRAL,
                [
                    0x02014B50,
                    45,
                    45,
                    0,
                    method,
                    0,
                    0,
                    crc,
                    *sizes,
                    len(title),
                    len(more),
                    0,
                    0,
                    0,
                    0,
                    where,
                ],
            )
        ]
        central += [title + more]
        at += struct.calcsize(_LOCAL) + len(title) + len(extra) + len(raw)
    length, count = (
        sum(len(r) if isinstance(r, bytes) else struct.calcsize(r[0]) for r in central),
        len(members),
    )
    records += central
    if wide:
        records += [
            (_END64, [0x06064B50, 44, 45, 45, 0, 0, count, count, length, at]),
            (_LOCATOR64, [0x07064B50, 0, at + length, 1]),
        ]
    records += [(_END, [0x06054B50, 0, 0, count, count, length, at, 0])]
    headers = [record for record in records if not isinstance(record, bytes)]
    for _ in range(lies):
        form, fields = rng.choice(headers)
        field = rng.randrange(len(fields))
        bits = _BITS["".join(int(n or 1) * c for n, c in _codes(form))[field]]
        fields[field] = rng.choice(
            [fields[field] + 1, fields[field] - 1, rng.randrange(at + length + 1), *NUMBERS]
        ) % (1 << bits)
    return b"".join(r if isinstance(r, bytes) else struct.pack(r[0], *r[1]) for r in records)


def _codes(form: str) -> list[tuple[str, str]]:
    found, number = [], ""
    for c in form[1:]:
        if c.isdigit():
            number += c
        else:
            found.append((number, c))
            number = ""
    return found


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


# safetensors.


def safetensors_file(rng: Random) -> bytes:
    """Two tensors and metadata, of which the header may lie, be no JSON, or have another length
    than it says.
    """
    header: Any = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [34, 34]},
    }
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        header = spoilt(rng, header)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        text = rng.choice(
            [
                b"[" * 50_000,
                b'{"a":' * 20_000,
                text[:-1] + b',"b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}}',
                text.replace(b"24", b"2" + b"4" * 5000),
                text.replace(b"24", b"24.0"),
                text.replace(b"24", b"1e999"),
                text.replace(b"24", b"-0"),
                text + b" " * 1000,
                noise(rng, text),
            ]
        )
    length = (
        len(text)
        if rng.random() < 0.9
        else rng.choice([len(text) + 1, len(text) - 1, *NUMBERS]) % (1 << 64)
    )
    data = bytes(range(34)) if rng.random() < 0.9 else rng.randbytes(rng.choice([0, 33, 35]))
    return length.to_bytes(8, "little") + text + data


def safetensors_index(rng: Random) -> bytes:
    index = {
        "metadata": {"total_size": 34},
        "weight_map": {"a.weight": "model.safetensors", "b": "model.safetensors"},
    }
    text = json.dumps(spoilt(rng, index) if rng.random() < 0.8 else index).encode()
    return text if rng.random() < 0.9 else noise(rng, text)


def weights_config(rng: Random) -> bytes:
    config = {
        "model_type": "toy",
        "transformers_weights": "model.safetensors",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    }
    return json.dumps(spoilt(rng, spoilt(rng, config))).encode()


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
    text = json.dumps(said).encode("utf-8", "surrogatepass")
    return text if len(text) < _MOST_JSON else otherwise


def _spoilt_file(rng: Random, file: bytes, in_header: bool) -> bytes:
    """A file of safetensors, whose header lies, or whose data has other bytes."""
    length = int.from_bytes(file[:8], "little")
    if in_header:
        header = json.loads(file[8 : 8 + length])
        name = rng.choice(sorted(header))
        header[name] = spoilt(rng, _unpacked(header[name]))
        header |= {rng.choice(sorted(header)): header[name]} if rng.random() < 0.3 else {}
        if isinstance(header[name], dict) and name == "__metadata__":
            header[name] = {
                k: v if isinstance(v, str) else json.dumps(v) for k, v in header[name].items()
            }
        text = _text(header, b"{}")
        return len(text).to_bytes(8, "little") + text + file[8 + length :]
    data = bytearray(file)
    for _ in range(rng.choice([1, 3, 30])):
        data[rng.randrange(8 + length, len(data))] = rng.choice([0, 127, 128, 255])
    return bytes(data)


# GGUF.


def gguf_file(rng: Random) -> bytes:
    """A file with a few keys and tensors, of which one or two things are not as they should be:
    a value or a type of a key, a tensor's name, lengths, type or offset, counts, or bytes.
    """
    values: dict[str, tuple[Any, Any]] = {
        "general.architecture": ("str", "llama"),
        "general.file_type": ("u32", 2),
        "llama.block_count": ("u32", 1),
        "llama.embedding_length": ("u32", 32),
        "llama.attention.head_count": ("u32", 2),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "llama.rope.freq_base": ("f32", 1e4),
        "tokenizer.ggml.tokens": (["str"], ["a", "b"]),
        "tokenizer.ggml.scores": (["f32"], [0.5, 1.5]),
    }
    tensors = [
        Tensor("token_embd.weight", [32, 2], 0, rng.randbytes(256)),
        Tensor("blk.0.attn_q.weight", [32, 4], 2, rng.randbytes(72)),
        Tensor("blk.0.ffn_up.weight", [256], 12, rng.randbytes(144)),
        Tensor("rope_freqs.weight", [8], 0, struct.pack("<8f", *[1.0] * 6, 3.0, 8.0)),
    ]
    written = Written(values, tensors, rng.choice([2, 3, 3, 3]))
    for _ in range(rng.choice([0, 1, 1, 2])):
        _spoil_gguf(rng, values, tensors, written)
    data = written.data()
    return noise(rng, data) if rng.random() < 0.4 else data


def _spoil_gguf(
    rng: Random, values: dict[str, tuple[Any, Any]], tensors: list[Tensor], written: Written
) -> None:
    tensor, way = rng.choice(tensors), rng.randrange(6)
    small = [n for n in NUMBERS if -(1 << 63) <= n < 1 << 63]
    if way == 0:
        key = rng.choice([*values, "general.alignment", "split.count", "llama.expert_count"])
        integer, text = rng.choice([n for n in small if n >= 0]), rng.choice(TEXTS)
        number = rng.choice([math.nan, math.inf, -5.0, 1e300])
        spoilt = ("u64", integer), ("str", text), (["i64"], [integer]), ("f64", number)
        values[key] = rng.choice(spoilt)
    elif way == 1:
        tensor.name = rng.choice([*TEXTS, tensors[0].name])
    elif way == 2:
        tensor.lengths = [*rng.sample([*tensor.lengths, *small], rng.randrange(1, 6))]
    elif way == 3:
        tensor.type = rng.choice([*range(42), 1 << 31])
    elif way == 4:
        tensor.offset = rng.choice([n for n in small if n >= 0] + [32, 64, 288])
    else:
        written.counts = rng.choice(small), rng.choice([*small, len(values)])


def _unpacked(value: Any) -> Any:
    """An entry of a header; of metadata, texts that are JSON as what they say."""
    if not all(isinstance(item, str) for item in value.values()):
        return value
    return {key: json.loads(text) if text[:1] in "{[" else text for key, text in value.items()}


# DCP: what `.metadata` says of the files beside it.

DCP = "torch.distributed.checkpoint."


def dcp_metadata(
    files: dict[str, tuple[str, int, int]], shape: tuple[int, int], rows: Sequence[int]
) -> Made:
    """The table of contents of a tensor `w`, cut into blocks of rows, and an object; `files` has
    what lies where.
    """
    starts = [sum(rows[:i]) for i in range(len(rows))]

    def sized(*n: int) -> Made:
        return Made("torch.Size", None, (n,), True)

    chunks = [
        Made(
            f"{DCP}metadata.ChunkStorageMetadata",
            {"offsets": sized(a, 0), "sizes": sized(n, shape[1])},
        )
        for a, n in zip(starts, rows, strict=True)
    ]
    properties = (
        Global("torch.float32"),
        "strided",
        False,
        Made(f"{DCP}metadata._MEM_FORMAT_ENCODING", None, (0,), True),
        False,
    )
    about = Made(
        f"{DCP}metadata.TensorStorageMetadata",
        {
            "properties": Made(f"{DCP}metadata.TensorProperties", properties),
            "size": sized(*shape),
            "chunks": chunks,
        },
    )

    def entry(name: str, offset: Any, index: Any) -> tuple[Made, Made]:
        file, start, length = files[name if index is None else f"{name}{index}"]
        said = {"fqn": name, "offset": offset, "index": index}
        return Made(f"{DCP}metadata.MetadataIndex", said), Made(
            f"{DCP}filesystem._StorageInfo",
            {"relative_path": file, "offset": start, "length": length},
        )

    storage = [entry("w", sized(a, 0), i) for i, a in enumerate(starts)]
    storage += [entry("epoch", None, None)]
    return Made(
        f"{DCP}metadata.Metadata",
        {
            "state_dict_metadata": {
                "w": about,
                "epoch": Made(f"{DCP}metadata.BytesStorageMetadata", {}),
            },
            "planner_data": {"w": ("w",), "epoch": ("epoch",)},
            "storage_data": Pairs(storage),
            "storage_meta": None,
        },
    )


# What stock Orbax and we write: JSON, sealed by a digest, or in a database.


def spoilt_json(rng: Random, data: bytes) -> bytes:
    """JSON that says something else in some places, nests deeply, or is JSON no more."""
    way = rng.random()
    if way < 0.08:
        return noise(rng, data)
    if way < 0.12:
        return rng.choice(
            [
                b"[" * 50_000,
                b'{"a":' * 20_000,
                b"[" * 900 + b"]" * 900,
                b"",
                b"null",
                b"[]",
                b"\xff",
                b"1e999",
            ]
        )
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
        return _packed(tree)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return noise(rng, data)


def _opened(code: int, data: bytes) -> dict[str, Any]:
    """An extension as a value that can be changed inside."""
    return {"!code": code, "inside": msgpack.unpackb(data)}


def _packed(value: Any) -> bytes:
    return msgpack.packb(_closed(value))


def _closed(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"!code", "inside"}:
        return msgpack.ExtType(value["!code"], _packed(value["inside"]))
    if isinstance(value, dict):
        return {key: _closed(item) for key, item in value.items()}
    return [_closed(item) for item in value] if isinstance(value, list) else value


def _spoilt_inside(rng: Random, value: Any) -> Any:
    """The value with one thing changed, in any place alike; also inside a text that is JSON, as
    in `_sharding`.
    """
    if _is_json(value):
        return spoilt_json(rng, value.encode()).decode("utf-8", "replace")
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    weights = {key: _nodes(item) for key, item in items}
    if not weights or rng.random() < 1 / (1 + sum(weights.values())):
        return spoilt(rng, value)
    key = rng.choices(list(weights), list(weights.values()))[0]
    if isinstance(value, dict):
        return {**value, key: _spoilt_inside(rng, value[key])}
    return [*value[:key], _spoilt_inside(rng, value[key]), *value[key + 1 :]]


def _nodes(value: Any) -> int:
    """How many values there are in a value, itself too."""
    if _is_json(value):
        return 20
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_nodes, items))


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value[:1] == "{"


def sealed(data: bytes) -> bytes:
    """A `ucp.json` with the digest of what it says, as whoever writes one can give it."""
    bare = re.sub(rb'"digest":"[^"]*"}$', b'"digest":""}', data)
    return (
        bare.removesuffix(b'"}') + xxhash.xxh3_64_hexdigest(bare).encode() + b'"}'
        if bare.endswith(b'""}')
        else data
    )


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


def spoilt_yaml(rng: Random, text: str) -> str:
    """A mapping or a spec that says something else somewhere, or more than a person would write."""
    way = rng.random()
    if way < 0.15:
        return noise(rng, text.encode()).decode("utf-8", "replace")
    if way < 0.25:
        return rng.choice(
            [
                _aliases(rng.randrange(1, 12)),
                "a: " + "[" * 5000,
                "- " * 5000,
                "a: 1" + ":1" * 5000,
                "? " * 900,
            ]
        )
    value = yaml.safe_load(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = spoilt(rng, value)
    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=rng.random() < 0.5)
    # a number with more digits than Python prints
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def _aliases(levels: int) -> str:
    """A list of lists of lists, each of which is ten times the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)
