"""The module's own tensors: copies of masters, tied names, buffers, parameters without a master.

They lie in the model states, in files of pipeline layers, and in files of experts.

Facts: `_save_checkpoint` and `_save_moe_checkpoint` in `runtime/engine.py`,
`runtime/pipe/module.py`; DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import touched
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import Files, Stored, zero_config
from jax_ucp.formats.deepspeed.slices import FROZEN, Slices
from jax_ucp.formats.listing import listed
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.opaque import closed_tensors, tensor_holders
from jax_ucp.formats.torch_save.unpickle import known
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.patterns import Sharded, flat_layouts
from jax_ucp.sources.consolidated import Consolidated

# A stored tensor with its name in the importer.
StoredKey = tuple[str, StoredTensor]

_EMPTIED = "ZeRO-3 empties the module; the values are in the partitions"
_OTHER_RANKS = "the buffer of another data-parallel rank; that of rank 0 is used"
_SEVERAL_TIED = "tied: several tied parameters have its name and shape"


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the module on one model-parallel rank, which is the parameter `owner`."""

    mp: int
    name: str
    owner: str
    key: str
    stored: StoredTensor


class ModuleReader:
    """Adds the module's tensors to slices; `copied` are the parameters it has a copy of."""

    def __init__(self, slices: Slices):
        self.slices, self.files, self.importer = slices, slices.files, slices.importer
        self.copied: set[str] = set()

    def read(self) -> None:
        """Add all of the module. Raises FormatError where the optimizer has more."""
        owned = list(self.slices.params())
        check_layers(self.files, owned)
        check_experts(self.files)
        check_expert_tensors(self.files)
        for mp in range(len(self.files.models)):
            add_frozen(self.slices, mp)
            add_model_states(self.slices, mp, self._owned(mp), self._add)
        self._add_layers()
        self._add_experts()
        if not self.files.zero3:
            check_copies(self.files, owned, self.copied)

    def _owned(self, mp: int) -> set[str]:
        """The parameters of a rank that the optimizer has, or had where its files are unusable."""
        if any(self.files.ranks):
            return set(self.slices.shapes_on(mp))
        groups = known(self.files.models[mp][0].state.get("param_shapes"))
        return {str(name) for group in as_list(groups) for name in as_dict(group)}

    def _add(self, tensor: ModuleTensor) -> None:
        self.copied.add(tensor.owner)
        add_tensor(self.slices, tensor)

    def _add_layers(self) -> None:
        """Add the files of pipeline layers; those of tied ones are the lowest stage's."""
        buffers = names_in(self.files, "buffer_names")
        for (layer, tp), stored in self.files.layers.items():
            tensors = tensors_of(self.slices, stored, stored.state)
            ranks, owned = self._layer_owners(tp)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            for local, name in layer_names(layer, shapes, owned).items():
                tensor, key = tensors[local], stored.key(tensors[local])
                if name is None:
                    self.copied.update(other for other in owned if other.endswith(f".{local}"))
                    self.importer.skip(key, "copy", _SEVERAL_TIED)
                elif name in buffers:
                    _add_buffer(self.slices, ModuleTensor(tp, name, name, key, tensor))
                elif name in owned or not any(self.files.ranks):
                    self._add(ModuleTensor(ranks.get(name, tp), name, name, key, tensor))
                else:
                    raise FormatError(
                        f"{stored.file.path} has {local}, but by the optimizer and the model states"
                        f" there is no {name}: the file was renamed, or belongs to another run"
                    )

    def _layer_owners(self, tp: int) -> tuple[dict[str, int], dict[str, Shape]]:
        """For a `tp` rank each parameter's lowest model-parallel rank, and its shape there."""
        ranks: dict[str, int] = {}
        shapes: dict[str, Shape] = {}
        for name, slices in self.slices.params().items():
            for stage in slices.stages[:1]:
                if (stage, None, tp) in slices.shapes:
                    ranks[name] = stage * self.files.tp + tp
                    shapes[name] = slices.shapes[stage, None, tp]
        return ranks, shapes

    def _add_experts(self) -> None:
        """Add the files of single experts, by global number."""
        rows: dict[tuple[int, str], dict[int, StoredKey]] = defaultdict(dict)
        for (_, expert, mp), stored in self.files.experts.items():
            for name, tensor in tensors_of(self.slices, stored, stored.state).items():
                fused, _, number = name.rpartition(".")
                if number.isdigit() and moe.is_fused(fused, self.files.models[mp][0]):
                    check_expert(stored, expert, number)
                    if ("param", fused) in self.slices.states:
                        self._add_fused_expert(mp, fused, int(number), stored.key(tensor))
                    else:
                        rows[mp, fused][int(number)] = stored.key(tensor), tensor
                    continue
                check_expert(stored, expert, moe.expert_number(name) or str(expert))
                self._add(ModuleTensor(mp, name, name, stored.key(tensor), tensor))
        for (mp, name), experts in rows.items():
            self._stack_experts(mp, name, experts)

    def _stack_experts(self, mp: int, name: str, experts: Mapping[int, StoredKey]) -> None:
        """Add a parameter that has no master as its experts' files have it, in their order."""
        model = self.files.models[mp][0]
        if self.files.tp > 1:
            raise FormatError(
                f"{self.files.folder}: {name} is cut over both expert- and tensor-parallel ranks,"
                " which is not read"
            )
        numbers = sorted(itertools.chain(*moe.placement(name, model).values()))
        if sorted(experts) != numbers:
            raise FormatError(
                f"{model.file.path} says that {name} has the experts {numbers}, but there are files"
                f" with the experts {sorted(experts)}: a file is missing, or belongs to another run"
            )
        keys: list[str] = []
        for number in numbers:
            key, tensor = experts[number]
            keys.append(f"{key} as a row")
            self.importer.cut(keys[-1], key, 0, (1, *tensor.shape))
        layout = Sharded(0).join([(1, *experts[number][1].shape) for number in numbers])
        whole = f"{name} on mp_rank_{mp:02d}"
        reason = f"an expert of {name}, of which the optimizer has no second copy"
        self.importer.slice(whole, Consolidated(layout, keys), reason)
        self.slices.add_whole(mp, "param", name, whole, layout.shape)
        self.copied.add(name)

    def _add_fused_expert(self, mp: int, name: str, number: int, key: str) -> None:
        self.copied.add(name)
        slices = self.slices.states["param", name]
        reason = f"a copy of an expert of {name}, compared with it by verify"
        for ep, experts in moe.placement(name, self.files.models[mp][0]).items():
            whole = slices.keys.get(self.slices.place(mp, ep))
            if whole and number in experts:
                row = experts.index(number)
                self.importer.slice_duplicate(whole, key, reason, at=(row,))


