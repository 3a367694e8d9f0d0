"""The table of damages: what is done to which files of a case, and what must come of it.

A row is a damage, a verdict, and words. The verdict is the class of the error that opening raises,
with these words in its message, or one of:

    RIGHT       it opens, and is the truth; with words, a note has them
    SKIPPED     the same, and the inventory says that the file was skipped
    SHOWN       it opens; `verify` says these words, and no conversion is made
    UNSEEN      a restore by a sample does not see it, one with verify="full" is refused
    PLAIN       nobody cares whether it opens, but no message has these words
    TOLD        right, refused or shown, as it happens, by the name of a file; but for the files
                in words, of which nothing stored tells

What is not asked by opening is said around it: `weights(...)` with weights alone, `both(...)` with
them and with all, `restored(...)` by a sample and in full, `sampled(...)`, `in_full(...)`,
`verified(...)`, `saved(...)`. ROUNDED is the truth of the weights in fewer bits.

In words FILE is the name of the first file that is damaged, and OTHER of the second. Where a
message names a remedy, `test_damages.py` follows it: the words of a row say just what is wrong.
"""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases import CORRUPTED, Case, names_of
from damages import (
    added,
    as_named,
    bit,
    bits_of_metadata,
    copied,
    cut,
    doubled,
    each,
    edited,
    exchanged,
    flipped,
    folders_exchanged,
    holding,
    items_wiped,
    kind,
    less,
    missing,
    of_another,
    of_sibling,
    renamed,
    replaced,
    tensors_changed,
    together,
)
from folders import EmptyFolder, Link
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, UCPError
from torch_writer import Instance
from torch_writer import saved as saved_by_torch

RIGHT, SKIPPED, SHOWN, UNSEEN, TOLD = "right", "skipped", "shown", "unseen", "told"
ROUNDED, PLAIN = "rounded", "plain"


@dataclass(frozen=True)
class Verdict:
    what: str | type[UCPError]
    doors: tuple[str, ...]

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else self.what.__name__
        return what if self.doors == ("open",) else f"{what} by {' and '.join(self.doors)}"


def weights(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("weights",))


def both(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("open", "weights"))


def sampled(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("restore",))


def in_full(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("full",))


def restored(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("restore", "full"))


def verified(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("verify",))


def saved(what: str | type[UCPError]) -> Verdict:
    return Verdict(what, ("save",))


# fmt: off

LFS, PAGE = b"version https://git-lfs.github.com/spec/v1\n", b"<html>"


def step(words: str) -> str:
    """What a message about a step says, with both files and both values."""
    return rf"(?=[\s\S]*FILE)(?=[\s\S]*{words})[\s\S]*, but \S+ in (?!.*[ _]0*1[_/])\S+\.pt; the files are not of one step"


# Files of DeepSpeed.

OPTIM, MODEL = "*_optim_states.pt", "*model_states.pt"
R0, R1, R2, R3 = (f"zero_pp_rank_{i}_mp_rank_00_optim_states.pt" for i in range(4))
R01, R11 = (f"zero_pp_rank_{i}_mp_rank_01_optim_states.pt" for i in range(2))
BF0, BF1, BF2 = (f"bf16_{name}" for name in (R0, R1, R2))
S0, S1, S2, S3 = (f"zero_pp_rank_{i}_mp_rank_00_model_states.pt" for i in range(4))
M0, M1 = (f"mp_rank_0{i}_model_states.pt" for i in (0, 1))
EXPERT1 = "layer_0_expert_1_mp_rank_00_model_states.pt"
Z0, Z1, Z1_LATER = "deepspeed/z0_fp32_dp2", "deepspeed/z1_bf16_dp2", "deepspeed/z1_fp16_dp2"
SGD, DP4, DP3 = "deepspeed/z1_fp32_dp2_sgd", "deepspeed/z1_fp32_dp4", "deepspeed/z2_bf16_dp3"
TURNS, TINY = "deepspeed/z2_fp32_dp3_roundrobin", "deepspeed/z2_fp32_dp4_tinygroup"
Z3, SUBGROUPS, FROZEN3 = "deepspeed/z3_bf16_dp2", "deepspeed/z3_fp16_dp2_subgroups", "deepspeed/z3_bf16_dp2_frozen_tied"
OFFLOAD3, TP2_Z3 = "deepspeed/z3_bf16_dp3_offload", "deepspeed/tp2_dp2_z3_bf16"
TP2, SWIGLU, PP2 = "deepspeed/tp2_dp2_z1_fp32", "deepspeed/tp2_dp2_z1_bf16_swiglu", "deepspeed/pp2_dp2_z1_fp32"
UNTIED, TP2_PP2 = "deepspeed/pp2_dp1_z1_fp16_untied", "deepspeed/tp2_pp2_dp1_z1_bf16"
MOE0, MOE1 = "deepspeed/moe_ep2_dp2_z0_fp32", "deepspeed/moe_ep2_dp2_z1_bf16"
AUTO1, AUTO3 = "deepspeed/autoep2_dp2_z1_bf16", "deepspeed/autoep2_dp4_z3_fp32"
GQA, U3, UMOE = (f"deepspeed_universal/{name}" for name in ("tp2_dp1_z1_fp32_gqa", "z3_bf16_dp2_frozen_tied", "autoep2_dp4_z3_fp32"))
MICS, NVME = "deepspeed_writers/mics_shard2_dp4", "deepspeed_writers/nvme_z3_small_dp2"
WORDS = "embed.word_embeddings.weight"
CRC = r"FILE: the bytes of storage \w+ do not have the CRC"
STATE0, MASTERS = "optimizer_state_dict/base_optimizer_state/state/0", "optimizer_state_dict/single_partition_of_fp32_groups"
INFO = "universal_checkpoint_info"


def on_more_ranks(counts: Any) -> Any:
    return [2 for _ in counts] if isinstance(counts, list) else 2 * counts


OTHER_PARAMETERS: Any = {"base_optimizer_state": {"state": {}}, "partition_count": [2, 2]}
OTHER_PARAMETERS["single_partition_of_fp32_groups"] = [np.zeros(8, np.float32)] * 2
OWN = "the weights are the module's own[\\s\\S]*their masters were left aside, because"

