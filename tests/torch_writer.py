"""Files as torch.save writes them, made without torch, for layouts of which no run is at hand."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.codecs.unpickle import Record, walk
from jax_ucp.layout.box import Box

KINDS = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "uint8": "ByteStorage",
}
KINDS |= {"float64": "DoubleStorage", "int64": "LongStorage", "bool": "BoolStorage"}
KINDS |= {"int8": "CharStorage", "int16": "ShortStorage", "int32": "IntStorage"}

MAGIC = 0x1950A86A20F9469CFC6C


class Global:
    """A name in a pickle, of a module that is not there."""

    def __init__(self, module: str, name: str):
        self.line = f"c{module}\n{name}\n".encode()

    def __call__(self) -> None:
        raise AssertionError("nothing in a pickle is called")


class Instance:
    """An instance of a class that is not there, with its state, and what it was made from."""

    def __init__(self, dotted: str, state: Any, args: tuple[Any, ...] = ()):
        self.kind, self.state, self.args = Global(*dotted.rsplit(".", 1)), state, args


class Size(tuple):
    """Pickled as torch.Size."""


class Storage:
    """`view` is a part of it, (first element, elements), of views before torch 0.4."""

    def __init__(self, key: str, array: np.ndarray, view: tuple[int, int] | None = None):
        self.key, self.array, self.view = key, array, view


class Tensor:
    """A strided view of a storage; an array is pickled as one with a storage of its own."""

    def __init__(self, storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int]):
        self.storage, self.offset = storage, offset
        self.shape, self.strides = tuple(shape), tuple(strides)


class Pickler(pickle._Pickler):
    """Pickles numpy arrays as tensors, and numpy dtypes as those of torch."""

    def __init__(self, file: io.BytesIO, protocol: int = 2, legacy: bool = False):
        super().__init__(file, protocol=protocol)
        self.legacy = legacy
        self.storages: dict[str, Storage] = {}
        self.alive: list[Any] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, np.dtype):
            obj = Global("torch", obj.name)
        if isinstance(obj, Global):
            self.write(obj.line)
        else:
            super().save(obj, save_persistent_id)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        kind = Global("torch", KINDS[obj.array.dtype.name])
        found: tuple[Any, ...] = "storage", kind, obj.key, "cpu", obj.array.size
        if self.legacy:
            found = *found, None if obj.view is None else (f"{obj.key} view", *obj.view)
        self.storages.setdefault(obj.key, obj)
        self.alive.append(found)
        return found

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Instance):
            return obj.kind, obj.args, obj.state
        if isinstance(obj, Size):
            self.alive.append(args := (tuple(obj),))
            return Global("torch", "Size"), args
        if isinstance(obj, np.ndarray):
            flat = np.ascontiguousarray(obj).reshape(obj.shape)
            strides = tuple(s // obj.itemsize for s in flat.strides)
            obj = Tensor(Storage(str(len(self.alive)), flat), 0, obj.shape, strides)
        if not isinstance(obj, Tensor):
            return NotImplemented
        args = obj.storage, obj.offset, obj.shape, obj.strides, False, OrderedDict()
        self.alive.append(args)
        return Global("torch._utils", "_rebuild_tensor_v2"), args


def pickled(tree: Any) -> bytes:
    Pickler(data := io.BytesIO()).dump(tree)
    return data.getvalue()


def saved(tree: Any) -> bytes:
    pickler = Pickler(data := io.BytesIO())
    pickler.dump(tree)
    with zipfile.ZipFile(whole := io.BytesIO(), "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), data.getvalue())
        for storage in pickler.storages.values():
            file.writestr(zipfile.ZipInfo(f"archive/data/{storage.key}"), storage.array.tobytes())
    return whole.getvalue()


def save(tree: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(saved(tree))


def rewrite(path: Path, members: Callable[[str, bytes], bytes]) -> None:
    """The file with other contents in its members, and the CRCs that go with them."""
    with zipfile.ZipFile(path) as file:
        old = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in old.items():
            file.writestr(name, members(name, data))


def change(path: Path, values: Mapping[str, Callable[[np.ndarray], None]]) -> None:
    """Change the storages of tensors, by key, in place of what they were."""
    nodes = [node for _, node in walk(TorchFile(path).tree) if isinstance(node, StoredTensor)]
    tensors = {node.key: node for node in nodes}
    by_storage = {tensors[key].storage: (tensors[key].dtype, what) for key, what in values.items()}

    def changed(name: str, data: bytes) -> bytes:
        folder, _, key = name.rpartition("/")
        if not folder.endswith("/data") or key not in by_storage:
            return data
        dtype, what = by_storage[key]
        array = np.frombuffer(data, dtype).copy()
        what(array)
        return array.tobytes()

    rewrite(path, changed)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """The file with another object, which `change` changes in place: its tensors are arrays, its
    records instances.

    Arrays of numpy's, which random states have, become lists.
    """
    file = TorchFile(path)

    def plain(node: Any) -> Any:
        match node:
            case StoredTensor():
                return np.array(file.read(node.key, Box.whole(node.shape)))
            case np.ndarray() | np.generic():
                return node.tolist()
            case Record():
                return Instance(node.type, plain(node.state), plain(node.args))
            case dict():
                return {plain(key): plain(value) for key, value in node.items()}
            case list() | tuple():
                return type(node)(map(plain, node))
        return node

    tree = plain(file.tree)
    change(tree)
    save(tree, path)


def legacy(tree: Any, protocol=2, magic=MAGIC, version=1001, keys: Any = None) -> bytes:
    """The format before torch 1.6: pickles, then storages; `keys` in place of the right list."""
    pickler = Pickler(data := io.BytesIO(), protocol, legacy=True)
    pickler.dump(tree)
    about = {"protocol_version": 1001, "little_endian": True}
    about["type_sizes"] = {"short": 2, "int": 4, "long": 4}
    head = b"".join(pickle.dumps(value, protocol) for value in (magic, version, about))
    listed = sorted(pickler.storages) if keys is None else keys
    arrays = [storage.array for _, storage in sorted(pickler.storages.items())]
    body = b"".join(a.size.to_bytes(8, "little") + a.tobytes() for a in arrays)
    return head + data.getvalue() + pickle.dumps(listed, protocol) + body
