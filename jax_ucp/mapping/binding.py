"""A mapping bound to names and shapes: which parameters form each leaf, and where elements go."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax_ucp.errors import LayoutError, SpecError, fault_lines
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
from jax_ucp.layout.strided import LeafForm, LeafLayout, Part, part
from jax_ucp.mapping.conditions import Undecided, holds, keys_in, unmet, values_of
from jax_ucp.mapping.model_config import is_length, numbers_of
from jax_ucp.mapping.names import name_regex, parse_name, values_in
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import (
    Power,
    Requirement,
    Rule,
    Skip,
    expression,
    shipped,
)
from jax_ucp.shard_spec.arithmetic import names_in, size_of
from jax_ucp.shard_spec.rules import regex_of

FAULTS_SHOWN = 40
MISSING_SHOWN = 3
# An axis of so many layers and experts that each becomes a leaf is of no model.
MOST_LEAVES = 1_000_000
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_NO_CONFIG = "the checkpoint does not have its model's config"

Values = tuple[str, ...]


@dataclass(frozen=True)
class Bound:
    """A mapping with the parameters of one checkpoint.

    `leaves` says how each leaf is formed, `skipped` why a parameter is in none, `sizes` the length
    of every axis that has a name. `notes` tell what is more than moving elements: padding, casts,
    scaling, copies, and requirements that a user vouches for.
    """

    leaves: dict[str, LeafForm]
    skipped: dict[str, str]
    sizes: dict[str, int]
    notes: list[str]


@dataclass
class _Instance:
    """A rule with the parameters it claims, for one value of each placeholder that leaves share.

    `shared` are those values. `members` has for each name with placeholders the parameter of each
    stacked place.
    """

    rule: Rule
    shared: dict[str, str]
    members: dict[str, dict[Values, str]] = field(default_factory=dict[str, dict[Values, str]])

    @property
    def names(self) -> list[str]:
        """The parameters that it claims; one under two names with placeholders comes twice."""
        return [name for members in self.members.values() for name in members.values()]

    @property
    def stacked(self) -> list[str]:
        """The placeholders of parameters that are axes of the leaves."""
        return _placeholder_axes(self.rule)[1]

    @property
    def places(self) -> list[range]:
        """The numbers of each stacked placeholder, from 0 to the largest that a parameter has."""
        values = [values for members in self.members.values() for values in members]
        numbers = (map(int, column) for column in zip(*values, strict=True))
        return [range(max(column) + 1) for column in numbers]

    def axes(self, pattern: str) -> str:
        """The axes of a parameter."""
        return {**self.rule.params, **self.rule.tied}[pattern]

    def spread(self, axes: str, rest: int) -> Expression:
        """The expression with names for the `rest` axes that `...` stands for."""
        # Two parameters of one rule may have other lengths there, so the names are of this instance
        # alone.
        at = f" of {self.rule.label}" + (f" for {self.shared}" if self.shared else "")
        return expression(axes).spread([f"...{i}{at}" for i in range(rest)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a requirement, and the config's values for it."""

    requirement: Requirement
    state: Literal["met", "assumed", "unmet"]
    values: str

    def __str__(self) -> str:
        return f"{self.requirement.name}: {self.values}; {self.requirement.reason}"


def outcomes(
    mapping: LeafMapping, config: Mapping[str, Any], assumed: Collection[str] = ()
) -> list[Outcome]:
    """What becomes of every requirement of a mapping; without a config none of them is met.

    Raises LayoutError where what is assumed is none of them.
    """
    names = [requirement.name for requirement in mapping.requires]
    if strays := sorted(set(assumed) - set(names)):
        has = ", ".join(names) or "none"
        raise LayoutError(
            f"{', '.join(strays)} in assume: the requirements of {mapping.name} are {has}"
        )
    return [_outcome(requirement, config, assumed) for requirement in mapping.requires]


def _outcome(
    requirement: Requirement, config: Mapping[str, Any], assumed: Collection[str]
) -> Outcome:
    fault = unmet(requirement.that, config) if config else _NO_CONFIG
    if not fault:
        return Outcome(requirement, "met", values_of(keys_in(requirement.that), config))
    return Outcome(requirement, "assumed" if requirement.name in assumed else "unmet", fault)


