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

import numpy as np

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.arrays.value import Array, cut, joined
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.parts import Part, Place, straight
from jax_ucp.tree import Key, Leaf

# The modules of gate, up and down, and parts of stored names by what they are in memory.
_LINEAR = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
_MIXTRAL = {".mlp.": ".block_sparse_moe."}
# By the model's type, as `conversion_mapping.py` of transformers 5.23 has them.
_TYPES: dict[str, tuple[tuple[str, str, str], dict[str, str]]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), (_NUMBERED, _MIXTRAL)),
    "phimoe": (_NUMBERED, {".router.weight": ".gate.weight", **_MIXTRAL}),
    "lfm2_moe": (_NUMBERED, {}),
    **dict.fromkeys(("jamba", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"), (_LINEAR, {})),
    **dict.fromkeys(("afmoe", "cohere2_moe", "dots1", "ernie4_5_moe"), (_LINEAR, {})),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), (_LINEAR, {})),
    **dict.fromkeys(("exaone_moe", "flex_olmo", "hunyuan_v1_moe"), (_LINEAR, {})),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa"), (_LINEAR, {})),
    **dict.fromkeys(("mellum", "mimo_v2_flash", "solar_open"), (_LINEAR, {})),
}
_TRAINED = ("mixtral", "qwen3_moe")  # whose parameters' order in an optimizer is known
_NAME = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>0|[1-9]\d{0,4})\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A weight that is part of a parameter: consecutive elements of it in row-major order, from the
    one at `start` on.
    """

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

    def of(self, name: str, weights: Sequence[Array]) -> Array:
        """The parameter called `name`, of `weights` in the order of `parts`. Raises LayoutError if
        their shapes or dtypes do not fit.
        """
        parts = [
            Part(i, part.shape, Place((0,) * len(part.shape), straight(len(part.shape))), place)
            for i, (part, place) in enumerate(zip(self.parts, self._places, strict=True))
        ]
        layout = ParamLayout(self.shape, tuple(part.shape for part in self.parts), tuple(parts))
        return joined(name, layout, weights, [part.name for part in self.parts])

    @property
    def _places(self) -> Iterator[Place]:
        """Where each part is: whole rows of one expert."""
        for part in self.parts:
            offset = tuple(map(int, np.unravel_index(part.start, self.shape)))
            yield Place(offset, tuple((axis, 1) for axis in range(1, len(self.shape))))


def in_memory(
    model_type: str, release: str, shapes: Mapping[str, Shape]
) -> dict[str, PackedParameter] | None:
    """The parameters of a model in memory, by the shapes of its stored weights; None where that is
    not known: another model type or release, or experts that are incomplete or differ.

    >>> stored = {f"mlp.experts.0.{one}_proj.weight": (2, 2) for one in ("gate", "up", "down")}
    >>> {name: one.shape for name, one in in_memory("qwen3_moe", "5.23.0", stored).items()}
    {'mlp.experts.gate_up_proj': (1, 4, 2), 'mlp.experts.down_proj': (1, 2, 2)}
    """
    is_known = model_type in _TRAINED and release.partition(".")[0] == "5"
    return packed(model_type, shapes) if is_known else None


def is_packed(model_type: str) -> bool:
    """Whether transformers 5 has the experts of such a model in one parameter."""
    return model_type in _TYPES


def packed(model_type: str, shapes: Mapping[str, Shape]) -> dict[str, PackedParameter] | None:
    """The parameters of a model by their names in memory, by the shapes of what is stored; None
    where experts are incomplete or differ.
    """
    (gate, up, down), renamed = _TYPES[model_type]
    parameters: dict[str, PackedParameter] = {}
    experts: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name, shape in shapes.items():
        meant = name
        for new, stored in renamed.items():
            meant = meant.replace(stored, new)
        if match := _NAME.fullmatch(name):
            prefix = meant.removesuffix(name.removeprefix(match["experts"]))
            experts[prefix][int(match["expert"]), match["part"]] = name
        else:
            parameters[meant] = PackedParameter(shape, (ExpertPart(name, 0, shape),))
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
            parameters[f"{prefix}.{name}"] = PackedParameter(
                (count, len(parts) * rows, columns), each
            )
    return parameters


def apart(model_type: str, shapes: Mapping[str, Shape]) -> dict[str, PackedParameter]:
    """The parameters that are stored packed, and the weights of experts, by the names of
    transformers 4, of which each consists; all others have one part, by its name there.
    """
    (gate, up, down), renamed = _TYPES[model_type]
    parameters: dict[str, PackedParameter] = {}
    for name, shape in shapes.items():
        older = name
        for new, stored in renamed.items():
            older = older.replace(new, stored)
        experts, _, last = older.rpartition(".")
        parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(last, ())
        if not (parts and experts.endswith(".experts") and len(shape) == 3):
            parameters[name] = PackedParameter(shape, (ExpertPart(older, 0, shape),))
            continue
        count, rows, columns = shape[0], shape[1] // len(parts), shape[2]
        names = [f"{experts}.{i}.{one}.weight" for i in range(count) for one in parts]
        each = [ExpertPart(one, i * rows * columns, (rows, columns)) for i, one in enumerate(names)]
        parameters[name] = PackedParameter(shape, tuple(each))
    return parameters


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
    """The scales of each expert as parts of the packed ones; none unless the codes of at least one
    expert are there, in whole blocks.
    """
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
