"""What no reader can see: changes after which the files are those that an honest run could have
written.

An entry looks at the files before and after, without the reader that is tried, and says whether the
change is of its kind. A wrong result counts as invisible only if an entry proves it so; the proof
fails where anything that the files store contradicts anything else that they store: a second copy,
a rounded copy, a checksum, a name, a counter.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from folders import Stored, archives, resummed, stored_tensors
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.codecs.unpickle import walk
from temptation_subjects import Subject

Files = Mapping[str, bytes]
_UNREADABLE = (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile)

# Files that say nothing of the arrays: without them, or with those of another save, a checkpoint is
# what it is.
_BESIDE = re.compile(
    r"latest\w*|latest_checkpointed_iteration\.txt|commit_success\.txt|_CHECKPOINT_METADATA|_sharding"
)


@dataclass(frozen=True)
class Case:
    """A change of files, or what was said, and what came of it.

    Tensors whose label matches `aside` were not asked for, and `extras` are those of the valid
    checkpoint.
    """

    subject: Subject
    before: Files
    after: Files
    found: Mapping[str, Any]
    want: Mapping[str, Any]
    aside: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> list[str]:
        return [name for name in self.before if self.before[name] != self.after.get(name)]

    @property
    def different(self) -> list[str]:
        """The leaves that both results have, with other values."""
        return [n for n in self.want if n in self.found and not _same(self.found[n], self.want[n])]


def _same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


@dataclass(frozen=True)
class Undecidable:
    reason: str
    proves: Callable[[Case], bool]


# All of it is of another.


def another_whole(case: Case) -> bool:
    """Every file that says anything of the arrays is that of one sibling."""
    for which in case.subject.siblings:
        other = case.subject.as_saved(which)
        if case.after == other:
            return True
        mine, theirs = (
            {n: d for n, d in f.items() if not _BESIDE.fullmatch(PurePosixPath(n).name)}
            for f in (case.after, other)
        )
        if mine and {n: d for n, d in theirs.items() if n in case.before} == mine:
            return True
    return False


# Only values differ.


def values_stored_once(case: Case) -> bool:
    """Only elements of tensors, and numbers in pickles, differ, and nothing that is stored
    contradicts them.
    """
    # what does not parse any more is a change of more than values
    with contextlib.suppress(*_UNREADABLE):
        return _values_stored_once(case)
    return False


def _values_stored_once(case: Case) -> bool:
    if set(case.before) != set(case.after) or not case.changed:
        return False
    tensors = stored_tensors(case.before)
    if {_place(t) for t in tensors} != {_place(t) for t in stored_tensors(case.after)}:
        return False
    if not all(_same_but_for_values(case, name, tensors) for name in case.changed):
        return False
    if _numbers_contradict(case):
        return False
    tensors = [t for t in tensors if not case.aside or not re.match(case.aside, t.label)]
    touched = [t for t in tensors if _bytes(t, case.before) != _bytes(t, case.after)]
    return not any(_contradicted(t, tensors, case) for t in touched)


def _place(t: Stored) -> tuple[Any, ...]:
    return t.file, t.label, t.dtype, t.start, t.stop


def _bytes(t: Stored, files: Files) -> bytes:
    return files[t.file][t.start : t.stop]


def _same_but_for_values(case: Case, name: str, tensors: list[Stored]) -> bool:
    """Whether a file says the same of its tensors, has right CRCs, and differs in nothing that
    is neither.
    """
    inner = [a for a in archives(case.before) if a.file == name]
    if len(inner) != len([a for a in archives(case.after) if a.file == name]):
        return False
    texts = []
    for files in (case.before, case.after):
        data = bytearray(files[name])
        for a in inner:
            if resummed(bytes(data[a.start : a.stop])) != data[a.start : a.stop]:
                return False
        for t in tensors:
            if t.file == name:
                data[t.start : t.stop] = bytes(t.stop - t.start)
        said = [_said(name, bytes(files[name][a.start : a.stop])) for a in inner]
        rest = bytes(data) if not inner else b"".join(_between(bytes(data), inner))
        texts.append((len(data), said, rest))
    return texts[0] == texts[1]


def _between(data: bytes, inner: list[Any]) -> Iterator[bytes]:
    at = 0
    for a in sorted(inner, key=lambda a: a.start):
        yield data[at : a.start]
        at = a.stop
    yield data[at:]


def _said(name: str, data: bytes) -> tuple[str, list[Any]]:
    """What a file of torch.save says, but for its numbers: its root in the zip, and its tree."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        root = file.namelist()[0].partition("/")[0]
    tree = []
    for labels, node in walk(TorchFile(name, data=data).tree):
        if isinstance(node, StoredTensor):
            tree.append(
                (labels, node.shape, str(node.dtype), node.storage, node.offset, node.strides)
            )
        elif isinstance(node, str | bool | bytes | type(None)):
            tree.append((labels, node))
        else:
            tree.append((labels, type(node).__name__))
    return root, tree


