"""Objects of classes that are not known here: they may lie beside the weights, and decide nothing.

The pickle interpreter makes an `Opaque` of each, without importing or calling anything. It is kept as JSON where it is
an extra. Where it holds tensors, only its class knows what they are: then it must not be taken for the model, nor may
another dict be taken for the model because this one cannot be looked into.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from jax_ucp.formats.safe_pickle import Opaque, children, walk
from jax_ucp.formats.torch_names import StoredTensor

NAMES_SHOWN = 8


def tensor_holders(node: object) -> Iterator[Opaque]:
    """The outermost objects of unknown classes in a tree that hold tensors, or may hold some."""
    if isinstance(node, Opaque):
        if node.closed or any(isinstance(inner, StoredTensor) for _, inner in walk(node)):
            yield node
        return
    for _, child in children(node):
        yield from tensor_holders(child)


def closed_tensors(holder: Opaque) -> str:
    """Why a tensor inside an object of an unknown class cannot be used, and what to do."""
    return (
        f"{holder.where} is an object of {holder.type}, which is not known here, and holds tensors that only its class "
        "can tell apart. Save its state_dict(), or its tensors in a dict, instead of the object"
    )


def unknown_notes(names: Collection[str]) -> list[str]:
    """A note on the classes and functions that files name and nobody here knows; none if there are none."""
    if not names:
        return []
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [
        f"the files name classes that are not known here: {shown}{more}. Nothing was imported; their objects are kept "
        "closed, as extras, and decide nothing"
    ]
