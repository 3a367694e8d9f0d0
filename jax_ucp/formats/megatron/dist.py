"""Megatron-Core's distributed checkpoints (torch_dist, and zarr before core 0.16).

A tensor of the model is stored whole, whatever the parallelism was, with layers and experts on
leading axes; masters and moments are stored in the same way or in one that `dist_names`
undoes. Weights beside masters are duplicates. The vocabulary is padded; `sizes` says its true size.
torch's AdamW and FusedAdam keep their step in two places.

Of two files whose items have equal sizes nothing in a checkpoint says that they were exchanged.
Where there are masters beside weights, `verify` finds it.

Facts: `megatron/core/dist_checkpointing/`, `megatron/core/optimizer/` and
`megatron/training/checkpointing.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import Claims, LeafClaim
from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.value import Array, stated
from jax_ucp.codecs.tensor_names import StoredTensor
from jax_ucp.codecs.unpickle import each_node, known, what_is
from jax_ucp.errors import FormatError, UnsafePickle, naming
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.dcp.marks import METADATA_FILE
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron.buffers import model_parallel_ranks
from jax_ucp.formats.megatron.checks import Comparison, check_gtp, of_model, refuse_difference
from jax_ucp.formats.megatron.dist_files import (
    DistFiles,
    ObjectSums,
    open_files,
)
from jax_ucp.formats.megatron.dist_flat import (
    BufferStates,
    buffer_states,
    has_flat_buffers,
)
from jax_ucp.formats.megatron.dist_names import group_key, is_flat, is_fully_reshardable, state_of
from jax_ucp.formats.megatron.dist_run import RUN_CONFIG
from jax_ucp.formats.megatron.dist_tensors import tensor_states
from jax_ucp.formats.megatron.marks import CONFIG_FILE, checkpoint_folder
from jax_ucp.formats.megatron.model import EMBEDDING, is_expert
from jax_ucp.formats.megatron.numbered import beside_tensors
from jax_ucp.formats.megatron.parameters import (
    LAYOUT,
    LEFT,
    TRANSFORMER_ENGINE,
    States,
    add_notes,
    add_parameter,
    are_rounded,
    group_decays,
    has_remainders,
    is_decayed,
    settings_of,
    unpadded,
)
from jax_ucp.formats.megatron.run import about, require_folder
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.layout.fragments import Shape
from jax_ucp.options import Options
from jax_ucp.text import listed

SHARDING_TYPE = "distrib_optim_sharding_type"


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory or an iteration's folder.

    Raises FormatError, naming file and tensor, or LayoutError for chunks that form no tensor.
    """
    folder = checkpoint_folder(path)
    require_folder(path, folder)
    beside = [f"../{child.name}" for child in path.children() if child.is_file()]
    files = open_files(folder, options.weights_only)
    return read_files(files, options, [] if folder == path else beside)


def read_files(files: DistFiles, options: Options, beside: Sequence[str] = ()) -> Contents:
    """The checkpoint in the files; `beside` names files of the save directory."""
    with naming(files.folder):
        # dp_zero_gather_scatter has its tensors in objects.
        groups = {} if options.weights_only else {key: group_key(key) for key in files.objects}
        states_in = [key for key, group in groups.items() if group and group.what == "param_state"]
        inside = {key: files.objects[key].load() for key in states_in}
        sources = {"": files.source, f"{files.common_name}:": files.common}
        sources |= {f"{files.objects[key].file}:{key}:": file for key, file in inside.items()}
        builder = ContentsBuilder(
            "megatron", files.folder, Combined.prefixed(sources), options.on_conflict
        )
        kind = as_dict(files.tree.get("content_metadata")).get(SHARDING_TYPE)
        layout = f"torch_dist, {kind:.40}" if isinstance(kind, str) else "torch_dist"
        builder.about = about(layout, files.args, files.tree.get("iteration"))
        builder.unknown |= files.common.unknown
        tensors = tensor_states(builder, files, options.weights_only)
        check_args(files, tensors.shapes, tensors.dtypes)
        buffers = BufferStates()
        if not options.weights_only:
            buffers = buffer_states(builder, files, tensors, inside)

        states = {
            name: {**tensors.states.get(name, {}), **buffers.states.get(name, {})}
            for name in (*tensors.states, *buffers.states)
        }
        stepless = _add_parameters(builder, files, options, states, buffers)
        _add_objects(builder, files)
        _add_common(builder, files, options.weights_only)
        for key in buffers.gaps:
            gap = "a gap between tensors in a flat buffer, which holds what was in memory"
            builder.skip(key, "", gap)
        for key in tensors.left:
            builder.leave(key, "", LEFT)
        for name in beside:
            builder.skip(name, "file", "beside the folder of the iteration, of all saves")
        _account_for_files(builder, files)

        notes: list[str] = []
        if stepless:
            notes.append(
                f"nothing says how often the optimizer of {listed(stepless, 1)} stepped;"
                " plan_optimizer needs step= where it counts"
            )
        saved = any(own.keys() != {"weight"} for own in states.values())
        without_args = ""
        if "args" not in files.tree:
            without_args = (
                "there are no args (trainers other than Megatron-LM's write none): what the run was"
                " is seen from what is stored, and nothing else was compared with that"
            )
            if (files.folder / RUN_CONFIG).is_file():
                without_args = f"Megatron-Bridge wrote it: {RUN_CONFIG} says what the run was"
        add_notes(builder, files.args, options, saved, notes, without_args)
        contents = builder.contents()
    # of objects, on which no leaf rests; the tensors inside some have claims of their own
    objects = [
        LeafClaim(ObjectSums(key, stored), frozenset())
        for key, stored in files.objects.items()
        if key not in inside
    ]
    return replace(contents, claims=Claims(lambda: itertools.chain(contents.claims, objects)))


