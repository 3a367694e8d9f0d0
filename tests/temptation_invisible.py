"""What no reader can see: a table of the classes of changes after which the files are those that an
honest run could have written, each with the reason.

A wrong result is invisible only if a row of the table has its checkpoint, its mistake and what of
the result is other. A checkpoint that stores twice what a mistake changes is in no row for that, so
that it must be refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from folders import stored_tensors
from temptation_subjects import Subject

Files = Mapping[str, bytes]
Leaves = Mapping[str, Any]
_UNREADABLE = (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile)

# Files that say nothing of the arrays: without them, or with those of another save, a checkpoint is
# what it is.
_BESIDE = re.compile(
    r"(latest\w*|latest_checkpointed_iteration\.txt|commit_success\.txt|_CHECKPOINT_METADATA|_sharding)"
)


@dataclass(frozen=True)
class Case:
    """A change of files, and the leaves that came of it and should have."""

    subject: Subject
    before: Files
    after: Files
    found: Leaves
    want: Leaves

    @property
    def changed(self) -> list[str]:
        return [name for name in self.before if self.before[name] != self.after.get(name)]


# All of it is of another: seen in the files.


def another_whole(case: Case) -> bool:
    """Every file that says anything of the arrays is that of one sibling."""
    for which in case.subject.siblings:
        other = case.subject.as_saved(which)
        if case.after == other:
            return True
        mine, theirs = (
            {n: d for n, d in f.items() if not _BESIDE.fullmatch(PurePosixPath(n).name)}
            for f in (case.after, other)
        )
        if mine and {n: d for n, d in theirs.items() if n in case.before} == mine:
            return True
    return False


# Some of it is: by the table.


def other_in(found: Leaves, want: Leaves) -> str:
    """What of a result is other: `names` of leaves, `shapes` or dtypes, `values`, or `settings`."""
    if found.keys() != want.keys():
        return "names"
    pairs = [(np.asarray(found[name]), np.asarray(want[name])) for name in want]
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return "shapes"
    return "values" if any(a.tobytes() != b.tobytes() for a, b in pairs) else "settings"


@dataclass(frozen=True)
class Undecidable:
    """A class: patterns of the whole name of a checkpoint and of what an attempt is, what of the
    result is other, and why nothing that is stored shows it; `alone` if that is so of weights alone.
    """

    subjects: str
    attempts: str
    other: str
    reason: str
    alone: bool = False


_OTHER = r"of another (step|run)|exchanged"
# fmt: off
INVISIBLE = [Undecidable(*row) for row in (
    (r"(torch|dtensors)/(old_|fsdp|dcp_|accelerate_).*", rf"\.distcp.*({_OTHER})|({_OTHER}).*\.distcp", "values",
     "parts of a DCP save say neither run nor step, and a model of torch is stored once"),
    (r"megatron/(dist_.*(fp32|pp1_bf16|fully_reshardable_bf16)|fsdp_.*|torch_dcp_.*)", rf"\.distcp.*({_OTHER})|({_OTHER}).*\.distcp", "values",
     "parts of a DCP save say neither run nor step; of a parameter weight and master are in one part, or there is one of them"),
    (r"megatron/old0153_tp2_zarr_fp32", _OTHER, "values",
     "a folder of zarr is an array, which is stored once and without checksums"),
    (r"dtensors/.*", _OTHER, "values",
     "files of DTensors by rank are stored once and say neither run nor step"),
    (r"(torch/(hf|dcp_hf)_.*|quantized/.*|adapters/.*|gguf/.*|flax/.*)", rf"{_OTHER}|flipped|has zeros|is a copy of", "values",
     "safetensors, GGUF and msgpack have no checksums, and each tensor is stored once"),
    (r"torch\.save/.*-bin", _OTHER, "values",
     "shards of a model by torch.save are stored once"),
    (r"trainers/.*", _OTHER, "values",
     "a trainer's weights and optimizer are files that say no run, and an optimizer of torch has no copy of the weights"),
    (r"trainers/.*", r"is that of trainers/", "settings",
     "what a trainer was told, and its random numbers, are in files that nothing else tells of"),
    (r"deepspeed(_writers)?/(z3_|mics_).*", rf"optim_states\.pt.*({_OTHER})|({_OTHER}).*optim_states\.pt", "values",
     "of ZeRO-3's partitions the moments, and in 16 bits the masters, are stored once, and a run of the same step says the same"),
    (r"deepspeed_writers/nvme_.*", r"offloaded_tensors.*exchanged", "values",
     "swap files have no checksums"),
    (r"deepspeed/moe_.*fp32", rf"_expert_.*({_OTHER})", "values",
     "weights of experts in float32 are in one file and in no master"),
    (r"deepspeed_universal/.*", r"exp_avg(_sq)?\.pt is ", "values",
     "moments of a parameter are files of their own, in the shape of its others"),
    (r"orbax.*", r".", "values",
     "stock Orbax stores neither checksums nor duplicates of chunks"),
    (r"dtensors/accelerate_.*", r"exchanged", "settings",
     "DCP finds a tensor by what a part has in it, and not by its folder's name"),
    (r"(torch/hf_|dtensors/|torch\.save/).*", r"\.json|\.tmp/|upper case", "settings",
     "config.json and its like have no checksum, are stored once, and no array is in them"),
    (r"megatron/.*", r"vocab is one row too ", "shapes",
     "sizes={'vocab': n} is the user's word: Megatron stores padded rows, and not how many tokens there are"),
    (r"(deepspeed|deepspeed_writers|megatron|trainers)/.*", _OTHER, "values",
     "the second copy of a weight is the optimizer's, which is not read for weights alone", True),
)]
# fmt: on


def invisible(case: Case, attempt: str, weights_only: bool = False) -> str:
    """The reason for which nothing shows that a result is other, or nothing."""
    if another_whole(case):
        return "another whole checkpoint"
    other = other_in(case.found, case.want)
    return next(
        (
            row.reason
            for row in INVISIBLE
            if row.other == other
            and row.alone <= weights_only
            and re.fullmatch(row.subjects, case.subject.name)
            and re.search(row.attempts, attempt)
        ),
        "",
    )


# What shows that something is wrong, but not what the right values are: a note must tell it.


def steps_mixed(case: Case) -> bool:
    """Whether parameters are of different steps that were of one.

    An optimizer of torch counts for each parameter the steps in which that had a gradient:
    different steps may be those of a model of which not every part is used in every step.
    """

    def steps(leaves: Mapping[str, Any]) -> set[float]:
        return {float(v) for n, v in leaves.items() if n.startswith("['step']") and np.size(v) == 1}

    return len(steps(case.found)) > len(steps(case.want))


def half_of_a_file_is_zeros(case: Case) -> bool:
    """Whether the second half of a file is zeros, as an interrupted download leaves it."""
    changed = [case.after[name] for name in case.changed if name in case.after]
    return any(len(x) > 512 and any(x) and not any(x[len(x) // 2 :]) for x in changed)


def total_contradicts(case: Case) -> bool:
    """Whether an index tells another size of all tensors than its files have, and told theirs."""
    indexes = [n for n in case.after if n.endswith(".safetensors.index.json")]
    before, after = case.before, case.after
    return any(_total_is_right(n, before) and not _total_is_right(n, after) for n in indexes)


def _total_is_right(index: str, files: Files) -> bool:
    about = json.loads(files[index])
    tensors = [t for t in stored_tensors(files) if t.file in about["weight_map"].values()]
    return about["metadata"]["total_size"] == sum(t.stop - t.start for t in tensors)


def states_kept_apart(case: Case) -> bool:
    """Whether states that are missed are all there, of no parameter."""
    missed = [np.asarray(leaf) for name, leaf in case.want.items() if name not in case.found]
    apart = [np.asarray(v).tobytes() for n, v in case.found.items() if n.startswith("['other']")]
    return bool(missed) and all(leaf.tobytes() in apart for leaf in missed)


TOLD: dict[str, tuple[Callable[[Case], bool], str]] = {
    "steps of several saves": (steps_mixed, r"steps differ"),
    "half of a file is zeros": (half_of_a_file_is_zeros, r"ends in zeros"),
    "states that are kept apart": (states_kept_apart, r"kept under `other`"),
    "a total size of another save": (total_contradicts, r"says that the tensors have"),
}


def shown_by(case: Case) -> list[str]:
    """What of TOLD shows in the files or in what came of them."""
    found = []
    for name, (shows, _) in TOLD.items():
        with contextlib.suppress(*_UNREADABLE):
            found += [name] * shows(case)
    return found
