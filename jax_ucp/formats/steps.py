"""The folder of a run, which has a folder or a file for each step: which step is opened.

Each kind of run has a function that finds a `Run`, where its names are known; the choice of the
step, and what is said of it, is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_ucp.arrays.beside import items_beside
from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.options import Options
from jax_ucp.text import listed

Open = Callable[[FilePath, Options], Contents]


@dataclass(frozen=True, slots=True)
class Run:
    """A folder with the steps of a run.

    Attributes:
        writer: The framework, for people.
        folder: Where the steps lie.
        steps: The finished ones by number, the lowest first.
        tracker: The file beside them that names the last one, if the framework writes it.
        unfinished: The names of saves that were not finished.
        unread: The names of what lies beside the steps and may be of interest.
        check: Raises for a run whose step of this number cannot be the one that is meant.
        is_count: The numbers count saves, and not updates.
    """

    writer: str
    folder: FilePath
    steps: Mapping[int, FilePath]
    tracker: str = ""
    unfinished: Sequence[str] = ()
    unread: Sequence[str] = ()
    check: Callable[[Run, int], None] = lambda run, number: None
    is_count: bool = False

    @property
    def names(self) -> str:
        return listed([step.name for step in self.steps.values()])


def open_run(run: Run, options: Options, open_contents: Open) -> Contents:
    """The checkpoint of step `step`, of the tracker, or the last. Raises NotACheckpoint."""
    unfinished = f"; not finished: {listed(run.unfinished)}" if run.unfinished else ""
    number = options.step
    if number is None:
        number = max(run.steps, default=-1)
        tracker = run.folder / run.tracker if run.tracker else None
        if tracker and tracker.is_file():
            text = tracker.read_pointer().strip()
            if not text.isdecimal() or int(text) not in run.steps:
                raise NotACheckpoint(
                    f"{tracker} names the step {text!r:.40}, which is not there, or not whole;"
                    f" there are {run.names}: open one of them, or say step="
                )
            number = int(text)
    if number not in run.steps:
        asked = "" if options.step is None else f" {options.step}"
        existing = f"; it has {run.names}" if run.steps else ""
        raise NotACheckpoint(f"{run.folder} has no finished step{asked}{existing}{unfinished}")
    run.check(run, number)
    step = run.steps[number]
    contents = open_contents(step, replace(options, step=None))
    others = [path.name for path in run.steps.values() if path != step]
    note = f"a run of {run.writer}, opened at {step.name}{unfinished}"
    if others:
        note += f"; there are {listed(others)} too (step=)"
    if run.unread:
        note += f"; not read: {listed(run.unread)}"
    about = contents.about
    if about.step is None and not run.is_count:
        about = replace(about, step=number)
    return replace(
        contents,
        inventory=[*contents.inventory, *items_beside(run.folder, {step.name})],
        notes=[note, *contents.notes],
        about=about,
    )


def chosen_model(
    path: FilePath, models: Iterable[str], model: str | None, kind: str = "models"
) -> str:
    """The only model, or item, of a step, or the one that the user names. Raises NotACheckpoint."""
    names = list(models)
    if model in names:
        return model
    if model is None and len(names) == 1:
        return names[0]
    absent = "" if model is None else f", and no {model!r:.80}"
    raise NotACheckpoint(
        f"{path} is a step with the {kind} {', '.join(names)}{absent}: open one of them,"
        f" {path / names[0]}, or name it, model={names[0]!r} (--model {names[0]})"
    )
