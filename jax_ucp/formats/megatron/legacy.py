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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.value import Array, cut, items_of, joined, label
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.codecs.unpickle import what_is
from jax_ucp.errors import FormatError, LayoutError, NotACheckpoint, naming
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.megatron.checks import model_spec, sizes_of, uses_gtp
from jax_ucp.formats.megatron.legacy_files import (
    MODEL_FILE,
    OPTIM_FILE,
    LegacyRank,
    open_ranks,
    optimizer_parts,
)
from jax_ucp.formats.megatron.legacy_optimizer import find_states
from jax_ucp.formats.megatron.marks import TRACKER, iteration_folder
from jax_ucp.formats.megatron.model import (
    BUFFERS,
    EMBEDDING,
    TIED,
    is_expert,
    layer_of,
    parts_of,
)
from jax_ucp.formats.megatron.numbered import (
    Module,
    ModuleState,
    beside_tensors,
    numbered_alone,
    param_groups,
)
from jax_ucp.formats.megatron.parameters import (
    LAYOUT,
    LEFT,
    NUMBERED_ALONE,
    TRANSFORMER_ENGINE,
    States,
    add_notes,
    add_parameter,
    has_remainders,
    keep_apart,
    number,
    settings_of,
)
from jax_ucp.formats.megatron.run import Args, about
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Part
from jax_ucp.layout.patterns import Replicated
from jax_ucp.options import Options
from jax_ucp.shard_spec.notation import load
from jax_ucp.shard_spec.rules import SpecShard, layouts
from jax_ucp.states.pairing import Undecided

_LAYER_WISE = "layer_wise_optimizer_"
_KV_DOWN = ".self_attention.linear_kv_down_proj.weight"
# A rank, and its modules by model chunk.
_RankModules = tuple[LegacyRank, list[list[Module]]]


@dataclass(frozen=True)
class RankShards:
    """The shards of a parameter on all ranks; `file` is the first file that has one.

    By state, `shards` has the copies of each tensor-parallel rank, and `numbers` the number that
    each file has.
    """

    file: str
    shards: dict[str, dict[int, list[Array]]] = field(default_factory=lambda: defaultdict(dict))
    numbers: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory or an iteration's folder.

    Raises FormatError, naming the file, or LayoutError where the rules do not fit the shards.
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
    files = {name: file for rank in ranks for name, file in rank.files.items()}
    builder = ContentsBuilder("megatron", folder, Combined.of_files(files), options.on_conflict)
    builder.about = about("legacy", args, ranks[0].tree.get("iteration"))
    builder.unknown |= {name for file in files.values() for name in file.unknown}
    modules = _rank_modules(builder, args, ranks)
    params: dict[str, RankShards] = {}
    for rank, by_chunk in modules:
        for module in itertools.chain(*by_chunk):
            weight = ModuleState("weight", rank.key(module.tensor), module.tensor.shape)
            _add_shards(builder, params, rank, module, weight)
    has_states = not options.weights_only and _add_states(builder, args, modules, params)
    by_name = _layouts(folder, args, options, params)
    with naming(folder):
        groups: list[dict[str, Any]] = []  # of every optimizer of every rank
        for rank in ranks if has_states else ():
            for part in optimizer_parts(rank.tree.get("optimizer") or []):
                groups += param_groups(rank.model.path, part.get("optimizer", part))
        _add_parameters(folder, builder, args, by_name, params, groups)
    if has_states and args.get("use_distributed_optimizer"):
        tied = _is_tied(args, by_name)
        for name in by_name:
            is_trained = not name.endswith(BUFFERS) and not (tied and name == TIED)
            if is_trained and "param" not in params[name].shards:
                raise FormatError(f"{folder}: no {OPTIM_FILE} holds the master of {name}")
    for rank in ranks:
        _add_beside(builder, args, rank, rank is ranks[0], options.weights_only)
    for rank in ranks:
        _account_for_files(builder, rank, options.weights_only)
    saved = [rank.tree["optimizer"] for rank in ranks if rank.has_optimizer]
    alone = has_states and any(numbered_alone(optimizer_parts(own)) for own in saved)
    add_notes(builder, args, options, bool(saved), [NUMBERED_ALONE] * alone)
    return builder.contents()


# -- what ranks have


