"""The proxy does what its names say, the same with the same seed."""

import http.client

import pytest

from servers.fault_proxy import KINDS, FaultProxy, Faults
from servers.stores import BUCKET, Store

# moto asks who one is, and believes it
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}
BODY = bytes(range(256)) * 64


@pytest.fixture
def object_path(s3: Store) -> str:
    path = f"/{BUCKET}/{s3.url.rpartition('/')[2]}/object"
    assert ask(s3.endpoint, "PUT", path, BODY)[0] == 200
    return path


def ask(endpoint, method, path, body=b"", headers=()):
    connection = http.client.HTTPConnection(endpoint, timeout=10)
    try:
        connection.request(method, path, body, SIGNED | dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("kind", "status"), [("429", 429), ("500", 500), ("503", 503), ("lost answer", 500)]
)
def test_a_request_is_refused_as_often_as_it_is_said(s3, object_path, kind, status):
    with FaultProxy(s3.endpoint, Faults(rates={kind: 1}, at_most=2)) as proxy:
        statuses = [ask(proxy.endpoint, "GET", object_path)[0] for _ in range(3)]
        assert statuses == [status, status, 200]
        assert proxy.met[kind] == 2


@pytest.mark.parametrize("kind", ["reset", "truncated"])
def test_a_body_ends_in_its_middle(s3, object_path, kind):
    with FaultProxy(s3.endpoint, Faults(rates={kind: 1}, at_most=1)) as proxy:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(proxy.endpoint, "GET", object_path)
        assert ask(proxy.endpoint, "GET", object_path) == (200, BODY)


@pytest.mark.parametrize("kind", ["wrong range", "lying range"])
def test_another_range_comes(s3, object_path, kind):
    headers = {"Range": "bytes=100-199"}
    with FaultProxy(s3.endpoint, Faults(rates={kind: 1}, at_most=1)) as proxy:
        assert ask(proxy.endpoint, "GET", object_path, headers=headers) == (206, BODY[99:199])
        assert ask(proxy.endpoint, "GET", object_path, headers=headers) == (206, BODY[100:200])


def test_a_lost_answer_was_done(s3, object_path):
    with FaultProxy(s3.endpoint, Faults(rates={"lost answer": 1}, at_most=1)) as proxy:
        assert ask(proxy.endpoint, "PUT", object_path, b"new")[0] == 500
        assert ask(s3.endpoint, "GET", object_path) == (200, b"new")


def test_a_stale_list_lacks_what_is_new(s3, object_path):
    folder = object_path.removesuffix("object").split("/", 2)[2]
    path = f"/{BUCKET}?list-type=2&prefix={folder}"
    with FaultProxy(s3.endpoint) as proxy:
        before = ask(proxy.endpoint, "GET", path)
        assert ask(proxy.endpoint, "PUT", f"{object_path}2", b"new")[0] == 200
        proxy.set(Faults(rates={"stale list": 1}, at_most=1))
        assert ask(proxy.endpoint, "GET", path) == before
        assert ask(proxy.endpoint, "GET", path) != before


def test_a_slow_answer_is_whole(s3, object_path):
    with FaultProxy(s3.endpoint, Faults(rates={"slow": 1}, slow_s=0.1)) as proxy:
        assert ask(proxy.endpoint, "GET", object_path) == (200, BODY)


def test_the_same_seed_has_the_same_faults():
    rates = dict.fromkeys(KINDS, 0.08)
    requests = [(f"GET /{n}", turn) for n in range(50) for turn in range(2)]

    def faults(seed):
        return [Faults(seed, rates=rates).of(*request) for request in requests]

    assert faults(1) == faults(1) != faults(2)
    assert set(faults(1)) == {None, *KINDS}
