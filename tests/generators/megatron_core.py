"""Checkpoints that Megatron-LM itself writes, on a CPU, with the live state of the run beside each.

    python tests/generators/megatron_core.py OUT --source DIR [--tag TAG] [--only PART ...]

DIR has the source of Megatron-LM in one folder for each tag: DIR/core_v0.19.0/megatron/... Cases of
no tag are of `--tag`, or the newest there; those of a tag that is not there are not written. The Python that runs this has torch, numpy, einops, packaging, pyyaml, psutil, and for 0.16 six, regex,
pydantic and requests. Models, optimizers and writers are Megatron's own; what needs a GPU is in
`megatron_stand_ins.py`.

Gradients are noise, the same whatever the parallelism; three steps are made with them. The state is
taken from the live parameters and optimizers of all ranks, never from the files; where the
optimizer keeps the low 16 bits of masters, from masters that the stand-in keeps beside. Cases named
`logits_` have the logits of the live model too, in float32 and without TransformerEngine, whose
stand-ins compute nothing. Those named `next_`, likewise, are made by Megatron's own train steps on
tokens instead of noise; after the save they go on for three more, whose losses and tokens they have.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import megatron_cases
import megatron_stand_ins as megatron
import numpy as np
import ranks
import torch
import torch.distributed as dist
import writing
from megatron_cases import (
    ALWAYS,
    BIAS,
    DSA,
    GATHER,
    GDN,
    GPT,
    GROUPED,
    LLAMA,
    MLA,
    MOE,
    PA,
    SHARED,
    STEPS,
    VOCAB,
    buckets,
    parallel,
)

BASE = f"""{ALWAYS} --num-layers {{layers}} --hidden-size {{hidden}} --ffn-hidden-size {{ffn}}
--vocab-size {{tokens}} --seed {{seed}} --lr-decay-style constant --save-interval 1
--ckpt-format torch_dist"""
DIST, Q_LORA = "--use-distributed-optimizer", "--q-lora-rank 12"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: what it is told, and on how many ranks."""

    name: str
    argv: str
    world: int = 1
    tag: str = ""
    model: str = LLAMA
    te: bool = True
    layers: int = 2
    hidden: int = 32
    ffn: int = 24
    seed: int = 1234
    without_args: str = ""  # "bridge" or "nemo": the files as these trainers leave them
    vocab: int = VOCAB

    @property
    def has_logits(self) -> bool:
        return self.name.startswith("logits_")

    @property
    def goes_on(self) -> bool:
        return self.name.startswith("next_")

    @property
    def computes(self) -> bool:
        """Whether the model is run, which stand-ins cannot be, and in float32."""
        return self.has_logits or self.goes_on


