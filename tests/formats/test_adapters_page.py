"""docs/adapters.md has the table that a run prints."""

import pytest

from adapters_table import CASES, HEAD, PAGE, row

LINES = PAGE.read_text().partition(HEAD)[2].strip().splitlines()


def test_every_case_has_its_line_and_no_other():
    assert [line.split(" | ")[0].removeprefix("| ") for line in LINES] == CASES


@pytest.mark.parametrize("case", CASES[::4])
def test_a_line_is_what_a_run_prints(case):
    assert row(case) in LINES
