"""The parts of an export: parameters by name with their states, buffers and the rest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.optimizer_groups import Group, plain_settings
from jax_ucp.errors import TreeMismatch, UnsupportedLeaf
from jax_ucp.export.files import Tensor
from jax_ucp.tree import Leaf

# The remedy for dtypes that a format lacks: an export casts nothing else.
CAST_FIRST = (
    "Give a dtype (--dtype) for floating-point parameters, and cast other arrays before you export"
)

# The importers' words for tensors of a model that are not parameters, and for tensors that are not
# part of a model.
BUFFER, OTHER = "buffer", "other"


@dataclass(frozen=True)
class Parameters:
    """The parameters by name and state, buffers, other tensors and known optimizer settings."""

    states: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]
    other: Mapping[str, Tensor]
    groups: Sequence[Group]

    @property
    def model(self) -> dict[str, Tensor]:
        """The tensors of a model's state dict by name: parameters and buffers."""
        return {name: states["param"] for name, states in self.states.items()} | dict(self.buffers)

    @property
    def trained(self) -> list[str]:
        """The parameters in the optimizer: those with a state besides `param`, or in a group."""
        grouped = {name for group in self.groups for name in group.params}
        return [
            name
            for name, states in self.states.items()
            if name in grouped or states.keys() - {"param"}
        ]

    @property
    def moments(self) -> list[str]:
        met = dict.fromkeys(itertools.chain.from_iterable(self.states.values()))
        return [state for state in met if state != "param"]


def parameters(contents: Contents, dtype: np.dtype | None = None) -> Parameters:
    """The parameters of a checkpoint with the tree `{state: {parameter: array}}`.

    `dtype`, if given, is that of all floating parameters in the target; states keep theirs. Raises
    TreeMismatch for any other tree, a parameter that is a buffer too, or a state without its
    parameter.
    """
    strange = list(itertools.filterfalse(_is_state, contents.leaves))
    if strange or not contents.leaves:
        what = "it has no leaves"
        if strange:
            label = strange[0].label or "the tree itself"
            what = f"{len(strange)} leaves lie elsewhere, the first {label}"
        raise TreeMismatch(
            f"{contents.path} is not a tree {{state: {{parameter: array}}}}, which is what can be"
            f" exported: {what}. Map the leaves of a model back to parameters first."
        )
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    beside: dict[str, dict[str, Tensor]] = {BUFFER: {}, OTHER: {}}
    for leaf in contents.leaves:
        state, name = (str(key.name) for key in leaf.path)
        tensor = _tensor(leaf, dtype if state == "param" else None)
        if state in beside:
            beside[state][name] = tensor
        else:
            states[name][state] = tensor
    if twice := sorted(states.keys() & beside[BUFFER].keys()):
        raise TreeMismatch(
            f"{contents.path} has {twice[0]} as a parameter and as a buffer; leave one out of the"
            " tree"
        )
    bare = {name: tensors for name, tensors in states.items() if "param" not in tensors}
    orphans = [f"{state} of {name}" for name, tensors in bare.items() for state in tensors]
    if orphans:
        raise TreeMismatch(
            f"{contents.path} has states of what is not a parameter ({len(orphans)}, the first"
            f" {orphans[0]}); no format has a place for them. Leave them out of the tree."
        )
    return Parameters(states, beside[BUFFER], beside[OTHER], list(_of(contents.groups, states)))


def torch_groups(
    groups: Iterable[Group], trained: Collection[str], originals: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Torch's `param_groups` of the parameters `trained`: settings and names in `params`.

    `originals` are the source's groups, with settings that a `Group` leaves out; they come first.
    Parameters in no group form a last group, without settings.
    """
    left = list(_of(groups, trained))
    unknown = dict.fromkeys(trained)
    torch: list[dict[str, Any]] = []

    def add(settings: Mapping[str, Any], names: Sequence[str]) -> None:
        torch.append({**settings, "params": list(names)})
        for name in names:
            unknown.pop(name, None)

    for settings in originals:
        plain = plain_settings(settings)
        same = [i for i, group in enumerate(left) if group.settings == plain]
        add(settings, left.pop(same[0]).params if same else ())
    for group in left:
        # several numbers, such as betas, are tuples in torch's optimizers
        settings = group.settings.items()
        add({key: tuple(v) if isinstance(v, list) else v for key, v in settings}, group.params)
    if unknown:
        add({}, list(unknown))
    return torch


def one_step(steps: Mapping[str, np.ndarray], why: str, remedy: str = "") -> np.ndarray | None:
    """The step that all these parameters have; None if there are no parameters. Raises
    UnsupportedLeaf, with `why` they need one step, if they differ.
    """
    different = {step.item(): name for name, step in steps.items()}
    if len(different) > 1:
        shown = ", ".join(f"{step} of {name}" for step, name in different.items())
        raise UnsupportedLeaf(f"{why}, but here are {shown}", remedy=remedy)
    return next(iter(steps.values()), None)


def untold(groups: Sequence[Mapping[str, Any]], instead: str) -> Iterator[str]:
    """A note on the parameters for which `torch_groups` has no settings, and their treatment."""
    bare = [group["params"] for group in groups if group.keys() == {"params"}]
    names = list(itertools.chain.from_iterable(bare))
    if names:
        yield (
            f"nothing says what the optimizer was told for {len(names)} parameters, the first"
            f" {names[0]}: {instead}"
        )


def _of(groups: Iterable[Group], names: Collection[str]) -> Iterator[Group]:
    for group in groups:
        if mine := tuple(filter(names.__contains__, group.params)):
            yield Group(mine, group.settings)


def _is_state(leaf: Leaf) -> bool:
    keys = [type(key.name) for key in leaf.path]
    return leaf.has_array and keys == [str, str]


def _tensor(leaf: Leaf, dtype: np.dtype | None) -> Tensor:
    stored = np.dtype(leaf.dtype)
    if dtype is None or not is_floating(stored):
        dtype = stored
    return Tensor(leaf.name, leaf.shape, dtype)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating one, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name.startswith(("bfloat", "float")))
