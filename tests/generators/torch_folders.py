"""Folders that torch's trainers write: DTensors by rank (verl, SkyRL), and DCP folders of several.

    python torch_folders.py OUT [--only CASE ...]

It is run by a Python that has torch, and the writer where it is another package (accelerate,
lightning, transformers, verl); the tests read what it wrote. Every case is `OUT/<case>/ckpt`,
`truth.npz` and `case.json`. Truth is taken from the processes that trained, before they ended:
`full_tensor()` of parameters and states, or what FSDP1 gathers of them.

verl's `FSDPCheckpointManager` writes its cases where it can be imported (its checkout on
PYTHONPATH); else, and for SkyRL, the calls of torch that its source makes are made here, and
`case.json` says `from_source`: `verl/utils/checkpoint/fsdp_checkpoint_manager.py` of v0.7.0,
`skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

if not hasattr(torch.cpu.Stream, "record_event"):  # before 2.7, FSDP2 expects an accelerator's
    torch.cpu.Stream.record_event = lambda self, event=None: None
    torch.cpu.Stream.wait_event = lambda self, event: None

Truth = dict[str, torch.Tensor]


@dataclass
class Case:
    """A case: `write` runs in each of `ranks` processes, and gives the truth in the first."""

    write: Callable[[Path], Truth]
    ranks: int
    options: dict[str, Any] = field(default_factory=lambda: {"optimizer_groups": "module-order"})
    about: dict[str, Any] = field(default_factory=dict)


# Models.


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model with sizes that few degrees divide, a buffer, and maybe a tie."""

    _no_split_modules = ("Block",)

    def __init__(self, vocab=13, width=6, hidden=10, blocks=2, tied=False, classes=0):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.head = nn.Linear(width, classes or vocab, bias=False)
        self.register_buffer("seen", torch.arange(3.0) + 0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale.sum())


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def trained(model: nn.Module, optimizers, steps=3, seed=1, vocab=13) -> None:
    seeded(seed)
    for _ in range(steps):
        tokens = torch.randint(0, vocab, (2, 5))
        out = model(tokens)
        loss = getattr(out, "logits", out).float().pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def llama(tied=False, layers=2, **sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": 23, "hidden_size": 12, "intermediate_size": 18, **sizes},
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


# Sharding and truth.


def mesh_of(*axes: tuple[str, int]):
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def fully_sharded(model: nn.Module, mesh, placement=None, bf16=False) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": mesh}
    if placement is not None:
        settings["shard_placement_fn"] = placement
    if bf16:
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ in (*(model._no_split_modules or ()), "LlamaDecoderLayer"):
            fully_shard(module, **settings)
    return fully_shard(model, **settings)


def verl_placement(size: int):
    """`get_shard_placement_fn` of verl: the first axis that the ranks divide."""
    from torch.distributed.tensor import Shard

    def placement(param):
        axes = [i for i, n in enumerate(param.shape) if n % size == 0]
        return Shard(axes[0] if axes else 0)

    return placement


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def truth_of(model: nn.Module, *optimizers) -> Truth:
    """Of live modules of FSDP2 and live optimizers, by the names that `state_dict` has."""
    truth = {f"param/{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for optimizer in optimizers:
            for state, value in optimizer.state.get(param, {}).items():
                truth[f"{state}/{name}"] = whole(torch.as_tensor(value))
    return truth


# verl and SkyRL.


def verl_save(model, optimizer, scheduler, folder: Path, step: int, fsdp=2) -> bool:
    """By verl's manager, if it can be imported; returns whether it was."""
    try:
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    except ImportError:
        rank_files(model, optimizer, scheduler, folder, fsdp)
        if dist.get_rank() == 0:
            config = {"FSDP_version": fsdp, "world_size": dist.get_world_size()}
            (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))
        dist.barrier()
        return False
    manager = FSDPCheckpointManager(model, optimizer, scheduler, processing_class=None)
    manager.get_rng_state = rng_state  # verl's asks for an accelerator
    manager.save_checkpoint(str(folder), global_step=step)
    return True


def rng_state() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def rank_files(model, optimizer, scheduler, folder: Path, fsdp=2, extra=None) -> None:
    """What verl and SkyRL save in each rank."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    context = nullcontext()
    if fsdp == 1:
        context = FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    with context:
        end = f"world_size_{world}_rank_{rank}.pt"
        torch.save(model.state_dict(), folder / f"model_{end}")
        torch.save(optimizer.state_dict() if optimizer else {}, folder / f"optim_{end}")
        state = {"lr_scheduler": scheduler.state_dict(), "rng": rng_state(), **(extra or {})}
        torch.save(state, folder / f"extra_state_{end}")
    dist.barrier()


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def verl_fsdp2(axes, make=llama, by_verl_placement=True, frozen=(), dtype=None, **sizes):
    def write(out: Path) -> Truth:
        seeded(0)
        model = make(**sizes)
        if dtype:
            model = model.to(dtype)
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in frozen))
        mesh = mesh_of(*axes)
        placement = verl_placement(axes[-1][1]) if by_verl_placement else None
        fully_sharded(model, mesh, placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = scheduler_of(optimizer)
        trained(model, [optimizer])
        scheduler.step()
        actor = out / "global_step_3" / "actor"
        verl_save(model, optimizer, scheduler, actor, 3)
        if dist.get_rank() == 0:
            torch.save({"_snapshot": {"_num_yielded": 3}}, actor.parent / "data.pt")
            (out / "latest_checkpointed_iteration.txt").write_text("3")
        return truth_of(model, optimizer)

    return write


def fsdp2_tp(axes, **sizes):
    """FSDP2 over tensor parallelism, of rows and columns."""

    def write(out: Path) -> Truth:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        seeded(0)
        model = Net(**sizes)
        mesh = mesh_of(*axes)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        data = tuple(name for name, _ in axes if name != "tp")
        fully_sharded(model, mesh[data if len(data) > 1 else data[0]])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        trained(model, [optimizer])
        rank_files(model, optimizer, scheduler_of(optimizer), out)
        return truth_of(model, optimizer)

    return write


def skyrl(roles=("policy", "critic"), meant="policy"):
    def write(out: Path) -> Truth:
        truths: dict[str, Truth] = {}
        for step in (2, 4):
            for i, role in enumerate(roles):
                seeded(10 * step + i)
                model = Net(classes=1 if role == "critic" else 0)
                fully_sharded(model, mesh_of(("fsdp", dist.get_world_size())), bf16=True)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                trained(model, [optimizer], steps=step)
                extra = {
                    "client_state": {},
                    "tag": None,
                    "fsdp_strategy": "fsdp2",
                    "world_size": dist.get_world_size(),
                    "rank": dist.get_rank(),
                }
                folder = out / f"global_step_{step}" / role
                rank_files(model, optimizer, scheduler_of(optimizer), folder, extra=extra)
                config = {"fsdp_strategy": "fsdp2", "world_size": dist.get_world_size()}
                (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))
                truths[role] = truth_of(model, optimizer)
            if dist.get_rank() == 0:
                state = {"global_step": step, "config": {"trainer": {"epochs": 1}}}
                torch.save(state, out / f"global_step_{step}" / "trainer_state.pt")
                torch.save({"_num_yielded": step}, out / f"global_step_{step}" / "data.pt")
                (out / "latest_ckpt_global_step.txt").write_text(str(step))
        return truths[meant]

    return write


def verl_fsdp1(axes, orig=False, make=llama, **sizes):
    def write(out: Path) -> Truth:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardingStrategy, StateDictType
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        seeded(0)
        model = make(**sizes)
        kinds = {type(m) for m in model.modules() if type(m).__name__ in model._no_split_modules}
        hybrid = len(axes) > 1
        strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy(kinds),
            sharding_strategy=strategy,
            device_mesh=mesh_of(*axes),
            use_orig_params=orig,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = scheduler_of(optimizer)
        trained(model, [optimizer])
        scheduler.step()
        verl_save(model, optimizer, scheduler, out, 3, fsdp=1)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            truth = {f"param/{n}": t.clone() for n, t in model.state_dict().items()}
            live = {param: dict(states) for param, states in optimizer.state.items()}
            # One state at a time: gathered together, all come in the buffer of the last.
            for state in ("step", "exp_avg", "exp_avg_sq"):
                for param, states in live.items():
                    optimizer.state[param] = {state: states[state]}
                whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
                for name, of_param in whole.items():
                    truth[f"{state}/{name}"] = torch.as_tensor(of_param[state]).clone()
        return truth

    return write


NO_GROUPS: dict[str, Any] = {}
FSDP = "fsdp"
CASES: dict[str, Case] = {
    "verl_fsdp2_4": Case(verl_fsdp2([(FSDP, 4)]), 4),
    "verl_fsdp2_3_uneven": Case(verl_fsdp2([(FSDP, 3)], make=Net, by_verl_placement=False), 3),
    "verl_fsdp2_8": Case(verl_fsdp2([(FSDP, 8)], make=Net), 8),
    "verl_hsdp_2x2": Case(verl_fsdp2([("ddp", 2), (FSDP, 2)]), 4),
    "verl_hsdp_2x3_rows": Case(
        verl_fsdp2([("ddp", 2), (FSDP, 3)], make=Net, by_verl_placement=False), 6
    ),
    "verl_tied_2": Case(verl_fsdp2([(FSDP, 2)], tied=True), 2),
    "verl_frozen_2": Case(verl_fsdp2([(FSDP, 2)], frozen=("embed", "norm")), 2),
    "verl_bf16_3": Case(verl_fsdp2([(FSDP, 3)], make=Net, dtype=torch.bfloat16), 3),
    "verl_one_rank": Case(verl_fsdp2([(FSDP, 1)], make=Net), 1),
    "skyrl_policy": Case(
        skyrl(), 2, {"optimizer_groups": "module-order", "model": "policy"}, {"from_source": True}
    ),
    "skyrl_critic": Case(
        skyrl(meant="critic"),
        3,
        {"optimizer_groups": "module-order", "model": "critic"},
        {"from_source": True},
    ),
    "skyrl_policy_alone": Case(skyrl(("policy",)), 2, about={"from_source": True}),
    "tp_2x2": Case(fsdp2_tp([("dp", 2), ("tp", 2)], hidden=8), 4),
    "tp_2x2_uneven": Case(fsdp2_tp([("dp", 2), ("tp", 2)]), 4),
    "tp_3x2_uneven": Case(fsdp2_tp([("dp", 3), ("tp", 2)], hidden=14), 6),
    "tp_2x4": Case(fsdp2_tp([("dp", 2), ("tp", 4)], hidden=12), 8),
    "tp_hsdp_2x2x2": Case(fsdp2_tp([("rep", 2), ("dp", 2), ("tp", 2)]), 8),
    "verl_fsdp1_2": Case(verl_fsdp1([(FSDP, 2)]), 2),
    "verl_fsdp1_3_tied": Case(verl_fsdp1([(FSDP, 3)], tied=True), 3),
    "verl_fsdp1_hsdp_2x2": Case(verl_fsdp1([("ddp", 2), (FSDP, 2)], make=Net), 4),
    "verl_fsdp1_orig_3": Case(verl_fsdp1([(FSDP, 3)], orig=True, make=Net), 3),
    "verl_fsdp1_orig_4": Case(verl_fsdp1([(FSDP, 4)], orig=True), 4),
}


# Running them.


def as_numpy(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        bits = tensor.contiguous().view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])
        return bits.numpy().view(f"u{tensor.element_size()}"), name
    return tensor.numpy(), name


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"torch": torch.__version__}
    for package in ("accelerate", "lightning", "transformers", "torchtitan", "ai2-olmo-core"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "verl" in sys.modules:
        found["verl"] = sys.modules["verl"].__version__
    return found


def run(rank: int, name: str, out: Path, port: int) -> None:
    case = CASES[name]
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks}
    os.environ |= {key: str(n) for key, n in {**ranks, "LOCAL_WORLD_SIZE": case.ranks}.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    if not case.about.get("own_process_group"):
        dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    ckpt = out / name / "ckpt"
    ckpt.mkdir(parents=True, exist_ok=True)
    truth = case.write(ckpt)
    if rank == 0:
        arrays = {key: as_numpy(tensor.detach().cpu()) for key, tensor in truth.items()}
        np.savez(out / name / "truth.npz", **{key: array for key, (array, _) in arrays.items()})
        about = {"writer": versions(), "options": case.options, **case.about}
        about["dtypes"] = {key: dtype for key, (_, dtype) in arrays.items()}
        (out / name / "case.json").write_text(json.dumps(about, indent=1))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    for name in arguments.only or CASES:
        shutil.rmtree(arguments.out / name, ignore_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            mp.spawn(run, (name, arguments.out, port), nprocs=CASES[name].ranks)
        except Exception as error:
            print(f"{name}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
            shutil.rmtree(arguments.out / name, ignore_errors=True)
        else:
            print(name)


if __name__ == "__main__":
    main()
