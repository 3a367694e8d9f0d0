"""What a target is made of: parameters by name, each with its states, and what stands beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import TreeMismatch
from jax_ucp.export.files import Tensor
from jax_ucp.metadata import Group, Leaf, plain_settings
from jax_ucp.storage.contents import Contents

# The importers' words for tensors of a model that are no parameters, and for those that are no part of a model.
BUFFER, OTHER = "buffer", "other"


@dataclass(frozen=True)
class Parameters:
    """`states[name][state]` for every parameter, `param` among the states; `other` are tensors beside the model.

    `groups` say what the optimizer was told for parameters, as far as that is known.
    """

    states: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]
    other: Mapping[str, Tensor]
    groups: Sequence[Group]

    @property
    def model(self) -> dict[str, Tensor]:
        """What a model's state dict has: parameters and buffers."""
        return {**{name: states["param"] for name, states in self.states.items()}, **self.buffers}

    @property
    def trained(self) -> list[str]:
        """The parameters that the optimizer has: those with a state besides `param`, and those of a group."""
        told = {name for group in self.groups for name in group.params}
        return [name for name, states in self.states.items() if name in told or states.keys() - {"param"}]

    @property
    def moments(self) -> list[str]:
        """The states that any parameter has, besides `param`, in the order in which they are met."""
        found = (state for states in self.states.values() for state in states if state != "param")
        return list(dict.fromkeys(found))


def parameters(contents: Contents, dtype: np.dtype | None = None) -> Parameters:
    """The parameters of a checkpoint with the tree `{state: {parameter: array}}`.

    `dtype`, if given, is that of all floating parameters in the target; states keep theirs.

    Raises TreeMismatch, naming leaves, for any other tree, and for states of what is no parameter.
    """
    strange = [leaf.label or "the tree itself" for leaf in contents.leaves if not _is_state(leaf)]
    if strange or not contents.leaves:
        what = f"{len(strange)} leaves lie elsewhere, the first {strange[0]}" if strange else "it has no leaves"
        raise TreeMismatch(
            f"{contents.path} is not a tree {{state: {{parameter: array}}}}, which is what can be exported: {what}. "
            "Map the leaves of a model back to parameters first."
        )
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    beside: dict[str, dict[str, Tensor]] = {BUFFER: {}, OTHER: {}}
    for leaf in contents.leaves:
        state, name = (str(key.name) for key in leaf.path)
        if state in beside:
            beside[state][name] = _tensor(leaf, None)
        else:
            found[name][state] = _tensor(leaf, dtype if state == "param" else None)
    if twice := sorted(found.keys() & beside[BUFFER].keys()):
        raise TreeMismatch(f"{contents.path} has {twice[0]} as a parameter and as a buffer; leave one out of the tree")
    orphans = [f"{state} of {name}" for name, states in found.items() for state in states if "param" not in states]
    if orphans:
        raise TreeMismatch(
            f"{contents.path} has states of what is no parameter ({len(orphans)}, the first {orphans[0]}); "
            "no format has a place for them. Leave them out of the tree."
        )
    return Parameters(found, beside[BUFFER], beside[OTHER], list(_of(contents.groups, found)))


def torch_groups(
    groups: Iterable[Group], trained: Collection[str], said: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Torch's `param_groups` of the parameters `trained`: settings, and in `params` the parameters' names.

    `said` are groups in the source's own words, which have settings that a `Group` leaves out, such as tensors, and an
    order: they come first, all of them. Parameters of which nothing is known are a last group, without settings.
    """
    left = list(_of(groups, trained))
    found: list[dict[str, Any]] = []
    for words in said:
        mine = next((group for group in left if group.settings == plain_settings(words)), Group((), {}))
        left = [group for group in left if group is not mine]
        found.append({**words, "params": list(mine.params)})
    for group in left:
        # What torch's optimizers take of several numbers, such as betas, is a tuple.
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in group.settings.items()}
        found.append({**settings, "params": list(group.params)})
    told = {name for group in found for name in group["params"]}
    if rest := [name for name in trained if name not in told]:
        found.append({"params": rest})
    return found


def untold(groups: Sequence[Mapping[str, Any]], instead: str) -> Iterator[str]:
    """A note on the parameters that `torch_groups` knew nothing of, and what becomes of them."""
    names = [name for group in groups if group.keys() == {"params"} for name in group["params"]]
    if names:
        yield f"nothing says what the optimizer was told for {len(names)} parameters, the first {names[0]}: {instead}"


def _of(groups: Iterable[Group], names: Collection[str]) -> Iterator[Group]:
    """The groups as far as they are of these parameters."""
    for group in groups:
        if mine := tuple(name for name in group.params if name in names):
            yield Group(mine, group.settings)


def _is_state(leaf: Leaf) -> bool:
    return leaf.has_array and len(leaf.path) == 2 and all(isinstance(key.name, str) for key in leaf.path)


def _tensor(leaf: Leaf, dtype: np.dtype | None) -> Tensor:
    stored = np.dtype(leaf.dtype)
    return Tensor(leaf.name, leaf.shape, dtype if dtype is not None and is_floating(stored) else stored)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating one, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name.startswith(("bfloat", "float")))


def named(problems: Sequence[str], what: str, remedy: str) -> str:
    """One report of problems that each name their parameter."""
    lines = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
    return "\n  ".join([f"{what}:", *lines, remedy])
