"""docs/quantization.md has the table that a run prints."""

import pytest

from quantized_table import CASES, HEAD, PAGE, row

LINES = [line for line in PAGE.read_text().splitlines() if "| all bits |" in line]


def test_every_case_has_its_line_and_no_other():
    assert HEAD in PAGE.read_text()
    assert [line.split(" | ")[0].removeprefix("| ") for line in LINES] == CASES


@pytest.mark.parametrize("case", CASES[::5])
def test_a_line_is_what_a_run_prints(case):
    assert row(case) in LINES
