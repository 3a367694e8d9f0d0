"""Folders in which a trainer saves weights and, beside them, its optimizer: one checkpoint.

- `checkpoint-N` of transformers' Trainer (`trainer.py`): weights, `optimizer.pt`, `scheduler.pt`,
  `rng_state*.pth`, `scaler.pt`, `trainer_state.json`, `training_args.bin`; with peft the weights
  are an adapter's.
- What accelerate's `save_state` writes: weights, `optimizer.bin`, `scheduler.bin`, `sampler.bin`,
  `random_states_*.pkl`, and a number in the names of further models and optimizers, `model_1`
  (`checkpointing.py`); under FSDP the optimizer is by name (`utils/fsdp_utils.py`).

The optimizer is one of torch, with numbers or names. `state_pairing` says whose its states are, of
weights in the order of the model: a file of torch.save has them so, for safetensors
`module_order` knows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.huggingface.module_order import in_order_of, model_types, orders_of
from jax_ucp.formats.huggingface.stand_ins import stand_in, why_missing
from jax_ucp.formats.huggingface.weight_files import CONFIG, keep_configs, read_json
from jax_ucp.formats.huggingface.weight_names import Save
from jax_ucp.formats.options import HF_DECAY, MODULE_ORDER, Options, model_type_of, rule_of
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.torch_save.file import TorchFile, is_torch_file
from jax_ucp.formats.torch_save.opaque import WeightsPlace
from jax_ucp.formats.torch_save.optimizer_dicts import Steps, joined
from jax_ucp.formats.torch_save.state_pairing import Stored, is_trainable
from jax_ucp.formats.torch_save.state_paths import Places, UnknownModel, places
from jax_ucp.formats.torch_save.tree import Tree, keep_extras
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import About, Contents

MODEL = "model"  # what the model is called where there are no others
TRAINER_STATE = "trainer_state.json"
_OPTIMIZER = re.compile(r"(?P<stem>optimizer(?:_\d+)?)\.(?P<suffix>pt|bin)")
_KEPT = re.compile(
    r"(scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args"
    r"|custom_checkpoint)(_\d+)*\.(pt|pth|bin|pkl)"
)
_ARGUMENTS = "training_args.bin"
_MODULE = re.compile(r"transformers\.models\.(\w+)\.")
_MAX_KEPT_BYTES = 1 << 26
_SHOWN_TYPES = 4
_ASIDE = "; weights_only leaves the optimizer and the trainer's state aside"


@dataclass(frozen=True, slots=True)
class TrainingFolder:
    """The files of a training checkpoint beside the weights that are read.

    `optimizers` are files by what their dict is called; `others` are other models by name, which
    are not read; `kept` is the rest of the trainer's state.
    """

    path: FilePath
    optimizers: Mapping[str, str]
    kept: Sequence[str]
    model: str = MODEL
    others: Mapping[str, Save] | None = None

    @property
    def files(self) -> set[str]:
        return {*self.optimizers.values(), *self.kept}

    @property
    def of_trainer(self) -> bool:
        return TRAINER_STATE in self.kept


def parse(path: FilePath, names: Collection[str]) -> TrainingFolder:
    """The training checkpoint that files of these names are, beside weights.

    Raises FormatError where two files are of one optimizer.
    """
    optimizers: dict[str, str] = {}
    for match in filter(None, map(_OPTIMIZER.fullmatch, sorted(names))):
        first = optimizers.setdefault(match["stem"], match[0])
        if first != match[0]:
            raise FormatError(
                f"{path} has {first}, as accelerate calls an optimizer's states, and {match[0]}, as"
                f" transformers' Trainer does: nothing says which belongs to the weights{_ASIDE}"
            )
    kept = [name for name in sorted(names) if _KEPT.fullmatch(name) or name == TRAINER_STATE]
    return TrainingFolder(path, optimizers, kept)


def add_training(
    imported: Import, folder: TrainingFolder, others: Mapping[str, Stored], options: Options
) -> None:
    """Give the optimizer's states to the parameters of an import, and keep the rest of the
    trainer's state as extras. `others` are the weights of other models.

    Raises FormatError where a file is not what its name says, or where the user's word does not
    fit.
    """
    for name in folder.kept:
        _keep(imported, folder.path / name)
    imported.notes.insert(0, _writer(imported, folder))
    imported.about = _about(imported, folder)
    if folder.optimizers:
        _add_optimizers(imported, folder, others, options)


def add_trainer_state(contents: Contents, path: FilePath) -> Contents:
    """A checkpoint of another format, such as DeepSpeed's, with what the Trainer or accelerate
    saved beside it in the folder `path` as extras.
    """
    names = [child.name for child in path.children() if child.is_file()]
    folder = parse(path, names)
    if not folder.kept:
        return contents
    beside = Import(contents.format, path, Combined.of_files({}))
    for name in folder.kept:
        _keep(beside, path / name)
    keep_configs(beside, path)
    kept = beside.contents()
    notes = [note for note in contents.notes if not _is_about(note, kept.extras)]
    return replace(
        contents,
        extras={**contents.extras, **kept.extras},
        inventory=[*contents.inventory, *kept.inventory],
        notes=[_writer(beside, folder), *notes, *kept.notes],
        about=_with_writer(contents.about, _about(beside, folder)),
    )


def _with_writer(about: About, trainer: About) -> About:
    """What is known of a checkpoint that a trainer had another library write."""
    writer = ", by ".join(filter(None, [about.writer, trainer.writer]))
    step = trainer.step if about.step is None else about.step
    return About(writer, step, about.parallelism)


def _is_about(note: str, files: Collection[str]) -> bool:
    """Whether a note says of some of these files that they are not read."""
    return note.startswith("not read: ") and any(name in note for name in files)


# The optimizer.


def _add_optimizers(
    imported: Import, folder: TrainingFolder, others: Mapping[str, Stored], options: Options
) -> None:
    files = {name: _opened(folder.path / name) for name in folder.optimizers.values()}
    imported.add_files(files)
    tree = Tree()
    for stem, name in folder.optimizers.items():
        keep_extras(imported, name, files[name])
        tree.add(name, files[name], (stem,))
        imported.unknown |= files[name].unknown
    states = {label: tensor.described() for label, tensor in tree.tensors.items()}
    states |= {label: Stored(path) for label, (path, _, _) in tree.numbers().items()}
    objects = {path: node for path, (_, node) in tree.objects.items()}
    weights = weights_of(imported, folder.model)
    pairing = _Settling(weights, others, states, objects, _ModelOf(imported, folder), options)
    if pairing.is_fused and options.optimizer_groups and not options.weights_only:
        raise FormatError(f"{folder.path}: optimizer_groups does not fit: {_FUSED}")
    placed = imported.placed(
        pairing.tensors(pairing.order()), objects, pairing.options, pairing.words
    )
    imported.notes += [*placed.notes, *pairing.notes]
    if pairing.is_fused:
        imported.notes.append(_FUSED)
    _place(imported, tree, placed)
    tree.check(
        imported, WeightsPlace(None, False, frozenset((stem,) for stem in folder.optimizers))
    )


def _place(imported: Import, tree: Tree, placed: Places) -> None:
    """Give every state its place; plain numbers of no parameter are in the extras."""
    for label, tensor in tree.tensors.items():
        state, name = placed.at[label]
        whole = Consolidated(Unique().join([tensor.node.shape]), [tensor.key])
        reason = f"{state} of {name}" if state != "other" else "a state of no parameter"
        imported.parameter(state, name, whole, reason)
    for label, (_, file, value) in tree.numbers().items():
        state, name = placed.at[label]
        if state != "other":
            imported.constant(state, name, np.asarray(value), f"{file}:{label}")


def _opened(path: FilePath) -> TorchFile:
    """A file that the name says torch.save wrote. Raises FormatError, with the way to the
    weights, where it is none.
    """
    try:
        if not path.is_file() or not is_torch_file(path):
            why = stand_in(path) if path.is_file() else why_missing(path.parent, path.name)
            raise FormatError(
                f"{path}: {why or 'it is not a file of torch.save, as its name says'}"
            )
        return TorchFile(path, lenient=True)
    except FormatError as error:
        raise type(error)(f"{error}{_ASIDE}") from error


def weights_of(imported: Import, model: str) -> dict[str, Stored]:
    """The weights of an import, as a state dict called `model` would have them, in their order."""
    weights: dict[str, Stored] = {}
    for (state, key), param in imported.params.items():
        if str(state) != "param":
            continue
        name, dtype = str(key), imported.stored[param.keys[0]].dtype
        path = (model, name)
        tie = imported.ties.get(name)
        weights[joined(path)] = Stored(path, param.layout.shape, is_trainable(dtype), tie)
    return weights


@dataclass(frozen=True)
class _ModelOf:
    """What a folder says of the class of its model, and whether its files have the model's
    order.
    """

    imported: Import
    folder: TrainingFolder

    @property
    def is_ordered(self) -> bool:
        """Whether weights come from one file of torch.save, which has them in the order of the
        module.
        """
        return self.imported.format == "torch" and len(self.imported.weight_files()) == 1

    def types(self) -> list[str]:
        """The model types that a config may mean; none of code that is not in transformers."""
        config = self._config(CONFIG)
        if config.get("auto_map"):
            return []
        if isinstance(model_type := config.get("model_type"), str):
            return [model_type]
        adapter = self._config("adapter_config.json").get("auto_mapping")
        library = adapter.get("parent_library") if isinstance(adapter, dict) else None
        module = _MODULE.match(str(library))
        if module is None:
            return []
        return [known for known in model_types() if known.replace("-", "_").startswith(module[1])]

    def release(self) -> str:
        """The release of transformers that saved the config."""
        return str(self._config(CONFIG).get("transformers_version", ""))

    def _config(self, name: str) -> Mapping[str, Any]:
        config = self.imported.extras.get(name, {}).get("config")
        return config if isinstance(config, dict) else {}


class _Settling:
    """The one order of the model in which the user's word decides, of those that are known."""

    def __init__(
        self,
        weights: Mapping[str, Stored],
        others: Mapping[str, Stored],
        states: Mapping[str, Stored],
        objects: Mapping[Steps, Any],
        model: _ModelOf,
        options: Options,
    ):
        self.weights, self.others, self.states, self.objects = weights, others, states, objects
        self.model = model
        self.options = options if others else replace(options, model=None)
        self.label_of = {
            str(stored.path[-1]): label for label, stored in weights.items() if stored.trainable
        }
        self.notes: list[str] = []

    def tensors(self, names: Sequence[str]) -> dict[str, Stored]:
        """The weights in the order of these names, all that an optimizer can have; the rest."""
        ordered = {self.label_of[name]: self.weights[self.label_of[name]] for name in names}
        buffers = {
            label: replace(stored, trainable=False)
            for label, stored in self.weights.items()
            if label not in ordered
        }
        return {**ordered, **buffers, **self.others, **self.states}

    def order(self) -> Sequence[str]:
        """The weights in the order that is right for the user's word, with a note on whence it
        is; as they are stored, where no word was said.
        """
        word = self.options.optimizer_groups
        if not rule_of(word) or self.options.weights_only:
            return list(self.label_of)
        try:
            order, types = self._settled(str(word))
        except (Undecided, UnknownModel) as error:
            path = self.model.folder.path
            raise FormatError(f"{path}: optimizer_groups does not fit: {error}") from None
        if types:
            self.notes.append(_order_note(types))
        return order

    @cached_property
    def is_fused(self) -> bool:
        """Whether states are of parameters that have all experts of a layer, which are stored one
        by one.
        """
        numbered = filter(None, map(_EXPERT.fullmatch, self.label_of))
        experts = {int(match[1]) for match in numbered}
        stored = {weight.shape for weight in self.weights.values()}
        shapes = {state.shape for state in self.states.values()} - stored
        return any(len(shape) == 3 and {*range(shape[0])} == experts for shape in shapes)

    def words(self) -> list[str] | None:
        """The words that would decide; None if neither words nor lists would."""
        if self.is_fused:
            return None
        rules = (HF_DECAY, MODULE_ORDER)
        if not self.model.folder.of_trainer:
            rules = (MODULE_ORDER, HF_DECAY)
        return [word for rule in rules for word in self._deciding(rule)]

    def _deciding(self, rule: str) -> Iterator[str]:
        words = [rule]
        if not self.model.is_ordered and not self.model.types():
            known = orders_of(list(self.label_of)).values()
            words += [f"{rule}:{types[0]}" for types in known]
        for word in words:
            with suppress(Undecided):
                self._settled(word)
                yield word
                return

    def _settled(self, word: str) -> tuple[Sequence[str], list[str]]:
        """The order in which a word decides, and the model types that have it; none where the
        file has it. Raises Undecided.
        """
        orders, decided = self._orders(word), dict[tuple[str, ...], object]()
        why = Undecided("")
        for order in orders:
            try:
                decided[order] = self._tried(order, word)
            except Undecided as error:
                why = error
        if not decided:
            raise why
        first = next(iter(decided))
        if any(at != decided[first] for at in decided.values()):
            types = [orders[order][0] for order in decided]
            raise Undecided(
                f"the classes of transformers with these names ({', '.join(types)}) have them in"
                f" several orders; say which is meant: '{rule_of(word)}:{types[0]}'"
            )
        return first, [name for order in decided for name in orders[order]]

    def _tried(self, order: Sequence[str], word: str) -> object:
        """Where the word puts states, of weights in an order. Raises Undecided."""
        options = replace(self.options, optimizer_groups=word)
        return places(self.tensors(order), self.objects, options).at

    def _orders(self, word: str) -> dict[tuple[str, ...], list[str]]:
        """The orders in which the model may have its weights, each with the model types that have
        it. Raises Undecided where there is none.
        """
        names, release = list(self.label_of), self.model.release()
        said = model_type_of(word)
        if self.model.is_ordered and not said:
            return {tuple(names): []}
        types = [said] if said else self.model.types()
        if len(types) == 1:
            return {tuple(in_order_of(types[0], names, release)): types}
        is_open = not types and rule_of(word) == HF_DECAY
        known = orders_of(names, None if is_open else types, release)
        if not known:
            raise Undecided(_NO_ORDER)
        return known


