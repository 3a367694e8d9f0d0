"""The names that weights of a base have in memory, where adapters find their modules.

Facts: `from_pretrained` of transformers renames what files have, from 4.52 on by rules of the
model's type (`conversion_mapping.py` of 5.23), and adds or leaves out the `base_model_prefix` where
a file is of the model without its head, or the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

# By types of models the beginnings of names in files, and in memory.
_LLAVA = {
    r"language_model\.model\.": "model.language_model.",
    r"language_model\.lm_head\.": "lm_head.",
    r"(?=(vision_tower|multi_modal_projector)\.)": "model.",
}
_QWEN2_VL = {
    r"(?=visual\.)": "model.",
    r"model\.(?!(language_model|visual)\.)": "model.language_model.",
}
_RULES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("aria", "aya_vision", "gemma3", "got_ocr2", "internvl", "llava"), _LLAVA),
    **dict.fromkeys(("llava_next", "mistral3", "paligemma", "vipllava"), _LLAVA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL),
}


def names_in_memory(
    modules: Collection[str], base: Collection[str], model_type: str
) -> Mapping[str, str]:
    """The name in the base by the name in memory of every weight. The base's own names are those
    in memory if they have all modules of the adapter, or if not just one other way has.
    """
    own = {name: name for name in base}
    ways = [{rename(name): name for name in base} for rename in _ways(modules, base, model_type)]
    fitting = [way for way in ways if len(way) == len(own) and _has_all(way, modules)]
    return fitting[0] if len(fitting) == 1 and not _has_all(own, modules) else own


def _ways(
    modules: Collection[str], base: Collection[str], model_type: str
) -> Iterator[Callable[[str], str]]:
    if rules := _RULES.get(model_type):
        yield lambda name: _renamed(name, rules)
    for prefix in {f"{name.partition('.')[0]}." for name in modules}:
        yield lambda name, prefix=prefix: prefix + name
    for prefix in {f"{name.partition('.')[0]}." for name in base}:
        yield lambda name, prefix=prefix: name.removeprefix(prefix)


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for begins, instead in rules.items():
        if match := re.match(begins, name):
            return instead + name[match.end() :]
    return name


def _has_all(names: Collection[str], modules: Collection[str]) -> bool:
    """Whether each module has a parameter, itself or below."""
    above = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    return above.issuperset(modules)
