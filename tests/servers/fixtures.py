"""Stores on loopback for tests, one of each kind for all tests of a process, each test in a folder
of its own. A server that does not start is a failed test.

Azurite comes from npm, and not from the package index: its tests run where UCP_AZURITE is `required`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import fsspec
import pytest
from etils.epath.backend import fsspec_backend

from servers import stores
from servers.fault_proxy import FaultProxy
from servers.stores import Store


@pytest.fixture(scope="session")
def _moto() -> Iterator[Store]:
    with stores.moto() as store:
        yield store


@pytest.fixture(scope="session")
def _ministack() -> Iterator[Store]:
    with stores.ministack() as store:
        yield store


@pytest.fixture(scope="session")
def _gcs() -> Iterator[Store]:
    with stores.gcs() as store:
        yield store


@pytest.fixture(scope="session")
def _azurite() -> Iterator[Store]:
    if os.environ.get("UCP_AZURITE") != "required":
        pytest.skip("Azurite comes from npm: UCP_AZURITE=required runs its tests")
    with stores.azurite() as store:
        yield store


@pytest.fixture
def s3(_moto: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty folder of S3."""
    return _entered(_moto, monkeypatch)


@pytest.fixture
def ministack(_ministack: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty folder of another S3."""
    return _entered(_ministack, monkeypatch)


@pytest.fixture
def gcs(_gcs: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty folder of Google Cloud Storage."""
    return _entered(_gcs, monkeypatch)


@pytest.fixture
def azure(_azurite: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty folder of Azure. Its server comes from npm: slow tests ask for it."""
    return _entered(_azurite, monkeypatch)


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each kind of store that needs nothing but Python."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["s3", "ministack", "gcs"])
def server(request: pytest.FixtureRequest) -> Store:
    """Each server that needs nothing but Python."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def faulty_s3(s3: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, FaultProxy]]:
    """An empty folder of S3, and the proxy that it is asked through, which has no faults yet."""
    with FaultProxy(s3.endpoint) as proxy:
        behind = s3.behind(proxy.endpoint)
        for key, value in behind.env.items():
            monkeypatch.setenv(key, value)
        yield behind, proxy


def _entered(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    # Orbax's paths remember the server of another test
    fsspec_backend._get_filesystem.cache_clear()
    for library in fsspec.registry.values():
        library.clear_instance_cache()
    for key, value in store.env.items():
        monkeypatch.setenv(key, value)
    return store.below(uuid.uuid4().hex)
