"""A page in a real browser: it draws, folds, searches, asks the network for nothing, and obeys no
name.

Needs `playwright`, `axe-playwright-python` and a chromium: Debian's, or that of `playwright
install chromium`. Where UCP_BROWSER is `required` their absence is an error.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_ucp as ucp

if os.environ.get("UCP_BROWSER") != "required":
    pytest.importorskip("axe_playwright_python")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import Error as BrowserError

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"
CASE = DATA / "deepspeed" / "z1_bf16_dp2"
HOSTILE = [
    "</script><script>window.hacked=1</script>", "<img src=http://example.invalid/x onerror=window.hacked=2>",
    '"><svg onload=window.hacked=3>', "<!--<script>", 'a" style="position:fixed', "constructor", "__proto__",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # a container has no namespaces for chromium's own sandbox
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        try:
            started = playwright.chromium.launch(**options)
        except BrowserError as error:
            if os.environ.get("UCP_BROWSER") == "required":
                raise
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield started
        started.close()


@dataclass
class Opened:
    """A page that a browser has open, with what it asked for and what it complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def show(browser, tmp_path):
    def shown(report, **options) -> Opened:
        report.save(tmp_path / "page.html")
        opened = Opened(browser.new_page(**options))
        opened.page.set_default_timeout(10_000)
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.goto((tmp_path / "page.html").as_uri())
        opened.page.wait_for_selector("html[data-ready]")
        return opened

    return shown


def open_all(page: Page) -> None:
    """Open every fold of the tree, and those that come out of it."""
    script = "document.querySelectorAll('#tree details').forEach(each => (each.open = true))"
    for _ in range(6):  # what is inside of one is made when it opens
        page.evaluate(script)
        page.wait_for_timeout(50)


def full_report():
    """With everything that a page can have."""
    return ucp.open(CASE).report(
        against=DATA / "deepspeed" / "z2_bf16_dp3",
        mesh={"data": 2, "model": 2},
        rules=[("weight$", PartitionSpec("data", "model"))],
        hosts=2,
    )


def test_it_draws_everything_and_asks_for_nothing(show):
    opened = show(full_report())
    page = opened.page
    # tiles of a module's parts have one colour, and the title has what there is no room for
    assert page.locator("#map .tile").count() == 16
    read = "tiles => [...new Set(tiles.map((tile) => tile.style.background))].length"
    colours = page.locator("#map .tile").evaluate_all(read)
    assert colours == 4
    about = "7.4 K parameters, float32, 87.0 KiB, step 5, DeepSpeed 0.19.8, ZeRO-1"
    assert page.locator("h1").text_content() == f"z1_bf16_dp2: {about}"
    assert page.locator("#depth svg path[stroke]").count() > 5
    assert page.locator("#changes svg").count() >= 1
    page.fill("#search", "param/head.weight")
    page.locator("#tree details.row > summary").click()
    page.locator("#tree figure svg rect").first.wait_for()
    assert page.locator("#tree dt").get_by_text("update / weight").count() == 1
    assert [url.partition("/page.html")[2] for url in opened.requests] == [""]
    assert opened.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_keeps_anybody_out(show, scheme):
    opened = show(full_report(), color_scheme=scheme)
    open_all(opened.page)
    found = Axe().run(opened.page).response
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    assert len(found["passes"]) > 30


def tiles(page: Page) -> list[str]:
    """The names of the map's tiles."""
    read = "tiles => tiles.map((tile) => tile.getAttribute('aria-label'))"
    labels = page.locator("#map .tile").evaluate_all(read)
    return [label.partition(":")[0] for label in labels]


def experts(layers=3, count=12) -> dict:
    """A model whose expert 7 of layer 2 is dead, and most bytes of which are in its experts."""
    tree = {"model.embed.weight": np.ones((2, 4), np.float32)}
    for layer in range(layers):
        tree[f"model.layers.{layer}.mlp.gate.weight"] = np.ones((1, 4), np.float32)
        for expert in range(count):
            values = np.full((16, 4), 0 if (layer, expert) == (2, 7) else 1 + layer, np.float32)
            tree[f"model.layers.{layer}.mlp.experts.{expert}.up.weight"] = values
            tree[f"model.layers.{layer}.mlp.experts.{expert}.down.weight"] = values[::2]
    return {"param": tree}


def test_a_dead_expert_is_a_cell_of_its_own_and_the_map_begins_where_bytes_are(show):
    opened = show(ucp.Checkpoint.of(experts()).report())
    page = opened.page
    assert tiles(page) == ["up", "down"]
    cells = page.locator("#depth figure svg g[aria-label='cell'] rect")
    assert cells.count() == 3 * 12
    assert cells.and_(page.locator("[fill='var(--bad)'], g[fill='var(--bad)'] rect")).count() == 1
    assert "red: 1 array to check" in page.locator("#depth figcaption").first.text_content()
    page.select_option("#grouping", "module")
    page.locator("#trail button", has_text="layers").click()
    assert tiles(page) == ["0", "1", "2"]
    page.locator("#map .tile", has_text="1").first.click()
    assert tiles(page) == ["experts", "gate"]
    page.locator("#map .tile").first.click()
    assert tiles(page) == [str(n) for n in range(12)]
    page.fill("#search", "up experts layers.0")
    found = page.locator("#tree details.row > summary .name").all_text_contents()
    assert [name.split(".")[5] for name in found] == [str(n) for n in range(12)]
    assert opened.complaints == []


