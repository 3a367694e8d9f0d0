"""Megatron-Core's distributed checkpoints (torch_dist, and zarr before core 0.16).

A tensor of the model is stored whole, whatever the parallelism was, with layers and experts on
leading axes; masters and moments are stored in the same way or in one that `dist_names`
undoes. Weights beside masters are duplicates. The vocabulary is padded; `sizes` says its true size.

Of two files whose items have equal sizes nothing in a checkpoint says that they were exchanged.
Where there are masters beside weights, `verify` finds it.

Facts: `megatron/core/dist_checkpointing/`, `megatron/core/optimizer/` and
`megatron/training/checkpointing.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jax_ucp.errors import FormatError, LayoutError, UnsafePickle
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.dcp.metadata import METADATA_FILE
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.listing import listed
from jax_ucp.formats.megatron import notes
from jax_ucp.formats.megatron.dist_args import check_args
from jax_ucp.formats.megatron.dist_buffers import (
    Plan,
    Variant,
    copies_of_embedding,
    cut_of,
    may_have_buckets,
    plan_buffers,
    stage_of,
    variants,
)
from jax_ucp.formats.megatron.dist_files import (
    CONFIG_FILE,
    DistFiles,
    StoredObject,
    checkpoint_folder,
    is_checkpoint,
    open_files,
)
from jax_ucp.formats.megatron.dist_flat import (
    Address,
    Filled,
    Flat,
    check_numels,
    filled,
    flats,
    group_object,
    param_state_sources,
)
from jax_ucp.formats.megatron.dist_names import (
    Run,
    bare_name,
    check_stacks,
    flattened_runs,
    gate_and_up,
    is_flat,
    is_fully_reshardable,
    stacked_halves,
    state_of,
    unstacked,
)
from jax_ucp.formats.megatron.dist_proof import (
    BF16,
    are_remainders,
    are_rounded,
    moved_by_padding,
    not_of_weights,
    unproved_order,
)
from jax_ucp.formats.megatron.dist_steps import (
    Step,
    common_steps,
    group_steps,
    one_step,
    optimizers,
)
from jax_ucp.formats.megatron.files import about, require_folder
from jax_ucp.formats.megatron.legacy_optimizer import BUFFERS, beside_tensors
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, is_expert
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.tensor_names import StoredTensor
from jax_ucp.formats.torch_save.unpickle import walk
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.cuts import Cut


def recognise(path: FilePath) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_megatron_dist(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory (with its tracker), or in one iteration's folder.

    Raises FormatError, naming file and tensor, where files are missing, damaged or of another run,
    and LayoutError where chunks do not form a tensor.
    """
    folder = checkpoint_folder(path)
    require_folder(path, folder)
    beside = [f"../{child.name}" for child in path.children() if child.is_file()]
    files = open_files(folder, options.weights_only)
    return read_files(files, options, [] if folder == path else beside)


def read_files(files: DistFiles, options: Options, beside: Sequence[str] = ()) -> Contents:
    """The checkpoint that the files form; `beside` are files of the save directory."""
    try:
        reader = _Reader(files, options)
        for name in beside:
            reader.importer.skip(name, "file", "beside the folder of the iteration, of all saves")
        contents = reader.contents()
    except (FormatError, LayoutError) as error:
        if str(files.folder) in str(error):
            raise
        raise type(error)(f"{files.folder}: {error}") from error
    return replace(
        contents,
        checks=lambda extent: itertools.chain(
            contents.checks(extent), files.object_checks(extent, reader.inside)
        ),
    )


def _layout(files: DistFiles) -> str:
    """The layout of the optimizer, where the files name one."""
    said = as_dict(files.tree.get("content_metadata")).get("distrib_optim_sharding_type")
    return f"torch_dist, {said:.40}" if isinstance(said, str) else "torch_dist"


# By parameter its shape, and the runs that it is made of.
_Blocks = dict[str, tuple[Shape, Sequence[Run]]]


