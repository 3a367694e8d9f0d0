"""Writes cases of Megatron's `torch`, `torch_dcp` and `fsdp_dtensor` checkpoints, with their truth.

    python tests/generators/megatron_legacy.py OUT --source DIR [--tag TAG] [--only PART ...]

`DIR/<tag>` is Megatron-LM's source at a tag, such as `core_v0.16.1`, and the newest is taken. With
torch 2.13 FSDP2 runs from 0.14.0, Megatron-FSDP from 0.15.3. Everything that decides what
is stored is Megatron's own: arguments, model, optimizer, checkpoint writer. It runs on CPUs over
gloo with the stand-ins of `megatron_stand_ins.py`; weights and gradients are random numbers that
follow from the names of the parameters, so that no two are alike. Truth is gathered from the live
parameters and optimizers before the checkpoint is written.

A case is `OUT/<case>/{ckpt, truth.npz, case.json}`. Keys of truth are `<state>/<parameter>`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megatron_cases
import megatron_stand_ins as megatron
import numpy as np
import ranks
import torch
import writing
from megatron_cases import (
    ALWAYS,
    BIAS,
    DSA,
    GDN,
    GPT,
    GROUPED,
    LLAMA,
    MLA,
    MOE,
    PA,
    SHARED,
    STEPS,
    TIED_LLAMA,
    UNTIED,
    VOCAB,
    buckets,
    parallel,
)

_BASE = f"""{ALWAYS} --num-layers 2 --hidden-size 32 --ffn-hidden-size 24 --min-lr 0.0001
--lr-decay-style cosine --lr-warmup-iters 1 --adam-beta1 0.9 --init-method-std 0.05 --vocab-size 100
--save-interval 1 --transformer-impl transformer_engine"""


@dataclass(frozen=True)
class Case:
    """A run: `world` processes of Megatron at `tag`, with `options` on its command line."""

    name: str
    options: str
    tag: str = ""  # the newest of the source
    world: int = 2
    model: str = LLAMA
    format: str = "torch"
    about: str = ""

    @property
    def command_line(self) -> list[str]:
        return f"{_BASE} {self.model} {self.options} --ckpt-format {self.format}".split()


_MUON, _SGD = "--optimizer muon", "--optimizer sgd"
_SMALL = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 12 --num-attention-heads 2"
_ZERO, _BUCKETS = "--bf16 --use-distributed-optimizer", buckets(2000)
_FSDP = "--bf16 --use-torch-fsdp2"
_SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_MFSDP = f"{_ZERO} {_SHARDED} optim_grads_params"
_SEQ, _Q, _MTP = "--sequence-parallel", "--q-lora-rank 12", "--mtp-num-layers"
TP2, PP2, EP2, TP2_PP2 = parallel(2), parallel(pp=2), parallel(ep=2), parallel(2, 2)


# fmt: off
_TORCH = (
    Case("zero_bf16", _ZERO),
    Case("tp2_bf16", f"--bf16 {TP2}"),
    Case("tp2_pp2_bf16", f"--bf16 {TP2_PP2}", world=4),
    Case("tp2_fp16", f"--fp16 --initial-loss-scale 1024 {TP2}"),
    Case("gpt2_tp2_zero", f"{_ZERO} {TP2}", world=4, model=GPT),
    Case("gpt2_pp2_zero_buckets", f"{_ZERO} {PP2} {_BUCKETS}", world=4, model=GPT),
    Case("gpt2_dp3_zero_buckets", f"{_ZERO} {_BUCKETS} --global-batch-size 9", world=3, model=GPT),
    Case("cp2_zero", f"{_ZERO} {parallel(cp=2)} {_BUCKETS}", world=4),
    Case("qk_norm_tp2", f"--bf16 --qk-layernorm {TP2}"),
    Case("grouped_ep2", f"--bf16 {GROUPED} {EP2}"),
    Case("grouped_ep4_zero", f"{_ZERO} {GROUPED} {parallel(ep=4)}", world=4),
    Case("grouped_ep2_tp2_zero", f"{_ZERO} {GROUPED} {parallel(2, ep=2)} {_SEQ}", world=4),
    Case("grouped_ep2_tp2_etp1", f"--bf16 {GROUPED} {SHARED} {parallel(2, ep=2, etp=1)} {_SEQ}"),
    Case("grouped_ep2_pp2_zero", f"{_ZERO} {GROUPED} {SHARED} {BIAS} {parallel(pp=2, ep=2)}", world=4),
    Case("grouped_bias_ep2", f"--bf16 {GROUPED} {EP2}", model=GPT),
    Case("grouped_bias_zero_buckets", f"{_ZERO} {GROUPED} {EP2} {_BUCKETS}", world=4, model=GPT),
    Case("sequential_ep2_zero", f"{_ZERO} {MOE} {SHARED} {EP2}", world=4),
    Case("shared_gate_tp2", f"--bf16 {GROUPED} {SHARED} --moe-shared-expert-gate {TP2} {_SEQ}"),
    Case("moe_freq_zero", f"{_ZERO} {GROUPED} {EP2} --moe-layer-freq ([0,1,1]) --num-layers 3"),
    Case("mla_tp2", f"--bf16 {_Q} {TP2}", model=MLA),
    Case("mla_no_q_rank_zero", _ZERO, model=MLA),
    Case("mla_moe_ep2_pp2_zero", f"{_ZERO} {_Q} {GROUPED} {SHARED} {parallel(pp=2, ep=2)}", world=4, model=MLA),
    Case("mtp_tp2", f"--bf16 {_MTP} 1 {TP2}"),
    Case("mtp2_pp2_zero", f"{_ZERO} {_MTP} 2 {PP2} --num-layers 4", world=4),
    Case("mtp_moe_ep2_zero", f"{_ZERO} {_MTP} 1 {GROUPED} {EP2}"),
    Case("mtp_tied_pp2_zero", f"{_ZERO} {_MTP} 1 {PP2} {_BUCKETS}", model=TIED_LLAMA),
    Case("decoupled_tp2", f"--bf16 --decoupled-lr 0.001 --decoupled-min-lr 0.0001 {TP2}"),
    Case("decoupled_pp2_zero", f"{_ZERO} --decoupled-lr 0.001 {PP2}", world=4),
    Case("sgd_tp2", f"--bf16 {_SGD} {TP2}"),
    Case("sgd_fp32", _SGD, world=1),
    Case("sgd_moe_ep2", f"--bf16 {_SGD} {GROUPED} {EP2}"),
    Case("muon", f"--bf16 {_MUON}", world=1),
    Case("muon_tp2", f"--bf16 {_MUON} {TP2}"),
    Case("muon_tp2_pp2", f"--bf16 {_MUON} {TP2_PP2} --num-layers 4", world=4),
    Case("muon_fp32", _MUON, world=1, model=GPT),
    Case("muon_moe_ep2", f"--bf16 {_MUON} {GROUPED} {SHARED} {EP2}"),
    Case("muon_mla", f"--bf16 {_MUON} --muon-no-split-qkv {_Q}", world=1, model=MLA),
    Case("adam_fp32_pp2", f"{PP2} --num-layers 4"),
    Case("sink_tp2_zero", f"{_ZERO} --softmax-type learnable {TP2}", world=4),
    Case("uneven_pp2_zero", f"{_ZERO} {PP2} --num-layers 4 --decoder-first-pipeline-num-layers 1"),
    Case("last_pp2", f"--bf16 {PP2} --num-layers 4 --decoder-last-pipeline-num-layers 1"),
    Case("layout_pp2_vpp2_zero", f"{_ZERO} {PP2} --num-layers 5 --pipeline-model-parallel-layout Et|tt|t|tL", "core_v0.15.3"),
    Case("account_pp2", f"--bf16 {PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
    Case("vpp2_zero", f"{_ZERO} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 {_BUCKETS}", world=4),
    Case("gdn_tp2", f"--bf16 {GDN} {TP2}"),
    Case("gdn_tp2_zero", f"{_ZERO} {GDN} {TP2}", world=4),
    Case("dsa_tp2_zero", f"{_ZERO} {DSA} {TP2} {_SEQ}", world=4, model=MLA),
    Case("precision_aware", f"{_ZERO} {PA}"),
    Case("precision_aware_bf16", f"{_ZERO} {PA} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"),
    # small copies of these are in tests/data/megatron
    Case("legacy_te_moe_ep2_zero_bf16", f"{_ZERO} {GROUPED} {SHARED} {BIAS} {EP2} {_SMALL}",
        about="torch, ep 2, TransformerEngine's grouped experts, a shared one, expert bias, DistributedOptimizer"),
    Case("legacy_te_mla_mtp_pp2_zero_bf16",
        f"{_ZERO} {_Q} {_MTP} 1 {PP2} {_SMALL} --num-layers 3 --decoder-first-pipeline-num-layers 2", model=MLA,
        about="torch, uneven pp 2, MLA and multi-token prediction with TransformerEngine's modules, DistributedOptimizer"),
    Case("legacy_te_muon_bf16", f"--bf16 {_MUON} {_SMALL}", world=1, about="torch, Muon with Adam beside it"),
    Case("legacy_te_precision_aware_bf16", f"{_ZERO} {PA} {_SMALL}",
        about="torch, dp 2, DistributedOptimizer, precision-aware: masters in two halves"),
    Case("legacy_te_gdn_tp2_bf16", f"--bf16 {GDN} {TP2} {_SMALL} --num-layers 2 --num-attention-heads 4",
        about="torch, tp 2, a gated delta net and gated attention with TransformerEngine's modules"),
)
_TORCH_DCP = (
    Case("torch_dcp_te_bf16", f"{_FSDP} {_SMALL}",
        about="torch's FSDP2 (torch_dcp) on 2 ranks, Float16OptimizerWithFloat16Params"),
    Case("fsdp2", _FSDP),
    Case("fsdp2_dp4_gpt2", _FSDP, world=4, model=f"{GPT} {UNTIED}"),
    Case("fsdp2_fp32", "--use-torch-fsdp2 --global-batch-size 9", world=3),
    Case("fsdp2_moe", f"{_FSDP} {GROUPED} {SHARED} {BIAS}"),
    Case("fsdp2_mla", f"{_FSDP} {_Q}", model=MLA),
    Case("fsdp2_mtp", f"{_FSDP} {_MTP} 1"),
    Case("fsdp2_sgd", f"{_FSDP} {_SGD}"),
)
_FSDP_DTENSOR = (
    Case("fsdp_dtensor_te_moe_ep2_bf16", f"{_MFSDP} {GROUPED} {SHARED} {EP2} {_SMALL}",
        about="Megatron-FSDP (fsdp_dtensor) on 2 ranks, ep 2, TransformerEngine's grouped experts, a shared one"),
    Case("mfsdp", _MFSDP),
    Case("mfsdp_dp4", _MFSDP, world=4),
    Case("mfsdp_tied", _MFSDP, model=TIED_LLAMA),
    Case("mfsdp_gpt2", f"{_MFSDP} --global-batch-size 9", world=3, model=GPT),
    Case("mfsdp_tp2", f"{_MFSDP} {TP2}", world=4),
    Case("mfsdp_moe_tp2", f"{_MFSDP} {GROUPED} {SHARED} {parallel(2, etp=1)} {_SEQ}", world=4),
    Case("mfsdp_moe_ep2", f"{_MFSDP} {GROUPED} {SHARED} {EP2}", world=4),
    Case("mfsdp_moe_seq", f"{_MFSDP} {MOE} {SHARED} {EP2}"),
    Case("mfsdp_mtp", f"{_MFSDP} {_MTP} 1"),
    Case("mfsdp_optim", f"{_ZERO} {_SHARDED} optim"),
)
# fmt: on
_FORMATS = {"torch": _TORCH, "torch_dcp": _TORCH_DCP, "fsdp_dtensor": _FSDP_DTENSOR}
_EVERY = [replace(case, format=name) for name, cases in _FORMATS.items() for case in cases]
CASES = {case.name: case for case in _EVERY}


# --- one rank


def work(case: Case, folder: Path, tag: str) -> None:
    """Train and save, in a process for each rank."""
    sys.path.append(sys.path.pop(0))  # this folder has files with names of packages
    megatron.install_cuda()
    if case.format == "fsdp_dtensor":  # which makes the name of a device of it
        megatron.number_device()
    if case.format == "torch_dcp":
        megatron.mesh_of_cpus()
    megatron.install_packages("triton", *megatron.TRANSFORMER_ENGINE, "emerging_optimizers")
    if "linear-attention" in case.options:
        megatron.install_packages("fla", "causal_conv1d")
    sys.argv = ["megatron", *case.command_line, "--seed", "1234", "--save", f"{folder}/ckpt"]
    importlib.import_module("pretrain_gpt")
    ranks.on_ranks(case.world, _RUNS[case.format](replace(case, tag=tag), folder).run)


_LAYER = re.compile(r"(decoder\.layers\.\d+)\.(.+)")
_TIED, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a parameter: its states, each an array and where that begins in the flat
    part; None for all of it. `sections` are rows that are each cut over ranks.
    """

    name: str
    rank: int
    ranks: int
    split: int | None
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    states: dict[str, tuple[int | None, str, Any]]