FULLY = "--dist-ckpt-optim-fully-reshardable"
LAYOUT = "--pipeline-model-parallel-layout"
ACCOUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
BUCKETS, SEQUENCE = buckets(3000), "--sequence-parallel"
# Of a run that goes on: no rows of padding, and what tunix's models have fixed.
NEXT = "--kv-channels 8 --rotary-base 1000000 --norm-epsilon 1e-6"
# The local core attention takes kv_channels for the length of values, which is v_head_dim.
DEEPSEEK3 = """--kv-channels 8 --norm-epsilon 1e-6 --q-lora-rank 12 --rope-type yarn
--rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1
--num-experts 8 --moe-ffn-hidden-size 12 --moe-router-topk 2 --moe-layer-freq [0,1,1]
--moe-shared-expert-intermediate-size 24 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1
--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-token-dispatcher-type allgather
--decoder-first-pipeline-num-layers 2"""
GPT_OSS = f"""--quick-geglu --glu-linear-offset 1 --normalization RMSNorm --softmax-type learnable
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --kv-channels 8
--position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 4
--yarn-original-max-position-embeddings 256 --window-size 7,0 {GATHER}"""
MAMBA = """--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec
--mamba-num-heads 4 --mamba-head-dim 4 --mamba-state-dim 3 --mamba-num-groups 2
--hybrid-layer-pattern M-M*"""
SMALL = {"hidden": 8, "ffn": 8}
ONE = {**SMALL, "layers": 1}
LION = "--muon-scalar-optimizer lion"
FP16 = "--exp-avg-dtype fp16 --main-params-dtype fp16"
_EVERY = (
    Case("dense_tp2", f"{DIST} {parallel(2)}", 4),
    Case("mla", f"{DIST} {Q_LORA}", 2, model=MLA),
    Case("moe_ep2", f"{DIST} {GROUPED} {SHARED} {parallel(ep=2)}", 2),
    Case("mtp", f"{DIST} --mtp-num-layers 1", 2),
    Case("layout", f"{DIST} {parallel(pp=2)} {LAYOUT} Et|tt|t|L", 2, layers=4),
    Case("pa", f"{DIST} {PA}", 2),
    Case("pa_full", f"{DIST} {PA} {FULLY}", 2),
    Case("gpt_tp2_pp2", f"{DIST} {parallel(2, 2)}", 4, model=GPT),
    Case("gpt_local", f"{DIST} {parallel(2)}", 2, model=GPT, te=False),
    Case("mla_tp2", f"{DIST} {Q_LORA} {parallel(2)}", 2, model=MLA, seed=7),
    Case("mla_pp2_no_q_lora", f"{DIST} {parallel(pp=2)}", 2, model=MLA, hidden=64),
    Case("mla_moe_etp1", f"{DIST} {Q_LORA} {GROUPED} {SHARED} {SEQUENCE} {parallel(2, ep=2, etp=1)}", 4, model=MLA),
    Case("moe_etp1_ep1", f"{DIST} {GROUPED} {SEQUENCE} {parallel(2, etp=1)}", 2),
    Case("moe_etp2_tp1", f"{DIST} {MOE} {parallel(1, ep=2, etp=2)}", 4),
    Case("moe_tp2_ep2_pp2", f"{DIST} {MOE} {SHARED} {SEQUENCE} {parallel(2, 2, 2, 1)}", 4),
    Case("moe_seq_bias", f"{DIST} {MOE} {parallel(ep=2)}", 2, model=GPT),
    Case("moe_freq", f"{DIST} {GROUPED} --moe-layer-freq [0,1,1]", 2, layers=3),
    Case("moe_shared_gate", f"{DIST} {GROUPED} {SHARED} --moe-shared-expert-gate", 2),
    Case("moe_router_bias", f"{DIST} {GROUPED} {BIAS}", 2),
    Case("sink", f"{DIST} --softmax-type learnable {parallel(2)}", 2),
    Case("no_extra_state", f"{DIST} --ckpt-drop-redundant-extra-state {parallel(2)}", 2),
    Case("qk_norm", f"{DIST} --qk-layernorm {parallel(cp=2)}", 2, hidden=64),
    Case("mtp_pp2", f"{DIST} --mtp-num-layers 2 {parallel(pp=2)}", 2),
    Case("mtp_moe", f"{DIST} --mtp-num-layers 1 {GROUPED} {parallel(ep=2)}", 2),
    Case("mtp_layout", f"{DIST} --mtp-num-layers 1 {parallel(pp=2)} {LAYOUT} Et|tt|t|mL", 2, layers=4, hidden=64),
    Case("uneven_ends", f"{DIST} {parallel(pp=2)} --decoder-first-pipeline-num-layers 1"
         " --decoder-last-pipeline-num-layers 3", 2, layers=4),
    Case("uneven_first", f"{DIST} {parallel(pp=4)} --decoder-first-pipeline-num-layers 1", 4, layers=7),
    Case("uneven_account", f"{DIST} {parallel(pp=2)} {ACCOUNT}", 2, layers=4),
    Case("uneven_account_vpp", f"{DIST} {parallel(pp=2)} {ACCOUNT} --num-virtual-stages-per-pipeline-rank 2", 2, layers=6),
    Case("vpp", f"{DIST} {parallel(pp=2)} --num-layers-per-virtual-pipeline-stage 1", 4, layers=4),
    Case("vpp_tied", f"{DIST} {parallel(pp=2)} --num-layers-per-virtual-pipeline-stage 2", 2, model=GPT, layers=8),
    Case("buckets", f"{DIST} {BUCKETS} {parallel(pp=2)}", 4, model=GPT),
    Case("full_buckets", f"{DIST} {FULLY} {BUCKETS} {parallel(pp=2)}", 4, model=GPT),
    Case("pa_full_buckets", f"{DIST} {PA} {FULLY} {BUCKETS} {parallel(pp=2)}", 4, model=GPT),
    Case("pa_tp2_buckets", f"{DIST} {PA} {BUCKETS} {parallel(2)}", 4),
    Case("pa_moe", f"{DIST} {PA} {GROUPED} {SHARED} {parallel(ep=2)}", 4),
    Case("pa_bf16_moments", f"{DIST} {PA} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 2),
    Case("pa_fp8_moments", f"{DIST} {PA} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", 2),
    Case("pa_fp16_all", f"{DIST} {PA} {FP16} --exp-avg-sq-dtype fp16", 2),
    Case("pa_fp16_all_full", f"{DIST} {PA} {FP16} {FULLY}", 2),
    Case("pa_mla_pp2", f"{DIST} {PA} {Q_LORA} {parallel(pp=2)}", 2, model=MLA),
    Case("pa_tied_pp2", f"{DIST} {PA} {parallel(pp=2)}", 2, model=GPT),
    Case("decoupled_lr", f"{DIST} --decoupled-lr 0.001 --decoupled-min-lr 0.0001 {parallel(2)}", 2),
    Case("sgd", f"--optimizer sgd {parallel(2)}", 2),
    Case("sgd_fp32_masters_tp1", "--optimizer sgd --sgd-momentum 0.5", 1, seed=3),
    Case("plain_moe", f"{GROUPED} {SHARED} {parallel(ep=2)}", 2),
    Case("bridge_moe", f"{DIST} {GROUPED} {SHARED} {parallel(2, ep=2, etp=1)} {SEQUENCE}", 4, "core_v0.18.2",
         without_args="bridge"),
    Case("bridge_pp2_tied", f"{DIST} {BUCKETS} {parallel(pp=2)}", 2, "core_v0.16.1", GPT, without_args="bridge"),
    Case("bridge_pa_layout", f"{DIST} {PA} {parallel(pp=2)} {LAYOUT} Et|tt|t|L", 2, "core_v0.18.2", layers=4,
         without_args="bridge"),
    Case("nemo_full", f"{DIST} {FULLY} {parallel(2)}", 2, "core_v0.15.3", without_args="nemo"),
    Case("nemo_flat", f"{DIST} {parallel(2, 2)}", 4, "core_v0.14.0", without_args="nemo"),
    Case("small_mla", f"{DIST} --q-lora-rank 6", 1, model=MLA, **ONE),
    Case("small_pa", f"{DIST} {PA}", 2, **ONE),
    Case("small_pa_full", f"{DIST} {PA} {FULLY}", 1, **ONE),
    Case("small_pa_buckets", f"{DIST} {PA} {FULLY} {buckets(300)}", 2, **ONE),
    Case("small_layout_mtp", f"{DIST} --mtp-num-layers 1 {parallel(pp=2)} {LAYOUT} Et|tmL", 2, **SMALL),
    Case("small_bridge", f"{DIST} {GROUPED} {parallel(ep=2)}", 2, "core_v0.18.2", without_args="bridge", **ONE),
    Case("dist_muon", "--optimizer dist_muon", 2),
    Case("muon_distopt", f"{DIST} --optimizer muon {parallel(2)}", 4),
    Case("dist_muon_moe_pp2", f"--optimizer dist_muon {GROUPED} {SHARED} {parallel(pp=2, ep=2)}", 4),
    Case("small_dist_muon", "--optimizer dist_muon", 2, **ONE),
    Case("muon_buckets", f"{DIST} --optimizer muon {BUCKETS} {parallel(2)}", 4),
    Case("muon_lion_pp2", f"{DIST} {FULLY} --optimizer muon {LION} {parallel(pp=2)}", 4),
    Case("dist_muon_lion", f"--optimizer dist_muon {LION}", 2),
    Case("small_muon_lion", f"{DIST} --optimizer muon {LION}", 2, **ONE),
    Case("gdn_tp2_pp2", f"{DIST} {GDN} {GROUPED} {SHARED} --moe-shared-expert-gate {SEQUENCE} --qk-layernorm"
         f" {parallel(2, 2)}", 4, layers=4),
    Case("gdn_full", f"{DIST} {GDN} {FULLY} {parallel(2)}", 2),
    Case("gdn_pa", f"{DIST} {PA} {GDN} {parallel(2)}", 4),
    Case("small_gdn", f"{DIST} {GDN} {parallel(2)}", 2, **SMALL),
    Case("gdn2", f"{DIST} {GDN.replace('gated_delta_net', 'gdn2')} {parallel(2)}", 2),
    Case("mamba_tp2", f"{DIST} {MAMBA} {parallel(2)}", 2, layers=4),
    Case("mamba_tp2_pp2", f"{DIST} {MAMBA} {parallel(2, 2)}", 4, layers=4),
    Case("mamba_pa", f"{DIST} {PA} {MAMBA} {parallel(2)}", 2, layers=4),
    Case("small_mamba", f"{DIST} {MAMBA.replace('M-M*', 'M*')} {parallel(2)}", 2, **SMALL),
    Case("small_dsa", f"{DIST} {DSA}", 1, model=MLA, **ONE),
    Case("dsa_pp2", f"{DIST} {DSA} {parallel(pp=2)}", 2, model=MLA),
    Case("dsa_tp2", f"{DIST} {DSA} {SEQUENCE} {parallel(2)}", 2, model=MLA),
    Case("logits_llama31", f"--kv-channels 8 --use-rope-scaling --rotary-base 500000"
         f" {parallel(2, 2)}", 4, te=False, hidden=16),
    Case("logits_qwen2", f"--kv-channels 8 --add-qkv-bias --rotary-base 1000000 {parallel(2)}", 2,
         te=False, hidden=16),
    Case("logits_qwen3_moe", f"--kv-channels 8 --qk-layernorm {GATHER} {parallel(ep=2)}", 2,
         te=False, hidden=16),
    Case("logits_qwen3_moe_unscaled", f"--kv-channels 8 --qk-layernorm --moe-router-pre-softmax {MOE}"
         f" {GATHER} {parallel(ep=2)}", 2, te=False, hidden=16),
    Case("next_llama", NEXT, te=False, hidden=16, vocab=112),
    Case("next_qwen3", f"{NEXT} --qk-layernorm {parallel(2)}", 2, te=False, hidden=16, vocab=112),
    Case("next_qwen3_moe", f"{NEXT} --qk-layernorm {GATHER} {parallel(ep=2)}", 2, te=False,
         hidden=16, vocab=112),
    Case("logits_mixtral", f"--kv-channels 8 {GATHER} {parallel(pp=2, ep=2)}", 4, te=False,
         hidden=16),
    Case("next_mixtral", f"{NEXT} {GATHER} {parallel(pp=2, ep=2)}", 4, te=False, hidden=16,
         vocab=112),
    Case("logits_deepseek3", f"{DEEPSEEK3} {parallel(2, 2)}", 4, model=MLA, te=False, layers=3,
         hidden=16),
    Case("next_deepseek3", f"{DEEPSEEK3} {parallel(pp=2, ep=2)}", 4, model=MLA, te=False, layers=3,
         hidden=16, vocab=112),
    Case("logits_gpt_oss", "--activation-func-clamp-value 7 --window-attn-skip-freq 2"
         f" --no-yarn-correction-range-round-to-int {parallel(pp=2, ep=2)}", 4, model=GPT_OSS, te=False, layers=4, hidden=16),
    Case("logits_gpt_oss_clamped", "--activation-func-clamp-value 0.1"
         f" --window-attn-skip-freq [1,0,1] {parallel(ep=2)}", 2, model=GPT_OSS, te=False, layers=3,
         hidden=16),
)  # fmt: skip
CASES = {case.name: case for case in _EVERY}


def _write(case: Case, folder: Path, tag: str) -> None:
    """Train and save, one process for each rank."""
    sys.path.append(sys.path.pop(0))  # this folder has files with names of packages
    megatron.install_cuda()
    engine = megatron.TRANSFORMER_ENGINE if case.te else ()
    muon = ("emerging_optimizers",) if "muon" in case.argv or "lion" in case.argv else ()
    is_linear = "linear-attention" in case.argv or "mamba" in case.argv
    linear = ("fla", "causal_conv1d", "mamba_ssm") if is_linear else ()
    megatron.install_packages("triton", *engine, *muon, *linear)
    sizes = {"layers": case.layers, "hidden": case.hidden, "ffn": case.ffn}
    argv = BASE.format(**sizes, seed=case.seed, tokens=case.vocab - 1).split()
    argv += case.model.split() + case.argv.split() + ["--bf16"] * (not case.computes)
    argv += ["--transformer-impl", "transformer_engine" if case.te else "local"]
    argv += ["--save", str(folder / "ckpt")]
    sys.argv = ["generate", *argv]
    importlib.import_module("pretrain_gpt")
    if case.computes:
        _let_core_attention_be_told_lengths()
    ranks.on_ranks(case.world, lambda: _train_and_save(case, folder, tag))


def _let_core_attention_be_told_lengths() -> None:
    """Multi-latent attention tells its core attention two lengths, which the local one lacks."""
    import functools

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    @functools.wraps(build)
    def told(self, config, *arguments, k_channels=None, v_channels=None, **options):
        assert v_channels in (None, config.kv_channels)
        build(self, config, *arguments, **options)

    DotProductAttention.__init__ = told


def _train_and_save(case: Case, folder: Path, tag: str) -> None:
    from megatron.training import get_args

    models, optimizer, scheduler = megatron.set_up()
    bare = [megatron.unwrapped(model) for model in models]
    places = [_places(model) for model in bare]
    for model, own in zip(bare, places, strict=True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = case.computes and "norm" in name
                noise = _local(own[name], "weight", 0) * 0.05 + is_norm
                parameter.copy_(noise.reshape(parameter.shape).to(parameter.dtype))
            for name, bias in _buffers(model) if case.computes else ():
                bias.copy_(torch.from_numpy(_noise(name, tuple(bias.shape), "bias")) * 0.1)
    optimizer.reload_model_params()
    for step in range(STEPS):
        if case.goes_on:
            train_step((models, optimizer, scheduler), step)
            continue
        optimizer.zero_grad()
        for model in models:
            model.zero_grad_buffer()
        for model, own in zip(bare, places, strict=True):
            for name, parameter in model.named_parameters():
                noise = _local(own[name], "gradient", step) * 0.1
                parameter.main_grad.copy_(noise.reshape(parameter.shape))
        if not optimizer.step()[0]:
            raise RuntimeError("a step was skipped")
        scheduler.step(increment=8)
    args = get_args()
    args.iteration, args.consumed_train_samples = STEPS, 8 * STEPS
    mine = [
        (own[name], state, start, array)
        for model, own in zip(bare, places, strict=True)
        for name, parameter in model.named_parameters()
        for state, start, array in _states(optimizer, parameter)
    ]
    own = [(name, bias) for model in bare for name, bias in _buffers(model)]
    buffers = {f"buffer/{name}": bias.float().numpy().copy() for name, bias in own}
    measured = _logits(bare) if case.has_logits else {}
    megatron.save(STEPS, models, optimizer, scheduler)
    if case.goes_on:
        measured = _next((models, optimizer, scheduler))
    gathered = [None] * case.world if dist.get_rank() == 0 else None
    dist.gather_object((mine, buffers), gathered, dst=0)
    if gathered is not None:
        more = measured
        for _, own in gathered:
            more |= own
        _write_truth(case, folder, [item for own, _ in gathered for item in own], more, tag)
        if case.without_args:
            _as_other_trainer(case, folder, args)
    dist.barrier()


# Where the elements of a parameter are in the whole: for each tensor of the checkpoint its key and
# shape, the index there, and which elements of the parameter these are.
Place = list[tuple[str, tuple[int, ...], tuple, "object"]]


def _places(model) -> dict[str, Place]:
    """The places of a model's parameters, by what Megatron says of how they are sharded."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    try:
        sharded = model.sharded_state_dict(metadata={"dp_cp_group": _data_group()})
    except TypeError:
        sharded = model.sharded_state_dict()
    kinds = (ShardedTensor, ShardedTensorFactory)
    every = [item for item in nested_values(sharded) if isinstance(item, kinds)]
    by_memory = {item.data.data_ptr(): item for item in every if item.data is not None}
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        item = by_memory[parameter.data_ptr()]
        index = torch.arange(parameter.numel()).reshape(parameter.shape)
        if isinstance(item, ShardedTensor):
            parts = [dataclasses.replace(item, data=index, dtype=index.dtype)]
        else:
            parts = list(nested_values(dataclasses.replace(item, data=index).build()))
        places[name] = [
            (part.key, tuple(part.global_shape), _box(part), part.data.numpy().copy())
            for part in parts
        ]
    return places


def _box(part) -> tuple[slice, ...]:
    """Where a sharded tensor lies in the whole, of which it may lack leading axes."""
    lengths = [1] * part.prepend_axis_num + list(part.local_shape)
    return tuple(slice(at, at + n) for at, n in zip(part.global_offset, lengths, strict=True))


def _data_group():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _noise(key: str, shape: tuple[int, ...], *what: object):
    return megatron.noise(shape, key, what).numpy()


def _local(place: Place, *what: object):
    """Noise of whole tensors, as a rank has it of one parameter, flat."""

    result = np.zeros(sum(index.size for *_, index in place), np.float32)
    for key, shape, at, index in place:
        result[index.reshape(-1)] = _noise(key, shape, *what)[at].reshape(-1)
    return torch.from_numpy(result)


def _states(optimizer, parameter):
    """(state, first element or None, array) of what the optimizers have of a parameter; of one that
    none of them has, itself.
    """
    found = [one for one in megatron.live_states(optimizer, parameter) if one[0] != "step"]
    kinds = [type(own).__name__ for own in megatron.each_optimizer(optimizer)]
    if not found and "DistributedOptimizer" not in kinds:
        found = [("param", None, parameter)]
    for state, start, value in found:
        yield state, start, megatron.array_of(value.reshape(-1))


def _buffers(model):
    """The biases of a model's routers, which are no parameters, by their names in the whole."""
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            name = f"decoder.layers.{module.layer_number - 1}.mlp.router.expert_bias"
            yield name, module.expert_bias


def _logits(chunks) -> dict[str, object]:
    """Tokens, and the logits that the live model gives of them, on rank 0; every rank takes part."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    (model,) = chunks
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(7))
    rows, length = tokens.shape
    is_later = torch.ones(1, 1, length, length).triu(1).bool()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    model.eval()
    with torch.no_grad():
        if stage:
            hidden = torch.empty(length, rows, model.config.hidden_size)
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor([hidden])
        result = model(tokens, torch.arange(length).expand(rows, length), is_later)
        if stage < stages - 1:
            dist.send(result.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        else:
            result = gather_from_tensor_model_parallel_region(result)[..., :VOCAB]
    model.train()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result.numpy() if stage == stages - 1 else None)
    last = [logits for logits in everyone if logits is not None]
    return {"io/tokens": tokens.numpy(), "io/logits": last[0]}


def _next(run) -> dict[str, object]:
    """The tokens of the next steps, of whose rows each is a row and what follows it; the losses."""

    steps = range(STEPS, 2 * STEPS)
    losses = [train_step(run, step) for step in steps]
    tokens = np.stack([_tokens(step).numpy() for step in steps])
    return {"io/tokens": tokens, "io/losses": np.float32(losses)}


def _tokens(step: int):
    """A batch for a step, of no meaning: rows of a token more than the model is given."""
    from megatron.training import get_args

    args, generator = get_args(), torch.Generator().manual_seed(step)
    return torch.randint(100, (args.global_batch_size, args.seq_length + 1), generator=generator)


def train_step(run, step: int) -> float:
    """The loss of one of Megatron's own steps, on data that depends on the step alone."""
    from megatron.core import mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args, training

    models, optimizer, scheduler = run
    length, tokens = get_args().seq_length, _tokens(step)
    own = range(mpu.get_data_parallel_rank(), len(tokens), mpu.get_data_parallel_world_size())
    is_later = torch.ones(1, 1, length, length).triu(1).bool()

    def forward(batches, model):
        row = next(batches)
        places = torch.arange(length)[None]
        output = model(row[None, :-1], places, is_later, labels=row[None, 1:])
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    batches = RerunDataIterator(iter([tokens[row] for row in own]))
    forward_backward = get_forward_backward_func()
    config = training.get_model_config(models[0])
    config.grad_scale_func = optimizer.scale_loss  # as Megatron's own loop does, which is not run:
    config.finalize_model_grads_func = finalize_model_grads  # without it ranks keep to themselves
    losses, skipped, *_ = training.train_step(
        forward, batches, models, optimizer, scheduler, config, forward_backward
    )
    if skipped:
        raise RuntimeError("a step was skipped")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [float(loss) for loss in losses.values()])
    found = [own[0] for own in everyone if own]
    if mpu.get_data_parallel_world_size() == 1 and len(set(found)) != 1:
        raise RuntimeError(f"losses of ranks differ: {found}")
    return sum(found) / len(found)  # each data-parallel rank has the mean of its own rows


def _write_truth(case: Case, folder: Path, items, more, tag: str) -> None:
    """Put together what all ranks have, and write it under the names of the local spec."""

    flat: dict[tuple, tuple[Place, np.ndarray, np.ndarray]] = {}
    dtypes: dict[str, str] = {}
    for place, state, start, (dtype, array) in items:
        ident = state, *(f"{key}{at}" for key, _, at, _ in place)
        size = sum(index.size for *_, index in place)
        if ident not in flat:
            flat[ident] = place, np.zeros(size, array.dtype), np.zeros(size, bool)
        _, whole, seen = flat[ident]
        first = start or 0
        part = slice(first, first + array.size)
        old = whole[part][seen[part]]
        if old.tobytes() != array[seen[part]].tobytes():
            raise RuntimeError(f"copies of {ident} differ")
        whole[part], seen[part] = array, True
        dtypes[state] = dtype
    wholes: dict[tuple[str, str], np.ndarray] = {}
    covered: dict[tuple[str, str], np.ndarray] = {}
    for (state, *_), (place, array, seen) in flat.items():
        assert seen.all(), (state, place[0][0])
        for key, shape, at, index in place:
            whole = wholes.setdefault((state, key), np.zeros(shape, array.dtype))
            whole[at] = array[index.reshape(-1)].reshape(whole[at].shape)
            covered.setdefault((state, key), np.zeros(shape, bool))[at] = True
    truth: dict[str, np.ndarray] = {}
    for (state, key), whole in wholes.items():
        assert covered[state, key].all(), (state, key)
        for name, array in _named(key, whole):
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                array = array[: case.vocab]
            truth[f"{state}/{name}"] = array
    of_adam = [name for name in truth if name.startswith("exp_avg_sq/")]
    truth |= {name.replace("exp_avg_sq", "step"): np.int64(STEPS) for name in of_adam} | more
    names = {state: dtype for state, dtype in dtypes.items() if dtype == "bfloat16"}
    about = {
        "writer": {"megatron_core": tag, "torch": torch.__version__},
        "options": {"sizes": {"vocab": case.vocab}},
        "dtypes": {key: names[s] for key in truth if (s := key.partition("/")[0]) in names},
        "steps": STEPS,
        "argv": f"{case.model} {case.argv}".split(),
        "world": case.world,
    }
    if "bucket" in case.name and FULLY in case.argv and _moves_what_is_behind_padding():
        about["refused"] = "(?s)embedding.word_embeddings.weight.*5077.*weights_only"
    writing.write_case(folder, truth, about)


def _moves_what_is_behind_padding() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return "cumulative_padding_stripped" not in inspect.getsource(distrib_optimizer)


def _named(key: str, whole):
    """The parameters in a tensor of a checkpoint, by the names of the local spec."""
    if match := re.fullmatch(r"(decoder\.layers)\.(?!\d)(.+)", key):
        for number, layer in enumerate(whole):
            yield from _named(f"{match[1]}.{number}.{match[2]}", layer)
    elif match := re.fullmatch(r"(.+\.experts)\.experts\.(?!\d)(.+)", key):
        for number, expert in enumerate(whole):
            yield from _named(f"{match[1]}.{number}.{match[2]}", expert)
    else:
        key = key.replace(".experts.experts.", ".experts.")
        layer = re.fullmatch(r"(decoder\.layers\.\d+\.)(.+)", key)
        yield (layer[1] + megatron.in_local_layers(layer[2]) if layer else key), whole


def _as_other_trainer(case: Case, folder: Path, args) -> None:
    """Leave the files as trainers on Megatron-Core do that write no args, with a `common.pt`."""
    import yaml

    iteration = folder / "ckpt" / f"iter_{STEPS:07d}"
    common = torch.load(iteration / "common.pt", weights_only=False)
    args = vars(common.pop("args"))
    if case.without_args == "nemo":
        (iteration / "common.pt").unlink(missing_ok=True)
        kept = {name: common[name] for name in ("optimizer", "content_metadata") if name in common}
        kept["optimizer"] = [kept["optimizer"]]
        torch.save(kept | {"global_step": STEPS, "state_dict": {}}, iteration / "common.pt")
        step = folder / "ckpt" / "run--step=3-last"
        (step / "context").mkdir(parents=True)
        (step / "context" / "model.yaml").write_text("_target_: nemo.collections.llm.GPTModel\n")
        iteration.rename(step / "weights")
        (folder / "ckpt" / "latest_checkpointed_iteration.txt").unlink()
        return
    torch.save(common, iteration / "common.pt")
    config = {"model": {}, "ddp": {}, "optimizer": {}}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers",
                 "virtual_pipeline_model_parallel_size", "expert_model_parallel_size",
                 "expert_tensor_parallel_size", "context_parallel_size", "hidden_size",
                 "mtp_num_layers", "pipeline_model_parallel_layout", "moe_grouped_gemm"):  # fmt: skip
        config["model"][name] = args.get(name)
    config["model"]["num_moe_experts"] = args.get("num_experts")
    tied = not args["untie_embeddings_and_output_weights"]
    config["model"]["share_embeddings_and_output_weights"] = tied
    config["ddp"]["overlap_grad_reduce"] = args["overlap_grad_reduce"]
    config["ddp"]["bucket_size"] = args.get("ddp_bucket_size")
    config["optimizer"]["use_precision_aware_optimizer"] = args["use_precision_aware_optimizer"]
    config["optimizer"]["main_params_dtype"] = {"_target_": "torch.float32", "_call_": False}
    (iteration / "run_config.yaml").write_text(yaml.safe_dump(config))
    state = {"step": torch.tensor(STEPS), "consumed_train_samples": torch.tensor(8 * STEPS)}
    torch.save(state, iteration / "train_state.pt")
    shutil.copy(iteration / "train_state.pt", folder / "ckpt" / "latest_train_state.pt")


if __name__ == "__main__":
    sys.exit(megatron_cases.main(__file__, __doc__, CASES, _write))
