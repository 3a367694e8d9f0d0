"""Buckets of S3, Google Cloud Storage and Azure, through `obstore`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

from jax_ucp.arguments import require_extra
from jax_ucp.errors import CorruptData, StoreError, UnsupportedPath
from jax_ucp.files.protocol import FileInfo, read_bytes
from jax_ucp.files.remote import Refused, RemoteFiles, Unanswered, bounded

# A file of at least PUT_BYTES is uploaded in parts, several at once. S3 and Google Cloud Storage
# take at most 10,000 parts, of which only the last may be below 5 MiB. An upload in parts takes two
# more requests, so that a chunk of 16 MiB with its checksums is uploaded whole.
PUT_BYTES, PART_BYTES, PARTS_AT_ONCE = 24 << 20, 16 << 20, 8
LEAST_PART_BYTES, MOST_PARTS = 5 << 20, 10_000

# How often the library itself repeats a request before it raises an error.
RETRIES = 4
_RETRY = {
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
}
# A read has at most a few MiB, so one that takes longer has stopped. An upload has more, and many
# uploads share a connection that may be slow.
READ_TIMEOUT, WRITE_TIMEOUT, CONNECT_TIMEOUT = "30s", "5min", "10s"
_MESSAGE_CHARS = 300

Chunk = bytes | bytearray
R = TypeVar("R")


class Bucket(RemoteFiles):
    """The objects of a bucket whose keys begin with `prefix`.

    The parts of keys before slashes are folders. An empty object whose key ends in a slash, as the
    clouds' web consoles write it, marks a folder and is not a file.
    """

    def __init__(self, scheme: str, bucket: str, prefix: str = "", store: Any = None):
        self._scheme, self._bucket, self._prefix = scheme, bucket, prefix
        self._store = store or open_store(scheme, bucket)

    @cached_property
    def _writer(self) -> Any:
        return open_store(self._scheme, self._bucket, timeout=WRITE_TIMEOUT)

    def __reduce__(self) -> tuple[Any, ...]:  # each process has credentials of its own
        return type(self), (self._scheme, self._bucket, self._prefix)

    def url(self, name: str = "") -> str:
        return f"{self._scheme}://{self._bucket}/{self._key(name)}".removesuffix("/")

    def join(self, folder: str) -> Bucket:
        return Bucket(self._scheme, self._bucket, self.key(folder), self._store)

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        prefix = self.key(folder)
        entries = self._ask(folder, lambda: obstore().list_with_delimiter(self._store, prefix))
        prefixes = entries["common_prefixes"]
        folders = [FileInfo(key[self._inside :], 0, "", "folder") for key in prefixes]
        files = [_info(meta["path"][self._inside :], meta) for meta in entries["objects"]]
        # a key may be that of a file and the beginning of others: then only the file is listed
        names = {file.name for file in files} | {folder}
        folders = [entry for entry in folders if entry.name not in names]
        files = [file for file in files if file.name != folder]  # an object that marks the folder
        return sorted((*folders, *files), key=lambda entry: entry.name)

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        """Every file below a folder; one request lists a thousand."""
        prefix = self.key(folder)
        pages = self._ask(folder, lambda: [*obstore().list(self._store, prefix)])
        objects = [_info(meta["path"][self._inside :], meta) for page in pages for meta in page]
        files = sorted(objects, key=lambda file: file.name)
        folders = {folder}.union(*(_folders(file.name) for file in files))
        yield from (file for file in files if file.size or file.name not in folders)

    def stat(self, name: str) -> FileInfo | None:
        if file := self.find(name):
            return file
        return FileInfo(name, 0, "", "folder") if self.list(name) else None

    def find(self, name: str) -> FileInfo | None:
        key = self.key(name)
        with contextlib.suppress(FileNotFoundError):
            if key:
                return _info(name, self._ask(name, lambda: obstore().head(self._store, key)))
        return None

    def fetch(self, file: FileInfo, start: int, stop: int) -> memoryview:
        key, options = self.key(file.name), {"range": (start, stop)}
        with _asking(self.url(file.name)):
            answer = obstore().get(self._store, key, options=options)
            if _info(file.name, answer.meta) != file:
                raise CorruptData(
                    f"{self.url(file.name)} has changed since it was opened; open it again"
                )
            if answer.range != (start, stop):
                raise Unanswered(f"bytes {answer.range} came, of {start} to {stop}")
            # a longer answer comes in two chunks, neither of which is much longer than this
            return bounded(answer.stream(min_chunk_size=stop - start), stop - start)

    def write(
        self, name: str, parts: Iterable[bytes | memoryview], *, durable: bool
    ) -> FileInfo | None:
        """Write a file, which is whole or not there at any time, whether `durable` or not."""
        return self._write(name, parts, PART_BYTES, PARTS_AT_ONCE, PUT_BYTES)

    def write_large(
        self, name: str, parts: Iterable[bytes | memoryview], size: int, max_bytes: int
    ) -> None:
        """Upload in parts of 5 to 16 MiB, or larger if there would be more than 10,000 of them."""
        wanted = max(LEAST_PART_BYTES, min(PART_BYTES, max_bytes // 4))
        part_bytes = max(wanted, -(-size // MOST_PARTS))
        # beside those in flight, one part is assembled and one waits
        at_once = max(1, min(PARTS_AT_ONCE, max_bytes // part_bytes - 2))
        self._write(name, parts, part_bytes, at_once)

    def _write(
        self,
        name: str,
        parts: Iterable[bytes | memoryview],
        part_bytes: int,
        at_once: int,
        put_bytes: int = 0,
    ) -> FileInfo | None:
        """Write a file in parts, or by one request if it is smaller than a part or `put_bytes`."""
        key, put_bytes = self.key(name), max(put_bytes, part_bytes)
        with contextlib.closing(_chunks(parts, put_bytes)) as chunks:
            first = [next(chunks, b"")]
            if len(first[0]) < put_bytes:
                put = self._ask(
                    name, lambda: obstore().put(self._writer, key, first[0], use_multipart=False)
                )
                return FileInfo(name, len(first[0]), _etag(put)) if put["e_tag"] else None
            options = {"chunk_size": part_bytes, "max_concurrency": at_once}
            return self._upload(name, itertools.chain(_popped(first), chunks), options)

    def _upload(
        self, name: str, chunks: Iterator[bytes | bytearray], options: Mapping[str, int]
    ) -> FileInfo:
        """Write a file in parts. The library repeats failed parts; an upload cannot be repeated."""
        size, key = 0, self.key(name)
        failed: list[Exception] = []  # errors of the iterator of parts, as opposed to the store's

        def counted() -> Iterator[Chunk]:
            nonlocal size
            try:
                while chunk := maker.submit(next, chunks, b"").result():
                    size += len(chunk)
                    yield chunk
            except Exception as error:
                failed.append(error)
                raise

        try:
            # the library allows no other request in the thread in which it takes the parts
            with _asking(self.url(name)), ThreadPoolExecutor(1) as maker:
                obstore().put(self._writer, key, counted(), use_multipart=True, **options)
        except Exception as error:
            if failed:
                raise failed[0] from failed[0].__cause__
            if isinstance(error, Unanswered):
                raise StoreError(f"{self.url(name)} was not written: {error}") from error
            raise
        info = self.find(name)
        if info is None or info.size != size:
            raise StoreError(f"{self.url(name)} was written with {size} bytes, and has {info}")
        return info

    def create(self, name: str, data: bytes) -> None:
        """Write a file. Raises FileExistsError if there is an object of that key.

        A request that was not answered may have created the object: an object with the same bytes
        is then taken for ours. So writers that may race put a mark of their own into the bytes.
        """
        once = open_store(self._scheme, self._bucket, retries=0)
        was_asked = False

        def ask() -> None:
            nonlocal was_asked
            again, was_asked = was_asked, True
            try:
                with _asking(self.url(name)):
                    options = {"mode": "create", "use_multipart": False}
                    obstore().put(once, self.key(name), data, **options)
            except FileExistsError:
                info = self.find(name) if again else None
                if info is None or info.size != len(data) or read_bytes(self, info) != bytes(data):
                    raise

        self.persist(name, ask)

    def delete(self, name: str) -> None:
        key = self.key(name)
        with contextlib.suppress(FileNotFoundError):
            self._ask(name, lambda: obstore().delete(self._store, key))

    def spec(self, name: str = "") -> dict[str, Any]:
        make = _KVSTORES.get(self._scheme)
        if make is None:
            raise UnsupportedPath(
                f"{self.url(name)}: arrays that stock Orbax wrote are read through TensorStore,"
                f" which has no driver for {self._scheme}://. Copy the checkpoint to a local"
                " folder, or to S3 or Google Cloud Storage"
            )
        key = self.key(name)
        return make(self._bucket) | {"path": f"{key}/" if key else ""}

    def _ask(self, name: str, ask: Callable[[], R]) -> R:
        def asked() -> R:
            with _asking(self.url(name)):
                return ask()

        return self.persist(name, asked)


@contextlib.contextmanager
def _asking(url: str) -> Iterator[None]:
    """Context that raises the errors of `Files` for those of the library."""
    try:
        yield
    except (CorruptData, StoreError, Unanswered):
        raise
    except Exception as error:
        exceptions = _exceptions()
        text = _plain(error)
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
        if isinstance(error, exceptions.AlreadyExistsError):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url) from error
        denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        if isinstance(error, denied):
            raise Refused(
                f"{url}: the store refused ({text}). Which credentials are taken is in"
                " docs/where-checkpoints-live.md"
            ) from error
        if isinstance(error, exceptions.BaseError) and _may_pass(text):
            raise Unanswered(text) from error
        if isinstance(error, exceptions.BaseError | ValueError):
            raise StoreError(f"{url}: {text}") from error
        raise


def _plain(error: BaseException) -> str:
    """The first part of the library's message, without the dump of its own structures; of an answer
    in XML its code and message.

    >>> _plain(ValueError("404: <?xml ?><Error><Code>NoSuchBucket</Code><Message>No.</Message>"))
    '404: NoSuchBucket, No.'
    """
    text = str(error).partition("\n\nDebug source")[0]
    before, begin, answer = text.partition("<?xml")
    fields = re.findall(r"<(?:Code|Message)>([^<]{1,200})<", answer) if begin else []
    return f"{before}{', '.join(fields) or begin + answer}"[:_MESSAGE_CHARS]


def _may_pass(text: str) -> bool:
    """Whether the same request may succeed later: not if it is wrong, or its key has no path."""
    if "invalid path" in text:
        return False
    _, _, status = text.partition("status code: ")
    return not status.startswith(("4", "501")) or status.startswith(("408", "425", "429"))


def open_store(
    scheme: str, bucket: str, retries: int = RETRIES, timeout: str = READ_TIMEOUT
) -> Any:
    """The library's store, with the settings of the cloud's own tools. Raises StoreError."""
    obstore_store = require_extra("obstore.store", "cloud", f"{scheme}://{bucket}")
    make, config = _STORES[scheme]
    container, settings = config(bucket)
    client = {"timeout": timeout, "connect_timeout": CONNECT_TIMEOUT, "allow_http": True}
    retry = {**_RETRY, "max_retries": retries}
    try:
        store = getattr(obstore_store, make)
        return store(container, client_options=client, retry_config=retry, **settings)
    except _exceptions().BaseError as error:
        raise StoreError(
            f"{scheme}://{bucket}: {_plain(error)}. Which accounts and credentials are taken is in"
            " docs/where-checkpoints-live.md"
        ) from error


def _s3_settings(bucket: str) -> tuple[str, Mapping[str, Any]]:
    """The bucket and its settings; boto3, if installed, knows profiles, SSO and roles."""
    environment = os.environ
    endpoint: dict[str, Any] = {"endpoint": _s3_endpoint(bucket)} if _is_virtual_hosted() else {}
    endpoint = {key: value for key, value in endpoint.items() if value}
    if "AWS_ACCESS_KEY_ID" in environment or environment.get("AWS_SKIP_SIGNATURE"):
        return bucket, endpoint
    try:
        import boto3
    except ImportError:
        if "AWS_PROFILE" in environment:
            raise StoreError(
                f"s3://{bucket}: AWS_PROFILE is set, and profiles are read by boto3, which is not"
                " installed: pip install boto3"
            ) from None
        return bucket, endpoint
    session = boto3.Session()
    settings = dict(endpoint)
    if session.region_name and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        settings["region"] = session.region_name
    if session.get_credentials() is None:
        return bucket, settings | {"skip_signature": True}
    from obstore.auth.boto3 import Boto3CredentialProvider

    return bucket, settings | {"credential_provider": Boto3CredentialProvider(session)}


def _s3_endpoint(bucket: str) -> str | None:
    """The address in the environment, with the bucket in it where buckets are hosts."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint or not _is_virtual_hosted():
        return endpoint
    scheme, _, host = endpoint.partition("://")
    return endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"


