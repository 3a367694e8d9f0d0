"""A first draft of a mapping, from the names and shapes of a checkpoint and of a model.

What shapes and names leave open is a comment in the draft, for the user to decide: nothing is
guessed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.layout.fragments import Shape

# More ways to lay out the axes of one array are not tried.
MOST_WAYS = 4096
# Of candidates, and of parameters in a comment, so many are named.
MOST_NAMED = 4
# Abbreviations of torch's names that JAX's write out.
_SAME = {"q": "query", "k": "key", "v": "value", "o": "out", "embed": "embedding"}
_KINDS = {"weight", "kernel", "w", "scale", "embedding", "proj", "layers", "layer", "model"}
_AXIS = re.compile(r"\bd\d+[a-h]?\b")
_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


@dataclass(frozen=True)
class _Family:
    """Arrays whose names differ in numbers alone; `counts` is how many values each number has."""

    name: str
    shape: Shape
    counts: tuple[int, ...]

    @property
    def axes(self) -> Shape:
        return (*self.counts, *self.shape)

    @property
    def words(self) -> set[str]:
        found: list[str] = re.findall(r"[a-z]+|\d+", re.sub(r"\{\w+\}", "", self.name).lower())
        return {_SAME.get(word, word) for word in found} - _KINDS


def mapping_draft(params: Mapping[str, Shape], leaves: Mapping[str, Shape]) -> str:
    """The draft as a YAML file: a rule where only one is possible, a comment where it is not.

    Args:
        params: the shapes of the checkpoint's parameters by name.
        leaves: those of the model's leaves, by their names with slashes.
    """
    sources, targets = _families(params), _families(leaves)
    ways = {
        (source.name, target.name): found
        for source, target in itertools.product(sources, targets)
        if (found := _ways(source, target))
    }
    pairs = _pairs(sources, targets, ways)
    rules = [_rule(source, target, ways[source.name, target.name]) for source, target in pairs]
    open_sources = [one for one in sources if one not in {source for source, _ in pairs}]
    open_targets = [one for one in targets if one not in {target for _, target in pairs}]
    comments = [_open(one, targets, ways) for one in open_sources]
    comments += [f"# open: {one.name} {list(one.axes)} of the model" for one in open_targets]
    title = "# A draft from names and shapes: compare logits once with those of the original model."
    decided = [rule for rule in rules if not rule.startswith("#")]
    left = len(sources) - len(decided)
    count = f"# {len(decided)} rules; {left} kinds of parameters are left open, below."
    body = "leaves:" if decided else "leaves: []"
    lengths = {name: name[1:].rstrip("abcdefgh") for rule in rules for name in _AXIS.findall(rule)}
    listed = ", ".join(f"{name}: {length}" for name, length in sorted(lengths.items()))
    return "\n".join([title, count, f"sizes: {{{listed}}}", body, *rules, *comments]) + "\n"


def _families(shapes: Mapping[str, Shape]) -> list[_Family]:
    """Arrays in families by name and shape; layers whose numbers are not all there stay alone."""
    members: dict[tuple[str, Shape], list[tuple[str, ...]]] = {}
    for name, shape in shapes.items():
        members.setdefault((_NUMBER.sub("#", name), shape), []).append(tuple(_NUMBER.findall(name)))
    families: list[_Family] = []
    for (pattern, shape), numbers in members.items():
        counts = tuple(len(set(column)) for column in zip(*numbers, strict=True))
        full = {tuple(map(str, at)) for at in itertools.product(*map(range, counts))}
        if full == set(numbers):
            families.append(_Family(_with_numbers(pattern, counts), shape, counts))
        else:
            named = [_filled(pattern, at) for at in numbers]
            families += [_Family(name, shape, ()) for name in named]
    return families


def _with_numbers(pattern: str, counts: Sequence[int]) -> str:
    return _filled(pattern, [f"{{n{i}of{count}}}" for i, count in enumerate(counts)])


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    texts = pattern.split("#")
    return "".join(
        itertools.chain.from_iterable(itertools.zip_longest(texts, numbers, fillvalue=""))
    )


def _ways(source: _Family, target: _Family) -> list[tuple[str, str]]:
    """The pairs of axes by which one can be the other; none where shapes do not allow it."""
    if target.counts and target.counts != source.counts:
        return []
    stacked = () if target.counts else source.counts
    dims = (*stacked, *source.shape)
    if math.prod(dims) != math.prod(target.shape) or len(dims) ** len(target.shape) > MOST_WAYS:
        return []
    if len(target.shape) < len(dims):
        return []
    found: list[tuple[str, str]] = []
    for owners in itertools.product(range(len(dims)), repeat=len(target.shape)):
        parts = [[i for i, owner in enumerate(owners) if owner == dim] for dim in range(len(dims))]
        lengths = [math.prod(target.shape[i] for i in part) for part in parts]
        whole = all(len(part) == 1 for part in parts[: len(stacked)])
        if whole and all(parts) and lengths == list(dims):
            found.append(_axes(source, target, parts, len(stacked)))
    return found


def _axes(
    source: _Family, target: _Family, parts: Sequence[Sequence[int]], stacked: int
) -> tuple[str, str]:
    """The axes of both sides; a stacked axis has the name of its number."""
    names = [
        f"d{length}" + "abcdefgh"[target.shape[:i].count(length)] * (length in target.shape[:i])
        for i, length in enumerate(target.shape)
    ]
    for number, (at,) in enumerate(parts[:stacked]):
        names[at] = f"n{number}of{source.counts[number]}"
    of_source = [[names[i] for i in part] for part in parts[stacked:]]
    texts = [part[0] if len(part) == 1 else f"({' '.join(part)})" for part in of_source]
    return " ".join(texts), " ".join(names)


def _pairs(
    sources: Sequence[_Family],
    targets: Sequence[_Family],
    ways: Mapping[tuple[str, str], object],
) -> list[tuple[_Family, _Family]]:
    """The pairs of which each has no other candidate: by shape, or by words that they share."""
    fitting = [(s, t) for s, t in itertools.product(sources, targets) if (s.name, t.name) in ways]
    likeness = {(s, t): len(s.words & t.words) for s, t in fitting}

    def best(one: _Family, side: int) -> _Family | None:
        mine = [pair for pair in fitting if pair[side] == one]
        most = max((likeness[pair] for pair in mine), default=0)
        first = [pair for pair in mine if likeness[pair] == most]
        return first[0][1 - side] if len(first) == 1 and (most or len(mine) == 1) else None

    return [(s, t) for s, t in fitting if best(s, 0) == t and best(t, 1) == s]


def _rule(source: _Family, target: _Family, ways: Sequence[tuple[str, str]]) -> str:
    """The rule of a pair; where several ways fit, all of them as comments."""
    texts = [_rule_text(source, target, *way) for way in ways[:MOST_NAMED]]
    if len(ways) == 1:
        return texts[0]
    lines = "\n".join(texts).replace("\n", "\n# ")
    title = f"# open: axes of one length fit in {len(ways)} ways; which is right, no shape says"
    return f"{title}\n# {lines}"


def _rule_text(source: _Family, target: _Family, axes: str, leaf: str) -> str:
    name, leaf_name = json.dumps(source.name), json.dumps(target.name)
    return (
        f"- param: {name}\n  axes: {json.dumps(axes)}\n  leaf: {{{leaf_name}: {json.dumps(leaf)}}}"
    )


def _open(
    source: _Family, targets: Sequence[_Family], ways: Mapping[tuple[str, str], object]
) -> str:
    fitting = [one.name for one in targets if (source.name, one.name) in ways]
    named = " or ".join(fitting[:MOST_NAMED]) or "nothing in the model"
    more = f" or {len(fitting) - MOST_NAMED} more" if len(fitting) > MOST_NAMED else ""
    return f"# open: {source.name} {list(source.shape)} fits {named}{more}"
