"""What happens to the files of a checkpoint: each damage gives, for all files of a valid one, those
that are other then.

A pattern names files by the end of their path; `*` stands for slashes too, and `|` is between
several. Each file that it names is damaged in turn.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

import numpy as np

import torch_writer
from cases import Case
from folders import (
    OTHER_RUN,
    STEP_LATER,
    Entry,
    archives,
    read_folder,
    resummed,
    sibling,
    stored_tensors,
)
from jax_ucp.codecs.torch_file import TorchFile

Files = Mapping[str, bytes]
Changes = dict[str, Entry | None]  # None: it is not there any more
Edit = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Damage:
    """`changes` gives what is other, the file that a message must name first; of all files that a
    pattern names, or of some, always the same.
    """

    about: str
    changes: Callable[[Files, int], Iterator[Changes]]

    def __str__(self) -> str:
        return self.about

    def __add__(self, other: Damage) -> Damage:
        """Both, one after the other."""

        def changes(files: Files, most: int) -> Iterator[Changes]:
            for first in self.changes(files, most):
                for second in other.changes(with_changes(files, first), most):
                    yield {**first, **second}

        return Damage(f"{self}, {other}", changes)


def with_changes(files: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The entries of a folder after a change."""
    return {name: entry for name, entry in {**files, **changes}.items() if entry is not None}


def named(files: Files, pattern: str, most: int = 1 << 30) -> list[str]:
    """The files of a pattern, or some: first those of different kinds and lengths."""
    found = sorted(name for name in files if is_named(name, pattern))
    assert found, f"no file is called {pattern}"
    if len(found) <= most:
        return found
    others = Random(0).sample(found, len(found))
    different = {(kind(name), len(files[name])): name for name in others}.values()
    return sorted([*different, *(name for name in others if name not in different)][:most])


def is_named(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(f"/{name}", f"*/{either}") for either in pattern.split("|"))


def one(files: Files, pattern: str) -> str:
    (name,) = named(files, pattern)
    return name


def kind(name: str) -> str:
    """A path without its numbers."""
    return re.sub(r"\d+", "#", name)


def each(about: str, pattern: str, *made: Callable[[bytes], Entry | None]) -> Damage:
    """Each file of a pattern becomes, in turn, what each function makes of it."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        for name in named(files, pattern, most):
            yield from ({name: make(files[name])} for make in made)

    return Damage(f"{pattern} {about}", changes)


def together(damage: Damage) -> Damage:
    """All that a damage does to one after another, at once."""

    def changes(files: Files, _: int) -> Iterator[Changes]:
        found = damage.changes(files, 1 << 30)
        yield {name: entry for change in found for name, entry in change.items()}

    return Damage(f"all {damage}", changes)


# Files that are missing, cut, or something else.


def missing(pattern: str) -> Damage:
    return each("missing", pattern, lambda data: None)


def cut(pattern: str, *lengths: float) -> Damage:
    """To so many bytes, counted from the end if negative, or to a share of them."""

    def kept(length: float) -> Edit:
        whole = isinstance(length, int)
        return lambda data: data[: int(length) if whole else int(length * len(data))]

    return each(f"cut to {lengths}", pattern, *map(kept, lengths))


def holding(pattern: str, *entries: Entry) -> Damage:
    """In its place is something else: other bytes, a link, a folder."""
    said = ", ".join(str(entry)[:30] for entry in entries)
    return each(f"is {said}", pattern, *(lambda data, entry=entry: entry for entry in entries))


def added(name: str, entry: Entry = b"") -> Damage:
    return Damage(f"{name} added", lambda files, _: iter([{name: entry}]))


def bit(pattern: str, at: int, mask: int = 1) -> Damage:
    """A bit is flipped, whatever is there."""

    def flipped(data):
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    return each(f"bit at {at}", pattern, flipped)


def bits_of_metadata(pattern: str) -> Damage:
    """Bits of files of torch.save that are of no tensor, some in each of three files."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        rng = Random(1)
        for name in named(files, pattern, 3):
            data, kept = files[name], TorchFile(name, data=files[name])._storages.values()
            of_tensors = {at for s in kept for at in range(s.offset, s.offset + s.size)}
            others = [at for at in range(len(data)) if at not in of_tensors]
            for at in rng.sample(others, 8):
                flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
                yield {name: data[:at] + flipped + data[at + 1 :]}

    return Damage(f"{pattern} bits of metadata", changes)


