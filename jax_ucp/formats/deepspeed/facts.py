"""Facts that all files of a DeepSpeed checkpoint must have alike: they are of one step.

Counters, loss scaler and overflow are reduced over all ranks; groups of parameters are alike in a
pipeline stage.

Facts: `_save_checkpoint` in `runtime/engine.py`, `state_dict` in `runtime/zero/stage_1_and_2.py`,
`stage3.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ucp.formats.deepspeed.files import Rank, TagFiles
from jax_ucp.formats.deepspeed.zero import base_optimizer
from jax_ucp.formats.facts import COUNTS, RATES, Facts
from jax_ucp.formats.nested import as_dict


def check_facts(files: TagFiles, weights_only: bool = False) -> None:
    """Raise FormatError where files, or with `weights_only` weights, are not of one step."""
    facts = Facts(files.folder)
    for mp, models in enumerate(files.models):
        stage = mp // files.tp
        for model in models:
            # The rest of a scheduler's state may be of each rank's own losses.
            file, name, state = model.file, model.name, model.state
            scheduler = state.get("lr_scheduler")
            facts.state_all(file, name, "lr_scheduler", scheduler, only=COUNTS)
            facts.state_all(file, name, "lr_scheduler", scheduler, stage, only=RATES)
            facts.state_all(file, name, "iteration", state.get("iteration"))
            if not weights_only:
                facts.state_all(file, name, "optimizer", _rates(state.get("optimizer")), stage)
    for mp, ranks in enumerate(files.ranks):
        for rank in ranks:
            _of_optimizer(facts, rank, mp // files.tp)
    for (_, mp), stored in files.expert_optimizers.items() if not weights_only else ():
        rates = _rates(stored.state.get("optimizer"))
        facts.state_all(stored.file, stored.name, "optimizer", rates, mp // files.tp)


def _of_optimizer(facts: Facts, rank: Rank, stage: int) -> None:
    for name in ("loss_scaler", "overflow"):
        facts.state_all(rank.file, rank.name, name, rank.state.get(name))
    base = base_optimizer(rank)
    if isinstance(base, list):  # an elastic checkpoint, which has no groups
        states = dict(enumerate(base))
    else:
        facts.state_all(rank.file, rank.name, "optimizer", _rates(base), stage)
        states = as_dict(as_dict(base).get("state"))
    for index, state in states.items():
        if isinstance(state, dict):
            what = f"step of group {index}"
            facts.state_all(rank.file, rank.name, what, state.get("step"), stage)


def _rates(optimizer: Any) -> Mapping[str, Any]:
    """The param groups of an optimizer of torch's, or of one that DeepSpeed wrapped."""
    if not isinstance(optimizer, dict):
        return {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return {"param_groups": inner.get("param_groups")} if isinstance(inner, dict) else {}
