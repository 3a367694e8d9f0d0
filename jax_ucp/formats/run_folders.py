"""Folders that frameworks make around checkpoints: those of a step, and of a run with its steps.

A run's folder has a folder for each step; the one that its tracker file names is opened, or else
the last that is whole. A step's folder has a save for each model, or saves that are one checkpoint
only together, such as that of the weights and that of the optimizer. What lies beside is kept as
extras. Which folders and files these are is each framework's own: `RUNS` and `STEPS`.

Facts: `verl/trainer/ppo/ray_trainer.py` of verl 0.7, `skyrl/train/trainer.py` of SkyRL,
`torchtitan/components/checkpointer/dcp.py`, `olmo_core/train/checkpoint.py`,
`nemo_automodel/recipes/base_recipe.py`, `accelerate/checkpointing.py` and `utils/fsdp_utils.py` of
accelerate 1.15.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.dcp.metadata import metadata_files
from jax_ucp.formats.dcp.reader import open_saves
from jax_ucp.formats.dtensor_ranks.files import has_rank_files
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.listing import listed
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.beside import keep_beside
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.contents import Contents, Item

Open = Callable[[FilePath, Options], Contents]

_ACCELERATE_MODEL = "pytorch_model_fsdp_"
_NAMES_SHOWN = 6
MAX_ROLES = 16  # a folder with more folders is none of a step, and they are not listed one by one
MAX_BESIDE_BYTES = 1 << 26  # of more a file is data, such as weights


@dataclass(frozen=True, slots=True)
class Step:
    """A framework's folder of a step. `models` are the saves in it by name: the folders that are
    one checkpoint together. `beside` are folders whose files are kept, as those of the step are.
    """

    writer: str
    models: Callable[[FilePath], Mapping[str, Sequence[FilePath]]]
    beside: Sequence[str] = ()


def _roles(path: FilePath) -> dict[str, list[FilePath]]:
    """verl's `actor` and `critic`, SkyRL's `policy` and `critic`: rank files in each."""
    folders = _folders(path)
    if len(folders) > MAX_ROLES:
        return {}
    return {child.name: [child] for child in folders if has_rank_files(child)}


def _accelerate(path: FilePath) -> dict[str, list[FilePath]]:
    """Of each number the model's save and the optimizer's, of which one may be missing."""
    models: dict[str, list[FilePath]] = {}
    for child in _folders(path):
        match = re.fullmatch(r"(pytorch_model_fsdp|optimizer)_(\d+)", child.name)
        if match and metadata_files(child):
            name = f"{_ACCELERATE_MODEL}{match[2]}"
            models[name] = [path / name, path / f"optimizer_{match[2]}"]
    return models


def _require_both(folders: Sequence[FilePath], options: Options) -> Sequence[FilePath]:
    """The folders that are to be read. Raises FormatError where one is missing."""
    weights, *others = folders
    if options.weights_only and weights.is_dir():
        return [weights]
    for folder, other in zip(folders, reversed(folders), strict=True):
        if not folder.is_dir():
            remedy = "" if folder == weights else "; weights_only opens the weights alone"
            raise FormatError(f"{folder} is missing, which belongs to {other.name}{remedy}")
    return [weights, *others]


def _together(*names: str) -> Callable[[FilePath], dict[str, list[FilePath]]]:
    """Saves that are one checkpoint, of which the first and the last must be there."""

    def models(path: FilePath) -> dict[str, list[FilePath]]:
        folders = [path / name for name in names]
        found = all(folder.is_dir() and metadata_files(folder) for folder in folders)
        return {"model": folders} if found else {}

    return models


STEPS: tuple[Step, ...] = (
    Step("verl or SkyRL", _roles),
    Step("accelerate (FSDP, sharded)", _accelerate),
    Step("OLMo-core", _together("model_and_optim"), beside=("train",)),
    Step("Automodel", _together("model", "optim"), beside=("rng", "dataloader")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A framework's folder of a run: the pattern of its steps' names, with the number; the file
    that names the last, if there is one; and what a folder has that is a step.
    """

    writer: str
    name: re.Pattern[str]
    is_step: Callable[[FilePath], bool]
    tracker: str = ""


