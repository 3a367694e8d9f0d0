"""Folders that torch's trainers write: DTensors by rank (verl, SkyRL), and DCP folders of several.

    python torch_folders.py OUT [--only PART ...]

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

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import torch
import torch.distributed as dist
import writing
from torch import nn

sys.path.remove(str(Path(__file__).parent))  # it has files called like packages

if not hasattr(torch.cpu.Stream, "record_event"):  # before 2.7, FSDP2 expects an accelerator's
    torch.cpu.Stream.record_event = lambda self, event=None: None
    torch.cpu.Stream.wait_event = lambda self, event: None

Truth = dict[str, torch.Tensor]
PACKAGES = ("torch", "accelerate", "lightning", "transformers", "torch_checkpointing")


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


def continued(model, optimizer) -> Truth:
    """The tokens and losses of the next steps of a language model, which starts from the save."""
    seeded(7)
    batches = torch.randint(0, 23, (3, 2, 6))
    losses = []
    for tokens in batches:
        logits = model(tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"io/tokens": batches, "io/losses": torch.stack(losses)}


def llama(tied=False, layers=2, **sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": 23, "hidden_size": 12, "intermediate_size": 18, **sizes},
        num_hidden_layers=layers, num_attention_heads=3, num_key_value_heads=1,
        max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
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


def truth_of_fsdp1(model, optimizer) -> Truth:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        truth = {f"param/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        live = {param: dict(states) for param, states in optimizer.state.items()}
        # One state at a time: gathered together, all come in the buffer of the last.
        for state in ("step", "exp_avg", "exp_avg_sq"):
            for param, states in live.items():
                optimizer.state[param] = {state: states[state]}
            found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
            for name, of_param in found.items():
                truth[f"{state}/{name}"] = torch.as_tensor(of_param[state]).clone()
    return truth


def sharded(seed=0, axis="dp", bf16=False, **sizes):
    """A small model on all ranks, and its optimizer."""
    seeded(seed)
    model = fully_sharded(Net(**sizes), mesh_of((axis, dist.get_world_size())), bf16=bf16)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp1(model: nn.Module, mesh, orig: bool):
    """The model by torch's first FSDP, its blocks apart; a mesh of two axes has replicas."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    kinds = {type(m) for m in model.modules() if type(m).__name__ in model._no_split_modules}
    hybrid = ShardingStrategy.HYBRID_SHARD if mesh.ndim > 1 else ShardingStrategy.FULL_SHARD
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy(kinds),
        sharding_strategy=hybrid,
        device_mesh=mesh,
        use_orig_params=orig,
        device_id=torch.device("cpu"),
    )


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
        truth = truth_of(model, optimizer)
        return truth | (continued(model, optimizer) if make is llama and not dtype else {})

    return write


def rank_files_of(model, optimizer, out: Path) -> None:
    rank_files(model, optimizer, scheduler_of(optimizer), out)


def fsdp2_tp(axes, save=rank_files_of, **sizes):
    """FSDP2 over tensor parallelism, of rows and columns."""

    def write(out: Path) -> Truth:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        seeded(0)
        model = Net(**sizes)
        begun = {name: param.detach().clone() for name, param in model.named_parameters()}
        mesh = mesh_of(*axes)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        data = tuple(name for name, _ in axes if name != "tp")
        fully_sharded(model, mesh[data if len(data) > 1 else data[0]])
        if any(not torch.equal(whole(p), begun[n]) for n, p in model.named_parameters()):
            raise SystemExit("full_tensor() of this torch is wrong where sizes are uneven")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        trained(model, [optimizer])
        save(model, optimizer, out)
        return truth_of(model, optimizer)

    return write


def skyrl(roles=("policy", "critic"), meant="policy"):
    def write(out: Path) -> Truth:
        truths: dict[str, Truth] = {}
        for step in (2, 4):
            for i, role in enumerate(roles):
                classes = 1 if role == "critic" else 0
                model, optimizer = sharded(10 * step + i, "fsdp", bf16=True, classes=classes)
                trained(model, [optimizer], steps=step)
                config = {"fsdp_strategy": "fsdp2", "world_size": dist.get_world_size()}
                extra = {"client_state": {}, "tag": None, **config, "rank": dist.get_rank()}
                folder = out / f"global_step_{step}" / role
                rank_files(model, optimizer, scheduler_of(optimizer), folder, extra=extra)
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
        seeded(0)
        model = fsdp1(make(**sizes), mesh_of(*axes), orig)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = scheduler_of(optimizer)
        trained(model, [optimizer])
        scheduler.step()
        verl_save(model, optimizer, scheduler, out, 3, fsdp=1)
        return truth_of_fsdp1(model, optimizer)

    return write


# DCP folders.


