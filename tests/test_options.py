"""Every option and path that is given is used, or refused, or a note says it changed nothing."""

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from commands import every_command, invoke, run
from helpers import memory, mesh_of
from jax_ucp.arguments import local_path
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import SpecError, UnsupportedPath
from jax_ucp.files import remote
from jax_ucp.files.local import LocalFiles
from jax_ucp.shard_spec.notation import parse

DATA = Path(__file__).parent / "data"
DEEPSPEED = DATA / "deepspeed" / "tp2_dp2_z1_fp32"
MEGATRON = DATA / "megatron" / "legacy_tp2_pp1_bf16" / "ckpt"
MEGATRON_DIST = DATA / "megatron" / "dist_tp2_pp1_bf16" / "ckpt"
SAFETENSORS = DATA / "torch" / "hf_llama" / "ckpt"
DCP = DATA / "torch" / "fsdp2_tp_2x2" / "ckpt"
TORCH = DATA / "torch" / "torchsave" / "trainer.pt"
MESH = mesh_of(4, 2)


@pytest.fixture
def tree() -> ucp.Checkpoint:
    states = "param", "exp_avg", "exp_avg_sq"
    moments = {name: {"w": np.ones((8, 4), np.float32)} for name in states}
    return memory({**moments, "step": {"w": np.float32([3]).reshape(())}})


