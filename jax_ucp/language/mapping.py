"""How parameters form the leaves of a model: rules in YAML or in Python, and the same rules backwards.

sizes: {heads: num_attention_heads}        # lengths by name, from the model's config; others follow from shapes
requires:                                  # what must hold of the config for the leaves to mean what they meant
- {name: activation, that: hidden_act == "silu", reason: the model has no other}
leaves:
- param: model.layers.{layer}.self_attn.q_proj.weight
  axes: (heads head_dim) embed
  leaf: {layers/attn/q/kernel: layer embed heads head_dim}      # no {layer} in the name: an axis of it
- param: {mlp.gate.weight: gate embed, mlp.up.weight: up embed}
  leaf: {mlp/wi: embed (gate + up)}
skip:
- {param: "*.rotary_emb.inv_freq", reason: computed from the config}
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.errors import SpecError
from jax_ucp.language.arithmetic import Expression as Size
from jax_ucp.language.arithmetic import names_in
from jax_ucp.language.conditions import check_condition, keys_in
from jax_ucp.language.document import document, dumped, faults_of, fields
from jax_ucp.language.rules import regex_of
from jax_ucp.layout.axes import REST, Expression, axis_sets, parse

_MAPPINGS = resources.files("jax_ucp") / "mappings"
_SECTIONS = {"sizes", "requires", "leaves", "skip"}
_DTYPES = ("float64", "float32", "bfloat16", "float16")
# A power of a size: `head_dim ** -0.5`.
POWER = re.compile(r"(?P<size>[A-Za-z_]\w*) \*\* (?P<power>-?\d+(\.\d+)?)")

_BRACES = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDER = re.compile(r"[A-Za-z_]\w*(\+\d+)?")


@dataclass(frozen=True)
class Rule:
    """Parameters and the leaves that have the same elements; in both, axes by name of the array.

    `{layer}` in a name is one part of it, `{layer+1}` the same number counted from one. Where it is in the names of
    one side only, the other side has an axis of that name: layers are stacked. Parameters in `tied` are further
    copies of the one in `params`. `cast` is the dtype of the leaf's parameter (its other states keep theirs). A
    parameter becomes `x * scale + add`, or with `backwards` `(x - add) / scale`; `scale` may be a power of a size,
    `head_dim ** -0.5`. An `optional` rule may find no parameter. A rule with `when`, a condition on the model's config,
    is there only where that holds.
    """

    params: Dict[str, str]
    leaves: Dict[str, str]
    tied: Dict[str, str] = field(default_factory=dict[str, str])
    optional: bool = False
    cast: str = ""
    scale: float | str = 1
    add: float = 0
    backwards: bool = False
    when: str = ""
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        said = " and ".join(f"{name}: {axes}" for name, axes in self.params.items())
        made = " and ".join(f"{name}: {axes}" for name, axes in self.leaves.items())
        return f"{said} -> {made}"

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.where}{': ' * bool(self.where)}the rule for {' and '.join(self.params)}"

    def inverse(self) -> Rule:
        """The rule from leaves to parameters. What was tied becomes one; a copy among the leaves becomes tied.

        A cast is not undone: the parameter has the leaf's dtype.
        """
        seen: set[frozenset[str]] = set()
        params: dict[str, str] = {}
        tied: dict[str, str] = {}
        for name, axes in self.leaves.items():
            new = set(_keys(name, axes)) - seen
            (params if new else tied)[name] = axes
            seen |= new
        turned = self.backwards ^ ((self.scale, self.add) != (1, 0))
        return replace(self, params=params, leaves=self.params, tied=tied, cast="", backwards=turned)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition `that` on the model's config, without which the leaves would mean something else, and the reason.

    `name` is what a user calls it who vouches for it instead: `map(..., assume=["rope"])`.
    """

    name: str
    that: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Parameters that are not wanted, with the reason. In `param`, `*` is any text, `{layer}` one part of the name."""

    param: str
    reason: str


@dataclass(frozen=True)
class Mapping:
    """Rules that turn the parameters of a checkpoint into the leaves of a model, all of them both ways."""

    rules: Sequence[Rule]
    skips: Sequence[Skip] = ()
    sizes: Dict[str, Size] = field(default_factory=dict[str, Size])
    name: str = field(default="mapping", compare=False)
    requires: Sequence[Requirement] = ()

    @classmethod
    def load(cls, source: str | PathLike[str]) -> Mapping:
        """The mapping in a YAML file, or one that comes with the package, by its name.

        Raises SpecError, with every fault and its line, where a file is no mapping.
        """
        path = local_path(source)
        if not path.is_file() and str(source) in shipped():
            return cls.parse((_MAPPINGS / f"{source}.yaml").read_text(encoding="utf-8"), f"{source}.yaml")
        try:
            return cls.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(shipped())
            raise SpecError(f"{source} is no mapping that can be read ({error}); the package has {known}") from error

    @classmethod
    def from_dict(cls, content: Dict[str, Any], name: str = "mapping") -> Mapping:
        """The mapping that the content of a YAML file says."""
        return cls.parse(dumped(content), name)

    @classmethod
    def parse(cls, text: str, name: str = "mapping") -> Mapping:
        """The mapping that a text in YAML says; `name` is what errors call it."""
        top, lines = document(text, name)
        strays = [key for key in top if key not in _SECTIONS]
        faults = [
            f"{name}:{lines[key]}: {key!r} is no section; there are sizes, requires, leaves and skip" for key in strays
        ]
        sizes: Any = top.get("sizes") or {}
        if not isinstance(sizes, dict):
            faults.append(f"{name}:{lines['sizes']}: sizes should be a mapping of names to sizes")
            sizes = {}
        for size, expression in sizes.items():
            if not isinstance(size, str) or not size.isidentifier():
                faults.append(f"{name}:{lines['sizes']}: {size!r} is no name for a size")
            faults += faults_of(lambda e=expression: names_in(e), f"{name}:{lines['sizes']}: sizes: {size}")
        found: dict[str, list[Any]] = {"requires": [], "leaves": [], "skip": []}
        for section, read in (("requires", _requirement), ("leaves", _rule), ("skip", _skip)):
            items = top.get(section) or []
            if not isinstance(items, list):
                faults.append(f"{name}:{lines[section]}: {section} should be a list")
                continue
            for item, line in zip(items, lines.get((section,), ()), strict=False):
                where = f"{name}:{line}"
                faults += faults_of(lambda i=item, w=where, r=read, s=section: found[s].append(r(i, w)), where)
        named = [requirement.name for requirement in found["requires"]]
        faults += [
            f"{name}: two requirements are named {twice!r}" for twice in {n for n in named if named.count(n) > 1}
        ]
        if faults:
            raise SpecError("\n  ".join([f"{name} is no mapping:", *faults]))
        return cls(tuple(found["leaves"]), tuple(found["skip"]), sizes, name, tuple(found["requires"]))

    @property
    def names(self) -> frozenset[str]:
        """Every name that may have a length: axes, sizes, and what sizes are made of."""
        axes = [text for rule in self.rules for side in (rule.params, rule.tied, rule.leaves) for text in side.values()]
        stacked = [
            key
            for rule in self.rules
            for side in (rule.params, rule.leaves)
            for name in side
            for key in placeholders(name)
        ]
        said = [name for size in self.sizes.values() for name in names_in(size)]
        powers = [rule.scale.split(" ** ")[0] for rule in self.rules if isinstance(rule.scale, str)]
        return frozenset().union(*(expression(text).names for text in axes), stacked, self.sizes, said, powers)

    @property
    def config_keys(self) -> frozenset[str]:
        """The keys of the model's config that conditions and sizes name, without what is below them."""
        conditions = [requirement.that for requirement in self.requires]
        conditions += [rule.when for rule in self.rules if rule.when]
        keys = [key for text in conditions for key in keys_in(text)]
        sizes = [name for size in self.sizes.values() for name in names_in(size)]
        return frozenset(key.partition(".")[0] for key in (*keys, *sizes))

    def inverse(self) -> Mapping:
        """From the leaves to the parameters: what exports. Names in `skip` cannot come back."""
        rules = tuple(rule.inverse() for rule in self.rules)
        return Mapping(rules, (), self.sizes, f"the inverse of {self.name}", self.requires)

    def to_dict(self) -> dict[str, Any]:
        """The content of a YAML file that says this mapping."""
        leaves: list[dict[str, Any]] = []
        for rule in self.rules:
            item: dict[str, Any] = {"param": dict(rule.params), "leaf": dict(rule.leaves)}
            item |= {"tied": dict(rule.tied)} if rule.tied else {}
            for name in ("optional", "cast", "scale", "add", "backwards", "when"):
                if getattr(rule, name) != getattr(_PLAIN, name):
                    item[name] = getattr(rule, name)
            leaves.append(item)
        skips = [{"param": skip.param, "reason": skip.reason} for skip in self.skips]
        sizes = {"sizes": dict(self.sizes)} if self.sizes else {}
        requires = [{"name": one.name, "that": one.that, "reason": one.reason} for one in self.requires]
        required = {"requires": requires} if requires else {}
        return {**sizes, **required, "leaves": leaves, **({"skip": skips} if skips else {})}