DEEPSPEED = {
    Z1: [
        (missing(BF1),                          FormatError, "FILE is missing: the run had 2 data-parallel ranks"),
        (missing(M0),                           FormatError, "FILE is missing"),
        (cut(BF1, 0, 100, 20_000, -1),          FormatError, "FILE"),
        (exchanged(BF0, BF1),                   FormatError, "FILE holds what rank 1 should hold"),
        (of_another(BF1, "deepspeed/z1_bf16_dp4_tinygroup"), FormatError, r"FILE is of \[4, 4, 4\] ranks, by its partition_count"),
        (copied(BF1, BF2),                      FormatError, rf"files of 3 ranks, but {M0} was written by 2"),
        (copied(BF1, R1),                       FormatError, "two saves with different settings"),
        (copied(BF1, BF1.replace("rank_1", "rank_01")), FormatError, rf"FILE and {BF1}, which are one rank's"),
        (copied("latest", "global_step5/notes.txt"), SKIPPED, ""),
        (less(BF1, "step"),                     FormatError, r"FILE: step of group \d is 4.0, but 5.0 in .*not of one step"),
        (flipped(BF1, "single_partition_of_fp32_groups/0", 0), SHOWN, rf"{CRC}[\s\S]*the master at bf16_zero_.* is .* in \[\d.*\], rounded to bfloat16 not what the copy at mp_rank_00_model.* has"),
        (flipped(M0, "module/embed", 0),        SHOWN, rf"{CRC}[\s\S]*the master at bf16_zero_.* is .* in \[\d.*\], rounded to bfloat16 not what the copy at mp_rank_00_model.* has"),
        (flipped(BF1, "state/0/exp_avg_sq", 25), saved(CorruptData), CRC),
        (holding("latest", b"global_step9"),    NotACheckpoint, "names global_step9, but there is no such folder"),
        (holding("latest", b"../elsewhere"),    FormatError, "should name a folder beside it"),
        (of_sibling("run", BF1),                sampled(UCPError), "FILE"),
        (together(of_sibling("run", OPTIM)),    sampled(UCPError), "one of the files is damaged, or of another rank, step or run"),
        (flipped(M0, f"module/{WORDS}", -1),    sampled(UCPError), "FILE"),
        (flipped(M0, f"module/{WORDS}", 400),   UNSEEN, "FILE"),
        (edited(BF1, "optimizer_state_dict", {"zen_partition": 1, "onebit_groups": []}),       FormatError, "FILE has neither the masters.*but zen_partition, onebit_groups: another optimizer wrapper"),
        (edited(BF1, f"{STATE0}/exp_avg_sq"),         FormatError, r"FILE: group 0 has the optimizer states \['step', 'exp_avg'\].*saved before the first step"),
        (edited(BF1, f"{STATE0}/exp_avg", lambda moment: moment[:-7]),    FormatError, r"FILE: exp_avg of group 0 has \d+ elements, where .* the partition of rank 1 of 2 has \d+"),
        (edited(BF1, f"{MASTERS}/0", np.zeros(8)), FormatError, r"group 0 has \d+ elements by mp_rank_00_model_states\.pt, but the masters .* 8 in FILE"),
        (edited(BF1, f"{MASTERS}/-1"), FormatError, "FILE has 1 parameter groups, but .* describes 2; .* of an earlier save with other groups"),
        (flipped(BF1, "avg", 7),                in_full(UCPError), CRC),
        (together(flipped(OPTIM, "state/0/step", 0)), sampled(UCPError), "do not have the CRC"),
        (flipped(BF1, "state/0/exp_avg$", 0),   weights(RIGHT), ""),
        (flipped(BF1, "state/0/exp_avg$", 0),   saved(UCPError), "do not have the CRC"),
    ],
    Z0: [
        (flipped(M0, "optimizer.*exp_avg$", 0), weights(RIGHT), ""),
        (flipped(M0, "optimizer.*exp_avg$", 0), saved(UCPError), "do not have the CRC"),
    ],
    "deepspeed/z0_bf16_dp1": [
        (doubled(M0, "optimizer/fp32_groups"),  sampled(UCPError), "FILE"),
        (flipped(M0, f"module/{WORDS}", -1),    sampled(UCPError), "FILE"),
        (flipped(M0, "^module/head.weight", -1), sampled(UCPError), rf"master at {M0}:.*fp32_groups.*copy at {M0}:module/head\.weight"),
        (flipped(M0, f"module/{WORDS}", 400),   UNSEEN, "FILE"),
    ],
    Z1_LATER: [(less(R1, "last_overflow_iter"), FormatError, step("iter is 1, but 2"))],
    SGD: [
        (less(R1, "lr"),                        FormatError, step(r"param_groups\[0\]\.lr is")),
        (of_sibling("run", R0),                 sampled(UCPError), "FILE"),
    ],
    "deepspeed/z1_fp32_dp2_elastic": [(of_sibling("run", R1), sampled(UCPError), "FILE")],
    DP4: [
        (together(missing(OPTIM)),              FormatError, rf"no \*_optim_states\.pt, but {M0} was written by ZeRO-1"),
        (together(missing(OPTIM)),              weights(ROUNDED), ""),
        (copied(R0, "zero_pp_rank_4_mp_rank_00_optim_states.pt"), FormatError, "FILE belongs to another run, or to an earlier save on more ranks"),
        (together(edited(OPTIM, "optimizer_state_dict/partition_count", [2, 2])), FormatError, r"of \[2, 2\] ranks, by its partition_count[\s\S]*a sharding over some of the ranks, which is not read"),
    ],
    DP3: [
        (less(BF2, "lr"),                       FormatError, step("lr is")),
        (flipped(M0, f"module/{WORDS}", -1),    sampled(UCPError), "FILE"),
        (flipped(M0, f"module/{WORDS}", 400),   UNSEEN, "FILE"),
    ],
    TURNS: [
        (exchanged(R0, R1),                     sampled(UCPError), "FILE|OTHER"),
        (of_sibling("run", R2),                 sampled(UCPError), "FILE"),
    ],
    TINY: [(edited(OPTIM, f"{MASTERS}/1", lambda masters: masters[:-1]), FormatError, "group 1 has 469 elements")],
    Z3: [
        (missing(S0),                           FormatError, "FILE is missing"),
        (missing(S1),                           FormatError, "FILE is missing"),
        (of_another(S1, OFFLOAD3),              FormatError, "FILE"),
        (copied(M0, f"global_step5/{M0}", Z1),  FormatError, "model states of ZeRO-3 .* and of another stage"),
        (less(BF1, "lr"),                       FormatError, step(r"lr is 0\.0012")),
        (flipped(BF0, "avg", 7),                in_full(UCPError), CRC),
    ],
    SUBGROUPS: [
        (of_another(R1, AUTO3),                 FormatError, "FILE"),
        (less(R1, "cur_iter"),                  FormatError, step("cur_iter is 4, but 5")),
        (missing(R1),                           weights(UCPError), "FILE is missing"),
        (together(missing(OPTIM)),              FormatError, "written by ZeRO-3: masters and optimizer state are missing; its weights are in no other file"),
    ],
    FROZEN3: [
        (copied(S0, S1),                        FormatError, "holds the same fragments of frozen parameters as"),
        (exchanged(S0, S1),                     FormatError, "FILE was written as OTHER"),
    ],
    OFFLOAD3: [(missing(BF2),                   FormatError, "FILE is missing")],
    "deepspeed/tp2_dp1_z1_bf16": [(exchanged(BF0, BF0.replace("mp_rank_00", "mp_rank_01")), sampled(UCPError), "FILE|OTHER")],
    TP2: [
        (missing(M1),                           FormatError, "FILE is missing"),
        (missing(R11),                          FormatError, "FILE is missing"),
        (of_another(M1, "deepspeed/tp2_dp1_z1_fp32_gqa"), FormatError, "FILE"),
        (exchanged(R0, R1),                     FormatError, r"rank_\d_mp_rank_\d\d_optim_states\.pt"),
        (exchanged(R0, R01),                    TOLD, ""),
        (exchanged(M0, M1),                     sampled(UCPError), "FILE|OTHER"),
        (less(M1, "last_batch_iteration"),      FormatError, step("iteration is 3, but 4")),
        (copied(M0, "mp_rank_02_model_states.pt"), FormatError, "FILE.*belongs to another run, or to an earlier save on more ranks"),
        (together(edited(MODEL, f"{INFO}/universal_checkpoint_version", 0.9)), FormatError, r"universal_checkpoint_info has version 0\.9"),
        (together(edited(MODEL, f"{INFO}/tp_replicated_parameter_patterns", ["no_such"])), FormatError, r"patterns that match no parameter: \['no_such'\]"),
        (together(edited(MODEL, f"{INFO}/autotp_unsupported_parameter_patterns", {"layers": "a bug"})),
                                                FormatError, r"DeepSpeed says that the slices of layers\..* cannot be joined: a bug"),
        (together(edited(MODEL, f"{INFO}/original_vocab_size")), FormatError, "has no original_vocab_size; give it"),
        (together(edited(MODEL, f"{INFO}/original_vocab_size", 1000)),
                                                UCPError, r"word_embeddings\.weight by its universal_checkpoint_info with vocab=1000: the shards hold"),
    ],
    SWIGLU: [],
    TP2_Z3: [
        (missing("zero_pp_rank_1_mp_rank_01_model_states.pt"), FormatError, "FILE is missing"),
        (less("zero_pp_rank_1_mp_rank_01_model_states.pt", "global_steps"), FormatError, step("steps is 4, but 5")),
    ],
    TP2_PP2: [
        (missing("mp_rank_03_model_states.pt"), FormatError, "FILE is missing"),
        (missing("layer_02-model_01-model_states.pt"), FormatError, "FILE is missing"),
        (exchanged("layer_00-model_00-model_states.pt", "layer_00-model_01-model_states.pt"), sampled(UCPError), "FILE|OTHER"),
    ],
    PP2: [
        (missing("layer_01-model_states.pt"),   FormatError, "FILE is missing"),
        (exchanged(R0, R01),                    FormatError, r"rank_\d_mp_rank_\d\d_optim_states\.pt"),
        (of_sibling("run", R01),                sampled(UCPError), "FILE"),
    ],
    UNTIED: [
        (together(less("zero_pp_rank_*_mp_rank_01_optim_states.pt", "lr")), RIGHT, ""),  # a stage may have its own groups
        (exchanged("layer_01-model_states.pt", "layer_02-model_states.pt"), TOLD, ""),
        (exchanged("layer_01-model_states.pt", "layer_03-model_states.pt"), sampled(UCPError), "FILE|OTHER"),
    ],
    MOE0: [
        (missing("layer_0_expert_0_mp_rank_00_model_states.pt"), FormatError, "FILE is missing"),
        (renamed("layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_7_mp_rank_00_model_states.pt"),
                                                UCPError, "expert_0_.* is missing.*expert_1_mp_rank_00_.*expert_7_mp"),
        (of_another(EXPERT1, AUTO1),            both(UCPError), "FILE has .* belongs to another run"),
        (of_another(EXPERT1, MOE1),             both(UCPError), "FILE has .* belongs to another run"),
        (exchanged("expp_rank_*"),              FormatError, "FILE was written as OTHER"),
        (copied("expp_rank_0_*", "expp_rank_1_*"), FormatError, "FILE was written as expp_rank_0"),
        (edited("expp_rank_1_*", "optimizer/state", {}), FormatError, "FILE.* are not those of expp_rank_0"),
        (edited("expp_rank_1_*", "optimizer"), FormatError, "FILE.* has no optimizer"),
        (less("expp_rank_1_*", "lr"),           FormatError, step(r"param_groups\[0\]\.lr is")),
    ],
    MOE1: [
        (missing("layer_0_expert_3_mp_rank_00_model_states.pt"), FormatError, "FILE is missing"),
        (exchanged(BF0, BF1),                   TOLD, ""),
        (of_another(EXPERT1, AUTO1),            both(UCPError), "FILE has .* belongs to another run"),
        (of_sibling("run", "layer_0_expert_3_mp_rank_00_model_states.pt"), sampled(UCPError), "FILE"),
    ],
    AUTO1: [
        (of_another(EXPERT1, MOE1),             both(UCPError), "FILE has .* belongs to another run"),
        (together(of_another("layer_0_expert_*", MOE1)), UCPError, "layer_0_expert_.*there is no such parameter"),
        (of_sibling("run", BF0),                sampled(UCPError), "FILE"),
        (copied(BF1, BF1.replace("mp_rank_00", "mp_rank_01")), FormatError, "belongs to another run"),
        (copied(BF1, BF1.replace("mp_rank_00", "mp_rank_01")), weights(RIGHT), ""),
        (together(copied("*.pt", "global_step5/", "deepspeed/z0_fp16_dp2_frozen")), both(FormatError), f"(?s){M0}.*files of two runs"),
    ],
    AUTO3: [
        (exchanged(R1, R3),                     FormatError, r"rank_\d_mp_rank_\d\d_optim_states\.pt"),
        (of_another(R3, TINY),                  UCPError, "FILE has .*of ZeRO-3: the file is of another run"),
    ],
    MICS: [(exchanged(BF0, BF1),                FormatError, "FILE was written as OTHER")],
    NVME: [
        (cut("offloaded_tensors/rank01/*.swp", 8), FormatError, "FILE has 8 bytes"),
        (missing("offloaded_tensors/rank01/*.swp"), FormatError, "FILE is missing"),
    ],
    GQA: [
        (missing("embed.position_embeddings.weight/fp32.pt"), FormatError, r"embed\.position_embeddings\.weight/fp32\.pt is missing"),
        (copied("final_layernorm.gain/fp32.pt", "final_layernorm.bias/fp32.pt"), FormatError, r"final_layernorm\.bias/fp32\.pt has shape \(1,\).*has \(16,\)"),
        (renamed("final_layernorm.bias", "x", keep=True), FormatError, "zero/x is there, but the model states have no x"),
        (exchanged("final_layernorm.weight/fp32.pt", "final_layernorm.bias/fp32.pt") + exchanged("final_layernorm.weight/exp_avg.pt", "final_layernorm.bias/exp_avg.pt"),
                                                SHOWN, "\n".join([r".*at zero/final_layernorm\.\w+/fp32\.pt:.*copy at mp_rank_00.*final_layernorm.*"] * 2)),
        (exchanged("layers.0.mlp.dense_h_to_4h.weight/exp_avg.pt", "layers.0.mlp.dense_h_to_4h.weight/exp_avg_sq.pt"), FormatError, "FILE was written as OTHER"),
        (missing(f"{WORDS}/exp_avg.pt"),        FormatError, r"FOLDER/exp_avg\.pt is missing: other parameters of the group have that state"),
        (as_named(copied(f"{WORDS}/exp_avg.pt", "exp_avz.pt")), FormatError, r"/exp_avz\.pt is missing: .*, as \S+/exp_avz\.pt, which may be too much"),
        (missing("zero/optimizer_state.pt"),    FormatError, "FILE is missing"),
        (together(copied(OPTIM, "global_step5_universal/", "deepspeed/tp2_dp1_z1_fp32_gqa")), FormatError, r"both atoms \(zero/\) and \*_optim_states\.pt"),
        (holding("latest_universal", b"global_step9_universal"), NotACheckpoint, "names global_step9_universal"),
        (copied("zero/model.norm.bias/exp_avg.pt", "layers.0.input_layernorm.bias/exp_avg.pt", UMOE), FormatError, "the form of the atoms is a .*, but a .* in zero/"),
        (holding("final_layernorm.bias/exp_avg.pt", LFS), FormatError, "FILE: it is a.*git-lfs"),
        (holding("final_layernorm.bias/exp_avg.pt", PAGE), FormatError, "FILE: it is a.*web page"),
        (holding("final_layernorm.bias/exp_avg.pt", Link("nowhere")), FormatError, "FILE: it is a link to nowhere, which does not exist"),
        (holding("final_layernorm.bias/exp_avg.pt", EmptyFolder()), FormatError, "FILE: it is a folder"),
        (doubled("zero/*layernorm*.weight/fp32.pt"), restored(CorruptData), "param/FOLDER.*(between|rounded)"),
        (doubled("zero/*layernorm*.bias/fp32.pt"), restored(CorruptData), "param/FOLDER.*(between|rounded)"),
        (exchanged(M0, M1),                     sampled(UCPError), "FILE|OTHER"),
        (of_sibling("run", f"{WORDS}/fp32.pt"), sampled(UCPError), "FILE"),
        (flipped(f"{WORDS}/fp32.pt", "", -1)  , sampled(UCPError), "FILE"),
        (flipped(f"{WORDS}/fp32.pt", "", 400),  UNSEEN, "FILE"),
        (flipped(f"{WORDS}/exp_avg_sq.pt", "", 7), in_full(UCPError), CRC),
        (tensors_changed("less", "embed.position_embeddings.weight/step.pt", "", lambda x: x - 1), FormatError, r"step of group 0 is .*, but .* in zero/.*/step\.pt"),
        (edited("optimizer_state.pt", "param_groups/1"), FormatError, r"FILE has settings of the groups \[0\], but .* 2 groups"),
        (edited("optimizer_state.pt", "partition_count", on_more_ranks), FormatError, "FILE is of 2 data-parallel ranks, .* of 1"),
        (edited("optimizer_state.pt", "param_alignment_paddings/0/-1"), FormatError, r"FILE is of \[9, 19\] parameters in its groups, .* of \[10, 19\]"),
    ],
    U3: [
        (edited("optimizer_state.pt", "param_groups/1"), FormatError, r"FILE has settings of the groups \[0\], but .* 2 groups"),
        (edited("optimizer_state.pt", "optimizer_state_dict/state/1"), FormatError, r"FILE has states of the groups \[0\], but .* 2 groups"),
        (edited("optimizer_state.pt", "partition_count", on_more_ranks), FormatError, "FILE is of 4 data-parallel ranks, .* of 2"),
    ],
    UMOE: [],
}
for case, first, second in ((DP4, R0, R1), (Z3, BF0, BF1), (SUBGROUPS, R0, R1), (TP2_Z3, BF0, "bf16_" + R01)):
    for a, b in ((first, second), (second, first)):
        DEEPSPEED[case].append((copied(a, b), FormatError, "holds the same masters as .*one is a copy|holds what rank"))
