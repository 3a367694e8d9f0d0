"""What people do to checkpoints by mistake: one function for each kind, which yields its attempts.

Options, targets, mappings and configs that do not fit are refused before files are looked at, or
with them: `test_options.py`, `mapping/test_requires.py` and `formats/quantized` have those, and
`hostile/test_folders.py` has links.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations, permutations
from pathlib import PurePosixPath
from random import Random

import numpy as np

from damages import Changes
from folders import EmptyFolder
from safetensors_writer import safetensors
from temptation_subjects import Subject

# Of the files of one role, which differ in numbers alone, how many are tried.
PER_ROLE = 2


@dataclass(frozen=True)
class Attempt:
    """One mistake made once.

    `changes` are the files that are other then. `opened` is what is opened below the folder;
    unsaid, what is opened rightly. `also` are checkpoints whose truth is right too. `small`: so few
    bytes are other that a sample may miss them.
    """

    what: str
    changes: Changes
    opened: str | None = None
    also: tuple[str, ...] = ()
    small: bool = False


Mistake = Callable[[Subject, Sequence[Subject]], Iterator[Attempt]]
MISTAKES: dict[str, Mistake] = {}


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__.replace("_", " ")] = function
    return function


def of_each_file(function: Callable[[str, bytes, Random], Iterator[tuple[str, Changes]]]) -> None:
    """Add a mistake that is made with one file: what the function yields of its name and bytes."""
    kind = function.__name__.replace("_", " ")

    def attempts(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
        rng = rng_of(subject, kind)
        for name in chosen(subject, rng):
            for how, changes in function(name, subject.folder[name], rng):
                if not changes.items() <= subject.folder.items():
                    yield Attempt(f"{name} {how}", changes, small="flipped" in how)

    MISTAKES[kind] = attempts


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


def chosen(subject: Subject, rng: Random) -> list[str]:
    """The last file of each role, which nothing after it tells of, and some others."""
    found: list[str] = []
    for names in by_role([*subject.folder]).values():
        found += [*rng.sample(names[:-1], min(PER_ROLE, len(names)) - 1), names[-1]]
    return found


def rng_of(subject: Subject, what: str) -> Random:
    return Random(f"{subject.name} {what}")


def folders_of(subject: Subject) -> list[str]:
    """Folders inside the checkpoint, two of each depth and role."""
    folders = {p.as_posix() for name in subject.folder for p in PurePosixPath(name).parents} - {"."}
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    for folder in sorted(folders):
        found[folder.count("/"), re.sub(r"\d+", "#", PurePosixPath(folder).name)[:6]].append(folder)
    return [folder for names in found.values() for folder in (names[0], names[-1])[: len(names)]]


def below(folder: str, names: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files in a folder, by their path in it."""
    inside = (name for name in names if name.startswith(f"{folder}/"))
    return {name.removeprefix(f"{folder}/"): names[name] for name in inside}


def moved(subject: Subject, old: str, new: str) -> Changes:
    """A folder, the whole one if it has no name, is another one; without a name, its parent."""
    names = {
        f"{old}/" * bool(old) + n: n
        for n in (below(old, subject.folder) if old else subject.folder)
    }
    gone: Changes = dict.fromkeys(names)
    return gone | {f"{new}/" * bool(new) + n: subject.folder[name] for name, n in names.items()}


def is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


# Files that are damaged.