def add_model_states(
    slices: Slices, mp: int, owned: Collection[str], add: Callable[[ModuleTensor], None]
) -> None:
    """Add the module in the model states of a rank; `add` adds tensors of parameters.

    `owned` are the parameters that are stored elsewhere, as masters.
    """
    shared = _shared_params(slices.files)
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


def _shared_params(files: Files) -> dict[str, str]:
    """The second names of parameters on all model-parallel ranks, and their owners."""
    shared: dict[str, str] = {}
    for first, *_ in files.models:
        owners = first.state.get("shared_params") or {}
        shared |= {str(alias): str(owner) for alias, owner in owners.items()}
    return shared


def _add_buffer(slices: Slices, tensor: ModuleTensor) -> None:
    if slices.place(tensor.mp) in slices.states["buffer", tensor.name].keys:
        slices.importer.skip(tensor.key, "buffer", _OTHER_RANKS)
    else:
        slices.add_whole(tensor.mp, "buffer", tensor.name, tensor.key, tensor.stored.shape)


def add_tensor(slices: Slices, tensor: ModuleTensor) -> None:
    """Add a tensor of a parameter: a copy of its master, or the parameter where it has none."""
    owner, key = tensor.owner, tensor.key
    master = slices.key_on(tensor.mp, owner)
    if master is None:
        slices.add_whole(tensor.mp, "param", tensor.name, key, tensor.stored.shape)
    elif master != key:
        tied = "" if owner == tensor.name else f"tied to {owner}: "
        reason = f"{tied}a copy of {owner}'s master in {tensor.stored.dtype}, compared with it by"
        slices.importer.slice_duplicate(master, key, f"{reason} verify")


def add_frozen(slices: Slices, mp: int) -> None:
    """Add frozen parameters: of ZeRO-2 whole on each rank, of ZeRO-3 only here, cut over ranks."""
    models = slices.files.models[mp]
    shapes = models[0].state.get("frozen_param_shapes") or {}
    for name, tensor in _frozen(models[0]).items():
        pieces = [_frozen_piece(model, name, models[0]) for model in models]
        keys = [model.key(piece) for model, piece in zip(models, pieces, strict=True)]
        if not slices.files.zero3:
            slices.add_whole(mp, "param", name, keys[0], tensor.shape)
            continue
        _refuse_quantized(models[0], name, tensor)
        shape = tuple(map(int, shapes[name]))
        layouts = flat_layouts({name: shape}, [piece.shape[0] for piece in pieces])
        layout, used = touched(layouts[name])
        whole = Consolidated(layout, [keys[i] for i in used])
        slices.add(mp, None, "param", name, whole, FROZEN)


def _refuse_quantized(model: Stored, name: str, piece: StoredTensor) -> None:
    """Raise FormatError for a frozen weight that ZeRO++ keeps as codes.

    Their scales are attributes of tensors that are not saved (`_partition_param` in
    `runtime/zero/partition_parameters.py`, `_get_param_fragment_func` in `runtime/engine.py`).
    """
    if piece.dtype == np.int8 and zero_config(model).get("zero_quantized_nontrainable_weights"):
        raise FormatError(
            f"{model.file.path} has the frozen {name} as codes of 8 bits, without their scales:"
            " zero_quantized_nontrainable_weights was on, and DeepSpeed does not save them. Take"
            " this weight from the model that the run began with, and save with"
            " exclude_frozen_parameters=True"
        )


