"""Objects of classes that are not known here: they may lie beside the weights, and decide nothing.

An `Opaque` is kept as JSON where it is an extra. Where it holds tensors, only its class knows what
they are: it must not be taken for the model, nor another dict because this one is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jax_ucp.codecs.tensor_names import StoredTensor
from jax_ucp.codecs.unpickle import Opaque, children, each_node
from jax_ucp.errors import FormatError
from jax_ucp.states.optimizer_dicts import Steps, head, joined, prefixes
from jax_ucp.states.state_paths import has_word


@dataclass(frozen=True)
class WeightsPlace:
    """The place of the weights: the dict at `model`, if there is one; never an optimizer.

    `model_is_certain` if the dict has a usual word for a model, or an optimizer names its
    parameters.
    """

    model: Steps | None
    model_is_certain: bool
    optimizers: frozenset[Steps]

    def is_aside(self, path: Steps) -> bool:
        """Whether a path leads to no weight: it is in an optimizer, or beside a certain model."""
        if any(in_optimizer(path, optimizer) for optimizer in self.optimizers):
            return True
        if not self.model_is_certain or has_word(path):
            return False
        return self.model is None or path[: len(self.model)] != self.model


def weights_place(
    paths: Mapping[str, Steps], at: Mapping[str, tuple[str, str]], in_optimizers: Collection[str]
) -> WeightsPlace:
    """Where the weights are, by the path of every tensor, its (state, parameter), and which are an
    optimizer's.

    >>> paths = {"model.w": ("model", "w"), "optim.state.0.m": ("optim", "state", 0, "m")}
    >>> place = weights_place(paths, {"model.w": ("param", "w"), "optim.state.0.m": ("other", "")},
    ...     {"optim.state.0.m"})
    >>> place.is_aside(("ema",)), place.is_aside(("model", "v")), place.is_aside(("optim", "state",
    ...     0, "n"))
    (True, False, True)
    """
    # the dict from which the path of the first weight is the name of its parameter
    model: Steps | None = None
    weights = [label for label, (state, _) in at.items() if state == "param"]
    for label in weights[:1]:
        path, (_, name) = paths[label], at[label]
        roots = (root for root in prefixes(path) if joined(path[len(root) :]) == name)
        model = next(roots, None)
    has_states = not {state for state, _ in at.values()} <= {"param", "other"}
    under_model_word = model is not None and has_word(model)
    # of a path to a state that of the optimizer's dict
    optimizers = frozenset(
        next((root for root in prefixes(path) if _is_state(path[len(root) :])), path)
        for path in map(paths.__getitem__, in_optimizers)
    )
    return WeightsPlace(model, has_states or under_model_word, optimizers)


def in_optimizer(path: Steps, optimizer: Steps) -> bool:
    """Whether a path leads to states or groups of the optimizer's dict at another path."""
    return path[: len(optimizer)] == optimizer and _is_state(path[len(optimizer) :])


def _is_state(path: Steps) -> bool:
    """Whether a path in an optimizer leads to states or groups; its first key may be flattened."""
    return bool(path) and head(path[0]) in ("state", "param_groups")


def require_known(node: object) -> None:
    """Raise FormatError for an object of an unknown class if its tree has tensors, or may have."""
    if not isinstance(node, Opaque):
        for _, child in children(node):
            require_known(child)
    elif node.closed or any(isinstance(inner, StoredTensor) for inner in each_node(node)):
        raise FormatError(
            f"{node.where} is an object of {node.type}, which is not known here, and holds tensors"
            " that only its class can tell apart. Save its state_dict(), or its tensors in a dict,"
            " instead of the object"
        )
