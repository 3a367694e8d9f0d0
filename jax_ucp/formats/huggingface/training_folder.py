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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents
from jax_ucp.arrays.value import items_of
from jax_ucp.codecs.torch_file import TorchFile, is_torch_file
from jax_ucp.errors import FormatError, naming
from jax_ucp.files.path import FilePath
from jax_ucp.files.placeholders import stand_in, why_missing
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.huggingface.beside import TRAINER_STATE
from jax_ucp.formats.huggingface.module_order import in_order_of, model_types, orders_of
from jax_ucp.formats.moments import settle_moments
from jax_ucp.formats.nested import config_in
from jax_ucp.formats.packed_experts import PackedParameter, in_memory
from jax_ucp.formats.state_dicts import Tree, keep_extras, keep_proved
from jax_ucp.formats.weight_files import keep_configs, read_json
from jax_ucp.formats.weight_names import WeightSave
from jax_ucp.options import HF_DECAY, MODULE_ORDER, Options, rule_of
from jax_ucp.states.opaque import WeightsPlace
from jax_ucp.states.optimizer_dicts import joined
from jax_ucp.states.pairing import Undecided
from jax_ucp.states.state_pairing import ModelOrders, Places, StateTensor, is_trainable

MODEL = "model"  # what the model is called where there are no others
_OPTIMIZER = re.compile(r"(?P<stem>optimizer(?:_\d+)?)\.(?P<suffix>pt|bin)")
_KEPT = re.compile(
    r"(scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args"
    r"|custom_checkpoint)(_\d+)*\.(pt|pth|bin|pkl)"
)
_ARGUMENTS = "training_args.bin"
_MODULE = re.compile(r"transformers\.models\.(\w+)\.")
_MAX_KEPT_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class TrainingFolder:
    """The files of a training checkpoint beside the weights that are read.

    `optimizers` are files by what their dict is called, `kept` become extras. `others` are other
    models, not read.
    """

    path: FilePath
    optimizers: Mapping[str, str]
    kept: Sequence[str]
    model: str = MODEL
    others: Mapping[str, WeightSave] | None = None

    @property
    def files(self) -> set[str]:
        return {*self.optimizers.values(), *self.kept}

    @property
    def of_trainer(self) -> bool:
        return TRAINER_STATE in self.kept


def training_beside(path: FilePath, names: Collection[str]) -> TrainingFolder:
    """The training files among `names`, which are beside weights. Raises FormatError for two files
    of one optimizer.
    """
    optimizers: dict[str, str] = {}
    for match in filter(None, map(_OPTIMIZER.fullmatch, sorted(names))):
        first = optimizers.setdefault(match["stem"], match[0])
        if first != match[0]:
            raise FormatError(
                f"{path} has {first}, as accelerate calls an optimizer's states, and {match[0]}, as"
                " transformers' Trainer does: nothing says which belongs to the weights",
                way_out="weights_only",
            )
    kept = [name for name in sorted(names) if _KEPT.fullmatch(name) or name == TRAINER_STATE]
    return TrainingFolder(path, optimizers, kept)


def add_training(
    builder: ContentsBuilder,
    folder: TrainingFolder,
    others: Mapping[str, StateTensor],
    options: Options,
) -> None:
    """Add the optimizer's states to the parameters of an import, and other files as extras.

    `others` are the weights of other models. Raises FormatError if a file is not what its name
    says, or if the user's word does not fit.
    """
    for name in folder.kept:
        _keep(builder, folder.path / name)
    builder.notes.insert(0, _note(builder, folder))
    builder.about = _about(builder, folder)
    if not folder.optimizers:
        return
    files = {name: _opened(folder.path / name) for name in folder.optimizers.values()}
    builder.add_files(files)
    tree = Tree()
    for stem, name in folder.optimizers.items():
        keep_extras(builder, name, files[name])
        tree.add(name, files[name], (stem,))
        builder.unknown |= files[name].unknown
    states = {label: tensor.described() for label, tensor in tree.tensors.items()}
    states |= {label: StateTensor(path) for label, (path, _, _) in tree.numbers().items()}
    objects = {path: node for path, (_, node) in tree.objects.items()}
    weights = weights_of(builder, folder.model)
    names = {str(w.path[-1]): label for label, w in weights.items() if w.trainable}
    # states of parameters with all experts of a layer, of which the weights are stored one by one
    experts = {int(match[1]) for match in filter(None, map(_EXPERT.fullmatch, names))}
    shapes = {own.shape for own in states.values()} - {own.shape for own in weights.values()}
    is_fused = any(len(shape) > 1 and {*range(shape[0])} == experts for shape in shapes)
    model = _ModelOf(builder, folder)
    packed = _packed(model, weights) if is_fused else None
    if is_fused and packed is None and options.optimizer_groups and not options.weights_only:
        raise FormatError(f"{folder.path}: optimizer_groups does not fit: {_FUSED}")
    if packed is not None:
        weights = {
            joined((folder.model, name)): StateTensor((folder.model, name), one.shape)
            for name, one in packed.items()
        }
        names = {str(weight.path[-1]): label for label, weight in weights.items()}
    orders = _model_orders(model, names)
    if is_fused and packed is None:
        orders = replace(orders, words=lambda: None)
    options = options if others else replace(options, model=None)
    stored = {name: [part.name for part in one.parts] for name, one in (packed or {}).items()}
    placed = builder.placed({**weights, **others, **states}, objects, options, orders, stored)
    builder.notes += placed.notes
    if is_fused and packed is None:
        builder.notes.append(_FUSED)
    _place(builder, tree, placed, packed or {})
    settle_moments(builder, options)
    tree.check(builder, WeightsPlace(None, False, frozenset((stem,) for stem in folder.optimizers)))


