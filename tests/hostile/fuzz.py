"""Hostile checkpoints by the thousand: `python -m hostile.fuzz 100000`, in `tests/`; one again:
`--only 17`.

Every input is read whole or refused with an error of ours, in bounded time and memory, and nothing
in it is called: the process notes every import, execution of code, start of a program, write to a
file that is not the target of a conversion, and call of a trap that the inputs name. Input number i
is made from i alone.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import unicodedata
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import jax
import msgspec
import numpy as np
import tensorstore as ts

import jax_ucp as ucp
from cases import DATA, copied
from commands import every_command, invoke
from hostile import inputs
from hostile.files import write_database
from jax_ucp import formats
from jax_ucp.arrays.checks import checks_of, verdicts
from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.json_values import as_json
from jax_ucp.codecs.tensor_names import NAMES, Storage, StorageClass
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.codecs.zip_members import member_bytes, zip_members
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.listing import Listing
from jax_ucp.files.path import file_path
from jax_ucp.files.ranges import MemoryRange
from jax_ucp.formats import saved_index
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.safetensors.reader import SafetensorsFile
from jax_ucp.layout.box import Box
from jax_ucp.mapping.rules import Mapping, shipped
from jax_ucp.shard_spec.notation import built_in, parse
from jax_ucp.universal import packs
from jax_ucp.universal.ocdbt import MANIFEST_FILE
from spec_writer import to_yaml

MODELS = Path(ucp.__file__).parent / "mapping" / "models"
MEMORY_BYTES = 256 << 20
MAX_TABLE_BYTES = 4 << 20
SECONDS = 20
BOMB_BYTES = 1 << 20
CASES = (
    "deepspeed/z0_bf16_dp1", "deepspeed/z1_bf16_dp2", "deepspeed/z3_fp16_dp2_subgroups",
    "deepspeed/tp2_dp1_z1_fp32_gqa", "deepspeed/autoep2_dp4_z3_fp32", "deepspeed/moe_ep2_dp2_z0_fp32",
    "deepspeed/tp2_pp2_dp1_z1_bf16", "deepspeed_universal/tp2_dp1_z1_fp32_gqa", "torch/hf_llama",
    "megatron/legacy_pp2_dp2_distopt_buckets_fp32", "megatron/legacy_ep2_moe_grouped_bf16",
    "megatron/old0153_tp2_zarr_fp32", "megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16",
    "megatron/legacy_te_muon_bf16", "megatron/fsdp_dtensor_te_moe_ep2_bf16", "torch/dcp_zstd",
    "torch/dcp_hf_sharded", "trainers/small_llama", "trainers/accelerate_two_proof", "dtensors/verl_llama",
    "dtensors/verl_fsdp1_orig_3", "dtensors/accelerate_llama", "deepspeed_writers/muon_z2_odd_dp4",
    "deepspeed_writers/bnb_adamw8bit_z2_dp3", "deepspeed_writers/nvme_z3_small_dp2",
    "deepspeed_writers/mics_shard2_dp4",
)  # fmt: skip
STOCK_CASES = (
    "orbax/ocdbt", "orbax/plain", "orbax/zarr3/state", "jax/orbax05-aggregate", "jax/orbax05-t5x",
    "jax/orbax05-processes_unmerged", "jax/orbax05-paxml", "jax/orbax05-flax_msgpack",
)  # fmt: skip
MSGPACK_FILES = (
    "orbax0128-flax_msgpack_file/ckpt", "orbax05-flax_chunked/ckpt",
    "orbax05-flax_msgpack/ckpt/checkpoint_9",
)  # fmt: skip
STATES = ("param", "exp_avg")
COMMANDS = ("inspect", "plan", "verify", "convert", "diff", "report", "export")
# The files of a stock checkpoint that are JSON, by how their names end.
JSON_FILES = ("_METADATA", "_sharding", "_strings.json", "process_0", ".zarray", "zarr.json")
QUANTIZED_FILES = ("model.safetensors", "config.json")

FORBIDDEN = {
    "import", "exec", "pickle.find_class", "marshal.loads", "code.__new__", "function.__new__",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir", "os.putenv",
    "os.chmod", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree", "subprocess.Popen",
    "socket.__new__", "socket.connect", "ctypes.dlopen",
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Read = Callable[[], object]
ONE = jax.make_mesh((1,), ("data",))
ONE_DEVICE = jax.sharding.NamedSharding(ONE, jax.sharding.PartitionSpec())


def _place(event: str, args: tuple[Any, ...]) -> object:
    """What an event is about; a name in a folder that is open, with that."""
    where = args[0] if args else ""
    if event in ("os.remove", "os.rmdir") and isinstance(args[1], int) and args[1] >= 0:
        return f"{os.readlink(f'/proc/self/fd/{args[1]}')}/{where}"
    return where


class Guard:
    """Notes in `seen` what must not happen while an input is read, and ends what takes too long.

    Only below `target` may anything be written.
    """

    def __init__(self, target: Path) -> None:
        self.seen: list[str] = []
        self.watching = False
        # an export grows beside its target, and is renamed
        self.targets = str(target), str(target.with_name(f".{target.name}.partial"))
        sys.addaudithook(self._hear)
        trap = types.ModuleType("ucp_trap")
        vars(trap)["spring"] = lambda *args, **more: self.seen.append("the trap was called")
        sys.modules["ucp_trap"] = trap
        signal.signal(signal.SIGPROF, self._late)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        where = _place(event, args)
        if isinstance(where, int) or str(where).startswith(self.targets):
            return  # an int is a file that is open already
        mode, flags = args[1:3] if event == "open" else ("", 0)
        writes = set(str(mode or "")) & set("wax+") or int(flags or 0) & WRITING
        if event in FORBIDDEN or writes:
            self.seen.append(f"{event} {args[:2]!r:.200}")

    @staticmethod
    def _late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds of processor time")

    @contextmanager
    def over(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        self.watching = True
        try:
            yield
        finally:
            self.watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)


def storage(persistent_id: Any, nbytes: int = 1 << 20) -> object:
    match persistent_id:
        case ("storage", StorageClass() as kind, str(key), str(), int()):
            return Storage(key, kind, nbytes)
    raise FormatError("no storage")


def read_pickle(data: bytes) -> None:
    """The object of a pickle, walked through and as JSON."""
    tree = safe_pickle.load(data, NAMES, storage)
    for _ in safe_pickle.walk(tree):
        pass
    json.dumps(as_json(tree, "file", lambda key, box: np.zeros(1)))


def read_file(path: Path) -> None:
    """Everything in one file that is a checkpoint by itself."""
    file = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
    for key, info in file.arrays().items():
        np.asarray(file.read(key, Box.whole(info.shape)))
    for _ in verdicts(checks_of(file.claims(), "full")) if isinstance(file, TorchFile) else ():
        pass


def read_folder(path: Path, **options: Any) -> None:
    """Everything in a checkpoint: what a conversion would read."""
    checkpoint = ucp.open(path, **options)
    arrays = [leaf for leaf in checkpoint.leaves if leaf.has_array]
    labels = Counter(leaf.label for leaf in arrays)  # one key `a/b` and two keys are called alike
    for leaf in arrays:
        checkpoint.where(leaf)
        if labels[leaf.label] == 1:
            checkpoint.read(leaf.label)
    for _ in checkpoint.verify():
        pass


def read_merged(base: Path, adapter: Path) -> None:
    """Everything in a checkpoint with an adapter merged."""
    checkpoint = ucp.open(base).merge(adapter)
    for leaf in checkpoint.leaves:
        checkpoint.where(leaf)
        checkpoint.read(leaf.label)


def read_ours(path: Path, target: Path) -> None:
    """All that is done with a checkpoint of a tree: read, plan, restore, export, copy."""
    checkpoint = ucp.open(path)
    read_folder(path)
    checkpoint.plan_save(1 << 16)
    checkpoint.abstract()
    checkpoint.plan(mesh=ONE_DEVICE.mesh)
    checkpoint.restore()
    for format in ("safetensors", "dcp", "deepspeed"):
        with suppress(UCPError):  # which is the answer to most trees
            checkpoint.plan_export(format)
    with suppress(UCPError):
        checkpoint.map(renaming_nothing(checkpoint))
    read_folder(Path(checkpoint.save(target).path))


def renaming_nothing(checkpoint: ucp.Checkpoint) -> Mapping:
    """The mapping in which each parameter is a leaf of its own name."""
    return Mapping.from_dict({"leaves": [{"param": x, "leaf": x} for x in checkpoint.params]})


def run_command(path: Path, target: Path, command: str) -> None:
    """A command ends with a message for a person: no traceback, nothing terminals obey."""
    more = {"inspect": ["--all"], "diff": [str(path)], "report": ["-o", f"{target}.html"]}
    more |= {"convert": [str(target)], "export": [str(target)]}
    result = invoke(command, path, *more.get(command, []))
    if result.exit_code:
        raise FormatError("as the command says")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Targets:
    """What is fuzzed. Each of `SHARES` is a method that makes an input from a generator, writes its
    files in `work`, and gives what reads it; `undo` gives the files back what they had.
    """

    def __init__(self, work: Path):
        self.work, self.target = work, work / "target"
        self.before: dict[Path, bytes] = {}
        saved = sorted(DATA.glob("torch/torchsave*/*.pt"))
        self.trees = [tree for path in saved for tree in _data_pkl(path.read_bytes())]
        self.legacy = [path.read_bytes() for path in saved if "legacy" in path.parent.name]
        self.quantized_cases = sorted(DATA.glob("quantized/*/ckpt"))
        self.adapter_cases = sorted(DATA.glob("adapters/*/adapter/adapter_model.safetensors"))
        self.dcp = work / "dcp"
        self.dcp_items = self._dcp()
        self.folders = [*map(self._copied, CASES), self.dcp]
        self.ours = [self._ours("plain", 1000), self._ours("packed", 2), self._imported()]
        self.ours += [self._model("plain"), self._model("packed"), self._linked()]
        self.stock = list(map(self._copied, STOCK_CASES))
        self.databases = [x for x in self.stock if (x / MANIFEST_FILE).exists()]
        self.indexed = [self._index(folder) for folder in [*self.folders[:3], self.dcp]]
        self.packed = [(DATA / "jax" / name).read_bytes() for name in MSGPACK_FILES]
        self.texts = [(Mapping.parse, (MODELS / f"{x}.yaml").read_text()) for x in shipped()]
        self.texts += [(parse, to_yaml(built_in("megatron")))]
        self.texts += [(parse, "extends: megatron\nsizes: {heads: 4}\n")]

    def put(self, path: str | Path, data: bytes) -> Path:
        """The path of a file in `work`, which now has other bytes."""
        path = self.work / path
        if path.exists():
            self.before.setdefault(path, path.read_bytes())
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    def undo(self) -> None:
        while self.before:
            path, data = self.before.popitem()
            path.write_bytes(data)

    def _copied(self, case: str) -> Path:
        folder = copied(DATA / case, self.work / case)
        return folder / "ckpt" if (folder / "ckpt").is_dir() else folder

    def _dcp(self) -> dict[str, tuple[str, int, int]]:
        """A DCP checkpoint of a tensor in two chunks and an object, and where its items lie."""
        file, items = b"", dict[str, tuple[str, int, int]]()
        stored = {"w0": (inputs.tensor("0", (2, 3)), 24), "w1": (inputs.tensor("0", (3, 3)), 36)}
        for name, (tree, nbytes) in (stored | {"epoch": ({"epoch": 3}, 0)}).items():
            members = [("archive/data.pkl", inputs.pickled(tree))]
            members += [("archive/data/0", bytes(nbytes))] if nbytes else []
            item = inputs.zip_file(Random(0), members, lies=0)
            items[name] = "__0_0.distcp", len(file), len(item)
            file += item
        self.put(self.dcp / "__0_0.distcp", file)
        tables = inputs.dcp_metadata(items, (5, 3), (2, 3))
        self.put(self.dcp / ".metadata", inputs.pickled(tables))
        return items

    def _ours(self, name: str, pack_from: int) -> Path:
        """A universal checkpoint with leaves of every kind; small arrays, if many, in a pack."""
        param = {"w": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.ones(3, np.int8)}
        on_device = jax.device_put(np.arange(4.0, dtype=np.float32), ONE_DEVICE)
        other = [on_device, {"step": 3, "rate": 0.5}, np.float32(1), True, 1j, "text", None, {}, ()]
        other.append(jax.random.key(1))
        moments = {"w": np.zeros((6, 4), np.float32)}
        usual, packs.PACK_FROM = packs.PACK_FROM, pack_from
        tree = {"param": param, "exp_avg": moments, "other": other}
        ucp.CheckpointHandler().save(self.work / name, ucp.args.Save(tree))
        packs.PACK_FROM = usual
        return self.work / name

    def _imported(self) -> Path:
        """A universal checkpoint with extras, groups and a source, and one made by a mapping."""
        checkpoint = ucp.open(DATA / "deepspeed/tp2_dp1_z1_fp32_gqa")
        return Path(checkpoint.map(renaming_nothing(checkpoint)).save(self.work / "imported").path)

    def _linked(self) -> Path:
        """A link to a folder of safetensors, with checksums; some of its leaves are copied."""
        source = DATA / "torch" / "hf_llama" / "ckpt"
        mapped = ucp.open(source).map("hf-llama2-to-maxtext")
        return Path(mapped.link(self.work / "linked", checksum=True).path)

    def _model(self, name: str) -> Path:
        """A universal checkpoint of parameters and moments only, to be mapped and exported."""
        tree, path = ucp.open(self.work / name).restore(), self.work / f"{name}_model"
        ucp.CheckpointHandler().save(path, ucp.args.Save({state: tree[state] for state in STATES}))
        return path

    def _index(self, folder: Path) -> bytes:
        index = self.work / "index.ucp-index"
        ucp.open(folder).save_index(index)
        ucp.open(index)  # which lets msgspec evaluate our own annotations
        return index.read_bytes()

    def _done(self, rng: Random, path: Path, read: Read | None = None, often: float = 0.15) -> Read:
        """A command with a checkpoint, or else all that is done with one that has a tree."""
        shutil.rmtree(self.target, ignore_errors=True)
        if rng.random() < often:
            command = rng.choice(COMMANDS)
            return lambda: run_command(path, self.target, command)
        return read or (lambda: read_ours(path, self.target))

    def universal(self, rng: Random) -> Read:
        """A universal checkpoint of which a file says something else, under the right digest."""
        folder = rng.choice(self.ours)
        path, change = folder / "ucp.json", inputs.spoilt_metadata
        if rng.random() > 0.85:
            path, change = rng.choice(files_of(folder)), inputs.noise
        self.put(path, change(rng, path.read_bytes()))
        return self._done(rng, folder)

    def orbax(self, rng: Random) -> Read:
        """A checkpoint of stock Orbax, of which one file or the database says something else."""
        folder = rng.choice(self.stock)
        if rng.random() < 0.3:
            return self._done(rng, self._database(rng, rng.choice(self.databases)))
        path = rng.choice([path for path in files_of(folder) if path.stat().st_size])
        change = rng.choice([inputs.noise, inputs.spoilt_node])
        if path.name.endswith(JSON_FILES):
            change = inputs.spoilt_json
        elif path.name.startswith("checkpoint"):
            change = inputs.spoilt_msgpack
        self.put(path, change(rng, path.read_bytes()))
        return self._done(rng, folder)

    def _database(self, rng: Random, source: Path) -> Path:
        """A copy of a stock checkpoint with some keys or values of its database changed."""
        folder = self.work / "orbax_db"
        shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("d", "ocdbt.process_*", MANIFEST_FILE)
        shutil.copytree(source, folder, ignore=ignored)
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{source}/"}).result()
        keys = store.list().result()
        values = {key.decode(): bytes(store.read(key).result().value) for key in keys}
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice(sorted(values))
            if key.endswith(JSON_FILES):
                values[key] = inputs.spoilt_json(rng, values[key]) or b" "
            elif rng.random() < 0.7:
                values[key] = inputs.noise(rng, values[key]) or b" "
            else:
                values[f"../{key}"] = values.pop(key)
        file = "data"
        if rng.random() < 0.1:
            file = rng.choice(["../plain/ucp.json", "/etc/passwd", "a/../../x", "x" * 300])
        write_database(folder, values, file)
        return folder

    def msgpack_files(self, rng: Random) -> Read:
        """A file of Flax that says something else."""
        data = inputs.spoilt_msgpack(rng, rng.choice(self.packed))
        return self._done(rng, self.put("x.msgpack", data))

    def equinox_files(self, rng: Random) -> Read:
        """A file of Equinox with some bytes changed."""
        source = rng.choice(sorted(DATA.glob("jax/equinox*/ckpt/model.eqx")))
        return self._done(rng, self.put("x.eqx", inputs.noise(rng, source.read_bytes())))

    def indexes(self, rng: Random) -> Read:
        """A saved index that says something else: in its file, in what the checkpoint's files
        answered, or in their bytes.
        """
        data = rng.choice(self.indexed)
        body = msgspec.msgpack.decode(zlib.decompress(data.removeprefix(saved_index.MAGIC)))
        way = rng.random()
        if way < 0.2:
            data = inputs.noise(rng, data)
        else:
            if way < 0.5:
                body["listing"] = inputs.noise(rng, body["listing"])
            else:
                listing = Listing.decode(body["listing"])
                question = rng.choice(list(listing.ranges))
                whole = listing.ranges[question]
                noisy = inputs.noise(rng, whole)[: len(whole)].ljust(len(whole), b"\0")
                listing.ranges[question] = noisy
                body["listing"] = listing.encode()
            data = saved_index.MAGIC + zlib.compress(msgspec.msgpack.encode(body))
        path = self.put("x.ucp-index", data)
        return lambda: read_folder(path)

    def yaml_texts(self, rng: Random) -> Read:
        read, text = rng.choice(self.texts)
        other = inputs.spoilt_yaml(rng, text)
        return lambda: read(other)

    def pickles(self, rng: Random) -> Read:
        way = rng.random()
        if way < 0.35:
            data = inputs.program(rng)
        elif way < 0.75:
            data = inputs.mutated_pickle(rng, rng.choice(self.trees))
        elif way < 0.85:
            data = inputs.noise(rng, rng.choice(self.trees))
        elif way < 0.998:
            tree = {"w": inputs.tensor("0", (2, 3)), "args": [1, ("a", 2.5), {3: "b"}]}
            data = inputs.pickled(inputs.spoilt(rng, tree))
        else:
            data = inputs.bomb(rng, BOMB_BYTES)
        return lambda: read_pickle(data)

    def torch_files(self, rng: Random) -> Read:
        way = rng.random()
        if way < 0.05:
            data = inputs.noise(rng, rng.choice(self.legacy))
        else:
            other = inputs.tensor("1", (4,), "torch.ByteStorage")
            tree = {"w": inputs.tensor("0", (2, 3)), "b": other}
            data = inputs.pickled(inputs.spoilt(rng, tree) if way < 0.4 else tree)
            data = inputs.bomb(rng, BOMB_BYTES) if way > 0.998 else data
            members = [("archive/data.pkl", data), ("archive/data/0", bytes(range(24)))]
            members += [("archive/data/1", b"abcd"), ("archive/byteorder", b"little")]
            if rng.random() < 0.1:
                more = [("other/data.pkl", data), ("archive/data/\ud800", b"")]
                members += [rng.choice([*members, *more])]
            lies = rng.choice([0, 1, 1, 1, 2, 3]) if way > 0.2 else 0
            data = inputs.zip_file(rng, members, lies)
            data = inputs.noise(rng, data) if rng.random() < 0.1 else data
        path = self.put("x.pt", data)
        return lambda: read_file(path)

    def safetensors(self, rng: Random) -> Read:
        if rng.random() < 0.7:
            path = self.put("x.safetensors", inputs.safetensors_file(rng))
            return lambda: read_file(path)
        self.put("safetensors/model.safetensors", inputs.safetensors_file(rng))
        self.put("safetensors/model.safetensors.index.json", inputs.safetensors_index(rng))
        config = inputs.weights_config(rng) if rng.random() < 0.3 else b"{}"
        folder = self.put("safetensors/config.json", config).parent
        return lambda: read_folder(folder, dequantize=False)

    def quantized(self, rng: Random) -> Read:
        """Weights as libraries of quantisation write them; header, config or bytes lie."""
        case, folder = rng.choice(self.quantized_cases), self.work / "quantized"
        whole = [(case / name).read_bytes() for name in QUANTIZED_FILES]
        for name, data in zip(QUANTIZED_FILES, inputs.quantized_files(rng, *whole), strict=True):
            self.put(folder / name, data)
        dtype = rng.choice(["bfloat16", "float32"])
        return lambda: read_folder(folder, dequantize=dtype)

    def adapters(self, rng: Random) -> Read:
        """Adapters as peft writes them, of which the header, the config or the bytes lie, merged
        into their base or another.
        """
        case = rng.choice(self.adapter_cases)
        base = (case if rng.random() < 0.8 else rng.choice(self.adapter_cases)).parents[1] / "base"
        config = case.with_name("adapter_config.json")
        files = inputs.adapter_files(rng, case.read_bytes(), config.read_bytes())
        for name, data in zip((case.name, config.name), files, strict=True):
            self.put(f"adapter/{name}", data)
        return lambda: read_merged(base, self.work / "adapter")

    def gguf(self, rng: Random) -> Read:
        path = self.put("x.gguf", inputs.gguf_file(rng))
        dtype = rng.choice(["bfloat16", "float32", False])
        return lambda: read_folder(path, dequantize=dtype)

    def dcp_tables(self, rng: Random) -> Read:
        tree: Any = inputs.dcp_metadata(self.dcp_items, (5, 3), (2, 3))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
            other = inputs.spoilt(rng, tree)
            with suppress(MemoryError):  # copies of copies of everything
                tree = other if len(inputs.pickled(other)) < MAX_TABLE_BYTES else tree
        data = inputs.pickled(tree)
        self.put("dcp/.metadata", inputs.mutated_pickle(rng, data) if rng.random() < 0.3 else data)
        if rng.random() < 0.5:
            return lambda: read_folder(self.dcp)
        return lambda: read_metadata(file_path(self.dcp))

    def checkpoints(self, rng: Random) -> Read:
        """Whole checkpoints of the trainers, with one file changed."""
        folder = rng.choice(self.folders)
        path = rng.choice(files_of(folder))
        data = path.read_bytes()
        if path.suffix == ".pt" and rng.random() < 0.6:
            data = _with_another_pickle(rng, data)
        elif path.suffix == ".json" or path.name == ".zarray":
            data = inputs.spoilt_json(rng, data)
        elif rng.random() < 0.95:
            data = inputs.noise(rng, data)
        else:
            data = rng.choice([b"", b"{}", data + data, b"global_step9", b"\xff\xfe"])
        self.put(path, data)
        return self._done(rng, folder, lambda: read_folder(folder), often=0.3)


def _data_pkl(data: bytes) -> list[bytes]:
    members = _members(data) if data[:2] == b"PK" else []
    return [raw for name, raw in members if name.endswith("/data.pkl")]


def _members(data: bytes) -> list[tuple[str, bytes]]:
    places = zip_members(MemoryRange(data)).items()
    return [(name, member_bytes(MemoryRange(data), at)) for name, at in places]


def _with_another_pickle(rng: Random, data: bytes) -> bytes:
    """The zip is right, so that what must refuse it is what reads the tree."""
    members = _members(data)
    (pickle,) = _data_pkl(data)
    other = inputs.mutated_pickle(rng, pickle)
    members = [(name, other if raw == pickle else raw) for name, raw in members]
    return inputs.zip_file(rng, members, lies=0)


# How many of a hundred and more inputs each target gets.
SHARES = {
    "pickles": 24, "torch_files": 14, "safetensors": 10, "dcp_tables": 10, "checkpoints": 10, "universal": 14,
    "orbax": 14, "msgpack_files": 10, "equinox_files": 4, "quantized": 10, "yaml_texts": 6, "adapters": 8, "gguf": 8, "indexes": 8,
}  # fmt: skip


def prepared(work: Path) -> tuple[Targets, Guard]:
    """What is fuzzed and what watches, once all is imported and memory is bounded."""
    targets = Targets(work)
    guard = Guard(targets.target)
    # which Python imports when it first meets a name that is not ASCII
    unicodedata.normalize("NFKC", "")
    for folder in targets.folders:  # what is imported when a format is first used is imported now
        read_folder(folder)
    every_command()
    # readers and decoders are imported when their format is met
    for module in pkgutil.walk_packages(formats.__path__, f"{formats.__name__}."):
        importlib.import_module(module.name)
    for folder in (*targets.ours, *targets.stock):
        shutil.rmtree(targets.target, ignore_errors=True)
        read_ours(folder, targets.target)
        for command in ("inspect", "plan", "verify", "diff", "report"):
            run_command(folder, targets.target, command)
    warnings.simplefilter("error")
    limit_memory(MEMORY_BYTES)
    return targets, guard


def run(targets: Targets, guard: Guard, numbers: range, family: str | None = None) -> int:
    """Fuzz with these inputs, print what happened, and return how many were neither read nor
    refused properly.

    All are of one family, if it is given.
    """
    names = [name for name, share in SHARES.items() for _ in range(share) if family in (None, name)]
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    slowest, faults = (0.0, 0), 0
    for number in numbers:
        rng = Random(number)
        name = rng.choice(names)
        read = getattr(targets, name)(rng)
        begin = time.process_time()
        try:
            with guard.over():
                read()
            outcome = "read"
        except UCPError:
            outcome = "refused"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            outcome, faults = "FAULT", faults + 1
            if faults <= 20:
                shown = "".join(traceback.format_exception(error, limit=-8))
                print(f"input {number} ({name}):\n{shown}")
        slowest = max(slowest, (time.process_time() - begin, number))
        targets.undo()
        outcomes[name][outcome] += 1
        while guard.seen:
            print(f"input {number} ({name}): {guard.seen.pop()}")
            faults += 1
    for name in dict.fromkeys(names):
        count = outcomes[name]
        print(f"{name:12} {count.total():>7} inputs", dict(sorted(count.items())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    worst = f"slowest {slowest[0]:.2f} s of processor time (input {slowest[1]}), peak {peak} MiB"
    print(f"{len(numbers)} inputs, {faults} faults; {worst}")
    return faults


M_ARENA_MAX = -8  # malloc.h


def limit_memory(nbytes: int) -> None:
    """Let the process have `nbytes` of address space more than it has now.

    What is reserved for threads and not used, stacks of 8 MiB and heaps of 64 MiB, would count as
    well.
    """
    threading.stack_size(1 << 20)
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="number of the one input to read")
    parser.add_argument("--family", choices=SHARES, help="make all inputs of this family")
    said = parser.parse_args(arguments)
    start, count = (said.only, 1) if said.only is not None else (said.start, said.count)
    with tempfile.TemporaryDirectory() as work:
        return 1 if run(*prepared(Path(work)), range(start, start + count), said.family) else 0


if __name__ == "__main__":
    sys.exit(main())
