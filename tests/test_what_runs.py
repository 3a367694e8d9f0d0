"""The page on what a restore executes has what a run of its script counts."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^([a-z ]+?) +([\d,]+) lines of +(\d+) files$", re.MULTILINE)


def test_the_page_says_how_many_lines_a_restore_executes():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", DOCS / "what_runs.py"],
        env=os.environ | {"PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said, counted = (
        ROW.findall(text) for text in ((DOCS / "what-runs.md").read_text(), done.stdout)
    )
    assert {room for room, *_ in said} == {room for room, *_ in counted}
    *_, (_, lines, files) = said
    *_, (_, now, files_now) = counted
    assert abs(int(files) - int(files_now)) <= 5
    lines, now = (int(number.replace(",", "")) for number in (lines, now))
    assert abs(lines - now) < 0.1 * lines  # other versions take other ways
