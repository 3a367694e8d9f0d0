"""Megatron's legacy checkpoints (`--ckpt-format torch`): a file per model-parallel rank.

Each rank's tensors get their global names, masters and moments are found beside them, or in flat
buffers by walking those, and the rules of the language (`shard_spec/specs/megatron.yaml`, or the
user's spec) say how the tensor-parallel ranks' shards form parameters. Copies under expert
parallelism are replicas; 16-bit weights and the second copy of a tied embedding are duplicates of
the masters.

Facts: `megatron/training/checkpointing.py`, `megatron/core/optimizer/*.py` of Megatron-LM
core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, LayoutError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.megatron import notes
from jax_ucp.formats.megatron.dist_proof import are_remainders, are_rounded
from jax_ucp.formats.megatron.files import (
    MODEL_FILE,
    OPTIM_FILE,
    TRACKER,
    Args,
    Rank,
    about,
    differing,
    is_checkpoint,
    iteration_folder,
    open_ranks,
)
from jax_ucp.formats.megatron.gtp import uses_gtp
from jax_ucp.formats.megatron.legacy_optimizer import (
    BUFFERS,
    beside_tensors,
    find_states,
    numbered_alone,
)
from jax_ucp.formats.megatron.numbered import Module, ModuleState
from jax_ucp.formats.megatron.sizes import sizes_of
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, Part, is_expert, layer_of, parts_of
from jax_ucp.formats.options import Options
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import what_is
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated, Unique
from jax_ucp.shard_spec.notation import built_in, load
from jax_ucp.shard_spec.rules import Shard, Spec, layouts
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents


def recognise(path: FilePath) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_megatron_legacy(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory (with its tracker), or in one iteration's folder.

    Raises FormatError, naming the file, for ranks that are missing or of another run, and
    LayoutError where the rules do not fit the shards.
    """
    folder = iteration_folder(path)
    if not folder.is_dir():
        raise NotACheckpoint(
            f"Megatron's folder of the iteration in {path / TRACKER}, {folder.name}, is not beside"
            " it: there is no such folder. Correct the file, or open the folder that is meant"
        )
    args, ranks = open_ranks(folder, options.weights_only)
    if uses_gtp(args):
        raise FormatError(
            f"{ranks[0].model.path} tells of generalized tensor parallelism (GTP), of which the"
            " legacy format keeps the shards of one rank alone"
        )
    return _Reader(folder, args, ranks, options).contents()


_LAYER_WISE = "layer_wise_optimizer_"
_KV_DOWN = ".self_attention.linear_kv_down_proj.weight"
# A rank, and its modules by model chunk.
_RankModules = tuple[Rank, list[list[Module]]]


