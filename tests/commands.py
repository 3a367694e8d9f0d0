"""The command line, run in this process."""

import json
from collections.abc import Mapping

from click.testing import CliRunner

from jax_ucp.cli.main import main


def outcome(*args: object, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code of a command and what it prints, its errors too: no traceback, and nothing
    that a terminal obeys.
    """
    result = CliRunner().invoke(main, [str(arg) for arg in args], env=env)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    strange = {c for c in result.output if not c.isprintable()} - {"\n"}
    assert not strange, f"{args[0]} prints {strange}"
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def run(*args: object, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    """What a command prints that ends with this exit code."""
    found, output = outcome(*args, env=env)
    assert found == code, output
    return output


def run_json(*args: object, code: int = 0) -> dict:
    return json.loads(run(*args, "--json", code=code))
