"""DeepSpeed's own universal folders: one file for each state of each parameter.

The model states beside the atoms are those of the run, copied: frozen parameters and buffers come
from them, and the module's own tensors are compared with the atoms. So are rank 0's partitions,
which ZeRO-3 leaves in the optimizer's state: the first elements of every atom. Folders of aliases,
and of what is not the optimizer's, hold copies only (of tied ones one rank's slice): not used.

Facts: `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from jax_ucp.arrays.beside import items_beside
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.value import Array, cut, joined
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed.extras import add_extras
from jax_ucp.formats.deepspeed.files import StateFile
from jax_ucp.formats.deepspeed.marks import tag_folder
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
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.patterns import Unique, flat_layouts
from jax_ucp.options import Options
from jax_ucp.shard_spec.rules import SpecShard

# `autoep_universal.py` of 0.19.5 and 0.19.8 writes the key where it gathers experts.
_ONE_RANKS = (
    "DeepSpeed before 0.19.6 left moments of AutoEP's experts so, which are not those of all"
    " experts. Open the run itself, convert it again with 0.19.6 or later, or open its weights with"
    " weights_only (--weights-only)"
)
_HOW_TO_CUT = "says how to cut the parameter; it is whole here"


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a universal folder, or in the folder that `latest_universal` names.

    Raises NotACheckpoint if that folder has no `zero`.
    """
    folder = path
    if not (path / "zero").is_dir():
        folder = tag_folder(path, "latest_universal") or path
    if not (folder / "zero").is_dir():
        raise NotACheckpoint(
            f"{path / 'latest_universal'} names {folder.name}, but there is no {folder / 'zero'}"
        )
    return _UniversalReader(open_universal(folder, options.weights_only), options).contents()


