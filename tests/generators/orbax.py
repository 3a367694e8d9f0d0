"""Checkpoints that Orbax and Flax write, with the state of the process that wrote them.

`python tests/generators/orbax.py OUT [--only PART ...] [--seed N]`, by a Python that has orbax-checkpoint, flax and optax:
any versions from orbax 0.5 and flax 0.8. Each case is `OUT/<case>/ckpt`, `truth.npz` (arrays by label) and `case.json`.
What the installed versions do not have is left out, and said.

Run with 0.5.20 (jax 0.4.26, flax 0.8.4), 0.6.4 (0.4.31, 0.9.0), 0.11.10 (0.5.3, 0.10.5), 0.11.25 (0.7.0, 0.11.2),
0.11.29 (0.8.0, 0.12.1) and 0.12.8 (0.10.2, 0.12.8).

T5X and Paxml do not install any more. `t5x` and `paxml` write the same calls of flax and TensorStore that their sources
make: `_get_spec` and `Checkpointer.save` of `t5x/checkpoints.py` (google-research/t5x cc342d4), and
`PaxCheckpointHandler` and `_extract_nested_prefix_names` of `paxml/checkpoints.py` (google/paxml, main).
"""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import writing

sys.path.pop(0)  # this folder, in which `orbax` is this file
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if len(sys.argv) > 1 and sys.argv[1] == "--process":
    # collectives of several devices of a process meet one another in jax before 0.4.34
    old_jax = tuple(map(int, importlib.metadata.version("jax").split(".")[:3])) < (0, 4, 34)
    os.environ.update(
        XLA_FLAGS=f"--xla_force_host_platform_device_count={1 if old_jax else 2}",
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        JAX_CPU_ENABLE_GLOO_COLLECTIVES="1",
    )

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import checkpoints as flax_checkpoints
from jax.sharding import NamedSharding, PartitionSpec

PACKAGES = ("orbax-checkpoint", "flax", "jax", "tensorstore", "optax")
VERSION = tuple(map(int, importlib.metadata.version("orbax-checkpoint").split(".")[:3]))


@flax.struct.dataclass
class TrainState:
    step: int
    params: dict
    opt_state: tuple
    batch_stats: dict
    rng: jax.Array


def trained(seed: int, devices=None, steps: int = 3, dtype=jnp.float32) -> TrainState:
    """A small model after some steps of AdamW with a schedule, its parameters on a mesh of (2, n)."""
    devices = np.array(jax.devices() if devices is None else devices)
    mesh = jax.sharding.Mesh(devices.reshape(min(2, len(devices)), -1), ("data", "model"))
    draw = np.random.default_rng(seed)
    wide = 4 * int(draw.integers(1, 4))

    def made(*shape):
        return draw.normal(size=shape).astype(np.float32)

    host = {
        "embed": {"embedding": made(11, wide)},
        "layers_0": {"kernel": made(wide, 8), "bias": made(8)},
        "layers_1": {"kernel": made(8, 12), "bias": made(12)},
        "scale": made(),
    }

    def placed(x):
        sharding = NamedSharding(mesh, spec_of(x.shape))
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i].astype(dtype))

    params = jax.tree_util.tree_map(placed, host)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 100), mu_dtype=dtype),
    )
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, opt_state, x):
        def loss(p):
            layer = p["layers_0"]
            h = jnp.tanh(p["embed"]["embedding"][x] @ layer["kernel"] + layer["bias"])
            y = h @ p["layers_1"]["kernel"] + p["layers_1"]["bias"]
            return jnp.sum((y * p["scale"]) ** 2)

        grads = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(steps):
        params, opt_state = step(params, opt_state, draw.integers(0, 11, 5))
    stats = {"mean": placed(made(8)), "count": placed(np.asarray(float(steps), np.float32))}
    key = placed_key(seed, mesh)
    return TrainState(steps, params, opt_state, stats, key)


