"""Files of safetensors with any header, also of dtypes that numpy does not have."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_ucp.formats.safetensors.reader import _DTYPES

_NAMES = {np.dtype(dtype).name: name for name, dtype in _DTYPES.items()}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, tuple[str, int]] | None = None,
) -> None:
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
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
