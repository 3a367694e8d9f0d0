"""The module's own tensors: copies of masters, tied names, buffers, and parameters without a master.

They lie in the model states, in files of pipeline layers, and in files of experts.

Facts: `_save_checkpoint` and `_save_moe_checkpoint` in `runtime/engine.py`, `runtime/pipe/module.py`; DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed_files import Files, Stored
from jax_ucp.formats.safe_pickle import known
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.fragments import Shape


def aliases(tensors: Mapping[str, StoredTensor], owned: Iterable[str], said: Mapping[str, str]) -> dict[str, str]:
    """Names that mean the tensor of another name: `shared_params` says so, or both are one block of one storage.

    ZeRO-0 has no `shared_params`; neither has a pipeline.
    """
    owned = set(owned)
    owners: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors, key=lambda name: name not in owned):  # stable: owned names first
        if 0 not in tensors[name].shape:
            owners.setdefault(_region(tensors[name]), name)
    found = {name: owners.get(_region(tensor), name) for name, tensor in tensors.items()}
    found |= {name: said[name] for name in tensors if name in said}
    return {name: owner for name, owner in found.items() if owner != name and name not in owned}


def _region(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.storage, tensor.offset, tensor.shape, tensor.strides, tensor.dtype


def layer_names(layer: int, tensors: Mapping[str, Shape], owned: Mapping[str, Shape]) -> dict[str, str | None]:
    """What the tensors of a pipeline layer's file are called in the whole model; None where that cannot be told.

    The file has names inside the layer. A tied layer's parameters are called after its key, which the file does not
    have: it is the one under which the optimizer owns parameters of those names and shapes.

    >>> layer_names(0, {"w": (4, 2), "b": (4,)}, {"tied_modules.embed.w": (4, 2), "3.w": (4, 2)})
    {'w': 'tied_modules.embed.w', 'b': 'tied_modules.embed.b'}
    """
    keys: set[str] = set()
    for name, shape in tensors.items():
        if f"{layer}.{name}" not in owned:
            keys |= {
                m[1]
                for other, found in owned.items()
                if found == shape and (m := re.fullmatch(rf"tied_modules\.([^.]+)\.{re.escape(name)}", other))
            }
    if len(keys) > 1:
        return {name: f"{layer}.{name}" if f"{layer}.{name}" in owned else None for name in tensors}
    prefix = f"tied_modules.{keys.pop()}" if keys else str(layer)
    return {name: f"{layer}.{name}" if f"{layer}.{name}" in owned else f"{prefix}.{name}" for name in tensors}


def check_layers(files: Files, owned: Iterable[str]) -> None:
    """Raise FormatError for a layer whose parameters the optimizer owns, but whose file is not there."""
    if files.pp == 1 and not files.layers:
        return
    for layer in sorted({int(name.partition(".")[0]) for name in owned if name.partition(".")[0].isdigit()}):
        for tp in range(files.tp):
            if (layer, tp) not in files.layers:
                model = f"model_{tp:02d}-" if files.tp > 1 else ""
                raise FormatError(
                    f"{files.folder}/layer_{layer:02d}-{model}model_states.pt is missing: the optimizer owns "
                    f"parameters of layer {layer}"
                )


def check_copies(files: Files, owned: Iterable[str], copied: Collection[str]) -> None:
    """Raise FormatError for a parameter that the optimizer owns, but no file of the module has.

    Only ZeRO-3 saves modules without their parameters.
    """
    if lost := [name for name in owned if name not in copied]:
        gap = next(n for n in range(len(files.layers) + 1) if n not in {layer for layer, _ in files.layers})
        what = f"layer_{gap:02d}-model_states.pt (or of another layer)" if files.layers else "*_model_states.pt"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise FormatError(
            f"{files.folder}: the optimizer owns {lost[0]}{more}, but no file of the module has it: {what} is "
            "missing, or was exchanged for another"
        )


def check_expert(stored: Stored, expert: int, number: str) -> None:
    """Raise FormatError where a file of one expert holds tensors of another."""
    if number != str(expert):
        raise FormatError(
            f"{stored.file.path} holds tensors of expert {number}: it was renamed, or exchanged for another file"
        )


def check_experts(files: Files) -> None:
    """Raise FormatError where the files of a layer's experts are not one for each expert."""
    numbers = known(files.models[0][0].state.get("num_experts")) if files.models else None
    counts: Sequence[int] = numbers if isinstance(numbers, list) else []
    for layer, mp in sorted({(layer, mp) for layer, _, mp in files.experts}):
        found = {expert for at, expert, rank in files.experts if (at, rank) == (layer, mp)}
        want = counts[layer] if layer < len(counts) else len(found)
        if missing := sorted(set(range(want)) - found):
            raise FormatError(
                f"{files.folder}/layer_{layer}_expert_{missing[0]}_mp_rank_{mp:02d}_model_states.pt is missing: the "
                f"layer has {want} experts"
            )
        if len(found) > want:
            raise FormatError(
                f"{files.folder} has layer_{layer}_expert_{max(found)}_mp_rank_{mp:02d}_model_states.pt, but the layer "
                f"has {want} experts; it belongs to another run"
            )
