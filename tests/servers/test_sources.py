"""Files in buckets of real servers."""

from urllib.parse import urlsplit

import boto3
import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import StoreError
from jax_ucp.files.listing import counting
from jax_ucp.files.path import file_path
from servers.stores import BUCKET


def put(store, key):
    """Create an empty object of a key that has no path."""
    client = boto3.client("s3", endpoint_url=f"http://{store.endpoint}")
    client.put_object(Bucket=BUCKET, Key=key)


def test_files_of_a_bucket_are_found_by_folder(server):
    root = file_path(f"{server.url}/a")
    for name in ("x", "b/y", "b/z/w", "bc"):
        root.files.write((root / name).key, [name.encode()], durable=True)
    assert [child.name for child in root.children()] == ["b", "bc", "x"]
    assert [(root / "b").is_dir(), (root / "bc").is_file(), (root / "c").exists()] == [1, 1, 0]
    assert [file.name for file in root.folder().walk()] == ["b/y", "b/z/w", "bc", "x"]
    assert (root / "b/z/w").read_text() == "b/z/w"


def test_an_object_that_marks_a_folder_is_no_file_in_it(s3):
    """As the web pages of clouds write one for a folder that somebody makes there."""
    root, key = file_path(f"{s3.url}/a"), urlsplit(s3.url).path.removeprefix("/")
    put(s3, f"{key}/a/")
    assert root.children() == list(root.folder().walk()) == []
    saved = ucp.Checkpoint.of({"w": np.arange(3.0)}).save(f"{s3.url}/a")
    assert saved.read("w").tolist() == [0, 1, 2]
    for folder in ("", "of/", "of/these/"):
        put(s3, f"{key}/b/{folder}")
    root.files.write((file_path(f"{s3.url}/b") / "of/these/x").key, [b"x"], durable=True)
    assert [file.name for file in file_path(f"{s3.url}/b").folder().walk()] == ["of/these/x"]


def test_a_key_that_has_no_path_is_named_at_once(s3):
    key = urlsplit(s3.url).path.removeprefix("/")
    put(s3, f"{key}/a//b")
    with counting() as asked, pytest.raises(StoreError, match=r"a: .*invalid path"):
        ucp.open(f"{s3.url}/a")
    assert asked.requests < 6


def test_a_file_is_created_once(server):
    root = file_path(server.url)
    root.files.create((root / "one").key, b"first")
    with pytest.raises(FileExistsError):
        root.files.create((root / "one").key, b"other")
    assert (root / "one").read_bytes() == b"first"


def test_a_large_file_is_whole(server):
    data = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    path = file_path(f"{server.url}/large")
    path.files.write(path.key, [data[: 7 << 20].data, data[7 << 20 :].data], durable=True)
    assert path.read_bytes() == data.tobytes()


def test_what_is_not_there_or_not_allowed_is_named(s3, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"s3://.*/nothing"):
        ucp.open(f"{s3.url}/nothing")
    with pytest.raises(StoreError, match="s3://no-such-bucket/x"):
        ucp.open("s3://no-such-bucket/x")
