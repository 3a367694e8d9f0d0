"""The module's own tensors: copies of masters, tied names, buffers, parameters without a master.

They lie in the model states, in files of pipeline layers, and in files of experts.

Facts: `_save_checkpoint` and `_save_moe_checkpoint` in `runtime/engine.py`,
`runtime/pipe/module.py`; DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.arrays.value import Array, cut
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.codecs.unpickle import known
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import StateFile, TagFiles, zero_config
from jax_ucp.formats.deepspeed.slices import FROZEN, Slices
from jax_ucp.formats.deepspeed.zero import touched
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.patterns import Sharded, flat_layouts
from jax_ucp.states.opaque import require_known
from jax_ucp.text import listed

_EMPTIED = "ZeRO-3 empties the module; the values are in the partitions"
_OTHER_RANKS = "the buffer of another data-parallel rank; that of rank 0 is used"
_SEVERAL_TIED = "tied: several tied parameters have its name and shape"


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the module on one model-parallel rank. If tied, it is the parameter `owner`."""

    mp: int
    name: str
    owner: str
    key: str
    stored: StoredTensor


def add_module(slices: Slices) -> None:
    """Add the module's tensors. Raises FormatError if one that the optimizer has is missing."""
    files = slices.files
    optimized = list(slices.params())
    copied: set[str] = set()  # the parameters that the module has

    def add(tensor: ModuleTensor) -> None:
        copied.add(tensor.owner)
        add_tensor(slices, tensor)

    check_layers(files, optimized)
    check_experts(files)
    check_expert_tensors(files)
    for mp in range(len(files.models)):
        add_frozen(slices, mp)
        owned = set(slices.shapes_on(mp))
        if not any(files.ranks):  # or those that it had, where its files are unusable
            groups = known(files.models[mp][0].state.get("param_shapes"))
            owned = {str(name) for group in as_list(groups) for name in as_dict(group)}
        add_model_states(slices, mp, owned, add)
    copied |= _add_layers(slices, add)
    copied |= _add_experts(slices, add)
    # Only ZeRO-3 saves modules without their parameters.
    lost = [name for name in optimized if name not in copied]
    if lost and not files.zero3:
        what = "*_model_states.pt"
        if files.layers:
            layers = {layer for layer, _ in files.layers}
            gap = min(set(range(len(layers) + 1)) - layers)
            what = f"layer_{gap:02d}-model_states.pt (or of another layer)"
        raise FormatError(
            f"{files.folder}: the optimizer owns {listed(lost, 1)}, but no file of the module has"
            f" it: {what} is missing, or was exchanged for another"
        )


def _add_layers(slices: Slices, add: Callable[[ModuleTensor], None]) -> set[str]:
    """Add the tensors in files of pipeline layers. A tied layer's belong to the lowest stage that
    has it.

    Returns the parameters that tensors may belong to whose name nothing decides.
    """
    files, ambiguous = slices.files, set[str]()
    buffers = names_in(files, "buffer_names")
    for (layer, tp), stored in files.layers.items():
        tensors = tensors_of(slices, stored, stored.state)
        # By parameter of this tp rank, the lowest model-parallel rank and the shape there.
        ranks: dict[str, int] = {}
        owned: dict[str, Shape] = {}
        for name, own in slices.params().items():
            for stage in own.stages[:1]:
                if array := own.arrays.get((stage, None, tp)):
                    ranks[name], owned[name] = stage * files.tp + tp, array.info.shape
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        for local, name in layer_names(layer, shapes, owned).items():
            tensor, key = tensors[local], stored.key(tensors[local])
            if name is None:
                ambiguous.update(other for other in owned if other.endswith(f".{local}"))
                slices.builder.skip(key, "copy", _SEVERAL_TIED)
            elif name in buffers:
                _add_buffer(slices, ModuleTensor(tp, name, name, key, tensor))
            elif name in owned or not any(files.ranks):
                add(ModuleTensor(ranks.get(name, tp), name, name, key, tensor))
            else:
                raise FormatError(
                    f"{stored.file.path} has {local}, but by the optimizer and the model states"
                    f" there is no {name}: the file was renamed, or belongs to another run"
                )
    return ambiguous


