"""Writes GGUF files with llama.cpp's own converter and ggml's own quantisation, and beside each what
gguf-py and transformers make of it.

    python tests/generators/gguf_files.py OUT LLAMA_CPP LIBGGML [--only PART ...]

LLAMA_CPP is the source tree of llama.cpp (`convert_hf_to_gguf.py`, `conversion/`), LIBGGML a shared
library with ggml's `ggml_quantize_chunk`, such as `libggml-base.so`. OUT/<case>/ckpt has the file or
files; OUT/<case>/truth.npz has `param/<name>` for every tensor, as gguf-py's reader and its `quants`
give it (bfloat16 as its bits in uint16). OUT/<case>/case.json says who wrote them, the mapping to
transformers' names, the model's config, and under `model` its tensors by transformers' names, as
float32: shape and SHA-256 of the bytes. Of a file without quantised weights these are the original,
of others gguf-py's, where the model has them. It needs torch, transformers, gguf, sentencepiece and
tokenizers.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
import writing
from safetensors.torch import load_file

_CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
from conversion.deepseek import DeepseekV2Model
from conversion.glm import Glm4Model
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # no model has this tokenizer
for model in (DeepseekV2Model, Glm4Model):
    model.set_vocab = TextModel._set_vocab_gpt2
script = sys.argv[1] + "/convert_hf_to_gguf.py"
sys.argv = [script, *sys.argv[2:]]
runpy.run_path(script, run_name="__main__")
"""

_SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
# Rows of whole blocks, of 256 and of 32, in all but two matrices of a layer.
_WIDE = {"hidden_size": 256, "head_dim": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_key_value_heads": 1}  # fmt: skip
_NARROW = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_K = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
_SMALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]


# The kinds whose tokenizer llama.cpp wants in a tokenizer.json.
_BPE = ("Qwen3Moe", "GptOss", "Glm4", "DeepseekV2", "DeepseekV3", "Llama4Text")

Arrays = dict[str, np.ndarray]


class Machine:
    """llama.cpp's source tree and ggml's library."""

    def __init__(self, llama_cpp: Path, library: Path):
        self.llama_cpp = llama_cpp
        self._ggml = ctypes.CDLL(str(library))
        self._ggml.ggml_quantize_chunk.restype = ctypes.c_size_t

    def convert(self, model: Path, out: Path, type: str, *arguments: str) -> None:
        command = [sys.executable, "-c", _CONVERT, str(self.llama_cpp), str(model)]
        command += ["--outfile", str(out), "--outtype", type, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def quantize(self, values: np.ndarray, type: gguf.GGMLQuantizationType) -> np.ndarray:
        """The blocks of a matrix, each element as important as any other."""
        values = np.ascontiguousarray(values, np.float32)
        out = np.empty(gguf.quant_shape_to_byte_shape(values.shape, type), np.uint8)
        rows, columns = values.size // values.shape[-1], values.shape[-1]
        importance = np.ones(columns, np.float32)
        pointer = ctypes.POINTER(ctypes.c_float)
        written = self._ggml.ggml_quantize_chunk(
            ctypes.c_int(type),
            values.ctypes.data_as(pointer),
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            importance.ctypes.data_as(pointer),
        )
        assert written == out.nbytes, (written, out.nbytes)
        return out


def _tokenizer(folder: Path, bpe: bool) -> None:
    text = "a tea at ten, a net eaten\n"
    if bpe:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=20, special_tokens=["<|end|>"])
        tokenizer.train_from_iterator([text] * 20, trainer)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        fast.save_pretrained(folder)
        return
    (folder / "text.txt").write_text(text * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def _model(folder: Path, kind: str, dtype: torch.dtype, **settings: Any) -> dict[str, torch.Tensor]:
    """A model of transformers with random weights, norms too, saved; its tensors as saved."""
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **settings})
    name = f"{kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, name)(config)
    biases = (one for name, one in model.named_buffers() if name.endswith("correction_bias"))
    for parameter in (*model.parameters(), *biases):
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(folder)
    _tokenizer(folder, bpe=kind in _BPE)
    return load_file(folder / "model.safetensors")


