"""Whether torch reads from exports what went into them. Run by hand: torch is no dependency of the
tests.

    python tests/read_with_torch.py write FOLDER     where jax_ucp is installed
    python tests/read_with_torch.py read FOLDER      where torch and safetensors are; says how many tensors are equal

`write` exports some cases in every format, with the bytes of each array beside them. `read` also
loads the DCP exports of torch's own optimizers into one, told other things and with its groups in
another order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CASES = [
    "z1_fp16_dp2", "z2_bf16_dp2_bf16master", "z3_bf16_dp2_frozen_tied", "tp2_dp1_z1_fp32_gqa",
    "z1_fp32_dp2_lion",
]  # fmt: skip
DATA = Path(__file__).parent / "data" / "deepspeed"


def write(folder: Path) -> None:
    import jax_ucp

    for case in CASES:
        checkpoint = jax_ucp.open(DATA / case)
        checkpoint.export(folder / case / "safetensors", "safetensors", max_shard_bytes=10_000)
        for format in ("dcp", "deepspeed"):
            checkpoint.export(folder / case / format, format)
        arrays = {label: checkpoint.read(label) for label in checkpoint}
        raw = {label: np.frombuffer(x.tobytes(), np.uint8) for label, x in arrays.items()}
        named = {label.replace("/", "|"): data for label, data in raw.items()}
        np.savez(folder / case / "truth.npz", **named)
        about = {leaf.label: [leaf.dtype, list(leaf.shape)] for leaf in checkpoint.leaves}
        (folder / case / "truth.json").write_text(json.dumps(about))
        told = {name: group.settings for group in checkpoint.groups for name in group.params}
        (folder / case / "groups.json").write_text(json.dumps(told))


def read_safetensors(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        for name, tensor in load_file(folder / file).items():
            assert index["weight_map"][name] == file
            yield f"param/{name}", tensor


def read_dcp(folder: Path) -> Iterator[tuple[str, Any]]:
    import torch
    from torch.distributed import checkpoint

    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")  # param_groups are objects
    }
    checkpoint.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        path = metadata.planner_data[name]
        yield (f"param/{path[1]}" if path[0] == "model" else f"{path[3]}/{path[2]}"), tensor


def load_optimizer(folder: Path) -> dict[str, dict[str, Any]]:
    """What AdamW has been told for each parameter after `set_optimizer_state_dict`."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = torch.nn.Module()
    entries = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = (name for name in entries if name.startswith("optimizer.state."))
    trained = {name.split(".", 2)[2].rpartition(".")[0] for name in names}
    for name in trained:
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        data = torch.zeros(entries[f"model.{name}"].size)
        module.register_parameter(last, torch.nn.Parameter(data))
    named = dict(model.named_parameters())
    matrices = {many: [p for p in named.values() if (p.ndim > 1) == many] for many in (False, True)}
    groups = [{"params": params} for params in matrices.values()]
    optimizer = torch.optim.AdamW(groups, lr=7.0, betas=(0.1, 0.2), weight_decay=0.7)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for name in named:
        named[name].grad = torch.zeros_like(named[name])
    optimizer.step()
    found = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= {id(param): settings for param in group["params"]}
    return {name: json.loads(json.dumps(found[id(param)])) for name, param in named.items()}


def read_deepspeed(folder: Path) -> Iterator[tuple[str, Any]]:
    """The atoms, as tensors without classes of DeepSpeed: `torch.load` with `weights_only`."""
    import torch

    tag = (folder / "latest_universal").read_text()
    for file in sorted((folder / tag / "zero").glob("*/*.pt")):
        name = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
        with torch.serialization.safe_globals([(type("SubparamShape", (), {}), name)]):
            atom = torch.load(file, weights_only=True)
        state = "param" if file.stem == "fp32" else file.stem
        yield f"{state}/{file.parent.name}", atom["param"] if isinstance(atom, dict) else atom


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    "safetensors": read_safetensors,
    "dcp": read_dcp,
    "deepspeed": read_deepspeed,
}


def read(folder: Path) -> None:
    import torch

    for case in CASES:
        about = json.loads((folder / case / "truth.json").read_text())
        truth = np.load(folder / case / "truth.npz")
        for format, reader in READERS.items():
            equal = 0
            for label, tensor in reader(folder / case / format):
                dtype, shape = about[label]
                if isinstance(tensor, int):  # the step of DeepSpeed's own optimizers
                    tensor = torch.tensor(tensor, dtype=getattr(torch, dtype))
                found = str(tensor.dtype), list(tensor.shape)
                assert found == (f"torch.{dtype}", shape), (case, format, label)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                assert np.array_equal(raw, truth[label.replace("/", "|")]), (case, format, label)
                equal += 1
            print(f"{case}: {format}: {equal} of {len(about)} arrays are there, and equal")
        told = json.loads((folder / case / "groups.json").read_text())
        if all("betas" in settings and "fused" in settings for settings in told.values()):
            assert load_optimizer(folder / case / "dcp") == told, case
            print(f"{case}: dcp: AdamW is told the same for {len(told)} parameters, and steps")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
