"""Checkpoints as dicts of files, and what the same run would have written at another step or with
another seed.

A sibling is made from a real checkpoint by changing numbers in place: every float through one
function of its own bits, so that what is stored twice, at whatever precision, still agrees; step
counters and learning rates in tensors and in pickles; and the CRCs of what was changed. No trainer
is needed, and every file keeps its length and its names.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickletools
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np

from cases import OF_TESTS
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.codecs.unpickle import label, walk
from jax_ucp.files.path import file_path
from jax_ucp.files.ranges import MemoryRange
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.gguf.file import PLAIN
from jax_ucp.formats.gguf.header import read_head


@dataclass(frozen=True)
class Link:
    """A symbolic link; `target` is relative to it, and may be written as an absolute path."""

    target: str
    absolute: bool = False


@dataclass(frozen=True)
class EmptyFolder:
    """A folder with nothing in it."""


Entry = bytes | Link | EmptyFolder
Folder = Mapping[str, Entry]


def read_folder(path: Path) -> dict[str, bytes]:
    """The files of a folder, by their path in it, without what tests keep beside a checkpoint."""
    files = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name not in OF_TESTS)
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in files}


def write_folder(folder: Folder, path: Path) -> Path:
    """Write the entries below `path`. A name that ends in `/` is a folder that has nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    for name, entry in folder.items():
        at = path / name
        at.parent.mkdir(parents=True, exist_ok=True)
        match entry:
            case Link(target, absolute):
                at.symlink_to(os.path.normpath(at.parent / target) if absolute else target)
            case EmptyFolder():
                at.mkdir()
            case _:
                at.write_bytes(entry)
    return path


# Where a checkpoint's tensors lie.


@dataclass(frozen=True)
class Stored:
    """The bytes `start` to `stop` of `file` are of `dtype`; `label` is its name in the file."""

    file: str
    label: str
    dtype: np.dtype
    start: int
    stop: int

    def read(self, folder: Mapping[str, bytes]) -> np.ndarray:
        return np.frombuffer(folder[self.file][self.start : self.stop], self.dtype)


@dataclass(frozen=True)
class Archive:
    """A zip file of torch.save, the bytes `start` to `stop` of `file`; `name` is that of DCP."""

    file: str
    start: int
    stop: int
    name: str = ""


def archives(folder: Mapping[str, bytes]) -> list[Archive]:
    """Every file of torch.save, and every item of DCP."""
    found = [Archive(name, 0, len(data)) for name, data in folder.items() if data[:4] == b"PK\3\4"]
    tables = {name for name in folder if PurePosixPath(name).name == ".metadata"}
    bases = {name: PurePosixPath(name).name for name in folder}
    tables |= {name for name, base in bases.items() if re.fullmatch(r"__\d+\.metadata", base)}
    parents = {PurePosixPath(name).parent.as_posix() for name in tables}
    inner = [item for parent in sorted(parents) for item in _dcp_items(folder, parent)]
    return [one for one in found if not one.file.endswith(".distcp")] + inner


def _dcp_items(folder: Mapping[str, bytes], parent: str) -> Iterator[Archive]:
    prefix = "" if parent == "." else f"{parent}/"
    with tempfile.TemporaryDirectory() as work:
        names = [name for name in folder if name.startswith(prefix)]
        below = {name.removeprefix(prefix): folder[name] for name in names}
        metadata = read_metadata(file_path(write_folder(below, Path(work))))
    plain = [(name, span) for name, span in metadata.spans() if not span.transforms]
    spans = {(span.file, span.offset, span.length): name for name, span in plain}
    for (file, offset, length), name in spans.items():
        if folder[prefix + file][offset : offset + 4] == b"PK\3\4":
            yield Archive(prefix + file, offset, offset + length, name)


def stored_tensors(folder: Mapping[str, bytes]) -> list[Stored]:
    """Every tensor whose bytes lie in a file as they are."""
    found: list[Stored] = []
    for archive in archives(folder):
        found += _in_archive(folder, archive)
    for name, data in folder.items():
        if name.endswith(".safetensors"):
            found += _in_safetensors(name, data)
        if name.endswith(".gguf"):
            found += _in_gguf(name, data)
        if PurePosixPath(name).name == ".zarray":
            found += _in_zarr(folder, name)
    return found


