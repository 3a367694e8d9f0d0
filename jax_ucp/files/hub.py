"""Models of the Hugging Face hub, through `huggingface_hub`: ranges of their files, none on disk.

A revision is a name that may move; what is opened is the commit that it names then, whose files
never change. One request says which they are, of what size and content.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jax_ucp.arguments import require_extra
from jax_ucp.errors import StoreError, UnsupportedPath
from jax_ucp.files.http import ERROR_BYTES, MOST_REDIRECTS, REDIRECTS, redirected, size_by_range
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.remote import PASSING, ReadOnlyFiles, Unanswered, bounded

_TIMEOUT_S = 30
_MESSAGE_CHARS = 300
# Statuses with which the hub's content networks answer requests to an expired link.
_EXPIRED = frozenset({400, 401, 403, 404, 410})
# Hosts that store the hub's files, to which `huggingface.co/.../resolve/...` redirects, such as
# `cdn-lfs-us-1.hf.co` and `cas-bridge.xethub.hf.co`.
_HOSTS = ("huggingface.co", "*.huggingface.co", "hf.co", "*.hf.co")


def open_hub(repo: str, revision: str | None) -> Hub:
    """The files of a model, as of the commit that a revision names now. Raises StoreError."""
    hub = require_extra("huggingface_hub", "hub", f"hf://{repo}")
    url = f"hf://{repo}" + (f"@{revision}" if revision else "")
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    unpinned = Hub(repo, revision or "main", {})

    def ask() -> Any:
        with _asking(url):
            return api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)

    model = unpinned.persist("", ask)
    files = {
        file.rfilename: FileInfo(file.rfilename, file.size or 0, _version(file))
        for file in model.siblings or ()
    }
    return Hub(repo, model.sha, files)


def _version(file: Any) -> str:
    """The hash of the content, by which the hub stores it."""
    return file.lfs.sha256 if file.lfs else file.blob_id


class Hub(ReadOnlyFiles):
    """The files of a model at a commit, below the folder `prefix`. It is read only."""

    def __init__(
        self,
        repo: str,
        commit: str,
        files: Mapping[str, FileInfo],
        prefix: str = "",
        links: dict[str, str] | None = None,
    ):
        self._repo, self._commit, self._files, self._prefix = repo, commit, files, prefix
        # by key, the address to which the hub redirects, which is valid for minutes or hours
        self._links: dict[str, str] = {} if links is None else links

    def __reduce__(self) -> tuple[Any, ...]:  # without the links, which are of this process
        return type(self), (self._repo, self._commit, self._files, self._prefix)

    def url(self, name: str = "") -> str:
        return f"hf://{self._repo}@{self._commit}/{self._key(name)}".removesuffix("/")

    def join(self, folder: str) -> Hub:
        return Hub(self._repo, self._commit, self._files, self.key(folder), self._links)

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        prefix = f"{self.key(folder)}/".lstrip("/")
        for key, file in sorted(self._files.items()):
            if key.startswith(prefix):
                yield FileInfo(key[self._inside :], file.size, file.version)

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        start = len(f"{folder}/") if folder else 0
        entries: dict[str, FileInfo] = {}
        for file in self.walk(folder):
            first, slash, _ = file.name[start:].partition("/")
            name = file.name[:start] + first
            entries[name] = FileInfo(name, 0, "", "folder") if slash else file
        return [entries[name] for name in sorted(entries)]

    def stat(self, name: str) -> FileInfo | None:
        file = self._files.get(self.key(name))
        if file is not None:
            return FileInfo(name, file.size, file.version)
        return FileInfo(name, 0, "", "folder") if any(self.walk(name)) else None

    def digest(self, file: FileInfo) -> str:
        return file.version  # `_version`

    def fetch(self, file: FileInfo, start: int, stop: int) -> memoryview:
        key = self.key(file.name)
        hub = require_extra("huggingface_hub", "hub", self.url())
        endpoint = os.environ.get("HF_ENDPOINT")
        asked = hub.hf_hub_url(self._repo, key, revision=self._commit, endpoint=endpoint)
        link = self._links.get(key)
        url = link or asked
        with _asking(self.url(file.name)):
            for _ in range(MOST_REDIRECTS + 1):
                # Only the head of the answer is read here. Only the hub itself gets the token.
                headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
                if urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(asked)[:2]:
                    headers |= hub.utils.build_hf_headers()
                with hub.utils.get_session().stream(
                    "GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=False
                ) as answer:
                    if answer.status_code not in REDIRECTS:
                        if link is not None and answer.status_code in _EXPIRED:
                            self._links.pop(key, None)
                            raise Unanswered(f"a link has expired, {answer.status_code}")
                        self._require_range(answer, file, start, stop)
                        if url != asked:
                            self._links[key] = url
                        return bounded(answer.iter_raw(), stop - start)
                    url = redirected(url, answer.headers.get("Location"), _HOSTS)
        raise StoreError(f"{self.url(file.name)} redirects more than {MOST_REDIRECTS} times")

    def _require_range(self, answer: Any, file: FileInfo, start: int, stop: int) -> None:
        if answer.status_code >= 400:
            # the library's error for this answer, of which it gets the first bytes
            hub = require_extra("huggingface_hub", "hub", self.url())
            headers = {name: text for name, text in answer.headers.items() if name.startswith("x-")}
            text = next(answer.iter_raw(ERROR_BYTES), b"")
            hub.utils.hf_raise_for_status(
                type(answer)(
                    answer.status_code, headers=headers, content=text, request=answer.request
                )
            )
            raise StoreError(f"{self.url()}: the hub answered with status {answer.status_code}")
        if answer.status_code == 200 and (start, stop) == (0, file.size):
            return
        if answer.status_code != 206:
            raise StoreError(f"{self.url(file.name)}: the hub's server does not answer with ranges")
        size = size_by_range(answer.headers.get("Content-Range"), start, stop)
        if size != file.size:
            raise Unanswered(f"a file of {size} bytes came, where there were {file.size}")

    def spec(self, name: str = "") -> NoReturn:
        raise UnsupportedPath(
            f"{self.url(name)}: arrays that stock Orbax wrote are read through TensorStore, which"
            " has no driver for the hub. Download the checkpoint: hf download"
        )


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Context that raises the errors of `Files` for those of the library."""
    errors = require_extra("huggingface_hub.errors", "hub", url)
    try:
        yield
    except (errors.HFValidationError, errors.OfflineModeIsEnabled) as error:
        raise StoreError(f"{url}: {error}") from error
    except errors.HTTPError as error:
        text = " ".join(str(error).split())[:_MESSAGE_CHARS]
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is None or status in PASSING:
            raise Unanswered(text or type(error).__name__) from error
        raise StoreError(f"{url}: the hub refused: {text}") from error


def parse(rest: str) -> tuple[str, str | None, str]:
    """The model, the revision and the folder or file that follow `hf://` in a URL.

    >>> parse("org/name@refs%2Fpr%2F1/onnx"), parse("org/name")
    (('org/name', 'refs/pr/1', 'onnx'), ('org/name', None, ''))
    """
    org, _, rest = rest.partition("/")
    name, _, key = rest.partition("/")
    name, _, revision = name.partition("@")
    if not org or not name or org in ("datasets", "spaces", "buckets"):
        raise UnsupportedPath(f"hf://{org}/{rest} names no model: hf://ORG/NAME[@REVISION][/PATH]")
    return f"{org}/{name}", urllib.parse.unquote(revision) or None, key
