"""The weights of a base in memory: renamed, with another prefix, packed or apart, or as stored."""

import pytest

from jax_ucp.formats.peft.names import in_memory

LLAVA = (
    "language_model.model.layers.0.q language_model.lm_head vision_tower.vision_model.layers.0.q"
)
LLAVA += " multi_modal_projector.linear_1"
MOE = "model.layers.0.block_sparse_moe"


@pytest.mark.parametrize(("modules", "base", "model_type", "want"), [
    ("layers.0.q", "layers.0.q", "llava", "layers.0.q"),
    ("model.language_model.layers.0.q model.multi_modal_projector.linear_1", LLAVA, "llava",
     "model.language_model.layers.0.q lm_head model.vision_tower.vision_model.layers.0.q model.multi_modal_projector.linear_1"),
    # trained with transformers 5, and a base as it was released
    ("model.language_model.layers.0.q model.vision_tower.layers.0.q", LLAVA, "gemma3",
     "model.language_model.layers.0.q lm_head model.vision_tower.layers.0.q model.multi_modal_projector.linear_1"),
    # trained before transformers 4.52, or a base stored as it is in memory
    ("language_model.model.layers.0.q", LLAVA, "llava", LLAVA),
    # rules are those of the type
    ("model.language_model.layers.0.q", LLAVA, "llama", LLAVA),
    ("model.language_model.layers.0.q model.visual.q", "model.layers.0.q visual.q lm_head", "qwen2_vl",
     "model.language_model.layers.0.q model.visual.q lm_head"),
    ("model.layers.0.q", "layers.0.q", "", "model.layers.0.q"),
    ("layers.0.q", "model.layers.0.q lm_head", "", "layers.0.q lm_head"),
    # not all modules are found, or two names would be one
    ("model.layers.0.q model.x", "layers.0.q", "", "layers.0.q"),
    ("q", "model.q q.bias model.q.bias", "", "model.q q.bias model.q.bias"),
    # the module is in two towers
    ("q", "a.q b.q", "", "a.q b.q"),
])  # fmt: skip
def test_names_are_those_by_which_the_adapter_finds_its_modules(modules, base, model_type, want):
    """Of weights: each name here is that of a module."""
    base, want = ([f"{name}.weight" for name in names.split()] for names in (base, want))
    memory = in_memory(modules.split(), dict.fromkeys(base, (2, 2)), model_type)
    assert list(memory.names) == want
    assert list(memory.names.values()) == base
    assert not memory.packed
    assert not memory.apart


def test_experts_that_granite_stores_in_modules_are_parameters_in_memory():
    base = [f"{MOE}.{name}.weight" for name in ("input_linear", "output_linear", "router.layer")]
    memory = in_memory(
        [f"{MOE}.experts", f"{MOE}.router"], dict.fromkeys(base, (2, 2)), "granitemoe"
    )
    want = [
        f"{MOE}.{name}" for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight")
    ]
    assert memory.names == dict(zip(want, base, strict=True))


EXPERTS = [f"model.layers.0.block_sparse_moe.experts.{i}" for i in range(2)]
EACH = {f"{expert}.{one}.weight": (3, 2) for expert in EXPERTS for one in ("w1", "w3")}
EACH |= {f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight": (2, 3) for i in range(2)}
PACKED = {
    "model.layers.0.mlp.experts.gate_up_proj": (2, 6, 2),
    "model.layers.0.mlp.experts.down_proj": (2, 2, 3),
}
ROUTER = {"model.layers.0.block_sparse_moe.gate.weight": (2, 2)}
RENAMED = {"model.layers.0.mlp.gate.weight": (2, 2)}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(("stored", "memory", "module"), [
    (EACH | ROUTER, PACKED | RENAMED, "model.layers.0.mlp.experts"),
    (EACH | ROUTER, PACKED | RENAMED, "model.layers.0.mlp.gate"),
    (EACH | ROUTER, EACH | ROUTER, "model.layers.0.block_sparse_moe.experts.1.w2"),
    (PACKED | RENAMED, EACH | ROUTER, "model.layers.0.block_sparse_moe.experts.1.w2"),
    (PACKED | RENAMED, PACKED | RENAMED, "model.layers.0.mlp.experts"),
])  # fmt: skip
def test_experts_are_packed_as_the_adapter_finds_them(stored, memory, module, prefix):
    stored = {name.removeprefix(prefix): shape for name, shape in stored.items()}
    assert in_memory([module], stored, "mixtral").shapes(stored) == memory


def test_experts_that_no_rule_packs_are_as_they_are_stored():
    for model_type, stored in [("grok", EACH), ("mixtral", dict(list(EACH.items())[1:]))]:
        memory = in_memory(["model.layers.0.mlp.experts"], stored, model_type)
        assert memory.shapes(stored) == stored
