"""Train one step of a large model with DeepSpeed on CPU and save it; needs torch and deepspeed, not
jax_ucp.

python deepspeed_checkpoint.py FOLDER STAGE LAYERS HIDDEN RANKS
"""

import os
import sys

import deepspeed
import torch


class Block(torch.nn.Module):
    """The matrices of a transformer block; what it computes does not matter here."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, layers: int, hidden: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def save(rank: int, folder: str, stage: int, layers: int, hidden: int, ranks: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = Model(layers, hidden)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    loss = engine(torch.randn(1, hidden, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()
    # ds_to_universal asks for it; for a model without pipeline and tensor parallelism it says
    # nothing more.
    engine.save_checkpoint(
        folder, client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    )


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "DS_ACCELERATOR": "cpu"}
    folder, *numbers = sys.argv[1:]
    torch.multiprocessing.spawn(save, (folder, *map(int, numbers)), nprocs=int(numbers[-1]))