_COUNTERS = re.compile(r"global_steps?|steps|iteration|last_batch_iteration|last_epoch|_step_count")


def _numbers(name: str, files: Files) -> dict[tuple[str, ...], float]:
    """The numbers that a file says, each by its path in the file."""
    found: dict[tuple[str, ...], float] = {}
    for a in archives(files):
        if a.file == name:
            for labels, node in walk(TorchFile(name, data=files[name][a.start : a.stop]).tree):
                path = (*a.name.split("."), *labels)
                if type(node) in (int, float) and re.match("[A-Za-z]", path[-1]):
                    found[path] = float(node)
    for t in stored_tensors({name: files[name]} if files[name][:4] == b"PK\3\4" else files):
        path = tuple(re.split("[/.]", t.label))
        if t.file == name and _called(path) in ("counter", "step") and len(t.read(files)) == 1:
            found[path] = float(t.read(files)[0])
    return found


def _called(path: tuple[str, ...], name: str = "") -> str:
    """What two files mean alike. A trainer's counters are one thing: all of them are of one
    training.

    The optimizer's own step is another: it counts anew where a run is taken up without its states.
    So is what a group of parameters was told, of which every group has its own, and the count of
    each of accelerate's schedulers.
    """
    if re.fullmatch(r"scheduler\w*\.bin", PurePosixPath(name).name):
        return f"{name}: {path[-1]}"
    if "param_groups" in path:
        return ".".join(path[path.index("param_groups") :])
    return "counter" if _COUNTERS.fullmatch(path[-1]) else path[-1]


def _numbers_contradict(case: Case) -> bool:
    """Whether a number that is other now is told, as it was, by a file that did not change, or by a
    folder's name.

    Megatron names the folder of an iteration; what DeepSpeed's is called is for the user's program
    to say.
    """
    kept: set[tuple[str, float]] = set()
    lost: set[tuple[str, float]] = set()
    for name in case.after:
        if _is_archive(name, case.after):
            now = _numbers(name, case.after)
            if name in case.changed:
                before = _numbers(name, case.before)
                lost |= {(_called(p, name), n) for p, n in before.items() if now.get(p) != n}
                kept |= {("counter", float(n)) for n in re.findall(r"iter_(\d+)/", name)}
            else:
                kept |= {(_called(path, name), n) for path, n in now.items()}
    return bool(lost & kept)


def _is_archive(name: str, files: Files) -> bool:
    return files[name][:4] == b"PK\3\4" or name.endswith(".distcp")


