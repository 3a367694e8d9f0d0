"""Names of files: which of a folder are one model's weights, decided by names and indexes alone.

Facts: transformers 4.57 (`modeling_utils.py`, `_get_resolved_checkpoint_files`) takes of a folder
the file that `transformers_weights` of the config names, else the first that is there of
`model.safetensors`, its index, `pytorch_model.bin`, its index. diffusers (`model_loading_utils.py`)
calls them `diffusion_pytorch_model`, and both put a variant such as `fp16` between dots. accelerate
(`checkpointing.py`) numbers further models `model_1`, `pytorch_model_1`. One part of several is
called `<name>-00001-of-00002`; torch DCP calls a rank's `shard-00001-model-00001-of-00002`.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jax_ucp.errors import FormatError

Kind = Literal["safetensors", "torch"]

_SUFFIXES: Mapping[str, Kind] = {".safetensors": "safetensors", ".bin": "torch"}
# Of files of torch.save a name must say that they are weights: optimizers and schedulers have the
# same suffix.
_TORCH_STEMS = re.compile(r"(diffusion_)?pytorch_model\w*|adapter_model")
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)")
# older diffusers have the variant last
_NUMBERED = re.compile(rf"{_PART.pattern}(?:\.(?P<variant>\w+))?")
_RANKS_PART = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_VARIANT = re.compile(r"(?P<stem>model|pytorch_model|diffusion_pytorch_model)\.(?P<variant>\w+)")
_INDEX = re.compile(
    r"(?P<name>.+(?P<suffix>\.safetensors|\.bin))\.index(?:\.(?P<variant>\w+))?\.json"
)
MAX_PARTS = 100_000  # a name that counts more is no part of several
RANKS_PARTS = "shard"  # the stem of what the ranks wrote, all of which is one model


@dataclass(frozen=True, slots=True, order=True)
class Model:
    """A model by format, name that its files share, and variant, such as `fp16`."""

    kind: Kind
    stem: str
    variant: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is one that readers look for, or a variant of one."""
        return replace(self, variant="") in _KNOWN


_Series = tuple[Model, int]  # the parts of one model, of which there are so many

# The models that are looked for, in this order; only where none of them is there, other names are
# looked at.
_KNOWN = (
    Model("safetensors", "model"),
    Model("torch", "pytorch_model"),
    Model("safetensors", "diffusion_pytorch_model"),
    Model("torch", "diffusion_pytorch_model"),
)


@dataclass(frozen=True, slots=True)
class WeightSave:
    """The files of one save of a model, and those `missing`; `index` names them, if one does.

    `numbered` parts, with no index, transformers would not load. `unnamed` are parts that numbers
    in names count and the index does not name, whether they are there or not.
    """

    model: Model
    files: tuple[str, ...]
    index: str = ""
    missing: tuple[str, ...] = ()
    numbered: bool = False
    unnamed: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return not self.missing and not self.unnamed

    @property
    def name(self) -> str:
        """The file to open in order to open this save, or the first and the last of its files."""
        if self.index or len(self.files) == 1:
            return self.index or self.files[0]
        return f"{self.files[0]} to {self.files[-1]}"

    @property
    def all_files(self) -> set[str]:
        return {*self.files, self.index} - {""}


@dataclass(frozen=True, slots=True)
class Choice:
    """The save that is read, maybe without files; another one of the model, `same`; and others."""

    save: WeightSave
    same: WeightSave | None = None
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def files_read(self) -> set[str]:
        return self.save.all_files | (self.same.all_files if self.same else set())


class FilePart(NamedTuple):
    """The part of a model that a file is, of how many; 0 of 0 for the whole."""

    model: Model
    number: int = 0
    parts: int = 0


def model_of(name: str) -> FilePart | None:
    """The model of which a file has weights, by its name, and which part of how many it is; None of
    another file.

    >>> model_of("model.fp16-00001-of-00002.safetensors")
    FilePart(model=Model(kind='safetensors', stem='model', variant='fp16'), number=1, parts=2)
    >>> model_of("model.safetensors")[1:]
    (0, 0)
    >>> model_of("optimizer.bin")
    """
    stem, dot, suffix = name.rpartition(".")
    kind = _SUFFIXES.get(dot + suffix)
    if kind is None or not stem or name.startswith("."):
        return None
    if is_ranks_part(name):
        return FilePart(Model(kind, RANKS_PARTS))
    stem, variant, number, count = _numbers(stem)
    if match := _VARIANT.fullmatch(stem):
        stem, variant = match["stem"], match["variant"]
    if kind == "torch" and not _TORCH_STEMS.fullmatch(stem):
        return None
    return FilePart(Model(kind, stem, variant), number, count)


