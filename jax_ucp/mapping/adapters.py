"""The mapping of a model's LoRA adapter, derived from the mapping of the model.

Factor A of peft has the axes `rank inputs`, factor B `outputs rank`. The layers of qwix, which
tunix and MaxText train, have the same factors beside the leaf of the weight: `w_lora_a` is `inputs
rank` and `w_lora_b` is `rank outputs`, their axes in the order of the leaf (`providers/lora.py`,
qwix 0.1.8, for `einsum`). Beside a `kernel`, which `dot_general` multiplies, inputs are one axis
and outputs are one axis, and stacked layers are on the same axis as in the kernel. So the rules of
the factors follow from the rule of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jax_ucp.layout.axes import REST, Axis, Expression, Product
from jax_ucp.mapping.names import parse_name
from jax_ucp.mapping.rules import Mapping, MappingRule, Skip, expression

PREFIX = "base_model.model."
# the beginning of MaxText's parameters in mappings, which its loader of factors leaves out
_PARAMS = "params/"
_SUFFIXES = ("_lora_a", "_lora_b")
_OF_BASE = "a weight of the base, not of the adapter"


def mapping_of(mapping: Mapping, names: Iterable[str], modules_to_save: Sequence[str]) -> Mapping:
    """The mapping itself, or if names are of an adapter or of leaves with one, that of adapters."""
    if any(name.startswith(PREFIX) for name in names):
        return adapter_mapping(mapping, modules_to_save)
    if any(name.endswith(_SUFFIXES) for name in names):
        name = mapping.name.removeprefix("the inverse of ")
        forwards = replace(mapping.inverse(), name=name)
        return adapter_mapping(forwards, modules_to_save).inverse()
    return mapping


def adapter_mapping(mapping: Mapping, modules_to_save: Sequence[str] = ()) -> Mapping:
    """The mapping of an adapter of the models that `mapping` is for.

    `modules_to_save` are ends of the names of modules that were trained whole, which are mapped as
    in the base. The inverse, from a model's leaves to peft's parameters, skips the base's other
    leaves.
    """
    rules: list[MappingRule] = []
    skips: dict[Skip, None] = {}  # each once: of a leaf there may be several rules
    for rule in mapping.rules:
        rules += _of_factors(rule)
        modules = [param.rpartition(".")[0] for param in rule.params]
        if any(module.endswith(tuple(modules_to_save)) for module in modules):
            params = {PREFIX + name: axes for name, axes in rule.params.items()}
            tied = {PREFIX + name: axes for name, axes in rule.tied.items()}
            leaves = {leaf.removeprefix(_PARAMS): axes for leaf, axes in rule.leaves.items()}
            own = replace(rule, params=params, leaves=leaves, tied=tied)
            rules.append(replace(own, optional=True, layout="", place=""))
        else:
            leaves = [leaf.removeprefix(_PARAMS) for leaf in rule.leaves]
            skips |= dict.fromkeys(Skip(leaf, _OF_BASE) for leaf in leaves)
    name = f"the adapters of {mapping.name}"
    return Mapping(tuple(rules), (), mapping.sizes, name, mapping.requires, leaf_skips=tuple(skips))


def _of_factors(rule: MappingRule) -> Iterator[MappingRule]:
    """The rules for factors A and B of a weight; none if the rule is not for a single matrix of a
    module. For a weight that qwix splits, it has other factors, and for experts one A for all.
    """
    if len(rule.params) != 1 or len(rule.leaves) != 1 or rule.add:
        return
    ((param, axes),), ((leaf, leaf_axes),) = rule.params.items(), rule.leaves.items()
    stacked = {*parse_name(param).indices} - {*parse_name(leaf).indices}
    is_kernel = leaf.endswith("/kernel")
    if not param.endswith(".weight") or len(expression(axes).dims) != 2:
        return
    if stacked and not is_kernel:
        return
    outputs, inputs = (Expression((dim,)) for dim in expression(axes).dims)
    of_leaf = expression(leaf_axes).dims
    layers = {i: dim for i, dim in enumerate(of_leaf) if Expression((dim,)).names & stacked}
    of_matrix = [dim for i, dim in enumerate(of_leaf) if i not in layers]
    first = [dim for dim in of_matrix if Expression((dim,)).names <= inputs.names]
    last = [dim for dim in of_matrix if Expression((dim,)).names <= outputs.names]
    if len(first) + len(last) != len(of_matrix):
        return
    if is_kernel:
        first, last = (
            [side[0] if len(side) == 1 else Product(tuple(side))] for side in (first, last)
        )
    of_a, of_b = [*first, Axis(REST)], [Axis(REST), *last]
    for i, layer in layers.items():
        of_a.insert(i, layer)
        of_b.insert(i, layer)
    module = PREFIX + param.removesuffix(".weight")
    a, b = (leaf.removeprefix(_PARAMS) + suffix for suffix in _SUFFIXES)
    plain = replace(rule, tied={}, optional=True, scale=1, place="")
    yield replace(
        plain,
        params={f"{module}.lora_A.weight": f"{REST} {inputs}"},
        leaves={a: str(Expression(tuple(of_a)))},
    )
    # a scale of the weight applies to the product of both factors, and so to B alone
    yield replace(
        plain,
        params={f"{module}.lora_B.weight": f"{outputs} {REST}"},
        leaves={b: str(Expression(tuple(of_b)))},
        scale=rule.scale,
    )
