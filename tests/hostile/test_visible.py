"""What is printed of others' names and paths: text, no order to the terminal, no markup."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from commands import run
from hostile.files import saved
from jax_ucp.errors import ShardingWarning
from jax_ucp.sharding.fit import warn_given_up
from jax_ucp.text import visible, visible_lines
from safetensors_writer import write_safetensors

HOSTILE = [
    "w\x1b[31mred", "w\x1b]0;title\x07", "w\x1b]52;c;cm0gLXJm\x07", "w\u202egnp.exe", "w\x9b31m", "w\r\x08x",
    "w\u2066x", "[/a]", "[bold red]zz", "\\[/foo]bar", "[link=https://x]y[/link]", ":bomb:", "a\nfaults: 0",
    "\u2028x", "\ue000x",
]  # fmt: skip


def safetensors(folder: Path, name: str) -> Path:
    write_safetensors(folder / "model.safetensors", {name: np.zeros(1, np.float32)})
    return folder


@given(st.text())
def test_a_text_is_one_line_of_what_can_be_printed(text):
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert text.isprintable() == (shown == text)
    assert all(line.startswith("  ") for line in visible_lines(text).split("\n")[1:])


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["inspect", "plan", "verify", "map"])
def test_a_name_is_shown_as_it_is_and_obeyed_by_nothing(tmp_path, name, command):
    path = safetensors(tmp_path / "c", name)
    more = {"inspect": ["--all"], "map": ["--mapping", "hf-gpt2-to-flax"]}.get(command, [])
    said = run(command, path, *more, code=1 if command == "map" else 0)
    assert not [line for line in said.splitlines() if line.startswith("faults: 0")]
    if command != "verify" and "\n" not in name:
        assert visible(name) in said.replace("\n", "")


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name])
def test_a_path_is_shown_as_it_is_by_every_command(tmp_path, name):
    """A conversion that succeeded exits with 0, whatever its target is called."""
    source = safetensors(tmp_path / "c", "w")
    target, other = tmp_path / name, tmp_path / f"x{name}"
    assert visible_lines(name) in run("convert", source, target)
    assert visible_lines(name) in run("verify", target)
    assert visible_lines(name) in run("inspect", target)
    assert visible_lines(name) in run("export", source, other, "--format", "safetensors")
    assert visible_lines(name) in run("inspect", tmp_path / "nowhere" / name, code=1)


def test_what_a_fault_quotes_is_shown_as_it_is(tmp_path):
    path = saved(tmp_path / "[/a]\x1b[2J", {"w\x1b[31m[/b]": np.ones(4, np.float32)})
    (chunk,) = path.glob("*/c.0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert r"[/a]\x1b[2J" in run("verify", path, code=1)


def test_extras_are_shown_as_they_are(tmp_path):
    path = safetensors(tmp_path / "c", "w")
    (path / "config.json").write_text(json.dumps({"name": "x\x9b31m\u202e"}))
    assert "u202e" in run("inspect", path, "--all")


@pytest.mark.parametrize(
    "args",
    [["x\x1b[31m"], ["inspect", "c", "--on-conflict", "s\x1b[31m"], ["map", "c", "--x\x1b[31m"]],
)
def test_a_wrong_command_line_is_shown_as_it_is(args):
    run(*args, code=2)


def test_warnings_and_representations_are_shown_as_they_are(tmp_path):
    with pytest.warns(ShardingWarning) as warned:
        warn_given_up(["leaf w\x1b[31m\nERROR forged"], stacklevel=1)
    assert str(warned[0].message).splitlines()[1:] == ["  leaf w\\x1b[31m", "  ERROR forged"]
    checkpoint = ucp.open(safetensors(tmp_path / "c\u202e", "w\x1b[31m<script>"))
    assert repr(checkpoint).isprintable()
    assert repr(checkpoint.params["w\x1b[31m<script>"]).isprintable()
    assert checkpoint._repr_html_().isprintable()
    assert "<script>" not in checkpoint._repr_html_()
