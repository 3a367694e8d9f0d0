"""Every combination of parallelism cuts a model into Megatron's files, and reading them gives the
model again.

The files are written here, by the description of the format and with numpy alone;
`test_megatron_legacy` has those that Megatron itself wrote.
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
import megatron_model
from helpers import faults_of, in_lanes
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError
from megatron_model import BF16, EXPERTS, FFN, HEAD_DIM, HEADS, HIDDEN, LAYERS, STATES
from torch_writer import save


def write(folder: Path, kind: str, t, p, v, e, etp, *, gated: bool, moe: bool, tied: bool):
    """The files of a run, and its parameters and moments."""
    whole = megatron_model.arrays_of(gated, moe, tied, HIDDEN)
    d = 2 * e
    common = megatron_model.args_of(t, p, v, e, etp, moe=moe, tied=tied, hidden_size=HIDDEN, ffn_hidden_size=FFN,
        moe_ffn_hidden_size=None, num_attention_heads=HEADS, group_query_attention=False, num_query_groups=1,
        kv_channels=HEAD_DIM, swiglu=gated, moe_layer_freq=1, use_distributed_optimizer=kind == "flat",
        overlap_grad_reduce=False, ddp_bucket_size=None)  # fmt: skip
    each, per_chunk = EXPERTS // e, LAYERS // (p * v)
    for pp in range(p):
        for r in range(e * etp):
            tp, ep, er = r % t, r // etp % e, r % etp

            def chunk(state: str, c: int, pp=pp, tp=tp, ep=ep, er=er) -> dict[str, np.ndarray]:
                first, found = (c * p + pp) * per_chunk, OrderedDict()
                for name, array in whole[state].items():
                    words = name.split(".")
                    if words[0] == "embedding" and (pp, c) != (0, 0):
                        continue
                    is_last = (pp, c) == (p - 1, v - 1)
                    if (words[0] == "output_layer" or "final" in name) and not is_last:
                        continue
                    if words[1] == "layers":
                        if not first <= int(words[2]) < first + per_chunk:
                            continue
                        words[2] = str(int(words[2]) - first)
                    if "experts" in words:
                        if int(words[5]) // each != ep:
                            continue
                        words[5] = f"local_experts.{int(words[5]) - ep * each}"
                    index, ranks = (er, etp) if "experts" in words else (tp, t)
                    parts = megatron_model.shard(name, array, ranks, gated)[index]
                    found[".".join(words)] = np.concatenate(parts)
                if tied and p > 1 and (pp, c) == (p - 1, v - 1):
                    embedding = whole[state]["embedding.word_embeddings.weight"]
                    found["output_layer.weight"] = np.split(embedding, t)[tp]
                return found

            held = {state: [chunk(state, c) for c in range(v)] for state in STATES}
            low = BF16 if kind != "fp32" else np.dtype(np.float32)
            names = ["model"] if v == 1 else [f"model{c}" for c in range(v)]
            tree = {
                "args": argparse.Namespace(**common, rank=pp * t * d + r), "checkpoint_version": 3.0, "iteration": 7,
            }  # fmt: skip
            for name, weights in zip(names, held["param"], strict=True):
                tree[name] = OrderedDict((n, array.astype(low)) for n, array in weights.items())
            parts, buffers = [], []
            for expert in (False, True) if e > 1 else (None,):
                part, buffer = optimizer(kind, held, expert, low)
                parts.append(part)
                buffers.append(buffer)
            tree["optimizer"] = parts if e > 1 else parts[0]
            rank = f"mp_rank_{tp:02d}{f'_{pp:03d}' if p > 1 else ''}{f'_{ep:03d}' if e > 1 else ''}"
            at = folder / rank
            save(tree, at / "model_optim_rng.pt")
            if kind == "flat":
                if e > 1 and r // t:
                    buffers[0] = None  # only dense data-parallel rank 0 writes the dense part
                save(buffers if e > 1 else buffers[0], at / "distrib_optim.pt")
    return whole


def optimizer(kind: str, held: dict, expert: bool | None, low: np.dtype) -> tuple[dict, dict]:
    """One optimizer's state of a rank, and its flat buffers."""
    mine = [(c, n) for c in range(len(held["param"])) for n in held["param"][c]]
    mine = [(c, n) for c, n in mine if expert is None or (".experts." in n) == expert]
    plain = {True: [], False: []}
    for c, n in mine:
        plain[held["param"][c][n].ndim == 1 or n.endswith(".bias")].append((c, n))
    ids, groups, state, masters = 0, [], {}, []
    for bare, members in plain.items():
        own = list(range(ids, ids + len(members)))
        groups.append({"wd_mult": 0.0 if bare else 1.0, "params": own})
        masters.append([held["param"][c][n] for c, n in members])
        for c, n in members:
            moments = {s: held[s][c][n] for s in ("exp_avg", "exp_avg_sq")}
            state[ids] = {"step": np.float32(5).reshape(()), **moments}
            ids += 1
    groups.reverse()
    masters.reverse()
    if kind == "fp32":
        return {"state": state, "param_groups": groups}, {}
    if kind == "bf16":
        inner = {"state": state, "param_groups": groups}
        return {"optimizer": inner, "fp32_from_fp16_params": masters}, {}
    groups = [{"wd_mult": group["wd_mult"], "step": 5} for group in groups]
    buffers: dict = {"buckets_coalesced": True}
    for c in range(len(held["param"])):
        flat: dict = {}
        for s in held:
            pieces: list[np.ndarray] = []
            for n in reversed([n for chunk, n in mine if chunk == c]):
                if sum(a.size for a in pieces) % 64:
                    pieces.append(np.full(-sum(a.size for a in pieces) % 64, np.nan, np.float32))
                pieces.append(held[s][c][n].ravel())
            flat[s] = np.concatenate(pieces)
        buffers[c] = {(low, np.dtype(np.float32)): {**flat, "numel_unpadded": flat["param"].size}}
    return {"optimizer": {"param_groups": groups}}, buffers


