"""What no reader can see: a table of the classes of changes after which the files are those that an
honest run could have written, each with the reason.

A wrong result is invisible only if a row of the table has its checkpoint, its mistake and what of
the result is other. A checkpoint that stores twice what a mistake changes is in no row for that, so
that it must be refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from temptation_subjects import Subject

Leaves = Mapping[str, Any]

# Files that say nothing of the arrays: without them, or with those of another save, a checkpoint is
# what it is.
_BESIDE = re.compile(
    r"(latest\w*|latest_checkpointed_iteration\.txt|commit_success\.txt|_CHECKPOINT_METADATA|_sharding)"
)


def is_another_whole(subject: Subject, files: Mapping[str, Any]) -> bool:
    """Whether every file that says anything of the arrays is that of one sibling."""

    def saying(folder: Mapping[str, Any]) -> dict[str, Any]:
        return {n: d for n, d in folder.items() if not _BESIDE.fullmatch(PurePosixPath(n).name)}

    mine = saying(files)
    for other in map(subject.as_saved, subject.siblings):
        theirs = saying(other)
        if mine and mine in (theirs, {n: d for n, d in theirs.items() if n in subject.folder}):
            return True
    return False


def other_in(found: Leaves, want: Leaves) -> str:
    """What of a result is other: `names` of leaves, or `apart` where they are kept under `other`,
    `shapes` or dtypes, `steps` where there are more of them, `values`, or `settings`.
    """
    if found.keys() != want.keys():
        apart = [bytes_of(leaf) for name, leaf in found.items() if name.startswith("['other']")]
        missed = [bytes_of(leaf) for name, leaf in want.items() if name not in found]
        return "apart" if missed and all(leaf in apart for leaf in missed) else "names"
    pairs = [(np.asarray(found[name]), np.asarray(want[name])) for name in want]
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return "shapes"
    if len(steps_of(found)) > len(steps_of(want)):
        return "steps"
    return "values" if any(a.tobytes() != b.tobytes() for a, b in pairs) else "settings"


def bytes_of(leaf: Any) -> bytes:
    return np.asarray(leaf).tobytes()


def steps_of(leaves: Leaves) -> set[float]:
    return {float(v) for n, v in leaves.items() if n.startswith("['step']") and np.size(v) == 1}


@dataclass(frozen=True)
class Undecidable:
    """A class: patterns of the whole name of a checkpoint and of what an attempt is, what of the
    result is other, and why nothing that is stored shows it; `alone` if that is so of weights alone.
    Where `note` is said, something looks wrong, though sound checkpoints have it too: a note must
    tell it.
    """

    subjects: str
    attempts: str
    other: str
    reason: str
    alone: bool = False
    note: str = ""


_OTHER = r"of another (step|run)|exchanged"
# fmt: off
INVISIBLE = [
    Undecidable(r".*", r".", "steps", "a model of which not every part is used in every step has such", note="steps differ"),
    Undecidable(r".*", r".", "apart", "which parameters the states are of is not proved", note="kept under `other`"),
    Undecidable(r"(torch|folders|quantized|trainers|dtensors|gguf)/.*|jax/.*(flax|equinox).*", r"is zeros after byte", "values", "weights may be zeros", note="ends in zeros"),
    Undecidable(r"(torch|dtensors|folders)/(old_|fsdp|dcp_|acc).*", rf"\.distcp.*({_OTHER})|({_OTHER}).*\.distcp", "values",
        "parts of a DCP save say neither run nor step, and a model of torch is stored once"),
    Undecidable(r"megatron/(dist_.*(fp32|pp1_bf16|fully_reshardable_bf16)|fsdp_.*|torch_dcp_.*)|megatron_core/.*", rf"\.distcp.*({_OTHER})|({_OTHER}).*\.distcp", "values",
        "parts of a DCP save say neither run nor step; of a parameter weight and master are in one part, or there is one of them"),
    Undecidable(r"megatron/old0153_tp2_zarr_fp32", rf"{_OTHER}|zeros", "values",
        "a folder of zarr is an array, which is stored once and without checksums"),
    Undecidable(r"dtensors/.*", _OTHER, "values",
        "files of DTensors by rank are stored once and say neither run nor step"),
    Undecidable(r"(torch/(hf|dcp_hf)_|quantized/|gguf/|folders/|jax/.*(flax|equinox)).*", rf"{_OTHER}|flipped|has zeros|is a copy of", "values",
        "safetensors, GGUF, Equinox and msgpack have no checksums, and each tensor is stored once"),
    Undecidable(r"(torch/(hf|dcp_hf)_|quantized/|gguf/|folders/|jax/.*(flax|equinox)).*", r"flipped", "names|shapes|settings",
        "nor have names, shapes and settings before the tensors"),
    Undecidable(r"trainers/.*", _OTHER, "values",
        "a trainer's weights and optimizer are files that say no run, and an optimizer of torch has no copy of the weights"),
    Undecidable(r"trainers/.*", rf"is that of trainers/|{_OTHER}", "settings",
        "what a trainer was told, and its random numbers, are in files that nothing else tells of"),
    Undecidable(r"trainers/accelerate_.*|folders/acc.*", r"optimizer\S* (is|are) (missing|that of)", "names",
        "a run of accelerate may have had no optimizer, or one that goes by numbers"),
    Undecidable(r"(trainers|folders)/.*", r"model\.safetensors is that of", "names|shapes",
        "weights are one file, which is another model's then"),
    Undecidable(r"folders/adapter_beside", r"model\.safetensors is (missing|called)", "names",
        "an adapter is a checkpoint by itself"),
    Undecidable(r"deepspeed(_writers)?/(z3_|mics_).*", rf"optim_states\.pt.*({_OTHER})|({_OTHER}).*optim_states\.pt", "values",
        "of ZeRO-3's partitions the moments, and in 16 bits the masters, are stored once, and a run of the same step says the same"),
    Undecidable(r"deepspeed(_writers)?/.*", r"all .*model_states\.pt are of another step", "settings",
        "steps that the optimizer skipped make its count another one than the run's"),
    Undecidable(r"deepspeed_writers/nvme_.*", r"offloaded_tensors.*exchanged", "values",
        "swap files have no checksums"),
    Undecidable(r"deepspeed/moe_.*fp32", rf"_expert_.*({_OTHER})", "values",
        "weights of experts in float32 are in one file and in no master"),
    Undecidable(r"deepspeed_universal/.*", r"all step\.pt are missing", "names",
        "an optimizer need not count steps, and no file lists its states"),
    Undecidable(r"deepspeed_universal/.*", r"exp_avg(_sq)?\.pt (is|are exchanged)", "values",
        "moments of a parameter are files of their own, in the shape of its others"),
    Undecidable(r"jax/orbax05-flax_msgpack", r"checkpoint_", "names|shapes|values",
        "each step of a run is a file, whose name alone says which it is"),
    Undecidable(r"jax/equinox.*", r"itself once more", "names",
        "a file of Equinox is one array after another, and does not say how many"),
    Undecidable(r"jax/orbax.*", r"metadata|lie beside|is there too|text mangled", "names|shapes|settings",
        "the metadata of stock Orbax have no checksums, and a run's steps are folders by number"),
    Undecidable(r"jax/orbax.*", r".", "values",
        "stock Orbax stores neither checksums nor duplicates of chunks"),
    Undecidable(r"dtensors/items_.*", r"rng_\d\S* is (missing|called)", "names",
        "a run may have kept no random numbers"),
    Undecidable(r"dtensors/accelerate_.*", r"exchanged", "settings",
        "DCP finds a tensor by what a part has in it, and not by its folder's name"),
    Undecidable(r"(torch/hf_|folders/|trainers/|dtensors/).*", r"\.json|\.tmp/|upper case|all extra_state\S* are of another", "settings",
        "config.json, schedules and their like have no checksum, are stored once, and no array is in them"),
    Undecidable(r"(deepspeed|deepspeed_writers|megatron|megatron_core|trainers)/.*", _OTHER, "values",
        "the second copy of a weight is the optimizer's, which is not read for weights alone", alone=True),
]
# fmt: on


def invisible(
    subject: str, attempt: str, other: str, notes: str = "", weights_only: bool = False
) -> str:
    """The reason for which nothing shows that a result is other, or nothing."""
    rows = (
        row
        for row in INVISIBLE
        if re.fullmatch(row.other, other)
        and row.alone <= weights_only
        and re.fullmatch(row.subjects, subject)
        and re.search(row.attempts, attempt)
    )
    return next((row.reason for row in rows if re.search(row.note, notes)), "")
