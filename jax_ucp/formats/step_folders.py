"""Folders that frameworks of torch make around checkpoints: of a step, and of a run with its steps.

A step's folder has a save for each model, or saves that are one checkpoint only together, such as
that of the weights and that of the optimizer. Files beside them are kept as extras. Which folders
and files these are is each framework's own: `STEPS` and `_RUNS`.

Facts: `verl/trainer/ppo/ray_trainer.py` of verl 0.7, `skyrl/train/trainer.py` of SkyRL,
`torchtitan/components/checkpointer/dcp.py`, `olmo_core/train/checkpoint.py`,
`nemo_automodel/recipes/base_recipe.py`, `accelerate/checkpointing.py` and `utils/fsdp_utils.py` of
accelerate 1.15. transformers calls its steps `checkpoint-N`, where N is `global_step` in
`trainer_state.json`, which is written last; accelerate calls them `checkpoint_N`, where N counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.dcp.marks import metadata_files
from jax_ucp.formats.dtensor_ranks.files import has_rank_files
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.huggingface.beside import TRAINER_STATE
from jax_ucp.formats.state_dicts import keep_beside
from jax_ucp.formats.steps import Open, Run, chosen_model
from jax_ucp.formats.weight_files import read_json
from jax_ucp.options import Options
from jax_ucp.text import listed

_ACCELERATE_MODEL = "pytorch_model_fsdp_"
MAX_ROLES = 16  # a folder with more folders is none of a step, and they are not listed one by one
MAX_BESIDE_BYTES = 1 << 26  # of more a file is data, such as weights
_TRAINER_STEP = re.compile(r"checkpoint([-_])(0|[1-9]\d{0,17})")


@dataclass(frozen=True, slots=True)
class Step:
    """A framework's folder of a step; `models` in it are the folders that are one checkpoint.

    Files of `beside` folders are kept, as the step's are. With `open_one`, a model is one folder,
    of any format; with `may_lack`, a save of the optimizer may be missing.
    """

    writer: str
    models: Callable[[FilePath], Mapping[str, Sequence[FilePath]]]
    beside: Sequence[str] = ()
    open_one: bool = False
    may_lack: bool = False


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


def _present(folders: Sequence[FilePath], options: Options) -> Sequence[FilePath]:
    """The folders that are to be read. Raises FormatError where one is missing."""
    weights, *others = folders
    if options.weights_only and weights.is_dir():
        return [weights]
    for folder, other in zip(folders, reversed(folders), strict=True):
        if not folder.is_dir():
            way_out = "" if folder == weights else "weights_only"
            raise FormatError(
                f"{folder} is missing, which belongs to {other.name}", way_out=way_out
            )
    return [weights, *others]


def _together(*names: str) -> Callable[[FilePath], dict[str, list[FilePath]]]:
    """Saves that are one checkpoint, of which the first and the last must be there."""

    def models(path: FilePath) -> dict[str, list[FilePath]]:
        folders = [path / name for name in names]
        is_whole = all(folder.is_dir() and metadata_files(folder) for folder in folders)
        return {"model": folders} if is_whole else {}

    return models


_olmo, _automodel = _together("model_and_optim"), _together("model", "optim")
STEPS = (
    Step("verl or SkyRL", _roles, open_one=True),
    Step("accelerate (FSDP, sharded)", _accelerate, may_lack=True),
    Step("OLMo-core", _olmo, beside=("train",)),
    Step("Automodel", _automodel, beside=("rng", "dataloader")),
)
# Frameworks with the names of their steps, which have the number; whether a folder is a step, and
# the file that names the last one.
_RUNS = (
    ("verl", r"global_step_(\d+)", _roles, "latest_checkpointed_iteration.txt"),
    ("SkyRL", r"global_step_(\d+)", _roles, "latest_ckpt_global_step.txt"),
    ("torchtitan", r"step-(\d+)", metadata_files, ""),
    ("OLMo-core", r"step(\d+)", _olmo, ""),
    ("Automodel", r"epoch_\d+_step_(\d+)", _automodel, ""),
)


def _folders(path: FilePath) -> list[FilePath]:
    return [child for child in sorted(path.children()) if child.is_dir() and not child.link()]


# A step.


def is_step(path: FilePath) -> bool:
    return path.is_dir() and _step_of(path) is not None


def _step_of(path: FilePath) -> Step | None:
    return next((step for step in STEPS if step.models(path)), None)


def open_step(path: FilePath, options: Options, open_contents: Open) -> Contents:
    """The checkpoint in a step's folder: its only model, or `model`. Raises NotACheckpoint."""
    step = _step_of(path)
    assert step is not None, "it is recognised by that"
    models = step.models(path)
    # of the only one, the user may name a model that lies inside it
    asked = options.model if len(models) > 1 or options.model in models else None
    name = chosen_model(path, models, asked)
    inner = replace(options, model=None) if name == options.model else options
    if step.open_one:
        contents = open_contents(models[name][0], inner)
    else:
        folders = _present(models[name], inner) if step.may_lack else models[name]
        from jax_ucp.formats.dcp.reader import open_saves

        contents = open_saves(path, folders, inner)
    if name == options.model:
        source = {"format": contents.format, "name": path.name, **contents.source, "model": name}
        contents = replace(contents, source=source)
    used = {folder.name for folder in models[name]}
    of_models = {folder.name for folder in itertools.chain(*models.values())}
    others = sorted(of_models - used)
    notes = [f"a step of {step.writer}", *contents.notes]
    if others:
        notes.append(f"not read: {listed(others)}: other models of the step")
    kept = _beside(path, of_models, step.beside, options)
    writer = contents.about.writer or step.writer
    contents = replace(contents, about=replace(contents.about, writer=writer))
    items = [Item(other, "folder", "skipped", "another model of the step") for other in others]
    return replace(
        contents,
        inventory=[*contents.inventory, *kept.inventory, *items],
        extras={**contents.extras, **kept.extras},
        notes=[*notes, *kept.notes],
    )


