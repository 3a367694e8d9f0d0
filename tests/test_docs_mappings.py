"""The walk through `docs/adding-a-family.md`: its files, its commands, the logits at its end; and
what `docs/mappings.md` says of conditions and lists.
"""

import json
import re
import shutil
from math import erf
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case
from commands import run
from jax_ucp.mapping.rules import shipped
from jax_ucp.shard_spec.expressions import condition

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "adding-a-family.md").read_text()
TABLES = (DOCS / "mappings.md").read_text()
CASE = ROOT / "tests" / "data" / "torch" / "gpt_neox"
(MODEL,) = re.findall(r"```python\n(import jax\n.*?)```", PAGE, re.DOTALL)
DRAFT, WHOLE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```\n\$ jax-ucp (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MODEL)
    Path("draft.yaml").write_text(DRAFT)
    Path("gpt-neox.yaml").write_text(WHOLE)
    shutil.copytree(CASE / "ckpt", "pythia")


@pytest.mark.parametrize(("command", "printed"), COMMANDS)
def test_the_commands_print_what_the_page_shows(command, printed, folder):
    shown = re.compile(r"fault: |suggestion: |\S+\.yaml: \d+ leaves")
    lines = [line for line in run(*command.split(), code=1).splitlines() if shown.match(line)]
    assert sorted(lines) == sorted(printed.splitlines())


def test_the_mapping_that_the_page_ends_with_gives_the_logits_of_the_original(folder):
    text = WHOLE.replace("layer embed heads head_dim}", "layer heads head_dim embed}")
    assert text != WHOLE
    Path("right.yaml").write_text(text)
    printed = run("map", "pythia", "--mapping", "right.yaml", "--target", "my_model:tree")
    assert "20 leaves, 0 faults" in printed
    checkpoint = ucp.open("pythia")
    tree = checkpoint.map("right.yaml").restore()["param"]
    config = checkpoint.extras["config.json"]["config"]
    measured = Case(str(CASE)).measured()
    tokens, want = measured["tokens"], measured["logits"]
    assert np.abs(logits(tree, config, tokens) - want).max() <= 1e-5 * np.abs(want).max()
    attention = tree["layers"]["attention"]
    attention["query"], attention["key"] = attention["key"], attention["query"]  # of one shape
    assert np.abs(logits(tree, config, tokens) - want).max() > 1e-3 * np.abs(want).max()


def test_the_conditions_that_the_page_shows_are_conditions():
    (shown,) = re.findall(r"```\n(requires:\n.*?)```", TABLES, re.DOTALL)
    mapping = ucp.Mapping.parse(shown + "leaves: [{param: a, leaf: b}]")
    assert [requirement.name for requirement in mapping.requires] == ["rope", "window"]
    checks = [one.that for one in mapping.requires]
    checks += ['hidden_act in ["silu", "swish"]', "not attention_bias"]
    for text in (*checks, "not first(tie_word_embeddings, false)"):
        assert text in TABLES
        condition(text)


def test_the_page_names_every_mapping_of_the_package():
    assert set(re.findall(r"`([\w.-]+-to-[\w-]+)`", TABLES)) == set(shipped())
    assert "gpt-neox" not in json.dumps(shipped())


def logits(tree, config, tokens):
    """GPT-NeoX with stacked layers, attention and multilayer perceptron side by side."""
    layers = tree["layers"]
    x = tree["embed"][tokens].astype(np.float64)
    for i in range(config["num_hidden_layers"]):
        own = layers["attention"].items()
        a = {name: {key: array[i] for key, array in p.items()} for name, p in own}
        h = norm(x, layers["input_norm"]["scale"][i], layers["input_norm"]["bias"][i])
        own = (a[name] for name in ("query", "key", "value"))
        q, k, v = (np.einsum("bte,ehd->bthd", h, p["kernel"]) + p["bias"] for p in own)
        q, k = rotated(q, config), rotated(k, config)
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("bhts,bshd->bthd", weights, v)
        attended = np.einsum("bthd,hde->bte", out, a["out"]["kernel"]) + a["out"]["bias"]
        after = layers["post_attention_norm"]
        h = norm(x, after["scale"][i], after["bias"][i])
        up = h @ layers["up"]["kernel"][i] + layers["up"]["bias"][i]
        up = up * (1 + np.vectorize(erf)(up / np.sqrt(2))) / 2
        x = x + attended + up @ layers["down"]["kernel"][i] + layers["down"]["bias"][i]
    return norm(x, tree["final_norm"]["scale"], tree["final_norm"]["bias"]) @ tree["head"]


def norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def rotated(x, config):
    """The first half of each head's features rotated, halves of it together."""
    rope = config["rope_parameters"]
    turned = int(x.shape[-1] * rope["partial_rotary_factor"])
    half = turned // 2
    angle = np.arange(x.shape[1])[:, None] * rope["rope_theta"] ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:turned]) * np.exp(1j * angle)[None, :, None, :]
    return np.concatenate([pairs.real, pairs.imag, x[..., turned:]], -1)
