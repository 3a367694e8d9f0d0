"""Metadata of ours and of stock Orbax that no writer writes: an error of ours each."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jax_ucp as ucp
from helpers import changed_json, faults_of
from hostile.files import resealed, stock, stock_entry
from jax_ucp.errors import TreeMismatch, UCPError
from jax_ucp.tree import Key, tree_fault

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::jax_ucp.errors.ShardingWarning"),
]

MESH = {"axis_names": ["x"], "axis_sizes": [2], "spec": ["x"], "device_ids": [0, 1]}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A universal checkpoint with a leaf of every kind."""
    tree = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [1, 0.5, True, 2j, np.float32(3)],
        "c": {"text": "x", "none": None, "empty": {}, "key": jax.random.key(1)},
    }
    ucp.CheckpointHandler().save(tmp_path / "ours", ucp.args.Save(tree))
    return tmp_path / "ours"


def everything(path: Path) -> None:
    checkpoint = ucp.open(path)
    for leaf in checkpoint.leaves:
        checkpoint.where(leaf)
    list(checkpoint.verify())
    checkpoint.abstract()
    checkpoint.restore(mesh=jax.make_mesh((1,), ("x",)))
    checkpoint.restore()


def leaf(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(leaf for leaf in content["leaves"] if leaf["name"] == name)


def at(name: str, **changes: Any) -> Callable[[dict], None]:
    """A change of one leaf."""
    return lambda content: leaf(content, name).update(changes)


def array(name: str, **changes: Any) -> Callable[[dict], None]:
    return lambda content: content["arrays"][name].update(changes)


def top(**changes: Any) -> Callable[[dict], None]:
    return lambda content: content.update(changes)


def mesh(**changes: Any) -> Callable[[dict], None]:
    """A change of what a leaf says of its mesh."""

    def change(content: dict) -> None:
        content["shardings"].append(MESH | changes)
        leaf(content, "a")["sharding"] = 0

    return change


OURS: dict[str, Callable[[dict], Any]] = {
    "a version that is not a number": top(version="1"),
    "a version before the first": top(version=0),
    "another format": top(format="other"),
    "leaves that are none": top(leaves={}),
    "a list for arrays": top(arrays=[]),
    "arrays of numbers": top(arrays={"a": 1}),
    "no array of a leaf": lambda content: content["arrays"].pop("a") and None,
    "an array of no leaf": lambda content: content["arrays"].update(z=content["arrays"]["a"]),
    "a leaf twice": lambda content: content["leaves"].append(content["leaves"][0]),
    "two leaves of one array": lambda content: content["leaves"].append({**content["leaves"][0],
        "path": ["z"]}),
    "a leaf below a leaf": lambda content: content["leaves"].append({"path": ["a", "b"], "name": "x",
        "kind": "none"}),
    "a list without its first item": lambda content: content["leaves"].remove(leaf(content, "b.0")),
    "a list with a name": at("b.1", path=["b", {"kind": "list", "name": "x"}]),
    "a list and a dict": at("b.1", path=["b", "x"]),
    "a list with a negative place": at("b.1", path=["b", {"kind": "list", "name": -1}]),
    "keys that differ in type": lambda content: content["leaves"].extend({"path": [key], "name": f"x{key}",
        "kind": "none"} for key in ("0", {"kind": "dict", "name": 0})),
    "a sharding that is not there": at("a", sharding=3),
    "a sharding before the first": at("a", sharding=-1),
    "a dtype of objects": at("a", dtype="object"),
    "a dtype of records": at("a", dtype="f4,f4"),
    "a dtype of dates": at("a", dtype="datetime64"),
    "a dtype of texts": at("a", dtype="S5"),
    "no dtype": at("a", dtype="nothing"),
    "an empty dtype": at("a", dtype=""),
    "a shape of floats": at("a", shape=[2.0, 3.0]),
    "a shape of booleans": at("a", shape=[True, 3]),
    "a negative shape": at("a", shape=[-2, 3]),
    "a shape that is a text": at("a", shape="23"),
    "a shape of another rank": at("a", shape=[6]),
    "a number with a shape": at("b.0", shape=[1]),
    "an int of floats": at("b.0", dtype="float64"),
    "a key of a kind that is not known": at("c.key", key_impl="nothing"),
    "a key without a kind": at("c.key", key_impl=""),
    "a key of another kind": at("c.key", key_impl="rbg"),
    "a key of floats": at("c.key", dtype="float32"),
    "a text without a text": at("c.text", value=None),
    "a text that is a list": at("c.text", value=[1]),
    "an empty node of no kind": at("c.empty", value="set"),
    "a kind that is not known": at("a", kind="pickle"),
    "a mesh with too few sizes": mesh(axis_sizes=[]),
    "a mesh with no devices": mesh(axis_sizes=[0], device_ids=[]),
    "a mesh that is larger than its devices": mesh(axis_sizes=[4]),
    "too few digests": array("a", digests=[]),
    "too many digests": array("a", digests=["0" * 16] * 2),
    "digests that are numbers": array("a", digests=[1]),
    "too few crcs": array("a", crcs="AAA="),
    "too many crcs": array("a", crcs="AAAAAAAAAAA="),
    "crcs that are not base64": array("a", crcs="!!!!!!"),
    "crcs that are numbers": array("a", crcs=[1]),
    "chunks of another rank": array("a", outer=[2], inner=[2]),
    "chunks of no length": array("a", outer=[0, 3], inner=[0, 3]),
    "inner chunks that do not divide": array("a", outer=[2, 3], inner=[2, 2]),
    "a place of one number": array("a", places=[[0]]),
    "a place before the first": array("a", places=[[0, -1]]),
    "too many places": array("a", places=[[0, 0]] * 2),
    "extras without names": top(extras={"file": [1]}),
    "extras that are a list": top(extras=[]),
    "files that are numbers": top(files={"_METADATA": 1}),
    "groups without settings": top(groups=[{"params": ["a"]}]),
    "groups of numbers": top(groups=[1]),
}  # fmt: skip


@pytest.mark.parametrize("change", OURS.values(), ids=OURS.keys())
def test_ours_is_refused_where_it_says_what_no_writer_says(ours, change):
    everything(ours)
    with pytest.raises(UCPError):
        everything(resealed(ours, change))


@pytest.mark.parametrize("changes", [{"dtype": "int32"}, {"shape": [3, 2]}], ids=str)
def test_ours_is_not_sound_where_it_says_another_dtype_or_shape_of_the_same_bytes(ours, changes):
    """Every checksum of the array is that of its bytes, and right."""
    resealed(ours, at("a", **changes))
    shape = changes.get("shape", [2, 3])
    resealed(ours, array("a", outer=shape, inner=shape))
    faults = faults_of(ucp.open(ours))
    assert ["its zarr.json had another digest" in fault for fault in faults] == [True]


def entry(name: str, **changes: Any) -> Callable[[dict], None]:
    return lambda content: stock_entry(content, name).update(changes)


STOCK: dict[str, tuple[str, Callable[[dict], Any]]] = {
    "no tree": ("_METADATA", lambda content: {"use_ocdbt": False}),
    "a tree of numbers": ("_METADATA", top(tree_metadata={"a": 1})),
    "a tree that is a list": ("_METADATA", top(tree_metadata=[])),
    "a flag that is a text": ("_METADATA", top(use_ocdbt="no")),
    "metadata of users that are a list": ("_METADATA", top(custom_metadata=[1])),
    "nothing but a list": ("_METADATA", lambda content: [content]),
    "a key that is a number": ("_METADATA", entry("rate", key_metadata=[{"key": 1, "key_type": 2}])),
    "a key of no type": ("_METADATA", entry("rate", key_metadata=[{"key": "rate", "key_type": 9}])),
    "a place that is a name": ("_METADATA", entry("rate", key_metadata=[{"key": "x", "key_type": 1}])),
    "a place before the first": ("_METADATA",
        entry("rate", key_metadata=[{"key": "-1", "key_type": 1}])),
    "a place of other digits": ("_METADATA", entry("rate", key_metadata=[{"key": "²", "key_type": 1}])),
    "keys that are a text": ("_METADATA", entry("rate", key_metadata="rate")),
    "a leaf below a leaf": ("_METADATA",
        entry("rate", key_metadata=[{"key": "step", "key_type": 2}, {"key": "x", "key_type": 2}])),
    "a leaf of no type": ("_METADATA", entry("rate", value_metadata={"value_type": "pickle"})),
    "a leaf that is a text and is none": ("_METADATA",
        entry("rate", value_metadata={"value_type": "string"})),
    "a number that is an array": ("_METADATA",
        entry("kernel", value_metadata={"value_type": "scalar"})),
    "a list without its second item": ("_METADATA",
        lambda content: content["tree_metadata"].pop("('opt', '1', 'zeros')") and None),
    "texts that are numbers": ("_strings.json", lambda content: {"note": 1}),
    "texts that are a list": ("_strings.json", lambda content: ["note"]),
    "a name of a sharding that is not base64": ("_sharding", lambda content: {"é": "{}"}),
    "a sharding that is a list": ("_sharding", lambda content: {"cmF0ZQ==": []}),
    "a sharding that is not JSON": ("_sharding", lambda content: {"cmF0ZQ==": "{"}),
    "a sharding without a mesh": ("_sharding",
        lambda content: {"cmF0ZQ==": '{"sharding_type": "NamedSharding"}'}),
    "a mesh of texts": (
        "_sharding",
        lambda content: {
            k: v.replace('{\\"id\\": 0}', '"x"').replace('{"id": 0}', '"x"')
            for k, v in content.items()
        },
    ),
    "a mesh of many devices": (
        "_sharding",
        lambda content: {
            k: v.replace('"shape": [2]', '"shape": [4611686018427387904]')
            for k, v in content.items()
        },
    ),
    "kinds of keys that are numbers": ("array_metadatas/process_0", lambda content: [1]),
    "arrays that are a text": ("array_metadatas/process_0", lambda content: {"array_metadatas": "x"}),
    "an array of a dtype of objects": ("rate/.zarray", top(dtype="|O")),
    "an array of another rank": ("rate/.zarray", top(shape=[3], chunks=[3, 3])),
    "an array that is negative": ("rate/.zarray", top(shape=[-3], chunks=[3])),
    "an array of another version": ("rate/.zarray", top(zarr_format=9)),
}  # fmt: skip


@pytest.mark.parametrize(("file", "change"), STOCK.values(), ids=STOCK.keys())
def test_stock_s_is_refused_where_it_says_what_no_writer_says(tmp_path, file, change):
    path = stock(tmp_path / "c")
    everything(path)
    before = (path / file).read_bytes()
    changed_json(path / file, change)
    assert json.loads(before) != json.loads((path / file).read_bytes())
    with pytest.raises(UCPError):
        everything(path)


@pytest.mark.parametrize("name", ["ocdbt", "plain", "zarr3/state"])
def test_what_stock_wrote_is_read(tmp_path, name):
    tree = ucp.open(stock(tmp_path / "c", name)).restore()
    want = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.testing.assert_array_equal(tree["params"]["kernel"], want)
    np.testing.assert_array_equal(tree["opt"][0], np.arange(3, dtype=np.int8))
    assert (tree["opt"][2], tree["opt"][3], tree["note"]) == (None, {}, "a text")
    want = jax.random.key_data(jax.random.key(3)).tolist()
    assert jax.random.key_data(tree["rng"]).tolist() == want


def test_paths_of_one_tree_have_no_fault():
    a, b = Key("dict", "a"), Key("dict", "b")
    items = [(a, Key("list", i)) for i in range(3)]
    assert tree_fault([*items, (b,)]) is None
    assert tree_fault([()]) is None
    assert tree_fault([]) is None
    alike = [(Key("dict", 0),), (Key("dict", "0"),)]
    for broken in ([*items[1:]], [*items, (a,)], [(), (a,)], [*items, items[0]], alike):
        assert tree_fault(broken) is not None


def test_a_target_says_which_key_a_leaf_is_not(ours):
    content = copy.deepcopy(ucp.open(ours).abstract())
    content["c"]["key"] = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    with pytest.raises(TreeMismatch, match="PRNG key"):
        ucp.open(ours).plan(content)


@pytest.mark.parametrize("value", [
    {"!array": "A", "dtype": "float32", "shape": [1]},
    {"!array": "AAAA", "dtype": "O", "shape": [1]},
])  # fmt: skip
def test_an_extra_that_is_no_value_is_left_out_of_an_export_with_its_reason(tmp_path, value):
    path = ucp.Checkpoint.of({"param": {"w": np.ones(2, np.float32)}}).save(tmp_path / "c").path
    resealed(Path(path), top(extras={"mp_rank_00_model_states.pt": {"x": value}}))
    notes = ucp.open(path).plan_export("deepspeed").notes
    assert any("x of mp_rank_00_model_states.pt is left out" in note for note in notes)


SUB = {"patterns": ["w"], "shape": [1], "partition_dim": 0}
INFOS = {
    "an axis that is not there": {"parameter_with_sub_params": [{**SUB, "partition_dim": 9}]},
    "an axis without end": {"parameter_with_sub_params": [{**SUB, "partition_dim": 1 << 62}]},
    "parts without end": {"parameter_with_sub_params": [{**SUB, "shape": [1 << 60]}]},
    "parts without patterns": {"parameter_with_sub_params": [{"shape": [1]}]},
    "patterns that are a number": {"vocabulary_parameter_patterns": 7},
    "a list": [1],
}


@pytest.mark.parametrize("info", INFOS.values(), ids=INFOS.keys())
def test_extras_that_no_trainer_writes_are_refused_in_an_export(tmp_path, info):
    path = ucp.Checkpoint.of({"param": {"w": np.ones(2, np.float32)}}).save(tmp_path / "c").path
    file = {"mp_rank_00_model_states.pt": {"universal_checkpoint_info": info}}
    resealed(Path(path), top(extras=file))
    with pytest.raises(UCPError):
        ucp.open(path).plan_export("deepspeed")