# Files that are exchanged, renamed, copied, or of another checkpoint.


def exchanged(*patterns: str) -> Damage:
    """Two files; of one pattern all pairs that differ in numbers alone, or some of them."""

    def changes(files: Files, _: int) -> Iterator[Changes]:
        names = [name for pattern in patterns for name in named(files, pattern)]
        pairs = [(a, b) for a, b in itertools.combinations(names, 2) if kind(a) == kind(b)]
        if len(patterns) == 2:
            pairs = [(one(files, patterns[0]), one(files, patterns[1]))]
        for a, b in pairs:
            yield {a: files[b], b: files[a]}

    return Damage(f"{' and '.join(patterns)} exchanged", changes)


def folders_exchanged(a: str, b: str) -> Damage:
    return renamed(a, "aside") + renamed(b, a) + renamed("aside", b)


def renamed(old: str, new: str, keep: bool = False) -> Damage:
    """The file or folder of that name has another; or has both, to `keep` it."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        found: Changes = {}
        for name, data in files.items():
            parts = PurePosixPath(name).parts
            other = "/".join(new if part == old else part for part in parts)
            if old in parts:
                found |= {other: data} if keep else {name: None, other: data}
        assert found, f"nothing is called {old}"
        yield found

    return Damage(f"{old} {'also ' * keep}called {new}", changes)


def copied(source: str, target: str, of: str = "") -> Damage:
    """The file `target`, or a new one of that name beside it, is a copy of the file `source`, `of`
    another case; where `target` ends in a slash, each is copied into that folder.
    """

    def changes(files: Files, most: int) -> Iterator[Changes]:
        theirs = read_folder(Case(of).path) if of else files
        for name in named(theirs, source, most):
            there = [n for n in files if is_named(n, target)]
            new = f"{target}{PurePosixPath(name).name if target.endswith('/') else ''}"
            if "/" not in target:
                new = (PurePosixPath(name).parent / new).as_posix()
            yield dict.fromkeys(there or [new], theirs[name])

    return Damage(f"{target} is {source} {of}", changes)


def of_another(pattern: str, *cases: str) -> Damage:
    """Each of the files is that of the same name in another case."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        for theirs in (read_folder(Case(case).path) for case in cases):
            for name in named(files, pattern, most):
                yield {name: theirs[one(theirs, PurePosixPath(name).name)]}

    return Damage(f"{pattern} of {', '.join(cases)}", changes)


def of_sibling(which: str, pattern: str) -> Damage:
    """Each of the files is as the same run wrote it a `step` later, or another `run`."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        other = sibling(files, {"step": STEP_LATER, "run": OTHER_RUN}[which])
        for name in named(files, pattern, most):
            if other[name] != files[name]:
                yield {name: other[name]}

    return Damage(f"{pattern} of another {which}", changes)


def as_named(damage: Damage) -> Damage:
    """The names inside of files of torch.save are those of the files in whose place they are."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        for found in damage.changes(files, most):
            owner = {data: name for name, data in files.items()}
            data = {name: data for name, data in found.items() if isinstance(data, bytes)}
            yield {name: x.replace(stem(owner[x]), stem(name)) for name, x in data.items()}

    return Damage(f"{damage} as named", changes)


def stem(name: str) -> bytes:
    return PurePosixPath(name).stem.encode()


# Contents that are other, under right checksums.