def _has_metadata(path: FilePath) -> bool:
    return bool(metadata_files(path))


RUNS: tuple[Run, ...] = (
    Run("verl", re.compile(r"global_step_(\d+)"), lambda path: bool(_roles(path)),
        "latest_checkpointed_iteration.txt"),
    Run("SkyRL", re.compile(r"global_step_(\d+)"), lambda path: bool(_roles(path)),
        "latest_ckpt_global_step.txt"),
    Run("torchtitan", re.compile(r"step-(\d+)"), _has_metadata),
    Run("OLMo-core", re.compile(r"step(\d+)"), lambda path: bool(STEPS[2].models(path))),
    Run("Automodel", re.compile(r"epoch_\d+_step_(\d+)"), lambda path: bool(STEPS[3].models(path))),
)  # fmt: skip


def _folders(path: FilePath) -> list[FilePath]:
    return [child for child in sorted(path.children()) if child.is_dir() and not child.link()]


# A step.


def is_step(path: FilePath) -> bool:
    return path.is_dir() and _step_of(path) is not None


def _step_of(path: FilePath) -> Step | None:
    return next((step for step in STEPS if step.models(path)), None)


def open_step(path: FilePath, options: Options, open_contents: Open) -> Contents:
    """The checkpoint in a step's folder: its only model, or the one that `model` names.

    Raises NotACheckpoint, naming them, where there are several and none is asked for, or where the
    one that is asked for is not there.
    """
    step = _step_of(path)
    assert step is not None, "it is recognised by that"
    models = step.models(path)
    name = _chosen(path, models, options.model)
    inner = replace(options, model=None) if name == options.model else options
    contents = _open_model(path, step, models[name], inner, open_contents)
    if name == options.model:
        source = {"format": contents.format, "name": path.name, **contents.source, "model": name}
        contents = replace(contents, source=source)
    used = {folder.name for folder in models[name]}
    of_models = {folder.name for folder in itertools.chain(*models.values())}
    others = sorted(of_models - used)
    notes = [f"a step of {step.writer}", *contents.notes]
    if others:
        notes.append(f"not read: {listed(others, _NAMES_SHOWN)}: other models of the step")
    kept = _beside(path, of_models, step.beside, options)
    writer = contents.about.writer or step.writer
    contents = replace(contents, about=replace(contents.about, writer=writer))
    items = [Item(other, "folder", "skipped", "another model of the step") for other in others]
    return _with(replace(contents, notes=notes), kept, items)


def _open_model(
    path: FilePath,
    step: Step,
    folders: Sequence[FilePath],
    options: Options,
    open_contents: Open,
) -> Contents:
    """One model of a step: the ranks' files of its only folder, or its saves as one checkpoint."""
    if step.models is _roles:
        return open_contents(folders[0], options)
    if step.models is _accelerate:
        folders = _require_both(folders, options)
    return open_saves(path, folders, options)


def _chosen(path: FilePath, models: Mapping[str, object], model: str | None) -> str:
    names = ", ".join(models)
    if model is not None and model in models:
        return model
    if len(models) == 1:
        (only,) = models
        return only
    if model is None:
        raise NotACheckpoint(
            f"{path} holds the models {names}: say which is meant, model={next(iter(models))!r}"
            f" (--model), or open its folder, {path / next(iter(models))}"
        )
    raise FormatError(f"{path}: model={model!r}: there is no such model; the models are: {names}")


def _beside(path: FilePath, used: set[str], folders: Sequence[str], options: Options) -> Contents:
    """What other files of a step's folder hold, as extras."""
    imported, facts = Import("", path, Combined.of_files({})), Facts(path)
    for child in sorted(path.children()):
        if child.name in used:
            continue
        if child.is_dir():
            inside = sorted(child.children()) if child.name in folders else []
            for file in inside:
                _keep(imported, f"{child.name}/{file.name}", file, facts, options)
            if not inside:
                imported.skip(child.name, "folder", "lies beside the weights; not read")
        else:
            _keep(imported, child.name, child, facts, options)
    return imported.contents()


