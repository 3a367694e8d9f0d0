"""A mapping applied to names and shapes: which parameters each leaf is made of, and where their elements go."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.language.arithmetic import names_in, size_of
from jax_ucp.language.conditions import Undecided, holds, keys_in, unmet, values_of
from jax_ucp.language.mapping import Mapping as LeafMapping
from jax_ucp.language.mapping import Requirement, Rule, expression, filled, name_regex, placeholders, shipped, values_in
from jax_ucp.language.model_config import is_length, numbers_of
from jax_ucp.language.rules import regex_of
from jax_ucp.layout.axes import Axis, Claim, Component, Expression, Known, components, infer
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.strided import LeafForm, LeafLayout, Part, part

FAULTS_SHOWN = 40
_NO_CONFIG = "the checkpoint does not have its model's config"

Values = tuple[str, ...]


@dataclass(frozen=True)
class Bound:
    """A mapping with the parameters of one checkpoint.

    `leaves` says how each leaf is formed, `skipped` why a parameter is in none, `sizes` the length of every axis
    that has a name. `notes` tell what is more than moving elements: padding, casts, scaling, copies, and requirements
    that a user vouches for.
    """

    leaves: dict[str, LeafForm]
    skipped: dict[str, str]
    sizes: dict[str, int]
    notes: list[str]


@dataclass
class _Instance:
    """A rule with the names that it found: for each name with placeholders, the parameter of each stacked place."""

    rule: Rule
    shared: dict[str, str]
    members: dict[str, dict[Values, str]] = field(default_factory=dict[str, dict[Values, str]])

    def spread(self, axes: str, rank: int) -> Expression:
        """The expression with names for the axes that `...` stands for, for an array of `rank` axes."""
        said = expression(axes)
        # Two parameters of one rule may have other lengths there, so the names are of this instance alone.
        at = f" of {self.rule.label}" + (f" for {self.shared}" if self.shared else "")
        return said.spread([f"...{i}{at}" for i in range(rank - len(said.dims) + 1)]) if said.rest else said


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a requirement: met, assumed on the user's word, or unmet; and what the config has there."""

    requirement: Requirement
    state: Literal["met", "assumed", "unmet"]
    found: str

    def __str__(self) -> str:
        return f"{self.requirement.name}: {self.found}; {self.requirement.reason}"


def outcomes(mapping: LeafMapping, config: Mapping[str, Any], assumed: Collection[str] = ()) -> list[Outcome]:
    """What becomes of every requirement of a mapping. Without a config none is met: it is not one of defaults.

    Raises LayoutError where what is assumed is none of them.
    """
    names = [requirement.name for requirement in mapping.requires]
    if strays := sorted(set(assumed) - set(names)):
        has = ", ".join(names) or "none"
        raise LayoutError(f"{', '.join(strays)} in assume: the requirements of {mapping.name} are {has}")
    found: list[Outcome] = []
    for requirement in mapping.requires:
        fault = unmet(requirement.that, config) if config else _NO_CONFIG
        state = "met" if not fault else "assumed" if requirement.name in assumed else "unmet"
        found.append(Outcome(requirement, state, fault or values_of(keys_in(requirement.that), config)))
    return found


def bind(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, Any],
    assumed: Collection[str] = (),
) -> Bound:
    """How the parameters of these shapes form leaves.

    `given` are lengths by name, `config` is what the model's config says, `assumed` are the names of requirements that
    the user vouches for.

    Raises LayoutError with everything that is wrong: requirements that the config does not meet, names that no rule
    claims or several do, rules that find nothing, layers that are missing, lengths that contradict one another or do
    not divide, leaves formed twice.
    """
    checked = outcomes(mapping, config, assumed)
    faults = _unmet_faults(mapping, shapes, config, [one for one in checked if one.state == "unmet"])
    if strays := sorted(given.keys() - mapping.names):
        faults.append(f"{', '.join(strays)} in sizes: no rule and no size of {mapping.name} has that name")
    mapping, undecided = _with_rules_that_hold(mapping, config)
    if undecided:  # which is said already where no config is there to decide
        raise _refusal(mapping, faults if faults and not config else [*faults, *undecided])
    bound = _bound(mapping, shapes, given, numbers_of(config), faults)
    vouched = [f"on the user's word, against the requirement {one}" for one in checked if one.state == "assumed"]
    return replace(bound, notes=[*vouched, *bound.notes])


