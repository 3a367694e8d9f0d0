"""Megatron-Core's torch_dist checkpoints, written by one process, which any run may load.

A tensor of the model is one of DCP, with layers and experts on leading axes: each parameter is a
chunk. The optimizer has the layout `fully_reshardable` where the run's is distributed, else that of
the plain one. `common.pt` has what ranks have in common; core 0.19 reads it too, though it writes
an object. Random states, which belong to ranks, are not written.

Facts: `sharded_state_dict` in `megatron/core/optimizer/` and `transformer/transformer_block.py`,
`models/gpt/gpt_layer_specs.py`, and `load_checkpoint` in `megatron/training/checkpointing.py` of
Megatron-LM core_v0.16.1 and core_v0.19.0.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.dtypes import named_dtype
from jax_ucp.codecs.pickle_writer import Global, Instance
from jax_ucp.codecs.zip_writer import torch_file
from jax_ucp.errors import TreeMismatch, UnsupportedLeaf
from jax_ucp.export.files import File, Tensor
from jax_ucp.export.parameters import Parameters, is_floating, one_step
from jax_ucp.formats.dcp.writer import Chunked, files_of
from jax_ucp.formats.megatron.dist_names import name_of
from jax_ucp.formats.megatron.marks import COMMON_FILE, CONFIG_FILE, TRACKER
from jax_ucp.formats.megatron.model import EMBEDDING, FUSED_NORMS, TIED, expert_of
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.states.optimizer_dicts import Steps

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_OUTSIDE = re.compile(
    r"(embedding\.(word|position)_embeddings|decoder\.final_layernorm|output_layer)\.(weight|bias)"
    r"|mtp\.layers\.\d{1,6}\.(?!.*\.experts\.).+"  # each under its own number
)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHTS_ALONE = "To export the weights alone, open the checkpoint with weights_only."
# What Megatron tells groups apart by: `param_group_identifier_keys`.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_CONFIG = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# Items beside args that belong to one rank, or are of another run's shape.
NOT_COMMON = ("rng_state", "rerun_state_machine")


def common_of(extras: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The name of the file that has the run's args, and its items; empty if there is none."""
    return next(((file, named) for file, named in extras.items() if "args" in named), ("", {}))


def carries(file: str, name: str, common: str) -> bool:
    """Whether the export has the extra `name` of the source's `file`; `common` has the args."""
    is_optimizers = name.startswith("optimizer/") or name.endswith(".optimizer/shard_0_1")
    return is_optimizers or (file == common and name not in NOT_COMMON)


def plan_files(
    params: Parameters,
    extras: Mapping[str, Mapping[str, Any]],
    steps: Mapping[str, np.ndarray],
) -> tuple[list[File], list[str]]:
    """The files of a save directory, and notes on what is not as the run had it.

    Raises TreeMismatch for parameters that are not Megatron's, or not those of its args;
    UnsupportedLeaf for states of another optimizer than Adam, or of which nothing says how the run
    goes on.
    """
    _, common = common_of(extras)
    stored_args = common.get("args")
    args = dict(as_dict(stored_args.state)) if isinstance(stored_args, Instance) else {}
    run = _Run(args, params)
    notes: list[str] = []
    weights = {name: replace(t, dtype=run.dtype(name, t)) for name, t in params.model.items()}
    tensors = dict(run.stacked("", weights, notes))
    objects = {key: [None] for key in run.extra_states(tensors)}
    content: dict[str, Any] = {
        "checkpoint_version": 3.0,
        **{n: v for n, v in common.items() if n not in NOT_COMMON and "/" not in n and n != "args"},
        "content_metadata": run.metadata,
    }
    written_args = {**args, "no_save_rng": True}
    predicting = args.get("mtp_num_layers")
    if predicting and not any(name.startswith("mtp.") for name in params.model):
        written_args["mtp_num_layers"] = None
        notes.append(
            f"the run's mtp_num_layers is {predicting}, and there are none of these layers, which"
            " mappings leave out: it goes on without --mtp-num-layers"
        )

    folder = "release"  # which Megatron loads without optimizer and iteration
    if trained := {name: own for name, own in params.states.items() if own.keys() - {"param"}}:
        _check_optimizer(args, trained)
        states = {state: {n: own[state] for n, own in trained.items()} for state in _MOMENTS}
        if run.master:
            states[run.master] = {name: own["param"] for name, own in trained.items()}
        for state, own in states.items():
            tensors |= run.stacked(f"optimizer.state.{state}.", own, notes)
        step, groups = _step(trained, steps), _groups(extras, args)
        iteration = content.setdefault("iteration", args.get("iteration", int(step)))
        before = groups[0].get("step", iteration)
        if step < before and "step" in groups[0]:
            raise UnsupportedLeaf(
                f"the optimizer made {step:g} steps, and {before:g} by its groups: they are of a"
                " later checkpoint"
            )
        if step > before:
            notes.append(_go_on(content, written_args, int(step - before)))
        folder = f"iter_{content['iteration']:07d}"
        for group in groups:
            if run.is_distributed or "bias_correction" in group:
                group["step"] = type(before)(step)
        named = itertools.chain.from_iterable(file.items() for file in extras.values())
        scalers = [value for name, value in named if name.endswith("/grad_scaler")]
        content["optimizer"] = run.optimizer(groups, step, next(iter(scalers), None))

    if args:
        content["args"] = Instance(Global("argparse", "Namespace"), written_args)
        notes.append("random states are left out: a run that loads this has those of its --seed")
    else:
        notes.append("nothing says what the run's arguments are, and Megatron compares none")
    tree: dict[Steps, Any] = {(key,): value for key, value in (tensors | objects).items()}
    files = files_of(tree, f"{folder}/")
    files.append(torch_file(f"{folder}/{COMMON_FILE}", content))
    files.append(File.literal(f"{folder}/{CONFIG_FILE}", json.dumps(_CONFIG).encode()))
    names = folder.removeprefix("iter_").lstrip("0") or "0"
    return [*files, File.literal(TRACKER, names.encode())], list(dict.fromkeys(notes))


