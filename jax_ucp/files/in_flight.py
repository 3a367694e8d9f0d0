"""Requests over a network, many at once: how many is decided here, for all of a process."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jax_ucp.files.protocol import Files

# One connection carries 20 to 90 MB/s, whatever the network does: what is fast is many of them.
REQUESTS, FILES = 64, 32

T = TypeVar("T")
R = TypeVar("R")


def request_all(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What the function makes of each item, in order; each is one request, none of which waits for
    another. Raises the first error, when all have ended.
    """
    return _all(_pool(os.getpid(), "request", REQUESTS), function, list(items))


def each_file(files: Files, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What the function makes of each item, in order: many at once where it waits for a network,
    and otherwise one after the other. It may make requests, and must not call this.
    """
    if not files.is_remote:
        return [function(item) for item in items]
    return _all(_pool(os.getpid(), "file", FILES), function, list(items))


def _all(pool: ThreadPoolExecutor, function: Callable[[T], R], items: list[T]) -> list[R]:
    if len(items) < 2:
        return [function(item) for item in items]
    runs = [contextvars.copy_context().run for _ in items]
    futures = [pool.submit(run, function, item) for run, item in zip(runs, items, strict=True)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@functools.lru_cache(maxsize=4)
def _pool(process: int, name: str, size: int) -> ThreadPoolExecutor:
    """The threads of this process: a fork has its parent's object, and none of its threads."""
    return ThreadPoolExecutor(size, thread_name_prefix=f"jax-ucp-{name}")
