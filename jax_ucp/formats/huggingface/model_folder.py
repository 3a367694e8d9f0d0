"""What an export writes beside weights, so that the folder loads as a model: its config, and the
files that go with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax_ucp.export.files import File
from jax_ucp.export.parameters import Parameters, is_floating
from jax_ucp.files.path import FilePath
from jax_ucp.formats.huggingface.companions import kind_of
from jax_ucp.formats.peft.config import PREFIX
from jax_ucp.formats.safetensors.writer import ADAPTER, CONFIG, CONFIGS

Config = Mapping[str, Any]

# What a config calls the dtype that the model is loaded in: of transformers 5, and before.
_DTYPES = ("dtype", "torch_dtype")


def model_configs(
    extras: Mapping[str, Mapping[str, Any]], params: Parameters
) -> tuple[dict[str, Config], list[str]]:
    """The configs among the extras that are still true, by the names of their files, and what was
    changed in them.

    The dtype that a config names is that of the floating weights, where they have one: a loader
    would round them to it.
    """
    is_adapter = all(name.startswith(PREFIX) for name in params.model)
    kept: dict[str, Config] = {}
    for name in CONFIGS if is_adapter else (CONFIG,):
        config = extras.get(name, {}).get("config")
        if isinstance(config, dict):
            kept[name] = config
    if is_adapter and ADAPTER not in kept:
        return kept, [f"peft loads it with an {ADAPTER}: give it (adapter_config=)"]
    dtype = _dtype_of(params)
    stale = [key for key in _DTYPES if kept.get(CONFIG, {}).get(key) not in (None, dtype)]
    if not dtype or not stale:
        return kept, []
    kept[CONFIG] = {**kept[CONFIG], **dict.fromkeys(stale, dtype)}
    return kept, [f"{CONFIG} says {dtype}, the dtype of the weights, in place of another"]


def _dtype_of(params: Parameters) -> str:
    """The dtype of all floating weights; empty where they have several."""
    dtypes = {tensor.dtype for tensor in params.model.values()}
    floating = [dtype.name for dtype in dtypes if is_floating(dtype)]
    return floating[0] if len(floating) == 1 else ""


def companion_files(companions: Mapping[str, FilePath]) -> Iterator[File]:
    """The files that go with a model, as they are. Names that are none of such files are those of
    no writer, and are not written.
    """
    for name, file in companions.items():
        if kind_of(name):
            yield File.literal(name, file.read_bytes())
