"""Takes the screens of the documentation, from runs of the commands on a terminal of 80 columns.

python docs/screens.py                # docs/screens.md
python docs/screens.py --pictures     # docs/pictures/report-*.png too, with playwright and chromium
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_ucp as ucp

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE = DOCS / "screens.md"
COLUMNS = 80
MAX_LINES = 40  # of one screen
SIZE: ViewportSize = {"width": 1000, "height": 2200}  # of a picture, in pixels
COLORS = 256
STYLE_CODES = re.compile(r"\x1b\[[0-9;]*m")
MESH = "--mesh data=2,model=2 --rule 'weight$=data,model'"
LAYERS = 303
MATRICES = [
    *(f"attention.{name}" for name in ("query", "key", "value", "out")),
    *(f"mlp.{name}" for name in ("router", "gate", "up", "down")),
    *(f"memory.{name}" for name in ("read", "write", "forget")),
]


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is shown, and another that it is compared with."""

    title: str
    path: str
    against: str
    plan: str = MESH
    diff: str = ""

    def commands(self) -> list[str]:
        return [
            f"inspect {self.path}",
            f"plan {self.path} {self.plan}",
            f"diff {self.path} {self.against}{self.diff}",
        ]


SUBJECTS = {
    "zero3": Subject(
        "DeepSpeed, ZeRO-3",
        "tests/data/deepspeed/z3_bf16_dp2",
        "tests/data/deepspeed/z2_bf16_dp3",
        diff=" --only '^(param|exp_avg)/(layers|embed)'",
    ),
    "megatron": Subject(
        "Megatron, two tensor-parallel ranks with a distributed optimizer",
        "tests/data/megatron/legacy_tp2_dp2_distopt_bf16/ckpt",
        "tests/data/megatron/legacy_tp2_pp1_bf16/ckpt",
    ),
    "hub": Subject(
        "A model as it is on the hub",
        "tests/data/torch/hf_llama/ckpt",
        "tests/data/torch/hf_llama_bf16_tied/ckpt",
    ),
    "universal": Subject(
        "10,000 arrays in the universal format",
        "run/1000",
        "run/1001",
        plan="--mesh data=16,model=16 --rule 'layers=data,model' --hosts 8",
    ),
}


@dataclass(frozen=True)
class View:
    """A picture of a page that no section has."""

    says: str
    command: str
    size: ViewportSize
    scheme: Literal["light", "dark"] = "light"


VIEWS = {
    "experts": View("A model with experts, one of them dead", "report experts", SIZE),
    "adapter": View("An adapter", "report tests/data/adapters/lora/adapter", SIZE),
    "against": View("Two steps of a run", "report run/1000 --against run/1001", SIZE),
    "dark": View("In the dark", f"report {SUBJECTS['zero3'].path}", SIZE, "dark"),
    "phone": View("On a phone", f"report {SUBJECTS['zero3'].path}", {"width": 390, "height": 1800}),
}


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder that looks like a clone of the repository with a run in it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        (work / "tests").symlink_to(ROOT / "tests")
        yield work


def save_run(work: Path) -> None:
    """Save 10,000 arrays as `run/1000`, and as `run/1001` with one bit of one of them flipped."""
    generator = np.random.default_rng(0)
    names = [f"layers.{layer}.{name}" for layer in range(LAYERS) for name in MATRICES]
    tree: dict = {
        state: {name: generator.standard_normal((16, 16), np.float32) for name in names}
        for state in ("param", "exp_avg", "exp_avg_sq")
    }
    tree["exp_avg_sq"] = {name: moment**2 for name, moment in tree["exp_avg_sq"].items()}
    tree["step"] = {"count": np.int32(1000)}
    _save(tree, work / "run" / "1000")
    tree["exp_avg"]["layers.217.mlp.up"].view(np.uint32)[7, 3] ^= 1
    _save(tree, work / "run" / "1001")


def save_experts(work: Path) -> None:
    """Save a model of six layers of 16 experts as `experts`; expert 7 of layer 4 is zeros."""
    generator = np.random.default_rng(0)
    tree: dict = {"embed.weight": generator.standard_normal((64, 32), np.float32)}
    for layer in range(6):
        at = f"layers.{layer}"
        for name in ("q", "k", "v", "o"):
            shape = (32, 32)
            tree[f"{at}.attention.{name}.weight"] = generator.standard_normal(shape, np.float32)
        for expert in range(16):
            values = generator.standard_normal((64, 32), np.float32) * (1 + layer)
            values[:] = 0 if (layer, expert) == (4, 7) else values
            tree[f"{at}.mlp.experts.{expert}.up.weight"] = values
            tree[f"{at}.mlp.experts.{expert}.down.weight"] = values.T / 2
    _save({"param": tree}, work / "experts")


