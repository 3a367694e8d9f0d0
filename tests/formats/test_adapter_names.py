"""The names of a base in memory: by rules of transformers, a prefix more or less, or its own."""

import pytest

from jax_ucp.formats.peft.names import names_in_memory

LLAVA = [
    "language_model.model.layers.0.q.weight",
    "language_model.lm_head.weight",
    "vision_tower.vision_model.layers.0.q.weight",
    "multi_modal_projector.linear_1.weight",
]


@pytest.mark.parametrize(
    ("modules", "base", "model_type", "want"),
    [
        (["layers.0.q"], ["layers.0.q.weight"], "llava", ["layers.0.q.weight"]),
        (
            ["model.language_model.layers.0.q", "model.multi_modal_projector.linear_1"],
            LLAVA,
            "llava",
            [
                "model.language_model.layers.0.q.weight",
                "lm_head.weight",
                "model.vision_tower.vision_model.layers.0.q.weight",
                "model.multi_modal_projector.linear_1.weight",
            ],
        ),
        # trained before transformers 4.52, or a base stored as it is in memory
        (["language_model.model.layers.0.q"], LLAVA, "llava", LLAVA),
        # rules are those of the type
        (["model.language_model.layers.0.q"], LLAVA, "llama", LLAVA),
        (
            ["model.language_model.layers.0.q", "model.visual.q"],
            ["model.layers.0.q.weight", "visual.q.weight", "lm_head.weight"],
            "qwen2_vl",
            ["model.language_model.layers.0.q.weight", "model.visual.q.weight", "lm_head.weight"],
        ),
        (["model.layers.0.q"], ["layers.0.q.weight"], "", ["model.layers.0.q.weight"]),
        (
            ["layers.0.q"],
            ["model.layers.0.q.weight", "lm_head.weight"],
            "",
            ["layers.0.q.weight", "lm_head.weight"],
        ),
        # not all modules are found, or two names would be one
        (["model.layers.0.q", "model.x"], ["layers.0.q.weight"], "", ["layers.0.q.weight"]),
        (["q"], ["model.q.weight", "q.bias.weight", "model.q.bias.weight"], "", None),
        # the module is in two towers
        (["q"], ["a.q.weight", "b.q.weight"], "", ["a.q.weight", "b.q.weight"]),
    ],
)
def test_names_are_those_by_which_the_adapter_finds_its_modules(modules, base, model_type, want):
    names = names_in_memory(modules, base, model_type)
    assert list(names) == (want or base)
    assert list(names.values()) == base
