"""The losses of torch, going on from the live state of cases of `megatron_core.py`.

    PYTHONPATH=tests python tests/generators/megatron_losses.py CASE_FOLDER...

Writes `losses.json` into each folder. The masters and moments are those of truth.npz; the steps are
those of `torch.optim.AdamW`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import megatron_decoder as decoder


def losses(folder: Path) -> list[float]:
    with np.load(folder / "truth.npz") as truth:
        states = {key: torch.from_numpy(truth[key]) for key in truth.files}
    steps = json.loads((folder / "case.json").read_text())["steps"]
    params = {
        key.removeprefix("param/"): torch.nn.Parameter(value)
        for key, value in states.items()
        if key.startswith("param/")
    }
    groups = [
        {
            "params": [p for name, p in params.items() if decoder.decays(name, p.ndim) == decay],
            "weight_decay": decoder.DECAY if decay else 0.0,
        }
        for decay in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=decoder.LR, betas=decoder.BETAS, eps=decoder.EPS)
    for name, param in params.items():
        moments = {state: states[f"{state}/{name}"] for state in ("exp_avg", "exp_avg_sq")}
        adam.state[param] = {"step": torch.tensor(float(steps)), **moments}
    found: list[float] = []
    for batch in decoder.tokens(len(params["output_layer.weight"])):
        adam.zero_grad()
        loss = decoder.loss(torch, params, torch.tensor(batch))
        loss.backward()
        adam.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        (path / "losses.json").write_text(json.dumps(losses(path)))
