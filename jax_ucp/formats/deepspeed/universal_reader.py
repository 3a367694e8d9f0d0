"""DeepSpeed's own universal folders: one file for each state of each parameter, written by
`ds_to_universal`.

An atom is a dict with the whole tensor, or, from ZeRO-3 without tensor parallelism, the bare flat
tensor, whose shape the model states beside it have. These are the model states of the run, copied:
frozen parameters and buffers come from them, and the module's own tensors are compared with the
atoms. So are rank 0's partitions, which ZeRO-3 leaves in the optimizer's state: the first elements
of every atom. Folders of aliases, and of what is not the optimizer's, hold copies only (of tied
ones one rank's slice), so they are not used.

Facts: `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.facts import check_facts
from jax_ucp.formats.deepspeed.files import Stored, open_files, open_stored, tag_folder
from jax_ucp.formats.deepspeed.reader import Reader
from jax_ucp.formats.deepspeed.slices import ASIDE
from jax_ucp.formats.deepspeed.zero import param_shapes
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Unique, flat_layouts
from jax_ucp.shard_spec.rules import Shard
from jax_ucp.sources.beside import items_beside
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.cuts import Cut

_OPTIMIZER = "zero/optimizer_state.pt"
_MODEL = re.compile(r".*mp_rank_.*_model_states\.pt")


def recognise(path: FilePath) -> bool:
    if not path.is_dir():
        return False
    if (path / "latest_universal").is_file() and not (path / "latest").is_file():
        return True
    return (path / "zero").is_dir() and any(
        _MODEL.fullmatch(child.name) for child in path.children()
    )


def open_deepspeed_universal(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a universal folder, or in the directory whose `latest_universal` names
    one.
    """
    folder = (None if (path / "zero").is_dir() else tag_folder(path, "latest_universal")) or path
    if not (folder / "zero").is_dir():
        raise NotACheckpoint(
            f"{path / 'latest_universal'} names {folder.name}, but there is no {folder / 'zero'}"
        )
    return _Universal(folder, options).contents()


