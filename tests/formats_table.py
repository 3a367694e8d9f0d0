"""Writes docs/tested.md from a run over every case: `python tests/formats_table.py`."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from jax.sharding import Mesh

import jax_ucp as ucp
from cases import RULES, Case, every, flat, names_of
from helpers import mesh_of, restored_on
from jax_ucp.errors import UCPError
from jax_ucp.sharding.jax_versions import enable_x64

TESTED = Path(__file__).parent.parent / "docs" / "tested.md"
# The page's sections, and the formats whose cases they have.
SECTIONS = {
    "DeepSpeed": ("deepspeed",),
    "Megatron": ("megatron",),
    "Orbax, Flax, T5X and Paxml": ("orbax", "flax", "t5x", "zarr folders"),
    "Equinox": ("equinox",),
    "PyTorch DCP": ("dcp",),
    "DTensors of each rank": ("dtensors",),
    "safetensors": ("safetensors",),
    "torch.save": ("torch",),
    "GGUF": ("gguf",),
}

TESTED_TEXT = """# Every tested checkpoint

Each line is a checkpoint in `tests/data` that the library itself wrote, together with the state of the processes that trained. The columns say how
many of its arrays (parameters and their states) equal that state, bit for bit: when they are read, when they are restored onto a mesh of (4, 2)
devices, and when they are converted and then restored. *Accounted for* means that every stored item is mapped, kept as an extra, or
skipped with a reason. `python tests/formats_table.py` writes this page; tests compare lines of the table with a run, and check that no
case is missing. The pages of [formats](formats.md) say what is refused.

{table}

## Folders of weights

Folders as libraries and people leave them: [which files are read](formats/weights.md).

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
    """Open the case, read it, restore it on the mesh, convert it to `folder`, restore that."""
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
    reasons = [item.reason for item in checkpoint.inventory]
    told = len(set(places)) == len(places) and "not understood" not in reasons
    return Outcome(checkpoint.format, count, same, told)


def line(case: Case, found: Outcome) -> str:
    """The case's line of the table."""
    cells = [f"`{case}`", found.format, _features(case), str(found.arrays or "")]
    said = {} if case.family in ("gguf", "jax", "megatron") else case.options
    if said:
        cells[2] += "; with " + ", ".join(f"`{key}={value!r}`" for key, value in said.items())
    if found.equal is None:
        reason = " ".join(found.refusal.replace(str(case.path), "").replace("|", "\\|").split())
        refusal = f"refused: {reason.strip('/: '):.200}"
        return "| " + " | ".join([*cells, refusal, "", "", ""]) + " |"
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


def text_of_cases() -> str:
    """The page of tested checkpoints without its table of cases."""
    return TESTED_TEXT.replace("{folders}", "\n".join(map(folder_row, names_of("folders"))))


def page_of_cases(rows: Sequence[str]) -> str:
    """The page with these lines of its tables, each in the section of its format."""
    columns = "equal when read | restored | converted, restored | accounted for"
    head = f"| case | format | what it shows | arrays | {columns} |"
    tables = []
    for title, of in SECTIONS.items():
        own = [line for line in rows if format_of(line) in of]
        tables.append("\n".join([f"## {title}", "", head, "|---" * 8 + "|", *own]))
    return text_of_cases().replace("{table}", "\n\n".join(tables))


def format_of(row: str) -> str:
    return row.split(" | ")[1]


if __name__ == "__main__":
    mesh = mesh_of(4, 2)
    TESTED.write_text(page_of_cases([row(case, mesh) for case in every()]))