def test_no_label_of_the_map_is_wider_or_higher_than_its_tile(show):
    page = show(ucp.Checkpoint.of(experts()).report(), viewport={"width": 390, "height": 800}).page
    for grouping in ("kind of module", "module"):
        page.select_option("#grouping", grouping)
        page.locator("#trail button").first.click()
        over = page.locator("#map .tile").evaluate_all(
            "tiles => tiles.filter((tile) => tile.scrollWidth > tile.clientWidth + 1"
            " || tile.scrollHeight > tile.clientHeight + 1).map((tile) => tile.textContent)"
        )
        assert [text for text in over if text] == []


def test_the_tree_folds_and_a_folded_row_shows_each_of_its_arrays(show):
    page = show(ucp.open(CASE).report()).page
    assert page.locator("#tree").get_by_text("mlp").count() == 0
    page.locator("#tree summary", has_text="layers.{0,1}").first.click()
    page.locator("#tree summary", has_text="mlp").first.click()
    open_all(page)
    row = page.locator("#tree details.row:has(select)").first
    choice = row.locator("select").first
    choice.wait_for()
    labels = choice.locator("option").all_text_contents()
    assert len(labels) == 2
    choice.select_option(index=1)
    assert row.locator(".array .name").first.text_content() == labels[1]


def test_a_search_finds_every_name_with_its_words_and_says_how_many(show):
    checkpoint = ucp.open(CASE)
    page = show(checkpoint.report(headers=True)).page
    page.fill("#search", "mlp EXP_AVG_SQ")
    labels = [leaf.label for leaf in checkpoint.leaves]
    want = sorted(label for label in labels if "mlp" in label and "exp_avg_sq" in label)
    assert page.locator("#tree details.row > summary .name").all_text_contents() == want
    found = f"{len(want)} of {len(checkpoint.leaves)} arrays"
    assert page.locator("#found").text_content() == found
    page.fill("#search", "")
    assert page.locator("#tree > details").count() == 4


def test_the_keyboard_is_enough(show):
    page = show(ucp.open(CASE).report()).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#arrays"
    page.focus("#tree summary")
    before = page.locator("#tree > details").first.evaluate("node => node.open")
    page.keyboard.press("Enter")
    assert page.locator("#tree > details").first.evaluate("node => node.open") != before
    page.focus("#map .tile")
    page.keyboard.press("Enter")
    assert page.locator("#trail button").all_text_contents() == ["all", "param"]
    page.locator("#trail button").first.press("Enter")
    assert page.locator("#trail button").all_text_contents() == ["all"]


def test_everything_that_can_be_used_has_a_name_for_those_who_do_not_see_it(show):
    page = show(full_report()).page
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, [role=region], svg[class]")]
        .filter(node => !(node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim()))
        .map(node => node.outerHTML.slice(0, 200))"""
    )
    assert nameless == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(node => node.tagName)")
    assert levels[0] == "H1"
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_in_dark(show, scheme):
    page = show(full_report(), color_scheme=scheme).page
    contrast = page.evaluate(
        """() => {
        const light = (color) => {
            const parts = color.match(/[0-9.]+/g).slice(0, 3).map(Number)
                .map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const style = getComputedStyle(document.body);
        const quiet = getComputedStyle(document.querySelector(".quiet"));
        const back = light(style.backgroundColor);
        return [style.color, quiet.color].map(light)
            .map(text => (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05));
        }"""
    )
    assert min(contrast) > 4.5


def test_a_phone_scrolls_down_and_not_sideways(show):
    page = show(full_report(), viewport={"width": 360, "height": 640}).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_print_leaves_the_controls_out(show):
    page = show(full_report()).page
    page.emulate_media(media="print")
    assert not page.locator("#search").is_visible()
    assert page.get_by_text("What hosts read").first.is_visible()


def test_hostile_names_are_text(show, tmp_path):
    array = np.ones((2, 2), np.float32)
    tree = {
        "param": {name: array for name in HOSTILE},
        "exp_avg": {name: array for name in HOSTILE},
    }
    other = {"param": {name: array * 2 for name in HOSTILE}}
    opened = show(ucp.Checkpoint.of(tree).report(against=ucp.Checkpoint.of(other)))
    page = opened.page
    open_all(page)
    page.fill("#search", "hacked")
    open_all(page)
    for choice in page.locator("#depth select, #changes select, #grouping").all():
        for i in range(choice.locator("option").count()):
            choice.select_option(index=i)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 4
    assert len(opened.requests) == 1
    assert opened.complaints == []
    hacked = sum("hacked" in name for name in HOSTILE)
    assert page.locator("#tree details.row").count() == 2 * hacked


def test_ten_thousand_arrays_are_drawn_and_searched(show):
    names = [f"layers.{i}.w{i * i % 97}" for i in range(10_000)]
    tree = {"param": dict.fromkeys(names, np.ones(2, np.float32))}
    opened = show(ucp.Checkpoint.of(tree).report())
    opened.page.fill("#search", "layers.9999.")
    assert opened.page.locator("#found").text_content() == "1 of 10000 arrays"
    assert opened.complaints == []
