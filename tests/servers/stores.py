"""Object stores on loopback: programs of others, each in a process that ends with this one.

A `Store` is a bucket and what a program's environment must say for it to be found.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
BUCKET = "checkpoints"
START_S = 60
_NO_HEADERS: Mapping[str, str] = {}

# Published: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURITE = "azurite@3.35.0"

# Ends the command when its own standard input ends: with the process that started it.
_GUARD = '"$@" & read _; kill -9 $!'


@dataclass(frozen=True)
class Store:
    """A bucket of a server.

    Attributes:
        kind: `s3`, `gcs` or `azure`.
        url: The bucket, or a folder in it, as users name it.
        endpoint: `host:port` of the server.
    """

    kind: str
    url: str
    endpoint: str

    @property
    def env(self) -> Mapping[str, str]:
        """What the environment says, in the words of the clouds' own tools."""
        return _ENVIRONMENTS[self.kind](f"http://{self.endpoint}")

    def behind(self, endpoint: str) -> Store:
        """The same bucket, asked through a proxy."""
        return replace(self, endpoint=endpoint)

    def below(self, folder: str) -> Store:
        return replace(self, url=f"{self.url}/{folder}")


def _s3(endpoint: str) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip


def _gcs(endpoint: str) -> Mapping[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": endpoint,
        "TENSORSTORE_GCS_HTTP_URL": endpoint,
        # nobody is asked who one is
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


def _azure(endpoint: str) -> Mapping[str, str]:
    url = f"{endpoint}/{AZURITE_ACCOUNT}"
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": url,
        "AZURE_STORAGE_CONNECTION_STRING": (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};"
            f"AccountKey={AZURITE_KEY};BlobEndpoint={url};"
        ),
    }


Settings = Callable[[str], Mapping[str, str]]
_ENVIRONMENTS: Mapping[str, Settings] = {"s3": _s3, "gcs": _gcs, "azure": _azure}


@contextlib.contextmanager
def moto() -> Iterator[Store]:
    """S3, by moto."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with serving(lambda port: [*command, str(port)]) as endpoint:
        _require(_request(endpoint, "PUT", f"/{BUCKET}"))
        yield Store("s3", f"s3://{BUCKET}", endpoint)


@contextlib.contextmanager
def ministack() -> Iterator[Store]:
    """S3, by ministack."""
    command = [sys.executable, "-m", "ministack"]

    def environment(port: int) -> Mapping[str, str]:
        return {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3"}

    with serving(lambda port: command, environment) as endpoint:
        _require(_request(endpoint, "PUT", f"/{BUCKET}"))
        yield Store("s3", f"s3://{BUCKET}", endpoint)


@contextlib.contextmanager
def gcs() -> Iterator[Store]:
    """Google Cloud Storage, by gcp-storage-emulator and `gcs.py`."""
    command = [sys.executable, str(HERE / "gcs.py")]
    with serving(lambda port: [*command, str(port), BUCKET]) as endpoint:
        yield Store("gcs", f"gs://{BUCKET}", endpoint)


@contextlib.contextmanager
def azurite() -> Iterator[Store]:
    """Azure's blobs, by Microsoft's Azurite; npm brings it if it is not there."""
    program = shutil.which("azurite-blob")
    command = [program] if program else ["npx", "--yes", f"--package={AZURITE}", "azurite-blob"]
    options = ["--skipApiVersionCheck", "--silent", "--disableTelemetry", "--inMemoryPersistence"]

    def started(port: int) -> Sequence[str]:
        return [*command, *options, "--blobPort", str(port)]

    with serving(started, start_s=5 * START_S) as endpoint:
        path = f"/{AZURITE_ACCOUNT}/{BUCKET}"
        _require(_request(endpoint, "PUT", f"{path}?restype=container", _signed(path)))
        yield Store("azure", f"az://{BUCKET}", endpoint)


def _signed(path: str) -> Mapping[str, str]:
    """Headers that make a container, signed. Source: Azure's "Authorize with Shared Key"."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [f"{key}:{value}" for key, value in headers.items()]
    text = "PUT" + "\n" * 12 + "\n".join([*lines, f"/{AZURITE_ACCOUNT}{path}", "restype:container"])
    mac = hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(mac).decode()
    return {**headers, "Authorization": f"SharedKey {AZURITE_ACCOUNT}:{signature}"}


@contextlib.contextmanager
def serving(
    command: Callable[[int], Sequence[str]],
    environment: Callable[[int], Mapping[str, str]] = lambda port: {},
    start_s: float = START_S,
) -> Iterator[str]:
    """A program that listens on a free port of loopback, given to it, while this lasts.

    Raises RuntimeError, with what it said, where it does not.
    """
    port = free_port()
    with tempfile.TemporaryFile() as said:
        own = {**os.environ, **environment(port)}
        files = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said}
        process = subprocess.Popen(["sh", "-c", _GUARD, "sh", *command(port)], env=own, **files)
        try:
            if not _listens(process, port, time.monotonic() + start_s):
                said.seek(0)
                text = said.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{command(port)} does not listen; it said:\n{text}")
            yield f"127.0.0.1:{port}"
        finally:
            process.stdin.close()
            process.wait(START_S)


def _listens(process: subprocess.Popen[bytes], port: int, end: float) -> bool:
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        time.sleep(0.05)
    return False


def free_port() -> int:
    """A port of loopback on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _request(
    endpoint: str, method: str, path: str, headers: Mapping[str, str] = _NO_HEADERS
) -> int:
    connection = http.client.HTTPConnection(endpoint, timeout=START_S)
    try:
        connection.request(method, path, headers={"Content-Length": "0", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def _require(status: int) -> None:
    if status not in (200, 201):
        raise RuntimeError(f"the server did not make a bucket: {status}")