class _Run:
    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder

    def run(self) -> None:
        self.build()
        self.train()
        pieces = [self.piece(*found) for found in self.parameters()]
        pieces += self.buffers()
        self.args.iteration = STEPS
        megatron.save(STEPS, self.model, self.optimizer, self.schedule)
        self.write(pieces)

    def build(self) -> None:
        self.model, self.optimizer, self.schedule = megatron.set_up()
        self.ranks = importlib.import_module("megatron.core.parallel_state")
        self.args = importlib.import_module("megatron.training").get_args()
        self.bare = [megatron.unwrapped(chunk) for chunk in self.model]

    # -- names

    def parameters(self) -> Iterator[tuple[Any, str]]:
        """Every parameter of the rank by its global name."""
        for chunk in self.bare:
            numbers = _layer_numbers(chunk)
            for local, parameter in chunk.named_parameters():
                yield parameter, self.global_name(local.removeprefix("module."), numbers)

    def global_name(self, local: str, numbers: dict[str, int]) -> str:
        name = local
        if layer := _LAYER.fullmatch(local):
            name = f"decoder.layers.{numbers[layer[1]]}.{megatron.in_local_layers(layer[2])}"
        first = self.first_expert()
        if expert := re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", name):
            return f"{expert[1]}{first + int(expert[2])}.{expert[3]}"
        if expert := re.fullmatch(r"(.+\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)", name):
            return f"{expert[1]}{first + int(expert[4])}.{expert[2]}.{expert[3]}"
        return name

    def first_expert(self) -> int:
        each = (self.args.num_experts or 0) // self.args.expert_model_parallel_size
        return self.ranks.get_expert_model_parallel_rank() * each

    # -- training

    def train(self) -> None:

        with torch.no_grad():
            for parameter, name in self.parameters():
                noise = megatron.noise(parameter.shape, "w", *self.identity(parameter, name)) * 0.05
                self.put(parameter, parameter, noise + (parameter.dim() == 1))
            for chunk in self.bare:
                for module in chunk.modules():
                    getattr(module, "_maintain_float32_expert_bias", _nothing)()
            for name, buffer in self.named_buffers():
                buffer.copy_(megatron.noise(buffer.shape, "b", name))
        if hasattr(self.optimizer, "reload_model_params"):
            self.optimizer.reload_model_params()
        for step in range(STEPS):
            self.set_gradients(step)
            updated, *_ = self.optimizer.step()
            assert updated, "the step was skipped"
            self.schedule.step(increment=self.args.global_batch_size)
            self.args.consumed_train_samples += self.args.global_batch_size

    def set_gradients(self, step: int) -> None:

        for chunk in self.model:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for parameter, name in self.parameters():
            if not parameter.requires_grad:
                continue
            what = "g", step, *self.identity(parameter, name)
            noise = megatron.noise(parameter.shape, *what) * 0.1
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.copy_(noise.to(parameter.main_grad.dtype))
            else:
                parameter.grad = torch.empty_like(parameter)
                self.put(parameter.grad, parameter, noise)

    def put(self, target: Any, parameter: Any, values: Any) -> None:
        """Set what the rank has of a parameter, or of its gradient, to the values of the whole."""
        target.copy_(values.to(target.dtype))

    def identity(self, parameter: Any, name: str) -> tuple[Any, ...]:
        """Equal for replicas: the tied output layer is the embedding."""
        same = _EMBEDDING if name == _TIED and self.tied else name
        return 0, same, self.place(parameter, name)[0]

    @property
    def tied(self) -> bool:
        return not self.args.untie_embeddings_and_output_weights

    def place(self, parameter: Any, name: str) -> tuple[int, int, int | None]:
        """The rank among those that share the parameter, how many they are, and the axis."""
        expert = ".experts." in name
        rank = self.ranks.get_tensor_model_parallel_rank()
        ranks = self.args.tensor_model_parallel_size
        if expert:
            rank = self.ranks.get_expert_tensor_parallel_rank()
            ranks = self.ranks.get_expert_tensor_parallel_world_size()
        split = 0 if name.endswith("softmax_offset") else None
        if getattr(parameter, "tensor_model_parallel", False):
            split = max(0, getattr(parameter, "partition_dim", 0))
        elif expert:
            split = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}.get(name.split("linear_")[-1])
        if split is None or ranks == 1:
            return 0, 1, None
        return rank, ranks, split

    # -- truth

    def piece(self, parameter: Any, name: str) -> Piece:
        rank, ranks, split = self.place(parameter, name)
        found = megatron.live_states(self.optimizer, parameter)
        states = {state: (at, *megatron.array_of(tensor)) for state, at, tensor in found}
        if "param" not in states:
            states["param"] = (None, *megatron.array_of(parameter))
        known = _EMBEDDING if name == _TIED and self.tied else name
        shape = tuple(parameter.shape)
        return Piece(known, rank, ranks, split, self.sections(name, shape[0]), shape, states)

    def sections(self, name: str, rows: int) -> tuple[int, ...]:
        """The rows of a rank that are gate and up, or parts of a gated delta net."""
        args, ranks = self.args, self.args.tensor_model_parallel_size
        if args.swiglu and "linear_fc1." in name:
            return rows // 2, rows // 2
        if ".in_proj.weight" not in name and ".conv1d." not in name:
            return ()
        heads = args.linear_num_value_heads // ranks
        keys = args.linear_num_key_heads // ranks * args.linear_key_head_dim
        values = heads * args.linear_value_head_dim
        more = (values, heads, heads) if "in_proj" in name else ()
        return keys, keys, values, *more

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        for chunk in self.bare:
            numbers = _layer_numbers(chunk)
            for local, buffer in chunk.named_buffers():
                if local.endswith("expert_bias"):
                    yield self.global_name(local, numbers), buffer

    def buffers(self) -> list[Piece]:
        return [
            Piece(name, 0, 1, None, (), tuple(b.shape), {"buffer": (None, *megatron.array_of(b))})
            for name, b in self.named_buffers()
        ]

    # -- files

    def write(self, pieces: list[Piece]) -> None:

        distributed = torch.distributed
        distributed.barrier()
        everything = [None] * self.case.world
        distributed.all_gather_object(everything, pieces)
        if distributed.get_rank():
            return
        truth, dtypes = joined([piece for own in everything for piece in own])
        _write_case(self.case, self.folder, self.args.padded_vocab_size, truth, dtypes)


