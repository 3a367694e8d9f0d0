"""Draws the pictures of the documentation from what the package computes.

python docs/pictures/draw.py
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

import jax_ucp as ucp
from jax_ucp.layout.blocks import chunk_shapes
from jax_ucp.layout.box import Box
from jax_ucp.layout.patterns import Fused

HERE = Path(__file__).resolve().parent
CASE = HERE.parents[1] / "tests" / "data" / "deepspeed" / "z1_bf16_dp4_tinygroup"
COLORS = ("#7aa6e8", "#f0b860", "#8fd0a5", "#e39aa6", "#b9a3e3", "#a8b3bd")
MARK = ("#2f8a82", "#d79a3f", "#6a8ec0")  # of assets/mark.svg
# Read in light and in dark: on a page of its own the picture follows the system's colours.
STYLE = """text{font:14px system-ui,sans-serif;fill:#1b1f24}
.q{fill:#59636e}.l{stroke:#59636e;fill:none}
rect,.l{stroke:#1b1f24;stroke-width:.6}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.l{stroke:#a2abb5}.q{fill:#a2abb5}.i{fill:#1b1f24}}"""


def rect(x: float, y: float, width: float, height: float, color: str = "none") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    words = html.escape(words)
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = "", width: float = 1) -> str:
    look = f'stroke="{color}"' if color else 'class="l"'
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" {look} style="stroke-width:{width:g}"/>'


def bend(x1: float, y1: float, x2: float, y2: float) -> str:
    half = (x1 + x2) / 2
    return f'<path d="M{x1:g} {y1:g}C{half:g} {y1:g} {half:g} {y2:g} {x2:g} {y2:g}" class="l"/>'


def picture(width: int, height: int, says: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{html.escape(says)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def waist() -> str:
    """Formats on the left, what is done with arrays on the right, arrays cut in boxes between."""
    left = ["DeepSpeed", "Megatron", "PyTorch DCP", "safetensors", "Orbax, Flax", "universal"]
    right = ["restore onto a mesh", "map to a model", "convert", "export", "diff, report", "verify"]
    top, cell, middle = 20, 30, 105
    parts = []
    for i, (source, target) in enumerate(zip(left, right, strict=True)):
        y, to = top + 34 * i, middle - 40 + 16 * i
        parts += [text(92, y + 5, source, "", "end"), bend(100, y, 182, to)]
        parts += [bend(282, to, 354, y), text(362, y + 5, target)]
    for row, color in enumerate(MARK):
        for column in range(3):
            x, y = 187 + column * (cell + 1), middle - 46 + row * (cell + 1)
            parts.append(rect(x, y, cell, cell, color))
    parts.append(text(233, 190, "whole arrays,", "q", "middle"))
    parts.append(text(233, 208, "any box of them", "q", "middle"))
    return picture(
        505, 220, "Every format is read as arrays by box; everything is done with those.", parts
    )


def zero() -> str:
    """Which parameter lies where in the flat partitions of four ranks, of a real checkpoint."""
    checkpoint = ucp.open(CASE)
    of_rank: dict[str, list[tuple[int, int, int, str]]] = {}
    for i, (name, parameter) in enumerate(checkpoint.params.items()):
        for piece in parameter.where("exp_avg"):
            key = f"{piece.file}:{piece.item}"
            of_rank.setdefault(key, []).append(
                (piece.source.start[0], piece.source.stop[0], i, name)
            )
    flat = [pieces for pieces in of_rank.values() if max(stop for _, stop, *_ in pieces) > 1000]
    scale = 640 / max(stop for pieces in flat for _, stop, *_ in pieces)
    parts = []
    for rank, pieces in enumerate(flat):
        y = 20 + 60 * rank
        parts.append(text(10, y + 25, f"rank {rank}"))
        for start, stop, i, name in pieces:
            width = (stop - start) * scale
            parts.append(rect(70 + start * scale, y, width, 36, COLORS[i % len(COLORS)]))
            short = name.removesuffix(".weight").rsplit(".", 1)[-1]
            if width > 8 * len(short):
                parts.append(text(74 + start * scale, y + 23, short, "i"))
    y = 30 + 60 * len(flat)
    parts.append(
        text(
            70,
            y,
            "A colour that continues in the next row is one parameter on two ranks.",
            "q",
        )
    )
    return picture(730, y + 15, "Parameters in the flat partitions of ZeRO-1, rank by rank.", parts)


def qkv() -> str:
    """The rows of a fused query_key_value on two tensor-parallel ranks, and in the whole."""
    rows = {"q": 8, "k": 4, "v": 4}
    layout = Fused(0, rows, groups=4).join([(8, 1), (8, 1)])
    colors = dict(zip(rows, COLORS, strict=False))
    ends = {"q": 8, "k": 12, "v": 16}
    parts = [text(60, 24, "rank 0"), text(60, 224, "rank 1"), text(500, 24, "the parameter")]
    for each in sorted(layout.parts, key=lambda each: (each.input, each.source.offset)):
        low, (first, *_) = each.target.offset[0], each.source.offset
        high = low + each.sizes[0]
        part = next(name for name, end in ends.items() if low < end)
        y = 35 + 200 * each.input + 20 * first
        to = 35 + 22 * low
        height = 20 * (high - low)
        parts += [rect(60, y, 110, height, colors[part]), text(70, y + height / 2 + 5, part, "i")]
        parts += [
            rect(500, to, 110, 22 * (high - low), colors[part]),
            text(510, to + 16, part, "i"),
        ]
        parts.append(line(170, y + height / 2, 500, to + 11 * (high - low)))
    return picture(
        680,
        410,
        "Each rank holds q q k v of its groups; the parameter has all q, all k, all v.",
        parts,
    )


def chunks() -> str:
    """The chunks of one array, and the boxes of the devices of two meshes over them."""
    shape = (1024, 512)
    inner = chunk_shapes(shape, 4).inner
    parts = []
    for x, (down, across) in ((40, (4, 2)), (420, (2, 4))):
        scale = 280 / shape[0]
        high, wide = shape[0] * scale, shape[1] * scale
        parts.append(text(x, 28, f"a mesh of {down} x {across}"))
        parts.append(rect(x, 40, wide, high, COLORS[0]))
        parts += [
            line(x, 40 + y * scale, x + wide, 40 + y * scale) for y in range(0, shape[0], inner[0])
        ]
        parts += [
            line(x + i * scale, 40, x + i * scale, 40 + high) for i in range(0, shape[1], inner[1])
        ]
        for i in range(down + 1):
            parts.append(
                line(x, 40 + high * i / down, x + wide, 40 + high * i / down, "#b3141d", 3)
            )
        for i in range(across + 1):
            parts.append(
                line(x + wide * i / across, 40, x + wide * i / across, 40 + high, "#b3141d", 3)
            )
    parts.append(
        text(
            40,
            350,
            f"thin: chunks of {inner[0]} x {inner[1]} elements; red: what each device holds",
            "q",
        )
    )
    parts.append(
        text(40, 370, "No device of either mesh reads a chunk that it needs only a part of.", "q")
    )
    return picture(680, 385, "Chunks of an array of 1024 x 512 under two meshes.", parts)


def move() -> str:
    """A parameter that four devices saved by rows, and its parts on a mesh of 2 x 2."""
    saved = [Box((2 * i, 0), (2 * i + 2, 8)) for i in range(4)]
    wanted = [Box((4 * i, 4 * j), (4 * i + 4, 4 * j + 4)) for i in range(2) for j in range(2)]
    unit, array, restored, top = 15, 200, 385, 58
    parts = [
        text(5, 28, "saved on 4 devices"),
        text(array, 28, "one array"),
        text(restored, 28, "restored on 2 x 2"),
    ]
    for i, box in enumerate(saved):
        y, height = unit * box.start[0], unit * box.shape[0]
        parts += [
            rect(5, 40 + 40 * i, 120, height, COLORS[i]),
            text(15, 40 + 40 * i + 20, f"device {i}", "i"),
            line(125, 55 + 40 * i, array, top + y + 15),
            rect(array, top + y, 120, height, COLORS[i]),
        ]
    for box in wanted:
        i, j = box.start[0] // 4, box.start[1] // 4
        x, y = restored + 72 * j, 40 + 94 * i
        for color, stored in zip(COLORS, saved, strict=False):
            if part := stored.intersect(box):
                low = part.relative_to(box)
                height, width = (unit * n for n in low.shape)
                parts.append(rect(x, y + unit * low.start[0], width, height, color))
        parts.append(text(x, y + 78, f"device {2 * i + j}", "q"))
    last = wanted[-1]
    left, lower = array + unit * last.start[1], top + unit * last.start[0]
    height, width = (unit * n for n in last.shape)
    for x, y in ((left, lower), (restored + 72, 134)):
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" '
            'style="stroke:#b3141d;stroke-width:3"/>'
        )
    parts.append(
        text(5, 245, "Red: all that device 3 of the new mesh reads, parts of two rows.", "q")
    )
    says = "Four devices saved a parameter by rows; each of 2 x 2 reads only its own block."
    return picture(525, 255, says, parts)


PICTURES = {
    "waist.svg": waist,
    "zero.svg": zero,
    "qkv.svg": qkv,
    "chunks.svg": chunks,
    "move.svg": move,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
