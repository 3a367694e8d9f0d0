"""Train one step of a large model with FSDP2 on CPU and save it by PyTorch's distributed
checkpoint; needs torch.

    python dcp_worker.py save FOLDER LAYERS HIDDEN RANKS
    python dcp_worker.py load FOLDER RANKS

`load` reads every tensor into DTensors that are cut over the ranks, made by the metadata: no model,
no optimizer.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, empty


def save(folder: str, ranks: int, layers: int, hidden: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(hidden),
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.Linear(4 * hidden, hidden),
        )
        for _ in range(layers)
    ]
    model = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(1, hidden)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def load(folder: str, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: (
            empty(
                *about.size, dtype=about.properties.dtype, device_mesh=mesh, placements=[Shard(0)]
            )
            if len(about.size)
            else torch.empty((), dtype=about.properties.dtype)
        )
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder)


def start(rank: int, do: Callable, folder: str, ranks: int, sizes: list[int]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29537"}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    do(folder, ranks, *sizes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    command, folder, *numbers = sys.argv[1:]
    *sizes, ranks = map(int, numbers)
    do = {"save": save, "load": load}[command]
    torch.multiprocessing.spawn(start, (do, folder, ranks, sizes), nprocs=ranks)
