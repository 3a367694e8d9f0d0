"""The page on adding a format does what it says, as it stands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import CorruptData, FormatError, SpecError
from jax_ucp.formats import registry

PAGE = Path(__file__).parent.parent / "docs" / "adding-a-format.md"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A checkpoint of the toy format at `run`, and the format in the table for one test."""
    embed = np.arange(20, dtype=np.float32).reshape(5, 4)
    norm = np.ones(4, np.float32)
    folder = tmp_path / "run"
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        (folder / f"rank{rank}").mkdir(parents=True)
        np.save(folder / f"rank{rank}" / "embed.npy", embed[rows])
        np.save(folder / f"rank{rank}" / "norm.npy", norm)
    header = {"ranks": 2, "step": 7, "sharded_axis": {"embed": 0, "norm": None}}
    (folder / "toy.json").write_text(json.dumps(header))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "FORMATS", registry.FORMATS)
    return folder


def program() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def test_the_page_reads_the_toy_format(toy):
    exec(program(), {})
    restored = ucp.open(toy).restore()["param"]["embed"]
    np.testing.assert_array_equal(restored, np.arange(20, dtype=np.float32).reshape(5, 4))


def test_replicas_of_the_toy_format_are_compared(toy):
    exec(program(), {})
    np.save(toy / "rank1" / "norm.npy", np.full(4, 2, np.float32))
    with pytest.raises(CorruptData, match="norm"):
        ucp.open(toy).restore()


@pytest.mark.parametrize("name", ["../embed", "/embed"])
def test_a_name_that_leads_out_of_the_toy_checkpoint_is_refused(toy, name):
    exec(program(), {})
    (toy / "toy.json").write_text(json.dumps({"ranks": 2, "step": 7, "sharded_axis": {name: 0}}))
    with pytest.raises(FormatError, match="embed"):
        ucp.open(toy)


def test_a_missing_file_of_the_toy_format_is_named(toy):
    exec(program(), {})
    (toy / "rank1" / "embed.npy").unlink()
    with pytest.raises(FormatError, match=r"rank1/embed\.npy is missing"):
        ucp.open(toy)


def test_a_spec_is_refused_where_the_toy_format_has_no_use_for_it(toy, tmp_path):
    exec(program(), {})
    (tmp_path / "spec.yaml").write_text("{}")
    with pytest.raises(SpecError, match="is a toy checkpoint, which does not use a spec"):
        ucp.open(toy, spec=tmp_path / "spec.yaml")