_EXPERT = re.compile(r".*\.experts\.(\d{1,5})\..*")
_FUSED = (
    "the optimizer has states of parameters with all experts of a layer, as transformers 5 trains"
    " them, and save_pretrained stores the experts one by one: no stored weight has the shape of"
    " such a state. weights_only leaves the optimizer aside"
)
_NO_ORDER = (
    "the files do not have the order of the model (safetensors sort their names), and nothing in"
    " them says of which class of transformers it is, or not of one that is known here; say its"
    " type with the word, such as 'module-order:llama', or say lists of names"
)


def _order_note(types: Sequence[str]) -> str:
    shown = ", ".join(types[:_SHOWN_TYPES])
    more = f" and {len(types) - _SHOWN_TYPES} more" if len(types) > _SHOWN_TYPES else ""
    return f"the order of the model is that of transformers' class for {shown}{more}"


# The rest of the trainer's state.


def _keep(imported: Import, path: FilePath) -> None:
    """A file of the trainer's state as extras. It is read now, so that its checksums are compared
    now.

    Raises FormatError where it is not what its name says.
    """
    name = path.name
    if name == TRAINER_STATE:
        imported.extra(name, "state", read_json(path))
        return
    if path.size() > _MAX_KEPT_BYTES:
        reason = "the state of the trainer, with more data than settings have; open it by its path"
        imported.skip(name, "file", reason)
        imported.notes.append(f"not read: {name}: {reason}")
        return
    file = _opened(path)
    imported.add_files({name: file})
    tree = file.tree if isinstance(file.tree, dict) else {"object": file.tree}
    for key, value in tree.items():
        imported.extra(name, str(key), value)
    if name != _ARGUMENTS:  # which is an object of a class, always
        imported.unknown |= file.unknown
    for fault in filter(None, (check.run() for check in file.checks("full"))):
        raise CorruptData(fault + _ASIDE)


def _about(imported: Import, folder: TrainingFolder) -> About:
    """The writer and the step, for people."""
    if not folder.of_trainer:
        return About("accelerate" if folder.kept else "")
    state = imported.extras.get(TRAINER_STATE, {}).get("state")
    step = state.get("global_step") if isinstance(state, dict) else None
    return About("transformers' Trainer", step if isinstance(step, int) else None)


def _writer(imported: Import, folder: TrainingFolder) -> str:
    """Who wrote the folder, and at which step."""
    writer = "accelerate"
    if folder.of_trainer:
        state = imported.extras.get(TRAINER_STATE, {}).get("state")
        step = state.get("global_step") if isinstance(state, dict) else None
        writer = f"transformers' Trainer at step {step} ({TRAINER_STATE})"
    elif any(name.endswith(".pt") for name in folder.optimizers.values()):
        writer = "a trainer"
    adapter = ", of an adapter of peft" if "adapter_config.json" in imported.extras else ""
    return f"a training checkpoint of {writer}{adapter}"
