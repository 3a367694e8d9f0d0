"""A page about a checkpoint: whole in one file, small, and nothing on it is obeyed."""

import hashlib
import html
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from commands import run
from hostile.files import saved
from jax_ucp.inspection.page_data import _front_coded

DATA = Path(__file__).parents[1] / "data"
CASE = DATA / "deepspeed" / "z1_bf16_dp2"
PARTS = files("jax_ucp.inspection.page_parts")

HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>',
    "<!--<script>", "]]><b>", "&lt;b&gt;", "' onfocus='alert(1)", "w\u202egnp.exe\x1b[31m", "{{constructor}}",
    "__proto__",
]  # fmt: skip


class _Reader(HTMLParser):
    """The elements, their attributes, and what scripts hold."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)


def data_of(page: str) -> dict:
    """What the page's script draws, as the script reads it."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    for texts in (data["arrays"]["label"], data["files"]):
        last = ""
        for i, (begin, rest) in enumerate(texts):
            last = texts[i] = last.encode("utf-16-le")[: 2 * begin].decode("utf-16-le") + rest
    return data


def test_a_page_has_what_the_checkpoint_has():
    checkpoint = ucp.open(CASE)
    page = checkpoint.report()
    data = data_of(page.html)
    assert page.faults == ()
    assert data["arrays"]["label"] == list(checkpoint)
    arrays = (checkpoint.read(leaf.label).astype(float) for leaf in checkpoint.leaves)
    norms = [np.linalg.norm(array) for array in arrays]
    assert data["arrays"]["norm"] == pytest.approx(norms, rel=1e-3)
    members = sorted(i for row in data["folded"] for i in row["members"])
    assert members == list(range(len(checkpoint.leaves)))
    for i, leaf in enumerate(checkpoint.leaves):
        pieces = data["pieces"][str(i)]
        files = [data["files"][piece[0]] for piece in pieces]
        assert files == [piece.file for piece in checkpoint.where(leaf)]
        starts = [tuple(piece[3]) for piece in pieces]
        assert starts == [piece.target.start for piece in checkpoint.where(leaf)]
    assert "DeepSpeed 0.19.8, ZeRO-1" in page.html


def test_a_page_of_headers_reads_no_array_and_says_so():
    reads = []
    checkpoint = ucp.open(CASE)
    checkpoint._reads.read = lambda leaf, box=None: reads.append(leaf)
    page = checkpoint.report(headers=True)
    assert not reads
    assert "No array was read" in page.html
    assert "norm" not in data_of(page.html)["arrays"]


def test_what_is_not_finite_and_dead_rows_of_parameters_are_flagged(tmp_path):
    broken = np.ones((4, 3), np.float32)
    broken[0, 0], broken[1, 1], broken[2] = np.nan, np.inf, 0
    zeros = np.zeros((4, 3), np.float32)
    params = {"good": np.ones((4, 3), np.float32), "broken": broken}
    tree = {"param": params, "exp_avg": {"good": zeros}}
    page = ucp.Checkpoint.of(tree).report()
    assert "1 NaN, 1 infinite, 1 of 4 rows are zeros" in page.html
    assert "1 of 3 arrays should be checked" in page.html


def test_an_array_whose_bytes_are_wrong_is_a_fault_on_the_page_and_in_the_exit_code(tmp_path):
    tree = {"w": np.arange(4096, dtype=np.float32), "v": np.ones(3, np.float32)}
    folder = saved(tmp_path / "c", tree)
    files = [file for file in folder.glob("w/**/*") if file.is_file()]
    [chunk] = [file for file in files if file.name != "zarr.json"]
    damaged = bytearray(chunk.read_bytes())
    damaged[100] ^= 1
    chunk.write_bytes(damaged)
    out = run("report", folder, "-o", tmp_path / "page.html", code=1)
    assert "fault: " in out
    page = (tmp_path / "page.html").read_text()
    assert "Fault: " in page
    assert "1 could not be read" in page


def test_parts_of_quantised_weights_are_not_read_and_are_no_fault():
    page = ucp.open(DATA / "quantized" / "awq_32" / "ckpt").report()
    assert page.faults == ()
    assert "could not be read" in page.html


def test_a_page_against_another_says_what_differs():
    first = ucp.Checkpoint.of({"a": {"0": np.ones(4), "1": np.ones(4)}, "b": np.zeros(2)})
    second = ucp.Checkpoint.of({"a": {"0": np.ones(4), "1": np.full(4, 2.0)}, "c": np.zeros(2)})
    page = first.report(against=second)
    assert "It is not equal to the other checkpoint" in page.html
    [change] = data_of(page.html)["changes"]
    assert (change["label"], change["share"], change["largest"]) == ("a/1", 1.0, 1.0)
    assert first.report(against=first).html.count("It is equal to the other checkpoint") == 1


