"""`jax-ucp`: look into any checkpoint, map it to a model, plan, convert, verify, export, compare.

Exit codes: 0, all is well; 1, the checkpoint is refused, has faults, or differs, with the reason;
2, the command line is wrong; 130, it was stopped by Ctrl-C, with what can be run again.
"""

from __future__ import annotations

import sys
from typing import Any

import click

import jax_ucp
from jax_ucp.cli.convert import convert
from jax_ucp.cli.diff import diff
from jax_ucp.cli.export import export
from jax_ucp.cli.index import index
from jax_ucp.cli.inspect import inspect
from jax_ucp.cli.link import link
from jax_ucp.cli.map import map_
from jax_ucp.cli.mappings import mappings
from jax_ucp.cli.output import to_stderr
from jax_ucp.cli.plan import plan
from jax_ucp.cli.report import report
from jax_ucp.cli.run import run
from jax_ucp.cli.verify import verify
from jax_ucp.errors import UCPError
from jax_ucp.text import visible_lines

# The exit code that shells give to what Ctrl-C ends.
STOPPED = 130

_NOTHING_WRITTEN = "nothing was written; run it again"
_AGAIN = {
    "convert": "TARGET is not a checkpoint yet; run the same command again to continue",
    "link": "TARGET is not a checkpoint yet; run the same command again to continue",
    "export": "nothing was written to TARGET; the same command starts over",
}


class _Refusals(click.Group):
    """Commands whose refusals are one clear message and exit code 1, never a traceback; nor is
    Ctrl-C.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if ctx.invoked_subcommand != run.name:  # whose errors are those of somebody's program
                _end_in_words(ctx, error)
            raise


def _end_in_words(ctx: click.Context, error: BaseException) -> None:
    """End with a message for an error that users may meet; return for any other one."""
    match error:
        case KeyboardInterrupt():
            command = ctx.invoked_subcommand or ""
            to_stderr.print(f"stopped: {_AGAIN.get(command, _NOTHING_WRITTEN)}")
            sys.exit(STOPPED)
        case BrokenPipeError():
            sys.stdout = None  # the reader has what it wanted; nothing more can be flushed
            sys.exit(0)
        case click.UsageError():
            shown = visible_lines(error.format_message())
            if shown != error.format_message():
                raise click.UsageError(shown, ctx=error.ctx) from None
        case UCPError() | OSError():
            raise click.ClickException(visible_lines(str(error))) from None
        case MemoryError():
            raise click.ClickException(
                f"there is not enough memory: {visible_lines(str(error))}"
            ) from None


@click.group(cls=_Refusals, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jax_ucp.__version__, prog_name="jax-ucp")
def main() -> None:
    """Read, compare, convert and export checkpoints of DeepSpeed, Megatron, PyTorch, Hugging Face,
    Orbax and others. A path may be local, or s3://, gs://, az://, https:// or hf://org/name.
    """


COMMANDS = inspect, plan, map_, mappings, convert, link, export, verify, diff, report, index, run
for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main()
