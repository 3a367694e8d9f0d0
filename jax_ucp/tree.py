"""The tree of a checkpoint: its leaves, their paths, and the names that their arrays have on disk.

`docs/format.md` states which trees and names are possible; the functions here check it.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jax_ucp.layout.fragments import Shape

# Names that a leaf's directory may not have, because the format or stock Orbax uses them.
_OF_ORBAX = {"_METADATA", "_sharding", "_strings.json", "array_metadatas", "manifest.ocdbt", "d"}
RESERVED = frozenset(_OF_ORBAX | {"ucp.json"})

# names of files that we write beside the leaves; only stock Orbax writes `d`
_WRITTEN = frozenset(name.lower() for name in RESERVED - {"d"})

# Unicode's default ignorable code points that count as printable (DerivedCoreProperties.txt).
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

# The most elements of an axis, and bytes of an array: the limit of TensorStore's indices, which is
# below numpy's.
MAX_LENGTH = MAX_ARRAY_BYTES = (1 << 62) - 2

# zarr v3 in TensorStore, and numpy before 2, have no array of more axes.
MAX_AXES = 32

# Trees are walked recursively, by us and by JAX, and Python allows some 1,000 nested calls.
MAX_TREE_DEPTH = 256

KeyKind = Literal["dict", "list", "tuple", "attr"]

_Number = Literal["bool", "int", "float", "complex"]
LeafKind = Literal[
    "array", "jax", "numpy", "numpy_scalar", "prng_key", _Number, "str", "none", "empty"
]

Axes = str | tuple[str, ...] | None


class Key(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """A step down a tree: into a dict, list or tuple, or to a named field of any other node."""

    kind: KeyKind
    name: str | int

    def __str__(self) -> str:
        return str(self.name)


Path = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class SavedSharding:
    """The NamedSharding of a saved leaf: names and sizes of mesh axes, and the PartitionSpec."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    spec: tuple[Axes, ...]
    device_ids: tuple[int, ...] = ()


class _KeepsLabel:
    """A slot for the cached label of a leaf, which inspecting a checkpoint uses six times."""

    __slots__ = ("_label",)


@dataclass(frozen=True, slots=True)
class Leaf(_KeepsLabel):
    """A leaf of a checkpoint's tree.

    `kind` is the kind of object that was saved, as which it is restored; an `array` comes from a
    format other than JAX's, and is placed on a mesh if there is one. `name` is its key in the
    source of arrays, unique in the checkpoint, and the directory of its array in a universal
    checkpoint. `shape` and `dtype` are those of the stored array; a PRNG key is stored as its key
    data. A leaf without an array (`str`, `none`, `empty`) has its `value` here: the string, or the
    kind of the empty node. `axes` are its logical axis names, if the model gave any.
    """

    path: Path
    name: str
    kind: LeafKind
    shape: Shape = ()
    dtype: str = ""
    value: Any = None
    key_impl: str = ""
    sharding: SavedSharding | None = None
    axes: tuple[Axes, ...] | None = None

    @property
    def has_array(self) -> bool:
        return self.kind not in ("str", "none", "empty")

    @property
    def label(self) -> str:
        """The path as people write it: `params/layers/0/kernel`."""
        try:
            return self._label
        except AttributeError:
            label = "/".join([str(key.name) for key in self.path])
            object.__setattr__(self, "_label", label)
            return label

    @property
    def state(self) -> str:
        """Its state in a tree `{state: {parameter: array}}`; empty for a leaf at the top."""
        return str(self.path[0]) if len(self.path) > 1 else ""

    @property
    def param(self) -> str:
        """The name of its parameter in such a tree, with slashes between keys."""
        return "/".join(map(str, self.path[1:]))


