"""Adapters of peft: merged as peft merges them, mapped by the mapping of their base, written again,
and refused where they are not for a base. The cases are of `tests/generators/peft.py`.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from helpers import changed_json, faults_of, mesh_of
from jax_ucp.errors import FormatError, LayoutError, QuantizedWeights, TreeMismatch
from safetensors_writer import edit, write_safetensors

DATA = Path(__file__).parents[1] / "data" / "adapters"
WITH_TRUTH = {path.parent.name for path in DATA.glob("*/merged.npz")}
# peft loads the base's file into the model with another head, whose names begin otherwise
RENAMED = {
    "headless_base": "model.{}".format,
    "headless_adapter": lambda name: name.removeprefix("model."),
}
CASES = sorted(WITH_TRUTH - RENAMED.keys())
REFUSED = sorted({path.name for path in DATA.iterdir()} - WITH_TRUTH)
ROUNDING = 2.0**-24  # of float32


def base_of(case: str) -> ucp.Checkpoint:
    return ucp.open(DATA / case / "base")


def adapters_of(case: str) -> list[Path]:
    folder = DATA / case / "adapter"
    return [folder, folder / "second"] if (folder / "second").exists() else [folder]


def merged(case: str) -> ucp.Checkpoint:
    return base_of(case).merge(*adapters_of(case))


def params(checkpoint: ucp.Checkpoint) -> dict[str, np.ndarray]:
    return {str(leaf.path[1]): checkpoint.read(leaf.label) for leaf in checkpoint.leaves}


def is_same(first: ucp.Checkpoint, second: ucp.Checkpoint) -> bool:
    """Whether two checkpoints have the same leaves, bit for bit."""
    found = ucp.diff(first, second)
    assert found.equal or found.values
    others = found.missing, found.added, found.reshaped, found.recast, found.values
    return not any(others)


def pefts(case: str, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What peft merged; bfloat16 is kept as its bits."""
    with np.load(DATA / case / "merged.npz") as file:
        return {name: file[name].view(like[name].dtype) for name in file.files}


@pytest.mark.parametrize("case", CASES)
def test_a_merged_checkpoint_is_what_peft_merges(case):
    got = params(merged(case))
    assert_merged(got, pefts(case, got), params(base_of(case)))


@pytest.mark.parametrize("case", RENAMED)
def test_a_base_whose_names_begin_otherwise_keeps_them(case):
    got, before, renamed = params(merged(case)), params(base_of(case)), RENAMED[case]
    assert got.keys() == before.keys()
    of_peft = {renamed(name): array for name, array in got.items()}
    want = pefts(case, of_peft)
    of_peft = {name: of_peft[name] for name in want}  # the model without a head lacks it
    assert_merged(of_peft, want, {renamed(name): array for name, array in before.items()})


Arrays = Mapping[str, np.ndarray]


def assert_merged(got: Arrays, want: Arrays, before: Arrays) -> None:
    assert got.keys() == want.keys()
    changed = 0
    for name, array in got.items():
        assert array.shape == want[name].shape
        if array.dtype == ml_dtypes.bfloat16:
            np.testing.assert_array_equal(array, want[name])
        else:  # peft sums in float32, in an order of its own
            most = 16 * ROUNDING * np.abs(want[name]).max()
            np.testing.assert_allclose(array, want[name], rtol=0, atol=most)
        changed += name not in before or not np.array_equal(array, before[name])
    assert changed


def test_tokens_that_were_added_are_in_the_config_and_in_what_is_exported(tmp_path):
    whole = merged("resized")
    assert whole.config == {**base_of("resized").config, "vocab_size": 43}
    assert any("has 43 tokens now" in note for note in whole.notes)
    exported = whole.export(tmp_path / "out", "safetensors")
    assert exported.config["vocab_size"] == 43
    assert exported.params["lm_head.weight"].shape == (43, 16)
    nested = changed_config("resized", tmp_path, {"text_config": {"vocab_size": 40}})
    config = ucp.open(nested).merge(DATA / "resized" / "adapter").config
    assert config["text_config"] == {"vocab_size": 43}
    assert "vocab_size" not in config


def changed_config(case: str, folder: Path, instead: Mapping[str, Any]) -> Path:
    """The base of a case with another number of tokens in its config."""
    base = shutil.copytree(DATA / case / "base", folder / "base")
    config = json.loads((base / "config.json").read_text())
    del config["vocab_size"]
    (base / "config.json").write_text(json.dumps({**config, **instead}))
    return base


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tied_")])
def test_a_head_that_is_another_than_the_embedding_is_tied_no_more(case):
    whole = merged(case)
    assert whole.config == {**base_of(case).config, "tie_word_embeddings": False}
    assert any("tie_word_embeddings" in note for note in whole.notes)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    embedding, head = (whole.read(f"param/{name}") for name in names)
    assert (embedding != head).any()
    assert merged("tokens_tied").config["tie_word_embeddings"]


def test_every_element_is_the_sum_in_float64_rounded_once():
    base, adapter = params(base_of("lora")), params(ucp.open(DATA / "lora" / "adapter"))
    got = params(merged("lora"))
    for name, weight in base.items():
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapter:
            b, a = (adapter[f"{module}.lora_{which}.weight"].astype(float) for which in "BA")
            exact = weight.astype(float) + 6 / 4 * (b @ a)
            np.testing.assert_array_equal(got[name], exact.astype(np.float32))
        else:
            np.testing.assert_array_equal(got[name], weight)


