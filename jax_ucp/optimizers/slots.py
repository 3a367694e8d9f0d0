"""The leaves of an optax state, and what each holds by the type of the state that it is in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from jax_ucp.errors import TreeMismatch
from jax_ucp.sharding.trees import walk
from jax_ucp.text import listed
from jax_ucp.tree import Key, Leaf, Path

STEP = "step"
# The role of a field of a state: the name of a moment, or one of these.
COUNT, ZEROS, GIVEN, INNER = "number of steps", "zeros", "as the optimizer was made", "inner"

# The table by which states are converted, in both directions.
FIELDS: dict[type, dict[str, str]] = {
    optax.ScaleByAdamState: {"count": COUNT, "mu": "exp_avg", "nu": "exp_avg_sq"},
    optax.ScaleByLionState: {"count": COUNT, "mu": "exp_avg"},
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.ScaleByScheduleState: {"count": COUNT},
    optax.InjectHyperparamsState: {"count": COUNT, "hyperparams": GIVEN, "inner_state": INNER},
    optax.InjectStatefulHyperparamsState: {
        "count": COUNT,
        "hyperparams": GIVEN,
        "hyperparams_states": COUNT,
        "inner_state": INNER,
    },
    # a trainer saves between two updates, when no gradients are accumulated
    optax.MultiStepsState: {
        "mini_step": ZEROS,
        "gradient_step": COUNT,
        "inner_opt_state": INNER,
        "acc_grads": ZEROS,
        "skip_state": INNER,
    },
    optax.MaskedState: {"inner_state": INNER},
    optax.PartitionState: {"inner_states": INNER},
}

# The names of the fields that are counts, also in states of schedules inside inject_hyperparams.
_COUNTS = ("count", "gradient_step")


@dataclass(frozen=True, slots=True)
class OptaxLeaf:
    """A leaf of an optax state: its role, its parameter if it has one, the type of its state, and
    for a count the parameters that it `covers`.
    """

    path: Path
    role: str
    value: Any
    owner: type
    param: str = ""
    covers: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "/".join(map(str, self.path))

    @property
    def of_moments(self) -> bool:
        """Whether its state also has moments, whose updates its count then counts."""
        return not {COUNT, ZEROS, GIVEN, INNER}.issuperset(FIELDS[self.owner].values())


def slots_of(tx: optax.GradientTransformation, params: Any) -> tuple[Any, list[OptaxLeaf]]:
    """The abstract state and its leaves, in order. Raises TreeMismatch for an unknown one."""
    state = jax.eval_shape(tx.init, jax.tree.map(_as_jax_has_it, params))
    names = param_leaves(params).keys()
    slots = list(_visit(state, (), names))
    return state, [replace(slot, covers=_covers(slot, slots, names)) for slot in slots]


def _as_jax_has_it(leaf: Any) -> Any:
    """The leaf with the dtype that JAX would give it, without a warning: 32 bits instead of 64."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def param_leaves(params: Any) -> dict[str, Any]:
    """The arrays of a tree of parameters, by name."""
    return {name_of(node.path): node.value for node in walk(params) if is_array(node.value)}


def unlike(params: Mapping[str, Any], stored: Mapping[str, Leaf], lacking: str) -> Iterator[str]:
    """Messages about a model's parameters that are stored in another shape, or not (`lacking`)."""
    for name, value in params.items():
        leaf = stored.get(name)
        if leaf is None:
            yield f"{name}: a parameter of the model, but {lacking}"
        elif leaf.shape != tuple(value.shape):
            yield (
                f"{name} has shape {tuple(value.shape)} in the model, {leaf.shape} in the"
                " checkpoint"
            )


def name_of(path: Path) -> str:
    """The name of the parameter at a path, without the attribute `value` of Flax's variables."""
    keys = path[:-1] if path and path[-1] == Key("attr", "value") else path
    return "/".join(map(str, keys))


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def few(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    return listed(names, 1)


def _visit(node: Any, path: Path, names: Collection[str]) -> Iterator[OptaxLeaf]:
    """The leaves below a node of an optax state. Raises TreeMismatch for unknown types."""
    fields = FIELDS.get(type(node))
    if fields is None and _is_named(node) and jax.tree.leaves(node):
        known = ", ".join(sorted(kind.__name__ for kind in FIELDS))
        raise TreeMismatch(
            f"{'/'.join(map(str, path))} is a {type(node).__name__}, and nothing says which state"
            f" of torch it is; known are {known}"
        )
    for key, child in _children(node):
        role = fields[str(key)] if fields else INNER
        if role == INNER:
            yield from _visit(child, (*path, key), names)
            continue
        # the arrays in a field, each with the parameter that its path names, if any
        for leaf in (each for each in walk(child, (*path, key)) if is_array(each.value)):
            if role == COUNT and name_of(leaf.path).rpartition("/")[2] not in _COUNTS:
                raise TreeMismatch(
                    f"{leaf.label} is a state of a schedule of its own, and nothing says what it"
                    " holds"
                )
            param = name_of(leaf.path[len(path) + 1 :])
            if role in (COUNT, GIVEN) or param not in names:
                param = ""
            yield OptaxLeaf(leaf.path, role, leaf.value, type(node), param)


def _children(node: Any) -> Iterator[tuple[Key, Any]]:
    """The children of a dict, a named tuple, a list or a tuple, with their keys."""
    kind, items = "attr", ()
    if isinstance(node, dict):
        kind, items = "dict", node.items()
    elif _is_named(node):
        items = node._asdict().items()
    elif isinstance(node, tuple | list):
        kind, items = "list" if isinstance(node, list) else "tuple", enumerate(node)
    for key, child in items:
        yield Key(kind, key), child


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _covers(slot: OptaxLeaf, slots: Sequence[OptaxLeaf], names: Collection[str]) -> tuple[str, ...]:
    """The parameters whose updates a count counts: those with moments in the nearest state around
    it, or else all `names`; empty if the slot is not a count.
    """
    if slot.role != COUNT:
        return ()
    for depth in range(len(slot.path) - 1, -1, -1):
        around = slot.path[:depth]
        params = {other.param for other in slots if other.path[:depth] == around} - {""}
        if params:
            return tuple(sorted(params))
    return tuple(sorted(names))