def spec_of(shape) -> PartitionSpec:
    specs = {8: ("data", "model"), 12: (None, "model")} if len(shape) == 2 else {8: ("model",)}
    if not shape or shape[0] % 4:
        return PartitionSpec()
    return PartitionSpec(*specs.get(shape[-1], ()))


def placed_key(seed, mesh):
    data = np.asarray([7, seed], np.uint32)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((2,), everywhere, lambda i: data[i])


def values(seed: int) -> dict:
    """Every kind of value that these versions write: scalars, texts, nothing, empty nodes, dtypes."""
    draw = np.random.default_rng(seed)
    numbers = draw.integers(0, 100, (3, 5))
    named = (
        "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "bool", "int4",
    )  # fmt: skip
    types = {name: getattr(ml_dtypes, name, name) for name in named}
    dtypes = {name: jnp.asarray(numbers % 7).astype(dtype) for name, dtype in types.items()}
    return {
        "ints": {"step": 12345, "negative": -3},
        "float": 0.1,
        "flag": True,
        "text": "a text: \u00e4",
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "optax": optax.EmptyState(),
        "numpy": {
            "f64": draw.normal(size=(2, 3)),
            "i64": numbers,
            "0d": np.asarray(2.5, np.float32),
            "scalar": np.float32(1.5),
            "zeros": np.zeros((4, 4), np.float32),
        },
        "jax": dtypes,
        "list": [jnp.arange(3), {"x": jnp.ones(2)}],
        "tuple": (jnp.zeros(3), 4),
        "mlp/~/linear_0": {"w": jnp.asarray(draw.normal(size=(3, 2)), jnp.float32)},
    }


# Truth


def leaves_of(tree, path=()):
    """Labels and leaves as a checkpoint has them: nodes with fields are dicts, sequences by place."""
    fields = getattr(tree, "_fields", None)
    if fields is None and hasattr(tree, "__dataclass_fields__"):
        fields = list(tree.__dataclass_fields__)
    if fields:
        tree = {name: getattr(tree, name) for name in fields}
    elif isinstance(tree, (list, tuple)):
        tree = {str(i): item for i, item in enumerate(tree)}
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from leaves_of(item, (*path, str(key)))
    else:
        yield "/".join(path), tree


def record(case: Path, tree, options: dict, more: dict) -> None:
    arrays, dtypes, others, shardings = {}, {}, {}, {}
    for label, leaf in leaves_of(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, (str, type(None), dict)):
            others[label] = leaf or (None if leaf is None else "empty")
            continue
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            shardings[label] = [list(mesh.axis_names), list(mesh.devices.shape)]
        arrays[label] = np.asarray(leaf)
        dtypes[label] = arrays[label].dtype.name
    writer = {package: importlib.metadata.version(package) for package in PACKAGES}
    writer["orbax-checkpoint"] = getattr(ocp, "__version__", writer["orbax-checkpoint"])
    named = ", ".join(f"{package} {writer[package]}" for package in PACKAGES[:2])
    about = {"about": f"{case.name.replace('_', ' ')} of {named}", "writer": writer}
    about |= {"options": options, "dtypes": dtypes, "others": others, "shardings": shardings}
    writing.write_case(case, arrays, about | more)


# Cases: each writes OUT/<case>/ckpt and returns the tree, options to open it with, and further facts

CASES = {}


def case(name, since=(0, 0, 0), before=(9, 0, 0)):
    def register(function):
        if since <= VERSION < before:
            CASES[name] = function
        return function

    return register


def handler(**options):
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))


for ocdbt in (False, True):
    for zarr3 in (False, True):
        for kind in ("train", "values"):

            @case(f"pytree_{kind}_{'ocdbt' if ocdbt else 'folders'}_zarr{3 if zarr3 else 2}")
            def _(path, seed, ocdbt=ocdbt, zarr3=zarr3, kind=kind):
                tree = trained(seed) if kind == "train" else values(seed)
                if not ocdbt and VERSION < (0, 6):
                    tree.pop("mlp/~/linear_0", None) if kind == "values" else None
                handler(use_ocdbt=ocdbt, use_zarr3=zarr3).save(path, args=ocp.args.PyTreeSave(tree))
                return tree, {}, {}


