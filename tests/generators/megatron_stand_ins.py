"""Lets Megatron's own training code run on CPUs: CUDA and TransformerEngine, without kernels.

Names, shapes and the order of parameters are TransformerEngine's own (its `pytorch/module/*.py` of
release 2.9); no module computes anything, for the generators set gradients themselves. `FusedAdam`
keeps the state that TransformerEngine's keeps: two moments for each parameter, the step in the
group.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
import typing
from typing import Any, Literal

import torch

_CPU = torch.device("cpu")
_TE_VERSION = "2.9.0"
_VERSIONS = {"transformer-engine": _TE_VERSION, "emerging-optimizers": "0.2.0"}


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
        *("manual_seed", "manual_seed_all", "seed", "reset_peak_memory_stats", "_lazy_init"))},
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


def install_without_triton() -> None:
    """Modules of Megatron that are nothing but kernels."""
    for name in ("custom_layers.batch_invariant_kernels", "moe.paged_stash"):
        name = f"megatron.core.transformer.{name}"
        sys.modules[name] = _Module(name)


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
    """A class or function of TransformerEngine that nothing here needs."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def _empty(*shape: int, dtype: Any, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=_on_cpu(device)))


class _Base(torch.nn.Module):
    """TransformerEngine's modules have an `_extra_state`, empty without fp8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def set_tensor_parallel_group(self, group: Any) -> None: ...


def _divided(features: tuple[int, int], mode: str | None, size: int) -> tuple[int, int]:
    inputs, outputs = features
    if mode == "column":
        outputs //= size
    if mode == "row":
        inputs //= size
    return inputs, outputs


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: Any = None,
        device: Any = None,
        **_: Any,
    ):
        super().__init__()
        inputs, outputs = _divided((in_features, out_features), parallel_mode, tp_size)
        self.parallel_mode = parallel_mode
        self.norms(in_features, params_dtype, device, **_)
        self.weight = _empty(outputs, inputs, dtype=params_dtype, device=device)
        split = {"column": 0, "row": 1}.get(parallel_mode or "")
        if split is not None:
            _mark(self.weight, split)
        self.register_parameter("bias", None)
        if bias:
            self.bias = _empty(outputs, dtype=params_dtype, device=device)
            if parallel_mode == "column":
                _mark(self.bias, 0)

    def norms(self, features: int, dtype: Any, device: Any, **_: Any) -> None: ...


class LayerNormLinear(Linear):
    def norms(
        self, features: int, dtype: Any, device: Any, normalization: str = "LayerNorm", **_: Any
    ) -> None:
        self.layer_norm_weight = _empty(features, dtype=dtype, device=device)
        if normalization == "LayerNorm":
            self.layer_norm_bias = _empty(features, dtype=dtype, device=device)


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: Any = None,
        device: Any = None,
        **_: Any,
    ):
        super().__init__()
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        inputs, outputs = _divided((in_features, out_features), parallel_mode, tp_size)
        split = {"column": 0, "row": 1}.get(parallel_mode or "")
        for i in range(num_gemms):
            weight = _empty(outputs, inputs, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", weight)
            if split is not None:
                _mark(weight, split)
            if bias:
                own = _empty(outputs, dtype=params_dtype, device=device)
                self.register_parameter(f"bias{i}", own)

    def init_fp8_metadata(self, *_: Any, **__: Any) -> None: ...


def _mark(parameter: torch.nn.Parameter, split: int) -> None:
    """As `set_tensor_model_parallel_attributes` of TransformerEngine's `pytorch/utils.py`."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = split
    parameter.partition_stride = 1


class _Norm(_Base):
    biased = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        *_: Any,
        hidden_size: int = 0,
        params_dtype: Any = None,
        device: Any = None,
        **__: Any,
    ):
        super().__init__()
        size = normalized_shape or hidden_size
        self.weight = _empty(size, dtype=params_dtype, device=device)
        if self.biased:
            self.bias = _empty(size, dtype=params_dtype, device=device)

    def get_extra_state(self) -> Any:
        return None


class LayerNorm(_Norm):
    biased = True


class RMSNorm(_Norm): ...


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
            own = num_attention_heads // tp_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(own))