class _TorchFsdp(_Run):
    """torch's FSDP2: every parameter is a DTensor, of which each rank has some rows."""

    def put(self, target: Any, parameter: Any, values: Any) -> None:
        from torch.distributed.tensor import distribute_tensor

        whole = values.to(target.dtype)
        own = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        target.to_local().copy_(own.to_local())


class _MegatronFsdp(_Run):
    """Megatron-FSDP: the optimizer has DTensors of any range of a parameter's elements."""

    def parameters(self) -> Iterator[tuple[Any, str]]:
        layers = {f"decoder.layers.{i}": i for i in range(self.args.num_layers)}
        for optimizer in megatron.each_optimizer(self.optimizer):
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    local = optimizer._param_name(parameter)
                    while local.startswith("module."):
                        local = local.removeprefix("module.")
                    yield parameter, self.global_name(local, layers)

    def first_expert(self) -> int:
        return 0  # the optimizer's names have global numbers

    def train(self) -> None:

        with torch.no_grad():
            for parameter, name in self.parameters():
                own = self.identity(parameter.orig_param, name)
                noise = megatron.noise(parameter.orig_param.shape, "w", *own) * 0.05
                self.put(parameter, parameter, noise + (parameter.dim() == 1))
        for step in range(STEPS):
            for parameter, name in self.parameters():
                own = self.identity(parameter.orig_param, name)
                parameter.grad = torch.zeros_like(parameter)
                noise = megatron.noise(parameter.orig_param.shape, "g", step, *own) * 0.1
                self.put(parameter.grad, parameter, noise)
            for optimizer in megatron.each_optimizer(self.optimizer):
                optimizer.optimizer.step()
            self.args.consumed_train_samples += self.args.global_batch_size

    def put(self, target: Any, parameter: Any, values: Any) -> None:
        own = values.reshape(-1)[_range(parameter)]
        target.to_local().view(-1).copy_(own.to(target.dtype))

    def piece(self, parameter: Any, name: str) -> Piece:
        whole = parameter.orig_param
        rank, ranks, split = self.place(whole, name)
        start = _range(parameter).start
        states = {"param": (start, *megatron.array_of(parameter.to_local()))}
        for optimizer in megatron.each_optimizer(self.optimizer):
            inner = optimizer.optimizer
            for state, at, tensor in megatron.named_states(inner.state.get(parameter, {}), start):
                own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                states[state] = at, *megatron.array_of(own)
            for state, _, tensor in megatron.step_of(inner, parameter):
                states[state] = None, *megatron.array_of(tensor)
        shape = tuple(whole.shape)
        return Piece(name, rank, ranks, split, self.sections(name, shape[0]), shape, states)