def _is_virtual_hosted() -> bool:
    switch = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "")
    return switch.lower() in ("1", "true", "on", "yes", "y")


def _gcs_settings(bucket: str) -> tuple[str, Mapping[str, Any]]:
    """The bucket, and settings for an emulator if STORAGE_EMULATOR_HOST has its address."""
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return bucket, {}
    url = host if "://" in host else f"http://{host}"
    # skip_signature is not asked when an object is written
    nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
    key = {"gcs_base_url": url, "disable_oauth": True, **nobody}
    return bucket, {"service_account_key": json.dumps(key)}


def _abfs_settings(bucket: str) -> tuple[str, Mapping[str, Any]]:
    """The container and its settings, for Hadoop's URLs, which name the account:
    `abfs://CONTAINER@ACCOUNT.dfs.core.windows.net`.
    """
    container, _, host = bucket.partition("@")
    _, settings = _azure_settings(container)
    return container, {**settings, "account_name": host.partition(".")[0]} if host else settings


def _azure_settings(bucket: str) -> tuple[str, Mapping[str, Any]]:
    """The container, and the account, key and address in the connection string of Azure's tools."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    return bucket, {names[name]: value for name, value in parts.items() if name in names}


_STORES: Mapping[str, tuple[str, Callable[[str], tuple[str, Mapping[str, Any]]]]] = {
    "s3": ("S3Store", _s3_settings),
    "gs": ("GCSStore", _gcs_settings),
    "az": ("AzureStore", _azure_settings),
    "abfs": ("AzureStore", _abfs_settings),
}


def _s3_kvstore(bucket: str) -> dict[str, Any]:
    environment, endpoint = os.environ, _s3_endpoint(bucket)
    # with the bucket in the host name of the endpoint, TensorStore takes no bucket beside it
    is_host = endpoint is not None and _is_virtual_hosted()
    settings = {
        "endpoint": endpoint,
        "bucket": "" if is_host else bucket,
        "aws_region": environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"),
    }
    return {"driver": "s3"} | {key: value for key, value in settings.items() if value}


_KVSTORES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "s3": _s3_kvstore,
    "gs": lambda bucket: {"driver": "gcs", "bucket": bucket},
}


def obstore() -> Any:
    return require_extra("obstore", "cloud", "a bucket")


def _exceptions() -> Any:
    return require_extra("obstore.exceptions", "cloud", "a bucket")


def _popped(chunks: list[Chunk]) -> Iterator[Chunk]:
    """Yield the items of a list, and remove each from it, so that its memory can be freed."""
    while chunks:
        yield chunks.pop(0)


def _chunks(
    parts: Iterable[bytes | memoryview], part_bytes: int
) -> Generator[bytearray, None, None]:
    """The same bytes in chunks of `part_bytes`, the last of which may be shorter."""
    chunk = bytearray()
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            missing = part_bytes - len(chunk)
            chunk += rest[:missing]
            rest = rest[missing:]
            if len(chunk) == part_bytes:
                yield chunk
                chunk = bytearray()
    if chunk:
        yield chunk


def _folders(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _info(name: str, meta: Mapping[str, Any]) -> FileInfo:
    return FileInfo(name, meta["size"], _version(meta))


def _version(meta: Mapping[str, Any]) -> str:
    """The object's etag, or if the store gives none, the time of its last change."""
    return _etag(meta) or f"changed {meta['last_modified']:%Y-%m-%dT%H:%M:%S}"


def _etag(meta: Mapping[str, Any]) -> str:
    return (meta["e_tag"] or "").strip('"')  # Azure's lists have them without quotes
