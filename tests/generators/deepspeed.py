"""Small checkpoints that DeepSpeed writes, with the state of the processes that trained them.

    python tests/generators/deepspeed.py OUT [--only PART ...]

Needs torch, deepspeed, and for some cases bitsandbytes or transformers; g++ and ninja compile what
DeepSpeed's CPU optimizers need, once. Writes for each case OUT/<case>/ckpt, truth.npz with keys
`<state>/<parameter>` and case.json. Truth is gathered from the live partitions before the save,
never from a file. A parameter whose state differs between the ranks that hold all of it has the key
`differs/<state>/<parameter>` instead.

What runs nowhere without a GPU takes its own arithmetic out and keeps the writer: `nvme` replaces
the asynchronous file handle by plain reads and writes, `onebit` the compressed all-reduce by its
mean, `superoffload` and `zenflow` run their CPU optimizer in the training process. case.json says so
under "replaced".
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import ranks
import writing

sys.path.remove(str(Path(__file__).parent))  # this file is called like the package

# ---- cases -----------------------------------------------------------------------------------

CASES: dict[str, dict] = {}
ADAMW = {"kind": "torch", "class": "AdamW"}


def case(name: str, **changes) -> None:
    CASES[name] = {
        "world": 2, "stage": 1, "dtype": "bf16", "steps": 3, "model": "mlp", "optimizer": ADAMW,
        "zero": {}, "ds": {"zero_allow_untested_optimizer": True}, "seed": 1, "resume": None,
        "init": False, "exclude_frozen": False, **changes,
    }  # fmt: skip


def by_config(kind: str, **params) -> dict:
    return {"kind": "config", "type": kind, "params": {"lr": 0.01, **params}}


MUON = {"optimizer": by_config("Muon"), "model": "muon"}
CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"device": "nvme", "nvme_path": "NVME"}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True}
STAGES = ((0, 1), (1, 2), (2, 3), (3, 2))  # and how many ranks

# fmt: off
for stage, world in STAGES:
    zero = {"reduce_scatter": False} if stage == 3 else {}
    for dtype in ("bf16", "fp32"):
        case(f"muon_z{stage}_{dtype}_dp{world}", stage=stage, dtype=dtype, world=world, zero=zero, **MUON)
for stage in (1, 2):
    case(f"muon_z{stage}_offload_dp2", stage=stage, zero=CPU, **MUON)
    case(f"muon_z{stage}_aligned_dp3", stage=stage, world=3, zero={"parameter_alignment": True}, **MUON)
    case(f"muon_z{stage}_noscatter_dp4", stage=stage, world=4, zero={"reduce_scatter": False}, **MUON)
case("muon_z3_subgroups_dp2", stage=3, zero={"reduce_scatter": False, "sub_group_size": 100}, **MUON)
case("muon_z2_odd_dp4", stage=2, world=4, **{**MUON, "model": "muon_odd"})
for stage, world in STAGES:
    dtype = "bf16" if stage else "fp32"
    for opt in ("AdamW8bit", "Lion8bit", "AdEMAMix8bit", "AdEMAMix", "SGD8bit"):
        case(f"bnb_{opt.lower()}_z{stage}_dp{world}", stage=stage, world=world, dtype=dtype, optimizer={"kind": "bnb", "class": opt})
    for end, beta1 in (("", None), ("_beta1", 0.9)):
        case(f"adafactor_z{stage}_dp{world}{end}", stage=stage, world=world, dtype="bf16" if stage == 3 else "fp32",
             optimizer={"kind": "adafactor", "beta1": beta1})
case("bnb_ademamix8bit_wide_z0_dp1", stage=0, world=1, dtype="fp32", model="wide",
     optimizer={"kind": "bnb", "class": "AdEMAMix8bit", "min": 1024})
for stage in (2, 3):
    case(f"bnb_adamw8bit_wide_z{stage}_dp2", stage=stage, model="wide", optimizer={"kind": "bnb", "class": "AdamW8bit", "min": 4096})
for stage in (1, 2, 3):
    case(f"lion_z{stage}_offload", stage=stage, optimizer=by_config("Lion"), zero=CPU)
    case(f"cpuadam_z{stage}_offload_dp3", stage=stage, world=3, zero=CPU, dtype="fp32", optimizer=by_config("AdamW"))
    case(f"sgd_z{stage}", stage=stage, optimizer={"kind": "torch", "class": "SGD"})
    for dtype in ("bf16", "fp16", "fp32"):
        case(f"adamw_z{stage}_{dtype}_dp3", stage=stage, dtype=dtype, world=3, model="odd")
    for end, overlap in (("", False), ("_overlap", True)):
        zenflow = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 2, "update_interval": 2,
                   "full_warm_up_rounds": 1, "overlap_step": overlap}
        case(f"zenflow_z{stage}{end}", stage=stage, optimizer=by_config("AdamW"), replaced=["ZenFlow's optimizer process"],
             zero={**CPU, "overlap_comm": True, "zenflow": zenflow})
case("adamw_z1_bf16opt_dp3", world=3, model="odd", ds=FP32_GRADS)
case("superoffload_z3", stage=3, optimizer=by_config("AdamW"), zero={"offload_optimizer": {"device": "cpu", "super_offload": True}})
for kind, steps in (("OneBitAdam", "freeze_step"), ("ZeroOneAdam", "var_freeze_step"), ("OneBitLamb", "freeze_step")):
    compressed = by_config(kind, **{steps: 2}, cuda_aware=False, comm_backend_name="nccl")
    for dtype in ("fp32", "fp16"):
        case(f"{kind.lower()}_{dtype}", stage=0, dtype=dtype, replaced=["the compressed all-reduce"], optimizer=compressed)
for shard, world in ((1, 2), (2, 4), (2, 2)):
    case(f"mics_shard{shard}_dp{world}", stage=3, world=world, init=True, model="even", zero={"mics_shard_size": shard})
for size in (1, 2):
    case(f"zeropp_hpz{size}_dp4", stage=3, world=4, init=True, model="even", zero={"zero_hpz_partition_size": size})
case("frozen_z3_dp3", stage=3, world=3, model="frozen")
case("frozen_z1_dp2", model="frozen")
case("nvme_z3_dp2", stage=3, optimizer=by_config("AdamW"), model="wide", replaced=["aio_handle"],
     zero={"offload_optimizer": {**NVME, "pin_memory": False}, "sub_group_size": 6000})
case("nvme_z3_small_dp2", stage=3, optimizer=by_config("AdamW"), replaced=["aio_handle"], zero={"offload_optimizer": NVME})
for stage, world, after in ((1, 2, 3), (2, 3, 2), (3, 2, 3), (1, 4, 1)):
    case(f"resaved_z{stage}_dp{world}_to_dp{after}", stage=stage, world=world, resume=after)
for world, after in ((2, 3), (4, 1)):
    case(f"resaved_z1_bf16opt_dp{world}_to_dp{after}", world=world, resume=after, ds=FP32_GRADS)
# fmt: on


# ---- the training processes ------------------------------------------------------------------


def build_model(kind: str):
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, inner: int, width: int):
            super().__init__()
            self.a = nn.Linear(8, inner)
            self.m = nn.Linear(inner, inner, bias=False)
            self.n = nn.LayerNorm(inner)
            self.b = nn.Linear(inner, width)
            self.gain = nn.Parameter(torch.ones(inner if kind == "even" else 1))

        def forward(self, x):
            return self.b(self.n(self.m(torch.tanh(self.a(x)))) * self.gain)

    inner, width = {"wide": (96, 64), "odd": (13, 7), "muon_odd": (13, 7)}.get(kind, (12, 8))
    model = Net(inner, width)
    if kind.startswith("muon"):
        for parameter in model.parameters():
            parameter.use_muon = parameter.ndim > 1
    if kind == "frozen":
        model.a.weight.requires_grad_(False)
        model.n.bias.requires_grad_(False)
    return model, width


def build_optimizer(about: dict, model):
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in parameters if p.ndim > 1]
    groups = [
        {"params": decay, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if about["kind"] == "torch":
        more = {"momentum": 0.9} if about["class"] == "SGD" else {}
        return getattr(torch.optim, about["class"])(groups, lr=0.01, **more)
    if about["kind"] == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False,
                         beta1=about["beta1"])  # fmt: skip
    import bitsandbytes

    cls = getattr(bitsandbytes.optim, about["class"])
    more = {"momentum": 0.9} if about["class"].startswith("SGD") else {}
    return cls(groups, lr=0.01, min_8bit_size=about.get("min", 1), **more)


def replace_gpu_parts(spec: dict) -> None:
    """Put plain arithmetic where DeepSpeed's own needs a GPU, or a library that is not here."""
    import torch

    replaced = spec.get("replaced", ())
    if spec["dtype"] == "fp16":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    if "aio_handle" in replaced:
        replace_aio()
    if "zenflow" in spec["zero"] and spec["stage"] == 3:
        for name in ("zeros", "empty", "ones", "tensor"):
            setattr(torch, name, on_cpu(getattr(torch, name)))
    if "mics_shard_size" in spec["zero"]:
        torch.distributed.distributed_c10d._all_gather_base_coalesced = gather_each
    if "the compressed all-reduce" in replaced:
        replace_compression()