class _Universal(Reader):
    """Atoms are the parameters that the optimizer owns; for the rest the model states are read
    as they always are.
    """

    def __init__(self, folder: FilePath, options: Options):
        files = open_files(folder, options.weights_only)
        if any(files.ranks):
            raise FormatError(
                f"{folder} has both atoms (zero/) and *_optim_states.pt: two checkpoints in one"
                " folder. Move zero/, or the optimizer files, to another one"
            )
        check_facts(files, options.weights_only)
        self.atoms: dict[str, dict[str, TorchFile]] = defaultdict(dict)
        self.optimizer: Stored | None = None
        self.left: list[FilePath] = []
        atoms = [atom for named in (folder / "zero").children() for atom in named.matching(".pt")]
        paths = [path for path in atoms if not path.name.startswith(".")]
        self._open_atoms(paths, options.weights_only)
        self._open_optimizer(folder / _OPTIMIZER, options.weights_only)
        more = {
            f"zero/{name}/{state}.pt": file
            for name, states in self.atoms.items()
            for state, file in states.items()
        }
        if self.optimizer:
            more[_OPTIMIZER] = self.optimizer.file
        super().__init__(files, options, more)
        self.copies: dict[str, dict[tuple[int, int], tuple[str, Shape]]] = defaultdict(dict)
        self.keys: dict[tuple[str, str], str] = {}  # of the atoms' tensors, by state and parameter

    def _open_atoms(self, paths: Sequence[FilePath], weights_only: bool) -> None:
        """Open the atoms; of the optimizer's states those that are to be read."""
        for path in paths:
            if path.stem == "fp32" or not weights_only:
                self.atoms[path.parent.name][path.stem] = TorchFile(path)
        if weights_only:
            self.left += filter(FilePath.is_file, paths)

    def _open_optimizer(self, path: FilePath, weights_only: bool) -> None:
        """Open what the optimizer has beside the atoms, if it is to be read."""
        if weights_only:
            self.left += [path] if path.is_file() else []
            return
        if not path.is_file():
            raise FormatError(
                f"{path} is missing: it holds what the optimizer has beside the atoms."
                " weights_only opens the parameters without it"
            )
        self.optimizer = open_stored(path)

    def contents(self) -> Contents:
        self.owned = self._owned()
        self._check_states()
        if not self.options.weights_only:
            self._check_steps()
        if self.by_spec:
            where = self.files.models[0][0].name
            self.by_spec.bind(
                {
                    n: [Shard(shape, where) for shape in shapes]
                    for n, (_, shapes) in self.owned.items()
                }
            )
        self._check_forms()
        for name, (stage, shapes) in self.owned.items():
            self._atoms(name, stage, shapes)
        self._compare_rank_0()
        for mp in range(len(self.files.models)):
            self._frozen_fragments(mp)
            self._module(mp)
        self._compare_copies()
        self.make_parameters()
        self._leave_other_folders()
        self._steps()
        self._hyperparameters()
        self._extras()
        self._optimizer_rest()
        for path in self.left:
            if path.stem != "fp32":
                self.found.skip(path.below(self.files.folder), "file", ASIDE)
        self._inventory()
        return self.found.contents()

    def _owned(self) -> dict[str, tuple[int, list[Shape]]]:
        """What the optimizer owns: the lowest pipeline stage that has it, and its slices' shapes
        there.
        """
        owned: dict[str, tuple[int, list[Shape]]] = {}
        for mp, models in enumerate(self.files.models):
            for shapes in param_shapes(models[0], ()):
                for name, shape in shapes.items():
                    stage, found = owned.setdefault(name, (mp // self.files.tp, []))
                    if stage == mp // self.files.tp:
                        found.append(shape)
        return owned

    def _check_states(self) -> None:
        """Raise FormatError where a parameter has not the states that others of its group have,
        or that Adam has.
        """
        for models in self.files.models if not self.options.weights_only else ():
            for index, shapes in enumerate(param_shapes(models[0], ())):
                states = {state for name in shapes for state in self.atoms.get(name, ())}
                self._check_moments(index, states)
                for name in shapes:
                    for state in sorted(states - self.atoms.get(name, {}).keys() - {"fp32"}):
                        raise FormatError(
                            f"{self.files.folder / 'zero' / name / state}.pt is missing: other"
                            " parameters of the group have that state. weights_only opens the"
                            " parameters without it"
                        )

    def _check_moments(self, index: int, states: Collection[str]) -> None:
        """Raise FormatError where no parameter of a group has a moment that its optimizer's
        settings are about.
        """
        steps = self.files.models[0][0].state.get("global_steps")
        groups = self.optimizer.state.get("param_groups") if self.optimizer else None
        hyper = next((group for group in groups or () if index in group.get("params", ())), {})
        if not steps or "betas" not in hyper or hyper.get("use_muon"):
            return
        wanted = [{"exp_avg"}] + [{"exp_avg_sq", "exp_inf"}] * ("eps" in hyper)
        for names in wanted:
            if not names & set(states):
                raise FormatError(
                    f"{self.files.folder / 'zero'}: {' or '.join(sorted(names))}.pt is missing of"
                    f" all parameters of group {index}, of which {_OPTIMIZER} has the betas."
                    " weights_only opens the parameters without it"
                )

    def _check_forms(self) -> None:
        """Raise FormatError where atoms are not all of one form, as one conversion of one
        checkpoint writes them.
        """
        facts = Facts(self.files.folder)
        for name, (stage, _) in self.owned.items():
            among = any(moe.is_fused(name, model) for model in self.files.models[stage])
            for state, file in self.atoms[name].items():
                if isinstance(file.tree, dict):
                    form = "a dict"
                    facts.state(
                        f"zero/{name}/{state}.pt",
                        f"what says how to cut {name}",
                        sorted(file.tree),
                        name,
                    )
                elif isinstance(file.tree, StoredTensor) and file.tree.shape:
                    form = "a bare tensor"
                else:
                    continue
                facts.state(f"zero/{name}/{state}.pt", "the form of the atoms", form, among)

    def _check_steps(self) -> None:
        """Raise FormatError where parameters of one group, which step together, have atoms of
        other steps.
        """
        facts = Facts(self.files.folder)
        for mp, models in enumerate(self.files.models):
            for index, shapes in enumerate(param_shapes(models[0], ())):
                for name in shapes:
                    if file := self.atoms.get(name, {}).get("step"):
                        what, among = f"step of group {index}", (mp // self.files.tp, index)
                        facts.state_all(file, f"zero/{name}/step.pt", what, file.tree, among)

    def _atoms(self, name: str, stage: int, shapes: list[Shape]) -> None:
        """Map the states of a parameter that have files."""
        if "fp32" not in self.atoms.get(name, ()):
            raise FormatError(
                f"{self.files.folder / 'zero' / name / 'fp32.pt'} is missing, but param_shapes has"
                f" {name}"
            )
        fused = any(moe.is_fused(name, model) for model in self.files.models[stage])
        want = None if fused else self.patterns[stage].layout(name, shapes).shape
        for state, file in self.atoms[name].items():
            label = "param" if state == "fp32" else state
            self._atom(label, name, f"zero/{name}/{state}.pt", file, want)

    def _atom(self, label: str, name: str, at: str, file: TorchFile, want: Shape | None) -> None:
        """Map one state of a parameter, which has the shape `want` if that is known."""
        value = self._value_of(at, file)
        if isinstance(value, StoredTensor) and (value.shape or label == "param"):
            layout = _layout_of(file, name, value, want)
            self._map(label, name, layout, f"{at}:{value.key}")
        elif label == "param" or value is None:
            raise FormatError(f"{file.path} holds no tensor of {name}")
        else:
            self.value(label, name, [(_Atom(file, {}), value)])

    def _value_of(self, at: str, file: TorchFile) -> Any:
        """What an atom holds of its state. A dict has it beside what says how to cut it."""
        if not isinstance(file.tree, dict):
            return file.tree
        for key in file.tree.keys() - {"param"}:
            self.found.skip(
                f"{at}:{key}", "layout", "says how to cut the parameter; it is whole here"
            )
        return file.tree.get("param")

    def _map(self, label: str, name: str, layout: ParamLayout, key: str) -> None:
        self.found.parameter(label, name, Consolidated(layout, [key]), f"{label} of {name}")
        self.keys[label, name] = key

    def _compare_rank_0(self) -> None:
        """Compare the first elements of the atoms with rank 0's partitions of them, which ZeRO-3
        leaves in its state.

        Under tensor parallelism those are elements of a slice, which atoms are not made of in their
        order.
        """
        masters = self.optimizer.state.get("fp32_flat_groups") if self.optimizer else None
        if masters is None or self.files.tp > 1:
            return
        states = self._rank_0().get("state") or {}
        groups = param_shapes(self.files.models[0][0], ())
        if len(masters) != len(groups):
            raise FormatError(
                f"{self.files.folder / _OPTIMIZER} has {len(masters)} parameter groups, but the"
                f" model states have {len(groups)}: one of the files is of another run"
            )
        for index, (shapes, master) in enumerate(zip(groups, masters, strict=True)):
            self._compare_partition(index, shapes, "param", master)
            for label, value in (states.get(index) or {}).items():
                if isinstance(value, StoredTensor) and value.shape:
                    self._compare_partition(index, shapes, label, value)

    def _compare_partition(
        self, index: int, shapes: Mapping[str, Shape], label: str, tensor: StoredTensor
    ) -> None:
        """Compare rank 0's partition of one state of a group with the atoms."""
        ranks = self._ranks_of(index)
        pieces = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
        if tensor.shape != (sum(pieces.values()),):
            raise FormatError(
                f"{self.files.folder / _OPTIMIZER}: {label} of group {index} has shape"
                f" {tensor.shape}, where by param_shapes rank 0 of {ranks} has"
                f" {sum(pieces.values())} elements: the file is of another run"
            )
        start, stored = 0, f"{_OPTIMIZER}:{tensor.key}"
        for name, numel in pieces.items():
            if (key := self.keys.get((label, name))) is None:
                file = "fp32.pt" if label == "param" else f"{label}.pt"
                atom = self.files.folder / "zero" / name / file
                raise FormatError(f"{atom} is missing: rank 0's part of it is in {_OPTIMIZER}")
            whole = f"the first {numel} elements of {label} of {name}"
            copy = f"{stored}, from {start}"
            self.found.cut(whole, Cut(key, 0, (numel,)))
            self.found.cut(copy, Cut(stored, start, (numel,)))
            self.found.slice_duplicate(whole, copy, "")
            start += numel

    def _ranks_of(self, index: int) -> int:
        """How many ranks share the parameters of a group: with experts, not all groups are
        alike.
        """
        state = self.optimizer.state if self.optimizer else {}
        teams = state.get("ds_zero_partition_groups") or ()
        counts = [team["partition_count"] for team in teams if team["sub_group"] == index]
        count = counts[0] if counts else state.get("partition_count")
        if not isinstance(count, int) or count < 1:
            raise FormatError(
                f"{self.files.folder / _OPTIMIZER} has the partition_count {count!r:.80}, which is"
                " none"
            )
        return count

    def _module_tensor(
        self, mp: int, name: str, owner: str, key: str, tensor: StoredTensor
    ) -> None:
        stage, tp = divmod(mp, self.files.tp)
        if owner not in self.owned:
            super()._module_tensor(mp, name, owner, key, tensor)
        elif name == owner and stage == self.owned[name][0]:
            self.copies[name][stage, tp] = key, tensor.shape
        else:
            self.found.skip(key, "copy", f"tied to {owner}")

    def _masters(self, mp: int) -> set[str]:
        return set(self.owned)

    def _held(self, mp: int, name: str) -> str | None:
        return name if name in self.owned else super()._held(mp, name)

    def _compare_copies(self) -> None:
        """Compare the module's tensors with the atoms; where the atom is their mean, it lies
        between them.
        """
        for name, found in self.copies.items():
            stage, shapes = self.owned[name]
            keys = [key for _, (key, _) in sorted(found.items())]
            if [shape for _, (_, shape) in sorted(found.items())] != shapes:
                raise FormatError(
                    f"{self.files.folder}: the module's {name} has not the shapes of param_shapes,"
                    f" {shapes}"
                )
            layout = self.patterns[stage].layout(name, shapes)
            whole = f"{name} in the module"
            self.found.slice(whole, Consolidated(layout, keys), "")
            reason = f"a copy of {name}" + (
                ": that is an average of those, and between them"
                if layout.averaged
                else ", compared with it by verify"
            )
            if layout.averaged:
                self.found.mean("param", name, keys)
            else:
                self.found.duplicate("param", name, whole, reason)
            for key in keys:
                self.found.skip(key, "copy", reason)

    def _leave_other_folders(self) -> None:
        module = {
            str(n) for models in self.files.models for n in models[0].state.get("module") or ()
        }
        for name in sorted(self.atoms.keys() - self.owned.keys()):
            if name not in module:
                raise FormatError(
                    f"{self.files.folder / 'zero' / name} is there, but the model states have no"
                    f" {name}"
                )
            for state, file in self.atoms[name].items():
                for key in file.arrays():
                    reason = (
                        "not the optimizer's: an alias, or a copy of what the model states have of"
                        f" {name}"
                    )
                    self.found.skip(f"zero/{name}/{state}.pt:{key}", "copy", reason)

    def _steps(self) -> None:
        """The step that ZeRO-3 writes for sub-groups, in rank 0's optimizer state."""
        state = self._rank_0().get("state") or {}
        for index, shapes in enumerate(param_shapes(self.files.models[0][0], ())):
            value = (state.get(index) or {}).get("step")
            for name in shapes if value is not None and not self.options.weights_only else ():
                if "step" not in self.atoms[name] and self.optimizer:
                    self.value("step", name, [(_Atom(self.optimizer.file, {}), value)])

    def _hyperparameters(self) -> None:
        """What rank 0's optimizer state says of each group."""
        if self.optimizer is None or self.options.weights_only:
            return
        for hyper in self.optimizer.state.get("param_groups") or ():
            numbers = hyper.get("params", ())
            for models in self.files.models:
                for index, shapes in enumerate(param_shapes(models[0], ())):
                    if index not in numbers:
                        continue
                    for name in shapes:
                        self.found.hyperparameters(name, hyper)

    def _inventory(self) -> None:
        """Account for what lies beside the files that are read: in the folder, in zero/ and
        beside the atoms.
        """
        zero = self.files.folder / "zero"
        left = {path.below(zero) for path in self.left}
        beside = items_beside(zero.parent, {file.name for file in self.files.all()} | {zero.name})
        beside += items_beside(
            zero,
            {_OPTIMIZER.partition("/")[2], *self.atoms, *(name.split("/")[0] for name in left)},
            "zero/",
        )
        for name, files in self.atoms.items():
            read = {f"{state}.pt" for state in files} | {
                at.name for at in self.left if at.parent.name == name
            }
            beside += items_beside(zero / name, read, f"zero/{name}/")
        for item in beside:
            self.found.skip(item.where, item.what, item.reason)

    def _rank_0(self) -> Mapping[str, Any]:
        inner = self.optimizer.state.get("optimizer_state_dict") if self.optimizer else None
        return inner if isinstance(inner, dict) else {}

    def _optimizer_rest(self) -> None:
        if self.optimizer is None:
            return
        for key in self.optimizer.file.arrays():
            if not key.endswith("/step") or self.options.weights_only:
                self.found.skip(
                    f"{_OPTIMIZER}:{key}",
                    "copy",
                    "rank 0's partitions, of which the atoms have all",
                )
        for name, value in self.optimizer.state.items():
            if name not in ("optimizer_state_dict", "fp32_flat_groups"):
                self.found.extra(_OPTIMIZER, name, value)


def _layout_of(file: TorchFile, name: str, tensor: StoredTensor, want: Shape | None) -> ParamLayout:
    """How an atom forms its parameter: as it is, or flat. `want` is None of a fused parameter,
    whose shape the model states do not say.
    """
    if want is None or tensor.shape == want:
        return Unique().join([tensor.shape])
    if want and tensor.shape == (math.prod(want),):
        return flat_layouts({name: want}, tensor.shape)[name]
    raise FormatError(
        f"{file.path} has shape {tensor.shape}, but by the model states {name} has {want}"
    )


class _Atom(Stored):
    """A file under zero/, where many have one name."""

    @property
    def name(self) -> str:
        path = self.file.path
        return (
            _OPTIMIZER
            if path.name == "optimizer_state.pt"
            else f"zero/{path.parent.name}/{path.name}"
        )
