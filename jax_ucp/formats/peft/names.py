"""The names that weights of a base have in memory, where adapters find their modules.

Facts: `from_pretrained` of transformers renames what files have, from 4.52 on by rules of the
model's type (`conversion_mapping.py` of 5.23), and adds or leaves out the `base_model_prefix` where
a file is of the model without its head, or the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jax_ucp.formats.packed_experts import PackedParameter, apart, is_packed, packed
from jax_ucp.layout.fragments import Shape

# By types of models the beginnings of names in files, and in memory.
_LLAVA = {
    r"language_model\.model\.": "model.language_model.",
    r"language_model\.lm_head\.": "lm_head.",
    r"(?=(vision_tower|multi_modal_projector)\.)": "model.",
}
# In memory of transformers 5.23 towers of CLIP and SigLIP have no `vision_model`.
_TOWER = {r"vision_tower\.vision_model\.": "model.vision_tower."}
_QWEN2_VL = {
    r"(?=visual\.)": "model.",
    r"model\.(?!(language_model|visual)\.)": "model.language_model.",
}
_GRANITE_MOE = {
    r"(.*\.block_sparse_moe\.)input_linear\.weight": r"\1experts.gate_up_proj",
    r"(.*\.block_sparse_moe\.)output_linear\.weight": r"\1experts.down_proj",
    r"(.*\.block_sparse_moe\.)router\.layer\.weight": r"\1router.weight",
}
GRANITE_MOE = ("granitemoe", "granitemoeshared", "granitemoehybrid")
_RULES: dict[str, dict[str, str]] = {
    "gpt_neox": {r"embed_out\.": "lm_head."},
    **dict.fromkeys(GRANITE_MOE, _GRANITE_MOE),
    **dict.fromkeys(("aria", "aya_vision", "gemma3", "got_ocr2", "internvl", "llava"), _LLAVA),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "mistral3"), _LLAVA),
    **dict.fromkeys(("paligemma", "vipllava"), _LLAVA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL),
}


@dataclass(frozen=True)
class Memory:
    """The weights of a base as they are in a model, where an adapter finds its modules.

    `packed` are parameters that consist of several stored weights; `apart` are stored ones, by
    their stored names, of which each part is a weight in memory. `names` has by the name in memory
    of each weight the one that all adapters of the base know it by: the stored one where the weight
    is the same in both, or else that in `packed` or of a part.
    """

    names: Mapping[str, str]
    packed: Mapping[str, PackedParameter] = field(default_factory=dict)
    apart: Mapping[str, PackedParameter] = field(default_factory=dict)

    def shapes(self, stored: Mapping[str, Shape]) -> dict[str, Shape]:
        """The shape of every weight in memory, by those of the stored ones."""
        shapes = {**stored, **{name: param.shape for name, param in self.packed.items()}}
        parts = (part for param in self.apart.values() for part in param.parts)
        shapes |= {part.name: part.shape for part in parts}
        return {name: shapes[of] for name, of in self.names.items()}


def in_memory(
    modules: Collection[str],
    base: Mapping[str, Shape],
    model_type: str,
    saved: Collection[str] = (),
) -> Memory:
    """The weights of a base in memory, by the shapes of the stored ones: as they are stored if they
    have all modules of the adapter, or in the one other way that has. `saved` are modules that may
    be new: where no way has these too, the others decide. Where several have all, or none, the
    weights are as they are stored.
    """
    stored = Memory({name: name for name in base})
    for wanted in [{*modules, *saved}, {*modules}]:
        for memory in (stored, *_repacked(base, model_type)):
            own = memory.shapes(base)
            if _has_all(own, wanted):
                return memory
            fitting: dict[frozenset[tuple[str, str]], Memory] = {}  # by what is of the modules
            for rename in _ways(wanted, own, model_type):
                names = {rename(name): of for name, of in memory.names.items()}
                if len(names) == len(own) and _has_all(names, wanted):
                    found = (pair for pair in names.items() if _module_of(pair[0]) in wanted)
                    fitting.setdefault(frozenset(found), replace(memory, names=names))
            if len(fitting) == 1:
                return next(iter(fitting.values()))
    return stored


def _repacked(base: Mapping[str, Shape], model_type: str) -> Iterator[Memory]:
    """The weights with experts as transformers 5 has them in memory, then as transformers 4 had."""
    if not is_packed(model_type):
        return
    weights = packed(model_type, base) or {}
    several = {name: param for name, param in weights.items() if len(param.parts) > 1}
    one = {name: param.parts[0].name for name, param in weights.items() if name not in several}
    yield Memory(one | {name: name for name in several}, several)
    weights = apart(model_type, base)
    several = {name: param for name, param in weights.items() if len(param.parts) > 1}
    one = {param.parts[0].name: name for name, param in weights.items() if name not in several}
    parts = {part.name: part.name for param in several.values() for part in param.parts}
    yield Memory(one | parts, apart=several)


def _ways(
    modules: Collection[str], base: Collection[str], model_type: str
) -> Iterator[Callable[[str], str]]:
    if rules := _RULES.get(model_type):
        yield lambda name: _renamed(name, rules)
        yield lambda name: _renamed(name, {**_TOWER, **rules})
    for prefix in {f"{name.partition('.')[0]}." for name in modules}:
        yield lambda name, prefix=prefix: prefix + name
    for prefix in {f"{name.partition('.')[0]}." for name in base}:
        yield lambda name, prefix=prefix: name.removeprefix(prefix)


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for begins, instead in rules.items():
        if match := re.match(begins, name):
            return match.expand(instead) + name[match.end() :]
    return name


def _has_all(names: Collection[str], modules: Collection[str]) -> bool:
    """Whether each module has a parameter of its own."""
    return set(map(_module_of, names)).issuperset(modules)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