def _add_parameters(
    builder: ContentsBuilder,
    files: DistFiles,
    options: Options,
    states: Mapping[str, States],
    buffers: BufferStates,
) -> list[str]:
    """Add all parameters; returns the names of those whose number of steps is not stored.

    Raises FormatError if a parameter lacks a state that most parameters of its optimizer have.
    Parameters of one optimizer have the same states; those of another, such as Muon beside Adam,
    have no state in common with them. A parameter without a state was frozen, or is of plain SGD.
    Also raises it for low bits of masters that may have been moved, because nothing would show it.
    """
    args, stepless = files.args, list[str]()
    by_experts = {} if options.weights_only else optimizer_groups(files)
    for expert in (False, True):
        groups = by_experts.get(expert and True in by_experts, [])
        settings = [group.settings for group in groups if group.settings is not None]
        mine = {name: own for name, own in states.items() if is_expert(name) == expert}
        kinds = Counter(frozenset(own) - {"weight", "param"} for own in mine.values())
        mixed = len(kinds.keys() - {frozenset[str]()}) > 1
        for name, own in mine.items():
            _check_alike(files, name, own, kinds)
            if "weight" not in own:
                first = buffers.copies[name]
                reason = f"a later pipeline stage's copy of {first}, compared with it by verify"
                for state, param in unpadded(first, own, options.sizes).items():
                    builder.duplicate(state, first, param, reason)
                continue
            cause = buffers.causes.get(name)
            if cause is not None and "param" in own:
                joined = has_remainders(args, own)
                if joined and not has_flat_buffers(files):
                    raise FormatError(
                        f"{files.folder}: {name}: of masters of which only the low 16 bits are"
                        f" stored nothing shows whether they are its own: {cause}"
                    )
                if not joined and options.on_conflict:
                    rounded = are_rounded(args)
                    builder.prove_place(name, own["param"], own["weight"], cause, rounded)
            whole = unpadded(name, own, options.sizes)
            if own.keys() != {"weight"}:
                step = step_of(builder, files, groups, name, own, mixed)
                if step is None:
                    stepless.append(name)
                else:
                    whole["step"] = step
                builder.hyperparameters(name, settings_of(args, settings, name, own))
            add_parameter(builder, args, name, whole, cause=cause or "")
    return stepless


def _check_alike(
    files: DistFiles, name: str, states: Mapping[str, Any], kinds: Mapping[frozenset[str], int]
) -> None:
    """Raise FormatError unless a parameter has the states of its optimizer; `kinds` count the
    parameters with each set of states.
    """
    kept = frozenset(states) - {"weight", "param"}
    alike = [states for states in kinds if states & kept]
    usual = max(alike, key=kinds.__getitem__, default=frozenset[str]())
    if kept == usual:
        return
    others = f"{kinds[usual]} parameters that share states with it"
    if lost := usual - kept:
        fault = f"{min(lost)} of {name} is in no file, though {others} have it"
    else:
        fault = f"{min(kept - usual)} is there of {name}, but not of {others}"
    raise FormatError(
        f"{files.folder}: {fault}: a part of the optimizer is missing. weights_only opens the"
        " weights alone"
    )


