"""The folder of a run of transformers' Trainer, or of accelerate, with its steps.

transformers calls them `checkpoint-N`, where N is `global_step` in `trainer_state.json`, which is
written last; accelerate calls them `checkpoint_N`, where N counts.
"""

from __future__ import annotations

import re

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.huggingface.training_folder import TRAINER_STATE
from jax_ucp.formats.steps import Run
from jax_ucp.formats.weight_files import read_json

_STEP = re.compile(r"checkpoint([-_])(0|[1-9]\d{0,17})")


def find_run(path: FilePath) -> Run | None:
    """The run of the Trainer, or else of accelerate, in a folder; None if there is neither."""
    trainer: dict[int, FilePath] = {}
    accelerate: dict[int, FilePath] = {}
    unread: list[str] = []
    for child in path.children() if path.is_dir() else ():
        match = _STEP.fullmatch(child.name)
        if match and child.is_dir():
            (trainer if match[1] == "-" else accelerate)[int(match[2])] = child
        else:
            unread.append(child.name)
    steps = dict(sorted((trainer or accelerate).items()))
    if trainer:
        unread = sorted([*unread, *(folder.name for folder in accelerate.values())])
        return Run("transformers' Trainer", path, steps, unread=unread, check=_check_step)
    if accelerate:
        return Run("accelerate", path, steps, unread=unread, is_count=True)
    return None


def _check_step(run: Run, number: int) -> None:
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
    found = content.get("global_step") if isinstance(content, dict) else None
    if found != number:
        raise FormatError(
            f"{state} says that it is of step {found!r:.80}, and not {number} as its folder does:"
            f" nothing says which step of the run it is. Open {folder} itself{other}"
        )
