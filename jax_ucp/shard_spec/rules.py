"""Rules applied to names and shapes: which rule claims a parameter, and where its elements are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Pattern
from jax_ucp.shard_spec.expressions import Size, names_in, size_of


@dataclass(frozen=True, slots=True)
class UnboundPattern:
    """A pattern with names in its sizes, which `bind` replaces by numbers."""

    node: object
    read: Callable[[object, Callable[[object], int]], Pattern] = field(repr=False)

    def bind(self, sizes: Mapping[str, int]) -> Pattern:
        return self.read(self.node, lambda expression: size_of(expression, sizes))

    def names(self) -> set[str]:
        """The names in its sizes."""
        names: set[str] = set()

        def size(expression: object) -> int:
            names.update(names_in(expression))
            return 1

        self.read(self.node, size)
        return names


@dataclass(frozen=True, slots=True)
class Sentence:
    """A rule: the parameters that it claims, and the pattern of their shards.

    In `param`, `*` stands for any text and `{layer}` for a part of the name without dots. `when` is
    the name of a size, or `not` and a name: the rule applies only if the size is not zero, or zero.
    `place` is the file and line of the rule.
    """

    param: str
    pattern: Pattern | UnboundPattern
    when: str = ""
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.place}{': ' * bool(self.place)}{self.param!r}"

    @property
    def size_names(self) -> set[str]:
        """The names in the sizes of its pattern."""
        return self.pattern.names() if isinstance(self.pattern, UnboundPattern) else set()

    @property
    def switch(self) -> str:
        """The name in `when`, or an empty text."""
        return self.when.removeprefix("not ").strip()

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the rule applies, by `when`. Raises SpecError if the name there has no number."""
        name = self.switch
        return not name or bool(size_of(name, sizes)) != self.when.startswith("not ")


