"""A mapping applied to names and shapes: which parameters form each leaf, and where elements go."""

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
from jax_ucp.layout.axes import (
    REST,
    Axis,
    Claim,
    Component,
    Expression,
    Known,
    components,
    infer,
    is_padding,
)
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.parts import LeafForm, LeafLayout, Part, affine_part
from jax_ucp.mapping.model_config import is_length, numbers_of
from jax_ucp.mapping.names import name_regex, parse_name, values_in
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import MappingRule, Power, Requirement, Skip, expression, shipped
from jax_ucp.shard_spec.expressions import (
    UndecidedCondition,
    condition,
    holds,
    names_in,
    size_of,
    unmet,
    values_of,
)

MISSING_SHOWN = 3
# The most leaves that one rule may form; no model has as many layers and experts.
MOST_LEAVES = 1_000_000
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_NO_CONFIG = "the checkpoint does not have its model's config"

Values = tuple[str, ...]


@dataclass(frozen=True)
class Bound:
    """A mapping applied to the parameters of one checkpoint.

    `leaves` has the form of each leaf, `skipped` the reason for each parameter that is left out,
    `sizes` the length of every named axis. `notes` are about everything beyond moving elements:
    padding, casts, scaling, copies, and requirements that a user vouches for.
    """

    leaves: dict[str, LeafForm]
    skipped: dict[str, str]
    sizes: dict[str, int]
    notes: list[str]


