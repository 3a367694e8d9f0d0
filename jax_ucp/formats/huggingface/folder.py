"""Folders of weights: safetensors, or files of torch.save, and what lies beside them.

`weight_names` decides what is read. Nothing else in the folder is silent: what an index or a name
says is missing is an error, what belongs to the same run is named in a note, and another save of
the same weights is compared: a sample when the folder is opened, all by `verify` and in a
conversion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_ucp.arrays.checks import Claims, LeafClaim, checks_of
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import elements_of, expressions, locate, split, tiles
from jax_ucp.arrays.proof import Proof
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.path import FilePath
from jax_ucp.files.placeholders import finished_name, why_missing
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.huggingface.beside import (
    ADAPTER,
    OPTIMIZER,
    SHARDS,
    TRAINER,
    notes,
    what_is,
)
from jax_ucp.formats.huggingface.companions import keep_companions
from jax_ucp.formats.huggingface.training_folder import (
    MODEL,
    add_training,
    training_beside,
    weights_of,
)
from jax_ucp.formats.nested import config_in
from jax_ucp.formats.peft.config import LORA, method_of
from jax_ucp.formats.safetensors import reader as safetensors
from jax_ucp.formats.safetensors.rank_files import ranks_of
from jax_ucp.formats.torch_save import reader as torch_state
from jax_ucp.formats.weight_files import (
    CONFIG,
    CONFIGS,
    keep_configs,
    keep_index,
    read_index,
    read_json,
    refuse_rank,
    require_all,
)
from jax_ucp.formats.weight_names import (
    Choice,
    WeightSave,
    choose,
    holds_weights,
    model_of_index,
    numbered_models,
    saves_of,
    which,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import sample_boxes
from jax_ucp.options import Options, Sizes
from jax_ucp.states.state_pairing import StateTensor

# Where torch DCP leaves the ranks' parts of what it consolidated
# (`torch/distributed/checkpoint/_hf_utils.py`).
SHARDED = "sharded"


def recognise(path: FilePath) -> bool:
    return path.is_dir() and holds_weights(entry.name for entry in path.children())


def parse(path: FilePath, options: Options) -> Contents:
    """The weights in a folder, by the index or the names of its files.

    Raises FormatError, naming files, where some are missing, where several models or saves could be
    meant, and where two saves differ; and as the readers of the files do.
    """
    for entry in sorted(path.children()):
        called_so = entry.name in CONFIGS or holds_weights([entry.name])
        if called_so and not entry.is_file():
            why = why_missing(path, entry.name) or "it is a folder, where a file should be"
            raise FormatError(f"{entry}: {why}")
    choice, models = _chosen(path, options)
    require_all(path, choice.save)
    training = None
    if not options.weights_only:
        training = training_beside(path, [entry.name for entry in path.children()])
    if training and not (training.optimizers or training.of_trainer):
        training = None
    elif training and len(models) > 1:
        training = replace(training, model=options.model or MODEL)
    # without the options that decide of other files than those of the weights
    model = None if len(models) > 1 else options.model
    groups = None if training and training.optimizers else options.optimizer_groups
    of_weights = replace(options, model=model, optimizer_groups=groups)
    builder = _read(path, choice.save, of_weights)
    keep_configs(builder, path)
    read = keep_companions(builder, path)
    if training is not None:
        # of the models that are not read, as an optimizer may be theirs
        plain = replace(options, model=None, optimizer_groups=None)
        others: dict[str, StateTensor] = {}
        for name, save in models.items():
            if name != training.model and save.whole:
                others |= weights_of(_read(path, save, plain), name)
        add_training(builder, training, others, options)
    read |= training.files if training else set()
    _inventory(builder, choice, read, options)
    if options.model is not None and len(models) > 1:
        builder.said["model"] = options.model
    contents = builder.contents()
    if choice.same is not None:
        contents = _compared(path, contents, choice.save, choice.same, options)
    return _with_parts(path, contents, choice.save, options)


def _chosen(path: FilePath, options: Options) -> tuple[Choice, Mapping[str, WeightSave]]:
    """The save to be read, and by name the models of which the user may choose one."""
    names = _files(path)
    called = [name for name in names if model_of_index(name) is not None]
    indexes = {name: read_index(path / name)[1] for name in called if (path / name).is_file()}
    saves = saves_of({name for name in names if (path / name).is_file()}, indexes)
    if not saves:
        raise FormatError(f"{path / names[0]}: {why_missing(path, names[0])}")
    # the file or the index that a config names for transformers to load
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    choice = choose(str(path), saves, named if isinstance(named, str) else "")
    models = numbered_models(saves, choice.save)
    if options.model is None or len(models) == 1:
        return choice, models
    if options.model not in models:
        raise FormatError(
            f"{path}: model={options.model!r}: there is no such model; the models are:"
            f" {', '.join(models)}"
        )
    return choose(str(path), saves, models[options.model].name), models


def _files(path: FilePath) -> list[str]:
    """The names of files and of broken links, those of weights or indexes first."""
    names = sorted(entry.name for entry in path.children() if entry.is_file() or entry.link())
    return sorted(names, key=lambda name: not holds_weights([name]))


def _read(path: FilePath, save: WeightSave, options: Options) -> ContentsBuilder:
    index = read_index(path / save.index)[0] if save.index else None
    if save.model.kind == "safetensors":
        builder = safetensors.read_weights(path, path, save.files, options.sizes, index)
    else:
        if len(save.files) == 1:
            refuse_rank(path / save.files[0])
        builder = torch_state.read_weights(path, path, save.files, options)
    if index is not None:
        keep_index(builder, path / save.index, index)
    return builder


# What lies beside.


def _inventory(
    builder: ContentsBuilder, choice: Choice, read: Collection[str], options: Options
) -> None:
    """Note what is not `read`, with notes for the user on files of the run and on rivals."""
    used = choice.files_read | {*CONFIGS, SHARDED, *read}
    is_adapter = choice.save.model.stem == "adapter_model"
    noted: dict[str, list[str]] = defaultdict(list)
    for entry in sorted(builder.path.children()):
        if entry.name in used:
            continue
        reason, is_noted = _beside(entry, choice, options)
        builder.skip(entry.name, "folder" if entry.is_dir() else "file", reason)
        if is_noted:
            noted[reason].append(entry.name)
    if "adapter_config.json" in builder.extras and not is_adapter:
        noted[ADAPTER].append("adapter_config.json")
    for reason, names in noted.items():
        builder.notes += notes(reason, names)
    if is_adapter:
        config = config_in(builder.extras, "adapter_config.json")
        base = config.get("base_model_name_or_path")
        method = method_of(config)
        applied = f"only {LORA} is merged, not {method or 'what its config does not name'}"
        if method == LORA:
            applied = "base.merge(adapter) (--merge) applies it"
        builder.notes.append(
            "these are the weights of an adapter, which mean something only with the model that it"
            f" changes, {base or 'which its config does not name'}; {applied}"
        )


def _beside(entry: FilePath, choice: Choice, options: Options) -> tuple[str, bool]:
    """The reason why something in the folder is not read, and whether that deserves a note."""
    name = entry.name
    if name.startswith("."):
        return "hidden: no part of the checkpoint", False
    if name in choice.left:
        return choice.left[name], True
    if holds_weights([name]):
        return f"{choice.save.name} does not name it", True
    if (finished := finished_name(name)) is not None:
        return f"a download of {finished} that has not ended", True
    kind = what_is(name)
    opens_by_itself = "; open it by its path" if kind in (OPTIMIZER, SHARDS) else ""
    if kind:
        not_wanted = options.weights_only and kind in (OPTIMIZER, TRAINER)
        return f"{kind}{opens_by_itself}", not not_wanted
    if entry.is_dir() and holds_weights(_files(entry)):
        return "a folder with weights of its own", True
    return "lies beside the weights; not read", False


# What is stored twice.


def _compared(
    path: FilePath, contents: Contents, save: WeightSave, same: WeightSave, options: Options
) -> Contents:
    """The checkpoint, compared with another save. Raises FormatError if they differ."""
    other = _read(path, same, options).contents()
    if difference := _other_structure(contents, other) or _other_values(contents, other):
        raise FormatError(
            f"{path} holds two saves of one model, {save.name} and {same.name}, and they differ:"
            f" {difference}. {which(str(path), [save, same])}"
        )
    note = (
        f"{same.name} holds the same weights as {save.name}, which is read: a sample of each tensor"
        " was compared"
    )
    reason = f"of {same.name}, which holds the same weights; compared"
    inventory = [
        *contents.inventory,
        *(replace(item, status="skipped", reason=reason) for item in other.inventory),
    ]
    noted = replace(contents, inventory=inventory, notes=[*contents.notes, note])
    return _with_copy(noted, other, same.name)


def _with_parts(path: FilePath, contents: Contents, save: WeightSave, options: Options) -> Contents:
    """The checkpoint, compared with ranks' parts if all of them are there. Raises FormatError."""
    parts = path / SHARDED
    if not parts.is_dir():
        return contents
    compared, other = contents, None
    try:
        # The shapes of the whole tensors, which are here, show whether a rank is missing.
        ranks = len(ranks_of(_files(parts)))
        of_all = replace(options, sizes=Sizes({"ranks": ranks}))
        other = parse(parts, of_all) if recognise(parts) else None
        fault = _other_structure(contents, other) if other else "it holds no weights"
    except (UCPError, OSError) as error:
        fault = str(error)
    if other is not None:
        compared = _with_copy(contents, other, SHARDED)
        if difference := _other_values(contents, other):
            raise FormatError(
                f"{path} holds two saves, {save.name} and the ranks' parts in {SHARDED}/, and they"
                f" differ: {difference}. Open the one that is meant: {path}/{save.name} or {parts}"
            )
    reason = "parts of the same tensors, as each rank wrote them; compared, and it opens by itself"
    if fault:
        reason = (
            f"{SHARDED}/ should hold the ranks' parts of the same tensors, and does not: {fault}"
        )
    inventory = [*compared.inventory, Item(SHARDED, "folder", "skipped", reason)]
    notes = [*compared.notes, reason] if fault else compared.notes
    return replace(compared, inventory=inventory, notes=notes)


