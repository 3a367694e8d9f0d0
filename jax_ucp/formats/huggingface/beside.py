"""Notes on files beside a checkpoint: other weights, and the state of a trainer, known by name.

Facts: `trainer.py` of transformers, `checkpointing.py` and `utils/fsdp_utils.py` of accelerate.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from jax_ucp.files.path import FilePath
from jax_ucp.formats.weight_names import holds_weights
from jax_ucp.text import listed

TRAINER_STATE = "trainer_state.json"
OPTIMIZER, SHARDS = "the states of the optimizer", "sharded states of the run"
TRAINER = "the state of the trainer"
_WEIGHTS_BESIDE = "weights beside the checkpoint"
ADAPTER = "an adapter, which changes the weights and is not applied"
_BESIDE = (
    (re.compile(r"optim(izer)?(_\d+)?(\.(pt|pth|bin|ckpt))?"), OPTIMIZER),
    (re.compile(r"global_step\d+|latest|(pytorch_model_fsdp|mp_rank)_\d+.*"), SHARDS),
    (
        re.compile(
            r"(scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args"
            r"|trainer_state|custom_checkpoint|meta)(_\d+)*\.(pt|pth|bin|pkl|json)"
        ),
        TRAINER,
    ),
    (re.compile(r"adapter_model\..*"), ADAPTER),
    (
        re.compile(r".*\.(h5|msgpack|gguf|npz|onnx|pth|pt|ckpt|mlmodel|tflite|nemo)"),
        "may hold weights, too",
    ),
)


def notes_beside(path: FilePath, of_torch: bool, kept: Collection[str] = ()) -> Iterator[str]:
    """Notes on weights and a trainer's state beside a checkpoint, but for files `kept`."""
    files = [info.name for info in path.folder().list() if info.kind == "file"]
    files = [name for name in files if name not in kept]
    by_kind: dict[str, list[str]] = {_WEIGHTS_BESIDE: [], TRAINER: []}
    for name in files:
        kind = _WEIGHTS_BESIDE if holds_weights([name]) else what_is(name)
        by_kind.setdefault(kind, []).append(name)
    unnoted = {"", SHARDS}
    if of_torch:
        unnoted |= by_kind.keys() - {_WEIGHTS_BESIDE, TRAINER}
    for kind, names in by_kind.items():
        if kind not in unnoted:
            yield from notes(kind, names)


def notes(reason: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"not read: {listed(names)}: {reason}"


def what_is(name: str) -> str:
    return next((what for pattern, what in _BESIDE if pattern.fullmatch(name)), "")
