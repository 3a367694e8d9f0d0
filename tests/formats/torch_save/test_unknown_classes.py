"""Objects of classes that nobody here knows: kept closed beside the weights, refused by name where
they decide.

`tests/data/unknown` has real checkpoints with such classes, and with optimizers whose states are
not understood, and what the live processes had.
"""

import builtins
import io
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import jax_ucp as ucp
from cases import Case
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.json_values import as_json
from jax_ucp.codecs.pickle_json import values
from jax_ucp.codecs.pickle_names import NAMES
from jax_ucp.codecs.unpickle import MAX_DEPTH, Opaque, Unknown, walk
from jax_ucp.errors import FormatError, TreeMismatch, UnsafePickle
from jax_ucp.layout.box import Box
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.universal.metadata import MAX_VALUE_DEPTH
from torch_writer import Global, Instance, edit, rewrite, save

CASES = Path(__file__).parents[2] / "data" / "unknown"
MESH = Mesh(np.array(jax.devices()[:2]), ("x",))


SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()


def several(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


VALUES = st.recursive(SCALARS, several)


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def load(data: bytes) -> Any:
    return safe_pickle.load(data, NAMES)


def no_tensor(key: str, box: Box) -> np.ndarray:
    raise AssertionError("there is no tensor")


def test_an_optimizer_that_is_not_known_cannot_be_planned():
    optax = pytest.importorskip("optax")
    checkpoint = ucp.open(CASES / "ds_z2_adafactor" / "ckpt")
    weights = [leaf for leaf in checkpoint.leaves if leaf.label[0] == "p"]
    params = {leaf.path[1].name: np.zeros(leaf.shape, np.float32) for leaf in weights}
    words = r"no exp_avg of a\.bias; it has param, exp_avg_sq, step: .* another optimizer"
    with pytest.raises(TreeMismatch, match=words):
        checkpoint.plan_optimizer(optax.adam(1e-3), params)


def renamed(path: Path, old: str, new: str) -> None:
    """Another name of a class in the pickle of a torch file, or of a table of contents."""
    names = (name.rpartition(".") for name in (old, new))
    lines = [f"c{module}\n{attribute}\n".encode() for module, _, attribute in names]
    if path.suffix != ".pt":
        data = path.read_bytes()
        assert lines[0] in data
        path.write_bytes(data.replace(*lines))
        return
    seen = []

    def change(name: str, data: bytes) -> bytes:
        seen.append(name.endswith("/data.pkl") and lines[0] in data)
        return data.replace(*lines) if seen[-1] else data

    rewrite(path, change)
    assert any(seen)


MOVED = {
    "deepspeed/z1_bf16_dp2": ("global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "deepspeed.utils.tensor_fragment.fragment_address"),
    "deepspeed/z3_fp16_dp2_subgroups": ("global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    "deepspeed/z2_fp32_dp3_roundrobin": ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed.runtime.zero.config.ZeroStageEnum"),
    "megatron/legacy_tp2_dp2_distopt_bf16": ("iter_0000003/mp_rank_01/model_optim_rng.pt",
        "megatron.core.transformer.enums.AttnBackend"),
    "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16": ("iter_0000003/common.pt",
        "megatron.core.transformer.enums.AttnBackend"),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_a_class_that_moved_in_a_newer_library_changes_no_array(case, tmp_path):
    file, name = MOVED[case]
    folder = Case(case).copied(tmp_path / "c")
    before = ucp.open(folder)
    arrays = {leaf.label: before.read(leaf.label).copy() for leaf in before.leaves}
    renamed(folder / file, name, "library.of.next_year.Kind")
    after = ucp.open(folder)
    assert set(after) == arrays.keys()
    assert all(same_bits(after.read(label), array) for label, array in arrays.items())
    assert any("library.of.next_year.Kind" in note for note in after.notes)


# In a trainer's dict.

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
TRAINER = {"epoch": 3, "config": Instance("mylib.config.Config", {"lr": 0.5, "layers": [1, 2]})}


def opened(tree: Any, folder: Path, **options: Any) -> ucp.Checkpoint:
    save(tree, folder / "run.pt")
    return ucp.open(folder / "run.pt", **options)


def test_what_is_beside_the_weights_is_an_extra_that_decides_nothing(tmp_path):
    tree = {"model": WEIGHTS, **TRAINER, "cls": Global("mylib.config", "Config")}
    checkpoint = opened(tree, tmp_path)
    assert set(checkpoint) == {"param/a", "param/b"}
    config = {"!opaque": "mylib.config.Config", "args": [], "state": {"lr": 0.5, "layers": [1, 2]}}
    want = {"run.pt": {"epoch": 3, "config": config, "cls": {"!opaque": "mylib.config.Config"}}}
    assert checkpoint.extras == want
    (note,) = checkpoint.notes
    assert note.startswith("the files name classes that are not known here: mylib.config.Config.")
    assert checkpoint.save(tmp_path / "copy").extras == want
    written, notes = values(checkpoint.extras)
    assert written == {"run.pt": {"epoch": 3}}
    words = "has an object of mylib.config.Config, and torch would run what makes one"
    assert all(words in note for note in notes)


def test_an_object_with_tensors_beside_a_model_that_is_told_is_kept_and_counted(tmp_path):
    ema = Instance("mylib.Ema", {"shadow": WEIGHTS["a"] + 1, "decay": 0.9})
    checkpoint = opened({"state_dict": WEIGHTS, "callbacks": {"ema": ema}}, tmp_path)
    assert set(checkpoint) == {"param/a", "param/b"}
    kept = checkpoint.extras["run.pt"]["callbacks"]["ema"]
    assert kept["state"]["shadow"]["shape"] == [2, 3]
    assert all(item.status in ("mapped", "extra") for item in checkpoint.inventory)


def test_a_tensor_that_cannot_be_read_beside_the_weights_is_left_out_and_noted(tmp_path):
    body = b"ctorch._utils\n_rebuild_sparse_tensor\n)R"
    path = tmp_path / "run.pt"
    save({"model": WEIGHTS, "mask": "here"}, path)
    old = b"X\x04\x00\x00\x00here"
    rewrite(path, lambda name, data: data.replace(old, body) if name.endswith(".pkl") else data)
    checkpoint = ucp.open(path)
    assert set(checkpoint) == {"param/a", "param/b"}
    reason = "it is sparse; save tensor.to_dense() instead"
    assert checkpoint.notes == [f"mask of run.pt was left out: {reason}"]
    assert checkpoint.extras["run.pt"]["mask"] == {"!left_out": reason}


STATE = {"training": True, "_parameters": dict(WEIGHTS)}
MODULE = Instance("torch.nn.modules.container.Sequential", STATE)
HIDDEN = {
    "the model itself": {"model": MODULE, "epoch": 3},
    "the whole file": MODULE,
    "the model, beside a copy that must not be taken for it": {"model": MODULE, "ema": WEIGHTS},
    "a model of another name, beside a copy": {"net": MODULE, "ema": WEIGHTS},
    "one of the weights": {"model": {**WEIGHTS, "c": MODULE}},
    "one of the weights of a flat dict": {**WEIGHTS, "c": MODULE},
    "one of several": {"model": WEIGHTS, "module": MODULE},
    "a module that holds itself": {"model": "itself"},
}


@pytest.mark.parametrize("case", HIDDEN)
def test_weights_inside_an_object_are_refused_by_its_class(case, tmp_path):
    path = tmp_path / "run.pt"
    save(HIDDEN[case], path)
    itself = b"ctorch.nn\nSequential\n)\x81q\xc8}" + text("w") + b"h\xc8sb"

    def change(name, data):
        return data.replace(text("itself"), itself) if "pkl" in name else data

    rewrite(path, change)
    with pytest.raises(FormatError, match=r"run\.pt: .*torch\.nn\..*Sequential.*state_dict\(\)"):
        ucp.open(path)


def stored(kind: bytes, count: bytes) -> bytes:
    """A storage on the CPU that the file calls 0, as an argument of what makes a tensor of it."""
    return b"(" + text("storage") + b"c" + kind + b"\n" + text("0") + text("cpu") + count + b"tQ"


FLOATS = stored(b"torch\nFloatStorage", b"K\x06")
V2, V3 = (b"ctorch._utils\n_rebuild_tensor_v%d\n(" % version for version in (2, 3))
DECIDES = {
    "a dtype": (
        V3 + stored(b"torch.storage\nUntypedStorage", b"K\x18")
        + b"K\x00(K\x06t(K\x01t\x89Nctorch\nfloat9000\ntR",
        r"torch\.float9000 has no numpy equivalent"),
    "a storage": (V2 + stored(b"torch\nNineStorage", b"K\x06") + b"K\x00(K\x06t(K\x01t\x89NtR",
        r"a storage of torch\.NineStorage, a kind that is not known here"),
    "a shape": (V2 + FLOATS + b"K\x00cmylib\nShape\n)R(K\x01t\x89NtR",
        r"_rebuild_tensor_v2 with arguments it does not take: .*an object of mylib\.Shape, which is not known here"),
    "what makes a tensor": (b"cmylib\n_rebuild\n(" + FLOATS + b"tR",
        r"'w': it is made by mylib\._rebuild, which is not known here"),
    "a kind of tensor": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\ncmylib\nTensor\n)}tR",
        r"'w': it is a mylib\.Tensor, a kind of tensor that is not known here"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECIDES)
def test_a_tensor_needs_names_that_are_known(case, tmp_path):
    body, why = DECIDES[case]
    save({"w": np.zeros(6, np.float32)}, tmp_path / "x.pt")

    def changed(name: str, data: bytes) -> bytes:
        return b"\x80\x02}" + text("w") + body + b"s." if name.endswith(".pkl") else data

    rewrite(tmp_path / "x.pt", changed)
    with pytest.raises(FormatError, match=rf"x\.pt: [\s\S]*{why}"):
        ucp.open(tmp_path / "x.pt")


REPLACED = {
    "num_layers": ("megatron/legacy_tp1_pp1_fp32", "num_layers"),
    "a parallel degree": ("megatron/dist_tp1_pp1_fp32", "tensor_model_parallel_size"),
    "the number of experts": ("megatron/dist_tp1_pp1_fp32", "num_experts"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_an_argument_that_decides_must_be_a_plain_value(case, tmp_path):
    name, argument = REPLACED[case]
    folder = Case(name).copied(tmp_path / "c")
    (path,) = folder.rglob("common.pt" if "dist" in name else "model_optim_rng.pt")
    old = re.compile(re.escape(text(argument)) + rb"(q.|r....)(K.|N)", re.DOTALL)
    degree = b"cmylib\nDegree\nK\x01\x85R"
    rewrite(path, lambda _, data: old.sub(lambda m: text(argument) + m[1] + degree, data))
    words = rf"{path.name}: args/{argument} is an object of mylib\.Degree, .* plain value"
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


def test_a_table_of_contents_needs_classes_that_are_known(tmp_path):
    writer = Writer(tmp_path / "c")
    writer.tensor("w", np.ones(2, np.float32), [("__0_0.distcp", Box((0,), (2,)))])
    writer.object("lr", "__0_0.distcp", {"lr": 0.5, "kind": Instance("mylib.Kind", {"a": 1})})
    folder = writer.finish()
    checkpoint = ucp.open(folder)
    assert checkpoint.extras["__0_0.distcp"]["lr"]["kind"]["!opaque"] == "mylib.Kind"
    for name in (
        "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "BytesStorageMetadata",
    ):  # fmt: skip
        copy = Path(shutil.copytree(folder, tmp_path / name))
        kind = f"torch.distributed.checkpoint.metadata.{name}"
        renamed(copy / ".metadata", kind, f"mylib.{name}")
        with pytest.raises(FormatError, match=rf"\.metadata: .* object of mylib\.{name}, which"):
            ucp.open(copy)


def test_what_a_table_of_contents_has_beside_the_tensors_may_be_of_any_class(tmp_path):
    folder = Case("torch/fsdp2_dp4_uneven").copied(tmp_path / "c")
    before = ucp.open(folder)
    arrays = {leaf.label: before.read(leaf.label).copy() for leaf in before.leaves}
    data = (folder / ".metadata").read_bytes()
    assert data.count(b"\x8c\x0bStorageMeta\x94") == 1
    data = data.replace(b"\x8c\x0bStorageMeta\x94", b"\x8c\x0bStorageNext\x94")
    (folder / ".metadata").write_bytes(data)
    after = ucp.open(folder)
    assert set(after) == arrays.keys()
    assert all(same_bits(after.read(label), array) for label, array in arrays.items())


@pytest.mark.parametrize(
    "key", ["dp_world_size", "num_experts", "param_shapes", "buffer_names", "module"]
)
def test_a_value_of_deepspeeds_that_decides_must_be_a_plain_one(key, tmp_path):
    folder = Case("deepspeed/moe_ep2_dp2_z1_bf16").copied(tmp_path / "c")
    path = folder / "global_step5" / "mp_rank_00_model_states.pt"
    edit(path, lambda tree: tree.update({key: Instance("mylib.Kind", {})}))
    words = rf"{path.name}: {key} is an object of mylib\.Kind, which is not known"
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


# The pickles themselves.

MADE = (
    "mylib.config.Config", "transformers.training_args.TrainingArguments", "__main__.Args",
    "datetime.datetime",
)  # fmt: skip


class Reduced:
    """What a class makes of arguments, with items and entries, as of a list or dict."""

    def __init__(self, args: tuple, state: Any, items: list, entries: dict):
        self.parts = args, state, items, entries


class Pickler(pickle._Pickler):
    def __init__(self, file: Any, protocol: int, name: str):
        super().__init__(file, protocol)
        self.name = name

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Global):
            self.write(obj.line)
        else:
            super().save(obj, save_persistent_id)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Reduced):
            return NotImplemented
        args, state, items, entries = obj.parts
        kind = Global(*self.name.rsplit(".", 1))
        return (
            kind, args, state, iter(items) if items else None, iter(entries.items()) if entries else None,
        )  # fmt: skip


@given(
    st.sampled_from(MADE), st.integers(2, 5), st.lists(VALUES, max_size=2).map(tuple), VALUES,
    st.lists(VALUES, max_size=3), st.dictionaries(st.text(), VALUES, max_size=3),
)  # fmt: skip
def test_an_object_of_any_class_keeps_what_made_it(name, protocol, args, state, items, entries):
    Pickler(file := io.BytesIO(), protocol, name).dump([Reduced(args, state, items, entries), 7])
    made, seven = load(file.getvalue())
    assert seven == 7
    assert isinstance(made, Opaque)
    assert made == Opaque(name, args, state, items, entries)
    assert as_json(made, "file", no_tensor)["!opaque"] == name


@pytest.mark.parametrize("use", [
    bool, len, iter, int, float, lambda x: x["a"], lambda x: 1 in x, lambda x: x.fields, lambda x: [][x],
    np.asarray,
], ids=["bool", "len", "iter", "int", "float", "[]", "in", "attribute", "index", "array"])  # fmt: skip
def test_what_is_closed_cannot_be_used_as_a_value(use):
    made = Opaque("a.B", where="x.pt: args/n")
    words = r"x\.pt: args/n is an object of a\.B, which is not known here.* plain value"
    with pytest.raises(FormatError, match=words):
        use(made)


def test_members_of_an_enum_and_classes_inside_others_are_names():
    member = b"c__builtin__\ngetattr\ncmylib\nKind\n" + text("fast") + b"\x86R"
    assert load(b"\x80\x02" + member + b".") == Unknown("mylib.Kind.fast")
    assert load(b"\x80\x02" + member + b")\x81.") == Opaque("mylib.Kind.fast")
    with pytest.raises(UnsafePickle, match="getattr with arguments it does not take"):
        load(b"\x80\x02c__builtin__\ngetattr\ncmylib\nKind\n" + text("__globals__") + b"\x86R.")


@pytest.mark.parametrize("name", [
    "os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.exec",
    "__builtin__.exec", "builtins.__import__", "builtins.open", "io.open", "_io.open",
    "importlib.import_module", "runpy.run_path", "pickle.loads", "_pickle.loads", "marshal.loads",
    "shutil.rmtree", "socket.socket", "ctypes.CDLL", "sys.exit", "webbrowser.open", "code.interact",
    "pty.spawn", "commands.getoutput", "cPickle.loads", "types.FunctionType.__call__",
    "a.b\\n", "a..b", "1a.b", f"{'a' * 300}.b",
])  # fmt: skip
def test_names_that_no_data_needs_are_refused_as_attacks(name):
    module, _, attribute = name.rpartition(".") if "__call__" not in name else name.partition(".")
    with pytest.raises(UnsafePickle, match=r"asks for .*, which no checkpoint needs.* Nothing was"):
        load(b"\x80\x04" + text(module) + text(attribute) + b"\x93" + text("x") + b"\x85R.")


def test_the_classes_of_builtins_that_may_be_mentioned_are_types_alone():
    for name, value in vars(builtins).items():
        data = b"\x80\x02cbuiltins\n" + name.encode() + b"\n."
        if isinstance(value, type):
            load(data)
        elif name != "getattr":
            with pytest.raises(UnsafePickle):
                load(data)


THING = b"cmylib\nThing\n)\x81"


def test_an_object_that_holds_itself_is_closed_and_what_is_around_it_read():
    data = b"\x80\x02]q\x00(" + THING + b"q\x01}" + text("me") + b"h\x01sbK\x05e."
    made, five = load(data)
    assert five == 5
    assert made.state is None
    assert "contains itself" in made.closed
    assert "contains itself" in as_json(made, "file", no_tensor)["left_out"]
    around = b"\x80\x02]q\x00(" + THING + b"}" + text("list") + b"h\x00sbK\x05e."
    assert load(around)[0].closed
    with pytest.raises(UnsafePickle, match="contains itself"):
        load(b"\x80\x02](" + THING + b"]q\x00h\x00ae.")


def test_an_object_that_is_nested_too_deep_is_closed():
    deep = b"]" * (MAX_DEPTH + 5) + b"a" * (MAX_DEPTH + 4)
    made, five = load(b"\x80\x02](" + THING + deep + b"bK\x05e.")
    assert five == 5
    assert "nested" in made.closed
    with pytest.raises(UnsafePickle, match="nested"):
        load(b"\x80\x02](" + deep + b"K\x05e.")


# What is around a value in a pickle: the opcodes before it and after it.
AROUND = {
    "an object's state": (THING + b"}K\x01", b"sb"),
    "an object's arguments": (b"cmylib\nThing\n", b"\x85R"),
    "an object's entries": (THING + b"K\x01", b"s"),
    "an object's items": (THING, b"a"),
    "a record's state": (b"cargparse\nNamespace\n)\x81}K\x01", b"sb"),
    "a dict": (b"}K\x01", b"s"),
    "a tuple": (b"", b"\x85"),
    "a list": (b"]", b"a"),
}


@pytest.mark.parametrize("kind", AROUND)
def test_an_extra_is_never_nested_deeper_than_our_own_metadata_may_be(kind):
    before, after = AROUND[kind]
    kept = []
    for depth in range(1, MAX_DEPTH + 2):
        try:
            made = load(b"\x80\x02" + before * depth + b"K\x05" + after * depth + b".")
        except UnsafePickle:
            continue
        # a list of extras, by file, by name
        levels = 3 + depth_of(as_json(made, "file", no_tensor))
        assert levels <= MAX_VALUE_DEPTH
        kept.append(depth)
    assert kept[: MAX_DEPTH // 2 - 1] == list(range(1, MAX_DEPTH // 2))


def depth_of(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + depth_of(item) for item in items), default=0)


def test_objects_that_share_exponentially_are_closed_in_time():
    shared = b"]" + b"q\x00h\x00\x86" * 60
    things = b"".join(THING + b"h\x00b" for _ in range(500)).replace(b"h\x00", shared, 1)
    made = load(b"\x80\x02](" + things + b"e.")
    assert all(one.closed for one in made)


def test_the_order_of_what_is_unpickled_does_not_matter_to_what_is_shared():
    config = b"cmylib\nThing\n)\x81q\x01}" + text("lr") + b"K\x01sb"
    first, second = load(b"\x80\x02](" + config + b"h\x01e.")
    assert first is second
    assert [node for _, node in walk([first, second]) if node == 1] == [1, 1]


def test_a_state_cannot_be_given_twice():
    with pytest.raises(UnsafePickle, match=r"gives a state to an object of mylib\.Thing"):
        load(b"\x80\x02" + THING + b"}b}b.")


def test_a_mesh_does_not_need_64_bits_for_a_counter_that_fits(tmp_path):
    steps = np.array([0, 2**31 - 1, -(2**31)])
    checkpoint = opened({"w": np.ones((2, 2), np.float32), "steps": steps}, tmp_path)
    with pytest.raises(TreeMismatch, match=r"steps: JAX would make int32 of its int64; .* narrow"):
        checkpoint.restore(mesh=MESH)
    restored = checkpoint.restore(mesh=MESH, narrow_integers=True)["param"]
    assert same_bits(np.asarray(restored["steps"]), steps.astype(np.int32))
    assert restored["w"].dtype == np.float32
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in restored.items()}
    target = {"param": like}
    words = r"steps: the target has dtype int32, .* int64; to convert, narrow_integers=True"
    with pytest.raises(TreeMismatch, match=words):
        checkpoint.restore(target, mesh=MESH)
    again = checkpoint.restore(target, mesh=MESH, narrow_integers=True)["param"]
    assert same_bits(np.asarray(again["steps"]), steps.astype(np.int32))
    # numpy has them
    assert checkpoint.restore(narrow_integers=True)["param"]["steps"].dtype == np.int64
    with enable_x64(True):
        steps = checkpoint.restore(mesh=MESH, narrow_integers=True)["param"]["steps"]
        assert steps.dtype == np.int64


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4))
def test_integers_are_narrowed_exactly_or_not_at_all(tmp_path_factory, values):
    array = np.array(values)
    checkpoint = opened({"n": array}, tmp_path_factory.mktemp("t"))
    if all(-(2**31) <= value < 2**31 for value in values):
        got = checkpoint.restore(mesh=MESH, narrow_integers=True)["param"]["n"]
        assert got.dtype == np.int32
        assert got.tolist() == values
    else:
        with pytest.raises(TreeMismatch, match=r"n: values of int64 do not fit int32: -?\d+ would"):
            checkpoint.restore(mesh=MESH, narrow_integers=True)
