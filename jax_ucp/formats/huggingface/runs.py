"""The folder of a run of transformers' Trainer, or of accelerate: a checkpoint for each of some
steps.

transformers calls them `checkpoint-N`, where N is `global_step` in `trainer_state.json`, which is
written last; accelerate calls them `checkpoint_N`, where N counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.huggingface.training_folder import TRAINER_STATE
from jax_ucp.formats.huggingface.weight_files import read_json
from jax_ucp.formats.listing import listed
from jax_ucp.formats.options import Options
from jax_ucp.sources.contents import Contents

_STEP = re.compile(r"checkpoint([-_])(0|[1-9]\d{0,17})")
_SHOWN = 8


def recognise(path: FilePath) -> bool:
    return path.is_dir() and bool(_steps(path))


def open_run(path: FilePath, options: Options, open_: Callable[..., Contents]) -> Contents:
    """The checkpoint of the last step, or of the one that is asked for; `open_` opens it.

    Raises NotACheckpoint where there is no such step, FormatError where the last one was not
    finished, or says itself that it is another one.
    """
    steps = _steps(path)
    step = max(steps) if options.step is None else options.step
    names = listed([str(n) for n in sorted(steps)], _SHOWN)
    if step not in steps:
        raise NotACheckpoint(f"{path} has no step {step}; its steps are {names}")
    folder = steps[step]
    _check_step(folder, step, [n for n in sorted(steps) if n != step])
    contents = open_(folder, replace(options, step=None))
    which = "the last step" if options.step is None else "the step that was asked for"
    note = f"{folder.name} is read, {which} of {path.name}, which has {names} (step= chooses)"
    return replace(contents, notes=[*contents.notes, note + _others(path)])


def _others(path: FilePath) -> str:
    """What a note adds of what else is in the folder of a run."""
    names = [child.name for child in path.children()]
    others = [name for name in sorted(names) if not _STEP.fullmatch(name)]
    return f"; not read: {listed(others, _SHOWN)}" if others else ""


def _steps(path: FilePath) -> Mapping[int, FilePath]:
    """The checkpoints of a run by number: those with a hyphen, if there are any."""
    named: dict[str, dict[int, FilePath]] = {"-": {}, "_": {}}
    for child in path.children():
        match = _STEP.fullmatch(child.name)
        if match and child.is_dir():
            named[match[1]][int(match[2])] = child
    return named["-"] or named["_"]


def _check_step(folder: FilePath, step: int, others: list[int]) -> None:
    """Raise FormatError where a checkpoint of the Trainer is not finished, or is of another step.

    One of accelerate has nothing that says so.
    """
    if "-" not in folder.name:
        return
    state = folder / TRAINER_STATE
    other = f"; step={others[-1]} opens the one before" if others else ""
    if not state.is_file():
        raise FormatError(
            f"{folder} has no {TRAINER_STATE}, which the Trainer writes last: the save has not"
            f" ended, or it was of another trainer. Open {folder} itself for what is there{other}"
        )
    said = read_json(state)
    found = said.get("global_step") if isinstance(said, dict) else None
    if found != step:
        raise FormatError(
            f"{state} says that it is of step {found!r:.80}, and not {step} as its folder does:"
            f" nothing says which step of the run it is. Open {folder} itself{other}"
        )