def _range(parameter: Any) -> slice:
    return getattr(parameter, "megatron_fsdp_slice", slice(0, parameter.orig_param.numel()))


_RUNS = {"torch": _Run, "torch_dcp": _TorchFsdp, "fsdp_dtensor": _MegatronFsdp}


def _nothing() -> None: ...


def _layer_numbers(chunk: Any) -> dict[str, int]:
    layer = re.compile(r"decoder\.layers\.\d+")
    modules = [(n, module) for n, module in chunk.named_modules() if layer.fullmatch(n)]
    return {name: module.layer_number - 1 for name, module in modules}


def joined(pieces: list[Piece]) -> tuple[dict[str, Any], dict[str, str]]:
    """Whole parameters of all ranks' pieces, and their dtypes. Raises where replicas differ."""

    shards: dict[tuple[str, str], dict[int, list[tuple[int | None, Any]]]] = {}
    about: dict[str, Piece] = {}
    dtypes: dict[str, str] = {}
    for piece in pieces:
        about[piece.name] = piece
        for state, (start, dtype, array) in piece.states.items():
            if state == "param" and (state, piece.name) in shards and start is None:
                parts = shards[state, piece.name]
                if any(at is not None for found in parts.values() for at, _ in found):
                    continue  # the weight of a rank that has no part of the master
            dtypes[f"{state}/{piece.name}"] = dtype
            parts = shards.setdefault((state, piece.name), {}).setdefault(piece.rank, [])
            parts.append((start, array))
    truth: dict[str, Any] = {}
    for (state, name), by_rank in shards.items():
        piece = about[name]
        shape = () if state == "step" else piece.shape
        wholes = [_whole(f"{state}/{name}", by_rank[r], shape) for r in sorted(by_rank)]
        whole = wholes[0] if state == "step" else _joined_ranks(wholes, piece)
        if name in (_EMBEDDING, _TIED) and state != "step":
            whole = whole[:VOCAB]
        truth[f"{state}/{name}"] = whole
    for key, array in truth.items():
        assert isinstance(array, np.ndarray), key
    return truth, dtypes


