"""Lets Megatron's own training code run on CPUs: CUDA and TransformerEngine, without kernels.

Names, shapes and the order of parameters are TransformerEngine's own (its `pytorch/module/*.py` of
release 2.9); no module computes anything, for the generators set gradients themselves. `FusedAdam`
has the states of TransformerEngine's and its formulas, in float32
(`transformer_engine/pytorch/optimizers/fused_adam.py`, `common/multi_tensor/adam.cu`, v2.18).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import numpy
import torch
import writing

_CPU = torch.device("cpu")
_TE_VERSION = "2.9.0"
_VERSIONS = {"transformer-engine": _TE_VERSION, "emerging-optimizers": "0.2.0"}
TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")


class _Handle:
    """A CUDA event or stream that does nothing."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *error: object) -> None: ...


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _nothing(*_: Any, **__: Any) -> None: ...


_PROPERTIES = types.SimpleNamespace(
    major=9, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1
)
# fmt: off
_CUDA = {
    "is_available": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: _CPU,
    "Event": _Handle,
    "Stream": _Handle,
    "current_stream": _Handle,
    "default_stream": _Handle,
    "stream": lambda *_, **__: contextlib.nullcontext(),
    "get_rng_state": _random_state,
    "initial_seed": lambda: 1,
    "memory_stats": lambda *_, **__: {},
    "mem_get_info": lambda *_, **__: (1 << 33, 1 << 34),
    "is_current_stream_capturing": lambda: False,
    "get_device_capability": lambda *_, **__: (9, 0),
    "get_device_properties": lambda *_, **__: _PROPERTIES,
    "get_device_name": lambda *_, **__: "cpu",
    "default_generators": (torch.default_generator,),
    **{name: _nothing for name in (*("set_device", "synchronize", "empty_cache", "set_stream", "set_rng_state"),
        *("manual_seed", "manual_seed_all", "seed", "reset_peak_memory_stats", "_lazy_init",
        "ipc_collect"))},
    **{name: lambda *_, **__: 0 for name in (*("memory_allocated", "max_memory_allocated", "memory_reserved"),
        "max_memory_reserved")},
    **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in ("Float", "Long", "Int", "Byte", "Double", "Half",
        "BFloat16")},
}
# fmt: on


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return _CPU
    return _CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def _factory(create: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return wrapped


def install_cuda() -> None:
    """Everything that asks for a GPU gets the CPU."""
    numpy.product = numpy.prod  # which older releases call
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # makes a table of torch.cuda's functions, once
    for name, stand_in in _CUDA.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed"):
        setattr(torch.cuda.random, name, _CUDA[name])
    torch.cuda.nvtx = types.SimpleNamespace(
        range_push=_nothing, range_pop=_nothing, range=lambda *_, **__: contextlib.nullcontext()
    )
    move = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kwargs: move(
        self, *map(_on_cpu_text, args), **{k: _on_cpu_text(v) for k, v in kwargs.items()}
    )
    kind = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *[_cpu_type(arg) for arg in args], **kwargs)
        return kind(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = cuda_type
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.is_pinned = lambda self, *_: False
    torch.nn.Module.cuda = lambda self, *_, **__: self
    kinds = ("empty", "zeros", "ones", "full", "rand", "randn", "arange", "tensor", "as_tensor")
    likes = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like")
    for name in (*kinds, *likes, "randint", "linspace", "eye"):
        setattr(torch, name, _factory(getattr(torch, name)))


def mesh_of_cpus() -> None:
    """A mesh of GPUs is one of CPUs."""
    mesh = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
    create = mesh.from_group
    mesh.from_group = staticmethod(
        lambda group, device_type, *args, **kwargs: create(group, "cpu", *args, **kwargs)
    )


def number_device() -> None:
    """The current device is a number, as on a machine with GPUs, and not the CPU itself."""
    torch.cuda.current_device = lambda: 0


def _on_cpu_text(value: Any) -> Any:
    return value if isinstance(value, int) else _on_cpu(value)


def _cpu_type(kind: Any) -> Any:
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


# --- TransformerEngine


class _Anything(type):
    """Classes that have every attribute: a function that does nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class _Unused(metaclass=_Anything):
    """A class or function of a package that nothing here needs."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _parameter(*shape: int, dtype: Any, split: int | None = None) -> torch.nn.Parameter:
    """Marked as by `set_tensor_model_parallel_attributes` of TransformerEngine's
    `pytorch/utils.py`.
    """
    made = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))
    if split is not None:
        made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, split, 1
    return made


