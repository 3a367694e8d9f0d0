"""What several tests need: arrays in memory, and parameters cut by patterns."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, MakesArrays
from jax_ucp.arrays.value import Array, joined
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import ShardingWarning
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.patterns import Averaged, Fused, Padded, Pattern, Replicated, Sharded, Unique
from jax_ucp.sharding.boxes import index_box
from jax_ucp.sharding.fit import Rule
from jax_ucp.text import visible_lines
from jax_ucp.tree import Key, Leaf, leaf_names


def in_lanes(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test, of which every third is in the default lane, and all are in the slow."""
    slow = pytest.mark.slow
    return [pytest.param(*row, marks=[slow] * (i % 3 > 0)) for i, row in enumerate(rows)]


def open_below(folder: Path) -> list[str]:
    """Files below the folder that this process holds open."""
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return [file for file in links if Path(file).is_relative_to(folder.resolve())]


def flip_bit(file: Path, at: int = -1, bit: int = 0) -> None:
    """Flip a bit of one byte of a file, of the last one by default: the file keeps its size."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


@contextlib.contextmanager
def changed(file: Path, data: bytes) -> Iterator[None]:
    """The file with other content, for a while."""
    before = file.read_bytes()
    file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(before)


def changed_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a file of JSON in place, or for what `change` returns."""
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps(change(content) or content))


class MemoryStore(MakesArrays):
    """Arrays in a dict; a source and a store whose contents a test can look at."""

    def __init__(self, data: Mapping[str, np.ndarray]):
        self.data = dict(data)
        self.reads: list[tuple[str, Box]] = []

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {key: ArrayInfo(a.shape, a.dtype) for key, a in self.data.items()}

    def read(self, key: str, box: Box) -> np.ndarray:
        self.reads.append((key, box))
        return self.data[key][box.index]

    def write(self, key: str, box: Box, data: np.ndarray) -> None:
        self.data[key][box.index] = data


@dataclass(frozen=True)
class Consolidated:
    """A parameter of named shards: `keys[i]` is shard i of `layout`."""

    layout: ParamLayout
    keys: Sequence[str]


def evaluated(store: ArraySource, *levels: Mapping[str, Consolidated]) -> Evaluated:
    """Joined arrays; those of a level may be made of stored arrays, or of a level before."""
    arrays: dict[str, Array] = dict(expressions(store))
    for level in levels:
        for name, param in level.items():
            inputs = [arrays[key] for key in param.keys]
            arrays[name] = joined(name, param.layout, inputs, param.keys)
    return Evaluated(arrays)


def numbered(shape: Sequence[int], dtype: type = np.int64) -> np.ndarray:
    """An array whose elements are all different."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def cut_by(layout: ParamLayout, whole: np.ndarray, padding: int = -1) -> list[np.ndarray]:
    """The shards of `whole` under `layout`; elements that no part has are `padding`."""
    shards = [np.full(shape, padding, whole.dtype) for shape in layout.shards]
    for f in layout.parts:
        shards[f.input][f.source_box.index] = whole[f.target_box.index].reshape(f.source_box.shape)
    return shards


def by_hand(pattern: Pattern, whole: np.ndarray, ranks: int) -> list[np.ndarray]:
    """The shards, cut with numpy as the pattern's description says, without any of our geometry."""
    match pattern:
        case Unique() | Replicated() | Averaged():
            return [whole] * ranks
        case Sharded(axes=axes, grid=grid):
            shards = [whole]
            for axis, n in zip(axes, grid or (ranks,), strict=True):
                shards = [part for shard in shards for part in np.array_split(shard, n, axis)]
            return shards
        case Fused(axis=axis, parts=parts, whole=kept, groups=groups):
            rows = {name: n if isinstance(n, int) else sum(n) for name, n in parts.items()}
            edges = np.cumsum(list(rows.values()))[:-1]
            split = dict(zip(rows, np.split(whole, edges, axis), strict=True))
            if groups:
                pieces = {name: np.split(part, groups, axis) for name, part in split.items()}
                each = [pieces[name][g] for g in range(groups) for name in rows]
                stream = np.concatenate(each, axis)
                return np.array_split(stream, ranks, axis)
            shards = []
            for rank in range(ranks):
                mine = []
                for name, part in split.items():
                    size = parts[name]
                    edges = np.cumsum(size)[:-1] if isinstance(size, tuple) else ranks
                    mine.append(part if name in kept else np.split(part, edges, axis)[rank])
                shards.append(np.concatenate(mine, axis))
            return shards
        case Padded(pattern=inner, axis=axis, size=size, padded=padded):
            assert padded is not None
            widths = [(0, padded - size if a == axis else 0) for a in range(whole.ndim)]
            return by_hand(inner, np.pad(whole, widths, constant_values=-1), ranks)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """A box of at least one element of an array of `shape`; all of an axis that has none."""
    start = [draw(st.integers(0, max(0, n - 1))) for n in shape]
    stop = [draw(st.integers(min(n, a + 1), n)) for a, n in zip(start, shape, strict=True)]
    return Box(tuple(start), tuple(stop))


