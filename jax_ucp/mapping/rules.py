"""How parameters form the leaves of a model: rules in YAML or in Python, and their inverse.

sizes: {heads: num_attention_heads}    # lengths by name, from the model's config; others follow
requires:                              # what must hold of the config for leaves to mean the same
- {name: activation, that: hidden_act == "silu", reason: the model has no other}
leaves:
- param: model.layers.{layer}.self_attn.q_proj.weight
  axes: (heads head_dim) embed
  leaf: {layers/attn/q/kernel: layer embed heads head_dim}  # no {layer} in the name: an axis
- param: {mlp.gate.weight: gate embed, mlp.up.weight: up embed}
  leaf: {mlp/wi: embed (gate + up)}
skip:
- {param: "*.rotary_emb.inv_freq", reason: computed from the config}
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dict
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.arrays.contents import STORED
from jax_ucp.errors import SpecError
from jax_ucp.layout.axes import ONES, REST, Expression, components, is_padding, parse
from jax_ucp.mapping.model_config import settings_in
from jax_ucp.mapping.names import NamePattern, name_regex, parse_name
from jax_ucp.shard_spec.document import Document, document, dumped, fields
from jax_ucp.shard_spec.expressions import Size, condition, is_number, names_in, within
from jax_ucp.shard_spec.rules import regex_of

_MAPPINGS = resources.files("jax_ucp.mapping") / "models"
_REQUIREMENTS = resources.files("jax_ucp.mapping") / "requirements.yaml"
_SECTIONS = ("about", "sizes", "requires", "config", "variants", "leaves", "skip")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
# The fields of a rule that its YAML has only where they are not the default.
_OPTIONS = ("tied", "optional", "cast", "scale", "add", "backwards", "when", "layout", "buffer")
_OTHER_SIDE = {"": "", "param": "leaf", "leaf": "param"}
# A power of a size: `head_dim ** -0.5`.
_POWER = re.compile(r"(?P<size>[A-Za-z_]\w*) \*\* (?P<power>-?\d+(\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Power:
    """A power of a size, by which a rule scales."""

    size: str
    exponent: float


@dataclass(frozen=True)
class MappingRule:
    """Parameters and the leaves that have the same elements; in both, axes by name of the array.

    `{layer}` in a name is one part of it, `{layer+1}` the same number counted from one. Where it is
    in the names of one side only, the other side has an axis of that name: layers are stacked.
    Parameters in `tied` are further copies of the one in `params`. `cast` is the dtype of the
    leaf's parameter (its other states keep theirs). A parameter becomes `x * scale + add`, or with
    `backwards` `(x - add) / scale`; `scale` may be a power of a size, `head_dim ** -0.5`. An
    `optional` rule may match no parameter. A rule with `when`, a condition on the model's config,
    applies only if that holds. `layout` names one of several ways in which checkpoints store the
    same parameters: for a checkpoint, only the rules of one layout apply. `buffer` is the side,
    `param` or `leaf`, on which the arrays are buffers of the model, which have no moments.
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
    layout: str = ""
    buffer: str = ""
    place: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        sides = (map(": ".join, side.items()) for side in (self.params, self.leaves))
        return " -> ".join(map(" and ".join, sides))

    @property
    def label(self) -> str:
        """The name of the rule in errors."""
        return f"{self.place}{': ' * bool(self.place)}the rule for {' and '.join(self.params)}"

    @property
    def factor(self) -> float | Power:
        """The value of `scale`: a number, or the power of a size."""
        if not isinstance(self.scale, str):
            return self.scale
        size, exponent = self.scale.split(" ** ")
        return Power(size, float(exponent))

    @property
    def names(self) -> frozenset[str]:
        """The names that `sizes` may give a length: axes, placeholders in names, and the name whose
        power `scale` is, such as `head_dim`.
        """
        axes = (*self.params.values(), *self.tied.values(), *self.leaves.values())
        of_axes = [expression(text).names for text in axes]
        of_names = [name.indices for name in self._parsed_names]
        of_scale = {self.factor.size} if isinstance(self.factor, Power) else ()
        return self.sizes_in_names.union(*of_axes, *of_names, of_scale)

    @property
    def rotated(self) -> frozenset[str]:
        """The axes whose order of pairs of features (`:halves`, `:pairs`) the rule states."""
        axes = (*self.params.values(), *self.leaves.values())
        return frozenset[str]().union(*(expression(text).rotated for text in axes))

    @property
    def _parsed_names(self) -> list[NamePattern]:
        return [parse_name(name) for name in (*self.params, *self.tied, *self.leaves)]

    @property
    def sizes_in_names(self) -> frozenset[str]:
        """The sizes that placeholders name, which must be known before a name is matched."""
        return frozenset[str]().union(*(name.sizes for name in self._parsed_names))

    @property
    def blocks(self) -> dict[str, int]:
        """The indices within a block, such as `i` in `{6*block+i}`, with the blocks' lengths."""
        parts = [one for name in self._parsed_names for one in name.placeholders if one.outer]
        return {one.index: int(one.stride) for one in parts}

    def with_numbers(self, sizes: Dict[str, int]) -> MappingRule:
        """The rule with numbers for sizes in its names. Raises SpecError for impossible ones."""
        sides = {
            side: {
                str(parse_name(name).with_numbers(sizes)): axes
                for name, axes in getattr(self, side).items()
            }
            for side in ("params", "tied", "leaves")
        }
        return replace(self, **sides)

    def to_dict(self) -> dict[str, Any]:
        """The rule as an item of a YAML file."""
        item: dict[str, Any] = {"param": dict(self.params), "leaf": dict(self.leaves)}
        for option in _OPTIONS:
            value = getattr(self, option)
            if value != getattr(_PLAIN, option):
                item[option] = dict(value) if option == "tied" else value
        return item

    def inverse(self) -> MappingRule:
        """The rule from leaves to parameters. Tied parameters are left out, and leaves that are
        copies become tied.

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
        sides = {"params": params, "leaves": self.params, "tied": tied}
        buffer = _OTHER_SIDE[self.buffer]
        return replace(self, **sides, cast="", backwards=turned, buffer=buffer)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition (`that`) on the model's config, without which the leaves would be wrong.

    A user may vouch for it by its name instead: `map(..., assume=["rope"])`.
    """

    name: str
    that: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Parameters to skip, with the reason.

    In `param`, `*` stands for any text. With a `*`, braces stand for one part of a name; without,
    for a placeholder as in rules. `...` stands for all parameters that nothing else claims.
    """

    param: str
    reason: str

    @property
    def has_any(self) -> bool:
        """Whether it has a `*` that stands for any text: one outside of braces."""
        return any("*" in text for text in re.split(r"\{[^{}]*\}", self.param))

    @property
    def regex(self) -> re.Pattern[str]:
        """A regular expression that matches its names, and maybe others."""
        return re.compile(regex_of(self.param)) if self.has_any else name_regex(self.param)


@dataclass(frozen=True)
class Mapping:
    """Rules that turn the parameters of a checkpoint into a model's leaves, and back.

    It is mostly made by `load`, `from_dict` or `parse`; `docs/mapping-notation.md` describes the
    language.

    Args:
        rules: which parameters form which leaves.
        skips: parameters that are left aside, each with the reason.
        sizes: lengths by name, in numbers, expressions or keys of the model's config.
        name: what errors call it.
        requires: conditions on the model's config, without which the leaves would be wrong.
        variants: for each variant by name, beginnings of leaves' names, and what replaces them.
        about: which `model` it is for, and which `target`, in words.
        leaf_skips: leaves that are no parameters, which the inverse skips.
        config: the config of the leaves' model, in keys of the parameters' config and in lengths;
            empty where both have one config.
    """

    rules: Sequence[MappingRule]
    skips: Sequence[Skip] = ()
    sizes: Dict[str, Size] = field(default_factory=dict[str, Size])
    name: str = field(default="mapping", compare=False)
    requires: Sequence[Requirement] = ()
    variants: Dict[str, Dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    about: Dict[str, str] = field(default_factory=dict[str, str], compare=False)
    leaf_skips: Sequence[Skip] = field(default=(), compare=False)
    config: Dict[str, Any] = field(default_factory=dict[str, Any], compare=False)

    @classmethod
    def load(cls, source: str | PathLike[str]) -> Mapping:
        """The mapping in a YAML file, or one that comes with the package, by its name.

        Args:
            source: a path or a name. `NAME:VARIANT` is a variant of it, and `NAME:to-VARIANT` takes
                its leaves to those of the variant.

        Returns:
            The mapping.

        Raises:
            SpecError: if there is no such file, name or variant, or a file is not a mapping, with
                every fault and its line.

        Example:
            >>> import jax_ucp as ucp
            >>> len(ucp.Mapping.load("hf-llama-to-tunix").rules)
            13
        """
        base, colon, variant = str(source).rpartition(":")
        if colon and not local_path(source).is_file():
            mapping = cls.load(base)
            way = mapping.rearranged if variant.startswith("to-") else mapping.variant
            return way(variant.removeprefix("to-"))
        path = local_path(source)
        if not path.is_file() and str(source) in shipped():
            return _of_package(str(source))
        try:
            return cls.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            like = difflib.get_close_matches(str(source), shipped(), cutoff=0.7) or shipped()
            raise SpecError(
                f"{source} is not a mapping that can be read ({reason}); the package has"
                f" {', '.join(like)}"
            ) from error

    @classmethod
    def from_dict(cls, content: Dict[str, Any], name: str = "mapping") -> Mapping:
        """The mapping with the content of a YAML file.

        Args:
            content: the content, as PyYAML would read it.
            name: the name of the mapping in errors.

        Returns:
            The mapping.

        Raises:
            SpecError: with every fault.
        """
        return cls.parse(dumped(content), name)

    @classmethod
    def parse(cls, text: str, name: str = "mapping") -> Mapping:
        """The mapping in a text in YAML.

        Args:
            text: the content of a file.
            name: the name of the mapping in errors.

        Returns:
            The mapping.

        Raises:
            SpecError: with every fault and its line.
        """
        top = document(text, name)
        top.refuse_other_sections(_SECTIONS, f"there are {', '.join(_SECTIONS)}")
        sizes = top.sizes()
        requires = top.items("requires", _requirement)
        rules = top.items("leaves", _rule)
        rest = top.content.get("skip") == "rest"
        skips = [_SKIP_REST] if rest else top.items("skip", _skip, "a list, or rest")
        for twice, count in Counter(requirement.name for requirement in requires).items():
            if count > 1:
                top.faults.append(f"{name}: two requirements are named {twice!r}")
        variants, about = _variants(top), top.content.get("about") or {}
        config: Any = top.content.get("config") or {}
        if not isinstance(config, dict):
            top.faults.append(f"{top.place('config')}: config should be a mapping of settings")
        elif config:
            top.attempt(lambda: settings_in(config), top.place("config"))
        if about and not (_are_texts(about) and about.keys() == {"model", "target"}):
            top.faults.append(f"{top.place('about')}: about has a model and a target, two texts")
        top.faults += _layout_faults(rules, variants)
        top.raise_faults(f"{name} is not a mapping:")
        mapping = cls(
            tuple(rules), tuple(skips), sizes, name, tuple(requires), variants, about, (), config
        )
        for variant in variants:
            top.attempt(lambda v=variant: mapping.variant(v), top.place("variants"))
        top.raise_faults(f"{name} is not a mapping:")
        return mapping

    @property
    def names(self) -> frozenset[str]:
        """Every name that may have a length: axes, sizes, and what sizes are made of."""
        of_sizes = [names_in(size) for size in self.sizes.values()]
        return frozenset(self.sizes).union(*(rule.names for rule in self.rules), *of_sizes)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of its layouts, the one that its inverse writes first."""
        return tuple(dict.fromkeys(rule.layout for rule in self.rules if rule.layout))

    @property
    def takes_parts(self) -> bool:
        """Whether its rules are for parts of quantised weights, `stored/NAME`."""
        return any(name.startswith(f"{STORED}/") for rule in self.rules for name in rule.params)

    @property
    def config_keys(self) -> frozenset[str]:
        """The top-level config keys that conditions, sizes and the leaves' config name."""
        conditions = {requirement.that for requirement in self.requires}
        conditions |= {rule.when for rule in self.rules} - {""}
        keys_of_conditions = (condition(text).keys for text in conditions)
        of_sizes, of_config = map(names_in, self.sizes.values()), settings_in(self.config)
        keys = set[str]().union(*keys_of_conditions, *of_sizes, of_config - self.names)
        return frozenset(key.partition(".")[0] for key in keys)

    def variant(self, name: str) -> Mapping:
        """The mapping to the leaves of a variant, or with only the rules of one layout.

        A variant replaces beginnings of the leaves' names. If a new name has an index, that is no
        longer an axis of the leaf.

        Args:
            name: of the variant, such as `unscanned`, or of the layout, such as `packed`.

        Returns:
            The mapping.

        Raises:
            SpecError: where there is no such variant, or it does not fit.
        """
        if name in self.layouts:
            return replace(self, rules=self._rules_of(name), name=f"{self.name}:{name}")
        if name not in self.variants:
            known = ", ".join((*self.variants, *self.layouts)) or "none"
            raise SpecError(f"{self.name} has no variant {name!r}; it has {known}")
        renames = self.variants[name]
        rules = tuple(replace(rule, leaves=_renamed(rule, renames)) for rule in self.rules)
        used = {
            old
            for rule in self.rules
            for leaf in rule.leaves
            for old in renames
            if leaf.startswith(f"{old}/")
        }
        if strays := sorted(renames.keys() - used):
            raise SpecError(f"{name}: no leaf of {self.name} begins with {strays[0]}/")
        return replace(self, rules=rules, name=f"{self.name}:{name}", variants={})

    def rearranged(self, name: str) -> Mapping:
        """The mapping from the leaves of this mapping to those of a variant, such as from scanned
        layers to unscanned ones. It only moves elements, so it requires nothing of the config.

        Args:
            name: of the variant.

        Returns:
            The mapping from leaves to leaves.

        Raises:
            SpecError: where there is no such variant, or it does not fit.
        """
        rules: dict[tuple[tuple[str, str], ...], MappingRule] = {}
        one = replace(self, rules=self._rules_of(*self.layouts[:1]))
        for rule, other in zip(one.rules, one.variant(name).rules, strict=True):
            back = rule.inverse()
            pairs = zip(rule.leaves, other.leaves.items(), strict=True)
            leaves = dict(leaf for old, leaf in pairs if old in back.params)
            optional = rule.optional or bool(rule.when)
            plain = MappingRule(back.params, leaves, optional=optional, place=rule.place)
            rules[tuple(plain.params.items())] = plain
        return Mapping(tuple(rules.values()), (), self.sizes, f"{self.name}:to-{name}")

    def inverse(self) -> Mapping:
        """The mapping from the leaves to the parameters, for exports. Skipped parameters do not
        come back. Of several layouts it has the first; the inverse of `variant("packed")` has
        `packed`.

        Raises SpecError for a mapping of parts of quantised weights.
        """
        if self.takes_parts:
            raise SpecError(
                f"{self.name} maps parts of quantised weights (`{STORED}/NAME`), which are not"
                " parameters, and has no inverse"
            )
        rules = tuple(rule.inverse() for rule in self._rules_of(*self.layouts[:1]))
        name = f"the inverse of {self.name}"
        return Mapping(rules, self.leaf_skips, self.sizes, name, self.requires)

    def _rules_of(self, layout: str = "") -> tuple[MappingRule, ...]:
        """The rules of one layout and those without a layout, with the layout removed."""
        of_it = (rule for rule in self.rules if rule.layout in ("", layout))
        return tuple(replace(rule, layout="") for rule in of_it)

    def to_dict(self) -> dict[str, Any]:
        """The mapping as the content of a YAML file."""
        content: dict[str, Any] = {
            "about": dict(self.about),
            "sizes": dict(self.sizes),
            "requires": [asdict(requirement) for requirement in self.requires],
            "config": dict(self.config),
            "variants": {name: dict(renames) for name, renames in self.variants.items()},
            "leaves": [rule.to_dict() for rule in self.rules],
            "skip": "rest" if _SKIP_REST in self.skips else [asdict(skip) for skip in self.skips],
        }
        return {
            section: items for section, items in content.items() if items or section == "leaves"
        }


