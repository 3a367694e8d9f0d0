"""The command line, run in this process."""

import json
from collections.abc import Mapping

import click
from click.testing import CliRunner, Result

from jax_ucp.cli.main import main


def command(name: str) -> click.Command:
    """A command, as one who runs it gets it."""
    _, found, _ = main.resolve_command(click.Context(main), [name])
    assert found
    return found


def every_command() -> dict[str, click.Command]:
    return {name: command(name) for name in main.commands}


def invoke(*args: object, env: Mapping[str, str] | None = None) -> Result:
    """What a command did: it shows no traceback, and prints nothing that a terminal obeys."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], env=env)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    strange = {c for c in result.output if not c.isprintable()} - {"\n"}
    assert not strange, f"{args[0]} prints {strange}"
    assert "Traceback" not in result.output
    return result


def run(*args: object, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    """What a command prints that ends with this exit code; its errors too."""
    result = invoke(*args, env=env)
    assert result.exit_code == code, result.output
    return result.output


def run_json(*args: object, code: int = 0, env: Mapping[str, str] | None = None) -> dict:
    result = invoke(*args, "--json", env=env)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout[result.stdout.index("{") :])  # click 8.1 has both streams in it
