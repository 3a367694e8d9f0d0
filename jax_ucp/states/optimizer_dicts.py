"""The optimizers in a trainer's nested state dict: their states by number or name, and groups.

An optimizer is a dict with the keys `state` and `param_groups`, as
`torch.optim.Optimizer.state_dict` makes it. A state of it lies at `state`, its owner, the state's
name. The owner is a number in the optimizer's list of parameters, or a parameter's name. Or path
and name are one flattened key, `state.layers.0.weight.exp_avg` (`flatten_optimizer_state_dict` of
`torch.distributed.checkpoint.state_dict`), in which every dot may be the end of the owner's name.
Where groups have `param_names`, numbers are those names.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Steps = tuple[str | int, ...]
Owner = int | str

# bitsandbytes 0.50 puts the states of a parameter into a dict of their own in that of the parameter
# (`_FSDP_WRAPPED_QUANT_STATE_KEY`, `optim/optimizer.py`).
_OF_8_BITS = "__bnb_optimizer_quant_state__."

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class OwnedGroup:
    """The settings that an optimizer has for some of its parameters, `owners`, in its order."""

    owners: tuple[Owner, ...]
    settings: Mapping[str, Any]


@dataclass(slots=True)
class OptimizerDict:
    """An optimizer at a path; `states` has every reading (owner, state) of a state's name.

    Without `state`, a dict has an optimizer's groups alone: the settings of one without a state.
    """

    path: Steps
    states: dict[str, tuple[tuple[Owner, str], ...]] = field(default_factory=dict)
    groups: list[OwnedGroup] = field(default_factory=list)
    flattened: bool = False
    has_state: bool = True

    @property
    def numbered(self) -> bool:
        readings = itertools.chain.from_iterable(self.states.values())
        return any(isinstance(owner, int) for owner, _ in readings)

    @property
    def name(self) -> str:
        return dict_name(self.path)

    def lists(self) -> list[tuple[Owner, ...]]:
        """The owners of each group in order; all in one group if it is flattened."""
        lists = [group.owners for group in self.groups]
        return [tuple(dict.fromkeys(itertools.chain(*lists)))] if self.flattened else lists

    def listed(self) -> list[Owner]:
        return list(itertools.chain(*self.lists()))


def optimizer_dicts(
    tensors: Mapping[str, Steps], objects: Mapping[Steps, Any]
) -> dict[Steps, OptimizerDict]:
    """The optimizers by path. `tensors` has the path of each tensor; `objects` has other values by
    path.

    >>> optimizer = optimizer_dicts({"s": ("o", "state", 0, "exp_avg")},
    ...     {("o", "param_groups", 0, "params"): [0]})
    >>> optimizer["o",].states, optimizer["o",].groups[0].owners
    ({'s': ((0, 'exp_avg'),)}, (0,))
    """
    nested, flattened = _groups(objects)
    with_state = dict.fromkeys(optimizer_paths([*tensors.values(), *objects]))
    paths = dict(with_state)
    for path in [*nested, *flattened]:
        if path not in paths and _first_prefix(path, paths) is None:
            paths[path] = None
    optimizers: dict[Steps, OptimizerDict] = {}
    names: dict[Steps, Mapping[int, str]] = {}
    for path in paths:
        groups, of_params = nested.get(path, ()), flattened.get(path, {})
        names[path] = _names_of_numbers(groups)
        listed = [OwnedGroup(_owners(group, names[path]), group) for group in groups]
        listed += [OwnedGroup((name,), settings) for name, settings in of_params.items()]
        is_flat, has_state = path in flattened, path in with_state
        optimizers[path] = OptimizerDict(path, {}, listed, is_flat, has_state)
    for name, path in tensors.items():
        optimizer = _first_prefix(path, with_state)
        if optimizer is None:
            continue
        inner = path[len(optimizer) :]
        if head(inner[0]) == "state":
            optimizers[optimizer].states[name] = _readings(inner, names[optimizer])
    return optimizers


def prefixes(path: Steps) -> Iterator[Steps]:
    """The dicts in which a path lies, the outermost first."""
    return (path[:depth] for depth in range(len(path)))


def _first_prefix(path: Steps, dicts: Container[Steps]) -> Steps | None:
    """The outermost of some dicts in which a path lies."""
    return next(filter(dicts.__contains__, prefixes(path)), None)


def optimizer_paths(paths: Iterable[Steps]) -> list[Steps]:
    """The outermost dicts with the keys `state` and `param_groups`, or keys that begin with them,
    of paths to values.

    >>> optimizer_paths([("model", "w"), ("optim", "state", "w", "step"),
    ...     ("optim", "param_groups", 0, "lr")])
    [('optim',)]
    """
    heads: dict[Steps, set[str]] = defaultdict(set)
    for path in paths:
        for prefix, step in zip(prefixes(path), path, strict=True):
            heads[prefix].add(head(step))
    optimizers = [path for path, keys in heads.items() if keys >= {"state", "param_groups"}]
    every = frozenset(optimizers)
    return [path for path in optimizers if _first_prefix(path, every) is None]


def head(step: str | int) -> str:
    """A key, or the first word of a flattened key."""
    return str(step).partition(".")[0]


def joined(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def dict_name(path: Steps) -> str:
    """The name of the dict at a path, for messages."""
    return joined(path) or "the outermost dict"


def _groups(
    objects: Mapping[Steps, Any],
) -> tuple[dict[Steps, list[dict[str, Any]]], dict[Steps, dict[str, dict[str, Any]]]]:
    """The `param_groups` of each optimizer by its path, and flattened settings by parameter."""
    by_number: dict[Steps, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    flattened: dict[Steps, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for path, value in objects.items():
        match path:
            case (*optimizer, "param_groups", int(number), str(key)):
                by_number[tuple(optimizer)][number][key] = value
            # an item of a list, which come in order
            case (*optimizer, "param_groups", int(number), str(key), int()):
                by_number[tuple(optimizer)][number].setdefault(key, []).append(value)
            case (*optimizer, str(key)) if key.startswith("param_groups."):
                name, _, setting = key.removeprefix("param_groups.").rpartition(".")
                flattened[tuple(optimizer)][name][setting] = value
            case _:
                pass
    nested = {path: [groups[i] for i in sorted(groups)] for path, groups in by_number.items()}
    return nested, flattened


def _names_of_numbers(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The parameter of each number, if groups name them all, and none twice; else empty."""
    name_of: dict[int, str] = {}
    count = 0
    for group in groups:
        numbers, names = group.get("params", []), group.get("param_names", [])
        of_known_types = _all_of(numbers, int) and _all_of(names, str)
        if not of_known_types or len(numbers) != len(names):
            return {}
        name_of |= zip(numbers, names, strict=True)
        count += len(names)
    distinct = len(name_of) == len(set(name_of.values())) == count
    return name_of if distinct else {}