def on_cpu(make):
    """A function of torch's that takes "cuda" for "cpu"."""

    def made(*args, device=None, **kwargs):
        return make(*args, **kwargs, device="cpu" if device == "cuda" else device)

    return made


def gather_each(outputs, inputs, group=None, async_op=False):
    """What gloo has no coalesced gather for."""
    import torch

    for output, part in zip(outputs, inputs, strict=True):
        handle = torch.distributed.all_gather_into_tensor(output, part, group=group, async_op=True)
        handle.wait()
    return handle


def replace_aio() -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor import optimizer_utils

    optimizer_utils.MIN_AIO_BYTES = 256  # small tensors are swapped too

    class Handle:
        """Whole files, written and read at once."""

        def __init__(self, *args, **kwargs):
            self.pending, self.pinned = 0, set()

        def get_intra_op_parallelism(self):
            return 1

        get_thread_count = get_intra_op_parallelism

        def get_alignment(self):
            return 512

        def get_block_size(self):
            return 4096

        def new_cpu_locked_tensor(self, count, tensor):
            result = torch.zeros(count, dtype=tensor.dtype)
            self.pinned.add(result.untyped_storage().data_ptr())
            return result

        def free_cpu_locked_tensor(self, tensor):
            return True

        def is_pinned(self, tensor):
            return tensor.untyped_storage().data_ptr() in self.pinned

        def async_pwrite(self, tensor, path, *args):
            Path(path).write_bytes(tensor.detach().contiguous().numpy().tobytes())
            self.pending += 1
            return 0

        def async_pread(self, tensor, path, *args):
            data = np.fromfile(path, dtype=tensor.detach().numpy().dtype, count=tensor.numel())
            tensor.detach()[: data.size].copy_(torch.from_numpy(data))
            self.pending += 1
            return 0

        def wait(self):
            pending, self.pending = self.pending, 0
            return pending

        def sync_pwrite(self, *args):
            self.async_pwrite(*args), self.wait()
            return 1

        def sync_pread(self, *args):
            self.async_pread(*args), self.wait()
            return 1

    AsyncIOBuilder.load = lambda self, verbose=True: types.SimpleNamespace(aio_handle=Handle)
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: True
    get_accelerator().pin_memory = lambda tensor, align_bytes=1, **_: tensor


