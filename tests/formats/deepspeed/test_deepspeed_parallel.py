"""DeepSpeed checkpoints of several model-parallel ranks, ZeRO-3, ZeRO-0 and experts."""

import re
import time
from pathlib import Path

import pytest
import yaml

import jax_ucp as ucp
from cases import DATA as CASES
from cases import Case, faults_of
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.deepspeed.modules import layer_names
from jax_ucp.formats.deepspeed.tensor_parallel import TensorParallel, affine_layout
from torch_writer import rewrite

DATA, UNIVERSAL = CASES / "deepspeed", CASES / "deepspeed_universal"


INFO = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": 5,
    "vocabulary_parameter_patterns": ["embed"],
    "tp_replicated_parameter_patterns": [r"norm\."],
    "parameter_with_row_parallelism_patterns": [r".*\.down"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate_up"],
    "parameter_with_sub_params": [
        {"patterns": [r".*\.qkv"], "shape": ((8, 2, 2), -1), "partition_dim": 0}
    ],
    "sub_param_shard_widths": {r".*\.qkv": [[4, 4], [2, 0], [0, 2]]},
}


def info(**change) -> TensorParallel:
    return TensorParallel({**INFO, **change}, 2, "file.pt", {})


@pytest.mark.parametrize(("name", "slices", "shape", "second"), [
    ("norm.weight",  (3,),   (3,),    ["[0:3]"]),
    ("a.down",       (4, 3), (4, 6),  ["[0:4, 3:6]"]),
    ("a.up",         (4, 3), (8, 3),  ["[4:8, 0:3]"]),
    ("a.gate_up",    (4, 3), (8, 3),  ["[2:4, 0:3]", "[6:8, 0:3]"]),
    ("a.qkv",        (6, 3), (12, 3), ["[4:8, 0:3]", "[10:12, 0:3]"]),
    ("embed.weight", (4, 3), (5, 3),  ["[4:5, 0:3]"]),
])  # fmt: skip
def test_each_list_of_patterns_joins_slices_in_its_way(name, slices, shape, second):
    layout = info().layout(name, [slices, slices])
    layout.check()
    assert layout.shape == shape
    assert [str(f.target_box) for f in layout.parts if f.input == 1] == second


def test_before_version_0_4_sub_params_are_counted_or_measured_and_cut_evenly():
    old = {"universal_checkpoint_version": 0.2, "sub_param_shard_widths": None}
    for sizes in (3, (4, 4, 4)):
        entry = [{"patterns": ["qkv"], "shape": (sizes, -1), "partition_dim": 0}]
        layout = info(**old, parameter_with_sub_params=entry).layout("qkv", [(6, 3), (6, 3)])
        boxes = [str(part.target_box) for part in layout.parts if part.input == 0]
        assert boxes == ["[0:2, 0:3]", "[4:6, 0:3]", "[8:10, 0:3]"]
    parts = {"patterns": ["qkv"], "shape": ((3, 3), -1), "partition_dim": 0}
    uneven = info(**old, parameter_with_sub_params=[parts])
    with pytest.raises(LayoutError, match="cannot be cut evenly"):
        uneven.layout("qkv", [(3, 3), (3, 3)])


@pytest.mark.parametrize(("change", "message"), [
    ({"universal_checkpoint_version": 0.5}, "version 0.5"),
    ({"affine_map": {"version": 2, "params": {}}}, "affine maps of version 2"),
])  # fmt: skip
def test_versions_newer_than_known_are_refused(change, message):
    with pytest.raises(FormatError, match=message):
        info(**change)


