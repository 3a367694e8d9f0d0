"""Other people's checkpoints, and ours: one table from what marks a format to what opens it.

To add a format, write a module with `recognise(path)` and an opener, and add one line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from jax_ucp.errors import FormatError, NotACheckpoint, UCPError
from jax_ucp.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    megatron_dist,
    megatron_legacy,
    orbax,
    safetensors,
    torch_state,
    universal,
)
from jax_ucp.formats.options import Options
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.ledger import Ledger

Opener = Callable[[Path, Options], Contents]


def _open_step(path: Path, options: Options) -> Contents:
    """The one PyTree item of a step. Raises NotACheckpoint, naming the items, where there is not just one."""
    items = orbax.items_of_step(path)
    if len(items) != 1:
        names = ", ".join(item.name for item in items) or "no PyTree item"
        raise NotACheckpoint(f"{path} is a step with {names}: open one of its items, {path}/<item>")
    return open_contents(items[0], options)


# What marks the format, what it is called, what opens it. The first that recognises the path has it.
FORMATS: tuple[tuple[Callable[[Path], bool], str, Opener], ...] = (
    (universal.recognise, "a universal checkpoint (ucp.json)", universal.open_universal),
    (orbax.recognise, "a PyTree item of Orbax (_METADATA)", orbax.open_orbax),
    (orbax.is_step, "a step of Orbax (_CHECKPOINT_METADATA)", _open_step),
    (
        deepspeed_universal.recognise,
        "DeepSpeed's universal folder (zero/)",
        deepspeed_universal.open_deepspeed_universal,
    ),
    (deepspeed.recognise, "DeepSpeed (latest, or *_optim_states.pt)", deepspeed.open_deepspeed),
    (megatron_dist.recognise, "Megatron (metadata.json and common.pt)", megatron_dist.open_megatron_dist),
    (dcp.recognise, "PyTorch's distributed checkpoint (.metadata)", dcp.open_dcp),
    (safetensors.recognise, "safetensors (a file, an index, or a folder)", safetensors.open_safetensors),
    (megatron_legacy.recognise, "Megatron (mp_rank_*/model_optim_rng.pt)", megatron_legacy.open_megatron_legacy),
    (torch_state.recognise, "torch.save (a file, or a folder with pytorch_model.bin)", torch_state.open_torch),
)


def open_contents(path: str | os.PathLike[str], options: Options) -> Contents:
    """What the checkpoint at `path` holds, whoever wrote it. Reads metadata only.

    Raises NotACheckpoint where nothing there is a finished checkpoint of a format in the table, FormatError
    where what is there is not as its format has it.
    """
    at = Path(path)
    if not at.exists():
        raise NotACheckpoint(f"{path} does not exist")
    if Ledger.begun(at) and not universal.recognise(at):
        raise NotACheckpoint(f"{path} is an unfinished conversion: run the same convert again to complete it")
    for recognise, name, opener in FORMATS:
        if recognise(at):
            try:
                contents = opener(at, options)
                _require_use(contents, options)
                return contents
            except UCPError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
                # An entry that is missing, or of another type than the format's writers give it.
                what = f"{type(error).__name__}: {error}"
                raise FormatError(f"{path} looks like {name}, but its metadata are not as expected ({what})") from error
    if at.is_dir() and (steps := sorted((p for p in at.iterdir() if orbax.is_step(p)), key=_natural)):
        last = steps[-1].name
        raise NotACheckpoint(f"{path} holds the steps {', '.join(p.name for p in steps)}: open one, {path}/{last}")
    known = "\n  ".join(name for _, name, _ in FORMATS)
    raise NotACheckpoint(f"{path} is no checkpoint of a format known here:\n  {known}")


def _require_use(contents: Contents, options: Options) -> None:
    """Raise FormatError where the user said something of the optimizer that decided nothing."""
    used = contents.format != "universal" and "optimizer_groups" in contents.source
    if used or options.optimizer_groups is None:
        return
    why = "no optimizer here has states whose parameters are not known"
    if options.weights_only:
        why = "weights_only leaves the optimizer aside"
    raise FormatError(f"{contents.path}: optimizer_groups would change nothing, because {why}; open it without")


def _natural(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else -1), path.name
