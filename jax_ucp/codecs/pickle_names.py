"""The names of Python, numpy and the trainers in a pickle: the allow-list without tensors.

Names are as Python writes them at protocols 2 to 5; protocol 2 says `__builtin__` for `builtins`
(`Lib/_compat_pickle.py`).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from jax_ucp.codecs.unpickle import (
    MAX_GLOBAL,
    Build,
    Constructor,
    Name,
    Opaque,
    Record,
    Unknown,
    inert,
    is_plain_name,
    table,
)
from jax_ucp.errors import FormatError

# Classes of which a checkpoint holds instances, and of which we need the fields but never the
# behaviour. Older DeepSpeed defines fragment_address in bf16_optimizer, older Megatron-LM its enums
# in megatron.model.
INERT = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "signal.Signals",
        "_io.BytesIO",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.bf16_optimizer.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "megatron.core.enums.ModelType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.model.enums.ModelType",
    }
)


def _call(name: str, build: Build | None = None, holds_keys: bool = False) -> Constructor:
    """The `Constructor` of plain values, by its dotted name."""
    return Constructor(name, lambda args: _value(name, args), build, holds_keys=holds_keys)


def _value(name: str, args: tuple) -> object:
    match name, args:
        case "builtins.bytes", ():
            return b""
        case "builtins.bytearray", ():
            return bytearray()
        case "builtins.bytearray", (bytes(data),):
            return bytearray(data)
        case "builtins.bytearray", (str(text), "latin1" | "latin-1"):
            return bytearray(_latin1(text))
        case "_codecs.encode", (str(text), "latin1" | "latin-1"):
            return _latin1(text)
        case "builtins.set", (list(items),):
            return set(items)
        case "builtins.frozenset", (list(items),):
            return frozenset(items)
        case "builtins.complex", (float(real), float(imaginary)):
            return complex(real, imaginary)
        # a member of an enum, as Python 3.11.0 to 3.11.3 write it; at protocol 2 an inner class
        case "builtins.getattr", (Unknown(of), str(member)) if is_plain_name(member):
            return (
                Unknown(f"{of}.{member}") if len(of) + len(member) < MAX_GLOBAL else NotImplemented
            )
        case "builtins.getattr", (Constructor(inert=True) as enum, str(member)):
            return Record(enum.name, (member,))
        case "collections.Counter", (dict(counts),):
            return dict(counts)
        case "collections.Counter" | "collections.OrderedDict", ():
            return {}
        case "collections.defaultdict", () | (None | Name(),):
            return {}
        case (("pathlib.PosixPath" | "pathlib._local.PosixPath"), _) if {*map(type, args)} <= {str}:
            return str(PurePosixPath(*args))
        case "numpy._core.multiarray.scalar", (np.dtype() as dtype, bytes(data)):
            return np.frombuffer(data, dtype)[0] if len(data) == dtype.itemsize else NotImplemented
        case "numpy._core.multiarray.scalar", (Opaque(type="numpy.dtype"), _):
            return Opaque("numpy.generic", args)
        case "numpy._core.multiarray._reconstruct", (Name("numpy.ndarray"), (0,), b"b"):
            return np.empty(0, np.int8)
        case "numpy.dtype", (str(code), bool() | int(), bool() | int()):
            plain = code in _NUMPY_CODES or _NUMPY_TEXT.fullmatch(code)
            return np.dtype("<" + code) if plain else Opaque("numpy.dtype", args)
    return NotImplemented


def _latin1(text: str) -> bytes:
    """The bytes that protocol 2 writes as the text of the same code points."""
    try:
        return text.encode("latin1")
    except UnicodeEncodeError as error:
        raise FormatError(f"bytes in the pickle are not bytes: {error.reason}") from error


def _drop_attributes(made: object, state: object) -> object:
    """Nothing is kept: torch has `_metadata`, versions of modules, in an OrderedDict."""
    return None if isinstance(state, dict) else NotImplemented


# numpy's own letters for plain numbers, and texts of a fixed length; "O" would hold pickled
# objects.
_NUMPY_CODES = {np.dtype(code).str[1:] for code in "?bBhHiIlLqQefdFD"}
_NUMPY_TEXT = re.compile(r"[SU]\d{1,9}")


def _check_dtype(made: object, state: object) -> object:
    """State: version, byte order, no sub-array, no fields ... (`arraydescr_reduce` of numpy)."""
    match made, state:
        case Opaque(), _:
            made.state = state
            return None
        case _, (int(), "<" | "|" | "=", None, None, None, *_):
            return None
        case np.dtype(), (int(), ">", *_):
            return Opaque("numpy.dtype", (made.str[1:],), state)
    return NotImplemented


def _fill_array(made: Any, state: object) -> object:
    """State: version, shape, dtype, column-major, bytes. Plain numbers alone are set."""
    match state:
        case (int(), tuple(shape), np.dtype(), bool() | int(), bytes()):
            if not all(type(n) is int and n >= 0 for n in shape):
                return NotImplemented
            try:
                made.__setstate__(state)
            except (ValueError, TypeError, OverflowError) as error:
                raise FormatError(f"a numpy array in the pickle: {error}") from error
            return None
        case (int(), tuple(), Opaque(type="numpy.dtype"), bool() | int(), bytes() | list()):
            return Opaque("numpy.ndarray", (), state)
    return NotImplemented


_BUILTINS = (
    *map(_call, ("builtins.bytes", "builtins.bytearray", "builtins.complex", "builtins.getattr")),
    *(_call(f"builtins.{kind}", holds_keys=True) for kind in ("set", "frozenset")),
    *(
        Name(f"builtins.{name}")
        for name in ("dict", "list", "int", "float", "str", "bool", "tuple")
    ),
)

_NUMPY_MULTIARRAY = (
    _call("numpy._core.multiarray.scalar"),
    _call("numpy._core.multiarray._reconstruct", _fill_array),
)

NAMES: dict[str, object] = {
    **table(*map(inert, INERT)),
    **table(*_BUILTINS),
    **{f"__builtin__.{name.name.removeprefix('builtins.')}": name for name in _BUILTINS},
    "__builtin__.long": Name("builtins.int"),
    "__builtin__.unicode": Name("builtins.str"),
    **table(
        _call("collections.OrderedDict", _drop_attributes),
        *map(_call, ("_codecs.encode", "collections.Counter", "collections.defaultdict")),
        *map(_call, ("pathlib.PosixPath", "pathlib._local.PosixPath")),  # the second of Python 3.13
        # Python up to 3.11.3 pickles a signal by its own name. Megatron-LM, `--exit-signal`, offers
        # these.
        *(Name(f"signal.{name}") for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")),
        _call("numpy.dtype", _check_dtype),
        Name("numpy.ndarray"),
        *_NUMPY_MULTIARRAY,
    ),
    # numpy 1
    **{name.name.replace("_core", "core"): name for name in _NUMPY_MULTIARRAY},
}
