"""Other people's checkpoints, and ours: one table from what marks a format to what opens it.

To add a format, write a module with `recognise` and `parse`, and add its `Format` to the table, or
make it an entry point of another package: `docs/adding-a-format.md`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Literal

from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import FormatError, NotACheckpoint, SpecError
from jax_ucp.files.listing import counting, listed
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.placeholders import stand_in
from jax_ucp.files.source_files import opening
from jax_ucp.formats import orbax_steps, saved_index, step_folders
from jax_ucp.formats.dcp import marks as dcp
from jax_ucp.formats.deepspeed import marks as deepspeed
from jax_ucp.formats.dtensor_ranks.files import has_rank_files
from jax_ucp.formats.huggingface import beside
from jax_ucp.formats.huggingface.quantization import settle
from jax_ucp.formats.megatron import marks as megatron
from jax_ucp.formats.nested import as_written
from jax_ucp.formats.orbax import marks as orbax
from jax_ucp.formats.steps import Run, open_run
from jax_ucp.garbage import gc_paused
from jax_ucp.jobs.ledger import LEDGER_FILE
from jax_ucp.options import NOTHING_TWICE, Options
from jax_ucp.universal import reader as universal

ENTRY_POINTS = "jax_ucp.formats"

# Options that mean something only in some checkpoints.
WORDS = frozenset({"model", "optimizer_groups"})
TWICE = WORDS | {"on_conflict"}
SPEC = TWICE | {"spec"}
STEP = SPEC | {"step"}


@dataclass(frozen=True)
class Format:
    """How checkpoints of one format are recognised and opened.

    Attributes:
        name: What messages call it. No two formats have one name.
        marker: The files by which it is recognised, for people.
        recognise: Whether a path has the marker. Reads names only.
        parse: Reads the metadata.
        takes: Of `spec`, `step`, `on_conflict`, `model` and `optimizer_groups` the options that can
            mean something for it; with another one, the checkpoint is refused.
        beside: Which files beside those of the checkpoint are noted as not read: `all` that may
            hold weights; `weights`, where its own files may have any name of torch's; `none`, where
            `parse` sees to it.
    """

    name: str
    marker: str
    recognise: Callable[[FilePath], bool]
    parse: Callable[[FilePath, Options], Contents]
    takes: frozenset[str] = TWICE
    beside: Literal["all", "weights", "none"] = "all"


def _run(
    name: str,
    marker: str,
    find: Callable[[FilePath], Run | None],
    beside: Literal["weights", "none"],
) -> Format:
    """The format of a run's folder, whose steps are of other formats."""

    def parse(path: FilePath, options: Options) -> Contents:
        run = find(path)
        assert run is not None, "it is recognised by that"
        return open_run(run, options, open_contents)

    return Format(name, marker, lambda path: find(path) is not None, parse, STEP, beside)


def _open_step(path: FilePath, options: Options) -> Contents:
    contents = orbax_steps.open_step(path, options, open_contents)
    notes = beside.notes_beside(path, of_torch=False)
    return replace(contents, notes=[*contents.notes, *notes])


def _open_deepspeed(path: FilePath, options: Options) -> Contents:
    """A checkpoint of DeepSpeed; what a trainer has beside it is kept."""
    from jax_ucp.formats.deepspeed.reader import parse

    contents = parse(path, options)
    if not any(beside.what_is(child.name) == beside.TRAINER for child in path.children()):
        return contents
    from jax_ucp.formats.huggingface.training_folder import add_trainer_state

    return add_trainer_state(contents, path)


def _open_index(path: FilePath, options: Options) -> Contents:
    return saved_index.open_index(path, options, open_contents)


def _parse(module: str) -> Callable[[FilePath, Options], Contents]:
    """`parse` of a module in this package, which is imported when there is something to parse."""
    return lambda path, options: import_module(module, __package__).parse(path, options)


def _in(module: str) -> tuple[Callable[[FilePath], bool], Callable[[FilePath, Options], Contents]]:
    """`recognise` and `parse` of a module in this package, which is imported when one is called."""
    return lambda path: import_module(module, __package__).recognise(path), _parse(module)


