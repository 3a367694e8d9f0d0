"""The meaning of torch's names in a pickle: storages, dtypes, functions that rebuild a tensor.

The functions are those of `torch/_utils.py` and `torch/_tensor.py`; ours take the same arguments
and return a StoredTensor, which is integers only. What torch could rebuild and we cannot read
becomes a RefusedTensor, so that whoever walks the object can say where it is.

The names of distributed tensors are inert records. A DTensor is pickled as its local tensor and its
spec: the mesh of ranks, a placement for each axis of the mesh, and the shape of the whole. Facts:
`torch/distributed/tensor/_dtensor_spec.py`, `placement_types.py`, `device_mesh.py` and
`_mesh_layout.py` of torch 2.13; torch 2.4 has the same classes in `torch.distributed._tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.codecs import pickle_names
from jax_ucp.codecs.coded_states import CODED_TYPES, CodedState, coded_state
from jax_ucp.codecs.unpickle import (
    Constructor,
    Name,
    ObjectNode,
    Opaque,
    Record,
    Unknown,
    children,
    inert,
    table,
)
from jax_ucp.errors import FormatError

# A view with stride 0 can claim any size. Real ones are small: torch saves their storage, nobody
# saves weights so.
MAX_VIEW_RATIO = 64
FREE_VIEW_BYTES = 1 << 24
_MAX_BYTES, _MAX_NDIM = 1 << 62, 32

# Every dtype that both have goes by the same name in both.
DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.int8, np.int16, np.int32, np.int64),
            *(np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16),
            *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2),
            *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
        ),
    )
}

_NO_NUMPY_DTYPE = (
    *("complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "float4_e2m1fn_x2"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)

STORAGE_DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexDouble": "complex128", "ComplexFloat": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor(ObjectNode):
    """A tensor or Parameter of the file: a strided view of one of its storages.

    `key` names it in `TorchFile.arrays()`: the labels that lead to its first place in the object.
    Offset and strides count elements. `attributes` were pickled with the tensor, such as Megatron's
    `partition_dim` or DeepSpeed's `ds_id`.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    storage: str
    offset: int
    strides: tuple[int, ...]
    attributes: dict[str, object] = field(default_factory=dict)

    def children(self) -> Iterable[tuple[object, object]]:
        return children(self.attributes)


@dataclass(frozen=True, slots=True)
class RefusedTensor:
    """Stands for a tensor that cannot be read, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class DTensor(ObjectNode):
    """A rank's part, `local`, of a tensor of the shape `shape`; `spec` says which part."""

    shape: tuple[int, ...]
    dtype: np.dtype
    local: StoredTensor
    spec: Record

    def children(self) -> Iterable[tuple[object, object]]:
        return ("_local_tensor", self.local), ("_spec", self.spec)


