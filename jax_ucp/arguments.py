"""Checks of arguments: paths, numbers, switches and optional libraries."""

from __future__ import annotations

import importlib
import operator
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

from jax_ucp.errors import UnsupportedPath

# One slash or none is enough: pathlib turns `s3://bucket/x` into `s3:/bucket/x`, and `s3://` into
# `s3:`.
# A scheme has at least two characters.
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/{1,2}|$)")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path in this machine's file system, with `~` and `file://` resolved.

    A folder whose name looks like a URL, or begins with `~`, must be given by its absolute path.

    Raises UnsupportedPath for another URL, and for a path that is empty or has a NUL in it, because
    a Path of it would name something else.

    >>> local_path("runs/7"), local_path("file:///runs/7%20b")
    (PosixPath('runs/7'), PosixPath('/runs/7 b'))
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise UnsupportedPath(
            f"{text!r:.200} is a path of bytes; give it as text: os.fsdecode(path)"
        )
    if not text or "\0" in text:
        raise UnsupportedPath(
            f"{text!r:.200} names no file: a path is not empty and has no NUL in it"
        )
    if url := URL.match(text):
        plain = re.sub(r"^//(localhost)?(?=/)", "", text[len(url["scheme"]) + 1 :])
        if url["scheme"].lower() == "file" and re.match(r"/[^/]", plain):
            return Path(urllib.parse.unquote(plain))
        raise UnsupportedPath(f"{text} is a URL, and here a local file or folder is needed")
    return Path(text).expanduser() if os.path.expanduser(text) != text else Path(text)


def require_extra(module: str, extra: str, what: str) -> Any:
    """A module of a library that is installed with `jax_ucp[extra]`.

    Raises UnsupportedPath if it is missing, with a message that `what` cannot be read without it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise UnsupportedPath(
            f"{what} is read through {library}, which is not installed:"
            f' pip install "jax_ucp[{extra}]"'
        ) from error


def whole_number(name: str, value: object, least: int = 1) -> int:
    """The argument `name` as an int. Raises ValueError if it is not a whole number of at least
    `least`.

    >>> whole_number("hosts", 4)
    4
    """
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r:.80} should be a whole number, at least {least}")
    return number


def switch(name: str, value: object) -> bool:
    """The argument `name`, True or False. Raises ValueError for anything else, such as "no"."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.80} should be True or False")
    return value
