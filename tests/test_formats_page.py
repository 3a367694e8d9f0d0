"""docs/tested.md is what a run prints, and has a line for every case in tests/data."""

import re

import pytest

from cases import Case, every
from formats_table import PAGE, TESTED, row, text, text_of_cases
from helpers import mesh_of

LINES = {
    found[1]: found[0]
    for found in re.finditer(r"^\| `(\S+/\S+)` \|.*$", TESTED.read_text(), re.MULTILINE)
}


def test_every_case_has_its_line_and_no_other():
    assert set(LINES) == set(map(str, every()))


def test_the_text_around_the_tables_is_that_of_the_script():
    assert PAGE.read_text() == text()
    before, after = text_of_cases().split("{table}")
    assert TESTED.read_text().startswith(before)
    assert TESTED.read_text().endswith(after)


def test_no_case_is_read_wrong():
    """A case whose line says less than all is one that is refused, and says why."""
    for name, line in LINES.items():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        right = cells[4].startswith("refused: ") or {*cells[4:7]} <= {"all", ""}
        assert right, line
        assert cells[7] == "yes" or cells[4].startswith("refused: "), name


@pytest.mark.parametrize("case", [
    Case("deepspeed/tp2_pp2_dp1_z1_bf16"),
    Case("deepspeed_universal/z3_bf16_dp2_frozen_tied"),
    Case("megatron/legacy_ep2_moe_grouped_bf16"),
    Case("torch/dcp_zstd"),
    Case("torch/hf_mixtral"),
    Case("torch/torchsave/trainer.pt"),
], ids=lambda case: case.name)  # fmt: skip
def test_a_line_is_what_a_run_prints(case):
    assert row(case, mesh_of(4, 2)) == LINES[str(case)]