@cache
def _of_package(name: str) -> Mapping:
    return Mapping.parse((_MAPPINGS / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def inverse_chain(mappings: Sequence[Mapping]) -> list[Mapping]:
    """The mappings that undo these, the last first."""
    return [mapping.inverse() for mapping in reversed(mappings)]


@cache
def shipped() -> tuple[str, ...]:
    """The names of the mappings that come with the package."""
    names = (entry.name for entry in _MAPPINGS.iterdir())
    return tuple(sorted(Path(name).stem for name in names if name.endswith(".yaml")))


@lru_cache(maxsize=4096)
def expression(axes: str) -> Expression:
    """The parsed expression; each text is parsed once."""
    return parse(axes)


def _keys(name: str, axes: str) -> list[frozenset[str]]:
    """The axes of each component, and those in the name, without components of padding."""
    in_name = frozenset(parse_name(name).indices)
    keys = [part.names | in_name for part in components(expression(axes), ONES)]
    return [key for key in keys if not any(map(is_padding, key))]


def _check(rule: MappingRule) -> None:
    """Raise SpecError for an invalid rule, or if its two sides name different axes."""
    if not rule.params or not rule.leaves:
        raise SpecError("a rule needs a parameter and a leaf")
    _check_placeholders("param", rule.params)
    _check_placeholders("tied", rule.tied)
    _check_placeholders("leaf", rule.leaves)
    if any("*" in text for name in rule.leaves for text in parse_name(name).texts):
        raise SpecError("a leaf has one name; write {name} for what differs, on both sides")
    for name in rule.leaves:
        if not all(name.split("/")):
            raise SpecError(f"a leaf's name is keys with one slash between them, not {name!r}")
    # changes of values must be possible, and possible to undo
    if rule.cast and rule.cast not in _DTYPES:
        raise SpecError(
            f"cast is the name of a floating dtype, {', '.join(_DTYPES)}, not {rule.cast!r}"
        )
    if rule.scale == 0:
        raise SpecError("scale should not be 0, which nothing could undo")
    is_power = isinstance(rule.scale, str) and _POWER.fullmatch(rule.scale)
    if not is_power and not is_number(rule.scale):
        raise SpecError(f"scale should be a number or a power of a size, not {rule.scale!r}")
    if not is_number(rule.add):
        raise SpecError(f"add should be a number, not {rule.add!r}")
    if rule.when != "":
        condition(rule.when)
    if rule.buffer not in [*_OTHER_SIDE]:
        raise SpecError(f"buffer is the side that has buffers, param or leaf, not {rule.buffer!r}")
    if rule.tied and len(rule.params) > 1:
        raise SpecError("what is tied is a copy of one parameter, but this rule has several")
    _check_axes(rule)


def _check_placeholders(side: str, names: Dict[str, str]) -> None:
    """Raise SpecError if an axis is also in the name, or names differ in placeholders."""
    for name, axes in names.items():
        for key in parse_name(name).indices:
            if key in expression(axes).names:
                raise SpecError(
                    f"{side} {name} has {key} in its name already, so it is not an axis in `{axes}`"
                )
    if len({frozenset(parse_name(name).indices) for name in names}) > 1:
        raise SpecError(f"the names {' and '.join(names)} should have the same placeholders")


def _check_axes(rule: MappingRule) -> None:
    """Raise SpecError if parameters, leaves and tied copies do not name the same axes."""
    names_of_axes: list[dict[frozenset[str], list[str]]] = []
    for side in (rule.params, rule.leaves):
        names_of: dict[frozenset[str], list[str]] = defaultdict(list)
        for name, text in side.items():
            for axes in _keys(name, text):
                names_of[axes].append(name)
        names_of_axes.append(names_of)
    of_params, of_leaves = names_of_axes
    for axes, names in of_params.items():
        if len(names) > 1:
            raise SpecError(
                f"the axes {_listed(axes)} are named {len(names)} times, in "
                f"{' and '.join(dict.fromkeys(names))}; "
                "parts that differ need axes of their own, and copies go under tied"
            )
    for mine, others, kind in ((of_params, of_leaves, "leaf"), (of_leaves, of_params, "param")):
        for axes, names in mine.items():
            if axes not in others:
                raise SpecError(
                    f"{names[0]} has the axes {_listed(axes)}, but no {kind} has just these:"
                    f" {_nearest(axes, others)}"
                )
    for name, text in rule.tied.items():
        if set(_keys(name, text)) != of_params.keys():
            raise SpecError(
                f"{name} is tied, so it should name the axes that {next(iter(rule.params))} names"
            )


def _nearest(axes: frozenset[str], others: Dict[frozenset[str], list[str]]) -> str:
    """The other side's closest component, and the axes that it lacks or has besides, in words."""
    if not others:
        return "name them there, or begin a name with _ for padding"
    near = min(others, key=lambda other: len(other ^ axes))
    lacks = [f"lacks {_listed(axes - near)}"] if axes - near else []
    extra = [f"has {_listed(near - axes)} besides"] if near - axes else []
    return f"{others[near][0]} {' and '.join(lacks + extra)}"


def _listed(axes: frozenset[str]) -> str:
    return ", ".join(sorted(axes)) or "of a scalar"


def _layout_faults(rules: Sequence[MappingRule], variants: Dict[str, object]) -> Iterator[str]:
    """Faults of layouts: other leaves than those of the others, or a name that is not allowed."""
    leaves: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        leaves[rule.layout].update(rule.leaves)
    layouts = [layout for layout in leaves if layout]
    for layout in layouts:
        if layout in variants or not layout.isidentifier():
            yield f"layout {layout!r}: its name is one word, and not that of a variant"
        others = set().union(*(leaves[other] for other in layouts if other != layout))
        if strays := sorted(leaves[layout] ^ others):
            yield (
                f"layout {layout!r}: layouts are of the same leaves, but {strays[0]} is not formed"
                " in each"
            )


def _variants(top: Document) -> dict[str, dict[str, str]]:
    """The section `variants`: beginnings of leaves' names and what replaces them, by variant."""
    variants: Any = top.content.get("variants") or {}
    named = variants.items() if isinstance(variants, dict) else [("variants", variants)]
    for name, renames in named:
        if not isinstance(name, str) or not name.isidentifier() or not _are_texts(renames):
            top.faults.append(
                f"{top.place('variants')}: a variant has a name, and beginnings of leaves' names by"
                f" others, not {name!r:.80}: {renames!r:.80}"
            )
    return {} if top.faults else variants


def _are_texts(content: object) -> bool:
    if not isinstance(content, dict) or not content:
        return False
    return all(isinstance(text, str) for item in content.items() for text in item)


def _renamed(rule: MappingRule, renames: Dict[str, str]) -> dict[str, str]:
    """The leaves of a rule under new names, without the axes that the names have."""
    leaves: dict[str, str] = {}
    for name, axes in rule.leaves.items():
        old = next((old for old in renames if name.startswith(f"{old}/")), "")
        new = renames[old] + name.removeprefix(old) if old else name
        named = set(parse_name(new).indices) - set(parse_name(name).indices)
        dims = [dim for dim in expression(axes).dims if str(dim) not in named]
        leaves[new] = " ".join(map(str, dims))
    return leaves


@lru_cache(maxsize=1)
def _shared_requirements() -> Dict[str, Dict[str, str]]:
    """The requirements that several mappings share, as fields, by name."""
    return document(_REQUIREMENTS.read_text(encoding="utf-8"), _REQUIREMENTS.name).content


def _requirement(item: object, place: str) -> Requirement:
    """The requirement that an item states: the name of a shared one, or a mapping of fields. The
    field `like` names a shared one that gives the fields that are left out, and `of` the section of
    the config that has the keys of the condition.
    """
    own = {"like": item} if isinstance(item, str) else item
    if isinstance(own, dict) and "like" in own:
        own = dict(own)
        like, shared = own.pop("like"), _shared_requirements()
        if not isinstance(like, str) or like not in shared:
            raise SpecError(f"{like!r:.80} is not a shared requirement: {', '.join(shared)}")
        own = {"name": like, **shared[like], **own}
    content = fields(own, "a requirement", {"name", "that", "reason"}, {"of"})
    for key in {"name", "reason", "of"} & content.keys():
        if not _is_text(content[key]):
            raise SpecError(f"the {key} of a requirement is a text, not {content[key]!r}")
    condition(content["that"])
    if section := content.get("of"):
        content["that"] = within(section, content["that"])
        condition(content["that"])
    return Requirement(content["name"], content["that"], content["reason"])


def _rule(item: object, place: str) -> MappingRule:
    content = fields(item, "a rule", {"param", "leaf"}, {"axes", *_OPTIONS})
    axes = content.get("axes", REST)
    if isinstance(content["param"], dict) and "axes" in content:
        raise SpecError("axes are for a param that is one name; here each has its own already")
    params = _named(content["param"], axes, "param")
    for flag in ("optional", "backwards"):
        if not isinstance(content.get(flag, False), bool):
            raise SpecError(f"{flag} is true or false, not {content[flag]!r}")
    options = {name: content[name] for name in _OPTIONS if name in content}
    if not isinstance(options.get("layout", ""), str):
        raise SpecError(f"the layout of a rule is a word, not {options['layout']!r}")
    options["tied"] = _named(content.get("tied", {}), axes, "tied")
    options["cast"] = str(content.get("cast", ""))
    leaves = _named(content["leaf"], axes if len(params) == 1 else None, "leaf")
    return MappingRule(params, leaves, **options, place=place)


def _skip(item: object, place: str) -> Skip:
    content = fields(item, "what is skipped", {"param", "reason"}, set())
    if not isinstance(content["param"], str) or not _is_text(content["reason"]):
        raise SpecError("what is skipped has a param, which is a name, and a reason")
    skip = Skip(**content)
    _ = skip.regex  # raises SpecError
    return skip


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _named(node: object, axes: object, what: str) -> dict[str, str]:
    """The axes by name, of a mapping or of one name with the rule's axes. Raises SpecError."""
    if isinstance(node, str) and isinstance(axes, str | int):
        return {node: str(axes)}
    if isinstance(node, dict) and all(
        isinstance(k, str) and isinstance(v, str | int) for k, v in node.items()
    ):
        return {name: str(text) for name, text in node.items()}
    raise SpecError(f"{what} should be a name, or a mapping of names to axes, not {node!r}")


_SKIP_REST = Skip(REST, "no rule of the mapping claims it")
_PLAIN = MappingRule({"param": REST}, {"leaf": REST})