class _Base(torch.nn.Module):
    """TransformerEngine's modules have an `_extra_state`, empty without fp8."""

    fp8 = fp8_calibration = False
    fp8_meta = types.MappingProxyType({"fp8_checkpoint": False})

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def set_tensor_parallel_group(self, group: Any) -> None: ...


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: Any = None,
        **options: Any,
    ):
        super().__init__()
        self.use_bias, self.parallel_mode = bias, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.add_parameters(params_dtype, **options)

    def add_parameters(self, dtype: Any, number: str = "", **_: Any) -> None:
        split = {"column": 0, "row": 1}.get(self.parallel_mode or "")
        weight = _parameter(self.out_features, self.in_features, dtype=dtype, split=split)
        self.register_parameter(f"weight{number}", weight)
        if self.use_bias:
            split = 0 if split == 0 else None
            own = _parameter(self.out_features, dtype=dtype, split=split)
            self.register_parameter(f"bias{number}", own)
        elif not number:
            self.bias = torch.Tensor()


class LayerNormLinear(Linear):
    def add_parameters(self, dtype: Any, *, normalization: str = "LayerNorm", **_: Any) -> None:
        self.layer_norm_weight = _parameter(self.in_features, dtype=dtype)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = _parameter(self.in_features, dtype=dtype)
        super().add_parameters(dtype)


class GroupedLinear(Linear):
    def __init__(self, num_gemms: int, *sizes: int, **options: Any):
        self.num_gemms = num_gemms
        super().__init__(*sizes, **options)

    def add_parameters(self, dtype: Any, **_: Any) -> None:
        for number in range(self.num_gemms):
            super().add_parameters(dtype, str(number))

    def init_fp8_metadata(self, *_: Any, **__: Any) -> None: ...


class RMSNorm(_Base):
    def __init__(
        self,
        normalized_shape: int = 0,
        *_: Any,
        hidden_size: int = 0,  # the size has one name or the other
        params_dtype: Any = None,
        **__: Any,
    ):
        super().__init__()
        self.size = normalized_shape or hidden_size
        self.weight = _parameter(self.size, dtype=params_dtype)

    def get_extra_state(self) -> Any:
        return None


class LayerNorm(RMSNorm):
    def __init__(self, *sizes: int, params_dtype: Any = None, **options: Any):
        super().__init__(*sizes, params_dtype=params_dtype, **options)
        self.bias = _parameter(self.size, dtype=params_dtype)


class GatedNorm(torch.nn.Module):
    """The norm of Mamba's mixer (`mamba_ssm`)."""

    def __init__(self, size: int, *_: Any, dtype: Any = None, **__: Any):
        super().__init__()
        self.weight = _parameter(size, dtype=dtype)