class _UniversalReader:
    """Adds the content of each file. Atoms come first, because the module is compared with them."""

    def __init__(self, universal: UniversalFiles, options: Options):
        self.universal, self.files = universal, universal.files
        self.owned = universal.owned()
        more: dict[str, TorchFile] = {}
        for name, states in universal.atoms.items():
            more |= {f"zero/{name}/{state}.pt": file for state, file in states.items()}
        if universal.optimizer:
            more[OPTIMIZER] = universal.optimizer.file
        self.slices, self.joins = Slices(self.files, options, more), Joins.of(self.files, options)
        self.builder = self.slices.builder
        self.values = Values(self.builder)
        if self.joins.by_spec:
            file = self.files.models[0][0].name
            shapes = {name: own.shapes for name, own in self.owned.items()}
            self.joins.by_spec.bind(
                {n: [SpecShard(s, file) for s in of] for n, of in shapes.items()}
            )

    def contents(self) -> Contents:
        check_forms(self.universal, self.owned)
        self._compare_rank_0(self._add_atoms())
        self._add_module()
        make_parameters(self.slices, self.joins)
        add_extras(self.slices)
        if self.universal.optimizer:
            self._add_optimizer(self.universal.optimizer)
        self._skip_other_files()
        return self.builder.contents()

    def _layout(self, name: str, own: Owned) -> ParamLayout:
        return self.joins.stages[own.stage].layout(name, own.shapes)

    def _add_atoms(self) -> dict[tuple[str, str], Array]:
        """Add every state that has a file. Returns the tensors, by state and parameter."""
        tensors: dict[tuple[str, str], Array] = {}
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
                atom = self.universal.atom(name, state)
                value = tree = atom.file.tree
                if isinstance(tree, dict):  # the state lies beside what says how to cut it
                    value = tree.get("param")
                    if fused and label != "param" and "ep_num_experts" not in tree:
                        raise FormatError(f"{atom.file.path} has no ep_num_experts: {_ONE_RANKS}")
                    for key in filter(lambda key: key != "param", tree):
                        self.builder.skip(f"{atom.name}:{key}", "layout", _HOW_TO_CUT)
                if isinstance(value, StoredTensor) and (value.shape or label == "param"):
                    stored = self.builder.array(atom.key(value))
                    layout = Unique().join([value.shape])
                    if shape is not None and value.shape != shape:  # flat
                        if not shape or value.shape != (math.prod(shape),):
                            raise FormatError(
                                f"{atom.file.path} has shape {value.shape}, but by the model states"
                                f" {name} has {shape}"
                            )
                        layout = flat_layouts({name: shape}, value.shape)[name]
                    array = joined(f"{label}.{name}", layout, [stored])
                    self.builder.parameter(label, name, array, f"{label} of {name}")
                    tensors[label, name] = stored
                elif label == "param" or value is None:
                    raise FormatError(f"{atom.file.path} holds no tensor of {name}")
                else:
                    self.values.add(label, name, [(atom, value)])
        return tensors

    def _compare_rank_0(self, atoms: Mapping[tuple[str, str], Array]) -> None:
        """Compare rank 0's partitions, which ZeRO-3 leaves, with atoms that are not cut."""
        masters = self.universal.optimizer_entry("fp32_flat_groups")
        if masters is None or self.files.tp > 1:
            return
        folder, groups = self.files.folder, param_shapes(self.files.models[0][0], ())
        if len(masters) != len(groups):
            raise FormatError(
                f"{folder / OPTIMIZER} has {len(masters)} parameter groups, but the"
                f" model states have {len(groups)}: one of the files is of another run"
            )
        states = self.universal.rank_0().get("state") or {}
        for index, (shapes, master) in enumerate(zip(groups, masters, strict=True)):
            ranks = ranks_of(self.universal, index)
            pieces = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
            total = sum(pieces.values())
            moments = [
                (label, value)
                for label, value in (states.get(index) or {}).items()
                if isinstance(value, StoredTensor) and value.shape
            ]
            for label, tensor in [("param", master), *moments]:
                if tensor.shape != (total,):
                    raise FormatError(
                        f"{folder / OPTIMIZER}: {label} of group {index} has shape"
                        f" {tensor.shape}, where by param_shapes rank 0 of {ranks} has {total}"
                        " elements: the file is of another run"
                    )
                start, stored = 0, self.builder.array(f"{OPTIMIZER}:{tensor.key}")
                for name, numel in pieces.items():
                    if (label, name) not in atoms:
                        file = "fp32.pt" if label == "param" else f"{label}.pt"
                        atom = folder / "zero" / name / file
                        raise FormatError(
                            f"{atom} is missing: rank 0's part of it is in {OPTIMIZER}"
                        )
                    called = f"the first {numel} elements of {label} of {name}"
                    whole = cut(called, atoms[label, name], 0, (numel,))
                    copy = cut(called, stored, start, (numel,))
                    self.builder.slice_duplicate(whole, called, copy)
                    start += numel

    def _add_module(self) -> None:
        """Add parameters without an atom, and compare others with atoms, which may be means."""
        # Copies of atoms, by (pipeline stage, tp rank).
        copies: dict[str, dict[tuple[int, int], ModuleTensor]] = defaultdict(dict)

        def add(tensor: ModuleTensor) -> None:
            stage, tp = divmod(tensor.mp, self.files.tp)
            own = self.owned.get(tensor.owner)
            if own is None:
                add_tensor(self.slices, tensor)
            elif tensor.name == tensor.owner and stage == own.stage:
                copies[tensor.name][stage, tp] = tensor
            else:
                self.builder.skip(tensor.key, "copy", f"tied to {tensor.owner}")

        for mp in range(len(self.files.models)):
            add_frozen(self.slices, mp)
            add_model_states(self.slices, mp, self.owned, add)
        for name, by_rank in copies.items():
            tensors = [by_rank[rank] for rank in sorted(by_rank)]
            keys, own = [tensor.key for tensor in tensors], self.owned[name]
            if [tensor.stored.shape for tensor in tensors] != own.shapes:
                raise FormatError(
                    f"{self.files.folder}: the module's {name} has not the shapes of param_shapes,"
                    f" {own.shapes}"
                )
            layout = self._layout(name, own)
            whole = joined(f"{name} in the module", layout, [*map(self.builder.array, keys)])
            reason = f"a copy of {name}, compared with it by verify"
            if layout.averaged:
                reason = f"a copy of {name}: that is an average of those, and between them"
                self.builder.mean("param", name, keys)
            else:
                self.builder.duplicate("param", name, whole, reason)
            self.slices.skip(keys, "copy", reason)

    def _add_optimizer(self, optimizer: StateFile) -> None:
        """Add rank 0's optimizer: the step of ZeRO-3's sub-groups, settings, extras."""
        states = self.universal.rank_0().get("state") or {}
        for index, shapes in enumerate(param_shapes(self.files.models[0][0], ())):
            value = (states.get(index) or {}).get("step")
            for name in shapes if value is not None else ():
                if "step" not in self.universal.states(name):
                    self.values.add("step", name, [(optimizer, value)])
        groups = list(self.universal.groups())
        for settings in self.universal.optimizer_entry("param_groups") or ():
            numbers = settings.get("params", ())
            for shapes in [shapes for _, index, shapes in groups if index in numbers]:
                for name in shapes:
                    self.builder.hyperparameters(name, settings)
        keys = [key for key in optimizer.file.arrays() if not key.endswith("/step")]
        reason = "rank 0's partitions, of which the atoms have all"
        self.slices.skip([f"{OPTIMIZER}:{key}" for key in keys], "copy", reason)
        for name, value in optimizer.state.items():
            if name not in ("optimizer_state_dict", "fp32_flat_groups"):
                self.builder.extra(OPTIMIZER, name, value)

    def _skip_other_files(self) -> None:
        """Note the files that are not read. Raises FormatError for folders of no parameter."""
        folder, atoms = self.files.folder, self.universal.atoms
        module = names_in(self.files, "module")
        for name in sorted(atoms.keys() - self.owned.keys()):
            if name not in module:
                raise FormatError(
                    f"{folder / 'zero' / name} is there, but the model states have no {name}"
                )
            reason = "not the optimizer's: an alias, or a copy of what the model states have of"
            for state, file in atoms[name].items():
                keys = [f"zero/{name}/{state}.pt:{key}" for key in file.arrays()]
                self.slices.skip(keys, "copy", f"{reason} {name}")
        left = [path.below(folder) for path in self.universal.left]
        self.slices.skip(left, "file", ASIDE)
        read = {file.name for file in self.files.all()} | {OPTIMIZER, *left}
        read |= {f"zero/{name}/{state}.pt" for name, states in atoms.items() for state in states}
        for item in items_beside(folder, read):
            self.builder.skip(item.where, item.what, item.reason)