def accelerate_fsdp(version: int, make=Net, **sizes):
    """What `Accelerator.save_state` writes with sharded state dicts, by the functions that it calls
    for that; an Accelerator itself runs FSDP on accelerators only.
    """

    def write(out: Path) -> Truth:
        from accelerate import PartialState
        from accelerate.checkpointing import save_accelerator_state
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

        state = PartialState(cpu=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
        seeded(0)
        mesh = mesh_of(("dp", dist.get_world_size()))
        model = make(**sizes)
        model = fsdp1(model, mesh, orig=True) if version == 1 else fully_sharded(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = scheduler_of(optimizer)
        trained(model, [optimizer])
        scheduler.step()
        save_fsdp_model(plugin, state, model, str(out), 0)
        save_fsdp_optimizer(plugin, state, optimizer, model, str(out), 0)
        save_accelerator_state(str(out), [], [], [scheduler], [], dist.get_rank(), step=0)
        dist.barrier()
        if version == 1:
            return truth_of_fsdp1(model, optimizer)
        truth = truth_of(model, optimizer)
        return truth | (continued(model, optimizer) if make is llama else {})

    return write


def lightning_model_parallel(out: Path) -> Truth:
    import lightning as L
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    truth: Truth = {}

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            seeded(0)
            self.net = Net()

        def configure_model(self):
            fully_sharded(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [scheduler_of(optimizer)]

        def on_train_end(self):
            truth.update(truth_of(self, self.optimizers().optimizer))

    seeded(1)
    data = [torch.randint(0, 13, (2, 5)) for _ in range(4)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]),
                                       tensor_parallel_size=1),
        plugins=[TorchElasticEnvironment()],
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(out.parent),
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))
    trainer.save_checkpoint(str(out))
    return truth


def dcp_save(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save(state, checkpoint_id=str(folder))


def states_of(model, optimizer, flat=False):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)


def torchtitan(out: Path) -> Truth:
    """Two steps, and a third that was not finished."""
    model, optimizer = sharded()
    scheduler = scheduler_of(optimizer)
    for step in (3, 12):
        trained(model, [optimizer], steps=step)
        weights, states = states_of(model, optimizer, flat=True)
        train_state = {"step": torch.tensor(step), "ntokens_seen": torch.tensor(100 * step)}
        rest = {"lr_scheduler": scheduler.state_dict(), "train_state": train_state}
        dcp_save({**weights, "optimizer": states, **rest}, out / f"step-{step}")
    if dist.get_rank() == 0:
        (out / "step-15").mkdir()
        (out / "step-15" / "__0_0.distcp").write_bytes(b"unfinished")
    return truth_of(model, optimizer)


def olmo_core(flat):
    def write(out: Path) -> Truth:
        model, optimizer = sharded(tied=False)
        rank = dist.get_rank()
        for step in (2, 4):
            trained(model, [optimizer], steps=2)
            weights, states = states_of(model, optimizer, flat)
            folder = out / f"step{step}"
            dcp_save({"model": weights, "optim": states}, folder / "model_and_optim")
            (folder / "train").mkdir(exist_ok=True)
            state = {"global_step": step, "max_steps": 9, "rng": rng_state()}
            torch.save(state, folder / "train" / f"rank{rank}.pt")
            if rank == 0:
                (folder / "config.json").write_text(json.dumps({"model": {"d_model": 6}}))
                (folder / ".metadata.json").write_text(json.dumps({"version": "2.0"}))
            dist.barrier()
        return truth_of(model, optimizer)

    return write


def automodel(out: Path) -> Truth:
    model, optimizer = sharded()
    rank = dist.get_rank()
    for step in (4, 9):
        trained(model, [optimizer], steps=2)
        weights, states = states_of(model, optimizer, flat=True)
        folder = out / f"epoch_0_step_{step}"
        dcp_save(dict(weights), folder / "model")
        dcp_save({"optim": states}, folder / "optim")
        (folder / "rng").mkdir(exist_ok=True)
        torch.save(rng_state(), folder / "rng" / f"rng_dp_rank_{rank}.pt")
        if rank == 0:
            torch.save({"step": step, "epoch": 0}, folder / "step_scheduler.pt")
            (folder / "config.yaml").write_text("model:\n  hidden: 10\n")
        dist.barrier()
    return truth_of(model, optimizer)