def bind(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, Any],
    assumed: Collection[str] = (),
) -> Bound:
    """How the parameters of these shapes form leaves.

    `given` are lengths by name, `config` is what the model's config says, `assumed` are the names
    of requirements that the user vouches for.

    Raises LayoutError with everything that is wrong: requirements that the config does not meet,
    names that no rule claims or several do, rules that find nothing, layers that are missing,
    lengths that contradict one another or do not divide, leaves formed twice.
    """
    checked = outcomes(mapping, config, assumed)
    faults = _unmet_faults(mapping, shapes, config, checked)
    if strays := sorted(given.keys() - mapping.names):
        faults.append(
            f"{', '.join(strays)} in sizes: no rule and no size of {mapping.name} has that name"
        )
    mapping, undecided = _with_rules_that_hold(mapping, config)
    if undecided:
        is_known_why = bool(faults) and not config  # the faults ask for a config already
        raise _refusal(mapping, faults if is_known_why else [*faults, *undecided])
    bound = _bound(mapping, shapes, given, numbers_of(config), faults)
    assumptions = [outcome for outcome in checked if outcome.state == "assumed"]
    vouched = [f"on the user's word, against the requirement {one}" for one in assumptions]
    return replace(bound, notes=[*vouched, *bound.notes])


def _unmet_faults(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    checked: Sequence[Outcome],
) -> list[str]:
    """A fault for each requirement that is not met, the last with the remedy."""
    lacking = [outcome for outcome in checked if outcome.state == "unmet"]
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