def _rank_modules(
    builder: ContentsBuilder, args: Args, ranks: Sequence[LegacyRank]
) -> list[_RankModules]:
    v = args.degree("virtual_pipeline_model_parallel_size")
    names = ["model"] if v == 1 else [f"model{i}" for i in range(v)]
    for rank in ranks:
        have = [name for name in rank.tree if name.startswith("model")]
        if have != names:
            raise FormatError(
                f"{rank.model.path} has {have}, where by its args there should be {names}"
            )
        for name in names:
            if not isinstance(rank.tree[name], dict) or "language_model" in rank.tree[name]:
                raise FormatError(
                    f"{rank.model.path}: {name} is not the flat state of a Megatron-Core model;"
                    " those of --use-legacy-models are not read"
                )
    first_layers = _first_layers(args, ranks, names)
    modules: list[_RankModules] = []
    for rank in ranks:
        first = [first_layers[c, rank.pp] for c in range(len(names))]
        by_chunk = [_modules(builder, args, rank, *own) for own in zip(names, first, strict=True)]
        modules.append((rank, by_chunk))
    return modules


def _first_layers(
    args: Args, ranks: Sequence[LegacyRank], names: Sequence[str]
) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (chunk, stage): layers are numbered chunk by chunk, and
    in each stage by stage (`get_transformer_layer_offset`).
    """
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for c, name in enumerate(names):
            layers = map(layer_of, rank.tree[name])
            numbers = sorted({number for number in layers if number is not None})
            if numbers != list(range(len(numbers))):
                raise FormatError(f"{rank.model.path} has the layers {numbers}; some are missing")
            others = counts.setdefault((c, rank.pp), len(numbers))
            if others != len(numbers):
                raise FormatError(
                    f"{rank.model.path} has {len(numbers)} layers, another rank of its pipeline"
                    f" stage {others}"
                )
    places = sorted(counts)
    *firsts, total = itertools.accumulate([counts[place] for place in places], initial=0)
    if total != (want := args.get("num_layers", total)):
        raise FormatError(
            f"{ranks[0].folder.parent} has {total} layers in all stages, but args.num_layers is"
            f" {want}"
        )
    return dict(zip(places, firsts, strict=True))


def _modules(
    builder: ContentsBuilder, args: Args, rank: LegacyRank, chunk: str, first_layer: int
) -> list[Module]:
    """The tensors of one chunk, in module order, with the parameters that are in them."""
    degree = args.degree("expert_model_parallel_size")
    each, rest = divmod(args.get("num_experts") or 0, degree)
    if rest:
        raise FormatError(
            f"{rank.model.path}: args.num_experts is not divisible by the expert parallel degree"
        )
    experts = range(rank.ep * each, (rank.ep + 1) * each)
    hidden = args.get("hidden_size", 0)
    modules: list[Module] = []
    for local, tensor in rank.tree[chunk].items():
        is_tensor = isinstance(tensor, StoredTensor)
        if local.endswith("._extra_state"):
            item = rank.key(tensor) if is_tensor else f"{rank.name}:{chunk}/{local}"
            reason = f"{TRANSFORMER_ENGINE}, such as fp8 scales"
            builder.skip(item, type(tensor).__name__, reason)
            continue
        if not is_tensor:
            raise FormatError(
                f"{rank.model.path}: {chunk}/{local} is not a tensor, but {what_is(tensor)}"
            )
        with naming(rank.model.path):
            parts = parts_of(local, tensor.shape, first_layer, experts, hidden)
        modules.append(Module(local, tensor, parts))
    return modules


def _add_shards(
    builder: ContentsBuilder,
    params: dict[str, RankShards],
    rank: LegacyRank,
    module: Module,
    stored: ModuleState,
) -> None:
    """Add a state of a rank's tensor: each parameter in the tensor gets all of it, or its part, as
    a shard.
    """
    for part in module.parts:
        param = params.setdefault(part.name, RankShards(rank.name))
        if stored.value is not None:
            param.numbers[stored.state][rank.name] = stored.value
            continue
        array: Array = builder.array(stored.key)
        is_whole = len(module.parts) == 1 and not (stored.flat or part.transposed)
        if not is_whole and stored.shape != ():
            start, label_ = stored.start + part.start, f"{stored.key}, {part.name}"
            array = cut(label_, array, start, part.shape, part.transposed)
        index = rank.etp if is_expert(part.name) else rank.tp
        param.shards[stored.state].setdefault(index, []).append(array)


def _add_states(
    builder: ContentsBuilder,
    args: Args,
    modules: Sequence[_RankModules],
    params: dict[str, RankShards],
) -> bool:
    """Add the optimizers' states, or keep all apart; returns whether there are any to add."""
    states: list[tuple[LegacyRank, Module, ModuleState]] = []
    undecided: list[str] = []
    for rank, by_chunk in modules:
        trained = [[m for m in chunk if not m.local.endswith(BUFFERS)] for chunk in by_chunk]
        try:
            pairs = find_states(args, rank, trained) if rank.has_optimizer else ()
            states += [(rank, module, state) for module, state in pairs]
        except Undecided as error:
            undecided.append(f"{rank.name}: {error}")
    if not undecided:
        for rank, module, state in states:
            _add_shards(builder, params, rank, module, state)
        return any(rank.has_optimizer for rank, _ in modules)
    tensors: dict[str, Array] = {}
    for name, file in itertools.chain(*(rank.files.items() for rank, _ in modules)):
        for key in file.arrays():
            path = key.split("/")
            of_states = "state" in path or "fp32_from_fp16_params" in path
            is_state = path[0] == "optimizer" and of_states and "param_groups" not in path
            if name.endswith(OPTIM_FILE) or is_state:
                label = f"{name.removesuffix('.pt')}.{key}".replace("/", ".")
                tensors[label] = builder.array(f"{name}:{key}")
    keep_apart(builder, tensors, undecided[0])
    return False