@pytest.fixture(scope="module")
def universal(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("universal") / "saved"
    args = ucp.args.Save({"w": np.ones((8, 4)), "step": 3})
    ocp.Checkpointer(ucp.CheckpointHandler()).save(path, args=args)
    return path


# Paths.

URLS = ["ftp://host/x", "hdfs:/host/x"]
BUCKETS = ["s3://bucket/x", "gs:/bucket/x", "HTTPS://host/x.safetensors", "hf://org/model"]
TREE = {"w": np.ones(3)}
DOORS: dict[str, Callable[[Any], object]] = {
    "open": ucp.open,
    "save": lambda url: ucp.Checkpoint.of(TREE).save(url),
    "plan_save": lambda url: ucp.Checkpoint.of(TREE).plan_save(path=url),
    "link": lambda url: ucp.Checkpoint.of(TREE).link(url),
    "export": lambda url: ucp.Checkpoint.of({"param": TREE}).export(url, "dcp"),
    "spec": lambda url: ucp.open(DEEPSPEED, spec=url),
    "mapping": ucp.Mapping.load,
    "map": lambda url: ucp.Checkpoint.of({"param": TREE}).map(url),
    "handler": lambda url: ucp.CheckpointHandler().save(url, ucp.args.Save(TREE)),
    "handler restore": lambda url: ucp.CheckpointHandler().restore(url),
    "directory": LocalFiles,
}
COMMANDS: dict[str, Callable[[str], tuple]] = {
    "inspect":            lambda url: ("inspect", url),
    "plan":               lambda url: ("plan", url),
    "plan to":            lambda url: ("plan", DEEPSPEED, url),
    "convert":            lambda url: ("convert", url, "out"),
    "convert to":         lambda url: ("convert", DEEPSPEED, url),
    "convert --mesh to":  lambda url: ("convert", DEEPSPEED, url, "--mesh", "x=2"),
    "link":               lambda url: ("link", url, "out"),
    "link to":            lambda url: ("link", DEEPSPEED, url),
    "export":             lambda url: ("export", url, "out", "--format", "dcp"),
    "export to":          lambda url: ("export", DEEPSPEED, url, "--format", "dcp"),
    "export --optimizer": lambda url: ("export", DEEPSPEED, "out", "--format", "dcp", "--optimizer", url),
    "verify":             lambda url: ("verify", url),
    "map":                lambda url: ("map", url, "--mapping", "hf-gpt2-to-flax"),
    "--mapping":          lambda url: ("map", SAFETENSORS, "--mapping", url),
    "--target":           lambda url: ("map", SAFETENSORS, "--mapping", "hf-llama-to-tunix", "--target", url),
    "--spec":             lambda url: ("inspect", DEEPSPEED, "--spec", url),
    "inspect --mapping":  lambda url: ("inspect", SAFETENSORS, "--mapping", url),
}  # fmt: skip


LOCAL_DOORS = ["spec", "mapping", "map", "directory"]
LOCAL_OPTIONS = ["export --optimizer", "--mapping", "--spec", "inspect --mapping"]


PATHS = [(door, kind(url), "is a URL") for door in DOORS for url in URLS for kind in (str, Path)]
PATHS += [(door, path, "names no file") for door in DOORS for path in ("", "a\0b")]
LOCAL_ONLY = "here a local file or folder is needed"
PATHS += [(door, url, LOCAL_ONLY) for door in LOCAL_DOORS for url in BUCKETS]


@pytest.mark.parametrize(("door", "path", "words"), PATHS, ids=repr)
def test_a_path_that_cannot_be_meant_is_refused(door, path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedPath, match=words):
        DOORS[door](path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["hdfs://bucket/x", "ftp:/bucket/x"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_is_refused_by_every_command_with_a_true_message(command, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run(*COMMANDS[command](url), code=1)
    assert f"{url} is a URL" in text
    assert "does not exist" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in LOCAL_OPTIONS])
def test_a_store_that_does_not_answer_is_one_message(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    text = run(*COMMANDS[command]("hf://org/model"), code=1)
    assert "hf://org/model" in text.replace("\n", "")
    assert list(tmp_path.iterdir()) == []


def test_home_and_file_urls_are_local_paths(tmp_path, monkeypatch, tree):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for said in (f"file://{tmp_path}/a%20b", "~/home", f"file://localhost{tmp_path}/local"):
        np.testing.assert_array_equal(tree.save(said).read("param/w"), tree.read("param/w"))
        np.testing.assert_array_equal(ucp.open(said).read("param/w"), tree.read("param/w"))
    with pytest.raises(UnsupportedPath, match="file://host/x is a URL"):  # of another machine
        ucp.open("file://host/x")
    # A folder that is really called so is given by its absolute path.
    kept = tree.save(tmp_path / "s3:" / "x")
    np.testing.assert_array_equal(kept.read("param/w"), tree.read("param/w"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "home", "local", "s3:"]


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9+.-]{1,8}:/{1,3}[a-z./%]{0,9}", fullmatch=True))
def test_whatever_looks_like_a_url_is_one_also_when_pathlib_was_at_it(url):
    for path in (url, Path(url)):
        if not url.lower().startswith("file:"):
            with pytest.raises(UnsupportedPath):
                local_path(path)


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
        lambda s: ":/" not in s
    )
)
def test_any_other_path_is_taken_as_it_is(text):
    if not text.startswith("~"):
        assert local_path(text) == Path(text)


# Sizes.

NOT_SIZES = [0, -1, 101.0, True, "101", None, [101], np.float32(101)]


SIZED: dict[str, Callable[[Any], object]] = {
    "deepspeed": lambda n: ucp.open(DEEPSPEED, sizes={"vocab": n}),
    "megatron": lambda n: ucp.open(MEGATRON, sizes={"vocab": n}),
    "torch_dist": lambda n: ucp.open(MEGATRON_DIST, sizes={"vocab": n}),
    "a mapping": lambda n: ucp.open(SAFETENSORS).map("hf-llama-to-tunix", sizes={"heads": n}),
}


@pytest.mark.parametrize("door", SIZED)
@pytest.mark.parametrize("n", NOT_SIZES, ids=repr)
def test_a_size_that_is_no_length_is_refused_by_its_name(door, n):
    name = "heads" if door == "a mapping" else "vocab"
    with pytest.raises(SpecError, match=rf"sizes: {name}=.* should be a whole number"):
        SIZED[door](n)


@pytest.mark.parametrize(("path", "known"), [
    (DEEPSPEED, "the names it takes are vocab; perhaps vocab is meant"),
    (MEGATRON_DIST, "the names it takes are vocab; perhaps vocab is meant"),
    (MEGATRON, r"the names it takes are .*, expert_ffn, ffn, .*, vocab; perhaps vocab is meant"),
    (SAFETENSORS, "it records all lengths itself"),
    (DCP, "it records all lengths itself"),
    (TORCH, "it records all lengths itself"),
    (DATA / "deepspeed" / "z1_bf16_dp2", "it records all lengths itself"),
    ("universal", "it records all lengths itself"),
], ids=str)  # fmt: skip
def test_a_size_that_the_checkpoint_has_no_use_for_is_refused_with_the_names_it_takes(
    path, known, universal
):
    path = universal if path == "universal" else path
    with pytest.raises(SpecError, match=f"has no use for vocabulary in sizes: {known}"):
        ucp.open(path, sizes={"vocabulary": 101})
    text = run("inspect", path, "--size", "vocabulary=101", code=1)
    assert "has no use for vocabulary in sizes" in text


@pytest.mark.parametrize("path", [DEEPSPEED, MEGATRON, MEGATRON_DIST])
def test_the_size_that_is_named_in_the_refusal_is_taken(path):
    (name,) = {param for param in ucp.open(path).params if param.endswith("word_embeddings.weight")}
    for n in (101, np.int64(101)):
        assert ucp.open(path, sizes={"vocab": n}).params[name].shape[0] == 101


def test_every_name_that_a_spec_takes_changes_what_it_says():
    """A size that the spec itself computes is none of them: its number would not be looked at."""
    text = """
sizes: {rows: heads * dim, dim: dim // 2}
shards:
- {param: a, pattern: {fused: {axis: 0, parts: {q: rows, k: width}}}}
- {param: b, when: gated, pattern: replicated}
- {param: c, when: not gated, pattern: {sharded: 0}}
"""
    spec = parse(text)
    assert spec.lengths == {"heads", "dim", "width"}
    assert spec.switches == {"gated"}


def test_a_switch_of_a_spec_may_be_off(tmp_path):
    """`when` asks whether something is there: 0 is an answer."""
    parameters = json.loads((DEEPSPEED / "case.json").read_text())["parameters"]
    padded = {"sharded": 0, "padded": {"axis": 0, "to": "vocab"}}
    kinds = {"vocab": padded, "replicated": "replicated"}
    kinds |= {"column": {"sharded": 0}, "row": {"sharded": 1}}
    patterns = [(p["name"], kinds[p["layout"]["kind"]]) for p in parameters]
    rules = [{"param": n, "pattern": p, "when": "not gated"} for n, p in patterns]
    (tmp_path / "mine.yaml").write_text(json.dumps({"shards": rules}))
    checkpoint = ucp.open(DEEPSPEED, spec=tmp_path / "mine.yaml", sizes={"vocab": 101, "gated": 0})
    assert len(checkpoint.params) == len(parameters)


def test_a_spec_may_be_a_python_object():
    patterns = ucp.patterns
    parameters = json.loads((DEEPSPEED / "case.json").read_text())["parameters"]
    column = patterns.Sharded(0)
    kinds = {"vocab": patterns.Padded(column, 0, 101), "replicated": patterns.Replicated()}
    kinds |= {"column": column, "row": patterns.Sharded(1)}
    spec = ucp.Spec.of({p["name"]: kinds[p["layout"]["kind"]] for p in parameters})
    want = ucp.open(DEEPSPEED, sizes={"vocab": 101})
    got = ucp.open(DEEPSPEED, spec=spec)
    assert got.leaves == want.leaves
    assert all(same_bits(got.read(label), want.read(label)) for label in want)
    with pytest.raises(SpecError, match=r"does not use a spec: leave out the spec of \d+ rules"):
        ucp.open(SAFETENSORS, spec=spec)


@pytest.mark.parametrize(
    "said",
    ["vocab=0", "vocab=-1", "vocab=101.0", "vocab=\xb2", "vocab=", "=3", "vocab=" + "9" * 30],
)
def test_the_command_refuses_what_is_no_size(said):
    refused = invoke("inspect", MEGATRON, "--size", said)
    assert refused.exit_code in (1, 2)
    assert re.search("vocab=50257|should be a whole number", refused.output)


def test_the_command_refuses_two_lengths_of_one_name():
    text = run("inspect", MEGATRON, "--size", "vocab=101", "--size", "vocab=102", code=2)
    assert "gives vocab twice: 101 and 102" in text
    run("inspect", MEGATRON, "--size", "vocab=101", "--size", "vocab=101")


def test_a_size_may_be_for_the_mapping_or_for_the_checkpoint_or_for_neither():
    mapping = ("--mapping", "hf-llama-to-tunix", "--assume", "rope_theta")
    run("inspect", SAFETENSORS, *mapping, "--size", "heads=4")
    text = run("inspect", SAFETENSORS, *mapping, "--size", "haeds=4", code=1)
    assert "the names it takes are embed, head_dim, heads" in text


# A spec where none is used, copies where there are none.


@pytest.mark.parametrize("path", [SAFETENSORS, DCP, TORCH, MEGATRON_DIST, "universal"], ids=str)
def test_a_spec_is_refused_where_the_checkpoint_says_itself_how_it_is_stored(
    path, tmp_path, universal
):
    (tmp_path / "mine.yaml").write_text("shards: [{param: '*', pattern: replicated}]")
    path = universal if path == "universal" else path
    with pytest.raises(SpecError, match=r"does not use a spec: leave out the spec .*mine\.yaml"):
        ucp.open(path, spec=tmp_path / "mine.yaml")


NOT_MEANT: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "on_conflict='both' should be 'master' or 'copy'": (lambda: ucp.open(SAFETENSORS, on_conflict="both"), ValueError),
    "sizes has the name 1, which is not a string": (lambda: ucp.open(SAFETENSORS, sizes={1: 2}), SpecError),
    r"is not a pattern; those are in jax_ucp\.pattern": (lambda: ucp.Spec.of({"*.weight": "sharded"}), SpecError),
    "a brace": (lambda: ucp.Spec.of({"{": ucp.patterns.Unique()}), SpecError),
}  # fmt: skip


