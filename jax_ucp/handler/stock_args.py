"""Conversion of stock Orbax's arguments for PyTrees to ours; unsupported ones are refused.

Facts: `_src/handlers/{standard,pytree}_checkpoint_handler.py`, `_src/serialization/types.py` of
orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding

from jax_ucp.checkpoint import open
from jax_ucp.handler.items import Restore, Save
from jax_ucp.sharding.trees import AsStored, StandIn

SAVE_ARGS = (Save, ocp.args.StandardSave, ocp.args.PyTreeSave)
RESTORE_ARGS = (Restore, ocp.args.StandardRestore, ocp.args.PyTreeRestore)
_PYTHON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def save_args(args: Any) -> Save:
    """The arguments of a save, stock Orbax's or ours, as ours.

    Raises ValueError for arguments that would change what is stored.
    """
    if isinstance(args, Save):
        return args
    for each in jax.tree.leaves(args.save_args):
        if getattr(each, "dtype", None) is not None:
            raise ValueError(
                f"save_args has dtype={each.dtype}: jax_ucp stores arrays as they are. Cast the"
                " tree before it is saved"
            )
    if args.custom_metadata is not None:
        raise ValueError(
            "custom_metadata of an item is not kept by jax_ucp; give it to CheckpointManager.save,"
            " which keeps it with the step"
        )
    return Save(args.item)


def restore_args(directory: os.PathLike[str], args: Any) -> Restore:
    """The arguments of a restore, stock Orbax's or ours, as ours.

    As with stock Orbax, a leaf of the target without a sharding goes to the devices that it was
    saved from, unless a mesh is set, and the result has the target's dtypes. Raises ValueError for
    options that are not supported.
    """
    if args is None or isinstance(args, Restore):
        return args or Restore()
    item = None if args.item is None else target_of(args.item)
    if isinstance(args, ocp.args.StandardRestore):
        if not args.strict:
            raise ValueError("strict=False cuts and pads arrays, which is not done by jax_ucp")
        fallback = args.fallback_sharding
        if fallback is not None:
            item = jax.tree.map(lambda leaf: _placed(leaf, fallback), item)
        return Restore(item, mesh="saved", cast=item is not None)
    if args.transforms or args.legacy_transform_fn is not None:
        raise ValueError("transforms are not done by jax_ucp: open the step and map it")
    # before Orbax had `partial_restore`, programs gave empty transforms, {}, for it
    is_partial = args.partial_restore or args.transforms is not None
    if args.restore_args is not None:
        item = open(directory).abstract() if item is None else item
        item = jax.tree.map(_as_asked, item, args.restore_args)
    if not is_partial:
        return Restore(item, mesh="saved", cast=item is not None)
    return partial_restore(item, args.item)


def partial_restore(target: Any, asked: Any, budget_bytes: int | None = None) -> Restore:
    """The arguments of a partial restore as in stock Orbax: leaves that only one side has are left.

    `asked` is the target as it was given, whose leaves are returned if the checkpoint lacks them.
    """
    item = jax.tree.map(StandIn, target, tree_in(asked))
    return Restore(
        item, mesh="saved", cast=True, partial=True, missing="leave", budget_bytes=budget_bytes
    )


def tree_in(asked: Any) -> Any:
    """The tree of a target, which may also be stock Orbax's metadata of an item."""
    return asked.tree if hasattr(asked, "tree") else asked


def target_of(tree: Any) -> Any:
    """The target of a restore by stock Orbax as a target of ours.

    Metadata of a jax.Array becomes a ShapeDtypeStruct, metadata of a numpy array a numpy array of
    that shape and dtype, metadata of a number or text a value of its type; other leaves stay.
    """
    return jax.tree.map(_target_leaf, tree_in(tree))


def _target_leaf(leaf: Any) -> Any:
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return ""
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return _PYTHON_TYPES[np.dtype(leaf.dtype).kind]()
    known = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    if isinstance(leaf, known) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if not (hasattr(leaf, "sharding") or hasattr(leaf, "sharding_metadata")):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # takes no memory
    sharding = getattr(leaf, "sharding", None)
    own = sharding if isinstance(sharding, Sharding) else None
    return AsStored(leaf.shape, leaf.dtype, sharding=own)


def _placed(leaf: Any, sharding: Sharding) -> Any:
    """The leaf of a target, with this sharding if it has none."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf


def _as_asked(leaf: Any, args: Any) -> Any:
    """The leaf of a target, changed by its RestoreArgs."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    shape = getattr(args, "global_shape", None)
    if shape is not None and tuple(shape) != tuple(leaf.shape):
        raise ValueError(
            f"global_shape {tuple(shape)} of an array of {tuple(leaf.shape)} would cut or pad it,"
            " which is not done by jax_ucp"
        )
    dtype = leaf.dtype if args.dtype is None else args.dtype
    if args.restore_type is np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), leaf.shape)
    sharding = getattr(args, "sharding", None)
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = NamedSharding(args.mesh, args.mesh_axes)
    return jax.ShapeDtypeStruct(
        leaf.shape, dtype, sharding=sharding if isinstance(sharding, Sharding) else None
    )
