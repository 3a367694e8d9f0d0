"""How often the optimizers of a torch_dist checkpoint stepped. torch's AdamW and FusedAdam keep
that in two places.

Facts: `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py` of Megatron-LM
core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.dist_files import COMMON_FILE, DistFiles, StoredObject
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import known, what_is
from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class Step:
    """A number of steps, and where it is: in `common.pt` perhaps a `tensor`.

    `decays` says of which parameter group it is: that with weight decay, that without, or of both
    (None). `adam`: of an optimizer with betas, which has their moments, of one without, or of
    either (None).
    """

    value: int | float
    decays: bool | None
    where: str
    tensor: StoredTensor | None = None
    adam: bool | None = None


def common_steps(files: DistFiles) -> dict[bool, list[Step]]:
    """The steps in `common.pt`: those of experts, which have an optimizer of their own, under
    True.
    """
    by_experts: dict[bool, list[Step]] = {}
    for i, part in enumerate(optimizers(files.tree.get("optimizer"))):
        inner = part.get("optimizer", part)
        if not isinstance(inner, dict):
            raise FormatError(f"{files.common.path}: optimizer {i} is {what_is(inner)}, not a dict")
        steps = by_experts.setdefault(_of_experts(inner, i), [])
        tensor = _as_dict(inner.get("state")).get("common_step")
        if isinstance(tensor, StoredTensor) and tensor.shape == ():
            value = files.common.read(tensor.key, Box((), ())).item()
            steps.append(Step(value, None, f"{COMMON_FILE}:{tensor.key}", tensor))
        steps += _of_groups(inner, f"{COMMON_FILE}:optimizer")
    return by_experts


def _as_dict(tree: Any) -> dict[Any, Any]:
    return tree if isinstance(tree, dict) else {}


def group_steps(key: str, stored: StoredObject) -> list[Step]:
    """The steps in the param groups of one model-parallel rank's optimizer."""
    tree = stored.open().tree
    inner = tree[0] if isinstance(tree, list) and tree else None
    return list(_of_groups(_as_dict(inner), f"{stored.file}:{key}"))


def one_step(files: DistFiles, name: str, steps: Sequence[Step]) -> Step | None:
    """The step of a parameter, of which all places must say the same; None where none says it,
    as SGD does not.
    """
    if not steps:
        return None
    first = steps[0]
    for other in steps[1:]:
        if other.value != first.value:
            raise FormatError(
                f"{files.folder}: the optimizer of {name} made {first.value} steps by"
                f" {first.where}, but {other.value} by {other.where}: one of these files is of"
                " another step or run, or was changed. weights_only opens the weights alone"
            )
    return first


def optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers in `common.pt`: one, or under the numbers 0 and 1 those of dense parameters
    and of experts.
    """
    if not isinstance(known(optimizer), dict):
        return []
    parts = (
        list(optimizer.values()) if all(isinstance(key, int) for key in optimizer) else [optimizer]
    )
    return [part for part in parts if isinstance(part, dict)]


def _of_experts(inner: dict[Any, Any], index: int) -> bool:
    """Whether the optimizer is that of experts: its groups say so, and in older releases it is
    the second one.
    """
    groups = map(_as_dict, inner.get("param_groups") or ())
    marks = [group["is_expert_parallel"] for group in groups if "is_expert_parallel" in group]
    return any(marks) if marks else bool(index)


def _of_groups(inner: dict[Any, Any], where: str) -> Iterator[Step]:
    groups = inner.get("param_groups")
    for group in map(_as_dict, groups if isinstance(groups, list) else []):
        step = group.get("step")
        if isinstance(step, int | float):
            yield Step(step, group.get("wd_mult", 1.0) != 0, where, adam="betas" in group)