def add_trainer_state(contents: Contents, path: FilePath) -> Contents:
    """A checkpoint with what the Trainer or accelerate saved beside it as extras."""
    names = [child.name for child in path.children() if child.is_file()]
    folder = training_beside(path, names)
    if not folder.kept:
        return contents
    beside = ContentsBuilder(contents.format, path, Combined.of_files({}))
    for name in folder.kept:
        _keep(beside, path / name)
    keep_configs(beside, path)
    kept = beside.contents()
    about, trainer = contents.about, _about(beside, folder)
    writer = ", by ".join(filter(None, [about.writer, trainer.writer]))
    step = trainer.step if about.step is None else about.step
    return replace(
        contents,
        extras={**contents.extras, **kept.extras},
        inventory=[*contents.inventory, *kept.inventory],
        notes=[_note(beside, folder), *contents.notes, *kept.notes],
        about=About(writer, step, about.parallelism),
    )


# The optimizer.


def _packed(
    model: _ModelOf, weights: Mapping[str, StateTensor]
) -> dict[str, PackedParameter] | None:
    """The parameters that the optimizer had, if that is known of a model with packed experts."""
    types = model.types()
    if model.is_ordered or len(types) != 1 or any(one.tie is not None for one in weights.values()):
        return None
    shapes = {str(one.path[-1]): one.shape for one in weights.values() if one.trainable}
    return in_memory(types[0], model.release(), shapes)


def _place(
    builder: ContentsBuilder,
    tree: Tree,
    placed: Places,
    packed: Mapping[str, PackedParameter],
) -> None:
    """Give every state its place. Plain numbers of no parameter become extras."""
    for label, tensor in tree.tensors.items():
        state, name = placed.at[label]
        reason = f"{state} of {name}" if state != "other" else "a state of no parameter"
        whole, of = builder.array(tensor.key), packed.get(name)
        if state == "other" or of is None or len(of.parts) == 1:
            stored = of.parts[0].name if of and state != "other" else name
            builder.parameter(state, stored, whole, reason)
            continue
        if whole.info.shape not in ((), of.shape):
            raise FormatError(
                f"{builder.path}: {state} of {name} has shape {list(whole.info.shape)}, the"
                f" parameter {list(of.shape)}: only states of the parameter's shape, and single"
                " numbers, are states of its experts",
                way_out="weights_only",
            )
        for part in of.parts:
            array = part.of(whole) if whole.info.shape else whole
            builder.parameter(state, part.name, array, reason)
    for label, (_, file, value) in tree.numbers().items():
        state, name = placed.at[label]
        if state == "other":
            continue
        for one in [part.name for part in packed[name].parts] if name in packed else [name]:
            builder.constant(state, one, np.asarray(value), f"{file}:{label}")


def _opened(path: FilePath) -> TorchFile:
    """A file of torch.save, opened. Raises FormatError if it is missing, or another file."""
    with naming(path, way_out="weights_only"):
        if not path.is_file() or not is_torch_file(path):
            why = stand_in(path) if path.is_file() else why_missing(path.parent, path.name)
            raise FormatError(
                f"{path}: {why or 'it is not a file of torch.save, as its name says'}"
            )
        return TorchFile(path, lenient=True)


