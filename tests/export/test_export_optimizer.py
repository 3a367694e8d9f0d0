"""From torch to optax and back: every parameter and every state, bit for bit, and by name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jax_ucp as ucp
from cases import Case
from commands import run
from helpers import differences, faults_of
from jax_ucp.errors import LayoutError
from resume_deepspeed import optimizer_of, rows_of, schedule_of, trained_in
from training_runs import ADAMW, MESH, WRAPPED, run_of, saved, trained, tree_of

DATA = Path(__file__).parents[1] / "data"
FORMATS = ["dcp", "deepspeed"]


def account_is_whole(stored: ucp.Checkpoint, back: ucp.Checkpoint) -> bool:
    """Whether each stored leaf is in the inventory once, and the mapped ones make the result."""
    told = [item.where for item in back.inventory if item.where != "ucp.json"]
    arrays = [leaf.name for leaf in stored.leaves if leaf.has_array]
    mapped = {item.where for item in back.inventory if item.status == "mapped"}
    used = {piece.file.partition("/")[0] for leaf in back.leaves for piece in back.where(leaf)}
    return sorted(told) == sorted(arrays) and mapped == used


# Precisions, optimizers, tensor parallelism with grouped heads, a gated MLP, and experts beside
# dense MLPs.
CASES = [
    "z1_fp32_dp4", "z2_bf16_dp2_bf16master", "z1_fp32_dp2_sgd", "z1_fp32_dp2_lion", "tp2_dp1_z1_fp32_gqa",
]  # fmt: skip
CASES += ["tp2_dp2_z1_bf16_swiglu", "moe_ep2_dp2_z1_bf16"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_deepspeed_comes_back_out_of_jax(case, tmp_path):
    about = Case(f"deepspeed/{case}").about
    source, sizes = ucp.open(DATA / "deepspeed" / case), rows_of(about["model"])
    rules = ucp.Mapping.load("deepspeed-gpt-to-reference")
    mapped = source.map(rules, sizes=sizes)
    step, rate = schedule_of(mapped)
    tx = optimizer_of(about, rate, trained_in(mapped))
    stored = saved(run_of(mapped, tx, MESH, step=step), tmp_path / "run")
    back = stored.torch_states(tx)
    assert account_is_whole(stored, back)
    assert faults_of(back) == []
    for format in FORMATS:
        exported = back.map(rules.inverse(), sizes=sizes).export(tmp_path / format, format)
        assert differences(source, exported) == []


@pytest.mark.parametrize("wrap", ["masked", "partition"])
@pytest.mark.parametrize("case", ["fsdp2_tp_2x2", "fsdp2_dp2_bf16_flatopt"])
def test_a_run_of_fsdp_comes_back_out_of_jax_by_its_own_names(case, wrap, tmp_path):
    source = ucp.open(DATA / "torch" / case / "ckpt")
    trained = {name for name, param in source.params.items() if "exp_avg" in param.states}
    core = WRAPPED[wrap](ADAMW)
    tx = optax.masked(core, {name: name in trained for name in source.params})
    back = saved(run_of(source, tx), tmp_path / "run").torch_states(tx)
    assert f"no state of {len(source.params) - len(trained)} parameters" in back.notes[-1]
    for format in FORMATS:
        assert differences(source, back.export(tmp_path / format, format)) == []


@pytest.mark.parametrize(("case", "counts"), [
    ("legacy_ep2_moe_seq_distopt_fp32", np.int32),
    ("dist_tp2_gqa_swiglu_qknorm_fp32", np.float32),
])  # fmt: skip
def test_a_run_of_megatron_comes_back_out_of_jax(case, counts, tmp_path):
    source = ucp.open(DATA / "megatron" / case / "ckpt")
    rules = ucp.Mapping.load("megatron-gpt-to-reference")
    tx = optax.chain(optax.clip(1.0), ADAMW)
    tree = run_of(source.map(rules), tx)
    lengths = source.map(rules).source["mapping"]["lengths"]
    states = ucp.Checkpoint.of(tree).torch_states(tx, step_dtype=counts)
    with pytest.raises(LayoutError, match="the checkpoint does not have its model's config"):
        states.map(rules.inverse(), sizes=lengths)
    back = states.map(rules.inverse(), sizes=lengths, config=source.config)
    assert differences(source, back.export(tmp_path / "out", "dcp")) == []


PROGRAM = """\
import optax