def shipped() -> list[str]:
    """The names of the mappings that come with the package."""
    return sorted(Path(entry.name).stem for entry in _MAPPINGS.iterdir() if entry.name.endswith(".yaml"))


@lru_cache(maxsize=4096)
def placeholders(name: str) -> tuple[str, ...]:
    """The placeholders in a name, each once. Raises SpecError where one is no name in braces.

    >>> placeholders("blocks.{layer+1}.experts.{expert}.w")
    ('layer', 'expert')
    """
    for said in _BRACES.findall(name):
        if not _PLACEHOLDER.fullmatch(said):
            raise SpecError(f"{{{said}}} in {name!r} is no placeholder; write a name in braces, or {{name+1}}")
    if re.search(r"[{}]", _BRACES.sub("", name)):
        raise SpecError(f"a brace in {name!r} is not closed, or was never opened")
    return tuple(dict.fromkeys(said.partition("+")[0] for said in _BRACES.findall(name)))


@lru_cache(maxsize=4096)
def name_regex(name: str) -> re.Pattern[str]:
    """The names that a name with placeholders stands for; the placeholders are groups.

    >>> name_regex("h.{layer}.mlp").fullmatch("h.11.mlp")["layer"]
    '11'
    """
    text, seen = "", set[str]()
    for i, part in enumerate(_BRACES.split(name)):
        if i % 2 == 0:
            text += re.escape(part)
            continue
        key, _, offset = part.partition("+")
        text += f"(?P={key})" if key in seen else f"(?P<{key}>{'[0-9]{1,9}' if offset else '[^./]+'})"
        seen.add(key)
    return re.compile(text)