def on_path(change: Callable[[Path], object]) -> Edit:
    """A function of bytes, of one that changes a file."""

    def edit(data: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "f"
            path.write_bytes(data)
            change(path)
            return path.read_bytes()

    return edit


GONE = object()


def edited(pattern: str, path: str, value: Any = GONE) -> Damage:
    """What a file of torch.save or of JSON holds is other at a path of keys: a value, what a
    function makes of the one that is there, or nothing.
    """
    *above, last = (int(key) if re.fullmatch(r"-?\d+", key) else key for key in path.split("/"))

    def change(tree: Any) -> None:
        for key in above:
            tree = tree[key]
            tree = tree.state if isinstance(tree, torch_writer.Instance) else tree
        if value is GONE:
            del tree[last]
        else:
            tree[last] = value(tree[last]) if callable(value) else value

    def edit(data: bytes) -> bytes:
        if data[:1] != b"{":
            return on_path(lambda file: torch_writer.edit(file, change))(data)
        change(content := json.loads(data))
        return json.dumps(content).encode()

    about = "gone" if value is GONE else "other" if callable(value) else f"{value!r:.30}"
    return each(f"with {path} {about}", pattern, edit)


def replaced(pattern: str, old: bytes, new: bytes) -> Damage:
    """Some of its bytes are other; in a file of torch.save those of its pickle."""

    def member(name: str, data: bytes) -> bytes:
        return data.replace(old, new) if name.endswith("data.pkl") else data

    def edit(data: bytes) -> bytes:
        assert old in data
        in_zip = on_path(lambda path: torch_writer.rewrite(path, member))
        return in_zip(data) if data[:4] == b"PK\3\4" else data.replace(old, new)

    return each(f"with {new!r} for {old!r}", pattern, edit)


def less(pattern: str, *keys: str) -> Damage:
    """Numbers under these keys in a pickle, or tensors, are a little less."""
    forms = "|".join(map(re.escape, keys)).encode()
    number = rb"(?:%s)(?:q.|r....|\x94)?(?:K.|G.{8})" % forms

    def lower(found: re.Match[bytes]) -> bytes:
        text = found[0]
        if text[-9:-8] == b"G":
            return text[:-8] + np.array(np.frombuffer(text[-8:], ">f8") * 0.75, ">f8").tobytes()
        return text[:-1] + bytes([max(text[-1] - 1, 0)])

    def member(name: str, data: bytes) -> bytes:
        return re.sub(number, lower, data, flags=re.DOTALL) if name.endswith("data.pkl") else data

    def fewer(array: np.ndarray) -> None:
        array -= 1

    def change(path: Path) -> None:
        before = path.read_bytes()
        torch_writer.rewrite(path, member)
        keys_there = TorchFile(path, lenient=True).arrays()
        tensors = [key for key in keys_there if key.split("/")[-1] in keys]
        if tensors:
            torch_writer.change(path, dict.fromkeys(tensors, fewer))
        assert path.read_bytes() != before

    return each(f"with less {', '.join(keys)}", pattern, on_path(change))


Change = Callable[[np.ndarray], np.ndarray]


def tensors_changed(about: str, pattern: str, label: str, change: Change) -> Damage:
    """Each tensor whose label matches has other values, one after another."""

    def changes(files: Files, most: int) -> Iterator[Changes]:
        names = named(files, pattern, most)
        found = [t for t in stored_tensors(files) if t.file in names and re.search(label, t.label)]
        assert found, f"no tensor of {pattern} is called {label}"
        for t in found:
            data = files[t.file]
            values = change(t.read(files).copy()).tobytes()
            assert len(values) == t.stop - t.start
            data = data[: t.start] + values + data[t.stop :]
            yield {t.file: resummed(data)}

    return Damage(f"{label} of {pattern} {about}", changes)


def items_wiped(name: str) -> Damage:
    """All items of DCP of such a name are zeros."""

    def changes(files: Files, _: int) -> Iterator[Changes]:
        found: dict[str, bytearray] = {}
        for item in (item for item in archives(files) if re.search(name, item.name)):
            data = found.setdefault(item.file, bytearray(files[item.file]))
            data[item.start : item.stop] = bytes(item.stop - item.start)
        assert found
        yield {file: bytes(data) for file, data in found.items()}

    return Damage(f"items of {name} wiped", changes)


def doubled(pattern: str, label: str = "") -> Damage:
    return tensors_changed("doubled", pattern, label, lambda x: (x * 2 + 1).astype(x.dtype))


def flipped(pattern: str, label: str, element: int) -> Damage:
    """A bit of an element of each tensor whose label matches is other, of its exponent, so that no
    rounding hides it; the checksum is not.
    """

    def changes(files: Files, most: int) -> Iterator[Changes]:
        names, found = named(files, pattern, most), False
        for item in (item for item in archives(files) if item.file in names):
            data = files[item.file]
            file = TorchFile(item.file, data=data[item.start : item.stop])
            for key, tensor in file._tensors.items():
                if re.search(label, "/".join(filter(None, (item.name, key)))):
                    index = tensor.offset + element % math.prod(tensor.shape)
                    at = item.start + file._storages[tensor.storage].offset
                    at += (index + 1) * tensor.dtype.itemsize - 1
                    yield {item.file: data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]}
                    found = True
        assert found, f"no tensor of {pattern} is called {label}"

    return Damage(f"{label} of {pattern} flipped at {element}", changes)