def boxes_of_hosts(mesh: Mesh, shape: Sequence[int], spec: Any, hosts: int) -> list[set[Box]]:
    """The distinct boxes that each of so many hosts needs of an array."""
    indices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(tuple(shape))

    def boxes(devices):
        return {index_box(indices[d] or (), tuple(shape)) for d in devices}

    return [boxes(devices) for devices in np.split(mesh.devices.ravel(), hosts)]


def mesh_of(*shape: int, names: Sequence[str] = ("data", "model")) -> Mesh:
    """So many of the devices as a mesh of this shape."""
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), tuple(names)[: len(shape)])


def require_memory(kind: str | None) -> None:
    """Skip the test if the devices have no memory of that kind."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if kind not in {None, *kinds}:
        pytest.skip(f"these devices have no {kind}")


def contents_of(tree: Mapping[str, Mapping[str, np.ndarray]], **more: Any) -> Contents:
    """Arrays by state and name as an opened checkpoint."""
    paths = [(Key("dict", state), Key("dict", name)) for state in tree for name in tree[state]]
    names = leaf_names(paths)
    data = dict(zip(names, (a for arrays in tree.values() for a in arrays.values()), strict=True))
    arrays = zip(paths, names, (data[name] for name in names), strict=True)
    leaves = [Leaf(p, n, "array", a.shape, a.dtype.name) for p, n, a in arrays]
    return Contents("memory", "nowhere", leaves, MemoryStore(data), **more)


Tree = Mapping[str, Mapping[str, np.ndarray]]


def memory(tree: Tree, extras: Mapping[str, Any] | None = None) -> Checkpoint:
    """A checkpoint in memory, of arrays by state and parameter."""
    return Checkpoint(contents_of(tree, extras=extras or {}))


def faults_of(checkpoint: Checkpoint) -> list[str]:
    return [fault for _, fault in checkpoint.verify() if fault]


def restored_on(mesh: Mesh, checkpoint: Checkpoint, rules: Sequence[Rule] = ()) -> Any:
    """The checkpoint on a mesh; it is warned of what the plan gives up, and of nothing else."""
    with warned_of(checkpoint.plan(mesh=mesh, rules=rules).notes):
        return checkpoint.restore(mesh=mesh, rules=rules)


def warned_of(notes: Sequence[str]) -> Any:
    """Expects a ShardingWarning where there are notes, which else would be an error."""
    if not notes:
        return contextlib.nullcontext()
    return pytest.warns(ShardingWarning, match=re.escape(visible_lines(notes[0])))


def differences(source: Checkpoint, target: Checkpoint, states: Collection[str] = ()) -> list[str]:
    """The labels of leaves that one of them lacks, or of which a bit differs, of these `states`."""
    want = {leaf.label for leaf in source.leaves if not states or str(leaf.path[0]) in states}
    found = set(target)
    same = (label for label in want & found if same_bits(source.read(label), target.read(label)))
    return sorted((want | found) - set(same))


def comparable(leaf: Any) -> Any:
    """What of a leaf must be the same after a restore: kind, dtype, shape and every bit."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), comparable(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray):
        array = np.asarray(leaf)
        return str(array.dtype), array.shape, array.tobytes()
    return type(leaf), leaf


def tree_differences(found: Any, want: Any) -> list[str]:
    """Where two trees differ, in any node or any bit; host and device arrays are the same."""
    flat = functools.partial(jax.tree_util.tree_flatten_with_path, is_leaf=lambda x: x is None)
    pairs = [flat(tree) for tree in (found, want)]
    (found_leaves, found_tree), (want_leaves, want_tree) = pairs
    if found_tree != want_tree:
        return [f"{found_tree} is not {want_tree}"]
    pairs = zip(found_leaves, want_leaves, strict=True)
    other = [path for (path, a), (_, b) in pairs if comparable(a) != comparable(b)]
    return [jax.tree_util.keystr(path) for path in other]


@st.composite
def grids(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """The boxes of a grid that cuts an array anywhere; equal cuts make chunks without elements."""
    cuts = [sorted([0, n, *draw(st.lists(st.integers(0, n), max_size=3))]) for n in shape]
    spans = [list(itertools.pairwise(axis)) for axis in cuts]
    boxes = itertools.product(*spans)
    return [Box(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in boxes]


def tree_of_files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def digests(folder: Path) -> dict[str, str]:
    files = tree_of_files(folder).items()
    return {name: hashlib.sha256(data).hexdigest() for name, data in files}
