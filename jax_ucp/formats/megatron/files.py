"""The files of a legacy Megatron checkpoint, and whether they belong together.

Facts: `megatron/training/checkpointing.py` (file names) and `megatron/core/parallel_state.py`
(order of ranks) of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.formats.torch_save.unpickle import Record, known, what_is
from jax_ucp.sources.contents import About

# No run has so many model-parallel ranks, times the chunks of each: what lies where is listed for
# all of them.
MAX_RANKS = 1 << 20
_DEGREES = ("pipeline", "virtual_pipeline", "expert")

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILE, OPTIM_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_ITERATION = re.compile(r"[0-9]{1,19}")
_SAVED = re.compile(r"iter_\d{7,}|release")
_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")

_KINDS = (
    *("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model"),
    *("expert_tensor", "context", "data"),
)
# Attributes that say how tensors are cut and which there are: files that differ in one are not of
# one checkpoint.
STRUCTURE = (
    *(f"{kind}_parallel_size" for kind in _KINDS),
    *("world_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("group_query_attention", "num_query_groups", "kv_channels", "swiglu", "num_experts"),
    *("moe_layer_freq", "moe_ffn_hidden_size", "padded_vocab_size"),
    *("untie_embeddings_and_output_weights", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("ddp_bucket_size", "ddp_num_buckets"),
)


@dataclass
class Args:
    """The run's own arguments; `absent` has those that were asked for and not there."""

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
        """The argument, or `default` where the release that wrote it had no such one.

        Raises FormatError where it is an object of a class that is not known here.
        """
        if name not in self.fields:
            if name not in self.absent:
                self.absent.append(name)
            return default
        return known(self.fields[name])

    def optional(self, name: str) -> Any:
        """The argument, or None; that it is not there needs no note."""
        return known(self.fields.get(name))

    def degree(self, name: str) -> int:
        """A parallel degree: 1 where it is None or not there."""
        value = self.get(name)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"args.{name} should be a number from 1, but is {value!r}")
        return value

    @property
    def expert_ranks(self) -> int:
        """The tensor-parallel ranks of an expert: those of the rest by default."""
        own = self.get("expert_tensor_parallel_size") is not None
        return self.degree("expert_tensor_parallel_size" if own else "tensor_model_parallel_size")

    @property
    def uses_muon(self) -> bool:
        """Whether matrices have Muon for their optimizer, and the rest another one."""
        optimizer = self.optional("optimizer")
        return isinstance(optimizer, str) and "muon" in optimizer

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


@dataclass(frozen=True)
class Rank:
    """The files of one model-parallel rank, and its place in each kind of parallelism."""

    tp: int
    pp: int
    ep: int
    etp: int
    folder: FilePath
    model: TorchFile
    optim: TorchFile | None
    tree: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.folder.name}/{MODEL_FILE}"

    @property
    def has_optimizer(self) -> bool:
        return self.tree.get("optimizer") is not None

    def key(self, tensor: StoredTensor, file: str = MODEL_FILE) -> str:
        return f"{self.folder.name}/{file}:{tensor.key}"


_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


def about(layout: str, args: Args, iteration: Any) -> About:
    """Who wrote a checkpoint, for people: the layout, and what `args` say of the run."""
    degrees = {axis: args.fields.get(name) for axis, name in _AXES.items()}
    return About(
        f"Megatron, {layout}",
        iteration if isinstance(iteration, int) else None,
        {axis: n for axis, n in degrees.items() if isinstance(n, int) and n > 1},
    )