def test_a_page_against_another_has_every_group_of_both():
    first, second = (ucp.open(DATA / "deepspeed" / case) for case in ("z3_bf16_dp2", "z2_bf16_dp3"))
    html = first.report(against=second, headers=True).html
    table = html.partition("<caption>Two checkpoints</caption>")[2].partition("</table>")[0]
    assert "of 11: weight_decay 0.1; of 20: weight_decay 0.0" in table


def test_a_page_for_a_mesh_says_what_lies_where_and_what_is_given_up():
    rules = [("head.weight$", ("data", "model")), (".*", ())]
    from jax.sharding import PartitionSpec

    rules = [(pattern, PartitionSpec(*axes)) for pattern, axes in rules]
    page = ucp.open(CASE).report(mesh={"data": 2, "model": 2}, rules=rules, hosts=2)
    data = data_of(page.html)
    i = data["arrays"]["label"].index("param/head.weight")
    assert data["shapes"][data["arrays"]["device"][i]] == [101, 8]
    assert "101 does not divide by 2" in page.html


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(HOSTILE) | st.text(min_size=1), min_size=1, max_size=3, unique=True)
)
def test_no_name_adds_an_element_an_attribute_or_a_script_to_the_page(names):
    flagged = np.array([np.nan, 1], np.float32)  # whose names are on the page as HTML too
    of = {f"k{i}": flagged for i in range(len(names))}
    plain = _Reader(ucp.Checkpoint.of(of).report().html)
    try:
        hostile = ucp.Checkpoint.of({name: flagged for name in names})
    except ucp.errors.UCPError:
        return  # a name that no checkpoint may have
    page = hostile.report().html
    read = _Reader(page)
    assert [tag for tag, _ in read.elements].count("script") == 4
    assert {tag for tag, _ in read.elements} == {tag for tag, _ in plain.elements}
    names = [name for _, attributes in read.elements for name in attributes]
    assert not [name for name in names if name.startswith("on")]
    strange = [c for c in data_of(page)["arrays"]["label"] if not c.isprintable()]
    assert not strange


def test_a_page_names_no_address_to_be_loaded_and_runs_its_own_scripts_alone():
    page = ucp.open(CASE).report().html
    read = _Reader(page)
    loaded = [attributes for _, attributes in read.elements if {"src", "action"} & {*attributes}]
    links = [attributes["href"] for _, attributes in read.elements if "href" in attributes]
    assert not loaded
    assert all(link.startswith("#") for link in links)
    [policy] = [a["content"] for t, a in read.elements if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.split("style-src")[0]


@given(st.lists(st.text() | st.sampled_from(["a.\U0001f600b", "a.\U0001f601b", "a.0.w", "a.1.w"])))
def test_front_coded_texts_are_what_they_were_to_a_script(texts):
    from jax_ucp.text import visible

    shown = [visible(text) for text in texts]
    last = ""
    for (begin, rest), text in zip(_front_coded(shown), shown, strict=True):
        last = last.encode("utf-16-le")[: 2 * begin].decode("utf-16-le") + rest
        assert last == text


def test_ten_thousand_arrays_that_do_not_fold_make_a_page_below_three_megabytes():
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.{rng.bytes(12).hex()}.mlp.down_proj.weight" for i in range(3334)]
    array = rng.normal(size=(2, 2)).astype(np.float32)
    tree = {state: dict.fromkeys(names, array) for state in ("param", "exp_avg", "exp_avg_sq")}
    checkpoint = ucp.Checkpoint.of(tree)
    assert len(checkpoint.leaves) > 10_000
    assert len(checkpoint.report().html.encode()) < 3_000_000


def test_a_page_replaces_a_page_and_nothing_else(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    assert "is left as it is" in run(
        "report", tmp_path / "nothing", "-o", weights, code=1
    )  # before it opens
    assert weights.read_bytes() == b"weights"
    for _ in range(2):
        run("report", CASE, "-o", tmp_path / "page.html", "--headers")
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["model.safetensors", "page.html"]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own():
    page = ucp.open(CASE).report(headers=True)
    [(tag, attributes)] = _Reader(page._repr_html_()).elements
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == page.html
    assert html.escape(CASE.name) in ucp.open(CASE)._repr_html_()


@pytest.mark.parametrize("name", ["d3.min.js", "plot.umd.min.js"])
def test_a_library_of_others_is_the_file_that_its_licence_page_names(name):
    content = PARTS.joinpath(name).read_bytes()
    row = re.search(rf"\| `{re.escape(name)}` \|.*", PARTS.joinpath("LICENSES.md").read_text())[0]
    assert hashlib.sha256(content).hexdigest() in row
    assert b"</script" not in content.lower()
    assert b"<!--" not in content