for case in (GQA, U3, UMOE):
    for state in ("exp_avg", "exp_avg_sq"):
        damage = together(missing(f"zero/*/{state}.pt"))
        DEEPSPEED[case] += [(damage, FormatError, rf"{state}\b.*\.pt is missing"), (damage, weights(RIGHT), "")]
    for other in sorted({GQA, U3, UMOE} - {case}):
        DEEPSPEED[case] += [(of_another("optimizer_state.pt", other), FormatError, "FILE.*of another run")]
for case in (U3, UMOE):  # every atom is compared with what rank 0 left of it
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        DEEPSPEED[case] += [(doubled(f"zero/*/{state}.pt"), restored(CorruptData), "zero/FOLDER/FILE")]
for case in (AUTO3, UMOE):  # also where the name that is written inside is that of the file
    for a, b in itertools.combinations((S0, S1, S2, S3), 2):
        DEEPSPEED[case] += [
            (as_named(exchanged(a, b)),         both(UCPError), "FILE: ds_autoep_layers says that it is of"),
            (as_named(copied(a, b)),            both(UCPError), "FILE: ds_autoep_layers says that it is of"),
        ]
DEEPSPEED[UMOE] += [(together(replaced("zero/*.experts.w1/*.pt", b"ep_num_experts", b"of_num_experts")), FormatError, r"FILE has no ep_num_experts: DeepSpeed before 0\.19\.6.*weights_only")]
DEEPSPEED[UMOE] += [(exchanged(S1, S2) + together(edited(MODEL, "ds_config/use_data_before_expert_parallelism", True)), RIGHT, "")]