def iteration_folder(path: FilePath) -> FilePath:
    """The folder of the iteration in the tracker file; without one, the only one that is there,
    or the path itself.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        inside = [child for child in path.children() if _SAVED.fullmatch(child.name)]
        return inside[0] if len(inside) == 1 else path
    text = tracker.read_pointer().strip()
    if text == "release":
        return path / text
    if not _ITERATION.fullmatch(text):
        raise FormatError(
            f"{tracker} should name an iteration or say `release`, but says {text!r:.80}"
        )
    return path / f"iter_{int(text):07d}"


def require_folder(path: FilePath, folder: FilePath) -> None:
    """Raise NotACheckpoint where the folder that the tracker names is not there, but its files."""
    if not folder.is_dir():
        raise NotACheckpoint(
            f"{path} names {folder.name}, but there is no such folder in it, while files of one"
            " iteration lie beside the name: move them into a folder that is called so, or open"
            " them without the file that names it"
        )


def is_checkpoint(path: FilePath) -> bool:
    """Whether the directory is a legacy checkpoint, or its tracker names one, or nothing."""
    folder = iteration_folder(path)
    return not folder.is_dir() or bool(_rank_folders(folder))


def _rank_folders(folder: FilePath) -> list[str]:
    return sorted(p.name for p in folder.children() if p.is_dir() and _FOLDER.fullmatch(p.name))


def writing_ranks(args: Args) -> list[tuple[int, int, int, int]]:
    """(tp, pp, ep, etp) of every rank that writes files, in the order of ranks.

    They are the ranks whose expert-data-parallel rank is 0: of each pipeline stage the first ep *
    etp. With etp unlike tp not every pair of tp and ep is among them.
    """
    t, p, e = (
        args.degree(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")
    )
    etp = args.expert_ranks
    if etp > t or not {r % t for r in range(e * etp)} == set(range(t)):
        raise FormatError(
            f"with tensor parallelism {t}, expert parallelism {e} and expert tensor parallelism"
            f" {etp} Megatron's legacy format does not keep every rank's tensors; save with"
            " --ckpt-format torch_dist"
        )
    return [(r % t, pp, r // etp % e, r % etp) for pp in range(p) for r in range(e * etp)]


def open_ranks(folder: FilePath, weights_only: bool = False) -> tuple[Args, list[Rank]]:
    """The args of the run, and the files of every rank; with `weights_only` not the optimizer's.

    Raises FormatError, naming the file, where one is missing, is another rank's, or is of another
    run.
    """
    names = _rank_folders(folder)
    first = next((name for name in names if (folder / name / MODEL_FILE).is_file()), None)
    if first is None:
        raise FormatError(
            f"{folder / names[0] / MODEL_FILE} is missing, as in all other folders mp_rank_*"
            " beside it"
        )
    model = TorchFile(folder / first / MODEL_FILE)
    args = Args(args_of(_tree(model), model.path))

    def open_rank(place: tuple[int, int, int, int]) -> Rank:
        name = _folder_name(args, place)
        own = model if name == first else _open_model(folder / name, first, args)
        optim_path = folder / name / OPTIM_FILE
        has_optim = not weights_only and optim_path.is_file()
        optim = TorchFile(optim_path) if has_optim else None
        return Rank(*place, folder / name, own, optim, _tree(own))

    ranks = each_file(folder.files, open_rank, writing_ranks(args))
    if strays := sorted(set(names) - {rank.folder.name for rank in ranks}):
        raise FormatError(
            f"{folder / strays[0]} belongs to another run, or to an earlier save with other"
            f" parallelism: the args of {first} know no such rank. Move the folders of the other"
            " save away"
        )
    _check_together(folder, args, ranks)
    return args, ranks


def _folder_name(args: Args, place: tuple[int, int, int, int]) -> str:
    tp, pp, ep, _ = place
    name = f"mp_rank_{tp:02d}"
    if args.degree("pipeline_model_parallel_size") > 1:
        name += f"_{pp:03d}"
    if args.degree("expert_model_parallel_size") > 1:
        name += f"_{ep:03d}"
    return name


def _open_model(folder: FilePath, first: str, args: Args) -> TorchFile:
    path = folder / MODEL_FILE
    if path.is_file():
        return TorchFile(path)
    kinds = ("tensor", "pipeline", "expert")
    t, p, e = (args.degree(f"{kind}_model_parallel_size") for kind in kinds)
    raise FormatError(
        f"{path} is missing: by the args of {first} the run had {t} tensor, {p} pipeline and {e}"
        " expert parallel ranks"
    )


def differing(args: Args, other: Mapping[str, Any]) -> dict[str, Any]:
    """What another file's args say otherwise."""
    names = sorted({*args.fields, *other})
    return {n: other.get(n) for n in names if repr(args.fields.get(n)) != repr(other.get(n))}


