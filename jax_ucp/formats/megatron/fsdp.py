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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.value import Array, Constant
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError, LayoutError, naming
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.dcp.metadata import DcpMetadata, read_metadata
from jax_ucp.formats.dcp.reader import (
    DcpSave,
    account_for_files,
    check_facts,
    read_object,
)
from jax_ucp.formats.dcp.source import DcpSource, chunk_key
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron.checks import check_whole, of_model, refuse_difference
from jax_ucp.formats.megatron.dist_files import without_backend
from jax_ucp.formats.megatron.marks import COUNTER, checkpoint_folder
from jax_ucp.formats.megatron.model import (
    BUFFERS,
    StoredRun,
    expert_of,
    gate_and_up,
    is_expert,
    join_gated,
    parts_of,
)
from jax_ucp.formats.megatron.numbered import Module, numbered_alone, numbered_states
from jax_ucp.formats.megatron.parameters import (
    LEFT,
    NUMBERED_ALONE,
    TRANSFORMER_ENGINE,
    add_notes,
    add_parameter,
    keep_apart,
    number,
    unpadded,
)
from jax_ucp.formats.megatron.run import (
    Args,
    about,
    args_of,
    check_iteration,
    require_folder,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, block_layout
from jax_ucp.layout.parts import Part, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.options import Options
from jax_ucp.states.pairing import Undecided

_WRAPPER = "module."
_GATED_LAYER = re.compile(r"\.linear_fc1\.(weight|bias)\d*$")
# Groups that differ in one of these may have rates of their own.
_KINDS = ("lr_mult", "wd_mult", "is_decoupled_lr", "is_expert_parallel", "max_lr", "min_lr")
_Path = tuple[str | int, ...]


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory, or in one iteration's folder.

    Raises FormatError, naming file and tensor, where metadata and files do not fit together, or
    ranks had tensors of one name, of which one is stored; also for torch_dist without its
    `metadata.json`.
    """
    folder = checkpoint_folder(path)
    require_folder(path, folder)
    metadata = read_metadata(folder, _of_optimizer if options.weights_only else None)
    if COUNTER not in metadata.objects:
        raise without_backend(folder)
    with naming(folder):
        return _contents(metadata, options)


def _of_optimizer(metadata: DcpMetadata) -> frozenset[str]:
    """The names of what lies in the optimizer's dict."""
    return frozenset(fqn for fqn, path in metadata.paths.items() if path[0] == "optimizer")


@dataclass(frozen=True)
class Saved:
    """The state dict that was saved, whose tensors have DCP's flattened names.

    `weights` are the model's tensors by their names in the model. `named` has the states of
    optimizers by (parameter, state), and `settings` the settings of parameters; `numbered` are the
    dicts of optimizers that number their parameters. `beside` names everything else.
    """

    weights: Mapping[str, str]
    named: Mapping[tuple[str, str], str | Any]
    settings: Mapping[str, Mapping[str, Any]]
    numbered: list[Any]
    beside: list[str]


def saved(paths: Mapping[str, _Path], leaves: Mapping[str, Any]) -> Saved:
    """The state dict of leaves, which are tensors and objects, by their paths. Raises FormatError
    for a path that leads into another value.
    """
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
            case ("optimizer", *above, last):
                node = tree
                for step in above:
                    node = node.setdefault(step, {})
                    if not isinstance(node, dict):
                        break
                if not isinstance(node, dict) or last in node:
                    raise FormatError(f"{fqn}: another value is stored at or above this path")
                node[last] = leaf
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


def _contents(metadata: DcpMetadata, options: Options) -> Contents:
    folder, table = metadata.folder, metadata.folder / metadata.files[0]
    source = DcpSource(metadata)
    builder = ContentsBuilder("megatron", folder, source, options.on_conflict)
    left = _of_optimizer(metadata) if options.weights_only else frozenset[str]()
    save = DcpSave("", metadata, source, left)
    save.open_ahead()
    objects = {
        fqn: read_object(builder, fqn, span, save)
        for fqn, spans in metadata.objects.items()
        for span in spans
    }
    args, iteration = Args(args_of(objects, table)), objects.get("iteration")
    builder.about = about("torch_dcp or fsdp_dtensor", args, iteration)
    spans = metadata.objects.get("iteration")
    check_iteration(folder / spans[0].file if spans else table, folder, iteration)
    check_facts(save)
    if lost := [fqn for fqn in (*metadata.tensors, *objects) if fqn not in metadata.paths]:
        raise FormatError(f"{table}: {lost[0]!r} is not in planner_data")
    check_settings(metadata, objects)

    # tensors and objects, in the order of the state dict
    leaves = objects | {fqn: _tensor(metadata, fqn) for fqn in metadata.tensors}
    stored = saved(metadata.paths, {fqn: leaves[fqn] for fqn in metadata.paths if fqn in leaves})
    weights = dict(stored.weights)
    for local in [local for local in weights if local.endswith("._extra_state")]:
        fqn = weights.pop(local)
        for chunk in metadata.tensors[fqn].chunks if fqn in metadata.tensors else ():
            builder.skip(chunk_key(fqn, chunk), "", TRANSFORMER_ENGINE)
    model = _whole(builder, metadata, args, weights)
    check_degrees(args, model)
    shapes = {name: array.info.shape for name, array in model.items()}
    refuse_difference(table, of_model(args, shapes))
    # a writer that takes a tensor-parallel rank's part for all of a parameter lets ranks overwrite
    # one another
    if max(map(args.tensor_ranks, (True, False))) > 1:
        try:
            check_whole(args, shapes)
        except LayoutError as error:
            raise LayoutError(
                f"{table}: with tensor parallelism some parameters are not stored whole, or in"
                f" another way than is known here; save with --ckpt-format torch_dist. {error}"
            ) from None

    states: dict[str, dict[str, Array]] = {name: {} for name in model}
    if options.weights_only:
        for fqn in left & metadata.tensors.keys():
            for chunk in metadata.tensors[fqn].chunks:
                builder.leave(chunk_key(fqn, chunk), "", LEFT)
    else:
        _fill_states(builder, metadata, args, stored, weights, states)
    for name, weight in model.items():
        own = {"weight": weight, **states[name]}
        whole = unpadded(name, own, options.sizes)
        add_parameter(builder, args, name, whole, remainders=False)
    for local, settings in stored.settings.items():
        builder.hyperparameters(_name(args, local), settings)
    for fqn in stored.beside:  # tensors of neither, such as states of generators, are extras
        if entry := metadata.tensors.get(fqn):
            for chunk in entry.chunks:
                file, _, item = chunk_key(fqn, chunk).partition(":")
                tensor = StoredTensor(item, chunk.sizes, entry.dtype, "", 0, ())
                builder.extra(file, fqn, tensor)
    kind = "Megatron-FSDP (fsdp_dtensor)" if stored.named else "torch's FSDP2 (torch_dcp)"
    builder.notes.append(f"saved by Megatron with {kind}")
    alone = not (options.weights_only or stored.named) and numbered_alone(stored.numbered)
    optimizer = bool(stored.named or stored.numbered)
    add_notes(builder, args, options, optimizer, [NUMBERED_ALONE] * alone)
    account_for_files(builder, save)
    return builder.contents()


def check_settings(metadata: DcpMetadata, objects: Mapping[str, Any]) -> None:
    """Raise FormatError if files have the settings of several steps: groups of one kind, such as
    those without weight decay, must have the same step and rate.
    """
    facts, settings = Facts(metadata.folder), dict[str, dict[str, tuple[str, Any]]]()
    for fqn, spans in metadata.objects.items():
        match metadata.paths[fqn]:
            case ("optimizer", "param_to_group_meta", str(name), str(setting)):
                settings.setdefault(name, {})[setting] = spans[0].file, objects[fqn]
    nothing = ("", None)
    for own in settings.values():
        for setting in [setting for setting in ("step", "lr") if setting in own]:
            of = [own.get(kind, nothing)[1] for kind in _KINDS] if setting == "lr" else []
            file, value = own[setting]
            facts.state(file, f"{setting} of parameter groups", value, str(of))


def _tensor(metadata: DcpMetadata, fqn: str) -> StoredTensor:
    entry = metadata.tensors[fqn]
    return StoredTensor(fqn, entry.shape, entry.dtype, "", 0, ())


def _block(metadata: DcpMetadata, fqn: str) -> tuple[Shape, list[StoredRun]]:
    table, entry = metadata.folder / metadata.files[0], metadata.tensors.get(fqn)
    if entry is None:
        raise FormatError(f"{table}: {fqn} should be a tensor, but is an object")
    with naming(table, fqn):
        entry.layout().check()
    return entry.shape, [StoredRun(chunk_key(fqn, c), 0, c.box) for c in entry.chunks]


def _whole(
    builder: ContentsBuilder, metadata: DcpMetadata, args: Args, fqns: Mapping[str, str]
) -> dict[str, Array]:
    """The arrays of one state by the parameter's global name; gate and up form one parameter."""
    params = {local: _block(metadata, fqn) for local, fqn in fqns.items()}
    whole: dict[str, Array] = {}
    for local, (shape, runs) in join_gated(params).items():
        # ranks that have gate and up of their own one after the other in a tensor
        has_both = local in params and args.get("swiglu", False) and _GATED_LAYER.search(local)
        ranks = args.tensor_ranks(is_expert(local)) if has_both else 1
        whole[_name(args, local)] = _joined(builder, local, shape, runs, ranks)
    return whole


def _joined(
    builder: ContentsBuilder, name: str, shape: Shape, runs: Sequence[StoredRun], ranks: int = 1
) -> Array:
    layout = regrouped(block_layout(shape, [run.target for run in runs]), ranks)
    return builder.joined(name, layout, [run.key for run in runs])


def _name(args: Args, local: str) -> str:
    """The global name of a parameter, of which `local` may be a half."""
    experts, hidden = range(args.get("num_experts") or 0), args.get("hidden_size", 0)
    whole = next(iter(gate_and_up([f"{local[:-1]}w", f"{local[:-1]}v"])), local)
    (part, *others) = parts_of(whole, (), 0, experts, hidden)
    if others or part.transposed:
        raise FormatError(
            f"{local}: experts that are grouped in one tensor are not read in this format; save"
            " with --ckpt-format torch_dist"
        )
    return part.name


def _fill_states(
    builder: ContentsBuilder,
    metadata: DcpMetadata,
    args: Args,
    stored: Saved,
    weights: Mapping[str, str],
    states: Mapping[str, dict[str, Array]],
) -> None:
    """Add the optimizer's states to `states` of the parameters. Numbered states are kept apart if
    nothing decides whose they are. Raises FormatError.
    """
    # the parameter, the state, and the tensor or number of all that optimizers have
    found = [(local, state, leaf) for (local, state), leaf in stored.named.items()]
    steps = {local: own["step"] for local, own in stored.settings.items() if "step" in own}
    found += [(local, "step", step) for local, step in steps.items()]
    trained = {local: fqn for local, fqn in weights.items() if not local.endswith(BUFFERS)}
    modules = [Module(local, _tensor(metadata, fqn), []) for local, fqn in trained.items()]
    table = metadata.folder / metadata.files[0]
    try:
        for module, state in numbered_states(table, stored.numbered, modules, False):
            leaf = _tensor(metadata, state.key) if state.key else state.value
            found.append((module.local, state.state, leaf))
    except Undecided as error:
        apart = [fqn for fqn in metadata.tensors if metadata.paths[fqn][0] == "optimizer"]
        tensors = {fqn: _joined(builder, fqn, *_block(metadata, fqn)) for fqn in apart}
        keep_apart(builder, tensors, str(error))

    def add(name: str, state: str, value: Array) -> None:
        if name not in states:
            raise FormatError(
                f"{state} is there of {name}, but the model has no such parameter: a part of the"
                " checkpoint is missing, or is of another run"
            )
        own = states[name].setdefault(state, value)
        if own is value:
            return
        match own, value:
            case Constant(first), Constant(second) if np.array_equal(first, second):
                return
        raise FormatError(f"{state} of {name} is stored twice")

    by_state: dict[str, dict[str, str]] = {}
    for local, state, leaf in found:
        if isinstance(leaf, StoredTensor):
            by_state.setdefault(state, {})[local] = leaf.key
        elif isinstance(leaf, int | float):
            item = f"{metadata.files[0]}:optimizer ({state})"
            add(_name(args, local), state, number(leaf, item))
    for state, fqns in by_state.items():
        if any(metadata.tensors[fqn].shape != () for fqn in fqns.values()):
            for name, param in _whole(builder, metadata, args, fqns).items():
                add(name, state, param)
            continue
        # one number of each parameter, of which halves have one each: replicas
        keys: dict[str, list[str]] = {}
        for local, fqn in fqns.items():
            _, runs = _block(metadata, fqn)
            keys.setdefault(_name(args, local), []).extend(run.key for run in runs)
        for name, own in keys.items():
            layout = Replicated().join([()] * len(own))
            add(name, state, builder.joined(f"{state}.{name}", layout, own))
    check_alike(states)


def check_alike(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise FormatError if a parameter has other states than the rest; a frozen one may have
    none.
    """
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
    """Raise FormatError if tensors of several ranks had one name, of which DCP keeps one tensor."""
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
    kept: Counter[str] = Counter()
    for name in filter(is_expert, model):
        expert = expert_of(name)
        kept[f"{expert.experts}.*.{expert.inner}" if expert else name] += 1
    for name, experts in kept.items():
        if experts != count:
            raise FormatError(
                f"{name} is there of {experts} experts, but args.num_experts is {count}: ranks that"
                " had other experts called them alike, so that theirs are lost"
            )


def regrouped(layout: ParamLayout, ranks: int) -> ParamLayout:
    """The layout in which the gates of all ranks come first, then all ups, of a tensor that has the
    gate and the up of each rank in turn.
    """
    if ranks == 1:
        return layout
    rows, *rest = layout.shape
    each, odd = divmod(rows, 2 * ranks)
    if odd:
        raise FormatError(f"{rows} rows are not gate and up of {ranks} ranks")
    parts: list[Part] = []
    for rank in range(ranks):
        for half in range(2):
            start, target = (2 * rank + half) * each, (half * ranks + rank) * each
            block = Box((start, *(0 for _ in rest)), (start + each, *rest))
            by = (target - start, *(0 for _ in rest))
            for part in layout.parts:
                for cut in part.narrow(block):
                    parts.append(cut._replace(target=cut.target.shift(by)))
    return replace(layout, parts=tuple(parts))
