"""Real processes, joined by jax.distributed over loopback: what some save others restore, and
how much they read.
"""

import itertools
import json
import math
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import faults_of, flip_bit
from jax_ucp.errors import ShardingWarning
from jax_ucp.layout.blocks import grid_boxes
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.universal.store import ZarrStore, open_store
from joined import said_by
from torch_writer import change
from workers.shared_arrays import KEYS, bits_by_name

DATA = Path(__file__).parent / "data"


def run(processes: int, what: str, directory: Path) -> list[dict]:
    """What the function returns in each process, by rank."""
    return [json.loads(said) for said in said_by(processes, "distributed.py", what, directory)]


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("four")
    run(4, "save", directory)
    return directory


@pytest.fixture(scope="module")
def packed_by_four(tmp_path_factory) -> Path:
    """The same beside so many small arrays that these are packed."""
    directory = tmp_path_factory.mktemp("packed")
    run(4, "save_packed", directory)
    return directory


@pytest.mark.parametrize(("saved", "count"), [("saved_by_four", 0), ("packed_by_four", 4)])
def test_every_chunk_was_written_by_one_process_and_all_by_several(saved, count, request):
    item = request.getfixturevalue(saved) / "0" / "default"
    checkpoint = ucp.open(item)
    assert faults_of(checkpoint) == []
    assert not list(item.glob("ucp-ledger*"))
    assert all(stored.crcs for stored in open_store(item)[0].arrays.values())
    packs = sorted(item.glob("ucp.pack_*"))
    assert len(packs) == count
    files = [*packs, *(file for file in item.rglob("c*") if (file.parent / "zarr.json").is_file())]
    stored = sum(file.stat().st_size for file in files)
    assert checkpoint.nbytes <= stored <= checkpoint.nbytes * 1.02


def test_tensorstore_reads_an_array_whose_chunks_are_in_packs_of_several_processes(packed_by_four):
    item = packed_by_four / "0" / "default"
    checkpoint = ucp.open(item)
    assert len({piece.file for piece in checkpoint.where("small0007")}) == 4
    kvstore = {"driver": "ocdbt", "base": f"file://{item}/", "path": "small0007/"}
    found = ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
    np.testing.assert_array_equal(found, checkpoint.read("small0007"))


@pytest.mark.parametrize(
    ("saved", "processes"), [("packed_by_four", 3), ("saved_by_four", 2), ("packed_by_four", 1)]
)
def test_fewer_processes_restore_what_four_saved(saved, processes, request):
    said = run(processes, "restore", request.getfixturevalue(saved))
    assert [each["rank"] for each in said] == list(range(processes))


def test_a_transposed_restore_in_four_processes_reads_each_byte_once_in_all(saved_by_four):
    said = run(4, "restore", saved_by_four)
    read, needed = sum(each["read"] for each in said), sum(each["needed"] for each in said)
    # `needed` counts each distinct box once for each process that holds it: columns of one array,
    # rows of another, and a replica of a third in each process. Beside the data a read fetches the
    # index of each file it opens.
    assert needed <= read <= needed * 1.02, (read, needed)


def test_of_stacked_arrays_each_process_writes_its_own_files_and_reads_what_it_needs(tmp_path):
    written = [each["written"] for each in run(4, "save_stacked", tmp_path)]
    assert len(set(map(len, written))) == 1  # as many by each
    metadata, store = open_store(tmp_path / "0" / "default")
    assert [len(names) for names in metadata.stacks.values()] == [12]
    files = list(grid_boxes(store.arrays()["ucp.stack_0"].shape, store.chunks["ucp.stack_0"].outer))
    assert sorted(itertools.chain(*written)) == sorted(f"ucp.stack_0{box}" for box in files)
    assert faults_of(ucp.open(tmp_path / "0" / "default")) == []
    for processes in (2, 4):
        for said in run(processes, "restore_stacked", tmp_path):
            assert said["needed"] <= said["read"] <= 1.02 * said["needed"]


