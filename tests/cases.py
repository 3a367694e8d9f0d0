"""Checkpoints in tests/data with the state of the process that wrote them.

A case is a folder `tests/data/<family>/<name>`:

    ckpt/       what the writer saved
    truth.npz   the live state by label, `param/w`, from before or after the save; types that numpy
                lacks as unsigned bits. What is under `io/` is no leaf: tokens, losses, and arrays
                that the writer leaves out of its files on purpose.
    case.json   `about`, `writer` (versions), `options` of `jax_ucp.open` with which all of the
                truth is read, `dtypes` of labels by name where the npz has bits;
                `at`, where what is opened is not `ckpt`; `widened`, where the truth has in float32
                what the run kept in fewer bits; `numbers`: `by value`, where numbers of Python are
                arrays without axes in the truth. A generator may add what its tests need.

A test of a case is two lines:

    case = Case("deepspeed/z1_bf16_dp2")
    assert case.wrong(case.open()) == []

`case.copied(tmp_path / "c")` is a copy to damage, `case.open(path)` opens it with the same options.
`tests/generators` has the scripts that write cases; `python tests/cases.py FOLDER...` compares
those in a folder with their truths.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.sharding.jax_versions import enable_x64

DATA = Path(__file__).parent / "data"
RULES = [(r"(weight|w[123])$|wte", P("data", "model"))]
OF_TESTS = ("truth.npz", "case.json")  # beside a checkpoint that is the case's folder itself

# Those of which all is the same law: read, restored, converted, on one device or many.
FAMILIES = ("deepspeed", "deepspeed_universal", "deepspeed_writers", "dtensors", "gguf", "jax")
FAMILIES += ("megatron", "torch", "trainers")

# A Megatron case whose writer, the released library, moved masters and moments.
CORRUPTED = "dist_pp2_dp2_distopt_buckets_fully_reshardable_fp32"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A case by its label, `torch/hf_llama`, or by the whole path of its folder."""

    label: str

    @property
    def folder(self) -> Path:
        return DATA / self.label

    @property
    def family(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        return self.folder.name

    def __str__(self) -> str:
        return self.label

    def file(self, name: str) -> Path:
        """`truth.npz` or `case.json`; what DeepSpeed made universal has those of its source."""
        family = self.family.removesuffix("_universal")
        return self.folder.parents[1] / family / self.name / name

    @property
    def about(self) -> dict[str, Any]:
        """What `case.json` says."""
        return json.loads(self.file("case.json").read_text())

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `jax_ucp.open`, with which the checkpoint is all of the truth."""
        return self.about["options"]

    @property
    def path(self) -> Path:
        """What is opened: a folder or a file."""
        return self.folder / self.about.get("at", "ckpt")

    def open(self, at: str | Path | None = None, **options: Any) -> ucp.Checkpoint:
        """The checkpoint with its options; weights alone need no word on the optimizer."""
        said = self.options
        if options.get("weights_only"):
            said.pop("optimizer_groups", None)
        return ucp.open(self.path if at is None else at, **said | options)

    def truth(self) -> dict[str, np.ndarray]:
        """The live state by label."""
        return {key: array for key, array in self._arrays().items() if not key.startswith("io/")}

    def measured(self) -> dict[str, np.ndarray]:
        """What is in no leaf, by name: tokens, losses, logits."""
        found = self._arrays().items()
        return {key.removeprefix("io/"): array for key, array in found if key.startswith("io/")}

    def _arrays(self) -> dict[str, np.ndarray]:
        dtypes = self.about.get("dtypes", {})
        with np.load(self.file("truth.npz")) as stored:
            found = dict(stored)
        for key in found.keys() & dtypes.keys():
            dtype = np.dtype(getattr(ml_dtypes, dtypes[key], dtypes[key]))
            if found[key].dtype != dtype:
                found[key] = found[key].view(dtype)
        return found

    def equal(self, got: Any, want: np.ndarray, label: str) -> bool:
        """The same bits; steps, which files have in several types, are the same numbers."""
        if isinstance(got, jax.Array) and jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got = jax.random.key_data(got)
        got, about = np.asarray(got), self.about
        if label.startswith("step/") or (about.get("numbers") == "by value" and not want.shape):
            return float(got) == float(want)
        return same_bits(got.astype(want.dtype) if about.get("widened") else got, want)

    def wrong(self, checkpoint: ucp.Checkpoint) -> list[str]:
        """What of the truth is missing or differs, and what else is under its states."""
        want, leaves = self.truth(), {x.label for x in checkpoint.leaves if x.has_array}
        states = {label.partition("/")[0] for label in want}
        found = [x for x in leaves - want.keys() if x.partition("/")[0] in states]
        wrong = [f"{label} is not in the truth" for label in sorted(found)]
        wrong += [f"{label} is missing" for label in want if label not in leaves]
        for label in want.keys() & leaves:
            if not self.equal(checkpoint.read(label), want[label], label):
                wrong.append(f"{label} differs")
        return wrong if want else ["the truth is empty"]

    def copied(self, target: Path) -> Path:
        """A copy of what is opened, as `target`."""
        return copied(self.path, target)


def names_of(family: str) -> list[str]:
    """The cases of a family by name."""
    return sorted(path.name for path in (DATA / family).iterdir())


def every() -> list[Case]:
    """The cases of these families whose state is known; of `gpt_neox` the logits alone are."""
    found = [Case(f"{family}/{name}") for family in FAMILIES for name in names_of(family)]
    return [one for one in found if one.name != "gpt_neox"]


def copied(source: Path, target: Path) -> Path:
    """A copy of a checkpoint, without what tests keep beside it."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(source, target))
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(*OF_TESTS)))


