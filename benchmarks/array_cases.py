"""Checkpoints of many small arrays, of which only the number matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import jax_ucp
from benchmarks.count_worker import small_tree
from jax_ucp.codecs.pickle_writer import Call, Global, Instance, dumps, torch_dtype
from jax_ucp.codecs.zip_writer import TorchZip

HIDDEN, RANKS = 4, 2
DCP, DATA = "torch.distributed.checkpoint", "__0_0.distcp"
# A layer's parameters: as many in every case, so that sizes can be compared.
LAYER = 10


def converted(folder: Path, arrays: int) -> None:
    """A universal checkpoint as a conversion writes it: small arrays lie in packs."""
    jax_ucp.Checkpoint.of(small_tree(arrays)).save(folder)


def saved(folder: Path, arrays: int) -> None:
    """A universal checkpoint as a manager saves it: small arrays lie in one pack."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(jax_ucp.CheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=jax_ucp.args.Save(small_tree(arrays)))


def deepspeed(folder: Path, parameters: int, ranks: int = RANKS, rows: int = HIDDEN) -> None:
    """What ZeRO-3 stores of so many parameters on some ranks, in one group, before copies of
    anything.
    """
    shapes = {f"layers.{i // LAYER}.weight_{i % LAYER}": (rows, HIDDEN) for i in range(parameters)}
    length = parameters * -(-rows * HIDDEN // ranks)
    folder.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    for rank in range(ranks):
        flat = {
            state: np.full(length, place + rank, np.float32)
            for place, state in enumerate(("param", "exp_avg", "exp_avg_sq"))
        }
        masters = flat.pop("param") + np.arange(length, dtype=np.float32)
        optimizer = {
            "state": {0: {"step": np.array(1, np.float32), **flat}},
            "param_groups": [{"lr": 1e-3, "weight_decay": 0.1, "params": [0]}],
        }
        zero = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": optimizer,
            "fp32_flat_groups": [masters],
        }
        model = {
            "module": {name: np.empty(0, np.float32) for name in shapes},
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "global_steps": 1,
            "dp_world_size": ranks,
            "mp_world_size": 1,
        }
        at = f"global_step1/zero_pp_rank_{rank}_mp_rank_00"
        _save({"optimizer_state_dict": zero}, folder / f"{at}_optim_states.pt")
        _save(model, folder / f"{at}_model_states.pt")


def many_ranks(folder: Path, ranks: int) -> None:
    """2,000 parameters, as ZeRO-3 stores them on so many ranks."""
    deepspeed(folder, 2_000, ranks)


def many_experts(folder: Path, experts: int) -> None:
    """The two weights of 60 times so many experts."""
    megatron_experts(folder, 2 * 60 * experts)