@case("pytree_checkpointer")
def _(path, seed):
    tree = trained(seed, dtype=jnp.bfloat16)
    ocp.PyTreeCheckpointer().save(path, tree)
    return tree, {}, {}


@case("standard_checkpointer")
def _(path, seed):
    tree = trained(seed)
    writer = ocp.StandardCheckpointer()
    writer.save(path, tree)
    if hasattr(writer, "wait_until_finished"):
        writer.wait_until_finished()
    return tree, {}, {}


@case("async_chunked")
def _(path, seed):
    tree = {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(64, 48)), jnp.float32)}
    args = {"w": ocp.SaveArgs(chunk_byte_size=1024) if VERSION >= (0, 6) else ocp.SaveArgs()}
    writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    writer.save(path, args=ocp.args.PyTreeSave(tree, save_args=args))
    writer.wait_until_finished()
    return tree, {}, {}


def managed(path, steps, how=ocp.args.StandardSave, metrics=None, **options):
    """A manager's steps, each of which has the trees, or items by name, that it is given."""
    with ocp.CheckpointManager(path, **options) as manager:
        for step, tree in steps.items():
            args = ocp.args.Composite(**tree) if how is None else how(tree)
            manager.save(step, args=args, metrics=metrics)
        manager.wait_until_finished()


@case("manager")
def _(path, seed):
    steps = {step: trained(seed + step) for step in (1, 10, 11)}
    managed(path, steps)
    return steps[11], {}, {}


@case("manager_step")
def _(path, seed):
    options = ocp.CheckpointManagerOptions(step_prefix="run", step_format_fixed_length=6)
    steps = {step: trained(seed + step) for step in (5, 300)}
    managed(path, steps, ocp.args.PyTreeSave, {"loss": 1.5}, options=options)
    return steps[5], {"step": 5}, {}


@case("manager_legacy")
def _(path, seed):
    manager = ocp.CheckpointManager(path, ocp.PyTreeCheckpointer())
    for step in (2, 7):
        tree = trained(seed + step)
        manager.save(step, tree)
    return tree, {}, {}


@case("manager_items")
def _(path, seed):
    tree, config = trained(seed), {"layers": 2, "name": "tiny"}
    items = {"state": ocp.args.StandardSave(tree), "config": ocp.args.JsonSave(config)}
    managed(path, {3: items}, how=None, item_names=tuple(items))
    return tree, {}, {"extras": {"config": config}}


@case("manager_two_trees")
def _(path, seed):
    tree = trained(seed)
    items = {"params": tree.params, "opt": tree.opt_state}
    items = {name: ocp.args.PyTreeSave(item) for name, item in items.items()}
    managed(path, {3: items}, how=None, item_names=tuple(items))
    return tree.params, {"model": "params"}, {}


@case("manager_key_and_array")
def _(path, seed):
    tree = trained(seed)
    key = jax.random.key(seed) if hasattr(jax.random, "key") else jax.random.PRNGKey(seed)
    items = {"state": ocp.args.PyTreeSave(tree), "rng": ocp.args.JaxRandomKeySave(key)}
    items["count"] = ocp.args.ArraySave(jnp.arange(5))
    managed(path, {3: items}, how=None, item_names=tuple(items))
    return tree, {}, {}


@case("aggregate", before=(0, 6, 0))
def _(path, seed):
    """Small values in the msgpack file `checkpoint`, others in folders, with `_METADATA`."""
    tree = {**values(seed), "state": trained(seed).params}
    tree["complex"] = np.asarray([1 + 2j], np.complex64)
    small = jax.tree_util.tree_map(
        lambda x: ocp.SaveArgs(
            aggregate=np.size(x) < 16 and getattr(x, "is_fully_replicated", True)
        ),
        tree,
    )
    handler(use_ocdbt=seed % 2 == 0).save(path, args=ocp.args.PyTreeSave(tree, save_args=small))
    return tree, {}, {}