def tx():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)))

def with_model():
    import jax
    shapes = {"embed": (6, 4), "dense": {"kernel": (4, 3), "bias": (3,)}, "norm": {"scale": ()}}
    model = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return tx(), model

def nothing():
    return 3
"""
MAPPING = """\
leaves:
- param: embed
  leaf: embed
- param: dense/kernel
  axes: a b
  leaf: {dense.weight: b a}
- {param: dense/bias, leaf: dense.bias}
- {param: norm/scale, leaf: norm.weight}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's directory: a training run, the function that made its optimizer, and a mapping."""
    monkeypatch.chdir(tmp_path)
    name = f"train_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(PROGRAM)
    inverse = ucp.Mapping.parse(MAPPING).inverse().to_dict()
    Path("names.yaml").write_text(json.dumps(inverse))
    saved(tree_of(trained("adam"), WRAPPED["chain"](ADAMW)), tmp_path / "run")
    return name


@pytest.mark.parametrize("function", ["tx", "with_model"])
def test_one_command_exports_a_run(function, folder):
    options = ("--format", "dcp", "--optimizer", f"{folder}:{function}", "--mapping", "names.yaml")
    printed = run("export", "run/7/default", "out", *options)
    assert "out: 16 tensors" in printed
    want = trained("adam").map(ucp.Mapping.parse(MAPPING))
    assert differences(want, ucp.open("out")) == []


@pytest.mark.parametrize(("optimizer", "message"), [
    ("nowhere",           "nowhere is neither a path that exists nor a function; write module:function"),
    ("no_such_module:tx", "ModuleNotFoundError"),
    ("MODULE:absent",     "AttributeError"),
    ("MODULE:nothing",    "MODULE:nothing gives 3, which is not an optax optimizer"),
])  # fmt: skip
def test_an_optimizer_that_is_none_is_refused_without_a_traceback(optimizer, message, folder):
    options = ("--format", "dcp", "--optimizer", optimizer.replace("MODULE", folder))
    text = run("export", "run/7/default", "out", *options, code=1)
    assert message.replace("MODULE", folder) in text
    assert not Path("out").exists()


def test_what_is_told_of_a_run_is_printed_and_labels_are_given_by_name(folder):
    tx = WRAPPED["chain"](ADAMW)
    tree = tree_of(trained("adam"), tx)
    tree = {"model": tree["params"], "optimizer": {"state": tree["opt_state"]}, "ema": np.ones(3)}
    saved(tree, Path("other").resolve())
    labels = ("--params", "model", "--opt-state", "optimizer/state")
    options = ("--format", "deepspeed", "--mapping", "names.yaml", "--step-dtype", "int32", *labels)
    printed = run("export", "other/7/default", "out", *options, "--optimizer", f"{folder}:tx")
    assert "note: 1 arrays that are not parameters are left out, the first ema" in printed
    assert ucp.open("out").read("step/dense.weight").dtype == np.int32
    text = run("export", "other/7/default", "x", *options, code=2)
    assert "--opt-state goes with --optimizer" in text


PAGE = (DATA.parent.parent / "docs" / "export.md").read_text()


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (loop,) = re.findall(r"```python\n(from pathlib.*?)```", PAGE, re.DOTALL)
    (rules,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (command, printed), *others = re.findall(r"```\n\$ jax-ucp (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert not others
    module = f"train_{tmp_path.name.replace('-', '_')}"
    Path(f"{module}.py").write_text(f"{loop}\ntrain()\n")
    Path("names.yaml").write_text(rules)
    subprocess.run([sys.executable, f"{module}.py"], check=True, timeout=120)
    Path(f"{module}.py").write_text(loop)
    assert run(*command.replace("train:", f"{module}:").split()) == printed
    space: dict[str, Any] = {}
    exec(loop, space)
    (in_python,) = re.findall(r"```python\n(run = .*?)```", PAGE, re.DOTALL)
    exec(in_python.replace('"torch"', '"again"'), space)
    assert differences(ucp.open("torch"), ucp.open("again")) == []
    assert ucp.open("torch").params.keys() == {"embed.weight", "head.weight"}
