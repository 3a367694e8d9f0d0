"""The web page about a checkpoint: one file for any browser, which loads nothing from the network.

Texts from the checkpoint are escaped or set as text, and the page's policy allows no script but its
own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jax_ucp.arguments import local_path
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.files.local import LocalFiles
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.page_data import Findings, flags_of, page_data
from jax_ucp.inspection.report import Report, head, inventory_of, pieces_of
from jax_ucp.inspection.statistics import Statistics
from jax_ucp.inspection.words import (
    SKIPPED,
    head_lines,
    several,
    size,
    skipped_reasons,
    spec_words,
    title_words,
)
from jax_ucp.text import visible
from jax_ucp.tree import Leaf

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint

# Rows of a table on the page; the commands print all.
_ROWS = 200

_BEGIN = "<!doctype html>"
_FOOTER = "Made by jax_ucp. Charts: d3 and Observable Plot (ISC)."
_PARTS = "jax_ucp.inspection.page_parts"
_SCRIPTS = "d3.min.js", "plot.umd.min.js", "page.js"


@dataclass(frozen=True)
class Page:
    """A page about a checkpoint, and the faults of the checkpoint that it shows."""

    html: str
    faults: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, also over an older page. Raises FileExistsError for any other file."""
        target = page_target(path)
        LocalFiles(target.parent).write(target.name, [self.html.encode()], durable=True)

    def _repr_html_(self) -> str:
        frame = html.escape(self.html, quote=True)
        return (
            f'<iframe sandbox="allow-scripts" title="checkpoint" srcdoc="{frame}"'
            ' style="width:100%;height:80vh;border:1px solid"></iframe>'
        )


def page_target(path: str | os.PathLike[str]) -> Path:
    """The local file for a page. Raises FileExistsError if another file than a page is there."""
    target = local_path(path)
    if target.exists():
        begin = b""
        if target.is_file():
            with target.open("rb") as file:
                begin = file.read(len(_BEGIN))
        if begin != _BEGIN.encode():
            raise FileExistsError(
                f"{target} exists and is not the page of a report: it is left as it is"
            )
    return target


def page(checkpoint: Checkpoint, arrays: Mapping[str, ArrayInfo], findings: Findings) -> Page:
    """The page of a checkpoint; `arrays` are those of its leaves, by name."""
    pieces = pieces_of(checkpoint)
    about = head(checkpoint, pieces)
    leaves = [leaf for leaf in checkpoint.leaves if leaf.has_array]
    statistics = findings.statistics or {}
    flags = {leaf.name: flags_of(leaf, statistics.get(leaf.name)) for leaf in leaves}
    of_leaves = [statistics[leaf.name] for leaf in leaves if leaf.name in statistics]
    faults = tuple(dict.fromkeys(each.unread for each in of_leaves if each.is_fault))
    data = page_data(leaves, arrays, pieces, findings, flags)
    source = [(f"source, {name}", json.dumps(value)) for name, value in about["source"].items()]
    extras = [(name, json.dumps(value)) for name, value in checkpoint.extras.items()]
    shown = [
        (name, text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)")
        for name, text in extras
    ]
    skipped = skipped_reasons(inventory_of(checkpoint))
    sections = [
        _verdict(about, leaves, flags, faults, findings),
        _difference_section(about, findings),
        _TREE,
        _MAP,
        _DEPTH if findings.statistics is not None else "",
        _mesh_section(findings.mesh),
        _section(
            "provenance",
            "Provenance",
            _facts([("format", about["format"]), ("written by", about["writer"]), *source])
            + _table("Stored, but not in any array", SKIPPED, skipped)
            + _table("Kept beside the arrays", ("what", "value"), shown),
        ),
    ]
    title = title_words(about, checkpoint.config)
    return Page(_document(title, about["path"], "\n".join(sections), data), faults)


# The document.


