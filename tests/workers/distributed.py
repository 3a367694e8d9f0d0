"""One of several processes that are joined: `distributed.py FUNCTION DIRECTORY`; prints what the
function returns.

What is saved is a function of names alone, so that every process can check its own part of what it
restores.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1
from reads import bytes_read
from shared_arrays import ARRAYS, KEYS, bits_by_name

import jax_ucp as ucp
from cases import Case
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import CorruptData
from jax_ucp.handler import items as handler
from jax_ucp.sharding import restore as restoring
from jax_ucp.sharding import share
from jax_ucp.sharding.boxes import device_boxes
from jax_ucp.universal import stacks
from jax_ucp.universal import store as universal_store
from jax_ucp.universal.store import ZarrStore
from remote_files import counted

what, directory = sys.argv[1:]
rank, processes = jax.process_index(), jax.process_count()
BIG, ODD, TINY = (1536, 768), (24, 330), (24, 10)
SMALL = [f"small{i:04}" for i in range(1000)]  # so many are packed
ALIKE = [f"alike{i:02}" for i in range(12)]  # they are stacked where that begins at twelve
MESH = Mesh(np.array(jax.devices()), ("x",))


def want(name: str) -> np.ndarray:
    shapes = {"big": BIG, "small": TINY, "alike": (192, 256)}
    shape = next((shapes[kind] for kind in shapes if name.startswith(kind)), ODD)
    return np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32)


def spec(name: str, columns: bool) -> P:
    if "replicated" in name:
        return P()
    return P(None, "x") if columns and name == "big" else P("x", None)


def placed(name: str, columns: bool) -> jax.Array:
    array = want(name)
    sharding = NamedSharding(MESH, spec(name, columns))
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


NAMES = ["big", "big_replicated", "odd"]


def save(names: list[str] = NAMES) -> dict:
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(0, args=ucp.args.Save(tree(names)))
        manager.wait_until_finished()
    return {}


def save_packed() -> dict:
    return save(NAMES + SMALL)


def save_stacked() -> dict:
    stacks.STACK_FROM = len(ALIKE)
    written: list[str] = []
    write = ZarrStore.write

    def noting(store, key, box, data, durable=True):
        written.append(f"{key}{box}")
        write(store, key, box, data, durable)

    ZarrStore.write = noting
    return save(NAMES + ALIKE) | {"written": [name for name in written if "stack" in name]}


def restore_stacked() -> dict:
    """Restored as many rows in each process, with the bytes read and needed."""
    rows = NamedSharding(MESH, P("x"))
    shapes = {name: want(name).shape for name in ALIKE}
    target = {n: jax.ShapeDtypeStruct(s, np.float32, sharding=rows) for n, s in shapes.items()}
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        with bytes_read() as count:
            got = manager.restore(0, args=ucp.args.Restore(target, partial=True))
        read = count()
        check(got)
        check(manager.restore(0, args=ucp.args.Restore(mesh=MESH)))
    return {"read": read, "needed": sum(want(name).nbytes for name in ALIKE) // processes}


def restore() -> dict:
    """Restored transposed, with the bytes read and needed; and refitted."""
    target = {}
    for name in NAMES:
        if name != "odd" or ODD[0] % len(jax.devices()) == 0:
            sharding = NamedSharding(MESH, spec(name, columns=True))
            target[name] = jax.ShapeDtypeStruct(want(name).shape, np.float32, sharding=sharding)
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        with bytes_read() as count:
            got = manager.restore(0, args=ucp.args.Restore(target, partial=True))
        read = count()
        check(got)
        check(manager.restore(0, args=ucp.args.Restore(mesh=MESH)))
    boxes = [device_boxes(array.sharding, array.shape) for array in got.values()]
    needed = 4 * sum(box.size for some in boxes for box in some)
    return {"read": read, "needed": needed}


def save_v1() -> dict:
    """A step saved at once, and one in the background while its arrays are deleted. The last
    process writes late.
    """
    if rank == processes - 1:
        write = handler.write_snapshot
        handler.write_snapshot = lambda *args: (time.sleep(0.5), write(*args))[1]
    args = {"model": ucp.args.Save(tree()), "config": {"layers": 2}}
    v1.save_checkpointables(f"{directory}/sync", args)
    state = tree()
    saving = v1.save_checkpointables_async(f"{directory}/async", {"model": ucp.args.Save(state)})
    for name in NAMES:
        state[name].delete()
    saving.result()
    return {}


def restore_v1() -> dict:
    for step in ("sync", "async"):
        args = ucp.args.Restore(mesh=MESH, share_reads=step == "async")
        found = v1.load_checkpointables(f"{directory}/{step}", {"model": args})["model"]
        check(found)
        assert found["host"].tolist() == [0, 1, 2], found["host"]
        sharding = NamedSharding(MESH, P(None, "x"))
        target = {"big": jax.ShapeDtypeStruct(BIG, np.float32, sharding=sharding)}
        args = {"model": ucp.args.Restore(target, partial=True)}
        found = v1.load_checkpointables(f"{directory}/{step}", args)
        assert found["model"]["big"].sharding == sharding
        check(found["model"])
    return {}


def count() -> dict:
    """Bytes read to restore each checkpoint of the directory by rows, and by columns."""
    read = {}
    for path in sorted(Path(directory).iterdir()):
        for axes in (("x",), (None, "x")):
            with bytes_read() as count:
                got = ucp.open(path).restore(mesh=MESH, rules=[("", P(*axes))])
            check(got)
            read[f"{path.name} onto {'columns' if len(axes) > 1 else 'rows'}"] = count()
    return {"read": read}


def first() -> dict:
    """A restore onto process 0's devices alone, in which the others read nothing."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with bytes_read() as count:
        got = ucp.open(directory).restore(mesh=mesh, rules=[("", P("x"))])
    check(got)
    return {"read": count()}