def _check_together(folder: FilePath, args: Args, ranks: Sequence[Rank]) -> None:
    """Raise FormatError where a file is of another run or step, or of another rank."""
    first, facts = ranks[0], Facts(folder)
    etp = max(rank.etp for rank in ranks) + 1
    for rank in ranks:
        own = args_of(rank.tree, rank.model.path)
        _check_structure(args, first, rank, own)
        _state(facts, rank, own)
        _check_version(rank)
        # Megatron's order of ranks; another one was asked for by use_tp_pp_dp_mapping.
        if not own.get("use_tp_pp_dp_mapping"):
            _check_number(args, rank, own.get("rank"), etp)
    check_iteration(first.model.path, folder, first.tree.get("iteration"))


def _check_structure(args: Args, first: Rank, rank: Rank, own: Mapping[str, Any]) -> None:
    if unlike := [name for name in STRUCTURE if repr(own.get(name)) != repr(args.fields.get(name))]:
        values = ", ".join(f"{n} {own.get(n)} against {args.fields.get(n)}" for n in unlike)
        raise FormatError(
            f"{rank.model.path} is of another run than {first.name}: its args have {values}"
        )


def _check_version(rank: Rank) -> None:
    version = rank.tree.get("checkpoint_version")
    if not isinstance(version, int | float) or version < 2:
        raise FormatError(
            f"{rank.model.path} has checkpoint_version {version!r}, where 2.0 or later is needed:"
            " before, the rows of query, key and value lie in another order. Load and save it with"
            " a newer Megatron"
        )


def _check_number(args: Args, rank: Rank, number: Any, etp: int) -> None:
    world = args.get("world_size")
    if not isinstance(world, int) or not isinstance(number, int):
        return
    stage_ranks = world // args.degree("pipeline_model_parallel_size")
    expected = rank.pp * stage_ranks + rank.ep * etp + rank.etp
    if number != expected:
        raise FormatError(
            f"{rank.model.path} was written by rank {number} of {world}, but its place is that of"
            f" rank {expected}: it was renamed, or belongs to another run"
        )


def check_iteration(file: FilePath, folder: FilePath, iteration: Any) -> None:
    """Raise FormatError where the folder is that of another iteration than the file says."""
    named = folder.name.startswith("iter_") and isinstance(iteration, int)
    if named and folder.name != f"iter_{iteration:07d}":
        raise FormatError(f"{file} is of iteration {iteration}, but its folder is {folder.name}")


def _state(facts: Facts, rank: Rank, args: Mapping[str, Any]) -> None:
    """State the step that a rank is of; groups of parameters are those of its pipeline stage."""

    def state(what: str, value: Any, stage: int | None = None) -> None:
        facts.state_all(rank.model, rank.name, what, value, stage)

    for name in ("iteration", "opt_param_scheduler", "checkpoint_version"):
        state(name, rank.tree.get(name))
    for name in ("consumed_train_samples", "skipped_train_samples"):
        facts.state(rank.name, f"args.{name}", args.get(name))
    for i, part in enumerate(optimizer_parts(rank.tree.get("optimizer"))):
        if isinstance(part, dict):
            state(f"grad_scaler of optimizer {i}", part.get("grad_scaler"))
            for what, value in _steps_and_rates(part.get("optimizer", part)):
                state(f"{what} of optimizer {i}", value, rank.pp)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers of a rank: one, or with experts one more for them."""
    return optimizer if isinstance(optimizer, list) else [optimizer]


def _steps_and_rates(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The settings of each group, learning rates among them, and the step of a parameter of it."""
    inner = as_dict(optimizer)
    states = inner.get("state") or {}
    groups = [group for group in as_list(inner.get("param_groups")) if isinstance(group, dict)]
    for i, group in enumerate(groups):
        yield f"parameter group {i}", group
        yield f"step of parameter group {i}", _first_step(states, group.get("params") or ())


def _first_step(states: Mapping[Any, Any], numbers: Iterable[Any]) -> Any:
    for state in map(states.get, numbers):
        if isinstance(state, dict) and "step" in state:
            return state["step"]
    return None


def _tree(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.tree, dict):
        raise FormatError(
            f"{file.path}: the file should hold a dict, but holds {what_is(file.tree)}"
        )
    return file.tree


def args_of(tree: Mapping[str, Any], path: FilePath) -> Mapping[str, Any]:
    args = tree.get("args")
    if isinstance(args, Record) and args.type == "argparse.Namespace":
        return args.fields
    instead = f"{what_is(args)} for args, not an argparse.Namespace"
    if args is None:
        instead = "no args"
    raise FormatError(f"{path} has {instead}: nothing says how the ranks divide the model")