def leaf_names(paths: Sequence[Path]) -> list[str]:
    """A directory name for each path: keys joined by '.', as stock Orbax would use, if that is
    safe.

    If two leaves would get one name, or one would get a name inside another's directory, all of
    them get escaped names instead. We find them by `ucp.json`; stock Orbax, which would silently
    return one leaf for the other, finds no array and raises an error. Names that some file system
    does not distinguish count as one name: `W` and `w`, or an accent written in two ways.

    >>> a, b, c = Key("dict", "a"), Key("dict", "b"), Key("dict", "a.b")
    >>> leaf_names([(a, b), (b,)])
    ['a.b', 'b']
    >>> leaf_names([(a, b), (c,)])
    ['%a.b', '%a%2Eb']
    >>> leaf_names([(Key("dict", "W"),), (Key("dict", "w"),)])
    ['%%57', '%w']
    """
    plain = [".".join([str(key.name) for key in path]) for path in paths]
    # names that no directory should have: not plain, of several leaves, or nested
    fold_of = {name: folded_name(name) for name in plain}
    counts = Counter(fold_of[name] for name in plain)
    parents = {name[:at] for name in counts if "/" in name for at in _slashes(name)}
    nested = parents & counts.keys()
    unsafe: set[str] = set()
    for name, fold in fold_of.items():
        # itself, or one above it, has another name below
        is_nested = bool(nested) and not nested.isdisjoint(
            [fold, *(fold[:at] for at in _slashes(fold))]
        )
        if is_nested or counts[fold] > 1 or not _is_plain(name, fold):
            unsafe.add(name)
    names = [
        _escaped(path) if name in unsafe else name for name, path in zip(plain, paths, strict=True)
    ]
    folded = [folded_name(name) for name in names]
    counts = Counter(folded)
    return [
        _escaped(path, case=True) if counts[fold] > 1 else name
        for name, fold, path in zip(names, folded, paths, strict=True)
    ]


def folded_name(name: str) -> str:
    """A text that is equal for all names which some file system does not distinguish.

    APFS, NTFS, exFAT, SMB and ext4's `casefold` do not distinguish upper and lower case, and APFS
    and ZFS the ways to write an accent; ext4 ignores Unicode's ignorable characters, and exFAT dots
    and spaces at the end.

    >>> folded_name("Ä/W") == folded_name("a\u0308/w")
    True
    """
    if name.isascii():
        folded = name.lower()
    else:
        parts = (_compatible(_IGNORABLE.sub("", part)).casefold() for part in name.split("/"))
        folded = "/".join(_compatible(part).replace("/", "?") for part in parts)
    return "/".join([part.rstrip(". ") for part in folded.split("/")])


def tree_fault(paths: Iterable[Path]) -> str | None:
    """The reason why paths cannot be those of the leaves of one tree; None if they can.

    A leaf has nothing below it, a list or a tuple has all its items, and no two keys of a node
    differ only in type.

    >>> tree_fault([(Key("dict", "a"),), (Key("dict", "a"), Key("list", 0))])
    "'a' is a leaf, but has something below it"
    >>> tree_fault([(Key("list", 0),), (Key("list", 2),)])
    'the tree itself is a list of 2 items, of which 1 is missing'
    """
    seen: set[Path] = set()
    keys_of: dict[Path, set[Key]] = {}
    for path in paths:
        if len(path) > MAX_TREE_DEPTH:
            return f"{_named(path)} is {len(path)} levels deep; {MAX_TREE_DEPTH} are the most"
        if path in seen:
            return f"{_named(path)} is there twice"
        seen.add(path)
        # the nodes above, up to the first that is there already
        for depth in reversed(range(len(path))):
            node, key = path[:depth], path[depth]
            if node in keys_of:
                keys_of[node].add(key)
                break
            keys_of[node] = {key}
    nodes = sorted(keys_of, key=len)
    faults = (_node_fault(path, keys_of[path], path in seen) for path in nodes)
    return next(filter(None, faults), None)