def _save(tree: dict, path: Path) -> None:
    ucp.Checkpoint.of(jax.tree.map(jnp.array, tree)).save(path)


def on_a_terminal(command: str, work: Path) -> str:
    """What `jax-ucp COMMAND` writes to a terminal of 80 columns, without styles and progress."""
    near, far = pty.openpty()
    terminal = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "NO_COLOR": "1"}
    environment = os.environ | terminal | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-m", "jax_ucp", *shlex.split(command)]
    with tempfile.TemporaryFile() as notes:
        process = subprocess.Popen(arguments, cwd=work, env=environment, stdout=far, stderr=notes)
        os.close(far)
        printed = b"".join(_until_closed(near))
        os.close(near)
        process.wait()
        notes.seek(0)
        told = notes.read().decode()
    if process.returncode not in (0, 1) or "Traceback" in told:
        raise RuntimeError(f"jax-ucp {command}:\n{told}")
    return STYLE_CODES.sub("", printed.decode().replace("\r\n", "\n"))


def _until_closed(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(terminal, 1 << 16)
        except OSError:  # the terminal's other side is closed
            return


def screen(printed: str, work: Path) -> list[str]:
    """The lines that 80 columns show, the first of them where there are many."""
    for folder in (work, ROOT):
        printed = printed.replace(f"{folder}/", "")
    lines = [part for line in printed.splitlines() for part in _folded(line.rstrip())]
    more = len(lines) - MAX_LINES
    return lines if more <= 1 else [*lines[:MAX_LINES], f"... and {more} more lines"]


def _folded(line: str) -> list[str]:
    """A line as a terminal shows it that is too narrow for it."""
    return [line[i : i + COLUMNS] for i in range(0, max(1, len(line)), COLUMNS)]


def section(name: str, work: Path) -> str:
    """What the page has of one checkpoint."""
    subject = SUBJECTS[name]
    parts = [f"## {subject.title}\n"]
    for command in subject.commands():
        lines = "\n".join(screen(on_a_terminal(command, work), work))
        parts.append(f"```sh\njax-ucp {command}\n```\n\n```text\n{lines}\n```\n")
    parts.append(f"```sh\njax-ucp report {subject.path}\n```\n")
    parts.append(f"![The page about {subject.path} in a browser](pictures/report-{name}.png)\n")
    return "\n".join(parts)


HEAD = f"""# Screens

What the commands print on a terminal of {COLUMNS} columns, the first {MAX_LINES} lines of each, and
how the page of `jax-ucp report` begins, for four checkpoints; then more pages, also in the dark and
on a phone. `docs/screens.py` makes this page, and the tests compare it. It makes `experts` too, and
`run`, which has 10,000 arrays in step 1000, and the same in step 1001 with one bit of one element
flipped.
"""


def written(names: Sequence[str] = tuple(SUBJECTS)) -> str:
    """The page, or the sections of some checkpoints with its head."""
    with working_folder() as work:
        if "universal" in names:
            save_run(work)
        return "\n".join([HEAD, *(section(name, work) for name in names)])


def elsewhere() -> str:
    """The end of the page: pictures of other pages."""
    shown = [
        f"### {view.says}\n\n```sh\njax-ucp {view.command}\n```\n\n"
        f"![{view.says}: the page in a browser](pictures/report-{name}.png)\n"
        for name, view in VIEWS.items()
    ]
    return "\n".join(["\n## More pages\n", *shown])


def take_pictures(folder: Path) -> list[Path]:
    """Save what a browser shows of each report, as `folder/report-NAME.png`."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with working_folder() as work, sync_playwright() as playwright:
        save_run(work)
        save_experts(work)
        # a container has no namespaces for chromium's own sandbox
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        plain = {name: View("", f"report {each.path}", SIZE) for name, each in SUBJECTS.items()}
        views = plain | VIEWS
        pictures = [folder / f"report-{name}.png" for name in views]
        for view, picture in zip(views.values(), pictures, strict=True):
            on_a_terminal(f"{view.command} -o report.html", work)
            report = work / "report.html"
            report.write_text(report.read_text().replace(f"{work}/", ""))
            page = browser.new_page(viewport=view.size, color_scheme=view.scheme)
            page.goto(report.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.screenshot(path=picture)
            page.close()
            Image.open(picture).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(
                picture, optimize=True
            )
        browser.close()
    return pictures


if __name__ == "__main__":
    PAGE.write_text(written() + elsewhere())
    if "--pictures" in sys.argv[1:]:
        for taken in take_pictures(DOCS / "pictures"):
            print(f"{taken.name}: {taken.stat().st_size:,} bytes")
