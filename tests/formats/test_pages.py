"""docs/adapters.md and docs/quantization.md have the tables that a run prints."""

import pytest

import adapters_table
import quantized_table

TABLES = {adapters_table: 4, quantized_table: 5}  # of so many lines one is printed again
PRINTED = [(table, case) for table, step in TABLES.items() for case in table.CASES[::step]]


def lines_of(table) -> list[str]:
    return table.PAGE.read_text().partition(table.HEAD)[2].partition("\n\n")[0].strip().splitlines()


@pytest.mark.parametrize("table", TABLES)
def test_every_case_has_its_line_and_no_other(table):
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines_of(table)] == table.CASES


@pytest.mark.parametrize(("table", "case"), PRINTED)
def test_a_line_is_what_a_run_prints(table, case):
    assert table.row(case) in lines_of(table)
