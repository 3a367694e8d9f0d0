"""How often the optimizers of a torch_dist checkpoint stepped.

torch's AdamW and FusedAdam keep that in two places.

Facts: `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py` of Megatron-LM
core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron.dist_buffers import stage_of
from jax_ucp.formats.megatron.dist_files import DistFiles, StoredObject
from jax_ucp.formats.megatron.dist_flat import group_object
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import known, what_is
from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class Step:
    """A number of steps, and `file:item` that has it: in `common.pt` perhaps a `tensor`.

    `decays` marks parameter groups with weight decay, `adam` those of an optimizer with betas,
    which has their moments; None is either.
    """

    value: int | float
    decays: bool | None
    at: str
    tensor: StoredTensor | None = None
    adam: bool | None = None


def steps_of(files: DistFiles) -> dict[bool, list[Step]]:
    """The steps in `common.pt` and in the objects of ranks: those of experts, which have their own
    optimizer, under True. Raises FormatError where ranks of one stage differ in their optimizers.
    """
    by_experts = _common_steps(files)
    facts = Facts(files.folder)
    for key, stored in files.objects.items():
        if (about := group_object(key)) and about.what == "optimizer":
            expert = bool(about.chain) and not files.args.is_layer_wise
            by_experts.setdefault(expert, []).extend(_group_steps(key, stored))
            file, stage = stored.open(), stage_of(files.args, expert, about.group)
            where = f"{stored.file}:{key}"
            facts.state_all(file, where, "optimizer", file.tree, (about.chain, stage))
    return by_experts


def _common_steps(files: DistFiles) -> dict[bool, list[Step]]:
    by_experts: dict[bool, list[Step]] = {}
    for i, part in enumerate(optimizers(files.tree.get("optimizer"))):
        inner = part.get("optimizer", part)
        if not isinstance(inner, dict):
            raise FormatError(f"{files.common.path}: optimizer {i} is {what_is(inner)}, not a dict")
        steps = by_experts.setdefault(_of_experts(inner, i), [])
        tensor = as_dict(inner.get("state")).get("common_step")
        if isinstance(tensor, StoredTensor) and tensor.shape == ():
            value = files.common.read(tensor.key, Box((), ())).item()
            steps.append(Step(value, None, f"{files.common_name}:{tensor.key}", tensor))
        steps += _of_groups(inner, f"{files.common_name}:optimizer")
    return by_experts


def _group_steps(key: str, stored: StoredObject) -> list[Step]:
    """The steps in the param groups of one model-parallel rank's optimizer."""
    first = next(iter(as_list(stored.open().tree)), None)
    return list(_of_groups(as_dict(first), f"{stored.file}:{key}"))


def one_step(files: DistFiles, name: str, steps: Sequence[Step]) -> Step | None:
    """The step of a parameter, or None where nothing has it, as SGD has none.

    Raises FormatError where two places differ.
    """
    if not steps:
        return None
    first, *others = steps
    for other in others:
        if other.value != first.value:
            raise FormatError(
                f"{files.folder}: the optimizer of {name} made {first.value} steps by {first.at},"
                f" but {other.value} by {other.at}: one of these files is of another step or run,"
                " or was changed. weights_only opens the weights alone"
            )
    return first


def optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers in `common.pt`: one, or those of dense parameters (0) and of experts (1).

    NeMo has a list of them.
    """
    if isinstance(known(optimizer), list):
        optimizer = dict(enumerate(optimizer))
    if not isinstance(optimizer, dict):
        return []
    chained = all(isinstance(key, int) for key in optimizer)
    parts = optimizer.values() if chained else [optimizer]
    return [part for part in parts if isinstance(part, dict)]


def _of_experts(inner: dict[Any, Any], index: int) -> bool:
    """Whether the optimizer is that of experts; in older releases that is the second one."""
    groups = map(as_dict, inner.get("param_groups") or ())
    key = "is_expert_parallel"
    marks = [group[key] for group in groups if key in group]
    return any(marks or [index])


def _of_groups(inner: dict[Any, Any], at: str) -> Iterator[Step]:
    for group in map(as_dict, as_list(inner.get("param_groups"))):
        step = group.get("step")
        if isinstance(step, int | float):
            yield Step(step, group.get("wd_mult", 1.0) != 0, at, adam="betas" in group)
