"""What people say of a valid checkpoint by mistake: options, targets, meshes, mappings, paths.

The table that it adds to is that of `temptation_mistakes`.

What is said has an effect, or is refused by name, or a note, a warning or the log tells that it had
none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.sharding.jax_versions import enable_x64
from temptation_mistakes import Attempt, Beside, each_file, mistake, same_folder, some_folders
from temptation_subjects import Subject, mesh


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
    for value in ("masters", "Master", "", True, 1, "copies"):
        yield _said(subject, f"on_conflict={value!r}", {"on_conflict": value}, "on_conflict")
    yield _said(subject, "on_conflict='master' where nothing differs", {"on_conflict": "master"})


@mistake
def weights_only_said(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    for value in ("no", "false", "False", 2):
        yield _said(subject, f"weights_only={value!r}", {"weights_only": value}, "weights_only")


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
    for name in (
        "size", "weight_only", "beleive", "specs", "vocab", "mesh", "optimizer_group", "dequantise",
    ):  # fmt: skip
        yield _said(subject, f"open({name}=...)", {name: 1})


@mistake
def restore_misspelt(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    def act(**said: Any) -> Callable[[ucp.Checkpoint, Path], Any]:
        def restore(checkpoint: ucp.Checkpoint, _: Path) -> Any:
            with enable_x64(True):
                return checkpoint.restore(**said)

        return restore

    P1, P9 = P("data"), P(*[None] * 9, "data")
    ways: dict[str, tuple[Callable[[ucp.Checkpoint, Path], Any], str]] = {
        "rules without a mesh": (act(rules=[("weight$", P1)]), ""),
        "a rule that no leaf has": (act(mesh=mesh(), rules=[("kernal_$", P1)]), "kernal"),
        "a rule for an axis that the mesh has not": (
            act(mesh=mesh(), rules=[("e", P("modle"))]),
            "modle",
        ),
        "a rule with too many axes": (act(mesh=mesh(), rules=[("e", P9)]), "axes|dim|rule"),
        "a rule that is not an expression": (act(mesh=mesh(), rules=[("(", P1)]), ""),
        "rules as a dict": (act(mesh=mesh(), rules={"weight$": P1}), ""),
        "one rule in place of a list": (act(mesh=mesh(), rules=("weight$", P1)), ""),
        "a rule with a string for a spec": (act(mesh=mesh(), rules=[("e", "data")]), "rule"),
        "a mesh of names and sizes": (act(mesh={"data": 4}), ""),
        "the name of a mesh": (act(mesh="data=4"), ""),
        "cast to no dtype": (act(cast="bfloat61"), ""),
        "cast to integers": (act(cast="int32"), ""),
        "cast without a target": (act(cast=True), ""),
        "no budget": (act(budget_bytes=0), ""),
        "a negative budget": (act(budget_bytes=-1), ""),
        "a budget in words": (act(budget_bytes="1GiB"), ""),
        "partial without a target": (act(partial="params"), "partial"),
        "an option that is not there": (act(meshes=mesh()), ""),
        "verify misspelt": (act(verify="ful"), ""),
        "verify as a number": (act(verify=2), ""),
        "narrow_integers misspelt": (act(narrow_integer=True), ""),
    }
    for what, (way, noticed) in ways.items():
        yield Attempt(f"restore with {what}", same_folder(subject), act=way, noticed=noticed)


@mistake
def target_of_another_model(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Targets that are not the tree of the checkpoint, in one leaf or in all."""

    def one(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return partial(_with_one, change, subject.name)

    def to(change: Callable[[Any], Any], **more: Any) -> Callable[[ucp.Checkpoint, Path], Any]:
        return lambda x, _: x.restore(change(x.abstract()), mesh=mesh(), **more)

    floats = np.float16, np.float32
    ways = {
        "a longer leaf": to(one(lambda x: Abstract((x.shape[0] + 1, *x.shape[1:]), x.dtype))),
        "a shorter leaf": to(one(lambda x: Abstract((x.shape[0] // 2, *x.shape[1:]), x.dtype))),
        "a leaf of another rank": to(one(lambda x: Abstract((int(np.prod(x.shape)), 1), x.dtype))),
        "an integer leaf": to(one(lambda x: Abstract(x.shape, np.int16 if x.dtype == np.int8 else np.int8))),
        "transposed leaves of one axis more": to(partial(jax.tree.map, _turned)),
        "a leaf of another float": to(one(lambda x: Abstract(x.shape, floats[x.dtype == floats[0]]))),
        "a number for an array": to(one(lambda x: 3)),
        "a leaf renamed": to(partial(_without_first, {"x_misspelt"})),
        "a leaf too few": to(partial(_without_first, set())),
        "all of it under a key": to(lambda tree: {"model": tree}),
        "a leaf renamed, in part": to(partial(_without_first, {"x_misspelt"}), partial=True),
    }  # fmt: skip
    for what, act in ways.items():
        yield Attempt(f"the target has {what}", same_folder(subject), act=act)


Abstract = jax.ShapeDtypeStruct


def _with_one(change: Callable[[Any], Any], name: str, tree: Any) -> Any:
    """The tree with one array changed, of those that have axes if there are any."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}
    arrays = [i for i, shape in shapes.items() if shape]
    chosen = Random(f"{name} {len(shapes)}").choice(arrays or [0])
    leaves[chosen] = change(leaves[chosen])
    return jax.tree_util.tree_unflatten(structure, leaves)


def _turned(leaf: Any) -> Any:
    if len(getattr(leaf, "shape", ())) < 2:
        return leaf
    *outer, rows, columns = leaf.shape
    return Abstract((*outer, columns, rows, 1), leaf.dtype)


def _without_first(renamed: Collection[str], tree: Any) -> Any:
    """The tree without its first leaf, or with that under another key."""
    if not isinstance(tree, dict) or not tree:
        return tree
    key = min(tree, key=str)
    inner = _without_first(renamed, tree[key])
    if inner is not tree[key]:
        return {**tree, key: inner}
    return {k: v for k, v in tree.items() if k != key} | dict.fromkeys(renamed, tree[key])


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


@mistake
def saved_to_a_wrong_place(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Where a conversion must not go; nothing but what it says is left behind."""

    def to(target: Callable[[Path], str], **said: Any) -> Callable[[ucp.Checkpoint, Path], Any]:
        return lambda checkpoint, work: checkpoint.save(target(work), **said).restore()

    folder = "" if subject.entry in subject.folder else subject.entry
    ways = {
        "a bucket": to(lambda work: "gs://bucket/x"),
        "a URL": to(lambda work: "s3://bucket/x"),
        "a URL of files": to(lambda work: f"file://{work}/out"),
        "the source": to(lambda work: str(work / "source" / subject.entry)),
        "inside the source": to(lambda work: str(work / "source" / folder / "converted")),
        "a file that is there": to(_a_file),
        "a folder that is there": to(_a_folder),
        "below a file": to(lambda work: _a_file(work) + "/x"),
        "an empty path": to(lambda work: ""),
        "a mesh without devices": to(_out, mesh={"data": 0}),
        "more hosts than devices": to(_out, mesh={"data": 2}, hosts=3),
        "no budget": to(_out, budget_bytes=0),
        "rules without a mesh": to(_out, rules=[("e", P("data"))]),
        "a rule that no leaf has": to(_out, mesh={"data": 2}, rules=[("kernal_", P("data"))]),
    }
    for what, act in ways.items():
        noticed = "kernal_" if "no leaf" in what else ""
        yield Attempt(f"save with {what}", same_folder(subject), act=act, noticed=noticed)


def _out(work: Path) -> str:
    return str(work / "out")


def _a_file(work: Path) -> str:
    (work / "a file").write_text("of the user's")
    return str(work / "a file")


def _a_folder(work: Path) -> str:
    (work / "a folder").mkdir(exist_ok=True)
    (work / "a folder" / "notes.txt").write_text("of the user's")
    return str(work / "a folder")
