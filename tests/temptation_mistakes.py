"""What people do to checkpoints and say of them by mistake: one function for each kind, which
yields its attempts.

An attempt is a folder as the mistake leaves it, or options as the mistake has them.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import combinations, product
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

import numpy as np

import jax_ucp as ucp
from folders import EmptyFolder, Entry, Folder, Link
from safetensors_writer import safetensors
from temptation_subjects import Subject

# Of the files of one role, which differ in numbers alone, how many are tried.
PER_ROLE = 2


@dataclass(frozen=True)
class Attempt:
    """One mistake made once.

    `folder` gives the files as it leaves them. `opened` gives what is opened from the path of that
    folder; unsaid, what is opened rightly. `options` are those of `open` beside the right ones.
    `act` does something else than restoring. `also` are checkpoints whose truth is right too.
    `noticed`: where it is not refused, notes, warnings or the log must have a match of it. `small`:
    so few bytes are other that a sample may miss them. `beside` are files outside of the
    checkpoint.
    """

    what: str
    folder: Callable[[], Folder]
    opened: Callable[[Path], str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    act: Callable[[ucp.Checkpoint, Path], Any] | None = None
    also: tuple[str, ...] = ()
    noticed: str = ""
    small: bool = False
    beside: Mapping[str, bytes] = field(default_factory=dict)


class Beside(str):
    """The name of a file of `beside`, to be given as its path."""


Mistake = Callable[[Subject, Sequence[Subject]], Iterator[Attempt]]
MISTAKES: dict[str, Mistake] = {}


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__.replace("_", " ")] = function
    return function


# What files there are.


def role(name: str) -> str:
    """What a file is for: its name, less the numbers."""
    base = PurePosixPath(name).name
    return "hex" if re.fullmatch(r"[0-9a-f]{20,}", base) else re.sub(r"\d+", "#", base)


def by_role(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        found[role(name)].append(name)
    return found


def chosen(subject: Subject, rng: Random, per_role: int = PER_ROLE) -> list[str]:
    """The last file of each role, which nothing after it tells of, and some others."""
    found: list[str] = []
    for names in by_role(list(subject.folder)).values():
        found += [*rng.sample(names[:-1], min(per_role, len(names)) - 1), names[-1]]
    return found


def rng_of(subject: Subject, what: str) -> Random:
    return Random(f"{subject.name} {what}")


def replacing(subject: Subject) -> Callable[[Mapping[str, Entry | None]], Callable[[], Folder]]:
    """A function that makes folders in which some entries are others, or, for None, not there."""

    def with_entries(entries: Mapping[str, Entry | None]) -> Callable[[], Folder]:
        def made() -> Folder:
            found = {**subject.folder, **entries}
            return {name: entry for name, entry in found.items() if entry is not None}

        return made

    return with_entries


def renaming(subject: Subject, new_name: Callable[[str], str]) -> Callable[[], Folder]:
    """The folder with other names."""
    return lambda: {new_name(name): data for name, data in subject.folder.items()}


def same_folder(subject: Subject) -> Callable[[], Folder]:
    return lambda: subject.folder


def is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def each_file(subject: Subject, what: str) -> Iterator[tuple[str, bytes, Random]]:
    rng = rng_of(subject, what)
    for name in chosen(subject, rng):
        yield name, subject.folder[name], rng


# Files that are damaged.


@mistake
def file_missing(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, _data, _rng in each_file(subject, "missing"):
        yield Attempt(f"{name} is missing", put({name: None}))
    for names in by_role(list(subject.folder)).values():
        if len(names) > 1:
            gone = dict.fromkeys(names)
            yield Attempt(f"all {role(names[0])} are missing", put(gone))


@mistake
def folder_missing(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for folder in some_folders(subject, "folder missing"):
        gone = dict.fromkeys(n for n in subject.folder if n.startswith(f"{folder}/"))
        yield Attempt(f"{folder}/ is missing", put(gone))


def some_folders(subject: Subject, what: str) -> list[str]:
    """Folders inside the checkpoint, two of each depth and role."""
    folders = {p.as_posix() for name in subject.folder for p in PurePosixPath(name).parents} - {"."}
    rng = rng_of(subject, what)
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    for folder in sorted(folders):
        found[folder.count("/"), re.sub(r"\d+", "#", PurePosixPath(folder).name)[:6]].append(folder)
    some = [folder for names in found.values() for folder in rng.sample(names, min(2, len(names)))]
    return some[:12]


@mistake
def file_truncated(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, rng in each_file(subject, "truncated"):
        n = len(data)
        lengths = {1, n // 4, n // 2, n * 9 // 10, n - 1, n // 512 * 512}
        some = sorted(n for n in lengths if 0 < n < len(data))
        for length in sorted(rng.sample(some, min(3, len(lengths) - 1)) if len(data) > 2 else ()):
            cut = data[:length]
            yield Attempt(f"{name} has its first {length} of {len(data)} bytes", put({name: cut}))


@mistake
def file_empty(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "empty"):
        if data:
            yield Attempt(f"{name} is empty", put({name: b""}))


@mistake
def half_downloaded(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """The length is there, and zeros where nothing came yet; or the name is that of a download."""
    put = replacing(subject)
    for name, data, rng in each_file(subject, "half"):
        if len(data) < 8:
            continue
        for share in (0.1, 0.5, 0.9):
            keep = int(len(data) * share)
            zeros = data[:keep] + bytes(len(data) - keep)
            yield Attempt(f"{name} is zeros after byte {keep}", put({name: zeros}))
        start = rng.randrange(len(data) // 2)
        stop = min(len(data), start + max(64, len(data) // 4))
        hole = data[:start] + bytes(stop - start) + data[stop:]
        yield Attempt(f"{name} has zeros at {start}:{stop}", put({name: hole}))
        for end in (".part", ".crdownload", ".incomplete"):
            other = {name: None, name + end: data[: len(data) // 2]}
            yield Attempt(f"{name} is half, as {end}", put(other))


@mistake
def bytes_appended(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "appended"):
        for what, more in (("zeros", bytes(512)), ("itself once more", data), ("a newline", b"\n")):
            yield Attempt(f"{name} ends with {what}", put({name: data + more}))


@mistake
def bit_flipped(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, rng in each_file(subject, "flipped"):
        for at in places_in(name, data, rng):
            bit = rng.randrange(8)
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            what = f"bit {bit} of byte {at} of {name} is flipped"
            yield Attempt(what, put({name: flipped}), small=True)


def places_in(name: str, data: bytes, rng: Random) -> list[int]:
    """Bytes of the header, of the data, and of what comes at the end."""
    if not data:
        return []
    found = [0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(3))]
    if name.endswith(".safetensors"):
        body = 8 + int.from_bytes(data[:8], "little")
        found += [rng.randrange(body), rng.randrange(8, body), rng.randrange(body, len(data))]
    elif data[:4] == b"PK\3\4" and not name.endswith(".distcp"):
        with zipfile.ZipFile(BytesIO(data)) as file:
            infos = file.infolist()
        for info in (infos[0], rng.choice(infos)):
            if info.file_size:
                inside = rng.randrange(len(info.filename) + info.file_size)
                found.append(info.header_offset + 30 + inside)
    return sorted(set(found))


@mistake
def text_mangled(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """As a transfer in text mode, an editor, or a version control that changes ends of lines."""
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "text"):
        ways = {
            "CRLF for LF": data.replace(b"\n", b"\r\n"),
            "LF for CRLF": data.replace(b"\r\n", b"\n"),
        }
        if is_text(data):
            ways |= {
                "a byte order mark": b"\xef\xbb\xbf" + data,
                "UTF-16": data.decode().encode("utf-16"),
                "CRLF at its end": data.rstrip() + b"\r\n",
                "spaces around it": b"  " + data.rstrip() + b"  \n",
                "upper case": data.upper(),
                "quotes around it": b'"' + data.strip() + b'"\n',
            }
        else:
            ways["UTF-8 for latin-1"] = data.decode("latin-1").encode()
            ways["no bytes beyond ASCII"] = data.decode("ascii", "ignore").encode()
        for how, other in ways.items():
            if other != data:
                yield Attempt(f"{name} with {how}", put({name: other}))


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
_NOT_FOUND = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>Not found.</body></html>\n"
_DENIED = b'{"error":"Repository not found"}'


@mistake
def another_thing_in_its_place(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, rng in each_file(subject, "things"):
        lfs = _LFS % (rng.randbytes(32).hex().encode(), len(data))
        base = PurePosixPath(name).name
        if not is_text(data):
            yield Attempt(f"{name} is a git-lfs pointer", put({name: lfs}))
        yield Attempt(f"{name} is a web page", put({name: _NOT_FOUND}))
        yield Attempt(f"{name} is an error in JSON", put({name: _DENIED}))
        yield Attempt(f"{name} is a folder that has it", put({name: None, f"{name}/{base}": data}))
        yield Attempt(f"{name} is an empty folder", put({name: EmptyFolder()}))
        yield Attempt(f"{name} is a broken link", put({name: Link(f"../nowhere/{base}")}))


@mistake
def file_renamed(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "renamed"):
        path = PurePosixPath(name)
        stem, suffix = path.stem, path.suffix
        others = [f"{stem} (1){suffix}", f"{stem}.bak", f"{stem}_old{suffix}", f"{path.name}.txt"]
        others += [path.name.upper(), path.name.capitalize(), *_raised(path.name)]
        for other in others:
            new = path.with_name(other).as_posix()
            if new != name and new not in subject.folder:
                yield Attempt(f"{name} is called {other}", put({name: None, new: data}))


def _raised(name: str) -> list[str]:
    """The name with its first number one more, if it has a number."""
    other = re.sub(r"\d+", lambda n: str(int(n[0]) + 1).zfill(len(n[0])), name, count=1)
    return [other] if re.search(r"\d", name) else []


@mistake
def folder_renamed(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for folder in some_folders(subject, "folder renamed"):
        path = PurePosixPath(folder)
        others = [f"{path.name} copy", path.name.upper(), f"{path.name}.tmp"]
        for other in [*others, *_raised(path.name)]:
            new = path.with_name(other).as_posix()
            if new == folder or any(name.startswith(f"{new}/") for name in subject.folder):
                continue
            made = renaming(subject, partial(_moved, folder=folder, new=new))
            yield Attempt(f"{folder}/ is called {other}/", made)


def _below(name: str, folder: str) -> str:
    return name.removeprefix(f"{folder}/")


def _merged(under: Folder, over: Folder) -> Folder:
    return {**under, **over}


def _moved(name: str, folder: str, new: str) -> str:
    return new + name.removeprefix(folder) if name.startswith(f"{folder}/") else name


@mistake
def folders_nested_or_flattened(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """As an archive unpacked into a folder of its own, or files moved without theirs."""
    tops = {PurePosixPath(name).parts[0] for name in subject.folder if "/" in name}
    deeper = renaming(subject, "checkpoint/{}".format)
    yield Attempt("all of it lies one folder deeper", deeper)
    for top in sorted(tops)[:2]:
        flat = renaming(subject, partial(_below, folder=top))
        yield Attempt(f"the files of {top}/ lie beside it", flat)
        twice = renaming(subject, partial(_moved, folder=top, new=f"{top}/{top}"))
        yield Attempt(f"{top}/ lies in {top}/", twice)


# Files that are there once more, or beside others.


@mistake
def file_twice(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "twice"):
        path = PurePosixPath(name)
        stem, suffix = path.stem, path.suffix
        others = [f"{stem} (1){suffix}", f"{path.name}.bak", f"{stem} copy{suffix}"]
        for number in re.finditer(r"\d+", path.name):
            most = max(_numbers(subject.folder, name, number.start()))
            raised = str(most + 1).zfill(len(number[0]))
            others.append(path.name[: number.start()] + raised + path.name[number.end() :])
        for other in others:
            new = path.with_name(other).as_posix()
            if new not in subject.folder:
                yield Attempt(f"{name} is there as {other} too", put({new: data}))


def _numbers(folder: Mapping[str, bytes], name: str, at: int) -> list[int]:
    """The numbers that files of this name have at this place."""
    path = PurePosixPath(name)
    before, rest = path.name[:at], re.sub(r"^\d+", "", path.name[at:])
    same = re.compile(re.escape(before) + r"(\d+)" + re.sub(r"\\?\d+", r"\\d+", re.escape(rest)))
    found = [m for other in folder if (m := same.fullmatch(PurePosixPath(other).name))]
    return [int(m[1]) for m in found] or [0]


_CLUTTER: dict[str, bytes] = {
    ".DS_Store": b"\0\0\0\1Bud1" + bytes(60),
    "README.md": b"# a model\n",
    "Thumbs.db": b"\xd0\xcf\x11\xe0" + bytes(60),
    "train.log": b"step 1 loss 2.0\n",
    ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
    "events.out.tfevents.1": bytes(24),
}


@mistake
def clutter_beside(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    folders = {PurePosixPath(name).parent.as_posix() for name in subject.folder}
    folders = sorted(folders, key=lambda f: (f.count("/"), f))
    for folder in dict.fromkeys([folders[0], folders[-1]]):
        prefix = "" if folder == "." else f"{folder}/"
        for name, data in _CLUTTER.items():
            yield Attempt(f"{prefix}{name} is there", put({prefix + name: data}))
    for name, _data, _rng in each_file(subject, "apple"):
        path = PurePosixPath(name)
        other = path.with_name(f"._{path.name}").as_posix()
        double = b"\0\5\26\7\0\2\0\0Mac OS X        " + bytes(100)
        yield Attempt(f"{other} of macOS is there", put({other: double}))


@mistake
def files_of_others_beside(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    """Weights, optimizers and adapters that belong to something else, or to this one."""
    put = replacing(subject)
    rng = rng_of(subject, "beside")
    pool = sorted({name for other in others for name in other.folder})
    donors = [other for other in others if other is not subject]
    below = PurePosixPath(sorted(subject.folder)[0]).parent.as_posix()
    prefix = "" if below == "." else f"{below}/"
    if not donors:
        return
    donor = rng.choice(donors)
    some = donor.folder[rng.choice(sorted(donor.folder, key=lambda n: len(donor.folder[n]))[-3:])]
    tensors = safetensors({"lora.weight": np.arange(4, dtype=np.float32).reshape(2, 2)})
    for name, data in (
        ("extra.safetensors", tensors), ("adapter_model.safetensors", tensors),
        ("optimizer.pt", some), ("pytorch_model.bin", some),
        ("model-00001-of-00002.safetensors", tensors), ("checkpoint.pt", some),
    ):  # fmt: skip
        if prefix + name not in subject.folder:
            yield Attempt(f"{prefix}{name} of something else is there", put({prefix + name: data}))
    for name in rng.sample(pool, min(6, len(pool))):
        owner = next(other for other in others if name in other.folder)
        if name not in subject.folder:
            data = owner.folder[name]
            yield Attempt(f"{name} of {owner.name} is there too", put({name: data}))


# Files exchanged, and of other steps, runs, ranks and models.


Pairs = Iterable[tuple[str, str]]


def _some_pairs(folder: Mapping[str, bytes], names: Pairs, rng: Random) -> Pairs:
    """Three of the pairs of files that differ, and three of those of one length."""
    pairs = [(a, b) for a, b in names if folder[a] != folder[b]]
    alike = [(a, b) for a, b in pairs if len(folder[a]) == len(folder[b])]
    some = [rng.sample(of, min(3, len(of))) for of in (pairs, alike)]
    return dict.fromkeys([*some[0], *some[1]])


@mistake
def files_exchanged(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    rng = rng_of(subject, "exchanged")
    for names in by_role(list(subject.folder)).values():
        for a, b in _some_pairs(subject.folder, combinations(names, 2), rng):
            both = {a: subject.folder[b], b: subject.folder[a]}
            yield Attempt(f"{a} and {b} are exchanged", put(both))


@mistake
def file_of_another_rank(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    put = replacing(subject)
    rng = rng_of(subject, "other rank")
    for names in by_role(list(subject.folder)).values():
        for a, b in _some_pairs(subject.folder, product(names, names), rng):
            yield Attempt(f"{a} is a copy of {b}", put({a: subject.folder[b]}))


@mistake
def folders_exchanged(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    rng = rng_of(subject, "folders exchanged")
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    folders = {p.as_posix() for name in subject.folder for p in PurePosixPath(name).parents} - {"."}
    for folder in sorted(folders):
        inner = sorted(_below(n, folder) for n in subject.folder if n.startswith(f"{folder}/"))
        found[PurePosixPath(folder).parent.as_posix(), *inner].append(folder)
    pairs = [pair for names in found.values() for pair in combinations(names, 2)]
    for a, b in rng.sample(pairs, min(8, len(pairs))):
        swap = renaming(subject, partial(_swapped, a=a, b=b))
        yield Attempt(f"{a}/ and {b}/ are exchanged", swap)


def _swapped(name: str, a: str, b: str) -> str:
    return _moved(name, a, b) if name.startswith(f"{a}/") else _moved(name, b, a)


@mistake
def file_of_another_step(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    yield from _of_sibling(subject, "step")


@mistake
def file_of_another_run(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    yield from _of_sibling(subject, "run")


def _of_sibling(subject: Subject, which: str) -> Iterator[Attempt]:
    put = replacing(subject)
    rng = rng_of(subject, f"sibling {which}")
    other = subject.siblings.get(which)
    if other is None:
        return
    differing = _differing(subject, other)
    for names in by_role(differing).values():
        for name in rng.sample(names, min(PER_ROLE, len(names))):
            yield Attempt(f"{name} is of another {which}", put({name: other[name]}))
        whole = {name: other[name] for name in names}
        if 1 < len(names) < len(differing):
            yield Attempt(f"all {role(names[0])} are of another {which}", put(whole))
        if len(names) > 1:  # another rank's file of the other step or run
            a, b = rng.sample(names, 2)
            yield Attempt(f"{a} is {b} of another {which}", put({a: other[b]}))
    parents = {PurePosixPath(name).parent.as_posix() for name in differing if name.count("/") > 1}
    for folder in sorted(parents):
        inside = {name: other[name] for name in differing if name.startswith(f"{folder}/")}
        if 1 < len(inside) < len(differing) and rng.random() < 0.3:
            yield Attempt(f"{folder}/ is of another {which}", put(inside))


def _differing(subject: Subject, other: Mapping[str, bytes]) -> list[str]:
    return [n for n, data in subject.folder.items() if other.get(n, data) != data]


@mistake
def interrupted_copy_over_another_step(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Some files are of one step, and the rest of another, as when a copy over an older
    checkpoint is stopped.
    """
    put = replacing(subject)
    for which, other in subject.siblings.items():
        rng = rng_of(subject, f"interrupted {which}")
        differing = sorted(_differing(subject, other))
        for _ in range(3 if len(differing) > 1 else 0):
            some = rng.sample(differing, rng.randrange(1, len(differing)))
            mixed = {name: other[name] for name in some}
            what = f"{len(some)} of {len(differing)} files are of another {which}"
            yield Attempt(f"{what}: {', '.join(some)[:200]}", put(mixed))