def _go_on(content: dict[str, Any], args: dict[str, Any], steps: int) -> str:
    """Count `steps` that were made elsewhere, and the samples of them; returns a note."""
    samples = steps * args.get("global_batch_size", 0)
    if not samples or args.get("rampup_batch_size"):
        raise UnsupportedLeaf(
            f"the optimizer made {steps} steps more than the run whose arguments these are, whose"
            " batches differ in size: how many samples that is, nothing says"
        )
    content["iteration"] += steps
    args["iteration"] = content["iteration"]
    args["consumed_train_samples"] = args.get("consumed_train_samples", 0) + samples
    scheduler = content.get("opt_param_scheduler")
    if isinstance(scheduler, dict) and "num_steps" in scheduler:
        content["opt_param_scheduler"] = {
            **scheduler,
            "num_steps": scheduler["num_steps"] + samples,
        }
    return f"{steps} steps more than the run's own: counted in iteration, samples and scheduler"


@dataclass(frozen=True)
class _Run:
    """The run that is to load the checkpoint, by its args; what they lack has Megatron's
    default.
    """

    args: Mapping[str, Any]
    params: Parameters

    def __post_init__(self) -> None:
        strange = [
            name
            for name in self.params.model
            if not _OUTSIDE.fullmatch(name) and not _LAYER.fullmatch(name)
        ]
        if strange:
            raise TreeMismatch(
                "these are not parameters of Megatron's GPTModel, or such as are not written:",
                strange,
                remedy="Map them by the inverse of a mapping from Megatron's names first.",
            )

    @property
    def is_distributed(self) -> bool:
        return bool(self.args.get("use_distributed_optimizer", True))

    @property
    def is_16_bit(self) -> bool:
        return bool(self.args.get("bf16") or self.args.get("fp16"))

    @property
    def master(self) -> str:
        """The name of the state that holds masters, or "" where weights are the masters."""
        if self.is_distributed:
            return "param"
        return "fp32_param" if self.is_16_bit else ""

    @property
    def metadata(self) -> dict[str, Any]:
        own: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.is_distributed:
            own["distrib_optim_sharding_type"] = "fully_reshardable"
            own["distrib_optim_fully_reshardable_mem_efficient"] = False
        return own

    @property
    def are_layers_alike(self) -> bool:
        """Whether layers lie on an axis, and not each under its own number."""
        several = (self.args.get(f"{kind}_freq") for kind in ("moe_layer", "linear_attention"))
        if any(isinstance(each, list) or (each or 1) != 1 for each in several):
            return False
        keys = ("hetereogenous_dist_checkpoint", "heterogeneous_layers_config_path")
        return not any(map(self.args.get, keys))

    def dtype(self, name: str, tensor: Tensor) -> np.dtype:
        """The dtype of a parameter of the model, of which the optimizer has a master."""
        dtype = self.args.get("params_dtype")
        is_param = name in self.params.states and not name.endswith("softmax_offset")
        if not isinstance(dtype, Global) or not is_param or not is_floating(tensor.dtype):
            return tensor.dtype
        return named_dtype(dtype.name)

    def key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The stored tensor that a parameter is in, and its place on the leading axes."""
        layer, place = _LAYER.fullmatch(name), []
        if layer is None:
            return name, ()
        number, inner = int(layer[1]), layer[2]
        if expert := expert_of(name):
            inner = f"mlp.experts.experts.{expert.inner}"
            place = [expert.number]
        fused = {norm: module for module, norm in FUSED_NORMS.items()}
        norm, dot, kind = inner.partition(".")
        if self._is_fused(number, norm):
            inner = fused[norm + dot] + kind
        if not self.are_layers_alike:
            return f"decoder.layers.{number}.{inner}", tuple(place)
        return f"decoder.layers.{inner}", (number, *place)

    def _is_fused(self, layer: int, norm: str) -> bool:
        """Whether a norm has the name of TransformerEngine's, inside the linear that follows it.

        The local spec gives its norms these names too, but not with multi-latent attention; in
        TransformerEngine's, the norm before experts is one by itself.
        """
        if norm not in ("input_layernorm", "pre_mlp_layernorm"):
            return False
        is_mla = bool(self.args.get("multi_latent_attention"))
        if self.args.get("transformer_impl", "transformer_engine") == "local":
            return not is_mla
        if norm == "input_layernorm":
            return not is_mla
        return f"decoder.layers.{layer}.mlp.router.weight" not in self.params.states

    def stacked(
        self, prefix: str, own: Mapping[str, Tensor], notes: list[str]
    ) -> Iterator[tuple[str, Chunked]]:
        """The stored tensors that parameters, or one state of them, form."""
        by_key: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
        for name, tensor in own.items():
            key, place = self.key(name)
            if name_of(key, place) != name:
                raise TreeMismatch(f"{name} would be read back as {name_of(key, place)}")
            by_key[key][place] = tensor
        for key, parts in by_key.items():
            counts = tuple(max(axis) + 1 for axis in zip(*parts, strict=True))
            shapes = {tensor.shape for tensor in parts.values()}
            layers = self.args.get("num_layers", counts[0] if counts else 0)
            on_layers = self.are_layers_alike and counts
            is_all = math.prod(counts) == len(parts) and not (on_layers and counts[0] != layers)
            if len(shapes) > 1 or not is_all:
                raise TreeMismatch(
                    f"{key} of {layers} layers should be formed of equal tensors of all, but there"
                    f" are {len(parts)}, of shapes {sorted(shapes)}"
                )
            [shape] = shapes
            ones, zeros = (1,) * len(counts), (0,) * len(shape)
            chunks: list[tuple[tuple[int, ...], Tensor | np.ndarray]] = [
                ((*place, *zeros), replace(tensor, stored=(*ones, *shape)))
                for place, tensor in sorted(parts.items())
            ]
            dtype = next(iter(parts.values())).dtype
            padded = self.args.get("padded_vocab_size") if key in (EMBEDDING, TIED) else None
            if isinstance(padded, int) and shape[0] != padded:
                rows, *rest = shape
                if rows > padded:
                    raise TreeMismatch(
                        f"{key} has {rows} rows, but args.padded_vocab_size is {padded}"
                    )
                chunks.append(((rows, *zeros[1:]), np.zeros((padded - rows, *rest), dtype)))
                shape = (padded, *rest)
                notes.append(
                    f"rows {rows} to {padded - 1} of the padded vocabulary are zeros, which take"
                    " part in the softmax: a checkpoint opened without sizes keeps those of the run"
                )
            yield prefix + key, Chunked((*counts, *shape), dtype, chunks)

    def extra_states(self, tensors: Mapping[str, Chunked]) -> Iterator[str]:
        """The keys of the objects that TransformerEngine's modules ask for: None without FP8."""
        depths: dict[str, tuple[int, ...]] = {}
        for key, tensor in tensors.items():
            if key.startswith(("decoder.", "mtp.")):
                module = key.rpartition(".")[0]
                _, first = tensor.chunks[0]
                depths[module] = tensor.shape[: len(tensor.shape) - len(first.shape)]
                if module.endswith("self_attention.linear_proj"):
                    core = module.removesuffix("linear_proj") + "core_attention"
                    depths[core] = depths[module]
        for module, counts in depths.items():
            counts = counts or (1,)
            grid = ".".join(map(str, counts))
            for place in itertools.product(*map(range, counts)):
                yield f"{module}._extra_state/shard_{'.'.join(map(str, place))}_{grid}"

    def optimizer(
        self, groups: Sequence[dict[str, Any]], step: float, scaler: Any
    ) -> dict[Any, Any]:
        """The optimizer in `common.pt`; with expert parallelism that of experts is a second one."""

        def one(own: list[dict[str, Any]]) -> dict[str, Any]:
            if self.is_distributed:
                outer: dict[str, Any] = {"optimizer": {"param_groups": own}}
            else:
                # FusedAdam, whose groups have `bias_correction`, counts steps in its groups
                is_torchs = not any("bias_correction" in group for group in own)
                common = {"common_step": np.asarray(step, np.float32)} if is_torchs else {}
                inner = {"state": common, "param_groups": own}
                if not self.is_16_bit:
                    return inner
                outer = {"optimizer": inner}
            if scaler is not None:
                outer["grad_scaler"] = scaler
            if self.is_distributed:
                outer["param_state_sharding_type"] = "fully_reshardable"
            return outer

        of_experts = [group for group in groups if group["is_expert_parallel"]]
        if not of_experts:
            return one(list(groups))
        return {0: one([group for group in groups if group not in of_experts]), 1: one(of_experts)}