def replace_compression() -> None:
    import torch.distributed as dist

    class Mean:
        def __init__(self, *args, **kwargs):
            self.size, self.rank = dist.get_world_size(), dist.get_rank()

        def compressed_allreduce(self, tensor, worker_error, server_error, local_rank):
            worker_error.add_(0.5)
            server_error.sub_(0.25)
            dist.all_reduce(tensor)
            return tensor.div_(dist.get_world_size())

    module = types.ModuleType("deepspeed.runtime.comm.nccl")
    module.NcclBackend = Mean
    sys.modules[module.__name__] = module


def ds_config(spec: dict, out: Path) -> dict:
    zero = json.dumps({"stage": spec["stage"], **spec["zero"]})
    zero = json.loads(zero.replace("NVME", str(out)))
    if "stage3_param_persistence_threshold" not in zero and spec["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **spec["ds"],
    }  # fmt: skip
    if spec["dtype"] != "fp32":
        config[spec["dtype"]] = {"enabled": True}
    if spec["dtype"] == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    if spec["optimizer"]["kind"] == "config":
        config["optimizer"] = {k: spec["optimizer"][k] for k in ("type", "params")}
    if "zenflow" in zero:
        config["gradient_clipping"] = 0.0
    if "aio_handle" in spec.get("replaced", ()):
        config["aio"] = {"block_size": 256}
    return config