@mistake
def files_missing(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for name in chosen(subject, rng_of(subject, "missing")):
        yield Attempt(f"{name} is missing", {name: None})
    for names in by_role([*subject.folder]).values():
        if len(names) > 1:
            yield Attempt(f"all {role(names[0])} are missing", dict.fromkeys(names))
    for folder in folders_of(subject):
        gone = dict.fromkeys(f"{folder}/{name}" for name in below(folder, subject.folder))
        yield Attempt(f"{folder}/ is missing", gone)


@of_each_file
def cut_short(name: str, data: bytes, rng: Random) -> Iterator[tuple[str, Changes]]:
    whole = len(data)
    lengths = {0, 1, whole // 4, whole // 2, whole * 9 // 10, whole - 1, whole // 512 * 512}
    for length in rng.sample(sorted(n for n in lengths if 0 <= n < whole), min(3, whole)):
        yield f"has its first {length} of {whole} bytes", {name: data[:length]}


@of_each_file
def half_downloaded(name: str, data: bytes, rng: Random) -> Iterator[tuple[str, Changes]]:
    """The length is there, and zeros where nothing came yet; or the name is that of a download."""
    whole, start = len(data), rng.randrange(len(data) // 2 + 1)
    for keep in (whole // 10, whole // 2):
        yield f"is zeros after byte {keep}", {name: data[:keep] + bytes(whole - keep)}
    for first, last in ((start, min(whole, start + max(64, whole // 4))), (whole * 9 // 10, whole)):
        other = data[:first] + bytes(last - first) + data[last:]
        yield f"has zeros at {first}:{last}", {name: other}
    for end in (".part", ".crdownload", ".incomplete"):
        yield f"is half, as {end}", {name: None, name + end: data[: len(data) // 2]}


@of_each_file
def bytes_appended(name: str, data: bytes, _: Random) -> Iterator[tuple[str, Changes]]:
    for what, more in (("zeros", bytes(512)), ("itself once more", data), ("a newline", b"\n")):
        yield f"ends with {what}", {name: data + more}


@of_each_file
def bit_flipped(name: str, data: bytes, rng: Random) -> Iterator[tuple[str, Changes]]:
    for at in places_in(name, data, rng):
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        yield f"has a bit of byte {at} flipped", {name: data[:at] + flipped + data[at + 1 :]}


def places_in(name: str, data: bytes, rng: Random) -> list[int]:
    """Bytes of the header, of the data, and of what comes at the end."""
    if not data:
        return []
    found = [0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(3))]
    body = 8 + int.from_bytes(data[:8], "little")
    if name.endswith(".safetensors") and body < len(data):
        found += [rng.randrange(body), rng.randrange(8, body), rng.randrange(body, len(data))]
    elif data[:4] == b"PK\3\4" and not name.endswith(".distcp"):
        with zipfile.ZipFile(BytesIO(data)) as file:
            infos = file.infolist()
        for info in (infos[0], rng.choice(infos)):
            inside = rng.randrange(len(info.filename) + info.file_size)
            found.append(info.header_offset + 30 + inside)
    return sorted(set(found))


@of_each_file
def text_mangled(name: str, data: bytes, _: Random) -> Iterator[tuple[str, Changes]]:
    """As a transfer in text mode, an editor, or a version control that changes ends of lines."""
    yield "with CRLF for LF", {name: data.replace(b"\n", b"\r\n")}
    yield "with LF for CRLF", {name: data.replace(b"\r\n", b"\n")}
    if not is_text(data):
        yield "with UTF-8 for latin-1", {name: data.decode("latin-1").encode()}
        yield "with no bytes beyond ASCII", {name: data.decode("ascii", "ignore").encode()}
        return
    yield "with a byte order mark", {name: b"\xef\xbb\xbf" + data}
    yield "with UTF-16", {name: data.decode().encode("utf-16")}
    yield "with CRLF at its end", {name: data.rstrip() + b"\r\n"}
    yield "with spaces around it", {name: b"  " + data.rstrip() + b"  \n"}
    yield "with upper case", {name: data.upper()}
    yield "with quotes around it", {name: b'"' + data.strip() + b'"\n'}


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
_NOT_FOUND = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"


@of_each_file
def another_thing_in_its_place(name: str, data: bytes, _: Random) -> Iterator[tuple[str, Changes]]:
    yield "is a git-lfs pointer", {name: _LFS % (b"0" * 64, len(data))}
    yield "is a web page", {name: _NOT_FOUND}
    yield "is an error in JSON", {name: b'{"error":"Repository not found"}'}
    yield "is a folder that has it", {name: None, f"{name}/{PurePosixPath(name).name}": data}
    yield "is an empty folder", {name: EmptyFolder()}


# Names that are other, and files that are there once more, or beside others.


def other_names(path: PurePosixPath) -> Iterator[str]:
    """Names that copies get, and the name with each of its numbers one more."""
    yield from (
        f"{path.stem} (1){path.suffix}",
        f"{path.name}.bak",
        f"{path.stem}_old{path.suffix}",
    )
    for number in re.finditer(r"\d+", path.name):
        raised = str(int(number[0]) + 1).zfill(len(number[0]))
        yield path.name[: number.start()] + raised + path.name[number.end() :]


@mistake
def renamed(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for name in chosen(subject, rng_of(subject, "renamed")):
        path = PurePosixPath(name)
        for other in (*other_names(path), path.name.upper(), f"{path.name}.txt"):
            new = path.with_name(other).as_posix()
            if new not in subject.folder:
                changes = {name: None, new: subject.folder[name]}
                yield Attempt(f"{name} is called {other}", changes)
    for folder in folders_of(subject):
        path = PurePosixPath(folder)
        for other in (*other_names(path), path.name.upper(), f"{path.name}.tmp"):
            new = path.with_name(other).as_posix()
            if new != folder and not below(new, subject.folder):
                what = f"{folder}/ is called {other}/"
                yield Attempt(what, moved(subject, folder, new))


@mistake
def folders_nested_or_flattened(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """As an archive unpacked into a folder of its own, or files moved without theirs."""
    yield Attempt("all of it lies one folder deeper", moved(subject, "", "checkpoint"))
    for top in sorted({name.partition("/")[0] for name in subject.folder if "/" in name})[:2]:
        yield Attempt(f"the files of {top}/ lie beside it", moved(subject, top, ""))
        yield Attempt(f"{top}/ lies in {top}/", moved(subject, top, f"{top}/{top}"))


_CLUTTER = {
    ".DS_Store": b"\0\0\0\1Bud1" + bytes(60),
    "README.md": b"# a model\n",
    "Thumbs.db": b"\xd0\xcf\x11\xe0" + bytes(60),
    "train.log": b"step 1 loss 2.0\n",
    ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
    "events.out.tfevents.1": bytes(24),
}
_APPLE = b"\0\5\26\7\0\2\0\0Mac OS X        " + bytes(100)


@mistake
def files_too_many(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """What programs leave in folders, and each file once more under another name."""
    folders = sorted({PurePosixPath(name).parent.as_posix() for name in subject.folder})
    for folder in dict.fromkeys([folders[0], folders[-1]]):
        for name, data in _CLUTTER.items():
            path = (PurePosixPath(folder) / name).as_posix()
            yield Attempt(f"{path} is there", {path: data})
    for name in chosen(subject, rng_of(subject, "too many")):
        path = PurePosixPath(name)
        apple = path.with_name(f"._{path.name}").as_posix()
        yield Attempt(f"{apple} of macOS is there", {apple: _APPLE})
        for other in other_names(path):
            new = path.with_name(other).as_posix()
            if new not in subject.folder:
                yield Attempt(f"{name} is there as {other} too", {new: subject.folder[name]})


@mistake
def files_of_others_beside(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    """Weights, optimizers and adapters that belong to something else, or to this one."""
    rng = rng_of(subject, "beside")
    donors = [other for other in others if other is not subject]
    if not donors:
        return
    donor = rng.choice(donors)
    some = donor.folder[rng.choice(sorted(donor.folder, key=lambda n: len(donor.folder[n]))[-3:])]
    tensors = safetensors({"lora.weight": np.arange(4, dtype=np.float32).reshape(2, 2)})
    parent = PurePosixPath(min(subject.folder)).parent
    for name, data in (
        ("extra.safetensors", tensors), ("adapter_model.safetensors", tensors),
        ("optimizer.pt", some), ("pytorch_model.bin", some),
        ("model-00001-of-00002.safetensors", tensors), ("checkpoint.pt", some),
    ):  # fmt: skip
        path = (parent / name).as_posix()
        if path not in subject.folder:
            yield Attempt(f"{path} of something else is there", {path: data})
    pool = {name: other for other in donors for name in other.folder if name not in subject.folder}
    for name in rng.sample(sorted(pool), min(6, len(pool))):
        what = f"{name} of {pool[name].name} is there too"
        yield Attempt(what, {name: pool[name].folder[name]})


# Files exchanged, and of other steps, runs, ranks and models.


@mistake
def files_of_another_rank(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    files, rng = subject.folder, rng_of(subject, "exchanged")
    for names in by_role([*files]).values():
        pairs = [(a, b) for a, b in permutations(names, 2) if files[a] != files[b]]
        alike = [(a, b) for a, b in pairs if len(files[a]) == len(files[b])]
        for a, b in {pair for of in (pairs, alike) for pair in rng.sample(of, min(3, len(of)))}:
            yield Attempt(f"{a} and {b} are exchanged", {a: files[b], b: files[a]})
            yield Attempt(f"{a} is a copy of {b}", {a: files[b]})


@mistake
def folders_exchanged(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Of those of the same names inside."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    folders = {p.as_posix() for name in subject.folder for p in PurePosixPath(name).parents} - {"."}
    for folder in sorted(folders):
        parent = PurePosixPath(folder).parent.as_posix()
        found[parent, *sorted(below(folder, subject.folder))].append(folder)
    pairs = [pair for names in found.values() for pair in combinations(names, 2)]
    for a, b in rng_of(subject, "folders exchanged").sample(pairs, min(8, len(pairs))):
        first, second = (below(folder, subject.folder) for folder in (a, b))
        changes = {f"{a}/{n}": data for n, data in second.items()}
        changes |= {f"{b}/{n}": data for n, data in first.items()}
        yield Attempt(f"{a}/ and {b}/ are exchanged", changes)


@mistake
def files_of_another_save(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Of another step or run; some of them, as when a copy over an older checkpoint is stopped."""
    for which, other in subject.siblings.items():
        rng = rng_of(subject, f"sibling {which}")
        differing = sorted(n for n, data in subject.folder.items() if other.get(n, data) != data)
        for names in by_role(differing).values():
            for name in rng.sample(names, min(PER_ROLE, len(names))):
                yield Attempt(f"{name} is of another {which}", {name: other[name]})
            if 1 < len(names) < len(differing):
                whole = {name: other[name] for name in names}
                yield Attempt(f"all {role(names[0])} are of another {which}", whole)
            if len(names) > 1:
                a, b = rng.sample(names, 2)
                yield Attempt(f"{a} is {b} of another {which}", {a: other[b]})
        for _ in range(3 if len(differing) > 1 else 0):
            some = rng.sample(differing, rng.randrange(1, len(differing)))
            what = f"{', '.join(some)[:200]}: {len(some)} of {len(differing)} of another {which}"
            yield Attempt(what, {name: other[name] for name in some})


@mistake
def whole_checkpoint_of_another(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Nothing is wrong with it but that it is another one."""
    for which in subject.siblings:
        other = subject.as_saved(which)
        changes = dict.fromkeys(subject.folder) | other
        yield Attempt(f"all of it is of another {which}", changes, also=(which,))


@mistake
def file_of_another_model(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    """Other sizes, ranks, or optimizer: a file of the same name from another checkpoint."""
    rng = rng_of(subject, "other model")
    for name in chosen(subject, rng):
        data = subject.folder[name]
        donors = [other for other in others if other.folder.get(name, data) != data]
        for donor in rng.sample(donors, min(3, len(donors))):
            what = f"{name} is that of {donor.name}"
            yield Attempt(what, {name: donor.folder[name]}, also=(donor.name,))


@mistake
def two_checkpoints_in_one_folder(subject: Subject, others: Sequence[Subject]) -> Iterator[Attempt]:
    donors = [  # those whose truth is what the same options give
        other
        for other in others
        if other is not subject and (other.entry, other.options) == (subject.entry, subject.options)
    ]
    for donor in rng_of(subject, "merged").sample(donors, min(4, len(donors))):
        for whose, files in ((donor.name, {}), ("this one", subject.folder)):
            what = f"merged with {donor.name}; of what both have, that of {whose}"
            yield Attempt(what, {**donor.folder, **files}, also=(donor.name,))


@mistake
def stale_pointer(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """`latest` and its like: of another step, of none, missing, or with two steps there."""
    for pointer in ("latest", "latest_universal", "latest_checkpointed_iteration.txt"):
        if pointer not in subject.folder:
            continue
        said = subject.folder[pointer].decode()
        wrong = ["global_step9999", "9999", "7", "latest", "release", "", "/", ".", ".."]
        wrong += [f"./{said}", f"{said}/", said.upper(), f"{said} ", f"../{said}"]
        for text in dict.fromkeys(wrong):
            yield Attempt(f"{pointer} says {text!r}", {pointer: text.encode()})
        if "step" in subject.siblings:
            other = subject.as_saved("step")
            later: Changes = {name: data for name, data in other.items() if name != pointer}
            yield Attempt(f"a later step is there, and {pointer} says {said}", later)
            what = f"a later step is there, and {pointer} says so"
            yield Attempt(what, {**later, pointer: other[pointer]}, also=("step",))
            yield Attempt(f"two steps are there, and no {pointer}", {**later, pointer: None})


@mistake
def stale_index(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """The index of a sharded model: of another save, without a tensor, with one too many, or
    naming other files.
    """
    for name in (name for name in subject.folder if name.endswith(".index.json")):
        index = json.loads(subject.folder[name])
        where: dict[str, str] = index["weight_map"]
        files, key = sorted(set(where.values())), rng_of(subject, name).choice(sorted(where))
        turned = dict(zip(files, [*files[1:], files[0]], strict=True))
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
            "names the files in turn": {k: turned[f] for k, f in where.items()},
            f"says that {key} is in another file": where | {key: turned[where[key]]},
        }
        for how, other in ways.items():
            data = json.dumps({**index, "weight_map": other}).encode()
            yield Attempt(f"{name} {how}", {name: data})
        total = json.dumps({**index, "metadata": {"total_size": 12}}).encode()
        yield Attempt(f"{name} has another total_size", {name: total})


_PART = re.compile(
    r"rank_?\d|(?<!random)_states|-of-\d|distcp|model_optim|distrib|\.metadata|index\.json|ucp\.json|_METADATA|latest"
)


@mistake
def part_of_it_opened(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A folder or a rank's file inside of it."""
    for folder in folders_of(subject):
        # which is an item by itself
        items = below(folder, subject.folder).keys() & {"_METADATA", ".metadata"}
        if folder != subject.entry and not items:
            yield Attempt(f"{folder}/ is opened", {}, opened=folder)
    for name in chosen(subject, rng_of(subject, "part")):
        if _PART.search(name) and name != subject.entry:
            yield Attempt(f"{name} is opened", {}, opened=name)