@case("aggregate_all", before=(0, 6, 0))
def _(path, seed):
    tree = {"state": jax.device_get(trained(seed).params), "n": 3, "text": "t"}
    small = jax.tree_util.tree_map(lambda x: ocp.SaveArgs(aggregate=True), tree)
    handler(use_ocdbt=False).save(path, args=ocp.args.PyTreeSave(tree, save_args=small))
    return tree, {}, {}


@case("aggregate_without_metadata", before=(0, 6, 0))
def _(path, seed):
    """As Orbax up to 0.2 left it: `checkpoint` alone says the tree."""
    tree = trained(seed)
    handler(use_ocdbt=seed % 2 == 0).save(path, args=ocp.args.PyTreeSave(tree))
    (path / "_METADATA").unlink()
    return tree, {}, {"from_source": True}


@case("keys", since=(0, 11, 0))
def _(path, seed):
    tree = {
        "rng": jax.random.key(seed),
        "many": jax.random.split(jax.random.key(seed), 3),
        "x": jnp.ones(2),
    }
    handler(use_ocdbt=seed % 2 == 0).save(path, args=ocp.args.PyTreeSave(tree))
    return tree, {}, {}


@case("rich_types", since=(0, 11, 0))
def _(path, seed):
    from orbax.checkpoint._src.metadata import pytree_metadata_options as options

    tree = trained(seed)
    rich = options.PyTreeMetadataOptions(support_rich_types=True)
    handler(pytree_metadata_options=rich).save(path, args=ocp.args.PyTreeSave(tree))
    return tree, {}, {}


def v1():
    from orbax.checkpoint import v1 as module

    return module


def saves(by):
    """The function of v1, or the method of its checkpointer, that saves a tree."""
    return getattr(by, "save", None) or by.save_pytree


@case("v1_pytree", since=(0, 11, 15))
def _(path, seed):
    tree = trained(seed)
    saves(v1())(path, tree)
    return tree, {}, {}


@case("v1_values", since=(0, 11, 15))
def _(path, seed):
    tree = values(seed)
    for name in ("optax", "empty", "nothing"):
        tree.pop(name)
    tree["numpy"].pop("scalar")
    saves(v1())(path, tree)
    return tree, {}, {}


@case("v1_training", since=(0, 11, 15))
def _(path, seed):
    with v1().training.Checkpointer(path) as checkpointer:
        for step in (1, 2, 10):
            tree = trained(seed + step)
            saves(checkpointer)(step, tree, metrics={"loss": 0.5})
    return tree, {}, {}


@case("v1_checkpointables", since=(0, 11, 15))
def _(path, seed):
    tree = trained(seed)
    v1().save_checkpointables(path, {"state": tree, "extra": {"a": jnp.ones(3)}})
    return tree, {"model": "state"}, {}


@case("v1_replica_folders", since=(0, 12, 5))
def _(path, seed):
    """What all devices have alike, in a database of its own, `ocdbt.process_replica_0`."""
    saving = v1().options.ArrayOptions.Saving(
        use_replica_parallel=True,
        min_slice_bytes_for_replica_parallel=1,
        enable_replica_parallel_separate_folder=True,
    )
    tree = trained(seed)
    with v1().Context(array_options=v1().options.ArrayOptions(saving=saving)):
        v1().save(path, tree)
    return tree, {}, {}