# Weights alone need neither masters nor moments, but for ZeRO-3, which has the weights there.
for case in (Z1, TURNS, SWIGLU, MOE1):
    DEEPSPEED[case] += [
        (damage,                                verdict, words)
        for damage in (missing(f"*{R1}"), cut(f"*{R1}", 0.5, 0))
        for verdict, words in ((UCPError, "FILE"), (weights(ROUNDED), f"(?=[\\s\\S]*FILE)[\\s\\S]*{OWN}"))
    ]
    damage = edited(f"*{R1}", "optimizer_state_dict", OTHER_PARAMETERS)
    DEEPSPEED[case] += [(damage, UCPError, "group"), (damage, weights(ROUNDED), OWN)]
for case in (f"deepspeed/{name}" for name in names_of("deepspeed")):
    if any(Case(case).path.rglob(f"*{R0}")):
        needed = re.search("_z3_|/z3_|pp2_", case)
        row = (weights(UCPError), "FILE") if needed else (weights(ROUNDED), "the weights are the module's own")
        DEEPSPEED.setdefault(case, []).append((missing(f"*{R0}"), *row))

for case, patterns in {
    MOE0: "expp_rank_*",
    GQA: "exp_avg.pt|exp_avg_sq.pt|step.pt|optimizer_state.pt",
    U3: "exp_avg.pt|exp_avg_sq.pt|optimizer_state.pt",
}.items():
    for damage in (missing(patterns), cut(patterns, 0.5), cut(patterns, 0)):
        DEEPSPEED[case] += [(together(damage), weights(RIGHT), ""), (together(damage), saved(UCPError), "")]

# Files of Megatron.

