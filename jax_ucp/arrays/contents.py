"""An opened checkpoint of any format: its leaves, where their bytes are, and an inventory of the
rest.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from jax_ucp.arrays.checks import Check, Extent, LeafClaim, checks_of, passed_on, verdicts
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.arrays.protocol import ArraySource, Piece
from jax_ucp.arrays.value import Array, users
from jax_ucp.errors import QuantizedWeights
from jax_ucp.files.path import FilePath
from jax_ucp.files.source_files import SourceFiles
from jax_ucp.layout.box import Box
from jax_ucp.tree import Key, Leaf, leaf_names

Status = Literal["mapped", "extra", "skipped"]

# the state of the parts of quantised weights, where the user asked for them as they are stored
STORED = "stored"
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A stored item, and its status in the opened checkpoint.

    `where` is the file and the place in it. `reason` is what the item became, or why it was left
    out.
    """

    where: str
    what: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that is stored as several tensors, none of which is its value.

    `name` is the label that the weight would have. `parts` are the labels of its leaves by their
    role: `codes`, which stand for the numbers, and roles such as `scale_inv` and `qzeros`, named as
    the format names them. `fault` describes missing parts, and `unread` is the reason why the
    numbers are not computed here; both are empty if there is none.
    """

    scheme: str
    name: str
    parts: Mapping[str, str]
    fault: str = ""
    unread: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.scheme}:"
            f" {', '.join(self.parts.values())}{'; ' * bool(self.fault)}{self.fault})"
        )


@dataclass(frozen=True, slots=True)
class About:
    """The writer, training step and parallelism that a checkpoint's files record; empty if they do
    not.

    `writer` names the program, its version and its layout. `step` is the training step.
    `parallelism` has the degrees that the tensors were cut by, such as {"tp": 2, "pp": 1, "dp": 4}.
    """

    writer: str = ""
    step: int | None = None
    parallelism: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """A checkpoint of any format, opened: nothing but metadata has been read.

    `leaves` name arrays of `arrays`. `inventory` has every stored item once. `groups` are the
    optimizer settings of the parameters, where the checkpoint names them. `source` describes the
    checkpoint that a universal checkpoint was imported from. `claims` are what the files state
    twice, or have checksums of, each with the leaves that rest on it. `files` are the source files;
    a caller that relies on what it read checks at the end that they are unchanged. `quantized` are
    the weights that are stored as several tensors; `require_values` refuses their parts as weights.
    `about` is for people, and decides nothing. `companions` are the files that belong to the model,
    such as its tokenizer, by their names in the model's folder. `reading` records the user's
    options on how stored tensors form parameters, or which of them are the parameters, because no
    other field may show them.

    It is a value: pickled, it is read in another process as in this one, from the same files.
    """

    format: str
    path: str
    leaves: Sequence[Leaf]
    arrays: ArraySource
    inventory: Sequence[Item] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    notes: Sequence[str] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    claims: Iterable[LeafClaim] = ()
    files: SourceFiles = field(default_factory=SourceFiles)
    quantized: Sequence[QuantizedWeight] = ()
    about: About = About()
    companions: Mapping[str, FilePath] = field(default_factory=dict)
    reading: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.claims, Iterator):
            raise TypeError("claims= can be gone through once only: give a list, or `Claims`")

    @property
    def first_source(self) -> dict[str, Any]:
        """`source`, or, of what was imported from nothing else, the format and the name."""
        return dict(self.source) or {"format": self.format, "name": Path(self.path).name}

    @property
    def origin(self) -> dict[str, Any]:
        """The provenance that a copy records: `first_source`, and the fields of `about` that are
        set.
        """
        about = {
            "writer": self.about.writer,
            "step": self.about.step,
            "parallelism": dict(self.about.parallelism),
        }
        said = {name: value for name, value in about.items() if value not in ("", None, {})}
        return said | self.first_source

    def with_leaves(
        self, leaves: Sequence[tuple[Leaf, Array | None]], stored: Mapping[str, Array]
    ) -> Contents:
        """The checkpoint with other leaves, whose names follow from their paths, and their arrays.

        These are made of arrays of `stored`, which has those here by name: the claims on which
        the leaves rest go with them.
        """
        names = leaf_names([leaf.path for leaf, _ in leaves])
        named = list(zip(names, leaves, strict=True))
        arrays = {name: array for name, (_, array) in named if array is not None}
        return replace(
            self,
            leaves=[replace(leaf, name=name) for name, (leaf, _) in named],
            arrays=Evaluated(arrays),
            claims=passed_on(self.claims, users(arrays, stored)),
        )

    def checks(self, extent: Extent) -> Iterator[Check]:
        """The work of proving what the files state, of a sample or of all that they hold."""
        return checks_of(self.claims, extent)

    def proofs(self, leaves: Collection[str], extent: Extent) -> Iterator[Check]:
        """The checks on which any of the leaves with these names depends; of all there is also the
        hashes of files that their place states.

        Raises ValueError if `extent` is neither "sample" nor "full".
        """
        if extent not in get_args(Extent):
            raise ValueError(f'verify={extent!r} is neither "sample" nor "full"')
        asked = (check for check in self.checks(extent) if not check.leaves.isdisjoint(leaves))
        if extent == "sample":
            return asked
        from jax_ucp.arrays.digests import digest_checks

        return chain(asked, digest_checks(self.files, frozenset(leaves)))

    def locate(self, leaf: Leaf) -> list[Piece]:
        """The blocks of files that hold the bytes of a leaf; empty if the leaf has no array."""
        if not leaf.has_array:
            return []
        return list(self.arrays.locate(leaf.name, Box.whole(leaf.shape)))

    def with_reasons(self, reasons: Mapping[str, str], skipped: Container[str] = ()) -> list[Item]:
        """The inventory, in which the stored items of some leaves have other reasons.

        Args:
            reasons: The new reasons by the label of the leaf.
            skipped: The labels of those leaves whose items become skipped.
        """
        label_of: dict[str, str] = {}
        for leaf in self.leaves:
            if leaf.label in reasons:
                label_of |= dict.fromkeys((p.name for p in self.locate(leaf)), leaf.label)
        inventory: list[Item] = []
        for item in self.inventory:
            if label := label_of.get(item.where):
                status = "skipped" if label in skipped else item.status
                item = replace(item, status=status, reason=reasons[label])
            inventory.append(item)
        return inventory

    def identity(self) -> tuple[Any, ...]:
        """A tuple that is equal for two openings of one source: the format, the source, the files
        as they were opened, the status of each item, the dtypes of the leaves, and the reading.

        It includes the open options, because they change the data: if a tensor is stored twice,
        they select one copy; and the same slices form another parameter by another spec.
        """
        items = sorted((item.where, item.status, item.reason) for item in self.inventory)
        dtypes = [(leaf.name, leaf.dtype) for leaf in self.leaves]
        files = self.files.identities()
        return self.format, self.source, files, items, dtypes, self.reading

    def verify(self) -> Iterator[tuple[str, str | None]]:
        """Compare all data that is stored twice or has a checksum. Yields (label of the check, its
        fault or None).
        """
        return verdicts(self.checks("full"), self.files.is_remote)


def require_values(contents: Contents, leaves: Iterable[Leaf]) -> None:
    """Raise QuantizedWeights if one of the leaves is a part of a quantised weight, and so is not a
    weight by itself.
    """
    if not contents.quantized:
        return
    asked = {leaf.label for leaf in leaves}
    if met := [
        weight for weight in contents.quantized if not asked.isdisjoint(weight.parts.values())
    ]:
        raise QuantizedWeights(
            f"{contents.path}: {_named(met)}. What is stored of one means something only together,"
            f" and is not read as weights unless you say so: {how_to_open(met)}"
        )


def how_to_open(weights: Sequence[QuantizedWeight]) -> str:
    """The advice of an error message: the options that open these quantised weights."""
    parts = (
        "dequantize=False (--no-dequantize): then the parts come as they are stored, under"
        f" `{STORED}`"
    )
    unread = [weight for weight in weights if weight.unread]
    if unread:
        why = next((weight.unread for weight in unread if weight.unread != weight.fault), "")
        computed = ". The numbers that they stand for are not computed: " * bool(why)
        return f"open with {parts}{computed}{why}"
    return (
        "open with dequantize='bfloat16' or dequantize='float32' (--dequantize) for the numbers"
        f" that they stand for, or with {parts}"
    )


def require_weights(contents: Contents) -> None:
    """Raise QuantizedWeights if any weight is quantised, even if its parts were opened under
    `stored`.
    """
    require_values(contents, contents.leaves)
    kept = list(filter(_is_part, contents.leaves))
    if kept and contents.source.get("dequantize") is False:
        raise QuantizedWeights(
            f"{contents.path}: {len(kept)} tensors, the first {kept[0].label}, are parts of"
            " quantised weights, kept as they are stored. There are no weights that could be"
            " mapped or exported; restore, read and save keep the parts, and a mapping may say by"
            f" `{STORED}/NAME` where each belongs. Open the original with dequantize='bfloat16' or"
            " dequantize='float32' (--dequantize)"
        )


def parts_as_parameters(contents: Contents) -> Contents:
    """The checkpoint with each part of a quantised weight as a parameter `stored/NAME`, for a
    mapping that places codes and scales.
    """
    leaves = [
        replace(leaf, path=(Key("dict", "param"), *leaf.path)) if _is_part(leaf) else leaf
        for leaf in contents.leaves
    ]
    return replace(contents, leaves=leaves)


def _is_part(leaf: Leaf) -> bool:
    return bool(leaf.path) and leaf.path[0].name == STORED


def _named(weights: Sequence[QuantizedWeight]) -> str:
    more = f" and {len(weights) - _NAMED} more" if len(weights) > _NAMED else ""
    return f"{len(weights)} weights are quantised: " + ", ".join(map(str, weights[:_NAMED])) + more