@dataclass(frozen=True, slots=True)
class StorageClass(Name):
    """A storage class and its elements' dtype, None where numpy has none; untyped are bytes."""

    dtype: np.dtype | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage the file holds, or the reason why no tensor can be read from it."""

    key: str
    kind: StorageClass
    nbytes: int = 0
    refusal: str = ""


def _view(
    storage: Storage, dtype: object, offset: Any, shape: tuple, strides: tuple, metadata: list
) -> object:
    """The tensor, proved to lie in the storage. Offset and strides count elements."""
    if len(metadata) > 1 or len(shape) != len(strides):
        return NotImplemented
    if not all(map(_is_size, (offset, *shape, *strides))):
        return NotImplemented
    if storage.refusal:
        return RefusedTensor(storage.refusal)
    if any(metadata):
        # the bits conj and neg: the stored bytes are those of the other tensor
        texts = metadata[0] if isinstance(metadata[0], dict) else ()
        names = [key for key in texts if isinstance(key, str)]
        bits = ", ".join(sorted(name[:20] for name in names[:4])) or "unknown"
        return RefusedTensor(
            f"it is a lazy view ({bits}); save tensor.resolve_conj().resolve_neg() instead"
        )
    if isinstance(dtype, Name):
        return RefusedTensor(f"{dtype} has no numpy equivalent")
    if not isinstance(dtype, np.dtype):
        return NotImplemented
    view = StoredTensor("", shape, dtype, storage.key, offset, strides)
    refusal = _view_refusal(view, storage)
    return RefusedTensor(refusal) if refusal else view


def _is_size(number: object) -> bool:
    return type(number) is int and number >= 0


def _view_refusal(view: StoredTensor, storage: Storage) -> str:
    """Why a view cannot be of its storage; nothing if it can."""
    itemsize, beyond = view.dtype.itemsize, "its shape or strides are beyond any array"
    if len(view.shape) > _MAX_NDIM:
        return beyond
    size = math.prod(max(n, 1) for n in view.shape)
    if max(size, view.offset, *view.strides) * itemsize > _MAX_BYTES:
        return beyond
    nbytes, stored = math.prod(view.shape) * itemsize, storage.nbytes // itemsize
    last = view.offset + sum(
        (n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)
    )
    if nbytes and last >= stored:
        return (
            f"its view reaches element {last} of storage {storage.key[:80]!r}, which has {stored}"
        )
    if nbytes > max(MAX_VIEW_RATIO * storage.nbytes, FREE_VIEW_BYTES):
        return (
            f"it repeats {storage.nbytes} stored bytes to {nbytes}; save a contiguous copy instead"
        )
    return ""


def not_a_storage(persistent_id: object) -> FormatError:
    """The error for a persistent id that does not name a storage of a known kind."""
    match persistent_id:
        case ("storage", Name(kind), *_):
            return FormatError(
                f"a storage of {kind}, a kind that is not known here; save plain tensors instead"
            )
    return FormatError("a persistent id does not name a storage of torch.save")


def unreadable(node: object) -> str:
    """Why a node of a tree is a tensor that cannot be read; nothing of any other node."""
    match node:
        case RefusedTensor(reason):
            return reason
        case Storage():
            return "a bare storage, not a tensor"
        case DTensor():
            return (
                "it is a DTensor, of which the file holds one rank's part; open the folder with"
                " the files of all ranks, if they are called *_world_size_N_rank_R.pt, or save"
                " tensor.full_tensor() instead"
            )
        case CodedState():
            return (
                f"it is a {node.type}, codes of torchao's optimizer, which are read in folders of"
                " DCP only; save state.dequantize() instead"
            )
        # as only functions have that make tensors
        case Opaque() if any(isinstance(arg, Storage) for arg in node.args):
            return (
                f"it is made by {node.type}, which is not known here; save a plain tensor instead"
            )
    return ""


def _rebuild_dtensor(inner: tuple, state: object) -> object:
    """`inner` is (type, dtype, size, ...); the state has what such a tensor is made of."""
    match inner, _attributes(state):
        case (_, dtype, tuple(shape), *_), {"_local_tensor": local, "_spec": Record() as spec}:
            pass
        case _:
            return NotImplemented
    match local, dtype:
        case (RefusedTensor(), _):
            return local
        case (_, Name()):
            return RefusedTensor(f"{dtype} has no numpy equivalent")
        case (StoredTensor(), np.dtype()) if local.dtype == dtype and all(map(_is_size, shape)):
            return DTensor(shape, dtype, local, spec)
    return NotImplemented


def _rebuild_from_type_v2(args: tuple) -> object:
    """`(function, type, args, state)`: a DTensor, or a plain tensor with attributes."""
    match args:
        case (Constructor() as function, Name() as kind, tuple(inner), state) if (
            function in _REBUILD
        ):
            is_wrapper = function.name == "torch._utils._rebuild_wrapper_subclass"
            if is_wrapper and kind in _DTENSOR_TYPES:
                return _rebuild_dtensor(inner, state)
            if is_wrapper and (kind in CODED_TYPES or kind == _FLOAT8_WEIGHT):
                return _rebuild_of_torchao(kind, inner, state)
            if kind in _TENSOR_TYPES:
                return _with_state(function.call(inner), state)
            return RefusedTensor(
                f"it is a {kind}, a kind of tensor that is not known here; save a plain tensor"
                " instead"
            )
        case (Unknown(function), Name(), tuple(), _):
            return RefusedTensor(
                f"it is made by {function}, which is not known here; save a plain tensor instead"
            )
    return NotImplemented


def _rebuild_of_torchao(kind: Name, inner: tuple, state: object) -> object:
    """A weight cast to float8 when gathered (`torchao/float8/fsdp_utils.py`), or codes."""
    attributes = _attributes(state)
    match inner:
        case (_, dtype, tuple(shape), *_) if attributes is not None and all(map(_is_size, shape)):
            pass
        case _:
            return NotImplemented
    if kind == _FLOAT8_WEIGHT:
        weight = attributes.get("_tensor")
        if isinstance(weight, RefusedTensor):
            return weight
        fits = isinstance(weight, StoredTensor) and (weight.shape, weight.dtype) == (shape, dtype)
        return weight if fits else NotImplemented
    parts = {name: part for name, part in attributes.items() if isinstance(part, StoredTensor)}
    misfit = f"it is a {kind} whose codes, scales and table do not fit one another and its shape"
    return coded_state(kind, shape, dtype, parts) or RefusedTensor(misfit)


def _attributes(state: object) -> dict[str, object] | None:
    """The attributes in None, a dict or a pair of dicts (`_set_obj_state`, torch/_utils.py)."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    attributes: dict[str, object] = {}
    for part in parts:
        if not isinstance(part, dict | None):
            return None
        attributes |= part or {}
    return attributes


