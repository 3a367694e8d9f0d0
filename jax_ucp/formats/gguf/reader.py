"""GGUF, the format of llama.cpp: one file, or the parts of a split one.

Tensors are parameters under their names in the file; those in ggml's blocks are quantised weights.
Keys with their values are extras. Of an architecture that is known the config that Hugging Face's
model would have is made of them (`config`). Facts: `docs/gguf.md` of ggml 0.25; `gguf_writer.py` of
gguf-py 0.19 and `tools/gguf-split` of llama.cpp for split files.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents, QuantizedWeight
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import read_bytes
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.gguf.config import model_config
from jax_ucp.formats.gguf.file import FILE_TYPES, GGUFFile
from jax_ucp.formats.gguf.header import MAGIC
from jax_ucp.formats.quantized.ggml import TYPES
from jax_ucp.formats.quantized.names import GGML
from jax_ucp.formats.weight_files import CONFIG, refuse_stand_in, require_files
from jax_ucp.options import Options

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def recognise(path: FilePath) -> bool:
    """Whether a file is called so, or begins as GGUF does, whatever its name."""
    if not path.is_file() or path.name.endswith(SUFFIX):
        return path.is_file()
    file = path.file()
    return read_bytes(path.files, file, 0, min(file.size, len(MAGIC))) == MAGIC


def parse(path: FilePath, options: Options) -> Contents:
    """The contents of a GGUF file: its tensors as parameters, and its keys as extras.

    If the file is the first part of a split model, all parts beside it are read too. Raises
    FormatError for a later part, and where a part is missing or of another split.
    """
    refuse_stand_in(path)
    first = GGUFFile(path)
    files = {path.name: first, **_other_parts(path, first)}
    total = sum(len(file.arrays()) for file in files.values())
    for file in files.values():
        count = file.head.values.get(_TENSORS, total)
        if count != total:
            raise FormatError(
                f"{file.path} counts {count!r:.20} tensors in all parts, and the parts of {path}"
                f" have {total}: they are not of one split"
            )
    if not total:
        raise FormatError(f"{path} has no tensors: it is a vocabulary alone")
    builder = ContentsBuilder("gguf", path, Combined.of_files(files))
    tensors = {tensor for file in files.values() for tensor in file.arrays()}
    for name, file in files.items():
        _keep(builder, name, file, tensors)
    values = first.head.values
    type = values.get("general.file_type")
    called = FILE_TYPES.get(type, "") if isinstance(type, int) else ""
    said = f"GGUF v{first.head.version}", values.get("general.architecture", ""), called
    builder.about = About(writer=", ".join([str(part) for part in said if part]))
    config, note = model_config(values, {k: f for f in files.values() for k in f.arrays()})
    if config:
        builder.extras[CONFIG] = {"config": config}
    builder.notes.append(note)
    return builder.contents()


def _keep(builder: ContentsBuilder, name: str, file: GGUFFile, tensors: Collection[str]) -> None:
    for tensor in file.arrays():
        whole = builder.array(f"{name}:{tensor}")
        builder.parameter("param", tensor, whole, f"the parameter {tensor}")
    for tensor, type in file.in_blocks.items():
        label = f"param/{tensor}"
        fault = "" if type in TYPES else f"{type} is not dequantised here"
        parts = {"codes": label}
        if type == "NVFP4":  # whose scale is of the whole, or of each expert
            module = tensor.removesuffix(".weight")
            beside = {role: f"{module}.{role}" for role in ("scale", "input_scale")}
            parts |= {role: f"param/{name}" for role, name in beside.items() if name in tensors}
        builder.quantized.append(QuantizedWeight(GGML + type, label, parts, fault))
    for key, value in file.head.values.items():
        builder.extra(name, key, value)


def _other_parts(path: FilePath, first: GGUFFile) -> dict[str, GGUFFile]:
    name = _PART.fullmatch(path.name)
    count = first.head.values.get(_COUNT, 0)
    parts = int(name["parts"]) if name else 1
    if type(count) is not int or max(count, 1) != max(parts, 1):
        raise FormatError(
            f"{path} is one of {count!r:.20} parts by its {_COUNT}, and of {parts} by its name:"
            " give it back the name that it was split under"
        )
    if parts <= 1:
        return {}
    assert name is not None
    if int(name["part"]) != 1:
        start = f"{name['model']}-00001-of-{name['parts']}{SUFFIX}"
        raise FormatError(f"{path} is one of {parts} parts of a model: open the first, {start}")
    _require_part(path, first, 0, parts)
    names = [f"{name['model']}-{part:05}-of-{parts:05}{SUFFIX}" for part in range(2, parts + 1)]
    missing = [other for other in names if not (path.parent / other).is_file()]
    require_files(path, path.parent, missing, parts)
    files: dict[str, GGUFFile] = {}
    for number, other in enumerate(names, 1):
        refuse_stand_in(path.parent / other)
        files[other] = GGUFFile(path.parent / other)
        _require_part(path.parent / other, files[other], number, parts)
    return files


def _require_part(path: FilePath, file: GGUFFile, number: int, parts: int) -> None:
    """Raise FormatError unless a file is part `number`, counted from 0, by its own metadata."""
    said = file.head.values.get(_NUMBER), file.head.values.get(_COUNT)
    if said != (number, parts):
        raise FormatError(
            f"{path} says {_NUMBER} {said[0]!r:.20} of {_COUNT} {said[1]!r:.20}, and its name"
            f" {number} of {parts}: the files are not of one split, or were renamed"
        )
