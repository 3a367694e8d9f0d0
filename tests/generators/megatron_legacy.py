"""Writes cases of Megatron's `torch`, `torch_dcp` and `fsdp_dtensor` checkpoints, with their truth.

    python tests/generators/megatron_legacy.py OUT --source DIR [--only CASE ...]

`DIR/<tag>` is Megatron-LM's source at a tag, such as `core_v0.16.1`. Everything that decides what
is stored is Megatron's own: arguments, model, optimizer, checkpoint writer. It runs on CPUs over
gloo with the stand-ins of `megatron_stand_ins.py`; weights and gradients are random numbers that
follow from the names of the parameters, so that no two are alike. Truth is gathered from the live
parameters and optimizers before the checkpoint is written.

A case is `OUT/<case>/{ckpt, truth.npz, case.json}`. Keys of truth are `<state>/<parameter>`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megatron_stand_ins as megatron
import numpy as np
import ranks
import torch

STEPS, VOCAB = 3, 101
_COMMON = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 100"
    " --lr 0.01 --min-lr 0.0001 --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1"
    " --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.05 --tokenizer-type"
    " NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 8 --distributed-backend gloo"
    " --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion"
    " --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion"
    " --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --save-interval 1"
)
_LLAMA = (
    " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)


@dataclass(frozen=True)
class Case:
    """A run: `world` processes of Megatron at `tag`, with `options` on its command line."""

    name: str
    options: str
    tag: str = ""  # the newest of the source
    world: int = 2
    model: str = _LLAMA
    format: str = "torch"
    about: str = ""

    @property
    def command_line(self) -> list[str]:
        last = f" --ckpt-format {self.format} --transformer-impl transformer_engine"
        return f"{_COMMON}{self.model} {self.options}{last}".split()


_GPT2 = " --position-embedding-type learned_absolute --normalization LayerNorm"
_MLA = (
    " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 10"
    " --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm"
)
_TIED_LLAMA = " --swiglu --normalization RMSNorm --position-embedding-type rope"
_MOE = " --num-experts 4 --moe-ffn-hidden-size 12 --moe-router-topk 2"
_MOE += " --moe-token-dispatcher-type alltoall"
_GROUPED = _MOE + " --moe-grouped-gemm"
_GDN = (
    " --experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    " --linear-conv-kernel-dim 2 --linear-key-head-dim 2 --linear-value-head-dim 3"
    " --linear-num-key-heads 2 --linear-num-value-heads 4 --attention-output-gate"
)
_DSA = (
    " --experimental-attention-variant dsa --q-lora-rank 12 --dsa-indexer-n-heads 2"
    " --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
)
_SHARED = " --moe-shared-expert-intermediate-size 16"
_BIAS = " --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
_TP, _PP = " --tensor-model-parallel-size", " --pipeline-model-parallel-size"
_EP, _ETP = " --expert-model-parallel-size", " --expert-tensor-parallel-size"
_MUON = " --optimizer muon"
_SMALL = " --num-layers 1 --hidden-size 16 --ffn-hidden-size 12 --num-attention-heads 2"
_ZERO = "--bf16 --use-distributed-optimizer"
_BUCKETS = " --overlap-grad-reduce --ddp-bucket-size 2000"
_VERSIONS = ("0.13.1", "0.14.0", "0.15.3", "0.17.0", "0.18.0", "0.19.0")


_UNTIED = " --untie-embeddings-and-output-weights"
_TORCH_FSDP = "--bf16 --use-torch-fsdp2"
_FULL = " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_MEGATRON_FSDP = _ZERO + _FULL


def _fsdp_of_versions() -> Iterator[Case]:
    for version in _VERSIONS:
        tag, prefix = f"core_v{version}", f"v{version.replace('.', '')}"
        if version == "0.13.1":  # its FSDP2 does not start with torch 2.13
            continue
        yield Case(f"{prefix}_fsdp2", _TORCH_FSDP, tag, format="torch_dcp")
        if version != "0.14.0":  # nor does its Megatron-FSDP
            options = _MEGATRON_FSDP + " --global-batch-size 9"
            yield Case(f"{prefix}_mfsdp", options, tag, world=3, format="fsdp_dtensor")
            tp2 = f"{_MEGATRON_FSDP}{_GROUPED}{_SHARED}{_TP} 2{_ETP} 1 --sequence-parallel"
            yield Case(f"{prefix}_mfsdp_moe_tp2", tp2, tag, world=4, format="fsdp_dtensor")


def _of_versions() -> Iterator[Case]:
    for version in _VERSIONS:
        tag, prefix = f"core_v{version}", f"v{version.replace('.', '')}"
        yield Case(f"{prefix}_tp2", f"--bf16{_TP} 2", tag)
        yield Case(f"{prefix}_pp2_zero", f"{_ZERO}{_PP} 2{_BUCKETS} --num-layers 4", tag, 4, _GPT2)
        grouped = f"{_ZERO}{_GROUPED}{_SHARED}{_BIAS}{_EP} 2"
        yield Case(f"{prefix}_moe", grouped, tag)
        yield Case(f"{prefix}_mla_tp2", f"{_ZERO} --q-lora-rank 12{_TP} 2", tag, 2, _MLA)
        yield Case(f"{prefix}_mtp_pp2", f"{_ZERO} --mtp-num-layers 1{_PP} 2 --num-layers 4", tag)


# fmt: off
CASES: tuple[Case, ...] = (
    Case("zero_bf16", _ZERO),
    Case("tp2_pp2_bf16", f"--bf16{_TP} 2{_PP} 2", world=4),
    Case("tp2_fp16", f"--fp16 --initial-loss-scale 1024{_TP} 2"),
    Case("gpt2_tp2_zero", f"{_ZERO}{_TP} 2", world=4, model=_GPT2),
    Case("gpt2_pp2_zero_buckets", f"{_ZERO}{_PP} 2{_BUCKETS}", world=4, model=_GPT2),
    Case("gpt2_dp3_zero_buckets", f"{_ZERO}{_BUCKETS} --global-batch-size 9", world=3, model=_GPT2),
    Case("cp2_zero", f"{_ZERO} --context-parallel-size 2{_BUCKETS}", world=4),
    Case("qk_norm_tp2", f"--bf16 --qk-layernorm{_TP} 2"),
    Case("grouped_ep2", f"--bf16{_GROUPED}{_EP} 2"),
    Case("grouped_ep4_zero", f"{_ZERO}{_GROUPED}{_EP} 4", world=4),
    Case("grouped_ep2_tp2_zero", f"{_ZERO}{_GROUPED}{_EP} 2{_TP} 2 --sequence-parallel", world=4),
    Case("grouped_ep2_tp2_etp1", f"--bf16{_GROUPED}{_SHARED}{_EP} 2{_TP} 2{_ETP} 1 --sequence-parallel"),
    Case("grouped_ep2_pp2_zero", f"{_ZERO}{_GROUPED}{_SHARED}{_BIAS}{_EP} 2{_PP} 2", world=4),
    Case("grouped_bias_ep2", f"--bf16{_GROUPED}{_EP} 2", model=_GPT2),
    Case("grouped_bias_zero_buckets", f"{_ZERO}{_GROUPED}{_EP} 2{_BUCKETS}", world=4, model=_GPT2),
    Case("sequential_ep2_zero", f"{_ZERO}{_MOE}{_SHARED}{_EP} 2", world=4),
    Case("shared_gate_tp2", f"--bf16{_GROUPED}{_SHARED} --moe-shared-expert-gate{_TP} 2 --sequence-parallel"),
    Case("moe_freq_zero", f"{_ZERO}{_GROUPED}{_EP} 2 --moe-layer-freq ([0,1,1]) --num-layers 3"),
    Case("mla_tp2", f"--bf16 --q-lora-rank 12{_TP} 2", model=_MLA),
    Case("mla_no_q_rank_zero", f"{_ZERO}", model=_MLA),
    Case("mla_moe_ep2_pp2_zero", f"{_ZERO} --q-lora-rank 12{_GROUPED}{_SHARED}{_EP} 2{_PP} 2", world=4, model=_MLA),
    Case("mtp_tp2", f"--bf16 --mtp-num-layers 1{_TP} 2"),
    Case("mtp2_pp2_zero", f"{_ZERO} --mtp-num-layers 2{_PP} 2 --num-layers 4", world=4),
    Case("mtp_moe_ep2_zero", f"{_ZERO} --mtp-num-layers 1{_GROUPED}{_EP} 2"),
    Case("mtp_tied_pp2_zero", f"{_ZERO} --mtp-num-layers 1{_PP} 2{_BUCKETS}", model=_TIED_LLAMA),
    Case("decoupled_tp2", f"--bf16 --decoupled-lr 0.001 --decoupled-min-lr 0.0001{_TP} 2"),
    Case("decoupled_pp2_zero", f"{_ZERO} --decoupled-lr 0.001{_PP} 2", world=4),
    Case("sgd_tp2", f"--bf16 --optimizer sgd{_TP} 2"),
    Case("sgd_fp32", "--optimizer sgd", world=1),
    Case("sgd_moe_ep2", f"--bf16 --optimizer sgd{_GROUPED}{_EP} 2"),
    Case("muon", f"--bf16{_MUON}", world=1),
    Case("muon_tp2_pp2", f"--bf16{_MUON}{_TP} 2{_PP} 2 --num-layers 4", world=4),
    Case("muon_fp32", _MUON, world=1, model=_GPT2),
    Case("muon_moe_ep2", f"--bf16{_MUON}{_GROUPED}{_SHARED}{_EP} 2"),
    Case("muon_mla", f"--bf16{_MUON} --muon-no-split-qkv --q-lora-rank 12", world=1, model=_MLA),
    Case("v0170_muon", f"--bf16{_MUON}{_TP} 2", "core_v0.17.0"),
    Case("v0190_muon", f"--bf16{_MUON}{_TP} 2", "core_v0.19.0"),
    Case("adam_fp32_pp2", f"{_PP} 2 --num-layers 4"),
    Case("sink_tp2_zero", f"{_ZERO} --softmax-type learnable{_TP} 2", world=4),
    Case("uneven_pp2_zero", f"{_ZERO}{_PP} 2 --num-layers 4 --decoder-first-pipeline-num-layers 1"),
    Case("last_pp2", f"--bf16{_PP} 2 --num-layers 4 --decoder-last-pipeline-num-layers 1"),
    Case("layout_pp2_vpp2_zero", f"{_ZERO}{_PP} 2 --num-layers 5 --pipeline-model-parallel-layout Et|tt|t|tL",
        tag="core_v0.15.3"),
    Case("account_pp2",
        f"--bf16{_PP} 2 --num-layers 2 --account-for-embedding-in-pipeline-split" " --account-for-loss-in-pipeline-split"),
    Case("vpp2_zero", f"{_ZERO}{_PP} 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1{_BUCKETS}", world=4),
    Case("gdn_tp2", f"--bf16{_GDN}{_TP} 2"),
    Case("gdn_tp2_zero", f"{_ZERO}{_GDN}{_TP} 2", world=4),
    Case("dsa_tp2_zero", f"{_ZERO}{_DSA}{_TP} 2 --sequence-parallel", world=4, model=_MLA),
    Case("precision_aware", f"{_ZERO} --use-precision-aware-optimizer"),
    Case("precision_aware_bf16",
        f"{_ZERO} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"),
    # small copies of these are in tests/data/megatron
    Case("legacy_te_moe_ep2_zero_bf16", f"{_ZERO}{_GROUPED}{_SHARED}{_BIAS}{_EP} 2{_SMALL}",
        about="torch, ep 2, TransformerEngine's grouped experts, a shared one, expert bias, DistributedOptimizer"),
    Case("legacy_te_mla_mtp_pp2_zero_bf16",
        f"{_ZERO} --q-lora-rank 12 --mtp-num-layers 1{_PP} 2{_SMALL} --num-layers 3" " --decoder-first-pipeline-num-layers 2",
        model=_MLA,
        about="torch, uneven pp 2, MLA and multi-token prediction with TransformerEngine's modules, DistributedOptimizer"),
    Case("legacy_te_muon_bf16", f"--bf16{_MUON}{_SMALL}", world=1, about="torch, Muon with Adam beside it"),
    Case("legacy_te_precision_aware_bf16", f"{_ZERO} --use-precision-aware-optimizer{_SMALL}",
        about="torch, dp 2, DistributedOptimizer, precision-aware: masters in two halves"),
    Case("legacy_te_gdn_tp2_bf16", f"--bf16{_GDN}{_TP} 2{_SMALL} --num-layers 2 --num-attention-heads 4",
        about="torch, tp 2, a gated delta net and gated attention with TransformerEngine's modules"),
    Case("torch_dcp_te_bf16", _TORCH_FSDP + _SMALL, format="torch_dcp",
        about="torch's FSDP2 (torch_dcp) on 2 ranks, Float16OptimizerWithFloat16Params"),
    Case("fsdp_dtensor_te_moe_ep2_bf16", f"{_MEGATRON_FSDP}{_GROUPED}{_SHARED}{_EP} 2{_SMALL}", format="fsdp_dtensor",
        about="Megatron-FSDP (fsdp_dtensor) on 2 ranks, ep 2, TransformerEngine's grouped experts, a shared one"),
    *_of_versions(),
    Case("fsdp2", _TORCH_FSDP, format="torch_dcp"),
    Case("fsdp2_dp4_gpt2", _TORCH_FSDP, world=4, model=_GPT2 + _UNTIED, format="torch_dcp"),
    Case("fsdp2_fp32", "--use-torch-fsdp2 --global-batch-size 9", world=3, format="torch_dcp"),
    Case("fsdp2_moe", _TORCH_FSDP + _GROUPED + _SHARED + _BIAS, format="torch_dcp"),
    Case("fsdp2_mla", _TORCH_FSDP + " --q-lora-rank 12", model=_MLA, format="torch_dcp"),
    Case("fsdp2_mtp", _TORCH_FSDP + " --mtp-num-layers 1", format="torch_dcp"),
    Case("fsdp2_sgd", _TORCH_FSDP + " --optimizer sgd", format="torch_dcp"),
    Case("mfsdp", _MEGATRON_FSDP, format="fsdp_dtensor"),
    Case("mfsdp_dp4", _MEGATRON_FSDP, world=4, format="fsdp_dtensor"),
    Case("mfsdp_tied", _MEGATRON_FSDP, model=_TIED_LLAMA, format="fsdp_dtensor"),
    Case("mfsdp_gpt2", _MEGATRON_FSDP + " --global-batch-size 9", world=3, model=_GPT2, format="fsdp_dtensor"),
    Case("mfsdp_tp2", _MEGATRON_FSDP + _TP + " 2", world=4, format="fsdp_dtensor"),
    Case("mfsdp_moe_ep2", f"{_MEGATRON_FSDP}{_GROUPED}{_SHARED}{_EP} 2", world=4, format="fsdp_dtensor"),
    Case("mfsdp_moe_seq", f"{_MEGATRON_FSDP}{_MOE}{_SHARED}{_EP} 2", format="fsdp_dtensor"),
    Case("mfsdp_mtp", _MEGATRON_FSDP + " --mtp-num-layers 1", format="fsdp_dtensor"),
    Case("mfsdp_optim", f"{_ZERO} --use-megatron-fsdp --data-parallel-sharding-strategy optim", format="fsdp_dtensor"),
    *_fsdp_of_versions(),
)
# fmt: on


# --- one rank


def work(case: Case, folder: Path) -> None:
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
    ranks.on_ranks(case.world, _RUNS[case.format](case, folder).run)


def _random(shape: Any, *what: Any) -> Any:
    """Normal numbers that follow from what they are for."""

    digest = hashlib.sha256(repr(what).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(tuple(shape), generator=generator)


_LAYER = re.compile(r"(decoder\.layers\.\d+)\.(.+)")
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
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
            inner = layer[2]
            for fused, norm in _NORMS.items():
                if inner.startswith(fused):
                    inner = norm + inner.removeprefix(fused)
            name = f"decoder.layers.{numbers[layer[1]]}.{inner}"
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
                noise = _random(parameter.shape, "w", *self.identity(parameter, name)) * 0.05
                self.put(parameter, parameter, noise + (parameter.dim() == 1))
            for chunk in self.bare:
                for module in chunk.modules():
                    getattr(module, "_maintain_float32_expert_bias", _nothing)()
            for name, buffer in self.named_buffers():
                buffer.copy_(_random(buffer.shape, "b", name))
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
            noise = _random(parameter.shape, "g", step, *self.identity(parameter, name)) * 0.1
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
        found = self.states(parameter)
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

    def states(self, parameter: Any) -> Iterator[tuple[str, int | None, Any]]:
        """The master and states that the optimizers have of a parameter."""
        for optimizer in megatron.each_optimizer(self.optimizer):
            if type(optimizer).__name__ == "DistributedOptimizer":
                yield from self.distributed_states(optimizer, parameter)
                continue
            inner = optimizer.optimizer
            own = [each for group in inner.param_groups for each in group["params"]]
            for held in (getattr(parameter, "main_param", None), parameter):
                if held is None or not any(held is each for each in own):
                    continue
                yield "param", None, held
                yield from _named_states(inner.state.get(held, {}), None)
                yield from _step_of(inner, held)
                break

    def distributed_states(
        self, optimizer: Any, parameter: Any
    ) -> Iterator[tuple[str, int | None, Any]]:

        if parameter not in optimizer.model_param_gbuf_map:
            return
        try:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
        except KeyError:
            return  # the rank has nothing of it
        group, place = optimizer.model_param_group_index_map[parameter]
        held = optimizer.optimizer.param_groups[group]["params"][place]
        inner = optimizer.optimizer
        if getattr(optimizer.config, "use_precision_aware_optimizer", False):
            states = optimizer._get_main_param_and_optimizer_states(parameter)
        else:
            states = dict(inner.state[held])
        master = states.pop("param", held)
        yield "param", start, inner.exact[held] if master.dtype == torch.int16 else master
        yield from _named_states(states, start)
        yield from _step_of(inner, held)

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
                noise = _random(parameter.orig_param.shape, "w", *own) * 0.05
                self.put(parameter, parameter, noise + (parameter.dim() == 1))
        for step in range(STEPS):
            for parameter, name in self.parameters():
                own = self.identity(parameter.orig_param, name)
                parameter.grad = torch.zeros_like(parameter)
                noise = _random(parameter.orig_param.shape, "g", step, *own) * 0.1
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
            for state, at, tensor in _named_states(inner.state.get(parameter, {}), start):
                own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                states[state] = at, *megatron.array_of(own)
            for state, _, tensor in _step_of(inner, parameter):
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


def _named_states(states: Any, start: int | None) -> Iterator[tuple[str, int | None, Any]]:

    for name, value in states.items():
        if torch.is_tensor(value):
            yield name, None if name == "step" else start, value


def _step_of(inner: Any, held: Any) -> Iterator[tuple[str, int | None, Any]]:

    for group in inner.param_groups:
        if any(held is each for each in group["params"]) and isinstance(group.get("step"), int):
            yield "step", None, torch.tensor(group["step"], dtype=torch.int32)


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

    np.savez_compressed(folder / "truth.npz", **truth)
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
    (folder / "case.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, required=True, help="Megatron-LM's source by tag")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    out, newest = options.out.resolve(), ranks.newest(options.source)
    by_name = {case.name: replace(case, tag=case.tag or newest) for case in CASES}
    if options.case:
        work(by_name[options.case], out / options.case)
    failed = []
    for name in ranks.chosen(by_name, options.only):
        case = by_name[name]
        source = options.source.resolve()
        arguments = [Path(__file__).resolve(), out, "--source", source, "--case", name]
        devices = "1" if case.format == "torch" else "8"
        if (source / case.tag).is_dir() and not ranks.write_case(
            out / name, arguments, source / case.tag, CUDA_DEVICE_MAX_CONNECTIONS=devices
        ):
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