@pytest.mark.parametrize(
    "case", ["dora", "experts", "experts_mixtral", "old_experts_packed", "several", "bfloat16"]
)
def test_what_is_merged_is_saved_exported_compared_and_verified(case, tmp_path):
    checkpoint = merged(case)
    saved = checkpoint.save(tmp_path / "saved")
    exported = checkpoint.export(tmp_path / "exported", "safetensors")
    for other in (saved, exported):
        assert is_same(checkpoint, other)
    assert faults_of(saved) == []
    assert saved.source["merged"] == [path.name for path in adapters_of(case)]
    assert not is_same(base_of(case), saved)


def test_what_is_merged_is_mapped_and_restored_on_a_mesh():
    from jax.sharding import PartitionSpec as P

    mesh = mesh_of(4, 2)
    mapped = merged("dora").map("hf-llama-to-tunix", assume=["rope_theta"])
    tree = mapped.restore(mesh=mesh, rules=[("q_proj/w$", P("data", None, "model"))])
    got = tree["param"]["layers"]["1"]["attn"]["q_proj"]["w"]
    assert len({str(shard.index) for shard in got.addressable_shards}) == 8
    want = params(merged("dora"))["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(got, want.reshape(4, 4, 16).transpose(2, 0, 1))


def test_what_is_merged_can_be_sent_to_other_processes():
    again = ucp.Checkpoint(pickle.loads(pickle.dumps(merged("several")._contents)))
    assert is_same(merged("several"), again)


def test_a_merge_of_several_is_rounded_once_and_one_after_the_other_twice():
    first, second = adapters_of("several")
    base = base_of("several")
    together, after = base.merge(first, second), base.merge(first).merge(second)
    name = "param/model.layers.0.self_attn.q_proj.weight"
    one, two = together.read(name), after.read(name)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert (one != two).any()
    assert after.source["merged"] == together.source["merged"] == ["adapter", "second"]


def test_a_changed_adapter_is_seen_like_a_changed_base(tmp_path):
    shutil.copytree(DATA / "lora", tmp_path / "lora")
    folder = tmp_path / "lora"
    checkpoint = ucp.open(folder / "base").merge(folder / "adapter")
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(FormatError, match=r"adapter_model\.safetensors.*opened"):
        checkpoint.save(tmp_path / "out")


def test_every_tensor_of_an_adapter_is_in_the_inventory_with_its_weight():
    reasons = {item.where: item.reason for item in merged("dora").inventory}
    for leaf in ucp.open(DATA / "dora" / "adapter").leaves:
        where = f"adapter/adapter_model.safetensors:{leaf.path[1]}"
        weight = str(leaf.path[1]).removeprefix("base_model.model.").partition(".lora")[0]
        assert reasons[where].endswith(f"of {weight}.weight")
    pieces = merged("dora").where("param/model.layers.0.self_attn.q_proj.weight")
    assert {piece.file for piece in pieces} == {"model.safetensors", "adapter_model.safetensors"}


def test_a_dequantised_base_is_merged(tmp_path):
    base = Path(__file__).parents[1] / "data" / "quantized" / "gptq_4" / "ckpt"
    wide = ucp.open(base, dequantize="float32")
    name = next(n for n in params(wide) if n.endswith("q_proj.weight"))
    weight = wide.read(f"param/{name}")
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, weight.shape[1])).astype(np.float32)
    b = rng.standard_normal((weight.shape[0], 2)).astype(np.float32)
    module = "base_model.model." + name.removesuffix(".weight")
    factors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    adapter = write_adapter(tmp_path, factors, r=2, lora_alpha=1)
    got = wide.merge(adapter).read(f"param/{name}")
    exact = weight.astype(float) + 0.5 * (b.astype(float) @ a.astype(float))
    np.testing.assert_array_equal(got, exact.astype(np.float32))
    with pytest.raises(QuantizedWeights):
        ucp.open(base).merge(adapter)


def write_adapter(folder: Path, arrays: Mapping[str, np.ndarray], **config: Any) -> Path:
    adapter = folder / "made"
    adapter.mkdir()
    write_safetensors(adapter / "adapter_model.safetensors", arrays)
    said = {"peft_type": "LORA", "base_model_name_or_path": "base", **config}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    return adapter


