"""The valid checkpoints that mistakes are made with, and their siblings."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from cases import FAMILIES, Case, every
from folders import OTHER_RUN, STEP_LATER, Change, read_folder, sibling, write_folder
from helpers import mesh_of

FORMATS = (
    "universal", "orbax", "flax", "equinox", "deepspeed", "deepspeed-universal", "megatron-legacy",
    "megatron-dist", "megatron-fsdp", "dcp", "dcp-hf", "safetensors", "torch.save", "folders", "trainers",
    "dtensors", "gguf",
)  # fmt: skip
_CHANGES: dict[str, Change] = {"step": STEP_LATER, "run": OTHER_RUN}


@dataclass
class Subject:
    """A valid checkpoint: `folder` has its files, and `entry` of it is what is opened, with
    `options`.

    `siblings` are the same checkpoint of another step and of another run, under the same names.
    """

    name: str
    format: str
    folder: dict[str, bytes]
    entry: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    made: Callable[[str], dict[str, bytes]] | None = None

    @functools.cached_property
    def siblings(self) -> dict[str, dict[str, bytes]]:
        made = self.made or (lambda which: sibling(self.folder, _CHANGES[which]))
        found = {which: made(which) for which in _CHANGES}
        return {which: folder for which, folder in found.items() if folder != self.folder}

    def as_saved(self, which: str) -> dict[str, bytes]:
        """A sibling with the names that its own step gives to folders."""
        folder = self.siblings[which]
        if which != "step":
            return folder
        return {_next_step(n): _pointing(n, data) for n, data in folder.items()}


def _next_step(text: str) -> str:
    return text.replace("global_step5", "global_step6").replace("iter_0000003", "iter_0000004")


def _pointing(name: str, data: bytes) -> bytes:
    """What a file holds of its own step; `latest` and its like name a folder."""
    if name == "latest_checkpointed_iteration.txt":
        return b"4"
    points = name.startswith("latest") and not name.endswith(".pt")
    return _next_step(data.decode()).encode() if points else data


_QUANTIZED = ("ct_int4_asymmetric", "gptq_4", "bnb_nf4_double", "fp8_block_32")


def subjects(formats: tuple[str, ...] = FORMATS) -> list[Subject]:
    """Every valid checkpoint of these formats.

    Not those with remainders in place of masters (`pa*`): they have no second copy, while gaps in
    flat buffers hold what was in memory, so that what is invisible cannot be proved to be.
    """
    cases = every((*FAMILIES, "folders", "megatron_core"))
    cases += [Case(f"quantized/{name}") for name in _QUANTIZED]
    # what is opened only where nothing is compared proves nothing
    read = (x for x in cases if not x.refused and "on_conflict" not in x.options)
    found = [x for x in read if x.family != "megatron_core" or x.name[0] != "p"]
    made = _universal() if "universal" in formats else []
    return [*made, *(_recorded(case) for case in found if format_of(case) in formats)]


def _recorded(case: Case) -> Subject:
    """All files of a folder, beside which a file is opened by its name."""
    root = case.path if case.path.is_dir() else case.path.parent
    folder = {case.name: case.path.read_bytes()} if case.is_file else read_folder(root)
    entry = "" if case.path.is_dir() else case.path.name
    return Subject(str(case), format_of(case), folder, entry, case.options)


def format_of(case: Case) -> str:
    match case.family:
        case "jax":
            known = "flax", "equinox", "orbax"
        case "megatron":
            if case.name.startswith(("torch_dcp", "fsdp_dtensor")):
                return "megatron-fsdp"
            return "megatron-legacy" if case.name.startswith("legacy") else "megatron-dist"
        case "megatron_core":
            return "megatron-dist"
        case "torch":
            kinds = {"hf": "safetensors", "dcp_hf": "dcp-hf"}
            return "torch.save" if case.is_file else kinds.get(case.about["kind"], "dcp")
        case "quantized":
            return "safetensors"
        case family:
            return family.removesuffix("_writers").replace("_", "-")
    return next(name for name in known if name in case.name)


# What we write.


def run_state(which: str) -> dict[str, Any]:
    """The state of a training run in JAX, of the step and seed of a sibling, or of neither."""
    rng = np.random.default_rng(1 if which == "run" else 0)
    later = 1 if which == "step" else 0

    def array(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.Array:
        values = np.asarray(rng.standard_normal(shape), np.float32) * np.float32(1 + later / 64)
        return jax.device_put(values.astype(dtype), NamedSharding(mesh_of(4, 2), P(*spec)))

    return {
        "params": {
            "embed": array((32, 16), jnp.float32, "data", "model"),
            "layers": [
                {"kernel": array((16, 24), jnp.bfloat16, "data", "model")} for _ in range(2)
            ],
        },
        "opt_state": [{"mu": array((32, 16), jnp.float32, "data")}, {"count": np.int32(7 + later)}],
        "step": 7 + later,
        "key": jax.random.key(7 + later),
        "run": "a name",
    }


def _universal() -> list[Subject]:
    def by_manager(which: str, path: Path) -> None:
        with ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler()) as manager:
            manager.save(7, args=ucp.args.Save(run_state(which)))
            manager.wait_until_finished()

    def packed(which: str, path: Path) -> None:
        rng = np.random.default_rng(len(which))
        ucp.Checkpoint.of({f"a{i}": rng.standard_normal(i + 1) for i in range(40)}).save(path)

    source = _recorded(Case("deepspeed/tp2_dp1_z1_bf16"))

    def converted(which: str, path: Path) -> None:
        files = source.folder if which == "base" else source.siblings[which]
        ucp.open(write_folder(files, path.with_name("source"))).save(path)

    return [
        _saved("manager", by_manager, "7"),
        _saved("packed", packed),
        _saved("converted", converted),
    ]


def _saved(name: str, save: Callable[[str, Path], None], entry: str = "") -> Subject:
    """What a save writes, of each sibling too."""

    @functools.cache
    def made(which: str) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Orbax's, about its own ways
            save(which, Path(work) / "c")
            return read_folder(Path(work) / "c")

    return Subject(f"universal/{name}", "universal", made("base"), entry, made=made)