def _with_state(tensor: object, state: object) -> object:
    attributes = _attributes(state)
    if attributes is None:
        return NotImplemented
    if isinstance(tensor, StoredTensor) and attributes:
        return replace(tensor, attributes=attributes)
    return tensor


def _shape(args: tuple) -> object:
    """The shape that torch.Size makes, of which a table of contents has several for each chunk."""
    match args:
        case (tuple(shape),) if {*map(type, shape)} <= {int, bool}:
            return shape
    return NotImplemented


def _call(name: str) -> Constructor:
    """The `Constructor` of a tensor, or the text of a device or a layout, by its name."""
    return Constructor(name, lambda args: _value(name, args))


def _value(name: str, args: tuple) -> object:
    """The value that a function of torch makes; its arguments have the names that torch gives."""
    if name in _REFUSED:
        return RefusedTensor(_REFUSED[name])
    match name, args:
        case (
            "torch._utils._rebuild_tensor_v2",
            (Storage() as storage, offset, tuple(size), tuple(stride), bool(), _hooks, *metadata),
        ):
            return _view(storage, storage.kind.dtype, offset, size, stride, metadata)
        case (
            "torch._utils._rebuild_tensor_v3",
            (Storage() as storage, offset, tuple(size), tuple(stride), bool(), _, dtype, *metadata),
        ):
            return _view(storage, dtype, offset, size, stride, metadata)
        case (
            "torch._utils._rebuild_tensor",
            (Storage() as storage, offset, tuple(size), tuple(stride)),
        ):
            return _view(storage, storage.kind.dtype, offset, size, stride, [])
        case (
            "torch._utils._rebuild_parameter",
            (StoredTensor() | DTensor() | RefusedTensor() as data, bool(), _hooks),
        ):
            return data
        case (
            "torch._utils._rebuild_parameter_with_state",
            (StoredTensor() | DTensor() | RefusedTensor() as data, bool(), _hooks, state),
        ):
            return _with_state(data, state)
        # torch copies the data to a device such as XLA's
        case (
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            (StoredTensor() as data, np.dtype() as dtype, _device, bool()),
        ):
            misfit = RefusedTensor(f"stored as {data.dtype} for a tensor of {dtype}")
            return data if data.dtype == dtype else misfit
        case (
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            (RefusedTensor() as data, _, _device, bool()),
        ):
            return data
        case (("torch.device" | "torch.serialization._get_layout"), (str(text),)):
            return text
        case "torch.device", (str(kind), int(index)):
            return f"{kind}:{index}"
    return NotImplemented