def _add_objects(builder: ContentsBuilder, files: DistFiles) -> None:
    for item in files.left:
        builder.skip(item, "object", LEFT)
    for key, stored in files.objects.items():
        item, group = f"{stored.file}:{key}", group_key(key)
        if "._extra_state/" in key:
            builder.skip(item, "object", TRANSFORMER_ENGINE)
            continue
        if group is not None and group.what != "optimizer":
            builder.skip(item, "object", LAYOUT)
            continue
        try:
            opened = stored.load()
        except UnsafePickle as error:
            builder.leave_out(item, f"the object {key}", error)
            continue
        builder.unknown |= opened.unknown
        tree = opened.tree
        if isinstance(tree, list) and len(tree) == 1:
            [tree] = tree
        builder.extra(stored.file, key, tree, opened)


def _add_common(builder: ContentsBuilder, files: DistFiles, weights_only: bool) -> None:
    common = files.common_name
    for name, value in files.tree.items():
        if name != "optimizer":
            builder.extra(common, name, value)
        elif weights_only:
            builder.skip(f"{common}:optimizer", "param_groups", LEFT)
            for node in each_node(value):
                if isinstance(node, StoredTensor):
                    builder.skip(f"{common}:{node.key}", "", LEFT)
        else:
            several = isinstance(value, list) or 0 in as_dict(value)
            for label, part in beside_tensors(optimizers(value) if several else value).items():
                builder.extra(common, label, part)


def _account_for_files(builder: ContentsBuilder, files: DistFiles) -> None:
    nothing = "nothing of the checkpoint lies in it"
    for name in files.beside:
        builder.skip(name, "file", nothing)
    tables = {CONFIG_FILE: "names the backend", METADATA_FILE: "says which chunk is where"}
    accounted = {*files.files, *files.left, files.common_name}
    for path in sorted(path for path in files.folder.children() if path.name not in accounted):
        if path.name in tables:
            reason = f"{tables[path.name]}; the tree's names and shapes come from it"
            builder.skip(path.name, "metadata", reason)
            continue
        what = "folder" if path.is_dir() else f"{path.size()} bytes"  # such as `tokenizer/`
        builder.skip(path.name, what, nothing)
        if path.suffix == ".distcp":
            builder.notes.append(f"{path.name} belongs to no tensor: it is left from another save")


# -- what ranks have in common, and the optimizer's groups


