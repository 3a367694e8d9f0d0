"""FSDP1's optimizer: its states are ranges of flat parameters, by number, and each rank has a part.

FSDP1 puts the parameters of a module that it wraps, without those of wrapped modules inside, one
behind the other into a flat parameter; each rank has as long a part of that, the last one padded.
With `use_orig_params=False` these are the optimizer's parameters, the outer module's before those
inside. With `use_orig_params=True` each parameter is one of the optimizer's, and a rank has of it
what lies in its part of the flat one: nothing, often. Files say neither which modules were wrapped
nor which number is what. The user says that the optimizer had `model.parameters()`; then sizes must
leave one way.

Facts: `FlatParamHandle` in `torch/distributed/fsdp/_flat_param.py` of torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jax_ucp.layout.parts import Shape
from jax_ucp.states.pairing import Undecided

MAX_WAYS = 1 << 16
_NUMBER = re.compile(r"\d+")
Units = list[list[str]]  # the names of the parameters in each flat one, in order


def flat_parameters(
    shapes: Mapping[str, Shape], parts: int, lengths: Sequence[int | None]
) -> Units:
    """The parameters in each flat one, of which the length of each of its parts is known or not.

    Modules that go by one name but for numbers are wrapped all or none, as a policy of classes
    does. Where no way fits, a parameter may be tied to an earlier one of its shape, and be left
    out. Raises Undecided where no way fits, or several.

    >>> shapes = {"e.w": (4,), "l.0.w": (3,), "l.1.w": (3,)}
    >>> flat_parameters(shapes, 2, [2, 2, 2])
    [['e.w'], ['l.0.w'], ['l.1.w']]
    """
    ways = _ways(shapes, parts, lengths)
    seen: set[Shape] = set()
    for name, shape in shapes.items() if not ways else ():
        if shape in seen:
            rest = {other: shape for other, shape in shapes.items() if other != name}
            ways += [way for way in _ways(rest, parts, lengths) if way not in ways]
        seen.add(shape)
    if len(ways) != 1:
        how = "several ways" if ways else "no way"
        raise Undecided(
            f"{len(lengths)} flat parameters of FSDP1 can be those of the model in {how}"
        )
    return ways[0]


def _ways(shapes: Mapping[str, Shape], parts: int, lengths: Sequence[int | None]) -> list[Units]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ways: list[Units] = []
    for wrapped in _wrappings([*shapes], len(lengths)):
        # the parameters of each wrapped module without those of wrapped ones inside; outer first
        by_module: dict[str, list[str]] = {"": []}
        for name in shapes:
            path = name.split(".")[:-1]
            inside = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
            around = ["", *filter(wrapped.__contains__, inside)]
            for module in around:
                by_module.setdefault(module, [])
            by_module[around[-1]].append(name)
        units = list(filter(None, by_module.values()))
        if len(units) != len(lengths) or units in ways:
            continue
        of_units = [-(-sum(map(sizes.__getitem__, unit)) // parts) for unit in units]
        if all(want in (None, have) for have, want in zip(of_units, lengths, strict=True)):
            ways.append(units)
    return ways


def _wrappings(names: Sequence[str], count: int) -> Iterator[set[str]]:
    """Sets of `count` modules that may be wrapped, or one more without parameters."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in names:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            module = ".".join(path[:depth])
            kinds[_NUMBER.sub("*", module)].add(module)
    sizes = {kind: len(modules) for kind, modules in kinds.items() if len(modules) <= count}
    for tried, chosen in enumerate(subsets([*sizes.items()], count)):
        if tried >= MAX_WAYS:
            raise Undecided("there are too many ways to try them all")
        yield set().union(*(kinds[kind] for kind in chosen))


def subsets(sizes: Sequence[tuple[str, int]], most: int) -> Iterator[list[str]]:
    """Choices of kinds with at most so many modules in all, and not one fewer than `most - 1`."""
    rest = [*itertools.accumulate((size for _, size in reversed(sizes)), initial=0)][::-1]

    def choose(i: int, left: int) -> Iterator[list[str]]:
        if rest[i] < left - 1:
            return
        if i == len(sizes):
            yield []
            return
        kind, size = sizes[i]
        if size <= left:
            yield from ([kind, *others] for others in choose(i + 1, left - size))
        yield from choose(i + 1, left)

    yield from choose(0, most)
