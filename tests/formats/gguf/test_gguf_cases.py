"""Files that llama.cpp's converter and ggml wrote of models of transformers: read as gguf-py reads
them, bit for bit, and mapped to the tensors that the models had.

`tests/generators/gguf_files.py` writes them.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from cases import Case, names_of
from commands import run
from gguf_table import BY_GGUF_PY, digest, table
from gguf_writer import BLOCKS, Tensor, Written, random_blocks
from helpers import mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError
from jax_ucp.formats.quantized.ggml import TYPES
from test_read_once import reads_of

CASES = names_of("gguf")
# Of their architectures no config is made.
WITHOUT_CONFIG = ("deepseek2_f32", "deepseek3_bf16", "glm4_f32", "gpt_oss_bf16")
WITHOUT_CONFIG += ("llama4_maverick_bf16", "llama4_scout_f32", "phi3_f16")
IN_BLOCKS = [case for case in CASES if case.endswith(("_k", "_32", "_q8_0"))]
# What a config has that says nothing of what is computed, or that GGUF does not keep.
NOT_KEPT = {"attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range"}
NOT_KEPT |= {"max_window_layers", "pad_token_id", "pretraining_tp", "transformers_version"}
NOT_KEPT |= {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "use_cache"}
NOT_KEPT |= {"layer_types", "_sliding_window_pattern", "use_bidirectional_attention"}


def opened(case: str, dtype: str = "float32") -> ucp.Checkpoint:
    return Case(f"gguf/{case}").open(dequantize=dtype)


def mapped_to_names(case: str) -> ucp.Checkpoint:
    """The case in Hugging Face's names, with the model's config where the file gives none."""
    said = Case(f"gguf/{case}").about
    config = {"config": said["config"]} if case in WITHOUT_CONFIG else {}
    return opened(case).map(said["mapping"], **config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_a_number_is_rounded_once(case, dtype):
    checkpoint, want = opened(case, dtype), Case(f"gguf/{case}").truth()
    plain = set(ucp.open(Case(f"gguf/{case}").path, dequantize=False))
    for label, array in want.items():
        rounded = array if label in plain else array.astype(dtype)
        assert same_bits(checkpoint.read(label), rounded), label


def test_every_type_of_four_bits_and_more_is_in_two_files_that_ggml_wrote():
    met: dict[str, set[str]] = {type: set() for type, (*_, rule) in BLOCKS.items() if rule}
    for case in IN_BLOCKS:
        for weight in ucp.open(Case(f"gguf/{case}").path)._contents.quantized:
            met[weight.scheme.removeprefix("ggml ")].add(case)
    assert {type: len(cases) for type, cases in met.items() if len(cases) < 2} == {}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("type", TYPES)
def test_any_blocks_have_the_bits_that_gguf_py_gives_them(type):
    assert digest(type) == BY_GGUF_PY["types"][type]


def test_the_table_of_the_page_is_what_a_run_prints():
    assert table() in (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_mapping_gives_the_model_of_transformers_bit_for_bit(case):
    said = Case(f"gguf/{case}").about
    mapped = mapped_to_names(case)
    names = {leaf.label.removeprefix("param/"): leaf for leaf in mapped.leaves}
    # of a tied model transformers saves one of the two, or both
    assert names.keys() == said["model"].keys() - ({"lm_head.weight"} if _is_tied(case) else set())
    for name, leaf in names.items():
        values = mapped.read(leaf.label).astype(np.float32)
        shape, digest = said["model"][name]
        assert list(values.shape) == shape
        assert hashlib.sha256(values.tobytes()).hexdigest() == digest, name


def _is_tied(case: str) -> bool:
    return Case(f"gguf/{case}").about["config"]["tie_word_embeddings"]


@pytest.mark.parametrize("case", WITHOUT_CONFIG)
def test_an_architecture_of_which_no_config_is_made_is_mapped_with_that_of_the_model(case):
    said, checkpoint = Case(f"gguf/{case}").about, opened(case)
    assert not checkpoint.config
    assert "says nothing here of a model's config" in checkpoint.notes[0]
    with pytest.raises(LayoutError, match=r"give it, config= \(--config\)"):
        checkpoint.map(said["mapping"])
    with pytest.raises(LayoutError, match="requires family"):
        checkpoint.map(said["mapping"], config=said["config"] | {"model_type": "llama"})
    rules, mapped = ucp.Mapping.load(said["mapping"]), mapped_to_names(case)
    assert mapped.config == said["config"]
    back = mapped.map(rules.inverse())
    skipped = {item.label for item in mapped.inventory if item.status == "skipped"}
    assert set(back) == {leaf.label for leaf in checkpoint.leaves} - skipped
    for leaf in back.leaves:
        assert same_bits(back.read(leaf.label), checkpoint.read(leaf.label)), leaf.label


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_CONFIG])
def test_the_config_that_is_made_of_the_keys_is_that_of_the_model(case):
    made, config = opened(case).config, dict(Case(f"gguf/{case}").about["config"])
    assert made == opened(case).map(Case(f"gguf/{case}").about["mapping"]).config
    if "num_experts" in made:
        config["num_experts"] = config.pop("num_local_experts")
    if case.startswith("mistral"):  # an architecture of its own it is not, in GGUF
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        assert config.pop("sliding_window") == 4096  # and the note says so
        assert "a window of theirs is stored nowhere" in opened(case).notes[0]
    kept = {key: x for key, x in config.items() if key not in NOT_KEPT and x is not None}
    assert {key: made.get(key) for key in kept} == kept
    assert made.keys() - kept.keys() <= {"head_dim", "attention_bias", "mlp_bias"}


# Through two mappings.

CHAINS = {
    "llama_f32": ("hf-llama2-to-maxtext", "hf-llama-to-maxtext", "rope"),
    "llama31_bf16": ("hf-llama-to-maxtext", "hf-llama2-to-maxtext", "rope"),
    "llama_blocks_of_32": ("hf-llama2-to-maxtext", "hf-llama-to-tunix", "rope_theta"),
    "mixtral_f32": ("hf-mixtral-to-maxtext", "hf-llama2-to-maxtext", "family"),
    "qwen2_f32": ("hf-qwen2-to-tunix", "hf-qwen3-to-tunix", "family"),
    "qwen3_bf16": ("hf-qwen3-to-tunix", "hf-qwen2-to-tunix", "family"),
    "qwen3_moe_f16": ("hf-qwen3-moe-to-maxtext", "hf-qwen3-to-maxtext", "family"),
    "gemma_bf16": ("hf-gemma-to-tunix", "hf-gemma-7b-to-tunix", "heads"),
    "gpt_oss_bf16": ("hf-gpt-oss-to-maxtext", "hf-qwen3-to-maxtext", "family"),
}


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_of_mappings_ends_on_a_mesh_in_the_models_leaves(case):
    fits, other, requirement = CHAINS[case]
    named = mapped_to_names(case)
    with pytest.raises(LayoutError, match=requirement):
        named.map(other)
    mapped = named.map(fits)
    mesh = mesh_of(4, 2)
    tree = restored_on(mesh, mapped, [(r".", P(None, "model"))])
    for leaf in mapped.leaves:
        array = tree
        for key in leaf.path:
            array = array[key.name]
        assert same_bits(np.asarray(array), mapped.read(leaf.label)), leaf.label


def test_of_deepseek_in_older_files_keys_and_values_are_in_one():
    said, checkpoint = Case("gguf/deepseek3_bf16").about, opened("deepseek3_bf16")
    arrays = {name: param.read() for name, param in checkpoint.params.items()}
    for layer in range(said["config"]["num_hidden_layers"]):
        keys, values = (arrays.pop(f"blk.{layer}.attn_{one}_b.weight") for one in "kv")
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        arrays[f"blk.{layer}.attn_kv_b.weight"] = joined.reshape(-1, joined.shape[2])
    older = ucp.Checkpoint.of({"param": arrays}).map(said["mapping"], config=said["config"])
    newer = mapped_to_names("deepseek3_bf16")
    assert older.params.keys() == newer.params.keys()
    for name, param in newer.params.items():
        assert same_bits(older.params[name].read(), param.read()), name


# On the command line.


def test_inspect_begins_with_the_architecture_and_the_type_of_the_file():
    output = run("inspect", Case("gguf/llama_q8_0").path)
    assert re.search(r"GGUF v3, llama, Q8_0", output)
    about = json.loads(run("inspect", "--json", Case("gguf/qwen2_f32").path))
    assert about["writer"] == "GGUF v3, qwen2, F32"


def test_a_conversion_reads_every_block_once(tmp_path):
    """But for the first million bytes, in which a head may lie."""
    stored = random_blocks(np.random.default_rng(0), "Q6_K", (3072,), 8)
    path = tmp_path / "in" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(Written({}, [Tensor("w", (2048, 3072), 14, stored.tobytes())]).data())
    with reads_of(path.parent) as counts:
        ucp.open(path, dequantize="bfloat16").save(tmp_path / "out")
    count = counts[str(path.resolve())][1 << 20 :]
    assert count.max() <= 2  # what a read has beside what is asked for, at the edges of pages
    assert (count == 1).mean() > 0.99