class DotProductAttention(_Base):
    def __init__(
        self,
        num_attention_heads: int,
        *_: Any,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        **__: Any,
    ):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = _parameter(num_attention_heads // tp_size, dtype=torch.float32)


def _local(tensor: Any) -> torch.Tensor:
    """What the rank has of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


class FusedAdam(torch.optim.Optimizer):
    """Adam with its step in the group; `exact` has the masters that are stored as two halves."""

    limits: typing.ClassVar = {
        torch.float16: torch.finfo(torch.float16).max / 2,
        torch.uint8: 448.0,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        master_weights: bool = False,
        master_weight_dtype: Any = torch.float32,
        exp_avg_dtype: Any = torch.float32,
        exp_avg_sq_dtype: Any = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_: Any,
    ):
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        full = master_weights and master_weight_dtype == torch.float32
        self.store_param_remainders = store_param_remainders and full
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.dtypes["master_param"] = master_weight_dtype
        self._scales, self.exact = {}, {}

    def initialize_state(self, param: Any, *_: Any) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._keep(param, name, torch.zeros(_local(param).shape))
        if self.master_weights:
            self._keep_master(param, param.detach().float())

    def _is_split(self, param: Any) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _keep_master(self, param: Any, master: torch.Tensor) -> None:
        """Keep a master; a bfloat16 weight whose master is in halves is rounded half up."""
        if not self._is_split(param):
            self._keep(param, "master_param", master)
            param.data.copy_(master)
            return
        bits = master.reshape(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        low = (bits & 0xFFFF).to(torch.int32).to(torch.int16)
        high = (((bits + 0x8000) >> 16) & 0xFFFF).to(torch.int32).to(torch.int16)
        self.state[param]["master_param"] = low.reshape(param.shape)
        param.data.copy_(high.view(torch.bfloat16).reshape(param.shape))
        self.exact[param] = master.clone()

    def _keep(self, param: Any, name: str, value: torch.Tensor) -> None:
        """Keep what the rank has of a state in its dtype, with a scale for the narrow ones."""
        dtype = self.dtypes[name]
        scale = torch.ones(1)
        if dtype in self.limits:
            scale = (value.abs().max() / self.limits[dtype]).reshape(1)
            value = value * torch.where(scale > 0, scale.reciprocal(), 0.0)
        value = value.to(torch.float8_e4m3fn if dtype == torch.uint8 else dtype)
        self._scales.setdefault(param, {})[name] = scale
        if hasattr(param, "_local_tensor"):  # a DTensor, as are its states
            own = self.state[param].setdefault(name, torch.zeros_like(param, dtype=dtype))
            own._local_tensor.copy_(value)
        else:
            self.state[param][name] = value

    def get_unscaled_state(self, param: Any, name: str, *_: Any) -> torch.Tensor:
        value = _local(self.state[param][name])
        if value.dtype in (torch.int16, torch.float32):
            return value
        return value.float() * self._scales[param][name]

    @torch.no_grad()
    def step(self, closure: Any = None, **_: Any) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(group, param, _local(grad).float())

    def _update(self, group: dict[str, Any], param: Any, grad: torch.Tensor) -> None:
        if not self.state[param]:
            self.initialize_state(param)
        (beta1, beta2), count = group["betas"], group["step"]
        first = beta1 * self.get_unscaled_state(param, "exp_avg") + (1 - beta1) * grad
        second = beta2 * self.get_unscaled_state(param, "exp_avg_sq") + (1 - beta2) * grad**2
        change = first / (1 - beta1**count)
        change = change / ((second / (1 - beta2**count)).sqrt() + group["eps"])
        master = _local(param.detach()).float()
        if self._is_split(param):
            master = self.exact[param]
        elif self.master_weights:
            master = self.get_unscaled_state(param, "master_param")
        master = master - group["lr"] * (change + group["weight_decay"] * master)
        self._keep(param, "exp_avg", first)
        self._keep(param, "exp_avg_sq", second)
        if self.master_weights:
            self._keep_master(param, master)
        else:
            _local(param.data).copy_(master)


class Lion(torch.optim.Optimizer):
    """The signs of a mean of gradients; one moment (`emerging_optimizers`)."""

    def __init__(self, params: Any, lr: float, betas: Any, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                own = self.state[parameter]
                if not own:
                    own["exp_avg"] = torch.zeros_like(parameter)
                change = torch.sign(torch.lerp(parameter.grad, own["exp_avg"], first))
                parameter.add_(change, alpha=-max(group["lr"], 1e-3))
                own["exp_avg"].lerp_(parameter.grad, 1 - second)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Muon's momentum, whose update a subclass makes orthogonal (`emerging_optimizers`)."""

    def __init__(
        self, params: Any, lr: float, momentum: float, *, scaled_orthogonalize_fn: Any, **_: Any
    ):
        defaults = {"lr": lr, "momentum_beta": momentum, "weight_decay": _.get("weight_decay", 0.0)}
        super().__init__(params, defaults)
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                own = self.state[parameter]
                if not own:
                    own["momentum_buffer"] = torch.zeros_like(parameter.grad)
                own["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum_beta"])
                change = self.orthogonalize(parameter, own["momentum_buffer"])
                parameter.add_(change, alpha=-max(group["lr"], 1e-3))

    def orthogonalize(self, parameter: Any, gradient: Any) -> Any:
        raise NotImplementedError


