"""Where a path or a URL leads: the one place that knows of schemes."""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping

from jax_ucp.arguments import URL, local_path
from jax_ucp.errors import UnsupportedPath
from jax_ucp.files.local import WholeDisk, name_fault
from jax_ucp.files.protocol import Files

# Beginnings of the names of environment variables that say where a bucket is, and with which
# credentials it is read.
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "HF_", "HUGGING_FACE_")


def locate(path: str | os.PathLike[str]) -> tuple[Files, str]:
    """The files of a path or URL, and its name there. Raises UnsupportedPath for others."""
    text = os.fspath(path)
    url = URL.match(text) if isinstance(text, str) else None
    if url is None or url["scheme"].lower() == "file":
        named = os.path.abspath(local_path(path))
        return WholeDisk(named), named[1:]
    open_at = _SCHEMES.get(url["scheme"].lower())
    if open_at is None:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UnsupportedPath(f"{text} is a URL of a kind that is not known here: {known}, file://")
    return open_at(text, text[url.end("slashes") :])


def _bucket(scheme: str, text: str, rest: str) -> tuple[Files, str]:
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UnsupportedPath(f"{text} names no bucket: {scheme}://BUCKET/KEY")
    from jax_ucp.files.object_store import Bucket

    return _kept(Bucket, _settings(), scheme, bucket), _checked(text, key)


def _web(scheme: str, text: str, rest: str) -> tuple[Files, str]:
    host, _, path = rest.partition("/")
    if not host or "@" in host or "?" in path or "#" in path:
        raise UnsupportedPath(
            f"{scheme}://{host.rpartition('@')[2]}: a URL here has a host and a path. A user, a"
            " query or a fragment would be lost, or kept in what is written of it"
        )
    try:
        _ = urllib.parse.urlsplit(f"{scheme}://{host}").port
    except ValueError as error:
        raise UnsupportedPath(f"{scheme}://{host} is not an address: {error}") from None
    from jax_ucp.files.web import Web

    return _kept(Web, _settings(), scheme, host), _checked(text, urllib.parse.unquote(path))


def _hub(text: str, rest: str) -> tuple[Files, str]:
    from jax_ucp.files.hub import open_hub, parse

    repo, revision, key = parse(rest)
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        files = _kept(open_hub, _settings(), repo, revision)
    else:  # a branch or a tag, which may name another commit the next time
        files = open_hub(repo, revision)
    return files, _checked(text, key)


def _checked(text: str, key: str) -> str:
    key = key.rstrip("/")
    if key and (fault := name_fault(key)):
        raise UnsupportedPath(f"{text} names no file: {fault}")
    return key


def _settings() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)))


@functools.lru_cache(maxsize=64)
def _kept(make: Callable[..., Files], settings: tuple[tuple[str, str], ...], *place: str) -> Files:
    """The files that `make` gives for a place, with their connections, while settings stay."""
    return make(*place)


_SCHEMES: Mapping[str, Callable[[str, str], tuple[Files, str]]] = {
    "s3": functools.partial(_bucket, "s3"),
    "s3a": functools.partial(_bucket, "s3"),
    "gs": functools.partial(_bucket, "gs"),
    "gcs": functools.partial(_bucket, "gs"),
    "az": functools.partial(_bucket, "az"),
    "azure": functools.partial(_bucket, "az"),
    "abfs": functools.partial(_bucket, "abfs"),
    "hf": _hub,
    "http": functools.partial(_web, "http"),
    "https": functools.partial(_web, "https"),
    "abfss": functools.partial(_bucket, "abfs"),
}
