"""The benchmark of accelerators runs on CPU, where its figures mean nothing."""

from benchmarks import device
from benchmarks.race import Options


def test_every_table_of_the_benchmark_of_accelerators_is_filled(tmp_path):
    tables = list(device.run(Options(tmp_path, runs=1, mib=1)))
    assert [len(table.rows) > 1 for table in tables] == [True] * 4
    for row in tables[1].rows.values():
        assert row["as restores send"] is True
