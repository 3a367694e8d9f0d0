"""DeepSpeed's own universal folders: one file for each state of each parameter.

The model states beside the atoms are those of the run, copied: frozen parameters and buffers come
from them, and the module's own tensors are compared with the atoms. So are rank 0's partitions,
which ZeRO-3 leaves in the optimizer's state: the first elements of every atom. Folders of aliases,
and of what is not the optimizer's, hold copies only (of tied ones one rank's slice): not used.

Facts: `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed.extras import add_extras
from jax_ucp.formats.deepspeed.files import tag_folder
from jax_ucp.formats.deepspeed.modules import (
    ModuleTensor,
    add_frozen,
    add_model_states,
    add_tensor,
    names_in,
)
from jax_ucp.formats.deepspeed.parameters import Joins, Values, make_parameters
from jax_ucp.formats.deepspeed.slices import ASIDE, Slices
from jax_ucp.formats.deepspeed.universal_files import (
    OPTIMIZER,
    Owned,
    UniversalFiles,
    check_forms,
    open_universal,
    ranks_of,
)
from jax_ucp.formats.deepspeed.zero import param_shapes
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Unique, flat_layouts
from jax_ucp.shard_spec.rules import Shard
from jax_ucp.sources.beside import items_beside
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents

_MODEL = re.compile(r".*mp_rank_.*_model_states\.pt")
_HOW_TO_CUT = "says how to cut the parameter; it is whole here"


def recognise(path: FilePath) -> bool:
    if not path.is_dir():
        return False
    if (path / "latest_universal").is_file() and not (path / "latest").is_file():
        return True
    if not (path / "zero").is_dir():
        return False
    return any(_MODEL.fullmatch(child.name) for child in path.children())


def open_deepspeed_universal(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a universal folder, or in the folder that `latest_universal` names."""
    folder = path
    if not (path / "zero").is_dir():
        folder = tag_folder(path, "latest_universal") or path
    if not (folder / "zero").is_dir():
        raise NotACheckpoint(
            f"{path / 'latest_universal'} names {folder.name}, but there is no {folder / 'zero'}"
        )
    return _Reader(open_universal(folder, options.weights_only), options).contents()


