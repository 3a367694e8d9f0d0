"""Requests over a network, many at once, in pools of threads that all of a process shares."""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from jax_ucp.files.protocol import FileInfo, Files

if TYPE_CHECKING:
    from jax_ucp.files.path import FilePath

# One connection carries 20 to 90 MB/s, however fast the network is, so many are used at once.
REQUESTS, FILES = 64, 32
LOOKED_UP = 32  # more names than that are looked up in a list of their folder

T = TypeVar("T")
R = TypeVar("R")


def request_all(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of requests made at once, in order. Raises the first error after all end."""
    return _all(_pool(os.getpid(), "request", REQUESTS), function, list(items))


def each_file(files: Files, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of a function of each file, in order; over a network they are computed at once.

    The function may call `request_all`, but not `each_file`.
    """
    if not files.is_remote:
        return list(map(function, items))
    return _all(_pool(os.getpid(), "file", FILES), function, list(items))


def opened_files(
    folder: FilePath, names: Iterable[str], open_file: Callable[[FilePath], R]
) -> dict[str, R]:
    paths = {name: folder / name for name in names}
    opened = each_file(folder.files, open_file, paths.values())
    return dict(zip(paths, opened, strict=True))


def stat_all(files: Files, names: Sequence[str]) -> list[FileInfo | None]:
    """The file that has each name now, or None; many are looked up in lists over a network."""
    if not files.is_remote:
        return list(map(files.find, names))
    listed: dict[str, FileInfo] = {}
    if len(names) > LOOKED_UP:
        around = os.path.commonpath([f"/{os.path.dirname(name)}" for name in names])
        listed = {file.name: file for file in files.walk(around.strip("/"))}
    missing = list(itertools.filterfalse(listed.__contains__, names))
    asked = zip(missing, request_all(files.find, missing), strict=True)
    info_of = {**listed, **dict(asked)}
    return [info_of[name] for name in names]


def _all(pool: ThreadPoolExecutor, function: Callable[[T], R], items: list[T]) -> list[R]:
    if len(items) < 2:
        return list(map(function, items))
    futures: list[Future[R]] = []
    for item in items:
        run = contextvars.copy_context().run
        futures.append(pool.submit(run, function, item))
    wait(futures)
    return [future.result() for future in futures]


@functools.lru_cache(maxsize=4)
def _pool(process: int, name: str, size: int) -> ThreadPoolExecutor:
    """The threads of this process: a fork has its parent's object, and none of its threads."""
    return ThreadPoolExecutor(size, thread_name_prefix=f"jax-ucp-{name}")
