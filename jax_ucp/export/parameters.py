"""What a target is made of: parameters by name, each with its states, and what stands beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.errors import TreeMismatch
from jax_ucp.export.files import Tensor
from jax_ucp.metadata import Leaf
from jax_ucp.storage.contents import Contents

# The importers' words for tensors of a model that are no parameters, and for those that are no part of a model.
BUFFER, OTHER = "buffer", "other"


@dataclass(frozen=True)
class Parameters:
    """`states[name][state]` for every parameter, `param` among the states; `other` are tensors beside the model."""

    states: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]
    other: Mapping[str, Tensor]

    @property
    def model(self) -> dict[str, Tensor]:
        """What a model's state dict has: parameters and buffers."""
        return {**{name: states["param"] for name, states in self.states.items()}, **self.buffers}

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
    orphans = [f"{state} of {name}" for name, states in found.items() for state in states if "param" not in states]
    if orphans:
        raise TreeMismatch(
            f"{contents.path} has states of what is no parameter ({len(orphans)}, the first {orphans[0]}); "
            "no format has a place for them. Leave them out of the tree."
        )
    return Parameters(found, beside[BUFFER], beside[OTHER])


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
