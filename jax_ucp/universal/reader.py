"""Our own format: a directory with `ucp.json`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jax_ucp.arrays.beside import MARKERS, items_beside
from jax_ucp.arrays.checks import Check, Claims, Extent, LeafClaim
from jax_ucp.arrays.contents import About, Contents, Item
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece, Want
from jax_ucp.errors import CorruptData, NotACheckpoint
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath
from jax_ucp.jobs.ledger import RESULT_FILE
from jax_ucp.layout.box import Box
from jax_ucp.universal.linked import LinkedChunks, source_folders
from jax_ucp.universal.metadata import Metadata
from jax_ucp.universal.orbax_tree import TREE_FILE
from jax_ucp.universal.packs import pack_name
from jax_ucp.universal.stacks import Stacks, as_leaves, homes_of
from jax_ucp.universal.store import (
    COMPANIONS,
    METADATA_FILE,
    ChunkDigests,
    ZarrStore,
    missing_files,
    open_store,
    verify_files,
)

if TYPE_CHECKING:
    from jax_ucp.options import Options


class Unstacked(ArraySource):
    """Each array of a store, those of a stack separately."""

    def __init__(self, store: ZarrStore, stacks: Stacks):
        self._store = store
        self._homes = homes_of(stacks)
        self._arrays, _ = as_leaves(store.arrays(), store.chunks, stacks)
        # an array of a stack has the stack's chunks here
        self.chunks = {key: store.chunks[self._homes.get(key, (key, 0))[0]] for key in self._arrays}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def lies_in(self, key: str) -> str:
        if key in self._homes:
            stack, _ = self._homes[key]
            return stack
        return self._store.lies_in(key)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        self.read_each([(key, boxes, outs)])

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays; those of one stack are read together."""
        stored: dict[str, tuple[list[Box], list[np.ndarray]]] = defaultdict(lambda: ([], []))
        for key, boxes, outs in wants:
            stack, number = self._homes.get(key, (key, None))
            all_boxes, all_outs = stored[stack]
            all_boxes += [_in_stack(box, number) for box in boxes]
            all_outs += outs if number is None else [out[None] for out in outs]
        self._store.read_each([(key, *wanted) for key, wanted in stored.items()])

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """The outer chunks that a box meets; of a stack's chunk, the part of the array."""
        if key not in self._homes:
            yield from self._store.locate(key, box)
            return
        stack, number = self._homes[key]
        whole = Box.whole(self._arrays[key].shape)
        for piece in self._store.locate(stack, _in_stack(box, number)):
            target = Box(piece.target.start[1:], piece.target.stop[1:])
            own = _in_stack(target, number - piece.target.start[0])
            origin = Box((0, *target.start), (0, *target.start))
            assert target.within(whole)
            yield Piece(piece.file, key, own.relative_to(origin), target)


def _in_stack(box: Box, number: int | None) -> Box:
    """The box in a stack of a box of array `number`; the box itself if that is None."""
    if number is None:
        return box
    return Box((number, *box.start), (number + 1, *box.stop))


def recognise(path: FilePath) -> bool:
    return path.files.find((path / METADATA_FILE).key) is not None


def open_universal(path: FilePath, options: Options) -> Contents:
    """The universal checkpoint at `path`. Raises CorruptData or NotACheckpoint by its files."""
    metadata, store = open_store(path)
    looks = [partial(missing_files, metadata, store), partial(_inventory, path, metadata, store)]
    missing, inventory = each_file(path.files, lambda look: look(), looks)
    if missing:
        _refuse(metadata, store, missing)
    folder, mark = path.folder(), f"{COMPANIONS}/"
    arrays = Unstacked(store, metadata.stacks) if metadata.stacks else store
    linked = LinkedChunks(metadata, folder) if metadata.linked else None
    companions = [name for name in metadata.files if name.startswith(mark)]
    return Contents(
        "universal",
        str(path),
        metadata.leaves,
        Evaluated({**expressions(arrays), **linked.values()}) if linked else arrays,
        inventory,
        metadata.extras,
        metadata.groups,
        source=metadata.source,
        claims=Claims(partial(_claims, metadata, store, linked)),
        about=_about(metadata.source),
        companions={name.removeprefix(mark): FilePath(folder, name) for name in companions},
    )


def _refuse(metadata: Metadata, store: ZarrStore, missing: Sequence[str]) -> NoReturn:
    """Raise CorruptData for files that are missing; NotACheckpoint if only the last one is."""
    if len(missing) == 1 and TREE_FILE in metadata.files.keys() - store.seen:
        raise NotACheckpoint(
            f"{store.directory} is a universal checkpoint without its {TREE_FILE}, which is written"
            " last: it was never finished, or the file is lost. If a conversion was stopped here,"
            " run it again, which finishes it; otherwise use another checkpoint."
        )
    raise CorruptData(
        f"{len(missing)} files of the checkpoint are missing or have another size; the first:"
        f" {missing[0]}. Restore them from a copy, or use another checkpoint."
    )


def _about(source: Mapping[str, Any]) -> About:
    """The writer, step and parallelism of the source, as a copy records them."""
    step, parallelism = source.get("step"), source.get("parallelism")
    return About(
        str(source.get("writer", "")),
        step if isinstance(step, int) else None,
        parallelism if isinstance(parallelism, dict) else {},
    )


def _claims(
    metadata: Metadata, store: ZarrStore, linked: LinkedChunks | None
) -> Iterator[LeafClaim]:
    if linked is not None:
        yield from linked.claims()
    label_of = {leaf.name: leaf.label for leaf in metadata.leaves if leaf.has_array}
    yield LeafClaim(_MetadataFiles(metadata, store), frozenset(label_of))
    for key, stored in metadata.arrays.items():
        names = metadata.stacks.get(key, (key,))
        label = label_of.get(key, f"{label_of[names[0]]} and {len(names) - 1} arrays like it")
        yield LeafClaim(ChunkDigests(store, key, label, stored), frozenset(names))


@dataclass(frozen=True)
class _MetadataFiles:
    """The digests of the files beside the arrays."""

    metadata: Metadata
    store: ZarrStore

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        label = f"{len(self.metadata.files) + 1} files of metadata"
        return [Check(label, leaves, 0, self._fault)] if extent == "full" else []

    def _fault(self) -> str | None:
        return "; ".join(verify_files(self.metadata, self.store)) or None


def _inventory(path: FilePath, metadata: Metadata, store: ZarrStore) -> list[Item]:
    inventory = [
        Item(leaf.name, f"{leaf.dtype} {list(leaf.shape)}", "mapped", leaf.label)
        if leaf.has_array
        else Item(METADATA_FILE, leaf.kind, "mapped", leaf.label)
        for leaf in metadata.leaves
    ]
    inventory += [
        Item(METADATA_FILE, name, "extra", "carried over from the source")
        for name in metadata.extras
    ]
    inventory += [
        Item(name, "file", "extra", "goes with the model")
        for name in metadata.files
        if name.startswith(f"{COMPANIONS}/")
    ]
    return inventory + items_beside(path, _names(metadata, store))


def _names(metadata: Metadata, store: ZarrStore) -> set[str]:
    """The names in a checkpoint's own folder."""
    files = {METADATA_FILE, RESULT_FILE, *metadata.files, *metadata.arrays}
    files |= set(map(pack_name, store.packs()))
    return {name.partition("/")[0] for name in files} | MARKERS | source_folders(metadata.sources)
