"""Texts made of reports, for terminals and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax_ucp.arrays.optimizer_groups import common_settings
from jax_ucp.inspection.report import Report
from jax_ucp.tree import Axes

SKIPPED = "skipped", "because", "such as"


def format_words(report: Report) -> str:
    """The writer of a checkpoint, and for one in the universal format what it was imported from."""
    source = report["source"]
    if report["format"] != "universal" or "name" not in source:
        return report["writer"] or report["format"]
    return f"universal, imported from {source['name']} ({report['writer'] or source.get('format')})"


# Names of folders of steps and items, which are not names of models.
_OF_A_STEP = re.compile(r"(?:global_?step|checkpoint|step|iter)?[-_]?\d+|default|items|state|ckpt")


def title_words(report: Report, config: Mapping[str, Any]) -> str:
    """The first line of a page: the model, its parameters, dtype, size, step and writer."""
    model = config.get("_name_or_path") or " ".join(config.get("architectures") or ())
    folders = [name for name in report["path"].split("/") if not _OF_A_STEP.fullmatch(name)]
    name = str(model or next(filter(None, reversed(folders)), report["path"]))
    weights = report["states"].get("param")
    elements = weights["elements"] if weights else report["elements"]
    dtypes = weights["dtypes"] if weights else list(report["dtypes"])
    parts = [
        f"{short_number(elements)} {'parameters' if weights else 'elements'}",
        "/".join(dtypes[:2]),
        size(report["bytes"]),
        "" if report["step"] is None else f"step {report['step']}",
        format_words(report),
    ]
    return f"{name}: {', '.join(filter(None, parts))}"


def short_number(n: int) -> str:
    """A number in thousands, millions, billions or trillions.

    >>> short_number(30_532_122_624), short_number(7_414)
    ('30.5 B', '7.4 K')
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)


def head_lines(report: Report) -> Iterator[tuple[str, str]]:
    """Lines of a summary with their headings; a text is empty if the files do not state it."""
    yield "step", "" if report["step"] is None else str(report["step"])
    yield "parallel", ", ".join(f"{axis} {n}" for axis, n in report["parallelism"].items())
    states = report["states"]
    if states:
        weights = states["param"]
        dtypes = ", ".join(weights["dtypes"])
        yield "parameters", f"{weights['parameters']:,}, {weights['elements']:,} elements, {dtypes}"
        yield (
            "optimizer",
            ", ".join(
                f"{state} {'/'.join(kind['dtypes'])} of {kind['parameters']:,}"
                for state, kind in states.items()
                if state != "param"
            ),
        )
    # the optimizer's settings that all groups have in common, then the others of each group
    if groups := report["groups"]:
        common = common_settings([group["settings"] for group in groups])
        yield "settings", _settings(common)
        for group in groups if len(groups) > 1 else ():
            own = {name: value for name, value in group["settings"].items() if name not in common}
            yield "  group", f"of {group['parameters']}: {_settings(own)}"
    dtypes = ", ".join(f"{n:,} {dtype}" for dtype, n in report["dtypes"].items())
    yield "arrays", f"{report['arrays']:,} in all ({dtypes}), {report['elements']:,} elements"
    items = ", ".join(f"{n:,} {status}" for status, n in report["items"].items())
    yield "stored", f"{size(report['bytes'])} in {several(report['files'], 'file')}; items: {items}"


def _settings(values: Report) -> str:
    """Settings as text, without those that are None or False."""
    return ", ".join(
        f"{name} {value}"
        for name, value in values.items()
        if value is not None and value is not False
    )


def skipped_reasons(items: Iterable[Report]) -> list[tuple[str, str, str]]:
    """The count of skipped items for each reason, the reason without names of arrays, and the
    first of the items; the largest counts first.
    """
    skipped = [(item["reason"], item["where"]) for item in items if item["status"] == "skipped"]
    reasons: list[tuple[str, str]] = []
    for reason, where in skipped:  # names of arrays are removed, so that equal reasons are counted
        name = re.split(r"[:/]", where)[-1]
        reason = reason.replace(name, "...") if name else reason
        reasons.append((_NAME.sub("...", reason), where))
    return counted(reasons)


# The name of an array in a sentence; names of files have fewer dots.
_NAME = re.compile(r"\w+(?:\.\w+){2,}")


def counted(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """The count of each reason, the reason, and the first of its names, of pairs (reason, name).

    >>> counted([("too long", "a"), ("empty", "b"), ("too long", "c")])
    [('2', 'too long', 'a'), ('1', 'empty', 'b')]
    """
    names: dict[str, list[str]] = {}
    for reason, name in reasons:
        names.setdefault(reason, []).append(name)
    most_first = sorted(names.items(), key=lambda pair: -len(pair[1]))
    return [(str(len(several)), reason, several[0]) for reason, several in most_first]


def spec_words(spec: Iterable[Axes]) -> str:
    """A PartitionSpec as `--rule` takes it.

    >>> spec_words(["data", None, ["replica", "model"]])
    'data,None,replica+model'
    """
    words = (axes if isinstance(axes, str) else "+".join(axes or ("None",)) for axes in spec)
    return ",".join(words)


def several(n: int, one: str, many: str = "") -> str:
    """A number and the singular or plural of a noun.

    >>> several(1, "leaf", "leaves"), several(1200, "file")
    ('1 leaf', '1,200 files')
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(nbytes: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return several(nbytes, "byte")