# Refusals.


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sum_of_factors_opens_and_is_refused_by_its_name(case):
    adapter = ucp.open(DATA / case / "adapter")
    assert adapter.params
    assert "adapter_config.json" in adapter.extras
    named = {"pissa": "'pissa'", "resized_embedding": "factors .* 43", "other_ia3": "IA3"}
    with pytest.raises(FormatError, match=named[case]):
        base_of(case).merge(adapter)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"r": 5}, "has rank 5, and its factors have 4"),
    ({"r": 0}, "r is 0"),
    ({"r": True}, "r is True"),
    ({"r": "4"}, "r is '4'"),
    ({"r": 1e300}, "r is 1e"),
    ({"lora_alpha": float("nan")}, "lora_alpha is .*nan"),
    ({"lora_alpha": float("inf")}, "lora_alpha is .*inf"),
    ({"lora_alpha": [1]}, r"lora_alpha is \[1\]"),
    ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\], where it should be whole num"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern is {'q_proj': -1}"),
    ({"alpha_pattern": {"(a|.)+!" * 300: 1}}, "pattern of"),
    ({"alpha_pattern": {"(?=x)": 1}}, "cannot be matched"),
    ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {".*q_proj": 3}}, "peft of 2024"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes', where it should be true or false"),
    ({"use_dora": True}, "the config asks for DoRA"),
    ({"target_parameters": "experts"}, "target_parameters is 'experts', where it should be a list"),
    ({"peft_type": "\x1b[31mLORA"}, r"kind \\x1b"),
    ({"peft_type": None}, "does not name"),
    ({"init_lora_weights": "olora"}, "olora"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": "1,3"}, "should be a list of tokens' numbers"),
    ({"trainable_token_indices": [1, -3]}, "should be a list of tokens' numbers"),
    ({"trainable_token_indices": [True]}, "should be a list of tokens' numbers"),
    ({"trainable_token_indices": {"embed_tokens": 3}}, "should be a list of tokens' numbers"),
    ({"trainable_token_indices": [1, 1]}, "should be a list of tokens' numbers, each once"),
    ({"use_some_new_thing": True}, "use_some_new_thing=True"),
]


@pytest.mark.parametrize(("said", "why"), HOSTILE, ids=str)
def test_a_config_that_cannot_be_meant_is_refused(said, why, tmp_path):
    folder = changed("lora", tmp_path, lambda arrays: None, **said)
    with pytest.raises(FormatError, match=why):
        base_of("lora").merge(folder)


def changed(case: str, tmp_path: Path, change: Callable[[Any], Any], **said: Any) -> Path:
    """The adapter of a case, with other tensors and another config; none of the version."""
    shutil.copytree(DATA / case / "adapter", tmp_path / "changed")
    edit(tmp_path / "changed" / "adapter_model.safetensors", change)
    config_file = tmp_path / "changed" / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config.pop("peft_version", None)
    config_file.write_text(json.dumps(config | said))
    return tmp_path / "changed"


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def put(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, np.ndarray]], Any]:
    """A tensor more, or in the place of another."""
    return lambda arrays: arrays.update({name: np.ones(shape, np.float32)})


def also_factors(arrays: dict[str, np.ndarray]) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    arrays[f"{name}A"], arrays[f"{name}B"] = (np.ones(shape, "f4") for shape in [(4, 40), (16, 4)])


def head_factors(arrays: dict[str, np.ndarray]) -> None:
    name = "base_model.model.lm_head.lora_"
    shapes = {"A.weight": (4, 16), "B.weight": (40, 4)}
    arrays.update({name + end: np.ones(shape, np.float32) for end, shape in shapes.items()})


def same(arrays: dict[str, np.ndarray]) -> None:
    """No other tensors."""


def tokens(said: Any) -> dict[str, Any]:
    return {"trainable_token_indices": said}


UNFIT = "(?s)does not fit the base.*"
FAULTS: list[tuple[str, Callable[[dict[str, np.ndarray]], Any], dict[str, Any], str]] = [
    ("lora", lambda a: a.pop(f"{Q}.lora_B.weight"), {}, f"{UNFIT}q_proj has no lora_B.weight"),
    ("lora", put(f"{Q}.lora_A.weight", (3, 16)), {}, f"{UNFIT}has rank 4, and its factors have 3"),
    ("lora", put(f"{Q}.lora_A.weight", (4, 15)), {}, f"{UNFIT}not for this base"),
    ("lora", put(f"{Q}.lora_A.weight", (0,)), {}, f"{UNFIT}not gathered"),
    ("lora", lambda a: a.update({k.replace("layers.0", "layers.7"): v for k, v in a.items()}), {},
     f"{UNFIT}the base has no model.layers.7.*it has model.layers.1"),
    ("lora", put("q.lora_A.weight", (4, 16)), {}, f"{UNFIT}not a tensor of"),
    ("lora", put(f"{Q}.lora_E", (4, 16)), {}, f"{UNFIT}lora_E is not a tensor of a LoRA adapter"),
    ("lora", put(f"{Q}.lora_magnitude_vector", (16,)), {}, f"{UNFIT}asks for no DoRA"),
    ("lora", put(f"{Q}.bias", (16,)), {}, f"{UNFIT}the base has no model.layers.0.self_attn.q_proj.bias"),
    ("lora", put("base_model.model.model.embed_tokens.weight", (41, 16)), {},
     rf"{UNFIT}if tokens were added, merge the adapter into its base with peft \(merge_and_unload\)"),
    ("resized", lambda a: a.pop("base_model.model.lm_head.weight"), {},
     r"has shape \[43, 16\].*if tokens were added"),
    ("tokens", also_factors, {}, r"embed_tokens\.weight is changed twice"),
    # peft computes such a head with the new rows and the factors, and merges something else
    ("tokens_tied", head_factors, {}, r"rows of .*embed_tokens.*, which are of the tied lm_head"),
    ("tokens", same, tokens([1]), "names 1 tokens of it, up to 1"),
    ("tokens", same, tokens([1, 40]), "names 2 tokens of it, up to 40"),
    ("tokens", same, tokens(None), "names 0 tokens"),
    ("tokens", same, tokens({"wte": [1, 3]}), "names 0 tokens"),
    ("tokens", same, tokens({"embed_tokens": [1, 3], "model.embed_tokens": [1, 3]}), "names 0 tokens"),
    # peft writes so for GPT-2's head, the last module that it saw: the flag is the head's
    ("conv1d", same, {"fan_in_fan_out": False}, r"attn\.c_proj\.weight is square, .* Conv1D"),
    # it took every model's experts for such with inputs first; of another shape that is seen
    ("experts_olmoe", same, {"peft_version": "0.18.1"}, "which are square: nothing stored tells"),
    ("experts_olmoe", same, {"peft_version": "0.19.0"}, "which are square: nothing stored tells"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "said", "why"), FAULTS, ids=[why for *_, why in FAULTS])