@mistake
def whole_checkpoint_of_another(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Nothing is wrong with it but that it is another one."""
    for which in subject.siblings:
        made = partial(subject.as_saved, which)
        yield Attempt(f"all of it is of another {which}", made, also=(which,))


@mistake
def file_of_another_model(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    """Other sizes, ranks, or optimizer: a file of the same name from another checkpoint."""
    put = replacing(subject)
    rng = rng_of(subject, "other model")
    for name in chosen(subject, rng):
        data = subject.folder[name]
        donors = [other for other in others if other.folder.get(name, data) != data]
        for donor in rng.sample(donors, min(3, len(donors))):
            what = f"{name} is that of {donor.name}"
            yield Attempt(what, put({name: donor.folder[name]}))


@mistake
def two_checkpoints_in_one_folder(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    rng = rng_of(subject, "merged")
    donors = [  # those whose truth is what the same options give
        other
        for other in others
        if other is not subject and (other.entry, other.options) == (subject.entry, subject.options)
    ]
    for donor in rng.sample(donors, min(4, len(donors))):
        for under, over in ((donor.folder, subject.folder), (subject.folder, donor.folder)):
            whose = donor.name if over is donor.folder else "this one"
            made = partial(_merged, under, over)
            what = f"merged with {donor.name}; of what both have, that of {whose}"
            yield Attempt(what, made, also=(donor.name,))


@mistake
def stale_pointer(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """`latest` and its like: of another step, of none, missing, or with two steps there."""
    put = replacing(subject)
    for pointer in ("latest", "latest_universal", "latest_checkpointed_iteration.txt"):
        if pointer not in subject.folder:
            continue
        said = subject.folder[pointer].decode()
        wrong = ["global_step9999", "9999", "7", "latest", "release", "", "/", ".", ".."]
        wrong += [f"./{said}", f"{said}/", said.upper(), f"{said} ", f"../{said}"]
        for text in dict.fromkeys(wrong):
            yield Attempt(f"{pointer} says {text!r}", put({pointer: text.encode()}))
        if "step" not in subject.siblings:
            continue
        other = subject.as_saved("step")
        later = {name: data for name, data in other.items() if name != pointer}
        now = other[pointer].decode()
        yield Attempt(f"a later step is there, and {pointer} says {said}", put(later), also=())
        made = put({**later, pointer: now.encode()})
        yield Attempt(f"a later step is there, and {pointer} says {now}", made, also=("step",))
        yield Attempt(f"two steps are there, and no {pointer}", put({**later, pointer: None}))


@mistake
def stale_index(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """The index of a sharded model: of another save, without a tensor, with one too many, or
    naming other files.
    """
    put = replacing(subject)
    for name in subject.folder:
        if not name.endswith(".index.json"):
            continue
        index = json.loads(subject.folder[name])
        where: dict[str, str] = index["weight_map"]
        keys, files = sorted(where), sorted(set(where.values()))
        rng = rng_of(subject, f"index {name}")
        key = rng.choice(keys)
        ways: dict[str, dict[str, str]] = {
            f"lacks {key}": {k: f for k, f in where.items() if k != key},
            "names a tensor too many": where | {"model.layers.99.weight": files[0]},
            f"calls {key} otherwise": {("x." + k if k == key else k): f for k, f in where.items()},
            "names files of another number": {
                k: re.sub(r"-of-\d+", "-of-00009", f) for k, f in where.items()
            },
            "names files below another folder": {k: f"old/{f}" for k, f in where.items()},
            "lacks a whole file": {k: f for k, f in where.items() if f != files[-1]},
            "is empty": {},
        }
        if len(files) > 1:
            turned = dict(zip(files, [*files[1:], files[0]], strict=True))
            ways["names the files in turn"] = {k: turned[f] for k, f in where.items()}
            ways[f"says that {key} is in another file"] = where | {key: turned[where[key]]}
        for how, other in ways.items():
            data = json.dumps({**index, "weight_map": other}).encode()
            yield Attempt(f"{name} {how}", put({name: data}))
        total = json.dumps({**index, "metadata": {"total_size": 12}}).encode()
        yield Attempt(f"{name} has another total_size", put({name: total}))
