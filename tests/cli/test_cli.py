"""The command line: what it prints, what it exits with, and that it never shows a traceback."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp
from commands import invoke, run, run_json
from helpers import flip_bit
from safetensors_writer import write_safetensors

CASE = Path(__file__).parents[1] / "data" / "deepspeed" / "z2_bf16_dp3"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("cli") / "out"
    run("convert", CASE, target)
    return target


def test_a_conversion_verifies_and_holds_what_the_source_holds(converted):
    assert "0 faults" in run("verify", converted)
    checks = run_json("verify", converted)
    assert checks["faults"] == []
    assert checks["checks"] > 100
    source, target = ucp.open(CASE), ucp.open(converted)
    for leaf in source.leaves:
        np.testing.assert_array_equal(source.read(leaf.label), target.read(leaf.label))


def test_inspect_says_first_what_people_ask_first():
    checkpoint = ucp.open(CASE)
    lines = run("inspect", CASE).splitlines()
    elements = sum(math.prod(parameter.shape) for parameter in checkpoint.params.values())
    assert lines[0].startswith(f"{checkpoint.path}: ")
    assert f"parameters  {len(checkpoint.params)}, {elements:,} elements, float32" in lines
    assert any(re.match(r"optimizer   exp_avg float32 of \d+, exp_avg_sq", line) for line in lines)
    assert any(re.match(r"  group     of \d+: .*weight_decay", line) for line in lines)


def test_inspect_says_which_settings_of_the_optimizer_are_on():
    lines = run("inspect", CASE.parents[1] / "torch/fsdp2_dp2_amsgrad/ckpt").splitlines()
    settings = "lr 0.01, betas [0.9, 0.95], eps 0.0001, amsgrad True, decoupled_weight_decay True"
    assert f"settings    {settings}" in lines


def test_inspect_says_of_a_tree_that_was_in_memory_that_it_is_universal(tmp_path):
    ucp.Checkpoint.of({"w": np.ones(3)}).save(tmp_path / "c")
    assert run("inspect", tmp_path / "c").splitlines()[0] == f"{tmp_path / 'c'}: universal"


def test_inspect_says_the_mesh_once_and_keys_are_keys(tmp_path):
    axes = ("replica", "data", "stage", "model")
    mesh, other = jax.make_mesh((1, 2, 1, 2), axes), jax.make_mesh((4,), ("x",))
    placed = NamedSharding(mesh, PartitionSpec("data", "model"))
    weights = {f"w{i}": jax.device_put(np.ones((4, 4)), placed) for i in range(3)}
    key = jax.random.key(0)
    tree = {"layers": weights, "rng": key, "keys": jax.random.split(jax.random.key(1))}
    ucp.Checkpoint.of(tree).save(tmp_path / "one")
    printed = run("inspect", tmp_path / "one")
    assert "saved on    data=2, model=2, 2 axes of length 1\n" in printed
    assert re.search(r"layers/w\{0..2\} +\[4, 4\] +float32 +data,model +x3", printed)
    assert re.search(r"^rng +\[\] +key threefry2x32$", printed, re.MULTILINE)
    assert re.search(r"^keys +\[2\] +key threefry2x32$", printed, re.MULTILINE)
    assert "2 key threefry2x32" in printed
    tree["wide"] = jax.device_put(np.ones(4), NamedSharding(other, PartitionSpec("x")))
    ucp.Checkpoint.of(tree).save(tmp_path / "two")
    printed = run("inspect", tmp_path / "two")
    assert "saved on" not in printed
    assert "x on x=4" in printed
    assert "data,model on data=2, model=2, 2 axes of length 1" in printed


def test_inspect_folds_the_layers_of_a_model():
    text = run("inspect", CASE)
    assert re.search(r"layers\.\{0,1\}\.mlp\.dense_h_to_4h\.weight +\[24, 16\].* x2 *$", text, re.M)
    assert "layers.1.mlp" not in text
    heads = [line for line in run("inspect", CASE, "--files").splitlines() if "parameter " in line]
    assert "stored in" in heads[0]
    assert "stored in" not in text


def test_inspect_has_a_row_for_each_parameter_whatever_the_order_of_its_states(tmp_path):
    one, two = np.ones((3, 4), np.float32), np.ones(2, np.int32)
    tree = {"exp_avg": {"w": one}, "param": {"w": one.astype(np.float16)}, "step": {"count": two}}
    ucp.Checkpoint.of(tree).save(tmp_path / "c")
    lines = [line.rstrip() for line in run("inspect", tmp_path / "c").splitlines()]
    assert "parameter  shape   dtype    other states" in lines
    assert "w          [3, 4]  float16" in lines
    assert "count      [2]     int32    step int32" in lines


def test_inspect_all_lists_every_parameter_in_full_and_the_account(converted):
    text = run("inspect", CASE, "--all")
    for name in ucp.open(CASE).params:
        assert name in text
    assert "skipped" in text
    assert "compared with it by verify" in text
    found = run_json("inspect", CASE)
    assert {item["status"] for item in found["inventory"]} == {"mapped", "extra", "skipped"}
    mapped = [item for item in found["inventory"] if item["status"] == "mapped"]
    assert found["items"]["mapped"] == len(mapped)
    source = run_json("inspect", converted)["source"]
    assert (source["format"], source["name"], source["step"]) == ("deepspeed", "global_step5", 5)
    assert "universal, imported from global_step5 (DeepSpeed 0.19.8" in run("inspect", converted)
    assert "lr_scheduler" in run("inspect", CASE, "--all")


def test_inspect_shows_where_the_bytes_of_a_leaf_lie():
    text = run("inspect", CASE, "--leaf", "^param/layers.0.self_attention.query_key_value.weight$")
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in text
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in text
    assert "single_partition_of_fp32_groups/0" in text


def test_help_has_one_whole_line_for_each_command():
    _, _, commands = run("--help").partition("Commands:\n")
    assert len(commands.splitlines()) == 12
    assert all(line.endswith(".") and "..." not in line for line in commands.splitlines())


def test_help_of_many_options_has_sections_with_what_people_give_first():
    printed = run("convert", "--help")
    titles = re.findall(r"^(\w.*):$", printed, re.MULTILINE)
    first = ["Options", "For a framework's own loader", "A mesh", "Your model"]
    assert titles == [*first, "What the files do not say", "Several processes"]
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)", printed.partition("Options:")[2], re.MULTILINE)
    assert options[:5] == ["--mapping", "--mesh", "--step", "--weights-only", "--dequantize"]
    assert len(options) == len(set(options))
    assert "Your model" not in run("mappings", "--help")


def test_a_wide_table_in_a_pipe_has_no_blanks_between_columns():
    llama = CASE.parents[1] / "torch" / "hf_llama" / "ckpt"
    printed = run("map", llama, "--mapping", "hf-llama2-to-maxtext")
    assert "leaf  its axes  parameters: axes  shape\n" in printed
    assert "   " not in printed.partition("requires")[0]


def test_plan_moves_nothing_and_says_what_would_be_moved(tmp_path):
    found = run_json("plan", CASE, tmp_path / "out", "--budget", "64KiB")
    assert not (tmp_path / "out").exists()
    assert found["write_bytes"] == found["bytes"] == ucp.open(CASE).nbytes
    assert found["peak_bytes_in_flight"] <= 64 << 10
    assert all(item["status"] != "mapped" for item in found["not_mapped"])


def test_the_copy_that_is_believed_is_the_parameter():
    found = run_json("inspect", CASE, "--on-conflict", "copy")
    params = [leaf for leaf in found["leaves"] if leaf["leaf"].startswith("param/")]
    assert {leaf["dtype"] for leaf in params} == {"bfloat16"}
    assert "the copy is taken, as asked" in found["notes"][0]


def test_plan_shows_a_mesh_without_having_its_devices():
    rule = "--rule", r"h_to_4h\.weight$=data,model"
    found = run_json("plan", CASE, "--mesh", "data=64,model=4", *rule)["restore"]
    assert found["devices"] == 256
    (leaf,) = [x for x in found["leaves"] if x["leaf"] == "param/layers.0.mlp.dense_h_to_4h.weight"]
    assert leaf["spec"] == [None, "model"]
    assert leaf["device_shape"] == [24, 4]
    assert leaf["notes"] == ["axis 0 of 24 is not cut over data: 24 does not divide by 64"]
    rule = ("--rule", r"h_to_4h\.weight=data,model")
    text = run("plan", CASE, "--mesh", "data=64,model=4", *rule)
    assert re.search(r"^6 +axis 0 of 24 is not cut over data: .* param/layers\.0\.mlp", text, re.M)
    assert "given up" not in run("plan", CASE, "--mesh", "data=64,model=4")


def test_plan_has_one_line_for_the_states_of_a_parameter(tmp_path):
    text = run("plan", CASE)
    (line,) = re.findall(r"^layers\.\{0,1\}\.mlp\.dense_h_to_4h\.weight .*", text, re.M)
    assert line.split()[1:] == ["[24,", "16]", "float32", "1", "x2"]
    assert "param, exp_avg, exp_avg_sq of" in text
    assert "and 30 scalars" in text
    assert "lr_scheduler" not in text
    assert "lr_scheduler" in run("plan", CASE, "--inventory")
    assert "exp_avg_sq/layers.1.mlp.dense_h_to_4h.weight" in run("plan", CASE, "--all")


def test_a_rule_for_a_numpy_array_is_said_not_to_put_it_on_the_mesh(tmp_path):
    ucp.Checkpoint.of({"w": np.ones((4, 4)), "b": np.ones(4)}).save(tmp_path / "c")
    found = run_json("plan", tmp_path / "c", "--mesh", "x=2", "--rule", "w=x")["restore"]
    b, w = sorted(found["leaves"], key=lambda leaf: leaf["leaf"])
    assert (b["notes"], w["spec"]) == ([], [])
    assert "a numpy array, which no rule puts on the mesh" in w["notes"][0]
    mesh = jax.make_mesh((1,), ("x",))
    checkpoint = ucp.open(tmp_path / "c")
    with pytest.warns(ucp.errors.ShardingWarning, match="w: a numpy array, which no rule"):
        tree = checkpoint.restore(mesh=mesh, rules=[("w", PartitionSpec("x"))])
    assert isinstance(tree["w"], np.ndarray)


def test_a_conversion_for_a_mesh_is_read_there_without_a_byte_in_vain(tmp_path):
    want = np.random.default_rng(0).normal(size=(2048, 512)).astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"kernel": want})
    mesh = ("--mesh", "data=2,model=32", "--rule", "kernel$=data,model", "--hosts", 32)
    run("convert", tmp_path / "model.safetensors", tmp_path / "any")
    text = run("convert", tmp_path / "any", tmp_path / "cut", *mesh, "--rule", "nothing=data")
    assert "note: the rule 'nothing' matches no leaf" in text
    np.testing.assert_array_equal(ucp.open(tmp_path / "cut").read("param/kernel"), want)
    any_, cut = (run_json("plan", tmp_path / name, *mesh)["restore"] for name in ("any", "cut"))
    assert len(cut["hosts"]) == 32
    assert {host["needed_bytes"] for host in any_["hosts"]} == {want.nbytes // 32}
    assert any_["amplification"] > cut["amplification"] == 1.0
    assert all(host["read_bytes"] == host["needed_bytes"] for host in cut["hosts"])
    assert any_["balance"] == cut["balance"] == 1.0
    (planned,) = run_json("plan", tmp_path / "any", tmp_path / "new", *mesh)["leaves"]
    files = list((tmp_path / "cut" / "param.kernel").glob("c.*"))
    assert len(files) == want.size // math.prod(planned["outer_chunk"])
    text = run("plan", tmp_path / "cut", *mesh)
    assert "all hosts: read / needed 1.000, most / mean 1.000" in text
    assert re.search(r"^\{0\.\.31\} +128\.0 KiB +128\.0 KiB +1\.000", text, re.M)


def test_a_damaged_checkpoint_fails_verification_with_the_file(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "damaged")
    flip_bit(tmp_path / "damaged" / "param.head.bias" / "c.0", 10)
    found = run_json("verify", tmp_path / "damaged", code=1)
    assert len(found["faults"]) == 1
    assert "param.head.bias" in found["faults"][0]
    assert "param.head.bias" in run("verify", tmp_path / "damaged", code=1)


@pytest.mark.parametrize(("command", "message"), [
    (("inspect", "nothing/there"),  "nothing/there does not exist"),
    (("verify", "."),               "is not a checkpoint of a format known here"),
    (("convert", "nothing", "out"), "nothing does not exist"),
    (("plan", __file__),            "is not a checkpoint of a format known here"),
])  # fmt: skip
def test_a_path_of_nothing_is_refused_without_a_traceback(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in run(*command, code=1)


def test_a_target_in_use_is_refused_and_left_alone(converted, tmp_path):
    before = (converted / "ucp.json").read_bytes()
    assert "is a checkpoint already" in run("convert", CASE, converted, code=1)
    assert (converted / "ucp.json").read_bytes() == before
    (tmp_path / "mine.txt").write_text("keep")
    assert "has files in it" in run("convert", CASE, tmp_path, code=1)
    assert "is a file; give a path" in run("convert", CASE, tmp_path / "mine.txt", code=1)
    assert "mine.txt" in run("convert", CASE, tmp_path / "mine.txt" / "below", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_installed_command_works_without_jax_devices_or_torch(tmp_path):
    program = "import sys; sys.modules['torch'] = None; from jax_ucp.cli.main import main; main()"
    command = [sys.executable, "-c", program, "convert", str(CASE), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "120 arrays" in done.stdout


@pytest.mark.parametrize("content", ["[]", "{}", '{"tree_metadata": {"a": {}}}', "not json"])
def test_metadata_of_another_form_are_refused_without_a_traceback(content, tmp_path):
    (tmp_path / "_METADATA").write_text(content)
    assert f"{tmp_path}" in run("inspect", tmp_path, code=1)


@pytest.mark.parametrize("command", ["convert", "export"])
def test_how_far_it_is_can_be_lines_of_json(command, tmp_path, monkeypatch):
    monkeypatch.setattr("jax_ucp.cli.output.LINE_S", 0)
    source = Path(__file__).parents[1] / "data" / "torch" / "hf_llama" / "ckpt"

    def lines(*options: str) -> list[dict]:
        done = invoke(command, source, tmp_path / "out", "--progress", "json", *options)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]

    shares = [lines("--worker", f"{i}/2") for i in range(2)]
    shutil.rmtree(tmp_path / "out")
    whole = lines()
    assert len(whole) > 2
    total = whole[-1]["bytes"]
    assert 0 < total == whole[-1]["of"]
    assert [line["bytes"] for line in whole] == sorted(line["bytes"] for line in whole)
    assert sum(lines[-1]["bytes"] for lines in shares) == total
    assert [lines[-1]["of"] for lines in shares] == [lines[-1]["bytes"] for lines in shares]
    assert [lines[-1]["share"] for lines in shares] == [[0, 2], [1, 2]]