def test_an_adapter_that_does_not_fit_its_base_is_refused_by_what_does_not(
    case, change, said, why, tmp_path
):
    with pytest.raises(FormatError, match=why):
        base_of(case).merge(changed(case, tmp_path, change, **said))


ROWS = np.ones((40, 16), np.float32)
TIED = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}


@pytest.mark.parametrize("module", TIED)
def test_of_a_head_and_an_embedding_that_are_one_the_other_stays(module, tmp_path):
    tensor = {f"base_model.model.{TIED[module]}": ROWS}
    adapter = write_adapter(tmp_path, tensor, modules_to_save=[module])
    base = base_of("embedding_tied")
    got = params(base.merge(adapter))
    (other,) = {*TIED.values()} - {TIED[module]}
    np.testing.assert_array_equal(got[TIED[module]], ROWS)
    np.testing.assert_array_equal(got[other], base.read("param/model.embed_tokens.weight"))
    assert base_of("lora").merge(adapter).read(f"param/{TIED[module]}").all()


def test_a_head_and_an_embedding_that_an_adapter_has_both_are_tied_no_more(tmp_path):
    base, names = base_of("embedding_tied"), [f"base_model.model.{name}" for name in TIED.values()]
    both = dict(zip(names, (ROWS, 2 * ROWS), strict=True))
    whole = base.merge(write_adapter(tmp_path, both, modules_to_save=[*TIED]))
    assert whole.config == {**base.config, "tie_word_embeddings": False}
    assert any("tie_word_embeddings" in note for note in whole.notes)
    exported = whole.export(tmp_path / "out", "safetensors")
    assert (exported.read("param/lm_head.weight") == 2).all()
    assert not exported.config["tie_word_embeddings"]


def with_config(case: str, tmp_path: Path, **said: Any) -> Path:
    """The base of a case, with other settings; None leaves one out."""
    base = shutil.copytree(DATA / case / "base", tmp_path / "base")
    changed_json(
        base / "config.json",
        lambda config: {k: v for k, v in {**config, **said}.items() if v is not None},
    )
    return base


@pytest.mark.parametrize("case", ["tied_saved", "tied_head", "tied_both", "tokens_tied"])
def test_a_config_that_leaves_out_that_it_ties_is_of_the_same_model(case, tmp_path):
    """Those of Gemma and GPT-2 do, because it is the default."""
    base = ucp.open(with_config(case, tmp_path, tie_word_embeddings=None, text_config={}))
    got, want = base.merge(*adapters_of(case)), merged(case)
    assert is_same(got, want)
    is_apart = not want.config["tie_word_embeddings"]
    apart = {"tie_word_embeddings": False} if is_apart else {}
    assert got.config == {**base.config, **apart, "text_config": apart}


def test_tables_of_which_an_adapter_has_the_same_tokens_are_not_of_another_number(tmp_path):
    def second_row(arrays: dict[str, np.ndarray]) -> None:
        (name,) = (name for name in arrays if "lm_head" in name)
        arrays[name] = np.repeat(arrays[name], 2, axis=0)

    tokens = {"embed_tokens": [0, 39], "lm_head": [2, 3]}
    folder = changed("tokens_bfloat16", tmp_path, second_row, trainable_token_indices=tokens)
    head = base_of("tokens_bfloat16").merge(folder).read("param/lm_head.weight")
    np.testing.assert_array_equal(head[3], params(merged("tokens_bfloat16"))["lm_head.weight"][2])


@pytest.mark.parametrize(
    "said", [{"is_encoder_decoder": True}, {"architectures": ["ModernBertForMaskedLM"]}], ids=str
)
def test_a_table_that_is_tied_under_unknown_names_is_not_replaced(said, tmp_path):
    base = ucp.open(with_config("tied_saved", tmp_path, **said))
    with pytest.raises(
        FormatError, match=r"embed_tokens.* is replaced by adapter, and what .*ties"
    ):
        base.merge(*adapters_of("tied_saved"))


