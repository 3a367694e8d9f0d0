"""`jax-ucp map`, and `--mapping` on the other commands."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from commands import run, run_json
from jax_ucp.inspection.mapping_report import mapping_report, tree_shapes

DATA = Path(__file__).parents[1] / "data"
LLAMA = DATA / "torch" / "hf_llama" / "ckpt"
TUNIX = DATA / "trees" / "llama-to-tunix.json"
ASSUMED = ("--assume", "rope_theta")  # which tunix has fixed at another number
TO_TUNIX = ("--mapping", "hf-llama-to-tunix", *ASSUMED)
MINE = ("--mapping", "mine.yaml", *ASSUMED)

MODEL = """\
import jax
from flax import nnx

def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")

def wrong():
    return {"embedder": {"input_embedding": array(64, 32)}, "lm_head": {"kernel": array(32, 64)},
            "layers": [{"attn": {"q_proj": {"w": array(4, 8, 32)}}}]}

def linear():
    return nnx.state(nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))))

def nothing():
    raise TypeError("no")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory of the user's own, with a model and a mapping that has a typing error."""
    monkeypatch.chdir(tmp_path)
    name = f"model_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    text = (Path(ucp.__file__).parent / "mapping" / "models" / "hf-llama-to-tunix.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("lm_head.weight", "lm_heads.weight"))
    return name


def test_a_mapping_that_fits_source_and_target_has_no_faults():
    found = run_json("map", LLAMA, *TO_TUNIX, "--target", TUNIX)
    assert (found["faults"], found["suggestions"]) == ([], [])
    assert all(leaf["shape"] == leaf["target"] for leaf in found["leaves"])
    text = run("map", LLAMA, *TO_TUNIX, "--target", TUNIX)
    assert "layers/{0,1}/attn/o_proj/w" in text
    assert "hf-llama-to-tunix.yaml: 21 leaves, 0 faults" in text


@pytest.mark.parametrize("name", ["mine.yaml ", "one, two.yaml"])
def test_a_file_that_exists_is_the_mapping_whatever_it_is_called(name, folder):
    Path(name).write_text(Path("mine.yaml").read_text().replace("lm_heads", "lm_head"))
    found = run_json("map", LLAMA, "--mapping", name, *ASSUMED, "--target", TUNIX)
    assert found["faults"] == []


def test_the_report_of_the_command_is_there_for_python(folder):
    command = run_json("map", LLAMA, *TO_TUNIX, "--target", f"{folder}:wrong", code=1)
    target = tree_shapes(importlib.import_module(folder).wrong())
    rules = ucp.Mapping.load("hf-llama-to-tunix")
    report = mapping_report(ucp.open(LLAMA), rules, target, assume=["rope_theta"])
    assert json.loads(json.dumps(report)) == command
    assert report["faults"]


def test_a_checkpoint_is_a_target_and_the_checkpoint_that_was_converted_is_one(tmp_path):
    ucp.open(LLAMA).map("hf-llama2-to-maxtext").save(tmp_path / "out")
    options = ("--mapping", "hf-llama2-to-maxtext", "--target", tmp_path / "out")
    assert run_json("map", LLAMA, *options)["faults"] == []
    (tmp_path / "tree.json").write_text(run("inspect", tmp_path / "out", "--json"))
    assert run_json("map", LLAMA, *options[:-1], tmp_path / "tree.json")["faults"] == []


def test_what_differs_from_a_model_is_told_with_the_axes_that_would_fit(folder):
    found = run_json("map", LLAMA, *TO_TUNIX, "--target", f"{folder}:wrong", code=1)
    assert "lm_head/kernel [32, 64]: in the target, but no rule forms it" in found["faults"]
    assert "lm_head/w [32, 64]: formed, but not in the target" in found["faults"]
    gives = "the rule gives [32, 4, 8], the target has [4, 8, 32]"
    turned = f"layers/0/attn/q_proj/w: {gives}; `heads head_dim embed` would fit"
    assert turned in found["faults"]


def test_what_no_rule_claims_gets_a_name_with_as_many_elements(folder):
    found = run_json("map", LLAMA, *MINE, "--target", f"{folder}:wrong", code=1)
    assert any("lm_heads.weight finds no parameter" in fault for fault in found["faults"])
    assert any("lm_head.weight [64, 32]: claimed by no rule" in fault for fault in found["faults"])
    (suggestion,) = found["suggestions"]
    best = "perhaps lm_head/kernel [32, 64], which has as many elements"
    assert suggestion == f"lm_head.weight [64, 32] -> {best}"
    text = run("map", LLAMA, *MINE, code=1)
    rule = "perhaps the rule for lm_heads.weight, which finds nothing, is meant"
    assert f"lm_head.weight [64, 32] -> {rule}" in text