@dataclass(frozen=True)
class Spec:
    """How shards form parameters, for `jax_ucp.open(path, spec=...)`.

    It is made by `Spec.of`, or from a file in the universal checkpoint language
    (`docs/language.md`). Each of its own rules must claim a parameter. Rules of a spec that it
    extends may be unused, because that is written for a family of models.

    Args:
        own: its rules, each a pattern for the parameters that it claims.
        sizes: lengths by name.
        extends: a spec that claims only what no rule of its own does.
    """

    own: tuple[Sentence, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    extends: Spec | None = None

    @classmethod
    def of(cls, rules: Mapping[str, Pattern], extends: Spec | None = None) -> Spec:
        """The spec whose rules are patterns by the parameters that they claim.

        Args:
            rules: patterns of `jax_ucp.patterns` by names, in which `*` is any text.
            extends: a spec that claims only what no rule of these does.

        Returns:
            The spec.

        Raises:
            SpecError: for a pattern that is none, or a name that no rule may have.

        Example:
            >>> from jax_ucp.layout.patterns import Replicated, Sharded
            >>> str(Spec.of({"*.weight": Sharded(0), "*.bias": Replicated()}))
            'of 2 rules'
        """
        for param, pattern in rules.items():
            if not isinstance(pattern, Pattern):
                raise SpecError(
                    f"{param}: {pattern!r:.80} is not a pattern; those are in jax_ucp.patterns"
                )
            regex_of(param)
        return cls(tuple(Sentence(*rule) for rule in rules.items()), extends=extends)

    def __str__(self) -> str:
        return f"of {len(self.own)} rules"

    @property
    def lengths(self) -> set[str]:
        """The names in patterns and sizes to which the user may give numbers."""
        sizes = self.known_sizes
        patterns = [sentence.size_names for layer in self.layers for sentence in layer.own]
        names = set[str]().union(*patterns, *map(names_in, sizes.values()))
        return {name for name in names if name not in sizes or name in names_in(sizes[name])}

    @property
    def switches(self) -> set[str]:
        """The names in `when` of all rules."""
        return {sentence.switch for layer in self.layers for sentence in layer.own} - {""}

    @property
    def content(self) -> tuple[Any, ...]:
        """Its rules and sizes, without the places where they were written."""
        rules = [
            (rule.param, rule.pattern, rule.when) for layer in self.layers for rule in layer.own
        ]
        return rules, sorted(self.known_sizes.items())

    @property
    def layers(self) -> tuple[Spec, ...]:
        """This spec, the one it extends, and so on."""
        return (self, *(self.extends.layers if self.extends else ()))

    @property
    def known_sizes(self) -> dict[str, Size]:
        """Its sizes, and those of the spec that it extends, unless its own have the same name."""
        return {**(self.extends.sizes if self.extends else {}), **self.sizes}


@dataclass(frozen=True, slots=True)
class SpecShard:
    """The shape of a stored tensor, and its file and place for errors."""

    shape: Shape
    where: str


def layouts(
    spec: Spec, params: Mapping[str, Sequence[SpecShard]], sizes: Mapping[str, int] | None = None
) -> dict[str, ParamLayout]:
    """The layout of every parameter over its shards, in order of rank; each has passed `check`.

    Raises LayoutError with all faults: parameters that no rule or several rules claim, rules that
    claim nothing, sizes without a number, and patterns that the shapes contradict.
    """
    faults: list[str] = []
    numbers = _bound(spec, sizes or {})
    claims = _claims(spec, list(params), numbers, faults)
    layout_of: dict[str, ParamLayout] = {}
    for name in filter(claims.__contains__, params):
        sentence, shards = claims[name], params[name]
        pattern = sentence.pattern
        try:
            bound = pattern.bind(numbers) if isinstance(pattern, UnboundPattern) else pattern
            layout = bound.join([shard.shape for shard in shards])
            layout.check()
            layout_of[name] = layout
        except (LayoutError, SpecError) as error:
            used = sorted(sentence.size_names & numbers.keys())
            given = ", ".join(f"{size}={numbers[size]!s:.40}" for size in used)
            rule = f"{sentence} with the sizes {given}" if given else str(sentence)
            listed = ", ".join(f"{shard.where} {list(shard.shape)}" for shard in shards)
            faults.append(f"{name}, by the rule {rule}: {error}\n    (shards: {listed})")
    if faults:
        raise LayoutError("the rules do not fit the shards:", faults)
    return layout_of


def _claims(
    spec: Spec, names: Sequence[str], numbers: Mapping[str, int], faults: list[str]
) -> dict[str, Sentence]:
    """The rule for each name; messages about names without exactly one are added to `faults`."""
    claims: dict[str, Sentence] = {}
    for layer in spec.layers:
        unclaimed = [name for name in names if name not in claims]
        claimants: dict[str, list[Sentence]] = {}
        for sentence in layer.own:
            try:
                if not sentence.holds(numbers):
                    continue
            except SpecError as error:
                faults.append(f"the rule {sentence}: when: {error}")
                continue
            claimed = list(filter(re.compile(regex_of(sentence.param)).fullmatch, unclaimed))
            if layer is spec and not claimed:
                faults.append(f"the rule {sentence} claims no parameter")
            for name in claimed:
                claimants.setdefault(name, []).append(sentence)
        for name, sentences in claimants.items():
            if len(sentences) > 1:
                faults.append(
                    f"{name} is claimed by {len(sentences)} rules: {'; '.join(map(str, sentences))}"
                )
            claims[name] = sentences[0]
    for name in itertools.filterfalse(claims.__contains__, names):
        faults.append(f"{name} is claimed by no rule; say in a spec how its shards form it")
    return claims


def _bound(spec: Spec, given: Mapping[str, int]) -> dict[str, int]:
    """The numbers that rules may use: given ones, and those of the spec's sizes.

    A size that depends on a name without a number is left out; that is an error only if a rule uses
    it.
    """
    waiting = spec.known_sizes
    numbers = {name: number for name, number in given.items() if name not in waiting}
    while waiting:
        done: dict[str, int] = {}
        for name, expression in waiting.items():
            own = {name: given[name]} if name in given else {}
            with suppress(SpecError):
                done[name] = size_of(expression, {**numbers, **own})
        if not done:
            break
        numbers |= done
        waiting = {name: expression for name, expression in waiting.items() if name not in done}
    return numbers


@lru_cache(maxsize=4096)
def regex_of(param: str) -> str:
    """The regular expression of `param`. Raises SpecError for an invalid placeholder.

    >>> bool(re.fullmatch(regex_of("*.{layer}.mlp.weight"), "model.layers.3.mlp.weight"))
    True
    """
    text = ""
    for part in re.split(r"(\*|\{[^{}]*\})", param):
        if part == "*":
            text += ".*"
        elif part.startswith("{") and part.endswith("}"):
            if not part[1:-1].isidentifier():
                raise SpecError(f"{part} in {param!r} is not a placeholder; write a name in braces")
            text += r"[^.]+"
        elif "{" in part or "}" in part:
            raise SpecError(f"a brace in {param!r} is not closed, or was never opened")
        else:
            text += re.escape(part)
    return text
