"""The run that wrote a checkpoint: its args, and the folder of an iteration of it.

Facts: `megatron/training/checkpointing.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.arrays.contents import About
from jax_ucp.codecs.unpickle import Record, known, what_is
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath

# No run has so many model-parallel ranks, times the chunks of each: what lies where is listed for
# all of them.
MAX_RANKS = 1 << 20
_DEGREES = ("pipeline", "virtual_pipeline", "expert")

# Parallel degrees as people call them, and their arguments.
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


@dataclass
class Args:
    """The arguments of the run; `absent` lists those that were asked for and are missing."""

    fields: Mapping[str, Any]
    absent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tensor = max(
            self._size(f"{kind}_parallel_size") for kind in ("tensor_model", "expert_tensor")
        )
        ranks = tensor * math.prod(self._size(f"{kind}_model_parallel_size") for kind in _DEGREES)
        if ranks > MAX_RANKS:
            raise FormatError(
                f"args say that the run had {ranks:.3g} model-parallel ranks: they are damaged"
            )

    def _size(self, name: str) -> int:
        size = self.fields.get(name)
        return max(1, size) if isinstance(size, int) else 1

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` if there is none. Raises FormatError for an object of an
        unknown class.
        """
        if name not in self.fields:
            if name not in self.absent:
                self.absent.append(name)
            return default
        return known(self.fields[name])

    def optional(self, name: str) -> Any:
        """The argument, or None; if it is missing, it is not listed in `absent`."""
        return known(self.fields.get(name))

    def degree(self, name: str) -> int:
        """A parallel degree; 1 if it is None or missing."""
        value = self.get(name)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"args.{name} should be a number from 1, but is {value!r}")
        return value

    @property
    def model_degrees(self) -> tuple[int, int, int]:
        tensor, pipeline, expert = (
            self.degree(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")
        )
        return tensor, pipeline, expert

    def tensor_ranks(self, expert: bool) -> int:
        """The number of tensor-parallel ranks of experts, or of the rest; by default they are
        equal.
        """
        own = expert and self.get("expert_tensor_parallel_size") is not None
        return self.degree("expert_tensor_parallel_size" if own else "tensor_model_parallel_size")

    @property
    def is_layer_wise(self) -> bool:
        """Whether matrices have a LayerWiseDistributedOptimizer, and the rest a plain distributed
        one behind it, though `use_distributed_optimizer` is False.

        Facts: `validate_args` in `megatron/training/arguments.py`, which turns `dist_muon`, and
        `muon` with `--use-distributed-optimizer`, into this; `_get_megatron_emerging_optimizer` in
        `megatron/core/optimizer/__init__.py` of Megatron-LM core_v0.18.2 and core_v0.19.0.
        """
        return self.optional("use_layer_wise_distributed_optimizer") is True

    @property
    def copies_embedding(self) -> bool:
        """Whether the last pipeline stage has a copy of the word embedding (tied)."""
        several_stages = self.degree("pipeline_model_parallel_size") > 1
        return several_stages and not self.get("untie_embeddings_and_output_weights", False)


def args_of(tree: Mapping[str, Any], path: FilePath) -> Mapping[str, Any]:
    args = tree.get("args")
    if isinstance(args, Record) and args.type == "argparse.Namespace":
        return args.fields
    instead = f"{what_is(args)} for args, not an argparse.Namespace"
    if args is None:
        instead = "no args"
    raise FormatError(f"{path} has {instead}: nothing says how the ranks divide the model")


def about(layout: str, args: Args, iteration: Any) -> About:
    """The description of a checkpoint for people: its layout, and the degrees in `args`."""
    degrees = {axis: args.fields.get(name) for axis, name in _AXES.items()}
    return About(
        f"Megatron, {layout}",
        iteration if isinstance(iteration, int) else None,
        {axis: n for axis, n in degrees.items() if isinstance(n, int) and n > 1},
    )


def require_folder(path: FilePath, folder: FilePath) -> None:
    """Raise NotACheckpoint if the folder that the tracker names is missing, while files of an
    iteration lie beside the tracker.
    """
    if not folder.is_dir():
        raise NotACheckpoint(
            f"{path} names {folder.name}, but there is no such folder in it, while files of one"
            " iteration lie beside the name: move them into a folder that is called so, or open"
            " them without the file that names it"
        )


def check_iteration(file: FilePath, folder: FilePath, iteration: Any) -> None:
    named = folder.name.startswith("iter_") and isinstance(iteration, int)
    if named and folder.name != f"iter_{iteration:07d}":
        raise FormatError(f"{file} is of iteration {iteration}, but its folder is {folder.name}")
