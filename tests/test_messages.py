"""What a refusal says is true of the situation that reached it, and the remedy that it names works.

Each situation is a checkpoint with one thing wrong. The message names what is wrong and where, and,
where it names a remedy, following it gives the arrays of the whole checkpoint, or of its weights.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from jax.sharding import Mesh

import jax_ucp as ucp
from cases import Case
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import QuantizedWeights, UCPError
from jax_ucp.layout.box import Box
from jax_ucp.sharding.jax_versions import enable_x64
from safetensors_writer import write_safetensors
from torch_writer import Instance, edit, rewrite, save

DATA = Path(__file__).parent / "data"
MESH = Mesh(np.array(jax.devices()[:2]), ("x",))

Arrays = dict[str, np.ndarray]


def copied(case: str, folder: Path) -> Path:
    """The folder of one save of a case, copied."""
    Case(case).copied(folder)
    folders = [path for path in folder.iterdir() if path.is_dir()]
    inner = [path for path in folders if path.name.startswith(("global_step", "iter_"))]
    return inner[0] if inner else folder


def arrays(checkpoint: ucp.Checkpoint) -> Arrays:
    return {leaf.label: checkpoint.read(leaf.label).copy() for leaf in checkpoint.leaves}


def same(found: Arrays, want: Arrays) -> bool:
    alike = (same_bits(found[label], array) for label, array in want.items() if label in found)
    return found.keys() == want.keys() and all(alike)


def rounded(found: Arrays, want: Arrays) -> bool:
    """Whether the weights are those wanted, in the dtype in which they are."""
    there = {label: array for label, array in want.items() if label in found}
    alike = {label: array.astype(found[label].dtype) for label, array in there.items()}
    weights = {label for label in want if label.startswith(("param/", "buffer/"))}
    return same(found, alike) and weights == found.keys()


@dataclass
class Situation:
    """`spoil` does what is wrong to a copy of `case` (or makes one) and may return what to open
    instead of it.

    `said` are patterns that the message has, in this order. `remedy` follows it, given the folder
    and the error.
    """

    case: str
    spoil: Callable[[Path], Path | None]
    said: list[str]
    remedy: Callable[[Path, str], Arrays] | None = None
    weights: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def weights_only(folder: Path, _: str) -> Arrays:
    return arrays(ucp.open(folder, weights_only=True))


def open_what_it_says(_: Path, message: str) -> Arrays:
    found = re.search(r"open (/\S+)", message)
    assert found is not None
    return arrays(ucp.open(found[1]))


def without(pattern: str) -> Callable[[Path, str], Arrays]:
    """Remove, as the message says, what is too much, and open again."""

    def follow(folder: Path, _: str) -> Arrays:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return arrays(ucp.open(folder))

    return follow


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def without_table(folder: Path) -> Path:
    (folder / ".metadata").unlink()
    return folder.parent


def one_state_too_much(folder: Path) -> None:
    """An atom of a state that no other parameter has."""
    atom = min(folder.glob("zero/*/exp_avg.pt"))
    rewrite_as(atom, atom.with_name("momentum.pt"))


def rewrite_as(path: Path, other: Path) -> None:
    """The same file under another name, by which torch.save was given it."""
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(other, "w") as renamed:
        for name in file.namelist():
            renamed.writestr(name.replace(path.stem, other.stem, 1), file.read(name))


def change(pattern: str, what: Callable[[Any], None]) -> Callable[[Path], None]:
    """What is wrong is one value in the objects of some files."""

    def spoil(folder: Path) -> None:
        paths = sorted(folder.glob(pattern))
        assert paths
        for path in paths:
            edit(path, what)

    return spoil


def delete(pattern: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        paths = sorted(folder.glob(pattern))
        assert paths
        for path in paths:
            path.unlink()

    return spoil


def copy_as(source: str, name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / source
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / name)

    return spoil


def linked(folder: Path, name: str) -> None:
    """The file is a link to somewhere else."""
    elsewhere = folder.parent / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)


def with_the_files_themselves(folder: Path, _: str) -> Arrays:
    return arrays(ucp.open(shutil.copytree(folder, folder.parent / "copy", symlinks=False)))


def base(tree: Any) -> dict[str, Any]:
    return tree["optimizer_state_dict"]["base_optimizer_state"]


def set_info(**more: Any) -> Callable[[Any], None]:
    return lambda tree: tree["universal_checkpoint_info"].update(more)


def rules_of(case: str) -> str:
    """A spec with one rule for each parameter, by what the case says of how it was cut."""
    padded = {"sharded": 0, "padded": {"axis": 0, "to": "vocab"}}
    kinds = {"vocab": padded, "replicated": "replicated"}
    kinds |= {"column": {"sharded": 0}, "row": {"sharded": 1}}
    params = Case(case).about["parameters"]
    shards = [{"param": p["name"], "pattern": kinds[p["layout"]["kind"]]} for p in params]
    return json.dumps({"shards": shards})


def by_spec(folder: Path, _: str) -> Arrays:
    spec = folder / "mine.yaml"
    spec.write_text(rules_of("deepspeed/tp2_dp2_z1_fp32"))
    return arrays(ucp.open(folder, spec=spec, sizes={"vocab": 101}))


def dcp(folder: Path) -> None:
    """Made anew: the case is none."""
    shutil.rmtree(folder, ignore_errors=True)
    writer = Writer(folder)
    for name in ("a", "b"):
        writer.tensor(name, np.arange(4, dtype=np.float32), [("__0_0.distcp", Box((0,), (4,)))])
    writer.finish()


def renamed_in(folder: Path, pattern: str, old: str, new: str) -> None:
    """A text of the pickles of files is another."""
    texts = [b"X" + len(text).to_bytes(4, "little") + text.encode() for text in (old, new)]
    for path in folder.glob(pattern):

        def other(name, data):
            return data.replace(*texts) if name.endswith("data.pkl") else data

        rewrite(path, other)


OWN, PLAIN = "decoder.layers.1.mlp.gate_proj.weight", "decoder.layers.1.mlp.linear_fc1.weight"


def with_a_module_of_its_own(folder: Path) -> None:
    renamed_in(folder, "mp_rank_*/model_optim_rng.pt", PLAIN, OWN)


def by_a_rule_more(folder: Path, _: str) -> Arrays:
    spec = folder / "mine.yaml"
    rule = {"param": OWN, "pattern": {"sharded": 0}}
    spec.write_text(yaml.safe_dump({"extends": "megatron", "shards": [rule]}))
    found = arrays(ucp.open(folder, spec=spec))
    return {label.replace(OWN, PLAIN): array for label, array in found.items()}


def without_a_moment(folder: Path) -> None:
    """One tensor of the optimizer has another name in the table of contents."""
    path = folder / ".metadata"
    states = "exp_avg", "exp_zzz"
    old, new = (f"state.{state}.decoder.final_layernorm".encode() for state in states)
    path.write_bytes(path.read_bytes().replace(old, new))


def made_in_its_source(folder: Path) -> None:
    for path in (DATA / "deepspeed" / "tp2_dp1_z1_fp32_gqa" / "global_step5").glob(OPTIM):
        shutil.copy(path, folder)


def with_files_of(case: str, pattern: str) -> Callable[[Path, str], Arrays]:
    """Copy the files that are missing, and open again."""

    def follow(folder: Path, _: str) -> Arrays:
        for file in (DATA / case / "ckpt").glob(pattern):
            shutil.copy(file, folder)
        return arrays(ucp.open(folder))

    return follow


def cut_evenly(folder: Path) -> None:
    for rank in (0, 1):
        mark = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4 * rank]}})}
        file = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        write_safetensors(file, {"w": np.arange(4, dtype=np.float32)}, mark)


def not_copied(folder: Path) -> None:
    dcp(folder)
    (folder / ".metadata").unlink()


def of_links(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        dcp(folder)
        linked(folder, name)

    return spoil


def sliced(tree: Any) -> None:
    """The last elements of a moment were cut off."""
    state = base(tree)["state"][0]
    state["exp_avg"] = state["exp_avg"][:-7]


def shared_by_some(tree: Any) -> None:
    tree["optimizer_state_dict"]["partition_count"] = [2, 2]


OPTIM, MODEL = "*_optim_states.pt", "*model_states.pt"
Z1, Z3 = "deepspeed/z1_bf16_dp2", "deepspeed/z3_fp16_dp2_subgroups"
DP4, TP2 = "deepspeed/z1_fp32_dp4", "deepspeed/tp2_dp2_z1_fp32"
UNIVERSAL = "deepspeed_universal/tp2_dp1_z1_fp32_gqa"
LEGACY = "megatron/legacy_tp2_pp1_bf16"
RESHARDABLE = "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16"
ALONE = r"weights_only opens"

# fmt: off
SITUATIONS = {
    # A part of a checkpoint in place of it.
    "one rank's file of DeepSpeed": Situation(Z1, lambda folder: folder / "mp_rank_00_model_states.pt",
        [r"mp_rank_00_model_states\.pt is what one rank wrote", r"open /.*/global_step5$"], open_what_it_says),
    "one rank's file of Megatron": Situation(LEGACY, lambda folder: folder / "mp_rank_01" / "model_optim_rng.pt",
        [r"model_optim_rng\.pt is what one rank wrote", r"open /.*/iter_0000003$"], open_what_it_says),
    "DCP whose hidden file was not copied": Situation("", not_copied, [r"no \.metadata: the save never ended",
        r"was not copied with the others, for its name begins with a dot"]),
    "a rank's file of torch's Hugging Face writer is missing": Situation("torch/dcp_hf_sharded",
        delete("shard-00004-*"), [r"/c has files of 3 ranks .*shard-00003-model-00001-of-00001", r"copy the others$"],
        with_files_of("torch/dcp_hf_sharded", "shard-00004-*")),
    "an even save of torch's Hugging Face writer": Situation("", cut_evenly,
        [r"If 2 ranks wrote files, say sizes=\{'ranks': 2\} \(--size ranks=2\)"], lambda folder,
        _: arrays(ucp.open(folder, sizes={"ranks": 2}))),
    "DCP of links": Situation("", of_links("__0_0.distcp"), [r"__0_0\.distcp is a link to .*, outside the checkpoint",
        r"copy the checkpoint with the files themselves"], with_the_files_themselves),
    "DCP whose table of contents is a link": Situation("", of_links(".metadata"),
        [r"\.metadata is a link to .*, outside the checkpoint", r"copy the checkpoint with the files themselves"],
        with_the_files_themselves),
    # Files too many, too few, or of another save.
    "a model file of ZeRO-3 is missing": Situation(Z3, delete("zero_pp_rank_1_mp_rank_00_model_states.pt"),
        [r"rank_1_mp_rank_00_model_states\.pt is missing: the run had 2 data-parallel ranks, 1 pipeline stages"]),
    "an optimizer file of an earlier save on more ranks": Situation(DP4,
        copy_as("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_4_mp_rank_00_optim_states.pt"),
        [r"zero_pp_rank_4_mp_rank_00_optim_states\.pt belongs to another run, or to an earlier save on more ranks"],
        without("zero_pp_rank_4_*")),
    "a model file of an earlier save on more ranks": Situation(TP2, copy_as("mp_rank_00_model_states.pt",
        "mp_rank_02_model_states.pt"), [r"mp_rank_02_model_states\.pt",
        r"belongs to another run, or to an earlier save on more ranks"], without("mp_rank_02_*")),
    "optimizer files of two saves": Situation(Z1, copy_as("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        [r"with and without the prefix bf16_: two saves with different settings are in one folder\. Remove", ALONE],
        without("zero_pp_rank_0_*")),
    "a rank of Megatron too many": Situation(LEGACY, copy_as("mp_rank_01", "mp_rank_02"),
        [r"mp_rank_02 belongs to another run, or to an earlier save with other parallelism", "Move the folders"],
        without("mp_rank_02")),
    "an optimizer file is missing": Situation(Z1, delete("*rank_1_*optim_states.pt"),
        [r"rank_1_mp_rank_00_optim_states\.pt is missing", ALONE], weights_only, True),
    "all optimizer files are missing": Situation(Z1, delete(OPTIM),
        [r"no \*_optim_states\.pt, but .* written by ZeRO-1", ALONE], weights_only, True),
    "all optimizer files of ZeRO-3 are missing": Situation(Z3, delete(OPTIM),
        [r"written by ZeRO-3: masters and optimizer state are missing; its weights are in no other file"]),
    "a universal folder without its optimizer file": Situation(UNIVERSAL, delete("zero/optimizer_state.pt"),
        [r"optimizer_state\.pt is missing", ALONE], weights_only, True),
    "a folder of one of Megatron's ranks": Situation("megatron/legacy_tp2_pp1_bf16",
        lambda folder: folder / "mp_rank_00",
        [r"mp_rank_00/model_optim_rng\.pt is what one rank wrote of a checkpoint: open \S+$"], open_what_it_says),
    "a run whose step lost its table": Situation("megatron/torch_dcp_te_bf16", without_table,
        [r"iter_0000003 has \.distcp files but no \.metadata: the save never ended"]),
    "a universal folder with a state of one parameter alone": Situation(UNIVERSAL, one_state_too_much,
        [r"/momentum\.pt is missing: .*, as \S+/momentum\.pt, which may be too much", ALONE], weights_only, True),
    "a universal folder without a moment": Situation(UNIVERSAL,
        delete("zero/embed.word_embeddings.weight/exp_avg.pt"),
        [r"word_embeddings\.weight/exp_avg\.pt is missing: other parameters of the group have that state", ALONE],
        weights_only, True),
    "a universal folder made inside its source": Situation(UNIVERSAL, made_in_its_source,
        [r"both atoms \(zero/\) and \*_optim_states\.pt", r"Move zero/, or the optimizer files, to another one"],
        without(OPTIM)),
    # Optimizers.
    "an optimizer wrapper that is not known": Situation(Z1, change("*rank_1_*optim_states.pt",
        lambda tree: tree.__setitem__("optimizer_state_dict", {"zen_partition": 1, "onebit_groups": []})),
        [r"optim_states\.pt has neither the masters", r"but zen_partition, onebit_groups: another optimizer wrapper",
        ALONE], weights_only, True),
    "a sharding over some of the ranks": Situation(DP4, change(OPTIM, shared_by_some),
        [r"of \[2, 2\] ranks, by its partition_count", r"a sharding over some of the ranks, which is not read",
        ALONE], weights_only, True),
    "a rank without a state that others have": Situation(Z1, change("*rank_1_*optim_states.pt",
        lambda tree: base(tree)["state"][0].pop("exp_avg_sq")),
        [r"rank_1_.*: group 0 has the optimizer states \['step', 'exp_avg'\]", r"saved before the first step", ALONE],
        weights_only, True),
    "a moment that was cut": Situation(Z1, change("*rank_1_*optim_states.pt", sliced),
        [r"rank_1_.*: exp_avg of group 0 has \d+ elements, where .* the partition of rank 1 of 2 has \d+", ALONE],
        weights_only, True),
    "masters of another model": Situation(Z1, change("*rank_1_*optim_states.pt",
        lambda tree: tree["optimizer_state_dict"]["single_partition_of_fp32_groups"].__setitem__(0, np.zeros(8))),
        [r"group 0 has \d+ elements by mp_rank_00_model_states\.pt, but the masters .* 8 in bf16_zero_pp_rank_1"],
        weights_only, True),
    "a parameter group too many": Situation(Z1, change("*rank_1_*optim_states.pt",
        lambda tree: tree["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop()),
        [r"rank_1_.* has 1 parameter groups, but .* describes 2; .* of an earlier save with other groups"],
        weights_only, True),
    "a state of Megatron's optimizer that one parameter lacks": Situation("unknown/te_muon", without_a_moment,
        [r"exp_avg of decoder\.final_layernorm\.weight is in no file, though 6 parameters that share states with it",
        ALONE], weights_only, True),
    # Tensor parallelism.
    "a newer universal_checkpoint_info": Situation(TP2, change("mp_rank_*_model_states.pt",
        set_info(universal_checkpoint_version=0.9)), [r"universal_checkpoint_info has version 0\.9",
        r"Say how slices form parameters in a spec \(spec=, --spec\)"], by_spec),
    "a pattern that meets no parameter": Situation(TP2, change("mp_rank_*_model_states.pt",
        set_info(tp_replicated_parameter_patterns=["no_such"])), [r"patterns that match no parameter: \['no_such'\]",
        r"Say how slices form parameters in a spec \(spec=, --spec\)"], by_spec),
    "parameters that DeepSpeed cannot join": Situation(TP2, change("mp_rank_*_model_states.pt",
        set_info(autotp_unsupported_parameter_patterns={"layers": "a bug"})),
        [r"DeepSpeed says that the slices of layers\..* cannot be joined: a bug",
        r"Say how slices form parameters in a spec"], by_spec),
    "a vocabulary without its size": Situation(TP2, change("mp_rank_*_model_states.pt",
        lambda tree: tree["universal_checkpoint_info"].pop("original_vocab_size")),
        [r'has no original_vocab_size; give it: sizes=\{"vocab": N\}, --size vocab=N'], lambda folder,
        _: arrays(ucp.open(folder, sizes={"vocab": 101}))),
    "a vocabulary of more rows than there are": Situation(TP2, change("mp_rank_*_model_states.pt",
        set_info(original_vocab_size=1000)),
        [r"mp_rank_00_model_states\.pt: .*word_embeddings\.weight by its universal_checkpoint_info with vocab=1000: the shards hold"],
        lambda folder, _: arrays(ucp.open(folder, sizes={"vocab": 101}))),
    # Megatron's files.
    "args that are not a Namespace": Situation(LEGACY, change("mp_rank_*/model_optim_rng.pt",
        lambda tree: tree.__setitem__("args", Instance("mylib.Config", dict(tree["args"].state)))),
        [r"model_optim_rng\.pt has an object of mylib\.Config, which .* for args, not an argparse\.Namespace"]),
    "a save before checkpoint_version 2": Situation(LEGACY, change("mp_rank_*/model_optim_rng.pt",
        lambda tree: tree.pop("checkpoint_version")), [r"checkpoint_version None, where 2\.0 or later is needed"]),
    "a parameter that the rules for Megatron do not know": Situation(LEGACY, with_a_module_of_its_own,
        [r"iter_0000003: the rules do not fit", r"1\.mlp\.gate_proj\.weight is claimed by no rule",
        "`extends: megatron`"], by_a_rule_more),
    "a distributed optimizer beside a run that had none": Situation(LEGACY,
        copy_as("mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"),
        [r"mp_rank_00/distrib_optim\.pt has the states of a distributed optimizer", r"was saved without one"],
        without("*/distrib_optim.pt")),
    "common.pt of another run": Situation("megatron/dist_tp1_pp1_fp32", change("common.pt",
        lambda tree: tree["args"].state.update(num_layers=3)),
        [r"axis 0 should count the 3 layers that args in common\.pt tell of: that file or the others are of"]),
}
# fmt: on


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_refusal_says_what_is_wrong_and_its_remedy_works(name, tmp_path):
    situation = SITUATIONS[name]
    folder = tmp_path / "c"
    whole: Arrays | None = None
    if situation.case:
        folder = copied(situation.case, folder)
        whole = arrays(ucp.open(folder))
    else:
        folder.mkdir()
    at = situation.spoil(folder) or folder
    with pytest.raises(UCPError) as refused:
        ucp.open(at, **situation.options)
    message = str(refused.value)
    assert re.search("[\\s\\S]*".join(situation.said), message), message
    assert str(tmp_path) in message
    if situation.remedy is None:
        followed = re.search(r"weights_only|spec=|sizes=|open /", message)
        assert not followed, "a remedy that is not followed"
        return
    found = situation.remedy(folder, message)
    assert found
    if whole is not None:
        assert (rounded if situation.weights else same)(found, whole)


Q = "model.layers.0.self_attn.q_proj"
FP8 = ml_dtypes.float8_e4m3fn
UNREAD = {
    "HQQ": (
        {f"{Q}.W_q": np.ones((32, 64), np.uint8), f"{Q}.scale": np.ones((64, 1), np.float16)},
        {"quant_method": "hqq"},
        "declares hqq, which is not dequantised here",
    ),
    "fp8 without a config": (
        {
            f"{Q}.weight": np.ones((64, 64), FP8),
            f"{Q}.weight_scale_inv": np.ones((1, 1), np.float32),
        },
        {},
        r"names alone do not say .* Put the config\.json",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_quantised_weights_are_sent_only_to_where_they_are_read(name, tmp_path):
    arrays, settings, why = UNREAD[name]
    write_safetensors(tmp_path / "model.safetensors", arrays)
    config = {"model_type": "llama", "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config if settings else {}))
    marked = ucp.open(tmp_path)
    with pytest.raises(QuantizedWeights, match=why) as refused:
        marked.restore()
    for said in (str(refused.value), *marked.notes):
        assert "dequantize='bfloat16'" not in said
        assert "dequantize=False" in said
    with pytest.raises(QuantizedWeights, match=why):
        ucp.open(tmp_path, dequantize="bfloat16")
    kept = ucp.open(tmp_path, dequantize=False).restore()["stored"]
    assert all(same_bits(np.asarray(kept[name]), array) for name, array in arrays.items())


@pytest.mark.parametrize("case", sorted(path.name for path in (DATA / "quantized").iterdir()))
def test_quantised_weights_that_are_read_are_sent_there(case):
    marked = ucp.open(DATA / "quantized" / case / "ckpt")
    with pytest.raises(QuantizedWeights, match="dequantize='bfloat16'"):
        marked.restore()
    assert ucp.open(DATA / "quantized" / case / "ckpt", dequantize="bfloat16").params


def test_states_of_fused_experts_are_not_sent_to_words_or_lists(tmp_path):
    """A Trainer's folder of transformers 5, whose experts are trained as one and stored apart."""
    weights = {f"mlp.experts.{i}.{p}_proj.weight": (3, 4) for i in range(2) for p in ("gate", "up")}
    arrays = {name: np.ones(shape, np.float32) for name, shape in weights.items()}
    stored = arrays | {"norm.weight": np.ones(4, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = {"model_type": "mixtral", "transformers_version": "5.23.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    states = [np.ones((2, 6, 4), np.float32), np.ones(4, np.float32)]
    state = {i: {"exp_avg": array, "exp_avg_sq": array} for i, array in enumerate(states)}
    groups = [{"params": [i], "lr": 0.1} for i in range(2)]
    save({"state": state, "param_groups": groups}, tmp_path / "optimizer.pt")
    why = "all experts of a layer, as transformers 5 trains them"
    apart = ucp.open(tmp_path)
    assert any(why in note for note in apart.notes)
    assert not any("optimizer_groups=" in note for note in apart.notes)
    for groups in ("hf-decay", "module-order", [[*arrays], ["norm.weight"]]):
        with pytest.raises(UCPError, match=f"{why}.* weights_only"):
            ucp.open(tmp_path, optimizer_groups=groups)
    assert {*arrays} < {*ucp.open(tmp_path, weights_only=True).params}


def test_files_that_say_the_same_in_instances_are_of_one_run(tmp_path):
    folder = copied("deepspeed/tp2_dp1_z1_fp32_gqa", tmp_path / "c")
    whole = arrays(ucp.open(folder))

    def as_instances(tree: Any) -> None:
        kind = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
        info = tree["universal_checkpoint_info"]
        parts = [Instance(kind, said) for said in info["parameter_with_sub_params"]]
        info["parameter_with_sub_params"] = parts

    change("mp_rank_*_model_states.pt", as_instances)(folder)
    assert same(arrays(ucp.open(folder)), whole)


def test_a_mapping_says_where_the_arrays_are_that_it_misses(tmp_path):
    weights = {"w": np.ones(2, np.float32)}
    save({"actor": weights, "critic": weights}, tmp_path / "run.pt")
    checkpoint = ucp.open(tmp_path / "run.pt")
    assert any("kept under `other`" in note for note in checkpoint.notes)
    words = r"no parameters: a mapping needs them below `param`; 2 are below `other`, and its"
    with pytest.raises(UCPError, match=words):
        checkpoint.map("hf-llama-to-tunix")


def test_a_float_of_64_bits_is_rounded_by_the_remedy_that_its_refusal_names(tmp_path):
    save({"w": np.full(2, 1 / 3)}, tmp_path / "run.pt")
    checkpoint = ucp.open(tmp_path / "run.pt")
    remedy = "set jax_enable_x64, or give a target of float32 and cast=True"
    said = rf"w: JAX would make float32 of its float64; {remedy}"
    with pytest.raises(UCPError, match=said):
        checkpoint.restore(mesh=MESH)
    target = {"param": {"w": jax.ShapeDtypeStruct((2,), np.float32)}}
    assert checkpoint.restore(target, mesh=MESH, cast=True)["param"]["w"].dtype == np.float32
    with enable_x64(True):
        assert checkpoint.restore(mesh=MESH)["param"]["w"].dtype == np.float64