@case("v1_split_metadata", since=(0, 12, 5))
def _(path, seed):
    """Nodes and values of databases in `ocdbt_meta` and `ocdbt_data`, which no option sets."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    options = tensorstore_utils.OcdbtKvStoreWriteOptions
    split = {"store_ocdbt_metadata_and_values_separately": True}
    tensorstore_utils.OcdbtKvStoreWriteOptions = lambda **said: options(**{**said, **split})
    try:
        tree = trained(seed)
        v1().save(path, tree)
    finally:
        tensorstore_utils.OcdbtKvStoreWriteOptions = options
    return tree, {}, {}


@case("v1_partial", since=(0, 12, 5))
def _(path, seed):
    """A tree that was saved in parts, and finalized; a step that was not lies beside."""
    tree = dict(vars(trained(seed)))
    for name, value in tree.items():
        v1().partial.save(path / "1", {name: value})
    v1().partial.finalize(path / "1")
    v1().partial.save(path / "2", {"params": tree["params"]})
    return tree, {}, {}


@case("manager_unfinished")
def _(path, seed):
    """Two finished steps, and what a killed save leaves: a folder with a suffix."""
    steps = {step: trained(seed + step) for step in (1, 2)}
    managed(path, steps)
    shutil.copytree(path / "2", path / "3.orbax-checkpoint-tmp-17")
    (path / "4.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    return steps[2], {}, {}


# Several processes


def processes(path, seed, n, how):
    """The tree of `n` processes with two devices each; every process saves it by `how`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = [sys.executable, __file__, "--process", str(path), str(seed), how, str(n), str(port)]
    workers = [subprocess.Popen([*args, str(rank)]) for rank in range(n)]
    if any([worker.wait(timeout=300) for worker in workers]):
        raise RuntimeError("a process failed")


def process(path, seed, how, n, port, rank):
    """Each process trains the same, on its own devices, and has its part of what they save."""
    path, seed = Path(path), int(seed)
    if old_jax:
        jax.config.update("jax_cpu_enable_gloo_collectives", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(n), int(rank))
    assert jax.process_count() == int(n), jax.process_count()
    mine = trained(seed, jax.local_devices())
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))

    def everywhere(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        whole = np.asarray(leaf)
        spec = PartitionSpec() if whole.shape == (2,) else spec_of(whole.shape)
        place = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

    tree = jax.tree_util.tree_map(everywhere, mine)
    if how == "manager":
        managed(path, {4: tree})
    else:
        merged = ocp.PyTreeCheckpointHandler(use_ocdbt=how != "folders")
        if how == "unmerged":
            merged.finalize = lambda *a, **k: None
        ocp.Checkpointer(merged).save(path, args=ocp.args.PyTreeSave(tree))
    if int(rank) == 0:
        record(path.parent, mine, {}, {"shardings": {}})


for how in ("ocdbt", "folders", "manager", "unmerged"):

    @case(f"processes_{how}")
    def _(path, seed, how=how):
        processes(path, seed, 2, how)
        return None, {}, {}


# Flax


def by_flax(path, seed, with_orbax):
    """The trees of the steps of a run that Flax keeps."""
    flax.config.update("flax_use_orbax_checkpointing", with_orbax)
    trees = {step: trained(seed + step) for step in (1, 9, 10)}
    for step, tree in trees.items():
        flax_checkpoints.save_checkpoint(path, tree, step, keep=5)
    return trees


for ends, step, said in (("", 10, {}), ("_step", 9, {"step": 9})):

    @case(f"flax_msgpack{ends}")
    def _(path, seed, step=step, said=said):
        tree = by_flax(path, seed, with_orbax=False)[step]
        return flax.serialization.to_state_dict(tree), said, {}


@case("flax_msgpack_file")
def _(path, seed):
    tree = {
        **values(seed),
        "complex": 1 + 2j,
        "big": 1 << 63,
        "c64": np.asarray([2j], np.complex64),
    }
    tree["jax"].pop("int4")
    tree = flax.serialization.to_state_dict(tree)
    path.write_bytes(flax.serialization.to_bytes(tree))
    return tree, {}, {}


@case("flax_chunked")
def _(path, seed):
    tree = {"params": trained(seed).params, "n": 4}
    before = flax.serialization.MAX_CHUNK_SIZE
    flax.serialization.MAX_CHUNK_SIZE = 100 + seed
    path.write_bytes(flax.serialization.to_bytes(tree))
    flax.serialization.MAX_CHUNK_SIZE = before
    return tree, {}, {}


@case("flax_orbax")
def _(path, seed):
    return by_flax(path, seed, with_orbax=True)[10], {}, {}


# T5X and Paxml, from their sources


def zarr_spec(path, leaf):
    about = {"compressor": {"id": "gzip"}, "shape": leaf.shape, "chunks": np.array(leaf.shape)}
    place = {"driver": "file", "path": path}
    return {"driver": "zarr", "dtype": leaf.dtype.name, "kvstore": place, "metadata": about}


def by_zarr(path, leaf):
    import tensorstore as ts

    opened = ts.open(zarr_spec(path, leaf), create=True, open=True).result()
    opened.write(np.asarray(leaf)).result()


@case("t5x")
def _(path, seed):
    import tensorstore as ts

    params = trained(seed).params
    folder = path / "checkpoint_1000"
    state = {"step": np.int32(1000), "param_states": {}}
    tree = {"target": params, "state": state}
    tree["state"]["param_states"] = jax.tree_util.tree_map(
        lambda p: {"v": p * 2, "v_row": jnp.zeros(1), "m": jnp.zeros(1, jnp.bfloat16)}, params
    )
    folder.mkdir(parents=True)

    def write(keys, leaf):
        name = "/".join(str(k.key) for k in keys)
        if np.size(leaf) < 2 or name.endswith("v_row"):
            return np.asarray(leaf) if name != "state/step" else leaf
        at = name.replace("/", ".")
        by_zarr(f"{folder}/{at}", leaf)
        return ts.Spec(zarr_spec(at, leaf))

    as_json = {
        "ty_to_state_dict": lambda spec: spec.to_json(),
        "ty_from_state_dict": lambda *_: None,
    }
    flax.serialization.register_serialization_state(ts.Spec, **as_json, override=True)
    written = jax.tree_util.tree_map_with_path(write, tree)
    content = {"version": 3, "optimizer": written}
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(content))
    (folder / "train_ds-000-of-001").write_bytes(b"a dataset iterator")
    (path / "checkpoint_2000.tmp-1700000000").mkdir()
    return tree, {}, {"from_source": True, "extras": {"checkpoint": {"version": 3}}}


