"""The plan by which an optax state is restored from the checkpoint of a torch trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.dtypes import canonicalize_dtype
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.arrays.checks import Extent
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.proved import ProvedReads
from jax_ucp.arrays.value import Array, Constant
from jax_ucp.errors import TreeMismatch
from jax_ucp.optimizers.adam_rule import rule_faults
from jax_ucp.optimizers.settings import setting_faults
from jax_ucp.optimizers.slots import (
    COUNT,
    GIVEN,
    STEP,
    ZEROS,
    OptaxLeaf,
    few,
    is_array,
    param_leaves,
    slots_of,
    unlike,
)
from jax_ucp.optimizers.small_run import SmallRun
from jax_ucp.sharding.fit import Rule
from jax_ucp.sharding.jax_versions import mesh_in_scope
from jax_ucp.sharding.restore import (
    RestoreRequest,
    dealt_out,
    plan_restore,
    run_restore,
    shared_plan,
)
from jax_ucp.sharding.trees import empty_kind, walk
from jax_ucp.text import html_table
from jax_ucp.tree import Leaf, Path, leaf_names

Status = Literal["mapped", "computed", "initial"]


@dataclass(frozen=True, slots=True)
class Filled:
    """The source of an optax leaf's value: a leaf of the checkpoint, or a constant."""

    slot: OptaxLeaf
    status: Status
    reason: str
    value: Leaf | np.ndarray

    def __str__(self) -> str:
        return f"{self.slot.label}: {self.status}, {self.reason}"


