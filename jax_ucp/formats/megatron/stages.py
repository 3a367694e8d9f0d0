"""Which parts of a model each pipeline stage has. Integers only.

Layers are in order of model chunk (virtual pipeline), then stage, however many each chunk has.

Facts: `get_num_layers_to_build` in `megatron/core/transformer/transformer_block.py`,
`get_transformer_layer_offset` in `transformer_layer.py`, `pipeline_parallel_layer_layout.py`, and
`megatron/core/models/gpt/gpt_model.py` of Megatron-LM core_v0.13.0 to core_v0.19.0.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.files import MAX_RANKS, Args
from jax_ucp.formats.torch_save.unpickle import Record

LAYOUT = "pipeline_model_parallel_layout"
# One letter for each part of a chunk: the embedding, a layer, a layer of multi-token prediction,
# the output layer with the loss.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,6})|([^()])\*(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a model chunk of a stage has: decoder layers, and other parts of the model."""

    layers: range
    embedding: bool
    final_norm: bool
    mtp: bool
    output: bool


def stage_chunks(args: Args) -> dict[tuple[int, int], Chunk]:
    """The parts of each (chunk, pipeline stage), in the order of chunks, then stages.

    Raises FormatError where the args do not say how layers lie on stages.
    """
    letters = stage_letters(args)
    layers = sum(part.count("t") for part in letters)
    p = args.degree("pipeline_model_parallel_size")
    if len(letters) % p:
        raise FormatError(
            f"args.{LAYOUT} has {len(letters)} parts, which {p} pipeline stages do not divide"
        )
    mtp = bool(args.optional("mtp_num_layers"))
    chunks: dict[tuple[int, int], Chunk] = {}
    first = 0
    for i, part in enumerate(letters):
        own = range(first, first := first + part.count("t"))
        # With multi-token prediction the norm is where the last layer is, else before the output.
        norm = layers - 1 in own if mtp else "L" in part
        chunks[divmod(i, p)] = Chunk(own, "E" in part, norm, "m" in part, "L" in part)
    return chunks


def stage_letters(args: Args) -> list[str]:
    """The parts of each chunk of each stage, a letter each: `E`, `t` for a layer, `m`, `L`.

    Without a layout one `m` stands for all layers of multi-token prediction.

    >>> stage_letters(Args({"num_layers": 4, "pipeline_model_parallel_size": 2}))
    ['Ett', 'ttL']
    >>> stage_letters(Args({"pipeline_model_parallel_layout": "Et*2|(t|)*2mL"}))
    ['Ett', 't', 't', 'mL']
    """
    layout = args.optional(LAYOUT)
    if layout:
        return _of_layout(args, layout)
    p = args.degree("pipeline_model_parallel_size")
    v = args.degree("virtual_pipeline_model_parallel_size")
    layers = args.get("num_layers")
    if not isinstance(layers, int):
        lost = (
            "args.num_layers is missing"
            if args.fields
            else "common.pt has no args (other trainers write none)"
        )
        raise FormatError(
            f"{lost}: which layers each pipeline stage has is not known, nor what lies in its"
            " buffers"
        )
    if not 0 <= layers <= MAX_RANKS:
        raise FormatError(f"args.num_layers is {layers}: they are damaged")
    letters = ["t" * count for count in _chunk_layers(args, layers, p, v)]
    letters[0] = "E" + letters[0]
    letters[-1] += "mL" if args.optional("mtp_num_layers") else "L"
    return letters


def _of_layout(args: Args, layout: Any) -> list[str]:
    if isinstance(layout, Record):  # `PipelineParallelLayerLayout`, which keeps what it was told
        layout = layout.fields.get("input_data")
    rows = _unrolled(layout).split("|") if isinstance(layout, str) else layout
    if not isinstance(rows, list):
        raise _no_layout(args)
    letters = [_row_letters(args, row) for row in rows]
    counts = Counter("".join(letters))
    layers = args.optional("num_layers")
    if counts["E"] != 1 or counts["L"] != 1 or layers not in (None, counts["t"]):
        raise _no_layout(args)
    return letters


def _no_layout(args: Args) -> FormatError:
    return FormatError(
        f"args.{LAYOUT} is {args.fields[LAYOUT]!r:.80}: how layers lie on stages by that is not"
        " known here, nor what lies in their buffers"
    )


def _unrolled(layout: str) -> str:
    """A layout without commas and repetitions, first those of groups, then of letters."""
    layout = layout.replace(",", "").replace(" ", "")
    for _ in range(2):
        repeats = [int(match[2] or match[4]) for match in _REPEATED.finditer(layout)]
        if sum(repeats) * len(layout) > MAX_RANKS:
            raise FormatError(f"args.{LAYOUT} has {sum(repeats)} repetitions: they are damaged")
        layout = _REPEATED.sub(_repeat, layout)
    return layout


def _repeat(match: re.Match[str]) -> str:
    return match[1] * int(match[2]) if match[2] else match[3] * int(match[4])


def _row_letters(args: Args, row: Any) -> str:
    """The letters of a part, which is told as text, or as a list of names or letters."""
    names = row if isinstance(row, list) else list(row) if isinstance(row, str) else [row]
    letters = [_LETTERS.get(str(name).strip().lower(), name) for name in names]
    if not all(letter in _LETTERS.values() for letter in letters):
        raise _no_layout(args)
    return "".join(letters)


def _chunk_layers(args: Args, layers: int, p: int, v: int) -> list[int]:
    """The layers of each chunk, in order of chunk, then stage.

    As many in each, unless args fix the number of the first or last stage, or count the embedding
    or the loss as a layer.
    """
    fixed = _fixed_layers(args, p)
    embedding, loss = (_counts_as_layer(args, p, part) for part in ("embedding", "loss"))
    rest = layers + embedding + loss - sum(fixed.values())
    each, left = divmod(rest, max(1, (p - len(fixed)) * v))
    counts = [fixed.get(stage, each * v) // v for stage in range(p)] * v
    counts[0] -= embedding
    counts[-1] -= loss
    uneven = any(n % v for n in fixed.values())
    if left or uneven or sum(counts) != layers or min(counts) < 0:
        raise FormatError(
            f"{layers} layers do not divide over {p} pipeline stages of {v} model chunks"
        )
    return counts


def _counts_as_layer(args: Args, p: int, part: str) -> bool:
    """Whether the embedding or the loss counts as a layer of its stage."""
    return bool(p > 1 and args.optional(f"account_for_{part}_in_pipeline_split"))


def _fixed_layers(args: Args, p: int) -> dict[int, int]:
    """The layers of the first and the last stage, where args fix them."""
    ends = {0: _end_layers(args, "first"), p - 1: _end_layers(args, "last")} if p > 1 else {}
    return {stage: n for stage, n in ends.items() if n is not None}


def _end_layers(args: Args, end: str) -> int | None:
    """The layers that args fix for the first or last stage; the model's config says it so too."""
    names = f"decoder_{end}_pipeline_num_layers", f"num_layers_in_{end}_pipeline_stage"
    values = (args.optional(name) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