@case("paxml")
def _(path, seed):
    state = trained(seed)
    tree = {"step": np.asarray(3, np.uint32)}
    tree |= {f"mdl_vars.params.lm.{k}.w": v for k, v in state.params["layers_0"].items()}
    adam = state.opt_state[1][0]
    for name in ("mu", "nu"):
        for key, leaf in getattr(adam, name)["layers_0"].items():
            tree[f"opt_states_0.no_prefix_1.{name[0]}.params.lm.{key}.w"] = leaf
    tree["opt_states_0.no_prefix_1.count"] = adam.count
    folder = path / "checkpoint_00000003"
    for name, leaf in tree.items():
        by_zarr(f"{folder}/state/{name}", leaf)
    about = {"version": 1.1, "train_state_metadata": {"step": {"_array_metadata_tag": True}}}
    (folder / "metadata").mkdir()
    (folder / "metadata" / "metadata").write_text(json.dumps(about))
    truth = {name.replace(".", "/"): leaf for name, leaf in tree.items()}
    return truth, {}, {"from_source": True, "extras": {"metadata": about}}


@case("paxml_flax")
def _(path, seed):
    state = trained(seed)
    leaves, treedef = jax.tree_util.tree_flatten(jax.device_get(state))
    tree = {"flattened_state": leaves, "str_pytree_state": str(treedef)}
    (path / "checkpoint_5" / "state").mkdir(parents=True)
    data = flax.serialization.msgpack_serialize(tree)
    (path / "checkpoint_5" / "state" / "checkpoint").write_bytes(data)
    return tree, {}, {"from_source": True}


def main() -> None:
    parser = writing.arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")

    def write(name: str, folder: Path) -> None:
        tree, options, more = CASES[name](folder / "ckpt", given.seed)
        if tree is not None:  # else a process of several has recorded it
            record(folder, tree, options, more)

    writing.write_each(writing.chosen(CASES, given.only), given.out, write)


if __name__ == "__main__":
    if sys.argv[1] == "--process":
        process(*sys.argv[2:])
    else:
        main()
