"""Experts that transformers 5 trains packed, in one parameter for all of a layer, and whose weights
`save_pretrained` stores one by one.

    experts.gate_up_proj [E, 2*I, H]    experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight
    experts.down_proj [E, H, I]         experts.0.down_proj.weight [H, I]

So an optimizer's states are of parameters that no file has. Each stored weight has consecutive
elements of the packed one, and its states are the same elements of that one's. Of fp8, 5.23 stores
the codes one by one and leaves the scales packed, which it does not read itself.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.arrays.value import Array, cut
from jax_ucp.layout.fragments import Shape
from jax_ucp.tree import Key, Leaf

# Model type -> the modules of gate, up and down, and what begins their names differently in memory.
_LINEAR = ("gate_proj", "up_proj", "down_proj")
_TYPES = {
    "mixtral": (("w1", "w3", "w2"), ("block_sparse_moe.", "mlp.")),
    "qwen3_moe": (_LINEAR, ("", "")),
}
_NAME = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>0|[1-9]\d{0,4})\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A stored weight: the elements of a parameter from `start` on."""

    name: str
    start: int
    shape: Shape

    def of(self, whole: Array) -> Array:
        """The weight's part of a state of the parameter."""
        return cut(self.name, whole, self.start, self.shape)


@dataclass(frozen=True, slots=True)
class PackedParameter:
    """A parameter in memory, and the stored weights that it consists of."""

    shape: Shape
    parts: tuple[ExpertPart, ...]


def in_memory(
    model_type: str, release: str, shapes: Mapping[str, Shape]
) -> dict[str, PackedParameter] | None:
    """The parameters of a model in memory, by the shapes of its stored weights; None where that is
    not known: another model type or release, or experts that are incomplete or differ.

    >>> stored = {f"mlp.experts.0.{one}_proj.weight": (2, 2) for one in ("gate", "up", "down")}
    >>> {name: one.shape for name, one in in_memory("qwen3_moe", "5.23.0", stored).items()}
    {'mlp.experts.gate_up_proj': (1, 4, 2), 'mlp.experts.down_proj': (1, 2, 2)}
    """
    if model_type not in _TYPES or release.partition(".")[0] != "5":
        return None
    (gate, up, down), (stored, meant) = _TYPES[model_type]
    found: dict[str, PackedParameter] = {}
    experts: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name, shape in shapes.items():
        new = name.replace(stored, meant) if stored else name
        if match := _NAME.fullmatch(name):
            prefix = match["experts"].replace(stored, meant) if stored else match["experts"]
            experts[prefix][int(match["expert"]), match["part"]] = name
        else:
            found[new] = PackedParameter(shape, (ExpertPart(name, 0, shape),))
    for prefix, of_layer in experts.items():
        count = 1 + max(expert for expert, _ in of_layer)
        if of_layer.keys() != {(i, one) for i in range(count) for one in (gate, up, down)}:
            return None
        for name, parts in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
            names = [of_layer[i, one] for i in range(count) for one in parts]
            if len({shapes[one] for one in names}) > 1 or len(shapes[names[0]]) != 2:
                return None
            rows, columns = shapes[names[0]]
            size = math.prod((rows, columns))
            each = tuple(ExpertPart(one, i * size, (rows, columns)) for i, one in enumerate(names))
            found[f"{prefix}.{name}"] = PackedParameter((count, len(parts) * rows, columns), each)
    return found


_PACKED_SCALES = {
    ".gate_up_proj_scale_inv": (("gate_proj", "up_proj"), ("w1", "w3")),
    ".down_proj_scale_inv": (("down_proj",), ("w2",)),
}


def with_own_scales(contents: Contents, block: Sequence[int]) -> Contents:
    """The checkpoint whose experts have scales of their own, each a part of those for all.

    `block` has the lengths of blocks, of which each expert has whole ones.
    """
    shapes = {leaf.label: leaf.shape for leaf in contents.leaves if leaf.has_array}
    split = {
        leaf.name: parts
        for leaf in contents.leaves
        if (parts := [*_own_scales(leaf, shapes, block)])
    }
    if not split:
        return contents
    stored = expressions(contents.arrays)
    made: list[tuple[Leaf, Array | None]] = []
    for leaf in contents.leaves:
        if leaf.name not in split:
            made.append((leaf, stored[leaf.name] if leaf.has_array else None))
            continue
        for part in split[leaf.name]:
            path = (*leaf.path[:-1], Key(leaf.path[-1].kind, part.name))
            own = replace(leaf, path=path, shape=part.shape)
            made.append((own, part.of(stored[leaf.name])))
    return contents.with_leaves(made, stored)


def _own_scales(
    leaf: Leaf, shapes: Mapping[str, Shape], block: Sequence[int]
) -> Iterator[ExpertPart]:
    """The parts of packed scales, if the codes of an expert are there, in whole blocks."""
    end = next((end for end in _PACKED_SCALES if leaf.label.endswith(f".experts{end}")), None)
    if end is None or len(leaf.shape) != 3:
        return
    experts = str(leaf.path[-1].name).removesuffix(end)
    folder = leaf.label.removesuffix(str(leaf.path[-1].name))
    for modules in _PACKED_SCALES[end]:
        names = [f"{experts}.{i}.{one}.weight" for i in range(leaf.shape[0]) for one in modules]
        rows, columns = leaf.shape[1] // len(modules), leaf.shape[2]
        codes = rows * block[0], columns * block[1]
        if rows * len(modules) == leaf.shape[1] and any(
            shapes.get(folder + name) == codes for name in names
        ):
            for i, name in enumerate(names):
                yield ExpertPart(f"{name}_scale_inv", i * rows * columns, (rows, columns))
            return