def _node_fault(path: Path, keys: Set[Key], leaf: bool) -> str | None:
    """The reason why a node cannot have these keys; None if it can."""
    if leaf:
        return f"{_named(path)} is a leaf, but has something below it"
    kinds = {key.kind for key in keys}
    names = {key.name for key in keys}
    if len(kinds) > 1:
        return f"{_named(path)} is said to be of several kinds: {', '.join(sorted(kinds))}"
    if len({str(name) for name in names}) < len(names):
        return f"{_named(path)} has keys that differ in type alone"
    if kinds <= {"list", "tuple"} and (lacking := set(range(len(names))) - names):
        return (
            f"{_named(path)} is a {kinds.pop()} of {len(names)} items, of which {min(lacking)} is"
            " missing"
        )
    return None


def _named(path: Path) -> str:
    return f"{'/'.join(map(str, path))!r:.200}" if path else "the tree itself"


def ambiguous_paths(paths: Iterable[Path]) -> list[list[str]]:
    """Groups of paths that stock Orbax's metadata do not distinguish, such as of keys 0 and "0"."""
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in paths:
        same[tuple(map(str, path))].append(" / ".join(repr(key.name) for key in path))
    return [group for group in same.values() if len(group) > 1]


def tree_of(leaves: Mapping[Path, Any]) -> Any:
    """Nested dicts, lists and tuples with the given leaves; any other node is a dict of its fields.

    >>> tree_of({(Key("dict", "a"), Key("tuple", 0)): 1, (Key("dict", "a"), Key("tuple", 1)): 2})
    {'a': (1, 2)}
    """
    if list(leaves) == [()]:
        return leaves[()]
    groups: dict[Key, dict[Path, Any]] = defaultdict(dict)
    for path, value in leaves.items():
        groups[path[0]][path[1:]] = value
    children = {key: tree_of(below) for key, below in groups.items()}
    kinds = {key.kind for key in children}
    if kinds <= {"list", "tuple"}:
        items = [children[key] for key in sorted(children, key=lambda key: int(key.name))]
        return tuple(items) if kinds == {"tuple"} else items
    return {key.name: child for key, child in children.items()}


def _slashes(name: str) -> list[int]:
    return [match.start() for match in re.finditer("/", name)]


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _is_plain(name: str, folded: str) -> bool:
    """Whether a leaf's directory can have the name on every file system."""
    return is_leaf_name(name) and not folded.startswith("%") and not _is_taken(folded, _WRITTEN)


def is_leaf_name(name: str) -> bool:
    """Whether a leaf's directory in a checkpoint may have the name.

    Names that only some file system does not distinguish are allowed: older saves may have them.
    """
    if _is_taken(name, RESERVED) or "\\" in name or not name.isprintable():
        return False
    for part in name.split("/"):
        if part in ("", ".", "..") or len(part.encode(errors="surrogatepass")) > 200:
            return False
    return True


def _is_taken(name: str, reserved: frozenset[str]) -> bool:
    """Whether the format, stock Orbax or TensorStore has a file or directory of the name."""
    top = name.partition("/")[0]
    if top in reserved or name.startswith(("ocdbt.process_", "ucp.", "ucp-")):
        return True
    return name.endswith(".__lock") or ".__lock/" in name


def _escaped(path: Path, case: bool = False) -> str:
    """A name that no other path has; with `case`, one that stays its own in lower case."""
    quoted = ".".join(
        # quoting never gives "%i", which distinguishes 0 from "0"
        _quoted(str(key), case) + ("%i" if isinstance(key.name, int) else "")
        for key in path
    )
    if len(quoted) > 180:
        quoted = f"{quoted[:120]}%{hashlib.sha256(quoted.encode()).hexdigest()[:32]}"
    return "%" + quoted


def _quoted(key: str, case: bool) -> str:
    quoted = urllib.parse.quote(key, safe="", errors="surrogatepass").replace(".", "%2E")
    if not case:
        return quoted
    # digits after a % are always upper case, and nothing else is
    return re.sub(r"%..|[A-Z]", lambda m: m[0] if m[0][0] == "%" else f"%{ord(m[0]):02X}", quoted)
