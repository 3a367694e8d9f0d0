"""The path to open instead of a folder that is not a checkpoint, or why nothing in it opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from jax_ucp.codecs.torch_file import is_torch_file
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.files.placeholders import finished_name, stand_in
from jax_ucp.formats.orbax_steps import STEP_FILE, is_step, items_of_step, not_a_step
from jax_ucp.formats.torch_save.reader import refuse_distributed
from jax_ucp.formats.weight_files import refuse_part
from jax_ucp.formats.weight_names import holds_weights
from jax_ucp.text import listed

_OF_KERAS = "`ucp.Checkpoint.of({v.path: np.asarray(v) for v in model.weights})` is a checkpoint"
# By suffix, the name of a format that is not read, and the way in.
_FOREIGN = {
    ".keras": (
        "a model of Keras in an archive",
        f"load it, `model = keras.saving.load_model(path)`; {_OF_KERAS}",
    ),
    ".h5": (
        "Keras's HDF5",
        f"build the model and load it, `model.load_weights(path)`; {_OF_KERAS}",
    ),
    ".npz": ("numpy's npz", "`ucp.Checkpoint.of(dict(np.load(path)))` is a checkpoint"),
    ".nemo": ("NeMo's archive", "unpack it, `tar -xf`, and open the folder of weights in it"),
    ".onnx": ("ONNX", "export the model's weights as safetensors"),
}
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")


def point_inside(at: FilePath, recognised: Callable[[FilePath], bool]) -> None:
    """Raise NotACheckpoint, naming what to open inside, or as `recognised` raises."""
    children = _children(at)
    # folders that are marked as a step of Orbax, and have a step's name or an item
    marked = list(filter(is_step, children))
    steps = [path for path in marked if path.name[-1].isdecimal() or items_of_step(path)]
    if steps:
        names = ", ".join(path.name for path in steps)
        raise NotACheckpoint(f"{at} holds the steps {names}: open one, {steps[-1]}")
    if (at / STEP_FILE).is_dir():
        raise NotACheckpoint(
            f"{at / STEP_FILE} is a folder, but should be a file that Orbax writes into each step:"
            " a copy or an unpacking went wrong. Put the file in its place"
        )
    folders, of_folders = _apart(filter(FilePath.is_dir, children), recognised)
    files = filter(is_torch_file, filter(FilePath.is_file, children))
    wholes, of_files = _apart(files, _is_whole)
    others = [path for path in children if path.suffix in (".gguf", ".eqx") and path.is_file()]
    others = [path for path in others if not _LATER_PART.fullmatch(path.name)]
    # in huggingface_hub's cache of a model the revision of `main`, if it is there
    snapshots, main = at / "snapshots", at / "refs" / "main"
    revisions = list(filter(FilePath.is_dir, _children(snapshots))) if snapshots.is_dir() else []
    named = main.read_pointer().strip() if revisions and main.is_file() else ""
    revisions = [path for path in revisions if path.name == named] or revisions
    inside = [*revisions, *folders, *wholes, *others]
    if inside:
        names = listed([path.name for path in inside])
        raise NotACheckpoint(
            f"{at} is not a checkpoint itself, but holds {names}: open one, {inside[0]}"
        )
    for error in [*of_folders, *of_files]:
        raise error


def _apart(
    paths: Iterable[FilePath], check: Callable[[FilePath], bool]
) -> tuple[list[FilePath], list[FormatError]]:
    """The paths that a check is true of, and the errors that it raises of others."""
    passed: list[FilePath] = []
    refusals: list[FormatError] = []
    for path in paths:
        try:
            passed += [path] * check(path)
        except FormatError as error:
            refusals.append(error)
    return passed, refusals


def _is_whole(path: FilePath) -> bool:
    refuse_part(path)
    refuse_distributed(path)
    return True


def not_read(at: FilePath) -> str:
    """The reason why a folder cannot be read: a download under way, another format, or ""."""
    for path in _children(at):
        name = finished_name(path.name)
        if name is not None and holds_weights([name]):
            return f"{path.name} in it is a download that has not ended"
        if why := not_a_step(path):
            instead = stand_in(path) if path.is_file() else None
            return f"{path.name} in it {why}{f': {instead}' if instead else ''}"
        if other := of_another_format(path):
            return f"{path.name} in it {other}"
    return ""


def of_another_format(path: FilePath) -> str:
    """The format of a file that is not read, and the way in; empty of any other file."""
    if path.suffix not in _FOREIGN or not path.is_file():
        return ""
    name, way_in = _FOREIGN[path.suffix]
    return f"is {name}, which is not read here: {way_in}"


def _children(at: FilePath) -> list[FilePath]:
    visible = [path for path in at.children() if not path.name.startswith(".")]
    return sorted(visible, key=_natural)


def _natural(path: FilePath) -> tuple[str, int, str]:
    """Names that end in numbers are in the order of these."""
    stem = path.name.rstrip("0123456789")
    number = path.name[len(stem) :]
    return stem, int(number) if number else -1, path.name