@dataclass(frozen=True, repr=False)
class OptimizerPlan:
    """The sources of an optax state in a checkpoint: `filled` has every leaf of it, `left` the
    states of the checkpoint that are not used, with reasons.

    `step` is the number of updates done, if all parameters agree on it.
    """

    contents: Contents
    state: Any
    filled: Sequence[Filled]
    left: Mapping[str, str]
    step: int | None

    def report(self) -> str:
        """A line for each leaf of the state, and for each unused state of the checkpoint."""
        left = [f"{name} of the checkpoint: left, {reason}" for name, reason in self.left.items()]
        return "\n".join([*map(str, self.filled), *left])

    def __repr__(self) -> str:
        steps = "" if self.step is None else f" after {self.step} steps"
        return (
            f"<an optax state{steps}: {len(self.filled)} leaves;"
            f" {len(self.left)} states of the checkpoint are left>"
        )

    def _repr_html_(self) -> str:
        rows = [(each.slot.label, each.status, each.reason) for each in self.filled]
        rows += [(name, "left", reason) for name, reason in self.left.items()]
        return html_table(repr(self), ("leaf", "status", "from, or why"), rows)

    def restore(
        self,
        *,
        mesh: Mesh | None = None,
        rules: Sequence[Rule] = (),
        cast: bool | DTypeLike = False,
        share_reads: bool = False,
        verify: Extent = "sample",
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> Any:
        """The optax state, read from the checkpoint. Moments have the shardings of their
        parameters.

        If the parameters had none, it is placed on `mesh`, by `rules` on labels such as
        `0/mu/layers/kernel`, or on the mesh that is set, or on the device that `tx.init` would use.
        `cast=True` converts to the dtypes of the state. `share_reads` and `verify` are those of
        `Checkpoint.restore`.

        Raises TreeMismatch if dtypes differ, or leaves cannot be placed; CorruptData if bytes are
        not what was written, or a file has changed since it was opened.
        """
        paths = [one.slot.path for one in self.filled]
        stored = expressions(self.contents.arrays)
        arrays: dict[str, Array] = {}
        for name, one in zip(leaf_names(paths), self.filled, strict=True):
            if isinstance(one.value, Leaf):
                arrays[name] = stored[one.value.name]
            else:
                arrays[name] = Constant(one.value)
        source = Evaluated(arrays)
        state = self.state if mesh or mesh_in_scope() else jax.tree.map(_on_a_device, self.state)
        empty = [node for node in walk(state) if not is_array(node.value)]
        leaves = [Leaf(n.path, "", "empty", value=empty_kind(n.value)) for n in empty]
        for path, (name, info) in zip(paths, source.arrays().items(), strict=True):
            leaves.append(Leaf(path, name, "array", info.shape, info.dtype.name))
        plan = plan_restore(leaves, RestoreRequest(state, mesh, rules, cast))
        plan = shared_plan(plan, source.arrays()) if share_reads else plan
        proofs = self.contents.proofs({leaf.name for leaf in _mapped(self.filled)}, verify)
        restored = run_restore(plan, source, budget_bytes, dealt_out(plan, proofs, verify))
        self.contents.files.require_unchanged()
        return restored


def plan_optimizer(
    contents: Contents,
    tx: optax.GradientTransformation,
    params: Any,
    step: int | None = None,
    check: bool = True,
) -> OptimizerPlan:
    """The plan to fill `tx.init(params)` from a torch trainer's checkpoint; see `Checkpoint`."""
    state, slots = slots_of(tx, params)
    stored = _states(contents)
    lacking = "not of the checkpoint; map it first"
    unfit = unlike(param_leaves(params), stored.get("param", {}), lacking)
    faults = [*_refusals(contents.extras), *unfit]
    if check:
        run = SmallRun(tx, params)
        faults += [f"{fault}; or check=False" for fault in rule_faults(run, contents.groups)]
        faults += setting_faults(contents.groups, run)
    given = _given(tx, params, [slot for slot in slots if slot.role == GIVEN])
    steps = _Steps(ProvedReads(contents), stored.get(STEP, {}), step)
    filled: list[Filled] = []
    for slot in slots:
        try:
            filled.append(_fill(slot, stored, steps, given))
        except TreeMismatch as fault:
            faults.append(f"{slot.label}: {fault}")
    used = {"param", *(str(leaf.path[0]) for leaf in _mapped(filled))}
    used |= {STEP} if steps.asked else set()
    reason = "no state of this optimizer takes it"
    left = {name: _LEFT.get(name, reason) for name in stored if name not in used}
    names = param_leaves(params).keys()
    for name, reason in left.items() if check else ():
        if name not in _OF_NO_UPDATE and (kept := sorted(names & stored[name].keys())):
            faults.append(f"the trainer's optimizer kept {name} of {few(kept)}: {reason}; {_MEANT}")
    if faults:
        raise TreeMismatch(
            f"{contents.path} does not fill the optimizer's state, in {len(faults)} places:", faults
        )
    return OptimizerPlan(contents, _placed(state, slots, params), filled, left, steps.common())


# Stored states that do not affect how an optimizer changes weights.
_OF_NO_UPDATE = (STEP, "buffer", "other")
_MEANT = "give the optimizer that was trained with, or check=False"

# Reasons why states of torch are not used, for those with a special one.
_LEFT = {
    "max_exp_avg_sq": "torch keeps the maximum of uncorrected moments, which optax has no place for"
}


@dataclass
class _Steps:
    """The numbers of steps of parameters, each of which is read once."""

    reads: ProvedReads
    stored: Mapping[str, Leaf]
    given: int | None
    known: dict[str, int] = field(default_factory=dict[str, int])
    asked: bool = False

    def of(self, params: Sequence[str]) -> int:
        """The number of steps of these parameters, which must agree."""
        self.asked = True
        param_of: dict[int, str] = {}  # the first parameter with a number of steps
        for param in params:
            param_of.setdefault(self._one(param), param)
        if len(param_of) > 1:
            counts = ", ".join(
                f"{count} of {param}" for count, param in sorted(param_of.items())[:4]
            )
            raise TreeMismatch(
                f"one count stands for parameters whose steps differ: {counts}; partition the"
                " optimizer"
            )
        if not param_of:
            raise TreeMismatch("it counts the steps of no parameter")
        return next(iter(param_of))

    def common(self) -> int | None:
        """The number of steps of all parameters, if they agree."""
        if not self.stored:
            return self.given
        first, *others = {self._one(param) for param in self.stored}
        return None if others else first

    def _one(self, param: str) -> int:
        """The number of steps of a parameter, stored or given; the two must not differ."""
        if param not in self.stored:
            if self.given is None:
                raise TreeMismatch(f"the checkpoint does not say the steps of {param}; give step=")
            return self.given
        if param not in self.known:
            leaf = self.stored[param]
            value = float(np.asarray(self.reads.read(leaf)).reshape(()))
            if value != int(value) or value < 0:
                raise TreeMismatch(f"{leaf.label} is {value}, which is not a number of steps")
            self.known[param] = int(value)
        if self.given not in (None, self.known[param]):
            raise TreeMismatch(
                f"step={self.given} was given, but {param} has done {self.known[param]}"
            )
        return self.known[param]


def _states(contents: Contents) -> dict[str, dict[str, Leaf]]:
    """The arrays of a tree `{state: {parameter: array}}`. Raises TreeMismatch."""
    states: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in contents.leaves:
        if leaf.state and leaf.has_array:
            states[leaf.state][leaf.param] = leaf
    if "param" not in states:
        raise TreeMismatch(
            f"{contents.path} has no parameters below `param`: it is not a checkpoint of"
            " a torch trainer"
        )
    return dict(states)


def _fill(
    slot: OptaxLeaf,
    stored: Mapping[str, Mapping[str, Leaf]],
    steps: _Steps,
    given: Mapping[Path, Any],
) -> Filled:
    """The source of a leaf's value. Raises TreeMismatch if there is none."""
    if slot.role == COUNT:
        count = steps.of(slot.covers)
        value = np.asarray(count, slot.value.dtype)
        return Filled(slot, "computed", f"{count} steps of {few(slot.covers)}", value)
    if slot.role == ZEROS:
        zeros = np.broadcast_to(np.zeros((), slot.value.dtype), slot.value.shape)
        return Filled(slot, "computed", "zeros: a checkpoint is saved between two updates", zeros)
    if slot.role == GIVEN:
        return Filled(slot, "initial", f"{given[slot.path]}, {GIVEN}", given[slot.path])
    if not slot.param:
        raise TreeMismatch(f"it is not the {slot.role} of a parameter of the model")
    leaf = stored.get(slot.role, {}).get(slot.param)
    if leaf is not None:
        return Filled(slot, "mapped", f"from {leaf.label}", leaf)
    states = [state for state, leaves in stored.items() if slot.param in leaves]
    why = "the trainer had another optimizer than tx, or its state was left out (see the notes)"
    if slot.role in stored:
        why = (
            "a parameter that was not trained has none: mask it (optax.masked, optax.partition);"
            " nor has one that a mapping scales, because moments do not scale with it (see the"
            " notes): map to a model that takes it as it is"
        )
    raise TreeMismatch(
        f"the checkpoint has no {slot.role} of {slot.param}; it has"
        f" {', '.join(states) or 'nothing of it'}: {why}"
    )


def _mapped(filled: Sequence[Filled]) -> list[Leaf]:
    return [one.value for one in filled if isinstance(one.value, Leaf)]


def _refusals(extras: Any) -> Iterator[str]:
    """Messages about settings in the checkpoint's parameter groups that optax does not have."""
    for key, value in _nested_items(extras):
        if key == "dampening" and value:
            yield (
                f"the checkpoint was trained with dampening={value}: torch's momentum is another"
                " sum than optax's"
            )
        elif key == "maximize" and value is True:
            yield (
                "the checkpoint was trained with maximize=True: its moments are those of the"
                " negated gradient"
            )


def _nested_items(tree: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of all mappings in nested mappings and lists."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield str(key), value
            yield from _nested_items(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _nested_items(value)


def _given(
    tx: optax.GradientTransformation, params: Any, slots: Sequence[OptaxLeaf]
) -> dict[Path, np.ndarray]:
    """The values of `tx.init` for leaves that do not depend on parameters (hyperparameters)."""
    if not slots:
        return {}
    paths = [slot.path for slot in slots]

    def initial() -> list[Any]:  # compiled, so that only these leaves are computed
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, canonicalize_dtype(p.dtype)), params)
        values = {node.path: node.value for node in walk(tx.init(zeros))}
        return [values[path] for path in paths]

    return dict(zip(paths, map(np.asarray, jax.jit(initial)()), strict=True))


def _placed(state: Any, slots: Sequence[OptaxLeaf], params: Any) -> Any:
    """The abstract state with the parameters' shardings; other leaves are on all devices."""
    shardings = {
        name: getattr(value, "sharding", None) for name, value in param_leaves(params).items()
    }
    known = list(filter(None, shardings.values()))
    named = [sharding for sharding in known if isinstance(sharding, NamedSharding)]
    everywhere = NamedSharding(named[0].mesh, PartitionSpec()) if named else next(iter(known), None)
    placed = [
        jax.ShapeDtypeStruct(
            slot.value.shape, slot.value.dtype, sharding=shardings.get(slot.param, everywhere)
        )
        for slot in slots
    ]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def _on_a_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
