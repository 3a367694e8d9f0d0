"""S3 where a bucket is a host, which its stores ask for."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
from jax_ucp.files.path import file_path
from servers.fault_proxy import FaultProxy
from servers.stores import BUCKET

HOST = "s3.us-east-1.amazonaws.com"
ARRAYS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}


# as boto3 has it, and as the library that is asked
@pytest.fixture(params=[HOST, f"{BUCKET}.{HOST}"])
def asked(request, s3, monkeypatch):
    """The (host, path) of requests, by a store whose buckets are hosts that a proxy knows."""
    asked = []

    class Proxy(FaultProxy):
        def fault(self, handler):
            asked.append((handler.headers["Host"], handler.path.partition(HOST)[2]))
            return super().fault(handler)

    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.endpoint}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{request.param}")
        monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
        yield asked


def test_a_bucket_is_a_host(asked, s3):
    ucp.CheckpointHandler().save(f"{s3.url}/a", ucp.args.Save(ARRAYS))
    exported = ucp.Checkpoint.of({"param": ARRAYS}).export(f"{s3.url}/b", "safetensors")
    restored = ucp.open(f"{s3.url}/a").restore()
    np.testing.assert_array_equal(restored["w"], ARRAYS["w"])
    np.testing.assert_array_equal(exported.read("param/w"), ARRAYS["w"])
    assert {host for host, _ in asked} == {f"{BUCKET}.{HOST}"}
    assert not any(path.startswith(f"/{BUCKET}") for _, path in asked)


def test_tensorstore_asks_that_host_too(asked, s3, tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "it", ARRAYS)
    root = file_path(f"{s3.url}/it")
    for path in filter(lambda path: path.is_file(), (tmp_path / "it").rglob("*")):
        target = root / path.relative_to(tmp_path / "it").as_posix()
        target.files.write(target.key, [path.read_bytes()], durable=True)
    np.testing.assert_array_equal(ucp.open(f"{s3.url}/it").restore()["w"], ARRAYS["w"])
    assert {host for host, _ in asked} == {f"{BUCKET}.{HOST}"}