def _in_archive(folder: Mapping[str, bytes], archive: Archive) -> Iterator[Stored]:
    data = folder[archive.file][archive.start : archive.stop]
    places = {name: at for name, at in _members(data).items() if "/data/" in name}
    members = {PurePosixPath(name).name: at for name, at in places.items()}
    seen: set[str] = set()
    for keys, node in walk(TorchFile(archive.file, data=data, lenient=True).tree):
        if isinstance(node, StoredTensor) and node.storage in members and node.storage not in seen:
            seen.add(node.storage)
            start, stop = members[node.storage]
            name = "/".join([archive.name, *map(label, keys)]).strip("/")
            place = archive.start + start, archive.start + stop
            yield Stored(archive.file, name, node.dtype, *place)


def _members(data: bytes) -> dict[str, tuple[int, int]]:
    """Where the members of a zip file lie that are stored as they are."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos = [info for info in file.infolist() if info.compress_type == zipfile.ZIP_STORED]
    begins = [(info, _begin(data, info)) for info in infos]
    return {info.filename: (begin, begin + info.file_size) for info, begin in begins}


def _begin(data: bytes, info: zipfile.ZipInfo) -> int:
    name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
    return info.header_offset + 30 + name + extra


_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
}
_SAFETENSORS |= {"I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}


def _in_safetensors(name: str, data: bytes) -> Iterator[Stored]:
    length = int.from_bytes(data[:8], "little")
    for key, about in json.loads(data[8 : 8 + length]).items():
        if key != "__metadata__" and about["dtype"] in _SAFETENSORS:
            start, stop = (8 + length + n for n in about["data_offsets"])
            yield Stored(name, key, dtype_of(_SAFETENSORS[about["dtype"]]), start, stop)


def _in_gguf(name: str, data: bytes) -> Iterator[Stored]:
    """The tensors that are in no blocks."""
    head = read_head(MemoryRange(data))
    for entry in head.tensors:
        if entry.type in PLAIN:
            dtype, start = np.dtype(PLAIN[entry.type]), head.data + entry.offset
            stop = start + math.prod(entry.lengths) * dtype.itemsize
            yield Stored(name, entry.name, dtype, start, stop)


def _in_zarr(folder: Mapping[str, bytes], table: str) -> Iterator[Stored]:
    about = json.loads(folder[table])
    if about["compressor"] is not None:
        return
    parent = table.removesuffix(".zarray")
    for name, data in folder.items():
        if name.startswith(parent) and re.fullmatch(r"[\d.]+", name.removeprefix(parent)):
            yield Stored(name, PurePosixPath(parent).name, dtype_of(about["dtype"]), 0, len(data))


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


# Siblings.


@dataclass(frozen=True)
class Change:
    """`salt` chooses the weights; `steps` is added to every counter, `rate` multiplies every lr."""

    salt: int
    steps: int = 0
    rate: float = 1.0


STEP_LATER = Change(salt=1, steps=1, rate=0.97)
OTHER_RUN = Change(salt=2)

_COUNTERS = {
    "global_steps", "iteration", "step", "last_batch_iteration", "last_epoch", "_step_count",
    "num_steps",
}  # fmt: skip
_COUNTERS |= {
    "global_samples", "micro_steps", "cur_iter", "consumed_train_samples", "global_step", "steps",
}  # fmt: skip


def sibling(folder: Mapping[str, bytes], change: Change) -> dict[str, bytes]:
    """The checkpoint as another step or another run would have written it."""
    out = {name: bytearray(data) for name, data in folder.items()}
    tensors = stored_tensors(folder)
    half = _half_precision(tensors)
    for tensor in tensors:
        values = _changed(tensor, tensor.read(folder), change, half)
        out[tensor.file][tensor.start : tensor.stop] = values.tobytes()
    for archive in archives(folder):
        data = bytes(out[archive.file][archive.start : archive.stop])
        data = _with_numbers(data, archive, change)
        out[archive.file][archive.start : archive.stop] = resummed(data)
    return {name: bytes(data) for name, data in out.items()}


def _half_precision(tensors: list[Stored]) -> np.dtype:
    """The 16-bit type of the model, or fp32 where all is in that."""
    for name in ("bfloat16", "float16"):
        if any(tensor.dtype == dtype_of(name) for tensor in tensors):
            return dtype_of(name)
    return np.dtype(np.float32)


def _changed(tensor: Stored, values: np.ndarray, change: Change, half: np.dtype) -> np.ndarray:
    if re.search(r"(^|[/.])steps?$", tensor.label) and values.size == 1:
        return values + values.dtype.type(change.steps)
    if values.dtype in (np.float32, half):
        return other_values(values, change.salt, half)
    return values


def other_values(values: np.ndarray, salt: int, half: np.dtype) -> np.ndarray:
    """A quarter of the values doubled, chosen by what they are in half precision; in fp32 the
    others' last bit flipped.

    It is a function of each value alone and goes with rounding: rounded, the result is that of the
    rounded value.

    >>> half, x = np.dtype(np.float16), np.linspace(-1, 1, 9, dtype=np.float32)
    >>> bool(all(other_values(x, 1, half).astype(half) == other_values(x.astype(half), 1, half)))
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what pads a buffer may be anything
        rounded, twice = values.astype(half), values + values
    bits = rounded.view(f"u{half.itemsize}").astype(np.uint64)
    mixed = (bits + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    chosen = (mixed >> np.uint64(40)) % np.uint64(4) == 0
    size = np.abs(rounded.astype(np.float32))
    plain = (size > np.float32(1e-3 if half == np.float16 else 1e-30)) & (size < np.float32(1e4))
    out = np.where(chosen & plain, twice, values).astype(values.dtype)
    if values.dtype != np.float32:
        return out
    flipped = (values.view(np.uint32) ^ 1).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = (values != 0) & np.isfinite(values) & ~(chosen & plain)
        kept &= flipped.astype(half) == rounded
    # In fp32 alone every bit counts as the value's own, so that the flip says nothing of the
    # choice.
    return np.where(kept if half != np.float32 else kept & (values != 1), flipped, out)


def _with_numbers(data: bytes, archive: Archive, change: Change) -> bytes:
    """The file with its counters and learning rates changed in its pickle."""
    if not change.steps and change.rate == 1:
        return data
    places = [at for name, at in _members(data).items() if name.endswith("/data.pkl")]
    tree = TorchFile(archive.file, data=data, lenient=True).tree
    wanted: dict[tuple[str, int | float], int | float] = {}
    for keys, value in walk(tree):
        path = (*archive.name.split("."), *keys) if archive.name else keys
        key = path[-1] if path else ""
        if type(value) is int and key in _COUNTERS:
            wanted[key if keys else "", value] = value + change.steps
        elif type(value) is float and key == "lr" and "param_groups" in path:
            wanted[key if keys else "", value] = value * change.rate
    for start, stop in places:
        data = data[:start] + with_other_numbers(data[start:stop], wanted) + data[stop:]
    return data


_FORMS: dict[str, Callable[[int | float], bytes]] = {
    "BINFLOAT": lambda n: struct.pack(">d", n),
    "BININT": lambda n: struct.pack("<i", n),
    "BININT1": lambda n: struct.pack("<B", n),
    "BININT2": lambda n: struct.pack("<H", n),
}


def with_other_numbers(data: bytes, wanted: Mapping[tuple[str, int | float], int | float]) -> bytes:
    """A pickle in which numbers after a key are others; the key may be empty for one number."""
    out, memo, last = bytearray(data), {}, ""
    for op, argument, at in pickletools.genops(data):
        assert at is not None
        if isinstance(argument, str) and "UNICODE" in op.name:
            last = argument
        elif op.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = last
        elif op.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(argument, "")
        elif op.name in _FORMS:
            new = wanted.get((last, argument), wanted.get(("", argument)) if not last else None)
            if new is not None:
                form = _FORMS[op.name](new)
                out[at + 1 : at + 1 + len(form)] = form
            last = "\0 a number"
        elif "PUT" not in op.name and op.name != "MEMOIZE":
            last = last if op.name in ("PROTO", "EMPTY_DICT", "MARK", "FRAME") else "\0 another"
    return bytes(out)


def resummed(data: bytes) -> bytes:
    """A zip file with the CRCs that its members have now."""
    out = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos, directory = file.infolist(), file.start_dir
    for info in infos:
        begin = _begin(data, info)
        stop = begin + info.compress_size
        if info.CRC and info.compress_type == zipfile.ZIP_STORED:
            crc = struct.pack("<L", zlib.crc32(data[begin:stop]))
            out[directory + 16 : directory + 20] = crc
            if data[info.header_offset + 14 : info.header_offset + 18] != bytes(4):
                out[info.header_offset + 14 : info.header_offset + 18] = crc
            if data[stop : stop + 4] == b"PK\7\10":
                out[stop + 4 : stop + 8] = crc
        name, extra, comment = struct.unpack_from("<3H", data, directory + 28)
        directory += 46 + name + extra + comment
    return bytes(out)