def _add_experts(slices: Slices, add: Callable[[ModuleTensor], None]) -> set[str]:
    """Add the tensors in files of single experts. Returns the fused parameters that have any."""
    files, fused_names = slices.files, set[str]()
    rows: dict[tuple[int, str], dict[int, Array]] = defaultdict(dict)
    for (_, expert, mp), stored in files.experts.items():
        model = files.models[mp][0]
        for name, tensor in tensors_of(slices, stored, stored.state).items():
            fused, _, number = name.rpartition(".")
            is_fused = number.isdigit() and moe.is_fused(fused, model)
            inside = number if is_fused else moe.expert_number(name) or str(expert)
            if inside != str(expert):
                raise FormatError(
                    f"{stored.file.path} holds tensors of expert {inside}: it was renamed, or"
                    " exchanged for another file"
                )
            key = stored.key(tensor)
            if not is_fused:
                add(ModuleTensor(mp, name, name, key, tensor))
                continue
            fused_names.add(fused)
            if ("param", fused) not in slices.states:
                rows[mp, fused][expert] = slices.builder.array(key)
                continue
            # A row of the slice that has this expert.
            reason = f"a copy of an expert of {fused}, compared with it by verify"
            for ep, experts in moe.placement(fused, model).items():
                place = slices.place(mp, ep)
                if expert in experts and slices.array_on(place, "param", fused):
                    row, copy = experts.index(expert), slices.builder.array(key)
                    slices.compare(place, "param", fused, copy, reason, at=(row,))
    for (mp, name), experts in rows.items():
        # a parameter without a master is as its experts' files have it, in their order
        model = files.models[mp][0]
        if files.tp > 1:
            raise moe.cut_twice(files, name)
        numbers = sorted(itertools.chain(*moe.placement(name, model).values()))
        if sorted(experts) != numbers:
            raise FormatError(
                f"{model.file.path} says that {name} has the experts {numbers}, but there are files"
                f" with the experts {sorted(experts)}: a file is missing, or belongs to another run"
            )
        of_name = [experts[number] for number in numbers]
        slabs = [cut(name, expert, 0, (1, *expert.info.shape)) for expert in of_name]
        layout = Sharded(0).join([slab.info.shape for slab in slabs])
        slices.add(slices.place(mp), "param", name, layout, slabs)
        reason = f"an expert of {name}, of which the optimizer has no second copy"
        slices.builder.mapped(slabs, reason)
    return fused_names


def add_model_states(
    slices: Slices, mp: int, owned: Collection[str], add: Callable[[ModuleTensor], None]
) -> None:
    """Add the module in the model states of a rank; `owned` parameters have masters."""
    # The second names of parameters on all model-parallel ranks, and their owners.
    shared: dict[str, str] = {}
    for first, *_ in slices.files.models:
        owners = first.state.get("shared_params") or {}
        shared |= {str(alias): str(owner) for alias, owner in owners.items()}
    for model in slices.files.models[mp]:
        tensors = tensors_of(slices, model, model.state.get("module") or {}, "module/")
        buffers = set(map(str, model.state.get("buffer_names") or ()))
        if slices.files.zero3:
            emptied = [tensor for name, tensor in tensors.items() if name not in buffers]
            slices.skip(map(model.key, emptied), "placeholder", _EMPTIED)
            tensors = {name: tensor for name, tensor in tensors.items() if name in buffers}
        second_names = shared | moe.router_aliases(tensors, owned, model)
        owner_of = aliases(tensors, set(owned) - buffers, second_names)
        for name in sorted(tensors, key=owner_of.__contains__):  # owners first
            owner, key = owner_of.get(name, name), model.key(tensors[name])
            tensor = ModuleTensor(mp, name, owner, key, tensors[name])
            if name in buffers:
                _add_buffer(slices, tensor)
            else:
                add(tensor)


def _add_buffer(slices: Slices, tensor: ModuleTensor) -> None:
    if slices.array_on(slices.place(tensor.mp), "buffer", tensor.name):
        slices.builder.skip(tensor.key, "buffer", _OTHER_RANKS)
    else:
        slices.add_whole(tensor.mp, "buffer", tensor.name, tensor.key)


