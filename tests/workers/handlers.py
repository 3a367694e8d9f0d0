"""One of two processes that are joined: `handlers.py DIRECTORY HOW`; the ways of a program that knows only
Orbax's arguments to save and restore trees of every kind, in the universal format: a few of them
if HOW is `quick`, and otherwise all.

It prints, by way and tree, what the save left, and whether what was restored is what was saved; and
what a save said of which process 1 could not do its part.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.sharding import share, shared_save
from jax_ucp.version import VERSION

root, is_quick = Path(sys.argv[1]), sys.argv[2] == "quick"
rank = jax.process_index()
MESH = Mesh(np.array(jax.devices()), ("x",))


def placed(make: Callable[[], Any], *spec: str | None) -> Any:
    return jax.jit(make, out_shardings=NamedSharding(MESH, P(*spec)))()


ARRAYS = {
    "rows": placed(lambda: jnp.arange(64.0).reshape(8, 8), "x"),
    "columns": placed(lambda: jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8), None, "x"),
    "count": placed(lambda: jnp.int32(7)),
}
KEYS = {
    "key": placed(lambda: jax.random.key(3)),
    "keys": placed(lambda: jax.random.split(jax.random.key(4, impl="rbg"), 8), "x"),
}
HOST = {"numpy": np.arange(6, dtype=np.int16).reshape(2, 3), "step": 3, "rate": 0.5}
TREES: dict[str, Any] = {
    "arrays": ARRAYS,
    "keys": {"params": ARRAYS, "rngs": KEYS},
    "keys alone": KEYS,
    "values of the host": {"params": ARRAYS, **HOST},
    "all of them": [ARRAYS, {"rngs": KEYS, "none": None}, HOST],
}
STRINGS = {"strings": {"params": ARRAYS, "rngs": KEYS, "name": "run"}}


def whole(value: Any) -> np.ndarray:
    """The bits of a value, of which every process has a part."""
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        replicated = NamedSharding(value.sharding.mesh, P())
        return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(value).addressable_data(0))
    return np.asarray(value)


def is_same(got: Any, want: Any) -> bool:
    if jax.tree.structure(got) != jax.tree.structure(want):
        return False

    def is_leaf_same(a: Any, b: Any) -> bool:
        is_placed = not isinstance(b, jax.Array) or a.sharding.is_equivalent_to(b.sharding, b.ndim)
        return bool(type(a) is type(b) and is_placed and same_bits(whole(a), whole(b)))

    return all(jax.tree.leaves(jax.tree.map(is_leaf_same, got, want)))


def abstract(tree: Any) -> Any:
    def leaf(x: Any) -> Any:
        is_array = isinstance(x, jax.Array)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if is_array else x

    return jax.tree.map(leaf, tree)


Save = Callable[[Path, Any], None]
Restore = Callable[[Path, Any], Any]
Way = tuple[Save, Restore, dict[str, Any]]


def by_manager(kind: str, asynchronous: bool, registry: bool) -> Way:
    """`CheckpointManager` with stock Orbax's arguments."""

    @contextlib.contextmanager
    def manager(path: Path):
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
        own = {"handler_registry": ucp.handler_registry()} if registry else {}
        everywhere = contextlib.nullcontext() if registry else ucp.orbax_everywhere()
        with everywhere, ocp.CheckpointManager(path, options=options, **own) as made:
            yield made

    def save(path: Path, tree: Any) -> None:
        with manager(path) as made:
            made.save(1, args=getattr(ocp.args, f"{kind}Save")(tree))
            made.wait_until_finished()

    def restore(path: Path, target: Any) -> Any:
        more = {}
        if kind == "PyTree":
            more["restore_args"] = ocp.checkpoint_utils.construct_restore_args(target)
        with manager(path) as made:
            return made.restore(1, args=getattr(ocp.args, f"{kind}Restore")(target, **more))

    return save, restore, TREES if kind == "Standard" and not registry else TREES | STRINGS


def by_checkpointer(handler: type, kind: str) -> Way:
    """`Checkpointer` with a handler of stock Orbax's, within `orbax_everywhere`."""

    def save(path: Path, tree: Any) -> None:
        with ucp.orbax_everywhere():
            args = getattr(ocp.args, f"{kind}Save")(tree)
            ocp.Checkpointer(handler()).save(path / "1" / "default", args=args)

    def restore(path: Path, target: Any) -> Any:
        with ucp.orbax_everywhere():
            args = getattr(ocp.args, f"{kind}Restore")(target)
            return ocp.Checkpointer(handler()).restore(path / "1" / "default", args=args)

    return save, restore, TREES