class _Reader:
    """Tells the importer what each file holds: atoms first, the module is compared with them."""

    def __init__(self, universal: UniversalFiles, options: Options):
        self.universal, self.files = universal, universal.files
        more: dict[str, TorchFile] = {}
        for name, states in universal.atoms.items():
            more |= {f"zero/{name}/{state}.pt": file for state, file in states.items()}
        if universal.optimizer:
            more[OPTIMIZER] = universal.optimizer.file
        self.slices, self.joins = Slices(self.files, options, more), Joins.of(self.files, options)
        self.values = Values(self.slices.importer)
        self.importer = self.slices.importer
        self.owned = universal.owned()

    def contents(self) -> Contents:
        self._apply_spec()
        check_forms(self.universal, self.owned)
        self._compare_rank_0(self._add_atoms())
        self._compare_module(self._add_model_states())
        make_parameters(self.slices, self.joins)
        self._leave_other_folders()
        if self.universal.optimizer:
            self._add_group_steps()
            self._add_hyperparameters()
        add_extras(self.slices)
        self._add_optimizer_extras()
        self._skip_other_files()
        return self.importer.contents()

    def _apply_spec(self) -> None:
        if self.joins.by_spec:
            file = self.files.models[0][0].name
            params = self.owned.items()
            self.joins.by_spec.bind(
                {name: [Shard(shape, file) for shape in own.shapes] for name, own in params}
            )

    def _layout(self, name: str, own: Owned) -> ParamLayout:
        return self.joins.stages[own.stage].layout(name, own.shapes)

    # Atoms.

    def _add_atoms(self) -> dict[tuple[str, str], str]:
        """Add every state that has a file; returns the keys of tensors, by state and parameter."""
        keys: dict[tuple[str, str], str] = {}
        for name, own in self.owned.items():
            states = self.universal.states(name)
            if "fp32" not in states:
                raise FormatError(
                    f"{self.files.folder / 'zero' / name / 'fp32.pt'} is missing, but param_shapes"
                    f" has {name}"
                )
            fused = self.universal.is_fused(name, own.stage)
            shape = None if fused else self._layout(name, own).shape
            for state in states:
                label = "param" if state == "fp32" else state
                if key := self._add_atom(label, name, state, shape):
                    keys[label, name] = key
        return keys

    def _add_atom(self, label: str, name: str, state: str, shape: Shape | None) -> str | None:
        """Add one state of a parameter, of this shape if that is known; returns a tensor's key."""
        atom = self.universal.atom(name, state)
        value = self._value_of(atom.name, atom.file)
        if isinstance(value, StoredTensor) and (value.shape or label == "param"):
            tensor = Consolidated(_layout_of(atom.file, name, value, shape), [atom.key(value)])
            self.importer.parameter(label, name, tensor, f"{label} of {name}")
            return atom.key(value)
        if label == "param" or value is None:
            raise FormatError(f"{atom.file.path} holds no tensor of {name}")
        self.values.add(label, name, [(atom, value)])
        return None

    def _value_of(self, at: str, file: TorchFile) -> Any:
        """What an atom holds of its state; a dict has it beside what says how to cut it."""
        if not isinstance(file.tree, dict):
            return file.tree
        for key in file.tree.keys() - {"param"}:
            self.importer.skip(f"{at}:{key}", "layout", _HOW_TO_CUT)
        return file.tree.get("param")

    def _compare_rank_0(self, keys: Mapping[tuple[str, str], str]) -> None:
        """Compare rank 0's partitions, which ZeRO-3 leaves in its state, with the atoms.

        Under tensor parallelism those are elements of a slice, which atoms are not made of in their
        order.
        """
        masters = self.universal.optimizer_entry("fp32_flat_groups")
        if masters is None or self.files.tp > 1:
            return
        groups = param_shapes(self.files.models[0][0], ())
        if len(masters) != len(groups):
            raise FormatError(
                f"{self.files.folder / OPTIMIZER} has {len(masters)} parameter groups, but the"
                f" model states have {len(groups)}: one of the files is of another run"
            )
        states = self.universal.rank_0().get("state") or {}
        for index, (shapes, master) in enumerate(zip(groups, masters, strict=True)):
            self._compare_partition(index, shapes, "param", master, keys)
            for label, value in (states.get(index) or {}).items():
                if isinstance(value, StoredTensor) and value.shape:
                    self._compare_partition(index, shapes, label, value, keys)

    def _compare_partition(
        self,
        index: int,
        shapes: Mapping[str, Shape],
        label: str,
        tensor: StoredTensor,
        keys: Mapping[tuple[str, str], str],
    ) -> None:
        """Compare rank 0's partition of one state of a group with the atoms."""
        ranks = ranks_of(self.universal, index)
        pieces = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
        total = sum(pieces.values())
        if tensor.shape != (total,):
            raise FormatError(
                f"{self.files.folder / OPTIMIZER}: {label} of group {index} has shape"
                f" {tensor.shape}, where by param_shapes rank 0 of {ranks} has {total} elements:"
                " the file is of another run"
            )
        start, stored = 0, f"{OPTIMIZER}:{tensor.key}"
        for name, numel in pieces.items():
            key = keys.get((label, name))
            if key is None:
                file = "fp32.pt" if label == "param" else f"{label}.pt"
                atom = self.files.folder / "zero" / name / file
                raise FormatError(f"{atom} is missing: rank 0's part of it is in {OPTIMIZER}")
            whole = f"the first {numel} elements of {label} of {name}"
            copy = f"{stored}, from {start}"
            self.importer.cut(whole, key, 0, (numel,))
            self.importer.cut(copy, stored, start, (numel,))
            self.importer.slice_duplicate(whole, copy, "")
            start += numel

    # The module.

    def _add_model_states(self) -> dict[str, dict[tuple[int, int], ModuleTensor]]:
        """Add what has no atom; returns the copies of atoms, by (pipeline stage, tp rank)."""
        copies: dict[str, dict[tuple[int, int], ModuleTensor]] = defaultdict(dict)

        def add(tensor: ModuleTensor) -> None:
            stage, tp = divmod(tensor.mp, self.files.tp)
            own = self.owned.get(tensor.owner)
            if own is None:
                add_tensor(self.slices, tensor)
            elif tensor.name == tensor.owner and stage == own.stage:
                copies[tensor.name][stage, tp] = tensor
            else:
                self.importer.skip(tensor.key, "copy", f"tied to {tensor.owner}")

        for mp in range(len(self.files.models)):
            add_frozen(self.slices, mp)
            add_model_states(self.slices, mp, self.owned, add)
        return copies

    def _compare_module(self, copies: Mapping[str, Mapping[tuple[int, int], ModuleTensor]]) -> None:
        """Compare the module's tensors with the atoms; an atom that is their mean lies between."""
        for name, by_rank in copies.items():
            tensors = [by_rank[rank] for rank in sorted(by_rank)]
            keys, own = [tensor.key for tensor in tensors], self.owned[name]
            if [tensor.stored.shape for tensor in tensors] != own.shapes:
                raise FormatError(
                    f"{self.files.folder}: the module's {name} has not the shapes of param_shapes,"
                    f" {own.shapes}"
                )
            layout, whole = self._layout(name, own), f"{name} in the module"
            self.importer.slice(whole, Consolidated(layout, keys), "")
            reason = f"a copy of {name}, compared with it by verify"
            if layout.averaged:
                reason = f"a copy of {name}: that is an average of those, and between them"
                self.importer.mean("param", name, keys)
            else:
                self.importer.duplicate("param", name, whole, reason)
            self.slices.skip(keys, "copy", reason)

    def _leave_other_folders(self) -> None:
        module = names_in(self.files, "module")
        for name in sorted(self.universal.atoms.keys() - self.owned.keys()):
            if name not in module:
                raise FormatError(
                    f"{self.files.folder / 'zero' / name} is there, but the model states have no"
                    f" {name}"
                )
            reason = "not the optimizer's: an alias, or a copy of what the model states have of"
            for state, file in self.universal.atoms[name].items():
                keys = [f"zero/{name}/{state}.pt:{key}" for key in file.arrays()]
                self.slices.skip(keys, "copy", f"{reason} {name}")

    # The optimizer.

    def _add_group_steps(self) -> None:
        """Add the step that ZeRO-3 writes for sub-groups, in rank 0's optimizer state."""
        assert self.universal.optimizer is not None, "with weights_only no step is read"
        states = self.universal.rank_0().get("state") or {}
        for index, shapes in enumerate(param_shapes(self.files.models[0][0], ())):
            value = (states.get(index) or {}).get("step")
            if value is None:
                continue
            for name in shapes:
                if "step" not in self.universal.states(name):
                    self.values.add("step", name, [(self.universal.optimizer, value)])

    def _add_hyperparameters(self) -> None:
        """Add what rank 0's optimizer state has as settings of each group."""
        groups = list(self.universal.groups())
        for hyper in self.universal.optimizer_entry("param_groups") or ():
            numbers = hyper.get("params", ())
            for shapes in [shapes for _, index, shapes in groups if index in numbers]:
                for name in shapes:
                    self.importer.hyperparameters(name, hyper)

    def _add_optimizer_extras(self) -> None:
        optimizer = self.universal.optimizer
        if optimizer is None:
            return
        keys = [key for key in optimizer.file.arrays() if not key.endswith("/step")]
        reason = "rank 0's partitions, of which the atoms have all"
        self.slices.skip([f"{OPTIMIZER}:{key}" for key in keys], "copy", reason)
        for name, value in optimizer.state.items():
            if name not in ("optimizer_state_dict", "fp32_flat_groups"):
                self.importer.extra(OPTIMIZER, name, value)

    def _skip_other_files(self) -> None:
        """Account for files that are not read: in the folder, in zero/ and beside the atoms."""
        folder = self.files.folder
        self.slices.skip([path.below(folder) for path in self.universal.left], "file", ASIDE)
        read: dict[str, set[str]] = defaultdict(set)
        for name, states in self.universal.atoms.items():
            read[name] = {f"{state}.pt" for state in states}
        for path in self.universal.left:
            if path.parent.name in self.universal.atoms:
                read[path.parent.name].add(path.name)
        own = {file.name for file in self.files.all()} | {"zero"}
        left = {path.below(folder / "zero").split("/")[0] for path in self.universal.left}
        in_zero = {OPTIMIZER.partition("/")[2], *self.universal.atoms, *left}
        beside = [*items_beside(folder, own), *items_beside(folder / "zero", in_zero, "zero/")]
        for name, files in read.items():
            beside += items_beside(folder / "zero" / name, files, f"zero/{name}/")
        for item in beside:
            self.importer.skip(item.where, item.what, item.reason)


def _layout_of(
    file: TorchFile, name: str, tensor: StoredTensor, shape: Shape | None
) -> ParamLayout:
    """How an atom forms its parameter: as it is, or flat.

    `shape` is None of a fused parameter, whose shape the model states do not have.
    """
    if shape is None or tensor.shape == shape:
        return Unique().join([tensor.shape])
    if shape and tensor.shape == (math.prod(shape),):
        return flat_layouts({name: shape}, tensor.shape)[name]
    raise FormatError(
        f"{file.path} has shape {tensor.shape}, but by the model states {name} has {shape}"
    )
