"""Megatron's checkpoints of models that FSDP cuts, in PyTorch's distributed format (DCP).

`--ckpt-format torch_dcp` is that of torch's FSDP2: the optimizer numbers its parameters, and its
masters prove which is which. `fsdp_dtensor` is that of Megatron-FSDP: states go by the names of
parameters, and what a gated layer has in one tensor is stored as gate (`_w`) and up (`_v`). Every
chunk says which block of its tensor it is.

Facts: `megatron/training/checkpointing.py`, `megatron/core/transformer/fsdp_dtensor_checkpoint.py`
and `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.13.1 to core_v0.19.0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.dcp.metadata import METADATA_FILE, DcpMetadata, TensorEntry, read_metadata
from jax_ucp.formats.dcp.reader import (
    Save,
    account_for_files,
    check_facts,
    read_object,
)
from jax_ucp.formats.dcp.source import DcpSource, chunk_key, consolidated
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron import notes
from jax_ucp.formats.megatron.dist_args import of_model, refuse_difference
from jax_ucp.formats.megatron.dist_files import checkpoint_folder, without_backend
from jax_ucp.formats.megatron.dist_names import gate_and_up
from jax_ucp.formats.megatron.files import (
    Args,
    about,
    args_of,
    check_iteration,
    require_folder,
)
from jax_ucp.formats.megatron.legacy_optimizer import BUFFERS, numbered_alone
from jax_ucp.formats.megatron.numbered import Module, numbered_states
from jax_ucp.formats.megatron.sizes import check_whole
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, is_expert, parts_of
from jax_ucp.formats.options import Options
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents

_PICKLE = b"\x80"
# Every checkpoint of these has the object, and nobody else's has.
_MARK = "num_floating_point_operations_so_far"
# Keys of torch_dist, which opens by its `metadata.json`: shards of objects, stacked layers.
_TORCH_DIST = re.compile(rb"/shard_\d+(?:\.\d+)*_\d|decoder\.layers\.(?:self_attention|mlp)\.")
_WRAPPER = "module."
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_GATED_LAYER = re.compile(r"\.linear_fc1\.(weight|bias)\d*$")
# Groups that differ in one of these may have rates of their own.
_KINDS = ("lr_mult", "wd_mult", "is_decoupled_lr", "is_expert_parallel", "max_lr", "min_lr")
_EXTRA_STATE = "._extra_state"
_Path = tuple[str | int, ...]


def recognise(path: FilePath) -> bool:
    if not path.is_dir():
        return False
    folder = checkpoint_folder(path)
    table = (folder if folder.is_dir() else path) / METADATA_FILE
    if not table.is_file():
        return False
    data = table.read_bytes()
    if _MARK.encode() in data or _TORCH_DIST.search(data):
        return True
    # below a root nobody else would say what is wrong with it
    return folder != path and not data.startswith(_PICKLE)


def open_megatron_fsdp(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory, or in one iteration's folder.

    Raises FormatError, naming the file and the tensor, where metadata and files do not fit
    together, or tensors of several ranks had one name, so that only one rank's are stored; also
    for a checkpoint of torch_dist that lost its `metadata.json`.
    """
    folder = checkpoint_folder(path)
    require_folder(path, folder)
    metadata = read_metadata(folder, _of_optimizer if options.weights_only else None)
    if _MARK not in metadata.objects:
        raise without_backend(folder)
    try:
        return Reader(metadata, options).contents()
    except (FormatError, LayoutError) as error:
        if str(folder) in str(error):
            raise
        raise type(error)(f"{folder}: {error}") from error


def _of_optimizer(metadata: DcpMetadata) -> frozenset[str]:
    """The names of what lies in the optimizer's dict."""
    return frozenset(fqn for fqn, path in metadata.paths.items() if path[0] == "optimizer")