def by_v1(asynchronous: bool, everywhere: bool) -> Way:
    """`v1.save`, within `orbax_everywhere` or in an `orbax_context`."""
    from orbax.checkpoint import v1

    def within() -> contextlib.AbstractContextManager[Any]:
        return ucp.orbax_everywhere() if everywhere else ucp.orbax_context()

    def save(path: Path, tree: Any) -> None:
        with within():
            if asynchronous:
                v1.save_async(path / "1", tree).result()
            else:
                v1.save(path / "1", tree)

    def restore(path: Path, target: Any) -> Any:
        with within():
            return v1.load(path / "1", target)

    return save, restore, TREES | STRINGS


WAYS: dict[str, Way] = {
    f"{kind}Save, {where}{' in the background' if later else ''}": by_manager(kind, later, registry)
    for kind in ("Standard", "PyTree")
    for where, registry in (("everywhere", False), ("registry", True))
    for later in (False, True)
}
for stock in (ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler):
    name = stock.__name__.removesuffix("CheckpointHandler")
    WAYS[f"a checkpointer of {stock.__name__}"] = by_checkpointer(stock, name)
if HAS_V1:
    WAYS |= {
        f"v1, {where}{' in the background' if later else ''}": by_v1(later, everywhere)
        for where, everywhere in (("everywhere", True), ("context", False))
        for later in (False, True)
    }


def kept(path: Path) -> list[str]:
    """What there is of a step: its folder, and whether it has our format."""
    sync_global_devices("saved")
    ours = [str(file.parent.relative_to(path)) for file in path.rglob("ucp.json")]
    return sorted(entry.name for entry in path.iterdir()) + ours


def met(way: str, name: str) -> dict[str, Any]:
    save, restore, trees = WAYS[way]
    path, tree = root / f"{way}, {name}".replace(" ", "_"), trees[name]
    save(path, tree)
    found = kept(path)
    return {"kept": found, "same": is_same(restore(path, abstract(tree)), tree)}


def failed(way: str) -> dict[str, Any]:
    """What a save says of which process 1 has a leaf that cannot be saved; and the next one.

    Orbax v1 looks at leaves before it comes to any handler, in each process for itself: there it is
    one that only we refuse.
    """
    save, restore, _ = WAYS[way]
    bad = jnp.ones(3) if way.startswith("v1") else object()
    path, tree = root / f"{way}, failed".replace(" ", "_"), TREES["keys"]
    begun, error = time.monotonic(), ""
    try:
        save(path, tree | {"bad": bad} if rank else tree)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - begun
    sync_global_devices("failed")
    whole = [str(file) for file in path.rglob("ucp.json")]
    sync_global_devices("looked")
    save(path, tree)
    same = is_same(restore(path, abstract(tree)), tree)
    return {"error": error, "seconds": seconds, "whole": whole, "same": same, "kept": kept(path)}


def caught(do: Callable[[], object]) -> str:
    try:
        do()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def versions(saved: Path) -> dict[str, Any]:
    """What is said where process 1 has another version of the package."""
    path = root / "versions"
    opened = ucp.open(saved, step=1)
    share.VERSION = shared_save.VERSION = "0.0.1" if rank else VERSION
    found = {
        "saved": caught(lambda: WAYS[QUICK[0]][0](path, ARRAYS)),
        "opened": caught(lambda: ucp.open(saved, step=1, share_reads=True)),
        "restored": caught(lambda: opened.restore(mesh=MESH, rules=[("", P())], share_reads=True)),
    }
    share.VERSION = shared_save.VERSION = VERSION
    sync_global_devices("versions")
    return found | {"whole": [str(file) for file in path.rglob("ucp.json")]}


QUICK = "StandardSave, everywhere", "PyTreeSave, everywhere in the background", "v1, everywhere"

said: dict[str, Any] = {"failed": {}}
for way, (_, _, trees) in WAYS.items():
    if is_quick and way not in QUICK:
        continue
    for name in ["all of them"] if is_quick else trees:
        print(way, name, file=sys.stderr, flush=True)
        said[f"{way}, {name}"] = met(way, name)
    print(way, "failed", file=sys.stderr, flush=True)
    said["failed"][way] = failed(way)
share.SMALL_BYTES = 0
first = f"{QUICK[0]}, all of them".replace(" ", "_")
said["versions"] = versions(root / first)
print(json.dumps(said))
