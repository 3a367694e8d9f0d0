"""The module's own tensors: copies of masters, tied names, buffers, and parameters without a
master.

They lie in the model states, in files of pipeline layers, and in files of experts.

Facts: `_save_checkpoint` and `_save_moe_checkpoint` in `runtime/engine.py`,
`runtime/pipe/module.py`; DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed.files import Files, Stored
from jax_ucp.formats.listing import listed
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import known
from jax_ucp.layout.fragments import Shape


def aliases(
    tensors: Mapping[str, StoredTensor], owned: Iterable[str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Names that mean the tensor of another name: `shared_params` says so, or both are one block of
    one storage.

    ZeRO-0 has no `shared_params`; neither has a pipeline.
    """
    owned = set(owned)
    owners: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors, key=lambda name: name not in owned):  # stable: owned names first
        if 0 not in tensors[name].shape:
            owners.setdefault(_region(tensors[name]), name)
    owner_of = {name: owners.get(_region(tensor), name) for name, tensor in tensors.items()}
    owner_of |= {alias: owner for alias, owner in shared.items() if alias in tensors}
    return {name: owner for name, owner in owner_of.items() if owner != name and name not in owned}


def _region(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.storage, tensor.offset, tensor.shape, tensor.strides, tensor.dtype


def layer_names(
    layer: int, tensors: Mapping[str, Shape], owned: Mapping[str, Shape]
) -> dict[str, str | None]:
    """What the tensors of a pipeline layer's file are called in the whole model; None where that
    cannot be told.

    The file has names inside the layer. A tied layer's parameters are called after its key, which
    the file does not have: it is the one under which the optimizer owns parameters of those names
    and shapes.

    >>> layer_names(0, {"w": (4, 2), "b": (4,)}, {"tied_modules.embed.w": (4, 2), "3.w": (4, 2)})
    {'w': 'tied_modules.embed.w', 'b': 'tied_modules.embed.b'}
    """
    names = {name: f"{layer}.{name}" for name in tensors}
    tied = [name for name in tensors if names[name] not in owned]
    keys = {key for name in tied for key in _tied_keys(name, tensors[name], owned)}
    if len(keys) > 1:
        return {**names, **dict.fromkeys(tied)}
    prefix = f"tied_modules.{keys.pop()}" if keys else str(layer)
    return {**names, **{name: f"{prefix}.{name}" for name in tied}}


def _tied_keys(name: str, shape: Shape, owned: Mapping[str, Shape]) -> Iterator[str]:
    """The keys of the tied modules that have a parameter of that name and shape."""
    tied = re.compile(rf"tied_modules\.([^.]+)\.{re.escape(name)}")
    for other in owned:
        match = tied.fullmatch(other)
        if match and owned[other] == shape:
            yield match[1]


def check_layers(files: Files, owned: Iterable[str]) -> None:
    """Raise FormatError for a layer whose parameters the optimizer owns, but whose file is not
    there.
    """
    if files.pp == 1 and not files.layers:
        return
    prefixes = {name.partition(".")[0] for name in owned}
    layers = sorted({int(prefix) for prefix in prefixes if prefix.isdigit()})
    for layer, tp in itertools.product(layers, range(files.tp)):
        if (layer, tp) not in files.layers:
            model = f"model_{tp:02d}-" if files.tp > 1 else ""
            raise FormatError(
                f"{files.folder}/layer_{layer:02d}-{model}model_states.pt is missing: the optimizer"
                f" owns parameters of layer {layer}"
            )


def check_copies(files: Files, owned: Iterable[str], copied: Collection[str]) -> None:
    """Raise FormatError for a parameter that the optimizer owns, but no file of the module has.

    Only ZeRO-3 saves modules without their parameters.
    """
    lost = [name for name in owned if name not in copied]
    if not lost:
        return
    what = "*_model_states.pt"
    if files.layers:
        layers = {layer for layer, _ in files.layers}
        gap = min(set(range(len(layers) + 1)) - layers)
        what = f"layer_{gap:02d}-model_states.pt (or of another layer)"
    raise FormatError(
        f"{files.folder}: the optimizer owns {listed(lost, 1)}, but no file of the module has it:"
        f" {what} is missing, or was exchanged for another"
    )


def check_expert(stored: Stored, expert: int, number: str) -> None:
    """Raise FormatError where a file of one expert holds tensors of another."""
    if number != str(expert):
        raise FormatError(
            f"{stored.file.path} holds tensors of expert {number}: it was renamed, or exchanged for"
            " another file"
        )


def check_experts(files: Files) -> None:
    """Raise FormatError where the files of a layer's experts are not one for each expert."""
    numbers = known(files.models[0][0].state.get("num_experts")) if files.models else None
    counts: Sequence[int] = numbers if isinstance(numbers, list) else []
    experts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for layer, expert, mp in files.experts:
        experts[layer, mp].add(expert)
    for (layer, mp), stored in sorted(experts.items()):
        want = counts[layer] if layer < len(counts) else len(stored)
        if missing := sorted(set(range(want)) - stored):
            raise FormatError(
                f"{files.folder}/layer_{layer}_expert_{missing[0]}_mp_rank_{mp:02d}_model_states.pt"
                f" is missing: the layer has {want} experts, and files of {sorted(stored)} are"
                " there; one that is too many belongs to another run"
            )
        if len(stored) > want:
            raise FormatError(
                f"{files.folder} has"
                f" layer_{layer}_expert_{max(stored)}_mp_rank_{mp:02d}_model_states.pt, but the"
                f" layer has {want} experts; it belongs to another run"
            )
