"""The states of torch's optimizers as those of optax, found by their types, and back.

An optax state is a tree of named tuples. Each type that is known here says of each of its fields what it holds: a
moment of every parameter, the number of steps, zeros, or what the optimizer was made with. A type that is not known is
refused: what it holds would be a guess. Positions do not count, so that `chain`, `masked`, `partition`,
`inject_hyperparams` and `MultiSteps` may be nested in any way.

Facts, by torch 2.13 (`torch/optim/adam.py`, `sgd.py`) and optax 0.2.8 (`optax/_src/transform.py`, `_accumulation.py`):

- Adam, AdamW: `exp_avg`, `exp_avg_sq` are optax's `mu`, `nu`: both keep b * m + (1 - b) * g uncorrected. `step` is
  optax's `count`: both count the updates done, and correct the bias of an update by that number and one. Torch adds
  eps to the corrected root, which is optax's `eps`, not `eps_root`. Weight decay has no state in either; that of
  torch's Adam is a term of the gradient, `chain(add_decayed_weights(...), scale_by_adam(...), ...)`.
- SGD: `momentum_buffer` is optax's `trace`: both are decay * t + g, with or without Nesterov. With dampening torch's
  is another sum, which is refused.
- Lion (DeepSpeed's, `deepspeed/ops/lion`): `exp_avg` is optax's `mu`; its `count` is not used in an update.
- AMSGrad: torch keeps the maximum of the second moments as they are, optax of the corrected ones. Refused.
- A schedule of optax is asked for the count of updates done, which is torch's `last_epoch` of a scheduler that is
  stepped with the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.box import Box
from jax_ucp.metadata import Key, Leaf, Path, leaf_names
from jax_ucp.sharding.fit import Rule
from jax_ucp.sharding.restore import plan_restore, run_restore
from jax_ucp.sharding.trees import FAULTS_SHOWN, empty_kind, walk
from jax_ucp.storage.budget import DEFAULT_BUDGET
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.source import ArrayInfo, ArraySource
from jax_ucp.weight_decay import decay_faults

STEP = "step"
# What a field of a state holds: the name of a moment, or one of these.
_STEP, _ZEROS, _GIVEN, _INNER = "number of steps", "zeros", "as the optimizer was made", "inner"

_FIELDS: dict[type, dict[str, str]] = {
    optax.ScaleByAdamState: {"count": _STEP, "mu": "exp_avg", "nu": "exp_avg_sq"},
    optax.ScaleByLionState: {"count": _STEP, "mu": "exp_avg"},
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.ScaleByScheduleState: {"count": _STEP},
    optax.InjectHyperparamsState: {"count": _STEP, "hyperparams": _GIVEN, "inner_state": _INNER},
    optax.InjectStatefulHyperparamsState: {
        **{"count": _STEP, "hyperparams": _GIVEN, "hyperparams_states": _STEP, "inner_state": _INNER}
    },
    # A trainer saves between two updates, so that no gradients are being gathered.
    optax.MultiStepsState: {
        **{"mini_step": _ZEROS, "gradient_step": _STEP, "inner_opt_state": _INNER, "acc_grads": _ZEROS},
        **{"skip_state": _INNER},
    },
    optax.MaskedState: {"inner_state": _INNER},
    optax.PartitionState: {"inner_states": _INNER},
}

# Names of the fields that count; those of schedules inside inject_hyperparams are called as the others are.
_COUNTS = ("count", "gradient_step")

Fate = Literal["mapped", "computed", "initial"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A leaf of an optax state: what it holds, of which parameter, or of which parameters the steps count."""

    path: Path
    role: str
    value: Any
    param: str = ""
    covers: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "/".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Filled:
    """Where the value of a leaf of an optax state comes from."""

    slot: Slot
    fate: Fate
    reason: str
    leaf: Leaf | None = None
    value: np.ndarray | None = None

    def __str__(self) -> str:
        return f"{self.slot.label}: {self.fate}, {self.reason}"