class _Reader:
    """Puts one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, files: DistFiles, options: Options):
        self.files, self.args, self.options = files, files.args, options
        # dp_zero_gather_scatter has its tensors in objects.
        self.inside = {} if options.weights_only else param_state_sources(files)
        sources = {"": files.source, f"{files.common_name}:": files.common, **self.inside}
        self.importer = Import(
            "megatron", files.folder, Combined.prefixed(sources), options.on_conflict
        )
        self.importer.about = about(_layout(files), files.args, files.tree.get("iteration"))
        self.importer.unknown |= files.common.unknown
        # parameter -> state -> how it is stored; `weight` is what the model computes with. The
        # vocabulary is padded.
        self.states: dict[str, dict[str, Consolidated]] = {}
        self.dtypes: dict[str, str] = {}
        self.steps: dict[bool, list[Step]] = {}
        self.copies: Mapping[str, str] = {}
        self.stepless: list[str] = []

    def contents(self) -> Contents:
        self._stored_states()
        shapes = {name: states["weight"].layout.shape for name, states in self.states.items()}
        check_args(self.files, shapes, self.dtypes)
        causes = self._buffers()
        self._steps()
        self._parameters(causes)
        self._objects()
        self._common()
        self._other_files()
        self._notes()
        return self.importer.contents()

    def _stored_states(self) -> None:
        """States that are stored as tensors of the model's shapes, or as parts of such."""
        keys = {key: state_of(key) for key in itertools.filterfalse(is_flat, self.files.tensors)}
        weights = {key for key, (state, _) in keys.items() if state == "weight"}
        by_state: dict[str, _Blocks] = {}
        for key, (state, model) in keys.items():
            if state != "weight" and self.options.weights_only:
                self._leave(key)
                continue
            if model not in weights:
                raise FormatError(
                    f"{self.files.folder}: {key} is a state of {model}, but the model has no such"
                    " tensor: a part of the checkpoint is missing, or is of another run"
                )
            params = by_state.setdefault(state, {})
            blocks = self._unstacked(key, model)
            if twice := params.keys() & blocks.keys():
                raise FormatError(
                    f"{self.files.folder}: {state} of {min(twice)} is stored twice, in {key} too"
                )
            params |= blocks
        for state, params in by_state.items():
            self._add_state(state, params)

    def _leave(self, key: str) -> None:
        for run in self.files.tensors[key].runs:
            self.importer.leave(run.key, "", notes.LEFT)

    def _unstacked(self, key: str, model: str) -> _Blocks:
        """The parameters in the tensor `key`: the model's tensor `model`, or a state of it."""
        tensor, shape = self.files.tensors[key], self.files.tensors[model].shape
        runs = tensor.runs if tensor.shape == shape else self._flattened(key, shape)
        check_stacks(
            model, shape, {"layers": self._layers(model), "experts": self.args.get("num_experts")}
        )
        params: _Blocks = {**unstacked(model, shape, runs)}
        if key == model:
            self.dtypes |= dict.fromkeys(params, tensor.dtype.name)
        return params

    def _add_state(self, state: str, params: _Blocks) -> None:
        for name, (gate, up) in gate_and_up(params).items():
            params[name] = stacked_halves(params.pop(gate), params.pop(up))
            self.dtypes[name] = self.dtypes[gate]
        for name, (shape, runs) in params.items():
            self.states.setdefault(name, {})[state] = self._consolidated(shape, runs)

    def _flattened(self, key: str, shape: Sequence[int]) -> list[Run]:
        tensor = self.files.tensors[key]
        try:
            return list(flattened_runs(shape, tensor.shape, tensor.runs))
        except FormatError as error:
            raise FormatError(f"{self.files.folder}: {key}: {error}") from None

    def _layers(self, model: str) -> int | None:
        return self.args.get("num_layers") if bare_name(model).startswith("decoder.") else None

    def _consolidated(self, shape: tuple[int, ...], runs: Sequence[Run]) -> Consolidated:
        """The runs as shards of the parameter: each a stored chunk, or a part of one."""
        keys: list[str] = []
        for run in runs:
            key = run.key
            if run.start or self.importer.stored[key].shape != run.target.shape:
                key = f"{run.key}[{run.start}:{run.start + run.target.size}]"
                self.importer.cut(key, Cut(run.key, run.start, run.target.shape))
            keys.append(key)
        fragments = [
            Fragment(i, Box.whole(run.target.shape), run.target) for i, run in enumerate(runs)
        ]
        return Consolidated(
            ParamLayout(shape, tuple(run.target.shape for run in runs), tuple(fragments)), keys
        )

    def _buffers(self) -> Mapping[str, str]:
        """Add states in flat buffers; returns what is likely where a master is not the weight's.

        Errors name the remedy: the weights are not in the buffers.
        """
        try:
            return self._read_buffers()
        except (FormatError, LayoutError) as error:
            if "weights_only" in str(error):
                raise
            raise type(error)(f"{error}. weights_only opens the weights alone") from error

    def _read_buffers(self) -> Mapping[str, str]:
        if self.options.weights_only:
            for key in filter(is_flat, self.files.tensors):
                self._leave(key)
        elif self._has_flat_buffers:
            self._read_slices()
            return dict.fromkeys(self.states, not_of_weights())
        elif any(map(is_fully_reshardable, self.files.tensors)):
            return self._moved()
        return {}

    @property
    def _has_flat_buffers(self) -> bool:
        return any(map(is_flat, (*self.files.tensors, *self.files.objects)))

    def _read_slices(self) -> None:
        stored = flats(self.files, self.inside)
        for key, stored_object in self.files.objects.items():
            if (about := group_object(key)) and about.what == "per_bucket_numel_unpadded":
                check_numels(self.files, key, stored_object.open(), stored)
        cuts = self._cuts()
        keys_by_state: dict[tuple[str, str], dict[int, str]] = {}
        for buffer in self._filled(cuts, stored):
            for key in buffer.gaps:
                self._skip_gap(key)
            for part in buffer.slices():
                self.importer.slice(
                    part.key, part.tensor, f"{part.state} of {part.name}, a part of a flat buffer"
                )
                keys_by_state.setdefault((part.name, part.state), {})[part.rank] = part.key
        for (name, state), keys in keys_by_state.items():
            self.states.setdefault(name, {})[state] = Consolidated(
                cuts[name], [keys[r] for r in range(len(keys))]
            )

    def _filled(
        self, cuts: Mapping[str, ParamLayout], stored: Mapping[Address, Flat]
    ) -> list[Filled]:
        """The buffers, by the first order of modules that has their sizes.

        Whether it is theirs, `dist_proof` says: weights are compared with masters.
        """
        fits, errors = self._fits(cuts, stored, every=self._has_remainders())
        if not fits:
            raise errors[0]
        orders = [[buffer.buffer for buffer in fit] for fit in fits]
        if any(order != orders[0] for order in orders):
            raise FormatError(f"{self.files.folder}: {unproved_order()}")
        return fits[0]

    def _fits(
        self, cuts: Mapping[str, ParamLayout], stored: Mapping[Address, Flat], every: bool
    ) -> tuple[list[list[Filled]], list[FormatError]]:
        """The buffers by `every` order of modules that fits, or by the first; and why others do
        not.
        """
        several = any(chain for chain, *_ in stored)
        fits: list[list[Filled]] = []
        errors: list[FormatError] = []
        for variant in variants(self.args):
            if fits and not every:
                break
            try:
                plans = self._plans(cuts, variant, several, stored)
                fits.append(filled(self.files, plans, stored))
            except FormatError as error:
                errors.append(error)
        return fits, errors

    def _has_remainders(self) -> bool:
        """Whether some masters in flat buffers are remainders, which prove no order."""
        dtypes = {tensor.dtype for key, tensor in self.files.tensors.items() if is_flat(key)}
        return any(are_remainders(self.args, dtype, BF16) for dtype in (*dtypes, np.dtype("f4")))

    def _skip_gap(self, key: str) -> None:
        self.importer.skip(
            key, "", "a gap between tensors in a flat buffer, which holds what was in memory"
        )

    def _moved(self) -> dict[str, str]:
        """What `fully_reshardable` may have moved, with the cause; see `dist_proof`."""
        try:
            several = self.args.degree("expert_model_parallel_size") > 1
            plans = self._plans(self._cuts(), variants(self.args)[0], several, {})
            buffers = [buffer for plan in plans for buffer in plan.buffers.values()]
            return {name: moved_by_padding(n) for buffer in buffers for name, n in buffer.moved}
        # modules of an order not known here: any of them may have been moved, if there is padding
        except (FormatError, LayoutError):
            if not may_have_buckets(self.args):
                return {}
            return dict.fromkeys(self.states, moved_by_padding(None))

    def _cuts(self) -> dict[str, ParamLayout]:
        """How tensor-parallel ranks held each parameter, and the copies of an embedding."""
        cuts: dict[str, ParamLayout] = {}
        for name, states in self.states.items():
            if not name.endswith(BUFFERS):
                cuts[name] = self._cut(name, states["weight"].layout)
        self.copies = copies_of_embedding(self.args, cuts)
        for copy, name in self.copies.items():
            cuts[copy] = cuts[name]
            self.dtypes[copy] = self.dtypes[name]
        return cuts

    def _cut(self, name: str, layout: ParamLayout) -> ParamLayout:
        ranks = self.args.degree("tensor_model_parallel_size")
        if is_expert(name):
            ranks = self.args.expert_ranks
        try:
            return cut_of(layout.shape, [fragment.target for fragment in layout.fragments], ranks)
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None

    def _plans(
        self,
        cuts: Mapping[str, ParamLayout],
        variant: Variant,
        several: bool,
        stored: Mapping[Address, Flat],
    ) -> list[Plan]:
        """The buffers of the optimizer, or of `several`: that of experts is the second."""
        shapes = {name: layout.shards[0] for name, layout in cuts.items()}
        recorded: list[dict[tuple[int, int, str], list[int]]] = [{}, {}]
        if "data_parallel_size" not in self.args.fields:
            for (chain, group, c, dtype), flat in stored.items():
                if not flat.coalesced:
                    recorded[chain][group, c, dtype] = flat.bucket_sizes
        return [
            plan_buffers(self.args, expert, shapes, self.dtypes, variant, sizes)
            for expert, sizes in zip((False, True) if several else (None,), recorded, strict=False)
        ]

    def _steps(self) -> None:
        """Read how often each optimizer stepped, from `common.pt` or from each rank's own."""
        if self.options.weights_only:
            return
        self.steps = common_steps(self.files)
        facts = Facts(self.files.folder)
        for key, stored in self.files.objects.items():
            if (about := group_object(key)) and about.what == "optimizer":
                self.steps.setdefault(bool(about.chain), []).extend(group_steps(key, stored))
                stage = stage_of(self.args, bool(about.chain), about.group)
                file = stored.open()
                facts.state_all(
                    file, f"{stored.file}:{key}", "optimizer", file.tree, (about.chain, stage)
                )

    def _parameters(self, causes: Mapping[str, str]) -> None:
        for expert in (False, True):
            mine = {
                name: states for name, states in self.states.items() if is_expert(name) == expert
            }
            kept = {name: frozenset(states) - {"weight", "param"} for name, states in mine.items()}
            mixed = len({*kept.values()} - {frozenset[str]()}) > 1
            for name, states in mine.items():
                self._check_states(name, kept)
                if "weight" in states:
                    self._parameter(name, states, mixed, causes.get(name))
                else:
                    self._copy_of_embedding(self.copies[name], states)

    def _check_states(self, name: str, kept: Mapping[str, frozenset[str]]) -> None:
        """Raise FormatError where a parameter has not the states of most that share one with it.

        Those of one optimizer have the same states; those of another, such as Muon beside Adam,
        share none with them. What has no state was frozen, or is of plain SGD.
        """
        alike = Counter(states for states in kept.values() if states & kept[name])
        usual = alike.most_common(1)[0][0] if alike else frozenset()
        if lost := usual - kept[name]:
            raise FormatError(
                f"{self.files.folder}: {min(lost)} of {name} is in no file, though {alike[usual]}"
                " parameters that share states with it have it: a part of the optimizer is"
                " missing. weights_only opens the weights alone"
            )
        if more := kept[name] - usual:
            raise FormatError(
                f"{self.files.folder}: {min(more)} is there of {name}, but not of {alike[usual]}"
                " parameters that share states with it: a part of the optimizer is missing."
                " weights_only opens the weights alone"
            )

    def _parameter(
        self, name: str, states: Mapping[str, Consolidated], mixed: bool, cause: str | None
    ) -> None:
        """Add a parameter; `mixed` is whether several kinds of optimizers have parameters.

        `cause` is why its master may be another's, if its place in the files is an assumption.
        """
        unpadded = {state: self._unpadded(name, param) for state, param in states.items()}
        weight, master = unpadded.pop("weight"), unpadded.pop("param", None)
        if name.endswith(BUFFERS):
            self.importer.parameter("buffer", name, weight, notes.BUFFER)
        elif master is None:
            self.importer.parameter("param", name, weight, f"the parameter {name}")
        elif self._are_remainders(states):
            self._joined(name, master, weight, cause)
        else:
            reason, likely = notes.copy_of_master(name), cause or ""
            near = are_rounded(self.args)
            self.importer.parameter("param", name, master, f"the master of {name}")
            self.importer.duplicate("param", name, weight, reason, likely, near)
            if cause is not None and self.options.on_conflict:
                self.importer.prove_place(name, states["param"], states["weight"], likely, near)
        for state, param in unpadded.items():
            self.importer.parameter(state, name, param, f"{state} of {name}")
        if states.keys() != {"weight"}:
            self._step(name, mixed)

    def _are_remainders(self, states: Mapping[str, Consolidated]) -> bool:
        if not {"param", "weight"} <= states.keys():
            return False
        stored, weight = (self.importer.dtype(states[state]) for state in ("param", "weight"))
        return are_remainders(self.args, stored, weight)

    def _joined(
        self, name: str, low: Consolidated, weight: Consolidated, cause: str | None
    ) -> None:
        """Add a parameter of which the low 16 bits are stored beside the weight.

        Raises FormatError where they may have been moved, because nothing would show it.
        """
        if cause is not None and not self._has_flat_buffers:
            raise FormatError(f"{self.files.folder}: {name}: {cause}")
        if self.options.on_conflict == "copy":
            self.importer.parameter("param", name, weight, f"the weight {name}, as asked")
            for key in low.keys:
                self.importer.skip(key, "", notes.REST_OF_MASTER)
        else:
            self.importer.remainders(name, low, weight, notes.half_of_master(name))

    def _unpadded(self, name: str, param: Consolidated) -> Consolidated:
        vocab = self.options.sizes.get("vocab") if name in (EMBEDDING, TIED) else None
        if vocab is None:
            return param
        try:
            return replace(param, layout=param.layout.clip((vocab, *param.layout.shape[1:])))
        except LayoutError as error:
            raise LayoutError(f"{name}, with vocab={vocab!s:.40} in sizes: {error}") from None

    def _copy_of_embedding(self, name: str, states: Mapping[str, Consolidated]) -> None:
        for state, param in states.items():
            self.importer.duplicate(
                state, name, self._unpadded(name, param), notes.copy_of_embedding(name)
            )

    def _step(self, name: str, mixed: bool) -> None:
        step = one_step(self.files, name, self._steps_of(name, mixed))
        if step is None:
            self.stepless.append(name)
        elif step.tensor is not None:
            one = Consolidated(Unique().join([()]), [f"{self.files.common_name}:{step.tensor.key}"])
            self.importer.parameter("step", name, one, notes.STEP)
        else:
            array = np.asarray(step.value, np.int32 if isinstance(step.value, int) else np.float32)
            self.importer.constant("step", name, array, step.at)

    def _steps_of(self, name: str, mixed: bool) -> list[Step]:
        """The steps of the parameter groups that the parameter can be in."""
        steps = self.steps.get(is_expert(name) and True in self.steps, [])
        if mixed:  # Adam beside another optimizer: the step of one is not that of the other
            adam = "exp_avg" in self.states[name]
            steps = [step for step in steps if step.adam in (None, adam)]
        decays = len(self.states[name]["weight"].layout.shape) != 1 and not name.endswith(".bias")
        # Where there is one group alone, it has what does not decay too.
        return [step for step in steps if step.decays in (None, decays)] or steps

    def _objects(self) -> None:
        for item in self.files.left:
            self.importer.skip(item, "object", notes.LEFT)
        for key, stored in self.files.objects.items():
            item, group = f"{stored.file}:{key}", group_object(key)
            if "._extra_state/" in key:
                self.importer.skip(item, "object", notes.TRANSFORMER_ENGINE)
            elif group is not None and group.what != "optimizer":
                self.importer.skip(item, "object", notes.LAYOUT)
            else:
                self._extra(key, stored, item)

    def _extra(self, key: str, stored: StoredObject, item: str) -> None:
        try:
            opened = stored.open()
        except UnsafePickle as error:
            reason = f"not read, because it asks for more than data: {error}"
            self.importer.skip(item, "object", reason)
            self.importer.notes.append(f"the object {key} was left out: {error}")
            return
        self.importer.unknown |= opened.unknown
        tree = opened.tree
        if isinstance(tree, list) and len(tree) == 1:
            [tree] = tree
        self.importer.extra(stored.file, key, tree, opened)

    def _common(self) -> None:
        common = self.files.common_name
        for name, value in self.files.tree.items():
            if name != "optimizer":
                self.importer.extra(common, name, value)
            elif self.options.weights_only:
                self._leave_common_optimizer()
            else:
                several = isinstance(value, list) or 0 in as_dict(value)
                for label, part in beside_tensors(optimizers(value) if several else value).items():
                    self.importer.extra(common, label, part)

    def _leave_common_optimizer(self) -> None:
        common = self.files.common_name
        self.importer.skip(f"{common}:optimizer", "param_groups", notes.LEFT)
        for _, node in walk(self.files.tree["optimizer"]):
            if isinstance(node, StoredTensor):
                self.importer.skip(f"{common}:{node.key}", "", notes.LEFT)

    def _other_files(self) -> None:
        for name in self.files.beside:
            self.importer.skip(name, "file", "nothing of the checkpoint lies in it")
        about = {CONFIG_FILE: "names the backend", METADATA_FILE: "says which chunk is where"}
        accounted = {*self.files.files, *self.files.left, self.files.common_name}
        others = [path for path in self.files.folder.children() if path.name not in accounted]
        for path in sorted(others):
            if path.name in about:
                reason = f"{about[path.name]}; the tree's names and shapes come from it"
                self.importer.skip(path.name, "metadata", reason)
                continue
            size = f"{path.size()} bytes"
            self.importer.skip(path.name, size, "nothing of the checkpoint lies in it")
            if path.suffix == ".distcp":
                self.importer.notes.append(
                    f"{path.name} belongs to no tensor: it is left from another save"
                )

    def _notes(self) -> None:
        if EMBEDDING in self.states and "vocab" not in self.options.sizes:
            rows = self.states[EMBEDDING]["weight"].layout.shape[0]
            self.importer.notes.append(notes.padded_vocabulary(rows))
        if self.options.weights_only:
            self.importer.notes.append(notes.WEIGHTS_ALONE)
        elif all(states.keys() == {"weight"} for states in self.states.values()):
            self.importer.notes.append(notes.WITHOUT_OPTIMIZER)
        if self.stepless:
            self.importer.notes.append(
                f"nothing says how often the optimizer of {listed(self.stepless, 1)} stepped;"
                " plan_optimizer needs step= where it counts"
            )
        if "args" not in self.files.tree:
            self.importer.notes.append(notes.without_args(self.files.folder))
        elif self.args.absent:
            self.importer.notes.append(notes.defaults_taken(self.args.absent))