def _unmet_faults(
    mapping: LeafMapping, shapes: Mapping[str, Shape], config: Mapping[str, Any], lacking: Sequence[Outcome]
) -> list[str]:
    """A fault for each requirement that is not met, the last with what to do about them."""
    if not lacking:
        return []
    vouch = "to vouch for a requirement, name it in assume= (--assume)"
    if not config:
        names = ", ".join(one.requirement.name for one in lacking)
        return [f"requires {names}, but {_NO_CONFIG}: give it, config= (--config); {vouch}"]
    fitting = ", ".join(_fitting(mapping, shapes, config))
    remedy = f"{fitting} fits this model; {vouch}" if fitting else vouch
    *faults, last = [f"requires {one}" for one in lacking]
    return [*faults, f"{last}; {remedy}"]


def _fitting(mapping: LeafMapping, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[str]:
    """The mappings of the package to the same target, one way or the other, that fit."""
    target = mapping.name.removesuffix(".yaml").rpartition("-to-")[2]
    for name in shipped():
        if not name.endswith(f"-to-{target}"):
            continue
        one = LeafMapping.load(name)
        for way in (one, one.inverse()) if one.requires else ():
            with suppress(LayoutError):
                if all(outcome.state == "met" for outcome in outcomes(way, config)):
                    bind(way, shapes, {}, config)
                    yield name


def _with_rules_that_hold(mapping: LeafMapping, config: Mapping[str, Any]) -> tuple[LeafMapping, list[str]]:
    """The mapping without rules whose `when` does not hold, and a fault for each that the config leaves open."""
    rules: list[Rule] = []
    faults: list[str] = []
    for rule in mapping.rules:
        if rule.when and not config:
            faults.append(f"{rule.label} is there when `{rule.when}`, but {_NO_CONFIG}")
            continue
        try:
            if not rule.when or holds(rule.when, config):
                rules.append(rule)
        except Undecided as error:
            faults.append(f"{rule.label} is there when `{rule.when}`, but the config has {error}")
    return replace(mapping, rules=tuple(rules)), faults


def _refusal(mapping: LeafMapping, faults: Sequence[str]) -> LayoutError:
    told = list(dict.fromkeys(faults))
    more = [f"... and {len(told) - FAULTS_SHOWN} more"] if len(told) > FAULTS_SHOWN else []
    title = f"{mapping.name} does not fit the checkpoint in {len(told)} places:"
    return LayoutError("\n  ".join([title, *told[:FAULTS_SHOWN], *more]))


def _bound(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, int],
    faults: list[str],
) -> Bound:
    """How parameters form leaves by the rules that are there. Raises LayoutError with `faults` and all others."""
    skipped, instances = _claimed(mapping, shapes, faults)
    claims = [claim for instance in instances for claim in _shape_claims(instance, shapes, faults)]
    lengths = infer(claims, _known(mapping, given, config, faults))
    faults += lengths.faults
    for size in sorted({i.rule.scale.split(" ** ")[0] for i in instances if isinstance(i.rule.scale, str)}):
        if size not in lengths.known:
            faults.append(f"{mapping.name} scales by a power of {size}, which has no length; give it in sizes")
    leaves: dict[str, LeafForm] = {}
    copied = [rule for rule in {id(i.rule): i.rule for i in instances}.values() if rule.inverse().tied]
    notes = [
        f"{rule.label}: one parameter becomes several leaves, which are independent from then on" for rule in copied
    ]
    for instance in instances if not faults else []:
        for name, form in _leaves(instance, shapes, lengths.sizes, faults, notes):
            if name in leaves:
                faults.append(f"the leaf {name} is formed twice, by {leaves[name].rule} and by {form.rule}")
            leaves[name] = form
    for name in leaves:
        for above in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
            if above in leaves:
                faults.append(f"{above} is a leaf, so {name} cannot be below it")
    if faults:
        raise _refusal(mapping, faults)
    sizes = {name: n for name, n in lengths.sizes.items() if name.isidentifier()}
    return Bound(leaves, skipped, sizes, list(dict.fromkeys(notes)))


