"""Checkpoints as PyTorch's DCP writes them, made without torch: any chunks, in any files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.layout.box import Box
from torch_writer import Instance, Size, pickled, saved

MODULE = "torch.distributed.checkpoint"


class Writer:
    """Appends items to files, and keeps the tables of `.metadata`, which a test may change."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, Any] = {}
        self.storage: dict[Instance, Instance] = {}
        self.paths: dict[str, Sequence[str | int]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def tensor(self, fqn: str, whole: np.ndarray, chunks: Iterable[tuple[str, Box]]) -> None:
        """Each chunk is a box of `whole` in a file. Of several at one offset one has elements."""
        chunks = list(chunks)
        self.declare(fqn, whole.dtype, whole.shape, [box for _, box in chunks])
        stored = {box.start: (file, box) for file, box in sorted(chunks, key=lambda x: x[1].size)}
        for file, box in stored.values():
            self.item(fqn, file, box.start, np.asarray(whole[box.index]))

    def declare(self, fqn: str, dtype: np.dtype, shape: Sequence[int], boxes: Iterable[Box]):
        fields = dtype, None, False, None, False
        properties = Instance(f"{MODULE}.metadata.TensorProperties", fields)
        kind = f"{MODULE}.metadata.ChunkStorageMetadata"
        places = [(Size(box.start), Size(box.shape)) for box in dict.fromkeys(boxes)]
        chunks = [Instance(kind, {"offsets": start, "sizes": shape}) for start, shape in places]
        state = {"properties": properties, "size": Size(shape), "chunks": chunks}
        self.tensors[fqn] = Instance(f"{MODULE}.metadata.TensorStorageMetadata", state)

    def item(self, fqn: str, file: str, offset: Sequence[int] | None, value: Any) -> None:
        data = saved(value)
        path = self.folder / file
        at = path.stat().st_size if path.exists() else 0
        with path.open("ab") as stream:
            stream.write(data)
        self.place(fqn, offset, file, at, len(data))

    def place(self, fqn: str, offset: Sequence[int] | None, file: str, at: int, length: int):
        where = {"fqn": fqn, "offset": None if offset is None else Size(offset), "index": None}
        index = Instance(f"{MODULE}.metadata.MetadataIndex", where)
        info = {"relative_path": file, "offset": at, "length": length}
        self.storage[index] = Instance(f"{MODULE}.filesystem._StorageInfo", info)

    def object(self, fqn: str, file: str, value: Any) -> None:
        self.tensors[fqn] = Instance(f"{MODULE}.metadata.BytesStorageMetadata", {})
        self.item(fqn, file, None, value)

    def finish(self, name: str = ".metadata") -> Path:
        paths = {fqn: tuple(path) for fqn, path in self.paths.items()} or None
        tables: dict[str, Any] = {"state_dict_metadata": self.tensors, "planner_data": paths}
        tables["storage_data"] = self.storage
        (self.folder / name).write_bytes(pickled(Instance(f"{MODULE}.metadata.Metadata", tables)))
        return self.folder
