"""Files of safetensors with any header, also of dtypes that numpy does not have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jax_ucp.formats.safetensors.reader import DTYPES, SafetensorsFile
from jax_ucp.layout.box import Box

_NAMES = {np.dtype(dtype).name: name for name, dtype in DTYPES.items()}


def file_of(header: bytes | object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file that begins with the length of its header, or with another."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def safetensors(
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, tuple[str, int]] | None = None,
) -> bytes:
    """`dtypes` are what the header says instead: a dtype, and the length of the last axis in it."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in arrays.items():
        said, shape = _NAMES[array.dtype.name], list(array.shape)
        if dtypes and name in dtypes:
            said, shape[-1] = dtypes[name]
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": said, "shape": shape, "data_offsets": offsets}
        data += np.ascontiguousarray(array).tobytes()
    return file_of(header, data)


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], *more, **how) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors(arrays, *more, **how))
    return path


def edit(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Let a function change the tensors of a file."""
    file = SafetensorsFile(path)
    arrays = {name: file.read(name, Box.whole(i.shape)) for name, i in file.arrays().items()}
    metadata = file.metadata
    change(arrays)
    path.unlink()  # its bytes may be mapped
    write_safetensors(path, arrays, metadata)
