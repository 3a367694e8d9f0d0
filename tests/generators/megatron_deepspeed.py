"""Checkpoints that Megatron-DeepSpeed itself writes, on a CPU, with the live state of the run beside.

    python tests/generators/megatron_deepspeed.py OUT --source DIR [--only CASE ...]

DIR has the source of Megatron-DeepSpeed in one folder for each commit that a case names. The Python
that runs this has torch, deepspeed 0.17.2, transformers 4, numpy, einops, regex and pybind11.
Models, train steps and writers are the library's own, but for modules of
images.

Three steps are made on random tokens with ZeRO-1 in float32. The state is taken from the live
optimizers of all ranks, never from the files, and the logits are the live model's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

from ranks import free_port

STEPS, VOCAB = 3, 101
BASE = """--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --lr 0.01 --train-iters 10 --lr-decay-style constant
--weight-decay 0.1 --adam-beta2 0.95 --tokenizer-type NullTokenizer --vocab-size 100
--make-vocab-size-divisible-by 8 --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0
--deepspeed --zero-stage 1 --no-async-tensor-model-parallel-allreduce
--save-interval 1 --seed 1234"""
LATEST, BEFORE_FPDT = "4efb479d", "6acc370a"  # of 16 July 2025 and 18 October 2024


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: what it is told, and on how many ranks."""

    name: str
    argv: str
    world: int = 2
    commit: str = LATEST


CASES = [
    Case("gpt2_tp2", "--no-pipeline-parallel --tensor-model-parallel-size 2 --no-bias-gelu-fusion"),
    Case("gpt2_tp2_before_fpdt", "--no-pipeline-parallel --tensor-model-parallel-size 2", 2,
         BEFORE_FPDT),
    Case("gpt2_pp2_tp2", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.case:
        case = next(case for case in CASES if case.name == options.case)
        _write(case, (options.out / case.name).resolve(), (options.source / case.commit).resolve())
        return
    for case in CASES:
        if not options.only or case.name in options.only:
            _run(case, options)


def _run(case: Case, options: argparse.Namespace) -> None:
    folder = options.out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(options.out)]
    command += ["--source", str(options.source), "--case", case.name]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    settings |= {"OMP_NUM_THREADS": "1", "PYTORCH_JIT": "0", "TORCHDYNAMO_DISABLE": "1"}
    settings |= {"WORLD_SIZE": str(case.world), "LOCAL_SIZE": str(case.world)}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(folder / f"log{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(case.world)
    ]
    codes = [rank.wait(300) for rank in ranks]
    print(f"{case.name}: {'FAILED' if any(codes) else 'written'}", flush=True)
    if not any(codes):
        for rank in range(case.world):
            (folder / f"log{rank}").unlink()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The library's modules of images, which need torchvision: every name is an empty class."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("megatron.model.vision.knn_monitor", "megatron.data.vit_dataset"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__file__ = __file__
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module) -> None: ...


