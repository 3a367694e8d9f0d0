"""What newer releases of Megatron-Core write, and trainers on it that write no args.

`tests/generators/megatron_core.py` wrote the cases.
"""

import functools
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_ucp as ucp
import megatron_decoder as decoder
from cases import DATA as CASES_DATA
from cases import Case
from jax_ucp.errors import FormatError
from jax_ucp.files.path import file_path
from jax_ucp.formats.megatron import dist_flat
from jax_ucp.formats.megatron.dist_run import run_fields
from jax_ucp.formats.megatron.model import in_module_order

DATA = CASES_DATA / "megatron_core"


def opened(case: str, path: Path | None = None, **options) -> ucp.Checkpoint:
    return Case(f"megatron_core/{case}").open(path, **options)


def test_a_folder_of_nemo_and_the_only_one_in_a_folder_of_them_open(tmp_path):
    step = tmp_path / "checkpoints" / "run--step=3-last"
    step.mkdir(parents=True)
    shutil.copytree(DATA / "mla" / "ckpt" / "iter_0000003", step / "weights")
    (step / "context").mkdir()
    for path in (step, step.parent, step / "weights"):
        assert Case("megatron_core/mla").wrong(opened("mla", path)) == []


def test_the_tokenizer_that_megatron_saves_beside_the_tensors_is_accounted_for(tmp_path):
    """As main of 22 August 2026 does, empty where there are no files of one."""
    case = Case("megatron_core/pa_buckets")
    folder = case.copied(tmp_path / "c") / "iter_0000003" / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = case.open(tmp_path / "c")
    [item] = [item for item in checkpoint.inventory if item.where == "tokenizer"]
    assert (item.what, item.status) == ("folder", "skipped")
    assert case.wrong(checkpoint) == []


def test_halves_of_masters_whose_order_is_not_proved_are_refused(monkeypatch):
    """As where both orders of modules have the sizes that are stored."""
    fits = ([SimpleNamespace(buffer=order)] for order in itertools.count())
    monkeypatch.setattr(dist_flat, "placed_buffers", lambda *_: next(fits))
    with pytest.raises(FormatError, match=r"several orders.*weights_only"):
        opened("pa")


def test_a_place_in_the_order_of_modules_is_known_or_refused():
    for name in ("mixer.in_proj.weight.householder", "cross_attention.linear_q.weight"):
        with pytest.raises(FormatError, match=rf"where .*{name} lies"):
            in_module_order([f"decoder.layers.0.{name}"], True, False)


def test_where_nothing_is_stored_the_run_had_one_rank(tmp_path):
    fields = run_fields(file_path(tmp_path), {}, [])
    assert fields["tensor_model_parallel_size"] == fields["pipeline_model_parallel_size"] == 1


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.slow
@pytest.mark.parametrize("case", ["mla", "pa", "pa_full"])
def test_the_next_losses_are_those_of_torch(case):
    """Also that another moment gives others."""
    want = json.loads((DATA / case / "losses.json").read_text())
    restored = opened(case).restore()
    assert next_losses(restored) == pytest.approx(want, rel=1e-5)
    restored["exp_avg"] = {name: -moment for name, moment in restored["exp_avg"].items()}
    assert next_losses(restored)[0] == pytest.approx(want[0], rel=1e-5)
    assert next_losses(restored)[1:] != pytest.approx(want[1:], rel=1e-3)


LOSS = jax.jit(jax.value_and_grad(functools.partial(decoder.loss, jnp)))


def next_losses(restored: dict) -> list[float]:
    """The losses of a run in JAX that goes on from a restored checkpoint."""
    params = jax.tree.map(jnp.asarray, restored["param"])
    masked = {name: decoder.decays(name, array.ndim) for name, array in params.items()}
    how = {"weight_decay": decoder.DECAY, "mask": masked}
    tx = optax.adamw(decoder.LR, *decoder.BETAS, decoder.EPS, **how)
    count = jnp.asarray(next(iter(restored["step"].values())), jnp.int32)
    moments = optax.ScaleByAdamState(count, restored["exp_avg"], restored["exp_avg_sq"])
    state = (moments, *tx.init(params)[1:])
    losses = []
    for batch in decoder.tokens(len(params["output_layer.weight"])):
        loss, grads = LOSS(params, jnp.asarray(batch))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses
