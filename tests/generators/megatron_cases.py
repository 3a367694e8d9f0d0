"""What cases of Megatron share: arguments, and how each is written, by a process of its own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ranks
import writing

STEPS, VOCAB = 3, 101
ALWAYS = """--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
--global-batch-size 8 --train-iters 100 --lr 0.01 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8 --distributed-backend gloo
--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-persist-layer-norm"""
_ROTARY = "--swiglu --normalization RMSNorm --position-embedding-type rope"
TIED_LLAMA = _ROTARY
UNTIED = "--untie-embeddings-and-output-weights"
LLAMA = f"{_ROTARY} --disable-bias-linear --group-query-attention --num-query-groups 2 {UNTIED}"
GPT = "--position-embedding-type learned_absolute --normalization LayerNorm"
MLA = f"""{_ROTARY} --disable-bias-linear {UNTIED} --multi-latent-attention --kv-lora-rank 10
--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"""
MOE = "--num-experts 4 --moe-ffn-hidden-size 12 --moe-router-topk 2 --moe-token-dispatcher-type"
GATHER = f"{MOE} allgather"  # the other waits for events of CUDA
MOE = f"{MOE} alltoall"
GROUPED, SHARED = f"{MOE} --moe-grouped-gemm", "--moe-shared-expert-intermediate-size 16"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
GDN = """--experimental-attention-variant gated_delta_net --linear-attention-freq 2
--linear-conv-kernel-dim 2 --linear-key-head-dim 2 --linear-value-head-dim 3
--linear-num-key-heads 2 --linear-num-value-heads 4 --attention-output-gate"""
DSA = """--experimental-attention-variant dsa --q-lora-rank 12 --dsa-indexer-n-heads 2
--dsa-indexer-head-dim 8 --dsa-indexer-topk 4"""
PA = "--use-precision-aware-optimizer"


def parallel(tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 0, cp: int = 1) -> str:
    words = {"tensor-model": tp, "pipeline-model": pp, "expert-model": ep, "context": cp}
    text = " ".join(f"--{kind}-parallel-size {n}" for kind, n in words.items() if n > 1)
    return f"{text} --expert-tensor-parallel-size {etp}" if etp else text


def buckets(size: int) -> str:
    return f"--overlap-grad-reduce --ddp-bucket-size {size}"


def newest(source: Path) -> str:
    """The folder of the newest release: `core_v0.19.2` is after `core_v0.9.0`."""
    tags = [folder.name for folder in source.iterdir()]
    return max(tags, key=lambda tag: [int(number) for number in re.findall(r"\d+", tag)])


def main(
    script: str,
    doc: str,
    cases: Mapping[str, Any],
    write: Callable[[Any, Path, str], None],
    devices: Callable[[Any], str] = lambda case: "1",
) -> int:
    """How many of the cases that were chosen are not written. A process is started for each, and
    calls `write` with the case, its folder and the release.
    """
    parser = writing.arguments(doc)
    parser.add_argument("--source", type=Path, required=True, help="Megatron-LM's source by tag")
    parser.add_argument("--tag", help="the release, for cases that name none: else the newest")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # in a process of its own
    given = parser.parse_args()
    tag = given.tag or newest(given.source)
    if given.case:
        case = cases[given.case]
        write(case, given.out / given.case, case.tag or tag)
        return 0
    failed = 0
    for name in writing.chosen(cases, given.only):
        source = given.source.resolve() / (cases[name].tag or tag)
        more = ["--source", given.source.resolve(), "--tag", tag, "--case", name]
        if source.is_dir():
            arguments = [Path(script).resolve(), given.out, *more]
            settings = {"CUDA_DEVICE_MAX_CONNECTIONS": devices(cases[name])}
            failed += not ranks.write_case(given.out / name, arguments, source, **settings)
    return failed