def _fitting(
    mapping: LeafMapping, shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> Iterator[str]:
    """The mappings of the package to the same target, one way or the other, that fit."""
    target = mapping.name.partition(".yaml")[0].rpartition("-to-")[2]
    for name in [name for name in shipped() if name.endswith(f"-to-{target}")]:
        other = LeafMapping.load(name)
        for way in (other, other.inverse()) if other.requires else ():
            with suppress(LayoutError):
                if all(outcome.state == "met" for outcome in outcomes(way, config)):
                    bind(way, shapes, {}, config)
                    yield name


def _with_rules_that_hold(
    mapping: LeafMapping, config: Mapping[str, Any]
) -> tuple[LeafMapping, list[str]]:
    """The mapping without rules whose `when` is false, and a fault for each that is undecided."""
    rules: list[Rule] = []
    faults: list[str] = []
    for rule in mapping.rules:
        try:
            if _is_used(rule, config):
                rules.append(rule)
        except Undecided as reason:
            faults.append(f"{rule.label} is there when `{rule.when}`, but {reason}")
    return replace(mapping, rules=tuple(rules)), faults


def _is_used(rule: Rule, config: Mapping[str, Any]) -> bool:
    """Whether `when` of a rule holds. Raises Undecided where the config does not decide it."""
    if not rule.when:
        return True
    if not config:
        raise Undecided(_NO_CONFIG)
    try:
        return holds(rule.when, config)
    except Undecided as error:
        raise Undecided(f"the config has {error}") from None


def _refusal(mapping: LeafMapping, faults: Sequence[str]) -> LayoutError:
    distinct = list(dict.fromkeys(faults))
    lines = fault_lines(distinct, FAULTS_SHOWN)
    places = len(distinct)
    return LayoutError(f"{mapping.name} does not fit the checkpoint in {places} places:\n  {lines}")


def _bound(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    given: Mapping[str, int],
    config: Mapping[str, int],
    faults: list[str],
) -> Bound:
    """How parameters form leaves by these rules. Raises LayoutError with `faults` and its own."""
    known = _known(mapping, given, config, faults)
    mapping = _with_numbers(mapping, known, faults)
    skipped, instances = _claimed(mapping, shapes, _lengths(known), faults)
    claims = [claim for instance in instances for claim in _shape_claims(instance, shapes, faults)]
    lengths = infer(claims, known)
    faults += lengths.faults
    faults += _scale_faults(mapping, instances, lengths.known)
    faults += _odd_faults(instances, lengths.sizes)
    notes = _independent_copies(instances)
    leaves = {} if faults else _leaves(instances, shapes, lengths.sizes, faults, notes)
    faults += _nested_leaves(leaves)
    if faults:
        raise _refusal(mapping, faults)
    sizes = {name: n for name, n in lengths.sizes.items() if name.isidentifier()}
    return Bound(leaves, skipped, sizes, list(dict.fromkeys(notes)))


def _scale_faults(
    mapping: LeafMapping, instances: Sequence[_Instance], known: Mapping[str, Known]
) -> Iterator[str]:
    scales = [instance.rule.factor for instance in instances]
    sizes = {scale.size for scale in scales if isinstance(scale, Power)}
    for size in sorted(sizes - known.keys()):
        yield f"{mapping.name} scales by a power of {size}, which has no length; give it in sizes"


def _odd_faults(instances: Sequence[_Instance], sizes: Mapping[str, int]) -> Iterator[str]:
    rotated = [instance.rule.rotated for instance in instances]
    for name in sorted(frozenset[str]().union(*rotated)):
        if sizes.get(name, 0) % 2:
            yield f"{name} = {sizes[name]} features are rotated in pairs, so they should be even"


def _with_numbers(
    mapping: LeafMapping, known: Mapping[str, Known], faults: list[str]
) -> LeafMapping:
    """The mapping with numbers for the sizes that names have; rules that lack one are left out."""
    rules: list[Rule] = []
    for rule in mapping.rules:
        if unknown := sorted(rule.sizes_in_names - known.keys()):
            names = " and ".join(unknown)
            faults.append(
                f"{rule.label} counts from {names}, which has no length; give it in sizes"
            )
            continue
        try:
            rules.append(rule.with_numbers(_lengths(known)))
        except SpecError as error:
            faults.append(f"{rule.label}: {error}")
    return replace(mapping, rules=tuple(rules))


def _lengths(known: Mapping[str, Known]) -> dict[str, int]:
    return {name: one.length for name, one in known.items()}


def _independent_copies(instances: Sequence[_Instance]) -> list[str]:
    """A note for each rule that gives several leaves the same elements."""
    rules = {id(instance.rule): instance.rule for instance in instances}
    labels = [rule.label for rule in rules.values() if rule.inverse().tied]
    return [
        f"{label}: one parameter becomes several leaves, which are independent from then on"
        for label in labels
    ]


def _nested_leaves(names: Collection[str]) -> Iterator[str]:
    """A fault for each leaf with a leaf above it."""
    for name in names:
        *above, _ = itertools.accumulate(name.split("/"), "{}/{}".format)
        for leaf in filter(names.__contains__, above):
            yield f"{leaf} is a leaf, so {name} cannot be below it"


def _claimed(
    mapping: LeafMapping,
    shapes: Mapping[str, Shape],
    lengths: Mapping[str, int],
    faults: list[str],
) -> tuple[dict[str, str], list[_Instance]]:
    """What becomes of every name: skipped with the reason, or a member of an instance of a rule.

    An index of `lengths` is below its length, so a rule for layers of which there are none needs
    no parameter.
    """
    contested = _claimed_twice(mapping, shapes, lengths)
    instances: list[_Instance] = []
    for rule in mapping.rules:
        of_rule = _instances(rule, shapes, lengths, contested)
        faults += _missing_instances(rule, of_rule, lengths)
        instances += of_rule
    faults += _uneven(instances, lengths)
    skipped: dict[str, str] = {}
    claims: dict[str, list[str]] = defaultdict(list)
    for skip in _plain_skips(mapping):
        names = list(filter(re.compile(regex_of(skip.param)).fullmatch, shapes))
        skipped |= dict.fromkeys(names, skip.reason)
        _add_claim(claims, names, f"skip {skip.param!r}")
    for instance in instances:
        _add_claim(claims, instance.names, instance.rule.label)
    skipped |= _skipped_rest(mapping, itertools.filterfalse(claims.__contains__, shapes))
    faults += _claim_faults(claims, skipped, shapes)
    return skipped, instances


def _add_claim(claims: dict[str, list[str]], names: Iterable[str], claimant: str) -> None:
    for name in names:
        claims[name].append(claimant)


def _skipped_rest(mapping: LeafMapping, names: Iterable[str]) -> dict[str, str]:
    """The reason to skip each name that nothing else claims, if the mapping has one."""
    reasons = [skip.reason for skip in mapping.skips if skip.param == REST]
    return dict.fromkeys(names, reasons[0]) if reasons else {}


def _plain_skips(mapping: LeafMapping) -> list[Skip]:
    return [skip for skip in mapping.skips if skip.param != REST]


def _is_for_none(rule: Rule, lengths: Mapping[str, int]) -> bool:
    """Whether an axis or an index of a rule has the length zero, so that nothing is meant by it."""
    return any(lengths.get(name) == 0 for name in rule.names)


def _missing_instances(
    rule: Rule, instances: Sequence[_Instance], lengths: Mapping[str, int]
) -> Iterator[str]:
    """Faults: a rule that finds nothing, or nothing for numbers below a known length."""
    if rule.optional:
        return
    if not instances:
        if not _is_for_none(rule, lengths):
            yield f"{rule.label} finds no parameter"
        return
    for key, length in {**lengths, **rule.blocks}.items():
        if key not in instances[0].shared:
            continue
        found = {instance.shared[key] for instance in instances}
        missing = (str(i) for i in range(length) if str(i) not in found)
        if first := next(missing, None):
            yield f"{rule.label} finds no parameter with {key} = {first}, of {length}"


def _uneven(instances: Sequence[_Instance], lengths: Mapping[str, int]) -> Iterator[str]:
    """Faults: a layer that some rules find and others do not, where leaves have its number too.

    Of names that begin alike up to a number, as `blk.{layer}` does, every rule finds the same ones.
    Where `lengths` has how many there are, each rule is held against that.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)  # by beginning, each with who finds it
    of_rules: dict[tuple[str, str], set[str]] = defaultdict(set)
    for instance in instances:
        label = instance.rule.label
        for beginning, filled in _numbered(instance, lengths):
            found[beginning].setdefault(filled, label)
            if not instance.rule.optional:
                of_rules[label, beginning].add(filled)
    for (label, beginning), mine in of_rules.items():
        missing = [filled for filled in found[beginning] if filled not in mine]
        if missing:
            yield (
                f"{label} finds no parameter at {missing[0]}, but {found[beginning][missing[0]]}"
                " does; write optional: true if not all have one"
            )


def _numbered(instance: _Instance, lengths: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Each beginning of a parameter's name that ends in a number that leaves have too, as the rule
    has it, and with its numbers. One whose numbers are all counted by `lengths` is left out.
    """
    for pattern in instance.rule.params:
        name = parse_name(pattern)
        for i, placeholder in enumerate(name.placeholders, 1):
            numbers = [instance.shared.get(index, "") for index in placeholder.names]
            if not all(map(_NUMBER.fullmatch, numbers)):
                break
            beginning = name.until(i)
            if not lengths.keys() >= {*beginning.indices}:
                yield str(beginning), beginning.filled(instance.shared)


def _instances(
    rule: Rule,
    shapes: Mapping[str, Shape],
    lengths: Mapping[str, int],
    contested: Collection[str],
) -> list[_Instance]:
    """The parameters that a rule claims, by the values of the placeholders that leaves have too."""
    instances: dict[Values, _Instance] = {}
    shared, stacked = _placeholder_axes(rule)
    unsure = contested if rule.optional else ()
    for pattern, axes in {**rule.params, **rule.tied}.items():
        for name, shape in shapes.items():
            values = values_in(pattern, name, lengths)
            if values is None or (name in unsure and not _fits(axes, shape)):
                continue
            of_leaf = {key: values[key] for key in shared}
            instance = instances.setdefault(tuple(of_leaf.values()), _Instance(rule, of_leaf))
            members = instance.members.setdefault(pattern, {})
            # Of two names that mean one place, 3 and 03, the second stays without a claim.
            members.setdefault(tuple(values[key] for key in stacked), name)
    return list(instances.values())


def _claim_faults(
    claims: Mapping[str, Sequence[str]], skipped: Collection[str], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    """A fault for names that not just one rule or skip claims.

    Layers share what is wrong with them, so names that differ in numbers alone are one fault.
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


def _claimed_twice(
    mapping: LeafMapping, shapes: Mapping[str, Shape], lengths: Mapping[str, int]
) -> set[str]:
    """The names that several rules match; an optional rule claims those of its number of axes."""
    counts: Counter[str] = Counter()
    for rule in mapping.rules:
        patterns = (*rule.params, *rule.tied)
        counts.update(
            name
            for name in shapes
            if any(values_in(pattern, name, lengths) is not None for pattern in patterns)
        )
    return {name for name, count in counts.items() if count > 1}


def _fits(axes: str, shape: Shape) -> bool:
    """Whether an array of this shape has as many axes as a rule says."""
    dims = len(expression(axes).dims)
    return len(shape) >= dims - 1 if expression(axes).rest else len(shape) == dims


def _placeholder_axes(rule: Rule) -> tuple[list[str], list[str]]:
    """The placeholders of parameters that leaves have too, and those that are axes of leaves."""
    of_params = parse_name(next(iter(rule.params))).indices
    of_leaves = parse_name(next(iter(rule.leaves))).indices
    shared = list(filter(of_leaves.__contains__, of_params))
    return shared, list(itertools.filterfalse(of_leaves.__contains__, of_params))


def _shape_claims(
    instance: _Instance, shapes: Mapping[str, Shape], faults: list[str]
) -> list[Claim]:
    """What a rule implies for the shapes of its parameters, and for their number."""
    if strays := list(_stray_numbers(instance)):
        faults.append(strays[0])
        return []
    faults += _missing_members(instance)
    blocks = instance.rule.blocks.items()
    of_blocks = [Claim(f"a block of {i}", Expression((Axis(i),)), (n,)) for i, n in blocks]
    return [*of_blocks, *_count_claims(instance), *_member_claims(instance, shapes)]


def _stray_numbers(instance: _Instance) -> Iterator[str]:
    """Faults: stacked placeholders that stand for something else than a number."""
    for i, key in enumerate(instance.stacked):
        for pattern, names in instance.members.items():
            numbers = {values[i] for values in names}
            if strays := sorted(itertools.filterfalse(_NUMBER.fullmatch, numbers)):
                yield (
                    f"{instance.rule.label} stacks {{{key}}} of {pattern}, but finds"
                    f" {', '.join(strays)} there"
                )


def _count_claims(instance: _Instance) -> Iterator[Claim]:
    """The length of each stacked axis, which is the number of parameters."""
    for i, key in enumerate(instance.stacked):
        for pattern, names in instance.members.items():
            label = f"the number of {{{key}}} in {_filled(pattern, instance.shared)}"
            count = max(int(values[i]) for values in names) + 1
            yield Claim(label, Expression((Axis(key),)), (count,))


def _missing_members(instance: _Instance) -> Iterator[str]:
    """Faults: parameters that a rule needs beside those that it found."""
    rule, places = instance.rule, instance.places
    count = math.prod(map(len, places))
    for pattern in (*rule.params, *filter(instance.members.__contains__, rule.tied)):
        members = instance.members.get(pattern, {})
        if rule.tied and not members:
            continue  # one of the tied copies stands for it
        missing = count - len(members)
        absent = (place for place in _places(places) if place not in members)
        for values in itertools.islice(absent, min(missing, MISSING_SHOWN)):
            name = _filled(
                pattern, instance.shared | dict(zip(instance.stacked, values, strict=True))
            )
            yield f"{name} is not there, but {rule.label} needs it beside {instance.names[0]}"
        if missing > MISSING_SHOWN:
            yield f"... and {missing - MISSING_SHOWN} more of {pattern}"


def _member_claims(instance: _Instance, shapes: Mapping[str, Shape]) -> Iterator[Claim]:
    """The shapes of parameters; those of one name that have the same are one claim."""
    for pattern, members in instance.members.items():
        alike: dict[Shape, list[str]] = defaultdict(list)
        for name in members.values():
            alike[shapes[name]].append(name)
        axes = instance.axes(pattern)
        for shape, names in alike.items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            yield Claim(names[0] + more, instance.spread(axes, _rest(axes, shape)), shape)


def _rest(axes: str, shape: Shape) -> int:
    """How many axes of an array `...` stands for."""
    parsed = expression(axes)
    return len(shape) - len(parsed.dims) + 1 if parsed.rest else 0


def _places(ranges: Sequence[range]) -> Iterator[Values]:
    """Every combination of numbers, generated lazily: a stray number may be very large."""
    if not ranges:
        yield ()
    else:
        yield from ((str(n), *rest) for n in ranges[0] for rest in _places(ranges[1:]))


def _known(
    mapping: LeafMapping, given: Mapping[str, int], config: Mapping[str, int], faults: list[str]
) -> dict[str, Known]:
    """The lengths known without shapes: those given, and sizes whose names the config has."""
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


def _leaves(
    instances: Sequence[_Instance],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    faults: list[str],
    notes: list[str],
) -> dict[str, LeafForm]:
    """How each leaf is formed, by name; adds to `faults` and `notes`."""
    leaves: dict[str, LeafForm] = {}
    for instance in instances:
        for name, form in _formed(instance, shapes, sizes, faults, notes):
            if name in leaves:
                faults.append(
                    f"the leaf {name} is formed twice, by {leaves[name].rule} and by {form.rule}"
                )
            leaves[name] = form
    return leaves


def _formed(
    instance: _Instance,
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    faults: list[str],
    notes: list[str],
) -> Iterator[tuple[str, LeafForm]]:
    """The leaves of one instance of a rule."""
    rule = instance.rule
    rest = _rest(instance.axes(next(iter(instance.members))), shapes[instance.names[0]])
    params = {
        pattern: instance.spread(instance.axes(pattern), rest) for pattern in instance.members
    }
    first, *copies = _copies(rule, params)
    scale = _scale(rule, sizes)
    if (scale, rule.add) != (1, 0):
        notes.append(_scaled_note(rule, scale))
    for pattern, axes in rule.leaves.items():
        leaf = instance.spread(axes, rest)
        for name, fixed in _leaf_places(pattern, instance.shared, sizes):
            layout = _layout(instance, leaf, first, sizes, fixed)
            if not layout.parts:
                faults.append(
                    f"{rule.label}: the leaf {name} of shape {list(layout.shape)} has no elements"
                )
                continue
            tied = tuple(_layout(instance, leaf, copy, sizes, fixed) for copy in copies)
            yield (
                name,
                LeafForm(layout, str(rule), tied, rule.cast, scale, rule.add, rule.backwards),
            )
            if layout.padding:
                notes.append(
                    f"{rule.label}: {layout.padding} elements of {pattern} are padding, zeros"
                )
    notes += _dropped_padding(rule, params, sizes)


def _copies(rule: Rule, params: Mapping[str, Expression]) -> list[dict[str, Expression]]:
    """The parameters that hold the elements of a rule's leaves: its own, then each tied copy."""
    own = {pattern: axes for pattern, axes in params.items() if pattern in rule.params}
    tied = [{pattern: axes} for pattern, axes in params.items() if pattern in rule.tied]
    return [own, *tied] if own else tied


def _scaled_note(rule: Rule, scale: float) -> str:
    change = f"(x - {rule.add}) / {scale}" if rule.backwards else f"x * {scale} + {rule.add}"
    return (
        f"{rule.label}: parameters x become {change}, rounded to their dtype; their moments are"
        " left out"
    )


def _leaf_places(
    pattern: str, shared: Mapping[str, str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The leaves of a name with placeholders, each with its index on the unstacked axes."""
    unstacked = [key for key in parse_name(pattern).indices if key not in shared]
    count = math.prod(sizes[key] for key in unstacked)
    if count > MOST_LEAVES:
        raise LayoutError(f"{pattern} would be {count} leaves; {MOST_LEAVES} are the most")
    for place in itertools.product(*(range(sizes[key]) for key in unstacked)):
        fixed = dict(zip(unstacked, place, strict=True))
        numbers = {key: str(i) for key, i in fixed.items()}
        yield _filled(pattern, {**shared, **numbers}), fixed


def _filled(pattern: str, values: Mapping[str, str]) -> str:
    return parse_name(pattern).filled(values)


def _dropped_padding(
    rule: Rule, params: Mapping[str, Expression], sizes: Mapping[str, int]
) -> Iterator[str]:
    """A note for each parameter that has padding, which no leaf has."""
    for pattern, axes in params.items():
        if names := " and ".join(sorted(filter(is_padding, axes.names))):
            yield f"{rule.label}: {names} of {pattern} is dropped; going back gives zeros there"


def _scale(rule: Rule, sizes: Mapping[str, int]) -> float:
    """The number by which a rule scales."""
    scale = rule.factor
    if not isinstance(scale, Power):
        return scale
    try:
        return float(sizes[scale.size]) ** scale.exponent
    except ArithmeticError as error:
        raise LayoutError(
            f"{rule.label}: the scale {rule.scale} cannot be, with {scale.size} ="
            f" {sizes[scale.size]}: {error}"
        ) from None


def _layout(
    instance: _Instance,
    leaf: Expression,
    params: Mapping[str, Expression],
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> LeafLayout:
    """Where the elements of a leaf are in parameters; `fixed` are indices of unstacked axes."""
    stacked = instance.stacked
    sources: dict[frozenset[str], tuple[str, Component]] = {}
    for pattern, axes in params.items():
        for component in components(axes, sizes):
            sources[component.names.union(stacked)] = pattern, component
    parts: list[Part] = []
    for target in components(leaf, sizes):
        if target.padding:
            continue
        pattern, source = sources[target.names.union(fixed)]
        for place, name in _in_order(instance.members[pattern]):
            indices = {**fixed, **dict(zip(stacked, place, strict=True))}
            parts.append(part(name, source, target, sizes, indices))
    return LeafLayout(leaf.shape(sizes), tuple(one for one in parts if 0 not in one.sizes))


def _in_order(members: Mapping[Values, str]) -> list[tuple[tuple[int, ...], str]]:
    """Parameters by their stacked places as numbers, in order."""
    return sorted((tuple(map(int, values)), name) for values, name in members.items())


@dataclass(frozen=True)
class Said:
    """What the user gave when a checkpoint was mapped: lengths, vouched requirements, a config."""

    lengths: dict[str, int] = field(default_factory=dict[str, int])
    assumed: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict[str, Any])


def said_before(mapping: LeafMapping, done: Mapping[str, Any]) -> Said:
    """What the user gave to the mapping that `mapping` undoes; `done` is the record of that."""
    rules, lengths = done.get("rules"), done.get("lengths")
    if not isinstance(rules, dict) or not isinstance(lengths, dict):
        return Said()
    if not all(map(is_length, lengths.values())):
        return Said()
    if LeafMapping.from_dict(rules).inverse() != replace(mapping, skips=()):
        return Said()
    assumed, config = done.get("assumed"), done.get("config")
    names = tuple(map(str, assumed)) if isinstance(assumed, list) else ()
    return Said(lengths, names, config if isinstance(config, dict) else {})


def mapping_record(
    mapping: LeafMapping, bound: Bound, assumed: Sequence[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint remembers of its mapping; `said_before` reads it.

    `config` is what the user gave: of it, what the mapping asks for.
    """
    record: dict[str, Any] = {
        "name": mapping.name,
        "lengths": bound.sizes,
        "rules": mapping.to_dict(),
    }
    if assumed:
        record["assumed"] = assumed
    if config:
        record["config"] = {key: config[key] for key in mapping.config_keys & config.keys()}
    return record


def unclaimed(mapping: LeafMapping, names: Sequence[str]) -> list[str]:
    """The names that neither a rule nor a skip claims."""
    regexes = list(itertools.chain.from_iterable(map(_param_regexes, mapping.rules)))
    regexes += [re.compile(regex_of(skip.param)) for skip in _plain_skips(mapping)]
    return [name for name in names if not any(regex.fullmatch(name) for regex in regexes)]


def _param_regexes(rule: Rule) -> list[re.Pattern[str]]:
    return list(map(name_regex, (*rule.params, *rule.tied)))