def check_args(files: DistFiles, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> None:
    """Raise FormatError at the first difference between args and the stored shapes and dtypes."""
    if not files.args.fields:
        return
    check_gtp(files.args, files.common.path, shapes)
    of_ranks: list[Comparison] = []
    for key in files.objects:
        grid = key.rpartition("_")[2].split(".")
        if key.startswith("rng_state/") and len(grid) > 1:
            for kind, stored in zip(("pipeline", "tensor"), grid, strict=False):
                degree = files.args.degree(f"{kind}_model_parallel_size")
                of_ranks.append((f"{kind} parallelism", str(degree), stored))
    of_optimizer = _of_optimizer(files, dtypes)
    comparisons = itertools.chain(of_model(files.args, shapes), of_ranks, of_optimizer)
    refuse_difference(files.common.path, comparisons)


def _of_optimizer(files: DistFiles, dtypes: Mapping[str, str]) -> Iterator[Comparison]:
    # the sharding types of a distributed optimizer that the stored keys show
    types: set[str] = set()
    has_states = False
    for key, tensor in files.tensors.items():
        state, model = state_of(key)
        has_states |= state != "weight"
        if is_flat(key):
            types.add("dp_reshardable")
        elif state != "weight" and tensor.shape != files.tensors[model].shape:
            types.add("fully_sharded_model_space")
        elif is_fully_reshardable(key):
            types.add("fully_reshardable")
    groups = filter(None, map(group_key, files.objects))
    if any(group.what == "param_state" for group in groups):
        types.add("dp_zero_gather_scatter")
    if types:
        declared = as_dict(files.tree.get("content_metadata")).get(SHARDING_TYPE)
        yield SHARDING_TYPE, declared, " and ".join(sorted(types))
    if types or has_states:
        args = files.args
        if not args.is_layer_wise:  # which may have a distributed one behind it
            declared = args.optional("use_distributed_optimizer")
            yield "use_distributed_optimizer", declared, bool(types)
        dtype = args.optional("params_dtype")
        if isinstance(dtype, np.dtype) and EMBEDDING in dtypes:
            yield "params_dtype", dtype.name, dtypes[EMBEDDING]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """The settings of a parameter group, and its number of steps, or None if it has none.

    `at` is the place of the group, `file:item`. `settings` is None for a tensor in `common.pt` that
    counts the steps of all parameters.
    """

    steps: int | float | None
    at: str
    settings: Mapping[Any, Any] | None = None


# The groups of dense parameters (False), and of experts (True), which have their own optimizer.
Groups = Mapping[bool, list[OptimizerGroup]]


def optimizer_groups(files: DistFiles) -> Groups:
    """The parameter groups of the optimizers in `common.pt` and in the objects of pipeline stages.

    Raises FormatError where copies of one stage's optimizer differ.
    """
    by_experts: dict[bool, list[OptimizerGroup]] = defaultdict(list)
    for i, part in enumerate(optimizers(files.tree.get("optimizer"))):
        inner = part.get("optimizer", part)
        if not isinstance(inner, dict):
            raise FormatError(f"{files.common.path}: optimizer {i} is {what_is(inner)}, not a dict")
        # in older releases the optimizer of experts is the second one, and does not say so
        key = "is_expert_parallel"
        groups = map(as_dict, inner.get("param_groups") or ())
        groups_here = by_experts[any([group[key] for group in groups if key in group] or [i])]
        tensor = as_dict(inner.get("state")).get("common_step")
        if isinstance(tensor, StoredTensor) and tensor.shape == ():
            value = files.common.tensor(tensor).item()
            groups_here.append(OptimizerGroup(value, f"{files.common_name}:{tensor.key}"))
        groups_here += _groups(inner, f"{files.common_name}:optimizer")
    facts = Facts(files.folder)
    for key, stored in files.objects.items():
        if (about := group_key(key)) and about.what == "optimizer":
            item, file = f"{stored.file}:{key}", stored.load()
            expert = bool(about.chain) and not files.args.is_layer_wise
            first = next(iter(as_list(file.tree)), None)
            by_experts[expert] += _groups(as_dict(first), item)
            ranks = model_parallel_ranks(files.args, expert)
            stage = ranks[about.group].pp if about.group < len(ranks) else None
            facts.state_all(file, item, "optimizer", file.tree, (about.chain, stage))
    return by_experts


def _groups(inner: dict[Any, Any], at: str) -> Iterator[OptimizerGroup]:
    for group in map(as_dict, as_list(inner.get("param_groups"))):
        step = group.get("step")
        yield OptimizerGroup(step if isinstance(step, int | float) else None, at, group)


def step_of(
    builder: ContentsBuilder,
    files: DistFiles,
    groups: Sequence[OptimizerGroup],
    name: str,
    states: States,
    mixed: bool,
) -> Array | None:
    """The number of steps of a parameter, or None if no group has one (SGD counts none).

    `mixed` is whether another optimizer has some of the parameters. Raises FormatError if the
    groups that may have the parameter have different numbers.
    """
    counts = [group for group in groups if group.steps is not None]
    if mixed:  # Adam beside another optimizer: the step of one is not that of the other
        is_adams = "exp_avg" in states
        counts = [c for c in counts if c.settings is None or ("betas" in c.settings) == is_adams]
    does = is_decayed(files.args, name, len(states["weight"].info.shape))
    # Where there is one group alone, it has what does not decay too.
    counts = [c for c in counts if c.settings is None or group_decays(c.settings) == does] or counts
    if not counts:
        return None
    first, *others = counts
    for other in others:
        if other.steps != first.steps:
            raise FormatError(
                f"{files.folder}: the optimizer of {name} made {first.steps} steps by {first.at},"
                f" but {other.steps} by {other.at}: one of these files is of another step or run,"
                " or was changed. weights_only opens the weights alone"
            )
    if first.settings is None:
        return builder.array(first.at)
    dtype = np.int32 if isinstance(first.steps, int) else np.float32
    return stated(np.asarray(first.steps, dtype), first.at)


def optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """The optimizers in `common.pt`: one, or those of dense parameters (0) and experts (1)."""
    if isinstance(known(optimizer), list):
        optimizer = dict(enumerate(optimizer))
    if not isinstance(optimizer, dict):
        return []
    chained = all(isinstance(key, int) for key in optimizer)
    parts = optimizer.values() if chained else [optimizer]
    return [part for part in parts if isinstance(part, dict)]