# -- parameters


def _layouts(
    folder: FilePath, args: Args, options: Options, params: Mapping[str, RankShards]
) -> dict[str, ParamLayout]:
    """The layout of every parameter over its tensor-parallel ranks, by the rules."""
    shards: dict[str, list[SpecShard]] = {}
    for name, param in params.items():
        copies = param.shards["weight"]
        ranks = range(args.tensor_ranks(is_expert(name)))
        if absent := sorted(set(ranks) - set(copies)):
            raise FormatError(
                f"{name} is in {param.file}, but not in the file of tensor-parallel rank"
                f" {absent[0]}"
            )
        firsts = [copies[rank][0] for rank in ranks]  # of copies one is enough
        shards[name] = [SpecShard(array.info.shape, label(array)) for array in firsts]
    # whether a rank has its share of the rows of latent attention's down projections
    latent = (args.optional("kv_lora_rank"), args.optional("qk_pos_emb_head_dim"))
    rows = sum(rank for rank in latent if isinstance(rank, int))
    downs = [own for name, own in shards.items() if name.endswith(_KV_DOWN)]
    down_is_cut = any(own[0].shape[0] != rows for own in downs)
    spec = load(options.spec) if options.spec else model_spec(args)
    known = {
        **sizes_of(args),
        "down_is_cut": down_is_cut,
        **options.sizes.of(spec.lengths, spec.switches),
    }
    sizes = {name: int(n) for name, n in known.items() if isinstance(n, int)}
    try:
        return layouts(spec, shards, sizes)
    except LayoutError as error:
        remedy = "\nA spec (spec=, --spec) with `extends: megatron` adds to the rules"
        raise LayoutError(f"{folder}: {error}{'' if options.spec else remedy}") from error


def _is_tied(args: Args, by_name: Mapping[str, ParamLayout]) -> bool:
    return TIED in by_name and not args.get("untie_embeddings_and_output_weights", False)


def _add_parameters(
    folder: FilePath,
    builder: ContentsBuilder,
    args: Args,
    by_name: Mapping[str, ParamLayout],
    params: Mapping[str, RankShards],
    groups: Sequence[Mapping[Any, Any]],
) -> None:
    """Add every state of every parameter, and the second copies that are stored of it.

    `groups` are the parameter groups of all optimizers of all ranks.
    """
    tied = _is_tied(args, by_name)
    if tied and EMBEDDING not in by_name:
        raise FormatError(f"{folder}: the output layer is tied to {EMBEDDING}, which is in no file")
    if tied:
        for state, by_file in params[TIED].numbers.items():
            params[EMBEDDING].numbers[state].update(by_file)
    for name, layout in by_name.items():
        if not (tied and name == TIED):
            copies = _copies(name, layout, params[name].shards["weight"])
            states = _states(folder, name, layout, params[name])
            add_parameter(builder, args, name, states, copies)
            if states.keys() != {"weight"}:
                builder.hyperparameters(name, settings_of(args, groups, name, states))
    if not tied:
        return
    # `verify` compares the last pipeline stage's copy of the embedding, and of its states
    of_embedding = _states(folder, EMBEDDING, by_name[EMBEDDING], params[EMBEDDING])
    copy_of = f"the last pipeline stage's copy of {EMBEDDING}"
    for state, shards in params[TIED].shards.items():
        if state == "weight" and has_remainders(args, of_embedding):
            reason = f"{copy_of}, of which the low 16 bits of the masters are compared"
            for key in itertools.chain(*map(items_of, itertools.chain(*shards.values()))):
                builder.skip(key, "", reason)
            continue
        main = "param" if state == "weight" else state
        if main != "param" and state not in of_embedding:
            raise FormatError(f"{folder}: the tied {TIED} has {state}, but {EMBEDDING} has not")
        layout = by_name[TIED]
        if state == "step":
            layout = Replicated().join([()] * len(layout.shards))
        for copy in _copies(TIED, layout, shards):
            builder.duplicate(main, EMBEDDING, copy, f"{copy_of}, compared with it by verify")


