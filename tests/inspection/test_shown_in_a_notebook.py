"""Plans and results are a line where they are printed, and a table in a notebook."""

from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import jax_ucp as ucp
from jax_ucp.text import html_table

CASE = Path(__file__).parents[1] / "data" / "deepspeed" / "z1_bf16_dp2"


@pytest.fixture(scope="module")
def checkpoint() -> ucp.Checkpoint:
    return ucp.open(CASE)


def optimizer(checkpoint: ucp.Checkpoint) -> object:
    params = {name: jnp.zeros(each.shape) for name, each in checkpoint.params.items()}
    return checkpoint.plan_optimizer(optax.adam(1e-3), params, check=False)


SHOWN = {
    "restore": (lambda c: c.plan(), "<a restore of 124 leaves, 0 of them onto devices; 0 notes>"),
    "reads": (lambda c: c.plan_reads({"x": 2}, hosts=2), "<reads of 2 hosts: 178,184 bytes"),
    "copy": (lambda c: c.plan_save(), "<a copy of 124 arrays: 89,092 bytes in 124 blocks"),
    "export": (lambda c: c.plan_export("dcp"), "<an export to dcp: 124 tensors, 89,092 bytes"),
    "group": (lambda c: c.groups[0], "<11 parameters: weight_decay 0.1, lr 0.00165"),
    "link": (lambda c: c.plan_link("nowhere"), "<a link of "),
    "optimizer": (optimizer, "<an optax state after 5 steps: "),
    "same": (lambda c: ucp.diff(c, CASE), "<no difference; 124 leaves are equal>"),
    "difference": (
        lambda c: ucp.diff(c, ucp.Checkpoint.of({"param": 0})),
        "<124 missing, 1 added; 0 leaves are equal>",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_plan_or_a_result_is_one_short_line_and_a_table(name, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, begins = SHOWN[name]
    shown = make(checkpoint)
    assert repr(shown).startswith(begins)
    assert len(repr(shown)) < 400
    assert repr(shown).isprintable()
    if hasattr(shown, "_repr_html_"):
        assert shown._repr_html_().isprintable()
        assert "<table>" in shown._repr_html_()


def test_a_table_of_many_rows_says_how_many_it_leaves_out():
    checkpoint = ucp.Checkpoint.of({f"w{i}x": jnp.zeros(i % 7 + 1) for i in range(600)})
    shown = checkpoint.plan()._repr_html_()
    assert "the first 500 of 600 rows" in shown
    assert shown.count("<tr>") == 501


@pytest.mark.parametrize(("rows", "beside"), [(500, ""), (501, ", the first 500 of 501 rows")])
def test_a_table_that_is_shown_whole_says_nothing_of_rows(rows, beside):
    assert html_table("leaves", ["name"], [["w"]] * rows).startswith(f"<b>leaves{beside}</b>")
