"""Tables of stored arrays: which bytes of which file each is, and the one reader of them.

Every format's file is such a table once its header is parsed: a file of torch.save, safetensors,
GGUF or msgpack, a chunk file, an item of DCP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_ucp.arrays.checks import SAMPLE_BYTES, Check, Extent, LeafClaim, Watcher, watchers
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece, Want
from jax_ucp.errors import FormatError, naming
from jax_ucp.files.crc import Summed, SummedBytes, Tally
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import ByteRange
from jax_ucp.files.strided import StridedRead, read_strided
from jax_ucp.layout.box import Box, row_major_strides

VERIFY_BYTES = 1 << 20  # so little stays in a core's cache until it is summed


class StoredFile(NamedTuple):
    """Bytes that arrays lie in; `path` is named in errors. In `swapped` ones numbers are stored in
    the other byte order than this machine's.
    """

    path: FilePath
    data: ByteRange
    swapped: bool = False


class Region(NamedTuple):
    """Bytes of a file from `start` to `stop`, called `storage` there, and the CRC-32 that the file
    records for them.
    """

    storage: str
    start: int
    stop: int
    crc: int


class StoredArray(NamedTuple):
    """An array in a file: the byte of its first element, and strides in elements; row-major without
    strides.

    `region` is what the file has a checksum of, with all of the array; `place` is the name by which
    the table finds that region.
    """

    file: StoredFile
    offset: int
    strides: tuple[int, ...] | None = None
    region: Region | None = None
    place: str = ""


class SummedArrays(NamedTuple):
    """The regions at `places` of a table, which `arrays` lie in, `nbytes` in all; `label` is for
    people.
    """

    label: str
    nbytes: int
    arrays: Iterable[str]
    places: Sequence[str]


class ExtentTable(ArraySource):
    """Arrays by name, and where each is stored; of what is not stored as an array, its elements.

    A table says where an array is stored, or its subclass finds it when it is read, in `stored`.
    Where all arrays lie in one file, `file_name` is its name for `locate`; of a table that is one
    of several, these have the names.
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayInfo],
        stored: Mapping[str, StoredArray | np.ndarray] | None = None,
        file_name: str = "",
    ):
        self._arrays, self._file_name = arrays, file_name
        self._stored = {} if stored is None else stored

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def stored(self, key: str) -> StoredArray | np.ndarray:
        """Where an array is stored, or its elements."""
        return self._stored[key]

    def sums(self) -> Iterable[SummedArrays]:
        """Groups of arrays that files record checksums of; none, unless a subclass has some.

        `regions` has the checksums, by the places that a group names.
        """
        return ()

    def regions(self, place: str) -> Sequence[tuple[StoredFile, Region]]:
        """The regions at a place that `sums` names."""
        return ()

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its memory: what lies in one run straight from the file."""
        self.read_each([(key, boxes, outs)])

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays: of those that lie in the same bytes of a file together."""
        together: dict[tuple[int, str], tuple[StoredFile, ByteRange, list[StridedRead]]] = {}
        apart: list[tuple[StoredFile, Sequence[np.ndarray], Sequence[np.ndarray]]] = []
        for key, boxes, outs in wants:
            info, stored = self._arrays[key], self.stored(key)
            whole = Box.whole(info.shape)
            for box in boxes:
                if len(box.start) != len(info.shape) or not box.within(whole):
                    where = f"{stored.file.path}: " if isinstance(stored, StoredArray) else ""
                    raise ValueError(
                        f"{where}box {box} does not lie in {key!r} of shape {info.shape}"
                    )
            if isinstance(stored, np.ndarray):
                for box, out in zip(boxes, outs, strict=True):
                    out[...] = stored[box.index]
                continue
            file, region, place = stored.file, stored.region, stored.place
            summing = watchers((id(self), place)) if region is not None else ()
            group = id(file.data), place if summing else ""
            if group not in together:
                data = file.data
                if region is not None and summing:
                    data = Summed(data, [each.tally(place, region) for each in summing])
                together[group] = file, data, []
            if file.swapped or any(out.dtype != info.dtype for out in outs):
                buffers = [np.empty(box.shape, info.dtype) for box in boxes]
                apart.append((file, outs, buffers))
                outs = buffers
            strides = row_major_strides(info.shape) if stored.strides is None else stored.strides
            together[group][2].append(StridedRead(stored.offset, strides, boxes, outs))
        for file, data, reads in together.values():
            with naming(file.path):
                read_strided(data, reads)
        for file, outs, buffers in apart:
            for out, buffer in zip(outs, buffers, strict=True):
                out[...] = _swapped(buffer) if file.swapped else buffer

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield Piece(self._file_name, key, box, box)

    def claims(self) -> Iterator[LeafClaim]:
        """The checksums that the files record of the bytes of arrays."""
        for label, nbytes, arrays, places in self.sums():
            yield LeafClaim(Checksums(self, label, nbytes, places), frozenset(arrays))


def _swapped(elements: np.ndarray) -> np.ndarray:
    """The elements in the other byte order: the halves of a complex number one by one."""
    unit = elements.dtype.itemsize // (2 if elements.dtype.kind == "c" else 1)
    swapped = elements.reshape(-1).view(f"u{unit}").byteswap()
    return swapped.view(elements.dtype).reshape(elements.shape)


@dataclass(frozen=True, slots=True)
class Checksums:
    """The CRC-32 recorded of the regions at `places` of a table, as in `SummedArrays`."""

    table: ExtentTable
    label: str
    nbytes: int
    places: Sequence[str]

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterator[Check]:
        if extent == "full" or self.nbytes <= SAMPLE_BYTES:
            summing = _Summing(self.table, self.places)
            watcher = summing if extent == "full" else None
            yield Check(self.label, leaves, self.nbytes, summing.fault, watcher)


class _Summing(Watcher):
    """The CRC-32 of regions: of what others read of them, and of the rest."""

    def __init__(self, table: ExtentTable, places: Sequence[str]):
        super().__init__(*((id(table), place) for place in places))
        self._table, self._places = table, places
        self._tallies: dict[str, Tally] = {}

    def tally(self, place: str, region: Region) -> Tally:
        """The sum of the region at a place, of what was seen up to now."""
        if place not in self._tallies:

            def noted(part: SummedBytes) -> None:
                self.note((place, region, part))

            tally = Tally(region.start, region.stop, region.crc, self.alarm, noted)
            self._tallies.setdefault(place, tally)
        return self._tallies[place]

    def add(self, seen: Iterable[tuple[str, Region, SummedBytes]]) -> None:
        for place, region, part in seen:
            self.tally(place, region).join([part])

    def fault(self) -> str | None:
        """A message about the first region that cannot be read or has another CRC-32 than is
        recorded; None if there is none. Reads what was not seen.
        """
        for place in self._places:
            known = self._tallies.get(place)
            if known is not None and known.agrees():
                continue
            try:
                for file, region in self._table.regions(place):
                    tally = known or Tally(region.start, region.stop, region.crc)
                    for start, stop in tally.gaps():
                        room = np.empty(min(VERIFY_BYTES, stop - start), np.uint8)
                        with naming(file.path):
                            for at in range(start, stop, VERIFY_BYTES):
                                Summed(file.data, [tally]).read_into([(at, room[: stop - at])])
                    if not tally.agrees():
                        return (
                            f"{file.path}: the bytes of storage {region.storage} do not have the"
                            " CRC that the file records for them"
                        )
            except FormatError as error:
                return str(error)
        return None