# The first that recognises a path has it; the folder of a run may have the final weights, too.
FORMATS: tuple[Format, ...] = (
    Format("an index that save_index wrote", f"*{saved_index.SUFFIX}", saved_index.recognise,
           _open_index, STEP, "none"),
    Format("a universal checkpoint", "ucp.json", universal.recognise, universal.open_universal,
           frozenset()),
    Format("a PyTree item of Orbax", "_METADATA", orbax.is_tree, _parse(".orbax.reader"), WORDS),
    Format("a step of Orbax", "_CHECKPOINT_METADATA", orbax_steps.is_step, _open_step, SPEC,
           "none"),
    _run("a run of verl, SkyRL, torchtitan, OLMo-core or Automodel", "folders of steps",
         step_folders.find_run, "weights"),
    Format("a step of verl, SkyRL, accelerate's FSDP, OLMo-core or Automodel", "folders of saves",
           step_folders.is_step,
           lambda path, options: step_folders.open_step(path, options, open_contents), TWICE,
           "weights"),
    Format("DeepSpeed's universal folder", "zero/", deepspeed.is_universal,
           _parse(".deepspeed.universal_reader"), SPEC, "weights"),
    Format("DeepSpeed", "latest, or *_optim_states.pt", deepspeed.is_checkpoint, _open_deepspeed,
           SPEC, "weights"),
    Format("Megatron", "metadata.json and common.pt", megatron.is_dist, _parse(".megatron.dist"),
           TWICE, "weights"),
    Format("Megatron with FSDP", ".metadata that names Megatron's counters", megatron.is_fsdp,
           _parse(".megatron.fsdp"), TWICE, "weights"),
    Format("PyTorch's distributed checkpoint", ".metadata", dcp.recognise, _parse(".dcp.reader"),
           TWICE, "weights"),
    Format("DTensors by torch.save", "*_world_size_N_rank_R.pt or ITEM_R.pt", has_rank_files,
           _parse(".dtensor_ranks.reader"), TWICE, "weights"),
    Format("Megatron's legacy format", "mp_rank_*/model_optim_rng.pt", megatron.is_legacy,
           _parse(".megatron.legacy"), SPEC, "weights"),
    _run("a run of Orbax, Flax, T5X or Paxml", "folders or files of steps", orbax_steps.find_run,
         "none"),
    Format("a folder of weights", "*.safetensors or pytorch_model.bin",
           *_in(".huggingface.folder"), WORDS, "none"),
    Format("safetensors", "a file or an index", *_in(".safetensors.reader"), WORDS, "none"),
    Format("torch.save", "a file, or an index of several", *_in(".torch_save.reader"), WORDS,
           "none"),
    Format("GGUF", "a file, or the first part of a split one", *_in(".gguf.reader"), WORDS),
    Format("Equinox", "*.eqx", *_in(".equinox.reader"), frozenset()),
    Format("Flax's msgpack", "a file, or T5X's folder with `checkpoint`",
           *_in(".flax_msgpack.reader"), WORDS),
    Format("a step of Paxml, T5X or an old Orbax", "a number, with items",
           orbax_steps.is_unmarked_step, _open_step, SPEC, "none"),
    Format("a folder of zarr arrays, as Paxml's state", "*/.zarray", orbax.are_arrays,
           _parse(".orbax.array_folders"), WORDS),
    _run("a run of transformers' Trainer or accelerate", "checkpoint-N, checkpoint_N",
         step_folders.find_trainer_run, "none"),
)  # fmt: skip


@cache
def formats() -> tuple[Format, ...]:
    """The formats of other packages, which are asked first, and those of the table.

    A package has its `Format` as an entry point of the group `jax_ucp.formats`. What cannot be
    loaded, is not a Format, or has the name of another one is left out, with a warning.
    """
    found: list[tuple[Format, str]] = [(format, "jax_ucp") for format in FORMATS]
    for point in entry_points(group=ENTRY_POINTS):
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            format = point.load()
            if not isinstance(format, Format):
                raise TypeError(f"{point.value} is a {type(format).__name__}, not a Format")
            found.append((format, owner))
        except Exception as error:  # whatever a module of others raises when it is imported
            warnings.warn(
                f"the format {point.name!r} of {owner} is left out: {type(error).__name__}:"
                f" {error}",
                stacklevel=2,
            )
    owners: dict[str, list[str]] = {}
    for format, owner in found:
        owners.setdefault(format.name, []).append(owner)
    for name, several in owners.items():
        if len(several) > 1:
            raise FormatError(
                f"{' and '.join(several)} have a format called {name!r} each: nothing says which"
                " is meant; remove one of the packages"
            )
    return tuple(format for format, _ in (*found[len(FORMATS) :], *found[: len(FORMATS)]))


