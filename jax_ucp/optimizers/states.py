"""Contents of a JAX run converted to those of a torch trainer, with torch's optimizer states."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from jax_ucp.arrays.checks import Claims, LeafClaim, passed_on
from jax_ucp.arrays.contents import Contents, Item, Status
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.proof import Zeros
from jax_ucp.arrays.value import Array, Constant
from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.box import Box
from jax_ucp.mapping.states import leaves_at, parameters_at
from jax_ucp.optimizers.adam_rule import rule_faults
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
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.sharding.trees import TreeNode, walk
from jax_ucp.tree import Key, Leaf, Path, leaf_names, tree_of

# Torch's own optimizers count in float32 tensors; DeepSpeed's Lion counts in ints.
_STEP_DTYPES: Mapping[type, DTypeLike] = {optax.ScaleByLionState: np.int32}

# The name of the extras that were numbers or texts in the tree, by their labels.
EXTRAS = "tree"


def torch_states(
    contents: Contents,
    tx: optax.GradientTransformation,
    model: Any = None,
    *,
    params: str = "params",
    opt_state: str = "opt_state",
    step: int | None = None,
    step_dtype: DTypeLike | None = None,
) -> Contents:
    """The contents of a JAX run in the form of an imported one; see `Checkpoint.torch_states`."""
    run = _TrainingRun(contents)
    named = run.parameters(params, model)
    if model is None:
        structs = [(p, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) for p, leaf in named.values()]
        model = tree_of(dict(structs))
    with enable_x64(run.wide(opt_state)):
        state, slots = slots_of(tx, model)
        unlike = list(rule_faults(SmallRun(tx, model)))
    stored = run.matched(opt_state, state)
    run.refuse(f"the state of this optimizer is not what is at {opt_state}")
    run.faults += unlike
    for slot in slots:
        run.record(slot, stored[slot.path], named)
    run.count(slots, stored, step, step_dtype)
    run.refuse("the optimizer's state has no equal in torch")
    made = {
        "params": params,
        "opt_state": opt_state,
        "step_dtype": None if step_dtype is None else str(np.dtype(step_dtype)),
    }
    source = {**contents.first_source, "torch_states": made}
    return replace(run.contents_with(named), source=source)


@dataclass(frozen=True, slots=True)
class _Made:
    """An array of the result, made of the leaf `stored`: its array by name, or a number."""

    stored: Leaf
    value: str | np.ndarray


class _TrainingRun:
    """The leaves of a run, each of which is mapped, kept as an extra, or left out with a reason."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self.fates: dict[Path, tuple[Status, str]] = {}
        # state -> name of a parameter -> array
        self.made: dict[str, dict[str, _Made]] = defaultdict(dict)
        self.extras: dict[str, Any] = {}
        self.notes: list[str] = []
        self.zeros: list[Leaf] = []
        self.faults: list[str] = []

    def parameters(self, label: str, model: Any) -> dict[str, tuple[Path, Leaf]]:
        """The parameters by name, with paths below `label`: the model's, or all that are stored."""
        arrays = parameters_at(self.contents, label)
        named = stored = {name: pair for name, pair in arrays.items() if _is_numeric(pair[1])}
        if model is not None:  # those that the model has, in its order
            wanted = param_leaves(model)
            named = {name: stored[name] for name in wanted if name in stored}
            leaves = {name: leaf for name, (_, leaf) in stored.items()}
            self.faults += unlike(wanted, leaves, f"not at {label}")
        if not named:
            raise TreeMismatch(f"{self.contents.path} has no parameters at {label!r}")
        for name, (_, leaf) in named.items():
            self._make("param", name, leaf, leaf.name)
        return named

    def wide(self, label: str) -> bool:
        """Whether the optimizer's state has float64, which JAX uses only if that is enabled."""
        return any(leaf.dtype == "float64" for leaf in leaves_at(self.contents, label).values())

    def matched(self, label: str, state: Any) -> dict[Path, Leaf]:
        """The stored leaf of each array of the optimizer's state, by its path there."""
        below = leaves_at(self.contents, label).items()
        left = {tuple(map(str, path)): leaf for path, leaf in below}
        stored: dict[Path, Leaf] = {}
        # a state that was saved through Flax has no empty nodes; any other has all of them
        has_structure = any(not leaf.has_array for leaf in left.values())
        for node in walk(state):
            leaf = next((left.pop(names) for names in _names(node.path) if names in left), None)
            fault = _difference(node, leaf, has_structure)
            if fault:
                self.faults.append(f"{label}/{node.label}: {fault}")
            elif leaf is not None and is_array(node.value):
                stored[node.path] = leaf
        for leaf in left.values():
            self.faults.append(f"{leaf.label}: the checkpoint has it, the optimizer not")
        return stored

    def record(self, slot: OptaxLeaf, leaf: Leaf, named: Mapping[str, object]) -> None:
        """Map a leaf of the state to its parameter, keep it as an extra, skip it, or add a fault;
        `count` does so for counts. `named` has the parameters by name.
        """
        if slot.role == COUNT:
            return
        if slot.role == GIVEN:
            self._keep(leaf)
        elif slot.role == ZEROS:
            self.fates[leaf.path] = "skipped", "zeros: no gradients are being gathered"
            if slot.param:
                self.zeros.append(leaf)
            elif number := self._number(leaf):
                self.faults.append(
                    f"{leaf.label} is {number}: gradients are being gathered, which torch keeps in"
                    " no state. Save after an update, when it is 0"
                )
        elif slot.param not in named:
            self.faults.append(f"{leaf.label} is not the {slot.role} of a parameter")
        elif slot.param in self.made[slot.role]:
            other = self.made[slot.role][slot.param].stored.label
            self.faults.append(f"{other} and {leaf.label} are both {slot.role} of {slot.param}")
        else:
            self._make(slot.role, slot.param, leaf, leaf.name)

    def count(
        self,
        slots: Sequence[OptaxLeaf],
        stored: Mapping[Path, Leaf],
        step: int | None,
        step_dtype: DTypeLike | None,
    ) -> None:
        """Set the steps of parameters by the counts beside moments; other counts must agree."""
        done: dict[str, tuple[int, str]] = {}  # by parameter: the number of updates, and its origin
        others: list[tuple[OptaxLeaf, int]] = []
        for slot in (slot for slot in slots if slot.role == COUNT):
            leaf = stored[slot.path]
            number = self._number(leaf)
            # a count beside moments is the number of steps of their parameters
            around = slot.path[:-1]
            params: list[str] = []
            if slot.of_moments:
                nearby = [other for other in slots if other.path[: len(around)] == around]
                params = [other.param for other in nearby if other.param]
            if not params:
                others.append((slot, number))
                continue
            if step not in (None, number):
                self.faults.append(
                    f"{leaf.label} counts {number} updates, but step={step} was given"
                )
            value = np.asarray(number, step_dtype or _STEP_DTYPES.get(slot.owner, np.float32))
            if int(value) != number:
                self.faults.append(
                    f"{leaf.label} is {number}, which {value.dtype} does not hold; give step_dtype="
                )
            for param in params:
                self.made[STEP].setdefault(param, _Made(leaf, value))
            self.fates[leaf.path] = "mapped", f"{STEP} of {few(params)}"
            done |= dict.fromkeys(params, (number, leaf.label))
        if step is not None:
            covered = itertools.chain.from_iterable(slot.covers for slot, _ in others)
            done = dict.fromkeys(covered, (step, f"step={step}")) | done
        for slot, number in others:
            self._compare(slot, stored[slot.path], number, done, step)
            # if no moments are counted, as in SGD, schedules are compared with one another
            label = stored[slot.path].label
            done = dict.fromkeys(slot.covers, (number, label)) | done

    def _compare(
        self,
        slot: OptaxLeaf,
        leaf: Leaf,
        number: int,
        done: Mapping[str, tuple[int, str]],
        step: int | None,
    ) -> None:
        """Keep a count as an extra, which should equal the updates of the parameters it covers."""
        self._keep(leaf)
        known = filter(done.__contains__, slot.covers)
        param = next((param for param in known if done[param][0] != number), None)
        if param is None:
            return
        updates, label = done[param]
        if step is None:
            self.faults.append(
                f"{leaf.label} counts {number}, but {label} has {updates} updates of {param}. If"
                f" they are to differ, as after a schedule was begun anew, give step={updates}"
            )
        else:
            self.notes.append(
                f"{leaf.label} counts {number}, where {label} has {updates} updates: it is an extra"
                " only"
            )

    def refuse(self, what: str) -> None:
        if self.faults:
            title = f"{self.contents.path}: {what}, in {len(self.faults)} places:"
            raise TreeMismatch(title, self.faults)

    def contents_with(self, named: Mapping[str, tuple[Path, Leaf]]) -> Contents:
        """The contents with the parameters and states that were mapped."""
        # leaves that belong neither to the parameters nor to the optimizer
        left: list[Leaf] = []
        for leaf in self.contents.leaves:
            if leaf.path in self.fates:
                continue
            if leaf.kind in ("none", "empty"):
                self.fates[leaf.path] = "skipped", "it holds nothing"
            elif leaf.kind == "str" or (_is_numeric(leaf) and not leaf.shape):
                self._keep(leaf)
            else:
                self.fates[leaf.path] = "skipped", "no parameter, and no state of the optimizer"
                left.append(leaf)
        if left:
            self.notes.append(
                f"{len(left)} arrays that are not parameters are left out, the first"
                f" {left[0].label}"
            )
        states = [arrays for state, arrays in self.made.items() if state != "param"]
        with_state = set(itertools.chain.from_iterable(states))
        if bare := [name for name in named if name not in with_state]:
            self.notes.append(
                f"the optimizer has no state of {len(bare)} parameters, the first {bare[0]}"
            )
        # the new tree, and the inventory with the status of each leaf of the run
        made: dict[Path, _Made] = {}
        for state, arrays in self.made.items():
            made |= {(Key("dict", state), *named[name][0]): array for name, array in arrays.items()}
        names = dict(zip(made, leaf_names(list(made)), strict=True))
        sources = {names[path]: array.stored for path, array in made.items()}
        of_contents = expressions(self.contents.arrays)
        values: dict[str, Array] = {}
        for path, one in made.items():
            if isinstance(one.value, str):
                values[names[path]] = of_contents[one.value]
            else:
                values[names[path]] = Constant(one.value, self.contents.locate(one.stored))
        infos = {name: array.info for name, array in values.items()}
        leaves = [
            Leaf(p, n, "array", infos[n].shape, infos[n].dtype.name) for p, n in names.items()
        ]
        stored = {item.reason: item for item in self.contents.inventory if item.status == "mapped"}
        inventory: list[Item] = []
        for leaf in self.contents.leaves:
            status, reason = self.fates[leaf.path]
            what = f"{leaf.dtype} {list(leaf.shape)}" if leaf.has_array else leaf.kind
            item = stored.get(leaf.label, Item(leaf.label, what, status, reason))
            inventory.append(replace(item, status=status, reason=reason))
        inventory += [item for item in self.contents.inventory if item.status != "mapped"]
        return replace(
            self.contents,
            leaves=leaves,
            arrays=Evaluated(values),
            inventory=inventory,
            extras={**self.contents.extras, **({EXTRAS: self.extras} if self.extras else {})},
            notes=[*self.contents.notes, *self.notes],
            claims=Claims(partial(self._claims, sources)),
        )

    def _claims(self, stored: Mapping[str, Leaf]) -> Iterator[LeafClaim]:
        """The claims of the checkpoint, and the claim that accumulated gradients are zeros."""
        users: dict[str, list[str]] = defaultdict(list)
        for name, leaf in stored.items():
            users[leaf.name].append(name)
        yield from passed_on(self.contents.claims, users)
        arrays = expressions(self.contents.arrays)
        fault = "has gradients, though none are being gathered"
        for leaf in self.zeros:
            yield LeafClaim(Zeros(leaf.label, arrays[leaf.name], fault), frozenset(stored))

    def _make(self, state: str, name: str, leaf: Leaf, value: str | np.ndarray) -> None:
        self.made[state][name] = _Made(leaf, value)
        self.fates[leaf.path] = "mapped", f"{state}/{name}"

    def _keep(self, leaf: Leaf) -> None:
        """Keep a number or a text as an extra."""
        self.extras[leaf.label] = _json(self._read(leaf).tolist()) if leaf.has_array else leaf.value
        self.fates[leaf.path] = "extra", f"{leaf.label} of {EXTRAS}"

    def _read(self, leaf: Leaf) -> np.ndarray:
        return np.asarray(self.contents.arrays.read(leaf.name, Box.whole(leaf.shape)))

    def _number(self, leaf: Leaf) -> int:
        if leaf.shape:
            raise TreeMismatch(
                f"{leaf.label} has shape {leaf.shape}: it is not one number, as of one optimizer"
            )
        return int(self._read(leaf))


