"""What both readers of Megatron's checkpoints say of what they found: reasons and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.walk import EMBEDDING

RUN_CONFIG = "run_config.yaml"  # of Megatron-Bridge

LEFT = "of the optimizer, which was to be left aside (weights_only)"
LAYOUT = "describes the layout of the flat buffers, which whole parameters do not need"
GAP = "a gap between tensors in a flat buffer, which holds what was in memory"
BUFFER = "a buffer of the model"
OTHER_FILE = "a file beside those of the checkpoint, which is not read"
STEP = "how often the optimizer stepped"
TRANSFORMER_ENGINE = "what a module of TransformerEngine keeps beside its weights"
COPY_OF_EMBEDDING = f"the last pipeline stage's copy of {EMBEDDING}, compared with it by verify"

WEIGHTS_ALONE = "weights alone: of a 16-bit run these are not the fp32 masters"
WITHOUT_OPTIMIZER = "the checkpoint was saved without its optimizer"

REST_OF_MASTER = "the rest of a master: its weight is taken, as asked"
COPY_OF_HALF = (
    f"the last pipeline stage's copy of {EMBEDDING}, of which the low 16 bits of the masters are"
    " compared"
)


def copy_of_embedding(name: str) -> str:
    return f"a later pipeline stage's copy of {name}, compared with it by verify"


NUMBERED_ALONE = (
    "optimizer states go by numbers, in Megatron's own order, which is that of the model's keys; no"
    " master in the files proves it"
)


def kept_apart(reason: str) -> str:
    return f"kept apart, because nothing says whose it is: {reason}"


def states_apart(reason: str) -> str:
    return (
        "the optimizer's masters and states are kept under `other`, because which parameters its"
        f" groups have is not stored, and their shapes do not tell ({reason}); the parameters are"
        " the model's weights"
    )


def copy_of_master(name: str) -> str:
    return (
        f"the weight that the model computes with, a copy of the master of {name}; verify compares"
    )


def half_of_master(name: str) -> str:
    return f"a half of the master of {name}: the 16-bit weight, or the low 16 bits beside it"


def padded_vocabulary(rows: Any) -> str:
    return (
        f"Megatron does not record the true vocabulary: all {rows} padded rows of the embeddings"
        " are kept. Say it with sizes={'vocab': ...} (--size vocab=...) and the others are left"
        " out"
    )


def without_args(folder: FilePath) -> str:
    if (folder / RUN_CONFIG).is_file():
        return f"Megatron-Bridge wrote it: {RUN_CONFIG} says what the run was"
    return (
        "there are no args (trainers other than Megatron-LM's write none): what the run was is seen"
        " from what is stored, and nothing else was compared with that"
    )


def defaults_taken(absent: Sequence[str]) -> str:
    return f"args lack {', '.join(absent)}; Megatron's defaults were taken"