def _dequantized(files: list[Path]) -> Arrays:
    """Every tensor as gguf-py has it, those in blocks as float32."""
    found: Arrays = {}
    for file in files:
        for tensor in gguf.GGUFReader(file).tensors:
            plain = tensor.data.dtype != np.uint8
            if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
                found[tensor.name] = tensor.data.view(np.uint16)
            elif plain:
                found[tensor.name] = tensor.data
            else:
                found[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return found


def _requantize(machine: Machine, source: Path, target: Path, types: list[str]) -> None:
    """A file of float32 again, its matrices in types by turns, where their rows are whole blocks."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kinds = field.types
        last = kinds[-1] if len(kinds) > 1 else None
        writer.add_key_value(field.name, field.contents(), kinds[0], last)
    turn = 0
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        type = gguf.GGMLQuantizationType[types[turn % len(types)]]
        if tensor.data.shape[-1] % gguf.GGML_QUANT_SIZES[type][0]:
            writer.add_tensor(tensor.name, tensor.data.astype(np.float16))
            continue
        turn += 1
        writer.add_tensor(tensor.name, machine.quantize(tensor.data, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _moved(stored: Arrays, weights: dict[str, torch.Tensor], file: Path, config: dict) -> Arrays:
    """Tensors of a file under the names of a model, its rows and experts where the model has them."""
    architecture = gguf.GGUFReader(file).get_field("general.architecture").contents()
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config["num_hidden_layers"])
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    model: Arrays = {}
    for name in weights:
        whole, expert = re.subn(r"experts\.\d+\.", "experts.", name)
        array = stored[names.get_name(whole, (".weight", ".bias"))]
        if expert:
            array = array[int(re.search(r"experts\.(\d+)", name)[1])]
        if architecture == "llama" and (found := re.search(r"(q|k)_proj", name)):
            rows = array.reshape(heads[found[1]], -1, 2, *array.shape[1:])
            array = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
        model[name] = array
    return model


def _as_loaded(name: str, weight: torch.Tensor, kind: str) -> np.ndarray:
    """A weight as it was, but for Gemma's norms: llama.cpp stores one more, rounded to float32."""
    values = weight.float()
    is_one_more = kind.startswith("Gemma") and name.endswith("norm.weight")
    return (values + 1 - 1 if is_one_more else values).numpy()


def _digests(arrays: Arrays) -> dict[str, list[Any]]:
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    return {name: [list(array.shape), digests[name]] for name, array in arrays.items()}


CASES: dict[str, Callable[[Machine, Path], tuple[Arrays, dict[str, Any]]]] = {}


def _case(
    name: str,
    kind: str,
    mapping: str,
    type: str = "f32",
    blocks: list[str] | None = None,
    arguments: tuple[str, ...] = (),
    **settings: Any,
) -> None:
    def made(machine: Machine, folder: Path) -> tuple[Arrays, dict[str, Any]]:
        dtypes = {"f16": torch.float16, "bf16": torch.bfloat16}
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "model"
            weights = _model(source, kind, dtypes.get(type, torch.float32), **settings)
            config = json.loads((source / "config.json").read_text())
            plain = Path(scratch) / "plain.gguf" if blocks else folder / f"{name}.gguf"
            machine.convert(source, plain, type, *arguments)
            if blocks:
                _requantize(machine, plain, folder / f"{name}.gguf", blocks)
        files = sorted(folder.iterdir())
        model: Arrays = {key: _as_loaded(key, weight, kind) for key, weight in weights.items()}
        if blocks or type == "q8_0":
            model = _moved(_dequantized(files), weights, files[0], config)
        truth = {f"param/{key}": array for key, array in _dequantized(files).items()}
        how = f"--outtype {type}" + (f", then ggml's {', '.join(blocks)}" if blocks else "")
        return truth, {
            "about": f"{kind} by convert_hf_to_gguf.py {' '.join([how, *arguments])}",
            "at": f"ckpt/{files[0].name}",
            "options": {"dequantize": "float32"},
            "dtypes": {key: "bfloat16" for key, array in truth.items() if array.dtype == np.uint16},
            "mapping": mapping,
            "config": config,
            "model": _digests({key: array.astype(np.float32) for key, array in model.items()}),
        }

    CASES[name] = made


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_case("llama_f32", "Llama", "gguf-llama-to-hf")
_case("llama_tied_f16", "Llama", "gguf-llama-to-hf", "f16", tie_word_embeddings=True, head_dim=12)
_case("llama31_bf16", "Llama", "gguf-llama-to-hf", "bf16", rope_parameters=_LLAMA3, head_dim=16)
_case("llama_bias_f32", "Llama", "gguf-llama-to-hf", attention_bias=True, mlp_bias=True)
_case("mistral_f32", "Mistral", "gguf-llama-to-hf")
_case("mixtral_f32", "Mixtral", "gguf-mixtral-to-hf", num_local_experts=3)
_case("qwen2_f32", "Qwen2", "gguf-qwen2-to-hf", rope_theta=1e6)
_case("qwen2_split", "Qwen2", "gguf-qwen2-to-hf", arguments=("--split-max-tensors", "7"),
    tie_word_embeddings=True)  # fmt: skip
_case("qwen3_bf16", "Qwen3", "gguf-qwen3-to-hf", "bf16", head_dim=8, rope_theta=1e6)
_case("qwen3_moe_f16", "Qwen3Moe", "gguf-qwen3-moe-to-hf", "f16", num_experts=3,
    num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, head_dim=8)  # fmt: skip
_case("gemma_bf16", "Gemma", "gguf-gemma-to-hf", "bf16", head_dim=8)
_case("gemma_f32", "Gemma", "gguf-gemma-to-hf", head_dim=8)
_case("gemma2_bf16", "Gemma2", "gguf-gemma2-to-hf", "bf16", head_dim=8, query_pre_attn_scalar=8)
_case("gemma3_bf16", "Gemma3Text", "gguf-gemma3-to-hf", "bf16", head_dim=8, query_pre_attn_scalar=8)
_case("gpt_oss_bf16", "GptOss", "gguf-gpt-oss-to-hf", "bf16", num_hidden_layers=2,
    num_local_experts=3, num_experts_per_tok=2, head_dim=8)  # fmt: skip
_case("glm4_f32", "Glm4", "gguf-glm4-to-hf", head_dim=8, attention_bias=True, pad_token_id=0)
_case("phi3_f16", "Phi3", "gguf-phi3-to-hf", "f16", pad_token_id=0)
_MLA = {"num_hidden_layers": 2, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "q_lora_rank":
    12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_group": 2, "topk_group": 1}  # fmt: skip
_case("deepseek3_bf16", "DeepseekV3", "gguf-deepseek2-to-hf", "bf16", n_shared_experts=1, **_MLA)
_case("deepseek2_f32", "DeepseekV2", "gguf-deepseek2-to-hf", n_shared_experts=2, **{**_MLA,
    "q_lora_rank": None})  # fmt: skip
_LLAMA4 = {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 12}
_LLAMA4 |= {"head_dim": 8, "intermediate_size": 8}
_case("llama4_scout_f32", "Llama4Text", "gguf-llama4-to-hf", num_hidden_layers=2, **_LLAMA4)
_case("llama4_maverick_bf16", "Llama4Text", "gguf-llama4-to-hf", "bf16", num_hidden_layers=4,
    interleave_moe_layer_step=2, **_LLAMA4)  # fmt: skip
_case("llama_q8_0", "Llama", "gguf-llama-to-hf", "q8_0", **{**_NARROW, "num_hidden_layers": 1})
_case("llama_k", "Llama", "gguf-llama-to-hf", blocks=_K, **_WIDE)
_case("qwen2_k", "Qwen2", "gguf-qwen2-to-hf", blocks=_K[::-1], **_WIDE)
_case("llama_blocks_of_32", "Llama", "gguf-llama-to-hf", blocks=_SMALL, **_NARROW)
_case("qwen3_blocks_of_32", "Qwen3", "gguf-qwen3-to-hf", blocks=_SMALL[::-1], **_NARROW)
_case("qwen3_moe_k", "Qwen3Moe", "gguf-qwen3-moe-to-hf", blocks=["Q4_K", "Q6_K"], num_experts=2,
    num_experts_per_tok=1, moe_intermediate_size=8, norm_topk_prob=True, **_WIDE)  # fmt: skip


def main() -> int:
    parser = writing.arguments(__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("libggml", type=Path)
    given = parser.parse_args()
    machine = Machine(given.llama_cpp, given.libggml)

    def write(name: str, folder: Path) -> None:
        (folder / "ckpt").mkdir()
        torch.manual_seed(sum(name.encode()))
        truth, about = CASES[name](machine, folder / "ckpt")
        about["writer"] = writing.versions("torch", "transformers", "gguf")
        writing.write_case(folder, truth, about)

    return len(writing.write_each(writing.chosen(CASES, given.only), given.out, write))


if __name__ == "__main__":
    sys.exit(main())
