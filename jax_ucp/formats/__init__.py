"""Other people's checkpoints, and ours: one table from what marks a format to what opens it.

To add a format, write a module with `recognise(path)` and an opener, and add one line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    weight_folder,
)
from jax_ucp.formats.options import Options
from jax_ucp.formats.quantization import settle
from jax_ucp.formats.stand_ins import finished_name, stand_in
from jax_ucp.formats.weight_files import refuse_part
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.ledger import Ledger

Opener = Callable[[Path, Options], Contents]

_SHOWN = 6
_FOREIGN = {".gguf": "GGUF", ".h5": "Keras's HDF5", ".msgpack": "Flax's msgpack", ".npz": "numpy's npz"}
_FOREIGN |= {".nemo": "NeMo's archive", ".onnx": "ONNX"}


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
    (megatron_legacy.recognise, "Megatron (mp_rank_*/model_optim_rng.pt)", megatron_legacy.open_megatron_legacy),
    (
        weight_folder.recognise,
        "a folder with *.safetensors or pytorch_model.bin",
        weight_folder.open_weight_folder,
    ),
    (safetensors.recognise, "safetensors (a file or an index)", safetensors.open_safetensors),
    (torch_state.recognise, "torch.save (a file, or an index of several)", torch_state.open_torch),
)


# Formats whose folders may have weights beside them that a trainer exported.
_OF_TORCH = (
    deepspeed.open_deepspeed,
    deepspeed_universal.open_deepspeed_universal,
    megatron_dist.open_megatron_dist,
    dcp.open_dcp,
    megatron_legacy.open_megatron_legacy,
)


def open_contents(path: str | os.PathLike[str], options: Options) -> Contents:
    """What the checkpoint at `path` holds, whoever wrote it. Reads metadata only.

    Raises NotACheckpoint where nothing there is a finished checkpoint of a format in the table, FormatError
    where what is there is not as its format has it.
    """
    at = Path(path)
    if not at.exists():
        link = f": it is a link to {at.readlink()}, which is not there" if at.is_symlink() else ""
        raise NotACheckpoint(f"{path} does not exist{link}")
    if Ledger.begun(at) and not universal.recognise(at):
        raise NotACheckpoint(f"{path} is an unfinished conversion: run the same convert again to complete it")
    for recognise, name, opener in FORMATS:
        if recognise(at):
            try:
                return settle(_with_notes(opener(at, options), at, opener), options.dequantize)
            except UCPError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
                # An entry that is missing, or of another type than the format's writers give it.
                what = f"{type(error).__name__}: {error}"
                raise FormatError(f"{path} looks like {name}, but its metadata are not as expected ({what})") from error
    if at.is_file() and (why := stand_in(at)):
        raise NotACheckpoint(f"{path} is no checkpoint: {why}")
    if at.is_dir():
        _point_inside(at)
    known = "\n  ".join(name for _, name, _ in FORMATS)
    why = f"\n{why}" if at.is_dir() and (why := _foreign(at)) else ""
    raise NotACheckpoint(f"{path} is no checkpoint of a format known here:\n  {known}{why}")


def _point_inside(at: Path) -> None:
    """Raises NotACheckpoint, naming them, where a folder holds checkpoints, and FormatError where only parts of one."""
    steps = sorted((path for path in at.iterdir() if orbax.is_step(path)), key=_natural)
    if steps:
        names = ", ".join(path.name for path in steps)
        raise NotACheckpoint(f"{at} holds the steps {names}: open one, {steps[-1]}")
    inside, refusals = [*_folders_in(at)], []
    for path in _children(at):
        if path.is_file() and torch_state.recognise(path):
            try:
                refuse_part(path)
                inside.append(path)
            except FormatError as error:
                refusals.append(error)
    if inside:
        raise NotACheckpoint(f"{at} is no checkpoint itself, but holds {_listed(inside)}: open one, {inside[0]}")
    for refusal in refusals:
        raise refusal


def _with_notes(contents: Contents, at: Path, opener: Opener) -> Contents:
    """The checkpoint, with notes on what a trainer has left beside it in the same folder."""
    beside = [*weight_folder.notes_beside(at)] if opener in _OF_TORCH else []
    return replace(contents, notes=[*contents.notes, *beside]) if beside else contents


def _folders_in(at: Path) -> Iterator[Path]:
    """The folders in a folder that are checkpoints: of any format, or the revisions that a hub cache has."""
    revision, snapshots = at / "refs" / "main", at / "snapshots"
    if snapshots.is_dir() and revision.is_file():
        yield snapshots / revision.read_text().strip()
    elif snapshots.is_dir():
        yield from (path for path in _children(snapshots) if path.is_dir())
    for path in _children(at):
        if path.is_dir() and any(recognise(path) for recognise, _, _ in FORMATS):
            yield path


def _children(at: Path) -> list[Path]:
    return sorted((path for path in at.iterdir() if not path.name.startswith(".")), key=_natural)


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(path.name for path in paths[:_SHOWN]) + more


def _foreign(at: Path) -> str:
    """What a folder shows of why nothing in it can be opened: a download under way, or weights in other formats."""
    for path in sorted(at.iterdir()):
        if (will_be := finished_name(path.name)) is not None and weight_folder.holds_weights([will_be]):
            return f"{path.name} in it is a download that has not ended"
        if (what := _FOREIGN.get(path.suffix)) is not None:
            return f"{path.name} in it is {what}, which is not read here"
    return ""


def _natural(path: Path) -> tuple[str, int, str]:
    """Steps in the order of their numbers, whatever is before these in their names."""
    stem = path.name.rstrip("0123456789")
    number = path.name[len(stem) :]
    return stem, int(number) if number else -1, path.name