def _numbers(stem: str) -> tuple[str, str, int, int]:
    """A stem without the numbers of a part, the variant after them, and the numbers: 0 of none.

    >>> _numbers("model-00001-of-00002.fp16")
    ('model', 'fp16', 1, 2)
    """
    match = _NUMBERED.fullmatch(stem)
    if match is None or int(match["parts"]) > MAX_PARTS:
        return stem, "", 0, 0
    return match["stem"], match["variant"] or "", int(match["part"]), int(match["parts"])


def is_ranks_part(name: str) -> bool:
    """Whether a file has one rank's parts of tensors, as torch DCP names it."""
    return bool(_RANKS_PART.fullmatch(name))


def model_of_index(name: str) -> Model | None:
    """The model whose files an index names, by the name of the index; None of another file.

    >>> model_of_index("model.safetensors.index.fp16.json")
    Model(kind='safetensors', stem='model', variant='fp16')
    """
    match = _INDEX.fullmatch(name)
    part = model_of(match["name"]) if match else None
    if match is None or part is None:
        return None
    return replace(part.model, variant=match["variant"] or part.model.variant)


def holds_weights(names: Iterable[str]) -> bool:
    """Whether any of the files of a folder is called as weights are, or as an index of them."""
    return any(model_of(name) or model_of_index(name) for name in names)