def _whole(what: str, parts: list[tuple[int | None, Any]], shape: tuple[int, ...]) -> Any:

    flat = [(start, array) for start, array in parts if start is not None]
    if not flat:
        first = parts[0][1]
        for _, other in parts[1:]:
            assert other.tobytes() == first.tobytes(), f"replicas of {what} differ"
        return first.reshape(shape)
    whole = np.zeros(int(np.prod(shape)), flat[0][1].dtype)
    seen = np.zeros(whole.size, bool)
    for start, array in flat:
        whole[start : start + array.size] = array.reshape(-1)
        seen[start : start + array.size] = True
    assert seen.all(), f"{what} has gaps"
    return whole.reshape(shape)


def _joined_ranks(wholes: list[Any], piece: Piece) -> Any:

    if piece.split is None:
        for other in wholes[1:]:
            assert other.tobytes() == wholes[0].tobytes(), f"ranks' {piece.name} differ"
        return wholes[0]
    assert len(wholes) == piece.ranks, f"{piece.name}: {len(wholes)} of {piece.ranks} ranks"
    if not piece.sections:
        return np.concatenate(wholes, piece.split)
    of_ranks = [np.split(whole, np.cumsum(piece.sections)[:-1]) for whole in wholes]
    return np.concatenate([part for parts in zip(*of_ranks, strict=True) for part in parts])


def _write_case(
    case: Case, folder: Path, padded: int, truth: dict[str, Any], dtypes: dict[str, str]
) -> None:

    facts = {
        "about": case.about or f"{case.format}: {case.options.strip()}",
        "model": {"vocab_size": VOCAB, "padded_vocab_size": padded},
        "writer": {"megatron-core": case.tag, "torch": torch.__version__},
        "stand_ins": ["CUDA", "TransformerEngine"],
        "command_line": " ".join(case.command_line),
        "world": case.world,
        "options": {"sizes": {"vocab": VOCAB}},
        "dtypes": dtypes,
    }
    writing.write_case(folder, truth, facts)


def devices(case: Case) -> str:
    return "1" if case.format == "torch" else "8"


if __name__ == "__main__":
    sys.exit(megatron_cases.main(__file__, __doc__, CASES, work, devices))
