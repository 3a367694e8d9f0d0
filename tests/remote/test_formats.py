"""Every format in every kind of store: the local bits, opened by few requests, no byte too many."""

import re

import pytest

import jax_ucp as ucp
from jax_ucp.errors import UnsupportedPath
from large_sources import FORMATS, made
from remote_table import OF_TENSORSTORE, PAGE, PLACES, Place, bucket, hub, measured, server, sharing

MOST = 1.05  # bytes read for each that is needed, those of opening included


def require_few(format, place: Place, folder) -> None:
    path = made(format, folder / "made")
    with place(path) as (url, proxy):
        row = measured(path, url, proxy)
    entries = sum(1 for _ in path.rglob("*"))
    assert row.is_equal
    assert row.amplification <= MOST
    # nothing here grows with bytes: the arrays have megabytes
    assert row.opening[0] <= 24 + 3 * entries + row.arrays
    assert row.opening[1] <= (1 << 20) + 4096 * (entries + row.arrays)


@pytest.mark.parametrize("format", FORMATS)
def test_no_more_is_read_of_s3_than_is_needed(format, s3, tmp_path):
    require_few(format, lambda path: bucket(s3, path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_no_more_is_read_of_google_than_is_needed(format, gcs, tmp_path):
    require_few(format, lambda path: bucket(gcs, path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_no_more_is_read_of_azure_than_is_needed(format, azure, tmp_path):
    if format in OF_TENSORSTORE:
        with pytest.raises(UnsupportedPath, match="TensorStore"):
            require_few(format, lambda path: bucket(azure, path), tmp_path)
        return
    require_few(format, lambda path: bucket(azure, path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_no_more_is_read_of_a_web_server_than_is_needed(format, tmp_path):
    require_few(format, server, tmp_path)


@pytest.mark.parametrize("format", ["safetensors", "PEFT"])
def test_no_more_is_read_of_the_hub_than_is_needed(format, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    require_few(format, hub, tmp_path)


def test_the_page_has_every_format_in_every_store():
    rows = re.findall(r"^\| (.+?) \| (\w+) \| (.*) \|$", PAGE.read_text(), re.M)
    cells = {(format, where): rest for format, where, rest in rows if format in FORMATS}
    assert {where for _, where in cells} == {*PLACES}
    for format in FORMATS:
        for where in set(PLACES) - {"hub"}:
            rest = cells[format, where]
            refused = where == "Azure" and format in OF_TENSORSTORE
            assert rest.startswith("refused") if refused else rest.endswith("equal")
            assert refused or float(rest.split(" | ")[2]) <= MOST


@pytest.mark.slow
def test_processes_that_share_their_reads_read_each_byte_once(s3, tmp_path):
    path = made("universal", tmp_path / "made")
    stored = ucp.open(path).nbytes
    apart, together = (sharing(path, s3, 2, share)[1] for share in (False, True))
    assert together <= MOST * stored
    assert apart >= 2 * stored
