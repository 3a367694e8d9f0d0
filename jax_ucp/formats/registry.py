"""Other people's checkpoints, and ours: one table from what marks a format to what opens it.

To add a format, write a module with `recognise(path)` and an opener, and add one line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jax_ucp.arguments import local_path
from jax_ucp.errors import FormatError, NotACheckpoint, SpecError, UCPError
from jax_ucp.files.source_files import opening
from jax_ucp.formats.dcp import reader as dcp
from jax_ucp.formats.deepspeed import reader as deepspeed
from jax_ucp.formats.deepspeed import universal_reader as deepspeed_universal
from jax_ucp.formats.huggingface import folder as weight_folder
from jax_ucp.formats.huggingface.hints import not_read, point_inside
from jax_ucp.formats.huggingface.quantization import settle
from jax_ucp.formats.huggingface.stand_ins import stand_in
from jax_ucp.formats.megatron import dist as megatron_dist
from jax_ucp.formats.megatron import legacy as megatron_legacy
from jax_ucp.formats.options import NOTHING_TWICE, Options
from jax_ucp.formats.orbax import reader as orbax
from jax_ucp.formats.safetensors import reader as safetensors
from jax_ucp.formats.torch_save import reader as torch_state
from jax_ucp.sources.beside import MARKERS, items_beside
from jax_ucp.sources.contents import Contents
from jax_ucp.universal import reader as universal
from jax_ucp.universal.ledger import Ledger

Opener = Callable[[Path, Options], Contents]


def _open_step(path: Path, options: Options) -> Contents:
    """The one PyTree item of a step. Raises NotACheckpoint, naming the items, where there is not
    just one.
    """
    items = orbax.items_of_step(path)
    if len(items) != 1:
        if not items:
            raise NotACheckpoint(
                f"{path} is a step without a PyTree item: what it had is missing, or was never"
                " finished"
            )
        names = ", ".join(item.name for item in items)
        raise NotACheckpoint(f"{path} is a step with {names}: open one of its items, {path}/<item>")
    contents = open_contents(items[0], options)
    inventory = [*contents.inventory, *items_beside(path, {items[0].name, *MARKERS})]
    return replace(
        contents,
        inventory=inventory,
        notes=[*contents.notes, *weight_folder.notes_beside(path, of_torch=False)],
    )


# What marks the format, what it is called, what opens it. The first that recognises the path has
# it.
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
    (
        megatron_dist.recognise,
        "Megatron (metadata.json and common.pt)",
        megatron_dist.open_megatron_dist,
    ),
    (dcp.recognise, "PyTorch's distributed checkpoint (.metadata)", dcp.open_dcp),
    (
        megatron_legacy.recognise,
        "Megatron (mp_rank_*/model_optim_rng.pt)",
        megatron_legacy.open_megatron_legacy,
    ),
    (
        weight_folder.recognise,
        "a folder with *.safetensors or pytorch_model.bin",
        weight_folder.open_weight_folder,
    ),
    (safetensors.recognise, "safetensors (a file or an index)", safetensors.open_safetensors),
    (torch_state.recognise, "torch.save (a file, or an index of several)", torch_state.open_torch),
)


# Formats that say themselves what else lies in their folder, and files. Others may have weights
# beside them that a trainer exported, in the folder that is opened or in the one that it names.
_NOTE_THEMSELVES = (
    _open_step,
    weight_folder.open_weight_folder,
    safetensors.open_safetensors,
    torch_state.open_torch,
)

# Which of them take a spec: the others record themselves how their shards form parameters, or have
# none.
_TAKE_SPEC = (
    deepspeed_universal.open_deepspeed_universal,
    deepspeed.open_deepspeed,
    megatron_legacy.open_megatron_legacy,
    _open_step,
)

# Which of them store an array once only. Others say themselves where nothing is stored twice.
_STORE_ONCE = (
    universal.open_universal,
    orbax.open_orbax,
    weight_folder.open_weight_folder,
    safetensors.open_safetensors,
    torch_state.open_torch,
)


def open_contents(path: str | os.PathLike[str], options: Options) -> Contents:
    """What the checkpoint at `path` holds, whoever wrote it. Reads metadata only.

    Raises NotACheckpoint where nothing there is a finished checkpoint of a format in the table,
    FormatError where what is there is not as its format has it, and SpecError for a spec that its
    format has no use for.
    """
    at = local_path(path)
    if not at.exists():
        link = f": it is a link to {at.readlink()}, which is not there" if at.is_symlink() else ""
        raise NotACheckpoint(f"{path} does not exist{link}")
    if Ledger.begun(at) and not universal.recognise(at):
        raise NotACheckpoint(
            f"{path} is an unfinished conversion: run the same convert again to complete it"
        )
    for recognise, name, opener in FORMATS:
        if recognise(at):
            if options.spec and opener not in _TAKE_SPEC:
                what = name.partition(" (")[0]
                raise SpecError(
                    f"{path} is {what}, which has no use for the spec {options.spec}: open it"
                    " without"
                )
            try:
                with opening() as files:
                    contents = opener(at, options)
                    _require_use(contents, options)
                    contents = settle(
                        _with_notes(contents, at, opener, options), options.dequantize
                    )
                return replace(contents, files=files)
            except UCPError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
                # An entry that is missing, or of another type than the format's writers give it.
                what = f"{type(error).__name__}: {error}"
                raise FormatError(
                    f"{path} looks like {name}, but its metadata are not as expected ({what})"
                ) from error
    if at.is_file() and (why := stand_in(at)):
        raise NotACheckpoint(f"{path} is no checkpoint: {why}")
    if at.is_dir():
        point_inside(at, _recognised)
    known = "\n  ".join(name for _, name, _ in FORMATS)
    why = f"\n{why}" if at.is_dir() and (why := not_read(at)) else ""
    raise NotACheckpoint(f"{path} is no checkpoint of a format known here:\n  {known}{why}")


def _recognised(path: Path) -> bool:
    return any(recognise(path) for recognise, _, _ in FORMATS)


def _with_notes(contents: Contents, at: Path, opener: Opener, options: Options) -> Contents:
    """The contents, with notes on weights that a trainer left beside, and where there is nothing
    to `on_conflict`.
    """
    folders = dict.fromkeys([at, Path(contents.path)]) if opener not in _NOTE_THEMSELVES else ()
    of_torch = opener not in (universal.open_universal, orbax.open_orbax)
    notes = [note for folder in folders for note in weight_folder.notes_beside(folder, of_torch)]
    if options.on_conflict and opener in _STORE_ONCE:
        notes.append(NOTHING_TWICE.format(options.on_conflict))
    return replace(contents, notes=[*contents.notes, *notes]) if notes else contents


def _require_use(contents: Contents, options: Options) -> None:
    """Raise FormatError where the user said something of the optimizer that decided nothing."""
    used = contents.format != "universal" and "optimizer_groups" in contents.source
    if used or options.optimizer_groups is None:
        return
    why = "no optimizer here has states whose parameters are not known"
    if options.weights_only:
        why = "weights_only leaves the optimizer aside"
    raise FormatError(
        f"{contents.path}: optimizer_groups would change nothing, because {why}; open it without"
    )