def _document(title: str, path: str, body: str, data: Report) -> str:
    """The whole page. Its policy allows the scripts that it contains, by their digests."""
    scripts = [_part(name) for name in _SCRIPTS]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    digests = " ".join(f"'sha256-{each.decode()}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'"
    )
    blocks = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""{_BEGIN}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{_text(title)}</title>
<style>{_part("page.css")}</style>
</head>
<body>
<a class="skip" href="#arrays">To the arrays</a>
<header><h1>{_text(title)}</h1><p class="quiet">{_text(path)}</p></header>
<main>
{body}
</main>
<footer class="quiet">{_FOOTER}</footer>
<script type="application/json" id="data">{_json(data)}</script>
{blocks}
</body>
</html>
"""


@cache
def _part(name: str) -> str:
    return files(_PARTS).joinpath(name).read_text(encoding="utf-8")


def _text(text: object) -> str:
    return html.escape(visible(str(text)), quote=True)


def _json(data: Report) -> str:
    """JSON that may stand in a script element: characters with a meaning in HTML are escaped."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{body}\n</section>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with at most the first `_ROWS` rows, which can be scrolled on a narrow screen."""
    if not rows:
        return ""
    if len(rows) > _ROWS:
        caption += f", the first {_ROWS} of {len(rows)}"
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in heads)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:_ROWS]
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(caption)}"><table>'
        f"<caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _folded(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in which rows whose names differ only in numbers are folded."""
    cells = [(row.name, *row.cells, f"x{row.count}" * (row.count > 1)) for row in fold(rows)]
    return _table(caption, (*heads, "times"), cells)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    pairs = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in facts if text)
    return f"<dl>{pairs}</dl>"


# Sections that the script fills.

_TREE = _section(
    "arrays",
    "Arrays",
    '<p class="controls"><label for="search">Search names</label>'
    '<input id="search" type="search" autocomplete="off" spellcheck="false"></p>'
    '<p id="found" class="quiet" role="status"></p><div id="tree">'
    "<noscript>The tree, the map and the charts need scripts.</noscript></div>",
)
_MAP = _section(
    "bytes",
    "Bytes",
    '<p class="controls"><label for="grouping">by</label> <select id="grouping"></select>'
    ' <span id="trail"></span></p><div id="map" class="map" role="group"'
    ' aria-label="Bytes, by size"></div>',
)
_DEPTH = _section("statistics", "By depth", '<div id="depth"></div>')


# What was found.


def _verdict(
    about: Report,
    leaves: Sequence[Leaf],
    flags: Mapping[str, str],
    faults: Sequence[str],
    findings: Findings,
) -> str:
    flagged = [(leaf.label, flags[leaf.name]) for leaf in leaves if flags[leaf.name]]
    lines = [_reading(findings.statistics)]
    if flagged:
        lines.append(f"{len(flagged)} of {len(leaves)} arrays should be checked.")
    if about["items"]["skipped"]:
        skipped = several(about["items"]["skipped"], "stored item")
        lines.append(f"Not in any array: {skipped}, see Provenance.")
    if findings.difference is not None:
        same = "equal to" if findings.difference.same else "not equal to"
        lines.append(f"It is {same} the other checkpoint.")
    lines += [f"Fault: {fault}" for fault in faults]
    bad = " bad" * bool(flagged or faults)
    paragraphs = "".join(f"<p>{_text(line)}</p>" for line in lines)
    return _section(
        "verdict",
        "What it is",
        f'<div class="verdict{bad}">{paragraphs}</div>{_facts(head_lines(about))}'
        + "".join(f"<p>note: {_text(note)}</p>" for note in about["notes"])
        + _folded("Please check", ("array", "what"), flagged),
    )