@pytest.fixture(scope="module")
def saved_by_two_of_v1(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    run(2, "save_v1", directory)
    return directory


def test_what_two_processes_save_by_v1_at_once_and_in_the_background_is_sound_and_the_same(
    saved_by_two_of_v1,
):
    steps = [ucp.open(saved_by_two_of_v1 / step / "model") for step in ("sync", "async")]
    for step in steps:
        assert faults_of(step) == []
    assert steps[0].leaves == steps[1].leaves


@pytest.mark.parametrize("processes", [1, 4])
def test_one_process_and_four_load_what_two_saved_by_v1(saved_by_two_of_v1, processes):
    run(processes, "restore_v1", saved_by_two_of_v1)


# Each process has two devices, so these are aligned with 2, 4 and 8 of them, and with none.
CUTS = {"rows": {"x": 8}, "columns": {"x": 8}, "rows in three": {"x": 3}}
AXES = {"rows": P("x"), "columns": P(None, "x"), "rows in three": P("x")}
CHECKS = 6000  # bytes of all checksums and indices


@pytest.fixture(scope="module")
def cut_for_meshes(saved_by_four, tmp_path_factory) -> Path:
    """The checkpoint of four processes, cut for each of several meshes."""
    directory = tmp_path_factory.mktemp("cut")
    for name, mesh in CUTS.items():
        hosts = max(1, mesh["x"] // 2)
        with warnings.catch_warnings():  # "odd" is not cut into columns: 330 is no multiple of 8
            warnings.simplefilter("ignore", ShardingWarning)
            how = {"mesh": mesh, "rules": [("", AXES[name])], "hosts": hosts}
            ucp.open(saved_by_four / "0" / "default").save(directory / name, **how)
    return directory


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_what_the_plan_says_and_if_cut_for_them_what_they_need(
    cut_for_meshes, processes
):
    said = run(processes, "count", cut_for_meshes)
    amplified = {}
    for pair in said[0]["read"]:
        cut, onto = pair.split(" onto ")
        checkpoint = ucp.open(cut_for_meshes / cut)
        rules = [("", AXES[onto])]
        plan = checkpoint.plan_reads({"x": 2 * processes}, rules=rules, hosts=processes)
        # Beside chunks there are their checksums and indices: less than any chunk is, so none was
        # read in vain.
        _, store = open_store(cut_for_meshes / cut)
        pairs = zip(said, plan.read.tolist(), strict=True)
        beside = [each["read"][pair] - read for each, read in pairs]
        assert all(0 < more < CHECKS for more in beside), (pair, beside)
        edges = one_chunk_at_each_edge(store, AXES[onto], processes)
        assert (plan.read <= plan.needed + edges).all()
        amplified[pair] = plan.amplification
    assert amplified["rows onto rows"] == amplified["columns onto columns"] == 1.0
    assert max(amplified.values()) == amplified["rows in three onto rows"]
    assert amplified["rows in three onto rows"] > (1.0 if processes > 1 else 0)


def one_chunk_at_each_edge(store: ZarrStore, spec: P, processes: int) -> int:
    """Bytes that a process may read beyond its two boxes of each array, whichever way they lie."""
    total = 0
    for name, info in store.arrays().items():
        fit = ()
        if name.startswith(("big", "odd")):
            fit = fit_spec(spec, info.shape, {"x": 2 * processes}).spec
        axes = range(len(info.shape))
        parts = [2 * processes if axis < len(fit) and fit[axis] else 1 for axis in axes]
        box = [n // p for n, p in zip(info.shape, parts, strict=True)]
        lengths = zip(info.shape, box, info.chunk or info.shape, strict=True)
        most = [min(n, b + 2 * (c - 1)) for n, b, c in lengths]
        total += 2 * (math.prod(most) - math.prod(box)) * info.dtype.itemsize
    return total


def test_processes_without_devices_of_a_mesh_take_part_in_a_restore_and_read_nothing(saved_by_four):
    first, second = run(2, "first", saved_by_four / "0" / "default")
    assert first["read"] > 4 * 1536 * 768
    assert second["read"] < 200  # the values of the host program


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_share_reads_read_a_replicated_array_once_over_all_of_them(
    saved_by_four, processes
):
    said = run(processes, "share_reads", saved_by_four)
    nbytes = 4 * 1536 * 768
    alone, together = (sum(each[way] for each in said) for way in ("alone", "together"))
    assert sum(each["planned"] for each in said) == nbytes
    # Beside the data there are the checksums, the index that each fetches of each file, and small
    # values.
    assert processes * nbytes < alone < processes * (nbytes + CHECKS)
    assert nbytes < together < nbytes + processes * CHECKS
    assert max(each["together"] for each in said) < nbytes / processes + CHECKS


# How many of the arrays several processes hold: of 2 by D devices, two to a process, copies may be
# within one.
SHARED = {2: 4 + 5, 4: 6 + 5}


@pytest.mark.parametrize("processes", [2, 4])
def test_shared_reads_give_every_bit_of_every_dtype_whatever_the_lengths(tmp_path, processes):
    tree = bits_by_name()
    tree[KEYS] = jax.random.wrap_key_data(tree[KEYS])
    tree = {name: jax.numpy.asarray(array) for name, array in tree.items()}
    ucp.Checkpoint.of(tree).save(tmp_path / "saved")
    said = run(processes, "share_bits", tmp_path / "saved")
    assert [each["shared"] for each in said] == [2 * SHARED[processes]] * processes


def test_processes_share_the_reads_of_another_format():
    path = DATA / "deepspeed" / "tp2_dp2_z1_fp32"
    said = run(2, "share_deepspeed", path)
    leaves = ucp.open(path).leaves
    nbytes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves]
    single = sum(n for n, leaf in zip(nbytes, leaves, strict=True) if math.prod(leaf.shape) == 1)
    assert [each["compared"] for each in said] == [len(leaves)] * 2
    assert sum(each["alone"] for each in said) == 2 * sum(nbytes)
    assert sum(each["together"] for each in said) == sum(nbytes) + single
    some = [leaf for leaf in leaves if leaf.path[0].name.startswith("exp_avg")]
    moments = sum(math.prod(leaf.shape) > 1 for leaf in some)
    assert [each["moments"] for each in said] == [[moments]] * 2


def test_processes_that_share_reads_prove_them_too(tmp_path):
    """A sample each for itself, all of it together; and what one finds, all raise."""
    flips = ("sound", []), ("sampled", range(101 * 16)), ("unsampled", range(400, 401))
    for name, elements in flips:
        shutil.copytree(DATA / "deepspeed" / "z1_bf16_dp2", tmp_path / name)

        def other(array: np.ndarray, elements: Iterable[int] = elements) -> None:
            for element in elements:
                array[element] = array[element] * 2 + 1

        (path,) = (tmp_path / name).rglob("mp_rank_00_model_states.pt")
        change(path, {"module/embed.word_embeddings.weight": other})
    said = run(2, "share_proofs", tmp_path)
    for each in said:
        for what in ("sound, sample", "sound, full", "unsampled, sample"):
            assert each[what] == "restored", (what, each[what])
        for what in ("sampled, sample", "sampled, full", "unsampled, full"):
            place = "copy at mp_rank_00_model_states.pt:module/embed.word_embeddings.weight"
            assert place in each[what], what
    compared = ["It says" in each["unsampled, full"] for each in said]
    assert sum(compared) == 1, "one of them compared it"
    assert not any("It says" in each["sampled, sample"] for each in said), "both compared a sample"


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("saved", ["saved_by_four", "packed_by_four"])
def test_one_process_asks_a_store_for_what_all_of_them_open(processes, saved, request):
    path = request.getfixturevalue(saved) / "0" / "default"
    said = run(processes, "open_shared", path)
    first, *others = [each["shared"] for each in said]
    assert 3 < first <= min(each["alone"] for each in said)
    assert others == [0] * (processes - 1)


def test_what_one_process_cannot_open_all_raise_and_none_waits(saved_by_four, tmp_path):
    shutil.copytree(saved_by_four / "0" / "default", tmp_path / "sound")
    shutil.copytree(saved_by_four / "0" / "default", tmp_path / "other")
    said = run(2, "open_shared_faults", tmp_path)
    for rank, each in enumerate(said):
        told = "process {} could not open the checkpoint, and no process has it. It says: {}"
        for case, faulty, raised, words in [
            ("nowhere", 0, "NotACheckpoint", "does not exist"),
            ("process 0 fails", 0, "CorruptData", "a fault"),
            ("process 1 fails", 1, "CorruptData", "a fault"),
        ]:
            kind, text = each[case]
            assert kind == raised, (case, rank, kind)
            assert words in text, (case, rank, text)
            assert text.startswith(told.format(faulty, raised)) == (rank != faulty), text
        assert each["another path"][0] == "TreeMismatch", each
        assert each["sound"] == ["opened", ""]


def test_what_one_process_cannot_read_all_raise_and_none_waits(saved_by_four, tmp_path):
    for copy in ("sound", "shared", "own", "missing"):
        shutil.copytree(saved_by_four / "0" / "default", tmp_path / copy)
    # row 576 of 1536: of the part of process 1
    (file,) = (tmp_path / "shared" / "big_replicated").glob("c*")
    flip_bit(file, 3 * file.stat().st_size // 8)
    last = max((tmp_path / "own" / "big").glob("c*"))  # by rows: of process 3
    last.write_bytes(last.read_bytes()[:-100] + bytes(100))
    said = run(4, "share_faults", tmp_path)
    for case, faulty, raised, words in [
        ("shared", 1, "CorruptData", "big_replicated"), ("own", 3, "CorruptData", last.name),
        ("missing", 3, "CorruptData", "is missing"),
        ("no error of ours", 0, "ZeroDivisionError", "division by zero"),
    ]:  # fmt: skip
        for rank, each in enumerate(said):
            kind, text, seconds = each[case]
            told = f"process {faulty} could not read its part, and nothing is restored. It says: {raised}"
            assert text.startswith(told) == (rank != faulty), (case, rank, text)
            assert words in text, (case, rank, text)
            assert kind == (raised if rank == faulty else "CorruptData"), (case, rank, kind)
            assert seconds < 60, (case, rank)
    for each in said:
        kind, text, _ = each["another target"]
        assert kind == "TreeMismatch", text
        assert "do not read the same" in text
        assert each["sound"][0] == "restored", each["sound"]