def add_tensor(slices: Slices, tensor: ModuleTensor) -> None:
    """Add a tensor of a parameter: a copy of its master, or if it has none, the parameter."""
    owner, place = tensor.owner, slices.place(tensor.mp)
    master, array = slices.array_on(place, "param", owner), slices.builder.array(tensor.key)
    if master is None:
        slices.add_whole(tensor.mp, "param", tensor.name, tensor.key)
    elif master is not array:
        tied = "" if owner == tensor.name else f"tied to {owner}: "
        reason = f"{tied}a copy of {owner}'s master in {tensor.stored.dtype}, compared with it by"
        slices.compare(place, "param", owner, array, f"{reason} verify")


def add_frozen(slices: Slices, mp: int) -> None:
    """Add frozen parameters: under ZeRO-2 all of each on every rank, under ZeRO-3 in fragments."""
    models = slices.files.models[mp]
    first = models[0]
    shapes = first.state.get("frozen_param_shapes") or {}
    for name, tensor in (first.state.get("frozen_param_fragments") or {}).items():
        pieces: list[tuple[StateFile, StoredTensor]] = []
        for model in models:
            piece = (model.state.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(piece, StoredTensor):
                raise FormatError(
                    f"{model.file.path} has no fragment of the frozen {name}, but {first.name} has"
                )
            pieces.append((model, piece))
        if not slices.files.zero3:
            slices.add_whole(mp, "param", name, first.key(tensor))
            continue
        # ZeRO++ may keep a frozen weight as codes. Their scales are attributes of tensors that are
        # not saved (`_partition_param` in `runtime/zero/partition_parameters.py`,
        # `_get_param_fragment_func` in `runtime/engine.py`).
        codes = tensor.dtype == np.int8
        if codes and zero_config(first).get("zero_quantized_nontrainable_weights"):
            raise FormatError(
                f"{first.file.path} has the frozen {name} as codes of 8 bits, without their"
                " scales: zero_quantized_nontrainable_weights was on, and DeepSpeed does not save"
                " them. Take this weight from the model that the run began with, and save with"
                " exclude_frozen_parameters=True"
            )
        shape = tuple(map(int, shapes[name]))
        layouts = flat_layouts({name: shape}, [piece.shape[0] for _, piece in pieces])
        layout, used = touched(layouts[name])
        arrays = [slices.builder.array(pieces[i][0].key(pieces[i][1])) for i in used]
        slices.add(slices.place(mp), "param", name, layout, arrays)
        slices.builder.mapped(arrays, FROZEN)


def names_in(files: TagFiles, key: str) -> set[str]:
    """The names that the model states of all model-parallel ranks list under a key."""
    return {str(name) for first, *_ in files.models for name in first.state.get(key) or ()}


def tensors_of(
    slices: Slices, stored: StateFile, values: Mapping[str, Any], prefix: str = ""
) -> dict[str, StoredTensor]:
    """The tensors among values; others become extras. Raises FormatError for unreadable ones."""
    tensors: dict[str, StoredTensor] = {}
    for name, value in values.items():
        if isinstance(value, StoredTensor):
            tensors[name] = value
            continue
        require_known(value)
        slices.builder.extra(stored.name, f"{prefix}{name}", value)
    return tensors


def aliases(
    tensors: Mapping[str, StoredTensor], owned: Iterable[str], shared: Mapping[str, str]
) -> dict[str, str]:
    """The second names of tensors, each with the name of the parameter it is tied to.

    `shared_params` lists them; in ZeRO-0 and pipelines, two names are tied if both are the same
    block of one storage.
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
    """The name in the whole model of each tensor of a pipeline layer; None if ambiguous.

    The file has names inside the layer. The parameters of a tied layer are named after the key of
    that layer, which the file does not have: it is the key under which the optimizer owns
    parameters with these names and shapes.

    >>> layer_names(0, {"w": (4, 2), "b": (4,)}, {"tied_modules.embed.w": (4, 2), "3.w": (4, 2)})
    {'w': 'tied_modules.embed.w', 'b': 'tied_modules.embed.b'}
    """
    names = {name: f"{layer}.{name}" for name in tensors}
    tied = [name for name in tensors if names[name] not in owned]
    keys: set[str] = set()
    for name in tied:
        of_module = re.compile(rf"tied_modules\.([^.]+)\.{re.escape(name)}")
        matches = [of_module.fullmatch(other) for other in owned if owned[other] == tensors[name]]
        keys.update(match[1] for match in matches if match)
    if len(keys) > 1:
        return {**names, **dict.fromkeys(tied)}
    prefix = f"tied_modules.{keys.pop()}" if keys else str(layer)
    return {**names, **{name: f"{prefix}.{name}" for name in tied}}


def check_layers(files: TagFiles, owned: Iterable[str]) -> None:
    """Raise FormatError if a layer has no file although the optimizer has parameters of it."""
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


def check_experts(files: TagFiles) -> None:
    """Raise FormatError unless there is one file for each expert of a layer."""
    numbers = known(files.models[0][0].state.get("num_experts")) if files.models else None
    counts: Sequence[int] = numbers if isinstance(numbers, list) else []
    experts: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for (layer, expert, mp), stored in files.experts.items():
        experts[layer, mp][expert] = stored.name
    for (layer, mp), names in sorted(experts.items()):
        count = counts[layer] if layer < len(counts) else len(names)
        model, present = files.models[0][0].name, listed([names[n] for n in sorted(names)], 16)
        if missing := sorted(set(range(count)) - set(names)):
            name = f"layer_{layer}_expert_{missing[0]}_mp_rank_{mp:02d}_model_states.pt"
            raise FormatError(
                f"{files.folder}/{name} is missing: by {model} the layer has {count} experts, and"
                f" {present} are there; one of these that is too many was renamed or belongs to"
                " another run, or the model states do"
            )
        if len(names) > count:
            raise FormatError(
                f"{files.folder} has {names[max(names)]}, but by {model} the layer has {count}"
                f" experts, and {present} are there; one of these, or the model states, belongs to"
                " another run"
            )


# The tensors of an expert's file, by the names that all experts of the layer share.
_Signature = frozenset[tuple[str, Shape, str]]


def check_expert_tensors(files: TagFiles) -> None:
    """Raise FormatError for tensors that most files of the layer lack, or of unknown names."""
    layers: dict[tuple[int, int], list[StateFile]] = defaultdict(list)
    for (layer, _, mp), stored in sorted(files.experts.items()):
        layers[layer, mp].append(stored)
    for experts in layers.values():
        signatures = [_signature(stored) for stored in experts]
        usual, _ = Counter(signatures).most_common(1)[0]
        like = experts[signatures.index(usual)]
        for stored, signature in zip(experts, signatures, strict=True):
            if signature != usual:
                first, second = (
                    next(
                        (f"{name} {dtype} {list(shape)}" for name, shape, dtype in sorted(own)), ""
                    )
                    or "nothing else"
                    for own in (signature - usual, usual - signature)
                )
                raise FormatError(
                    f"{stored.file.path} has {first}, where {like.name}, of another expert of the"
                    f" layer, has {second}: one of the two files belongs to another run, or to"
                    " another layer. Put the run's own file in its place"
                )
    # the run's parameters and buffers, without experts' numbers, if the model states list them
    listed_groups = [
        as_dict(group)
        for model in files.all_models
        for group in as_list(known(model.state.get("param_shapes")))
    ]
    known_names = names_in(files, "buffer_names") | names_in(files, "frozen_param_shapes")
    known_names.update(str(name) for group in listed_groups for name in group)
    known_names |= set(map(moe.without_number, known_names))
    for stored in files.experts.values() if listed_groups else ():
        if unknown := sorted({name for name, _, _ in _signature(stored)} - known_names):
            raise FormatError(
                f"{stored.file.path} has {listed(unknown, 1)}, but by {files.models[0][0].name}"
                " there is no such parameter: the file belongs to another run. Put the run's own"
                " file in its place"
            )


def _signature(stored: StateFile) -> _Signature:
    return frozenset(
        (moe.without_number(name), tensor.shape, str(tensor.dtype))
        for name, tensor in stored.state.items()
        if isinstance(tensor, StoredTensor)
    )