def saves_of(
    names: Collection[str], indexes: Mapping[str, Sequence[str]]
) -> dict[Model, list[WeightSave]]:
    """Every save in a folder by model: a whole file, those of `indexes`, numbered parts."""
    named = itertools.chain.from_iterable(indexes.values())
    parts = _parts(sorted(set(names).difference(named)))
    saves = [WeightSave(model, (file,)) for file, model in parts.whole.items()]
    for index, files in sorted(indexes.items()):
        model = model_of_index(index)
        if model is None:
            raise ValueError(f"{index} is not a name of an index")
        present = tuple(name for name in files if name in names)
        missing = tuple(name for name in files if name not in names)
        saves.append(
            WeightSave(model, present, index, missing, unnamed=tuple(missing_parts(files)))
        )
    for (model, count), by_number in parts.numbered.items():
        present = tuple(by_number[number] for number in sorted(by_number))
        saves.append(WeightSave(model, present, missing=_others(count, by_number), numbered=True))
    saves += [WeightSave(model, tuple(files)) for model, files in parts.by_rank.items()]
    by_model: dict[Model, list[WeightSave]] = defaultdict(list)
    for save in saves:
        by_model[save.model].append(save)
    return dict(by_model)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Files of weights: whole ones, the parts of each series by number, and those of the ranks."""

    whole: dict[str, Model] = field(default_factory=dict)
    numbered: dict[_Series, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    by_rank: dict[Model, list[str]] = field(default_factory=lambda: defaultdict(list))


def _parts(names: Iterable[str]) -> _Parts:
    parts = _Parts()
    for name in names:
        match model_of(name):
            case FilePart(model, _, 0) if model.stem == RANKS_PARTS:
                parts.by_rank[model].append(name)
            case FilePart(model, _, 0):
                parts.whole[name] = model
            case FilePart(model, number, count):
                parts.numbered[model, count][number] = name
    return parts


def missing_parts(names: Iterable[str]) -> list[str]:
    """The names of the parts missing among these files, of series numbered from 0 or 1.

    >>> missing_parts(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors",
    ...     "mtp.safetensors"])
    ['model-00002-of-00003.safetensors']
    """
    series = sorted(_parts(names).numbered.items())
    return list(itertools.chain(*(_others(count, files) for (_, count), files in series)))


def _others(count: int, by_number: Mapping[int, str]) -> tuple[str, ...]:
    """Files numbered from 1 to `count`, or from 0, beside those given."""
    first = min(by_number)
    numbers = range(count) if first == 0 else range(1, count + 1)
    return tuple(numbered(by_number[first], n) for n in numbers if n not in by_number)


def numbered(name: str, number: int) -> str:
    """The name of another part of the same save.

    >>> numbered("model-00001-of-00002.safetensors", 2)
    'model-00002-of-00002.safetensors'
    """
    match = _PART.match(name)
    if match is None:
        return name
    start, stop = match.span("part")
    return f"{name[:start]}{number:0{stop - start}}{name[stop:]}"


def choose(folder: str, saves: Mapping[Model, Sequence[WeightSave]], named: str = "") -> Choice:
    """The save of a folder's checkpoint that is read: the one called `named`, or that of the model
    that transformers would load, or of the only model.

    `named` is from the config, or what the user says. A save that is not whole is chosen if it is
    named, or if its model has no whole one; where a model has two, the other is to be compared.
    Raises FormatError where several models, or more than two whole saves of one, could be meant, or
    where no save is called `named`.
    """
    all_saves = list(itertools.chain(*saves.values()))
    chosen, same = next((save for save in all_saves if save.name == named), None), None
    if named and chosen is None:
        raise FormatError(
            f"{folder}: config.json names {named!r} in transformers_weights, which is not a save in"
            " the folder"
        )
    if chosen is None:
        # the save of the first known or only model, and another one to compare
        known = [model for model in _KNOWN if model in saves]
        models = known or list(saves)
        of_one_library = known and len({model.stem.startswith("diffusion") for model in known}) == 1
        if len(models) > 1 and not of_one_library:
            names = ", ".join(saves[model][0].name for model in models)
            raise FormatError(
                f"{folder} holds the weights of {len(models)} models, or of one in files that"
                f" nothing says belong together: {names}. Open the one that is meant, or put an"
                " index (model.safetensors.index.json) beside the files of one"
            )
        # that which transformers would load; else the first whole one, or the first
        loaded = [model for model in models if not all(save.numbered for save in saves[model])]
        whole = [model for model in models if any(save.whole for save in saves[model])]
        first, *_ = [*loaded, *whole, *models]
        chosen, same = _of_one_model(folder, saves[first])
    choice = Choice(chosen, same)
    left: dict[str, str] = {}
    for save in all_saves:
        if save not in (chosen, same):
            reason = _why_left(save, chosen)
            left |= dict.fromkeys(save.all_files - choice.files_read, reason)
    return replace(choice, left=left)


def numbered_models(
    saves: Mapping[Model, Sequence[WeightSave]], first: WeightSave
) -> dict[str, WeightSave]:
    """The models that accelerate numbers beside the first one, by name: `model`, `model_1`, ..."""
    models = {"model": first}
    for model, of_model in saves.items():
        number = model.stem.removeprefix(f"{first.model.stem}_")
        if model.kind == first.model.kind and number.isdigit() and not model.variant:
            models[f"model_{number}"] = of_model[0]
    return models


def _of_one_model(folder: str, saves: Sequence[WeightSave]) -> tuple[WeightSave, WeightSave | None]:
    """The one whole save, or two to compare, or one that is not whole. Raises for more."""
    # indexes that name files that are not there, or not all that names count
    stale = [save for save in saves if save.index and not save.whole]
    # beside an index that lacks files, numbered parts are not a save that anybody would load
    match [save for save in saves if save.whole and not (stale and save.numbered)]:
        case []:
            return (stale or saves)[0], None
        case [only]:
            return only, None
        case [first, second]:
            return first, second
        case several:
            names = " and ".join(save.name for save in several)
            raise FormatError(
                f"{folder} holds {len(several)} saves of one model, {names}."
                f" {which(folder, several)}"
            )


def which(folder: str, saves: Sequence[WeightSave]) -> str:
    """The remedy where several saves could be meant."""
    paths = [f"{folder}/{save.name}" for save in saves if not save.numbered]
    return (
        f"Nothing says which is the newer: open the one that is meant ({', '.join(paths)}), or move"
        " the other away"
    )


def _why_left(save: WeightSave, chosen: WeightSave) -> str:
    model = save.model
    reads = f"{chosen.name} is read"
    if model.is_known and not save.whole:
        lacks = f"whose index does not name {save.unnamed[0]}" if save.unnamed else ""
        if save.missing:
            lacks = f"of which {len(save.missing)} files are missing"
        return f"belongs to a save {lacks}; {reads}"
    if model == chosen.model:
        return f"another save of the model; {reads}"
    if model.stem == "adapter_model":
        return "an adapter, which changes the weights; it is not applied"
    if (model.kind, model.stem) == (chosen.model.kind, chosen.model.stem):
        return f"the variant {model.variant or 'without a name'} of the weights; {reads}"
    if model.stem.removeprefix(f"{chosen.model.stem}_").isdigit():
        number = model.stem.rpartition("_")[2]
        return (
            "another model of the same save, as accelerate numbers them;"
            f" {reads}, model='model_{number}' opens this one"
        )
    if model.is_known:
        return f"{reads}, which transformers and diffusers take first"
    return f"weights under another name; {reads}"
