"""The documentation's screens are what the commands print and the browser shows now."""

import os
import runpy
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SCREENS = runpy.run_path(str(DOCS / "screens.py"))
SUBJECTS = SCREENS["SUBJECTS"]
MAX_BYTES = 200_000
PNG = b"\x89PNG\r\n\x1a\n"


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    header = picture.read_bytes()[:24]
    assert header.startswith(PNG)
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_has_what_the_commands_print(name):
    assert SCREENS["written"]([name]).removeprefix(SCREENS["HEAD"]) in SCREENS["PAGE"].read_text()


def test_the_page_has_every_subject_in_lines_of_eighty_columns():
    page = SCREENS["PAGE"].read_text()
    assert page.startswith(SCREENS["HEAD"])
    assert page.endswith(SCREENS["elsewhere"]())
    sections = [part.splitlines()[0] for part in page.split("\n## ")[1:-1]]
    assert sections == [subject.title for subject in SUBJECTS.values()]
    screens = [part.partition("```")[0] for part in page.split("```text\n")[1:]]
    assert len(screens) == 3 * len(SUBJECTS)
    assert max(len(line) for text in screens for line in text.splitlines()) <= SCREENS["COLUMNS"]
    assert "Traceback" not in page


def test_of_ten_thousand_arrays_the_one_with_a_flipped_bit_is_found():
    screen = SCREENS["PAGE"].read_text().rpartition("jax-ucp diff run/1000 run/1001")[2]
    assert "exp_avg/layers.217.mlp.up" in screen
    assert "1 leaf differs, 9,999 equal in all elements" in screen


SIZES = dict.fromkeys(SUBJECTS, SCREENS["SIZE"])
SIZES |= {name: view.size for name, view in SCREENS["VIEWS"].items()}


@pytest.mark.parametrize("name", SIZES)
def test_a_picture_is_small_and_of_the_size_that_is_taken(name):
    picture = DOCS / "pictures" / f"report-{name}.png"
    assert picture.stat().st_size < MAX_BYTES
    assert size_of(picture) == tuple(SIZES[name].values())


@pytest.mark.slow
def test_the_pictures_can_be_taken(tmp_path):
    if os.environ.get("UCP_BROWSER") != "required":
        pytest.importorskip("playwright.sync_api")
        if not shutil.which("chromium"):
            pytest.skip("no browser")
    pictures = SCREENS["take_pictures"](tmp_path)
    assert {picture.name for picture in pictures} == {f"report-{name}.png" for name in SIZES}
    for picture, size in zip(pictures, SIZES.values(), strict=True):
        assert 10_000 < picture.stat().st_size < MAX_BYTES
        assert size_of(picture) == tuple(size.values())
