"""Folders of transformers' Trainer, accelerate and peft, and files of Lightning: one checkpoint,
optimizer included, equal to the live state; or refused with what to say.

The cases are written by `tests/generators/trainers.py`.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import commands
import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, assert_accounted_for, names_of
from jax_ucp.errors import FormatError, NotACheckpoint, SpecError
from jax_ucp.formats.huggingface.module_order import in_order_of, model_types
from jax_ucp.states.pairing import Undecided

DATA = CASES_DATA / "trainers"
CASES = names_of("trainers")
LLAMA = DATA / "small_llama" / "ckpt"


@pytest.mark.parametrize("case", CASES)
def test_lists_and_a_function_say_the_same_as_the_word(case):
    about = Case(f"trainers/{case}").about
    groups = about.get("groups")
    if groups is None:
        return
    names_given: list[str] = []

    def function(names):
        names_given.extend(names)
        return groups

    for said in (groups, function):
        checkpoint = ucp.open(DATA / case / "ckpt", optimizer_groups=said)
        assert Case(f"trainers/{case}").wrong(checkpoint) == []
        assert checkpoint.source["optimizer_groups"] == tuple(map(tuple, groups))
    assert set(names_given) == {name for group in groups for name in group}


def test_a_function_that_fails_or_makes_no_lists_is_refused():
    def fails(names):
        raise KeyError(names[0])

    with pytest.raises(SpecError, match="the function given as optimizer_groups failed: KeyError"):
        ucp.open(LLAMA, optimizer_groups=fails)
    with pytest.raises(SpecError, match="the function given as optimizer_groups returned 3"):
        ucp.open(LLAMA, optimizer_groups=lambda names: 3)  # pyright: ignore[reportArgumentType]


def test_what_the_trainer_saved_beside_is_in_the_extras():
    checkpoint = ucp.open(LLAMA)
    assert checkpoint.extras["trainer_state.json"]["state"]["global_step"] == 4
    assert checkpoint.extras["scheduler.pt"]["last_epoch"] == 4
    assert {"rng_state.pth", "training_args.bin", "optimizer.pt"} <= checkpoint.extras.keys()
    assert checkpoint.notes[0].startswith("a training checkpoint of transformers' Trainer at step")
    weights = ucp.open(LLAMA, weights_only=True)
    assert "scheduler.pt" not in weights.extras
    assert {label.partition("/")[0] for label in weights} == {"param"}


def llama(params, config, tokens):
    """Transformers' Llama, by the names of its parameters."""

    def norm(x, name):
        scale = params[f"{name}.weight"]
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def turned(x):
        half = config["head_dim"] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"

        def dense(x, name, at=at):
            return x @ params[f"{at}.{name}.weight"].T

        h = norm(x, f"{at}.input_layernorm")
        heads = (*h.shape[:2], -1, config["head_dim"])
        q, k, v = (dense(h, f"self_attn.{n}_proj").reshape(heads) for n in "qkv")
        group = q.shape[2] // k.shape[2]
        k, v = turned(k).repeat(group, 2), v.repeat(group, 2)
        scores = jnp.einsum("bthd,bshd->bhts", turned(q), k) / config["head_dim"] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + dense(mixed.reshape(*h.shape[:2], -1), "self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gated = jax.nn.silu(dense(h, "mlp.gate_proj")) * dense(h, "mlp.up_proj")
        x = x + dense(gated, "mlp.down_proj")
    return norm(x, "model.norm") @ params["lm_head.weight"].T


def next_losses(params, state, tx, config, batches):
    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            logits = llama(params, config, tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for tokens in batches:
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.slow
def test_training_that_the_trainer_began_goes_on_with_the_losses_that_torch_gives():
    measured = Case("trainers/small_llama").measured()
    tokens, want = measured["tokens"], measured["losses"]
    checkpoint = ucp.open(LLAMA, optimizer_groups="hf-decay")
    config, params = checkpoint.config, checkpoint.restore()["param"]

    # What decays is compared with the groups that the Trainer made.
    def mask(tree):
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    tx = optax.adamw(1e-2, weight_decay=0.1, mask=mask)
    state = checkpoint.plan_optimizer(tx, params).restore()
    losses = next_losses(params, state, tx, config, tokens)
    assert np.abs(losses / want - 1).max() <= 1e-5
    fresh = next_losses(params, tx.init(params), tx, config, tokens)
    assert np.abs(fresh / want - 1).max() > 1e-4


# Runs.


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run, with three steps."""
    for step in (2, 10, 4):
        at = tmp_path / "out" / f"checkpoint-{step}"
        shutil.copytree(LLAMA, at)
        (at / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path / "out"


def test_a_run_opens_as_its_last_step_or_as_the_one_that_is_asked_for(run):
    assert ucp.open(run).path == str(run / "checkpoint-10")
    checkpoint = ucp.open(run, step=4, optimizer_groups="hf-decay")
    assert checkpoint.path == str(run / "checkpoint-4")
    assert Case("trainers/small_llama").wrong(checkpoint) == []
    assert "Trainer, opened at checkpoint-4; there are checkpoint-2, " in checkpoint.notes[0]
    with pytest.raises(NotACheckpoint, match="no finished step 3; it has checkpoint-2, checkpoint"):
        ucp.open(run, step=3)
    with pytest.raises(FormatError, match="is one checkpoint, not a run with steps"):
        ucp.open(run / "checkpoint-4", step=4)


def test_a_run_with_its_final_weights_opens_as_these_or_as_a_step(run):
    shutil.copy(LLAMA / "model.safetensors", run)
    (run / "checkpoint_7").mkdir()  # of accelerate
    assert ucp.open(run).path == str(run)
    step = ucp.open(run, step=10)
    assert step.path == str(run / "checkpoint-10")
    assert step.notes[0].endswith("; not read: checkpoint_7, model.safetensors")


def test_a_last_step_that_is_unfinished_or_of_another_step_is_refused(run):
    (run / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 9}')
    with pytest.raises(FormatError, match=r"of step 9, and not 10 .*step=4 opens the one before"):
        ucp.open(run)
    (run / "checkpoint-10" / "trainer_state.json").unlink()
    with pytest.raises(FormatError, match=r"has no trainer_state.json, which the Trainer writes"):
        ucp.open(run)
    assert ucp.open(run, step=4).path == str(run / "checkpoint-4")


def test_the_command_line_takes_the_words_the_step_and_the_model(run):
    text = commands.run("inspect", run, "--step", "4", "--optimizer-groups", "hf-decay")
    assert "the two groups that" in " ".join(text.split())
    two = DATA / "accelerate_two_proof" / "ckpt"
    text = commands.run("inspect", two, "--model", "model_1")
    assert "model_1 is the model" in " ".join(text.split())


# Several models.


def test_of_several_models_one_is_chosen_by_name_and_another_name_lists_them():
    cases = {"accelerate_two_proof": "model, model_1", "student_numbered_order": "model, student"}
    for case, names in (cases | {"lightning_gan": "discriminator, generator"}).items():
        with pytest.raises(FormatError, match=rf"model='x': .*the models are: .*{names}"):
            ucp.open(DATA / case / "ckpt", model="x")
    with pytest.raises(FormatError, match="has only one model: leave out model="):
        ucp.open(LLAMA, model="model")


def test_an_optimizer_that_fits_two_models_is_neither_s_until_the_user_says_so():
    path = DATA / "student_numbered_order" / "ckpt"
    checkpoint = ucp.open(path, model="student")
    assert {label.partition("/")[0] for label in checkpoint} == {"param", "other"}
    with pytest.raises(FormatError, match=r"could be the optimizer of other tensors"):
        ucp.open(path, optimizer_groups="module-order")


# The order of the model.


@given(st.sampled_from(model_types()), st.data())
def test_the_order_does_not_depend_on_the_order_of_names(model_type, data):
    names = [
        f"{'model.' * depth}layers.{i}.{part}.weight"
        for depth in (0, 1)
        for i in (0, 1, 10, 2)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    ][:16]
    try:
        order = in_order_of(model_type, names)
    except Undecided:
        with pytest.raises(Undecided):
            in_order_of(model_type, data.draw(st.permutations(names)))
        return
    assert in_order_of(model_type, data.draw(st.permutations(names))) == order
    assert sorted(order) == sorted(names)
    layers = [name.split(".")[1] for name in order]
    assert layers == sorted(layers, key=int)


@pytest.mark.parametrize(("names", "why"), [
    (["a.weight", "b.weight"], "the order of a, b in a module is not known"),
    (["layers.0.q_proj.w", "layers.0.new.w"], "the order of new, q_proj"),
])  # fmt: skip
def test_modules_that_a_class_has_not_have_no_order(names, why):
    with pytest.raises(Undecided, match=why):
        in_order_of("llama", names)


def test_weights_of_an_unknown_class_are_refused_with_what_to_say(tmp_path):
    at = tmp_path / "ckpt"
    shutil.copytree(LLAMA, at)
    config = json.loads((at / "config.json").read_text())
    for changed in ({"model_type": "mine"}, {"auto_map": {"AutoModel": "mine.Model"}}):
        (at / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(FormatError, match="optimizer_groups does not fit: the "):
            ucp.open(at, optimizer_groups="module-order")
        said = ucp.open(at, optimizer_groups="module-order:llama")
        assert Case("trainers/small_llama").wrong(said) == []


def test_deepspeed_s_folder_in_that_of_the_trainer_has_its_state_too(tmp_path):
    Case("deepspeed/z1_bf16_dp2").copied(tmp_path / "ckpt")
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth", "config.json"):
        shutil.copy(LLAMA / name, tmp_path / "ckpt")
    checkpoint = ucp.open(tmp_path / "ckpt")
    assert checkpoint.format == "deepspeed"
    assert checkpoint.notes[0].startswith("a training checkpoint of transformers' Trainer at step")
    assert checkpoint.extras["trainer_state.json"]["state"]["global_step"] == 4
    assert checkpoint.extras["config.json"]["config"]["model_type"] == "llama"
    assert not any("trainer_state.json" in note for note in checkpoint.notes[1:])
    assert_accounted_for(checkpoint)


def test_a_broken_link_is_named_with_where_it_leads(tmp_path):
    folder = Case("trainers/small_llama").copied(tmp_path / "ckpt")
    (folder / "trainer_state.json").unlink()
    (folder / "trainer_state.json").symlink_to("gone.json")
    with pytest.raises(FormatError, match=r"trainer_state\.json is a link to .*gone\.json, where"):
        ucp.open(folder)