def share_reads() -> dict:
    """Bytes read of a replicated array by each for itself and together, behind Orbax's manager;
    and as planned.
    """
    replicated = NamedSharding(MESH, P())
    target = {"big_replicated": jax.ShapeDtypeStruct(BIG, np.float32, sharding=replicated)}
    said = {}
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        for together in (False, True):
            with bytes_read() as count:
                args = ucp.args.Restore(target, partial=True, share_reads=together)
                got = manager.restore(0, args=args)
            said["together" if together else "alone"] = count()
            check(got)
            assert got["big_replicated"].sharding == target["big_replicated"].sharding
    checkpoint = ucp.open(f"{directory}/0/default")
    planned = checkpoint.plan(target, partial=True, share_reads=True).read_bytes
    # Onto a mesh of all but the last process's devices, it takes part too.
    most = NamedSharding(Mesh(np.array(jax.devices()[:-2]), ("x",)), P())
    target = {"big_replicated": jax.ShapeDtypeStruct(BIG, np.float32, sharding=most)}
    got = checkpoint.restore(target, partial=True, share_reads=True)
    check(got)
    assert len(got["big_replicated"].addressable_shards) == (0 if rank == processes - 1 else 2)
    return said | {"planned": planned}


def share_bits() -> dict:
    """Arrays of many dtypes, most of whose lengths divide by nothing, by specs that leave copies:
    each bit as it was.

    Cast too, and with a budget in which each array goes alone. Returns how many arrays were shared.
    """
    devices, shared = np.array(jax.devices()), 0
    checkpoint = ucp.open(directory)
    rules = [(f"^{name}$", P(*spec)) for name, (_, _, spec) in ARRAYS.items()]
    meshes = (devices.reshape(2, -1), ("a", "b")), (devices.reshape(-1, 2), ("b", "a"))
    for mesh in (Mesh(*about) for about in meshes):
        for cast, budget in ((False, 1), (np.dtype("bfloat16"), 1 << 30)):
            options = {"mesh": mesh, "rules": rules, "cast": cast, "share_reads": True}
            plan = checkpoint.plan(**options)
            shared += sum(placement.shared is not None for placement in plan.placements)
            got = checkpoint.restore(**options, budget_bytes=budget)
            for name, array in bits_by_name().items():
                is_cast = cast and jax.numpy.issubdtype(array.dtype, np.floating)
                truth = array.astype(cast) if is_cast else array
                found = jax.random.key_data(got[name]) if name == KEYS else got[name]
                assert found.sharding.is_equivalent_to(plan[name].sharding, array.ndim), name
                for shard in found.addressable_shards:
                    assert same_bits(np.asarray(shard.data), truth[shard.index]), (name, cast)
    return {"shared": shared}