def _local(tensor: Any) -> torch.Tensor:
    """What the rank has of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


class FusedAdam(torch.optim.Optimizer):
    """Adam with its step in the group, as TransformerEngine's `pytorch/optimizers/fused_adam.py`.

    The arithmetic is plain; with `store_param_remainders` the master is the weight's bits and the
    int16 remainder of them, and the weight is rounded half up.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = False,
        master_weight_dtype: Any = torch.float32,
        exp_avg_dtype: Any = torch.float32,
        exp_avg_sq_dtype: Any = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_: Any,
    ):
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def _remainders(self, parameter: torch.Tensor) -> bool:
        return self.store_param_remainders and parameter.dtype == torch.bfloat16

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        """Moments, and the master where the weight has none of its own."""
        own = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            own[name] = torch.zeros_like(parameter, dtype=self.name_to_dtype_map[name])
        if not self.master_weights:
            return
        if self._remainders(parameter):
            own["master_param"] = torch.zeros_like(parameter, dtype=torch.int16)
        else:
            dtype = self.name_to_dtype_map["master_param"]
            own["master_param"] = parameter.detach().clone().to(dtype)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        stored = self.state[parameter][name]
        return stored if stored.dtype == torch.int16 else stored.float()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        own = self.state[parameter]
        if name not in own:
            self.initialize_state(parameter)
        own[name].copy_(value.to(own[name].dtype))

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 master, put together of the weight's bits and the remainder."""
        own = self.state[parameter]
        if "master_param" not in own:
            return parameter.detach().float()
        stored = own["master_param"]
        if stored.dtype != torch.int16:
            return stored.float()
        low = stored.to(torch.int32)
        high = parameter.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        return ((high << 16) | (low & 0xFFFF)).view(torch.float32)

    def _store(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        own = self.state[parameter]
        if "master_param" in own and own["master_param"].dtype == torch.int16:
            bits = master.view(torch.int32)
            low = (bits & 0xFFFF).to(torch.int16)
            high = (bits >> 16) + (low < 0).to(torch.int32)
            own["master_param"].copy_(low)
            parameter.data.copy_(high.to(torch.int16).view(torch.bfloat16))
            return
        if "master_param" in own:
            own["master_param"].copy_(master)
        _local(parameter.data).copy_(master)

    @torch.no_grad()
    def step(self, closure: Any = None, **_: Any) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                name = "decoupled_grad" if self.use_decoupled_grad else "grad"
                gradient = getattr(parameter, name, None)
                if gradient is not None:
                    self._update(parameter, _local(gradient).float(), group)

    def _update(self, parameter: Any, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        own = {name: _local(state) for name, state in self.state[parameter].items()}
        (first, second), step = group["betas"], group["step"]
        mean = own["exp_avg"].float() * first + gradient * (1 - first)
        square = own["exp_avg_sq"].float() * second + gradient * gradient * (1 - second)
        own["exp_avg"].copy_(mean)
        own["exp_avg_sq"].copy_(square)
        scale = (square / (1 - second**step)).sqrt() + group["eps"]
        master = _local(self.master_of(parameter))
        change = mean / (1 - first**step) / scale + group["weight_decay"] * master
        self._store(parameter, master - max(group["lr"], 1e-3) * change)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum, and a rate that is not zero while it warms up."""

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, **_: Any
    ):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


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
    "transformer_engine": {"__version__": _TE_VERSION},
    "transformer_engine.pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm,
        "DotProductAttention": DotProductAttention},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD,
        "multi_tensor_applier": _apply, "multi_tensor_scale": _scale, "multi_tensor_l2norm": _norm},
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": lambda *_, **__: (contextlib.nullcontext(),
        _nothing)},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
    "emerging_optimizers.scalar_optimizers": {"Lion": Lion},
    "emerging_optimizers.registry": {"get_optimizer_name_list": lambda: []},
    "emerging_optimizers.orthogonalized_optimizers": {"OrthogonalizedOptimizer": OrthogonalizedOptimizer,
        "get_muon_scale_factor": lambda *_, **__: 1.0},
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {"NSCoeffT": Literal["simple", "quintic",
        "polar_express"], "newton_schulz_tp": _newton_schulz},
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
}
# fmt: on


_PACKAGES = (
    *("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common"),
    "emerging_optimizers",
)


_STAND_INS = ("transformer_engine", "transformer_engine_torch", "emerging_optimizers")


class _Module(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if name.islower() and self.__name__ in _PACKAGES:
            return importlib.import_module(f"{self.__name__}.{name}")
        own = type(name, (_Unused,), {"__module__": self.__name__})
        setattr(self, name, own)
        return own


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in _STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _MODULES.get(module.__name__, {}).items():
            if isinstance(value, type):
                value.__module__ = module.__name__
            setattr(module, name, value)


def install_transformer_engine() -> None:
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method
    sys.meta_path.insert(0, _Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: _VERSIONS.get(name.replace("_", "-")) or version(name)
