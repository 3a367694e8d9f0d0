"""What people say of a valid checkpoint by mistake: options of `open`, mappings, paths.

The table that it adds to is that of `temptation_mistakes`. Targets, meshes, rules and budgets are
refused before any format is asked: `test_options.py` and `sharding/test_leaves.py` have those.

What is said has an effect, or is refused by name, or a note, a warning or the log tells that it had
none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import jax_ucp as ucp
from temptation_mistakes import Attempt, Beside, each_file, mistake, same_folder, some_folders
from temptation_subjects import Subject


def _said(subject: Subject, what: str, options: Mapping[str, Any], noticed="", **more) -> Attempt:
    return Attempt(what, same_folder(subject), options=options, noticed=noticed, **more)


@mistake
def sizes_misspelt(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    vocab = subject.options.get("sizes", {}).get("vocab", 101)
    for sizes in ({"vocabulary": vocab}, {"Vocab": vocab}, {"vocab_size": vocab}, {"hidden": 16}):
        (name,) = sizes
        yield _said(subject, f"sizes={sizes}", {"sizes": sizes}, re.escape(name))
        both = {"vocab": vocab, **sizes}
        if "sizes" in subject.options:
            yield _said(subject, f"sizes={both}", {"sizes": both}, re.escape(name))
    for value in (0, -1, vocab + 0.0, vocab + 0.5, str(vocab), [vocab], 10**6, 10**30, np.nan):
        yield _said(subject, f"vocab is {value!r}", {"sizes": {"vocab": value}}, "vocab")
    for value in ("vocab=101", [("vocab", vocab)], vocab, {1: 2}):
        yield _said(subject, f"sizes={value!r}", {"sizes": value}, "sizes|vocab")
    if "sizes" in subject.options:
        for what, rows in (("few", vocab - 1), ("many", vocab + 1)):
            yield _said(subject, f"vocab is one row too {what}: {rows}", {"sizes": {"vocab": rows}})


@mistake
def believe_said(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    yield _said(subject, "on_conflict='master' where nothing differs", {"on_conflict": "master"})


_SPECS = {
    "of another model": (
        "rules:\n  - match: 'transformer\\.h\\.(\\d+)\\.attn'\n    name: x\n    pattern: whole\n"
    ),
    "empty": "",
    "a list": "- a\n- b\n",
    "not YAML": "{a: [\n",
    "a mapping": "name: m\nrules:\n  - param: a\n    leaf: b\n",
    "prose": "shard everything over tp\n",
}


@mistake
def spec_said(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for what, text in _SPECS.items():
        options, beside = {"spec": Beside("spec.yaml")}, {"spec.yaml": text.encode()}
        yield _said(subject, f"spec is {what}", options, r"\bspec\b", beside=beside)
    for value in ("nowhere.yaml", "/", "/dev/null"):
        yield _said(subject, f"spec={value!r}", {"spec": value}, r"\bspec\b")


@mistake
def option_misspelt(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for options in (
        {"optimizer_groups": "module_order"},
        {"optimizer_groups": [["nowhere.weight"]]},
        {"optimizer_groups": "nowhere.json"},
        {"optimizer_groups": 3},
        {"dequantize": "yes"},
        {"dequantize": True},
    ):
        (name,) = options
        yield _said(subject, f"open({name}={options[name]!r})", options, name)


_MAPPINGS = (
    "hf-llama-to-tunix", "hf-gpt2-to-flax", "hf-qwen2-to-tunix", "hf-qwen3-to-maxtext",
    "hf-gemma-to-tunix", "hf-mixtral-to-maxtext", "hf-qwen3-moe-to-tunix",
    "megatron-gpt-to-reference", "deepspeed-gpt-to-reference",
    "hf-llama-to-tunx", "llama", "", "hf-llama-to-tunix.yaml", "/etc/passwd", "/",
)  # fmt: skip


def _mapped(name: str, checkpoint: ucp.Checkpoint, _: Path) -> Any:
    return checkpoint.map(name).restore()


@mistake
def mapping_of_another_model(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A mapping that is not for this family; those that are have a truth of their own elsewhere."""
    family = subject.name.split("/")[-1]
    for name in _MAPPINGS:
        own = re.match(r"hf-([\w-]+?)-to", name)
        fits = own and family.startswith(f"hf_{own[1].replace('-', '_')}")
        if not fits and name.split("-")[0] not in subject.name:
            yield Attempt(f"map({name!r})", same_folder(subject), act=partial(_mapped, name))


def _with_scheme(scheme: str, entry: str, root: Path) -> str:
    return f"{scheme}{root / entry}"


def _inside(name: str, root: Path) -> str:
    return str(root / name)


@mistake
def path_misspelt(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    entry = subject.entry

    def at(root: Path) -> str:
        return str(root / entry)

    plain: dict[str, Callable[[Path], str]] = {
        "with a slash at its end": lambda root: at(root) + "/",
        "with two slashes": lambda root: at(root).replace("/", "//", 2),
        "of the folder above": lambda root: str((root / entry).parent),
        "of a name that is not there": lambda root: at(root) + "x",
        "with a space at its end": lambda root: at(root) + " ",
        "in upper case": lambda root: at(root).upper(),
        "with a star": lambda root: at(root)[:-1] + "*",
        "in quotes": lambda root: f'"{at(root)}"',
        "with a variable": lambda root: "$HOME/" + entry,
        "that is empty": lambda root: "",
        "of the file system": lambda root: "/dev/null",
    }
    for what, opened in plain.items():
        yield Attempt(f"a path {what}", same_folder(subject), opened=opened)
    for scheme in (
        "s3://bucket", "gs://bucket", "hf://org/model", "https://host", "file://", "S3://bucket",
        "az://c",
    ):  # fmt: skip
        opened = partial(_with_scheme, scheme, entry)
        yield Attempt(f"a URL of {scheme}", same_folder(subject), opened=opened)


@mistake
def part_of_it_opened(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A folder or a rank's file inside of it."""
    for folder in some_folders(subject, "part"):
        # which is an item by itself
        inside = {name.removeprefix(f"{folder}/") for name in subject.folder}
        if folder != subject.entry and not inside & {"_METADATA", ".metadata"}:
            opened = partial(_inside, folder)
            yield Attempt(f"{folder}/ is opened", same_folder(subject), opened=opened)
    rank = re.compile(
        r"rank_?\d|(?<!random)_states|-of-\d|distcp|model_optim|distrib|\.metadata|index\.json|ucp\.json|_METADATA|latest"
    )
    for name, _data, _rng in each_file(subject, "part file"):
        if rank.search(name) and name != subject.entry:
            opened = partial(_inside, name)
            yield Attempt(f"{name} is opened", same_folder(subject), opened=opened)