@dataclass(frozen=True)
class Saved:
    """What the state dict had: tensors of the model by their names in it, and of the optimizer.

    Tensors are named in DCP's flattened way. `named` has states by parameter, `numbered` the dicts
    of optimizers that number their parameters.
    """

    weights: Mapping[str, str]
    named: Mapping[tuple[str, str], str | Any]
    settings: Mapping[str, Mapping[str, Any]]
    numbered: list[Any]
    beside: list[str]


def saved(paths: Mapping[str, _Path], leaves: Mapping[str, Any]) -> Saved:
    """What each path of the state dict means. `leaves` has tensors and objects by flat name."""
    weights: dict[str, str] = {}
    named: dict[tuple[str, str], Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    tree: dict[Any, Any] = {}
    beside: list[str] = []
    for fqn, leaf in leaves.items():
        match paths[fqn]:
            case ("model", str(name)):
                weights[_bare(name)] = fqn
            case ("optimizer", "state", str(name), str(state)) if not _is_number(name):
                named[_bare(name), state] = leaf
            case ("optimizer", "param_to_group_meta", str(name), str(setting)):
                settings.setdefault(_bare(name), {})[setting] = leaf
            case ("optimizer", *steps):
                _put(tree, steps, leaf)
            case _:
                beside.append(fqn)
    optimizers = _listed(tree)
    numbered = optimizers if isinstance(optimizers, list) else [optimizers] if tree else []
    return Saved(weights, named, settings, numbered, beside)


def _bare(name: str) -> str:
    """The name of a parameter in the model, without those of the modules that wrap it.

    >>> _bare("module.module.decoder.final_layernorm.weight")
    'decoder.final_layernorm.weight'
    """
    while name.startswith(_WRAPPER):
        name = name.removeprefix(_WRAPPER)
    return name


def _put(tree: dict[Any, Any], steps: Iterable[str | int], leaf: Any) -> None:
    *above, last = steps
    inside = reduce(lambda node, step: node.setdefault(step, {}), above, tree)
    inside[last] = leaf


def _listed(tree: Any) -> Any:
    """Nested dicts with lists in the place of those that were lists. Paths have text for the number
    of a parameter, which is a key of a dict.

    >>> _listed({"params": {0: "a", 1: "b"}, "state": {"0": "c"}})
    {'params': ['a', 'b'], 'state': {0: 'c'}}
    """
    if not isinstance(tree, dict):
        return tree
    inside = {int(k) if _is_number(k) else k: _listed(v) for k, v in tree.items()}
    return list(inside.values()) if tree and list(tree) == list(range(len(tree))) else inside


def _is_number(step: str | int) -> bool:
    return isinstance(step, str) and step.isdecimal() and len(step) < 10


class Reader:
    """Puts one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, metadata: DcpMetadata, options: Options):
        self.metadata, self.options = metadata, options
        self.folder = metadata.folder
        self.table = self.folder / metadata.files[0]
        self.source = DcpSource(metadata)
        self.importer = Import("megatron", self.folder, self.source, options.on_conflict)
        self.left = _of_optimizer(metadata) if options.weights_only else frozenset[str]()
        self.save = Save("", metadata, self.source, self.left)
        self.objects = self._objects()
        self.args = Args(args_of(self.objects, self.table))
        self.importer.about = about(
            "torch_dcp or fsdp_dtensor", self.args, self.objects.get("iteration")
        )

    def contents(self) -> Contents:
        check_iteration(self._file("iteration"), self.folder, self.objects.get("iteration"))
        check_facts(self.save)
        stored = saved(self._paths(), self._leaves())
        self.check_settings()
        model = self._model(stored)
        check_degrees(self.args, model)
        refuse_difference(self.table, of_model(self.args, _shapes(model)))
        self._check_shapes(model)
        states = self._states(stored, model)
        for name, weight in model.items():
            self._parameter(name, weight, states[name])
        self._settings(stored)
        self._beside(stored)
        self._notes(stored, model)
        account_for_files(self.importer, self.save)
        return self.importer.contents()

    def _objects(self) -> dict[str, Any]:
        """Every object, kept as an extra."""
        self.save.open_ahead()
        return {
            fqn: read_object(self.importer, fqn, span, self.save)
            for fqn, spans in self.metadata.objects.items()
            for span in spans
        }

    def _check_shapes(self, model: Mapping[str, Consolidated]) -> None:
        """Raise LayoutError where a parameter is not whole: its writer took the part that a
        tensor-parallel rank has for all of it, so that ranks overwrote one another.
        """
        degrees = self.args.expert_ranks, self.args.degree("tensor_model_parallel_size")
        if max(degrees) == 1:
            return
        try:
            check_whole(self.args, _shapes(model))
        except LayoutError as error:
            raise LayoutError(
                f"{self.table}: with tensor parallelism some parameters are not stored whole, or in"
                f" another way than is known here; save with --ckpt-format torch_dist. {error}"
            ) from None

    def _file(self, fqn: str) -> FilePath:
        """The file that an object lies in."""
        spans = self.metadata.objects.get(fqn)
        return self.folder / spans[0].file if spans else self.table

    def check_settings(self) -> None:
        """Raise FormatError where files have settings of several steps: the first of groups that
        are alike, such as those without weight decay, says how often it stepped, and its rate.
        """
        facts, kinds = Facts(self.folder), dict[str, dict[str, Any]]()
        said: list[tuple[str, str, str, Any]] = []
        for fqn, spans in self.metadata.objects.items():
            match self._paths().get(fqn):
                case ("optimizer", "param_to_group_meta", str(name), str(setting)):
                    kinds.setdefault(name, {})[setting] = self.objects[fqn]
                    said.append((spans[0].file, name, setting, self.objects[fqn]))
        for file, name, setting, value in said:
            if setting in ("step", "lr"):
                of = [kinds[name].get(kind) for kind in _KINDS] if setting == "lr" else []
                facts.state(file, f"{setting} of parameter groups", value, str(of))

    def _paths(self) -> Mapping[str, _Path]:
        every = (*self.metadata.tensors, *self.metadata.objects)
        if lost := [fqn for fqn in every if fqn not in self.metadata.paths]:
            raise FormatError(f"{self.table}: {lost[0]!r} is not in planner_data")
        return self.metadata.paths

    def _leaves(self) -> dict[str, Any]:
        """Tensors and objects in the order of the state dict."""
        tensors = {fqn: _tensor(fqn, entry) for fqn, entry in self.metadata.tensors.items()}
        every = {**self.objects, **tensors}
        return {fqn: every[fqn] for fqn in self.metadata.paths if fqn in every}

    def _model(self, stored: Saved) -> dict[str, Consolidated]:
        """The parameters of the model, by their global names."""
        fqns = _without_extra_states(stored.weights)
        for fqn in set(stored.weights.values()) - set(fqns.values()):
            self._skip(fqn, notes.TRANSFORMER_ENGINE)
        return self._whole(fqns)

    def _whole(self, fqns: Mapping[str, str]) -> dict[str, Consolidated]:
        """Tensors of the model, or one state of each, by parameter; gate and up are one."""
        params = {local: self._consolidated(fqn) for local, fqn in fqns.items()}
        halves = gate_and_up(params)
        for local, (gate, up) in halves.items():
            params[local] = stacked(params.pop(gate), params.pop(up))
        return {
            self._name(local): param
            if local in halves
            else regrouped(param, _gated_ranks(self.args, local))
            for local, param in params.items()
        }

    def _scalars(self, fqns: Mapping[str, str]) -> dict[str, Consolidated]:
        """One number of each parameter, of which halves have one each: replicas."""
        keys: dict[str, list[str]] = {}
        for local, fqn in fqns.items():
            keys.setdefault(self._name(local), []).extend(self._consolidated(fqn).keys)
        return {
            name: Consolidated(Replicated().join([()] * len(own)), own)
            for name, own in keys.items()
        }

    def _consolidated(self, fqn: str) -> Consolidated:
        entry = self.metadata.tensors.get(fqn)
        if entry is None:
            raise FormatError(f"{self.table}: {fqn} should be a tensor, but is an object")
        try:
            entry.layout().check()
        except LayoutError as error:
            raise LayoutError(f"{self.table}: {fqn}: {error}") from None
        return consolidated(fqn, entry)

    def _name(self, local: str) -> str:
        """The global name of a parameter, of which `local` may be a half."""
        experts, hidden = range(self.args.get("num_experts") or 0), self.args.get("hidden_size", 0)
        whole = next(iter(gate_and_up([f"{local[:-1]}w", f"{local[:-1]}v"])), local)
        (part, *others) = parts_of(whole, (), 0, experts, hidden)
        if others or part.transposed:
            raise FormatError(
                f"{local}: experts that are grouped in one tensor are not read in this format; save"
                " with --ckpt-format torch_dist"
            )
        return part.name

    def _skip(self, fqn: str, reason: str) -> None:
        for chunk in self.metadata.tensors[fqn].chunks if fqn in self.metadata.tensors else ():
            self.importer.skip(chunk_key(fqn, chunk), "", reason)

    def _states(
        self, stored: Saved, model: Mapping[str, Consolidated]
    ) -> dict[str, dict[str, Consolidated | np.ndarray]]:
        """The optimizer's states by parameter: tensors, or numbers."""
        states: dict[str, dict[str, Consolidated | np.ndarray]] = {name: {} for name in model}
        if self.options.weights_only:
            self._leave_optimizer()
            return states
        by_state: dict[str, dict[str, str]] = {}
        for local, state, leaf in self._leaves_of_states(stored):
            if isinstance(leaf, StoredTensor):
                by_state.setdefault(state, {})[local] = leaf.key
            elif isinstance(leaf, int | float):
                _add(states, self._name(local), state, _number(leaf))
        for state, fqns in by_state.items():
            scalar = all(self.metadata.tensors[fqn].shape == () for fqn in fqns.values())
            whole = self._scalars(fqns) if scalar else self._whole(fqns)
            for name, param in whole.items():
                _add(states, name, state, param)
        check_alike(states)
        return states

    def _leave_optimizer(self) -> None:
        for fqn in self.left & self.metadata.tensors.keys():
            for chunk in self.metadata.tensors[fqn].chunks:
                self.importer.leave(chunk_key(fqn, chunk), "", notes.LEFT)

    def _leaves_of_states(self, stored: Saved) -> Iterator[tuple[str, str, Any]]:
        """(parameter, state, tensor or number) of everything that optimizers have."""
        for (local, state), leaf in stored.named.items():
            yield local, state, leaf
        for local, settings in stored.settings.items():
            if "step" in settings:
                yield local, "step", settings["step"]
        if not stored.numbered:
            return
        try:
            found = list(numbered_states(self.table, stored.numbered, self._modules(stored), False))
        except Undecided as error:
            self._keep_apart(stored, str(error))
            return
        for module, state in found:
            key = state.key
            value = _tensor(key, self.metadata.tensors[key]) if key else state.value
            yield module.local, state.state, value

    def _modules(self, stored: Saved) -> list[Module]:
        """The model's parameters in the order of its state dict."""
        tensors = self.metadata.tensors
        return [
            Module(
                local, 0, StoredTensor(fqn, tensors[fqn].shape, tensors[fqn].dtype, "", 0, ()), []
            )
            for local, fqn in _without_extra_states(stored.weights).items()
            if not local.endswith(BUFFERS)
        ]

    def _keep_apart(self, stored: Saved, reason: str) -> None:
        """Keep the optimizer's tensors under `other`, by their places in the state dict."""
        for path, fqn in ((self.metadata.paths[fqn], fqn) for fqn in self.metadata.tensors):
            if path[0] == "optimizer":
                self.importer.parameter(
                    "other", fqn, self._consolidated(fqn), notes.kept_apart(reason)
                )
        self.importer.notes.append(notes.states_apart(reason))

    def _parameter(
        self, name: str, weight: Consolidated, states: Mapping[str, Consolidated | np.ndarray]
    ) -> None:
        weight = self._unpadded(name, weight)
        if name.endswith(BUFFERS):
            self.importer.parameter("buffer", name, weight, notes.BUFFER)
            return
        if "param" in states:
            self.importer.duplicate("param", name, weight, notes.copy_of_master(name))
        else:
            self.importer.parameter("param", name, weight, f"the parameter {name}")
        for state, value in sorted(states.items(), key=lambda own: own[0] != "param"):
            if isinstance(value, Consolidated):
                own = self._unpadded(name, value)
                self.importer.parameter(state, name, own, f"{state} of {name}")
            else:
                where = f"{self.metadata.files[0]}:optimizer ({state})"
                self.importer.constant(state, name, value, where)

    def _unpadded(self, name: str, param: Consolidated) -> Consolidated:
        vocab = self.options.sizes.get("vocab") if name in (EMBEDDING, TIED) else None
        if vocab is None or param.layout.shape == ():
            return param
        try:
            return replace(param, layout=param.layout.clip((vocab, *param.layout.shape[1:])))
        except LayoutError as error:
            raise LayoutError(f"{name}, with vocab={vocab!s:.40} in sizes: {error}") from None

    def _settings(self, stored: Saved) -> None:
        for local, settings in stored.settings.items():
            self.importer.hyperparameters(self._name(local), settings)

    def _beside(self, stored: Saved) -> None:
        """Tensors beside model and optimizer, such as states of random generators, are extras."""
        for fqn in stored.beside:
            for chunk in self.metadata.tensors[fqn].chunks if fqn in self.metadata.tensors else ():
                entry, key = self.metadata.tensors[fqn], chunk_key(fqn, chunk)
                file, _, item = key.partition(":")
                tensor = StoredTensor(item, chunk.sizes, entry.dtype, "", 0, ())
                self.importer.extra(file, fqn, tensor)

    def _notes(self, stored: Saved, model: Mapping[str, Consolidated]) -> None:
        said = self.importer.notes
        kind = "Megatron-FSDP (fsdp_dtensor)" if stored.named else "torch's FSDP2 (torch_dcp)"
        said.append(f"saved by Megatron with {kind}")
        if "vocab" not in self.options.sizes and EMBEDDING in model:
            said.append(notes.padded_vocabulary(self.args.get("padded_vocab_size")))
        if self.options.weights_only:
            said.append(notes.WEIGHTS_ALONE)
        elif not (stored.named or stored.numbered):
            said.append(notes.WITHOUT_OPTIMIZER)
        elif numbered_alone(stored.numbered):
            said.append(notes.NUMBERED_ALONE)
        if self.args.absent:
            said.append(notes.defaults_taken(self.args.absent))


def _tensor(fqn: str, entry: TensorEntry) -> StoredTensor:
    return StoredTensor(fqn, entry.shape, entry.dtype, "", 0, ())


def _without_extra_states(weights: Mapping[str, str]) -> dict[str, str]:
    return {local: fqn for local, fqn in weights.items() if not local.endswith(_EXTRA_STATE)}


def _shapes(model: Mapping[str, Consolidated]) -> dict[str, Shape]:
    return {name: param.layout.shape for name, param in model.items()}


def _number(value: int | float) -> np.ndarray:
    return np.asarray(value, np.int32 if isinstance(value, int) else None)


def _add(states: Mapping[str, dict[str, Any]], name: str, state: str, value: Any) -> None:
    """Add a state of a parameter. Raises FormatError for one of no parameter, and for two."""
    if name not in states:
        raise FormatError(
            f"{state} is there of {name}, but the model has no such parameter: a part of the"
            " checkpoint is missing, or is of another run"
        )
    own = states[name].setdefault(state, value)
    if own is not value and not (isinstance(own, np.ndarray) and np.array_equal(own, value)):
        raise FormatError(f"{state} of {name} is stored twice")


def check_alike(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise FormatError where a parameter has other states than the rest; a frozen one has none."""
    kinds = Counter(frozenset(own) for own in states.values() if own)
    if len(kinds) <= 1:
        return
    usual = kinds.most_common(1)[0][0]
    name, own = next(
        (n, frozenset(own)) for n, own in states.items() if own and own.keys() != usual
    )
    raise FormatError(
        f"{name} has the states {sorted(own)}, but {kinds[usual]} other parameters have"
        f" {sorted(usual)}: a part of the optimizer is missing. weights_only opens the weights"
        " alone"
    )


def check_degrees(args: Args, model: Mapping[str, Any]) -> None:
    """Raise FormatError where tensors of several ranks had one name.

    DCP keeps one of those that begin at the same place, and says nothing of the others.
    """
    kinds = ["pipeline_model"]
    if args.optional("ckpt_format") != "fsdp_dtensor":
        kinds += ["tensor_model", "expert_model"]
    for kind in kinds:
        if (degree := args.degree(f"{kind}_parallel_size")) > 1:
            raise FormatError(
                f"args.{kind}_parallel_size is {degree}, and in this format the ranks call their"
                " tensors alike: those of all but one are lost. Save with --ckpt-format torch_dist"
            )
    count = args.get("num_experts") or 0
    kept = Counter(_EXPERT.sub("*", name) for name in model if is_expert(name))
    for name, experts in kept.items():
        if experts != count:
            raise FormatError(
                f"{name} is there of {experts} experts, but args.num_experts is {count}: ranks that"
                " had other experts called them alike, so that theirs are lost"
            )


def _gated_ranks(args: Args, local: str) -> int:
    """The ranks that have gate and up of their own one after the other in a tensor."""
    if not args.get("swiglu", False) or not _GATED_LAYER.search(local):
        return 1
    if is_expert(local):
        return args.expert_ranks
    return args.degree("tensor_model_parallel_size")


def stacked(gate: Consolidated, up: Consolidated) -> Consolidated:
    """Gate and up as one parameter: the rows of the gate, then those of up."""
    rows, *rest = gate.layout.shape
    if gate.layout.shape != up.layout.shape:
        raise FormatError(f"gate has shape {gate.layout.shape}, but up {up.layout.shape}")
    by = (rows, *(0 for _ in rest))
    below = [
        Fragment(f.shard + len(gate.keys), f.source, f.target.shift(by))
        for f in up.layout.fragments
    ]
    layout = ParamLayout(
        (2 * rows, *rest),
        (*gate.layout.shards, *up.layout.shards),
        (*gate.layout.fragments, *below),
    )
    return Consolidated(layout, [*gate.keys, *up.keys])


def regrouped(param: Consolidated, ranks: int) -> Consolidated:
    """The gates of all ranks, then all ups, of a tensor that has gate and up of each in turn."""
    if ranks == 1:
        return param
    rows, *rest = param.layout.shape
    each, odd = divmod(rows, 2 * ranks)
    if odd:
        raise FormatError(f"{rows} rows are not gate and up of {ranks} ranks")
    fragments: list[Fragment] = []
    for rank in range(ranks):
        for half in range(2):
            start, target = (2 * rank + half) * each, (half * ranks + rank) * each
            block = Box((start, *(0 for _ in rest)), (start + each, *rest))
            by = (target - start, *(0 for _ in rest))
            for fragment in param.layout.fragments:
                if part := fragment.narrow(block):
                    fragments.append(replace(part, target=part.target.shift(by)))
    return replace(param, layout=replace(param.layout, fragments=tuple(fragments)))