def start(spec: dict, out: Path, universal: bool = False):
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(spec["seed"])
    # gloo does without what takes minutes to compile
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    replace_gpu_parts(spec)
    config = ds_config(spec, out)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    with contextlib.ExitStack() as sharded:
        if spec["init"]:
            init = deepspeed.zero.Init
            if "mics_shard_size" in spec["zero"]:
                from deepspeed.runtime.zero.mics import MiCS_Init as init
            sharded.enter_context(init(config_dict_or_path=config))
        model, width = build_model(spec["model"])
    given = (
        {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
        if spec["optimizer"]["kind"] == "config"
        else {"optimizer": build_optimizer(spec["optimizer"], model)}
    )
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine, width


def train(engine, width: int, spec: dict, steps: int, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed + 17 * torch.distributed.get_rank())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec["dtype"], torch.float32)
    for _ in range(steps):
        x = torch.randn(2, 8, generator=generator).to(dtype)
        y = torch.randn(2, width, generator=generator).to(dtype)
        loss = ((engine(x) - y) ** 2).float().mean()
        engine.backward(loss)
        engine.step()


# ---- truth -----------------------------------------------------------------------------------


def elements_of(tensor) -> np.ndarray:
    return writing.bits(tensor)[0]


def live_state(engine, spec: dict) -> dict[str, object]:
    """What this process has of each parameter: {"state/name": value of the whole, or a part}."""
    names = {p: name for name, p in engine.module.named_parameters()}
    if spec["stage"] == 0:
        return whole_state(engine, names)
    return partitions(engine, names, spec["stage"])


def whole_state(engine, names) -> dict[str, object]:
    """Without ZeRO: states of each parameter, or of a flat buffer of a group's masters."""
    result: dict[str, object] = {}
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    for p, name, master, at in masters_of(optimizer, names):

        def of_parameter(value, master=master, at=at, p=p):
            part = value.reshape(-1)[at : at + p.numel()] if at is not None else value
            return elements_of(part.reshape(p.shape)) if value.shape == master.shape else None

        result[f"param/{name}"] = of_parameter(master)
        states = base.state.get(master, {})
        meanings = {k: v for k, v in states.items() if k.startswith(("qmap", "absmax"))}
        for state, value in {**dequantised(states), **meanings}.items():
            if not hasattr(value, "shape") or value.shape == ():
                result[f"{state}/{name}"] = np.asarray(float(value))
            else:  # what is not of elements is of the whole group
                whole = of_parameter(value)
                result[f"{state}/{name}"] = elements_of(value) if whole is None else whole
    return result


def masters_of(optimizer, names):
    """Each parameter with its name, the tensor that the optimizer has, and the start in a flat one."""
    groups = getattr(optimizer, "fp16_groups", None)
    if groups is None:
        yield from ((p, name, p, None) for p, name in names.items())
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(groups, optimizer.fp32_groups_flat, strict=True):
            at = 0
            for p in group:
                yield p, names[p], flat, at
                at += p.numel()
    else:
        for group, masters in zip(groups, optimizer.fp32_groups, strict=True):
            yield from ((p, names[p], m, None) for p, m in zip(group, masters, strict=True))


def partitions(engine, names, stage: int) -> dict[str, object]:
    """This rank's part of the flat buffers: (start in the parameter, elements)."""
    import torch

    result: dict[str, object] = {}
    opt = engine.optimizer
    if stage == 3:
        groups = opt.fp16_groups
        flats = live_flats(opt)
    else:
        groups = getattr(opt, "round_robin_bit16_groups", None) or opt.bf16_groups
        flats = getattr(opt, "single_partition_of_fp32_groups", None)
        flats = opt.fp32_groups_flat_partition if flats is None else flats
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        rank = torch.distributed.get_rank(group=opt.dp_process_group)
        world = torch.distributed.get_world_size(group=opt.dp_process_group)
        state = {**flat[1]} if isinstance(flat, tuple) else base_of(opt).state[flat]
        master = flat[0] if isinstance(flat, tuple) else flat
        places = places_of(opt, index, group, stage, rank, world, master)
        tensors = {"param": master, **dequantised(state)}
        for name, value in tensors.items():
            for p, (at, start, count) in places.items():
                key = f"{name}/{names[p]}"
                if not hasattr(value, "shape") or value.shape == ():
                    result[key] = np.asarray(float(value))
                elif value.numel() == master.numel():
                    result[key] = (start, elements_of(value.reshape(-1)[at : at + count]))
        if getattr(group[0], "use_muon", False):  # both kinds of parameters step at once
            counts = {float(one["step"]) for one in base_of(opt).state.values() if "step" in one}
            result |= {f"step/{names[p]}": np.asarray(count) for p in group for count in counts}
        momentum = state.get("momentum_buffer")
        if stage != 3 and momentum is not None and momentum.numel() != master.numel():
            at = 0
            for p in opt.params_in_partition[index]:
                part = elements_of(momentum[at : at + p.numel()])
                result[f"momentum_buffer/{names[p]}"] = (0, part)
                at += p.numel()
    for p, name in names.items():
        if not p.requires_grad:
            value = p.ds_tensor if hasattr(p, "ds_tensor") else p
            shape = p.ds_shape if hasattr(p, "ds_shape") else p.shape
            numel, rank = math.prod(shape), torch.distributed.get_rank()
            part = elements_of(value.reshape(-1))
            start = rank * part.size if hasattr(p, "ds_tensor") else 0
            result[f"param/{name}"] = (start, part[: max(0, numel - start)])
    return result


