"""Links to the arrays of any checkpoint: runs of elements stay in its files, the rest is copied.

Stock Orbax reads both by one index. TensorStore takes no `..` in a key, so the files lie below the
link's folder, or on a disk below a symbolic link in it. Facts: `tensorstore/kvstore/file/util.cc`
and `tensorstore/kvstore/ocdbt/io/indirect_data_kvstore_driver.cc`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jax_ucp.arrays.budget import DEFAULT_BUDGET, run_bounded
from jax_ucp.arrays.checks import Claims, LeafClaim, require
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.arrays.strided_blocks import StridedBlocks
from jax_ucp.arrays.value import Array
from jax_ucp.errors import LayoutError, UnsupportedPath
from jax_ucp.files.crc import crc32
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.ranges import FileRange
from jax_ucp.layout.runs import RunGrid, run_grid
from jax_ucp.text import html_table
from jax_ucp.tree import Leaf
from jax_ucp.universal.copy import CopyBlock, CopyPlan, copy, plan_copy, require_target
from jax_ucp.universal.linked import CRC, LINK_FOLDER, Linked, source_folders
from jax_ucp.universal.metadata import LinkedArray, SourceFile
from jax_ucp.universal.ocdbt import MAX_ENTRIES
from jax_ucp.universal.store import array_info
from jax_ucp.universal.validation import storable


@dataclass(frozen=True, repr=False)
class LinkPlan:
    """The arrays of a checkpoint that a link leaves in their `files`, and the copy of the others,
    of which `copied` has the reasons by name.
    """

    contents: Contents
    files: Sequence[tuple[FilePath, FileInfo]]
    copied: Mapping[str, str]
    copy: CopyPlan

    @property
    def linked(self) -> Linked:
        """The arrays that stay in their files."""
        return self.copy.linked

    @property
    def linked_bytes(self) -> int:
        """The bytes that stay where they are."""
        return sum(info.nbytes for info in self.linked.infos.values())

    @property
    def copied_bytes(self) -> int:
        """The bytes that are written to the target."""
        return self.copy.write_bytes

    @property
    def reasons(self) -> dict[str, int]:
        """The number of arrays that are copied, by reason."""
        return dict(Counter(self.copied.values()).most_common())

    def __repr__(self) -> str:
        return (
            f"<a link of {len(self.linked.arrays)} arrays, {self.linked_bytes:,} bytes, in"
            f" {len(self.files)} files; {len(self.copied)} arrays, {self.copied_bytes:,} bytes,"
            " are copied>"
        )

    def _repr_html_(self) -> str:
        return html_table(repr(self), ("copied", "because"), [*self.copied.items()])


def plan_link(contents: Contents, target: FilePath, budget_bytes: int = DEFAULT_BUDGET) -> LinkPlan:
    """The arrays that can be linked from `target`, and a plan for the copy of the others.

    Raises UnsupportedPath for files out of reach, FileExistsError where it is in use.
    """
    blocks, arrays = StridedBlocks(), expressions(contents.arrays)
    grids: dict[str, RunGrid] = {}
    copied: dict[str, str] = {}
    for leaf in contents.leaves:
        if leaf.has_array:
            try:
                grids[leaf.name] = _grid(leaf, arrays[leaf.name], blocks)
            except LayoutError as error:
                copied[leaf.name] = str(error)
    if sum(len(grid.places) + 1 for grid in grids.values()) > MAX_ENTRIES:
        raise LayoutError(
            f"{contents.path}: its arrays lie in more than {MAX_ENTRIES} runs, which no index has:"
            " convert it"
        )
    names, folders = _names(contents, target, [path for path, _ in blocks.files])
    sources = [
        SourceFile(name, info.size, info.version)
        for name, (_, info) in zip(names, blocks.files, strict=True)
    ]
    linked = Linked(
        {name: LinkedArray(grid.chunk, grid.order, grid.places) for name, grid in grids.items()},
        {
            leaf.name: array_info(leaf.shape, leaf.dtype)
            for leaf in contents.leaves
            if leaf.name in grids
        },
        sources,
    )
    require_target(contents, target, source_folders(sources))
    leaves = [leaf for leaf in contents.leaves if leaf.name in copied]
    plan = plan_copy(replace(contents, leaves=leaves), budget_bytes)
    plan = replace(plan, linked=linked, folders=folders)
    return LinkPlan(contents, blocks.files, copied, plan)


def _grid(leaf: Leaf, array: Array, blocks: StridedBlocks) -> RunGrid:
    if not math.prod(leaf.shape):
        raise LayoutError("it has no elements")
    if not storable(array.info.dtype):
        raise LayoutError(f"zarr has no {array.info.dtype}")
    return run_grid(leaf.shape, array.info.dtype.itemsize, blocks.of(array))


def _names(
    contents: Contents, target: FilePath, files: Sequence[FilePath]
) -> tuple[list[str], dict[str, str]]:
    """The name of each file below the target, and the symbolic links for that."""
    names: list[str] = []
    folders: dict[str, str] = {}
    root = f"{str(target).rstrip('/')}/"
    for path in files:
        url = str(path)
        if path.files.is_remote == target.files.is_remote and url.startswith(root):
            names.append(url.removeprefix(root))
            continue
        if path.files.is_remote or target.files.is_remote:
            raise UnsupportedPath(
                f"{target} cannot link to {path}: in a bucket the files of a link lie below it,"
                " since stock Orbax reads no others. Give a target that the source is in, and"
                " nothing else, or convert the source"
            )
        folder = str(contents.path).rstrip("/")
        if not url.startswith(f"{folder}/"):
            folder = os.path.dirname(url)
        folder_name = folders.setdefault(folder, f"{LINK_FOLDER}{len(folders)}")
        names.append(f"{folder_name}/{url.removeprefix(folder).lstrip('/')}")
    return names, {name: folder for folder, name in folders.items()}


def link(
    plan: LinkPlan,
    target: FilePath,
    progress: Callable[[CopyBlock], object] = lambda block: None,
    is_noted: bool = False,
) -> None:
    """Make a link by the plan; of linked duplicates a sample is compared, of copied ones all."""
    for check in plan.contents.proofs(plan.linked.arrays, "sample"):
        require(check)

    def claims() -> Iterator[LeafClaim]:
        return (each for each in plan.contents.claims if not each.leaves.isdisjoint(plan.copied))

    contents = replace(plan.contents, claims=Claims(claims))
    copy(contents, plan.copy, target, progress, is_noted=is_noted)


def with_checksums(plan: LinkPlan) -> LinkPlan:
    """The plan with the CRC-32 of each linked run, for which all of them are read once."""
    linked = plan.linked
    data = [FileRange(path, file=info) for path, info in plan.files]
    crcs = {name: np.zeros(len(array.places), CRC) for name, array in linked.arrays.items()}

    def jobs() -> Iterator[tuple[int, Callable[[], object]]]:
        for name, array in linked.arrays.items():
            nbytes = math.prod(array.chunk) * linked.infos[name].dtype.itemsize
            for i in range(len(array.places)):
                yield nbytes, partial(sum_run, name, i, nbytes)

    def sum_run(name: str, i: int, nbytes: int) -> None:
        file, offset = linked.arrays[name].places[i]
        crcs[name][i] = crc32(data[file].read(offset, offset + nbytes))

    run_bounded(jobs(), plan.copy.budget_bytes, any(file.is_remote for file in data))
    arrays = {
        name: LinkedArray(array.chunk, array.order, array.places, crcs[name].tobytes())
        for name, array in linked.arrays.items()
    }
    return replace(plan, copy=replace(plan.copy, linked=replace(linked, arrays=arrays)))
