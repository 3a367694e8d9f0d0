"""The files of a DeepSpeed checkpoint: which must be there, and whether they belong together.

Facts: file names in `runtime/engine.py` (`_get_zero_ckpt_name`, `_get_ckpt_name`) of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.torch_file import StoredTensor, TorchFile

_OPTIM = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_ELSEWHERE = {
    r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt": "ZeRO-3",
    r"layer_\d+-(model_\d+-)?model_states\.pt": "pipeline parallelism",
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt": "mixture of experts",
    r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt": "mixture of experts",
}


@dataclass(frozen=True)
class Rank:
    """The optimizer file of one data-parallel rank."""

    dp: int
    file: TorchFile
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.file.path.name

    def key(self, tensor: StoredTensor) -> str:
        return f"{self.name}:{tensor.key}"


def tag_folder(path: Path) -> Path | None:
    """The folder that `latest` names, if `path` is a save directory."""
    latest = path / "latest"
    if not latest.is_file():
        return None
    tag = latest.read_text(errors="replace").strip()
    if not tag or "/" in tag or tag in (".", ".."):
        raise FormatError(f"{latest} should name a folder beside it, but says {tag!r:.80}")
    return path / tag


def is_checkpoint(path: Path) -> bool:
    """Whether the directory is DeepSpeed's: it has `latest`, or files named as DeepSpeed names them."""
    if tag_folder(path) is not None:
        return True
    return any(re.fullmatch(p, file.name) for file in path.iterdir() for p in (_OPTIM, _MODEL, *_ELSEWHERE))


def open_files(folder: Path) -> tuple[TorchFile, list[Rank]]:
    """The model states of one tag, and the optimizer file of every data-parallel rank, in order.

    Raises FormatError, naming the file, where one is missing, is of another run, or has a layout not read yet.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for pattern, what in _ELSEWHERE.items():
        if found := [name for name in names if re.fullmatch(pattern, name)]:
            raise FormatError(
                f"{folder} has {found[0]}: DeepSpeed checkpoints with {what} are not read by this version"
            )
    optim = {name: match for name in names if (match := _OPTIM.fullmatch(name))}
    model = {name: match for name in names if (match := _MODEL.fullmatch(name))}
    if not optim:
        raise FormatError(f"{folder} has no *_optim_states.pt: ZeRO-0 checkpoints are not read by this version")
    families = {bool(match["bf16"]) for match in optim.values()}
    if len(families) > 1:
        raise FormatError(
            f"{folder} has optimizer files with and without the prefix bf16_: it was saved twice, by different runs. "
            "Remove the older family."
        )
    if any(int(match["mp"]) for match in (*optim.values(), *model.values())):
        raise FormatError(f"{folder} has files of several mp_ranks: model parallelism is not read by this version")
    if not model:
        raise FormatError(
            f"{folder}/mp_rank_00_model_states.pt is missing; without it nothing says what the buffers hold"
        )
    model_file = TorchFile(folder / next(iter(model)))
    by_rank = {int(match["dp"]): name for name, match in optim.items()}
    world = _world(model_file, len(by_rank))
    prefix = "bf16_" if True in families else ""
    for dp in range(max(world, *by_rank, 0)):
        if dp not in by_rank:
            raise FormatError(
                f"{folder}/{prefix}zero_pp_rank_{dp}_mp_rank_00_optim_states.pt is missing: the run had {world} "
                "data-parallel ranks, and each holds a part of every parameter group"
            )
    if len(by_rank) != world:
        raise FormatError(
            f"{folder} has optimizer files of {len(by_rank)} ranks, but {model_file.path.name} was written by {world}; "
            f"{by_rank[max(by_rank)]} belongs to another run"
        )
    return model_file, [_open_rank(dp, folder / by_rank[dp], world) for dp in sorted(by_rank)]


def _world(model: TorchFile, found: int) -> int:
    states = expect_dict(model.tree, model.path, "the file")
    world = states.get("dp_world_size")
    return world if isinstance(world, int) and not isinstance(world, bool) else found


def _open_rank(dp: int, path: Path, world: int) -> Rank:
    file = TorchFile(path)
    state = expect_dict(file.tree, path, "the file").get("optimizer_state_dict")
    state = expect_dict(state, path, "optimizer_state_dict")
    for name in ("base_optimizer_state", "single_partition_of_fp32_groups"):
        if name not in state:
            raise FormatError(f"{path} has no {name}: it is no optimizer file of ZeRO-1 or ZeRO-2")
    counts = state.get("partition_count")
    if isinstance(counts, list) and any(count != world for count in counts):
        raise FormatError(f"{path} was written by a run of {counts} ranks per group, but there are files of {world}")
    return Rank(dp, file, state)


def expect_dict(value: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {what} should be a dict, but is a {type(value).__name__}")
    return value