def megatron(folder: Path, parameters: int) -> None:
    """A legacy Megatron checkpoint of at least so many parameters, of one rank, in fp32 with Adam's
    moments.
    """
    layers = -(-parameters // len(dict(_layer(0))))
    weights = {"embedding.word_embeddings.weight": np.zeros((8, HIDDEN), np.float32)}
    for layer in range(layers):
        weights |= dict(_layer(layer))
    weights |= {"decoder.final_layernorm.weight": np.ones(HIDDEN, np.float32)}
    plain = [name for name, array in weights.items() if array.ndim > 1]
    bare = [name for name, array in weights.items() if array.ndim == 1]
    numbers = {name: i for i, name in enumerate(plain + bare)}
    state = {
        numbers[name]: {
            "step": np.array(1, np.float32),
            "exp_avg": weights[name] + 1,
            "exp_avg_sq": weights[name] + 2,
        }
        for name in numbers
    }
    groups = [
        {"wd_mult": 1.0, "params": [numbers[name] for name in plain]},
        {"wd_mult": 0.0, "params": [numbers[name] for name in bare]},
    ]
    tree = {
        "args": Instance(Global("argparse", "Namespace"), _arguments(layers)),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "model": weights,
        "optimizer": {"state": state, "param_groups": groups},
    }
    _save(tree, folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def megatron_experts(folder: Path, parameters: int) -> None:
    """A torch_dist Megatron checkpoint of at least so many parameters, nearly all of them experts
    of one layer, each in a chunk of its own, in fp32 with Adam's moments.
    """
    experts = -(-parameters // 2)
    kinds = {"linear_fc1": (4 * HIDDEN, HIDDEN), "linear_fc2": (HIDDEN, 4 * HIDDEN)}
    iteration = folder / "iter_0000001"
    iteration.mkdir(parents=True)
    stored = _Dcp(iteration)
    for state in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        stored.tensor(f"{state}decoder.final_layernorm.weight", (HIDDEN,), 1)
        for kind, shape in kinds.items():
            key = f"{state}decoder.layers.mlp.experts.experts.{kind}.weight"
            stored.tensor(key, (1, experts, *shape), experts)
    stored.finish()
    arguments = _arguments(1) | {"num_experts": experts, "moe_ffn_hidden_size": 4 * HIDDEN}
    groups = [{"wd_mult": 1.0, "step": 1, "params": []}]
    common = {
        "args": Instance(Global("argparse", "Namespace"), arguments),
        "iteration": 1,
        "optimizer": {"state": {}, "param_groups": groups},
    }
    _save(common, iteration / "common.pt")
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


class _Dcp:
    """Writes the tensors of a DCP checkpoint, each in equal chunks along its second axis."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = bytearray()
        self.entries: dict[str, Any] = {}
        self.storage: dict[Any, Any] = {}

    def tensor(self, name: str, shape: tuple[int, ...], count: int) -> None:
        sizes = (1, 1, *shape[2:]) if count > 1 else shape
        item = _zipped(np.zeros(sizes, np.float32))
        chunks = []
        for i in range(count):
            offsets = _size((0, i, 0, 0) if count > 1 else (0,) * len(shape))
            index = _of_dcp("metadata.MetadataIndex", fqn=name, offset=offsets, index=None)
            place = {"relative_path": DATA, "offset": len(self.data), "length": len(item)}
            self.storage[index] = _of_dcp("filesystem._StorageInfo", **place)
            chunks.append(
                _of_dcp("metadata.ChunkStorageMetadata", offsets=offsets, sizes=_size(sizes))
            )
            self.data += item
        properties = Instance(
            Global(f"{DCP}.metadata", "TensorProperties"),
            (torch_dtype(np.dtype(np.float32)), None, False, None, False),
        )
        self.entries[name] = _of_dcp(
            "metadata.TensorStorageMetadata",
            properties=properties,
            size=_size(shape),
            chunks=chunks,
        )

    def finish(self) -> None:
        metadata = _of_dcp(
            "metadata.Metadata",
            state_dict_metadata=self.entries,
            planner_data={name: (name,) for name in self.entries},
            storage_data=self.storage,
        )
        (self.folder / DATA).write_bytes(self.data)
        (self.folder / ".metadata").write_bytes(dumps(metadata))


def _of_dcp(kind: str, **fields: Any) -> Instance:
    module, _, name = kind.rpartition(".")
    return Instance(Global(f"{DCP}.{module}", name), fields)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (shape,))


def _layer(layer: int) -> Iterator[tuple[str, np.ndarray]]:
    h = HIDDEN
    for name, shape in [
        ("input_layernorm.weight", (h,)),
        ("self_attention.linear_proj.weight", (h, h)),
        ("self_attention.linear_proj.bias", (h,)),
        ("self_attention.linear_qkv.weight", (3 * h, h)),
        ("self_attention.linear_qkv.bias", (3 * h,)),
        ("pre_mlp_layernorm.weight", (h,)),
        ("mlp.linear_fc1.weight", (4 * h, h)),
        ("mlp.linear_fc1.bias", (4 * h,)),
        ("mlp.linear_fc2.weight", (h, 4 * h)),
        ("mlp.linear_fc2.bias", (h,)),
    ]:
        yield f"decoder.layers.{layer}.{name}", np.full(shape, layer, np.float32)


def _arguments(layers: int) -> dict[str, Any]:
    """What the run was told, as far as it is asked here."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "rank": 0,
        "num_layers": layers,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 4 * HIDDEN,
        "num_attention_heads": 1,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": HIDDEN,
        "swiglu": False,
        "num_experts": None,
        "padded_vocab_size": 8,
        "untie_embeddings_and_output_weights": False,
        "use_distributed_optimizer": False,
    }


def _save(tree: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_zipped(tree))


def _zipped(tree: Any) -> bytes:
    written = TorchZip(tree)
    data, tail = bytearray(written.size), written.section().tail
    assert tail is not None, "of a tree in memory nothing but a tail is written"
    for start, part in tail([]):
        data[start : start + len(part)] = part
    return bytes(data)
