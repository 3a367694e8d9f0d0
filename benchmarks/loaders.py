"""A model of Hugging Face onto MaxText's leaves on eight CPU devices: every way there is, on the
same bytes, and what each makes of damaged files.

`--torch-python` is a Python 3.12 with jax_ucp, maxtext, transformers, torch and google-tunix; each
run is a process of its own, and its clock starts when everything is imported. The weights have the
shapes of Qwen3-0.6B and random bits.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jax_ucp as ucp
from benchmarks.peers import OURS, fresh
from benchmarks.race import Options, Table

HERE = Path(__file__).parent
LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 28, 1024, 3072, 151936, 16, 8, 128
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 40960,
    "max_window_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"
MISSING = f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"
BY_COPY = ["jax_ucp: link, stock Orbax", "jax_ucp: convert, stock Orbax"]
DIRECT = [
    OURS,
    "MaxText: to_maxtext, its restore",
    "MaxText: safetensors_dynamic",
    "Orbax v1: safetensors layout",
    "tunix: its loader",
]
WAYS = [*DIRECT, *BY_COPY]


def run(options: Options) -> Iterator[Table]:
    """Seconds, memory and bytes read of each way; then what each does with damaged files."""
    if not options.torch_python:
        raise RuntimeError("the peers of this benchmark need --torch-python")
    source = options.work / "qwen3"
    if not source.exists():
        _write(source, _weights())
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way in WAYS:
            found[way].append(_load(way, source, options))
    ours = statistics.median(one["wall_s"] for one in found[OURS])
    rows: dict[str, dict[str, object]] = {}
    for way, runs in found.items():
        if error := next(filter(None, map(_error, runs)), None):
            rows[way] = {"wall s": error}
            continue
        median = {key: statistics.median(one[key] for one in runs) for key in _FIGURES}
        rows[way] = {
            "wall s": round(median["wall_s"], 2),
            "CPU s": round(median["cpu_s"], 2),
            "wall / ours": round(median["wall_s"] / ours, 2),
            "peak memory MiB": round(median["memory"] / (1 << 20)),
            "bytes read / model": round(median["read"] / _size(source), 2),
            "arrays that are as ours": _same(runs[0]["digests"], found[OURS][0]["digests"]),
        }
    notes = [
        "Orbax's layout gives the names and shapes of the files, and tunix its own model's: their"
        " arrays are not those of MaxText.",
        "Peak memory is beyond what the process had before it began, and holds the model itself.",
    ]
    yield Table(f"Qwen3-0.6B, {_size(source) / 2**30:.2f} GiB in bfloat16", rows, notes)
    outcomes: dict[str, dict[str, object]] = {way: {} for way in DIRECT}
    for name, damage in DAMAGES.items():
        damaged = fresh(options.work / "damaged")
        shutil.copytree(source, damaged)
        damage(damaged)
        for way in DIRECT:
            one = _load(way, damaged, options)
            right = found[way][0].get("digests", {})
            outcomes[way][name] = _error(one) or _wrong(one["digests"], right)
    yield Table("What each makes of damaged files", outcomes)


_FIGURES = ("wall_s", "cpu_s", "memory", "read")


def _weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    rng = np.random.default_rng(0)
    return {
        # positive and finite
        name: rng.integers(0, 0x7F80, shape, np.uint16).view(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def _write(folder: Path, weights: Mapping[str, np.ndarray]) -> None:
    """The weights in two files and their index, as transformers has them."""
    half = sum(array.nbytes for array in weights.values()) // 2 + HIDDEN * VOCAB
    plain = ucp.Checkpoint.of({"param": dict(weights)})
    plain.export(folder, "safetensors", max_shard_bytes=half, config=CONFIG)


def _rewritten(folder: Path, file: str, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    opened, index = ucp.open(folder), json.loads((folder / INDEX).read_text())
    names = [name for name, place in index["weight_map"].items() if place == file]
    tensors = {name: np.asarray(opened[f"param/{name}"][:]) for name in names}
    change(tensors)
    alone = folder / "alone"
    ucp.Checkpoint.of({"param": tensors}).export(alone, "safetensors")
    (alone / "model.safetensors").rename(folder / file)
    shutil.rmtree(alone)


def _exchange(folder: Path) -> None:
    (folder / FIRST).rename(folder / "other")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "other").rename(folder / SECOND)


def _omit(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    _rewritten(folder, index["weight_map"][MISSING], lambda tensors: tensors.pop(MISSING))


def _widen(folder: Path) -> None:
    def first_as_float32(tensors: dict[str, np.ndarray]) -> None:
        name = min(tensors)
        tensors[name] = tensors[name].astype(np.float32)

    _rewritten(folder, FIRST, first_as_float32)


def _cut(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 4096)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "two files exchanged": _exchange,
    "a tensor missing": _omit,
    "first tensor in float32, same values": _widen,
    "a file 4 KiB short": _cut,
}


def _load(way: str, folder: Path, options: Options) -> dict[str, Any]:
    """What the process of a way printed, and its memory; or its error."""
    scratch = fresh(options.work / "scratch")
    scratch.mkdir()
    command = [str(options.torch_python), "-m", "benchmarks.loaders_worker", way]
    process = subprocess.run(
        [*command, str(folder), str(scratch)],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        timeout=600,
    )
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        return {"error": (process.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[-1])


def _error(one: Mapping[str, Any]) -> str | None:
    return f"refused: {one['error'][:120]}" if "error" in one else None


def _same(some: Mapping[str, str], others: Mapping[str, str]) -> str:
    return f"{sum(others.get(name) == digest for name, digest in some.items())} of {len(some)}"


def _wrong(some: Mapping[str, str], right: Mapping[str, str]) -> str:
    wrong = len(right) - sum(some.get(name) == digest for name, digest in right.items())
    return f"loads, {wrong} of {len(right)} arrays wrong" if wrong else "right"


def _size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (FIRST, SECOND))
