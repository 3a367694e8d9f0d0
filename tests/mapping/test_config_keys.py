"""No key of a config changes what a model computes without a mapping that reads it.

`tests/data/configs/moves.json` has what `generators/config_moves.py` measured in transformers 4 and
5: which changes of a config move the logits of a model, among all keys that its class has or that
any code reads. A mapping refuses each of them, unless it follows the key (its sizes name it), or
`docs/mappings.md` lists it as one that must be set in the model. What moves nothing is accepted,
whatever it says.
"""

import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

import jax_ucp as ucp
from config_changes import ABSENT, CASES, DATA, ONE_STYLE, SINCE_5, changed, v4_style
from jax_ucp.errors import LayoutError
from jax_ucp.mapping.binding import bind, outcomes
from jax_ucp.mapping.rules import shipped
from jax_ucp.shard_spec.expressions import names_in

# `.ci/writers` names the table that it measured with the newest transformers.
PATH = os.environ.get("UCP_CONFIG_MOVES", DATA / "configs" / "moves.json")
MOVES = json.loads(Path(PATH).read_text())
HUB = json.loads((DATA / "configs" / "hub.json").read_text())
DOCS = Path(__file__).parents[2] / "docs" / "mappings.md"
MAPPINGS = [name for name in shipped() if name.startswith("hf-")]
PAIRS = [(case, mapping) for case, mappings in CASES.items() for mapping in mappings]
# The Flax model of transformers 4 reads config.json itself (`modeling_flax_gpt2.py`).
READ_BY_FLAX = {"activation_function", "layer_norm_epsilon", "n_head", "num_attention_heads"}
# Gemma's own releases say gelu and mean the approximation with tanh: so `GemmaConfig.__post_init__`
# of transformers 5, and 4 until it read `hidden_act` again.
MEANT = {
    "hf-gemma-to-tunix": {"hidden_act": "gelu"},
    "hf-gemma-7b-to-tunix": {"hidden_act": "gelu"},
    "hf-gemma-to-maxtext": {"hidden_act": "gelu"},
}


@cache
def loaded(name):
    return ucp.Mapping.load(name)


@cache
def must_be_set(mapping):
    """The keys that the table of the page lists for the mapping's target."""
    if mapping.endswith("-to-flax"):
        return READ_BY_FLAX
    table = DOCS.read_text().split("**What you must set in the model.**")[1].split("\n\n")[1]
    lines = [row.split("|")[1:-1] for row in table.split("\n")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    (column,) = [i for i, cell in enumerate(header) if cell.lower() == mapping.rpartition("-")[2]]
    return {key for row in rows if row[column] for key in re.findall(r"`(\w+)`", row[0])}


@cache
def shapes_and_config(case):
    checkpoint = ucp.open(DATA / case / "ckpt")
    return {name: param.shape for name, param in checkpoint.params.items()}, checkpoint.config


def fault(case, mapping, config):
    """Why a mapping refuses the model with this config; empty where it does not."""
    shapes, _ = shapes_and_config(case)
    rotary = "maxtext/llama2", "maxtext/qwen3", "maxtext/qwen3_moe"
    assumed = ["rope_theta"] if case in rotary else []
    names = [one.name for one in loaded(mapping).requires if one.name in assumed]
    for outcome in outcomes(loaded(mapping), config, names):
        if outcome.state == "unmet":
            return str(outcome)
    try:
        bind(loaded(mapping), shapes, {}, config, names)
    except LayoutError as error:
        return str(error)
    return ""


def differing(old, new):
    """The names of what differs; of dicts, of what they hold."""
    if not (isinstance(old, dict) or isinstance(new, dict)):
        return set()
    old, new = ({} if one is None or one == ABSENT else one for one in (old, new))
    keys = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    inner = {key for key in keys if isinstance(old.get(key) or new.get(key), dict)}
    return (keys - inner).union(*(differing(old.get(key), new.get(key)) for key in inner))


def runs(case):
    """Each run of a model: what it found, and the config that it changed."""
    _, config = shapes_and_config(case)
    for run, found in MOVES[case].items():
        yield found, v4_style(config) if run.endswith("v4") else config


@pytest.mark.parametrize(("case", "mapping"), PAIRS)
def test_what_moves_logits_is_refused_or_must_be_set(case, mapping):
    followed = set().union(*map(names_in, loaded(mapping).sizes.values()))
    accepted = []
    for found, config in runs(case):
        assert fault(case, mapping, config) == ""
        for change in found["moved"]:
            if change == MEANT.get(mapping):
                continue
            new = changed(config, change)
            left = differing(config, new) - followed - must_be_set(mapping)
            if left and not fault(case, mapping, new):
                accepted.append(change)
    assert accepted == []


@pytest.mark.parametrize(("case", "mapping"), PAIRS)
def test_what_moves_nothing_is_accepted_whatever_it_says(case, mapping):
    every = [found for found, _ in runs(case)]
    changes = [change for found in every for change in found["moved"] + found["failed"]]
    tried = {key for change in changes for key in change}
    same = {key for found in every for key in found["same"]}
    ignored = same - tried - loaded(mapping).config_keys
    assert len(ignored) > 10
    for _, config in runs(case):
        for value in (ABSENT, None, True, 7, "other", ["other"]):
            assert fault(case, mapping, changed(config, dict.fromkeys(ignored, value))) == ""


def test_every_mapping_of_hugging_face_was_tried():
    assert {mapping for _, mapping in PAIRS} == set(MAPPINGS)
    assert MOVES.keys() == CASES.keys()
    for case, found in MOVES.items():
        styles = 1 if case in ONE_STYLE else 2 if case in SINCE_5 else 3
        wanted = ["5v5", "5v4", "4v4"][:styles]
        assert [run.split()[0][0] + run.split()[1] for run in found] == wanted, case


@pytest.mark.parametrize("name", HUB)
def test_the_config_of_a_release_meets_the_mappings_of_its_model(name):
    config = HUB[name]["config"]
    states = {m: {one.state for one in outcomes(loaded(m), config)} for m in MAPPINGS}
    met = [mapping for mapping, found in states.items() if found <= {"met"}]
    assert met == sorted(HUB[name]["fits"])
