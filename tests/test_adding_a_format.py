"""The package that the page on adding a format makes does what the page says."""

import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, SpecError
from jax_ucp.formats import registry

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-format.md").read_text()
*MODULE, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def install(site: Path, project: str) -> None:
    """Write what an installer makes of a `pyproject.toml`, as far as entry points need it."""
    about = tomllib.loads(project)["project"]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines: list[str] = []
    for group, points in about["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, for one test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registry.formats.cache_clear()
    yield folder
    registry.formats.cache_clear()
    for name in ("toy_format", "toy_again"):
        sys.modules.pop(name, None)


@pytest.fixture
def toy(tmp_path, monkeypatch, site):
    """A checkpoint of the toy format at `run`, with the page's package installed."""
    (site / "toy_format.py").write_text("\n".join(MODULE))
    install(site, PROJECT)
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
    return folder


def test_the_page_reads_the_toy_format(toy):
    exec(USE, {})
    restored = ucp.open(toy).restore()["param"]["embed"]
    np.testing.assert_array_equal(restored, np.arange(20, dtype=np.float32).reshape(5, 4))


def test_replicas_of_the_toy_format_are_compared(toy):
    np.save(toy / "rank1" / "norm.npy", np.full(4, 2, np.float32))
    with pytest.raises(CorruptData, match="norm"):
        ucp.open(toy).restore()


@pytest.mark.parametrize("name", ["../embed", "/embed"])
def test_a_name_that_leads_out_of_the_toy_checkpoint_is_refused(toy, name):
    (toy / "toy.json").write_text(json.dumps({"ranks": 2, "step": 7, "sharded_axis": {name: 0}}))
    with pytest.raises(FormatError, match="embed"):
        ucp.open(toy)


def test_a_missing_file_of_the_toy_format_is_named(toy):
    (toy / "rank1" / "embed.npy").unlink()
    with pytest.raises(FormatError, match=r"rank1/embed\.npy is missing"):
        ucp.open(toy)


@pytest.mark.parametrize(("length", "why"), [(20, "is not a .npy file, or is cut"), (-4, "has")])
def test_a_cut_file_of_the_toy_format_is_named(toy, length, why):
    file = toy / "rank1" / "embed.npy"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(FormatError, match=rf"rank1/embed\.npy {why}"):
        ucp.open(toy)


def test_a_spec_is_refused_where_the_toy_format_has_no_use_for_it(toy, tmp_path):
    (tmp_path / "spec.yaml").write_text("{}")
    with pytest.raises(SpecError, match="is a toy checkpoint, which does not use a spec"):
        ucp.open(toy, spec=tmp_path / "spec.yaml")


def test_without_the_package_the_message_lists_what_is_known(toy, site):
    next(site.glob("*.dist-info/entry_points.txt")).unlink()
    with pytest.raises(NotACheckpoint, match=r"GGUF \(a file, or") as raised:
        ucp.open(toy)
    assert "toy" not in "".join(raised.value.faults)


@pytest.mark.parametrize(("content", "why"), [
    ("import a_module_that_is_not_there\n", "ModuleNotFoundError: No module named"),
    ("toy = 'text'\n", "toy_again:toy is a str, not a Format"),
])  # fmt: skip
def test_an_entry_point_that_cannot_be_used_is_named_and_others_still_open(toy, site, content, why):
    (site / "toy_again.py").write_text(content)
    install(site, PROJECT.replace("toy-format", "toy-again").replace("toy_format:", "toy_again:"))
    with pytest.warns(UserWarning, match=f"the format 'toy' of toy-again 1.0 is left out: .*{why}"):
        assert ucp.open(toy).format == "toy"


def test_two_formats_of_one_name_are_refused_with_their_packages(toy, site):
    (site / "toy_again.py").write_text("from toy_format import toy\n")
    install(site, PROJECT.replace("toy-format", "toy-again").replace("toy_format:", "toy_again:"))
    with pytest.raises(FormatError, match=r"toy-.* 1\.0 and toy-.* 1\.0 have a format called 'a t"):
        ucp.open(toy)