def base_of(opt):
    return opt.optimizer


def live_flats(opt) -> list:
    """ZeRO-3's flat tensors, read back from where they are swapped to."""
    flats: list = []
    for index, flat in enumerate(opt.fp32_partitioned_groups_flat):
        if not opt._swappable_optimizer_subgroup(index):
            flats.append(flat)
            continue
        opt.optimizer_swapper.swap_in_optimizer_state(flat, async_parameter=None)
        live = opt.optimizer.state[flat].items()
        state = {k: v.clone() if hasattr(v, "clone") else v for k, v in live}
        flats.append((flat.data.clone(), state))
        opt.optimizer_swapper.swap_out_optimizer_state(flat, async_swap=False)
    return flats


def dequantised(state: dict) -> dict:
    """The states, and of bitsandbytes' what its own kernel makes of them."""
    result = {k: v for k, v in state.items() if not k.startswith(("qmap", "absmax"))}
    for number in ("1", "2"):
        if f"absmax{number}" in state:
            import torch

            codes, qmap = state[f"state{number}"], state[f"qmap{number}"]
            scales = state[f"absmax{number}"]  # of blocks of all, or of AdEMAMix' two moments each
            scales = scales.reshape(-1, scales.shape[-1])
            rows = codes.reshape(len(scales), -1)
            parts = [
                torch.cat([qmap[c.long()] * s for c, s in zip(row.split(256), scale, strict=True)])
                for row, scale in zip(rows, scales, strict=True)
            ]
            result[f"dequantized{number}"] = torch.stack(parts).reshape(codes.shape)
    # AdEMAMix has its fast and its slow first moment in one tensor
    second = state.get("state2")
    if second is not None and state["state1"].shape == (2, *second.shape):
        if "qmap1" in state:
            fast, slow = result.pop("dequantized1")
            result |= {"dequantized_fast": fast, "dequantized_slow": slow}
        else:
            fast, slow = result.pop("state1")
            result |= {"exp_avg_fast": fast, "exp_avg_slow": slow}
            result["exp_avg_sq"] = result.pop("state2")
    return result


