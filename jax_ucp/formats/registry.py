"""Other people's checkpoints, and ours: one table from what marks a format to what opens it.

To add a format, write a module with `recognise(path)` and an opener, and add its `Format` here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from jax_ucp.errors import FormatError, NotACheckpoint, SpecError, UCPError
from jax_ucp.files.looked import looking_once
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.source_files import opening
from jax_ucp.formats import run_folders
from jax_ucp.formats.dcp import reader as dcp
from jax_ucp.formats.deepspeed import reader as deepspeed
from jax_ucp.formats.deepspeed import universal_reader as deepspeed_universal
from jax_ucp.formats.dtensor_ranks import reader as dtensor_ranks
from jax_ucp.formats.flax_msgpack import reader as flax_msgpack
from jax_ucp.formats.gguf import reader as gguf
from jax_ucp.formats.huggingface import folder as weight_folder
from jax_ucp.formats.huggingface import runs
from jax_ucp.formats.huggingface.hints import not_read, point_inside
from jax_ucp.formats.huggingface.quantization import settle
from jax_ucp.formats.huggingface.stand_ins import stand_in
from jax_ucp.formats.huggingface.training_folder import add_trainer_state
from jax_ucp.formats.huggingface.weight_names import holds_weights
from jax_ucp.formats.listing import listed
from jax_ucp.formats.megatron import dist as megatron_dist
from jax_ucp.formats.megatron import fsdp as megatron_fsdp
from jax_ucp.formats.megatron import legacy as megatron_legacy
from jax_ucp.formats.options import NOTHING_TWICE, Options
from jax_ucp.formats.orbax import array_folders
from jax_ucp.formats.orbax import reader as orbax
from jax_ucp.formats.orbax import steps as orbax_steps
from jax_ucp.formats.safetensors import reader as safetensors
from jax_ucp.formats.torch_save import reader as torch_state
from jax_ucp.garbage import uncollected
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.suspicions import suspicions
from jax_ucp.universal import reader as universal
from jax_ucp.universal.ledger import LEDGER_FILE

_SHOWN = 4

Opener = Callable[[FilePath, Options], Contents]


@dataclass(frozen=True)
class Format:
    """What a checkpoint of one format is recognised by, and what opens it.

    Attributes:
        recognise: Whether a path has the format's marker. Reads names only.
        label: What messages call it, with the marker in parentheses.
        open: Reads the metadata.
        takes_spec: Shards need the user's word on how they form parameters.
        stores_once: No array is stored twice. Others say themselves where nothing is.
        from_torch: Its own files may be torch's, so those beside it are not noted one by one.
        notes_siblings: `open` notes itself what weights lie beside. For others `open_contents`
            looks in the folder that is opened, and in the one that it names.
        takes_step: It has several steps, of which the user may choose one.
    """

    recognise: Callable[[FilePath], bool]
    label: str
    open: Opener
    takes_spec: bool = False
    stores_once: bool = False
    from_torch: bool = False
    notes_siblings: bool = False
    takes_step: bool = False


def _open_trainer_run(path: FilePath, options: Options) -> Contents:
    return runs.open_run(path, options, open_contents)


def _open_step(path: FilePath, options: Options) -> Contents:
    contents = orbax_steps.open_step(path, options, open_contents)
    notes = weight_folder.notes_beside(path, of_torch=False)
    return replace(contents, notes=[*contents.notes, *notes])


def _open_orbax_run(path: FilePath, options: Options) -> Contents:
    """A step of a run. Raises NotACheckpoint where weights beside the steps could be meant."""
    if weight_folder.recognise(path):
        weights = [child.name for child in path.children() if holds_weights([child.name])]
        raise NotACheckpoint(
            f"{path} holds the steps {orbax_steps.step_names(path)}, and beside them weights of"
            f" torch or safetensors, {listed(weights, _SHOWN)}: open one of them by its path"
        )
    return orbax_steps.open_run(path, options, open_contents)


def _open_step_folder(path: FilePath, options: Options) -> Contents:
    return run_folders.open_step(path, options, open_contents)


def _open_run(path: FilePath, options: Options) -> Contents:
    return run_folders.open_run(path, options, open_contents)


RUN = Format(
    runs.recognise,
    "a run of transformers' Trainer or accelerate (checkpoint-N, checkpoint_N)",
    _open_trainer_run,
    takes_spec=True,
    notes_siblings=True,
    takes_step=True,
)

# The first that recognises a path has it; the folder of a run may have the final weights, too.
FORMATS: tuple[Format, ...] = (
    Format(
        universal.recognise,
        "a universal checkpoint (ucp.json)",
        universal.open_universal,
        stores_once=True,
    ),
    Format(
        orbax.recognise,
        "a PyTree item of Orbax (_METADATA)",
        orbax.open_orbax,
        stores_once=True,
    ),
    Format(
        orbax_steps.is_step,
        "a step of Orbax (_CHECKPOINT_METADATA)",
        _open_step,
        takes_spec=True,
        notes_siblings=True,
    ),
    Format(
        run_folders.is_run,
        "a run of verl, SkyRL, torchtitan, OLMo-core or Automodel (folders of steps)",
        _open_run,
        takes_spec=True,
        from_torch=True,
        takes_step=True,
    ),
    Format(
        run_folders.is_step,
        "a step of verl, SkyRL, accelerate's FSDP, OLMo-core or Automodel (folders of saves)",
        _open_step_folder,
        from_torch=True,
    ),
    Format(
        deepspeed_universal.recognise,
        "DeepSpeed's universal folder (zero/)",
        deepspeed_universal.open_deepspeed_universal,
        takes_spec=True,
        from_torch=True,
    ),
    Format(
        deepspeed.recognise,
        "DeepSpeed (latest, or *_optim_states.pt)",
        deepspeed.open_deepspeed,
        takes_spec=True,
        from_torch=True,
    ),
    Format(
        megatron_dist.recognise,
        "Megatron (metadata.json and common.pt)",
        megatron_dist.open_megatron_dist,
        from_torch=True,
    ),
    Format(
        megatron_fsdp.recognise,
        "Megatron with FSDP (.metadata that names Megatron's counters)",
        megatron_fsdp.open_megatron_fsdp,
        from_torch=True,
    ),
    Format(
        dcp.recognise,
        "PyTorch's distributed checkpoint (.metadata)",
        dcp.open_dcp,
        from_torch=True,
    ),
    Format(
        dtensor_ranks.recognise,
        "DTensors by torch.save (*_world_size_N_rank_R.pt)",
        dtensor_ranks.open_dtensor_ranks,
        from_torch=True,
    ),
    Format(
        megatron_legacy.recognise,
        "Megatron (mp_rank_*/model_optim_rng.pt)",
        megatron_legacy.open_megatron_legacy,
        takes_spec=True,
        from_torch=True,
    ),
    Format(
        orbax_steps.is_run,
        "a run of Orbax, Flax, T5X or Paxml (folders or files of steps)",
        _open_orbax_run,
        takes_spec=True,
        notes_siblings=True,
        takes_step=True,
    ),
    Format(
        weight_folder.recognise,
        "a folder with *.safetensors or pytorch_model.bin",
        weight_folder.open_weight_folder,
        stores_once=True,
        from_torch=True,
        notes_siblings=True,
    ),
    Format(
        safetensors.recognise,
        "safetensors (a file or an index)",
        safetensors.open_safetensors,
        stores_once=True,
        from_torch=True,
        notes_siblings=True,
    ),
    Format(
        torch_state.recognise,
        "torch.save (a file, or an index of several)",
        torch_state.open_torch,
        stores_once=True,
        from_torch=True,
        notes_siblings=True,
    ),
    Format(
        gguf.recognise,
        "GGUF (a file, or the first part of a split one)",
        gguf.open_gguf,
        stores_once=True,
    ),
    Format(
        flax_msgpack.recognise,
        "Flax's msgpack (a file, or T5X's folder with `checkpoint`)",
        flax_msgpack.open_flax,
        stores_once=True,
    ),
    Format(
        orbax_steps.is_unmarked_step,
        "a step of Paxml, T5X or an old Orbax (a number, with items)",
        _open_step,
        takes_spec=True,
        notes_siblings=True,
    ),
    Format(
        array_folders.recognise,
        "a folder of zarr arrays, as Paxml's state (*/.zarray)",
        array_folders.open_array_folders,
        stores_once=True,
    ),
    RUN,
)


def open_contents(
    path: str | os.PathLike[str] | FilePath, options: Options, at: FilePath | None = None
) -> Contents:
    """What the checkpoint at `path` holds, whoever wrote it. Reads metadata only. `at` is where the
    path leads, where that is known.

    Raises NotACheckpoint where nothing there is a finished checkpoint of a format in the table,
    FormatError where what is there is not as its format has it, and SpecError for a spec that its
    format has no use for.
    """
    with looking_once() as asked:
        contents = _open_at(path, at or file_path(path), options)
    contents.files.asked = asked
    return replace(contents, suspicions=cache(partial(suspicions, contents)))


def _open_at(path: str | os.PathLike[str] | FilePath, at: FilePath, options: Options) -> Contents:
    _require_finished(path, at)
    format = RUN if options.step is not None and RUN.recognise(at) else _format_of(at)
    if format is None:
        raise _not_recognised(path, at)
    if options.spec and not format.takes_spec:
        what = format.label.partition(" (")[0]
        raise SpecError(
            f"{path} is {what}, which does not use a spec: leave out the spec {options.spec}"
        )
    if options.step is not None and not format.takes_step:
        raise FormatError(
            f"{path} is one checkpoint, not a run with steps: leave out step={options.step}, or"
            " open the folder that has the steps"
        )
    try:
        return _open_as(format, at, options)
    except UCPError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        # An entry that is missing, or of another type than the format's writers give it.
        what = f"{type(error).__name__}: {error}"
        raise FormatError(
            f"{path} looks like {format.label}, but its metadata are not as expected ({what})"
        ) from error


def _format_of(at: FilePath) -> Format | None:
    return next((format for format in FORMATS if format.recognise(at)), None)


def _open_as(format: Format, at: FilePath, options: Options) -> Contents:
    with opening() as files, uncollected():
        contents = format.open(at, options)
        _require_use(contents, format, options)
        noted = _with_notes(contents, at, format, options)
        settled = settle(noted, options.dequantize)
    return replace(settled, files=files, reading=options.reading)


def _require_finished(path: str | os.PathLike[str] | FilePath, at: FilePath) -> None:
    """Raise NotACheckpoint where nothing is at the path, or a conversion that has not finished."""
    if universal.recognise(at):
        return
    if not at.exists():
        link = f": it is a link to {at.link()}, which is not there" if at.link() else ""
        raise NotACheckpoint(f"{path} does not exist{link}")
    if (at / LEDGER_FILE).is_file():
        raise NotACheckpoint(
            f"{path} is an unfinished conversion: run the same convert again to complete it"
        )


def _not_recognised(path: str | os.PathLike[str] | FilePath, at: FilePath) -> NotACheckpoint:
    """The error for a path that no format recognises, with what is known of what is there."""
    if at.is_file() and (why := stand_in(at)):
        return NotACheckpoint(f"{path} is not a checkpoint: {why}")
    known = "\n  ".join(format.label for format in FORMATS)
    message = f"{path} is not a checkpoint of a format known here:\n  {known}"
    if at.is_dir():
        point_inside(at, _opens)
        if why := not_read(at):
            message += f"\n{why}"
    return NotACheckpoint(message)


def _opens(inside: FilePath) -> bool:
    """Whether a format knows a folder. Raises NotACheckpoint for one of DCP without its table."""
    format = _format_of(inside)
    if format is not None and format.open is dcp.open_dcp:
        dcp.require_metadata(inside)
    return format is not None


def _with_notes(contents: Contents, at: FilePath, format: Format, options: Options) -> Contents:
    """The contents, with notes on weights that a trainer left beside, and where there is nothing
    to `on_conflict`.
    """
    notes = list(contents.notes)
    if not format.notes_siblings:
        for folder in dict.fromkeys([at, replace(at, key=file_path(contents.path).key)]):
            notes += weight_folder.notes_beside(folder, format.from_torch, contents.extras)
        if format.open is deepspeed.open_deepspeed and at.is_dir():
            contents = add_trainer_state(replace(contents, notes=notes), at)
            notes = list(contents.notes)
    if options.on_conflict and format.stores_once:
        notes.append(NOTHING_TWICE.format(options.on_conflict))
    return replace(contents, notes=notes)


def _require_use(contents: Contents, format: Format, options: Options) -> None:
    """Raise FormatError where the user said something of the optimizer, or of the model, that
    decided nothing.
    """
    # what was said of the source of a conversion is recorded in it; a step of it can have a say
    said = {} if format.open is universal.open_universal else contents.source
    if options.model is not None and "model" not in said:
        raise FormatError(f"{contents.path} has only one model: leave out model=")
    if options.optimizer_groups is None or "optimizer_groups" in said:
        return
    why = "no optimizer here has states whose parameters are not known"
    if options.weights_only:
        why = "weights_only leaves the optimizer aside"
    raise FormatError(
        f"{contents.path}: optimizer_groups has no effect, because {why}; leave it out"
    )