def _keep(imported: Import, name: str, file: FilePath, facts: Facts, options: Options) -> None:
    if options.weights_only:
        imported.skip(name, "file", "only weights were asked for")
    elif not file.is_file() or file.size() > MAX_BESIDE_BYTES:
        imported.skip(name, "file", "lies beside the weights; not read")
    else:
        keep_beside(imported, name, file, facts)


def _with(contents: Contents, kept: Contents, items: Sequence[Item]) -> Contents:
    return replace(
        contents,
        inventory=[*contents.inventory, *kept.inventory, *items],
        extras={**contents.extras, **kept.extras},
        notes=[*contents.notes, *kept.notes],
    )


# A run.


def is_run(path: FilePath) -> bool:
    return path.is_dir() and _run_of(path) is not None


def _run_of(path: FilePath) -> tuple[Run, dict[int, FilePath]] | None:
    """The framework of a run's folder, and its steps that are whole; of several the one whose
    tracker file is there.
    """
    found: list[tuple[Run, dict[int, FilePath]]] = []
    for run in RUNS:
        if steps := _steps(path, run):
            found.append((run, steps))
    tracked = [
        (run, steps) for run, steps in found if run.tracker and (path / run.tracker).is_file()
    ]
    return next(iter([*tracked, *found]), None)


def _steps(path: FilePath, run: Run) -> dict[int, FilePath]:
    """The folders of steps by number, in their order."""
    steps: dict[int, FilePath] = {}
    for child in _folders(path):
        match = run.name.fullmatch(child.name)
        if match and run.is_step(child):
            steps[int(match[1])] = child
    return dict(sorted(steps.items()))


def open_run(path: FilePath, options: Options, open_contents: Open) -> Contents:
    """The checkpoint of a step of a run: the one that `step` names, or the last.

    Raises NotACheckpoint where that is not there.
    """
    found = _run_of(path)
    assert found is not None, "it is recognised by that"
    run, steps = found
    _refuse_own_files(path, run, steps)
    number = _number(path, run, steps, options.step)
    contents = open_contents(steps[number], replace(options, step=None))
    others = [folder.name for step, folder in steps.items() if step != number]
    beside = f"; there are {listed(others, _NAMES_SHOWN)} too (step=)" if others else ""
    note = f"a run of {run.writer}, opened at {steps[number].name}{beside}"
    items = [
        Item(child.name, "folder" if child.is_dir() else "file", "skipped",
             "beside the step that is open")
        for child in sorted(path.children()) if child.name != steps[number].name
    ]  # fmt: skip
    return replace(
        contents,
        inventory=[*contents.inventory, *items],
        notes=[note, *contents.notes],
        about=replace(contents.about, step=number),
    )


def _refuse_own_files(path: FilePath, run: Run, steps: Mapping[int, FilePath]) -> None:
    """Raise FormatError where a run's folder is a checkpoint, too."""
    if has_rank_files(path) or metadata_files(path):
        first = next(iter(steps.values())).name
        files = listed(sorted(child.name for child in path.children() if child.is_file()), 3)
        raise FormatError(
            f"{path} holds files of a checkpoint itself ({files}), and the steps of a run of"
            f" {run.writer}, such as {first}: two checkpoints lie in it. Open the folder of a step"
        )


def _number(path: FilePath, run: Run, steps: Mapping[int, FilePath], asked: int | None) -> int:
    names = listed([folder.name for folder in steps.values()], _NAMES_SHOWN)
    if asked is not None:
        if asked not in steps:
            raise NotACheckpoint(f"{path} has no step {asked} that is whole; it has {names}")
        return asked
    tracker = path / run.tracker if run.tracker else None
    if tracker is None or not tracker.is_file():
        return max(steps)
    text = tracker.read_pointer().strip()
    if not text.isdecimal() or int(text) not in steps:
        raise NotACheckpoint(
            f"{tracker} names the step {text!r:.40}, which is not there, or not whole; there are"
            f" {names}: open one of them, or say step="
        )
    return int(text)
