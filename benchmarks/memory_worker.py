"""What one save or one restore takes of memory, in a process that has done nothing else; printed as
JSON.

python -m benchmarks.memory_worker REQUEST
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import OURS, fresh, peers, ready
from jax_ucp import open as ucp_open
from jax_ucp.files.local import LocalFiles
from jax_ucp.sharding.save import commit_snapshot, describe, take_snapshot, write_snapshot

WARM_SHAPE = (1024, 512)
SMALL_BUDGET = 1 << 20


def main(request: dict[str, Any]) -> None:
    path, shape, count = Path(request["path"]), tuple(request["shape"]), request["count"]
    small = fresh(path.with_name("warm"))
    # what a first time costs is no part of what is measured
    _save(OURS, small, _state(WARM_SHAPE, 2), None)
    _restore(OURS, small, _target(WARM_SHAPE, 2, "columns"), SMALL_BUDGET)
    if request["do"] == "save":
        state = _state(shape, count)
        _measure(lambda: _save(request["peer"], fresh(path), state, request["budget"]))
        return
    target = _target(shape, count, request["onto"], request["dtype"])
    if request["peer"] != OURS:
        _save(request["peer"], fresh(small), _state(WARM_SHAPE, 2), None)
        _restore(request["peer"], small, _target(WARM_SHAPE, 2, "columns"), None)
    _measure(lambda: _restore(request["peer"], path, target, request["budget"]), request["times"])


def _measure(do: Any, times: int = 1) -> None:
    """Print the most that was resident, above what was before; and what is left each time that
    the result is gone.
    """
    gc.collect()
    before = _kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew. Source: proc(5)
    left = []
    for _ in range(times):
        result = do()
        del result
        gc.collect()
        left.append((_kib("VmRSS") - before) >> 10)
    print(json.dumps({"peak_mib": (_kib("VmHWM") - before) / 1024, "left_mib": left}))


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _save(peer: str, path: Path, state: Any, budget: int | None) -> None:
    if budget is None:
        _peer(peer).save(path, state)
        return
    snapshot = take_snapshot(describe(state))
    commit_snapshot(write_snapshot(snapshot, LocalFiles(path), budget))


def _restore(peer: str, path: Path, target: Any, budget: int | None) -> Any:
    if budget is None:
        return ready(_peer(peer).restore(path, target))
    return ready(ucp_open(path).restore(target, cast=True, budget_bytes=budget))


def _peer(name: str) -> Any:
    return next(peer for peer in peers() if peer.name == name)


def _state(shape: tuple[int, ...], count: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    sharding = _sharding("rows")

    def block(index: tuple[slice, ...]) -> np.ndarray:
        return rng.standard_normal(
            [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], np.float32
        )

    return {
        f"w{i:03}": ready(jax.make_array_from_callback(shape, sharding, block))
        for i in range(count)
    }


def _target(
    shape: tuple[int, ...], count: int, onto: str, dtype: str = "float32"
) -> dict[str, jax.ShapeDtypeStruct]:
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(onto))
    return {f"w{i:03}": like for i in range(count)}


def _sharding(name: str) -> NamedSharding:
    devices = jax.devices()[: 1 if name == "one device" else 8]
    spec = {
        "rows": PartitionSpec("x", None),
        "columns": PartitionSpec(None, "x"),
        "one device": PartitionSpec(),
    }
    return NamedSharding(Mesh(np.array(devices), ("x",)), spec[name])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