@dataclass
class _Instance:
    """A rule with the parameters that it claims, for one value of each placeholder that parameters
    share with leaves, such as one layer.

    `shared` has these values. `members` has, for each of the rule's names, the parameters by the
    values of the placeholders that are stacked in the leaf.
    """

    rule: MappingRule
    shared: dict[str, str]
    members: dict[str, dict[Values, str]] = field(default_factory=dict[str, dict[Values, str]])

    @property
    def names(self) -> list[str]:
        """The parameters that it claims; one that two names of the rule match comes twice."""
        return [name for members in self.members.values() for name in members.values()]

    @property
    def stacked(self) -> list[str]:
        """The placeholders of parameters that are axes of the leaves."""
        return _placeholder_axes(self.rule)[1]

    @property
    def places(self) -> list[range]:
        """The numbers of each stacked placeholder, from 0 to the largest number that occurs."""
        values = [values for members in self.members.values() for values in members]
        numbers = (map(int, column) for column in zip(*values, strict=True))
        return [range(max(column) + 1) for column in numbers]

    def axes(self, pattern: str) -> str:
        """The axes of a parameter."""
        return {**self.rule.params, **self.rule.tied}[pattern]

    def spread(self, axes: str, rest: int) -> Expression:
        """The expression with names for the `rest` axes that `...` stands for."""
        # each instance has names of its own, because lengths may differ between instances
        at = f" of {self.rule.label}" + (f" for {self.shared}" if self.shared else "")
        return expression(axes).spread([f"...{i}{at}" for i in range(rest)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A requirement, whether it is met, and the values in the config that decide it."""

    requirement: Requirement
    state: Literal["met", "assumed", "unmet"]
    values: str

    def __str__(self) -> str:
        return f"{self.requirement.name}: {self.values}; {self.requirement.reason}"


def outcomes(
    mapping: LeafMapping, config: Mapping[str, Any], assumed: Collection[str] = ()
) -> list[Outcome]:
    """The outcome of every requirement of a mapping; without a config, no requirement is met.

    Raises LayoutError if `assumed` has a name that no requirement has.
    """
    names = [requirement.name for requirement in mapping.requires]
    if strays := sorted(set(assumed) - set(names)):
        has = ", ".join(names) or "none"
        raise LayoutError(
            f"{', '.join(strays)} in assume: the requirements of {mapping.name} are {has}"
        )
    results: list[Outcome] = []
    for requirement in mapping.requires:
        if fault := unmet(requirement.that, config) if config else _NO_CONFIG:
            state = "assumed" if requirement.name in assumed else "unmet"
            results.append(Outcome(requirement, state, fault))
        else:
            values = values_of(condition(requirement.that).keys, config)
            results.append(Outcome(requirement, "met", values))
    return results


def bind(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, Any],
    assumed: Collection[str] = (),
) -> Bound:
    """The leaves that the parameters of these shapes form.

    `given` are lengths by name, `config` is the model's config, `assumed` are the names of
    requirements that the user vouches for.

    Raises LayoutError with all faults: requirements that the config does not meet, parameters that
    no rule or several rules claim, rules that match nothing, missing layers, lengths that
    contradict one another or do not divide, leaves that are formed twice.
    """
    checked = outcomes(mapping, config, assumed)
    faults = _unmet_faults(mapping, shapes, config, checked)
    if strays := sorted(given.keys() - mapping.names):
        faults.append(
            f"{', '.join(strays)} in sizes: no rule and no size of {mapping.name} has that name"
        )
    rules: list[MappingRule] = []
    undecided: list[str] = []
    for rule in mapping.rules:
        if rule.when and not config:
            undecided.append(f"{rule.label} is there when `{rule.when}`, but {_NO_CONFIG}")
            continue
        try:
            if not rule.when or holds(rule.when, config):
                rules.append(rule)
        except UndecidedCondition as error:
            undecided.append(
                f"{rule.label} is there when `{rule.when}`, but the config has {error}"
            )
    if undecided:
        asks_for_config = bool(faults) and not config
        raise _refusal(mapping, faults if asks_for_config else [*faults, *undecided])
    ways = {
        layout: replace(mapping, rules=tuple(one for one in rules if one.layout in ("", layout)))
        for layout in _layouts_of(mapping, rules, shapes, faults)
    }
    bound = _bound_by_one_layout(ways, shapes, given, numbers_of(config), faults)
    assumptions = [outcome for outcome in checked if outcome.state == "assumed"]
    vouched = [f"on the user's word, against the requirement {one}" for one in assumptions]
    return replace(bound, notes=[*vouched, *bound.notes])


def _layouts_of(
    mapping: LeafMapping,
    rules: Sequence[MappingRule],
    shapes: Mapping[str, Shape],
    faults: Sequence[str],
) -> list[str]:
    """The layouts whose names the parameters have: several if these layouts differ only in shapes.
    If no parameter is of a layout, the first one, and "" for a mapping without layouts.

    Raises LayoutError, with `faults` and its own, if the parameters are of layouts that differ in
    names.
    """
    example_of: dict[str, str] = {}  # by layout, a parameter that is in it
    patterns: dict[str, set[str]] = {layout: set() for layout in mapping.layouts}
    for rule in rules:
        for pattern in (*rule.params, *rule.tied) if rule.layout else ():
            patterns[rule.layout].add(pattern)
            candidates = () if rule.layout in example_of else shapes
            if name := next(filter(name_regex(pattern).fullmatch, candidates), None):
                example_of[rule.layout] = name
    if len({frozenset(patterns[layout]) for layout in example_of}) > 1:
        each = " and ".join(f"{layout} ({name})" for layout, name in example_of.items())
        raise _refusal(mapping, [*faults, f"has parameters in several layouts, {each}"])
    return list(example_of) or [*mapping.layouts[:1]] or [""]


def _bound_by_one_layout(
    ways: Mapping[str, LeafMapping],
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, int],
    faults: list[str],
) -> Bound:
    """The leaves by the only layout that fits the shapes; `ways` are the mapping by each layout.

    Raises LayoutError if several layouts fit; if none does, with `faults` and those of the first.
    """
    fitting: dict[str, Bound] = {}
    refusals: list[LayoutError] = []
    for layout, way in ways.items():
        try:
            fitting[layout] = _bound(way, shapes, given, config, list(faults))
        except LayoutError as refusal:
            refusals.append(refusal)
    if not fitting:
        raise refusals[0]
    layouts = [*fitting]
    if len(layouts) > 1:
        name = next(iter(ways.values())).name
        each = " and of ".join(layouts)
        raise LayoutError(f"{name} fits with the layout of {each}: {name}:{layouts[0]} says which")
    return fitting[layouts[0]]


def _unmet_faults(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    checked: Sequence[Outcome],
) -> list[str]:
    """A fault for each requirement that is not met; the last fault has the remedy."""
    lacking = [outcome for outcome in checked if outcome.state == "unmet"]
    if not lacking:
        return []
    vouch = "to vouch for a requirement, name it in assume= (--assume)"
    if not config:
        names = ", ".join(one.requirement.name for one in lacking)
        return [f"requires {names}, but {_NO_CONFIG}: give it, config= (--config); {vouch}"]
    # the package's mappings to the same target that fit, forwards or backwards
    fitting: list[str] = []
    target = mapping.name.partition(".yaml")[0].rpartition("-to-")[2]
    for name in [name for name in shipped() if name.endswith(f"-to-{target}")]:
        other = LeafMapping.load(name)
        if not other.requires or any(one.state != "met" for one in outcomes(other, config)):
            continue
        for way in (other, other.inverse()):
            with suppress(LayoutError):
                bind(way, shapes, {}, config)
                fitting.append(name)
    remedy = f"{', '.join(fitting)} fits this model; {vouch}" if fitting else vouch
    *faults, last = [f"requires {one}" for one in lacking]
    return [*faults, f"{last}; {remedy}"]


def _refusal(mapping: LeafMapping, faults: Sequence[str]) -> LayoutError:
    distinct = list(dict.fromkeys(faults))
    title = f"{mapping.name} does not fit the checkpoint in {len(distinct)} places:"
    return LayoutError(title, distinct)


def _bound(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, int],
    faults: list[str],
) -> Bound:
    """The leaves that the mapping's rules form. Raises LayoutError with `faults` and its own."""
    known = _known(mapping, given, config, faults)
    lengths = {name: one.length for name, one in known.items()}
    mapping = replace(mapping, rules=tuple(_numbered(mapping.rules, lengths, faults)))

    skipped, instances = _claimed(mapping, shapes, lengths, faults)
    claims = [
        claim
        for instance in instances
        for claim in _shape_claims(instance, shapes, lengths, faults)
    ]
    inferred = infer(claims, known)
    faults += inferred.faults
    scales = [instance.rule.factor for instance in instances]
    for size in sorted({scale.size for scale in scales if isinstance(scale, Power)}):
        if size not in inferred.known:
            faults.append(
                f"{mapping.name} scales by a power of {size}, which has no length; give it in sizes"
            )
    rotated = frozenset[str]().union(*(instance.rule.rotated for instance in instances))
    for name in sorted(rotated):
        if inferred.sizes.get(name, 0) % 2:
            faults.append(
                f"{name} = {inferred.sizes[name]} features are rotated in pairs, so they should be"
                " even"
            )
    copying = {id(one.rule): one.rule.label for one in instances if one.rule.inverse().tied}
    notes = [
        f"{label}: one parameter becomes several leaves, which are independent from then on"
        for label in copying.values()
    ]
    leaves: dict[str, LeafForm] = {}
    for instance in () if faults else instances:
        for name, form in _formed(instance, shapes, inferred.sizes, faults, notes):
            if name in leaves:
                faults.append(
                    f"the leaf {name} is formed twice, by {leaves[name].rule} and by {form.rule}"
                )
            leaves[name] = form
    for name in leaves:
        *above, _ = itertools.accumulate(name.split("/"), "{}/{}".format)
        faults += [
            f"{leaf} is a leaf, so {name} cannot be below it" for leaf in above if leaf in leaves
        ]
    if faults:
        raise _refusal(mapping, faults)
    sizes = {name: n for name, n in inferred.sizes.items() if name.isidentifier()}
    return Bound(leaves, skipped, sizes, list(dict.fromkeys(notes)))


def _numbered(
    rules: Sequence[MappingRule], lengths: Mapping[str, int], faults: list[str]
) -> Iterator[MappingRule]:
    """The rules, with numbers in place of the sizes in their parameters' names.

    A rule with a size whose length is not known is left out, and a message is added to `faults`.
    """
    for rule in rules:
        if unknown := sorted(rule.sizes_in_names - lengths.keys()):
            names = " and ".join(unknown)
            faults.append(
                f"{rule.label} counts from {names}, which has no length; give it in sizes"
            )
            continue
        try:
            numbered = rule.with_numbers(lengths)
        except SpecError as error:
            faults.append(f"{rule.label}: {error}")
            continue
        for i, n in numbered.blocks.items():
            if lengths.get(i, n) > n:
                faults.append(f"{rule.label} has blocks of {n}, but {i} = {lengths[i]} in sizes")
        yield numbered


def _claimed(
    mapping: LeafMapping, shapes: Mapping[str, Shape], lengths: Mapping[str, int], faults: list[str]
) -> tuple[dict[str, str], list[_Instance]]:
    """The parameters to skip, with reasons, and the instances of rules that claim the others.

    An index whose length is in `lengths` is below that, so that a rule for layers whose number is
    zero needs no parameter.
    """
    # of a parameter that several rules match, an optional rule claims it only by its number of axes
    matches: Counter[str] = Counter()
    for rule in mapping.rules:
        patterns = (*rule.params, *rule.tied)
        matches.update(
            name
            for name in shapes
            if any(values_in(pattern, name, lengths) is not None for pattern in patterns)
        )
    contested = {name for name, count in matches.items() if count > 1}
    instances: list[_Instance] = []
    for rule in mapping.rules:
        of_rule = _instances(rule, shapes, lengths, contested)
        instances += of_rule
        if rule.optional:
            continue
        # a rule with an axis or an index of length zero applies to nothing
        if not of_rule and not any(lengths.get(name) == 0 for name in rule.names):
            faults.append(f"{rule.label} finds no parameter")
        if of_rule:
            limits = {**rule.blocks, **lengths}
            limits = {key: n for key, n in limits.items() if key in of_rule[0].shared}
            alone = [_missing(rule, of_rule, {key: n}) for key, n in limits.items()]
            faults += filter(None, alone if any(alone) else [_missing(rule, of_rule, limits)])
    faults += _uneven(instances, lengths)
    skipped: dict[str, str] = {}
    claims: dict[str, list[str]] = defaultdict(list)
    for skip in mapping.skips:
        if strays := [] if skip.has_any else sorted(parse_name(skip.param).sizes - lengths.keys()):
            if any(map(skip.regex.fullmatch, shapes)):
                faults.append(f"skip {skip.param!r} counts from {strays[0]}, which has no length")
            continue
        for name in _skipped(skip, shapes, lengths):
            skipped[name] = skip.reason
            claims[name].append(f"skip {skip.param!r}")
    for instance in instances:
        for name in instance.names:
            claims[name].append(instance.rule.label)
    rest = [skip.reason for skip in mapping.skips if skip.param == REST]
    if rest:
        skipped |= dict.fromkeys(itertools.filterfalse(claims.__contains__, shapes), rest[0])
    faults += _claim_faults(shapes, claims, skipped)
    return skipped, instances


def _claim_faults(
    shapes: Mapping[str, Shape], claims: Mapping[str, Sequence[str]], skipped: Collection[str]
) -> Iterator[str]:
    """Faults for parameters that no rule or several rules claim. Parameters whose names differ only
    in numbers share one fault.
    """
    alike: dict[tuple[str, Shape, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        claimants = tuple(claims.get(name, ()))
        is_skipped_rest = not claimants and name in skipped
        if len(claimants) != 1 and not is_skipped_rest:
            alike[re.sub(r"\d+", "#", name), shape, claimants].append(name)
    for (_, shape, claimants), names in alike.items():
        fault = f"claimed {len(claimants)} times, {'; '.join(claimants)}"
        if not claimants:
            fault = "claimed by no rule; map it, or skip it with a reason"
        others = f" and {len(names) - 1} more of other numbers" if len(names) > 1 else ""
        yield f"{names[0]} {list(shape)}{others}: {fault}"


def _missing(
    rule: MappingRule, instances: Sequence[_Instance], limits: Mapping[str, int]
) -> str | None:
    """A fault for the first numbers below `limits` that no instance of a rule has, or None."""
    numbers = {tuple(instance.shared[key] for key in limits) for instance in instances}
    for one in itertools.product(*(map(str, range(n)) for n in limits.values())):
        if one not in numbers:
            which = [f"{k} = {i}, of {n}" for (k, n), i in zip(limits.items(), one, strict=True)]
            return f"{rule.label} finds no parameter with {' and '.join(which)}"
    return None


def _skipped(skip: Skip, names: Collection[str], lengths: Mapping[str, int]) -> Iterator[str]:
    """The names that a skip matches."""
    if skip.has_any:
        return filter(skip.regex.fullmatch, names)
    numbered = str(parse_name(skip.param).with_numbers(lengths))
    return (name for name in names if values_in(numbered, name, lengths) is not None)


def _uneven(instances: Sequence[_Instance], lengths: Mapping[str, int]) -> Iterator[str]:
    """Faults for layers that some rules match and other rules do not.

    Rules whose names begin alike up to a number, such as `blk.{layer}`, must match the same
    numbers. If `lengths` has the count of these numbers, `_missing` compares each rule with that
    instead.
    """
    # for each beginning with placeholders: with numbers filled in, the label of a rule
    finders: dict[str, dict[str, str]] = defaultdict(dict)
    of_rules: dict[tuple[str, str], set[str]] = defaultdict(set)
    for instance in instances:
        label, shared = instance.rule.label, instance.shared
        for name in map(parse_name, instance.rule.params):
            for i, placeholder in enumerate(name.placeholders, 1):
                numbers = [shared.get(index, "") for index in placeholder.names]
                if not all(map(_NUMBER.fullmatch, numbers)):
                    break
                beginning = replace(name, texts=name.texts[:i], placeholders=name.placeholders[:i])
                if lengths.keys() >= {*beginning.indices}:
                    continue
                filled = beginning.filled(shared)
                finders[str(beginning)].setdefault(filled, label)
                if not instance.rule.optional:
                    of_rules[label, str(beginning)].add(filled)
    for (label, beginning), mine in of_rules.items():
        missing = [filled for filled in finders[beginning] if filled not in mine]
        if missing:
            yield (
                f"{label} finds no parameter at {missing[0]}, but"
                f" {finders[beginning][missing[0]]} does; write optional: true if not all have one"
            )


def _instances(
    rule: MappingRule,
    shapes: Mapping[str, Shape],
    lengths: Mapping[str, int],
    contested: Collection[str],
) -> list[_Instance]:
    """The instances of a rule: one for each value of the placeholders that leaves have too.

    An optional rule claims a parameter in `contested`, which several rules match, only if its
    number of axes fits.
    """
    instances: dict[Values, _Instance] = {}
    shared, stacked = _placeholder_axes(rule)
    unsure = contested if rule.optional else ()
    for pattern, axes in {**rule.params, **rule.tied}.items():
        for name, shape in shapes.items():
            values = values_in(pattern, name, lengths)
            if values is None:
                continue
            dims, has_rest = len(expression(axes).dims), expression(axes).rest
            fits = len(shape) >= dims - 1 if has_rest else len(shape) == dims
            if name in unsure and not fits:
                continue
            of_leaf = {key: values[key] for key in shared}
            instance = instances.setdefault(tuple(of_leaf.values()), _Instance(rule, of_leaf))
            members = instance.members.setdefault(pattern, {})
            # of two names for one place, such as 3 and 03, the second is not claimed
            members.setdefault(tuple(values[key] for key in stacked), name)
    return list(instances.values())


def _placeholder_axes(rule: MappingRule) -> tuple[list[str], list[str]]:
    """The placeholders of parameters that leaves have too, and those that are axes of leaves."""
    of_params = parse_name(next(iter(rule.params))).indices
    of_leaves = parse_name(next(iter(rule.leaves))).indices
    shared = list(filter(of_leaves.__contains__, of_params))
    return shared, list(itertools.filterfalse(of_leaves.__contains__, of_params))


def _shape_claims(
    instance: _Instance, shapes: Mapping[str, Shape], lengths: Mapping[str, int], faults: list[str]
) -> list[Claim]:
    """The claims on lengths of axes by the shapes of an instance's parameters, and their number."""
    rule, claims = instance.rule, []
    for i, key in enumerate(instance.stacked):
        for pattern, names in instance.members.items():
            numbers = {values[i] for values in names}
            if strays := sorted(itertools.filterfalse(_NUMBER.fullmatch, numbers)):
                faults.append(
                    f"{rule.label} stacks {{{key}}} of {pattern}, but finds {', '.join(strays)}"
                    " there"
                )
                return []
    faults += _missing_members(instance)
    for i in rule.blocks.keys() - lengths.keys():
        claims.append(Claim(f"a block of {i}", Expression((Axis(i),)), (rule.blocks[i],)))
    # a stacked axis is as long as the number of its parameters
    for i, key in enumerate(instance.stacked):
        for pattern, names in instance.members.items():
            label = f"the number of {{{key}}} in {parse_name(pattern).filled(instance.shared)}"
            count = max(int(values[i]) for values in names) + 1
            claims.append(Claim(label, Expression((Axis(key),)), (count,)))
    # all parameters of one name and one shape share a claim
    for pattern, members in instance.members.items():
        alike: dict[Shape, list[str]] = defaultdict(list)
        for name in members.values():
            alike[shapes[name]].append(name)
        axes = instance.axes(pattern)
        for shape, names in alike.items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            spread = instance.spread(axes, _rest(axes, shape))
            claims.append(Claim(names[0] + more, spread, shape))
    return claims


def _missing_members(instance: _Instance) -> Iterator[str]:
    """Faults for parameters that an instance of a rule lacks: the first few, and their number."""
    rule, places = instance.rule, instance.places
    count = math.prod(map(len, places))
    for pattern in (*rule.params, *filter(instance.members.__contains__, rule.tied)):
        members = instance.members.get(pattern, {})
        if rule.tied and not members:
            continue  # a tied copy takes its place
        missing = count - len(members)
        absent = (place for place in _places(places) if place not in members)
        for values in itertools.islice(absent, min(missing, MISSING_SHOWN)):
            stacked = dict(zip(instance.stacked, values, strict=True))
            name = parse_name(pattern).filled(instance.shared | stacked)
            yield f"{name} is not there, but {rule.label} needs it beside {instance.names[0]}"
        if missing > MISSING_SHOWN:
            yield f"... and {missing - MISSING_SHOWN} more of {pattern}"


def _rest(axes: str, shape: Shape) -> int:
    """The number of axes of an array that `...` stands for."""
    parsed = expression(axes)
    return len(shape) - len(parsed.dims) + 1 if parsed.rest else 0


def _places(ranges: Sequence[range]) -> Iterator[Values]:
    """Every combination of numbers, generated lazily, because a stray number may be very large."""
    if not ranges:
        yield ()
    else:
        yield from ((str(n), *rest) for n in ranges[0] for rest in _places(ranges[1:]))


def _known(
    mapping: LeafMapping, given: Mapping[str, int], config: Mapping[str, int], faults: list[str]
) -> dict[str, Known]:
    """The lengths that are known without shapes: given ones, and sizes by the config."""
    known = {name: Known(n, "given in sizes") for name, n in given.items()}
    numbers = {**config, **given}
    waiting = {name: size for name, size in mapping.sizes.items() if name not in given}
    while ready := [name for name, size in waiting.items() if names_in(size) <= numbers.keys()]:
        for name in ready:
            size = waiting.pop(name)
            origin = f"{size} of the config" if isinstance(size, str) else "in the mapping"
            try:
                numbers[name] = size_of(size, numbers)
                known[name] = Known(numbers[name], origin)
            except SpecError as error:
                faults.append(f"{mapping.name}: sizes: {name}: {error}")
    return known


def _formed(
    instance: _Instance,
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    faults: list[str],
    notes: list[str],
) -> Iterator[tuple[str, LeafForm]]:
    """The leaves that one instance of a rule forms, by name."""
    rule = instance.rule
    rest = _rest(instance.axes(next(iter(instance.members))), shapes[instance.names[0]])
    params = {
        pattern: instance.spread(instance.axes(pattern), rest) for pattern in instance.members
    }
    # the leaves are formed of the rule's own parameters, and again of each tied copy
    own = {pattern: axes for pattern, axes in params.items() if pattern in rule.params}
    tied = [{pattern: axes} for pattern, axes in params.items() if pattern in rule.tied]
    first, *copies = [own, *tied] if own else tied
    scale = rule.factor
    if isinstance(scale, Power):
        try:
            scale = float(sizes[scale.size]) ** scale.exponent
        except ArithmeticError as error:
            raise LayoutError(
                f"{rule.label}: the scale {rule.scale} cannot be, with {scale.size} ="
                f" {sizes[scale.size]}: {error}"
            ) from None
    if (scale, rule.add) != (1, 0):
        change = f"(x - {rule.add}) / {scale}" if rule.backwards else f"x * {scale} + {rule.add}"
        notes.append(
            f"{rule.label}: parameters x become {change}, rounded to their dtype; their moments are"
            " left out"
        )
    for pattern, axes in rule.leaves.items():
        leaf = instance.spread(axes, rest)
        for name, fixed in _leaf_places(pattern, instance.shared, sizes):
            layout = _layout(instance, leaf, first, sizes, fixed)
            if not layout.parts:
                faults.append(
                    f"{rule.label}: the leaf {name} of shape {list(layout.shape)} has no elements"
                )
                continue
            tied_layouts = tuple(_layout(instance, leaf, copy, sizes, fixed) for copy in copies)
            change = rule.cast, scale, rule.add, rule.backwards
            is_buffer = rule.buffer == "leaf"
            yield name, LeafForm(layout, str(rule), tied_layouts, *change, buffer=is_buffer)
            if layout.padding:
                notes.append(
                    f"{rule.label}: {layout.padding} elements of {pattern} are padding, zeros"
                )
    for pattern, axes in params.items():
        if names := " and ".join(sorted(filter(is_padding, axes.names))):
            notes.append(
                f"{rule.label}: {names} of {pattern} is dropped; going back gives zeros there"
            )


def _leaf_places(
    pattern: str, shared: Mapping[str, str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The names of the leaves for a name with placeholders, each with its indices on the axes that
    are not stacked.
    """
    unstacked = [key for key in parse_name(pattern).indices if key not in shared]
    count = math.prod(sizes[key] for key in unstacked)
    if count > MOST_LEAVES:
        raise LayoutError(f"{pattern} would be {count} leaves; {MOST_LEAVES} are the most")
    for place in itertools.product(*(range(sizes[key]) for key in unstacked)):
        fixed = dict(zip(unstacked, place, strict=True))
        numbers = {key: str(i) for key, i in fixed.items()}
        yield parse_name(pattern).filled({**shared, **numbers}), fixed


def _layout(
    instance: _Instance,
    leaf: Expression,
    params: Mapping[str, Expression],
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> LeafLayout:
    """The layout of a leaf in parameters; `fixed` has its indices on axes that are not stacked."""
    stacked = instance.stacked
    sources: dict[frozenset[str], tuple[str, Component]] = {}
    for pattern, axes in params.items():
        for component in components(axes, sizes):
            sources[component.names.union(stacked)] = pattern, component
    numbers: dict[str, int] = {}
    parts: list[Part] = []
    for target in components(leaf, sizes):
        if target.padding:
            continue
        pattern, source = sources[target.names.union(fixed)]
        # in the order of their numbers
        members = sorted(
            (tuple(map(int, values)), name) for values, name in instance.members[pattern].items()
        )
        for place, name in members:
            indices = {**fixed, **dict(zip(stacked, place, strict=True))}
            number = numbers.get(name, len(numbers))
            part = affine_part(number, source, target, sizes, indices)
            if part.size:
                numbers[name] = number
                parts.append(part)
    return LeafLayout(leaf.shape(sizes), tuple(numbers), tuple(parts))


@dataclass(frozen=True)
class Given:
    """The user's input when a checkpoint was mapped: lengths, assumed requirements, a config; and
    the mapping that was `undone`, with the record of `earlier` mappings.
    """

    lengths: dict[str, int] = field(default_factory=dict[str, int])
    assumed: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    undone: LeafMapping | None = None
    earlier: dict[str, Any] = field(default_factory=dict[str, Any])


def given_before(mapping: LeafMapping, done: Mapping[str, Any]) -> Given:
    """The user's input for the mapping that `mapping` undoes, if there is one.

    `done` is the record of the last mapping, which contains the records of those before it.
    """
    record: Any = done
    while isinstance(record, dict) and record:
        if (given := _given(mapping, record)) is not None:
            return given
        record = record.get("before")
    return Given(earlier=dict(done))


def _given(mapping: LeafMapping, record: Mapping[str, Any]) -> Given | None:
    """The user's input for the mapping of a record, if that is the one that `mapping` undoes."""
    rules, lengths = record.get("rules"), record.get("lengths")
    if not isinstance(rules, dict) or not isinstance(lengths, dict):
        return None
    if not all(map(is_length, lengths.values())):
        return None
    undone = LeafMapping.from_dict(rules)
    ways = undone, *map(undone.variant, undone.layouts)
    if replace(mapping, skips=()) not in [way.inverse() for way in ways]:
        return None
    assumed, config, earlier = (record.get(key) for key in ("assumed", "config", "before"))
    names = tuple(map(str, assumed)) if isinstance(assumed, list) else ()
    return Given(
        lengths,
        names,
        config if isinstance(config, dict) else {},
        undone,
        earlier if isinstance(earlier, dict) else {},
    )


def mapping_record(
    mapping: LeafMapping,
    bound: Bound,
    assumed: Sequence[str],
    config: Mapping[str, Any],
    earlier: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of a mapping that the mapped checkpoint keeps, and `given_before` reads.

    It has those keys of `config` that the mapping uses, because the mapped checkpoint has another
    config. `earlier` is the record of the mappings before.
    """
    record: dict[str, Any] = {
        "name": mapping.name,
        "lengths": bound.sizes,
        "rules": mapping.to_dict(),
    }
    if assumed:
        record["assumed"] = assumed
    if config:
        record["config"] = {key: config[key] for key in sorted(mapping.config_keys & config.keys())}
    if earlier:
        record["before"] = earlier
    return record


def takes_buffer(mapping: LeafMapping, name: str) -> bool:
    """Whether a rule forms leaves of the buffer with this name."""
    of_buffers = (rule for rule in mapping.rules if rule.buffer == "param")
    patterns = itertools.chain.from_iterable(rule.params for rule in of_buffers)
    return any(name_regex(pattern).fullmatch(name) for pattern in patterns)


def unclaimed(mapping: LeafMapping, names: Sequence[str]) -> list[str]:
    """The names that neither a rule nor a skip claims."""
    regexes = [name_regex(name) for rule in mapping.rules for name in (*rule.params, *rule.tied)]
    regexes += [skip.regex for skip in mapping.skips]
    return [name for name in names if not any(regex.fullmatch(name) for regex in regexes)]
