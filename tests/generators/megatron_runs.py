"""Runs of Megatron-LM on a CPU that train, save, and go on from a checkpoint.

    python tests/generators/megatron_runs.py FOLDER --source DIR/core_v0.16.1 --python PYTHON

Checks `export --format megatron`: FOLDER gets runs of three steps at TP 2 and PP 2, their exports by
PYTHON's jax_ucp (`export`), exports of what was converted to other names and back (`back`), and what
runs that load them have: the tensors by `megatron.core`'s own
`dist_checkpointing.load_plain_tensors`, the live weights and states of every rank, and the next
three losses, at TP 2 and PP 2, and at TP 1, each beside those from Megatron's own checkpoint. With
`--jax DIR` DIR has what `examples/megatron_resume.py --export` wrote, of runs that made three steps
of six in JAX: their next three losses, beside those of Megatron alone. The source, and what stands
in for CUDA, are as in `megatron_core.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_core
import megatron_stand_ins as megatron
import ranks
import torch
import torch.distributed as dist
from megatron_cases import ALWAYS, GATHER, LLAMA, STEPS, parallel

HERE = Path(__file__).resolve()
BASE = f"""{ALWAYS} {LLAMA} --num-layers 2 --hidden-size 32 --ffn-hidden-size 24 --min-lr 0.001
--lr-decay-style cosine --lr-warmup-iters 2 --vocab-size 111 --save-interval 1000
--ckpt-format torch_dist --transformer-impl local --seed 1234"""
ZERO = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
QK = "--qk-layernorm"
LLAMA, QWEN3 = "megatron-llama-to-hf", "megatron-qwen3-to-hf,hf-qwen3-to-maxtext"
QWEN3_MOE = "megatron-qwen3-moe-to-hf,hf-qwen3-moe-to-maxtext"
# Name -> arguments, the largest parallel degrees beside TP 1 (tp, pp, ep, ranks), and mappings.
RUNS = {
    "fp32": ("", (2, 2, 1, 4), LLAMA),
    "bf16": ("--bf16", (2, 2, 1, 4), LLAMA),
    "bf16_zero": (f"--bf16 {ZERO}", (2, 2, 1, 4), LLAMA),
    "qwen3": (QK, (2, 2, 1, 4), QWEN3),
    "qwen3_bf16_zero": (f"--bf16 {QK} {ZERO}", (2, 2, 1, 4), QWEN3),
    "mixtral": (GATHER, (1, 2, 2, 4), "megatron-mixtral-to-hf"),
    "qwen3_moe": (f"{GATHER} {QK}", (1, 2, 2, 4), QWEN3_MOE),
    "qwen3_moe_bf16_zero": (f"--bf16 {GATHER} {QK} {ZERO}", (1, 2, 2, 4), QWEN3_MOE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    parser.add_argument("--jax", type=Path, metavar="DIR")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.run:
        _run(json.loads(options.run))
        return
    if options.jax:
        _go_on(options)
        return
    for name in options.only:
        argv, degrees, mappings = RUNS[name]
        folder = options.folder.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        first = _start(options, f"{name} trains", argv, degrees, save=folder / "own")
        for command, source, target, *more in (
            ("export", "own", "export", "--format", "megatron"),
            ("convert", "own", "mapped", "--mapping", mappings),
            ("export", "mapped", "back", "--format", "megatron", "--mapping", mappings),
        ):
            line = [options.python, "-m", "jax_ucp", command, folder / source, folder / target]
            subprocess.run([*line, *more], check=True)
        for each in (degrees, (1, 1, degrees[2], degrees[2])):
            own, *others = (
                _start(options, f"{name} from {kind} {each}", argv, each, load=folder / kind)
                for kind in ("own", "export", "back")
            )
            for kind, found in zip(("export", "back"), others, strict=True):
                same = {key: own[key] == found[key] for key in ("plain", "live", "losses")}
                off = [abs(a - b) for a, b in zip(first["losses"], found["losses"], strict=True)]
                print(f"{name} {each} {kind}: as from its own: {same}; off the run {max(off):.1e}")
                print(f"    {first['losses']} {found['losses']}", flush=True)


def _go_on(options) -> None:
    """Six steps of Megatron from the checkpoints of `next_` cases, and three from those of JAX."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for exported in sorted(options.jax.resolve().iterdir()):
        case = megatron_core.CASES[f"next_{exported.name}"]
        own = HERE.parents[1] / "data" / "megatron_next" / exported.name / "ckpt"
        sizes = {"layers": case.layers, "hidden": case.hidden, "ffn": case.ffn}
        argv = megatron_core.BASE.format(**sizes, seed=case.seed, tokens=case.vocab - 1)
        argv += f" {case.model} {case.argv} --transformer-impl local"
        alone = _launch(options, case.name, argv, case.world, load=own, more=2 * STEPS)["losses"]
        more = _launch(options, exported, argv, case.world, load=exported, first=2 * STEPS)
        off = max(abs(a - b) / a for a, b in zip(alone[STEPS:], more["losses"], strict=True))
        print(f"{case.name}: {alone[:STEPS]}, then {alone[STEPS:]}")
        print(f"    after JAX {more['losses']}, apart by {off:.1e}", flush=True)


