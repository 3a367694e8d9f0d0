"""Runs the code of documentation pages, and writes below each block what it prints.

    python tests/tutorial_pages.py [PAGE ...]

A block of ```python or ```sh that is followed by a block of ```text prints that text. The blocks of
a page run one after the other, as if in a clone of the repository, in a folder of their own. Pages
that need a package which is not installed are left out, if they are not named.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tutorials", "reference", "formats")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md"))
PAGES = [page for page in PAGES if "```python" in page.read_text()]
NEEDS = {
    "maxtext": "maxtext",
    "equinox": "equinox",
}  # a page, and the package that it needs beside those of the tests
BLOCK = re.compile(r"```(python|sh)\n(.*?)```\n(?:\n?```text\n(.*?)```\n)?", re.DOTALL)
SHIM = """#!/bin/sh
exec {python} -c "import sys; sys.argv[0] = 'jax-ucp'; from jax_ucp.cli.main import main; main()" "$@"
"""


def can_run(page: Path) -> bool:
    """Whether the package that a page needs is installed."""
    return find_spec(NEEDS.get(page.stem, "jax_ucp")) is not None


def written(page: Path) -> str:
    """The page, with what its code prints now."""
    outputs = iter(outputs_of(page))
    return BLOCK.sub(lambda block: _with_output(block, next(outputs)), page.read_text())


def outputs_of(page: Path) -> list[str]:
    """What each block of the page prints, run in another process; raises where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        for name in ("tests", "examples"):
            (work / name).symlink_to(ROOT / name)
        (work / "bin").mkdir()
        (work / "bin" / "jax-ucp").write_text(SHIM.format(python=sys.executable))
        (work / "bin" / "jax-ucp").chmod(0o755)
        environment = os.environ | {
            "PATH": f"{work / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--run", str(page.resolve())],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            raise RuntimeError(f"{page}:\n{done.stderr}")
        return [_plain(output, work) for output in json.loads(done.stdout)]


def _plain(output: str, work: Path) -> str:
    """The output without the folder that it ran in, and without spaces at the ends of lines."""
    for folder in (work, ROOT):
        output = output.replace(f"{folder}/", "")
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def _with_output(block: re.Match[str], output: str) -> str:
    language, code, before = block.groups()
    text = f"\n```text\n{output}```\n" if before is not None else ""
    return f"```{language}\n{code}```\n{text}"


def _run(page: Path) -> None:
    """Run the blocks of a page here, and print their outputs as JSON."""
    outputs: list[str] = []
    names: dict[str, object] = {"__name__": "__main__"}
    for language, code, _ in BLOCK.findall(page.read_text()):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, page.name, "exec"), names)
            outputs.append(printed.getvalue())
        else:
            command = ["bash", "-c", code]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            outputs.append(done.stdout.decode())
            if done.returncode and "# exit code 1" not in code:
                raise RuntimeError(f"{code}\n{outputs[-1]}")
    print(json.dumps(outputs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(Path(sys.argv[2]))
    else:
        for page in map(Path, sys.argv[1:]) if sys.argv[1:] else filter(can_run, PAGES):
            page.write_text(written(page))
