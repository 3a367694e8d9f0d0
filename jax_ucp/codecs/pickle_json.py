"""Extras that importers kept as JSON, turned back into objects that torch pickles."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_ucp.arrays.dtypes import named_dtype
from jax_ucp.codecs.pickle_writer import Call, Global, Instance, torch_dtype
from jax_ucp.errors import UnsupportedLeaf

# The classes that may be named in a file that torch will run: what trainers' own settings are made
# of. The names come from a checkpoint, and a pickle calls what it names.
_ARGUMENTS = "argparse.Namespace"
CLASSES = frozenset(
    (
        _ARGUMENTS,
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
    )
)


def values(extras: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Extras by file and name as `from_json` makes them, and notes on those left out.

    Of a run's arguments those alone are left out that cannot be written.
    """
    decoded: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for file, named in extras.items():
        decoded[file] = {}
        for name, value in named.items():
            try:
                if isinstance(value, dict) and value.get("!record") == _ARGUMENTS:
                    value, left = _writable(value)
                    if left:
                        notes.append(
                            f"{len(left)} of {name} of {file} are left out, the first {left[0][0]}:"
                            f" {left[0][1]}"
                        )
                decoded[file][name] = from_json(value)
            except UnsupportedLeaf as error:
                notes.append(f"{name} of {file} is left out: {error}")
            except (ValueError, TypeError, ArithmeticError) as error:
                notes.append(
                    f"{name} of {file} is left out: it is not what an import makes of a value"
                    f" ({error})"
                )
    return decoded, notes


def _writable(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A namespace with the fields that can be written, and the others with the reason."""
    fields: dict[str, Any] = {}
    left: list[tuple[str, str]] = []
    for field, value in dict(arguments.get("fields") or {}).items():
        try:
            from_json(value)
            fields[field] = value
        except UnsupportedLeaf as error:
            left.append((field, str(error)))
    return {**arguments, "fields": fields}, left


def from_json(value: Any) -> Any:
    """The value of JSON that `as_json` made, classes as names. Raises UnsupportedLeaf."""
    match value:
        case {"!array": str(data), "dtype": str(name), "shape": list(shape)}:
            flat = np.frombuffer(base64.b64decode(data), named_dtype(name))
            return flat.reshape(shape)
        case {"!record": str(name), "args": list(args), "fields": dict(fields)}:
            args, fields = from_json(args), from_json(fields)
            if name not in CLASSES:
                raise UnsupportedLeaf(
                    f"it has an object of {name}, and torch would run what makes one"
                )
            module, _, attribute = name.rpartition(".")
            made = Global(module, attribute)
            return Call(made, tuple(args)) if args else Instance(made, fields)
        case {"!opaque": str(name)}:
            raise UnsupportedLeaf(f"it has an object of {name}, and torch would run what makes one")
        case {"!left_out": str(reason)} if len(value) == 1:
            raise UnsupportedLeaf(f"it has a tensor that was not read: {reason}")
        case {"!complex": [real, imaginary]} if len(value) == 1:
            return complex(real, imaginary)
        case dict() if len(value) == 1:
            ((key, content),) = value.items()
            kind, decode = _TAGS.get(key, (object, None))
            if decode is None or not isinstance(content, kind):
                return {key: from_json(content)}
            return decode(content)
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return list(map(from_json, value))
    return value


# By tag, the kind of content that it is for, and what makes the value of it.
_TAGS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "!float": (str, float),
    "!text": (str, str),
    "!bytes": (str, base64.b64decode),
    "!wtf8": (str, lambda data: base64.b64decode(data).decode(errors="surrogatepass")),
    "!dtype": (str, lambda name: torch_dtype(named_dtype(name))),
    "!tuple": (list, lambda items: tuple(map(from_json, items))),
    "!set": (list, lambda items: set(map(from_json, items))),
    "!dict": (list, lambda pairs: {from_json(key): from_json(item) for key, item in pairs}),
}