def test_a_table_whose_head_is_not_known_is_not_replaced(tmp_path):
    """Mamba's `lm_head` is tied to `backbone.embeddings`."""
    (tmp_path / "base").mkdir()
    name = "backbone.embeddings.weight"
    write_safetensors(tmp_path / "base" / "model.safetensors", {name: ROWS})
    config = {"architectures": ["MambaForCausalLM"], "vocab_size": 40}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(tmp_path, {f"base_model.model.{name}": ROWS})
    with pytest.raises(FormatError, match="what MambaForCausalLM ties to it is not known"):
        ucp.open(tmp_path / "base").merge(adapter)


def test_an_embedding_is_not_changed_beside_a_head_to_which_the_config_ties_it(tmp_path):
    base = ucp.open(with_config("tokens", tmp_path, tie_word_embeddings=True))
    with pytest.raises(
        FormatError, match=r"has lm_head\.weight beside model\.embed_tokens\.weight"
    ):
        base.merge(*adapters_of("tokens"))


def test_a_square_weight_is_not_taken_for_a_conv1d_where_the_base_has_linears(tmp_path):
    """The base may be GPT-2 as bitsandbytes stores it, with outputs before inputs."""
    shapes = {"b.lora_A.weight": (2, 6), "b.lora_B.weight": (6, 2)}
    arrays = {f"base_model.model.{name}": np.ones(shape, "f4") for name, shape in shapes.items()}
    said = {"r": 2, "target_modules": ["b"], "fan_in_fan_out": True}
    adapter = write_adapter(tmp_path, arrays, **said)
    (tmp_path / "base").mkdir()
    base = {"a.weight": (12, 6), "a.bias": (12,), "b.weight": (6, 6)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in base.items()}
    write_safetensors(tmp_path / "base" / "model.safetensors", arrays)
    with pytest.raises(FormatError, match=r"b\.weight is square, .* Linear modules alone"):
        ucp.open(tmp_path / "base").merge(adapter)