def weights_of(builder: ContentsBuilder, model: str) -> dict[str, StateTensor]:
    """The weights of an import, in order, as they would be in a state dict called `model`."""
    weights: dict[str, StateTensor] = {}
    for (state, key), param in builder.params.items():
        if str(state) != "param":
            continue
        name, info = str(key), param.info
        path = (model, name)
        tie = builder.ties.get(name)
        weights[joined(path)] = StateTensor(path, info.shape, is_trainable(info.dtype), tie)
    return weights


@dataclass(frozen=True)
class _ModelOf:
    """The class of a folder's model, by its configs, and whether files have the model's order."""

    builder: ContentsBuilder
    folder: TrainingFolder

    @property
    def is_ordered(self) -> bool:
        """Whether weights come from one file of torch.save, which has the module's order."""
        params = self.builder.params.items()
        weights = [array for (state, _), array in params if str(state) == "param"]
        files = {item.partition(":")[0] for array in weights for item in items_of(array)}
        return self.builder.format == "torch" and len(files) == 1

    def types(self) -> list[str]:
        """The model types that a config may mean; none if its code is not in transformers."""
        config = config_in(self.builder.extras)
        if config.get("auto_map"):
            return []
        if isinstance(model_type := config.get("model_type"), str):
            return [model_type]
        adapter = config_in(self.builder.extras, "adapter_config.json").get("auto_mapping")
        library = adapter.get("parent_library") if isinstance(adapter, dict) else None
        module = _MODULE.match(str(library))
        if module is None:
            return []
        return [known for known in model_types() if known.replace("-", "_").startswith(module[1])]

    def release(self) -> str:
        """The release of transformers that wrote the config; empty if it does not say."""
        return str(config_in(self.builder.extras).get("transformers_version", ""))


def _model_orders(model: _ModelOf, labels: Mapping[str, str]) -> ModelOrders:
    """The orders that the model may have its weights in; `labels` are the weights by name."""
    names = list(labels)

    def of(word: str) -> dict[tuple[str, ...], list[str]]:
        given, release = word.partition(":")[2] if isinstance(word, str) else "", model.release()
        if model.is_ordered and not given:
            return {}
        types = [given] if given else model.types()
        if len(types) == 1:
            orders = {tuple(in_order_of(types[0], names, release)): types}
        else:
            is_open = not types and rule_of(word) == HF_DECAY
            orders = orders_of(names, None if is_open else types, release)
        if not orders:
            raise Undecided(_NO_ORDER)
        return {tuple(labels[name] for name in order): types for order, types in orders.items()}

    def words() -> list[list[str]]:
        known: list[str] = []
        if not model.is_ordered and not model.types():
            known = [types[0] for types in orders_of(names).values()]
        rules = [HF_DECAY, MODULE_ORDER]
        if not model.folder.of_trainer:
            rules.reverse()
        return [[rule, *(f"{rule}:{model_type}" for model_type in known)] for rule in rules]

    return ModelOrders(of, words)


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


# The rest of the trainer's state.


def _keep(builder: ContentsBuilder, path: FilePath) -> None:
    """Keep a file of the trainer's state as extras, read and proved now. Raises FormatError."""
    name = path.name
    if name == TRAINER_STATE:
        builder.extra(name, "state", read_json(path))
        return
    if path.size() > _MAX_KEPT_BYTES:
        reason = "the state of the trainer, with more data than settings have; open it by its path"
        builder.skip(name, "file", reason)
        builder.notes.append(f"not read: {name}: {reason}")
        return
    file = _opened(path)
    builder.add_files({name: file})
    keep_proved(builder, name, file)
    if name != _ARGUMENTS:  # which is an object of a class, always
        builder.unknown |= file.unknown


def _global_step(builder: ContentsBuilder) -> Any:
    state = builder.extras.get(TRAINER_STATE, {}).get("state")
    return state.get("global_step") if isinstance(state, dict) else None


def _about(builder: ContentsBuilder, folder: TrainingFolder) -> About:
    if not folder.of_trainer:
        return About("accelerate" if folder.kept else "")
    step = _global_step(builder)
    return About("transformers' Trainer", step if isinstance(step, int) else None)


def _note(builder: ContentsBuilder, folder: TrainingFolder) -> str:
    """The note that says which program wrote the folder."""
    writer = "accelerate"
    if folder.of_trainer:
        writer = f"transformers' Trainer at step {_global_step(builder)} ({TRAINER_STATE})"
    elif any(name.endswith(".pt") for name in folder.optimizers.values()):
        writer = "a trainer"
    adapter = ", of an adapter of peft" if "adapter_config.json" in builder.extras else ""
    return f"a training checkpoint of {writer}{adapter}"
