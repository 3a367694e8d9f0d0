"""The command line, run in this process."""

import json

from click.testing import CliRunner

from jax_ucp.cli.main import main


def run(*args: object, code: int = 0) -> str:
    """What a command prints; its errors too."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def run_json(*args: object, code: int = 0) -> dict:
    return json.loads(run(*args, "--json", code=code))
