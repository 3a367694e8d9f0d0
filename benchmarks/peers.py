"""Everything a user could take instead, each in its default and in its best configuration,
behind one small shape.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

import jax_ucp as ucp

OURS = "jax_ucp"
Tree = Mapping[str, Any]
Begin = Callable[[Path, Tree], Callable[[], object]]


@dataclass(frozen=True)
class Peer:
    """A way to save a flat tree of arrays to a path, and to restore it onto the shardings of a
    target.

    `begin` is its asynchronous save, where it has one: it gives what waits for the end.
    """

    name: str
    save: Callable[[Path, Tree], object]
    restore: Callable[[Path, Tree], Any]
    begin: Begin | None = None


def peers() -> list[Peer]:
    """Ours first, then every peer that is installed."""
    found = [
        Peer(OURS, _save_ours, lambda path, target: ucp.open(path).restore(target), _begin_ours),
        _orbax_v0("Orbax v0, default"),
        _orbax_v0("Orbax v0, no compression", use_compression=False),
        _orbax_v0("Orbax v0, no compression, no OCDBT", use_compression=False, use_ocdbt=False),
        _orbax_v1("Orbax v1, default"),
        _orbax_v1("Orbax v1, no compression", use_compression=False),
    ]
    if find_spec("safetensors"):
        found += [
            Peer("safetensors + device_put", _save_safetensors, _load_safetensors),
            Peer("Orbax v1, its safetensors layout", _save_safetensors, _load_safetensors_layout),
        ]
    return found


def fresh(path: Path) -> Path:
    """The path, with nothing at it."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def ready(tree: Any) -> Any:
    return jax.block_until_ready(tree)


def _save_ours(path: Path, tree: Tree) -> None:
    with ocp.Checkpointer(ucp.CheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ucp.args.Save(dict(tree)))


def _begin_ours(path: Path, tree: Tree) -> Callable[[], object]:
    checkpointer = ocp.AsyncCheckpointer(ucp.CheckpointHandler())
    checkpointer.save(path, args=ucp.args.Save(dict(tree)))
    return checkpointer.close


def _orbax_v0(name: str, **options: Any) -> Peer:
    def save(path: Path, tree: Tree) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(dict(tree)))

    def restore(path: Path, target: Tree) -> Any:
        args = ocp.args.PyTreeRestore(
            dict(target), ocp.checkpoint_utils.construct_restore_args(dict(target))
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            return checkpointer.restore(path, args=args)

    def begin(path: Path, tree: Tree) -> Callable[[], object]:
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**options))
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(tree)))
        return checkpointer.close

    return Peer(name, save, restore, begin)


def _orbax_v1(name: str, **saving: Any) -> Peer:
    options = v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(**saving))

    def save(path: Path, tree: Tree) -> None:
        with v1.Context(array_options=options):
            v1.save(path, dict(tree))

    def begin(path: Path, tree: Tree) -> Callable[[], object]:
        with v1.Context(array_options=options):
            return v1.save_async(path, dict(tree)).result

    return Peer(name, save, lambda path, target: v1.load(path, dict(target)), begin)


def _save_safetensors(path: Path, tree: Tree) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    save_file({name: np.asarray(array) for name, array in tree.items()}, path / "model.safetensors")


def _load_safetensors(path: Path, target: Tree) -> Any:
    from safetensors.numpy import load_file

    arrays = load_file(path / "model.safetensors")
    names = list(target)
    placed = jax.device_put(
        [arrays[name] for name in names], [target[name].sharding for name in names]
    )
    return dict(zip(names, placed, strict=True))


def _load_safetensors_layout(path: Path, target: Tree) -> Any:
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        return v1.load(path, dict(target))