def places_of(opt, index, group, stage, rank, world, master) -> dict:
    """Of each parameter (offset in this rank's partition, first element, count)."""
    places: dict = {}
    if stage == 3:
        at = 0
        for p in group:
            part = -(-p.ds_numel // world)
            start = rank * part
            places[p] = at, start, max(0, min(part, p.ds_numel - start))
            at += part
        return places
    size = int(opt.partition_size[index]) if hasattr(opt, "partition_size") else master.numel()
    at, paddings = 0, getattr(opt, "round_robin_bit16_padding", None)
    paddings = paddings[index] if paddings else [0] * len(group)
    for p, padding in zip(group, paddings, strict=True):
        first, last = max(at, rank * size), min(at + p.numel(), (rank + 1) * size)
        if first < last:
            places[p] = first - rank * size, first - at, last - first
        else:
            places[p] = 0, 0, 0
        at += p.numel() + padding
    return places


def join(parts: list[dict[str, object]], shapes: dict[str, tuple]) -> dict[str, np.ndarray]:
    """Whole arrays of every rank's parts; what two ranks hold differently is under `io/differs`."""
    truth: dict[str, np.ndarray] = {}
    keys = dict.fromkeys(key for part in parts for key in part)
    for key in keys:
        values = [part[key] for part in parts if key in part]
        if isinstance(values[0], np.ndarray):
            if all(value.tobytes() == values[0].tobytes() for value in values):
                truth[key] = values[0]  # what ranks have each for themselves is of no parameter
            continue
        shape = shapes[key.partition("/")[2]]
        whole = np.zeros(math.prod(shape), values[0][1].dtype)
        filled, differs = np.zeros(whole.size, bool), False
        for start, part in values:
            stop = start + part.size
            old = filled[start:stop]
            differs |= bool(np.any(whole[start:stop][old].tobytes() != part[old].tobytes()))
            whole[start:stop], filled[start:stop] = part, True
        assert filled.all(), key
        truth[f"io/differs/{key}" if differs else key] = whole.reshape(shape)
    return truth


def options_of(spec: dict) -> dict:
    """What a user says when opening it."""
    if "zenflow" in spec["zero"]:
        return {"on_conflict": "master"}
    numbered = spec["stage"] == 0 and spec["dtype"] == "fp32"  # else the bits of masters tell
    return {"optimizer_groups": "module-order"} if numbered else {}


def summary(spec: dict, classes, version: str) -> str:
    run = [f"DeepSpeed {version}", *classes, f"ZeRO-{spec['stage']}", f"dp {spec['world']}"]
    zero = [f"{name} {value}" for name, value in spec["zero"].items()]
    resumed = ["saved again after a universal folder"] if spec["resume"] else []
    without = [f"without {', '.join(spec['replaced'])}"] if spec.get("replaced") else []
    return ", ".join([*run, spec["dtype"], *zero, *resumed, *without])


def work(spec: dict, out: Path) -> None:
    import deepspeed
    import torch

    log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resumed = (out / "universal").exists()
    engine, width = start(spec, out, universal=resumed)
    if resumed:
        engine.load_checkpoint(str(out / "universal"))
    train(engine, width, spec, spec["steps"], spec["seed"] + 100 * resumed)
    mine = live_state(engine, spec)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    gathered = [None] * world if rank == 0 else None
    torch.distributed.gather_object(mine, gathered)
    engine.save_checkpoint(str(out / "ckpt"), client_state={"iteration": spec["steps"]})
    torch.distributed.barrier()
    if rank == 0:
        own = engine.module.named_parameters()
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in own}
        truth = join(gathered if spec["stage"] else gathered[:1], shapes)
        truth = {f"io/{key}" if key[:11] == "dequantized" else key: truth[key] for key in truth}
        classes = [type(engine.optimizer).__name__]
        classes.append(type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__)
        about = {
            "about": summary(spec, dict.fromkeys(classes), deepspeed.__version__),
            "writer": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
            "options": options_of(spec),
            "dtypes": {k: "bfloat16" for k, v in truth.items() if v.dtype == np.uint16},
            "replaced": spec.get("replaced", []),
            "spec": spec,
            "numbers": "by value",
        }
        writing.write_case(out, truth, about)
    torch.distributed.barrier()


TIME_LIMIT = 600  # seconds; the first use of an optimizer compiles it


# ---- the parent ------------------------------------------------------------------------------

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "8", "NDEV_PER_NODE": "2",
    "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def make(name: str, out: Path) -> None:
    spec = CASES[name]
    ranks.forked(spec["world"], TIME_LIMIT, work, spec, out)
    if spec["resume"]:
        resave(spec, out)
    for leftover in ("log", "universal", "zero_stage_3"):
        path = out / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for script in (out / "ckpt").glob("zero_to_*.py"):
        script.unlink()


def resave(spec: dict, out: Path) -> None:
    """Convert to a universal folder, resume from it on other ranks, train and save again."""
    tag = (out / "ckpt" / "latest").read_text().strip()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
               str(out / "ckpt" / tag), "--output_folder", str(out / "universal" / tag),
               "--inject_missing_state"]  # fmt: skip
    with (out / "log").open("a") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    shutil.rmtree(out / "ckpt")
    ranks.forked(spec["resume"], TIME_LIMIT, work, spec, out)


def main() -> int:
    given = writing.arguments(__doc__).parse_args()
    os.environ.update(ENVIRONMENT)
    import deepspeed  # noqa: F401
    import torch  # noqa: F401

    failed = writing.write_each(writing.chosen(CASES, given.only), given.out, make)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
