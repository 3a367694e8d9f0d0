"""The page on what a restore executes has what a run of its script counts."""

import re
from pathlib import Path

from programs import python

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^([a-z ]+?) +([\d,]+) lines of +(\d+) files$", re.MULTILINE)


def test_the_page_says_how_many_lines_a_restore_executes():
    env = {"PYTHONPATH": str(DOCS.parent)}
    printed = python("-W", "ignore", DOCS / "what_runs.py", env=env)
    page = (DOCS / "what-runs.md").read_text()
    said, counted = (ROW.findall(text) for text in (page, printed))
    assert {room for room, *_ in said} == {room for room, *_ in counted}
    *_, (_, lines, files) = said
    *_, (_, now, files_now) = counted
    assert abs(int(files) - int(files_now)) <= 5
    lines, now = (int(number.replace(",", "")) for number in (lines, now))
    assert abs(lines - now) < 0.1 * lines  # other versions take other ways
