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
from jax_ucp.formats.listing import listed
from jax_ucp.formats.megatron import notes
from jax_ucp.formats.megatron.dist_args import check_args
from jax_ucp.formats.megatron.dist_files import (
    CONFIG_FILE,
    DistFiles,
    StoredObject,
    checkpoint_folder,
    is_checkpoint,
    open_files,
)
from jax_ucp.formats.megatron.dist_flat import (
    group_object,
    param_state_sources,
)
from jax_ucp.formats.megatron.dist_proof import (
    are_remainders,
    are_rounded,
)
from jax_ucp.formats.megatron.dist_slices import BufferStates, buffer_states, has_flat_buffers
from jax_ucp.formats.megatron.dist_steps import (
    Step,
    one_step,
    optimizers,
    steps_of,
)
from jax_ucp.formats.megatron.dist_tensors import TensorStates, tensor_states
from jax_ucp.formats.megatron.files import about, require_folder
from jax_ucp.formats.megatron.legacy_optimizer import BUFFERS, beside_tensors
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, is_expert
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.tensor_names import StoredTensor
from jax_ucp.formats.torch_save.unpickle import walk
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents


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
        assembly = _Assembly(files, options)
        for name in beside:
            assembly.importer.skip(name, "file", "beside the folder of the iteration, of all saves")
        contents = assembly.contents()
    except (FormatError, LayoutError) as error:
        if str(files.folder) in str(error):
            raise
        raise type(error)(f"{files.folder}: {error}") from error
    return replace(
        contents,
        checks=lambda extent: itertools.chain(
            contents.checks(extent), files.object_checks(extent, assembly.inside)
        ),
    )


def _layout(files: DistFiles) -> str:
    """The layout of the optimizer, where the files name one."""
    said = as_dict(files.tree.get("content_metadata")).get("distrib_optim_sharding_type")
    return f"torch_dist, {said:.40}" if isinstance(said, str) else "torch_dist"


class _Assembly:
    """Puts one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, files: DistFiles, options: Options):
        self.files, self.args, self.options = files, files.args, options
        # dp_zero_gather_scatter has its tensors in objects.
        self.inside = {} if options.weights_only else param_state_sources(files)
        tensors = tensor_states(files, options.weights_only)
        check_args(files, tensors.shapes, tensors.dtypes)
        if options.weights_only:
            buffers, self.steps = BufferStates(), {}
        else:
            buffers, self.steps = buffer_states(files, tensors, self.inside), steps_of(files)
        names = dict.fromkeys((*tensors.states, *buffers.states))
        nothing: Mapping[str, Consolidated] = {}
        self.states = {
            name: {**tensors.states.get(name, nothing), **buffers.states.get(name, nothing)}
            for name in names
        }
        self.copies, self.causes = buffers.copies, buffers.causes
        self.stepless: list[str] = []
        self.importer = self._importer(tensors, buffers)

    def _importer(self, tensors: TensorStates, buffers: BufferStates) -> Import:
        files = self.files
        sources = {"": files.source, f"{files.common_name}:": files.common, **self.inside}
        importer = Import(
            "megatron", files.folder, Combined.prefixed(sources), self.options.on_conflict
        )
        importer.about = about(_layout(files), self.args, files.tree.get("iteration"))
        importer.unknown |= files.common.unknown
        for key, run in tensors.cuts.items():
            importer.cut(key, run.key, run.start, run.target.shape)
        for part in buffers.slices:
            reason = f"{part.state} of {part.name}, a part of a flat buffer"
            importer.slice(part.key, part.tensor, reason)
        for key in buffers.gaps:
            importer.skip(key, "", notes.GAP)
        for key in tensors.left:
            importer.leave(key, "", notes.LEFT)
        return importer

    def contents(self) -> Contents:
        self._parameters()
        self._objects()
        self._common()
        self._other_files()
        self._notes()
        return self.importer.contents()

    def _parameters(self) -> None:
        for expert in (False, True):
            mine = {
                name: states for name, states in self.states.items() if is_expert(name) == expert
            }
            kept = {name: frozenset(states) - {"weight", "param"} for name, states in mine.items()}
            counts = Counter(kept.values())
            mixed = len(counts.keys() - {frozenset[str]()}) > 1
            for name, states in mine.items():
                self._check_states(name, kept[name], counts)
                if "weight" in states:
                    self._parameter(name, states, mixed, self.causes.get(name))
                else:
                    self._copy_of_embedding(self.copies[name], states)

    def _check_states(
        self, name: str, kept: frozenset[str], counts: Mapping[frozenset[str], int]
    ) -> None:
        """Raise FormatError where a parameter has not the states of most that share one with it.

        `kept` are its states, and `counts` how many parameters have which. Those of one optimizer
        have the same states; those of another, such as Muon beside Adam, share none with them.
        What has no state was frozen, or is of plain SGD.
        """
        alike = [states for states in counts if states & kept]
        usual = max(alike, key=counts.__getitem__, default=frozenset[str]())
        if lost := usual - kept:
            raise FormatError(
                f"{self.files.folder}: {min(lost)} of {name} is in no file, though {counts[usual]}"
                " parameters that share states with it have it: a part of the optimizer is"
                " missing. weights_only opens the weights alone"
            )
        if more := kept - usual:
            raise FormatError(
                f"{self.files.folder}: {min(more)} is there of {name}, but not of {counts[usual]}"
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
        if cause is not None and not has_flat_buffers(self.files):
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
