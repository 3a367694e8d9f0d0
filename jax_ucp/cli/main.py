"""`jax-ucp`: look into any checkpoint, map it to a model, plan, convert, verify, export, compare.

Exit codes: 0, all is well; 1, the checkpoint is refused, has faults, or differs, with the reason;
2, the command line is wrong; 130, it was stopped by Ctrl-C, with what can be run again.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

import click

import jax_ucp
from jax_ucp.errors import UCPError
from jax_ucp.garbage import gc_paused, is_frozen
from jax_ucp.text import visible_lines

# The exit code that shells give to what Ctrl-C ends.
STOPPED = 130

_NOTHING_WRITTEN = "nothing was written; run it again"
_AGAIN = {
    "convert": "TARGET is not a checkpoint yet; run the same command again to continue",
    "link": "TARGET is not a checkpoint yet; run the same command again to continue",
    "export": "nothing was written to TARGET; the same command starts over",
}

# The commands and their lines in `jax-ucp --help`; each is defined in the module of its name.
_SUMMARIES = {
    "convert": "Convert to the universal format.",
    "diff": "Show what differs between two checkpoints.",
    "export": "Write safetensors, DCP, DeepSpeed universal or Megatron.",
    "index": "Write an index that opens a checkpoint at once.",
    "inspect": "Show what is in a checkpoint, and where.",
    "link": "Make a checkpoint for Orbax of the files as they are.",
    "map": "Check or draft a mapping to your model.",
    "mappings": "List the mappings that come with the package.",
    "plan": "Dry run of a conversion or a restore.",
    "report": "Write a web page about a checkpoint.",
    "run": "Run a program whose saves and restores by Orbax are ours.",
    "verify": "Check checksums and duplicates.",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are needed, and whose errors and Ctrl-C end
    with a message and an exit code, without a traceback.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, summary, rest = super().resolve_command(ctx, args)
        if summary is None:
            return name, None, rest
        with gc_paused():
            module = importlib.import_module(f"jax_ucp.cli.{name}")
        if not is_frozen():  # only once, if a program runs several commands
            gc.freeze()  # imported objects stay: the collector need not look at them
        return name, getattr(module, str(name)), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if ctx.invoked_subcommand == "run":  # these are errors of the user's program
                raise
            match error:
                case KeyboardInterrupt():
                    command = ctx.invoked_subcommand or ""
                    click.echo(f"stopped: {_AGAIN.get(command, _NOTHING_WRITTEN)}", err=True)
                    sys.exit(STOPPED)
                case BrokenPipeError():
                    sys.stdout = None  # the reader has closed the pipe; nothing can be flushed
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
            raise


@click.group(
    cls=_Commands,
    commands=[click.Command(name, short_help=summary) for name, summary in _SUMMARIES.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(jax_ucp.__version__, prog_name="jax-ucp")
def main() -> None:
    """Read, compare, convert and export checkpoints of DeepSpeed, Megatron, PyTorch, Hugging Face,
    Orbax and others. A path may be local, or s3://, gs://, az://, https:// or hf://org/name.
    """


if __name__ == "__main__":
    main()