UNDECIDED = {
    "square": ({"up": (2, 6, 6)}, ["up"], "which are square: nothing stored tells whether rows"),
    "two alike": ({"up": (2, 6, 8), "down": (2, 6, 8)}, ["up", "down"],
        "the parameters .*up, .*down in 2 orders, by their shapes, and nothing stored tells which"),
    "of another base": ({"up": (2, 6, 5)}, ["up"], "fit no parameters .*: the adapter is not for"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDED)
def test_experts_of_which_nothing_tells_the_axes_are_refused(name, tmp_path):
    base, targets, why = UNDECIDED[name]
    columns = base["up"][2] + (name == "of another base")
    shapes = {}
    for wrapped in ("", ".base_layer")[: len(targets)]:
        module = f"base_model.model.mlp.experts{wrapped}"
        shapes |= {f"{module}.lora_A.weight": (4, columns), f"{module}.lora_B.weight": (6, 4)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    targets = [f"experts.{target}" for target in targets]
    adapter = write_adapter(tmp_path, arrays, r=2, target_parameters=targets)
    (tmp_path / "base").mkdir()
    arrays = {f"mlp.experts.{name}": np.ones(shape, np.float32) for name, shape in base.items()}
    write_safetensors(tmp_path / "base" / "model.safetensors", arrays)
    with pytest.raises(FormatError, match=why):
        ucp.open(tmp_path / "base").merge(adapter)


def square_experts(folder: Path, up: Any, model_type: str, **config: Any) -> ucp.Checkpoint:
    """Zeros with an adapter for square experts, others with factors of so many inputs, outputs."""
    shapes = {"lora_A.weight": (4, 6), "lora_B.weight": (6, 4)}
    if up:
        shapes |= {"base_layer.lora_A.weight": (4, up[0]), "base_layer.lora_B.weight": (up[1], 4)}
    factors = {}
    for name, shape in shapes.items():
        places = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        factors[f"base_model.model.mlp.experts.{name}"] = places
    said = {"r": 2, "lora_alpha": 2, "target_parameters": ["experts.up", "experts.down"]}
    adapter = write_adapter(folder, factors, **said | config)
    (folder / "base").mkdir()
    rows = {"up": 12, "down": 6}
    arrays = {f"mlp.experts.{name}": np.zeros((2, n, 6), np.float32) for name, n in rows.items()}
    write_safetensors(folder / "base" / "model.safetensors", arrays)
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ucp.open(folder / "base").merge(adapter)


@pytest.mark.parametrize(("up", "model_type", "config", "axes"), [
    ((6, 12), "gpt_oss", {"peft_version": "0.21.2"}, "eoi"),  # by peft with transformers 4
    ((12, 6), "gpt_oss", {"peft_version": "0.21.2"}, "eio"),
    ((12, 6), "mixtral", {"peft_version": "0.19.0"}, "eio"),
    ((6, 12), "", {}, "eoi"),
    (None, "gpt_oss", {"peft_version": "0.18.1"}, "eio"),
    (None, "granitemoe", {"peft_version": "0.19.1"}, "eoi"),
])  # fmt: skip
def test_experts_that_are_square_are_as_those_beside_them_or_as_the_writer_took_them(
    up, model_type, config, axes, tmp_path
):
    targets = {} if up else {"target_parameters": ["experts.down"]}
    got = square_experts(tmp_path, up, model_type, **config, **targets)
    a = np.arange(24, dtype=np.float32).reshape(2, 2, 6)
    b = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    want = np.einsum(f"ore,eri->{axes}", b, a)
    np.testing.assert_array_equal(got.read("param/mlp.experts.down"), want)


def test_square_experts_of_gpt_oss_are_refused_where_nothing_beside_them_tells(tmp_path):
    """With transformers 4 peft 0.19.1 and later took outputs first, with 5 inputs."""
    targets = ["experts.down"]
    with pytest.raises(FormatError, match="which are square: nothing stored tells"):
        square_experts(tmp_path, None, "gpt_oss", peft_version="0.21.2", target_parameters=targets)


@pytest.mark.parametrize(("case", "words"), [
    ("saved_experts", r"the base has no model\.layers\.0\.mlp\.gate\.weight"),
    ("experts_qwen3", r"one by one: how transformers packs those of grok"),
])  # fmt: skip
def test_of_a_type_whose_names_in_memory_are_not_known_layers_are_refused(case, words, tmp_path):
    """Trained whole, one would be new, beside what it replaces; packed experts go by no rule."""
    base = shutil.copytree(DATA / case / "base", tmp_path / "base")
    changed_json(base / "config.json", lambda config: config | {"model_type": "grok"})
    with pytest.raises(FormatError, match=words):
        ucp.open(base).merge(DATA / case / "adapter")


def test_adapters_that_have_experts_packed_and_apart_are_merged_in_turn(tmp_path):
    packed = DATA / "experts_mixtral" / "adapter"
    each = DATA / "old_experts_each" / "adapter"
    for case in ("experts_mixtral", "old_experts_packed"):
        base = base_of(case)
        with pytest.raises(FormatError, match=r"one by one, and by one .* one after the other"):
            base.merge(packed, each)
        whole = base.merge(packed).merge(each)
        assert is_same(whole, whole.save(tmp_path / case))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("case", ["experts_mixtral", "old_experts_packed"])
def test_adapters_of_the_bare_model_and_of_that_with_its_head_add_up(case, order, tmp_path):
    """Experts are known by the same names, whichever model an adapter was trained on."""

    def doubled(arrays: dict[str, np.ndarray], prefix: str = "model.") -> None:
        for name in [*arrays]:
            renamed = name.replace("base_model.model.model.", f"base_model.model.{prefix}")
            arrays[renamed] = arrays.pop(name) * 2

    base, whole = base_of(case), DATA / case / "adapter"
    bare = changed(case, tmp_path / "bare", partial(doubled, prefix=""))
    same = changed(case, tmp_path / "same", doubled)
    first, second = [whole, bare][::order]
    together = base.merge(first, second)
    assert is_same(together, base.merge(*[whole, same][::order]))
    after = params(base.merge(first).merge(second))
    before, added, got = params(base), params(base.merge(whole)), params(together)
    assert got.keys() == after.keys() == before.keys()
    for name, weight in before.items():
        np.testing.assert_allclose(got[name], after[name], rtol=1e-5, atol=1e-5)
        want = weight + 5 * (added[name] - weight)  # both factors of the other are doubled
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("role", ["modules_to_save", "original_module"])
def test_what_peft_writes_beside_a_resized_module_is_called_so(role, tmp_path):
    """peft 0.21.2, `save_embedding_layers`, of a resized embedding in `modules_to_save`."""
    names = ["embed_tokens.weight", f"embed_tokens.{role}.weight"]
    tensors = {f"base_model.model.model.{name}": np.ones((41, 16), np.float32) for name in names}
    adapter = write_adapter(tmp_path, tensors, modules_to_save=["embed_tokens"])
    with pytest.raises(FormatError, match=rf"{role}\.weight is what peft writes .* merge the adap"):
        base_of("lora").merge(adapter)


def test_what_is_no_base_or_no_adapter_is_refused():
    adapter = DATA / "lora" / "adapter"
    with pytest.raises(FormatError, match="has no adapter_config"):
        base_of("lora").merge(DATA / "lora" / "base")
    with pytest.raises(FormatError, match="does not fit the base"):
        base_of("conv1d").merge(adapter)
    mapped = base_of("lora").map("hf-llama-to-tunix", assume=["rope_theta"])
    with pytest.raises(LayoutError, match="before it is mapped"):
        mapped.merge(adapter)
    with pytest.raises(ValueError, match="needs at least one adapter"):
        base_of("lora").merge()


def test_dora_and_another_adapter_of_one_weight_are_merged_one_after_the_other():
    base, adapters = base_of("dora"), [DATA / case / "adapter" for case in ("dora", "lora")]
    with pytest.raises(FormatError, match="one after the other"):
        base.merge(*adapters)
    assert base.merge(adapters[0]).merge(adapters[1]).params


def test_what_one_adapter_replaces_and_another_adds_to_is_merged_in_turn(tmp_path):
    base, adapter = base_of("lora"), DATA / "lora" / "adapter"
    factors = ucp.open(adapter).params
    module = next(name for name in factors if name.endswith(".lora_A.weight"))
    module = module.removesuffix(".lora_A.weight")
    weight = f"{module.removeprefix('base_model.model.')}.weight"
    own = np.ones_like(base.read(f"param/{weight}"))
    last = module.rpartition(".")[2]
    saved = write_adapter(tmp_path, {f"{module}.weight": own}, modules_to_save=[last])
    for adapters in ((adapter, saved), (saved, adapter)):
        with pytest.raises(FormatError, match=f"{weight} is replaced by .* one after the other"):
            base.merge(*adapters)
    np.testing.assert_array_equal(base.merge(adapter).merge(saved).read(f"param/{weight}"), own)


# Mapped, and back.


def about(case: str) -> dict[str, Any]:
    return {"config": base_of(case).config, "assume": ["rope_theta"]}


@pytest.mark.parametrize("case", ["lora", "saved_modules", "rslora_patterns", "old_torch_save"])
def test_an_adapter_goes_by_the_mapping_of_its_base_and_back_to_a_folder_of_peft(case, tmp_path):
    adapter = ucp.open(DATA / case / "adapter")
    mapped = adapter.map("hf-llama-to-tunix", **about(case))
    a = mapped.read("param/layers/0/attn/q_proj/w_lora_a")
    want = adapter.read(f"param/{Q}.lora_A.weight")
    np.testing.assert_array_equal(a, want.T)
    inverse = ucp.Mapping.load("hf-llama-to-tunix").inverse()
    saved = mapped.save(tmp_path / "saved")
    back = saved.map(inverse).export(tmp_path / "back", "safetensors")
    assert is_same(adapter, back)
    files = {path.name for path in (tmp_path / "back").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "ucp.checksums.sfv"}
    before = json.loads((DATA / case / "adapter" / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text()) == before
    assert is_same(base_of(case).merge(adapter), base_of(case).merge(back))


def test_factors_trained_in_jax_become_a_folder_of_peft_with_a_config(tmp_path):
    adapter = ucp.open(DATA / "lora" / "adapter")
    mapped = adapter.map("hf-llama-to-tunix", **about("lora"))
    base = base_of("lora").map("hf-llama-to-tunix", assume=["rope_theta"])
    tree = mapped.restore()["param"]
    whole = base.restore()["param"]
    for layer, parts in tree["layers"].items():
        for group, modules in parts.items():
            for module, factors in modules.items():
                whole["layers"][layer][group][module] |= factors
    trained = ucp.Checkpoint.of({"param": whole})
    back = trained.map(ucp.Mapping.load("hf-llama-to-tunix").inverse(), **about("lora"))
    skipped = [item for item in back.inventory if "not of the adapter" in item.reason]
    assert len(skipped) == len(base.leaves)
    config = DATA / "lora" / "adapter" / "adapter_config.json"
    exported = back.export(tmp_path / "out", "safetensors", adapter_config=config)
    assert is_same(adapter, exported)
    said = json.loads(config.read_text())
    with pytest.raises(FormatError, match="has rank 8, and its factors have 4"):
        back.plan_export("safetensors", adapter_config=said | {"r": 8})
    with pytest.raises(TreeMismatch, match="not a parameter of an adapter"):
        base_of("lora").plan_export("safetensors", adapter_config=said)
    with pytest.raises(ValueError, match="adapter_config is for safetensors"):
        back.plan_export("dcp", adapter_config=said)
    (note,) = back.plan_export("safetensors").notes
    assert "give it (adapter_config=)" in note


def test_moments_of_an_adapter_are_mapped_as_its_factors_are():
    run = ucp.open(DATA.parent / "trainers" / "small_peft" / "ckpt", optimizer_groups="hf-decay")
    states = {str(leaf.path[0]) for leaf in run.leaves}
    assert {"param", "exp_avg", "exp_avg_sq"} <= states
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    rules = ["family", "rope", "rope_theta", "activation", "bias"]
    mapped = run.map("hf-llama-to-tunix", config=config, assume=rules)
    labels = {leaf.label.partition("/")[2] for leaf in mapped.leaves}
    for label in labels:
        assert label.endswith(("_lora_a", "_lora_b"))
        moment = mapped.read(f"exp_avg/{label}")
        assert moment.shape == mapped.read(f"param/{label}").shape
    module = next(iter(run.params)).rpartition(".lora_")[0]
    a = run.read(f"exp_avg/{module}.lora_A.weight")
    layer = module.partition("layers.")[2].replace("self_attn", "attn").replace(".", "/")
    np.testing.assert_array_equal(mapped.read(f"exp_avg/layers/{layer}/w_lora_a"), a.T)


def test_the_alphas_of_factors_are_noted_where_they_are_not_those_of_all():
    adapter = ucp.open(DATA / "rslora_patterns" / "adapter")
    notes = adapter.map("hf-llama-to-tunix", **about("rslora_patterns")).notes
    (note,) = [note for note in notes if "alpha" in note]
    # 12 and 6 times the root of ranks 2, 4 and 8, and 1.5 times 2
    assert "alpha 12 for model.layers.0.self_attn.k_proj and 3 more" in note
    assert "3 for model.layers.0.self_attn.o_proj" in note
    assert "16.9706 for model.layers.0.self_attn.q_proj and 2 more" in note
    of_all = ucp.open(DATA / "lora" / "adapter").map("hf-llama-to-tunix", **about("lora"))
    assert not any("alpha" in note for note in of_all.notes)


@pytest.mark.parametrize(("said", "why"), [
    ({"init_lora_weights": "pissa"}, "'pissa': the base was changed"),
    ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens=\[3\]"),
    ({"lora_alpha": "6"}, "lora_alpha is '6'"),
])  # fmt: skip
def test_an_adapter_whose_factors_are_not_added_to_the_base_is_not_mapped(said, why, tmp_path):
    adapter = ucp.open(changed("lora", tmp_path, lambda arrays: None, **said))
    with pytest.raises(FormatError, match=why):
        adapter.map("hf-llama-to-tunix", **about("lora"))


def test_what_qwix_has_no_factors_of_is_not_mapped():
    with pytest.raises(LayoutError, match="lora_magnitude_vector"):
        ucp.open(DATA / "dora" / "adapter").map("hf-llama-to-tunix", **about("dora"))
    each = ucp.open(DATA / "old_experts_each" / "adapter")
    config = base_of("old_experts_each").config
    with pytest.raises(LayoutError, match=r"experts\.0\.w1\.lora_A.*claimed by no rule"):
        each.map("hf-mixtral-to-maxtext", config=config)


@pytest.mark.parametrize("way", ["hf-llama2-to-maxtext", "hf-llama2-to-maxtext:unscanned"])
def test_maxtexts_factors_make_what_the_merged_weights_are(way):
    base, adapter = base_of("lora"), ucp.open(DATA / "lora" / "adapter")
    ways = (one.map(way, config=base.config) for one in (adapter, base, merged("lora")))
    factors, weights, want = ways
    labels = [label for label in factors if label[-1] == "a"]
    modules = {label.removesuffix("_lora_a") for label in labels}
    assert len(modules) == (7 if way.endswith("maxtext") else 14)
    for module in modules:
        a, b = (factors.read(f"{module}_lora_{which}") for which in "ab")
        name = module.replace("param/", "param/params/")
        weight = weights.read(name)
        if a.ndim == 3:  # layers are on the second axis
            weight = np.moveaxis(weight, 1, 0)
            added = np.einsum("ilr,rlo->lio", a, b, dtype=float)
        else:
            added = a.astype(float) @ b
        got = weight + 6 / 4 * added.reshape(weight.shape)
        got = np.moveaxis(got, 0, 1) if a.ndim == 3 else got
        np.testing.assert_allclose(got, want.read(name), rtol=0, atol=1e-6)


def test_a_step_of_maxtexts_factors_alone_becomes_a_folder_of_peft(tmp_path):
    base, adapter = base_of("lora"), ucp.open(DATA / "lora" / "adapter")
    mapped = adapter.map("hf-llama2-to-maxtext", config=base.config)
    of_lora = {"lora_rank": 4, "lora_alpha": 6.0}
    run = tmp_path / "run"
    custom = {"lora": of_lora}
    mapped.save(run, root="", variables=True, step=0, item="items", custom_metadata=custom)
    assert ucp.open(run).leaves[0].label.startswith("decoder/layers/")
    about = json.loads((run / "0" / "_CHECKPOINT_METADATA").read_text())
    assert about["custom_metadata"] == {"lora": of_lora}
    inverse = ucp.Mapping.load("hf-llama2-to-maxtext").inverse()
    back = ucp.open(run).weights("").map(inverse, config=base.config)
    config = DATA / "lora" / "adapter" / "adapter_config.json"
    assert is_same(adapter, back.export(tmp_path / "out", "safetensors", adapter_config=config))


FACTORS = json.loads((DATA.parent / "mappings" / "maxtext_factors.json").read_text())
MAPPINGS = {"llama31": "llama", "gpt_oss": "gpt-oss"}


@pytest.mark.parametrize("case", FACTORS)
def test_factors_have_the_names_and_shapes_that_maxtext_gives_them(case):
    """`tests/data/mappings/maxtext_factors.json` has the leaves of MaxText's own models, of LoRA on all modules of
    the decoder with rank 4. The experts' have one A for all, which peft's have not.
    """
    model, _, variant = case.partition(":")
    base = ucp.open(DATA.parent / "maxtext" / model / "ckpt")
    mapping = f"hf-{MAPPINGS.get(model, model)}-to-maxtext{variant and ':'}{variant}"
    rng = np.random.default_rng(0)
    adapter: dict[str, np.ndarray] = {}
    for name, param in base.params.items():
        is_expert = ".experts." in name or not name.endswith(".weight")
        if is_expert or len(param.shape) != 2 or "embed_tokens" in name:
            continue
        outputs, inputs = param.shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for which, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
            adapter[f"{module}.lora_{which}.weight"] = rng.standard_normal(shape, np.float32)
    mapped = ucp.Checkpoint.of({"param": adapter}).map(mapping, config=base.config)
    found = {leaf.label.removeprefix("param/"): [*leaf.shape] for leaf in mapped.leaves}
    experts = ("wi_0", "wi_1", "wo")
    factors = FACTORS[case].items()
    of_maxtext = {n: s for n, s in factors if not n.rpartition("/")[2].startswith(experts)}
    assert found == of_maxtext
    back = mapped.map(ucp.Mapping.load(mapping).inverse(), config=base.config)
    for name, param in back.params.items():  # that of a query is scaled there and back
        np.testing.assert_allclose(param.read(), adapter[name], rtol=1e-6)
    assert back.params.keys() == adapter.keys()