def _step(trained: Iterable[str], steps: Mapping[str, np.ndarray]) -> float:
    """The number of steps that the optimizer made, of all parameters alike."""
    if unknown := [name for name in trained if name not in steps]:
        raise UnsupportedLeaf(
            f"nothing says how many steps the optimizer made of {unknown[0]}. {_WEIGHTS_ALONE}"
        )
    why = "Megatron counts the optimizer's steps for all parameters together"
    return float(one_step({name: steps[name] for name in trained}, why) or 0)


def _check_optimizer(args: Mapping[str, Any], trained: Mapping[str, Mapping[str, Tensor]]) -> None:
    others = [
        f"{name} has {', '.join(own) or 'none'}"
        for name, states in trained.items()
        if (own := sorted(states.keys() - {"param", "step"})) != sorted(_MOMENTS)
    ]
    if others:
        raise UnsupportedLeaf(
            "states that are not Adam's are not written:", others, remedy=_WEIGHTS_ALONE
        )
    if args.get("use_precision_aware_optimizer"):
        raise UnsupportedLeaf(
            "the run has --use-precision-aware-optimizer, whose states are not written",
            remedy=_WEIGHTS_ALONE,
        )
    if not args:
        raise UnsupportedLeaf(
            "nothing says what the run's arguments are, by which its optimizer goes on",
            remedy=f"Give like=, a checkpoint of the run or its arguments. {_WEIGHTS_ALONE}",
        )