RNG, FLAT = "model_optim_rng.pt", "distrib_optim.pt"
TP2_BF16, TP2_DP2 = "megatron/legacy_tp2_pp1_bf16", "megatron/legacy_tp2_dp2_distopt_bf16"
BUCKETS, SEQ = "megatron/legacy_pp2_dp2_distopt_buckets_fp32", "megatron/legacy_ep2_moe_seq_distopt_fp32"
VPP, SCALER = "megatron/legacy_tp1_pp2_vpp2_fp32", "megatron/legacy_tp2_fp16_scaler"
MUON_TE, ONE_RANK = "megatron/legacy_te_muon_bf16", "megatron/legacy_tp1_pp1_fp32"
ZARR, DIST = "megatron/old0153_tp2_zarr_fp32", "megatron/dist_tp1_pp1_fp32"
RESHARDABLE, DIST_TP2 = "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16", "megatron/dist_tp2_pp1_bf16"
MLA, BRIDGE = "megatron_core/mla", "megatron_core/bridge"
TRACKER, NEXT = "latest_checkpointed_iteration.txt", renamed("iter_0000003", "iter_0000004")

MEGATRON = {
    TP2_BF16: [
        (together(copied("mp_rank_01/*", "iter_0000003/mp_rank_01/", TP2_DP2)), FormatError, r"mp_rank_01/model_optim_rng\.pt is of another run .*use_distributed"),
        (renamed("mp_rank_01", "mp_rank_02", keep=True), FormatError, "mp_rank_02 belongs to another run"),
        (together(edited(RNG, "args", lambda args: Instance("mylib.Config", dict(args.state)))),   FormatError, r"FILE has an object of mylib\.Config, which .* for args, not an argparse\.Namespace"),
        (together(edited(RNG, "checkpoint_version")), FormatError, r"checkpoint_version None, where 2\.0 or later is needed"),
        (copied(f"mp_rank_00/{RNG}", f"iter_0000003/mp_rank_00/{FLAT}"), FormatError, "FOLDER/FILE has the states of a distributed optimizer.*was saved without one"),
        (flipped("mp_rank_01/*", "^model/decoder.layers.0.mlp.linear_fc1.weight", 0), saved(CorruptData), r"(?s)linear_fc1\.weight.*mp_rank_01"),
    ],
    TP2_DP2: [
        (missing(f"mp_rank_01/{FLAT}"),         FormatError, "FOLDER/FILE is missing"),
        (exchanged(f"mp_rank_00/{FLAT}", f"mp_rank_01/{FLAT}"), sampled(UCPError), "FILE"),
        (of_sibling("run", f"mp_rank_01/{FLAT}"), sampled(UCPError), "FILE"),
        (flipped(f"mp_rank_00/{RNG}", "^model/embedding.word_embeddings.weight", -1), sampled(UCPError), "FILE"),
        (flipped(f"mp_rank_00/{RNG}", "^model/embedding.word_embeddings.weight", 400), UNSEEN, "FILE"),
        (flipped(f"mp_rank_01/{FLAT}", "avg", 7), in_full(UCPError), CRC),
        (less(f"mp_rank_01/{RNG}", "max_lr"),   FormatError, step(r"group 0 of .*lr is 0\.0075")),
        (tensors_changed("other", f"mp_rank_01/{RNG}", "torch_rng", lambda x: x + 1), RIGHT, ""),
    ],
    BUCKETS: [(of_sibling("run", f"mp_rank_00_001/{RNG}"), sampled(UCPError), "FILE")],
    SEQ: [
        (exchanged(f"mp_rank_00_000/{FLAT}", f"mp_rank_00_001/{FLAT}"), sampled(UCPError), "FILE"),
        (copied(f"mp_rank_00_000/{FLAT}", f"mp_rank_00_000/{FLAT}", BUCKETS), UCPError, "FILE.*of another run or model"),
    ],
    VPP: [(less(f"mp_rank_00_001/{RNG}", "num_steps"), FormatError, step("num_steps is 11, but 12"))],
    SCALER: [
        (of_sibling("run", f"mp_rank_00/{RNG}"), sampled(UCPError), "FILE"),
        (less(f"mp_rank_01/{RNG}", "growth_tracker"), FormatError, step("tracker is 2, but 3")),
    ],
    MUON_TE: [
        (added("iter_0000003/mp_rank_00/modelopt_state.pt"), SKIPPED, "not read"),
        (added("iter_0000003/mp_rank_00/layer_wise_optimizer_0.pt"), FormatError, "FILE.*dist_muon.*weights_only"),
        (added("iter_0000003/mp_rank_00/layer_wise_optimizer_0.pt"), weights(SKIPPED), "weights_only"),
    ],
    ONE_RANK: [
        (NEXT,                                  NotACheckpoint, "no such folder"),
        (NEXT + holding(TRACKER, b"4"),         FormatError, "is of iteration 3, but its folder is iter_0000004"),
        (holding(TRACKER, b"../elsewhere"),     FormatError, "should name an iteration"),
    ],
    DIST: [
        (NEXT,                                  NotACheckpoint, "no such folder"),
        (NEXT + holding(TRACKER, b"4"),         FormatError, r"common\.pt is of iteration 3, but its folder is iter_0000004"),
        (edited("common.pt", "args/num_layers", 3),  FormatError, "axis 0 should count the 3 layers that args in FILE tell of: that file or the others are of"),
    ],
    "megatron/torch_dcp_te_bf16": [(missing(".metadata"), NotACheckpoint, r"FOLDER has \.distcp files but no FILE: the save never ended")],
    "unknown/te_muon": [
        (replaced(".metadata", b"state.exp_avg.decoder.final_layernorm", b"state.exp_zzz.decoder.final_layernorm"),
                                                FormatError, r"exp_avg of decoder\.final_layernorm\.weight is in no file, though 6 parameters that share states with it"),
    ],
    DIST_TP2: [
        (flipped("__0_?.distcp", "^optimizer.state.fp32_param.embedding.word_embeddings.weight", -1), sampled(UCPError), "FILE"),
        (flipped("__0_?.distcp", "^optimizer.state.fp32_param.embedding.word_embeddings.weight", 400), UNSEEN, "FILE"),
    ],
    RESHARDABLE: [
        (items_wiped(r"optimizer\."),           weights(ROUNDED), ""),
        (items_wiped(r"optimizer\."),           saved(UCPError), r"\.distcp"),
    ],
    ZARR: [
        (NEXT,                                  NotACheckpoint, "no such folder"),
        (NEXT + holding(TRACKER, b"4"),         FormatError, r"common\.pt is of iteration 3, but its folder is iter_0000004"),
        (exchanged("decoder.layers.mlp.linear_fc1.weight/0.0.0", "embedding.word_embeddings.weight/0.0"),
                                                CorruptData, r"fc1\.weight/0\.0\.0 has 7168 bytes, but a chunk of float32 .* 1536"),
        (renamed("embedding.word_embeddings.weight", "embedding.word_embeddings.weight.1"), FormatError, r"embedding.word_embeddings.weight, but the model has no such tensor"),
        (renamed("output_layer.weight", "OUTPUT_LAYER.WEIGHT"), both(FormatError), "OUTPUT_LAYER.WEIGHT is in capitals"),
        (renamed("optimizer.state.exp_avg.output_layer.weight", "OPTIMIZER.STATE.EXP_AVG.OUTPUT_LAYER.WEIGHT"),
                                                both(FormatError), "OPTIMIZER.STATE.EXP_AVG.OUTPUT_LAYER.WEIGHT is in capitals"),
        (together(holding("optimizer.state.*/.zarray", b"{}")), weights(RIGHT), ""),
        (together(missing("optimizer.state.*/0*")), weights(RIGHT), ""),
        *((added(f"iter_0000003/{folder}/{name}", b"\0\5\26\7" + bytes(100)), SKIPPED, "")
          for folder in ("decoder.final_layernorm.weight", "rng_state") for name in ("._1.0.0", "._.zarray", ".DS_Store", "Thumbs.db")),
        *((copied("rng_state/shard_0.0_1.2.pt", copy.format("shard_0.0_1.2") + ".pt"), UCPError, f"{re.escape(copy.format('shard_0.0_1.2'))}.pt is not a shard of rng_state")
          for copy in ("{} (1)", "{} copy", "{} 2")),
        (copied("rng_state/shard_0.0_1.2.pt", "Copy of shard_0.0_1.2.pt"), SKIPPED, ""),
    ],
    MLA: [
        (replaced(".metadata", b"common_state/shard", b"common_stata/shard"), FormatError, "common_state, which megatron-core has in its place"),
        (copied("common.pt", "common.pt", BRIDGE), SKIPPED, ""),
    ],
    BRIDGE: [
        (replaced("run_config.yaml", b"num_layers: 1", b"num_layers: 3"), FormatError, "num_layers 3|counts? the 3 layers"),
        (missing("run_config.yaml"),            RIGHT, ""),
        (holding("run_config.yaml", b"model: [", b"a: &a [1]\nb: *a", b"model: 3\nddp: []"), RIGHT, ""),
        (tensors_changed("4", "iter_*/train_state.pt", "step", lambda x: x * 0 + 4), FormatError, r"train_state\.pt.* 4"),
        (missing("iter_*/train_state.pt"),      RIGHT, ""),
    ],
}
LEGACY = [f"megatron/{name}" for name in names_of("megatron") if name.startswith("legacy_")]
for case in LEGACY:
    MEGATRON.setdefault(case, []).append((cut("iter_0000003/*.pt", 2 / 3), FormatError, "FOLDER/FILE"))
