"""The proxy does what its names say, the same with the same seed."""

import http.client

import pytest

from servers.fault_proxy import KINDS, FaultProxy, Faults
from servers.stores import BUCKET, Store

# moto asks who one is, and believes it
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}
BODY = bytes(range(256)) * 64
RANGE = {"Range": "bytes=100-199"}
# What comes of a request for a range in the place of its bytes, once.
FAULTS = {
    "429": 429,
    "500": 500,
    "503": 503,
    "lost answer": 500,
    "reset": "an end in the middle",
    "truncated": "an end in the middle",
    "wrong range": BODY[99:199],
    "lie": BODY[101:200] + BODY[100:101],
    "stale list": BODY[100:200],
    "slow": BODY[100:200],
}


@pytest.fixture
def path(s3: Store) -> str:
    path = f"/{BUCKET}/{s3.url.rpartition('/')[2]}/object"
    assert ask(s3.endpoint, "PUT", path, BODY)[0] == 200
    return path


def ask(endpoint, method, path, body=b"", headers=()):
    connection = http.client.HTTPConnection(endpoint, timeout=10)
    try:
        connection.request(method, path, body, SIGNED | dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (http.client.IncompleteRead, ConnectionError):
        return 206, "an end in the middle"
    finally:
        connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_as_its_name_says_and_as_often_as_it_is_said(s3, path, kind):
    with FaultProxy(s3.endpoint, Faults(rates={kind: 1}, at_most=2, slow_s=0.1)) as proxy:
        answers = [ask(proxy.endpoint, "GET", path, headers=RANGE) for _ in range(3)]
        said = [status if status != 206 else body for status, body in answers]
        assert said == [FAULTS[kind], FAULTS[kind], BODY[100:200]]
        assert proxy.met[kind] == 2


def test_a_lost_answer_was_done(s3, path):
    with FaultProxy(s3.endpoint, Faults(rates={"lost answer": 1}, at_most=1)) as proxy:
        assert ask(proxy.endpoint, "PUT", path, b"new")[0] == 500
        assert ask(s3.endpoint, "GET", path) == (200, b"new")


def test_a_stale_list_lacks_what_is_new(s3, path):
    folder = path.removesuffix("object").split("/", 2)[2]
    listing = f"/{BUCKET}?list-type=2&prefix={folder}"
    with FaultProxy(s3.endpoint) as proxy:
        before = ask(proxy.endpoint, "GET", listing)
        assert ask(proxy.endpoint, "PUT", f"{path}2", b"new")[0] == 200
        proxy.set(Faults(rates={"stale list": 1}, at_most=1))
        assert ask(proxy.endpoint, "GET", listing) == before
        assert ask(proxy.endpoint, "GET", listing) != before


def test_the_same_seed_has_the_same_faults():
    rates = dict.fromkeys(KINDS, 0.08)
    requests = [(f"GET /{n}", turn) for n in range(50) for turn in range(2)]

    def faults(seed):
        return [Faults(seed, rates=rates).of(*request) for request in requests]

    assert faults(1) == faults(1) != faults(2)
    assert set(faults(1)) == {None, *KINDS}