def _start(options, what, argv, degrees, **more):
    tp, pp, ep, world = degrees
    return _launch(options, what, f"{BASE} {argv} {parallel(tp, pp, ep)}", world, **more)


def _launch(options, what, argv, world, save=None, load=None, first=STEPS, more=STEPS):
    arguments = argv.split()
    arguments += ["--save", str(save)] if save else []
    arguments += ["--load", str(load)] if load else []
    out = options.folder.resolve() / "result.json"
    spec = {"argv": arguments, "world": world, "save": bool(save), "out": str(out)}
    spec |= {"load": str(load) if load else "", "first": first, "more": more}
    arguments = [HERE, options.folder, "--source", ".", "--python", ".", "--run", json.dumps(spec)]
    code = ranks.run_alone(arguments, options.source, options.folder / "log")
    if code:
        lines = (options.folder / "log").read_text().splitlines()
        raise SystemExit(f"{what} failed:\n" + "\n".join(lines[-30:]))
    return json.loads(out.read_text())


def _run(spec) -> None:
    sys.path.append(sys.path.pop(0))  # this folder has files with names of packages
    megatron.install_cuda()
    megatron.install_packages("triton")
    sys.argv = ["run", *spec["argv"]]
    importlib.import_module("pretrain_gpt")
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(moe).setdefault("te_general_gemm", None)  # 0.16.1 names it without the engine too
    if "--use-distributed-optimizer" in spec["argv"]:
        _use_fused_adam()
    ranks.on_ranks(spec["world"], lambda: _train(spec))


def _use_fused_adam() -> None:
    """Megatron cannot load what its distributed optimizer saved of torch's Adam."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    optimizers.Adam = distrib_optimizer.Adam = megatron.FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True


def _train(spec) -> None:
    from megatron.training import get_args

    run = megatron.set_up()
    args, first, result = get_args(), spec["first"], {}
    if spec["save"]:
        for iteration in range(STEPS):
            megatron_core.train_step(run, iteration)
        args.iteration, args.consumed_train_samples = STEPS, 8 * STEPS
        megatron.save(STEPS, *run)
    elif args.iteration != first or args.consumed_train_samples != 8 * first:
        raise RuntimeError(f"iteration {args.iteration}, {args.consumed_train_samples} samples")
    if spec["load"]:
        # with a barrier of all ranks
        result["plain"] = _plain(Path(spec["load"]) / f"iter_{first:07d}")
    everyone = [None] * spec["world"]
    dist.all_gather_object(everyone, _live(run))
    result["live"] = everyone
    result["losses"] = [megatron_core.train_step(run, first + each) for each in range(spec["more"])]
    if not dist.get_rank():
        Path(spec["out"]).write_text(json.dumps(result))
    dist.barrier()


def _plain(folder: Path) -> dict[str, str]:
    """The digests of all tensors, as megatron-core loads them without a model."""
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(folder))
    return {key: _digest(value) for key, value in sorted(tensors.items()) if _digest(value)}


def _live(run) -> dict[str, str]:
    """The digests of what a rank has: weights, masters and moments, steps and learning rates."""
    models, optimizer, scheduler = run
    live = {}
    for i, model in enumerate(models):
        live |= {f"{i} {name}": _digest(value) for name, value in model.named_parameters()}
    for o, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for g, group in enumerate(one.optimizer.param_groups):
            live[f"{o} {g}"] = repr({key: v for key, v in group.items() if key != "params"})
            for p, parameter in enumerate(group["params"]):
                live[f"{o} {g} {p}"] = _digest(parameter)
                for state, value in one.optimizer.state[parameter].items():
                    live[f"{o} {g} {p} {state}"] = _digest(value)
    return live | {"scheduler": repr(scheduler.state_dict())}


def _digest(value) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"


if __name__ == "__main__":
    main()
