"""Print docs/formats.md from a run over every case: `python tests/formats_table.py >
docs/formats.md`.
"""

import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from jax.sharding import Mesh

import jax_ucp as ucp
from cases import Case, Outcome, every, mesh_4_2, outcome
from deepspeed_cases import word
from folder_cases import CASES, RIGHT
from jax_ucp.errors import UCPError
from jax_ucp.formats.huggingface.quantization import SCHEMES

PAGE = Path(__file__).parent.parent / "docs" / "formats.md"

TEXT = """# What is read, case by case

Each line is a checkpoint in `tests/data`, written by the library itself, with the state of the live processes beside
it. Numbers are arrays (parameters and their states) that are that state, bit for bit: when read, when restored
straight onto a mesh of (4, 2) devices, and when converted first and restored from that. *Accounted for* says that every
stored item is mapped, kept as an extra, or skipped for a reason. The table is printed by `python
tests/formats_table.py > docs/formats.md`; tests compare lines of it with a run, and see that no case is missing.

{table}

## Writers of DeepSpeed's files

Run: DeepSpeed 0.19.8 and 0.18.2, on CPUs, with `tests/generators/deepspeed.py`; some parts that need a GPU were replaced
by plain arithmetic, as a case's line says. What opens beside Adam, Lion and SGD, and what does not:

| what | | |
|---|---|---|
| Muon | opens | ZeRO-1 and 2 have the momentum of a matrix whole on each rank that has a part of it: copies are compared. Before 0.19.3 ranks have different ones of a matrix in two partitions, which is refused; `on_conflict='master'` takes the first rank's |
| 8-bit optimizers of bitsandbytes 0.50 | opens | as codes, tables and scales; `dequantize='float32'` gives the numbers. AdEMAMix's first moments stay codes |
| Adafactor | opens | its RMS is of a rank's partition, and an extra of each file |
| 1-bit Adam, 0/1 Adam, 1-bit LAMB | opens | removed from DeepSpeed after 0.19.5; the errors of compression are rank 0's, as saved |
| MiCS | opens | removed from DeepSpeed after 0.19.5 |
| ZeRO++ | opens | the second partitions (hpZ) and quantised communication (qwZ, qgZ) are in no file; frozen weights under `zero_quantized_nontrainable_weights` are saved without their scales and refused |
| ZenFlow | `on_conflict=` | masters may be behind the weights; with `overlap_step` no moments are saved |
| SuperOffload | opens, from the source of 0.19.8 | the files are ZeRO-3's; moments are in another process and not saved, which a note says |
| NVMe | opens | ZeRO-3 without tensor or expert parallelism, with `offloaded_tensors` beside the files |

## Folders of weights

What is read of a folder with safetensors or with files of torch.save is decided by names and indexes: what transformers
would load, and where it would load nothing, numbered parts that are all there, or the weights of the one model. What an
index or a name says is missing is an error. Another whole save of the same model is compared: a sample of each tensor
when the folder is opened, all of it by `verify` and by a conversion. What else belongs to it is named in a note.

| folder in `tests/data/folders` | | |
|---|---|---|
{folders}

## Quantised weights

A weight that is stored as codes and scales is refused as a weight, in any format, wherever weights are asked for:
restoring, mapping, exporting, converting. `dequantize=False` (`--no-dequantize`) gives the parts as they are stored,
under `stored` in place of `param`. Recognised by names, dtypes and shapes are:

{schemes}

Where a config declares a quantisation, whatever may be codes is refused too, such as fp8 without its scales. An fp8
tensor without scales, and without such a config, is a weight like any other.

## What no reader can see

A file that is missing, cut short, of another world size, step or run is refused by name, or a restore finds it by a
sample of its copies, a conversion by all of them. These are not, because nothing that is stored tells:

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

Hostile files are a matter of their own: `python tests/fuzz.py 100000` makes that many of them, and
[design/015-hostile-files.md](design/015-hostile-files.md) says what is refused.
"""


def line(case: Case, found: Outcome) -> str:
    """The case's line of the table."""
    cells = [f"`{case.family}/{case.name}`", found.format, _features(case), str(found.arrays or "")]
    said = case.about["options"] if case.is_generated else word(case.path)
    if said:
        words = ", ".join(f"{name}={value!r}" for name, value in said.items())
        cells[2] += f"; with `{words}`"
    if found.equal is None:
        reason = (
            found.refusal.partition("\n")[0]
            .replace(str(case.path), "")
            .replace("|", "\\|")
            .strip("/: ")
        )
        return "| " + " | ".join([*cells, f"refused: {reason:.200}", "", "", ""]) + " |"
    same = [_all(found.equal.get(way), found.arrays) for way in ("read", "restored", "converted")]
    return "| " + " | ".join([*cells, *same, "yes" if found.accounted else "no"]) + " |"


def _all(equal: int | None, arrays: int) -> str:
    return "" if equal is None else "all" if equal == arrays else f"{equal} of {arrays}"


def _features(case: Case) -> str:
    """What the case shows, in the words of whoever made it, or by its degrees of parallelism."""
    about = case.about
    if text := about.get("about") or about.get("description"):
        return str(text).partition(" {")[0].replace("|", "/")
    if case.is_generated:
        return ", ".join(f"{name} {version}" for name, version in about["writer"].items())
    degrees = [
        f"{name} {n}"
        for name, n in about["parallel"].items()
        if name != "world" and isinstance(n, int) and n > 1
    ]
    optimizer = about["optimizer"]
    said = [about["ckpt_format"], *(degrees or ["one rank"]), *dict.fromkeys(optimizer["classes"])]
    return ", ".join(said + ([optimizer["sharding_type"]] if optimizer["sharding_type"] else []))


def row(case: Case, mesh: Mesh) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return line(case, outcome(case, mesh, Path(folder) / "out"))


def folder_row(case: str) -> str:
    """The line of a folder: how it is read and what is noted, or why it is refused."""
    path = CASES / case / RIGHT[case].at
    try:
        checkpoint = ucp.open(path)
        checkpoint.plan()
        what, said = "read", "; ".join(checkpoint.notes)
    except UCPError as error:
        what, said = "refused", str(error)
    words = said.replace(f"{path}/", "").replace(str(path), "the folder").replace("|", "\\|")
    return f"| `{case}` | {what} | {words:.300} |"


def text() -> str:
    """The page without its table of cases."""
    schemes = "\n".join(f"- {name}" for name in sorted({scheme.name for scheme in SCHEMES}))
    folders = "\n".join(map(folder_row, RIGHT))
    return TEXT.replace("{folders}", folders).replace("{schemes}", schemes)


def page() -> str:
    mesh = mesh_4_2()
    head = (
        "| case | format | what it shows | arrays | equal when read | restored | converted,"
        " restored | accounted for |"
    )
    return text().replace(
        "{table}", "\n".join([head, "|---" * 8 + "|", *(row(case, mesh) for case in every())])
    )


if __name__ == "__main__":
    print(page(), end="")
