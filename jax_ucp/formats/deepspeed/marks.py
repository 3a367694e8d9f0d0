"""Marks of DeepSpeed's checkpoints: the files by whose names they are recognised.

Facts: file names in `runtime/engine.py` (`_get_zero_ckpt_name`, `_get_ckpt_name`,
`_get_expert_ckpt_name`) and `runtime/pipe/module.py` (`ckpt_layer_path`) of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
import re

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath

# The engine's files by kind; the groups are the numbers in their names.
KINDS = {
    "model states": re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"),
    "optimizers": re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"),
    "layers": re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt"),
    "experts": re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt"),
    "experts' optimizers": re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"),
}
_UNIVERSAL_MODEL = re.compile(r".*mp_rank_.*_model_states\.pt")


def tag_folder(path: FilePath, marker: str = "latest") -> FilePath | None:
    """The folder that `latest` names if `path` is a save directory; else `path`."""
    latest = path / marker
    if not latest.is_file():
        return None
    tag = latest.read_pointer().strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", "..") or len(os.fsencode(tag)) > 255:
        raise FormatError(f"{latest} should name a folder beside it, but says {tag!r:.80}")
    return path / tag


def is_checkpoint(path: FilePath) -> bool:
    """Whether it is a directory that has `latest`, or files named as DeepSpeed names them."""
    if not path.is_dir():
        return False
    return tag_folder(path) is not None or any(is_own(file.name) for file in path.children())


def is_own(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in KINDS.values())


def is_universal(path: FilePath) -> bool:
    if not path.is_dir():
        return False
    if (path / "latest_universal").is_file() and not (path / "latest").is_file():
        return True
    if not (path / "zero").is_dir():
        return False
    return any(_UNIVERSAL_MODEL.fullmatch(child.name) for child in path.children())
