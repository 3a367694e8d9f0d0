"""The index we write is what TensorStore reads: every key has the bytes of its range, and no
flipped bit passes.
"""

import random

import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_ucp.universal import ocdbt
from jax_ucp.universal.ocdbt import MANIFEST_FILE, ValueRange, index_parts

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
FILES = {"data": bytes(range(256)) * 2, "deep/er/é": b"0123456789" * 30}


def ranges() -> st.SearchStrategy[ValueRange]:
    def within(file: str) -> st.SearchStrategy[ValueRange]:
        size = len(FILES[file])
        ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
        return ends.map(lambda span: ValueRange(file, span[0], span[1] - span[0]))

    return st.sampled_from(sorted(FILES)).flatmap(within)


def write(root, entries) -> None:
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    pairs = sorted((key.encode(), value) for key, value in entries.items())
    parts, manifest = index_parts("index", pairs)
    (root / "index").write_bytes(b"".join(parts))
    (root / MANIFEST_FILE).write_bytes(manifest)


def read(root) -> dict[bytes, bytes]:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}/"}).result()
    return {key: store[key] for key in store.list().result()}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(st.dictionaries(KEYS, ranges(), min_size=1, max_size=40), st.sampled_from([1, 3, 40]))
def test_tensorstore_reads_the_bytes_of_every_range(tmp_path_factory, entries, node_entries):
    root = tmp_path_factory.mktemp("ocdbt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "NODE_ENTRIES", node_entries)
        write(root, entries)
    want = {}
    for key, at in entries.items():
        want[key.encode()] = FILES[at.file][at.offset : at.offset + at.nbytes]
    assert read(root) == want


def test_more_entries_than_one_node_has_are_read(tmp_path):
    count = 300_000
    keys = [f"layers.{i}.attention.output.kernel/c.0" for i in range(count)]
    entries = {key: ValueRange("data", i % 256, 8) for i, key in enumerate(keys)}
    write(tmp_path, entries)
    assert (tmp_path / "index").stat().st_size > 8 << 20
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    for i in random.Random(0).sample(range(count), 100):
        want = bytes(FILES["data"][i % 256 : i % 256 + 8])
        assert store[f"layers.{i}.attention.output.kernel/c.0"] == want


@pytest.mark.parametrize("node_entries", [6, 20])
def test_no_flipped_bit_of_manifest_or_nodes_passes(tmp_path, monkeypatch, node_entries):
    entries = {f"w{i}/c.0": ValueRange("data", i, 4) for i in range(20)}
    monkeypatch.setattr(ocdbt, "NODE_ENTRIES", node_entries)
    write(tmp_path, entries)
    want = read(tmp_path)
    for name in ("index", MANIFEST_FILE):
        data = (tmp_path / name).read_bytes()
        for at in range(len(data)):
            flipped = bytes([data[at] ^ 1 << at % 8])
            (tmp_path / name).write_bytes(data[:at] + flipped + data[at + 1 :])
            with pytest.raises(ValueError, match=r"Error|error"):
                read(tmp_path)
        (tmp_path / name).write_bytes(data)
    assert read(tmp_path) == want
