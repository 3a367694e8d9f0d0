"""A torch_dist checkpoint by megatron-core on CPU; needs torch and megatron-core, not jax_ucp.

    python megatron_checkpoint.py save FOLDER COMMON_PT DTYPE LAYERS HIDDEN RANKS
    python megatron_checkpoint.py load ITERATION_FOLDER LAYERS HIDDEN

`save` writes a GPT and Adam's moments as Megatron names and cuts them, tensor parallel over RANKS;
the rest of the checkpoint (args, scheduler) is COMMON_PT's, with the sizes changed. DTYPE is fp32,
or bf16: then there are fp32 masters too. `load` reads every tensor of an fp32 checkpoint whole into
one process.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

VOCAB, POSITIONS, HEAD = 32000, 1024, 64


def sharded_tensors(
    layers: int, hidden: int, rank: int, ranks: int, new: Callable, bf16: bool = False
) -> Iterator[tuple[str, ShardedTensor]]:
    h, f = hidden, 4 * hidden
    yield from states(
        "embedding.word_embeddings.weight", (VOCAB, h), 0, None, rank, ranks, new, bf16
    )
    yield from states(
        "embedding.position_embeddings.weight", (POSITIONS, h), None, None, rank, ranks, new, bf16
    )
    for layer in ((i, layers) for i in range(layers)):
        for name, shape, axis in [
            ("self_attention.linear_qkv.layer_norm_weight", (h,), None),
            ("self_attention.linear_qkv.layer_norm_bias", (h,), None),
            ("self_attention.linear_qkv.weight", (3 * h, h), 0),
            ("self_attention.linear_qkv.bias", (3 * h,), 0),
            ("self_attention.linear_proj.weight", (h, h), 1),
            ("self_attention.linear_proj.bias", (h,), None),
            ("mlp.linear_fc1.layer_norm_weight", (h,), None),
            ("mlp.linear_fc1.layer_norm_bias", (h,), None),
            ("mlp.linear_fc1.weight", (f, h), 0),
            ("mlp.linear_fc1.bias", (f,), 0),
            ("mlp.linear_fc2.weight", (h, f), 1),
            ("mlp.linear_fc2.bias", (h,), None),
        ]:
            yield from states(f"decoder.layers.{name}", shape, axis, layer, rank, ranks, new, bf16)
    yield from states("decoder.final_layernorm.weight", (h,), None, None, rank, ranks, new, bf16)
    yield from states("decoder.final_layernorm.bias", (h,), None, None, rank, ranks, new, bf16)


def states(
    name: str,
    shape: tuple[int, ...],
    axis: int | None,
    layer: tuple[int, int] | None,
    rank: int,
    ranks: int,
    new: Callable[[list[int]], torch.Tensor],
    bf16: bool,
) -> Iterator[tuple[str, ShardedTensor]]:
    """A parameter and its two moments, cut over the ranks on `axis`; layers are stacked on an axis
    before the rest.

    A weight in bf16 has a master, of which it is a copy.
    """
    local = [n // ranks if i == axis else n for i, n in enumerate(shape)]
    offsets = [(0, *layer)] if layer else []
    if axis is not None:
        offsets.append((axis + len(offsets), rank, ranks))
    held = {
        "": new(local),
        **{f"optimizer.state.{moment}.": new(local) for moment in ("exp_avg", "exp_avg_sq")},
    }
    if bf16:
        held |= {"optimizer.state.fp32_param.": held[""], "": held[""].bfloat16()}
    for prefix, data in held.items():
        key = f"{prefix}{name}"
        replica = rank if axis is None else 0
        tensor = ShardedTensor.from_rank_offsets(
            key, data, *offsets, replica_id=replica, prepend_axis_num=int(layer is not None)
        )
        yield f"{key}@{layer}", tensor


def start(rank: int, ranks: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    # megatron-core takes a GPU for granted where it synchronises and where it counts failures.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)


def save(
    rank: int, folder: str, common_path: str, dtype: str, layers: int, hidden: int, ranks: int
) -> None:
    start(rank, ranks)
    common = torch.load(common_path, weights_only=False)
    args = common["args"] = copy.copy(common["args"])
    args.num_layers, args.hidden_size, args.ffn_hidden_size = layers, hidden, 4 * hidden
    args.num_attention_heads, args.kv_channels = hidden // HEAD, HEAD
    args.vocab_size = args.padded_vocab_size = VOCAB
    args.max_position_embeddings = args.seq_length = POSITIONS
    args.tensor_model_parallel_size = ranks
    iteration = os.path.join(folder, f"iter_{common['iteration']:07d}")
    os.makedirs(iteration, exist_ok=True)
    tensors = sharded_tensors(layers, hidden, rank, ranks, torch.randn, dtype == "bf16")
    dist_checkpointing.save({**common, **dict(tensors)}, iteration)
    torch.distributed.barrier()
    if rank == 0:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as file:
            file.write(str(common["iteration"]))


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    if command == "save":
        common_path, dtype, *numbers = rest
        torch.multiprocessing.spawn(
            save, (folder, common_path, dtype, *map(int, numbers)), nprocs=int(numbers[-1])
        )
    else:
        start(0, 1)
        layers, hidden = map(int, rest)
        dist_checkpointing.load(dict(sharded_tensors(layers, hidden, 0, 1, torch.empty)), folder)
