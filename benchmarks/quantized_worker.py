"""The library's side of `benchmarks/quantized.py`: what one dequantisation takes, on one thread.

python quantized_worker.py SCHEME FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]


def block_fp8(t: Tensors) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rule = Fp8Dequantize(None)
    return rule._dequantize_one(t["w.weight"], t["w.weight_scale_inv"], torch.bfloat16)


def _compressed(t: Tensors, compressor: str, **weights: object) -> torch.Tensor:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    rule = BaseCompressor.get_value_from_registry(compressor)
    return rule.decompress({name[2:]: tensor for name, tensor in t.items()}, scheme)["weight"]


def ct_int8(t: Tensors) -> torch.Tensor:
    return _compressed(t, "int-quantized", num_bits=8, strategy="channel")


def ct_int4(t: Tensors) -> torch.Tensor:
    return _compressed(t, "pack-quantized", num_bits=4, strategy="group", group_size=128)


def ct_nvfp4(t: Tensors) -> torch.Tensor:
    said = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return _compressed(t, "nvfp4-pack-quantized", **said)


def mxfp4(t: Tensors) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(t["w_blocks"], t["w_scales"])


def gptq(t: Tensors) -> torch.Tensor:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    rows, columns = t["w.qweight"].shape[1], t["w.g_idx"].shape[0]
    sizes = {"in_features": columns, "out_features": rows}
    module = TorchLinear(bits=4, group_size=128, sym=False, desc_act=False, **sizes)
    for name, tensor in t.items():
        module.register_buffer(name[2:], tensor)
    module.post_init()
    return module.dequantize_weight().T.contiguous()


def awq(t: Tensors) -> torch.Tensor:
    from awq.utils.packing_utils import dequantize_gemm

    made = dequantize_gemm(t["w.qweight"], t["w.qzeros"], t["w.scales"], 4, 128)
    return made.T.contiguous()


def bnb_nf4(t: Tensors) -> torch.Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    parts = {name: tensor for name, tensor in t.items() if name != "w.weight"}
    return dequantize_4bit(t["w.weight"], QuantState.from_dict(parts, torch.device("cpu")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rule, file = globals()[sys.argv[1]], f"{sys.argv[2]}/model.safetensors"
    rule(load_file(file))  # imports, and warms
    wall, cpu = time.perf_counter(), time.process_time()
    rule(load_file(file))
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))
