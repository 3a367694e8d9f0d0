"""Exports: every format gives back what went in, in files that their own readers expect."""

import io
import json
import pickletools
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import Case
from commands import run
from helpers import MemoryStore, differences, faults_of, in_lanes, memory
from jax_ucp.arrays.checks import checks_of, verdicts
from jax_ucp.arrays.contents import Contents
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.codecs.json_values import as_json
from jax_ucp.codecs.torch_file import Record, StoredTensor, TorchFile
from jax_ucp.codecs.zip_writer import TorchZip
from jax_ucp.errors import LayoutError
from jax_ucp.export.files import Tensor, row_major_boxes
from jax_ucp.layout.box import Box
from jax_ucp.tree import Key, Leaf

DATA = Path(__file__).parents[1] / "data"
DTYPES = [
    np.float32, ml_dtypes.bfloat16, np.float16, np.float64, np.int8, np.uint8, np.int64, np.bool_, np.uint32,
]  # fmt: skip
DTYPES += [np.complex64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu]

# One case for each way in which a source differs: masters, ZeRO stage, optimizer, frozen, tied,
# parallel, experts.
CASES = [f"deepspeed/{case}" for case in (
    "z0_fp32_dp2", "z1_fp16_dp2", "z1_fp32_dp2_sgd", "z2_bf16_dp2_bf16master",
    "z2_bf16_dp2_frozen_tied", "z2_fp32_dp2_offload", "z3_bf16_dp2_frozen_tied", "tp2_dp1_z1_fp32_gqa",
    "autotp2_dp2_z3_bf16", "autoep2_dp4_z3_fp32", "moe_ep2_dp2_z1_bf16",
)]  # fmt: skip
WEIGHTS = ["torch/hf_llama_bf16_tied", "torch/hf_gpt2"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Each case in the universal format, made once."""
    made: dict[str, Checkpoint] = {}

    def get(case: str) -> Checkpoint:
        if case not in made:
            made[case] = Case(case).open().save(tmp_path_factory.mktemp("universal") / "out")
        return made[case]

    return get


@pytest.mark.parametrize("format", ["dcp", "deepspeed"])
@pytest.mark.parametrize("case", in_lanes([(case,) for case in CASES]))
def test_an_export_of_a_conversion_holds_each_bit_of_its_source(case, format, converted, tmp_path):
    exported = converted(case).export(tmp_path / "out", format)
    assert exported.format == format
    assert differences(Case(case).open(), exported) == []
    assert faults_of(exported) == []
    assert [item for item in exported.inventory if item.reason == "not understood"] == []


@pytest.mark.parametrize("case", [*WEIGHTS, *CASES[:3]])
def test_safetensors_hold_every_bit_of_the_weights(case, converted, tmp_path):
    exported = converted(case).export(tmp_path / "out", "safetensors", max_shard_bytes=10_000)
    assert differences(Case(case).open(), exported, {"param"}) == []
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    numbers = range(1, len(files) + 1)
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in numbers]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == exported.nbytes
    assert index["weight_map"].keys() == exported.params.keys()


def test_the_config_of_a_model_comes_back_with_its_weights(converted, tmp_path):
    case = WEIGHTS[0]
    converted(case).export(tmp_path / "out", "safetensors")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    jsons = ["config.json", "generation_config.json"]
    assert names == [*jsons, "model.safetensors", "ucp.checksums.sfv"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((Case(case).path / "config.json").read_text())
    head = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert length % 8 == 0
    assert json.loads(head[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def said(file: Path) -> dict:
    """What a file of torch.save holds, with the dtypes of tensors in their place."""

    def go(value: object) -> object:
        match value:
            case StoredTensor():
                return value.dtype
            case Record():
                return value.type, go(value.args), go(value.fields)
            case dict():
                return {key: go(item) for key, item in value.items()}
            case list() | tuple():
                return [go(item) for item in value]
        return value

    tree = go(TorchFile(file).tree)
    return tree if isinstance(tree, dict) else {"param": tree}


def test_what_deepspeed_cuts_parameters_by_is_what_its_own_converter_says(converted, tmp_path):
    case = "tp2_dp1_z1_fp32_gqa"
    converted(f"deepspeed/{case}").export(tmp_path / "out", "deepspeed")
    ours, theirs = tmp_path / "out", DATA / "deepspeed_universal" / case
    files = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
    # Of the run's ranks and of tied names we write one.
    more = {"mp_rank_01_model_states.pt", "head.weight"}
    files = {file for file in files if not more & set(file.parts)}
    written = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()}
    assert files == written - {Path("ucp.checksums.sfv")}
    atoms = [file for file in files if file.parent.parent.name == "zero"]
    assert len(atoms) == 116
    for file in atoms:
        assert said(ours / file) == said(theirs / file), file
    keys = {key for file in atoms for key in said(theirs / file)}
    assert keys == {"param", "cat_dim", "vocab_tensor", "sub_param_shape"}
    name = "global_step5_universal/zero/optimizer_state.pt"
    mine, converters = said(ours / name), said(theirs / name)
    about_ranks = {"partition_count", "group_paddings", "param_alignment_paddings"}
    assert not any(group["params"] for group in mine["param_groups"][2:])  # more than any run has
    mine["param_groups"] = mine["param_groups"][:2]
    assert {key: value for key, value in converters.items() if key not in about_ranks} == mine
    model = "global_step5_universal/mp_rank_00_model_states.pt"
    mine, converters = said(ours / model), said(theirs / model)
    assert mine.keys() == converters.keys()
    for key in ("lr_scheduler", "global_steps", "skipped_steps", "args", "ds_config", "iteration"):
        assert mine[key] == converters[key], key


def with_objects(objects: dict[str, object]) -> Checkpoint:
    """A checkpoint that was DCP, with one parameter and some extras."""
    leaf = Leaf((Key("dict", "param"), Key("dict", "w")), "w", "array", (2,), "float32")
    store = MemoryStore({"w": np.float32([1, 2])})
    return Checkpoint(Contents("dcp", "in memory", [leaf], store, extras={"__1_0.distcp": objects}))


def test_the_objects_of_a_dcp_checkpoint_come_back_under_their_names(tmp_path):
    objects = {"optimizer.param_groups.0.params": ["w"], "scheduler.last": 7}
    objects["optimizer.param_groups.0.lr"] = 0.1
    objects["rng"] = {"!array": "AAECAw==", "dtype": "uint8", "shape": [4]}
    exported = with_objects(objects).export(tmp_path / "out", "dcp")
    assert exported.extras == {"__0_0.distcp": objects}
    plan = with_objects(objects).plan_export("safetensors")
    assert any("left out" in note for note in plan.notes)


def test_every_byte_of_an_export_is_of_an_item(tmp_path):
    tree = {"param": {"v": np.ones(3, np.float32), "w": np.ones((5, 7), np.int8)}}
    exported = memory(tree).export(tmp_path / "out", "dcp")
    assert exported.notes == []


def test_groups_that_had_numbers_list_names_as_the_states_do(tmp_path):
    source = ucp.open(DATA / "torch" / "dcp_named_optimizer" / "ckpt")
    exported = source.export(tmp_path / "out", "dcp")
    assert differences(source, exported) == []
    assert exported.groups == source.groups
    each = (c.extras.values() for c in (source, exported))
    numbers, names = ({k: v for f in files for k, v in f.items()} for files in each)
    pairs = ([0, 1], ["1.weight", "1.bias"]), ([2, 3], ["0.weight", "0.bias"])
    for i, (had, have) in enumerate(pairs):
        key = f"optimizer.param_groups.{i}.params"
        assert (numbers.pop(key), names.pop(key)) == (had, have)
    assert names == numbers


def test_states_that_stay_by_number_keep_the_numbers_of_their_groups(tmp_path):
    objects = {"optimizer.param_groups.0.params": [0]}
    objects["optimizer.param_groups.0.param_names"] = ["w"]
    exported = with_objects(objects).export(tmp_path / "out", "dcp")
    assert exported.extras == {"__0_0.distcp": objects}


def test_tensors_beside_a_model_stay_beside_it(tmp_path):
    source = memory({"other": {"data.seen": np.arange(3), "rng.cpu.state": np.arange(4)}})
    assert differences(source, source.export(tmp_path / "out", "dcp")) == []


SCALARS = st.none() | st.booleans() | st.floats() | st.text(max_size=5)
SCALARS |= st.integers(-(1 << 70), 1 << 70)
SCALARS |= st.binary(max_size=5) | st.complex_numbers(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS,
    lambda some: (
        st.lists(some, max_size=3)
        | st.lists(some, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), some, max_size=3)
        | st.sets(st.integers(-5, 5) | st.text(max_size=2), max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=4))
def test_extras_are_pickled_as_what_they_were(tmp_path_factory, values):
    objects = {f"x.{i}": as_json(value, "", MemoryStore({}).read) for i, value in enumerate(values)}
    exported = with_objects(objects).export(tmp_path_factory.mktemp("law") / "out", "dcp")
    assert exported.extras == {"__0_0.distcp": objects}


@st.composite
def trees(draw: st.DrawFn, alike: bool = False) -> dict[str, dict[str, np.ndarray]]:
    """Parameters of any dtype and shape, scalars and empty ones too, some with moments and a
    step; `alike`, all with the same. A number is no name: in an optimizer's state it is a place
    in a list."""
    names = st.text("ab.7_é ", min_size=1, max_size=8).filter(lambda name: not name.isdigit())
    names = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    states = st.sampled_from([[], ["exp_avg", "step"], ["momentum_buffer"]])
    states = st.just(draw(states)) if alike else states
    steps = st.integers(0, 1 << 24)
    steps = st.just(draw(steps)) if alike else steps
    tree: dict[str, dict[str, np.ndarray]] = {"param": {}}
    for name in names:
        shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(DTYPES))
        for state in ["param", *draw(states)]:
            if state == "step":
                tree.setdefault(state, {})[name] = np.array(draw(steps), np.float32)
                continue
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            raw = draw(st.binary(min_size=nbytes, max_size=None))
            raw = bytes(b & 1 for b in raw) if dtype is np.bool_ else raw
            count = int(np.prod(shape))
            tree.setdefault(state, {})[name] = np.frombuffer(raw, dtype, count).reshape(shape)
    return tree


@settings(max_examples=60)
@given(trees(), st.sampled_from(["safetensors", "dcp"]))
def test_a_tree_of_any_dtypes_and_shapes_comes_back_as_it_was(tmp_path_factory, tree, format):
    names = {f"model.{name}" for name in tree["param"]}
    states = [f"optimizer.state.{name}.{state}" for state in tree for name in tree[state]]
    assume(not names & {*states})
    source = memory(tree)
    exported = source.export(tmp_path_factory.mktemp("law") / "out", format)
    assert differences(source, exported, {"param"} if format == "safetensors" else None) == []


@settings(max_examples=30)
@given(trees(alike=True))
def test_a_universal_folder_of_any_dtypes_and_shapes_comes_back_as_it_was(tmp_path_factory, tree):
    assume(not {".", ".."} & tree["param"].keys())
    source = memory(tree)
    exported = source.export(tmp_path_factory.mktemp("law") / "out", "deepspeed", zero_stage=1)
    assert differences(source, exported) == []


@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple), st.sampled_from([1, 2, 4]),
    st.integers(4, 64), st.none() | st.integers(1, 4),
)  # fmt: skip
def test_blocks_follow_one_another_in_the_bytes_of_the_array(shape, itemsize, max_bytes, chunk):
    chunks = None if chunk is None else (chunk,) * len(shape)
    boxes = list(row_major_boxes(shape, chunks, itemsize, max_bytes))
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    read = [flat[box.index].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *read]).tolist() == list(range(flat.size))
    fits = all(box.size * itemsize <= max_bytes or box.size == 1 for box in boxes)
    assert fits or chunk is not None


def test_blocks_are_made_of_whole_stored_chunks_where_they_can_be():
    boxes = list(row_major_boxes((1000, 64), (128, 16), 4, 100_000))
    assert [box.start[0] for box in boxes] == [0, 384, 768]


def test_a_zip_of_torch_is_one_to_any_reader(tmp_path):
    array = np.arange(5, dtype=np.float32)
    values = [1, -(1 << 40), 2.5, None, True, "é", b"\x00\xff"]
    made = TorchZip({"w": Tensor("w", (5,), array.dtype), "n": values})
    data = bytearray(made.size)
    section = made.section(at=0)
    ((at, tensor),) = section.tensors
    assert at % 64 == 0
    data[at : at + tensor.nbytes] = array.tobytes()
    for offset, part in section.rest([zlib.crc32(array.tobytes())]):
        assert not any(data[offset : offset + len(part)])
        data[offset : offset + len(part)] = part
    assert len(data) == made.size
    (tmp_path / "w.pt").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "w.pt") as file:
        assert file.testzip() is None
        assert file.read("archive/data/0") == array.tobytes()
        # raises if it is no pickle; `torch.load` with `weights_only` takes no LONG4
        pickletools.dis(file.read("archive/data.pkl"), out=(listing := io.StringIO()))
        assert "LONG4" not in listing.getvalue()
    read = TorchFile(tmp_path / "w.pt")
    np.testing.assert_array_equal(read.read("w", Box((0,), (5,))), array)
    assert read.tree["n"] == [1, -(1 << 40), 2.5, None, True, "é", b"\x00\xff"]
    assert [fault for _, fault in verdicts(checks_of(read.claims(), "full"))] == [None]


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def exported_with(config, tmp_path, **params):
    """The config that is written beside these weights, of two layers, where it is accepted."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    names = (EMBEDDING, "model.layers.0.w", "model.layers.1.w")
    weights = ucp.Checkpoint.of({"param": dict.fromkeys(names, rows) | params})
    weights.export(tmp_path / "out", "safetensors", config=config)
    return json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("layers", [1, 3])
def test_a_given_config_of_another_number_of_layers_is_refused(tmp_path, layers):
    """A loader would make the third of random numbers, or leave out the second."""
    with pytest.raises(LayoutError, match=rf"num_hidden_layers = {layers}, .* of 2 layers"):
        exported_with({"num_hidden_layers": layers}, tmp_path)
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert exported_with(config, tmp_path) == config


def test_a_given_config_that_ties_another_head_is_refused(tmp_path):
    tied = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    other = rows.copy()
    other[-1, -1] += 1
    with pytest.raises(LayoutError, match=r"lm_head\.weight differs from param/model\.embed"):
        exported_with(tied, tmp_path, **{HEAD: other})
    assert not (tmp_path / "out").exists()
    assert exported_with(tied, tmp_path, **{HEAD: rows}) == tied


def test_a_config_that_declares_codes_does_not_go_beside_numbers(tmp_path):
    """As of a model in fp8, from which a run began that has its weights in float32."""
    codes = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"num_hidden_layers": 2, "quantization_config": codes}
    assert exported_with(config, tmp_path) == {"num_hidden_layers": 2}


def test_the_command_says_what_is_left_out_of_a_given_config(tmp_path):
    declared = "the config declares fp8, which is left out"
    config = {"num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = ucp.Checkpoint.of({"param": {"layers": {"0": {"w": np.ones((2, 2), np.float32)}}}})
    weights.save(tmp_path / "jax")
    rule = "{param: 'model.layers.{layer}.w', axes: a b, leaf: {'layers/{layer}/w': a b}}"
    (tmp_path / "mapping.yaml").write_text(f"leaves: [{rule}]")
    given = ("--mapping", tmp_path / "mapping.yaml", "--config", tmp_path / "config.json")
    said = run("export", tmp_path / "jax", tmp_path / "out", *given)
    assert f"note: {declared}" in said
    assert "1 tensor, 16 bytes, in 2 files" in said
    back = ucp.Checkpoint.of({"param": {"model.layers.0.w": np.ones((2, 2), np.float32)}})
    planned = back.plan_export("safetensors", config=config)
    assert any(declared in note for note in planned.notes)