def _reading(statistics: Mapping[str, Statistics] | None) -> str:
    """A sentence on the share of the elements that was read."""
    if statistics is None:
        return "No array was read: this page is made of metadata only."
    read = [each for each in statistics.values() if not each.unread]
    sampled = [each for each in read if each.seen < each.elements]
    unread = len(statistics) - len(read)
    text = f"Read whole: {several(len(read) - len(sampled), 'array')}"
    if sampled:
        share = sum(each.seen for each in sampled) / sum(each.elements for each in sampled)
        text += f", and an evenly spread sample of {share:.2%} of {len(sampled)} large ones"
    if unread:
        text += f"; {unread} could not be read"
    return f"{text}. Where an array is stored twice, a sample of the copies was compared."


# Meshes, differences, provenance.


def _mesh_section(mesh: Report | None) -> str:
    if mesh is None:
        return ""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh["mesh"].items())
    hosts: list[Sequence[object]] = []
    for i, host in enumerate(mesh["hosts"]):
        read, needed = size(host["read_bytes"]), size(host["needed_bytes"])
        hosts.append((i, read, needed, f"{host['amplification']:.3f}", host["files"]))
    given_up = [
        (leaf["leaf"], str(leaf["shape"]), str(tuple(leaf["spec"])), "; ".join(leaf["notes"]))
        for leaf in mesh["leaves"]
        if leaf["notes"]
    ]
    placed: list[tuple[str, ...]] = []
    for leaf in mesh["leaves"]:
        spec, nbytes = spec_words(leaf["spec"]), size(leaf["device_bytes"])
        placed.append((leaf["leaf"], str(leaf["shape"]), spec, str(leaf["device_shape"]), nbytes))
    facts = [
        ("mesh", f"{axes}: {mesh['devices']} devices"),
        ("on each device", size(mesh["device_bytes"])),
        ("read / needed", f"{mesh['amplification']:.3f}, of all hosts"),
        ("most / mean", f"{mesh['balance']:.3f}, of what hosts read"),
    ]
    return _section(
        "mesh",
        "On the mesh",
        _facts(facts)
        + "".join(f"<p>note: {_text(note)}</p>" for note in mesh["notes"])
        + _table("What hosts read", ("host", "to read", "needed", "read / needed", "files"), hosts)
        + _folded("Specs that do not fit the mesh", ("array", "shape", "spec", "why"), given_up)
        + "<details><summary>What a device holds of each array</summary>"
        + _folded("By array", ("array", "shape", "spec", "on each device", "bytes"), placed)
        + "</details>",
    )


def _difference_section(about: Report, findings: Findings) -> str:
    if findings.difference is None or findings.other is None:
        return ""
    other = head(findings.other, pieces_of(findings.other))
    texts: dict[str, tuple[list[str], list[str]]] = {}  # by heading, of both sides
    for side, report in enumerate((about, other)):
        for heading, text in head_lines(report):
            texts.setdefault(heading, ([], []))[side].append(text)
    rows = [(heading, *map("; ".join, sides)) for heading, sides in texts.items()]
    difference = findings.difference
    settings = [(fact.label, fact.first, fact.second) for fact in difference.facts]
    compared = "names, shapes and dtypes" if difference.headers_only else "all elements"
    lines = [repr(difference)[1:-1], f"The other is {other['path']}. Equal means in {compared}."]
    most = sorted(difference.values, key=lambda each: -each.share)
    numbers = [
        (each.label, f"{each.share:.3%}", f"{each.largest:.3g}", f"{each.relative:.3g}")
        for each in most
    ]
    heads = ("array", "changed", "largest", "relative")
    return _section(
        "difference",
        "Compared with the other",
        "".join(f"<p>{_text(line)}</p>" for line in lines)
        + ('<div id="changes"></div>' if difference.values else "")
        + _folded("Settings that differ", ("setting", "this", "other"), settings)
        + _folded("Elements that differ", heads, numbers)
        + _folded("Leaves that differ", ("leaf", "what", "this", "other"), difference.changes())
        + _table("Two checkpoints", ("fact", "this", "other"), rows),
    )
