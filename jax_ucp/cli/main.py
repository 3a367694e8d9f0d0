"""`jax-ucp`: look into any checkpoint, map it to a model, plan, convert, verify, export, compare.

Exit codes: 0, all is well; 1, the checkpoint is refused, has faults, or differs, with the reason;
2, the command line is wrong; 130, it was stopped by Ctrl-C, with what can be run again.
"""

from __future__ import annotations

import sys
from typing import Any

import click

import jax_ucp
from jax_ucp.cli.copying import convert
from jax_ucp.cli.diff import diff
from jax_ucp.cli.export import export
from jax_ucp.cli.inspect import inspect
from jax_ucp.cli.map import map_
from jax_ucp.cli.mappings import mappings
from jax_ucp.cli.output import to_stderr
from jax_ucp.cli.plan import plan
from jax_ucp.cli.report import report
from jax_ucp.cli.verify import verify
from jax_ucp.errors import UCPError
from jax_ucp.text import visible_lines

# The exit code that shells give to what Ctrl-C ends.
STOPPED = 130

_NOTHING_WRITTEN = "nothing was written; run it again"
_AGAIN = {
    "convert": "TARGET is not a checkpoint yet; run the same command again to continue",
    "export": "nothing was written to TARGET; the same command starts over",
}


class _Refusals(click.Group):
    """Commands whose refusals are one clear message and exit code 1, never a traceback; nor is
    Ctrl-C.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            command = ctx.invoked_subcommand or ""
            to_stderr.print(f"stopped: {_AGAIN.get(command, _NOTHING_WRITTEN)}")
            sys.exit(STOPPED)
        except BrokenPipeError:
            sys.stdout = None  # the reader has what it wanted; nothing more can be flushed
            return None
        except click.UsageError as error:
            raise _visible(error) from None
        except (UCPError, OSError) as error:
            raise click.ClickException(visible_lines(str(error))) from None
        except MemoryError as error:
            raise click.ClickException(
                f"there is not enough memory: {visible_lines(str(error))}"
            ) from None


def _visible(error: click.UsageError) -> click.UsageError:
    """The error, with what it quotes of the command line made visible."""
    message = error.format_message()
    shown = visible_lines(message)
    return error if shown == message else click.UsageError(shown, ctx=error.ctx)


@click.group(cls=_Refusals, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jax_ucp.__version__, prog_name="jax-ucp")
def main() -> None:
    """Read, compare, convert and export checkpoints of DeepSpeed, Megatron, PyTorch, Hugging Face,
    Orbax and others. A path may be local, or s3://, gs://, az://, https:// or hf://org/name.
    """


# What `jax-ucp --help` says of each, in one line.
for command, command.short_help in (
    (inspect, "Show what is in a checkpoint, and where."),
    (plan, "Dry run of a conversion or a restore."),
    (map_, "Check or draft a mapping to your model."),
    (mappings, "List the mappings that come with the package."),
    (convert, "Convert to the universal format."),
    (export, "Write safetensors, DCP or DeepSpeed universal."),
    (verify, "Check checksums and duplicates."),
    (diff, "Show what differs between two checkpoints."),
    (report, "Write a web page about a checkpoint."),
):
    main.add_command(command)

if __name__ == "__main__":
    main()