def values_in(name: str, found: str) -> dict[str, str] | None:
    """What the placeholders of `name` stand for in the name `found`; None where that is another name.

    >>> values_in("blocks.{layer+1}.w", "blocks.3.w")
    {'layer': '2'}
    """
    hit = name_regex(name).fullmatch(found)
    if hit is None:
        return None
    values = hit.groupdict()
    for key, _, offset in (said.partition("+") for said in _BRACES.findall(name)):
        if offset and int(hit[key]) < int(offset):
            return None
        if offset:
            values[key] = str(int(hit[key]) - int(offset))
    return values


def filled(name: str, values: Dict[str, str]) -> str:
    """A name with its placeholders replaced, as far as there are values for them.

    >>> filled("blocks.{layer+1}.w", {"layer": "2"})
    'blocks.3.w'
    """

    def replaced(hit: re.Match[str]) -> str:
        key, _, offset = hit[1].partition("+")
        if key not in values:
            return hit[0]
        return str(int(values[key]) + int(offset)) if offset else values[key]

    return _BRACES.sub(replaced, name)


@lru_cache(maxsize=4096)
def expression(axes: str) -> Expression:
    """The expression that a text says, parsed once."""
    return parse(axes)


def _keys(name: str, axes: str) -> list[frozenset[str]]:
    """The axes of each component, those in the name too; without padding."""
    inside = frozenset(placeholders(name))
    found = [axis_set | inside for axis_set in axis_sets(expression(axes))]
    return [key for key in found if not any(axis.startswith("_") for axis in key)]