@pytest.mark.parametrize("words", NOT_MEANT)
def test_what_is_no_value_of_an_option_is_refused(words):
    call, error = NOT_MEANT[words]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "path", [SAFETENSORS, DCP, TORCH, DATA / "deepspeed" / "z0_fp32_dp2"], ids=lambda p: p.name
)
@pytest.mark.parametrize("on_conflict", ["master", "copy"])
def test_a_note_says_where_there_is_nothing_to_believe(path, on_conflict):
    plain, told = ucp.open(path), ucp.open(path, on_conflict=on_conflict)
    unused = f"nothing is stored twice here, so that on_conflict={on_conflict!r} changes nothing"
    assert [note for note in told.notes if note not in plain.notes] == [unused]
    assert told.leaves == plain.leaves


# Switches.


@pytest.mark.parametrize("value", ["no", "False", 0, 2, None])
@pytest.mark.parametrize("name", ["weights_only", "partial", "share_reads", "narrow_integers"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(name, value):
    opened = partial(ucp.open, SAFETENSORS)
    call = opened if name == "weights_only" else opened().restore
    with pytest.raises(ValueError, match=f"{name}={value!r} should be True or False"):
        call(**{name: value})


# Numbers.

NOT_BYTES = [0, -1, 1e9, True, "1GiB", None]
BUDGETED: dict[str, Callable[[ucp.Checkpoint, Any, Path], object]] = {
    "restore": lambda tree, n, out: tree.restore(budget_bytes=n),
    "save": lambda tree, n, out: tree.save(out, budget_bytes=n),
    "plan_save": lambda tree, n, out: tree.plan_save(n),
    "export": lambda tree, n, out: tree.export(out, "dcp", budget_bytes=n),
    "plan_export": lambda tree, n, out: tree.plan_export("dcp", budget_bytes=n),
    "plan_optimizer": lambda tree, n, out: tree.plan_optimizer(optax.adam(1e-3),
        {"w": jax.ShapeDtypeStruct((8, 4), np.float32)}).restore(mesh=MESH, budget_bytes=n),
    "handler": lambda tree, n, out: ucp.CheckpointHandler(n),
}  # fmt: skip


@pytest.mark.parametrize("n", NOT_BYTES, ids=repr)
@pytest.mark.parametrize("door", BUDGETED)
def test_a_budget_is_a_number_of_bytes(door, n, tree, tmp_path):
    with pytest.raises(ValueError, match=r"budget_bytes=.* should be a whole number, at least 1"):
        BUDGETED[door](tree, n, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    BUDGETED[door](tree, 1, tmp_path / "out")


@pytest.mark.parametrize("n", [n for n in NOT_BYTES if n is not None], ids=repr)
def test_a_budget_of_arguments_for_orbax_is_a_number_of_bytes_or_none(n, universal):
    with pytest.raises(ValueError, match=r"budget_bytes=.* should be a whole number"):
        ucp.args.Save(TREE, budget_bytes=n)
    with pytest.raises(ValueError, match=r"budget_bytes=.* should be a whole number"):
        ucp.CheckpointHandler().restore(universal, ucp.args.Restore(budget_bytes=n))


@pytest.mark.parametrize(("options", "words"), [
    ({"mesh": {"data": 0}}, "the mesh axis data=0 should be a whole number"),
    ({"mesh": {"data": 2.5}}, "the mesh axis data=2.5 should be a whole number"),
    ({"mesh": {"data": -4}}, "the mesh axis data=-4 should be a whole number"),
    ({"mesh": "data=4"}, "should be a mesh of JAX, or the sizes of its axes"),
    ({"mesh": {"data": 1 << 40}}, "at most 16777216 are planned for"),
    ({"mesh": {"data": 4}, "hosts": 0}, "hosts=0 should be a whole number"),
    ({"mesh": {"data": 4}, "hosts": 2.0}, "hosts=2.0 should be a whole number"),
    ({"mesh": {"data": 4}, "hosts": 3}, "4 devices cannot be shared out evenly to 3 hosts"),
    ({"mesh": MESH, "hosts": 3}, "8 devices cannot be shared out evenly to 3 hosts"),
    ({"mesh": {"data": 4}, "rules": [("(", P("data"))]}, "is not a regular expression"),
    ({"mesh": {"data": 4}, "rules": ["w"]}, "is not a pair"),
    ({"mesh": {"data": 4}, "rules": [("w", 3)]}, "is not a pair"),
    ({"mesh": {"data": 4}, "rules": [(None, P("data"))]}, "is not a pair"),
], ids=str)  # fmt: skip
def test_meshes_hosts_and_rules_that_cannot_be_meant_are_refused(options, words, tree, tmp_path):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        tree.plan_save(**options)
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        tree.save(tmp_path / "out", **options)
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        tree.plan_reads(**options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"hosts": 2}, {"rules": [("w", P("data"))]}], ids=str)
def test_hosts_and_rules_are_refused_without_a_mesh(options, tree, tmp_path):
    for call in (tree.plan_save, tree.report, partial(tree.save, tmp_path / "out")):
        with pytest.raises(ValueError, match="give mesh= too"):
            call(**options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "words"), [
    ({"rules": [("w", P("data"))]},  "give mesh= too"),
    ({"rules": ["w"], "mesh": MESH}, "is not a pair"),
    ({"rules": {"w": P()}, "mesh": MESH}, "is not a pair"),
    ({"rules": ("w", P()), "mesh": MESH}, "is not a pair"),
    ({"rules": [("(", P())], "mesh": MESH}, r"the rule '\(' is not a regular expression"),
    ({"mesh": {"data": 8}},          r"should be a jax\.sharding\.Mesh"),
    ({"mesh": "data=4"},             r"should be a jax\.sharding\.Mesh"),
    ({"partial": True},              "there is no target"),
    ({"cast": True},                 "there is none; give a dtype"),
    ({"cast": None},                 "give a floating dtype"),
    ({"cast": "bf16"},               "give a floating dtype"),
    ({"cast": "int8"},               "give a floating dtype"),
], ids=str)  # fmt: skip
def test_arguments_of_a_restore_that_cannot_be_meant_are_refused(options, words, tree):
    for call in (tree.restore, tree.plan):
        with pytest.raises(ValueError, match=words):
            call(**options)


