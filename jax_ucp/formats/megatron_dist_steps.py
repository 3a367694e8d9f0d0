"""How often the optimizers of a torch_dist checkpoint stepped. torch's AdamW and FusedAdam keep that in two places.

Facts: `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron_dist_files import COMMON_FILE, DistFiles, StoredObject
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class Step:
    """A number of steps, and where it is: in `common.pt` perhaps a `tensor`.

    `decays` says of which parameter group it is: that with weight decay, that without, or of both (None).
    """

    value: int | float
    decays: bool | None
    where: str
    tensor: StoredTensor | None = None


def common_steps(files: DistFiles) -> dict[bool, list[Step]]:
    """The steps in `common.pt` by optimizer; that of experts under True."""
    found: dict[bool, list[Step]] = {}
    for i, part in enumerate(optimizers(files.tree.get("optimizer"))):
        inner = part.get("optimizer", part)
        if not isinstance(inner, dict):
            raise FormatError(f"{files.common.path}: optimizer {i} is a {type(inner).__name__}, not a dict")
        state = inner.get("state")
        steps = found.setdefault(bool(i), [])
        tensor = state.get("common_step") if isinstance(state, dict) else None
        if isinstance(tensor, StoredTensor) and tensor.shape == ():
            value = files.common.read(tensor.key, Box((), ())).item()
            steps.append(Step(value, None, f"{COMMON_FILE}:{tensor.key}", tensor))
        steps += _of_groups(inner, f"{COMMON_FILE}:optimizer")
    return found


def group_steps(key: str, stored: StoredObject) -> list[Step]:
    """The steps in the param groups of one model-parallel rank's optimizer."""
    tree = stored.open().tree
    inner = tree[0] if isinstance(tree, list) and tree else None
    return list(_of_groups(inner if isinstance(inner, dict) else {}, f"{stored.file}:{key}"))


def one_step(files: DistFiles, name: str, steps: Sequence[Step]) -> Step:
    """The step of a parameter, of which all places must say the same."""
    if not steps:
        raise FormatError(
            f"{files.folder}: how often the optimizer of {name} stepped is not found where Adam's is (SGD and Muon do "
            "not store it, and of several optimizers which one has the parameter is not stored); weights_only leaves "
            "the optimizer aside"
        )
    first = steps[0]
    for other in steps[1:]:
        if other.value != first.value:
            raise FormatError(
                f"{files.folder}: the optimizer of {name} made {first.value} steps by {first.where}, but {other.value} "
                f"by {other.where}"
            )
    return first


def optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers in `common.pt`: one, or under the numbers 0 and 1 those of dense parameters and of experts."""
    if not isinstance(optimizer, dict):
        return []
    parts = list(optimizer.values()) if all(isinstance(key, int) for key in optimizer) else [optimizer]
    return [part for part in parts if isinstance(part, dict)]


def _of_groups(inner: dict[Any, Any], where: str) -> Iterator[Step]:
    groups = inner.get("param_groups")
    for group in groups if isinstance(groups, list) else []:
        step = group.get("step") if isinstance(group, dict) else None
        if isinstance(step, int | float):
            yield Step(step, group.get("wd_mult", 1.0) != 0, where)