def _beside(path: FilePath, used: set[str], folders: Sequence[str], options: Options) -> Contents:
    """The contents of what lies in a step's folder beside its models, as extras.

    `used` names the folders of models, which are left out. Of other folders those in `folders` are
    kept; the rest is listed as skipped. Raises FormatError for a damaged file.
    """
    builder, facts = ContentsBuilder("", path, Combined.of_files({})), Facts(path)
    for child in sorted(path.children()):
        if child.name in used:
            continue
        if child.is_dir():
            inside = sorted(child.children()) if child.name in folders else []
            for file in inside:
                _keep(builder, f"{child.name}/{file.name}", file, facts, options)
            if not inside:
                builder.skip(child.name, "folder", "lies beside the weights; not read")
        else:
            _keep(builder, child.name, child, facts, options)
    return builder.contents()


def _keep(
    builder: ContentsBuilder, name: str, file: FilePath, facts: Facts, options: Options
) -> None:
    if options.weights_only:
        builder.skip(name, "file", "only weights were asked for")
    elif not file.is_file() or file.size() > MAX_BESIDE_BYTES:
        builder.skip(name, "file", "lies beside the weights; not read")
    else:
        keep_beside(builder, name, file, facts)


# A run.


def find_run(path: FilePath) -> Run | None:
    """The run whose steps lie in a folder; of several frameworks the one whose tracker is there."""
    if not path.is_dir():
        return None
    folders = _folders(path)
    runs: list[Run] = []
    for writer, name, is_step_of, tracker in _RUNS:
        steps: dict[int, FilePath] = {}
        for child in folders:
            match = re.fullmatch(name, child.name)
            if match and is_step_of(child):
                steps[int(match[1])] = child
        if steps:
            run = Run(writer, path, dict(sorted(steps.items())), tracker, (), (), _refuse_own_files)
            runs.append(run)
    tracked = [run for run in runs if run.tracker and (path / run.tracker).is_file()]
    return next(iter([*tracked, *runs]), None)


def _refuse_own_files(run: Run, number: int) -> None:
    path = run.folder
    if has_rank_files(path) or metadata_files(path):
        first = next(iter(run.steps.values())).name
        files = listed(sorted(child.name for child in path.children() if child.is_file()), 3)
        raise FormatError(
            f"{path} holds files of a checkpoint itself ({files}), and the steps of a run of"
            f" {run.writer}, such as {first}: two checkpoints lie in it. Open the folder of a step"
        )


# A run of transformers' Trainer, or of accelerate.


def find_trainer_run(path: FilePath) -> Run | None:
    """The run of the Trainer, or else of accelerate, in a folder; None if there is neither."""
    trainer: dict[int, FilePath] = {}
    accelerate: dict[int, FilePath] = {}
    unread: list[str] = []
    for child in path.children() if path.is_dir() else ():
        match = _TRAINER_STEP.fullmatch(child.name)
        if match and child.is_dir():
            (trainer if match[1] == "-" else accelerate)[int(match[2])] = child
        else:
            unread.append(child.name)
    steps = dict(sorted((trainer or accelerate).items()))
    if trainer:
        unread = sorted([*unread, *(folder.name for folder in accelerate.values())])
        return Run("transformers' Trainer", path, steps, unread=unread, check=_check_trainer_step)
    if accelerate:
        return Run("accelerate", path, steps, unread=unread, is_count=True)
    return None


def _check_trainer_step(run: Run, number: int) -> None:
    """Raise FormatError for an unfinished checkpoint of the Trainer, or one of another step."""
    folder = run.steps[number]
    others = [other for other in run.steps if other != number]
    other = f"; step={others[-1]} opens the one before" if others else ""
    state = folder / TRAINER_STATE
    if not state.is_file():
        raise FormatError(
            f"{folder} has no {TRAINER_STATE}, which the Trainer writes last: the save has not"
            f" ended, or it was of another trainer. Open {folder} itself for what is there{other}"
        )
    content = read_json(state)
    step = content.get("global_step") if isinstance(content, dict) else None
    if step != number:
        raise FormatError(
            f"{state} says that it is of step {step!r:.80}, and not {number} as its folder does:"
            f" nothing says which step of the run it is. Open {folder} itself{other}"
        )
