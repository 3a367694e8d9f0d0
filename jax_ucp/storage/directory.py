"""A checkpoint's directory: small files read and written whole, on a local disk or an object store."""

from __future__ import annotations

import os
from typing import Any

import tensorstore as ts


class Directory:
    """The directory at `path`: a local path, or a URL that TensorStore knows (`gs://`, `s3://`).

    Writes are atomic and durable: a file is there whole, or it is not there. Nothing is created
    before the first write.
    """

    def __init__(self, path: str | os.PathLike[str]):
        text = os.fspath(path)
        self.path = text if "://" in text else os.path.abspath(text)
        self._files: ts.KvStore = ts.KvStore.open(self.spec()).result()

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's description of this directory, or of the one called `name` inside it."""
        below = f"{name}/" if name else ""
        if "://" not in self.path:
            return {"driver": "file", "path": f"{self.path.rstrip('/')}/{below}"}
        spec: dict[str, Any] = ts.KvStore.Spec(f"{self.path.rstrip('/')}/").to_json()
        return spec | {"path": spec["path"] + below}

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""
        result = self._files.read(name).result()
        return None if result.state == "missing" else result.value

    def write(self, name: str, data: bytes) -> None:
        self._files.write(name, data).result()

    def delete(self, name: str) -> None:
        self._files.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result()

    def files(self) -> list[str]:
        """The names of all files, those in directories below included, sorted."""
        return sorted(key.decode() for key in self._files.list().result())

    def __str__(self) -> str:
        return self.path
