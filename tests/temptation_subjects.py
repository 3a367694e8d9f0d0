"""The valid checkpoints that mistakes are made with, with their truth and their siblings."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
import torch_writer
from cases import DATA, Case, every, names_of
from folders import OTHER_RUN, STEP_LATER, Change, read_folder, sibling, write_folder
from helpers import mesh_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.formats.safetensors.reader import SafetensorsFile
from jax_ucp.layout.box import Box

FORMATS = (
    "universal", "orbax-v0", "orbax-v1", "deepspeed", "deepspeed-universal", "megatron-legacy",
)  # fmt: skip
FORMATS += ("flax", "megatron-dist", "megatron-fsdp", "dcp", "dcp-hf", "safetensors", "torch.save")
FORMATS += ("trainers", "dtensors", "gguf")

# Of each folder the files that the test data keep beside the checkpoint.
_OURS = {"truth.npz", "case.json", "plain.pt"}


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
    truth: Mapping[str, np.ndarray] | None = None
    equal: Callable[[np.ndarray, np.ndarray, str], bool] | None = None
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


_CHANGES: dict[str, Change] = {"step": STEP_LATER, "run": OTHER_RUN}


def subjects(formats: tuple[str, ...] = FORMATS) -> list[Subject]:
    """Every valid checkpoint of these formats.

    Not those with remainders in place of masters (`pa*`): they have no second copy, while gaps in
    flat buffers hold what was in memory, so that what is invisible cannot be proved to be.
    """
    cases = [
        case
        for case in every()
        if not case.about.get("kind", "").startswith("torch_save")
        # what is opened only where nothing is compared proves nothing
        and "on_conflict" not in case.options
    ]
    cases += [Case(f"megatron_core/{n}") for n in names_of("megatron_core") if n[0] != "p"]
    found = [_recorded(case) for case in cases if _format(case) in formats]
    makers = {
        "universal": _universal,
        "orbax-v0": _orbax_v0,
        "orbax-v1": _orbax_v1,
        "flax": _flax,
        "torch.save": _torch_saved,
        "safetensors": lambda: _quantized() + _adapters(),
    }
    for format, make in makers.items():
        found += make() if format in formats else []
    return found


def _recorded(case: Case) -> Subject:
    folder = {}
    if case.path.is_dir():
        found = read_folder(case.path)
        folder = {name: data for name, data in found.items() if Path(name).name not in _OURS}
    entry = ""
    if case.family == "gguf":
        entry, folder = case.path.name, read_folder(case.path.parent)
    elif case.path.is_file():
        entry, folder = case.path.name, {case.path.name: case.path.read_bytes()}
    truth = case.truth()
    return Subject(str(case), _format(case), folder, entry, case.options, truth, case.equal)


def _format(case: Case) -> str:
    if case.family == "megatron_core":
        return "megatron-dist"
    if case.family == "megatron":
        kinds = {"legacy": "megatron-legacy", "torch_dcp": "megatron-fsdp"}
        kinds["fsdp_dtensor"] = "megatron-fsdp"
        known = [kind for name, kind in kinds.items() if case.name.startswith(name)]
        return known[0] if known else "megatron-dist"
    if case.family == "torch":
        return {"hf": "safetensors", "dcp_hf": "dcp-hf"}.get(case.about["kind"], "dcp")
    return case.family.removesuffix("_writers").replace("_", "-")


# What Orbax and we write.


def mesh() -> Mesh:
    return mesh_of(4, 2)


def run_state(which: str, strings: bool = True, keys: bool = False) -> dict[str, Any]:
    """The state of a training run in JAX, of the step and seed of a sibling, or of neither."""
    rng = np.random.default_rng({"base": 0, "step": 0, "run": 1}[which])
    later = 1 if which == "step" else 0

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.Array:
        values = np.asarray(rng.standard_normal(shape), np.float32) * np.float32(1 + later / 64)
        return jax.device_put(values.astype(dtype), NamedSharding(mesh(), spec))

    params = {
        "embed": array((32, 16), jnp.float32, P("data", "model")),
        "layers": [{"kernel": array((16, 24), jnp.bfloat16, P("data", "model"))} for _ in range(2)],
        "scale": array((16,), jnp.float32, P()),
    }
    moments = {"mu": array((32, 16), jnp.float32, P("data"))}
    moments["nu"] = array((16, 24), jnp.float32, P(None, "model"))
    count = jax.device_put(np.int32(7 + later), NamedSharding(mesh(), P()))
    state = {"params": params, "opt_state": [moments, {"count": count}], "step": 7 + later}
    state |= {"key": jax.random.key(7 + later)} if keys else {}
    ids = np.arange(5, dtype=np.int64) + later
    return state | ({"run": "a name", "ids": ids} if strings else {})


def _written(save: Callable[[str, Path], object]) -> Callable[[str], dict[str, bytes]]:
    """The folder that a save writes, for each sibling."""

    @functools.cache
    def made(which: str) -> dict[str, bytes]:
        work = Path(tempfile.mkdtemp())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Orbax's, about its own ways
                save(which, work / "c")
            return read_folder(work / "c")
        finally:
            shutil.rmtree(work)

    return made


def _of_jax(name: str, format: str, save: Callable[[str, Path], Any], entry="", **more) -> Subject:
    made = _written(save)
    return Subject(f"{format}/{name}", format, made("base"), entry, made=made, **more)


def _universal() -> list[Subject]:
    def by_manager(which: str, path: Path) -> None:
        with ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler()) as manager:
            manager.save(7, args=ucp.args.Save(run_state(which, keys=True)))
            manager.wait_until_finished()

    def item(which: str, path: Path) -> None:
        by_manager(which, path)
        _keep(path, "7/default")

    def small(which: str, path: Path) -> None:
        rng = np.random.default_rng(len(which))
        ucp.Checkpoint.of({f"a{i}": rng.standard_normal(i + 1) for i in range(40)}).save(path)

    def converted(case: str) -> Callable[[str, Path], object]:
        subject = _recorded(Case(f"deepspeed/{case}"))

        def save(which: str, path: Path) -> None:
            source = path.with_name("source")
            write_folder(subject.folder if which == "base" else subject.siblings[which], source)
            ucp.open(source).save(path)

        return save

    return [
        _of_jax("manager", "universal", by_manager, "7"),
        _of_jax("item", "universal", item),
        _of_jax("packed", "universal", small),
        _of_jax("converted", "universal", converted("z1_bf16_dp2")),
        _of_jax("converted-tp", "universal", converted("tp2_dp1_z1_bf16")),
    ]


def _orbax_v0() -> list[Subject]:
    def by_manager(which: str, path: Path) -> None:
        with ocp.CheckpointManager(path, item_handlers=ocp.StandardCheckpointHandler()) as manager:
            manager.save(7, args=ocp.args.StandardSave(run_state(which, strings=False)))
            manager.wait_until_finished()

    def by_handler(**how: Any) -> Callable[[str, Path], None]:
        def save(which: str, path: Path) -> None:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
                state = run_state(which, keys=True)
                checkpointer.save(path, args=ocp.args.PyTreeSave(state))

        return save

    return [
        _of_jax("manager", "orbax-v0", by_manager, "7"),
        _of_jax("ocdbt-zarr2", "orbax-v0", by_handler(use_ocdbt=True, use_zarr3=False)),
        _of_jax("ocdbt-zarr3", "orbax-v0", by_handler(use_ocdbt=True, use_zarr3=True)),
        _of_jax("zarr2", "orbax-v0", by_handler(use_ocdbt=False, use_zarr3=False)),
        _of_jax("zarr3", "orbax-v0", by_handler(use_ocdbt=False, use_zarr3=True)),
    ]


def _orbax_v1() -> list[Subject]:
    def pytree(which: str, path: Path) -> None:
        v1.save_pytree(path, run_state(which, strings=False))

    def checkpointables(which: str, path: Path) -> None:
        state = run_state(which, strings=False)
        v1.save_checkpointables(path, {"state": state, "config": {"layers": 2}})

    by_name = _of_jax("checkpointables", "orbax-v1", checkpointables, "state")
    return [_of_jax("pytree", "orbax-v1", pytree), by_name]


def _flax() -> list[Subject]:
    def file(name: str) -> Callable[[str, Path], None]:
        def save(which: str, path: Path) -> None:
            path.mkdir()
            (path / name).write_bytes(flax.serialization.to_bytes(run_state(which)))

        return save

    def chunked(which: str, path: Path) -> None:
        usual, flax.serialization.MAX_CHUNK_SIZE = flax.serialization.MAX_CHUNK_SIZE, 300
        file("checkpoint_7")(which, path)
        flax.serialization.MAX_CHUNK_SIZE = usual

    by_name = _of_jax("file", "flax", file("model.msgpack"), "model.msgpack")
    by_chunks = _of_jax("chunked", "flax", chunked, "checkpoint_7")
    return [_of_jax("run", "flax", file("checkpoint_7")), by_name, by_chunks]


def _keep(path: Path, inner: str) -> None:
    aside = path.with_name("aside")
    (path / inner).rename(aside)
    shutil.rmtree(path)
    aside.rename(path)


# Files of torch.save, and folders as transformers wrote them before safetensors.


def _torch_saved() -> list[Subject]:
    found = []
    for pattern in ("torchsave/*", "torchsave_legacy/*", "torchsave_variants/plain"):
        for path in sorted(DATA.glob(f"torch/{pattern}.pt")):
            name = f"torch.save/{path.parent.name}/{path.name}"
            found.append(Subject(name, "torch.save", {path.name: path.read_bytes()}, path.name))
    return [*found, _bin_folder("hf_llama", 1), _bin_folder("hf_llama", 3)]


_QUANTIZED = ("ct_int4_asymmetric", "gptq_4", "bnb_nf4_double", "fp8_block_32")


def _quantized() -> list[Subject]:
    """Weights that libraries of quantisation wrote, dequantised."""
    cases = (Case(f"quantized/{name}") for name in _QUANTIZED)
    files = [(case, read_folder(case.path)) for case in cases]
    more = [(str(x), "safetensors", folder, "", x.options, x.truth()) for x, folder in files]
    return [Subject(*about, _same_bits) for about in more]


_ADAPTERS = ("lora", "dora", "experts")


def _adapters() -> list[Subject]:
    """Adapters as peft wrote them, with the config beside."""
    return [_adapter(DATA / "adapters" / case / "adapter") for case in _ADAPTERS]


def _adapter(path: Path) -> Subject:
    file = SafetensorsFile(path / "adapter_model.safetensors")
    truth = {f"param/{key}": file.read(key, Box.whole(i.shape)) for key, i in file.arrays().items()}
    name = f"adapters/{path.parent.name}"
    return Subject(name, "safetensors", read_folder(path), "", {}, truth, _same_bits)


def _same_bits(made: np.ndarray, want: np.ndarray, label: str) -> bool:
    return same_bits(np.asarray(made), np.ascontiguousarray(want))


def _bin_folder(case: str, shards: int) -> Subject:
    """The weights of a model as `pytorch_model.bin`, or in several files with an index."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(DATA.glob(f"torch/{case}/ckpt/*.safetensors")):
        file = SafetensorsFile(path)
        infos = file.arrays()
        arrays |= {key: np.array(file.read(key, Box.whole(infos[key].shape))) for key in infos}
    names = sorted(arrays)
    parts = [names[i::shards] for i in range(shards)]
    files = ["pytorch_model.bin"]
    if shards > 1:
        files = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    tensors = [{name: arrays[name] for name in part} for part in parts]
    folder = {f: torch_writer.saved(some) for f, some in zip(files, tensors, strict=True)}
    if shards > 1:
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        total = sum(array.nbytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        folder["pytorch_model.bin.index.json"] = json.dumps(index, indent=2).encode()
    folder["config.json"] = (DATA / f"torch/{case}/ckpt/config.json").read_bytes()
    truth = {f"param/{name}": array for name, array in arrays.items()}
    name = f"torch.save/{case}-{shards}-bin"
    return Subject(name, "torch.save", folder, "", {}, truth, _same_bits)
