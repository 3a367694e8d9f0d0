"""Writes docs/formats.md, and docs/tested.md from a run over every case: `python
tests/formats_table.py`.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from jax.sharding import Mesh

import jax_ucp as ucp
from cases import RULES, Case, every, flat, names_of
from helpers import mesh_of, restored_on
from jax_ucp.errors import UCPError
from jax_ucp.formats.huggingface.module_order import model_types
from jax_ucp.formats.huggingface.quantization import SCHEMES
from jax_ucp.sharding.jax_versions import enable_x64

PAGE = Path(__file__).parent.parent / "docs" / "formats.md"
TESTED = PAGE.with_name("tested.md")

TEXT = """# Formats

Every checkpoint opens with `jax_ucp.open(path)`. What of it is refused is below, format by format; [every tested
checkpoint](tested.md) is on a page of its own.

| format | what is read | was run with |
|---|---|---|
| [universal](format.md) | everything | jax_ucp |
| [Orbax](#orbax-flax-t5x-and-paxml) v0 and v1 | a checkpoint, or the folder of a run | orbax-checkpoint 0.5.20, 0.6.4, 0.11.10, 0.11.25, 0.11.30, 0.12.8 |
| [Flax](#orbax-flax-t5x-and-paxml) | msgpack, one file or a run of them | flax 0.8.4 to 0.12.8 |
| [T5X](#orbax-flax-t5x-and-paxml) | `checkpoint` and folders of zarr | by its source |
| [Paxml](#orbax-flax-t5x-and-paxml) | `state/` as folders of zarr, or msgpack | by its source |
| [DeepSpeed](#deepspeed) | ZeRO-0 to ZeRO-3 and universal folders, with the optimizer | 0.18.2, 0.19.8 |
| [Megatron-LM, `torch_dist`](#megatron) (and `zarr`) | weights and optimizer | megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2, 0.19.0 |
| [Megatron-LM, `torch`](#megatron) (legacy) | weights and optimizer | megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.18.0, 0.19.0 |
| [Megatron-LM, `torch_dcp`](#megatron) (torch's FSDP2) | weights and optimizer | megatron-core 0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.18.0, 0.19.0 |
| [Megatron-LM, `fsdp_dtensor`](#megatron) (Megatron-FSDP) | weights and optimizer | megatron-core 0.15.3, 0.16.1, 0.17.0, 0.18.0, 0.19.0 |
| [Megatron-Bridge](#megatron), `torch_dist` | weights and optimizer | its layout by megatron-core 0.16.1, 0.19.0; `run_config.yaml` from source (v0.6.0) |
| [NeMo 2](#megatron) (`weights/` and `context/`) | weights and optimizer | its layout by megatron-core 0.13.1, 0.14.0, 0.15.3, from source |
| [PyTorch DCP](tested.md) | FSDP1, FSDP2, HSDP and tensor parallelism, with the optimizer | [these checkpoints](tested.md) |
| [safetensors](#folders-of-weights) | a file, or a folder as transformers loads it | [these checkpoints](tested.md) |
| [torch.save](#folders-of-weights) | a file, or a folder as transformers loads it | [these checkpoints](tested.md) |
| [GGUF](#gguf) | versions 2 and 3, split or not; ggml's blocks | llama.cpp at 0c1e570, gguf-py 0.19, ggml 0.25 |
| [LoRA adapters](adapters.md) of peft | the adapter | [the table of adapters](adapters.md) |
| [transformers' Trainer](#training-folders) | weights or adapter, with the optimizer | transformers 4.44.2, 4.57.1, 5.23.0 |
| [accelerate](#training-folders) | weights or adapter, with the optimizer; FSDP too | accelerate 0.34.2 to 1.15.0 |
| [Lightning](#training-folders) | weights and optimizer | Lightning 2.6.6 with torch 2.4 to 2.13 |
| [verl](#verl-skyrl-and-other-folders-of-ranks-and-steps) | DTensors of each rank, FSDP1 and FSDP2 | verl 0.7.0, torch 2.13 |
| [SkyRL](#verl-skyrl-and-other-folders-of-ranks-and-steps) | DTensors of each rank | the calls of torch that it makes: torch 2.4 (no optimizer), 2.6, 2.9, 2.13 |
| [torch_checkpointing](#verl-skyrl-and-other-folders-of-ranks-and-steps) | a file of each item and rank, with the optimizer | torch_checkpointing 0.1.1, torch 2.13 |
| [torchtitan](#verl-skyrl-and-other-folders-of-ranks-and-steps) | a step, or the folder of a run | from source, with torch 2.13's DCP |
| [OLMo-core](#verl-skyrl-and-other-folders-of-ranks-and-steps) | a step, or the folder of a run | from source, with torch 2.13's DCP |
| [Automodel](#verl-skyrl-and-other-folders-of-ranks-and-steps) | a step, or the folder of a run | from source, with torch 2.13's DCP |
| [quantised weights](quantization.md) | codes and scales, or the numbers that they stand for | [the table of schemes](quantization.md) |

## Megatron

megatron-core was run on a CPU, with stand-ins for TransformerEngine's modules and FusedAdam.

**`torch_dist` (and `zarr`)**

- Read: every sharding type; MLA, multi-token prediction, learnable softmax offsets; experts (grouped, sequential, shared) with any etp; uneven and
  `--pipeline-model-parallel-layout` pipelines, virtual stages.
- Optimizers: precision-aware, SGD, `--optimizer-cpu-offload`, Muon with Adam or Lion beside it, also layer-wise
  (`dist_muon`, `muon --use-distributed-optimizer`).
- Refused: modules whose order is not known in `dp_reshardable` (Mamba, cross attention); fp8 weights in flat buffers; `fully_reshardable` that
  its writer moved; generalized tensor parallelism (GTP) where it pads or mixes rows: lengths that are no multiple of its alignment, gated layers.

**`torch` (legacy)**

- Read: TransformerEngine's modules; experts (grouped, sequential, shared), MLA, multi-token prediction, softmax offsets; any pipeline.
- Optimizers: plain and distributed; decoupled learning rates, SGD, Muon with Adam, precision-aware.
- Refused: a layer-wise optimizer (`dist_muon`: one file for each data-parallel rank); expert tensor parallelism of which not every rank wrote a file;
  buffers from before February 2024; generalized tensor parallelism.

**`torch_dcp` (torch's FSDP2)**

- Read: from the root, with or without its tracker, or from the folder. Numbers go to names by masters and shapes.
- Refused: ranks of tensor, pipeline or expert parallelism, whose tensors have one name.

**`fsdp_dtensor` (Megatron-FSDP)**

- Read: as `torch_dcp`; gate and up as one, also where those of several ranks alternate.
- Refused: pipeline stages; experts, their biases, or parts of tensor-parallel ranks, that several ranks stored under one name.

**Megatron-Bridge and NeMo 2**

- Read, and refused: as the layout that they use. Degrees are by `run_config.yaml` in Megatron-Bridge, or seen from what is stored.

## DeepSpeed

DeepSpeed 0.19.8 and 0.18.2 were run on CPUs with `tests/generators/deepspeed.py`. Some parts that need a GPU were replaced by plain arithmetic, which
the lines of the cases say. Beside Adam, Lion and SGD:

| feature | read? | remarks |
|---|---|---|
| Muon | yes | with ZeRO-1 and 2, each rank that has a part of a matrix stores its whole momentum, and the copies are compared. Before 0.19.3 they differ if the matrix is in two partitions, which is refused; `on_conflict='master'` takes that of the first rank |
| 8-bit optimizers of bitsandbytes 0.50 | yes | as codes, tables and scales; `dequantize='float32'` gives the numbers. AdEMAMix's first moments stay codes |
| Adafactor | yes | its RMS belongs to a rank's partition, and is kept as an extra of each file |
| 1-bit Adam, 0/1 Adam, 1-bit LAMB | yes | removed from DeepSpeed after 0.19.5; the errors of compression are rank 0's, as saved |
| AutoEP | yes | a universal folder whose experts' moments have no `ep_num_experts`, as from before 0.19.6, is refused; `weights_only` opens its weights |
| MiCS | yes | removed from DeepSpeed after 0.19.5 |
| ZeRO++ | yes | the second partitions (hpZ) and quantised communication (qwZ, qgZ) are in no file; frozen weights under `zero_quantized_nontrainable_weights` are saved without their scales and refused |
| ZenFlow | with `on_conflict=` | masters may be older than the weights; with `overlap_step` no moments are saved |
| SuperOffload | yes, by the source of 0.19.8 | the files are ZeRO-3's; moments are in another process and not saved, which a note says |
| NVMe | yes | ZeRO-3 without tensor or expert parallelism, with `offloaded_tensors` beside the files |

## Folders of weights

Of a folder with safetensors or torch.save files, the files are read that transformers would load. If it would load none, a complete set of numbered parts
is read, or the weights of the only model. A file that an index or a name implies and that is missing is an error. A second complete save of
the same model is compared: a sample of each tensor when the folder is opened, all of it by `verify` and conversions. Notes name what else belongs
to the model.

Files with one rank's parts of tensors (torch's `HuggingFaceStorageWriter(save_distributed=True)` without consolidation) store neither the number of
ranks nor the shapes of the whole tensors. They open if the way in which the tensors are cut shows that no rank is missing: an axis that the ranks do
not divide evenly, an axis that FSDP cut within tensor parallelism, or norms as wide as the model, by the columns of the embedding or of the first
projections, or by `hidden_size` in a `config.json` beside the files. Otherwise they are refused, and `sizes={"ranks": 8}` (`--size ranks=8`) says how many
ranks wrote files.

[How each tested folder opens](tested.md#folders-of-weights), with its notes or the reason.

## Orbax, Flax, T5X and Paxml

These versions were run: orbax-checkpoint 0.5.20, 0.6.4, 0.11.10, 0.11.25, 0.11.30 and 0.12.8, with flax 0.8.4 to 0.12.8 and jax 0.4.26 to 0.10.2. These
are read according to their sources: T5X and Paxml, trees without `_METADATA` (Orbax up to 0.2), and Flax's `_gda` folders.
`tests/generators/orbax.py` writes the cases again with the installed versions.

| checkpoint | result |
|---|---|
| PyTree, Standard and Async checkpointers, v1's `save`; OCDBT or folders; zarr v2 or v3 | read |
| `_METADATA` without `use_ocdbt` (before 0.11.31) | read; `manifest.ocdbt` decides, as for Orbax |
| aggregate files (`SaveArgs(aggregate=True)`, up to 0.5), with `_METADATA` or without | read; refused if its tree differs from `_METADATA` |
| one process or several; databases of processes merged or not | read; a missing or duplicate chunk in databases that are not merged is refused |
| the folder of a run | its latest finished step is read, or `step=`; refused if the steps have names of several kinds |
| a step with one tree, and JSON, arrays or random keys beside | read; JSON is kept as extras, and a note names the others |
| a step with several trees | refused with their names, unless `model=` says which |
| Flax's msgpack, in chunks or not, one file or a run of them | read by ranges; other extensions than Flax's and Orbax's are refused |
| T5X: `checkpoint` and folders of zarr | read, version 2 and 3; an array of uint16 (bfloat16 of version 2), another shape or dtype than its spec are refused |
| Paxml: `state/` as folders of zarr, or msgpack | read; the tree is that of the folders' names |
| what all devices have alike, in databases of its own (`ocdbt.process_replica_N`); nodes and values of databases apart (`ocdbt_meta`, `ocdbt_data`) | read; those of replicas are refused without the database that joins them |
| a tree that v1 saved in parts | read once it is finalized; before, refused |
| saves that are not finished | refused; skipped in the folder of a run |

## Training folders

The folders of transformers' Trainer (`checkpoint-N`) and accelerate (`save_state`) open as one checkpoint: weights or peft's adapter, with the optimizer;
schedulers, random states and the trainer's state are extras. The folder of a run opens at its last step, or at `step=`. These versions were run:
transformers 4.44.2, 4.57.1 and 5.23.0, accelerate 0.34.2 to 1.15.0, peft 0.12.0 to 0.21.2, Lightning 2.6.6 with torch 2.4 to 2.13. The optimizer's
states have numbers instead of names. They are assigned to parameters if shapes leave only one arrangement, or as `optimizer_groups` says:

| `optimizer_groups` | meaning |
|---|---|
| `"hf-decay"` | the optimizer has the Trainer's two groups, parameters with weight decay, then biases and norms, each in the model's order |
| `"module-order"` | every group lists its parameters in the model's order, as one of `model.parameters()` does |
| lists, or a function that makes lists from the names | the names in each group |

Safetensors are sorted by name, so the model's order is taken from the class of transformers that `config.json` or `adapter_config.json` names, as the
releases above define it, for {types} model types. You may name another class, as in `"hf-decay:llama"`. 8-bit states (bitsandbytes 0.50.2) and
factored ones (Adafactor) come as stored, under their own names. Refused are:

- a class that is not known, or whose order differs between releases;
- groups for which shapes and order leave several possibilities, as with frozen layers (give lists);
- models whose saved parameters differ from those of the optimizer (`weights_only` opens the weights). Known are the packed experts of transformers 5 in Mixtral
  and Qwen3-MoE: the states of a parameter with all experts of a layer go to the experts that are stored, unless they are factored ones;
- sharded states; open those as what DCP or DeepSpeed wrote.

If a file or folder has several models, `model="student"` chooses one. An optimizer that fits two of them needs `optimizer_groups`, or a name of its own
that contains the model's (`student_optim`).

## verl, SkyRL, and other folders of ranks and steps

verl and SkyRL save `{model,optim,extra_state}_world_size_N_rank_R.pt`, which are DTensors of torch.save. Mesh and placements are in the pickle, and say
which part a rank has (FSDP2, HSDP, FSDP2 with tensor parallelism, uneven sizes). `verify` compares the copies. Every rank's file must be there once; files that
were renamed, are of two world sizes, or whose learning rates, counters or steps differ are refused. The optimizer's states have numbers: they are
assigned to parameters if shapes prove it, or by `optimizer_groups="module-order"`. That is so for FSDP1's flat parameters too, if the sizes leave only
one way in which the modules can have been wrapped. Partial placements, and plain tensors in the files of several ranks, are refused.

torch_checkpointing saves `ITEM_R.pt`, `model_0.pt` and `optimizer_0.pt`, and torch's own `_experimental` checkpointer `checkpoint_R.pt`: DTensors too. An item
with DTensors is of the model and its optimizer, and its parts are put together; of other items (schedulers, random states, a step) each rank's file is an extra.
`metadata.pkl`, where there is one, says which files there must be. Items with a layout of their own (safetensors, JSON) are refused.

The folders of a step also open as one checkpoint: those of verl and SkyRL (`actor`, `policy`, `critic`; `model=` chooses), accelerate with FSDP
(`pytorch_model_fsdp_0/` and `optimizer_0/`), OLMo-core (`model_and_optim/`, `train/`), Automodel (`model/` and `optim/`, both DCP), and Lightning (`meta.pt`
beside the shards). A run of verl, SkyRL, torchtitan, OLMo-core or Automodel opens at the step that its tracker file names, or else at the last complete
one, or at `step=`. Other files of the step are extras.

| writer | versions |
|---|---|
| verl's `FSDPCheckpointManager`, FSDP1 and FSDP2 | run: 0.7.0, torch 2.13 |
| the calls of torch that verl and SkyRL make | run: torch 2.4 (no optimizer), 2.6, 2.9, 2.13 |
| torch_checkpointing, FSDP2 and with tensor parallelism; `torch.distributed.checkpoint._experimental` | run: 0.1.1 (its metadata gathered by gloo instead of on GPUs); torch 2.13 |
| accelerate's `save_fsdp_model`, `save_fsdp_optimizer`, FSDP1 and FSDP2; Lightning's `ModelParallelStrategy` | run: 1.15.0; 2.6.6 |
| folders of torchtitan, OLMo-core, Automodel | from source, with torch 2.13's DCP |

## GGUF

Versions 2 and 3 of llama.cpp's format, little-endian, are read: a file of any name, or the first part of a split one, which opens all parts. Parameters
have the names of the file (`blk.0.attn_q.weight`), and axes in the order of other formats, which is the reverse of GGUF's. F32, F16, BF16, F64 and I8 to
I64 are arrays. ggml's blocks are quantised weights ([which ones are read](quantization.md#gguf)). All keys and values, with the tokenizer's, are
extras. These writers were run: `convert_hf_to_gguf.py` of llama.cpp at 0c1e570 and gguf-py 0.19 (for `deepseek2`, `glm4`, `gpt-oss`, `llama4` and `phi3` the converter in llama-cpp-python 0.3.32), on models of transformers 5.23, and
`ggml_quantize_chunk` of ggml 0.25.

`checkpoint.map("gguf-llama-to-hf")` gives Hugging Face's names; there are also `gguf-mixtral-to-hf`, `gguf-qwen2-to-hf`, `gguf-qwen3-to-hf`,
`gguf-qwen3-moe-to-hf`, `gguf-gemma-to-hf`, `gguf-gemma2-to-hf` and `gguf-gemma3-to-hf`. A second `.map()` then leads to a model of JAX, and `export` writes a
folder that transformers loads. The model's config is made from the keys of the architecture; if one of them is not known, no config is made, and a note says so.
Of `deepseek2`, `glm4`, `gpt-oss`, `llama4` and `phi3` none is made: `gguf-deepseek2-to-hf` and so on take that of the model, `config="MODEL/config.json"`.

| detail | how it is handled |
|---|---|
| query and key of the architecture `llama` | llama.cpp turns neighbours where transformers turns halves: the mapping puts rows back. Models of Mistral are of this architecture; a sliding window of theirs is in no key, and a note says so |
| Gemma's norms | stored with one added, in float32. The mapping subtracts one in float32: bit for bit what was there where the sum was exact, as of every bfloat16 weight from 2 ** -16 to 2 ** 23, and of 0. Of others (float32 weights, or float16, to which the converter adds one in float16) what the sum had no place for is lost; a norm from 0.5 to 2, once one is added again, is what is stored |
| tied embeddings | `output.weight` is not there; then the config says so |
| `rope_freqs.weight` | left out by the mapping; the config has Llama 3.1's settings if these give just the factors that are stored, and else the mapping is refused |
| experts | `ffn_gate_exps.weight` is cut into a tensor for each expert; of gpt-oss and Llama 4 gate and up become one, with inputs first, of gpt-oss by turns |
| DeepSeek's latent attention | `attn_k_b` is transposed and joined with `attn_v_b` to `kv_b_proj`; older files have `attn_kv_b` |
| float32 settings, such as `1e-5` for norms | in the config the shortest decimal number that is the same float32 |

Refused by name: version 1, big-endian files, types that ggml has removed, arrays in arrays, `fuse_qkv` and
`fuse_gate_up_exps` where they are mapped, a part that is missing, of another split or renamed.

## Quantised weights

A weight that is stored as codes and scales is refused, in any format, wherever weights are asked for: by restore, map, export and convert.
`dequantize="bfloat16"` (`--dequantize bfloat16`; also `float16`, `float32`) gives the numbers that they stand for, for the schemes in [quantised
weights](quantization.md). `dequantize=False` (`--no-dequantize`) gives the parts as they are stored, under `stored` instead of `param`. These are
recognised by names, dtypes and shapes:

{schemes}

If a config declares a quantisation, everything that could be codes is refused too, such as fp8 without its scales. An fp8 tensor without scales and
without such a config is an ordinary weight.

## What no reader can see

A file that is missing, cut short, or of another world size, step or run is refused when the checkpoint is opened, or found when copies are compared: a sample
by a restore, all by a conversion. The following cannot be found, because nothing that is stored shows them. [What is proved, and
when](trust.md#what-no-reader-can-see) has the whole list.

- **DTensors by rank**: files of the optimizer, or of a rank's part of it, from another run of the same step and settings.
- **ZeRO-3**: a rank's file from another run of the same shapes and step, swap files of two ranks exchanged, or whole
  files that were not written by name (torch.save puts the name into the zip). There is one copy of everything.
- **ZeRO-0**: what the one file of model states, or that of an expert, has is stored nowhere else.
- **Whose a numbered optimizer state is**: torch numbers parameters in the order in which a script lists them, and
  ZeRO-0 in fp32, files of torch.save and some of DCP have the numbers alone. States are mapped where names are stored,
  or where shapes leave one arrangement; in half precision where the bits of masters do, which are refused if they are
  of no weights of the module. Otherwise they are kept under `other`, unless `optimizer_groups` says whose they are:
  then shapes are compared, and nothing proves the rest.
- **Megatron's numbered states** in fp32 (legacy, no distributed optimizer): Megatron's own order is taken, that of the
  model's keys in the file. Masters of 16 bits, and those of a distributed optimizer, are compared with the weights.
- **DeepSpeed's universal folders**: an atom's name is that of its folder. Two weights exchanged are found by the
  module's copies, unless the folder comes from ZeRO-3; two moments exchanged, or weights that tensor-parallel ranks
  average, are not.
- **Quantised weights without a config**: codes of a scheme that is not in the list above are integers like any other.
- **A part of a model whose name says nothing of parts**, with no index beside it, is a smaller model.
- **Names changed everywhere** in the metadata, and the CRCs with them, are other names.

For hostile files, `PYTHONPATH=tests python -m hostile.fuzz 100000` makes that many and opens them; [a design record](design/015-hostile-files.md) says what is refused.
"""

TESTED_TEXT = """# Every tested checkpoint

Each line is a checkpoint in `tests/data` that the library itself wrote, together with the state of the processes that trained. The columns say how
many of its arrays (parameters and their states) equal that state, bit for bit: when they are read, when they are restored onto a mesh of (4, 2)
devices, and when they are converted and then restored. *Accounted for* means that every stored item is mapped, kept as an extra, or
skipped with a reason. `python tests/formats_table.py` writes this page; tests compare lines of the table with a run, and check that no
case is missing. [Formats](formats.md) says what is refused.

{table}

## Folders of weights

Folders as libraries and people leave them: [which files are read](formats.md#folders-of-weights).

| folder in `tests/data/folders` | result | notes, or the reason |
|---|---|---|
{folders}
"""


@dataclass(frozen=True)
class Outcome:
    """What of a case equals its truth; `refusal` is the error of one that is not read."""

    format: str
    arrays: int = 0
    equal: Mapping[str, int] | None = None
    accounted: bool = False
    refusal: str = ""


def outcome(case: Case, mesh: Mesh, folder: Path) -> Outcome:
    """Open the case, read it, restore it on the mesh, convert it to `folder` and restore that
    too.
    """
    try:
        checkpoint, count = case.open(), len(case.truth())
        converted = checkpoint.save(folder)
    except UCPError as error:
        return Outcome(case.family, refusal=str(error))
    wrong = {"read": case.wrong(checkpoint)}
    with enable_x64(True):
        for way, one in (("restored", checkpoint), ("converted", converted)):
            wrong[way] = case.differing(flat(restored_on(mesh, one, RULES)))
    same = {way: count - len(found) for way, found in wrong.items()}
    places = [item.where for item in checkpoint.inventory]
    told = len(set(places)) == len(places) and all(
        item.reason != "not understood" for item in checkpoint.inventory
    )
    return Outcome(checkpoint.format, count, same, told)


def line(case: Case, found: Outcome) -> str:
    """The case's line of the table."""
    cells = [f"`{case}`", found.format, _features(case), str(found.arrays or "")]
    said = {} if case.family in ("gguf", "jax", "megatron") else case.options
    if said:
        cells[2] += "; with " + ", ".join(f"`{key}={value!r}`" for key, value in said.items())
    if found.equal is None:
        reason = " ".join(found.refusal.replace(str(case.path), "").replace("|", "\\|").split())
        return (
            "| " + " | ".join([*cells, f"refused: {reason.strip('/: '):.200}", "", "", ""]) + " |"
        )
    same = [_all(found.equal.get(way), found.arrays) for way in ("read", "restored", "converted")]
    return "| " + " | ".join([*cells, *same, "yes" if found.accounted else "no"]) + " |"


def _all(equal: int | None, arrays: int) -> str:
    return "" if equal is None else "all" if equal == arrays else f"{equal} of {arrays}"


def _features(case: Case) -> str:
    """What the case shows, in the words of whoever made it, or by its degrees of parallelism."""
    about = case.about
    text = str(about["about"]).partition(" {")[0].replace("|", "/")
    if case.family not in ("trainers", "dtensors"):
        return text
    return f"{text}; " + ", ".join(f"{name} {n}" for name, n in about["writer"].items())


def row(case: Case, mesh: Mesh) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return line(case, outcome(case, mesh, Path(folder) / "out"))


def folder_row(case: str) -> str:
    """The line of a folder: how it is read and what is noted, or why it is refused."""
    path = Case(f"folders/{case}").path
    try:
        checkpoint = ucp.open(path)
        checkpoint.plan()
        what, said = "read", "; ".join(checkpoint.notes)
    except UCPError as error:
        what, said = "refused", str(error)
    words = said.replace(f"{path}/", "").replace(str(path), "the folder").replace("|", "\\|")
    return f"| `{case}` | {what} | {words:.300} |"


def text() -> str:
    """The page of formats."""
    schemes = "\n".join(f"- {name}" for name in sorted({scheme.name for scheme in SCHEMES}))
    return TEXT.replace("{schemes}", schemes).replace("{types}", str(len(model_types())))


def text_of_cases() -> str:
    """The page of tested checkpoints without its table of cases."""
    return TESTED_TEXT.replace("{folders}", "\n".join(map(folder_row, names_of("folders"))))


def page_of_cases() -> str:
    mesh = mesh_of(4, 2)
    head = (
        "| case | format | what it shows | arrays | equal when read | restored | converted,"
        " restored | accounted for |"
    )
    return text_of_cases().replace(
        "{table}", "\n".join([head, "|---" * 8 + "|", *(row(case, mesh) for case in every())])
    )


if __name__ == "__main__":
    PAGE.write_text(text())
    TESTED.write_text(page_of_cases())
