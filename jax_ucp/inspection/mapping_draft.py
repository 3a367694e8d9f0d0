"""A first draft of a mapping, with comments where shapes and names do not decide."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.layout.fragments import Shape

# The most ways to lay out the axes of one array that are tried.
MOST_WAYS = 4096
# The most candidates, and ways, that a comment lists.
MOST_NAMED = 4
# Abbreviations in torch's names that are written out in JAX's.
_SAME = {"q": "query", "k": "key", "v": "value", "o": "out", "embed": "embedding"}
_KINDS = {"weight", "kernel", "w", "scale", "embedding", "proj", "layers", "layer", "model"}
# Suffixes that distinguish axes of one length: d64, d64b, d64c. Arrays of more axes are not tried.
_SUFFIXES = ("", *"bcdefgh")
_AXIS = re.compile(r"\b(d(\d+)[a-h]?)\b")
_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
_TITLE = "# A draft from names and shapes: compare logits once with those of the original model."


@dataclass(frozen=True)
class _Family:
    """Arrays whose names differ only in numbers, of which each has `counts[i]` values."""

    name: str
    shape: Shape
    counts: tuple[int, ...]

    @property
    def axes(self) -> Shape:
        return (*self.counts, *self.shape)

    @property
    def words(self) -> set[str]:
        plain = re.sub(r"\{\w+\}", "", self.name).lower()
        words: list[str] = re.findall(r"[a-z]+|\d+", plain)
        return {_SAME.get(word, word) for word in words} - _KINDS


@dataclass(frozen=True)
class _Fit:
    """A source and a target whose shapes fit, and the possible axes of both, as `ways`."""

    source: _Family
    target: _Family
    ways: tuple[tuple[str, str], ...]
    shared_words: int

    @property
    def is_decided(self) -> bool:
        return len(self.ways) == 1


def mapping_draft(params: Mapping[str, Shape], leaves: Mapping[str, Shape]) -> str:
    """The draft as a YAML file: a rule where only one is possible, else a comment.

    Args:
        params: the shapes of the checkpoint's parameters by name.
        leaves: the shapes of the model's leaves, by their names with slashes.
    """
    sources, targets = _families(params), _families(leaves)
    fits = [
        _Fit(source, target, ways, len(source.words & target.words))
        for source, target in itertools.product(sources, targets)
        if (ways := tuple(_ways(source, target)))
    ]
    pairs = _pairs(fits)
    decided = sum(fit.is_decided for fit in pairs)
    count = f"# {decided} rules; {len(sources) - decided} kinds of parameters are left open, below."
    rules = "\n".join(map(_rule, pairs))
    lengths = itertools.starmap("{}: {}".format, sorted(set(_AXIS.findall(rules))))
    sizes = f"sizes: {{{', '.join(lengths)}}}"
    body = "leaves:" if decided else "leaves: []"
    # each family, of both sides, that no rule names
    comments: list[str] = []
    for source in itertools.filterfalse({fit.source for fit in pairs}.__contains__, sources):
        candidates = [fit.target.name for fit in fits if fit.source == source]
        shown = candidates[:MOST_NAMED]
        if more := len(candidates) - len(shown):
            shown.append(f"{more} more")
        listed = " or ".join(shown) or "nothing in the model"
        comments.append(f"# open: {source.name} {list(source.shape)} fits {listed}")
    for target in itertools.filterfalse({fit.target for fit in pairs}.__contains__, targets):
        comments.append(f"# open: {target.name} {list(target.axes)} of the model")
    return "\n".join(filter(None, [_TITLE, count, sizes, body, rules, *comments])) + "\n"


def _families(shapes: Mapping[str, Shape]) -> list[_Family]:
    """The arrays as families by name and shape; an array is alone if numbers are missing."""
    members: dict[tuple[tuple[str, ...], Shape], list[Sequence[str]]] = defaultdict(list)
    for name, shape in shapes.items():
        members[tuple(_NUMBER.split(name)), shape].append(_NUMBER.findall(name))
    families: list[_Family] = []
    for (texts, shape), numbers in members.items():
        counts = _counts(numbers)
        if counts is None:
            families += [_Family(_filled(texts, each), shape, ()) for each in numbers]
        else:
            names = itertools.starmap("{{n{}of{}}}".format, enumerate(counts))
            families.append(_Family(_filled(texts, list(names)), shape, counts))
    return families


def _counts(numbers: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """The number of values of each number, if all combinations from 0 on exist; else None."""
    columns = list(map(set, zip(*numbers, strict=True)))
    counts = tuple(map(len, columns))
    from_zero = [set(map(str, range(count))) for count in counts]
    return counts if math.prod(counts) == len(numbers) and columns == from_zero else None


def _filled(texts: Sequence[str], numbers: Sequence[str]) -> str:
    pairs = itertools.zip_longest(texts, numbers, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs))


def _ways(source: _Family, target: _Family) -> Iterator[tuple[str, str]]:
    """The axes of source and target, for each way in which their shapes fit."""
    if target.counts not in ((), source.counts):
        return
    stacked = () if target.counts else source.counts
    shape, lengths = target.shape, (*stacked, *source.shape)
    is_too_large = len(shape) > len(_SUFFIXES) or len(lengths) ** len(shape) > MOST_WAYS
    if is_too_large or math.prod(shape) != math.prod(lengths):
        return
    # each axis of the target belongs to one axis of the source, whose length is their product
    for owners in itertools.product(range(len(lengths)), repeat=len(shape)):
        groups: list[list[int]] = [[] for _ in lengths]
        products = [1] * len(lengths)
        for axis, owner in enumerate(owners):
            groups[owner].append(axis)
            products[owner] *= shape[axis]
        are_single = {1}.issuperset(map(len, groups[: len(stacked)]))
        if all(groups) and products == [*lengths] and are_single:
            yield _axes(target, groups, stacked)


def _axes(
    target: _Family, groups: Sequence[Sequence[int]], stacked: Sequence[int]
) -> tuple[str, str]:
    """The axes of both sides; a stacked axis has the name of its number in the source's name."""
    names = [
        f"d{length}{_SUFFIXES[target.shape[:i].count(length)]}"
        for i, length in enumerate(target.shape)
    ]
    for number, count in enumerate(stacked):
        (axis,) = groups[number]
        names[axis] = f"n{number}of{count}"
    of_source = [" ".join(names[axis] for axis in group) for group in groups[len(stacked) :]]
    grouped = [f"({axes})" if " " in axes else axes for axes in of_source]
    return " ".join(grouped), " ".join(names)


