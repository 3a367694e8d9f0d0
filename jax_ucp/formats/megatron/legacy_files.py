"""The files of a legacy Megatron checkpoint, and whether they belong together.

Facts: `megatron/training/checkpointing.py` (file names) and `megatron/core/parallel_state.py`
(order of ranks) of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.errors import FormatError
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.megatron.marks import rank_folders
from jax_ucp.formats.megatron.run import Args, args_of, check_iteration
from jax_ucp.formats.nested import as_dict, as_list, require_dict

MODEL_FILE, OPTIM_FILE = "model_optim_rng.pt", "distrib_optim.pt"

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


@dataclass(frozen=True)
class LegacyRank:
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
    def optim_name(self) -> str:
        return f"{self.folder.name}/{OPTIM_FILE}"

    @property
    def files(self) -> dict[str, TorchFile]:
        own = {self.name: self.model}
        return own | {self.optim_name: self.optim} if self.optim else own

    @property
    def has_optimizer(self) -> bool:
        return self.tree.get("optimizer") is not None

    def key(self, tensor: StoredTensor) -> str:
        return f"{self.name}:{tensor.key}"


def writing_ranks(args: Args) -> list[tuple[int, int, int, int]]:
    """(tp, pp, ep, etp) of every rank that writes files, in the order of ranks.

    Their expert-data-parallel rank is 0: of each stage the first ep * etp. With etp unlike tp not
    every pair of tp and ep is among them.
    """
    t, p, e = args.model_degrees
    etp = args.tensor_ranks(True)
    if etp > t or not {r % t for r in range(e * etp)} == set(range(t)):
        raise FormatError(
            f"with tensor parallelism {t}, expert parallelism {e} and expert tensor parallelism"
            f" {etp} Megatron's legacy format does not keep every rank's tensors; save with"
            " --ckpt-format torch_dist"
        )
    return [(r % t, pp, r // etp % e, r % etp) for pp in range(p) for r in range(e * etp)]


def open_ranks(folder: FilePath, weights_only: bool = False) -> tuple[Args, list[LegacyRank]]:
    """The args of the run, and the files of every rank. Raises FormatError for foreign ones."""
    names = rank_folders(folder)
    first = next((name for name in names if (folder / name / MODEL_FILE).is_file()), None)
    if first is None:
        raise FormatError(
            f"{folder / names[0] / MODEL_FILE} is missing, as in all other folders mp_rank_*"
            " beside it"
        )
    model = TorchFile(folder / first / MODEL_FILE)
    args = Args(args_of(require_dict(model.tree, f"{model.path}: the file"), model.path))
    t, p, e = args.model_degrees

    def open_rank(place: tuple[int, int, int, int]) -> LegacyRank:
        tp, pp, ep, _ = place
        own = folder / (f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (p > 1) + f"_{ep:03d}" * (e > 1))
        if not (own / MODEL_FILE).is_file():
            raise FormatError(
                f"{own / MODEL_FILE} is missing: by the args of {first} the run had {t} tensor,"
                f" {p} pipeline and {e} expert parallel ranks"
            )
        file = model if own.name == first else TorchFile(own / MODEL_FILE)
        has_optim = not weights_only and (own / OPTIM_FILE).is_file()
        optim = TorchFile(own / OPTIM_FILE) if has_optim else None
        tree = require_dict(file.tree, f"{file.path}: the file")
        return LegacyRank(*place, own, file, optim, tree)

    ranks = each_file(folder.files, open_rank, writing_ranks(args))
    if strays := sorted(set(names) - {rank.folder.name for rank in ranks}):
        raise FormatError(
            f"{folder / strays[0]} belongs to another run, or to an earlier save with other"
            f" parallelism: the args of {first} know no such rank. Move the folders of the other"
            " save away"
        )
    _check_together(folder, args, ranks)
    return args, ranks


def _check_together(folder: FilePath, args: Args, ranks: Sequence[LegacyRank]) -> None:
    first, facts = ranks[0], Facts(folder)
    etp = max(rank.etp for rank in ranks) + 1
    for rank in ranks:
        path, own = rank.model.path, args_of(rank.tree, rank.model.path)
        unlike = [name for name in STRUCTURE if repr(own.get(name)) != repr(args.fields.get(name))]
        if unlike:
            values = ", ".join(f"{n} {own.get(n)} against {args.fields.get(n)}" for n in unlike)
            raise FormatError(f"{path} is of another run than {first.name}: its args have {values}")
        if rank.optim and own.get("use_distributed_optimizer") is False:
            raise FormatError(
                f"{rank.optim.path} has the states of a distributed optimizer, but by its args"
                f" {path} was saved without one: one of them is of another run, or of an earlier"
                " save. Move the other's file away, or open the weights alone with weights_only"
            )
        for stage, what, value in _facts(rank):
            facts.state_all(rank.model, rank.name, what, value, stage)
        for name in ("consumed_train_samples", "skipped_train_samples"):
            facts.state(rank.name, f"args.{name}", own.get(name))
        version = rank.tree.get("checkpoint_version")
        if not isinstance(version, int | float) or version < 2:
            raise FormatError(
                f"{path} has checkpoint_version {version!r}, where 2.0 or later is needed: before,"
                " the rows of query, key and value lie in another order. Load and save it with a"
                " newer Megatron"
            )
        # Megatron's order of ranks; another one was asked for by use_tp_pp_dp_mapping.
        number, world = own.get("rank"), args.get("world_size")
        is_known = isinstance(world, int) and isinstance(number, int)
        if is_known and not own.get("use_tp_pp_dp_mapping"):
            stage_ranks = world // args.degree("pipeline_model_parallel_size")
            expected = rank.pp * stage_ranks + rank.ep * etp + rank.etp
            if number != expected:
                raise FormatError(
                    f"{path} was written by rank {number} of {world}, but its place is that of rank"
                    f" {expected}: it was renamed, or belongs to another run"
                )
    check_iteration(first.model.path, folder, first.tree.get("iteration"))


def _facts(rank: LegacyRank) -> Iterator[tuple[int | None, str, Any]]:
    """The facts that must be equal in the files of all ranks, or of those of one pipeline stage, as
    (stage or None, name, value).

    Groups are those of a stage. Of the states of a group, the first step is enough.
    """
    for name in ("iteration", "opt_param_scheduler", "checkpoint_version"):
        yield None, name, rank.tree.get(name)
    for i, part in enumerate(optimizer_parts(rank.tree.get("optimizer"))):
        if not isinstance(part, dict):
            continue
        yield None, f"grad_scaler of optimizer {i}", part.get("grad_scaler")
        inner = as_dict(part.get("optimizer", part))
        states: Mapping[Any, Any] = inner.get("state") or {}
        groups = [group for group in as_list(inner.get("param_groups")) if isinstance(group, dict)]
        for j, group in enumerate(groups):
            own = [as_dict(states.get(number)) for number in group.get("params") or ()]
            step = next((state["step"] for state in own if "step" in state), None)
            yield rank.pp, f"parameter group {j} of optimizer {i}", group
            yield rank.pp, f"step of parameter group {j} of optimizer {i}", step


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers of a rank: one, or two if experts have their own."""
    return optimizer if isinstance(optimizer, list) else [optimizer]
