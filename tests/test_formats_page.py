"""docs/tested.md is what a run prints, and has a line for every case in tests/data; what pages of
formats count is what there is.
"""

import re

import pytest

from cases import Case, every
from formats_table import TESTED, page_of_cases, row
from helpers import mesh_of
from jax_ucp.formats.huggingface.module_order import model_types
from jax_ucp.formats.huggingface.quantization import SCHEMES

DOCS = TESTED.parent

FOUND = re.finditer(r"^\| `(\S+/\S+)` \|.*$", TESTED.read_text(), re.MULTILINE)
LINES = {found[1]: found[0] for found in FOUND}


def test_every_case_has_its_line_and_no_other():
    assert set(LINES) == set(map(str, every()))


def test_each_line_is_in_the_section_of_its_format():
    assert TESTED.read_text() == page_of_cases(list(LINES.values()))


def test_pages_of_formats_are_those_that_the_table_links_to():
    page = (DOCS / "formats.md").read_text()
    linked = re.findall(r"^\| \[.*?\]\(formats/(\S+?)\)", page, re.MULTILINE)
    assert set(linked) == {page.name for page in (DOCS / "formats").iterdir()}


def test_pages_count_and_name_what_there_is():
    page = (DOCS / "formats" / "training-folders.md").read_text()
    assert f"for {len(model_types())} model types" in page
    page = " ".join((DOCS / "quantization.md").read_text().split())
    assert [scheme.name for scheme in SCHEMES if scheme.name not in page] == []


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