def _check(rule: Rule) -> None:
    """Raise SpecError where the two sides of a rule do not name the same axes."""
    if not rule.params or not rule.leaves:
        raise SpecError("a rule needs a parameter and a leaf")
    sides = [(what, names) for what, names in (("param", rule.params), ("tied", rule.tied), ("leaf", rule.leaves))]
    for what, names in sides:
        for name, axes in names.items():
            for key in placeholders(name):
                if key in expression(axes).names:
                    raise SpecError(f"{what} {name} has {key} in its name already, so it is no axis in `{axes}`")
        if len({placeholders_set(name) for name in names}) > 1:
            raise SpecError(f"the names {' and '.join(names)} should have the same placeholders")
        if what == "leaf" and any("*" in name for name in names):
            raise SpecError("a leaf has one name; write {name} for what differs, on both sides")
        if what == "leaf" and (empty := [name for name in names if not all(name.split("/"))]):
            raise SpecError(f"a leaf's name is keys with one slash between them, not {empty[0]!r}")
    if rule.cast and rule.cast not in _DTYPES:
        raise SpecError(f"cast is the name of a floating dtype, {', '.join(_DTYPES)}, not {rule.cast!r}")
    if rule.scale == 0:
        raise SpecError("scale should not be 0, which nothing could undo")
    for name, number in (("scale", rule.scale), ("add", rule.add)):
        power = name == "scale" and isinstance(number, str) and POWER.fullmatch(number)
        if not power and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise SpecError(f"{name} should be a number{' or a power of a size' * (name == 'scale')}, not {number!r}")
    if rule.when != "":
        check_condition(rule.when)
    if rule.tied and len(rule.params) > 1:
        raise SpecError("what is tied is a copy of one parameter, but this rule has several")
    have = [(name, key) for name, axes in rule.params.items() for key in _keys(name, axes)]
    want = [(name, key) for name, axes in rule.leaves.items() for key in _keys(name, axes)]
    for name, key in have:
        if (others := [other for other, k in have if k == key]) != [name]:
            raise SpecError(
                f"the axes {_listed(key)} are named {len(others)} times, in {' and '.join(dict.fromkeys(others))}; "
                "parts that differ need axes of their own, and copies go under tied"
            )
    for name, key in have:
        if key not in {k for _, k in want}:
            raise SpecError(f"{name} has the axes {_listed(key)}, but no leaf has just these: {_nearest(key, want)}")
    for name, key in want:
        if key not in {k for _, k in have}:
            raise SpecError(f"{name} has the axes {_listed(key)}, but no param has just these: {_nearest(key, have)}")
    for name, axes in rule.tied.items():
        if set(_keys(name, axes)) != {key for _, key in have}:
            raise SpecError(f"{name} is tied, so it should name the axes that {next(iter(rule.params))} names")


def placeholders_set(name: str) -> frozenset[str]:
    return frozenset(placeholders(name))


def _nearest(key: frozenset[str], others: Sequence[tuple[str, frozenset[str]]]) -> str:
    """The other side's component with the most axes in common, and what is too much and too little in it."""
    if not others:
        return "name them there, or begin a name with _ for padding"
    name, near = min(others, key=lambda item: len(item[1] ^ key))
    lacks = f"lacks {_listed(key - near)}" if key - near else ""
    extra = f"has {_listed(near - key)} besides" if near - key else ""
    return f"{name} {' and '.join(filter(None, (lacks, extra)))}"


def _listed(axes: frozenset[str]) -> str:
    return ", ".join(sorted(axes)) or "of a scalar"


def _requirement(item: object, where: str) -> Requirement:
    said = fields(item, "a requirement", {"name", "that", "reason"}, set())
    for key in ("name", "reason"):
        if not isinstance(said[key], str) or not said[key].strip():
            raise SpecError(f"the {key} of a requirement is a text, not {said[key]!r}")
    check_condition(said["that"])
    return Requirement(said["name"], said["that"], said["reason"])


def _rule(item: object, where: str) -> Rule:
    optional = {"axes", "tied", "optional", "when", "cast", "scale", "add", "backwards"}
    said = fields(item, "a rule", {"param", "leaf"}, optional)
    axes = said.get("axes", REST)
    if isinstance(said["param"], dict) and "axes" in said:
        raise SpecError("axes are for a param that is one name; here each has its own already")
    params = _named(said["param"], axes, "param")
    numbers = {name: said[name] for name in ("scale", "add") if name in said}
    flags = {name: said[name] for name in ("optional", "backwards") if name in said}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SpecError(f"{name} is true or false, not {flag!r}")
    return Rule(
        params,
        _named(said["leaf"], axes if len(params) == 1 else None, "leaf"),
        _named(said.get("tied", {}), axes, "tied"),
        cast=str(said.get("cast", "")),
        when=said.get("when", ""),
        where=where,
        **flags,
        **numbers,
    )


def _skip(item: object, where: str) -> Skip:
    said = fields(item, "what is skipped", {"param", "reason"}, set())
    if not isinstance(said["param"], str) or not isinstance(said["reason"], str) or not said["reason"].strip():
        raise SpecError("what is skipped has a param, which is a name, and a reason")
    regex_of(said["param"])
    return Skip(said["param"], said["reason"])


def _named(node: object, axes: object, what: str) -> dict[str, str]:
    """Names with their axes; a name alone has those of the rule."""
    if isinstance(node, str) and isinstance(axes, str | int):
        return {node: str(axes)}
    if isinstance(node, dict) and all(isinstance(k, str) and isinstance(v, str | int) for k, v in node.items()):
        return {name: str(text) for name, text in node.items()}
    raise SpecError(f"{what} should be a name, or a mapping of names to axes, not {node!r}")


_PLAIN = Rule({"param": REST}, {"leaf": REST})