WINDOW = 6
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def _contradicted(t: Stored, tensors: list[Stored], case: Case) -> bool:
    """Whether elements of a tensor are stored a second time, as they are or rounded, and differ
    there now.
    """
    values, now = t.read(case.before), t.read(case.after)
    starts = (
        np.linspace(0, max(0, len(values) - WINDOW), 12, dtype=int) if len(values) >= WINDOW else []
    )
    for start in dict.fromkeys(starts):
        window, after = values[start : start + WINDOW], now[start : start + WINDOW]
        if window.tobytes() == after.tobytes():
            continue
        for other in tensors:
            for at in _copies(window, other, case.before):
                there = other.read(case.after)[at : at + WINDOW]
                lower = min(window.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
                if after.astype(lower).tobytes() != there.astype(lower).tobytes():
                    return True
    return False


def _copies(window: np.ndarray, other: Stored, files: Files) -> Iterator[int]:
    """Where another tensor has these elements, or what they are when rounded, or what rounds to
    them.
    """
    if window.dtype not in (np.dtype(np.float32), *_HALVES):
        return  # random states are alike on all ranks by chance
    values = other.read(files)
    if window.dtype == np.float32 and other.dtype in (np.dtype(np.float32), *_HALVES):
        wanted = window.astype(other.dtype)
    elif window.dtype in _HALVES and other.dtype == np.float32:
        wanted, values = window, values.astype(window.dtype)
    elif window.dtype == other.dtype:
        wanted = window
    else:
        return
    if len(np.unique(wanted.astype(np.float64))) < WINDOW - 1:
        return  # zeros and ones are everywhere
    data, form, size = values.tobytes(), wanted.tobytes(), values.dtype.itemsize
    at = data.find(form)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = data.find(form, at + 1)


# Files without checksums.


def no_checksum(case: Case) -> bool:
    """Values of leaves differ that come from one file, or several swap files, of a kind that has no
    checksum, and from nowhere else.
    """
    swapped = all(name.endswith(".tensor.swp") for name in case.changed)
    if (len(case.changed) != 1 and not swapped) or set(case.before) != set(case.after):
        return False
    if not case.different or set(case.found) != set(case.want):
        return False
    if any(_summed(name, case.before) for name in case.changed):
        return False
    if any(np.shape(case.found[n]) != np.shape(case.want[n]) for n in case.different):
        return False
    rest = b"".join(data for name, data in case.before.items() if name not in case.changed)
    return not any(
        _window_in(np.asarray(case.want[n]), np.asarray(case.found[n]), rest)
        for n in case.different
    )


def _window_in(values: np.ndarray, found: np.ndarray, data: bytes) -> bool:
    """Whether the data have the values that lie around some of those that are found to differ."""
    flat = values.reshape(-1)
    differing = np.flatnonzero(_bytes_of(flat) != _bytes_of(found.reshape(-1))) // flat.itemsize
    for at in differing[:: max(1, len(differing) // 12)]:
        start = max(0, min(at - WINDOW // 2, len(flat) - WINDOW))
        window = flat[start : start + WINDOW]
        if len(np.unique(window.astype(np.float64))) >= WINDOW - 1 and window.tobytes() in data:
            return True
    return False


def _bytes_of(flat: np.ndarray) -> np.ndarray:
    return np.frombuffer(flat.tobytes(), np.uint8)


def _summed(name: str, files: Files) -> bool:
    """Whether what is in a file has a checksum in it, or in a table of the checkpoint."""
    path = PurePosixPath(name)
    return (
        files[name][:4] == b"PK\3\4"
        or name.endswith(".distcp")
        or path.name == "ucp.json"
        or any(PurePosixPath(other).name == "ucp.json" for other in files)
    )


def stock_chunks(case: Case) -> bool:
    """Chunks of stock Orbax are other chunks, and what it stores of its arrays beside them still
    holds.
    """
    if not case.subject.format.startswith("orbax") or set(case.before) != set(case.after):
        return False
    changed = [n for n in case.changed if not _BESIDE.fullmatch(PurePosixPath(n).name)]
    tables = [n for n in changed if PurePosixPath(n).name in (".zarray", "zarr.json")]
    if not changed or not all(_is_chunk(name) for name in changed if name not in tables):
        return False
    return all(_shape_in(case.before[n]) == _shape_in(case.after[n]) for n in tables)


def _shape_in(table: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(table)["shape"]
    return None


def _is_chunk(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parent.name == "d" or path.name[0].isdigit() or path.name == "c" or "/c/" in name


def a_name(case: Case) -> bool:
    """One tensor has another name, in a file without a checksum, and no other file has the name
    that it had.
    """
    gone = [name for name in case.want if name not in case.found]
    new = [name for name in case.found if name not in case.want]
    if (
        len(case.changed) != 1
        or not gone
        or len(gone) != len(new)
        or len(gone) > 4
        or case.different
    ):
        return False
    (name,) = case.changed
    if _summed(name, case.before) and not name.endswith(".metadata"):
        return False
    if sorted(np.asarray(case.want[n]).tobytes() for n in gone) != sorted(
        np.asarray(case.found[n]).tobytes() for n in new
    ):
        return False
    keys = [re.findall(r"\['?([^'\]]*)'?\]", label)[-1].encode() for label in gone]
    return not any(key in data for key in keys for n, data in case.before.items() if n != name)


def a_setting(case: Case) -> bool:
    """Every array is right; what differs is in a text, or a header, that has no checksum and is
    stored once.
    """
    if case.different or set(case.found) != set(case.want) or not case.changed:
        return False
    texts = (".json", ".safetensors", ".gguf", ".txt", "")
    return all(
        PurePosixPath(n).suffix in texts and not _summed(n, case.before) for n in case.changed
    )


def settings_of_another(case: Case) -> bool:
    """Every array is right; what differs are settings in whole files of another, which no other
    file tells.
    """
    if (
        case.different
        or set(case.found) != set(case.want)
        or not case.changed
        or set(case.before) != set(case.after)
    ):
        return False
    with contextlib.suppress(*_UNREADABLE):
        tensors = stored_tensors(case.before)
        there = {_place(t) for t in stored_tensors(case.after)}
        touched = [t for t in tensors if t.file in case.changed and not _unchanged(t, case, there)]
        others = [t for t in tensors if t.file not in case.changed]
        copied = any(_stored_among(t, others, case) for t in touched)
        return (
            not copied
            and all(_whole_file(case, name) for name in case.changed)
            and not _numbers_contradict(case)
        )
    return False


def an_optimizer_of_another(case: Case) -> bool:
    """Beside weights as a trainer saved them is a whole optimizer that fits, of another save."""
    of_optimizer = all(PurePosixPath(name).name.startswith("optimizer") for name in case.changed)
    changed = [n for n in {**case.want, **case.found} if n in case.different or n not in case.found]
    if case.subject.format != "trainers" or not of_optimizer or set(case.before) != set(case.after):
        return False
    with contextlib.suppress(*_UNREADABLE):
        whole = all(_whole_file(case, name) for name in case.changed)
        return whole and not any(n.startswith("['param']") for n in changed)
    return False


def _unchanged(t: Stored, case: Case, there: set[tuple[Any, ...]]) -> bool:
    return _place(t) in there and _bytes(t, case.before) == _bytes(t, case.after)


def _stored_among(t: Stored, others: list[Stored], case: Case) -> bool:
    """Whether other tensors have elements of this one."""
    windows = [values for values in np.array_split(t.read(case.before), 8) if len(values) >= WINDOW]
    return any(True for w in windows for o in others for _ in _copies(w[:WINDOW], o, case.before))


def _whole_file(case: Case, name: str) -> bool:
    """Whether it is a file of torch.save with right CRCs, written under the name that it has."""
    before, after = case.before[name], case.after[name]
    return resummed(after) == after and _said(name, before)[0] == _said(name, after)[0]


def padded_alike(case: Case) -> bool:
    """The vocabulary that was said has as many padded rows as the true one, which no file tells."""
    wrong, right = (
        options.get("sizes", {}).get("vocab") for options in (case.said, case.subject.options)
    )
    multiples = list(_values_of("make_vocab_size_divisible_by", case.extras))
    degrees = list(_values_of("tensor_model_parallel_size", case.extras))
    if type(wrong) is not int or type(right) is not int or not multiples or not degrees:
        return False
    multiple = multiples[0] * degrees[0]
    return -(-wrong // multiple) == -(-right // multiple) and all(
        _rows_alike(case, n) for n in case.different
    )


def _rows_alike(case: Case, name: str) -> bool:
    found, want = np.asarray(case.found[name]), np.asarray(case.want[name])
    rows = min(len(found), len(want))
    return found.shape[1:] == want.shape[1:] and _same(found[:rows], want[:rows])


def _values_of(key: str, tree: Any) -> Iterator[int]:
    if isinstance(tree, Mapping):
        if isinstance(tree.get(key), int):
            yield tree[key]
        for value in tree.values():
            yield from _values_of(key, value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values_of(key, value)


def parts_of_others(case: Case) -> bool:
    """In a folder of DTensors each file is whole, of this save or a sibling, and names and shapes
    are as they were.
    """
    if case.subject.format != "dtensors" or set(case.found) != set(case.want):
        return False
    if any(np.shape(case.found[name]) != np.shape(case.want[name]) for name in case.want):
        return False
    saves = [case.before, *map(case.subject.as_saved, case.subject.siblings)]
    whole = {data for files in saves for data in files.values()}
    return whole.issuperset(case.after.values())


INVISIBLE: dict[str, Undecidable] = {
    "another whole checkpoint": Undecidable(
        "Every file that says anything of the arrays is of one other step or run: a valid"
        " checkpoint, only not the one that was meant. With weights_only that is so where the"
        " model's files are.",
        another_whole,
    ),
    "values stored once": Undecidable(
        "Only values of tensors, and numbers that no other file tells, differ; none is stored a"
        " second time, and each file's checksums are its own: a run that had these values would"
        " have written these files.",
        values_stored_once,
    ),
    "a format without checksums": Undecidable(
        "Bytes of a safetensors file, of GGUF, of torch.save's format before 1.6, or of swap files, in"
        " values that no other file has.",
        no_checksum,
    ),
    "stock Orbax's chunks": Undecidable(
        "Stock Orbax stores neither checksums nor duplicates of chunks; shapes are as before.",
        stock_chunks,
    ),
    "a name without a checksum": Undecidable(
        "A tensor's name is other in a header or table that has no checksum, and no other file has"
        " the name.",
        a_name,
    ),
    "a setting without a checksum": Undecidable(
        "Something beside the arrays, in config.json or a header, which has no checksum and is"
        " stored once.",
        a_setting,
    ),
    "parts of several saves": Undecidable(
        "Files of DTensors by rank, and parts of a DCP save, are stored once and say neither run nor"
        " step; counters and settings of the ranks that do say one agree. DCP finds a tensor by what"
        " a part has in it, and not by its folder's name.",
        parts_of_others,
    ),
    "a vocabulary within the padding": Undecidable(
        "sizes={'vocab': n} is the user's word: Megatron stores padded rows and not how many tokens"
        " there are. A number that would be padded alike cannot be told from the true one.",
        padded_alike,
    ),
    "an optimizer of another": Undecidable(
        "A trainer's optimizer is a whole file of another save, and its shapes fit; the optimizer"
        " of training_args.bin is not the one that a program gave to the Trainer.",
        an_optimizer_of_another,
    ),
    "settings of another": Undecidable(
        "Files that hold no array, only what the trainer was told, are of another checkpoint;"
        " nothing else tells it.",
        settings_of_another,
    ),
}


# What shows that something is wrong, but not what the right values are: a note must tell it.


def steps_mixed(case: Case) -> bool:
    """Whether parameters are of different steps that were of one.

    An optimizer of torch counts for each parameter the steps in which that had a gradient:
    different steps may be those of a model of which not every part is used in every step.
    """

    def steps(leaves: Mapping[str, Any]) -> set[float]:
        return {float(v) for n, v in leaves.items() if n.startswith("['step']") and np.size(v) == 1}

    return len(steps(case.found)) > len(steps(case.want))


def half_of_a_file_is_zeros(case: Case) -> bool:
    """Whether the second half of a file is zeros, as an interrupted download leaves it."""
    return any(_zeros_at_its_end(case.after[n]) for n in case.changed if n in case.after)


def _zeros_at_its_end(data: bytes) -> bool:
    return len(data) > 512 and any(data) and not any(data[len(data) // 2 :])


def total_contradicts(case: Case) -> bool:
    """Whether an index tells another size of all tensors than its files have, and told theirs."""
    indexes = [n for n in case.after if n.endswith(".safetensors.index.json")]
    return any(
        _total_is_right(n, case.before) and not _total_is_right(n, case.after) for n in indexes
    )


def _total_is_right(index: str, files: Files) -> bool:
    about = json.loads(files[index])
    tensors = [t for t in stored_tensors(files) if t.file in about["weight_map"].values()]
    return about["metadata"]["total_size"] == sum(t.stop - t.start for t in tensors)


def states_kept_apart(case: Case) -> bool:
    """Whether states that are missed are all there, of no parameter."""
    missed = [np.asarray(leaf) for name, leaf in case.want.items() if name not in case.found]
    apart = [np.asarray(v).tobytes() for n, v in case.found.items() if n.startswith("['other']")]
    return bool(missed) and all(leaf.tobytes() in apart for leaf in missed)


TOLD: dict[str, tuple[Callable[[Case], bool], str]] = {
    "steps of several saves": (steps_mixed, r"steps differ"),
    "half of a file is zeros": (half_of_a_file_is_zeros, r"ends in zeros"),
    "states that are kept apart": (states_kept_apart, r"kept under `other`"),
    "a total size of another save": (total_contradicts, r"says that the tensors have"),
}


def shown_by(case: Case) -> list[str]:
    """What of TOLD shows in the files or in what came of them."""
    found = []
    for name, (shows, _) in TOLD.items():
        with contextlib.suppress(*_UNREADABLE):
            found += [name] * shows(case)
    return found