def test_what_is_skipped_is_shown_with_its_reason(folder):
    rules = ucp.Mapping.load("hf-llama-to-tunix").to_dict()
    rules["leaves"] = [rule for rule in rules["leaves"] if "lm_head.weight" not in rule["param"]]
    rules["skip"] = [{"param": "lm_head.weight", "reason": "the head is tied"}]
    Path("tied.yaml").write_text(json.dumps(rules))
    ((where, reason),) = run_json("map", LLAMA, "--mapping", "tied.yaml", *ASSUMED)["skipped"]
    assert where.endswith(":lm_head.weight")
    assert reason == "the head is tied"
    text = run("map", LLAMA, "--mapping", "tied.yaml", *ASSUMED)
    assert re.search(r":lm_head\.weight +the head is tied", text)


def test_layers_that_no_rule_claims_are_one_suggestion(folder):
    rules = ucp.Mapping.load("hf-llama2-to-maxtext").to_dict()
    rules["leaves"] = [
        rule for rule in rules["leaves"] if not any("up_proj" in name for name in rule["param"])
    ]
    Path("partial.yaml").write_text(json.dumps(rules))
    ucp.open(LLAMA).map("hf-llama2-to-maxtext").save("whole")
    found = run_json("map", LLAMA, "--mapping", "partial.yaml", "--target", "whole", code=1)
    name, _, meant = found["suggestions"][0].partition(" -> perhaps ")
    assert name == "model.layers.{n}.mlp.up_proj.weight (2 of [48, 32])"
    assert meant == "params/decoder/layers/mlp/wi_1/kernel [32, 2, 48], which has as many elements"


def test_a_flax_variable_is_called_by_the_name_of_its_module(folder, tmp_path):
    from jax_ucp.cli.map import target_shapes

    assert target_shapes(f"{folder}:linear") == {"kernel": (3, 2), "bias": (2,)}


@pytest.mark.parametrize(("target", "message"), [
    (":",                   ": gives no tree: ValueError: Empty module name"),
    ("nowhere",             "nowhere is neither a path that exists nor a function; write module:function"),
    ("no_such_module:tree", "no_such_module:tree gives no tree: ModuleNotFoundError"),
    ("MODEL:absent",        "MODEL:absent gives no tree: AttributeError"),
    ("MODEL:nothing",       "MODEL:nothing gives no tree: TypeError: no"),
    ("bad.json",            "bad.json is not what `inspect --json` prints"),
])  # fmt: skip
def test_a_target_that_is_none_is_refused_without_a_traceback(target, message, folder):
    Path("bad.json").write_text('{"leaves": [1]}')
    target, message = target.replace("MODEL", folder), message.replace("MODEL", folder)
    assert message in run("map", LLAMA, *TO_TUNIX, "--target", target, code=1)


def test_a_mapping_is_asked_for_and_refused_by_name():
    text = run("map", LLAMA, code=2)
    assert "give --mapping: a file, or one of deepspeed-gpt-to-reference, deepspeed-gpt2-to" in text
    text = run("inspect", LLAMA, "--mapping", "nothing", code=1)
    assert "nothing is not a mapping that can be read" in text


def test_the_other_commands_see_the_leaves(tmp_path):
    options = ("--mapping", "hf-llama2-to-maxtext")
    found = run_json("inspect", LLAMA, *options)
    label = "param/params/decoder/layers/self_attention/out/kernel"
    (leaf,) = [leaf for leaf in found["leaves"] if leaf["leaf"] == label]
    assert leaf["shape"] == [4, 2, 8, 32]
    assert leaf["stored"][1]["to"] == "[0:4, 1:2, 0:8, 0:32]"
    assert "embed (heads head_dim)" in leaf["stored"][1]["rule"]
    assert "moments are left out" in run("plan", LLAMA, *options, "--mesh", "data=2")
    assert "0 faults" in run("verify", LLAMA, *options)
    run("convert", LLAMA, tmp_path / "out", *options)
    want = ucp.open(LLAMA).map(options[1]).read(label)
    np.testing.assert_array_equal(ucp.open(tmp_path / "out").read(label), want)
    source = run_json("inspect", tmp_path / "out")["source"]
    assert source["mapping"]["name"] == "hf-llama2-to-maxtext.yaml"


def test_a_length_is_given_by_name():
    options = ("map", LLAMA, "--size", "kv_heads=2", "--size", "heads=4")
    assert run_json(*options, *TO_TUNIX)["faults"] == []
    wrong = run_json(*options[:2], "--size", "heads=5", *TO_TUNIX, code=1)["faults"]
    assert any("with heads = 5 (given in sizes)" in fault for fault in wrong)
