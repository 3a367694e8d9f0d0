"""Files of torch.save, written without torch: a zip of `data.pkl` and one member for each storage.

Members are stored, aligned to 64 bytes by an extra field as torch does
(`caffe2/serialize/inline_container.cc`), with zip64 sizes throughout. All sizes are known before
any byte of a tensor is: a file can lie inside another one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.codecs.pickle_writer import dumps
from jax_ucp.codecs.zip_members import CENTRAL, END, END64, LOCAL, LOCATOR64, MAX16, MAX32
from jax_ucp.export.files import Bytes, File, Section, Tensor
from jax_ucp.files.crc import crc32

ALIGNMENT = 64
_VERSION = 45  # zip64
_DATE = (1 << 5) | 1  # the first day that a zip file can name, so that equal content is equal bytes


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    content: bytes | Tensor
    header: int
    start: int

    @property
    def size(self) -> int:
        return self.content.nbytes if isinstance(self.content, Tensor) else len(self.content)


class TorchZip:
    """The file of torch.save for a value, as `dumps` takes it; CRCs are known at the end."""

    def __init__(self, value: Any, root: str = "archive"):
        storages: list[bytes | Tensor] = []

        def storage(tensor: Tensor | np.ndarray) -> str:
            storages.append(
                tensor if isinstance(tensor, Tensor) else np.ascontiguousarray(tensor).tobytes()
            )
            return str(len(storages) - 1)

        contents: list[tuple[str, bytes | Tensor]] = [
            ("data.pkl", dumps(value, storage)),
            ("byteorder", b"little"),
        ]
        contents += [(f"data/{key}", content) for key, content in enumerate(storages)] + [
            ("version", b"3\n")
        ]
        self._members: list[_Member] = []
        at = 0
        for name, content in contents:
            full = f"{root}/{name}".encode()
            # 4: the header of the field that pads
            start = at + LOCAL.size + len(full) + len(_sizes(0)) + 4
            start += -start % ALIGNMENT
            self._members.append(_Member(full, content, at, start))
            at = start + self._members[-1].size
        self._directory = at
        entries = sum(
            CENTRAL.size + len(member.name) + len(_sizes(0, 0)) for member in self._members
        )
        self.size = at + entries + END64.size + LOCATOR64.size + END.size

    def section(self, at: int = 0) -> Section:
        tensors = [(m.start, m.content) for m in self._members if isinstance(m.content, Tensor)]
        return Section(
            [(at + start, tensor) for start, tensor in tensors], tail=partial(self._tail, at)
        )

    def _tail(self, at: int, crcs: Sequence[int]) -> list[Bytes]:
        """Everything but the bytes of tensors, whose CRC-32 are given."""
        left, parts, directory = iter(crcs), [], bytearray()
        for member in self._members:
            name, literal = member.name, member.content
            crc = next(left) if isinstance(literal, Tensor) else crc32(literal)
            extra = _sizes(member.size)
            padding = member.start - member.header - LOCAL.size - len(name) - len(extra) - 4
            extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            about = _DATE, crc, MAX32, MAX32, len(name)
            head = LOCAL.pack(b"PK\3\4", _VERSION, 0, 0, 0, *about, len(extra)) + name + extra
            parts.append((member.header, head + (b"" if isinstance(literal, Tensor) else literal)))
            extra = _sizes(member.size, member.header)
            versions = b"PK\1\2", _VERSION, _VERSION, 0, 0, 0
            directory += CENTRAL.pack(*versions, *about, len(extra), 0, 0, 0, 0, MAX32)
            directory += name + extra
        end = self._directory + len(directory)
        count, size = len(self._members), len(directory)
        directory += END64.pack(
            *(b"PK\6\6", END64.size - 12, _VERSION, _VERSION, 0, 0),
            *(count, count, size, self._directory),
        )
        directory += LOCATOR64.pack(b"PK\6\7", 0, end, 1)
        directory += END.pack(b"PK\5\6", 0, 0, MAX16, MAX16, MAX32, MAX32, 0)
        parts.append((self._directory, bytes(directory)))
        return [(at + start, data) for start, data in parts]


def torch_file(name: str, value: Any) -> File:
    """The file `name` with what torch.save would write for a value."""
    made = TorchZip(value, name.rpartition("/")[2].removesuffix(".pt"))
    return File(name, made.size, [made.section()])


def _sizes(size: int, *header: int) -> bytes:
    """The zip64 field: the size twice, and in the directory where the local header is."""
    return struct.pack(f"<2H{2 + len(header)}Q", 1, 8 * (2 + len(header)), size, size, *header)