def _all_of(items: Any, kind: type) -> bool:
    """Whether a value is a list of numbers, or of texts; a bool is not a number."""
    return isinstance(items, list) and all(type(item) is kind for item in items)


def _owners(group: Mapping[str, Any], names: Mapping[int, str]) -> tuple[Owner, ...]:
    """The parameters of a group, as names or numbers; none if the group has anything else."""
    params = group.get("params")
    if not isinstance(params, list) or not {*map(type, params)} <= {int, str}:
        return ()
    return tuple(_owner(param, names) for param in params)


def _owner(key: int | str, names: Mapping[int, str]) -> Owner:
    """The owner that a key means: a name, or a number without a name, which may be pickled as it is
    or written into a path by a planner of DCP.
    """
    if isinstance(key, str) and _NUMBER.fullmatch(key):
        key = int(key)
    return names.get(key, key) if type(key) is int else str(key)


def _readings(path: Steps, names: Mapping[int, str]) -> tuple[tuple[Owner, str], ...]:
    """The readings (owner, state) of a path from `state` on; numbers only if groups have them."""
    if path[0] == "state":
        state = joined(path[2:]).removeprefix(_OF_8_BITS)
        return ((_owner(path[1], names), state),) if len(path) >= 3 else ()
    parts = joined(path).removeprefix("state.").split(".")
    readings: list[tuple[Owner, str]] = []
    for n in range(len(parts) - 1, 0, -1):
        owner = ".".join(parts[:n])
        if not owner.isdigit():
            readings.append((owner, ".".join(parts[n:])))
    return tuple(readings)
