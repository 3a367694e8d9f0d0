"""What callers give: paths and numbers, checked in one place before anything is read or written."""

from __future__ import annotations

import operator
import os
import re
import urllib.parse
from pathlib import Path

from jax_ucp.errors import UnsupportedPath

# One slash is enough: pathlib makes `s3:/bucket/x` of `s3://bucket/x`, and `s3:` of `s3://`. A
# scheme has at least two characters.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(/|$)")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, which is of this machine's file system.

    A folder whose name looks like a URL, or begins with `~`, is given by its absolute path.

    Raises UnsupportedPath for a URL, for a home directory that nobody expanded, and for a path that
    is empty or has a NUL in it: made a Path, they would name something else.

    >>> local_path("runs/7")
    PosixPath('runs/7')
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
    if url := _URL.match(text):
        raise UnsupportedPath(
            f"{text} is a URL; this version reads and writes local files only. {_remedy(text, url)}"
        )
    home = os.path.expanduser(text)
    if text.startswith("~") and home != text:
        raise UnsupportedPath(f"{text} begins with ~, which only a shell expands; write {home}")
    return Path(text)


def whole_number(name: str, value: object, least: int = 1) -> int:
    """The argument called `name` as an int. Raises ValueError where it is no whole number, or below
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
    """The argument called `name`, which is True or False. Raises ValueError for anything else,
    such as "no".
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.80} should be True or False")
    return value


def _remedy(text: str, url: re.Match[str]) -> str:
    """What to give in place of a URL."""
    plain = re.sub(r"^//(localhost)?(?=/)", "", text[len(url["scheme"]) + 1 :])
    if url["scheme"].lower() == "file" and re.match(r"/[^/]", plain):
        return f"Write {urllib.parse.unquote(plain)}"
    return "Copy it to a local folder, or give the path where it is mounted"