@pytest.mark.parametrize("kind", ["fp32", "bf16", "flat"])
@pytest.mark.parametrize(
    ("t", "p", "v", "e", "etp"),
    in_lanes([(1, 1, 1, 1, 1), (4, 1, 1, 1, 4), (2, 2, 1, 1, 2), (2, 2, 2, 1, 2), (1, 4, 1, 1, 1), (1, 2, 2, 2, 1),
     (2, 1, 1, 2, 1), (2, 2, 1, 2, 2), (2, 2, 1, 4, 1), (4, 1, 1, 2, 4)]),
)  # fmt: skip
def test_a_model_cut_for_any_parallelism_is_read_as_it_was(tmp_path, kind, t, p, v, e, etp):
    for gated, tied in (True, False), (False, kind != "flat" or p == 1):
        folder = tmp_path / f"{gated}" / "iter_0000007"
        whole = write(folder, kind, t, p, v, e, etp, gated=gated, moe=e > 1, tied=tied)
        checkpoint = ucp.open(folder)
        assert set(checkpoint.params) == set(whole["param"])
        for state, arrays in whole.items():
            for name, array in arrays.items():
                assert same_bits(checkpoint.read(f"{state}/{name}"), array), f"{state}/{name}"
                assert checkpoint.read(f"step/{name}") == 5
        assert faults_of(checkpoint) == []