def _write(case: Case, folder: Path, source: Path) -> None:
    """Train and save, as one rank of several."""
    rank = int(os.environ["RANK"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    os.chdir(folder)
    settings = Path(f"ds{rank}.json")
    settings.write_text(json.dumps(config))
    sys.argv = ["generate", *BASE.split(), *case.argv.split(), "--global-batch-size", "2"]
    sys.argv += ["--deepspeed_config", str(settings), "--save", "ckpt"]
    sys.path[:] = [str(source), *(p for p in sys.path if p != str(Path(__file__).parent))]
    sys.meta_path.insert(0, _StandIns())

    import megatron.initialize as initialize
    import pretrain_gpt
    import torch.distributed as dist
    from megatron import get_args, training
    from megatron.checkpointing import save_checkpoint
    from megatron.core import mpu
    from megatron.core.enums import ModelType

    initialize._compile_dependencies = lambda: None  # of datasets and of CUDA

    def provider(*arguments, **options):
        model = pretrain_gpt.model_provider(*arguments, **options)
        _randomise(model, mpu.get_tensor_model_parallel_rank())
        return model

    training.initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    args = get_args()
    args.deepspeed_config_dict, args.deepspeed_config = config, None
    made = training.setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
    [engine], optimizer, scheduler = made
    for step in range(STEPS):
        _train(engine, step)
    args.iteration, args.consumed_train_tokens = STEPS, STEPS * 2 * 16
    mine = [
        (
            name,
            getattr(p, "tensor_model_parallel", False) and p.partition_dim,
            _states(p, optimizer),
        )
        for name, p in engine.module.named_parameters()
    ]
    measured = _logits(engine)
    save_checkpoint(STEPS, [engine], optimizer, scheduler)
    everyone = [None] * case.world if rank == 0 else None
    dist.gather_object((mpu.get_tensor_model_parallel_rank(), mine), everyone, dst=0)
    if everyone:
        _write_truth(case, folder, everyone, measured)
    dist.barrier()
    settings.unlink()
    sys.stdout.flush()
    os._exit(0)


def _randomise(model, rank: int) -> None:
    import numpy as np
    import torch

    for name, p in model.named_parameters():
        own = rank if getattr(p, "tensor_model_parallel", False) else 0
        seed = int.from_bytes(hashlib.sha256(f"{name} {own}".encode()).digest()[:8], "little")
        noise = np.random.default_rng(seed).standard_normal(tuple(p.shape), dtype=np.float32)
        is_scale = p.ndim == 1 and name.endswith("weight")
        with torch.no_grad():
            p.copy_(torch.from_numpy(noise) * 0.1 + is_scale)


def _batch(seed: int):
    """Tokens, their places, what follows each, and weights of one of these losses."""
    import torch

    rows = torch.randint(100, (1, 17), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(16)[None]
    return rows[:, :-1].contiguous(), places, rows[:, 1:].contiguous(), torch.ones(1, 16)


def _mask():
    import torch

    return torch.ones(1, 1, 16, 16).triu(1).bool()


def _train(engine, step: int) -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    batches = [_batch(2 * step + i) for i in range(2)]
    if isinstance(engine, PipelineEngine):
        engine.set_batch_fn(lambda b: ((b[0], b[1], _mask()), (b[2], b[3])))
        engine.train_batch(iter(batches))
        return
    for tokens, places, labels, _ in batches:
        losses, _ = engine(tokens, places, _mask(), labels=labels)
        engine.backward(losses.mean())
        engine.step()


def _states(parameter, zero):
    """The live master and moments of a parameter, all of it, as no rank shares a parameter."""
    master = parameter._hp_mapping.hp_fragment
    memory = master.untyped_storage().data_ptr()
    [flat] = [f for f in zero.single_partition_of_fp32_groups if f.data_ptr() == memory]
    first = master.storage_offset()
    own = zero.optimizer.state[flat]
    states = {"param": flat, **{key: own[key] for key in ("exp_avg", "exp_avg_sq")}}
    own = {
        state: whole.detach()[first : first + parameter.numel()]
        .view(parameter.shape)
        .numpy()
        .copy()
        for state, whole in states.items()
    }
    return own | {"step": zero.optimizer.state[flat]["step"].numpy().copy()}


def _logits(engine):
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from megatron.core import mpu
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens, places, *_ = _batch(7)
    engine.module.eval()
    result = None
    with torch.no_grad():
        if not isinstance(engine, PipelineEngine):
            result = engine.module(tokens, places, _mask())[0]
        elif mpu.is_pipeline_first_stage():
            hidden = engine.module((tokens, places, _mask()))
            dist.send(hidden.contiguous(), mpu.get_pipeline_model_parallel_next_rank())
        else:
            hidden = torch.empty(16, 1, 16)
            dist.recv(hidden, mpu.get_pipeline_model_parallel_prev_rank())
            result = engine.module(hidden).transpose(0, 1)
        if result is not None:
            result = gather_from_tensor_model_parallel_region(result)[..., :VOCAB].numpy()
    engine.module.train()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    found = [logits for logits in everyone if logits is not None]
    return {"io/tokens": tokens.numpy(), "io/logits": found[0]}


def _write_truth(case: Case, folder: Path, everyone, measured) -> None:
    """Put together what all ranks have: slices of tensor parallelism in order, copies once."""
    import deepspeed
    import numpy as np
    import torch

    slices: dict[str, dict[int, tuple[object, dict[str, np.ndarray]]]] = {}
    for tensor_rank, mine in everyone:
        for name, axis, states in mine:
            known = slices.setdefault(name, {}).setdefault(tensor_rank, (axis, states))[1]
            is_unused = "position" in name  # and decays in the last stage, which has it to be tied
            if not is_unused and any(known[s].tobytes() != states[s].tobytes() for s in states):
                raise RuntimeError(f"copies of {name} differ")
    truth = dict(measured)
    for name, by_rank in slices.items():
        axis = by_rank[0][0]
        for state in ("param", "exp_avg", "exp_avg_sq", "step"):
            parts = [by_rank[rank][1][state] for rank in sorted(by_rank)]
            is_whole = axis is False or state == "step"
            if is_whole and any(part.tobytes() != parts[0].tobytes() for part in parts):
                raise RuntimeError(f"copies of {name} differ")
            whole = parts[0] if is_whole else np.concatenate(parts, axis)
            is_padded = "word_embeddings" in name and state != "step"
            truth[f"{state}/{name}"] = whole[:VOCAB] if is_padded else whole
    np.savez_compressed(folder / "truth.npz", **truth)
    versions = {"megatron_deepspeed": case.commit, "deepspeed": deepspeed.__version__}
    about = {
        "writer": {**versions, "torch": torch.__version__},
        "options": {"sizes": {"vocab": VOCAB}},
        "dtypes": {},
        "argv": case.argv.split(),
        "world": case.world,
    }
    (folder / "case.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