def open_contents(
    path: str | os.PathLike[str] | FilePath, options: Options, at: FilePath | None = None
) -> Contents:
    """The contents of the checkpoint at `path`, whoever wrote it, found `at` where it leads.

    Raises NotACheckpoint where nothing is a finished checkpoint of a known format, FormatError for
    what breaks its format, and SpecError for a spec that its format has no use for.
    """
    with counting() as asked:
        at = at or file_path(path)
        with listed(at.files) as files:
            contents = _open_at(path, FilePath(files, at.key), options)
    contents.files.asked = asked
    return contents


def _open_at(path: str | os.PathLike[str] | FilePath, at: FilePath, options: Options) -> Contents:
    _require_finished(path, at)
    format = _format_of(at, options.step)
    if format is None:
        raise _not_recognised(path, at)
    if options.spec and "spec" not in format.takes:
        raise SpecError(
            f"{path} is {format.name}, which does not use a spec: leave out the spec {options.spec}"
        )
    if options.step is not None and "step" not in format.takes:
        raise FormatError(
            f"{path} is one checkpoint, not a run with steps: leave out step={options.step}, or"
            " open the folder that has the steps"
        )
    looks = f"{path} looks like {format.name} ({format.marker})"
    with as_written(f"{looks}, but its metadata are not as expected"):
        with opening() as files, gc_paused():
            contents = format.parse(at, options)
            if format.parse is _open_index:  # which opened it as what it is of
                return contents
            _require_use(contents, format, options)
            # the contents, with notes on weights beside, and on a useless `on_conflict`
            notes = list(contents.notes)
            if format.beside != "none":
                of_torch = format.beside == "weights"
                for folder in dict.fromkeys([at, replace(at, key=file_path(contents.path).key)]):
                    notes += beside.notes_beside(folder, of_torch, contents.extras)
            if options.on_conflict and "on_conflict" not in format.takes:
                notes.append(NOTHING_TWICE.format(options.on_conflict))
            settled = settle(replace(contents, notes=notes), options.dequantize)
        return replace(settled, files=files, reading=options.reading)


def _format_of(at: FilePath, step: int | None = None) -> Format | None:
    """The first format that recognises a path; where a step is asked for, a run with steps."""
    recognising = (format for format in formats() if format.recognise(at))
    if step is None:
        return next(recognising, None)
    recognised = list(recognising)
    runs_first = sorted(recognised, key=lambda format: "step" not in format.takes)
    return next(iter(runs_first), None)


def _require_finished(path: str | os.PathLike[str] | FilePath, at: FilePath) -> None:
    """Raise NotACheckpoint where nothing is at the path, or a conversion that has not finished."""
    if universal.recognise(at):
        return
    if not at.exists():
        link = f": it is a link to {at.link()}, which is not there" if at.link() else ""
        raise NotACheckpoint(f"{path} does not exist{link}")
    if (at / LEDGER_FILE).is_file():
        raise NotACheckpoint(
            f"{path} is an unfinished conversion: run the same convert again, or the same export in"
            " shares, to complete it"
        )


def _not_recognised(path: str | os.PathLike[str] | FilePath, at: FilePath) -> NotACheckpoint:
    """The error for a path that no format recognises, with what is known of what is there."""
    from jax_ucp.formats.hints import not_read, of_another_format, point_inside

    if at.is_file() and (why := stand_in(at)):
        return NotACheckpoint(f"{path} is not a checkpoint: {why}")
    if other := of_another_format(at):
        return NotACheckpoint(f"{path} {other}")
    why = ""
    if at.is_dir():
        point_inside(at, _opens)
        why = not_read(at)
    known = [f"{format.name} ({format.marker})" for format in formats()]
    return NotACheckpoint(f"{path} is not a checkpoint of a format known here:", known, remedy=why)


def _opens(inside: FilePath) -> bool:
    """Whether a format knows a folder. Raises NotACheckpoint for one of DCP without its table."""
    format = _format_of(inside)
    if format is None:
        return False
    if dcp.recognise(inside):
        dcp.require_metadata(inside)
    return True


def _require_use(contents: Contents, format: Format, options: Options) -> None:
    """Raise FormatError where a word on the optimizer or the model decided nothing."""
    # a universal checkpoint takes neither; its source records what was said when it was made
    said = contents.source.keys() & format.takes
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
