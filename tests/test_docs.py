"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_in_the_readme_prints_what_the_readme_says():
    program, printed = re.search(r"```python\n(.*?)```\nprints\n```\n(.*?)```", README, re.DOTALL).groups()
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout == printed


def test_the_first_example_script_restores_every_array():
    command = [sys.executable, "examples/open_deepspeed.py"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert out.returncode == 0, out.stderr
    assert "124 of 124 arrays equal" in out.stdout
    assert "0 faults" in out.stdout


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))])
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for function in re.findall(r"`((?:storage|layout|metadata|sharding|formats)\.[\w.]+)`", text):
        *module, name = function.split(".")
        while not (ROOT / "jax_ucp" / "/".join(module)).with_suffix(".py").exists():
            name = module.pop()
        assert f"{name}" in (ROOT / "jax_ucp" / "/".join(module)).with_suffix(".py").read_text(), function
