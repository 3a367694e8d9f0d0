"""The tutorials' code runs as printed, and prints what the pages say."""

import pytest

from tutorial_pages import BLOCK, NEEDS, PAGES, can_run, outputs_of, written


def test_there_are_tutorials():
    assert len(PAGES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_its_page_says(page):
    assert BLOCK.search(page.read_text())
    if not can_run(page):
        pytest.skip(f"{NEEDS[page.stem]} is not installed; .ci/frameworks runs this page")
    assert written(page) == page.read_text()


def test_a_page_whose_code_fails_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```python\nraise KeyError('no such thing')\n```\n")
    with pytest.raises(RuntimeError, match="no such thing"):
        outputs_of(page)
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert written(page) != page.read_text()
