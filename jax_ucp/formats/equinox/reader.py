"""Files of Equinox: the leaves of a tree one after the other, as numpy writes them, in the order of
`jax.tree.leaves` and without names; a line of JSON may be before them.

Facts: `_serialisation.py` and the example "Serialisation" of equinox 0.13.8; `lib/_format_impl.py`
of numpy 2.4, which writes bfloat16 as two bytes of no type; `jax.numpy.load` takes these for it.
"""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np

from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs.json_values import as_json
from jax_ucp.errors import CorruptData, FormatError, naming
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.weight_files import refuse_stand_in
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import row_major_strides
from jax_ucp.options import Options
from jax_ucp.tree import Key, Leaf

_MAGIC = b"\x93NUMPY\x01\x00"
# Behind it is how long the text is, which describes an array.
_HEAD = re.compile(
    _MAGIC + rb"(..)(\{'descr': '([<|]\w+)', 'fortran_order': (True|False),"
    rb" 'shape': \(([\d, ]*)\), \} *\n)",
    re.DOTALL,
)
_MAX_HEAD_BYTES, _MAX_LINE_BYTES, _MAX_ELEMENTS = 1 << 12, 1 << 20, 1 << 58
_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQefdFD"}
_DTYPES["<V2"] = np.dtype(ml_dtypes.bfloat16)
_NOTE = "Equinox stores neither names nor checksums; leaves are in the order of jax.tree.leaves"


def recognise(path: FilePath) -> bool:
    return path.suffix == ".eqx" and path.is_file()


def parse(path: FilePath, options: Options) -> Contents:
    """The leaves of a file as a list, and the JSON before them as an extra. Raises FormatError for
    bytes of no leaf, CorruptData where the file ends within one.
    """
    refuse_stand_in(path)
    file = StoredFile(path, FileRange(path, file=path.file()))
    infos: dict[str, ArrayInfo] = {}
    stored: dict[str, StoredArray] = {}
    arrays, extras, at = ExtentTable(infos, stored, path.name), {}, 0
    with naming(path):
        if file.data.read(0, 1) != _MAGIC[:1]:
            line, end, _ = file.data.read(0, _MAX_LINE_BYTES).partition(b"\n")
            try:
                said = as_json(decode_json(line, unique_names=True), path.name, arrays.read)
                extras, at = {path.name: {"hyperparameters": said}}, len(line + end)
            except ValueError:
                raise FormatError("it begins neither with a leaf nor with JSON") from None
        while at < file.data.size:
            name = str(len(infos))
            infos[name], stored[name], at = _leaf(file, name, at)
        if not infos:
            raise FormatError("it has no leaves")
    leaves = [
        Leaf((Key("list", int(name)),), name, "array", info.shape, info.dtype.name)
        for name, info in infos.items()
    ]
    items = [Item(leaf.label, "array", "mapped", leaf.label) for leaf in leaves]
    if extras:
        items.append(Item("the first line", "JSON", "extra", "kept as JSON"))
    return Contents("equinox", str(path), leaves, arrays, items, extras=extras, notes=[_NOTE])


def _leaf(file: StoredFile, name: str, at: int) -> tuple[ArrayInfo, StoredArray, int]:
    """The array from a byte of the file on, and where the next one begins."""
    head = file.data.read(at, at + _MAX_HEAD_BYTES)
    begin = end = at + 10 + int.from_bytes(head[8:10], "little")
    if (match := _HEAD.match(head)) and at + match.end() == begin:
        shape = tuple(int(n) for n in match[5].split(b",") if n.strip())
        dtype = _DTYPES.get(match[3].decode())
        if dtype is not None and math.prod(n or 1 for n in shape) < _MAX_ELEMENTS:
            end += math.prod(shape) * dtype.itemsize
            if end <= file.data.size:
                strides = row_major_strides(shape[::-1])[::-1] if match[4] == b"True" else None
                return ArrayInfo(shape, dtype), StoredArray(file, begin, strides), end
    if end > file.data.size and _MAGIC.startswith(head[: len(_MAGIC)]):
        raise CorruptData(f"it ends within leaf {name}: it is cut short")
    raise FormatError(
        f"what should be leaf {name}, at byte {at}, is no array of numbers in one of the types that"
        f" JAX reads: {head[:99]!r}; a filter_spec may have written it"
    )
