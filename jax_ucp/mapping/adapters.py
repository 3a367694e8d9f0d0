"""The mapping of a model's LoRA adapter, made of that of the model.

Factor A of peft has the axes `rank inputs`, factor B `outputs rank`. The layers of qwix, which
tunix trains, have the same factors beside the leaf of the weight: `w_lora_a` is `inputs rank` and
`w_lora_b` is `rank outputs`, their axes in the order of the leaf (`providers/lora.py`, qwix 0.1.8,
for `einsum`; a plain matrix is the same for `dot_general`). So the rule of a weight says what the
rules of its factors are, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jax_ucp.layout.axes import REST, Expression
from jax_ucp.mapping.names import parse_name
from jax_ucp.mapping.rules import Mapping, MappingRule, Skip, expression

PREFIX = "base_model.model."
_SUFFIXES = ("_lora_a", "_lora_b")
_OF_BASE = "a weight of the base, not of the adapter"


def mapping_of(mapping: Mapping, names: Iterable[str], modules_to_save: Sequence[str]) -> Mapping:
    """The mapping itself, or where names are an adapter's, or of leaves with one, that of adapters
    of its models.
    """
    if any(name.startswith(PREFIX) for name in names):
        return adapter_mapping(mapping, modules_to_save)
    if any(name.endswith(_SUFFIXES) for name in names):
        name = mapping.name.removeprefix("the inverse of ")
        forwards = replace(mapping.inverse(), name=name)
        return adapter_mapping(forwards, modules_to_save).inverse()
    return mapping


def adapter_mapping(mapping: Mapping, modules_to_save: Sequence[str] = ()) -> Mapping:
    """The mapping of an adapter of the models that `mapping` is for.

    `modules_to_save` are ends of the names of modules that were trained whole: they are mapped as
    the base's. In its inverse, which makes parameters of peft of a model's leaves, the
    base's other leaves are skipped.
    """
    rules: list[MappingRule] = []
    skips: dict[Skip, None] = {}  # each once: of a leaf there may be several rules
    for rule in mapping.rules:
        rules += _of_factors(rule)
        modules = [param.rpartition(".")[0] for param in rule.params]
        if any(module.endswith(tuple(modules_to_save)) for module in modules):
            params = {PREFIX + name: axes for name, axes in rule.params.items()}
            tied = {PREFIX + name: axes for name, axes in rule.tied.items()}
            rules.append(
                replace(rule, params=params, tied=tied, optional=True, layout="", place="")
            )
        else:
            skips |= dict.fromkeys(Skip(leaf, _OF_BASE) for leaf in rule.leaves)
    name = f"the adapters of {mapping.name}"
    return Mapping(tuple(rules), (), mapping.sizes, name, mapping.requires, leaf_skips=tuple(skips))


def _of_factors(rule: MappingRule) -> Iterator[MappingRule]:
    """The rules of the factors of a weight; there are none if the rule is not for one matrix of a
    module, for each layer as it is: qwix has other factors where it is stacked or taken apart.
    """
    if len(rule.params) != 1 or len(rule.leaves) != 1 or (rule.scale, rule.add) != (1, 0):
        return
    ((param, axes),), ((leaf, leaf_axes),) = rule.params.items(), rule.leaves.items()
    is_stacked = {*parse_name(param).indices} != {*parse_name(leaf).indices}
    if not param.endswith(".weight") or len(expression(axes).dims) != 2 or is_stacked:
        return
    outputs, inputs = (Expression((dim,)) for dim in expression(axes).dims)
    of_leaf = [Expression((dim,)) for dim in expression(leaf_axes).dims]
    first = [dim for dim in of_leaf if dim.names <= inputs.names]
    last = [dim for dim in of_leaf if dim.names <= outputs.names]
    if len(first) + len(last) != len(of_leaf):
        return
    module = PREFIX + param.removesuffix(".weight")
    a, b = (f"{leaf}{suffix}" for suffix in _SUFFIXES)
    yield MappingRule(
        {f"{module}.lora_A.weight": f"{REST} {inputs}"},
        {a: " ".join([*map(str, first), REST])},
        optional=True,
        when=rule.when,
    )
    yield MappingRule(
        {f"{module}.lora_B.weight": f"{outputs} {REST}"},
        {b: " ".join([REST, *map(str, last)])},
        optional=True,
        when=rule.when,
    )