def test_lists_with_a_pattern_for_each_parameter_are_not_walked_through_for_each():
    """As AutoTP writes them."""
    rows, replicas, parts = ([f"m.{i}.{kind}.w" for i in range(6_000)] for kind in "abc")

    def each(names):
        return [f"^{re.escape(name)}$" for name in names]

    parallel = TensorParallel({
        "parameter_with_row_parallelism_patterns": each(rows),
        "tp_replicated_parameter_patterns": each(replicas),
        "parameter_with_sub_params": [{"patterns": [pattern], "shape": (2, -1),
            "partition_dim": 0} for pattern in each(parts)],
    }, 2, "f", {})  # fmt: skip
    begin = time.process_time()
    for names, shape in ((rows, (4, 4)), (replicas, (4, 2)), (parts, (8, 2))):
        assert {parallel.layout(name, [(4, 2)] * 2).shape for name in names} == {shape}
        assert not any(map(parallel.stage_copy, names))
        assert all(map(parallel.names, names))
    parallel.check_used([*rows, *replicas, *parts])
    assert time.process_time() - begin < 6  # walks take twenty


def test_patterns_that_hit_twice_or_never_are_refused():
    said = info(tp_replicated_parameter_patterns=["norm", "norm.weight"])
    with pytest.raises(FormatError, match=r"matches several patterns of tp_replicated"):
        said.layout("norm.weight", [(3,), (3,)])
    said = TensorParallel({"tp_replicated_parameter_patterns": ["normm"]}, 2, "f", {})
    with pytest.raises(FormatError, match=r"patterns that match no parameter: \['normm'\]"):
        said.check_used(["norm.weight"])
    unsupported = {"autotp_unsupported_parameter_patterns": {"^w$": "a reason"}}
    unsupported |= {"affine_map": {"params": {"x": {}}}}
    with pytest.raises(FormatError, match="the slices of w cannot be joined: a reason"):
        TensorParallel(unsupported, 2, "f", {}).check_used(["w"])


def test_a_vocabulary_of_unknown_size_asks_for_it():
    with pytest.raises(FormatError, match=r"sizes=\{\"vocab\": N\}"):
        info(original_vocab_size=None).layout("embed", [(4, 3), (4, 3)])
    given = TensorParallel({**INFO, "original_vocab_size": None}, 2, "file.pt", {"vocab": 7})
    assert given.layout("embed", [(4, 3), (4, 3)]).shape == (7, 3)


def affine(**change) -> dict:
    def rank(offset: int) -> dict:
        piece = {"shape": [4, 2], "source": [offset, [4, 1]], "dest": [0, [2, 1]], "locations": [0]}
        return {"shard_shape": [4, 2], "pieces": [{**piece, **change}]}

    return {"logical_shape": [4, 4], "ranks": {0: rank(0), 1: rank(2)}}


@pytest.mark.parametrize("change", [
    {"scale": 0.5}, {"source": [0, [1, 4]]}, {"source": [0, [8, 1]]}, {"source": [3, [4, 1]]},
    {"dest": [0, [1, 2]]},
])  # fmt: skip
def test_an_affine_piece_that_is_no_box_is_refused(change):
    with pytest.raises(FormatError, match="not a box, or is scaled"):
        affine_layout(affine(**change), [(4, 2), (4, 2)], "w")


def test_an_affine_map_of_another_world_is_refused():
    with pytest.raises(FormatError, match=r"for the ranks \[0, 1\], but there are 3 slices"):
        affine_layout(affine(), [(4, 2)] * 3, "w")
    with pytest.raises(FormatError, match="but the file has"):
        affine_layout(affine(), [(4, 2), (4, 3)], "w")


def test_a_tied_layer_whose_key_cannot_be_told_is_left_out():
    owned = {"tied_modules.a.w": (2,), "tied_modules.b.w": (2,), "3.v": (2,)}
    assert layer_names(3, {"w": (2,), "v": (2,)}, owned) == {"w": None, "v": "3.v"}
    assert layer_names(4, {"w": (5,)}, owned) == {"w": "4.w"}


# Tensor parallelism of which the files say nothing: the user's spec does.

WITHOUT_INFO = [
    "tp2_dp2_z1_fp32", "tp2_dp1_z1_fp32_gqa", "tp2_dp2_z1_bf16_swiglu", "autotp2_dp2_z3_bf16",
]  # fmt: skip
WITHOUT_INFO += ["tp2_pp2_dp1_z1_bf16"]