def _frozen(model: Stored) -> Mapping[str, Any]:
    return model.state.get("frozen_param_fragments") or {}


def _frozen_piece(model: Stored, name: str, first: Stored) -> StoredTensor:
    piece = _frozen(model).get(name)
    if isinstance(piece, StoredTensor):
        return piece
    raise FormatError(
        f"{model.file.path} has no fragment of the frozen {name}, but {first.name} has"
    )


def names_in(files: Files, key: str) -> set[str]:
    """The names under a key of the model states, on all model-parallel ranks."""
    return {str(name) for first, *_ in files.models for name in first.state.get(key) or ()}


def tensors_of(
    slices: Slices, stored: Stored, values: Mapping[str, Any], prefix: str = ""
) -> dict[str, StoredTensor]:
    """The tensors among values, of which the others become extras.

    Raises FormatError for tensors inside objects that cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, value in values.items():
        if isinstance(value, StoredTensor):
            tensors[name] = value
            continue
        for holder in tensor_holders(value):
            raise FormatError(closed_tensors(holder))
        slices.importer.extra(stored.name, f"{prefix}{name}", value)
    return tensors


def aliases(
    tensors: Mapping[str, StoredTensor], owned: Iterable[str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Second names, each with the name that owns the tensor.

    `shared_params` lists them, or both are one block of one storage: ZeRO-0 and pipelines have no
    `shared_params`.
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
    """The names in the whole model of the tensors of a pipeline layer's file; None if ambiguous.

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
    """Raise FormatError for a layer that the optimizer has parameters of, but that has no file."""
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
        count = counts[layer] if layer < len(counts) else len(stored)
        _check_layer_experts(files, layer, mp, stored, count)


def _check_layer_experts(
    files: Files, layer: int, mp: int, experts: Collection[int], count: int
) -> None:
    def file(expert: int) -> str:
        return next(
            (stored.name for key, stored in files.experts.items() if key == (layer, expert, mp)),
            f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt",
        )

    there = listed([file(expert) for expert in sorted(experts)], 16)
    if missing := sorted(set(range(count)) - set(experts)):
        raise FormatError(
            f"{files.folder}/{file(missing[0])} is missing: by {files.models[0][0].name} the layer"
            f" has {count} experts, and {there} are there; one of these that is too many was"
            " renamed or belongs to another run, or the model states do"
        )
    if len(experts) > count:
        raise FormatError(
            f"{files.folder} has {file(max(experts))}, but by {files.models[0][0].name} the layer"
            f" has {count} experts, and {there} are there; one of these, or the model states,"
            " belongs to another run"
        )


# What an expert's file has, by the names that all experts of the layer share.
_Signature = frozenset[tuple[str, Shape, str]]


def check_expert_tensors(files: Files) -> None:
    """Raise FormatError for an expert's file that differs from others of its layer in names,
    shapes or dtypes, or has what no parameter of the run is called.
    """
    layers: dict[tuple[int, int], list[Stored]] = defaultdict(list)
    for (layer, _, mp), stored in sorted(files.experts.items()):
        layers[layer, mp].append(stored)
    for experts in layers.values():
        _check_alike(experts)
    known_names = _generic_names(files)
    for stored in files.experts.values() if known_names else ():
        if unknown := sorted({name for name, _, _ in _signature(stored)} - known_names):
            raise FormatError(
                f"{stored.file.path} has {listed(unknown, 1)}, but by {files.models[0][0].name}"
                " there is no such parameter: the file belongs to another run. Put the run's own"
                " file in its place"
            )


def _check_alike(experts: Sequence[Stored]) -> None:
    """Raise FormatError for the file of an expert that is not like most of its layer."""
    signatures = [_signature(stored) for stored in experts]
    usual, _ = Counter(signatures).most_common(1)[0]
    like = experts[signatures.index(usual)]
    for stored, signature in zip(experts, signatures, strict=True):
        if signature != usual:
            first, second = (
                ", ".join(
                    f"{name} {dtype} {list(shape)}" for name, shape, dtype in sorted(some)[:1]
                )
                or "nothing else"
                for some in (signature - usual, usual - signature)
            )
            raise FormatError(
                f"{stored.file.path} has {first}, where {like.name}, of another expert of the"
                f" layer, has {second}: one of the two files belongs to another run, or to another"
                " layer. Put the run's own file in its place"
            )


def _signature(stored: Stored) -> _Signature:
    return frozenset(
        (moe.without_number(name), tensor.shape, str(tensor.dtype))
        for name, tensor in stored.state.items()
        if isinstance(tensor, StoredTensor)
    )


def _generic_names(files: Files) -> set[str]:
    """The names of the run's parameters and buffers, without experts' numbers; none where the
    model states have no list of parameters.
    """
    if not any(model.state.get("param_shapes") for model in files.all_models):
        return set()
    names = names_in(files, "buffer_names") | names_in(files, "frozen_param_shapes")
    for model in files.all_models:
        for group in as_list(known(model.state.get("param_shapes"))):
            names.update(map(str, as_dict(group)))
    return names | set(map(moe.without_number, names))