def raw_numbered(split: bool):
    """`optimizer.state_dict()` as it is, whose states go by numbers."""

    def write(out: Path) -> Truth:
        model, _ = sharded()
        params = [*model.parameters()]
        groups: Any = params
        if split:
            decay = [param for param in params if param.ndim > 1]
            groups = [{"params": decay}, {"params": [p for p in params if p.ndim < 2], "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        trained(model, [optimizer])
        dcp_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
        return truth_of(model, optimizer)

    return write


def two_optimizers(out: Path) -> Truth:
    """Momentum for matrices, Adam for the rest, as Muon is used."""
    model, _ = sharded()
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "blocks" in n]
    chosen = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in chosen]
    muon, adam = torch.optim.SGD(matrices, 0.01, momentum=0.9), torch.optim.AdamW(rest, 0.01)
    trained(model, [muon, adam])
    names = {id(param): name for name, param in model.named_parameters()}

    def by_name(optimizer):
        state = {names[id(p)]: of_param for p, of_param in optimizer.state.items()}
        named = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        groups = [{**g, "params": n} for g, n in zip(optimizer.param_groups, named, strict=True)]
        return {"state": state, "param_groups": groups}

    dcp_save({"model": model.state_dict(), "muon": by_name(muon), "adam": by_name(adam)}, out)
    return truth_of(model, muon, adam)


def actor_and_critic(meant: str):
    def write(out: Path) -> Truth:
        state: dict[str, Any] = {}
        truths: dict[str, Truth] = {}
        for i, role in enumerate(("actor", "critic")):
            model, optimizer = sharded(i, classes=1 if role == "critic" else 0)
            trained(model, [optimizer])
            state[role], state[f"{role}_optim"] = states_of(model, optimizer)
            truths[role] = truth_of(model, optimizer)
        dcp_save(state, out)
        return truths[meant]

    return write