def _claimed(
    mapping: LeafMapping, shapes: Mapping[str, Shape], faults: list[str]
) -> tuple[dict[str, str], list[_Instance]]:
    """What becomes of every name: skipped with the reason, or a member of an instance of a rule."""
    claims: dict[str, list[str]] = {name: [] for name in shapes}
    skipped: dict[str, str] = {}
    for skip in mapping.skips:
        for name in filter(re.compile(regex_of(skip.param)).fullmatch, shapes):
            skipped[name] = skip.reason
            claims[name].append(f"skip {skip.param!r}")
    found: list[_Instance] = []
    several = _claimed_twice(mapping, shapes)
    for rule in mapping.rules:
        instances: dict[Values, _Instance] = {}
        shared = _shared(rule)
        for pattern in (*rule.params, *rule.tied):
            stacked = [key for key in placeholders(pattern) if key not in shared]
            for name in shapes:
                if (hit := values_in(pattern, name)) is not None:
                    if rule.optional and name in several and not _fits(rule, pattern, shapes[name]):
                        continue
                    claims[name].append(rule.label)
                    values = tuple(hit[key] for key in shared)
                    instance = instances.setdefault(values, _Instance(rule, dict(zip(shared, values, strict=True))))
                    instance.members.setdefault(pattern, {})[tuple(hit[key] for key in stacked)] = name
        if not instances and not rule.optional:
            faults.append(f"{rule.label} finds no parameter")
        found += instances.values()
    # Layers share what is wrong with them, so names that differ in numbers alone are told once.
    alike: dict[tuple[str, Shape, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, by in claims.items():
        if len(by) != 1:
            alike[re.sub(r"\d+", "#", name), shapes[name], tuple(by)].append(name)
    for (_, shape, by), names in alike.items():
        what = f"{names[0]} {list(shape)}" + (f" and {len(names) - 1} more of other numbers" if names[1:] else "")
        if by:
            faults.append(f"{what}: claimed {len(by)} times, {'; '.join(by)}")
        else:
            faults.append(f"{what}: claimed by no rule; map it, or skip it with a reason")
    return skipped, found


def _claimed_twice(mapping: LeafMapping, shapes: Mapping[str, Shape]) -> set[str]:
    """The names that several rules match, such as those that the inverse gives the leaves of a dense and a sparse MLP:
    an optional rule then means the arrays that have as many axes as it names."""
    seen: Counter[str] = Counter()
    for rule in mapping.rules:
        patterns = [name_regex(pattern) for pattern in (*rule.params, *rule.tied)]
        seen.update(name for name in shapes if any(pattern.fullmatch(name) for pattern in patterns))
    return {name for name, count in seen.items() if count > 1}


def _fits(rule: Rule, pattern: str, shape: Shape) -> bool:
    said = expression({**rule.params, **rule.tied}[pattern])
    return len(shape) >= len(said.dims) - 1 if said.rest else len(shape) == len(said.dims)


def _shared(rule: Rule) -> tuple[str, ...]:
    """The placeholders that are in the names of both sides."""
    of_leaves = placeholders(next(iter(rule.leaves)))
    return tuple(key for key in placeholders(next(iter(rule.params))) if key in of_leaves)


def _stacked(rule: Rule) -> tuple[str, ...]:
    """The placeholders of the parameters that are axes of the leaves."""
    of_leaves = placeholders(next(iter(rule.leaves)))
    return tuple(key for key in placeholders(next(iter(rule.params))) if key not in of_leaves)


def _shape_claims(instance: _Instance, shapes: Mapping[str, Shape], faults: list[str]) -> Iterator[Claim]:
    """What a rule says of the shapes of the parameters it found, and of how many of them there are."""
    rule, members = instance.rule, instance.members
    stacked = _stacked(rule)
    for i, key in enumerate(stacked):
        for pattern, names in members.items():
            numbers = {values[i] for values in names}
            if wrong := sorted(n for n in numbers if not re.fullmatch(r"0|[1-9]\d{0,8}", n)):
                faults.append(f"{rule.label} stacks {{{key}}} of {pattern}, but finds {', '.join(wrong)} there")
                return
            of = f"the number of {{{key}}} in {filled(pattern, instance.shared)}"
            yield Claim(of, Expression((Axis(key),)), (max(map(int, numbers)) + 1,))
    places = {values for names in members.values() for values in names}
    ranges = [range(max(int(values[i]) for values in places) + 1) for i in range(len(stacked))]
    count = math.prod(map(len, ranges))
    for pattern in (*rule.params, *(tied for tied in rule.tied if tied in members)):
        there = members.get(pattern, {})
        if len(there) == count or (rule.tied and not there):
            continue  # all are there, or one of the tied copies stands for them
        for values in itertools.islice((place for place in _places(ranges) if place not in there), 3):
            name = filled(pattern, instance.shared | dict(zip(stacked, values, strict=True)))
            beside = next(iter(next(iter(members.values())).values()))
            faults.append(f"{name} is not there, but {rule.label} needs it beside {beside}")
        if count - len(there) > 3:
            faults.append(f"... and {count - len(there) - 3} more of {pattern}")
    for pattern, names in members.items():
        axes = {**rule.params, **rule.tied}[pattern]
        alike: dict[Shape, list[str]] = defaultdict(list)
        for name in names.values():
            alike[shapes[name]].append(name)
        for shape, those in alike.items():
            also = f" (and {len(those) - 1} more)" if len(those) > 1 else ""
            yield Claim(those[0] + also, instance.spread(axes, len(shape)), shape)


def _places(ranges: Sequence[range]) -> Iterator[Values]:
    """Every combination of numbers, one at a time: a name with a stray number must not make a list of all below it."""
    for number in ranges[0] if ranges else ():
        for rest in _places(ranges[1:]):
            yield (str(number), *rest)
    if not ranges:
        yield ()


def _known(
    mapping: LeafMapping, given: Mapping[str, int], config: Mapping[str, int], faults: list[str]
) -> dict[str, Known]:
    """The lengths that need no shapes: those given, and the mapping's sizes as far as the config has their names."""
    known = {name: Known(n, "given in sizes") for name, n in given.items()}
    numbers = {**config, **given}
    waiting = {name: size for name, size in mapping.sizes.items() if name not in given}
    while ready := [name for name, size in waiting.items() if names_in(size) <= numbers.keys()]:
        for name in ready:
            size = waiting.pop(name)
            try:
                numbers[name] = size_of(size, numbers)
                known[name] = Known(
                    numbers[name], f"{size} of the config" if isinstance(size, str) else "in the mapping"
                )
            except SpecError as error:
                faults.append(f"{mapping.name}: sizes: {name}: {error}")
    return known


def _leaves(
    instance: _Instance, shapes: Mapping[str, Shape], sizes: Mapping[str, int], faults: list[str], notes: list[str]
) -> Iterator[tuple[str, LeafForm]]:
    """The leaves of one instance of a rule."""
    rule = instance.rule
    some = shapes[next(iter(next(iter(instance.members.values())).values()))]
    axes = {**rule.params, **rule.tied}
    pattern = next(iter(instance.members))
    rest = len(some) - len(expression(axes[pattern]).dims) + 1 if expression(axes[pattern]).rest else 0
    spread = {p: instance.spread(axes[p], rest + len(expression(axes[p]).dims) - 1) for p in instance.members}
    scale = _scale(rule, sizes)
    if (scale, rule.add) != (1, 0):
        how = f"(x - {rule.add}) / {scale}" if rule.backwards else f"x * {scale} + {rule.add}"
        notes.append(f"{rule.label}: parameters x become {how}, rounded to their dtype; their moments are left out")
    for leaf, said in rule.leaves.items():
        made = instance.spread(said, rest + len(expression(said).dims) - 1)
        unstacked = [key for key in placeholders(leaf) if key not in instance.shared]
        shape = made.shape(sizes)
        for place in itertools.product(*[range(sizes[key]) for key in unstacked]):
            fixed = dict(zip(unstacked, place, strict=True))
            name = filled(leaf, instance.shared | {key: str(i) for key, i in fixed.items()})
            groups = [[p for p in rule.params if p in spread], *([p] for p in rule.tied if p in spread)]
            layouts = [
                LeafLayout(shape, tuple(_parts(instance, made, {p: spread[p] for p in group}, sizes, fixed)))
                for group in groups
                if group
            ]
            if not layouts[0].parts:
                faults.append(f"{rule.label}: the leaf {name} of shape {list(shape)} has no elements")
                continue
            form = LeafForm(layouts[0], str(rule), tuple(layouts[1:]), rule.cast, scale, rule.add, rule.backwards)
            yield name, form
            if layouts[0].padding:
                notes.append(f"{rule.label}: {layouts[0].padding} elements of {leaf} are padding, zeros")
    for p, said in spread.items():
        if dropped := [c for c in components(said, sizes) if c.padding]:
            names = " and ".join(sorted({n for c in dropped for n in c.names if n.startswith("_")}))
            notes.append(f"{rule.label}: {names} of {p} is dropped; going back gives zeros there")


def _scale(rule: Rule, sizes: Mapping[str, int]) -> float:
    """The number by which a rule scales."""
    if not isinstance(rule.scale, str):
        return rule.scale
    size, power = rule.scale.split(" ** ")
    try:
        return float(sizes[size]) ** float(power)
    except ArithmeticError as error:
        raise LayoutError(
            f"{rule.label}: the scale {rule.scale} cannot be, with {size} = {sizes[size]}: {error}"
        ) from None


def _parts(
    instance: _Instance,
    leaf: Expression,
    params: Mapping[str, Expression],
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> Iterator[Part]:
    """Where each parameter's elements are in a leaf; `fixed` are the places at which parameters are unstacked."""
    stacked = _stacked(instance.rule)
    sources: dict[frozenset[str], tuple[str, Component]] = {}
    for pattern, said in params.items():
        for component in components(said, sizes):
            sources[component.names.union(stacked)] = pattern, component
    for target in components(leaf, sizes):
        if target.padding:
            continue
        pattern, source = sources[target.names.union(fixed)]
        for values, name in sorted(instance.members[pattern].items(), key=lambda item: tuple(map(int, item[0]))):
            at = {**fixed, **{key: int(value) for key, value in zip(stacked, values, strict=True)}}
            found = part(name, source, target, sizes, at)
            if 0 not in found.sizes:
                yield found


@dataclass(frozen=True)
class Said:
    """What was said beside a checkpoint when it was mapped: lengths, requirements vouched for, a model's config."""

    lengths: dict[str, int] = field(default_factory=dict[str, int])
    assumed: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict[str, Any])


def said_before(mapping: LeafMapping, done: Mapping[str, Any]) -> Said:
    """What was said to the mapping that made a checkpoint, if `mapping` undoes it; `done` is the record of that."""
    rules, lengths, assumed, config = (done.get(name) for name in ("rules", "lengths", "assumed", "config"))
    if not isinstance(rules, dict) or not isinstance(lengths, dict) or not all(map(is_length, lengths.values())):
        return Said()
    if LeafMapping.from_dict(rules).inverse() != mapping:
        return Said()
    names = tuple(map(str, assumed)) if isinstance(assumed, list) else ()
    return Said(lengths, names, config if isinstance(config, dict) else {})


def unclaimed(mapping: LeafMapping, names: Sequence[str]) -> list[str]:
    """The names that neither a rule nor a skip claims."""
    found = [name_regex(pattern) for rule in mapping.rules for pattern in (*rule.params, *rule.tied)]
    found += [re.compile(regex_of(skip.param)) for skip in mapping.skips]
    return [name for name in names if not any(regex.fullmatch(name) for regex in found)]