@pytest.fixture(params=WITHOUT_INFO)
def without_info(request, deepspeed_copy) -> Path:
    """A checkpoint of a trainer that puts no universal_checkpoint_info into the client state."""
    folder = deepspeed_copy(request.param)
    old, new = b"universal_checkpoint_info", b"what_the_trainer_did_said"
    for path in folder.glob("*mp_rank_*_model_states.pt"):
        rewrite(path, lambda _, data: data.replace(old, new))
    return folder


def rules_of(case: str) -> list[dict]:
    """One rule for each parameter, by what the case says of how it was cut."""
    rules = []
    for param in Case(f"deepspeed/{case}").about["parameters"]:
        padded = {"sharded": 0, "padded": {"axis": 0, "to": "vocab"}}
        kinds = {"vocab": padded, "column": {"sharded": 0}, "row": {"sharded": 1}}
        pattern = (kinds | {"replicated": "replicated"})[param["layout"]["kind"]]
        if "sub" in param["layout"]:
            parts = {f"part{i}": n for i, n in enumerate(param["layout"]["sub"])}
            pattern = {"fused": {"axis": 0, "parts": parts}}
        rules.append({"param": param["name"], "pattern": pattern})
    return rules


def test_slices_that_only_a_spec_describes_are_refused_without_it_and_right(without_info, tmp_path):
    case, spec = without_info.parent.name, tmp_path / "mine.yaml"
    with pytest.raises(FormatError, match=r"no universal_checkpoint_info.*Say how .* in a spec"):
        ucp.open(without_info)
    spec.write_text(yaml.safe_dump({"shards": rules_of(case)}))
    sizes = {"vocab": 101} if "to: vocab" in spec.read_text() else {}
    checkpoint, live = ucp.open(without_info, spec=spec, sizes=sizes), Case(f"deepspeed/{case}")
    want = live.truth()
    assert set(checkpoint) == set(want)
    for label, array in want.items():
        assert live.equal(checkpoint.read(label), array, label), label
    assert faults_of(checkpoint) == []


SHORT = """
shards:
- {param: "*word_embeddings.weight", pattern: {sharded: 0, padded: {axis: 0, to: vocab}}}
- {param: "*position_embeddings.weight", pattern: replicated}
- {param: "*layernorm.{kind}", pattern: replicated}
- {param: "*.{linear}.bias", pattern: replicated}
- {param: "*.query_key_value.weight", pattern: {sharded: 0}}
- {param: "*.dense_h_to_4h.weight", pattern: {sharded: 0}}
- {param: "*.dense.weight", pattern: {sharded: 1}}
- {param: "*.dense_4h_to_h.weight", pattern: {sharded: 1}}
"""


@pytest.mark.parametrize(("old", "new", "message"), [
    ("*.{linear}.bias", "*.dense.bias",
     r"query_key_value\.bias is claimed by no rule[\s\S]*dense_4h_to_h\.bias"),
    ("*.dense.weight", "*.dens.weight", r"mine\.yaml:9: '\*\.dens\.weight' claims no parameter"),
    ("*.dense.weight", "*.weight", r"dense_4h_to_h\.weight is claimed by 2 rules"),
    ("{sharded: 1}", "{sharded: 2}", r"dense\.weight.*[\s\S]*mp_rank_01"),
    ("to: vocab", "to: words", "'words' has no number"),
])  # fmt: skip
def test_a_spec_for_deepspeed_is_strict(tmp_path, old, new, message):
    (tmp_path / "mine.yaml").write_text(SHORT.replace(old, new, 1))
    with pytest.raises(LayoutError, match=message):
        ucp.open(DATA / "tp2_dp2_z1_fp32", spec=tmp_path / "mine.yaml", sizes={"vocab": 101})


def test_a_universal_folder_takes_a_spec_too(tmp_path):
    case = "tp2_dp1_z1_fp32_gqa"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"shards": rules_of(case)}))
    checkpoint = ucp.open(UNIVERSAL / case, spec=tmp_path / "mine.yaml", sizes={"vocab": 101})
    assert set(checkpoint) == set(Case(f"deepspeed/{case}").truth())
    assert faults_of(checkpoint) == []