def _newton_schulz(gradient: torch.Tensor, **_: Any) -> torch.Tensor:
    return gradient / (gradient.norm() + 1e-7)


def _apply(operation: Any, _: Any, lists: Any, *args: Any) -> Any:
    return operation(lists, *args)


def _scale(lists: Any, factor: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def _norm(lists: Any, *_: Any) -> Any:
    norms = [tensor.float().norm() for tensor in lists[0]]
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    return total.reshape(1), None


# fmt: off
_MODULES = {
    "transformer_engine.pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm,
        "DotProductAttention": DotProductAttention},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": type("FusedSGD", (torch.optim.SGD,), {}),
        "multi_tensor_applier": _apply, "multi_tensor_scale": _scale, "multi_tensor_l2norm": _norm},
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": lambda *_, **__: (contextlib.nullcontext(),
        _nothing)},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
    "emerging_optimizers.scalar_optimizers": {"Lion": Lion},
    "emerging_optimizers.registry": {"get_optimizer_name_list": lambda: []},
    "emerging_optimizers.orthogonalized_optimizers": {"OrthogonalizedOptimizer": OrthogonalizedOptimizer,
        "get_muon_scale_factor": lambda *_, **__: 1.0},
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {"NSCoeffT": Literal["simple", "quintic",
        "polar_express"], "newton_schulz_tp": _newton_schulz},
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
}
# fmt: on


# Modules that are taken as attributes of the module above them.
_SUBMODULES = (
    "common", "recipe", "pytorch", "ops", "module", "distributed", "tensor",
    "language", "registry",
)  # fmt: skip