@dataclass(frozen=True)
class OptimizerPlan:
    """An optax state out of a checkpoint, decided before any moment is read.

    `filled` has every leaf; `left` has what the checkpoint holds for optimizers and no leaf takes, with the reason;
    `step` is the number of updates done, where all parameters agree on it.
    """

    contents: Contents
    state: Any
    filled: Sequence[Filled]
    left: Mapping[str, str]
    step: int | None

    def report(self) -> str:
        """A line for each leaf of the state, and for each state of the checkpoint that is left."""
        left = [f"{name} of the checkpoint: left, {reason}" for name, reason in self.left.items()]
        return "\n".join([*map(str, self.filled), *left])

    def restore(
        self,
        *,
        mesh: Mesh | None = None,
        rules: Sequence[Rule] = (),
        cast: bool | DTypeLike = False,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> Any:
        """The optax state. A moment lies as its parameter does, if the parameters of the plan had shardings.

        Else it is placed on `mesh`, by `rules` on labels such as `0/mu/layers/kernel`, or on the one device that
        `tx.init` would take. `cast=True` converts to the dtypes of the state.

        Raises TreeMismatch where dtypes differ, or leaves have no place.
        """
        source = _Values(self.contents.arrays, self.filled)
        state = self.state if mesh else jax.tree.map(_on_a_device, self.state)
        plan = plan_restore(source.leaves(state), state, mesh=mesh, rules=rules, cast=cast)
        return run_restore(plan, source, budget_bytes)


def plan_optimizer(
    contents: Contents,
    tx: optax.GradientTransformation,
    params: Any,
    step: int | None = None,
    check_decay: bool = True,
) -> OptimizerPlan:
    """How the state that `tx.init(params)` has is filled from a checkpoint of a torch trainer.

    `params` is the tree of the model, of arrays or ShapeDtypeStructs; its leaves are those of the checkpoint below
    `param`. `step` is the number of updates done, for a checkpoint that does not say it (torch's SGD counts none).
    With `check_decay`, `tx` must decay the weights that the checkpoint's parameter groups decay, where these are known.

    Raises TreeMismatch with everything that has no source: a state of a type that is not known, a parameter without
    the moment, steps that differ or are not there; and with every parameter that is decayed otherwise.
    """
    state, slots = _slots(tx, params)
    stored = _states(contents)
    faults = [*_refusals(contents.extras), *_unlike(params, stored.get("param", {}))]
    faults += decay_faults(contents.groups, tx, params) if check_decay else []
    used: set[str] = set()
    filled: list[Filled] = []
    given = _given(tx, params, [slot for slot in slots if slot.role == _GIVEN])
    steps = _Steps(contents, stored.get(STEP, {}), step)
    for slot in slots:
        try:
            found = _fill(slot, stored, steps, given)
        except TreeMismatch as fault:
            faults.append(f"{slot.label}: {fault}")
            continue
        filled.append(found)
        used |= {str(found.leaf.path[0])} if found.leaf else set()
    if faults:
        more = [f"... and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        lines = "\n  ".join([*faults[:FAULTS_SHOWN], *more])
        raise TreeMismatch(f"{contents.path} does not fill the optimizer's state, in {len(faults)} places:\n  {lines}")
    used |= {"param", *([STEP] if steps.asked else [])}
    left = {name: _LEFT.get(name, "no state of this optimizer takes it") for name in stored if name not in used}
    return OptimizerPlan(contents, _placed(state, slots, params), filled, left, steps.common())


_LEFT = {"max_exp_avg_sq": "torch keeps the maximum of uncorrected moments, which optax has no place for"}


@dataclass
class _Steps:
    """The steps of parameters, each read once, a few bytes."""

    contents: Contents
    stored: Mapping[str, Leaf]
    said: int | None
    known: dict[str, int] = field(default_factory=dict[str, int])
    asked: bool = False

    def of(self, params: Sequence[str]) -> int:
        """The steps of these parameters, which must agree."""
        self.asked = True
        found: dict[int, str] = {}
        for param in params:
            found.setdefault(self._one(param), param)
        if len(found) > 1:
            told = ", ".join(f"{count} of {param}" for count, param in sorted(found.items())[:4])
            raise TreeMismatch(f"one count stands for parameters whose steps differ: {told}; partition the optimizer")
        if not found:
            raise TreeMismatch("it counts the steps of no parameter")
        return next(iter(found))

    def common(self) -> int | None:
        counts = {self._one(param) for param in self.stored}
        return self.said if not counts else counts.pop() if len(counts) == 1 else None

    def _one(self, param: str) -> int:
        if param not in self.known:
            if param not in self.stored:
                if self.said is None:
                    raise TreeMismatch(f"the checkpoint does not say the steps of {param}; give step=")
                return self.said
            leaf = self.stored[param]
            value = float(np.asarray(self.contents.arrays.read(leaf.name, Box.whole(leaf.shape))).reshape(()))
            if value != int(value) or value < 0:
                raise TreeMismatch(f"{leaf.label} is {value}, which is no number of steps")
            self.known[param] = int(value)
        if self.said is not None and self.said != self.known[param]:
            raise TreeMismatch(f"step={self.said} was given, but {param} has done {self.known[param]}")
        return self.known[param]


def _slots(tx: optax.GradientTransformation, params: Any) -> tuple[Any, list[Slot]]:
    """The abstract state of the optimizer, and its leaves in the order of JAX's."""
    state = jax.eval_shape(tx.init, params)
    names = {slot.param for slot in _param_slots(params)}
    slots = list(_visit(state, (), names))
    return state, [replace(slot, covers=_covers(slot, slots, names)) if slot.role == _STEP else slot for slot in slots]


def _param_slots(params: Any) -> list[Slot]:
    return [Slot(node.path, "param", node.value, _name(node.path)) for node in walk(params) if _is_array(node.value)]


def _visit(node: Any, path: Path, names: Collection[str]) -> Iterator[Slot]:
    """The leaves of a state, each by what the type of the state around it says."""
    fields = _FIELDS.get(type(node))
    if fields is None and _is_named(node) and jax.tree.leaves(node):
        known = ", ".join(sorted(kind.__name__ for kind in _FIELDS))
        raise TreeMismatch(
            f"{'/'.join(map(str, path))} is a {type(node).__name__}, and nothing says which state of torch it is; "
            f"known are {known}"
        )
    for name, child in _children(node):
        role = fields[str(name)] if fields else _INNER
        if role == _INNER:
            yield from _visit(child, (*path, name), names)
            continue
        for leaf in walk(child, (*path, name)):
            if role == _STEP and _is_array(leaf.value) and _name(leaf.path).rpartition("/")[2] not in _COUNTS:
                raise TreeMismatch(f"{leaf.label} is a state of a schedule of its own, and nothing says what it holds")
            if _is_array(leaf.value):
                relative = _name(leaf.path[len(path) + 1 :])
                about = relative if role not in (_STEP, _GIVEN) and relative in names else ""
                yield Slot(leaf.path, role, leaf.value, about)


def _children(node: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(node, dict):
        yield from ((Key("dict", key), child) for key, child in node.items())
    elif _is_named(node):
        yield from ((Key("attr", key), getattr(node, key)) for key in type(node)._fields)
    elif isinstance(node, tuple | list):
        yield from ((Key("list" if isinstance(node, list) else "tuple", i), child) for i, child in enumerate(node))


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _covers(slot: Slot, slots: Sequence[Slot], names: Collection[str]) -> tuple[str, ...]:
    """Whose steps a count is: of the parameters with moments in its own state, else in the states around it."""
    for depth in range(len(slot.path) - 1, -1, -1):
        found = {other.param for other in slots if other.param and other.path[:depth] == slot.path[:depth]}
        if found:
            return tuple(sorted(found))
    return tuple(sorted(names))


def _name(path: Path) -> str:
    """The parameter that a path says; Flax keeps an array in the attribute `value` of a variable."""
    keys = path[:-1] if path and path[-1] == Key("attr", "value") else path
    return "/".join(map(str, keys))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _states(contents: Contents) -> dict[str, dict[str, Leaf]]:
    """The arrays of the checkpoint by state and by parameter."""
    found: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in contents.leaves:
        if len(leaf.path) > 1 and leaf.has_array:
            found[str(leaf.path[0])]["/".join(map(str, leaf.path[1:]))] = leaf
    if "param" not in found:
        raise TreeMismatch(f"{contents.path} has no parameters below `param`: it is no import of a torch trainer")
    return dict(found)


def _fill(slot: Slot, stored: Mapping[str, Mapping[str, Leaf]], steps: _Steps, given: Mapping[Path, Any]) -> Filled:
    """Where the value of a leaf comes from. Raises TreeMismatch where it comes from nowhere."""
    if slot.role == _STEP:
        count = steps.of(slot.covers)
        return Filled(
            slot, "computed", f"{count} steps of {_few(slot.covers)}", value=np.asarray(count, slot.value.dtype)
        )
    if slot.role == _ZEROS:
        return Filled(slot, "computed", "zeros: a checkpoint is saved between two updates")
    if slot.role == _GIVEN:
        return Filled(slot, "initial", f"{given[slot.path]}, {_GIVEN}", value=given[slot.path])
    if not slot.param:
        raise TreeMismatch(f"it is no {slot.role} of a parameter of the model")
    leaf = stored.get(slot.role, {}).get(slot.param)
    if leaf is None:
        raise TreeMismatch(
            f"the checkpoint has no {slot.role} of {slot.param}; it has {', '.join(stored)}. Mask a parameter that "
            "was not trained (optax.masked, optax.partition)"
        )
    return Filled(slot, "mapped", f"from {leaf.label}", leaf)


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _unlike(params: Any, stored: Mapping[str, Leaf]) -> Iterator[str]:
    """The parameters of the model that the checkpoint does not have as they are."""
    for slot in _param_slots(params):
        leaf = stored.get(slot.param)
        if leaf is None:
            yield f"{slot.param}: a parameter of the model, but not of the checkpoint; map it first"
        elif leaf.shape != tuple(slot.value.shape):
            yield f"{slot.param} has shape {tuple(slot.value.shape)} in the model, {leaf.shape} in the checkpoint"


def _refusals(extras: Any) -> Iterator[str]:
    """What the parameter groups of the checkpoint say that optax has no equal of."""
    for key, value in _pairs(extras):
        if key == "dampening" and value:
            yield f"the checkpoint was trained with dampening={value}: torch's momentum is another sum than optax's"
        elif key == "maximize" and value is True:
            yield "the checkpoint was trained with maximize=True: its moments are those of the negated gradient"


def _pairs(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield str(key), value
            yield from _pairs(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _pairs(value)


def _given(tx: optax.GradientTransformation, params: Any, slots: Sequence[Slot]) -> dict[Path, np.ndarray]:
    """What `tx.init` gives for leaves that do not depend on the parameters, such as hyperparameters."""
    if not slots:
        return {}
    wanted = {slot.path for slot in slots}

    def initial() -> list[Any]:  # compiled, so that nothing but these leaves is made
        state = tx.init(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params))
        return [node.value for node in walk(state) if node.path in wanted]

    paths = [node.path for node in walk(jax.eval_shape(tx.init, params)) if node.path in wanted]
    return dict(zip(paths, map(np.asarray, jax.jit(initial)()), strict=True))


def _placed(state: Any, slots: Sequence[Slot], params: Any) -> Any:
    """The abstract state with the shardings of the parameters; what is of no parameter is on all their devices."""
    shardings = {slot.param: getattr(slot.value, "sharding", None) for slot in _param_slots(params)}
    there = [sharding for sharding in shardings.values() if sharding is not None]
    named = [sharding for sharding in there if isinstance(sharding, NamedSharding)]
    everywhere = NamedSharding(named[0].mesh, PartitionSpec()) if named else next(iter(there), None)
    placed = [
        jax.ShapeDtypeStruct(slot.value.shape, slot.value.dtype, sharding=shardings.get(slot.param, everywhere))
        for slot in slots
    ]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def _on_a_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class _Values:
    """The leaves of an optax state as an ArraySource: those of the checkpoint under other names, and constants."""

    def __init__(self, source: ArraySource, filled: Sequence[Filled]):
        self._source = source
        paths = [one.slot.path for one in filled]
        self._filled = dict(zip(leaf_names(paths), filled, strict=True))

    def leaves(self, state: Any) -> list[Leaf]:
        """The leaves of the whole state, of which some are structure alone."""
        found = [Leaf(n.path, "", "empty", value=empty_kind(n.value)) for n in walk(state) if not _is_array(n.value)]
        infos = self.arrays()
        for name, one in self._filled.items():
            found.append(Leaf(one.slot.path, name, "array", infos[name].shape, infos[name].dtype.name))
        return found

    def arrays(self) -> Mapping[str, ArrayInfo]:
        stored = self._source.arrays()
        return {
            name: stored[one.leaf.name] if one.leaf else ArrayInfo(tuple(one.slot.value.shape), one.slot.value.dtype)
            for name, one in self._filled.items()
        }

    def read(self, key: str, box: Box) -> np.ndarray:
        one = self._filled[key]
        if one.leaf:
            return self._source.read(one.leaf.name, box)
        if one.value is None:
            return np.zeros(box.shape, one.slot.value.dtype)
        return one.value[box.index].copy()