def regrouped(monkeypatch, split) -> None:
    """Let the optimizer have a group for each value of `split(name)`, in the model's order."""

    def other(kind: str, held: dict, expert: bool | None, low: np.dtype) -> tuple[dict, dict]:
        names = [(c, n) for c in range(len(held["param"])) for n in held["param"][c]]
        groups: dict[object, list] = {}
        for c, n in names:
            groups.setdefault(split(n), []).append((c, n))
        groups.pop("frozen", None)
        state, told, ids = {}, [], 0
        for members in groups.values():
            own = list(range(ids, ids + len(members)))
            told.append({"wd_mult": 1.0, "lr_mult": 1.0, "params": own})
            for c, n in members:
                moments = {s: held[s][c][n] for s in ("exp_avg", "exp_avg_sq")}
                state[ids] = {"step": np.float32(5).reshape(()), **moments}
                ids += 1
        masters = [[held["param"][c][n] for c, n in members] for members in groups.values()]
        if kind == "fp32":
            return {"state": state, "param_groups": told}, {}
        inner = {"state": state, "param_groups": told}
        return {"optimizer": inner, "fp32_from_fp16_params": masters}, {}

    monkeypatch.setitem(globals(), "optimizer", other)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_groups_that_shapes_tell_apart_are_read_whatever_they_are_for(tmp_path, monkeypatch, kind):
    """Learning rates of their own for the embeddings, as with --decoupled-lr."""
    own = ("embedding.word_embeddings.weight", "output_layer.weight")
    regrouped(monkeypatch, lambda n: "own" if n in own else n.endswith(("norm.weight", "bias")))
    whole = write(tmp_path / "iter_0000007", kind, 2, 1, 1, 1, 2, gated=True, moe=False, tied=False)
    checkpoint = ucp.open(tmp_path / "iter_0000007")
    for state, arrays in whole.items():
        for name, array in arrays.items():
            assert same_bits(checkpoint.read(f"{state}/{name}"), array), f"{state}/{name}"
    assert faults_of(checkpoint) == []


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("split", "why"), [
    # a rate for each layer
    (lambda n: n.partition(".mlp")[0].partition(".self")[0],                         "several ways"),
    (lambda n: 2 if "input_layernorm" in n else n.endswith(("norm.weight", "bias")), "several ways"),
    (lambda n: "frozen" if "layers.0" in n else n.endswith("norm.weight"),           "some may be frozen"),
])  # fmt: skip
def test_groups_that_shapes_do_not_tell_have_states_apart(tmp_path, monkeypatch, kind, split, why):
    regrouped(monkeypatch, split)
    whole = write(tmp_path / "iter_0000007", kind, 2, 1, 1, 1, 2, gated=True, moe=False, tied=False)
    checkpoint = ucp.open(tmp_path / "iter_0000007")
    assert {leaf.label.partition("/")[0] for leaf in checkpoint.leaves} == {"param", "other"}
    for name, array in whole["param"].items():
        weight = array if kind == "fp32" else array.astype(BF16)
        assert same_bits(checkpoint.read(f"param/{name}"), weight), name
    assert any("kept under `other`" in note and why in note for note in checkpoint.notes)
    assert all(item.reason != "not understood" for item in checkpoint.inventory)
    labels = [label for label in checkpoint if label.endswith("exp_avg")]
    moments = [checkpoint.read(label) for label in labels]
    assert sum(map(np.size, moments)) > 0


def test_a_model_that_was_never_stepped_has_no_states(tmp_path, monkeypatch):
    before = optimizer

    def empty(kind: str, held: dict, expert: bool | None, low: np.dtype) -> tuple[dict, dict]:
        found, buffers = before(kind, held, expert, low)
        return {**found, "state": {}}, buffers

    monkeypatch.setitem(globals(), "optimizer", empty)
    write(tmp_path / "iter_0000007", "fp32", 1, 1, 1, 1, 1, gated=True, moe=False, tied=False)
    checkpoint = ucp.open(tmp_path / "iter_0000007")
    assert {leaf.label.partition("/")[0] for leaf in checkpoint.leaves} == {"param"}


@pytest.mark.parametrize(("step", "read"), [(5, True), (4, False)])
def test_flat_buffers_do_not_depend_on_groups_but_steps_do(tmp_path, monkeypatch, step, read):
    before = optimizer

    def third(kind: str, held: dict, expert: bool | None, low: np.dtype) -> tuple[dict, dict]:
        found, buffers = before(kind, held, expert, low)
        found["optimizer"]["param_groups"].append({"wd_mult": 1.0, "step": step})
        return found, buffers

    monkeypatch.setitem(globals(), "optimizer", third)
    how = {"gated": True, "moe": False, "tied": False}
    whole = write(tmp_path / "iter_0000007", "flat", 2, 1, 1, 1, 2, **how)
    if not read:
        with pytest.raises(FormatError, match=r"stepped \[4, 5\] times, and which parameters they"):
            ucp.open(tmp_path / "iter_0000007")
        return
    checkpoint = ucp.open(tmp_path / "iter_0000007")
    for name, array in whole["exp_avg"].items():
        assert same_bits(checkpoint.read(f"exp_avg/{name}"), array)
        assert checkpoint.read(f"step/{name}") == 5