def _is_numeric(leaf: Leaf) -> bool:
    return leaf.has_array and leaf.kind != "prng_key"


def _names(path: Path) -> Iterator[tuple[str, ...]]:
    """The paths that a leaf of the state may have: Flax adds the attribute `value` of variables."""
    names = tuple(map(str, path))
    yield names
    yield names[:-1] if path and path[-1] == Key("attr", "value") else (*names, "value")


def _difference(node: TreeNode, leaf: Leaf | None, has_structure: bool) -> str | None:
    """A message if a stored leaf is not what the optimizer's state has there, or None."""
    if leaf is None:
        is_needed = has_structure or is_array(node.value)
        return "the optimizer has it, the checkpoint not" if is_needed else None
    stored = f"{leaf.dtype} {leaf.shape}" if leaf.has_array else leaf.kind
    if is_array(node.value):
        wanted = f"{node.value.dtype} {tuple(node.value.shape)}"
        return None if wanted == stored else f"the optimizer has {wanted}, the checkpoint {stored}"
    return f"the optimizer has no array there, the checkpoint {stored}" if leaf.has_array else None


def _json(value: Any) -> Any:
    """A number, or nested lists of numbers, as JSON, which lacks infinite and complex ones."""
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, complex):
        return {"!complex": [value.real, value.imag]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"!float": repr(value)}
    return value