def _with_copy(contents: Contents, copy: Contents, name: str) -> Contents:
    """The checkpoint, whose `verify` compares all of a copy of it in `name`."""

    def claims() -> Iterator[LeafClaim]:
        yield from contents.claims
        yield from copy.claims
        yield from _copies(contents, copy, name)

    return replace(contents, claims=Claims(claims))


def _copies(contents: Contents, copy: Contents, name: str = "") -> Iterator[LeafClaim]:
    """The claims that two checkpoints have equal arrays. Faults name the copy, if it has a name."""
    arrays, others = expressions(contents.arrays), expressions(copy.arrays)
    of_copy = {(leaf.label, leaf.shape, leaf.dtype): others[leaf.name] for leaf in copy.leaves}
    for leaf in contents.leaves:
        if other := of_copy.get((leaf.label, leaf.shape, leaf.dtype)):
            proof = _Copy(leaf.label, arrays[leaf.name], other, name)
            yield LeafClaim(proof, frozenset([leaf.name]))


@dataclass(frozen=True)
class _Copy(Proof):
    """An array that another save, called `name`, has too."""

    label: str
    array: Array
    copy: Array
    name: str

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        return [self.array.info] * 2

    def sample(self) -> Sequence[Box]:
        return sample_boxes(tiles(self.array), tiles(self.copy))

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first box that differs, with the files in which it lies."""
        both = (split(each, boxes) for each in (elements, elements_of(self.copy, boxes)))
        for box, data, copied in zip(boxes, *both, strict=True):
            if not same_bits(data, copied):
                files = ", ".join(sorted({piece.file for piece in locate(self.array, box)}))
                copy_file = f" (the copy is in {self.name})" if self.name else ""
                return f"{self.label} has other values in {box}, in {files}{copy_file}"
        return None


def _other_structure(contents: Contents, copy: Contents) -> str | None:
    """The first difference between checkpoints in names, shapes or dtypes; None if they agree."""
    first, second = _kinds(contents), _kinds(copy)
    for label in sorted(first.keys() ^ second.keys()):
        return f"{label} is in only one of them"
    for label, kind in first.items():
        if kind != second[label]:
            return f"{label} is {kind} in one, {second[label]} in the other"
    return None


def _kinds(contents: Contents) -> dict[str, str]:
    return {leaf.label: f"{leaf.dtype} {list(leaf.shape)}" for leaf in contents.leaves}


def _other_values(contents: Contents, copy: Contents) -> str | None:
    """The first difference in a sample of each array that both have; None if they agree."""
    checks = checks_of(_copies(contents, copy), "sample")
    return next(filter(None, (check.run() for check in checks)), None)
