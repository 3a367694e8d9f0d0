"""An opened checkpoint of any format, to inspect, restore onto a mesh, convert and export.

This module uses `formats` and `sharding`, which do not import one another.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.arrays.checks import Extent, verdicts
from jax_ucp.arrays.contents import About, Contents, Item, Piece, require_values, require_weights
from jax_ucp.arrays.optimizer_groups import Group, settings_by_parameter
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.proved import ProvedReads
from jax_ucp.arrays.suspicions import suspicions
from jax_ucp.errors import CorruptData, UnsupportedLeaf, UnsupportedPath
from jax_ucp.files.listing import Asked, counting
from jax_ucp.files.path import FilePath, file_path, target_path
from jax_ucp.formats import saved_index
from jax_ucp.formats.registry import open_contents
from jax_ucp.inspection.statistics import MAX_READ
from jax_ucp.jobs.ledger import Share
from jax_ucp.jobs.run import run, run_share
from jax_ucp.jobs.work import verify
from jax_ucp.layout.box import Box
from jax_ucp.options import Options, require_used
from jax_ucp.text import html_table, visible
from jax_ucp.tree import Leaf, tree_of
from jax_ucp.universal.copy import (
    CopyBlock,
    CopyPlan,
    UniversalTarget,
    copy,
    plan_copy,
    require_target,
)

if TYPE_CHECKING:
    import optax
    from jax.sharding import AbstractMesh, Mesh
    from jax.typing import DTypeLike

    from jax_ucp.formats.exporting import ExportFormat, ExportPlan
    from jax_ucp.inspection.diff import Side
    from jax_ucp.inspection.page import Page
    from jax_ucp.inspection.parameters import LazyArray, ParameterTable
    from jax_ucp.mapping import rules as mappings
    from jax_ucp.optimizers import OptimizerPlan
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostReads
    from jax_ucp.sharding.restore import RestorePlan
    from jax_ucp.sharding.trees import Missing
    from jax_ucp.universal.linking import LinkPlan


@dataclass(frozen=True)
class Opened:
    """A path, the options that it was opened with, and the contents that were found."""

    path: str
    options: Options
    contents: Contents

    @cached_property
    def suspicions(self) -> Sequence[str]:
        """Notes that a sample of the arrays and files gives."""
        return suspicions(self.contents)


def open_with(
    path: str | os.PathLike[str],
    options: Options,
    also_used: Collection[str] = (),
    share_reads: bool = False,
) -> Checkpoint:
    """`open` with its options in one value; sizes in `also_used` need not be used by it."""
    with counting():  # locating the path may take a request, too
        at = file_path(path)
        if share_reads:
            from jax_ucp.sharding.open_together import open_together

            contents = open_together(at, lambda at: open_contents(path, options, at))
        else:
            contents = open_contents(path, options, at)
    require_used(options.sizes, contents.path, also_used)
    return Checkpoint(contents, Opened(str(at), options, contents))


def opened(checkpoint: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """The given checkpoint, or the one at the given path, opened."""
    return checkpoint if isinstance(checkpoint, Checkpoint) else open_with(checkpoint, Options())


def require_mesh(mesh: object, rules: Sequence[Rule], hosts: int) -> None:
    """Raises ValueError for rules or hosts without a mesh."""
    if mesh is None and (rules or hosts != 1):
        raise ValueError("rules= and hosts= are for a mesh: give mesh= too")


def _written(
    path: str | os.PathLike[str],
    write: Callable[[FilePath], object],
    step: int | None,
    item: str | None,
    custom_metadata: Mapping[str, Any] | None,
) -> Checkpoint:
    """The checkpoint that `write` writes to a path, opened; with `step`, as an item of that step.

    Raises ValueError for an item or custom metadata without a step.
    """
    target = target_path(path)
    if item is not None and step is None:
        raise ValueError(f"item={item!r} names an item of a step: give step= too")
    if custom_metadata and step is None:
        raise ValueError(f"custom_metadata={custom_metadata!r:.80} is of a step: give step= too")
    if step is None:
        write(target)
        return opened(path)
    from jax_ucp.universal.step import write_step

    name = "default" if item is None else item
    return opened(str(write_step(target, step, name, write, custom_metadata or {})))


class Checkpoint:
    """An opened checkpoint, as `jax_ucp.open` gives it.

    Only metadata have been read; the files must stay where they are. It is a mapping from labels to
    lazy arrays: `checkpoint["param/w"]`.

    Args:
        contents: the contents that a reader gives.
        opened: the result of `open` that this is, or was made of, if any.
    """

    def __init__(self, contents: Contents, opened: Opened | None = None):
        self._contents = contents
        self._opened = opened
        self._reads = ProvedReads(contents)

    @classmethod
    def of(cls, tree: Any) -> Checkpoint:
        """A pytree in memory as a checkpoint: to be exported, mapped or saved without having been
        saved before.

        Args:
            tree: arrays, numbers, strings and None in any registered containers. Arrays are copied
                to host memory.

        Returns:
            A checkpoint of the format `memory`.

        Raises:
            UnsupportedLeaf: for a leaf that could not be saved, and always where JAX has several
                processes.

        Examples:
            >>> import jax_ucp as ucp, numpy as np
            >>> ucp.Checkpoint.of({"w": np.zeros((2, 3), np.float32)})["w"].shape
            (2, 3)
        """
        import jax

        from jax_ucp.sharding.save import describe, take_snapshot

        if jax.process_count() > 1:
            raise UnsupportedLeaf(
                "the tree is in the memory of several processes; save it, and open what was saved"
            )
        snapshot = take_snapshot(describe(tree))
        # unique, so that no stopped copy of another tree is continued with this one
        origin = {"format": "memory", "taken": time.time_ns()}
        return cls(Contents("memory", "a tree in memory", snapshot.leaves, snapshot, source=origin))

    @property
    def format(self) -> str:
        """The name of its format: `universal`, `orbax`, `deepspeed`; `memory` of a tree."""
        return self._contents.format

    @property
    def path(self) -> str:
        """Its path: of a DeepSpeed directory the folder in `latest`, of a step its item."""
        return self._contents.path

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Every leaf of its tree, with path, shape and dtype."""
        return self._contents.leaves

    @property
    def inventory(self) -> Sequence[Item]:
        """All stored items, each of which is mapped, kept as an extra, or skipped for a reason."""
        return self._contents.inventory

    @property
    def extras(self) -> Mapping[str, Any]:
        """Stored items other than arrays of the tree, as JSON values: schedulers, loss scalers,
        random states, client state.
        """
        return self._contents.extras

    @property
    def groups(self) -> Sequence[Group]:
        """The settings of the trainer's optimizer for each parameter, such as weight_decay, if the
        files have them by name.
        """
        return self._contents.groups

    @cached_property
    def notes(self) -> Sequence[str]:
        """Warnings and facts about this checkpoint, as texts. Reads a sample: the steps of up to
        512 parameters, and the ends of as many files.
        """
        suspicions = self._opened.suspicions if self._opened else ()
        return [*self._contents.notes, *suspicions]

    @property
    def source(self) -> Mapping[str, Any]:
        """The origin of a universal checkpoint that was imported, and options that the user gave
        (`optimizer_groups`, `model`).
        """
        return self._contents.source

    @property
    def about(self) -> About:
        """Its writer, the step, and the degrees of parallelism, if the files say so."""
        return self._contents.about

    @property
    def is_remote(self) -> bool:
        """Whether it is read over a network."""
        return self._contents.files.is_remote

    @property
    def asked(self) -> Asked:
        """The number of requests over a network that opening it took, and of bytes."""
        return self._contents.files.asked

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(
            ArrayInfo(leaf.shape, np.dtype(leaf.dtype)).nbytes
            for leaf in self.leaves
            if leaf.has_array
        )

    @cached_property
    def params(self) -> ParameterTable:
        """The parameters by name, of a tree `{state: {parameter: array}}`; empty for any other
        tree.

        Where the tree is deeper, as after `map`, a name has slashes.
        """
        from jax_ucp.inspection.parameters import Parameter, ParameterTable

        states_of: dict[str, dict[str, Leaf]] = {}
        for leaf in self.leaves:
            if leaf.state and leaf.has_array:
                states_of.setdefault(leaf.param, {})[leaf.state] = leaf
        named = {
            name: Parameter(name, states, self._contents, self._reads)
            for name, states in states_of.items()
            if "param" in states
        }
        return ParameterTable(named)

    def where(self, leaf: str | Leaf) -> Sequence[Piece]:
        """The files that hold the bytes of a leaf.

        Args:
            leaf: one of `leaves`, or its label (`param/layers.0.mlp.weight`).

        Returns:
            A piece for each box of the array that lies in one file, with the file and the place in
            it.

        Raises:
            KeyError: where no array has that label, or several have it.
        """
        return self._contents.locate(self._leaf(leaf) if isinstance(leaf, str) else leaf)

    def read(self, label: str, box: Box | None = None) -> np.ndarray:
        """The array of a leaf, or one box of it.

        Before the first read of a leaf, a sample of it is compared with its second copy, if it is
        stored twice, as `restore` does.

        Args:
            label: of the leaf, such as `param/layers.0.mlp.weight`.
            box: which elements to read; by default all.

        Returns:
            An array of the box's shape and the stored dtype.

        Raises:
            KeyError: where no array has that label, or several have it.
            CorruptData: where copies differ, or bytes are not what was written.
            QuantizedWeights: for a part of a quantised weight.
        """
        return self._read(self._leaf(label), box)

    def __getitem__(self, label: str) -> LazyArray:
        """The array with a label, lazily: indexing reads only those elements.

        Args:
            label: such as `param/layers.0.mlp.weight`.

        Returns:
            A lazy array with `shape` and `dtype`. Index it with ints and slices, or read all of it
            with `numpy.asarray`.

        Raises:
            KeyError: where no array has that label, or several have it.

        Examples:
            >>> import jax_ucp as ucp
            >>> weight = ucp.open("tests/data/deepspeed/z1_bf16_dp2")["param/head.weight"]
            >>> weight.shape, weight[:2, :3].shape
            ((101, 16), (2, 3))
        """
        from jax_ucp.inspection.parameters import LazyArray

        return LazyArray(self._leaf(label), self._read)

    def __contains__(self, label: object) -> bool:
        return label in self._leaf_of

    def __iter__(self) -> Iterator[str]:
        """The labels that one array has."""
        return iter(self._leaf_of)

    def _read(self, leaf: Leaf, box: Box | None) -> np.ndarray:
        require_values(self._contents, [leaf])
        return self._reads.read(leaf, box)

    def _side(self) -> Side:
        """Its data for a comparison with another checkpoint."""
        from jax_ucp.inspection.diff import Side

        return Side(self.leaves, self._read, self.about, self.groups)

    def _leaf(self, label: str) -> Leaf:
        """The array with a label. Raises KeyError if there is none, or several."""
        if label in self._leaf_of:
            return self._leaf_of[label]
        matches = [leaf for leaf in self.leaves if leaf.label == label and leaf.has_array]
        message = f"{self.path} has {len(matches)} arrays {label!r}"
        if matches:
            paths = " and ".join(repr([key.name for key in leaf.path]) for leaf in matches)
            raise KeyError(f"{message}, at {paths}")
        import difflib

        near = difflib.get_close_matches(str(label), self._leaf_of, n=3)
        hint = f"; perhaps {' or '.join(map(repr, near))} is meant" if near else ""
        raise KeyError(message + hint)

    @cached_property
    def _leaf_of(self) -> dict[str, Leaf]:
        """The leaves with arrays by label, without those that share a label."""
        arrays = [leaf for leaf in self.leaves if leaf.has_array]
        counts = Counter(leaf.label for leaf in arrays)
        return {leaf.label: leaf for leaf in arrays if counts[leaf.label] == 1}

    def abstract(
        self, *, mesh: Mesh | Literal["saved"] | None = None, rules: Sequence[Rule] = ()
    ) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` for every array: a target for `restore`, and for a
        compilation while that runs. Its arguments are those of `restore`; with a mesh, each array
        has the sharding that `restore` would give it.

        Returns:
            The pytree. With a mesh, arrays that stay on the host are numpy arrays of zeros, which
            take no memory.

        Raises:
            TreeMismatch: where `restore` would raise it.

        Examples:
            >>> state = checkpoint.abstract(mesh=mesh, rules=rules)  # doctest: +SKIP
            >>> step = jax.jit(train_step).lower(state, batch).compile()  # doctest: +SKIP
            >>> state = checkpoint.restore(state)  # doctest: +SKIP
        """
        from jax_ucp.sharding.restore import abstract_leaf

        if mesh is None and not rules:
            return tree_of({leaf.path: abstract_leaf(leaf) for leaf in self.leaves})
        placements = self.plan(mesh=mesh, rules=rules).placements
        return tree_of(
            {p.leaf.path: abstract_leaf(p.leaf, p.sharding, is_placed=True) for p in placements}
        )

    @property
    def config(self) -> dict[str, Any]:
        """The config of its model: Hugging Face's config.json, Megatron's arguments, or empty."""
        from jax_ucp.mapping.model_config import config_of

        return config_of(self.extras)

    def merge(self, *adapters: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
        """The checkpoint of a model with LoRA adapters of peft merged into its weights. Reads
        nothing.

        Each weight is `weight + scale * (B @ A)`, of all adapters together, computed in float64 as
        it is read, and rounded once to the dtype that it has here; the scale is as the adapter's
        config says (rsLoRA, `rank_pattern`, `alpha_pattern`). DoRA scales each output's row by its
        norm, for which the row is read whole. What an adapter has of `modules_to_save` and biases
        takes the place of the base's.

        Args:
            adapters: paths of folders with `adapter_config.json`, or opened checkpoints of them.

        Returns:
            A checkpoint of the same names, to be mapped, restored, saved, exported, compared.

        Raises:
            FormatError: for an adapter of another method, or one that does not fit, with every
                place where it does not.
            LayoutError: where the checkpoint is mapped, or has an optimizer's states.
            QuantizedWeights: where weights are stored as codes; open it with `dequantize`.

        Examples:
            >>> ucp.open("base").merge("adapter").save("merged")  # doctest: +SKIP
        """
        from jax_ucp.formats.peft.merging import merged  # which only this needs

        if not adapters:
            raise ValueError("merge() needs at least one adapter")
        given = [opened(each) for each in adapters]
        for checkpoint in (self, *given):
            require_weights(checkpoint._contents)
        return self._made(merged(self._contents, [each._contents for each in given]))

    def map(
        self,
        mapping: mappings.Mapping | str | os.PathLike[str],
        *,
        sizes: Mapping[str, int] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        assume: Sequence[str] = (),
        params: str | None = None,
    ) -> Checkpoint:
        """The checkpoint with the leaves of your model instead of its parameters. Reads nothing.

        Optimizer states are mapped like their parameters. A leaf is found under its state and the
        parts of its name between slashes. What the mapping requires of the model's config must
        hold. A LoRA adapter of peft uses the mapping of its base; its factors become the leaves
        that qwix has beside the weight's (`w_lora_a`, `w_lora_b`).

        Args:
            mapping: a mapping, its file, or the name of one that comes with the package.
            sizes: lengths by name; others are taken from the model's config, and from the shapes.
            config: the model's config, for a checkpoint that has none: a dict, such as `config` of
                another checkpoint, or a JSON file.
            assume: names of requirements that you know to be met. They become notes, and are saved
                with the mapping.
            params: the label of the parameters in the tree of a training run, such as `params`.
                Every other part of the tree that has their names, such as Adam's moments, is mapped
                as they are, and everything else stays as it is.

        Returns:
            The mapped checkpoint.

        Raises:
            LayoutError: with everything in which mapping, config and checkpoint differ.
            SpecError: where `mapping` is none.
            FormatError: where `config` is no config.
            QuantizedWeights: where weights are stored as codes.
        """
        from jax_ucp.checkpoint.views import mapped  # brings in YAML, as all that maps

        return self._made(mapped(self._contents, mapping, sizes, config, assume, params))

    def weights(self, params: str = "params") -> Checkpoint:
        """A checkpoint of only the parameters of a training run, to be mapped back and exported.

        Args:
            params: the label in the run's tree below which the parameters are; `""` takes all
                arrays.

        Returns:
            A checkpoint with these arrays below `param`, under the names that they had below
            `params`, without Flax's `value` at the end. It has no other leaves; extras stay.

        Raises:
            TreeMismatch: where no array is below that label, or two get the same name.
        """
        from jax_ucp.mapping.states import weights_of

        return self._made(weights_of(self._contents, params))

    def _made(self, contents: Contents) -> Checkpoint:
        """A checkpoint with these contents, which were made of this one's."""
        return Checkpoint(contents, self._opened)

    def plan(
        self,
        target: Any = None,
        *,
        mesh: Mesh | Literal["saved"] | None = None,
        rules: Sequence[Rule] = (),
        cast: bool | DTypeLike = False,
        partial: bool = False,
        missing: Missing = "refuse",
        share_reads: bool = False,
        narrow_integers: bool = False,
    ) -> RestorePlan:
        """The plan of a restore. Reads nothing. Its arguments are those of `restore`.

        Returns:
            A placement for each leaf, and in `notes` what was given up of shardings.

        Raises:
            TreeMismatch: with everything in which target and checkpoint differ.
            QuantizedWeights: where what is asked for is stored as codes.
        """
        from jax_ucp.sharding.restore import RestoreRequest, plan_restore, shared_plan

        request = RestoreRequest(
            target, mesh, rules, cast, partial, missing, narrow_integers, share_reads
        )
        plan = plan_restore(self.leaves, request)
        require_values(self._contents, [placement.leaf for placement in plan.placements])
        return shared_plan(plan, self._contents.arrays.arrays()) if share_reads else plan

    def restore(
        self,
        target: Any = None,
        *,
        mesh: Mesh | Literal["saved"] | None = None,
        rules: Sequence[Rule] = (),
        cast: bool | DTypeLike = False,
        partial: bool = False,
        missing: Missing = "refuse",
        share_reads: bool = False,
        narrow_integers: bool = False,
        verify: Extent = "sample",
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> Any:
        """Restore the tree onto devices, or as numpy arrays without a target and a mesh.

        What the source stores twice of these leaves is compared. A spec that does not fit the mesh
        is a ShardingWarning, and in the `notes` of `plan`.

        Args:
            target: a pytree of arrays or `jax.ShapeDtypeStruct`s; the result has its form and its
                shardings. A `NamedSharding` or a PartitionSpec stands for an array as it is stored,
                on that sharding. By default the result has the checkpoint's own form, in which
                nodes other than dicts, lists and tuples are dicts.
            mesh: where to put arrays. A target's own sharding wins if it is on a mesh of the same
                axes. Any other array, also one whose target is on another mesh, has the spec of the
                first of `rules` that matches, or that it was saved with, fitted to this mesh.
                `"saved"` means the devices that arrays were saved from, for leaves whose target
                has no sharding. By default it is the mesh that `jax.set_mesh` has set, if there is
                one and a target; leaves of `jax.eval_shape` and `nnx.eval_shape` go there as these
                say.
            rules: how to shard leaves on `mesh`: pairs of a regular expression on a leaf's label
                and a PartitionSpec, or of the name of a logical axis and mesh axes. The first rule
                that matches is used instead of a saved spec.
            cast: True converts to the target's dtypes, a dtype converts all floating arrays to it;
                otherwise dtypes must be equal.
            partial: leave out leaves that the target lacks.
            missing: what to do with leaves that the checkpoint lacks: `"refuse"` raises, `"keep"`
                keeps the target's value (new heads, adapters, averages), `"leave"` keeps what the
                target has, even a ShapeDtypeStruct, like a partial load of Orbax's.
            share_reads: if several processes need the same bytes, each reads a part of them, and
                their devices exchange the parts, so that each stored byte is read about once over
                all processes. Use it for storage that is slower than the interconnect. All
                processes must make this call, with the same arguments; an error in one is raised in
                all. In a single process it has no effect.
            narrow_integers: give 64-bit integers as 32-bit ones, if every value fits. JAX has no
                64-bit integers unless `jax_enable_x64` is set, and without this they are refused.
            verify: `"sample"` compares a few kilobytes of each array that is stored twice, in every
                file that has a part of it, which finds files that were exchanged, or are of another
                step, rank or run. `"full"` compares all of it, and every checksum of what is read.
            budget_bytes: how much memory may be used beside the result.

        Returns:
            The pytree.

        Raises:
            TreeMismatch: with all differences between target and checkpoint.
            CorruptData: where bytes are not what was written, or a file is no longer the one that
                was opened.
            QuantizedWeights: where what is asked for is stored as codes.

        Examples:
            >>> import jax_ucp as ucp
            >>> state = ucp.open("tests/data/deepspeed/z1_bf16_dp2").restore()
            >>> state["exp_avg"]["head.weight"].shape
            (101, 16)
        """
        from jax_ucp.sharding.restore import dealt_out, run_restore

        plan = self.plan(
            target,
            mesh=mesh,
            rules=rules,
            cast=cast,
            partial=partial,
            missing=missing,
            share_reads=share_reads,
            narrow_integers=narrow_integers,
        )
        proofs = self._contents.proofs({p.leaf.name for p in plan.placements}, verify)
        checks, files = dealt_out(plan, proofs, verify), self._contents.files
        restored = run_restore(plan, self._contents.arrays, budget_bytes, checks, files.is_remote)
        files.require_unchanged()
        return restored

    def plan_optimizer(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        *,
        step: int | None = None,
        check: bool = True,
    ) -> OptimizerPlan:
        """Plan to fill the optax state `tx.init(params)` from the trainer's optimizer in this
        checkpoint.

        Args:
            tx: the optax optimizer.
            params: the parameters of the model, as arrays or ShapeDtypeStructs, with the names that
                they have below `param` here; usually `map` gives them these names.
            step: the number of updates done, if the checkpoint does not have it (torch's SGD counts
                none).
            check: test that `tx` takes all states that the trainer's optimizer kept; that it
                computes what Adam or SGD computes, if its state has that type, with the betas, eps,
                momentum, Nesterov's step and weight decay that parameters have according to
                `groups`; and whether learning rates are alike.

        Returns:
            The plan: `report()` says where each leaf comes from, `restore()` gives the state.

        Raises:
            TreeMismatch: with everything that cannot be filled, such as a state of an unknown type,
                a parameter without the moment, or steps that differ or are missing; and everything
                that `tx` would do differently.
        """
        from jax_ucp.optimizers import plan_optimizer

        require_weights(self._contents)
        return plan_optimizer(self._contents, tx, params, step, check)

    def torch_states(
        self,
        tx: optax.GradientTransformation,
        model: Any = None,
        *,
        params: str = "params",
        opt_state: str = "opt_state",
        step: int | None = None,
        step_dtype: DTypeLike | None = None,
    ) -> Checkpoint:
        """The checkpoint of a JAX training run as a torch trainer would have it: the inverse of
        `plan_optimizer`.

        The states of the optimizer are found by type and become `exp_avg`, `exp_avg_sq`, `step` or
        `momentum_buffer` of the parameters. Counts of schedules and hyperparameters become extras.
        The inventory of the result says why anything else is left out. Only single numbers are
        read.

        Args:
            tx: the optax optimizer.
            model: the tree that `tx.init` was given, of arrays or ShapeDtypeStructs; by default
                nested dicts and lists of what is stored, which works unless a mask of `tx` is a
                tree of another kind.
            params: the label of the parameters in the run's tree.
            opt_state: the label of the optimizer's state.
            step: the number of updates done, if a schedule of the run has another count.
            step_dtype: that of `step`: int32 for an optimizer of DeepSpeed that counts in ints;
                by default float32, and int32 for Lion.

        Returns:
            A checkpoint with the tree `{state: {parameter: array}}`, to be mapped by the inverse of
            a mapping, and exported.

        Raises:
            TreeMismatch: with everything that does not belong to this optimizer, that torch does
                not have, or whose count differs: an unknown type of state, accumulated gradients, a
                leaf too many or too few.
        """
        from jax_ucp.optimizers import torch_states

        labels = {"params": params, "opt_state": opt_state}
        states = torch_states(self._contents, tx, model, **labels, step=step, step_dtype=step_dtype)
        return self._made(states)

    def plan_reads(
        self,
        mesh: Mesh | AbstractMesh | Mapping[str, int],
        *,
        rules: Sequence[Rule] = (),
        hosts: int = 1,
    ) -> HostReads:
        """The reads of each of several processes that restore the checkpoint onto a mesh.

        Args:
            mesh: a mesh, or the sizes of its axes by name; no devices are needed.
            rules: how to shard leaves on `mesh`, as for `restore`.
            hosts: the number of processes, among which the devices are divided evenly and in order.
                A process reads a chunk only once.

        Returns:
            For each host the bytes that it needs, those that it reads, and the files that it opens.

        Raises:
            ValueError: for an invalid mesh, rules or hosts.

        Examples:
            >>> import jax_ucp as ucp
            >>> checkpoint = ucp.open("tests/data/deepspeed/z1_bf16_dp2")
            >>> checkpoint.plan_reads({"data": 4, "model": 2}, hosts=2).files
            array([2, 2])
        """
        from jax_ucp.sharding.reads import HostMesh, checkpoint_reads

        require_values(self._contents, self.leaves)
        return checkpoint_reads(self._contents, HostMesh.of(mesh, hosts), rules)

    def plan_save(
        self,
        budget_bytes: int = DEFAULT_BUDGET,
        *,
        path: str | os.PathLike[str] | None = None,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        rules: Sequence[Rule] = (),
        hosts: int = 1,
    ) -> CopyPlan:
        """The plan of a save: its files, and the memory it takes.

        Its arguments are those of `save`. A path may be left out; if it is given, it is refused
        where `save` would refuse it.

        Returns:
            The plan; its `notes` say which saved specs and rules do not fit the mesh.

        Raises:
            ValueError: for an invalid rule, mesh or hosts.
            QuantizedWeights: where weights are stored as codes.
            FileExistsError: if `path` is in use.
            UnsupportedPath: for a `path` that cannot be written to.
        """
        if path is not None:
            require_target(self._contents, file_path(path))
        require_values(self._contents, self.leaves)
        require_mesh(mesh, rules, hosts)
        if mesh is None:
            return plan_copy(self._contents, budget_bytes)
        from jax_ucp.sharding.reads import HostMesh, fit_notes, mesh_cells

        host_mesh = HostMesh.of(mesh, hosts)
        plan = plan_copy(self._contents, budget_bytes, mesh_cells(self.leaves, host_mesh, rules))
        return replace(plan, notes=fit_notes(self.leaves, host_mesh, rules))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        rules: Sequence[Rule] = (),
        hosts: int = 1,
        budget_bytes: int = DEFAULT_BUDGET,
        progress: Callable[[CopyBlock], None] = lambda block: None,
        executor: Executor | None = None,
        root: str | None = None,
        variables: bool = False,
        step: int | None = None,
        item: str | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write the checkpoint to `path` in the universal format, and open it there.

        What is stored twice is compared while it is copied. If the call is interrupted, there is no
        checkpoint at `path`; the same call continues it.

        Args:
            path: a new folder or URL; with `step`, the folder of a run.
            mesh: a mesh, or the sizes of its axes by name. The chunks are those of a save from this
                mesh, with arrays sharded by their saved specs and `rules`, and devices divided
                evenly among `hosts`. A restore onto it then reads only the bytes that it needs; any
                other mesh can read the checkpoint too. A spec that does not fit the mesh is a
                ShardingWarning.
            rules: how to shard leaves on `mesh`, as for `restore`.
            hosts: the number of processes of `mesh`.
            budget_bytes: about how much memory blocks may take at once.
            progress: called with each block that is written.
            executor: runs the work, in threads or in other processes, which must see source and
                `path` by the same names; each then has at most one block in memory at once. The
                checkpoint is the same, byte for byte.
            root: where the parameters go in the tree, for a framework's own loader, instead of
                `param`; `""` makes them the whole tree. MaxText's `load_parameters_path` needs
                `root="params", step=0, item="items"`, tunix's manager `root="", variables=True,
                step=0, item="model_params"`.
            variables: put each parameter in a node `value`, as Flax NNX's states are stored.
            step: add the result to the run at `path`, as this step.
            item: its name in that step; by default `default`.
            custom_metadata: what the step says to its readers, as JSON, as of a manager's `save`.
                MaxText reads `{"scan_layers": False}` of a tree whose layers are not scanned, and
                `{"lora": {"lora_rank": 8, "lora_alpha": 16.0}}` of an adapter.

        Returns:
            The checkpoint that was written, opened.

        Raises:
            FileExistsError: if `path` is in use.
            UnsupportedPath: for a URL that cannot be written to.
            CorruptData: if the source contradicts itself or changes meanwhile.
            QuantizedWeights: where weights are stored as codes.
            ValueError: for an item or custom metadata without a step, and an invalid mesh, rules or
                hosts.
            WorkerError: where the checkpoint cannot be sent to the executor's processes, or one
                has ended.

        Examples:
            >>> ucp.open("tests/data/deepspeed/z1_bf16_dp2").save("converted")  # doctest: +SKIP
        """
        target_path(path)
        laid_out = self._laid_out(root, variables)
        plan = laid_out.plan_save(budget_bytes, mesh=mesh, rules=rules, hosts=hosts)
        if plan.notes:
            from jax_ucp.sharding.fit import warn_given_up

            warn_given_up(plan.notes, stacklevel=2)

        is_noted = step is not None
        write = partial(copy, laid_out._contents, plan, progress=progress, executor=executor)
        return _written(path, partial(write, is_noted=is_noted), step, item, custom_metadata)

    def _laid_out(self, root: str | None, variables: bool) -> Checkpoint:
        """The checkpoint with its parameters at `root`, each in a node `value` if `variables`."""
        if root is None and not variables:
            return self
        from jax_ucp.mapping.states import rerooted

        to = "param" if root is None else root
        return self._made(rerooted(self._contents, to, variables))

    def plan_link(
        self, path: str | os.PathLike[str], budget_bytes: int = DEFAULT_BUDGET
    ) -> LinkPlan:
        """The plan of a link: the arrays that stay in their files, and those that are copied, with
        the reasons. Its arguments are those of `link`.

        Returns:
            The plan; nothing is read or written for it.

        Raises:
            FileExistsError: if `path` is in use.
            UnsupportedPath: where stock Orbax could not reach the files from `path`.
            QuantizedWeights: where weights are stored as codes.
        """
        from jax_ucp.universal.linking import plan_link

        require_values(self._contents, self.leaves)
        return plan_link(self._contents, target_path(path), budget_bytes)

    def link(
        self,
        path: str | os.PathLike[str],
        *,
        checksum: bool = False,
        budget_bytes: int = DEFAULT_BUDGET,
        progress: Callable[[CopyBlock], None] = lambda block: None,
        root: str | None = None,
        variables: bool = False,
        step: int | None = None,
        item: str | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint to `path` whose arrays stay in this one's files, and open it there.

        Stock Orbax restores it, on any mesh, from the original files. Arrays that do not lie there
        as runs of elements are copied beside the link (`plan_link` says which, and why). The files
        must stay as they are: `open` refuses the link where one has changed, stock Orbax does not
        look.

        Args:
            path: a new folder, from which symbolic links lead to the files. In a bucket, a folder
                in which the files are, and nothing else; on a disk that may be too, and takes no
                symbolic links.
            checksum: read every linked byte once, and record the CRC-32 of each chunk, with which
                `verify` and conversions compare.
            budget_bytes: about how much memory blocks that are copied may take at once.
            progress: called with each block that is copied.

        The other arguments are those of `save`.

        Returns:
            The link, opened.

        Raises:
            FileExistsError: if `path` is in use.
            UnsupportedPath: where stock Orbax could not reach the files from `path`.
            CorruptData: if the source contradicts itself or changes meanwhile.
            QuantizedWeights: where weights are stored as codes.
            ValueError: for an item or custom metadata without a step.

        Examples:
            >>> ucp.open("tests/data/torch/hf_llama/ckpt").link("linked")  # doctest: +SKIP
        """
        from jax_ucp.universal.linking import link, with_checksums

        laid_out = self._laid_out(root, variables)

        def write(target: FilePath) -> None:
            plan = laid_out.plan_link(str(target), budget_bytes)
            link(with_checksums(plan) if checksum else plan, target, progress, step is not None)

        return _written(path, write, step, item, custom_metadata)

    def save_share(
        self,
        path: str | os.PathLike[str],
        share: tuple[int, int],
        *,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        rules: Sequence[Rule] = (),
        hosts: int = 1,
        budget_bytes: int = DEFAULT_BUDGET,
        progress: Callable[[CopyBlock], None] = lambda block: None,
        begin: Callable[[int], None] = lambda nbytes: None,
    ) -> Checkpoint | None:
        """`save`, by processes that know nothing of one another, each of which writes a share.

        The last to finish commits. All give the same arguments, and see source and `path` alike.
        Any may be run again, then or later: what is there is looked at, and left. The checkpoint is
        that of `save`, byte for byte, and has `ucp.conversion.json` beside it, which says of which
        copy it is the result. Where the source contradicts itself there is never a checkpoint.

        Args:
            share: (i, n): this process does the i-th, from 0 to n - 1, of n shares of about as many
                bytes.
            begin: called once with the number of bytes of this share, before any is written.

        The other arguments are those of `save`.

        Returns:
            The checkpoint if it is committed, None while other shares are not done.

        Raises:
            ValueError: for a share that is none.
            FormatError: where `path` has an unfinished copy of another source or in another number
                of shares.
            UCPError: as `save` does.
        """
        target = target_path(path)
        plan = self.plan_save(budget_bytes, mesh=mesh, rules=rules, hosts=hosts)
        copy_of = UniversalTarget(self._contents, plan, target, progress)
        return opened(path) if run_share(copy_of, Share(*share), begin) else None

    def plan_export(
        self,
        format: ExportFormat,
        *,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
        zero_stage: int | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        adapter_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        like: Mapping[str, Any] | str | os.PathLike[str] | Checkpoint | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> ExportPlan:
        """The plan of an export. Its arguments are those of `export`.

        Returns:
            The plan; its `notes` say what would be left out.

        Raises:
            UCPError: as `export` does.
            ValueError: for an argument that is for another format.
        """
        from jax_ucp.checkpoint.views import of_run
        from jax_ucp.formats.exporting import plan_export  # brings in every writer
        from jax_ucp.formats.peft.config import with_config
        from jax_ucp.mapping.model_config import given_config

        require_weights(self._contents)
        contents = self._with_config(format, config)._contents
        if adapter_config is not None:
            if format != "safetensors":
                raise ValueError(f"adapter_config is for safetensors: {format} has no adapters")
            contents = with_config(contents, given_config(adapter_config))
        if like is not None:
            if format != "megatron":
                raise ValueError(f"like is for megatron: {format} goes on with no run's arguments")
            if isinstance(like, Mapping):  # a run of which nothing but its arguments is known
                record = {"!record": "argparse.Namespace", "args": [], "fields": dict(like)}
                contents = of_run(contents, {"args": {"args": record}})
            else:
                contents = of_run(contents, opened(like).extras)
        arguments = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "zero_stage": zero_stage}
        return plan_export(contents, format, **arguments, budget_bytes=budget_bytes)

    def export(
        self,
        path: str | os.PathLike[str],
        format: ExportFormat,
        *,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
        zero_stage: int | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        adapter_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        like: Mapping[str, Any] | str | os.PathLike[str] | Checkpoint | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
        progress: Callable[[int], None] = lambda nbytes: None,
        executor: Executor | None = None,
    ) -> Checkpoint:
        """Write the parameters, and their states if the format has a place for them, to the new
        folder `path`.

        What is stored twice is compared while it is copied. If the call is interrupted, there is
        nothing at `path`. In a bucket, a process that is killed leaves files, but not the last one,
        which makes the folder loadable; the next export there is refused. Safetensors are
        accompanied by the model's config, tokenizer and the like, if the checkpoint has them, and
        each format by `ucp.checksums.sfv`, with a CRC-32 of each file for `verify`.

        Args:
            path: a folder or URL where nothing is.
            format: `safetensors` (weights, as transformers loads them), `dcp`
                (`torch.distributed.checkpoint`), `deepspeed` (its universal folder) or `megatron`
                (torch_dist of Megatron-Core, for `--load`).
            dtype: cast floating parameters to it, rounded to the nearest; by default no bit
                changes.
            max_shard_bytes: how large a file of safetensors may be; by default 50 GB.
            zero_stage: the ZeRO stage of the DeepSpeed run that will load it; by default that of
                the source.
            config: the config.json of the model, if the source has none: a dict, the file, or its
                folder, whose tokenizer, licence and the like are written too.
            adapter_config: peft's config, a dict or its file, if the source is an adapter that was
                trained in JAX; peft then loads the folder.
            like: with megatron one of the checkpoints of the run that goes on, or its arguments as
                a dict, if the source does not have them.
            budget_bytes: about how much memory blocks may take at once.
            progress: called with numbers of bytes that were written.
            executor: as for `save`.

        Returns:
            The exported checkpoint, opened.

        Raises:
            TreeMismatch: if the tree is not `{state: {parameter: array}}`.
            UnsupportedLeaf: with every parameter that the format cannot hold.
            FileExistsError: if `path` is in use.
            UnsupportedPath: for a URL that cannot be written to.
            ValueError: for an argument that is for another format.
            CorruptData: if the source contradicts itself or changes meanwhile.
            QuantizedWeights: where weights are stored as codes.
            LayoutError: for a config of another number of layers, or one that ties a head to the
                embedding from which it differs.
            WorkerError: as `save` does.

        Examples:
            >>> ucp.open("run/100").export("hf", "safetensors", dtype="bfloat16")  # doctest: +SKIP
        """
        from jax_ucp.formats.exporting import export_target  # brings in every writer

        target = target_path(path)
        described = self._with_config(format, config)
        plan = described.plan_export(
            format,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            zero_stage=zero_stage,
            adapter_config=adapter_config,
            like=like,
            budget_bytes=budget_bytes,
        )
        run(export_target(described._contents, plan, target, progress), executor)
        return opened(path)

    def _with_config(
        self, format: ExportFormat, config: Mapping[str, Any] | str | os.PathLike[str] | None
    ) -> Checkpoint:
        """The checkpoint with the config.json of its model, or itself."""
        if config is None:
            return self
        if format != "safetensors":
            raise ValueError(f"config is for safetensors: {format} has no place for it")
        from jax_ucp.checkpoint.views import with_model_config
        from jax_ucp.formats.huggingface.given_config import require_tied

        described = self._made(with_model_config(self._contents, config))
        require_tied(described._contents, described.config)
        return described

    def export_share(
        self,
        path: str | os.PathLike[str],
        format: ExportFormat,
        share: tuple[int, int],
        *,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
        begin: Callable[[int], None] = lambda nbytes: None,
        **options: Any,
    ) -> Checkpoint | None:
        """`export`, by processes that know nothing of one another: this one does share (i, n), i
        from 0 to n - 1, of about an n-th of the bytes. The last to finish makes the folder.

        All give the same arguments, and see source and `path` alike. Any may be run again, then or
        later: what is there is looked at, and left. The files are those of `export`, byte for byte,
        and beside them is `ucp.conversion.json`, which says of which export they are the result.
        Until it is whole, all is in a hidden folder beside `path`; in a bucket each file is of one
        share, and the last file, which makes the folder loadable, is written when all others are
        there.

        Args:
            share: the number of this share, from 0 on, and how many there are.
            begin: called once with the number of bytes of this share, before any is written.
            options: any other argument of `plan_export`.

        The other arguments are those of `export`.

        Returns:
            The exported checkpoint if it is there, None while other shares are not done.

        Raises:
            ValueError: for a share that is none.
            FormatError: where an unfinished export in shares to `path` is of another source, or in
                another number of shares.
            UCPError: what `export` raises.
            FileExistsError: if something else is at `path`.
        """
        from jax_ucp.formats.exporting import export_target  # brings in every writer

        part, described = Share(*share), self._with_config(format, config)
        plan = described.plan_export(format, **options)
        target = export_target(described._contents, plan, target_path(path), progress)
        return opened(path) if run_share(target, part, begin) else None

    def verify(self, *, executor: Executor | None = None) -> Iterator[tuple[str, str | None]]:
        """Verdicts on all that has a checksum or a duplicate, which is read as they are taken.
        Files of the Hugging Face hub, and of its cache, have the hub's hashes; what `export` wrote
        has CRC-32s in `ucp.checksums.sfv`.

        Args:
            executor: as for `save`.

        Returns:
            An iterator of pairs: what was looked at, and what is wrong with it or None. A file that
            is no longer the one that was opened is wrong too.

        Raises:
            WorkerError: as `save` does.

        Examples:
            >>> import jax_ucp as ucp
            >>> checkpoint = ucp.open("tests/data/deepspeed/z1_bf16_dp2")
            >>> [fault for what, fault in checkpoint.verify() if fault]
            []
        """
        from jax_ucp.arrays.digests import checksum_checks, digest_checks

        yield from verify(self._contents, executor)
        files = self._contents.files
        yield from verdicts(digest_checks(files, frozenset()), files.is_remote)
        if self._opened is not None:
            exported = file_path(self._opened.path)
            yield from verdicts(checksum_checks(exported), exported.files.is_remote)
        for change in files.changes():
            yield "the files of the checkpoint", change

    def save_index(self, path: str | os.PathLike[str]) -> None:
        """Write an index, from which `open` opens the checkpoint again without asking its files.

        The index has what the files answered when the checkpoint was opened: lists, and bytes of
        their headers. `open(path)` reads it, and then asks only whether each file has the size and
        the version that it had; of more than a few files behind a network these are looked up in
        one list. It takes the options of `open`, best those with which the checkpoint was opened:
        what they make necessary beyond the index is asked of the files.

        What is read of arrays is read from the files, which must stay where they are.

        Args:
            path: a file or a URL to write, whose name ends in `.ucp-index`.

        Raises:
            UnsupportedPath: for another name, and where this is not what `open` gave, but was
                mapped, merged or made in memory.
            CorruptData: where the files have changed since the checkpoint was opened.
        """
        target = target_path(path)
        if target.suffix != saved_index.SUFFIX:
            raise UnsupportedPath(f"{target}: the name of an index ends in {saved_index.SUFFIX}")
        opened = self._opened
        if opened is None or opened.contents is not self._contents:
            raise UnsupportedPath(
                f"{self._contents.path}: an index is of a checkpoint as `open` gives it, not of"
                " what was mapped, merged or made in memory. Save the index before, and map what"
                " is opened by it"
            )
        again, data = saved_index.encoded_index(opened.path, opened.options, open_contents)
        if again.files.identities() != self._contents.files.identities():
            self._contents.files.require_unchanged()
            raise CorruptData(
                f"{self._contents.path} has changed since it was opened: open it again"
            )
        target.files.write(target.key, [data], durable=True)

    def report(
        self,
        *,
        against: str | os.PathLike[str] | Checkpoint | None = None,
        rename: Mapping[str, str] | None = None,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        rules: Sequence[Rule] = (),
        hosts: int = 1,
        headers: bool = False,
        max_read_bytes: int = MAX_READ,
        budget_bytes: int = DEFAULT_BUDGET,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> Page:
        """A page to look at: what it is, its arrays as a tree with search, where each is stored,
        bytes by module, norms and extremes by depth, how large the optimizer's steps are, and what
        is not finite.

        Args:
            against: another checkpoint, or its path, to be compared with as `jax_ucp.diff` does.
            rename: beginnings of labels here, and what they are in the other, as for `diff`.
            headers: read no array.
            max_read_bytes: if the checkpoint has more bytes, large arrays are sampled, and the page
                says so.
            budget_bytes: how much memory the blocks that are read may take.
            progress: called with numbers of bytes that were read for the statistics.

        The other arguments are those of `plan_reads`: the page then shows what lies where on the
        mesh, and which specs do not fit it.

        Returns:
            The page, which notebooks show, and `save(path)` writes as one file. What is wrong with
            arrays that cannot be read is on it, and in its `faults`.

        Raises:
            ValueError: for an invalid mesh, rules or hosts.
            UCPError: as `diff` does.

        Examples:
            >>> ucp.open("run/100").report().save("report.html")  # doctest: +SKIP
        """
        # which only this needs
        from jax_ucp.inspection.diff import difference
        from jax_ucp.inspection.moments import together
        from jax_ucp.inspection.page import Findings, page
        from jax_ucp.inspection.report import mesh_plan
        from jax_ucp.inspection.statistics import statistics_of

        require_mesh(mesh, rules, hosts)
        arrays = self._contents.arrays.arrays()
        settings = {} if headers else settings_by_parameter(self.groups)
        groups = together(self.leaves, self.params, settings)
        findings = Findings(groups)
        if mesh is not None:
            from jax_ucp.sharding.reads import HostMesh

            placed = mesh_plan(self, HostMesh.of(mesh, hosts), rules)
            findings = replace(findings, mesh=placed)
        if against is not None:
            other = opened(against)
            arguments = {"headers": headers, "budget_bytes": budget_bytes}
            differing = difference(self._side(), other._side(), rename=rename, **arguments)
            findings = replace(findings, other=other, difference=differing)
        if not headers:
            statistics = statistics_of(
                groups,
                arrays,
                self._read,
                max_read_bytes=whole_number("max_read_bytes", max_read_bytes),
                budget_bytes=whole_number("budget_bytes", budget_bytes),
                progress=progress,
            )
            findings = replace(findings, statistics=statistics)
        return page(self, arrays, findings)

    def __repr__(self) -> str:
        arrays = sum(leaf.has_array for leaf in self.leaves)
        return (
            f"<{self.format} checkpoint {visible(self.path)}: {arrays} arrays, {self.nbytes:,}"
            " bytes>"
        )

    def _repr_html_(self) -> str:
        from jax_ucp.inspection.fold import fold

        leaves = (
            (leaf.label, leaf.dtype or leaf.kind, str(list(leaf.shape))) for leaf in self.leaves
        )
        rows = [(row.name, *row.cells, str(row.count)) for row in fold(leaves)]
        return html_table(repr(self), ("leaf", "dtype", "shape", "how many"), rows)
