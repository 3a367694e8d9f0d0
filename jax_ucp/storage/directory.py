"""A checkpoint's directory: small files read and written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorstore as ts

from jax_ucp.errors import NotACheckpoint


class Directory:
    """The local directory at `path`.

    Writes are atomic and durable: a file is there whole, or it is not there. Nothing is created before the
    first write. Raises NotACheckpoint for a URL: object stores are not read or written yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if "://" in os.fspath(path):
            raise NotACheckpoint(f"{path} is a URL; this version reads and writes local directories only")
        self.path = os.path.abspath(path)
        self._files: ts.KvStore = ts.KvStore.open(self.spec()).result()

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's description of this directory, or of the one called `name` inside it."""
        below = f"{name}/" if name else ""
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/{below}"}

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""
        with _as_os_errors(self.path):
            result = self._files.read(name).result()
        return None if result.state == "missing" else result.value

    def write(self, name: str, data: bytes) -> None:
        with _as_os_errors(self.path):
            self._files.write(name, data).result()

    def delete(self, name: str) -> None:
        self._files.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result()

    def files(self) -> list[str]:
        """The names of all files, those in directories below included, sorted."""
        with _as_os_errors(self.path):
            return sorted(key.decode() for key in self._files.list().result())

    def __str__(self) -> str:
        return self.path


@contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """What TensorStore says of the file system, as the errors that say it everywhere else."""
    try:
        yield
    except ValueError as error:
        kind = PermissionError if "PERMISSION_DENIED" in str(error) else OSError
        raise kind(f"{path}: {error}") from None