def share_deepspeed() -> dict:
    """A checkpoint of DeepSpeed, all of whose arrays are small, with their reads shared, against
    its truth.
    """
    share.SMALL_BYTES = 0
    mesh, case = Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b")), Path(directory).name
    live = Case(f"deepspeed/{case}")
    checkpoint, truth = ucp.open(directory), live.truth()
    options = {"mesh": mesh, "rules": [("weight$", P("b"))]}
    got = checkpoint.restore(**options, share_reads=True)
    for label, array in truth.items():
        state, _, name = label.partition("/")
        for shard in got[state][name].addressable_shards:
            assert live.equal(shard.data, array[shard.index], label), label
    plans = (checkpoint.plan(**options, share_reads=shared) for shared in (False, True))
    alone, together = (plan.read_bytes for plan in plans)
    plan, counted = checkpoint.plan_optimizer(optax.adam(1e-3), got["param"], check=False), []
    read_together = restoring.read_together

    def noted(reads, *more):
        counted.append(len(reads))
        return read_together(reads, *more)

    restoring.read_together = noted
    states = [jax.tree.leaves(plan.restore(share_reads=shared)) for shared in (False, True)]
    for a, b in zip(*states, strict=True):
        assert a.sharding == b.sharding
        for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert same_bits(np.asarray(one.data), np.asarray(other.data))
    return {"compared": len(truth), "alone": alone, "together": together, "moments": counted}


def share_proofs() -> dict:
    """What each process raises where a source contradicts itself, and processes share its reads."""
    share.SMALL_BYTES, said = 0, {}
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b"))
    for name in ("sound", "sampled", "unsampled"):
        for verify in ("sample", "full"):
            try:
                ucp.open(f"{directory}/{name}").restore(mesh=mesh, share_reads=True, verify=verify)
                said[f"{name}, {verify}"] = "restored"
            except CorruptData as error:
                said[f"{name}, {verify}"] = str(error)
    return said


def share_faults() -> dict:
    """What each process raises, and after how many seconds, where only one of them cannot read."""
    shardings = {name: NamedSharding(MESH, spec(name, columns=False)) for name in NAMES[:2]}
    target = {}
    for name, sharding in shardings.items():
        target[name] = jax.ShapeDtypeStruct(BIG, np.float32, sharding=sharding)
    replicated = NamedSharding(MESH, P())
    other = target | {"big": jax.ShapeDtypeStruct(BIG, np.float32, sharding=replicated)}
    read_into, said = ZarrStore.read_into, {}

    def attempt(name: str, target: dict = target) -> None:
        there = name if Path(directory, name).is_dir() else "sound"
        checkpoint = ucp.open(f"{directory}/{there}")
        multihost_utils.sync_global_devices(name)
        if name == "missing" and rank == 3:
            sorted(Path(directory, name, "big").glob("c*"))[-1].unlink()
        multihost_utils.sync_global_devices(name)
        begin = time.monotonic()
        try:
            check(checkpoint.restore(target, partial=True, share_reads=True))
            said[name] = ["restored", "", 0]
        except Exception as error:
            said[name] = [type(error).__name__, str(error), time.monotonic() - begin]

    for name in ("shared", "own", "missing"):
        attempt(name)
    ZarrStore.read_into = read_into if rank else lambda *args: 1 / 0
    attempt("no error of ours")
    ZarrStore.read_into = read_into
    attempt("another target", target if rank else other)
    attempt("sound")
    return said


def open_shared() -> dict:
    """What a store is asked by this process to open a checkpoint, alone and shared, and to restore
    what all of them then have.
    """
    with counted() as store:

        def asked(share_reads: bool) -> tuple[ucp.Checkpoint, int]:
            store.asked.clear()
            checkpoint = ucp.open(f"counted://{directory}", share_reads=share_reads)
            return checkpoint, store.asked.total()

        (_, alone), (checkpoint, shared) = asked(False), asked(True)
        store.asked.clear()
        check(checkpoint.restore(mesh=MESH))
        return {"alone": alone, "shared": shared, "restore": store.asked.total()}


def open_shared_faults() -> dict:
    """What each process raises where one of them cannot open a checkpoint, or opens another."""
    said = {}

    def attempt(name: str, path: str = "sound") -> None:
        try:
            ucp.open(f"counted://{directory}/{path}", share_reads=True)
            said[name] = ["opened", ""]
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]

    def fault(*args: object) -> None:
        raise CorruptData("a fault")

    decode = universal_store.decode
    with counted():
        attempt("nowhere", "nowhere")
        for faulty in range(processes):
            universal_store.decode = fault if rank == faulty else decode
            attempt(f"process {faulty} fails")
        universal_store.decode = decode
        attempt("another path", "sound" if rank else "other")
        attempt("sound")
    return said


def tree(names: list[str] = NAMES) -> dict:
    return {name: placed(name, columns=False) for name in names} | {"step": 7, "host": np.arange(3)}


def check(got: dict) -> None:
    """Every part of an array that this process has is what it should be."""
    for name, array in got.items():
        for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
            assert np.array_equal(np.asarray(shard.data), want(name)[shard.index]), name
    assert got.get("step", 7) == 7


print(json.dumps({"rank": rank} | globals()[what]()))