_PLAIN_REBUILD = tuple(
    _call(f"torch._utils._rebuild_{kind}")
    for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")
)
_REFUSED = {
    f"torch._utils._rebuild_{kind}": reason
    for kind, reason in {
        "meta_tensor_no_storage": "it is on the meta device, so it has no data",
        "sparse_tensor": "it is sparse; save tensor.to_dense() instead",
        "qtensor": "it is quantized; save tensor.dequantize() instead",
        "nested_tensor": "it is a nested tensor; save its tensors as a list instead",
        "wrapper_subclass": "it is a tensor subclass without data; save a plain tensor",
        "device_tensor_from_numpy": "its device keeps it as numpy; save tensor.cpu()",
    }.items()
}
_REFUSED_REBUILD = tuple(map(_call, _REFUSED))
_REBUILD = frozenset(_PLAIN_REBUILD + _REFUSED_REBUILD)
_PARAMETERS = ("nn.parameter.Parameter", "nn.parameter.Buffer")
_TENSOR_TYPES = frozenset(Name(f"torch.{n}") for n in ("Tensor", "_tensor.Tensor", *_PARAMETERS))

_FLOAT8_WEIGHT = Name("torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor")

_STORAGE_CLASSES = [
    StorageClass(f"{module}.{kind}Storage", DTYPES[dtype])
    for module in ("torch", "torch.cuda")
    for kind, dtype in STORAGE_DTYPES.items()
] + [
    StorageClass(f"torch.{kind}Storage", None)
    for kind in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")
]

_DTENSOR_TYPES = frozenset(
    Name(f"torch.distributed.{name}")
    for name in ("tensor.DTensor", "tensor._api.DTensor", "_tensor.DTensor", "_tensor.api.DTensor")
)
# Of a mesh the ranks and the place of the rank that wrote the file. The rest names groups of
# processes, repeats the ranks, or leads to other meshes and from there back.
_KEPT_OF_MESH = ("mesh", "_layout", "_rank_map", "_coordinate_on_dim", "mesh_dim_names")
_KEPT_OF_MESH += ("_mesh_dim_names",)
_SPEC_MODULES = ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
_PLACEMENT_MODULES = ("tensor.placement_types", "_tensor.placement_types")


def _keep_mesh(made: object, state: object) -> object:
    if not isinstance(made, Record) or not isinstance(state, dict):
        return NotImplemented
    made.state = {name: state[name] for name in _KEPT_OF_MESH if name in state}
    return None


_DTENSOR_NAMES = table(
    *_DTENSOR_TYPES,
    inert("torch.distributed.device_mesh.DeviceMesh", _keep_mesh),
    inert("torch.distributed._mesh_layout._MeshLayout"),
    inert("torch.distributed._mesh_layout._FlatLayout"),
    *(
        inert(f"torch.distributed.{module}.{name}")
        for module in _SPEC_MODULES
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    ),
    *(
        inert(f"torch.distributed.{module}.{name}")
        for module in _PLACEMENT_MODULES
        for name in ("Shard", "_StridedShard", "Replicate", "Partial", "_Partial", "MaskPartial")
    ),
)

NAMES: dict[str, object] = {
    **pickle_names.NAMES,
    **_DTENSOR_NAMES,
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **table(
        *_PLAIN_REBUILD,
        *_REFUSED_REBUILD,
        *_TENSOR_TYPES,
        *CODED_TYPES,
        _FLOAT8_WEIGHT,
        *_STORAGE_CLASSES,
        _call("torch._utils._rebuild_parameter_with_state"),
        _call("torch._utils._rebuild_device_tensor_from_cpu_tensor"),
        Constructor("torch._tensor._rebuild_from_type_v2", _rebuild_from_type_v2),
        StorageClass("torch.storage.UntypedStorage", np.dtype(np.uint8)),
        StorageClass("torch.storage._UntypedStorage", np.dtype(np.uint8)),  # torch 1.11 and 1.12
        Constructor("torch.Size", _shape),
        *map(_call, ("torch.device", "torch.serialization._get_layout")),
        *(Name(f"torch.{name}") for name in _NO_NUMPY_DTYPE),
        *(
            Name(f"torch.{name}")
            for name in ("per_tensor_affine", "per_channel_affine", "preserve_format")
        ),
    ),
}
