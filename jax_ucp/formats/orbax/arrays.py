"""The arrays that Orbax, T5X and Paxml leave: zarr v2 or v3, in folders or OCDBT databases.

Facts: `_src/serialization/tensorstore_utils.py` and `ocdbt_utils.py` of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from jax_ucp.arrays.budget import HELD_BYTES
from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Piece
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, MakesArrays
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.protocol import Files
from jax_ucp.layout.blocks import grid_shape, whole_chunks
from jax_ucp.layout.box import Box
from jax_ucp.universal.ocdbt import MANIFEST_FILE
from jax_ucp.universal.validation import is_dtype

# The database of one process; a save of several ends by making one of theirs.
PROCESS_PREFIX = "ocdbt.process_"

# No codec of zarr makes more of a byte: a block of zstd has 4 bytes at least, and inflates to 128
# KiB at most.
MAX_RATIO = 1 << 15

# Chunks of nothing but zeros, which older versions of Orbax left out, may make so much of no bytes
# at all.
FREE_BYTES = 1 << 30
# No codec of Orbax's makes a chunk much longer than it was; small ones have headers.
CHUNK_SLACK_BYTES = 1 << 26

_V2_FILE, _V3_FILE = ".zarray", "zarr.json"

# What TensorStore raises for a checkpoint that is damaged, depending on where.
_TENSORSTORE_ERRORS = (ValueError, IndexError, OverflowError, NotImplementedError)


@dataclass(frozen=True)
class ZarrFolder:
    """How the arrays of a folder are stored.

    Attributes:
        folder: Where they are.
        said_by: The file that says which there are, for messages.
        databases: The OCDBT databases below the folder; "" is the folder itself. Without any, each
            array has a folder of its own.
        zarr3: They are of zarr v3; else of v2.
        complete: A chunk that is not there is a loss, and not zeros.
    """

    folder: Files
    said_by: str
    databases: tuple[str, ...] = ()
    zarr3: bool = False
    complete: bool = False

    @property
    def is_unmerged(self) -> bool:
        """Whether several processes wrote a database each, and none was made of them."""
        return bool(self.databases) and self.databases != ("",)


def databases(folder: Files, ocdbt: bool | None) -> tuple[str, ...]:
    """The databases of a folder, by `ocdbt` of its files or by a manifest. Raises FormatError.

    Where only processes have databases, the save was never merged.
    """
    if ocdbt is False:
        return ()
    if folder.stat(MANIFEST_FILE):
        return ("",)
    # those of processes, numbered from 0
    folders = [entry.name for entry in folder.list() if entry.name.startswith(PROCESS_PREFIX)]
    expected = [f"{PROCESS_PREFIX}{i}" for i in range(len(folders))]
    whole = [name for name in expected if folder.stat(f"{name}/{MANIFEST_FILE}")]
    if whole != expected:
        raise FormatError(
            f"{folder} has no {MANIFEST_FILE}, and {', '.join(sorted(folders))} are not whole"
            " databases of processes 0 and up: the save was not finished, or files are missing"
        )
    return tuple(whole) or (("",) if ocdbt else ())


def check_size(storage: ZarrFolder, arrays: Mapping[str, ArrayInfo]) -> None:
    """Raise FormatError where arrays are larger than the bytes that are stored could make them."""
    claimed = sum(info.nbytes for info in arrays.values())
    files = [*storage.folder.walk()]
    stored = sum(file.size for file in files)
    # TensorStore reads the file of a chunk whole, and ends the process where there is no memory
    for file in () if storage.databases else files:
        if "/" in file.name and file.size > 2 * claimed + CHUNK_SLACK_BYTES:
            raise FormatError(
                f"{storage.folder}/{file.name} has {file.size:,} bytes, and all arrays have"
                f" {claimed:,}: it is damaged, or not part of the checkpoint"
            )
    if claimed > FREE_BYTES + MAX_RATIO * stored:
        raise FormatError(
            f"{storage.folder} says that its arrays have {claimed} bytes, but its files have"
            f" {stored}, of which no codec makes more than {MAX_RATIO} each: the shape of an array"
            " is damaged, or files are missing"
        )


def names_beside(storage: ZarrFolder, stored: Mapping[str, str]) -> set[str]:
    """The folder's entries that belong to the named arrays. Raises FormatError for two of one."""
    if storage.databases:
        folders = {file.name.partition("/")[0] for file in storage.folder.walk()}
        processes = {name for name in folders if name.startswith(PROCESS_PREFIX)}
        return processes | {"d", "ocdbt_meta", "ocdbt_data", MANIFEST_FILE}
    files = {file.name for file in storage.folder.walk()}
    for name in stored.values():
        if {f"{name}/{_V2_FILE}", f"{name}/{_V3_FILE}"} <= files:
            raise FormatError(
                f"{storage.folder}/{name} has {_V2_FILE} and {_V3_FILE}: an array of zarr v2 and"
                f" one of v3, of two saves, lie in one folder. By {storage.said_by} it is the one"
                f" of v{3 if storage.zarr3 else 2}; move the other away"
            )
    return {name.partition("/")[0] for name in stored.values()}


