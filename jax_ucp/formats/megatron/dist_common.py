"""Whether `common.pt` describes the model, ranks and optimizer beside it, and its groups.

torch's AdamW and FusedAdam keep their step in two places.

Facts: `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py` of Megatron-LM
core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.arrays.value import Array, stated
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.codecs.unpickle import known, what_is
from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron.buffers import model_parallel_ranks
from jax_ucp.formats.megatron.checks import Comparison, check_gtp, of_model, refuse_difference
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_names import group_key, is_flat, is_fully_reshardable, state_of
from jax_ucp.formats.megatron.groups import group_decays, is_decayed
from jax_ucp.formats.megatron.model import EMBEDDING
from jax_ucp.formats.megatron.parameters import States
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

SHARDING_TYPE = "distrib_optim_sharding_type"


def check_args(files: DistFiles, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> None:
    """Raise FormatError at the first difference of args and the model's shapes and dtypes."""
    if not files.args.fields:
        return
    check_gtp(files.args, files.common.path, shapes)
    of_ranks: list[Comparison] = []
    for key in files.objects:
        grid = key.rpartition("_")[2].split(".")
        if key.startswith("rng_state/") and len(grid) > 1:
            for kind, stored in zip(("pipeline", "tensor"), grid, strict=False):
                degree = files.args.degree(f"{kind}_model_parallel_size")
                of_ranks.append((f"{kind} parallelism", str(degree), stored))
    of_optimizer = _of_optimizer(files, dtypes)
    comparisons = itertools.chain(of_model(files.args, shapes), of_ranks, of_optimizer)
    refuse_difference(files.common.path, comparisons)


def _of_optimizer(files: DistFiles, dtypes: Mapping[str, str]) -> Iterator[Comparison]:
    # the sharding types of a distributed optimizer that the stored keys show
    types: set[str] = set()
    has_states = False
    for key, tensor in files.tensors.items():
        state, model = state_of(key)
        has_states |= state != "weight"
        if is_flat(key):
            types.add("dp_reshardable")
        elif state != "weight" and tensor.shape != files.tensors[model].shape:
            types.add("fully_sharded_model_space")
        elif is_fully_reshardable(key):
            types.add("fully_reshardable")
    groups = filter(None, map(group_key, files.objects))
    if any(group.what == "param_state" for group in groups):
        types.add("dp_zero_gather_scatter")
    if types:
        declared = as_dict(files.tree.get("content_metadata")).get(SHARDING_TYPE)
        yield SHARDING_TYPE, declared, " and ".join(sorted(types))
    if types or has_states:
        args = files.args
        if not args.is_layer_wise:  # which may have a distributed one behind it
            declared = args.optional("use_distributed_optimizer")
            yield "use_distributed_optimizer", declared, bool(types)
        dtype = args.optional("params_dtype")
        if isinstance(dtype, np.dtype) and EMBEDDING in dtypes:
            yield "params_dtype", dtype.name, dtypes[EMBEDDING]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """The settings of a parameter group, and its number of steps, if it says one.

    `at` is `file:item` of them. A tensor in `common.pt` counts the steps of all: `settings` is then
    None.
    """

    steps: int | float | None
    at: str
    settings: Mapping[Any, Any] | None = None


# The groups of dense parameters (False), and of experts (True), which have their own optimizer.
Groups = Mapping[bool, list[OptimizerGroup]]


def optimizer_groups(files: DistFiles) -> Groups:
    """The parameter groups of the optimizers in `common.pt` and in the objects of pipeline stages.

    Raises FormatError where copies of one stage's optimizer differ.
    """
    by_experts: dict[bool, list[OptimizerGroup]] = defaultdict(list)
    for i, part in enumerate(optimizers(files.tree.get("optimizer"))):
        inner = part.get("optimizer", part)
        if not isinstance(inner, dict):
            raise FormatError(f"{files.common.path}: optimizer {i} is {what_is(inner)}, not a dict")
        # in older releases the optimizer of experts is the second one, and does not say so
        key = "is_expert_parallel"
        groups = map(as_dict, inner.get("param_groups") or ())
        found = by_experts[any([group[key] for group in groups if key in group] or [i])]
        tensor = as_dict(inner.get("state")).get("common_step")
        if isinstance(tensor, StoredTensor) and tensor.shape == ():
            value = files.common.read(tensor.key, Box((), ())).item()
            found.append(OptimizerGroup(value, f"{files.common_name}:{tensor.key}"))
        found += _groups(inner, f"{files.common_name}:optimizer")
    facts = Facts(files.folder)
    for key, stored in files.objects.items():
        if (about := group_key(key)) and about.what == "optimizer":
            where, file = f"{stored.file}:{key}", stored.load()
            expert = bool(about.chain) and not files.args.is_layer_wise
            first = next(iter(as_list(file.tree)), None)
            by_experts[expert] += _groups(as_dict(first), where)
            ranks = model_parallel_ranks(files.args, expert)
            stage = ranks[about.group].pp if about.group < len(ranks) else None
            facts.state_all(file, where, "optimizer", file.tree, (about.chain, stage))
    return by_experts


def _groups(inner: dict[Any, Any], at: str) -> Iterator[OptimizerGroup]:
    for group in map(as_dict, as_list(inner.get("param_groups"))):
        step = group.get("step")
        yield OptimizerGroup(step if isinstance(step, int | float) else None, at, group)


def step_of(
    importer: ContentsBuilder,
    files: DistFiles,
    groups: Sequence[OptimizerGroup],
    name: str,
    states: States,
    mixed: bool,
) -> Array | None:
    """The number of steps of a parameter, or None where no group says one (SGD counts none).

    `mixed`: another optimizer has some of the parameters. Raises FormatError where groups that may
    have the parameter say different numbers.
    """
    counts = [group for group in groups if group.steps is not None]
    if mixed:  # Adam beside another optimizer: the step of one is not that of the other
        is_adams = "exp_avg" in states
        counts = [c for c in counts if c.settings is None or ("betas" in c.settings) == is_adams]
    does = is_decayed(files.args, name, len(states["weight"].info.shape))
    # Where there is one group alone, it has what does not decay too.
    counts = [c for c in counts if c.settings is None or group_decays(c.settings) == does] or counts
    if not counts:
        return None
    first, *others = counts
    for other in others:
        if other.steps != first.steps:
            raise FormatError(
                f"{files.folder}: the optimizer of {name} made {first.steps} steps by {first.at},"
                f" but {other.steps} by {other.at}: one of these files is of another step or run,"
                " or was changed. weights_only opens the weights alone"
            )
    if first.settings is None:
        return importer.array(first.at)
    dtype = np.int32 if isinstance(first.steps, int) else np.float32
    return stated(np.asarray(first.steps, dtype), first.at)


def optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers in `common.pt`: one, or those of dense parameters (0) and experts (1)."""
    if isinstance(known(optimizer), list):
        optimizer = dict(enumerate(optimizer))
    if not isinstance(optimizer, dict):
        return []
    chained = all(isinstance(key, int) for key in optimizer)
    parts = optimizer.values() if chained else [optimizer]
    return [part for part in parts if isinstance(part, dict)]
