"""Options: what a checkpoint does not say itself, and the user knows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from jax_ucp.arguments import local_path, switch, whole_number
from jax_ucp.errors import SpecError
from jax_ucp.shard_spec.rules import Spec

MODULE_ORDER: Final = "module-order"
HF_DECAY: Final = "hf-decay"
# The statement about an optimizer's groups that each word stands for.
_WORDS: Final = {
    MODULE_ORDER: (
        "every group lists its parameters in the order of the model, as an optimizer made of"
        " model.parameters() does"
    ),
    HF_DECAY: (
        "the two groups that there are were made by transformers' Trainer: weights that decay, then"
        " biases and norms, each in the order of the model"
    ),
}
Lists = tuple[tuple[str, ...], ...]
GroupsFunction = Callable[[Sequence[str]], Sequence[Sequence[str]]]
OptimizerGroups = str | Lists | GroupsFunction  # a word, maybe with `:` and a model type
SaidGroups = str | Lists
Dequantize = Literal[False, "bfloat16", "float16", "float32"] | None
DECODED: Final = "float32"  # what the states of 8-bit optimizers are decoded to

_DEQUANTIZED = ("bfloat16", "float16", "float32")
NOTHING_TWICE = "nothing is stored twice here, so that on_conflict={!r} changes nothing"


class Sizes(Mapping[str, int]):
    """Lengths by name, with a record of the names that were looked up (`asked`): the checkpoint has
    no use for the others.

    Raises SpecError for a length that is not a whole number of at least 1. A name that switches a
    rule on or off, in `when` of a spec, may be 0.
    """

    def __init__(self, given: Mapping[str, int]):
        if not isinstance(given, Mapping):
            raise SpecError(
                f"sizes={given!r:.80} should be lengths by name, such as {{'vocab': 50257}}"
            )
        if strange := [name for name in given if not isinstance(name, str)]:
            raise SpecError(
                f"sizes has the name {strange[0]!r:.80}, which is not a string: names are such as"
                " 'vocab'"
            )
        self.asked: set[str] = set()
        self._given = {name: _whole(name, n, least=0) for name, n in given.items()}

    def __getitem__(self, name: str) -> int:
        self.asked.add(name)
        return _whole(name, self._given[name])

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        return repr(sorted(self._given.items()))

    def of(self, lengths: Collection[str], switches: Collection[str] = ()) -> dict[str, int]:
        """The given sizes of some names, all of which count as asked for; `switches` may be 0."""
        self.asked.update(lengths, switches)
        given = {name: self._given[name] for name in switches if name in self}
        return given | {name: self[name] for name in lengths if name in self}

    def unused(self) -> list[str]:
        """The names that nothing asked for."""
        return [name for name in self._given if name not in self.asked]


@dataclass(frozen=True)
class Options:
    """The options that a checkpoint is opened with, which `jax_ucp.open` describes.

    Where `on_conflict` says which of two copies to take, they are not compared. "float32" for
    `dequantize` decodes the states of 8-bit optimizers too.
    """

    sizes: Sizes = field(default_factory=lambda: Sizes({}))
    spec: Path | Spec | None = None
    weights_only: bool = False
    on_conflict: Literal["master", "copy"] | None = None
    dequantize: Dequantize = None
    optimizer_groups: OptimizerGroups | None = None
    model: str | None = None
    step: int | None = None

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int] | None = None,
        spec: str | os.PathLike[str] | Spec | None = None,
        weights_only: bool = False,
        on_conflict: Literal["master", "copy"] | None = None,
        dequantize: Dequantize = None,
        optimizer_groups: str | Sequence[Sequence[str]] | GroupsFunction | None = None,
        model: str | None = None,
        step: int | None = None,
    ) -> Options:
        """The options as callers give them.

        Raises SpecError, UnsupportedPath or ValueError for what cannot be meant.
        """
        if on_conflict not in (None, "master", "copy"):
            raise ValueError(f"on_conflict={on_conflict!r} should be 'master' or 'copy'")
        if not (dequantize is None or dequantize is False or dequantize in _DEQUANTIZED):
            raise ValueError(
                f"dequantize={dequantize!r}: quantised weights are refused (None), kept as parts"
                " (False), or dequantised to 'bfloat16', 'float16' or 'float32'"
            )
        rules = spec if spec is None or isinstance(spec, Spec) else local_path(spec)
        groups = checked_groups(optimizer_groups)
        return cls(
            Sizes(sizes or {}),
            rules,
            switch("weights_only", weights_only),
            on_conflict,
            dequantize,
            groups,
            _model_name(model),
            None if step is None else whole_number("step", step, least=0),
        )

    @property
    def reading(self) -> str:
        """A text of the spec and the sizes, equal in all processes that have the same; empty if
        there are none.

        Raises SpecError for a spec that cannot be read.
        """
        if not self.spec:
            return repr(((), self.sizes)) if self.sizes else ""
        from jax_ucp.shard_spec.notation import load  # brings in YAML

        return repr((load(self.spec).content, self.sizes))


def _model_name(model: object) -> str | None:
    if model is None or (isinstance(model, str) and model):
        return model
    raise ValueError(f"model={model!r:.80} should be the name of a model in the checkpoint")


def _whole(name: str, n: object, least: int = 1) -> int:
    try:
        return whole_number(f"sizes: {name}", n, least)
    except ValueError as error:
        raise SpecError(str(error)) from None


def require_used(sizes: Sizes, path: str, elsewhere: Collection[str] = ()) -> None:
    """Raise SpecError for a length that opening the checkpoint at `path` had no use for.

    `elsewhere` are names that have a use all the same, in a mapping.
    """
    strays = [name for name in sizes.unused() if name not in elsewhere]
    if not strays:
        return
    known = sorted({*sizes.asked, *elsewhere})
    takes = (
        f"the names it takes are {', '.join(known)}" if known else "it records all lengths itself"
    )
    import difflib

    near = difflib.get_close_matches(strays[0], known, n=1)
    hint = f"; perhaps {near[0]} is meant" if near else ""
    raise SpecError(f"{path} has no use for {', '.join(strays)} in sizes: {takes}{hint}")


def checked_groups(
    value: str | Sequence[Sequence[str]] | GroupsFunction | None,
) -> OptimizerGroups | None:
    """The user's statement on optimizer groups, checked for its form: a word, lists of names, or a
    function that makes them.

    Raises SpecError for anything else, and for a name that is said twice.

    >>> checked_groups([["a.weight"], []])
    (('a.weight',), ())
    """
    if value is None or callable(value):
        return value
    if isinstance(value, str) and rule_of(value):
        return value
    return _checked_lists(value, "optimizer_groups=")


def rule_of(groups: object) -> str:
    """The word for a known order of groups, without a model type; empty for any other value.

    >>> rule_of("hf-decay:llama"), rule_of("sorted")
    ('hf-decay', '')
    """
    word = groups.partition(":")[0] if isinstance(groups, str) else ""
    return word if word in _WORDS else ""


def said_of(groups: OptimizerGroups | None, names: Sequence[str]) -> SaidGroups | None:
    """The user's statement as a word or lists: a function is called with the names of the model's
    parameters.

    Raises SpecError if the function fails, or returns anything but lists of names.
    """
    if groups is None or isinstance(groups, str | tuple):
        return groups
    try:
        lists = groups(list(names))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise SpecError(f"the function given as optimizer_groups failed: {what}") from error
    return _checked_lists(lists, "the function given as optimizer_groups returned ")


def _checked_lists(value: Any, whence: str) -> Lists:
    """Lists of names as tuples. Raises SpecError for anything else, and repeated names."""
    groups = value if isinstance(value, list | tuple) else ()
    are_lists = bool(groups) and all(isinstance(group, list | tuple) for group in groups)
    if not are_lists or not all(isinstance(name, str) for group in groups for name in group):
        raise SpecError(
            f"{whence}{_short(value)}: say {MODULE_ORDER!r}, {HF_DECAY!r}, or a list for each group"
            " with the names of its parameters in order"
        )
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(groups):
        if name in seen:
            raise SpecError(
                f"optimizer_groups says {_short(name)} twice; an optimizer has a parameter once"
            )
        seen.add(name)
    return tuple(map(tuple, groups))


def word_note(groups: SaidGroups) -> str:
    """The note on states that were given to parameters as the user's statement says."""
    how = _WORDS.get(rule_of(groups), "the names of each group")
    return (
        f"optimizer states were given to parameters as optimizer_groups says, {how}: nothing in the"
        " files proves it"
    )


def remedy(words: Sequence[str], sizes: str = "", example: str = "") -> str:
    """Advice how to state whose the optimizer's states are: by one of the words that would decide;
    and by lists, if `sizes` of the groups are given, with an `example` of a name in lists.
    """
    ways = [
        f"optimizer_groups={word!r} (--optimizer-groups {word}) if {_WORDS[rule_of(word)]}"
        for word in words
    ]
    if sizes:
        otherwise = "else " if ways else ""
        ways.append(
            f"{otherwise}optimizer_groups=[[...], ...] (--optimizer-groups FILE.json), for each"
            f" group the names of its parameters in its order, such as {example!r} (in torch, names"
            f" are those of model.named_parameters()): {sizes}"
        )
    return f"to map them, say which parameters the optimizer was given: {'; '.join(ways)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