def joined(*sources: ArraySource) -> ArraySource:
    """The arrays of sources that have no name in common, as one."""
    places = {name: (source, name) for source in sources for name in source.arrays()}
    arrays = {name: source.arrays()[name] for name, (source, _) in places.items()}
    return Combined(arrays, places, [("", source) for source in sources])


class ZarrArrays(MakesArrays):
    """The arrays of a stock checkpoint, by their leaves' names.

    A large chunk that is read in several blocks stays decoded until another is wanted.
    """

    def __init__(self, storage: ZarrFolder, stored: Mapping[str, str]):
        """`stored` has the names of arrays in the folder. Raises FormatError."""
        self._storage, self._stored = storage, stored
        self._specs = _specs(storage, stored)
        self._handles: dict[str, Any] = {}
        self._infos: dict[str, ArrayInfo] = {}
        self._decoded: tuple[str, Box, Any] | None = None
        self._lock = threading.Lock()
        opening = {name: ts.open(spec, open=True) for name, spec in self._specs.items()}
        for name, future in opening.items():
            fails = (
                f"{storage.folder}: {storage.said_by} has {stored[name]}, whose array is unreadable"
            )
            try:
                array = self._handles[name] = future.result()
            except _TENSORSTORE_ERRORS as error:
                raise FormatError(f"{fails}: {error}") from None
            if fault := _array_fault(array):
                raise FormatError(f"{fails}: it {fault}")
            chunk = tuple(int(n or 1) for n in array.chunk_layout.read_chunk.shape or ())
            self._infos[name] = ArrayInfo(tuple(array.shape), array.dtype.numpy_dtype, chunk)
            if storage.is_unmerged:
                # a chunk may be in no database as it is zeros, or as a database is missing
                written = tuple(int(n or 1) for n in array.chunk_layout.write_chunk.shape or ())
                chunks = math.prod(grid_shape(array.shape, written))
                present = len(self._specs[name]["kvstore"]["layers"]) - 1
                if present != chunks:
                    raise FormatError(
                        f"{storage.folder}: of {chunks} chunks of {stored[name]!r:.200} the"
                        f" databases of processes have {present}: they were never merged, so that"
                        " nothing says whether a database is missing"
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": {}, "_decoded": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._infos

    def read(self, key: str, box: Box) -> np.ndarray:
        try:
            return np.asarray(self._handle(key, box)[box.index].read().result())
        except _TENSORSTORE_ERRORS as error:
            raise CorruptData(f"{self._storage.folder}/{key}: {error}") from None

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        stored, storage = self._stored[key], self._storage
        database = ", ".join(f"{at}/{MANIFEST_FILE}".lstrip("/") for at in storage.databases)
        yield Piece(database or stored, stored, box, box)

    def _handle(self, key: str, box: Box) -> Any:
        """The array for a read of `box`: with a cache for the chunks that are larger."""
        info = self._infos[key]
        around = whole_chunks(box, info.chunk or box.shape)
        nbytes = around.size * info.dtype.itemsize
        if nbytes < HELD_BYTES or around.intersect(Box.whole(info.shape)) == box:
            if key not in self._handles:
                self._handles[key] = ts.open(self._specs[key], open=True).result()
            return self._handles[key]
        with self._lock:
            if self._decoded is None or self._decoded[:2] != (key, around):
                # the memory of the last ones goes before that of the next is taken
                self._decoded = None
                context = ts.Context({"cache_pool": {"total_bytes_limit": 2 * nbytes}})
                self._decoded = (
                    key,
                    around,
                    ts.open(self._specs[key], open=True, context=context).result(),
                )
            return self._decoded[2]


def _array_fault(array: Any) -> str | None:
    """The property of an array that stock Orbax never writes, and that could take any memory."""
    if not is_dtype(array.dtype.name):
        return f"has the dtype {array.dtype.name}"
    for chunks in (array.chunk_layout.read_chunk, array.chunk_layout.write_chunk):
        if any(c > max(1, n) for c, n in zip(chunks.shape or (), array.shape, strict=False)):
            return (
                f"has chunks of {tuple(chunks.shape)}, which are larger than its shape"
                f" {tuple(array.shape)}"
            )
    # A blosc chunk is inflated whole before its size is looked at; the other codecs stop at that of
    # the chunk.
    if '"blosc"' in json.dumps(array.codec.to_json()):
        return "is compressed with blosc, which Orbax does not write"
    return None


def _specs(storage: ZarrFolder, stored: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    layers = _process_layers(storage) if storage.is_unmerged else {}
    specs: dict[str, dict[str, Any]] = {}
    for name, at in stored.items():
        kvstore = {"driver": "ocdbt", "base": storage.folder.spec(), "path": f"{at}/"}
        if not storage.databases:
            kvstore = storage.folder.spec(at)
        elif storage.is_unmerged:
            kvstore = {"driver": "kvstack", "layers": layers.get(at, [])}
        specs[name] = {
            "driver": "zarr3" if storage.zarr3 else "zarr",
            "kvstore": kvstore,
            "recheck_cached_data": "open",
            "fill_missing_data_reads": not storage.complete and not storage.is_unmerged,
        }
    return specs


def _process_layers(storage: ZarrFolder) -> dict[str, list[dict[str, Any]]]:
    """The files of each array in its processes' databases. Raises FormatError for twins."""
    layers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    owners: dict[str, Any] = {}
    for database in storage.databases:
        base = {"driver": "ocdbt", "base": storage.folder.spec(database)}
        try:
            values = ts.KvStore.open(base).result()
            keys = [key.decode() for key in values.list().result()]
            for key in keys:
                name, file = _array_and_file(key)
                if key not in owners:
                    owners[key] = values
                    layers[name].append({"base": {**base, "path": key}, "exact": file})
                    continue
                same = {of.read(key).result().value for of in (values, owners[key])}
                if file not in (_V2_FILE, _V3_FILE) or len(same) > 1:
                    raise FormatError(
                        f"{storage.folder}: {database} has {key!r:.200}, which the database of"
                        " another process has too: they are of two saves"
                    )
        except _TENSORSTORE_ERRORS as error:
            raise FormatError(f"{storage.folder}/{database} is unreadable: {error}") from None
    return layers


def _array_and_file(key: str) -> tuple[str, str]:
    """An array's name and the name of a file of it: `.zarray` and `0.1` of v2, `zarr.json` and
    `c/0/1` of v3.

    >>> _array_and_file("a/b/0.1"), _array_and_file("w/c/0/1")
    (('a/b', '0.1'), ('w', 'c/0/1'))
    """
    parts = key.split("/")
    first = len(parts) - 1
    while first > 1 and parts[first].isdecimal():
        first -= 1
    if parts[first] != "c":
        first = len(parts) - 1
    return "/".join(parts[:first]), "/".join(parts[first:])