def _states(folder: FilePath, name: str, layout: ParamLayout, param: RankShards) -> States:
    """The states of a parameter, with every copy of its shards as a replica. Raises FormatError if
    a number differs between files.
    """
    states: dict[str, Any] = {}
    for state in sorted(param.shards, key=lambda state: (state != "param", state == "step")):
        by_rank = param.shards[state]
        if lost := sorted(set(range(len(layout.shards))) - set(by_rank)):
            raise FormatError(
                f"{folder}: {state} of {name} is not in the files of tensor-parallel rank"
                f" {lost[0]}, but in those of others"
            )
        if state == "step":
            arrays = [copy for _, copies in sorted(by_rank.items()) for copy in copies]
            whole = Replicated().join([()] * len(arrays))
        else:
            # a part for each copy of its shard
            arrays, parts = list[Array](), list[Part]()
            for rank in range(len(layout.shards)):
                mine = [part for part in layout.parts if part.input == rank]
                for copy in by_rank[rank]:
                    parts += [part._replace(input=len(arrays)) for part in mine]
                    arrays.append(copy)
            shapes = tuple(array.info.shape for array in arrays)
            whole = replace(layout, shards=shapes, parts=tuple(parts))
        states[state] = joined(f"{state}.{name}", whole, arrays)
    for state, by_file in param.numbers.items():
        (first, value), *_ = by_file.items()
        for file, other in by_file.items():
            if other != value:
                raise FormatError(
                    f"{folder / file}: {state} is {other}, but {value} in {first}: one of the files"
                    " is of another step or run"
                )
        states[state] = number(value, f"{first}:optimizer ({state})")
    return states


def _copies(name: str, layout: ParamLayout, copies: Mapping[int, Sequence[Array]]) -> list[Array]:
    """The parameter as often as the rank with the most copies of its shard has it, so that every
    copy is in one of them.
    """
    shards, most = range(len(layout.shards)), max(len(arrays) for arrays in copies.values())
    every = [[copies[i][min(j, len(copies[i]) - 1)] for i in shards] for j in range(most)]
    return [joined(f"a copy of {name}", layout, arrays) for arrays in every]


# -- everything else


def _add_beside(
    builder: ContentsBuilder, args: Args, rank: LegacyRank, is_first: bool, weights_only: bool
) -> None:
    """Keep the rest of a rank's files as extras, of later ranks' args only what differs."""
    values = {name: value for name, value in rank.tree.items() if not name.startswith("model")}
    if not is_first and "args" in values:
        own, first = values["args"].fields, args.fields
        unlike = [n for n in sorted({*first, *own}) if repr(first.get(n)) != repr(own.get(n))]
        values["args"] = {name: own.get(name) for name in unlike}
    optimizer = values.pop("optimizer", None)
    if not weights_only:
        values |= beside_tensors(optimizer)
    for name, value in values.items():
        builder.extra(rank.name, name, value)
    if rank.optim is not None:
        builder.skip(f"{rank.optim_name}:buffers", "layout", LAYOUT)
    if weights_only:
        for key in rank.model.arrays():
            if key.startswith("optimizer/"):
                builder.leave(f"{rank.name}:{key}", "", LEFT)
        if "optimizer" in rank.tree:
            builder.skip(f"{rank.name}:optimizer", "param_groups", LEFT)


def _account_for_files(builder: ContentsBuilder, rank: LegacyRank, weights_only: bool) -> None:
    """Skip files that are not read. Raises FormatError for those of an unknown optimizer."""
    for path in rank.folder.children():
        name = f"{path.parent.name}/{path.name}"
        is_layer_wise = path.name.startswith(_LAYER_WISE)
        if is_layer_wise and not weights_only:
            raise FormatError(
                f"{path} has the states of a layer-wise optimizer (dist_muon), of which each"
                " data-parallel rank writes a file with some parameters, by numbers; they are"
                " not read from the legacy format. Save with --ckpt-format torch_dist, or open"
                " the weights alone with weights_only"
            )
        is_left = is_layer_wise or (path.name == OPTIM_FILE and weights_only)
        if is_left or path.name not in (MODEL_FILE, OPTIM_FILE):
            other = "a file beside those of the checkpoint, which is not read"
            builder.skip(name, "file", LEFT if is_left else other)
