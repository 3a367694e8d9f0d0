"""Every checkpoint in tests/data that has a truth, whichever library wrote it, read in every way
and compared.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import deepspeed_cases
import generated_cases
import gguf_cases
import jax_cases
import jax_ucp as ucp
import megatron_cases
import torch_cases
import trainer_cases
from helpers import restored_on
from jax_ucp.errors import UCPError
from jax_ucp.formats.torch_save.file import TorchFile
from jax_ucp.layout.box import Box
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.sources.consolidated import same_bits

DATA = Path(__file__).parent / "data"
RULES = [(r"(weight|w[123])$", P("data", "model"))]


_FAMILIES = (
    "deepspeed",
    "deepspeed_universal",
    "deepspeed_writers",
    "dtensors",
    "gguf",
    "jax",
    "megatron",
)
_FAMILIES += ("torch", "trainers")


@dataclass(frozen=True)
class Case:
    """A folder of tests/data; `family` is the folder above it."""

    family: str
    name: str

    @property
    def path(self) -> Path:
        if self.family == "gguf":
            return gguf_cases.file_of(self.name)
        folder = DATA / self.family / self.name
        return folder / "ckpt" if (folder / "ckpt").exists() else folder

    @property
    def about(self) -> Mapping:
        family = "deepspeed" if self.family == "deepspeed_universal" else self.family
        return json.loads((DATA / family / self.name / "case.json").read_text())

    @property
    def is_generated(self) -> bool:
        return self.family == "deepspeed_writers"

    def truth(self) -> dict[str, np.ndarray]:
        if self.is_generated:
            return generated_cases.truth(DATA / self.family / self.name)
        if self.family == "gguf":
            return gguf_cases.truth(self.name)
        if self.family == "torch":
            return torch_cases.truth(self.name)
        if self.family == "jax":
            return jax_cases.truth(self.name)
        if self.family == "megatron_core":
            return megatron_cases.core_truth(self.name)
        if self.family == "trainers":
            return trainer_cases.truth(self.name)
        if self.family == "dtensors":
            with np.load(DATA / self.family / self.name / "truth.npz") as arrays:
                return {key: arrays[key] for key in arrays if not key.startswith("io/")}
        return (megatron_cases if self.family == "megatron" else deepspeed_cases).truth(self.name)

    def equal(self, got: np.ndarray, want: np.ndarray, label: str) -> bool:
        """The same bits; truths hold steps as integers, and DeepSpeed's are widened to fp32."""
        if isinstance(got, jax.Array) and jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got = jax.random.key_data(got)
        got = np.asarray(got)
        if self.is_generated:
            return generated_cases.equal(got, want)
        if label.startswith("step/") and self.family != "jax":
            return float(got) == float(want)
        return same_bits(
            got.astype(np.float32) if self.family.startswith("deepspeed") else got, want
        )

    def open(self, at: str | Path | None = None, **options) -> ucp.Checkpoint:
        path = self.path if at is None else at
        if not options.get("weights_only"):
            options = deepspeed_cases.word(self.path) | options
        if self.is_generated:
            options = {**self.about["options"], **options}
        elif self.family == "megatron":
            options["sizes"] = {"vocab": self.about["model"]["vocab_size"]}
        if self.family == "gguf":
            options["dequantize"] = "float32"
        if self.family == "jax":
            options |= self.about["options"]
        if self.family in ("trainers", "dtensors") and not options.get("weights_only"):
            options = self.about["options"] | options
        return ucp.open(path, **options)


def every() -> list[Case]:
    """The cases whose state is known; of `torchsave_exotic` nothing is, of `gpt_neox` the logits
    alone.
    """
    cases = [
        Case(folder.parent.name, folder.name)
        for folder in sorted(DATA.glob("*/*"))
        if folder.is_dir()
    ]
    cases = [case for case in cases if case.family in _FAMILIES]
    return [
        case
        for case in cases
        if case.family != "torch" or any("io::" not in key for key in case.about["dtypes"])
    ]


@dataclass(frozen=True)
class Outcome:
    """What of a case equals its truth; `refusal` is the error of one that is not read."""

    format: str
    arrays: int = 0
    equal: Mapping[str, int] | None = None
    accounted: bool = False
    refusal: str = ""


WAYS = ("read", "restored", "converted")


def outcome(case: Case, mesh: Mesh, folder: Path) -> Outcome:
    """Open the case, read it, restore it on the mesh, convert it to `folder` and restore that
    too.
    """
    if case.about.get("kind", "").startswith("torch_save"):
        return _files(case)
    found = {}
    try:
        checkpoint, want = case.open(), case.truth()
        converted = checkpoint.save(folder)
    except UCPError as error:
        return Outcome(case.family, refusal=str(error))
    with enable_x64(True):
        found["restored"] = _flat(restored_on(mesh, checkpoint, RULES))
        found["converted"] = _flat(restored_on(mesh, converted, RULES))
    found["read"] = {
        leaf.label: checkpoint.read(leaf.label) for leaf in checkpoint.leaves if leaf.has_array
    }
    # What a trainer keeps beside the model is in no truth: torchtitan's own step.
    assert all(label in want or label.startswith("other/") for label in found["read"]), set(
        found["read"]
    ) - set(want)
    same = {
        way: sum(
            label in found[way] and case.equal(found[way][label], want[label], label)
            for label in want
        )
        for way in WAYS
    }
    places = [item.where for item in checkpoint.inventory]
    told = len(set(places)) == len(places) and all(
        item.reason != "not understood" for item in checkpoint.inventory
    )
    return Outcome(checkpoint.format, len(want), same, told)


def _flat(tree: Any, label: str = "") -> dict[str, np.ndarray]:
    """The arrays of nested dicts and lists, by label."""
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return {
            at: array
            for name, item in items
            for at, array in _flat(item, f"{label}/{name}".lstrip("/")).items()
        }
    return {} if isinstance(tree, str | None) else {label: tree}


def _files(case: Case) -> Outcome:
    """Files of torch.save, each by itself: `truth` has their tensors as `file:key`. A refused
    file has none.
    """
    tensors, refused = {}, ""
    for path in sorted(case.path.glob("*.pt")):
        try:
            ucp.open(path)  # which refuses tensors that only an unknown class can tell apart
            file = TorchFile(path)
        except UCPError as error:
            refused = f"{path.name}: {str(error).partition(': ')[2]}"
            continue
        tensors |= {
            f"{path.name}:{key}": file.read(key, Box.whole(i.shape))
            for key, i in file.arrays().items()
        }
    same = sum(
        same_bits(array, want)
        for label, want in case.truth().items()
        if (array := tensors.get(label)) is not None
    )
    return Outcome("torch.save files", len(tensors), {"read": same}, True, refused)


def mesh_4_2() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
