"""Checkpoints of each format whose arrays are large beside what describes them, made without torch."""

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import gguf_writer
import torch_writer
from dcp_writer import Writer
from helpers import flip_bit, memory
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.dcp.source import DcpSource, chunk_key
from jax_ucp.layout.box import Box

DATA = Path(__file__).parent / "data"
BF16 = np.dtype(ml_dtypes.bfloat16)
RNGS = {name: np.random.default_rng(i) for i, name in enumerate("abc")}
ARRAYS = {name: rng.standard_normal((1024, 1024), "f4") for name, rng in RNGS.items()}
STATES = {"param": ARRAYS, "exp_avg": {name: array / 7 for name, array in ARRAYS.items()}}


def zero_1(folder: Path) -> None:
    """Masters in a flat partition of each of two ranks, in a module of 16-bit copies."""
    flat = np.concatenate([array.reshape(-1) for array in ARRAYS.values()])
    module = {name: array.astype(BF16) for name, array in ARRAYS.items()}
    shapes = {name: array.shape for name, array in ARRAYS.items()}
    tree = {"module": module, "param_shapes": [shapes]}
    torch_writer.save(tree, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(np.split(flat, 2)):
        moments = {"exp_avg": part / 7, "exp_avg_sq": part**2}
        state = {"base_optimizer_state": {"state": {0: moments}}, "zero_stage": 1}
        state |= {"single_partition_of_fp32_groups": [part], "partition_count": 2}
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch_writer.save({"optimizer_state_dict": state}, path)


def torch_file(folder: Path) -> None:
    """Tensors of one storage, transposed ones, and a part of a storage that no tensor has."""
    a, b, c = ARRAYS.values()
    storage = torch_writer.Storage("9", np.concatenate([b.reshape(-1), c.reshape(-1)]))
    last = torch_writer.Tensor(storage, b.size + 1024 * 100, (924, 1024), (1024, 1))
    views = {"b": torch_writer.Tensor(storage, 0, b.shape, (1024, 1)), "last rows of c": last}
    torch_writer.save({"model": {"a": a.T, **views}}, folder / "it")


def dcp_replicas(folder: Path) -> None:
    """What ranks wrote without collectives: each all of it."""
    for rank in range(2):
        writer = Writer(folder)
        for name, array in ARRAYS.items():
            writer.tensor(name, array, [(f"__{rank}_0.distcp", Box.whole(array.shape))])
        writer.finish(f"__{rank}.metadata")


SOURCES: dict[str, Callable[[Path], object]] = {
    "deepspeed": zero_1,
    "torch": torch_file,
    "dcp replicas": dcp_replicas,
    "dcp": lambda folder: memory(STATES).export(folder / "it", "dcp"),
    "safetensors": lambda folder: memory(STATES).export(folder / "it", "safetensors"),
    "deepspeed universal": lambda folder: memory(STATES).export(folder / "it", "deepspeed"),
    "universal": lambda folder: memory(STATES).save(folder / "it"),
    "universal, many chunks": lambda folder: memory(STATES).save(
        folder / "it", budget_bytes=1 << 20
    ),
}


# The inner axis of the MLP of small cases has so many elements, whole or on one of two ranks, and is
# made so many times longer.
INNER, TIMES = (24, 12), 512


def megatron_legacy(folder: Path) -> None:
    """A case of two tensor-parallel ranks, with a wide MLP."""
    shutil.copytree(DATA / "megatron" / "legacy_tp2_pp1_bf16" / "ckpt", folder / "it")
    for path in (folder / "it").rglob("*.pt"):
        torch_writer.edit(path, _widen)


def _widen(tree: Any) -> None:
    """Make every array longer in place, and say so in the arguments, also below."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(entries):
        if isinstance(value, torch_writer.Instance):
            value = value.state
        if key == "ffn_hidden_size":
            tree[key] = value * TIMES
        elif isinstance(value, np.ndarray):
            for axis in _inner(value.shape):
                tree[key] = np.repeat(value, TIMES, axis)
        elif isinstance(value, dict | list):
            _widen(value)


def _inner(shape: Sequence[int]) -> list[int]:
    return [axis for axis, length in enumerate(shape) if length in INNER]


def megatron_dist(folder: Path) -> None:
    """A case of torch_dist, two ranks, with a wide MLP."""
    source = next((DATA / "megatron" / "dist_tp2_pp1_bf16" / "ckpt").glob("iter_*"))
    target = folder / "it"
    metadata = read_metadata(file_path(source), lambda every: set())
    arrays = DcpSource(metadata)
    writer = Writer(target)
    for fqn, tensor in metadata.tensors.items():
        whole = np.empty(tensor.shape, tensor.dtype)
        for chunk in tensor.chunks:
            whole[chunk.box.index] = arrays.read(chunk_key(fqn, chunk), Box.whole(chunk.sizes))
        boxes = [(chunk.span.file, chunk.box) for chunk in tensor.chunks]
        for axis in _inner(tensor.shape):
            whole = np.repeat(whole, TIMES, axis)
            boxes = [(file, _longer(box, axis)) for file, box in boxes]
        writer.tensor(fqn, whole, boxes)
    writer.finish()
    for name in ("common.pt", "metadata.json"):
        shutil.copy(source / name, target / name)
    torch_writer.edit(target / "common.pt", _widen)


def _longer(box: Box, axis: int) -> Box:
    start, stop = list(box.start), list(box.stop)
    start[axis] *= TIMES
    stop[axis] *= TIMES
    return Box(tuple(start), tuple(stop))


def gguf(folder: Path) -> None:
    """A Llama of one block."""
    width, inner, rows = 512, 1024, 4096
    shapes = {"token_embd": (rows, width), "output": (rows, width), "output_norm": (width,)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width)}
    shapes |= {"blk.0.ffn_down": (width, inner)}
    shapes |= {f"blk.0.{name}_norm": (width,) for name in ("attn", "ffn")}
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal(shape, np.float32) for n, shape in shapes.items()}
    tensors = []
    for name, array in arrays.items():
        about = f"{name}.weight", array.shape[::-1], 0
        tensors.append(gguf_writer.Tensor(*about, array.tobytes()))
    numbers = {"block_count": 1, "embedding_length": width, "feed_forward_length": inner}
    numbers |= {"attention.head_count": 8, "attention.head_count_kv": 8, "context_length": 64}
    values = {f"llama.{key}": ("u32", value) for key, value in numbers.items()}
    values |= {"general.architecture": ("str", "llama")}
    written = gguf_writer.Written(values, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "it.gguf").write_bytes(written.data())


def peft(folder: Path) -> None:
    """Factors of an adapter."""
    random = np.random.default_rng(0)
    shapes = {"lora_A": (64, 8192), "lora_B": (8192, 64)}
    at = "base_model.model.model.layers.{}.self_attn.q_proj.{}.weight"
    factors = {}
    for layer, name in itertools.product(range(2), shapes):
        factors[at.format(layer, name)] = random.standard_normal(shapes[name], np.float32)
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ["q_proj"]}
    memory({"param": factors}).export(folder / "it", "safetensors", adapter_config=config)


def orbax(folder: Path, **options: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(**options)
    ocp.Checkpointer(handler).save(folder / "it", args=ocp.args.PyTreeSave(STATES))


# One of each format that is opened.
FORMATS: Mapping[str, Callable[[Path], object]] = {
    "DeepSpeed": zero_1,
    "DeepSpeed universal": SOURCES["deepspeed universal"],
    "Megatron torch_dist": megatron_dist,
    "Megatron legacy": megatron_legacy,
    "DCP": SOURCES["dcp"],
    "safetensors": lambda folder: memory(STATES).export(
        folder / "it", "safetensors", max_shard_bytes=5 << 20
    ),
    "PEFT": peft,
    "GGUF": gguf,
    "torch.save": torch_file,
    "Orbax": orbax,
    "Orbax, a file a chunk": lambda folder: orbax(folder, use_ocdbt=False),
    "universal": SOURCES["universal"],
}


def made(format: str, folder: Path, of: Mapping[str, Callable[[Path], object]] = FORMATS) -> Path:
    """Where the checkpoint of a format lies, which is made below the folder."""
    of[format](folder)
    return next(folder.glob("it*"), folder)


def in_two_minds(folder: Path) -> Path:
    """A checkpoint of DeepSpeed in which a bit of a file is not what its other copy says."""
    SOURCES["deepspeed"](folder)
    path = max(folder.glob("*optim_states.pt"), key=lambda path: path.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)
    return folder
