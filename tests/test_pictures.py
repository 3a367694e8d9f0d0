"""The documentation's pictures are those that its program draws, and its list of decisions has all."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_program_draws_and_says_what_it_shows(name):
    drawn = PICTURES[name]()
    assert (DOCS / "pictures" / name).read_text() == drawn
    root = ElementTree.fromstring(drawn)
    assert root.find("{http://www.w3.org/2000/svg}title").text


def test_every_decision_is_in_the_list_of_them():
    listed = (DOCS / "design" / "index.md").read_text()
    assert [page.name for page in DOCS.glob("design/0*.md") if f"({page.name})" not in listed] == []