def torch_checkpointing(flat=False, metadata=False):
    """Items of torch_checkpointing, which gathers its metadata on GPUs alone: here by gloo."""

    def save(model, optimizer, out: Path) -> None:
        import torch_checkpointing as package
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.metadata_manager import DefaultMetadataManager
        from torch_checkpointing.schema import ItemSpec
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        def gathered(self, data, process_group=None):
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, data)
            return dict(enumerate(found))

        DefaultMetadataManager._all_gather_pickled_data = gathered
        weights, states = states_of(model, optimizer, flat)
        payload = {
            "model": weights,
            "optimizer": states,
            "lr_scheduler": scheduler_of(optimizer).state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "rank": dist.get_rank()},
            "step": 3,
        }
        reshards = ("model", "optimizer") if metadata else ()
        config = package.CheckpointManager.Config(
            items={item: ItemSpec(resharder=DefaultResharder()) for item in reshards},
            save=package.SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        dist.barrier()
        if dist.get_rank() == 0:
            out.rmdir()  # it makes the folder itself
        dist.barrier()
        manager = package.CheckpointManager(config)
        manager.save(str(out), payload)
        manager.close()

    return save


def experimental(model, optimizer, out: Path) -> None:
    from torch.distributed.checkpoint._experimental import make_sync_checkpointer
    from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
    from torch.distributed.checkpoint._experimental.types import RankInfo

    ranks = RankInfo(global_rank=dist.get_rank(), global_world_size=dist.get_world_size())
    checkpointer = make_sync_checkpointer(config=CheckpointerConfig(), rank_info=ranks)
    weights, states = states_of(model, optimizer)
    checkpointer.save(str(out), {"model": weights, "optim": states, "step": 3})
    checkpointer.close()


def saved_by(save, **sizes):
    def write(out: Path) -> Truth:
        model, optimizer = sharded(**sizes)
        trained(model, [optimizer])
        save(model, optimizer, out)
        return truth_of(model, optimizer)

    return write


def plain(out: Path) -> Truth:
    """One process, without DTensors."""
    seeded(0)
    model = Net(blocks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, [optimizer])
    torch_checkpointing(metadata=True)(model, optimizer, out)
    return truth_of(model, optimizer)


NO_GROUPS: dict[str, Any] = {}
BY_SOURCE = {"from_source": True}
POLICY, CRITIC = (
    {"optimizer_groups": "module-order", "model": name} for name in ("policy", "critic")
)
FSDP, DP2, TP2 = "fsdp", ("dp", 2), ("tp", 2)
# fmt: off
CASES: dict[str, Case] = {
    "verl_fsdp2_4": Case(verl_fsdp2([(FSDP, 4)]), 4),
    "verl_fsdp2_3_uneven": Case(verl_fsdp2([(FSDP, 3)], make=Net, by_verl_placement=False), 3),
    "verl_fsdp2_8": Case(verl_fsdp2([(FSDP, 8)], make=Net), 8),
    "verl_hsdp_2x2": Case(verl_fsdp2([("ddp", 2), (FSDP, 2)]), 4),
    "verl_hsdp_2x3_rows": Case(verl_fsdp2([("ddp", 2), (FSDP, 3)], make=Net, by_verl_placement=False), 6),
    "verl_tied_2": Case(verl_fsdp2([(FSDP, 2)], tied=True), 2),
    "verl_frozen_2": Case(verl_fsdp2([(FSDP, 2)], frozen=("embed", "norm")), 2),
    "verl_bf16_3": Case(verl_fsdp2([(FSDP, 3)], make=Net, dtype=torch.bfloat16), 3),
    "verl_one_rank": Case(verl_fsdp2([(FSDP, 1)], make=Net), 1),
    "verl_llama": Case(verl_fsdp2([(FSDP, 2)], layers=1), 2),
    "skyrl_policy": Case(skyrl(), 2, POLICY, BY_SOURCE),
    "skyrl_critic": Case(skyrl(meant="critic"), 3, CRITIC, BY_SOURCE),
    "skyrl_policy_alone": Case(skyrl(("policy",)), 2, about=BY_SOURCE),
    "tp_2x2": Case(fsdp2_tp([DP2, TP2], hidden=8), 4),
    "tp_2x2_uneven": Case(fsdp2_tp([DP2, TP2]), 4),
    "tp_2x2_small": Case(fsdp2_tp([DP2, TP2], blocks=1), 4),
    "tp_3x2_uneven": Case(fsdp2_tp([("dp", 3), TP2], hidden=14), 6),
    "tp_2x4": Case(fsdp2_tp([DP2, ("tp", 4)], hidden=12), 8),
    "tp_hsdp_2x2x2": Case(fsdp2_tp([("rep", 2), DP2, TP2]), 8),
    "verl_fsdp1_2": Case(verl_fsdp1([(FSDP, 2)]), 2),
    "verl_fsdp1_3_tied": Case(verl_fsdp1([(FSDP, 3)], tied=True), 3),
    "verl_fsdp1_hsdp_2x2": Case(verl_fsdp1([("ddp", 2), (FSDP, 2)], make=Net), 4),
    "verl_fsdp1_orig_3": Case(verl_fsdp1([(FSDP, 3)], orig=True, make=Net), 3),
    "verl_fsdp1_orig_4": Case(verl_fsdp1([(FSDP, 4)], orig=True), 4),
    "accelerate_fsdp1": Case(accelerate_fsdp(1), 2, NO_GROUPS),
    "accelerate_fsdp2": Case(accelerate_fsdp(2), 3, NO_GROUPS),
    "accelerate_llama": Case(accelerate_fsdp(2, llama, layers=1), 2, NO_GROUPS),
    "lightning_model_parallel": Case(lightning_model_parallel, 2, NO_GROUPS, {"own_process_group": True}),
    "torchtitan": Case(torchtitan, 2, NO_GROUPS, BY_SOURCE),
    "olmo_core": Case(olmo_core(False), 2, NO_GROUPS, BY_SOURCE),
    "olmo_core_flat": Case(olmo_core(True), 3, NO_GROUPS, BY_SOURCE),
    "automodel": Case(automodel, 2, NO_GROUPS, BY_SOURCE),
    "dcp_numbered": Case(raw_numbered(False), 2),
    "dcp_numbered_groups": Case(raw_numbered(True), 3),
    "dcp_two_optimizers": Case(two_optimizers, 2, NO_GROUPS),
    "dcp_actor": Case(actor_and_critic("actor"), 2, {"model": "actor"}),
    "dcp_critic": Case(actor_and_critic("critic"), 3, {"model": "critic"}),
    "items_tp_2x2": Case(fsdp2_tp([DP2, TP2], torch_checkpointing(metadata=True), blocks=1), 4, NO_GROUPS),
    "items_3_flat": Case(saved_by(torch_checkpointing(flat=True), blocks=1), 3, NO_GROUPS),
    "items_2": Case(saved_by(torch_checkpointing()), 2, NO_GROUPS),
    "items_one_rank": Case(saved_by(torch_checkpointing(metadata=True)), 1, NO_GROUPS),
    "items_plain": Case(plain, 1, NO_GROUPS),
    "experimental_2": Case(saved_by(experimental, blocks=1), 2, NO_GROUPS),
    "experimental_3": Case(saved_by(experimental, tied=True), 3, NO_GROUPS),
}
# fmt: on


# Running them.


def run(name: str, folder: Path) -> None:
    case = CASES[name]
    os.environ |= {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    if not case.about.get("own_process_group"):
        dist.init_process_group("gloo")
    ckpt = folder / "ckpt"
    ckpt.mkdir(exist_ok=True)
    truth = case.write(ckpt)
    if os.environ["RANK"] == "0":
        found = writing.versions(*PACKAGES)
        if "verl" in sys.modules:
            found["verl"] = sys.modules["verl"].__version__
        about = {"writer": found, "options": case.options, **case.about}
        writing.write_case(folder, truth, about)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    given = writing.arguments(__doc__).parse_args()
    from transformers.models.llama import modeling_llama  # noqa: F401  once, for all ranks

    def write(name: str, folder: Path) -> None:
        ranks.forked(CASES[name].ranks, 600, run, name, folder)

    writing.write_each(writing.chosen(CASES, given.only), given.out, write)


if __name__ == "__main__":
    main()