def swap(folder: Path, a: str, b: str) -> None:
    """Exchange two files or folders."""
    (folder / a).rename(folder / "aside")
    (folder / b).rename(folder / a)
    (folder / "aside").rename(folder / b)


def flat(tree: Any, label: str = "") -> dict[str, Any]:
    """The arrays of nested dicts and lists, by label; without texts and None."""
    if not isinstance(tree, Mapping | list | tuple):
        return {} if isinstance(tree, str | None) else {label: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {
        at: array
        for name, item in items
        for at, array in flat(item, f"{label}/{name}".lstrip("/")).items()
    }


def assert_equal_however_read(checkpoint: ucp.Checkpoint, want: Arrays, folder: Path) -> None:
    """Its leaves are just those wanted, bit for bit: as read, as restored on a mesh, and as
    converted and restored.
    """
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    converted, mesh = checkpoint.save(folder / "converted"), mesh_of(4, 2)
    with enable_x64(True):
        straight = flat(restored_on(mesh, checkpoint, RULES))
        kept = flat(restored_on(mesh, converted, RULES))
    for label, array in want.items():
        assert same_bits(checkpoint.read(label), array), label
        assert same_bits(np.asarray(straight[label]), array), label
        assert same_bits(np.asarray(kept[label]), array), label
    assert converted.extras == checkpoint.extras
    for one in (checkpoint, converted):
        assert [fault for _, fault in one.verify() if fault] == []


def assert_accounted_for(checkpoint: ucp.Checkpoint) -> None:
    """Every stored thing is in the inventory once, with a reason."""
    assert len({item.where for item in checkpoint.inventory}) == len(checkpoint.inventory)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.inventory)
    json.dumps(checkpoint.extras)


def main(folders: list[str]) -> int:
    """Print a line a case and how many are right; the exit code is 1 where one is not."""
    count: Counter[bool] = Counter()
    made = sorted(file.parent for folder in folders for file in Path(folder).glob("*/case.json"))
    for one in (Case(str(folder.resolve())) for folder in made):
        try:
            wrong = one.wrong(one.open())
        except ucp.errors.UCPError as error:
            wrong = [f"refused: {error}"]
        count[not wrong] += 1
        print(f"{one.name}: {'; '.join(wrong[:3]) or 'equal'}")
    print(f"{count[True]} equal, {count[False]} not")
    return 1 if count[False] or not made else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
