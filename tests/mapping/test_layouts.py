"""Where frameworks look for parameters: a step with an item, read by stock Orbax; and the commands
around mappings.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_ucp as ucp
from commands import run, run_json
from jax_ucp.errors import FormatError, TreeMismatch

TREE = {"a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(3, np.float32)}


def test_stock_orbax_restores_the_item_of_the_step_that_a_save_added(tmp_path):
    checkpoint = ucp.Checkpoint.of({"param": TREE})
    layout = {"root": "", "variables": True, "item": "model_params"}
    for step in (0, 7):
        checkpoint.save(tmp_path / "run", step=step, **layout)
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    manager = ocp.CheckpointManager(tmp_path / "run", item_handlers=handlers)
    assert manager.all_steps() == [0, 7]
    restored = manager.restore(7, args=ocp.args.Composite(model_params=ocp.args.PyTreeRestore()))
    tree = restored["model_params"]
    np.testing.assert_array_equal(tree["a"]["w"]["value"], TREE["a"]["w"])
    np.testing.assert_array_equal(tree["b"]["value"], TREE["b"])
    with pytest.raises(FileExistsError, match="give another step"):
        checkpoint.save(tmp_path / "run", step=7, **layout)
    with pytest.raises(ValueError, match="item='x' names an item of a step: give step= too"):
        checkpoint.save(tmp_path / "other", item="x")
    assert not (tmp_path / "other").exists()


def test_parameters_have_the_root_that_is_asked_for_and_states_stay_where_they_were(tmp_path):
    checkpoint = ucp.Checkpoint.of({"param": TREE, "exp_avg": TREE})
    saved = checkpoint.save(tmp_path / "run", root="params/model", step=3, item="items")
    assert saved.path == str(tmp_path / "run" / "3" / "items")
    labels = ["exp_avg/a/w", "exp_avg/b", "params/model/a/w", "params/model/b"]
    assert sorted(saved) == labels
    np.testing.assert_array_equal(saved.read("params/model/a/w"), TREE["a"]["w"])
    with pytest.raises(TreeMismatch, match="cannot be the whole tree"):
        checkpoint.save(tmp_path / "other", root="")
    with pytest.raises(TreeMismatch, match="cannot have its parameters at"):
        checkpoint.save(tmp_path / "other", root="exp_avg")
    for root in ("//a//", "a/", "/a", "/"):
        with pytest.raises(TreeMismatch, match="has an empty name"):
            checkpoint.save(tmp_path / "other", root=root)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("verb", ["save", "link"])
def test_what_a_step_says_to_its_readers_is_read_as_maxtext_does(verb, tmp_path):
    checkpoint = ucp.Checkpoint.of({"param": TREE}).save(tmp_path / "source")
    said = {"scan_layers": False, "lora": {"lora_rank": 8, "lora_alpha": 16.0}}
    write = getattr(checkpoint, verb)
    write(tmp_path / "run", step=3, item="items", custom_metadata=said)
    # `load_checkpoint_metadata` of maxtext 0.2.5
    assert ocp.v1.checkpointables_metadata(tmp_path / "run" / "3").custom_metadata == said
    assert ucp.open(tmp_path / "run").extras["_CHECKPOINT_METADATA"] == {"custom_metadata": said}
    with pytest.raises(ValueError, match=r"custom_metadata=.* is of a step: give step= too"):
        write(tmp_path / "other", custom_metadata=said)
    for bad in ({"rate": float("nan")}, {"w": np.ones(2)}, "scan_layers"):
        with pytest.raises(ValueError, match=r"custom_metadata=.* is not JSON"):
            write(tmp_path / "other", step=0, custom_metadata=bad)
    assert not (tmp_path / "other").exists()


def test_the_command_takes_what_a_step_says(tmp_path):
    ucp.Checkpoint.of({"param": TREE}).save(tmp_path / "source")
    words = ("convert", tmp_path / "source", tmp_path / "run", "--custom-metadata")
    run(*words, '{"scan_layers": true}', "--to-step", 0)
    step = ocp.v1.checkpointables_metadata(tmp_path / "run" / "0")
    assert step.custom_metadata == {"scan_layers": True}
    for bad in ("scan_layers", "[1]"):
        assert "is not an object of JSON" in run(*words, bad, "--to-step", 1, code=2)
    assert "--custom-metadata goes with --to-step" in run(*words, "{}", code=2)


def test_a_save_that_fails_leaves_no_step(tmp_path):
    checkpoint = ucp.Checkpoint.of({"param": TREE})
    for item in ("a/b", "", "..", "_CHECKPOINT_METADATA", "commit_success.txt"):
        with pytest.raises(ValueError, match="is not a name"):
            checkpoint.save(tmp_path / "run", step=1, item=item)
    with pytest.raises(ValueError, match="step=-1"):
        checkpoint.save(tmp_path / "run", step=-1)
    assert not (tmp_path / "run" / "1").exists()


def test_a_checkpoint_is_no_run_and_an_unfinished_step_takes_no_other_item(tmp_path):
    checkpoint = ucp.Checkpoint.of({"param": TREE})
    checkpoint.save(tmp_path / "one")
    with pytest.raises(FileExistsError, match="one is a checkpoint, and no run"):
        checkpoint.save(tmp_path / "one", step=1)

    def stop(block):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(run, step=1, item="params", progress=stop)
    with pytest.raises(FileExistsError, match="another item that is not finished, params"):
        checkpoint.save(run, step=1, item="others")
    assert list(run.glob("1/*")) == []
    checkpoint.save(run, step=1, item="params")
    assert (run / "1" / "params" / "ucp.json").is_file()


@pytest.fixture
def llama(request):
    return request.path.parents[1] / "data" / "torch" / "hf_llama" / "ckpt"


def test_the_mappings_of_the_package_are_listed_and_those_that_fit_a_checkpoint(llama):
    listed = run_json("mappings")["mappings"]
    assert all(entry["model"] and entry["target"] for entry in listed)
    near = {one["name"]: one for one in run_json("mappings", llama)["mappings"]}
    fits = {name: one["fits"] for name, one in near.items()}
    others = {"hf-llama-to-maxtext": False, "hf-llama-to-tunix": False}
    assert fits == others | {"hf-llama2-to-maxtext": True}
    assert "rope_theta" in near["hf-llama-to-tunix"]["why"]


def test_a_draft_parses_and_what_it_decides_is_right(llama, tmp_path):
    tree = llama.parents[2] / "trees" / "llama-to-tunix.json"
    draft = run("map", llama, "--suggest", "--target", tree)
    rules = ucp.Mapping.parse(draft)
    shipped = ucp.Mapping.load("hf-llama-to-tunix")
    checkpoint = ucp.open(llama)
    want = checkpoint.map(shipped, assume=["rope_theta"]).restore()["param"]
    left = ucp.Mapping(rules.rules, ucp.Mapping.parse("leaves: []\nskip: rest").skips, rules.sizes)
    mapped = checkpoint.map(left)
    assert len(mapped.leaves) > 10
    for leaf in mapped.leaves:
        value = want
        for key in leaf.path[1:]:
            value = value[key.name]
        np.testing.assert_array_equal(mapped.read(leaf.label), value)
    assert "# open: axes of one length fit in 2 ways" in draft


def test_a_run_is_exported_by_the_inverse_with_its_models_config(llama, tmp_path):
    checkpoint = ucp.open(llama)
    mapped = checkpoint.map("hf-llama-to-tunix", assume=["rope_theta"])
    tree = {"model_params": mapped.restore()["param"], "step": 3}
    ucp.Checkpoint.of(tree).save(tmp_path / "run")
    words = ("--params", "model_params", "--mapping", "hf-llama-to-tunix", "--inverse")
    given = ("--config", llama, "--assume", "rope_theta")
    run("export", tmp_path / "run", tmp_path / "out", *words, *given)
    out = ucp.open(tmp_path / "out")
    assert out.config == checkpoint.config
    assert out.params.keys() == checkpoint.params.keys()
    for name, param in checkpoint.params.items():
        np.testing.assert_array_equal(out.params[name].read(), param.read())


def test_an_item_of_variables_beside_the_optimizers_is_exported_by_its_name(llama, tmp_path):
    checkpoint = ucp.open(llama)
    mapped = checkpoint.map("hf-llama-to-tunix", assume=["rope_theta"]).restore()["param"]
    items = {"model_params": mapped, "optimizer_state": {"mu": jax.tree.map(np.zeros_like, mapped)}}
    states = {name: nnx.State(jax.tree.map(nnx.Param, tree)) for name, tree in items.items()}
    step = tmp_path / "run" / "4"
    handlers = {name: ocp.PyTreeCheckpointHandler() for name in states}
    with ucp.orbax_everywhere(), ocp.CheckpointManager(step.parent, item_handlers=handlers) as run_:
        saved = {name: ocp.args.PyTreeSave(state) for name, state in states.items()}
        run_.save(4, args=ocp.args.Composite(**saved))
    for name in states:
        opened = ucp.open(step, model=name)
        assert (opened.format, opened.path) == ("universal", str(step / name))
        assert opened.source["model"] == name
        copy = opened.save(tmp_path / name)
        assert copy.source["model"] == name  # a record, and no choice of what is opened here
        for at in (step / name, tmp_path / name):
            with pytest.raises(FormatError, match="leave out model="):
                ucp.open(at, model=name)
    words = ("--params", "model_params", "--mapping", "hf-llama-to-tunix", "--inverse")
    given = ("--config", llama, "--assume", "rope_theta")
    for at in (step, step.parent):
        run("export", at, tmp_path / "out" / at.name, *words, *given)
        out = ucp.open(tmp_path / "out" / at.name)
        assert out.params.keys() == checkpoint.params.keys()
        for name, param in checkpoint.params.items():
            np.testing.assert_array_equal(out.params[name].read(), param.read())