def _pairs(fits: Sequence[_Fit]) -> list[_Fit]:
    """The fits that share more words than any other fit of their source or their target."""
    of_source: dict[_Family, list[_Fit]] = defaultdict(list)
    of_target: dict[_Family, list[_Fit]] = defaultdict(list)
    for fit in fits:
        of_source[fit.source].append(fit)
        of_target[fit.target].append(fit)

    def is_best(fit: _Fit, rivals: Sequence[_Fit]) -> bool:
        return all(each is fit or each.shared_words < fit.shared_words for each in rivals)

    best_of_sources = [fit for mine in of_source.values() for fit in mine if is_best(fit, mine)]
    return [fit for fit in best_of_sources if is_best(fit, of_target[fit.target])]


def _rule(fit: _Fit) -> str:
    """The rule for a fit; if there are several ways, comments with the first of them."""
    name, leaf_name = json.dumps(fit.source.name), json.dumps(fit.target.name)
    texts = [
        f"- param: {name}\n  axes: {json.dumps(axes)}\n  leaf: {{{leaf_name}: {json.dumps(leaf)}}}"
        for axes, leaf in fit.ways[:MOST_NAMED]
    ]
    if fit.is_decided:
        return texts[0]
    lines = "\n".join(texts).replace("\n", "\n# ")
    title = f"# open: axes of one length fit in {len(fit.ways)} ways; which is right, no shape says"
    return f"{title}\n# {lines}"