def test_a_rule_that_a_plan_of_reads_does_not_use_is_in_its_notes(tree):
    notes = tree.plan_reads(MESH, rules=[("nothing", P("data"))]).notes
    assert notes == ["the rule 'nothing' matches no leaf"]


@pytest.mark.parametrize(("format", "options", "words"), [
    ("dcp",         {"max_shard_bytes": 10},  "max_shard_bytes is for safetensors"),
    ("deepspeed",   {"max_shard_bytes": 10},  "max_shard_bytes is for safetensors"),
    ("safetensors", {"max_shard_bytes": 0},   "max_shard_bytes=0 should be a whole number"),
    ("safetensors", {"max_shard_bytes": 1e9}, "max_shard_bytes=1000000000.0 should be a whole number"),
    ("safetensors", {"zero_stage": 1},        "zero_stage is for deepspeed"),
    ("dcp",         {"zero_stage": 1},        "zero_stage is for deepspeed"),
    ("deepspeed",   {"zero_stage": 0},        "zero_stage=0 should be a whole number"),
    ("deepspeed",   {"zero_stage": 4},        "zero_stage=4 is not a stage of ZeRO"),
    ("dcp",         {"like": {}},             "like is for megatron"),
    ("megatron",    {"dtype": "bfloat16"},    "dtype is not for megatron"),
    ("torch",       {},                       "format='torch' is not one that is written"),
    ("dcp",         {"dtype": "bf16"},        "'bf16' is not a floating dtype"),
    ("dcp",         {"dtype": "int8"},        "'int8' is not a floating dtype"),
], ids=str)  # fmt: skip
def test_arguments_that_are_not_for_an_export_are_refused(format, options, words, tree, tmp_path):
    with pytest.raises((ValueError, TypeError), match=words):
        tree.plan_export(format, **options)
    with pytest.raises((ValueError, TypeError), match=words):
        tree.export(tmp_path / "out", format, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_note_says_whether_a_dtype_casts_anything(tree):
    (note, *_) = tree.plan_export("dcp", dtype="bfloat16").notes
    assert note.startswith("floating parameters are cast to bfloat16")
    assert tree.plan_export("dcp", dtype="float32").notes[0].startswith("no parameter is cast")


# The command line.

WRONG: list[tuple[tuple[object, ...], int, str]] = [
    (("convert", SAFETENSORS), 2, "Missing argument 'TARGET'"),
    (("verify", SAFETENSORS, "--on-conflict", "me"), 2, "'me' is not one of 'master', 'copy'"),
    (("mappings", "--config", "config.json"), 2, "--config goes with SOURCE"),
    (("report", SAFETENSORS, "--hosts", 2), 2, "give --mesh too"),
    (("report", SAFETENSORS, "--rename", "a=b"), 2, "--rename is for --against"),
    (("inspect", SAFETENSORS, "--leaf", "nothing"), 1,
     "no leaf of .* matches 'nothing'; it has 21, such as param/"),
    (("inspect", SAFETENSORS, "--leaf", "q_proj", "--all"), 2, "give one of them"),
    (("inspect", SAFETENSORS, "--leaf", "(("), 2, "is not a regular expression"),
    (("inspect", DEEPSPEED, "--spec", "/nothing.yaml"), 1, "/nothing.yaml cannot be read as a spec"),
    (("inspect", SAFETENSORS, "--spec", "/nothing.yaml"), 1, "does not use a spec"),
    (("plan", SAFETENSORS, "--hosts", 2), 2, "give --mesh too"),
    (("plan", SAFETENSORS, "--rule", "weight=x"), 2, "give --mesh too"),
    (("convert", SAFETENSORS, "out", "--hosts", 2), 2, "give --mesh too"),
    (("plan", SAFETENSORS, "--rule", "kernel"), 2, "is not a rule"),
    (("plan", SAFETENSORS, "--rule", "(=data"), 2, "is not a regular expression"),
    (("convert", SAFETENSORS, "out", "--rule", "kernel=data"), 2, "give --mesh too"),
    (("plan", SAFETENSORS, "--budget", "much"), 2, "is not a size"),
    (("plan", SAFETENSORS, "--mesh", "data:4"), 2, "is not a mesh"),
    (("plan", SAFETENSORS, "--mesh", ""), 2, "is not a mesh"),
    (("plan", SAFETENSORS, "--mesh", "x=0"), 2, "is not a mesh"),
    (("plan", SAFETENSORS, "--mesh", "x=2,x=2"), 2, "is not a mesh"),
    (("plan", SAFETENSORS, "--mesh", "x=999999999,y=9"), 2, "at most 16777216"),
    (("plan", SAFETENSORS, "--mesh", "x=8", "--hosts", 3), 2, "cannot be shared out evenly"),
    (("plan", SAFETENSORS, "--budget", "0"), 2, "is not a size"),
    (("plan", SAFETENSORS, "--budget", "0.00001"), 2, "is not a size"),
    (("plan", SAFETENSORS, "--budget", "9" * 400), 2, "is not a size"),
    (("plan", SAFETENSORS, DATA), 1, "has files in it that are not those of an unfinished copy"),
    (("export", SAFETENSORS, "out", "--format", "dcp", "--max-shard", "1MB"), 2,
     "--max-shard is for --format safetensors"),
    (("export", SAFETENSORS, "out", "--format", "dcp", "--zero-stage", 1), 2,
     "--zero-stage is for --format deepspeed"),
    (("export", SAFETENSORS, "out", "--format", "deepspeed", "--zero-stage", 4), 2, "not in the range"),
    (("export", SAFETENSORS, "out", "--format", "dcp", "--like", SAFETENSORS), 2,
     "--like is for --format megatron"),
    (("export", SAFETENSORS, "out", "--params", "x"), 1, "has nothing at 'x'; it has param"),
    (("export", SAFETENSORS, "out", "--format", "dcp", "--opt-state", "x"), 2,
     "--opt-state goes with --optimizer"),
    (("export", SAFETENSORS, "out", "--format", "dcp", "--step-dtype", "int32"), 2,
     "--step-dtype goes with --optimizer"),
    (("export", SAFETENSORS, "out", "--forward"), 2, "--forward go with --mapping"),
    (("export", SAFETENSORS, "out", "--mapping", "hf-llama-to-maxtext", "--forward", "--inverse"), 2,
     "--forward goes with neither --inverse nor --optimizer"),
    (("convert", SAFETENSORS, "out", "--to-step", 1, "--item", "a/b"), 1, "item='a/b' is not a name: it has a slash"),
    (("map", SAFETENSORS), 2, "give --mapping"),
    (("map", SAFETENSORS, "--mapping", "nothing"), 1, "is not a mapping that can be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "words"),
    WRONG,
    ids=lambda x: " ".join(map(str, x[2:])) if type(x) is tuple else "",
)
def test_options_of_a_command_that_are_not_used_are_refused(
    command, code, words, tmp_path, monkeypatch
):

    monkeypatch.chdir(tmp_path)
    text = run(*command, code=code)
    assert re.search(words, " ".join(text.split())), text
    assert list(tmp_path.iterdir()) == []


def test_rules_and_axes_that_are_not_used_are_printed_by_plan_and_convert(tmp_path):
    mesh = ("--mesh", "x=8", "--rule", "nothing=x", "--rule", r"embed_tokens\.weight$=modle")
    for words in (("plan", SAFETENSORS), ("convert", SAFETENSORS, tmp_path / "out")):
        text = " ".join(run(*words, *mesh).split())
        assert "the rule 'nothing' matches no leaf" in text
        assert "not cut over modle: the mesh has no such axis" in text


# Of each option of functions and commands, by its name, what happens where it would change nothing:
# it always changes something, or is refused there or noted there, or is harmless, and why.
USED = """
against args budget budget_bytes check context dry_run executor first format headers json_ launcher
module optimizer output path progress root sample_above scheduler second source target to_step tx
variables workers
"""
REFUSED = """
adapter_config adapters all_ assume cast config custom_metadata files forward hosts inventory inverse
item leaf like mapping max_shard max_shard_bytes merge missing model opt_state optimizer_groups params
partial rules share sizes spec step step_dtype suggest zero_stage
"""
NOTED = "dtype mesh on_conflict"
HARMLESS = {
    "checksum": "a link that has them is verified by them",
    "dequantize": "weights that are not quantised come as they are",
    "narrow_integers": "integers that JAX has as they are stay so",
    "no_dequantize": "weights that are not quantised come as they are",
    "only": "leaves that nothing matches are left out, and the count says so",
    "rename": "a beginning that no label has renames none, and both then differ",
    "share_reads": "in one process, or where no array is held by several, each reads its own",
    "snapshot_bytes": "on CPU nothing is copied",
    "verify": "nothing is stored twice there, nor has a checksum",
    "weights_only": "there is no optimizer to leave aside",
}
FUNCTIONS = (
    ucp.open, ucp.diff, ucp.args.Save, ucp.args.Restore, ucp.CheckpointHandler, ucp.handler_registry,
    ucp.orbax_context,
)  # fmt: skip
METHODS = (
    "merge", "map", "plan", "restore", "plan_optimizer", "torch_states", "plan_reads", "plan_save", "save",
    "plan_link", "link", "plan_export", "export",
)  # fmt: skip


def test_what_becomes_of_every_option_is_decided():
    calls = [*FUNCTIONS, *(getattr(ucp.Checkpoint, name) for name in METHODS)]
    found = {name for call in calls for name in inspect.signature(call).parameters} - {"self"}
    found |= {option.name for command in every_command().values() for option in command.params}
    decided = [*USED.split(), *REFUSED.split(), *NOTED.split(), *HARMLESS]
    assert sorted(decided) == sorted(found)