class _Reader:
    """Puts the pieces of one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, folder: FilePath, args: Args, ranks: Sequence[Rank], options: Options):
        self.folder, self.args, self.ranks, self.options = folder, args, ranks, options
        files = {rank.name: rank.model for rank in ranks}
        files |= {f"{rank.folder.name}/{OPTIM_FILE}": rank.optim for rank in ranks if rank.optim}
        self.files = Combined.of_files(files)
        self.importer = Import("megatron", folder, self.files, options.on_conflict)
        self.importer.about = about("legacy", args, ranks[0].tree.get("iteration"))
        self.importer.unknown |= {name for file in files.values() for name in file.unknown}
        # (state, parameter) -> by tensor-parallel rank, the keys of every copy of that rank's
        # shard.
        self.keys: dict[tuple[str, str], dict[int, list[str]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.values: dict[tuple[str, str], dict[str, Any]] = {}

    def contents(self) -> Contents:
        modules = self._modules_of_ranks(self._chunks())
        self._add_weights(modules)
        optimizer = self._add_optimizer_states(modules)
        layouts = self._layouts()
        self._parameters(layouts)
        if optimizer:
            self._check_masters(layouts)
        self._extras()
        self._other_files()
        self._notes(optimizer)
        return self.importer.contents()

    def _modules_of_ranks(
        self, chunks: Mapping[str, Sequence[dict[str, Any]]]
    ) -> list[_RankModules]:
        """The modules of every rank, by chunk."""
        first_layers = self._first_layers(chunks)
        modules: list[_RankModules] = []
        for rank in self.ranks:
            own = enumerate(chunks[rank.folder.name])
            by_chunk = [self._modules(rank, c, chunk, first_layers[c, rank.pp]) for c, chunk in own]
            modules.append((rank, by_chunk))
        return modules

    def _add_weights(self, modules: Sequence[_RankModules]) -> None:
        for rank, by_chunk in modules:
            for module in itertools.chain(*by_chunk):
                key, shape = rank.key(module.tensor), module.tensor.shape
                self._add(rank, module, ModuleState("weight", key, shape))

    def _add_optimizer_states(self, modules: Sequence[_RankModules]) -> bool:
        """Add the optimizer's states, or keep all apart; returns whether there are any to add."""
        if self.options.weights_only:
            for rank in self.ranks:
                self._leave_optimizer(rank)
            return False
        states: list[tuple[Rank, Module, ModuleState]] = []
        undecided: list[str] = []
        for rank, by_chunk in modules:
            try:
                states += self._states_of(rank, by_chunk)
            except Undecided as error:
                undecided.append(f"{rank.name}: {error}")
        if undecided:
            self._keep_apart(undecided[0])
            return False
        for rank, module, state in states:
            self._add(rank, module, state)
        return any(rank.has_optimizer for rank in self.ranks)

    def _states_of(
        self, rank: Rank, by_chunk: Sequence[Sequence[Module]]
    ) -> list[tuple[Rank, Module, ModuleState]]:
        if not rank.has_optimizer:
            return []
        trained = [[m for m in chunk if not m.local.endswith(BUFFERS)] for chunk in by_chunk]
        return [(rank, module, state) for module, state in find_states(self.args, rank, trained)]

    def _chunks(self) -> dict[str, list[dict[str, Any]]]:
        """The model chunks of every rank, by its folder: several for virtual pipeline stages."""
        v = self.args.degree("virtual_pipeline_model_parallel_size")
        names = ["model"] if v == 1 else [f"model{i}" for i in range(v)]
        chunks: dict[str, list[dict[str, Any]]] = {}
        for rank in self.ranks:
            have = [name for name in rank.tree if name.startswith("model")]
            if have != names:
                raise FormatError(
                    f"{rank.model.path} has {have}, where by its args there should be {names}"
                )
            chunks[rank.folder.name] = [_core_chunk(rank, name) for name in names]
        return chunks

    def _first_layers(
        self, chunks: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[tuple[int, int], int]:
        """The global number of the first layer of each (chunk, pipeline stage).

        Layers are in order of chunk, then stage, however many each has
        (`get_transformer_layer_offset`).
        """
        counts: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            for c, chunk in enumerate(chunks[rank.folder.name]):
                numbers = sorted({number for number in map(layer_of, chunk) if number is not None})
                count = len(numbers)
                if numbers != list(range(count)):
                    raise FormatError(
                        f"{rank.model.path} has the layers {numbers}; some are missing"
                    )
                others = counts.setdefault((c, rank.pp), count)
                if others != count:
                    raise FormatError(
                        f"{rank.model.path} has {count} layers, another rank of its pipeline stage"
                        f" {others}"
                    )
        places = sorted(counts)
        *firsts, total = itertools.accumulate([counts[place] for place in places], initial=0)
        if total != (want := self.args.get("num_layers", total)):
            raise FormatError(
                f"{self.folder} has {total} layers in all stages, but args.num_layers is {want}"
            )
        return dict(zip(places, firsts, strict=True))

    def _modules(
        self, rank: Rank, c: int, chunk: Mapping[str, Any], first_layer: int
    ) -> list[Module]:
        """The tensors of one chunk, in module order, with the parameters that are in them."""
        degree = self.args.degree("expert_model_parallel_size")
        each, rest = divmod(self.args.get("num_experts") or 0, degree)
        if rest:
            raise FormatError(
                f"{rank.model.path}: args.num_experts is not divisible by the expert parallel"
                " degree"
            )
        experts = range(rank.ep * each, (rank.ep + 1) * each)
        hidden = self.args.get("hidden_size", 0)
        prefix = "model" if "model" in rank.tree else f"model{c}"
        modules: list[Module] = []
        for local, tensor in chunk.items():
            label = f"{prefix}/{local}"
            if local.endswith("._extra_state"):
                self._skip_extra_state(rank, label, tensor)
                continue
            if not isinstance(tensor, StoredTensor):
                raise FormatError(
                    f"{rank.model.path}: {label} is not a tensor, but {what_is(tensor)}"
                )
            try:
                parts = parts_of(local, tensor.shape, first_layer, experts, hidden)
            except FormatError as error:
                raise FormatError(f"{rank.model.path}: {error}") from None
            modules.append(Module(local, c, tensor, parts))
        return modules

    def _skip_extra_state(self, rank: Rank, label: str, state: Any) -> None:
        reason = f"{notes.TRANSFORMER_ENGINE}, such as fp8 scales"
        if isinstance(state, StoredTensor):
            self.importer.skip(rank.key(state), "", reason)
        else:
            self.importer.skip(f"{rank.name}:{label}", type(state).__name__, reason)

    def _add(self, rank: Rank, module: Module, stored: ModuleState) -> None:
        """Add one state of a rank's tensor, as a shard of every parameter in it."""
        for part in module.parts:
            name = stored.state, part.name
            if stored.value is not None:
                self.values.setdefault(name, {})[rank.name] = stored.value
                continue
            key, shape = self._shard(module, part, stored)
            if stored.state == "weight":
                self.shapes[key] = shape
            index = rank.etp if is_expert(part.name) else rank.tp
            self.keys.setdefault(name, {}).setdefault(index, []).append(key)

    def _shard(self, module: Module, part: Part, stored: ModuleState) -> tuple[str, Shape]:
        """The key and shape of a parameter's part of a tensor: all of it, or cut out of it."""
        whole = len(module.parts) == 1 and not (stored.flat or part.transposed)
        if whole or stored.shape == ():
            return stored.key, stored.shape
        key, start = f"{stored.key}@{part.name}", stored.start + part.start
        self.importer.cut(key, stored.key, start, part.shape, part.transposed)
        return key, part.shape[::-1] if part.transposed else part.shape

    def _layouts(self) -> dict[str, ParamLayout]:
        """The layout of every parameter over its tensor-parallel ranks, by the rules."""
        params = {name: self._shards(name) for state, name in self.keys if state == "weight"}
        own_spec = self.options.spec
        spec = load(own_spec) if own_spec else Spec(extends=built_in("megatron"))
        try:
            return layouts(spec, params, self._sizes(spec))
        except LayoutError as error:
            remedy = "\nA spec (spec=, --spec) with `extends: megatron` adds to the rules"
            raise LayoutError(f"{self.folder}: {error}{'' if own_spec else remedy}") from error

    def _shards(self, name: str) -> list[Shard]:
        """The weight of each tensor-parallel rank, of which one copy is enough."""
        keys = self.keys["weight", name]
        ranks = range(self.args.degree("tensor_model_parallel_size"))
        if is_expert(name):
            ranks = range(max(rank.etp for rank in self.ranks) + 1)
        if absent := sorted(set(ranks) - set(keys)):
            file = keys[min(keys)][0].partition(":")[0]
            raise FormatError(
                f"{name} is in {file}, but not in the file of tensor-parallel rank {absent[0]}"
            )
        firsts = [keys[rank][0] for rank in ranks]
        return [Shard(self.shapes[key], key) for key in firsts]

    def _sizes(self, spec: Spec) -> dict[str, int]:
        """The numbers that rules may name: those of args, also by the built-in spec's names."""
        known = {
            **sizes_of(self.args),
            "down_is_cut": self._down_is_cut(),
            **self.options.sizes.of(spec.lengths, spec.switches),
        }
        return {name: int(n) for name, n in known.items() if isinstance(n, int)}

    def _down_is_cut(self) -> bool:
        """Whether a rank has its share of the rows of latent attention's down projections."""
        ranks = (self.args.optional("kv_lora_rank"), self.args.optional("qk_pos_emb_head_dim"))
        whole = sum(rank for rank in ranks if isinstance(rank, int))
        downs = [keys for (_, name), keys in self.keys.items() if name.endswith(_KV_DOWN)]
        return any(
            self.shapes[keys[0][0]][0] != whole for keys in downs if keys[0][0] in self.shapes
        )

    def _parameters(self, layouts: Mapping[str, ParamLayout]) -> None:
        """Every state of every parameter, and what is stored of it once more."""
        tied = self._is_tied(layouts)
        if tied:
            for state, name in [key for key in self.values if key[1] == TIED]:
                self.values.setdefault((state, EMBEDDING), {}).update(self.values[state, name])
        keyed, valued = _states_by_name(self.keys), _states_by_name(self.values)
        for name, layout in layouts.items():
            if not tied or name != TIED:
                self._states(name, layout, keyed[name], valued[name])
        if tied:
            self._tied(layouts[TIED])

    def _states(
        self, name: str, layout: ParamLayout, keyed: Sequence[str], valued: Sequence[str]
    ) -> None:
        """A parameter's states, of which some are tensors, with keys, and others values."""
        if name.endswith(BUFFERS):
            weights = _consolidated(layout, self.keys["weight", name])
            self.importer.parameter("buffer", name, weights, notes.BUFFER)
            return
        states = [state for state in keyed if state != "weight"]
        states.sort(key=lambda state: (state != "param", state == "step"))
        if self._has_remainders(name):
            states.remove("param")
            self._joined(name, layout)
        else:
            self._weight(name, layout, has_master="param" in states)
        for state in states:
            self._state(state, name, layout)
        for state in valued:
            self._value(state, name, self.values[state, name])

    def _weight(self, name: str, layout: ParamLayout, has_master: bool) -> None:
        weights = self.keys["weight", name]
        if has_master:
            reason, near = notes.copy_of_master(name), are_rounded(self.args)
            for copy in _copies(weights, len(layout.shards)):
                one = Consolidated(layout, copy)
                self.importer.duplicate("param", name, one, reason, near=near)
            return
        whole = _consolidated(layout, weights)
        self.importer.parameter("param", name, whole, f"the parameter {name}")

    def _has_remainders(self, name: str) -> bool:
        """Whether the low 16 bits of a parameter's master are stored, and not all of it."""
        dtypes: list[np.dtype] = []
        for state in ("param", "weight"):
            if (state, name) not in self.keys:
                return False
            (key, *_), *_ = self.keys[state, name].values()
            dtypes.append(self.importer.dtype(Consolidated(Unique().join([()]), [key])))
        return are_remainders(self.args, *dtypes)

    def _joined(self, name: str, layout: ParamLayout) -> None:
        """Add a parameter of which the low 16 bits are stored beside the weight."""
        low, weight = (
            _consolidated(layout, self.keys[state, name]) for state in ("param", "weight")
        )
        if self.options.on_conflict != "copy":
            self.importer.remainders(name, low, weight, notes.half_of_master(name))
            return
        self.importer.parameter("param", name, weight, f"the weight {name}, as asked")
        for key in low.keys:
            self.importer.skip(key.rpartition("@")[0] or key, "", notes.REST_OF_MASTER)

    def _check_masters(self, layouts: Mapping[str, ParamLayout]) -> None:
        """Raise FormatError for a parameter without a master in a distributed optimizer."""
        trained = [name for name in layouts if not name.endswith(BUFFERS)]
        if self._is_tied(layouts):
            trained.remove(TIED)
        lacking = [name for name in trained if ("param", name) not in self.keys]
        if lacking and self.args.get("use_distributed_optimizer"):
            raise FormatError(f"{self.folder}: no {OPTIM_FILE} holds the master of {lacking[0]}")

    def _is_tied(self, layouts: Mapping[str, ParamLayout]) -> bool:
        if TIED not in layouts:
            return False
        return not self.args.get("untie_embeddings_and_output_weights", False)

    def _state(self, state: str, name: str, layout: ParamLayout) -> None:
        keys = self.keys[state, name]
        if lost := sorted(set(range(len(layout.shards))) - set(keys)):
            raise FormatError(
                f"{self.folder}: {state} of {name} is not in the files of tensor-parallel rank"
                f" {lost[0]}, but in those of others"
            )
        if state == "step":
            flat = [key for _, copies in sorted(keys.items()) for key in copies]
            one = Consolidated(Replicated().join([()] * len(flat)), flat)
            self.importer.parameter(state, name, one, notes.STEP)
        else:
            self.importer.parameter(state, name, _consolidated(layout, keys), f"{state} of {name}")

    def _value(self, state: str, name: str, values: Mapping[str, Any]) -> None:
        """A number that each file has for a group of parameters: they must be equal."""
        (first, value), *_ = values.items()
        for file, other in values.items():
            if other != value:
                raise FormatError(
                    f"{self.folder / file}: {state} is {other}, but {value} in {first}: one of the"
                    " files is of another step or run"
                )
        array = np.asarray(value, np.int32 if isinstance(value, int) else None)
        self.importer.constant(state, name, array, f"{first}:optimizer ({state})")

    def _tied(self, layout: ParamLayout) -> None:
        """The last stage's copy of the word embedding, with optimizer states of its own."""
        if ("weight", EMBEDDING) not in self.keys:
            raise FormatError(
                f"{self.folder}: the output layer is tied to {EMBEDDING}, which is in no file"
            )
        for state in [state for state, n in self.keys if n == TIED]:
            self._tied_state(state, self.keys[state, TIED], layout)

    def _tied_state(
        self, state: str, keys: Mapping[int, Sequence[str]], layout: ParamLayout
    ) -> None:
        if state == "weight" and self._has_remainders(EMBEDDING):
            for key in itertools.chain(*keys.values()):
                self.importer.skip(key, "", notes.COPY_OF_HALF)
            return
        main = "param" if state == "weight" else state
        if main != "param" and (state, EMBEDDING) not in self.keys:
            raise FormatError(
                f"{self.folder}: the tied {TIED} has {state}, but {EMBEDDING} has not"
            )
        one = Replicated().join([()] * len(layout.shards)) if state == "step" else layout
        for copy in _copies(keys, len(layout.shards)):
            copied = Consolidated(one, copy)
            self.importer.duplicate(main, EMBEDDING, copied, notes.COPY_OF_EMBEDDING)

    def _leave_optimizer(self, rank: Rank) -> None:
        for key in rank.model.arrays():
            if key.startswith("optimizer/"):
                self.importer.leave(f"{rank.name}:{key}", "", notes.LEFT)
        if (rank.folder / OPTIM_FILE).is_file():
            self.importer.skip(f"{rank.folder.name}/{OPTIM_FILE}", "file", notes.LEFT)
        if "optimizer" in rank.tree:
            self.importer.skip(f"{rank.name}:optimizer", "param_groups", notes.LEFT)

    def _keep_apart(self, reason: str) -> None:
        """Keep the optimizer's tensors under `other`, by their places in the files."""
        for key, info in self.importer.stored.items():
            file, _, item = key.partition(":")
            if file.endswith(OPTIM_FILE) or _is_state(item.split("/")):
                label = f"{file.removesuffix('.pt')}.{item}".replace("/", ".")
                one = Consolidated(Unique().join([info.shape]), [key])
                self.importer.parameter("other", label, one, notes.kept_apart(reason))
        self.importer.notes.append(notes.states_apart(reason))

    def _extras(self) -> None:
        """Add everything else, by file. Of later ranks' args only what differs."""
        for rank in self.ranks:
            self._extras_of(rank)
            if rank.optim is not None:
                buffers = f"{rank.folder.name}/{OPTIM_FILE}:buffers"
                self.importer.skip(buffers, "layout", notes.LAYOUT)

    def _other_files(self) -> None:
        """Files that are neither the model's nor the optimizer's. Raises FormatError for those of
        an optimizer that is not read.
        """
        for path in itertools.chain(*(rank.folder.children() for rank in self.ranks)):
            name = f"{path.parent.name}/{path.name}"
            if path.name.startswith(_LAYER_WISE) and not self.options.weights_only:
                raise FormatError(
                    f"{path} has the states of a layer-wise optimizer (dist_muon), of which each"
                    " data-parallel rank writes a file with some parameters, by numbers; they are"
                    " not read from the legacy format. Save with --ckpt-format torch_dist, or open"
                    " the weights alone with weights_only"
                )
            if path.name not in (MODEL_FILE, OPTIM_FILE):
                left = path.name.startswith(_LAYER_WISE)
                self.importer.skip(name, "file", notes.LEFT if left else notes.OTHER_FILE)

    def _extras_of(self, rank: Rank) -> None:
        values = {name: value for name, value in rank.tree.items() if not name.startswith("model")}
        if rank is not self.ranks[0] and "args" in values:
            values["args"] = differing(self.args, values["args"].fields)
        optimizer = values.pop("optimizer", None)
        if not self.options.weights_only:
            values |= beside_tensors(optimizer)
        for name, value in values.items():
            self.importer.extra(rank.name, name, value)

    def _notes(self, optimizer: bool) -> None:
        padded = self.args.get("padded_vocab_size")
        if "vocab" not in self.options.sizes and ("weight", EMBEDDING) in self.keys:
            self.importer.notes.append(notes.padded_vocabulary(padded))
        if optimizer and any(numbered_alone(rank.tree["optimizer"]) for rank in self.ranks):
            self.importer.notes.append(notes.NUMBERED_ALONE)
        if self.options.weights_only:
            self.importer.notes.append(notes.WEIGHTS_ALONE)
        elif not any(rank.has_optimizer for rank in self.ranks):
            self.importer.notes.append(notes.WITHOUT_OPTIMIZER)
        if self.args.absent:
            self.importer.notes.append(notes.defaults_taken(self.args.absent))


def _states_by_name(stored: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The states that are stored of each parameter, of pairs of both."""
    states: dict[str, list[str]] = defaultdict(list)
    for state, name in stored:
        states[name].append(state)
    return states


def _is_state(path: Sequence[str]) -> bool:
    """Whether what lies there in a model file is a state of the optimizer, or a master."""
    if path[0] != "optimizer" or "param_groups" in path:
        return False
    return "state" in path or "fp32_from_fp16_params" in path


def _core_chunk(rank: Rank, name: str) -> dict[str, Any]:
    """A model chunk of the rank. Raises FormatError where it is not of Megatron-Core."""
    chunk = rank.tree[name]
    if not isinstance(chunk, dict) or "language_model" in chunk:
        raise FormatError(
            f"{rank.model.path}: {name} is not the flat state of a Megatron-Core model; those of "
            "--use-legacy-models are not read"
        )
    return chunk


def _consolidated(layout: ParamLayout, copies: Mapping[int, Sequence[str]]) -> Consolidated:
    """The parameter with every copy of its shards; the copies are replicas of one another."""
    keys, shards, fragments = list[str](), list[tuple[int, ...]](), []
    for i, shape in enumerate(layout.shards):
        for key in copies[i]:
            fragments += [replace(f, shard=len(keys)) for f in layout.fragments if f.shard == i]
            keys.append(key)
            shards.append(shape)
    return Consolidated(replace(layout, shards=tuple(shards), fragments=tuple(fragments)), keys)


def _copies(copies: Mapping[int, Sequence[str]], shards: int) -> list[list[str]]:
    """All shards, as often as the rank with most copies has some: every copy is used."""
    most = max(len(keys) for keys in copies.values())
    return [[copies[i][min(j, len(copies[i]) - 1)] for i in range(shards)] for j in range(most)]
