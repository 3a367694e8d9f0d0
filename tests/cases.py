"""Checkpoints in tests/data with the state of the process that wrote them.

A case is a folder `tests/data/<family>/<name>`, or one of the files of torch.save in such a folder:

    ckpt/       what the writer saved
    truth.npz   the live state by label, `param/w`, from before or after the save; types that numpy
                lacks as unsigned bits. What is under `io/` is no leaf: tokens, losses, and arrays
                that the writer leaves out of its files on purpose.
    case.json   `about`, `writer` (versions), `options` of `jax_ucp.open` with which all of the
                truth is read, `dtypes` of labels by name where the npz has bits;
                `at`, where what is opened is not `ckpt`; `widened`, where the truth has in float32
                what the run kept in fewer bits; `numbers`: `by value`, where numbers of Python are
                arrays without axes in the truth; `unproved`, states of which no truth was kept;
                `noted`, what each note matches; `refused`, the words by which is refused what cannot
                be read right (of several files by name), `remedy`, the folder to open instead.
                A generator may add what its tests need.

A test of a case is two lines:

    case = Case("deepspeed/z1_bf16_dp2")
    assert case.wrong(case.open()) == []

What holds for all of them is in `test_every_case.py`.

`case.copied(tmp_path / "c")` is a copy to damage, `case.open(path)` opens it with the same options.
`tests/generators` has the scripts that write cases; `python tests/cases.py FOLDER...` compares
those in a folder with their truths.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import faults_of, mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.sharding.jax_versions import enable_x64

DATA = Path(__file__).parent / "data"
RULES = [(r"(weight|w[123]|kernel|embedding)$|wte", P("data", "model"))]
OF_TESTS = ("truth.npz", "case.json")  # beside a checkpoint that is the case's folder itself

# Those with a line in docs/tested.md, and all that are read.
FAMILIES = ("deepspeed", "deepspeed_universal", "deepspeed_writers", "dtensors", "gguf", "jax")
FAMILIES += ("megatron", "torch", "trainers")
READ = (
    *FAMILIES, "folders", "megatron_core", "megatron_deepspeed", "megatron_logits",
    "megatron_next", "packed_experts", "pairings", "quantized", "unknown",
)  # fmt: skip

# A Megatron case whose writer, the released library, moved masters and moments.
CORRUPTED = "dist_pp2_dp2_distopt_buckets_fully_reshardable_fp32"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A case by its label, `torch/hf_llama` or `torch/torchsave/tied.pt`, or its folder's path."""

    label: str

    @property
    def is_file(self) -> bool:
        """Whether it is one of several files of torch.save."""
        return (DATA / self.label).is_file()

    @property
    def folder(self) -> Path:
        return (DATA / self.label).parent if self.is_file else DATA / self.label

    @property
    def family(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        return (DATA / self.label).name

    def __str__(self) -> str:
        return self.label

    def file(self, name: str) -> Path:
        """`truth.npz` or `case.json`; what DeepSpeed made universal has those of its source."""
        family = self.family.removesuffix("_universal")
        return self.folder.parents[1] / family / self.folder.name / name

    @property
    def about(self) -> dict[str, Any]:
        """What `case.json` says."""
        return _json_of(self.file("case.json"))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `jax_ucp.open`, with which the checkpoint is all of the truth."""
        return dict(self.about["options"])

    @property
    def path(self) -> Path:
        """What is opened: a folder or a file."""
        return DATA / self.label if self.is_file else self.folder / self.about.get("at", "ckpt")

    @property
    def refused(self) -> str:
        """What the refusal matches of a case that is not read."""
        said = self.about.get("refused", "")
        return said if isinstance(said, str) else said.get(self.name, "")

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
        found = _stored_in(self.file("truth.npz"), self.file("case.json"))
        if not self.is_file:
            return found
        own = {key: path for key, (file, path) in self.about["paths"].items() if file == self.name}
        return {_label_of(path, self.name): found[key] for key, path in own.items()}

    def equal(self, got: Any, want: np.ndarray, label: str) -> bool:
        """The same bits; steps, which files have in several types, are the same numbers."""
        if isinstance(got, jax.Array) and jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got = jax.random.key_data(got)
        got, about = np.asarray(got), self.about
        if label.startswith("step/") or (about.get("numbers") == "by value" and not want.shape):
            return float(got) == float(want)
        return same_bits(got.astype(want.dtype) if about.get("widened") else got, want)

    def differing(self, found: Mapping[str, Any]) -> list[str]:
        """What of the truth is missing or differs among arrays by label."""
        want = self.truth()
        wrong = [f"{label} is missing" for label in want if label not in found]
        for label in want.keys() & found.keys():
            if not self.equal(found[label], want[label], label):
                wrong.append(f"{label} differs")
        return wrong if want else ["the truth is empty"]

    def wrong(self, checkpoint: ucp.Checkpoint) -> list[str]:
        """What of the truth is missing or differs as it is read, and what else is there that is not
        kept apart as `other`.
        """
        return self.unlike(arrays_of(checkpoint))

    def unlike(self, found: Mapping[str, Any]) -> list[str]:
        """The same of arrays that were read, by label."""
        apart = ("other", *self.about.get("unproved", ()))
        more = [x for x in found.keys() - self.truth().keys() if x.partition("/")[0] not in apart]
        return [f"{x} is not in the truth" for x in sorted(more)] + self.differing(found)

    def copied(self, target: Path) -> Path:
        """A copy of what is opened, as `target`."""
        return copied(self.path, target)


def names_of(family: str) -> list[str]:
    """The cases of a family by name."""
    return sorted(path.name for path in (DATA / family).iterdir())


def every(families: Iterable[str] = FAMILIES) -> list[Case]:
    """The cases of these families whose state is known; of `gpt_neox` the logits alone are."""
    named = (Case(f"{family}/{name}") for family in families for name in names_of(family))
    known = (one for one in named if one.file("truth.npz").exists())
    found = (_files_of(one) if "paths" in one.about else [one] for one in known)
    return [one for ones in found for one in ones if one.name != "gpt_neox"]


def _files_of(case: Case) -> list[Case]:
    return [Case(f"{case}/{path.name}") for path in sorted(case.folder.glob("*.pt"))]


def _label_of(path: Sequence[str | int], file: str) -> str:
    """The label of a tensor in a file of torch.save: a weight in a flat dict, or in `model`."""
    of_model = path[:1] == ["model"]
    flat = len(path) == 1 and isinstance(path[0], str) and file != "trainer.pt"
    steps = path[1:] if of_model else path or ["tensor"]
    return f"{'param' if of_model or flat else 'other'}/{'.'.join(map(str, steps))}"


@functools.lru_cache(maxsize=4)
def _stored_in(truth: Path, about: Path) -> dict[str, np.ndarray]:
    """Arrays by name, which every test of a case shares: nobody may write to them."""
    dtypes = _json_of(about).get("dtypes", {})
    with np.load(truth) as stored:
        found = dict(stored)
    for key in found.keys() & dtypes.keys():
        dtype = np.dtype(getattr(ml_dtypes, dtypes[key], dtypes[key]))
        if found[key].dtype != dtype:
            found[key] = found[key].view(dtype)
    for array in found.values():
        array.flags.writeable = False
    return found


@functools.cache
def _json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


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
    found = {}
    for name, item in items:
        found |= flat(item, f"{label}/{name}".lstrip("/"))
    return found


def arrays_of(checkpoint: ucp.Checkpoint) -> dict[str, np.ndarray]:
    """Its arrays by label."""
    return {leaf.label: checkpoint.read(leaf.label) for leaf in checkpoint.leaves if leaf.has_array}


def bits_of(checkpoint: ucp.Checkpoint) -> dict[str, bytes]:
    return {label: array.tobytes() for label, array in arrays_of(checkpoint).items()}


def facts(checkpoint: ucp.Checkpoint) -> tuple[Any, ...]:
    """What is known of a checkpoint before any array of it is read."""
    leaves = [(leaf.label, leaf.kind, leaf.shape, leaf.dtype) for leaf in checkpoint.leaves]
    said = checkpoint.path, checkpoint.extras, list(checkpoint.notes)
    return leaves, list(checkpoint.inventory), said


def assert_same(found: Arrays, want: Arrays) -> None:
    """The same names, and bit for bit the same arrays."""
    assert found.keys() == want.keys()
    assert [name for name in want if not same_bits(found[name], want[name])] == []


def assert_equal_however_read(checkpoint: ucp.Checkpoint, want: Arrays, folder: Path) -> None:
    """Its leaves are just those wanted: as read, as restored on a mesh, converted and restored."""
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
    assert faults_of(checkpoint) == faults_of(converted) == []


def assert_accounted_for(checkpoint: ucp.Checkpoint) -> None:
    """Every stored thing is in the inventory once, with a reason."""
    assert len({item.where for item in checkpoint.inventory}) == len(checkpoint.inventory)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.inventory)
    json.dumps(checkpoint.extras)


def _differing(case: Case) -> list[str]:
    """What of a case is not as it should be, also where that is a refusal."""
    try:
        wrong = case.wrong(case.open())
    except ucp.errors.UCPError as error:
        as_told = case.refused and re.search(case.refused, str(error))
        return [] if as_told else [f"refused: {error}"]
    return [f"it is read, and should be refused: {case.refused}"] if case.refused else wrong


def main(folders: list[str]) -> int:
    """Print a line a case and how many are right; the exit code is 1 where one is not."""
    count: Counter[bool] = Counter()
    made = sorted(file.parent for folder in folders for file in Path(folder).glob("*/case.json"))
    for one in (Case(str(folder.resolve())) for folder in made):
        wrong = _differing(one)
        count[not wrong] += 1
        print(f"{one.name}: {'; '.join(wrong[:3]) or 'as it should be'}")
    print(f"{count[True]} as they should be, {count[False]} not")
    return 1 if count[False] or not made else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