for case in (TP2_BF16, VPP, "megatron/legacy_ep2_moe_grouped_bf16", TP2_DP2, BUCKETS, SEQ):
    ranks = ("mp_rank_00", "mp_rank_01") if "tp2" in case else ("mp_rank_00_000", "mp_rank_00_001")
    MEGATRON[case] += [(together(missing(f"{rank}/*")), FormatError, r"FOLDER/model_optim_rng\.pt is missing") for rank in ranks]
    MEGATRON[case] += [(folders_exchanged(*ranks), FormatError, r"model_optim_rng\.pt was written by rank")]
    if "distopt" in case:
        MEGATRON[case] += [(exchanged(*(f"{rank}/{FLAT}" for rank in ranks)), saved(FormatError), "distrib_optim|not what the copy at")]
        for damage in (missing(FLAT), cut(FLAT, 0.5), cut(FLAT, 0)) if case in (TP2_DP2, SEQ) else ():
            MEGATRON[case] += [(together(damage), weights(ROUNDED), ""), (together(damage), saved(UCPError), "")]

# torch_dist, with chunks in few files. Runs of the same sizes, ranks and steps say the same in common.pt.
CHUNKED = [f"megatron/{name}" for name in names_of("megatron") if name.startswith(("dist_", "old0153_tp2_dp2")) and name != CORRUPTED]
ALIKE = {"megatron/dist_tp2_gqa_swiglu_qknorm_fp32", "megatron/dist_tp2_singleton_swiglu_fp32", ZARR}