class _Module(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    __version__ = _TE_VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if name in _SUBMODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        own = type(name, (_Unused,), {"__module__": self.__name__})
        setattr(self, name, own)
        return own


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _MODULES.get(module.__name__, {}).items():
            if isinstance(value, type):
                value.__module__ = module.__name__
            setattr(module, name, value)


def install_packages(*packages: str) -> None:
    """Find every module of these packages, and their versions."""
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method
    sys.meta_path.insert(0, _Finder(packages))
    versions = {k: v for k, v in _VERSIONS.items() if k.replace("-", "_") in packages}
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: versions.get(name.replace("_", "-")) or version(name)


# --- Megatron's own training


def set_up() -> tuple[Any, Any, Any]:
    """The model chunks, the optimizer and the scheduler, as Megatron's own training has them."""
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    pretrain = importlib.import_module("pretrain_gpt")
    initialize._compile_dependencies = _nothing
    importlib.import_module("megatron.core.parallel_state").get_nccl_options = _nothing
    defaults = {"tokenizer_type": "NullTokenizer"}
    try:
        initialize.initialize_megatron(allow_no_cuda=True, args_defaults=defaults)
    except TypeError:  # newer releases parse the command line before
        arguments = importlib.import_module("megatron.training.arguments")
        arguments.parse_and_validate_args(args_defaults=defaults)
        initialize.initialize_megatron(allow_no_cuda=True)
    provider = pretrain.model_provider
    kind = "hybrid" if "--hybrid-layer-pattern" in sys.argv else "gpt"
    with contextlib.suppress(ImportError):
        builders = importlib.import_module(f"{kind}_builders")
        provider = functools.partial(provider, getattr(builders, f"{kind}_builder"))
    wanted = inspect.signature(training.setup_model_and_optimizer).parameters
    values = {name: provider for name in wanted if "provider" in name}
    if "model_type" in wanted:
        kinds = importlib.import_module("megatron.core.enums").ModelType
        values["model_type"] = kinds.encoder_or_decoder
    return training.setup_model_and_optimizer(**values)


def save(step: int, models: Any, optimizer: Any, scheduler: Any) -> None:
    training = importlib.import_module("megatron.training.training")
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    clean = getattr(training, "preprocess_common_state_dict", None)
    more = {"preprocess_common_state_dict_fn": clean} if clean else {}
    checkpointing.save_checkpoint(step, models, optimizer, scheduler, 12345, **more)


def unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def each_optimizer(optimizer: Any) -> list[Any]:
    """The optimizers that a chain has, also in chains of its own."""
    inner = getattr(optimizer, "chained_optimizers", None)
    if not inner:
        return [optimizer]
    parts = [[part] if part is optimizer else each_optimizer(part) for part in inner]
    return [leaf for part in parts for leaf in part]


def array_of(tensor: torch.Tensor) -> tuple[str, Any]:
    """The name of its dtype, and its elements; those that numpy lacks as unsigned bits."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    array, name = writing.bits(whole)
    return name, array


def noise(shape: Any, *what: Any) -> torch.Tensor:
    """Normal numbers that follow from what they are for."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(tuple(shape), generator=generator)


_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def in_local_layers(name: str) -> str:
    """The name in a layer where norms are modules, for one where linear layers have them."""
    for fused, norm in _NORMS.items():
        if name.startswith(fused):
            return norm + name.removeprefix(fused)
    return name


States = Iterator[tuple[str, int | None, Any]]


def live_states(chain: Any, parameter: Any) -> States:
    """The master and states that optimizers have of a parameter, and the first of its elements that
    the rank has of them; None, where it has all.
    """
    for optimizer in each_optimizer(chain):
        if type(optimizer).__name__ == "DistributedOptimizer":
            yield from _distributed_states(optimizer, parameter)
            continue
        inner = optimizer.optimizer
        own = [each for group in inner.param_groups for each in group["params"]]
        for held in (getattr(parameter, "main_param", None), parameter):
            if held is None or not any(held is each for each in own):
                continue
            yield "param", None, held
            yield from named_states(inner.state.get(held, {}), None)
            yield from step_of(inner, held)
            break


def _distributed_states(optimizer: Any, parameter: Any) -> States:
    if parameter not in optimizer.model_param_gbuf_map:
        return
    try:
        start = optimizer._get_model_param_range_map(parameter)["param"].start
    except KeyError:
        return  # the rank has nothing of it
    group, place = optimizer.model_param_group_index_map[parameter]
    inner = optimizer.optimizer
    held = inner.param_groups[group]["params"][place]
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        states = optimizer._get_main_param_and_optimizer_states(parameter)
    else:
        states = dict(inner.state[held])
    master = states.pop("param", held)
    yield "param", start, getattr(inner, "exact", {}).get(held, master)
    yield from named_states(states, start)
    yield from step_of(inner, held)


def named_states(states: Any, start: int | None) -> States:
    for name, value in states.items():
        if torch.is_tensor(value):
            yield name, None if name == "step" else start, value


def step_of(inner: Any, held: Any) -> States:
    for group in inner.param_groups:
        if any(held is each for each in group["params"]) and isinstance(group.get("step"), int):
            yield "step", None, torch.tensor(group["step"], dtype=torch.int32)