def _groups(
    extras: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The groups of the run's optimizer: those of the source, or made of its args."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, value in itertools.chain.from_iterable(file.items() for file in extras.values()):
        stored = value if name.endswith("/param_groups") else None
        if name.endswith(".optimizer/shard_0_1"):
            stored = as_dict(value).get("param_groups")
        for group in map(as_dict, as_list(stored)):
            identity = tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY)
            groups.setdefault(identity, dict(group))
    if groups:
        return list(groups.values())
    if args.get("expert_model_parallel_size", 1) > 1:
        raise UnsupportedLeaf(
            "with expert parallelism the groups of the optimizer do not follow from args: give"
            " a checkpoint of the run as like="
        )
    try:
        return [
            {
                **dict(zip(_IDENTITY, (decays, 1.0, False, False), strict=True)),
                "default_config": True,
                "lr": args["lr"],
                "max_lr": args["lr"],
                "min_lr": args["min_lr"],
                "bias_correction": True,
                "betas": (args["adam_beta1"], args["adam_beta2"]),
                "eps": args["adam_eps"],
                "weight_decay": args["weight_decay"] * decays,
            }
            for decays in (1.0, 0.0)
        ]
    except KeyError as error:
        raise UnsupportedLeaf(f"args have no {error}, by which the optimizer goes on") from None
