"""The order of a model's modules, which safetensors do not have: their names are sorted.

`module_orders.json` has the orders of side by side modules, by model type of transformers
(`tests/generators/module_orders.py` writes it). `torch.nn.Module.parameters`, and so numbers in
`torch.optim`, go by them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jax_ucp.states.pairing import Undecided

# What peft puts into a module in place of its weight (`LoraLayer`, `tuners/lora/layer.py`).
_OF_ADAPTERS = (
    *("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"),
    "lora_magnitude_vector",
)
_Order = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Type:
    """A model type: its orders of modules by major release, and the names of its buffers."""

    orders: Mapping[str, Sequence[_Order]]
    buffers: frozenset[str]


@cache
def _table() -> Mapping[str, _Type]:
    folder = resources.files("jax_ucp.formats.huggingface")
    table = json.loads((folder / "module_orders.json").read_text(encoding="utf-8"))
    del table["transformers"]
    types: dict[str, _Type] = {}
    for model_type, about in table.items():
        buffers = frozenset(about.pop("buffers", ()))
        orders = {key: [tuple(order.split(" ")) for order in about[key]] for key in about}
        types[model_type] = _Type(orders, buffers)
    return types


def model_types() -> Sequence[str]:
    return list(_table())


def in_order_of(model_type: str, names: Iterable[str], release: str = "") -> list[str]:
    """Names of parameters in the order in which a model of this type has them, in a release of
    transformers; without those that are of buffers.

    Raises Undecided where the type or a module is not known, or releases differ in the order.

    >>> in_order_of("gpt2", ["h.0.mlp.c_fc.weight", "wte.weight", "h.0.ln_1.weight"])
    ['wte.weight', 'h.0.ln_1.weight', 'h.0.mlp.c_fc.weight']
    """
    if model_type not in _table():
        raise Undecided(f"the order of the modules of {model_type!r} is not known here")
    known = _table()[model_type]
    # of a major release, or of all of them, where it is not known
    major = release.partition(".")[0]
    releases = [major] if major in known.orders else [key for key in known.orders if key != "all"]
    orders = [order for key in ("all", *releases) for order in known.orders.get(key, ())]
    orders.append(_OF_ADAPTERS)
    params = [name.split(".") for name in names if name.rpartition(".")[2] not in known.buffers]
    return [".".join(parts) for parts in _sorted(params, orders)]


def _sorted(names: Sequence[Sequence[str]], orders: Sequence[_Order]) -> list[Sequence[str]]:
    """Names, as their parts, in the order of a walk through modules. Raises Undecided."""
    ends = [name for name in names if not name]
    inside: dict[str, list[Sequence[str]]] = defaultdict(list)
    for name in filter(None, names):
        inside[name[0]].append(name[1:])
    walked = ends
    for part in _siblings(list(inside), orders):
        walked += [[part, *rest] for rest in _sorted(inside[part], orders)]
    return walked


def _siblings(parts: Sequence[str], orders: Sequence[_Order]) -> list[str]:
    """The submodules of one module in the order that all `orders` with them agree on; numbers are
    the indices of a list. Raises Undecided if there is no such order.
    """
    numbers = sorted(filter(str.isdigit, parts), key=int)
    words = {"*" if part.isdigit() else part for part in parts}
    if len(words) == 1:
        return numbers or list(parts)
    # these words, as all orders that have them put them
    having = [order for order in orders if words <= {*order}]
    ways = {tuple(word for word in order if word in words) for order in having}
    listed = ", ".join(sorted(words))
    if not ways:
        raise Undecided(f"the order of {listed} in a module is not known")
    if len(ways) > 1:
        raise Undecided(f"the order of {listed} in a module differs between classes or releases")
    (order,) = ways
    if not numbers:
        return list(order)
    at = order.index("*")
    return [*order[:at], *numbers, *order[at + 1 :]]


def orders_of(
    names: Sequence[str], types: Iterable[str] | None = None, release: str = ""
) -> dict[tuple[str, ...], list[str]]:
    """The model types, of those given or of all, by the order that they give to the names, without
    types whose order is not decided. `release` is of transformers; empty for any.
    """
    types_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for model_type in model_types() if types is None else types:
        try:
            types_of[tuple(in_order_of(model_type, names, release))].append(model_type)
        except Undecided:
            continue
    return dict(types_of)