def filled_with(data: bytes) -> bytes:
    """The largest file of another run, often enough."""
    others = (path for case in CHUNKED for path in Case(case).path.rglob("*.distcp"))
    other = max((path.read_bytes() for path in others if path.read_bytes() != data), key=len)
    return other * (1 + len(data) // len(other))


for case in CHUNKED:
    first, second, *_ = sorted(path.name for path in Case(case).path.rglob("*.distcp"))
    MEGATRON.setdefault(case, []).extend([
        (cut("*.distcp|common.pt|.metadata", 2 / 3), verified(FormatError), "FILE"),
        (missing("*.distcp|common.pt|.metadata"), FormatError, r"(?=[\s\S]*FILE)[\s\S]*(is missing|has neither)"),
        (exchanged(first, second),              FormatError, "FILE|OTHER"),
        (each("of another run", "__0_0.distcp", filled_with), verified(FormatError), "FILE"),
        (flipped("*.distcp", r"^decoder\.layers.*self_attention.linear_qkv.weight", 0), saved(CorruptData), r"linear_qkv\.weight|CRC"),
    ])
MEGATRON[ZARR] += [
    (cut("iter_0000003/*/*", 2 / 3),            verified(FormatError), "FOLDER/FILE"),
    (missing("iter_0000003/*/*"),               FormatError, r"(?=[\s\S]*FOLDER/FILE)[\s\S]*(is missing|has neither)"),
]
for case in (*CHUNKED, ZARR):
    alike = sorted(ALIKE - {case}) if case in ALIKE else []
    MEGATRON[case] += [(of_another("common.pt", *alike), RIGHT, "")] if alike else []
    MEGATRON[case] += [(of_another("common.pt", *(o for o in (*CHUNKED, ZARR) if o not in (case, *alike))), FormatError, "iter_0000003")]
NO_ARGS = saved_by_torch({"iteration": 3, "optimizer": {"param_groups": [{"step": 3}]}})
for case in (DIST_TP2, RESHARDABLE, "megatron/dist_pp2_vpp2_fp32", "megatron/dist_ep2_moe_distopt_dp_reshardable_fp32"):
    MEGATRON[case] += [(holding("common.pt", NO_ARGS), RIGHT, "there are no args")]

# Files of torch: DCP, safetensors, DTensors by rank, folders of trainers.

OLD, UNEVEN, TWO_TABLES = "torch/old_v260", "torch/fsdp2_dp4_uneven", "torch/dcp_no_collectives"
GPT2, SHARDED, SHARDED_2D = "torch/hf_gpt2", "torch/dcp_hf_sharded", "torch/dcp_hf_sharded_2d"
RANK0, CONSOLIDATED = "torch/dcp_hf_rank0", "torch/dcp_hf_consolidated"
VERL, OLD_DTENSORS, ACCELERATE = "dtensors/verl_llama", "dtensors/torch_2_4", "dtensors/accelerate_llama"
ITEMS, PLAIN_ITEMS, EXPERIMENTAL = "dtensors/items_tp_2x2", "dtensors/items_plain", "dtensors/experimental_2"
LLAMA = "trainers/small_llama"
INDEX, FIRST, SECOND = "model.safetensors.index.json", "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"
RANKS = [f"shard-{i:05}-model-00001-of-00001.safetensors" for i in range(6)]
MODEL1, OPTIM1, EXTRA1 = (f"{kind}_world_size_2_rank_1.pt" for kind in ("model", "optim", "extra_state"))
MODEL0, OPTIM0 = (f"{kind}_world_size_2_rank_0.pt" for kind in ("model", "optim"))
WAY_OUT = "weights_only opens the weights alone"


TORCH = {
    UNEVEN: [
        (each("with more bytes", "__1_0.distcp", lambda data: data + b"later"), SKIPPED, "FILE has 5 bytes that are not items of this checkpoint"),
        (copied("__1_0.distcp", "__4_0.distcp"), SKIPPED, "FILE belongs to no tensor of this checkpoint: it is left from another save"),
        (missing(".metadata"),                  NotACheckpoint, r"no \.metadata: the save never ended.*was not copied with the others, for its name begins with a dot"),
    ],
    TWO_TABLES: [(missing("__*.metadata"),      FormatError, "FILE is missing")],
    OLD: [
        (holding(name, content),                FormatError, f"FILE: it is {what}")
        for name in (".metadata", "__0_0.distcp") for content, what in (
            (LFS + b"oid sha256:0\n", "a git-lfs pointer"), (b"<!DOCTYPE html>\n<html></html>", "a web page"),
            (b'{"error":"Repository not found"}', "an error that a server answered"))
    ],
    GPT2: [
        (copied(SECOND, FIRST),                 FormatError, "is stored twice|not of one checkpoint"),
        (missing(FIRST),                        FormatError, f"{INDEX} is of .* files, of which 1 are not beside it: 'FILE'"),
        (cut(FIRST, 0, 7, 8, 100),              FormatError, "FILE"),
        (missing(INDEX),                        RIGHT, ""),
        (missing(INDEX) + copied(SECOND, FIRST), FormatError, "is stored twice"),
    ],
    SHARDED: [
        (missing(RANKS[2]),                     FormatError, "that of rank 2 is not there"),
        (missing(RANKS[4]),                     FormatError, "has files of 3 ranks .*shard-00003-model-00001-of-00001.*copy the others$"),
        (cut(RANKS[2], -1),                     FormatError, r"FILE has \d+ bytes"),
        (copied(RANKS[4], RANKS[5]),            FormatError, f"is stored twice: .* is in {RANKS[4]}:.* and in FILE:"),
        (copied("shard-00004-model-00001-of-00002.safetensors", RANKS[4], SHARDED_2D), UCPError, "overlap|hole|number of axes"),
        *((renamed(RANKS[4], name),             FormatError, "shard-00004|a file may be missing")
          for name in ("x.bak", f"{RANKS[4]}.bak", RANKS[5], f"{RANKS[4][:-12]} (1).safetensors")),
    ],
    SHARDED_2D: [(together(missing("*-model-00002-of-00002.safetensors")), FormatError, "none has one called model-00002-of-00002")],
    RANK0: [(edited(INDEX, "metadata/total_size", lambda total: 2 * total),        FormatError, "total_size 7862, and its files have 3931 bytes")],
    CONSOLIDATED: [(missing(INDEX) + cut("c*/model-00001-of-00001.safetensors|model-00001-of-00001.safetensors", -100), CorruptData, "model-00001-of-00001.safetensors has .*cut short")],
    VERL: [
        (missing(f"{MODEL1}|{OPTIM1}|{EXTRA1}"), FormatError, "FILE is missing: each of 2"),
        (copied(MODEL0, "model_world_size_2_rank_2.pt"), FormatError, "is of rank 2, but the ranks are 0 to 1"),
        (copied(MODEL0, "model_world_size_4_rank_2.pt"), FormatError, "files of 2 and of 4 ranks, such as .*two saves lie in it"),
        (holding("fsdp_config.json", b'{"FSDP_version": 2, "world_size": 8}'), FormatError, "says that 8 ranks saved, but the files are of 2"),
        (exchanged(MODEL0, MODEL1),             FormatError, "which is called that of rank 0: the file was renamed"),
        (exchanged(OPTIM0, OPTIM1),             FormatError, "which is called that of rank 0: the file was renamed"),
        (less(EXTRA1, "last_epoch"),            FormatError, "last_epoch is 0, but 1 in extra_state_world_size_2"),
        (less(OPTIM1, "lr"),                    FormatError, r"param_groups\[0\]\.lr is .*not of one step"),
        (holding(TRACKER, b"9"),                NotACheckpoint, "names the step '9', which is not there"),
    ],
    ITEMS: [
        (missing("model_1.pt|optimizer_2.pt|lr_scheduler_3.pt"), FormatError, "FILE is missing: each of 4 ranks"),
        (together(missing("*_3.pt")),           FormatError, r"_3\.pt is missing: each of 4 ranks"),
        (copied("model_0.pt", "model_4.pt"),    FormatError, r"_4\.pt is missing: each of 5 ranks"),
        (exchanged("model_0.pt", "model_1.pt"), FormatError, "which is called that of rank 0: the file was renamed"),
        (less("lr_scheduler_1.pt", "_step_count"), FormatError, "_step_count is .*not of one step"),
        (holding("metadata.pkl", pickle.dumps({"version": "2.0"})), FormatError, "FILE: it does not say which rank wrote which item"),
        (holding("metadata.pkl", pickle.dumps({"metadata": {"ema": {"rank_to_layout_info": {0: None}}}})), FormatError, r"ema_0\.pt is missing"),
        (holding("metadata.pkl", pickle.dumps({"metadata": {"model": {"rank_to_layout_info": {2: {"file_path": "2.safetensors"}}}}})), FormatError, "FILE: rank 2 wrote model to '2.safetensors'"),
        (missing("metadata.pkl"),               RIGHT, ""),
    ],
    PLAIN_ITEMS: [
        (missing("metadata.pkl"),               NotACheckpoint, "is not a checkpoint itself, but holds"),
        (missing("optimizer_0.pt"),             FormatError, "FILE is missing: each of 1 ranks"),
    ],
    EXPERIMENTAL: [
        (missing("checkpoint_1.pt"),            FormatError, "FILE is missing, or has no part of"),
        (exchanged("checkpoint_0.pt", "checkpoint_1.pt"), FormatError, "which is called that of rank 0: the file was renamed"),
    ],
    OLD_DTENSORS: [(doubled("model_world_size_4_rank_2.pt", ""), TOLD, "")],
    ACCELERATE: [
        (together(missing("optimizer_0/*")),    FormatError, "optimizer_0 is missing, .*weights_only opens the wei"),
        (together(missing("optimizer_0/*")),    weights(RIGHT), ""),
        (together(missing("pytorch_model_fsdp_0/*")), FormatError, "pytorch_model_fsdp_0 is missing, which belongs to op"),
        (replaced("random_states_1.pkl", b"stepq\x01K\x00", b"stepq\x01K\x07"), FormatError, r"random_states_\*.pkl.step is 7, but 0 in random_states_0"),
        (cut("random_states_1.pkl", 1000),      FormatError, f"FILE.*{WAY_OUT}"),
        (bit("random_states_1.pkl", 9128, 8),   FormatError, f"FILE.*{WAY_OUT}"),
        (bit("random_states_1.pkl", 9128, 8),   weights(RIGHT), ""),
    ],
    LLAMA: [
        (cut("optimizer.pt", -100),             FormatError, "FILE: .*weights_only opens the weights"),
        (cut("optimizer.pt", -100),             weights(RIGHT), ""),
        (cut("rng_state.pth", 0, -50),          FormatError, "FILE.*weights_only opens"),
        (bit("rng_state.pth", 11_000),          FormatError, "FILE.*weights_only opens"),
        (bit("rng_state.pth", 11_000),          weights(RIGHT), ""),
        (copied("optimizer.pt", "optimizer.bin"), FormatError, r"optimizer\.bin, as accelerate .*and optimizer\.pt"),
    ],
}
# In dcp_no_collectives both ranks wrote items of equal sizes in equal order: nothing tells two such files apart.
for case in (UNEVEN, "torch/fsdp2_tp_2x2", "torch/dcp_zstd", TWO_TABLES, "torch/dcp_file_per_item"):
    TORCH.setdefault(case, []).extend([
        (missing("*.distcp"),                   FormatError, r"FILE is missing: by the table \d+ items lie in it"),
        (cut("*.distcp", -1),                   CorruptData, r"FILE has \d+ bytes, .* truncated"),
    ])
    small, *_, large = (path.name for path in sorted(Case(case).path.glob("*.distcp"), key=lambda path: path.stat().st_size))
    if case != TWO_TABLES:
        TORCH[case] += [
            (exchanged(small, large),           verified(UCPError), "FILE|OTHER"),
            (exchanged(small, large),           saved(UCPError), ""),
            (copied("__0_0.distcp", small, "torch/fsdp2_dp2_amsgrad"), verified(UCPError), "FILE"),
        ]

# What Orbax of other ages wrote.

TEXT = "tree_metadata/('text',)"
UNMERGED, AGGREGATE = "jax/orbax05-processes_unmerged", "jax/orbax05-aggregate"


JAX = {
    UNMERGED: [
        (together(missing("ocdbt.process_0/*")), FormatError, "are not whole databases"),
        (together(missing("ocdbt.process_1/*")), FormatError, "chunks of"),
        (renamed("ocdbt.process_1", "ocdbt.process_2", keep=True), FormatError, "the database of another process has too"),
    ],
    AGGREGATE: [
        (edited("_METADATA", TEXT),  FormatError, "has another tree than the _METADATA"),
        (edited("_METADATA", f"{TEXT}/value_metadata/skip_deserialize", lambda skips: not skips), FormatError, "'text' should be in checkpoint by one of _METADATA"),
        (missing("checkpoint"),                 FormatError, "or one is missing"),
    ],
}

# Laws: a missing, cut, exchanged or foreign file is told by name, or changes nothing; but for those of which
# nothing is stored twice. ZeRO-3 has no second copy, and its ranks' files do not say whose they are unless there
# are experts. ZeRO-0 has everything once, in one file or in that of an expert. Moments, and what the
# tensor-parallel ranks of Megatron-DeepSpeed average, have no copy in the module.
ONLY_COPY = r"zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
UNTOLD = {
    SUBGROUPS: (ONLY_COPY, ONLY_COPY), AUTO3: ("", ONLY_COPY), Z0: ("", M0), MOE0: ("", r"layer_0_expert_\d_mp_rank_00_model_states\.pt"),
    GQA: (r"exp_avg(_sq)?\.pt|.*norm.*fp32\.pt", r"exp_avg(_sq)?\.pt|.*(norm|dense).*fp32\.pt"),
}
LAWS = {
    case: [
        (missing("*.pt") + added("global_step5", EmptyFolder()) if case == Z0 else missing("*.pt"), TOLD, ""),
        (cut("*.pt", 0, 1 / 3, -1),             UCPError, "FILE"),
        *([(exchanged("*.pt"),                  TOLD, UNTOLD.get(case, ("", ""))[0])] if case != Z0 else []),
        (of_sibling("run", "*.pt"),             TOLD, UNTOLD.get(case, ("", ""))[1]),
        (bits_of_metadata("*.pt"),              TOLD, ""),
    ]
    for case in (Z1, TURNS, SUBGROUPS, Z0, SWIGLU, PP2, MOE1, MOE0, AUTO3, GQA, TP2_DP2, VPP, SEQ)
}
# A file of another step, whose arrays are as they were, is told by what it says of its step.
COUNTERS = ("global_steps", "iteration", "step")
for case, name in (
    (Z1, BF1), (SUBGROUPS, R1), (SUBGROUPS, S0), (SWIGLU, "bf16_" + R01), (SWIGLU, M1), (PP2, R11), (MOE1, BF1),
    (AUTO3, R2), (GQA, M1), (TP2_DP2, f"mp_rank_01/{RNG}"), (VPP, f"mp_rank_00_001/{RNG}"),
):
    row = (less(name, *COUNTERS), verified(UCPError) if case == VPP else UCPError, r"(?=[\s\S]*FILE)[\s\S]*(step|iteration)")
    LAWS[case].append(row)  # in stages of a pipeline each rank has steps of its own

# One file of each kind of run and of each of its kinds of files, where another belongs: no message speaks of metadata in general.
DONORS = [
    ("z1_bf16_dp2", M0), ("z2_fp32_dp4_tinygroup", R3), ("z1_fp32_dp2_elastic", R1), ("z3_bf16_dp2", S1), ("z3_bf16_dp3_offload", BF1),
    ("autoep2_dp4_z3_fp32", R3), ("pp2_dp2_z1_fp32", "layer_00-model_states.pt"), ("autoep2_dp2_z1_bf16", EXPERT1),
    ("moe_ep2_dp2_z1_bf16", EXPERT1), ("moe_ep2_dp2_z1_bf16", BF1), ("moe_ep2_dp2_z0_fp32", "expp_rank_1_mp_rank_00_optim_states.pt"),
]
for case in (AUTO3, MOE0, Z3):
    last = {kind(path.name): path.name for path in sorted(Case(case).path.rglob("*.pt"))}
    LAWS.setdefault(case, []).extend(
        (copied(theirs, mine, f"deepspeed/{other}"), both(PLAIN), "not as expected")
        for mine in last.values() for other, theirs in DONORS if f"deepspeed/{other}" != case or theirs != mine
    )

TABLE = {}
for table in (DEEPSPEED, MEGATRON, TORCH, JAX, LAWS):
    for case, rows in table.items():
        for damage, verdict, words in rows:
            verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict, ("open",))
            TABLE.setdefault(case, []).append((damage, verdict, words))
