"""What is printed of names and paths of others: text, never an order to the terminal, and no
markup.
"""

import json
import struct
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from hostile.files import saved
from jax_ucp.cli.main import main
from jax_ucp.errors import ShardingWarning
from jax_ucp.sharding.fit import warn_given_up
from jax_ucp.text import visible, visible_lines

HOSTILE = [
    "w\x1b[31mred", "w\x1b]0;title\x07", "w\x1b]52;c;cm0gLXJm\x07", "w\u202egnp.exe", "w\x9b31m", "w\r\x08x",
    "w\u2066x",
]  # fmt: skip
HOSTILE += [
    "[/a]", "[bold red]zz", "\\[/foo]bar", "[link=https://x]y[/link]", ":bomb:", "a\nfaults: 0", "\u2028x",
    "\ue000x",
]  # fmt: skip


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    strange = [c for c in result.output if not c.isprintable() and c != "\n"]
    assert not strange, strange
    return result.exit_code, result.output


def safetensors(folder: Path, name: str) -> Path:
    folder.mkdir()
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
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
    code, said = run(command, path, *more)
    assert code == (1 if command == "map" else 0)
    assert not [line for line in said.splitlines() if line.startswith("faults: 0")]
    if command != "verify" and "\n" not in name:
        assert visible(name) in said.replace("\n", "")


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name])
def test_a_path_is_shown_as_it_is_by_every_command(tmp_path, name):
    """A conversion that succeeded exits with 0, whatever its target is called."""
    source = safetensors(tmp_path / "c", "w")
    for args in (
        ["convert", source, tmp_path / name],
        ["verify", tmp_path / name],
        ["inspect", tmp_path / name],
        ["export", source, tmp_path / f"x{name}", "--format", "safetensors"],
    ):
        code, said = run(*args)
        assert code == 0
        assert visible_lines(name) in said
    code, said = run("inspect", tmp_path / "nowhere" / name)
    assert code == 1
    assert visible_lines(name) in said


def test_what_a_fault_quotes_is_shown_as_it_is(tmp_path):
    path = saved(tmp_path / "[/a]\x1b[2J", {"w\x1b[31m[/b]": np.ones(4, np.float32)})
    (chunk,) = path.glob("*/c.0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    code, said = run("verify", path)
    assert code == 1
    assert r"[/a]\x1b[2J" in said


def test_extras_are_shown_as_they_are(tmp_path):
    path = safetensors(tmp_path / "c", "w")
    (path / "config.json").write_text(json.dumps({"name": "x\x9b31m\u202e"}))
    _, said = run("inspect", path, "--all")
    assert "u202e" in said


@pytest.mark.parametrize(
    "args",
    [["x\x1b[31m"], ["inspect", "c", "--on-conflict", "s\x1b[31m"], ["map", "c", "--x\x1b[31m"]],
)
def test_a_wrong_command_line_is_shown_as_it_is(args):
    code, _ = run(*args)
    assert code == 2


def test_warnings_and_representations_are_shown_as_they_are(tmp_path):
    with pytest.warns(ShardingWarning) as warned:
        warn_given_up(["leaf w\x1b[31m\nERROR forged"], stacklevel=1)
    assert str(warned[0].message).splitlines()[1:] == ["  leaf w\\x1b[31m", "  ERROR forged"]
    checkpoint = ucp.open(safetensors(tmp_path / "c\u202e", "w\x1b[31m<script>"))
    for shown in (
        repr(checkpoint),
        repr(checkpoint.params["w\x1b[31m<script>"]),
        checkpoint._repr_html_(),
    ):
        assert shown.isprintable()
    assert "<script>" not in checkpoint._repr_html_()
