"""Mistakes with what one format keeps beside its arrays: configs, tables, scales, arguments.

The table that they are added to is that of `temptation_mistakes`. Each kind of edit is a row of a
small table.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

import jax_ucp as ucp
from folders import Link, dtype_of, stored_tensors
from safetensors_writer import file_of
from temptation_mistakes import Attempt, each_file, mistake, replacing
from temptation_subjects import Subject
from torch_writer import edit

# The folder of a step, opened by itself.

_STEP = re.compile(r"((?:[^/]+/)*?(?:iter_|global_step|step-|checkpoint-)\d+(?:_universal)?)/")


@mistake
def step_opened_without_a_table(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """What tells the format lies in one small file of the step's folder; it is lost, or cut."""
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "step opened"):
        step = _STEP.match(name)
        if not step or not any(n.startswith(step[0]) for n in subject.folder if n != name):
            continue
        opened = partial(_inside, step[1])
        left: dict[str, bytes | None] = {"missing": None, "cut": data[: len(data) // 2]}
        for how, rest in left.items():
            what = f"{step[1]}/ is opened, and {name} is {how}"
            yield Attempt(what, put({name: rest}), opened=opened)


def _inside(folder: str, root: Path) -> str:
    return str(root / folder)


# Links.


@mistake
def link_to_elsewhere(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A file is a link to a copy outside of the checkpoint, or to one inside."""
    put = replacing(subject)
    for name, data, _rng in each_file(subject, "link"):
        path = PurePosixPath(name)
        up = "../" * len(path.parts)
        beside = {f"elsewhere/{path.name}": data}
        is_read = name.startswith(f"{subject.entry}/" if subject.entry else "")
        noticed = r"link|leads out" if is_read else ""
        for how in ("a relative", "an absolute"):
            link = {name: Link(f"{up}elsewhere/{path.name}", absolute=how == "an absolute")}
            what = f"{name} is {how} link to a copy outside"
            yield Attempt(what, put(link), noticed=noticed, beside=beside)
        kept = "kept/0"  # named like no file of a checkpoint
        inside = {name: Link("../" * (len(path.parts) - 1) + kept), kept: data}
        yield Attempt(f"{name} is a link to {kept}", put(inside))


# The config of a model, with a mapping.

_NO_NOTE_IS_ENOUGH = "(?!)"

_MAPPED = {
    "torch/hf_llama": "hf-llama2-to-maxtext",
    "torch/hf_llama_bf16_tied": "hf-llama2-to-maxtext",
    "torch/hf_qwen2": "hf-qwen2-to-tunix",
    "torch/hf_qwen3": "hf-qwen3-to-maxtext",
    "torch/hf_mixtral": "hf-mixtral-to-maxtext",
    "torch/hf_gemma": "hf-gemma-to-tunix",
    "torch/hf_gemma_mha": "hf-gemma-7b-to-tunix",
    "torch/hf_gpt2": "hf-gpt2-to-flax",
}
_ROTARY = "llama|qwen|mixtral|gemma"
_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

# Edits that change what the model computes or that contradict its weights, and for which of these:
# a class of transformers ignores what its config does not have.
_OTHER_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "is not causal": ({"is_causal": False}, "."),
    "has rope_scaling beside rope_parameters": ({"rope_scaling": {"rope_type": "yarn", **_YARN}}, _ROTARY),
    "has rope_scaling by type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, _ROTARY),
    "has another head_dim": ({"head_dim": 16}, _ROTARY),
    "has other heads": ({"num_attention_heads": 2, "num_key_value_heads": 1}, "llama|qwen3|gemma"),
    "has a layer more": ({"num_hidden_layers": 3, "n_layer": 3}, "."),
    "has a layer less": ({"num_hidden_layers": 1, "n_layer": 1}, "."),
    "has another family": ({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}, "."),
    "has another activation": ({"hidden_act": "relu", "hidden_activation": "relu"}, _ROTARY),
    "has a window": ({"sliding_window": 8}, "mixtral"),
    "attends both ways": ({"use_bidirectional_attention": True}, "gemma"),
    "scales attention by layer": ({"scale_attn_by_inverse_layer_idx": True}, "gpt2"),
}  # fmt: skip
# Edits that transformers does not read, or that it refuses itself and that move no array.
_SAME_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "has twice the width": ({"hidden_size": 64, "n_embd": 48}, "never"),
    "has a name": ({"_name_or_path": "somebody/model"}, "never"),
    "was mended": ({"unsloth_fixed": True}, "never"),
    "was written by another version": ({"transformers_version": "4.57.1"}, "never"),
    "does not cache": ({"use_cache": False}, "never"),
    "has dropout": ({"attention_dropout": 0.1, "attn_pdrop": 0.2}, "never"),
    "has other tokens": ({"bos_token_id": 7, "pad_token_id": 9}, "never"),
}


@mistake
def config_of_another_model(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A config that is not of these weights, or that somebody edited, under a mapping."""
    mapping = _MAPPED.get(subject.name)
    if mapping is None:
        return
    put = replacing(subject)
    config = json.loads(subject.folder["config.json"])

    def mapped(checkpoint: ucp.Checkpoint, _: Path) -> Any:
        checkpoint.map(mapping).restore()
        return checkpoint.restore()

    for what, (edits, matters) in (_OTHER_MODEL | _SAME_MODEL).items():
        changed = put({"config.json": json.dumps(config | edits).encode()})
        noticed = _NO_NOTE_IS_ENOUGH if re.search(matters, subject.name) else ""
        yield Attempt(f"config.json {what}", changed, act=mapped, noticed=noticed)


# The config of a quantisation, and its scales.


def _weights_of(config: Any, name: str) -> Iterator[dict[str, Any]]:
    """Every mapping in a config that has a key."""
    if isinstance(config, dict):
        if name in config:
            yield config
        for value in config.values():
            yield from _weights_of(value, name)


# Key, other value: of no scheme that these codes, scales and shapes could be.
_OTHER_SCHEME: dict[str, Sequence[Any]] = {
    "num_bits": (8, 3),
    "bits": (8, 3),
    "group_size": (64, 16, -1),
    "strategy": ("channel", "tensor"),
    "symmetric": (True,),
    "weight_block_size": ([64, 64], [32, 64], None),
    "bnb_4bit_quant_type": ("fp4",),
    "quant_method": ("awq", "gptq", "fp8", "nowhere"),
}


@mistake
def scheme_of_another(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """A quantization_config that is not of these codes, or none."""
    if not subject.name.startswith("quantized/"):
        return
    put = replacing(subject)
    text = subject.folder["config.json"]
    for key, values in _OTHER_SCHEME.items():
        for value in values:
            config = json.loads(text)
            places = list(_weights_of(config["quantization_config"], key))
            for place in places:
                place[key] = value
            if places and config != json.loads(text):
                changed = {"config.json": json.dumps(config).encode()}
                yield Attempt(f"config.json has {key} {value}", put(changed))
    config = {k: v for k, v in json.loads(text).items() if k != "quantization_config"}
    changed = {"config.json": json.dumps(config).encode()}
    yield Attempt("config.json has no quantization_config", put(changed))


@mistake
def scales_turned(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Scales whose header has their axes in the other order, as a writer with outputs last has."""
    if not subject.name.startswith("quantized/"):
        return
    put = replacing(subject)
    for name, data in subject.folder.items():
        if not name.endswith(".safetensors"):
            continue
        for key, about in _header(data).items():
            shape = about.get("shape", [])
            if re.search("scale|zero", key) and len(shape) == 2 and shape[0] != shape[1]:
                turned = {key: about | {"shape": shape[::-1]}}
                made = put({name: _with_header(data, _header(data) | turned)})
                yield Attempt(f"{key} is {shape[::-1]}", made)


def _header(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _with_header(data: bytes, header: Mapping[str, Any]) -> bytes:
    body = data[8 + int.from_bytes(data[:8], "little") :]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return file_of(text, body)


# A shard of another save, in another dtype.


@mistake
def shard_of_a_save_in_another_dtype(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """One of the shards that an index names is of a save in another dtype: the total is wrong."""
    indexes = [name for name in subject.folder if name.endswith(".safetensors.index.json")]
    if not indexes or not (other := subject.siblings.get("run")):
        return
    put = replacing(subject)
    files = sorted(set(json.loads(subject.folder[indexes[0]])["weight_map"].values()))
    for file in files[:3] if len(files) > 1 else ():
        made = put({file: _in_another_dtype({file: other[file]}, file)})
        yield Attempt(f"{file} is of another run, in 16 bits or 32", made)


def _in_another_dtype(files: Mapping[str, bytes], name: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    shapes = {key: about.get("shape") for key, about in _header(files[name]).items()}
    body = b""
    for tensor in stored_tensors(files):
        wide = tensor.dtype == np.float32
        values = tensor.read(files).astype(dtype_of("bfloat16") if wide else np.float32)
        span = [len(body), len(body) + values.nbytes]
        about = {"dtype": "BF16" if wide else "F32", "shape": shapes[tensor.label]}
        header[tensor.label] = about | {"data_offsets": span}
        body += values.tobytes()
    return _with_header(bytes(8) + body, header) if body else files[name]


# What a trainer was told.

# Arguments under which, were they 8, the same files would hold other arrays.
_OTHER_ARGS = "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"


@mistake
def arguments_of_another_run(subject: Subject, _: Sequence[Subject]) -> Iterator[Attempt]:
    """Arguments of Megatron's that mean another layout of the shards than the one that is there."""
    name = next((n for n in subject.folder if PurePosixPath(n).name == "common.pt"), None)
    if subject.format != "megatron-dist" or name is None:
        return
    put = replacing(subject)
    for key in _OTHER_ARGS:
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "common.pt"
            path.write_bytes(subject.folder[name])
            edit(path, partial(_told, args={key: 8}))
            data = path.read_bytes()
        gated = "swiglu" in subject.name and not key.startswith("expert")
        noticed = _NO_NOTE_IS_ENOUGH if gated else ""
        yield Attempt(f"{name} has {key} 8", put({name: data}), act=_restored, noticed=noticed)


def _restored(checkpoint: ucp.Checkpoint, _: Path) -> Any:
    return checkpoint.restore()


def _told(tree: Any, args: Mapping[str, Any]) -> None:
    if "args" in tree:  # NeMo writes none
        tree["args"].state.update(args)
