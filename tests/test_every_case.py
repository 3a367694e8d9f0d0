"""What holds for every checkpoint in tests/data, whatever wrote it: `cases.py` says what a case is.

Laws that take servers or other processes hold for one case of each kind.
"""

import functools
import json
import pickle
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from cases import (
    CORRUPTED,
    DATA,
    OF_TESTS,
    READ,
    RULES,
    Case,
    arrays_of,
    assert_accounted_for,
    assert_same,
    bits_of,
    every,
    facts,
    flat,
)
from helpers import digests, faults_of, in_lanes, mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.protocol import ArraySource, Piece
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import UCPError, UnsupportedPath
from jax_ucp.files.path import file_path
from jax_ucp.files.ranges import EDGE_BYTES
from jax_ucp.formats.dcp.metadata import DcpMetadata, read_metadata
from jax_ucp.formats.dcp.source import DcpSource
from jax_ucp.formats.safetensors.reader import SafetensorsFile
from jax_ucp.layout.box import Box
from jax_ucp.sharding.jax_versions import enable_x64
from remote_files import counted, uploaded
from servers.stores import Store
from servers.web import web
from test_read_once import reads_of

CASES = [case for case in every(READ) if not case.refused]
IN_LANES = in_lanes([(case,) for case in CASES])
# Of each format, and of each way in which one is stored: flat, by ranks, in items, compressed, coded.
# fmt: off
KINDS = [Case(label) for label in (
    "deepspeed/tp2_dp2_z1_bf16_swiglu", "deepspeed/tp2_dp2_z3_bf16",
    "deepspeed_universal/autoep2_dp4_z3_fp32", "deepspeed_writers/nvme_z3_small_dp2",
    "dtensors/tp_2x2_small", "gguf/llama_k", "jax/equinox0138-training",
    "jax/orbax05-manager_items", "jax/orbax05-paxml",
    "jax/orbax05-t5x", "jax/orbax0128-flax_msgpack_file", "jax/orbax06-processes_ocdbt",
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16", "megatron/legacy_ep2_moe_grouped_bf16",
    "megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16", "megatron/old0153_tp2_zarr_fp32",
    "quantized/ct_nvfp4", "torch/dcp_objects", "torch/dcp_zstd", "torch/hf_llama",
    "torch/torchsave/trainer.pt", "trainers/small_llama",
)]
# fmt: on
MESHES = mesh_of(4, 2), mesh_of(3, 2), mesh_of(1)
# What every rank says alike is in the inventory once.
COMPARED = {"buckets_coalesced", "param_groups"}
# Masters that are kept in two halves, of which `where` names one.
HALVED = ("legacy_te_precision_aware_bf16", "pa", "pa_full", "pa_buckets")


def files_of(case: Case) -> list[Path]:
    below = [path for path in sorted(case.path.rglob("*")) if path.is_file()]
    return [path for path in below if path.name not in OF_TESTS] or [case.path]


@functools.cache
def formats_of_kinds() -> set[str]:
    return {case.open().format for case in KINDS}


