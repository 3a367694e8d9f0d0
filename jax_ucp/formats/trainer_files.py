"""Files that a trainer leaves beside the weights, kept as extras; they decide nothing."""

from __future__ import annotations

import re

from jax_ucp.codecs.torch_file import TorchFile, is_torch_file
from jax_ucp.errors import FormatError, UnsafePickle
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.facts import COUNTS, Facts
from jax_ucp.formats.state_dicts import keep_proved
from jax_ucp.formats.weight_files import read_json

_NUMBER = re.compile(r"\d+")
MAX_TEXT_BYTES = 1 << 20
_SAVED = (".pt", ".pth", ".bin", ".pkl")  # how trainers call files of torch.save
_TEXTS = (".yaml", ".yml", ".txt")


def keep_beside(imported: ContentsBuilder, name: str, path: FilePath, facts: Facts) -> None:
    """Keep a file as extras of `name`, or as unread. Raises FormatError if it does not fit."""
    if path.suffix == ".json":
        imported.extra(name, "content", read_json(path))
    elif path.suffix in _TEXTS and path.size() <= MAX_TEXT_BYTES:
        imported.extra(name, "content", path.read_text())
    elif path.suffix in _SAVED or is_torch_file(path):
        _keep_torch(imported, name, path, facts)
    else:
        imported.skip(name, f"{path.size()} bytes", "lies beside the weights; not read")


def _keep_torch(imported: ContentsBuilder, name: str, path: FilePath, facts: Facts) -> None:
    try:
        file = TorchFile(path, lenient=True)
        keep_proved(imported, name, file, file)
    except UnsafePickle as error:
        imported.leave_out(name, name, error)
        return
    except FormatError as error:
        error.at(path, way_out="weights_only")
        raise
    facts.state_all(file, name, _NUMBER.sub("*", name), file.tree, only=("step", *COUNTS))
    imported.unknown |= file.unknown