@pytest.fixture(scope="module", params=IN_LANES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(case: Case) -> ucp.Checkpoint:
    OPENED.clear()
    with watched(case.path):
        return case.open()


@pytest.fixture(scope="module")
def arrays(case: Case, checkpoint: ucp.Checkpoint) -> dict[str, np.ndarray]:
    with watched(case.path):
        return arrays_of(checkpoint)


# Equal to the truth, however it is read.


def test_it_is_the_live_state(case, checkpoint, arrays):
    assert case.unlike(arrays) == []
    assert faults_of(checkpoint) == []
    assert checkpoint.format in formats_of_kinds(), "add a case to KINDS"


def test_notes_and_the_source_say_what_was_said_and_what_is_left(case, checkpoint):
    about, source = case.about, checkpoint.source
    for note, match in zip(checkpoint.notes, about.get("noted", checkpoint.notes), strict=True):
        assert note == match or re.match(match, note), note
    for option in ("model", "optimizer_groups"):
        said = case.options.get(option)
        assert source.get(option) == (tuple(map(tuple, said)) if isinstance(said, list) else said)


def test_on_meshes_it_is_the_live_state(case, checkpoint):
    """On the first, and on the second or the third by turns."""
    for mesh in (MESHES[0], MESHES[1 + CASES.index(case) % 2]):
        with enable_x64(True):
            arrays = flat(restored_on(mesh, checkpoint, RULES))
        assert case.differing(arrays) == [], mesh
        cut = [x for x in arrays if mesh is MESHES[0] and is_cut(x, arrays[x])]
        assert {arrays[label].sharding.spec for label in cut} <= {P("data", "model")}


def is_cut(label: str, array: Any) -> bool:
    """Whether the rules cut a matrix for the first mesh."""
    shape = np.shape(array)
    return label.endswith("weight") and len(shape) == 2 and shape[0] % 4 == shape[1] % 2 == 0


def test_a_conversion_is_the_live_state_and_reads_little_twice(case, tmp_path):
    """The edges of an item are read when it is opened, and small gaps between arrays along with
    them; TensorStore's reads are not seen.
    """
    checkpoint = case.open()
    folder = case.path if case.path.is_dir() else case.path.parent
    with reads_of(folder) as counts:
        converted = checkpoint.save(tmp_path / "out")
    for name, count in counts.items():
        again = np.flatnonzero(np.diff(np.concatenate([[0], (count > 1).astype(np.int8), [0]])))
        runs = [stop - start for start, stop in again.reshape(-1, 2).tolist()]
        assert max(runs, default=0) <= 4 * EDGE_BYTES, name
    assert case.wrong(converted) == []
    with enable_x64(True):
        assert case.differing(flat(restored_on(MESHES[0], converted, RULES))) == []
    assert faults_of(converted) == []
    assert (converted.extras, converted.about) == (checkpoint.extras, checkpoint.about)


def test_sent_to_another_process_it_is_the_same(checkpoint, arrays):
    here = checkpoint._contents
    sent = pickle.loads(pickle.dumps(here))
    for leaf in checkpoint.leaves:
        if leaf.has_array:
            there = sent.arrays.read(leaf.name, Box.whole(leaf.shape))
            assert there.tobytes() == arrays[leaf.label].tobytes(), leaf.label
            assert sent.locate(leaf) == here.locate(leaf)
    labels = [check.label for check in here.checks("full")]
    assert [check.label for check in sent.checks("full")] == labels


def test_any_box_is_that_of_the_whole(checkpoint, arrays):
    random = np.random.default_rng(0)
    for label, whole in arrays.items():
        for _ in range(2):
            edges = [np.sort(random.integers(0, n + 1, 2)).tolist() for n in whole.shape]
            sides = zip(edges, whole.shape, strict=True)
            box = Box.spanning([(a, b) if a < b else (0, n) for (a, b), n in sides])
            assert same_bits(checkpoint.read(label, box), whole[box.index]), (label, box)


def test_weights_alone_are_the_live_weights_and_nothing_of_the_optimizer(case):
    assert_weights_alone(case)


def assert_weights_alone(case: Case) -> None:
    """Trees of JAX have no states: they are what they were."""
    checkpoint, truth = case.open(weights_only=True), case.truth()
    states = {x.partition("/")[0] for x in truth} if case.family == "jax" else {"param", "buffer"}
    arrays = {x: a for x, a in arrays_of(checkpoint).items() if not x.startswith("other/")}
    assert arrays.keys() == {x for x in truth if x.partition("/")[0] in states - {"other"}}
    for label, array in arrays.items():
        assert case.equal(array, truth[label].astype(array.dtype), label), label
    assert faults_of(checkpoint) == []
    assert_accounted_for(checkpoint)


def test_without_the_users_word_states_are_right_or_apart(case):
    """Of a numbered optimizer, unless something stored proves whose they are."""
    options = case.options
    if options.pop("optimizer_groups", None):
        checkpoint, truth = ucp.open(case.path, **options), case.truth()
        found = {x: a for x, a in arrays_of(checkpoint).items() if not x.startswith("other/")}
        assert found.keys() <= truth.keys()
        assert [x for x in found if not case.equal(found[x], truth[x], x)] == []
        told = [note for note in checkpoint.notes if "optimizer_groups" in note]
        assert found.keys() == truth.keys() or told
        assert_accounted_for(checkpoint)


def test_over_a_network_and_by_an_index_it_is_the_same(case, arrays, tmp_path):
    index = tmp_path / "a.ucp-index"
    with counted() as files:
        remote = case.open(f"counted://{case.path}")
        assert_same(arrays_of(remote), arrays)
        assert files.asked["fetch"]
        remote.save_index(index)
        files.asked.clear()
        again = case.open(index)
        assert not files.asked["fetch"]
        assert facts(again) == facts(remote)
        for label in [*arrays][:3]:
            assert again.read(label).tobytes() == arrays[label].tobytes()


# In what files.


def test_everything_stored_is_in_the_inventory(case, checkpoint):
    """Tensors and objects by name, or the file or folder that they are in."""
    assert_accounted_for(checkpoint)
    root, places = root_of(checkpoint), {item.where for item in checkpoint.inventory}
    read = {name for name, *_ in checkpoint._contents.files.identities()}
    for path in files_of(case):
        if not path.is_relative_to(root):
            continue  # of another step of the run
        name = path.relative_to(root).as_posix()
        if places & {name, *(parent.as_posix() for parent in Path(name).parents)}:
            continue
        own = {x.removeprefix(f"{name}:") for x in places if x.startswith(f"{name}:")}
        # objects, and what is at the top
        above = {x.partition(mark)[0] for x in own for mark in ":/"}
        assert own or str(path) in read, name
        if name.removesuffix(".pt") not in own:  # the file is one object
            left = [x for x in named_in(path) if not (own | above) & {x, x.partition("@")[0]}]
            assert left == [], name


def root_of(checkpoint: ucp.Checkpoint) -> Path:
    """What its places are relative to."""
    path = Path(checkpoint.path)
    return path if path.is_dir() else path.parent


def named_in(path: Path) -> list[str]:
    """The tensors in a file, objects, and what is at the top of one of torch.save."""
    if path.suffix == ".distcp":
        spans = [(fqn, span) for fqn, span in dcp(path.parent)[0].spans() if span.file == path.name]
        return [f"{fqn}@{span.offset}" for fqn, span in spans]
    source = tensors_of(path)
    tree = source.tree if isinstance(source, TorchFile) else None
    top = {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
    empty = {k for k, v in top.items() if v is None or (isinstance(v, dict) and not v)}
    return [] if source is None else [*source.arrays(), *(top.keys() - empty - COMPARED)]


@functools.cache
def dcp(folder: Path) -> tuple[DcpMetadata, DcpSource]:
    metadata = read_metadata(file_path(folder))
    return metadata, DcpSource(metadata)


@functools.cache
def tensors_of(path: Path) -> TorchFile | SafetensorsFile | None:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    with suppress(UCPError, FileNotFoundError):  # a file of another kind, or several in one name
        file = TorchFile(path)
        return file if file.tree is not None else None
    return None


def test_where_names_the_stored_elements_that_an_array_is_made_of(case, checkpoint, arrays):
    """Of arrays that are stored as they are: not of codes, halves and numbers of Python."""
    if "dequantize" in case.options or case.name in HALVED:
        return
    for label, whole in arrays.items():
        pieces = checkpoint.where(label)
        stored = [stored_at(root_of(checkpoint), piece) for piece in pieces]
        if label.startswith("step/") or any(data is None for data in stored):
            continue
        seen = np.zeros(whole.shape, bool)
        for piece, data in zip(pieces, stored, strict=True):
            part = (data.ravel() if piece.source.ndim == 1 else data)[piece.source.index]
            assert same_bits(part.reshape(piece.target.shape), whole[piece.target.index]), label
            seen[piece.target.index] = True
        assert seen.all(), label


def stored_at(root: Path, piece: Piece) -> np.ndarray | None:
    return _stored(root / piece.file, piece.item)


@functools.cache
def _stored(path: Path, item: str) -> np.ndarray | None:
    """A stored tensor by the reader of its file alone."""
    if path.suffix == ".distcp":
        metadata, source = dcp(path.parent)
        key, (fqn, _, inside) = f"{path.name}:{item}", item.partition(":")
        if key not in source.arrays():
            return whole_of(source.object(fqn, dict(metadata.objects)[fqn][0]), inside)
        return whole_of(source, key)
    if (path.parent / ".zarray").exists():
        shape = json.loads((path.parent / ".zarray").read_text())["chunks"]
        return np.fromfile(path, np.float32).reshape(shape)
    return whole_of(tensors_of(path), item)


def whole_of(source: ArraySource | None, key: str) -> np.ndarray | None:
    known = {} if source is None else source.arrays()
    return source.read(key, Box.whole(known[key].shape)) if source and key in known else None


@pytest.mark.usefixtures("arrays")
def test_every_file_that_is_read_is_looked_at_again(checkpoint):
    """But those that say which step is meant: once it is open, the run may go on."""
    noted = {name for name, *_ in checkpoint._contents.files.identities()}
    read = {x for x in OPENED if Path(x).is_file() and Path(x).name not in POINTERS}
    assert sorted(read - noted) == []
    assert read


POINTERS = {"latest", "latest_universal", "latest_checkpointed_iteration.txt", *OF_TESTS}
POINTERS |= {"_CHECKPOINT_METADATA", "checkpoint_1", "checkpoint_9"}
OPENED: set[str] = set()  # while `WATCHED` is not empty, below the paths in it
WATCHED: set[str] = set()


@contextmanager
def watched(path: Path) -> Iterator[None]:
    """The files below a path that are opened meanwhile are in `OPENED`."""
    WATCHED.add(str(path))
    try:
        yield
    finally:
        WATCHED.clear()


def hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and str(args[0]).startswith(tuple(WATCHED)):
        OPENED.add(str(args[0]))


sys.addaudithook(hear)


# What is rightly not read.


@pytest.mark.parametrize("case", [case for case in every(READ) if case.refused], ids=str)
def test_what_cannot_be_right_is_refused_with_the_reason(case):
    with pytest.raises(UCPError, match=case.refused) as refused:
        case.open().restore()
    assert str(case.path) in str(refused.value) or case.name == CORRUPTED
    if remedy := case.about.get("remedy"):
        assert f"{case.path}/{remedy}" in str(refused.value)
        assert case.wrong(case.open(case.path / remedy)) == []
    if "weights_only" in case.refused:
        assert_weights_alone(case)


# By others: one case of each kind.


@pytest.fixture(scope="module", params=["threads", "processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    spawned = get_context("spawn")
    threads = request.param == "threads"
    with ThreadPoolExecutor(3) if threads else ProcessPoolExecutor(2, spawned) as pool:
        yield pool


@pytest.mark.parametrize("kind", [x for x in KINDS if not x.is_file], ids=str)
def test_a_link_is_the_live_state(kind, tmp_path):
    link = kind.open().link(tmp_path / "link", checksum=True)
    assert [fault for fault in kind.wrong(link) if "is missing" not in fault] == []
    assert faults_of(link) == []


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_executor_converts_to_the_same_bytes_and_verifies(kind, executor, tmp_path):
    checkpoint = kind.open()
    checkpoint.save(tmp_path / "here")
    checkpoint.save(tmp_path / "there", executor=executor)
    assert digests(tmp_path / "there") == digests(tmp_path / "here") != {}
    assert list(checkpoint.verify(executor=executor)) == list(checkpoint.verify())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_in_a_bucket_it_is_the_same(kind, store):
    assert_same_in(store, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_azure_it_is_the_same(kind, azure):
    if kind.open().format in ("orbax", "t5x", "zarr folders"):  # read by TensorStore
        with pytest.raises(UnsupportedPath, match="TensorStore"):
            kind.open(uploaded(kind.path, f"{azure.url}/run"))
    else:
        assert_same_in(azure, kind)


def assert_same_in(store: Store, case: Case) -> None:
    opened = case.open(uploaded(case.path, f"{store.url}/run"))
    assert opened.path.startswith(store.url)
    assert bits_of(opened) == bits_of(case.open())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_a_web_server_it_is_the_same(kind):
    with web(DATA) as (address, _):
        opened = kind.open(f"{address}/{kind.path.relative_to(DATA)}")
        assert opened.path.startswith(address)
        assert bits_of(opened) == bits_of(kind.open())
