"""Reports in words, as a terminal and a page show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from jax_ucp.inspection.diff import Change, Difference
from jax_ucp.inspection.report import Report
from jax_ucp.tree import Axes

SKIPPED = "skipped", "because", "such as"


def format_words(report: Report) -> str:
    """What wrote it; of a copy in the universal format, what it was imported from."""
    source = report["source"]
    if report["format"] != "universal" or "name" not in source:
        return report["writer"] or report["format"]
    return f"universal, imported from {source['name']} ({report['writer'] or source.get('format')})"


def head_lines(report: Report) -> Iterator[tuple[str, str]]:
    """What people ask first, by headings; empty where the files do not say it."""
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
    yield from _group_lines(report["groups"])
    dtypes = ", ".join(f"{n:,} {dtype}" for dtype, n in report["dtypes"].items())
    yield "arrays", f"{report['arrays']:,} in all ({dtypes}), {report['elements']:,} elements"
    items = ", ".join(f"{n:,} {status}" for status, n in report["items"].items())
    yield "stored", f"{size(report['bytes'])} in {several(report['files'], 'file')}; items: {items}"


def _group_lines(groups: list[Report]) -> Iterator[tuple[str, str]]:
    """What the optimizer does with all parameters, then what it does with those of each group
    alone; what is off is left out.
    """
    if not groups:
        return
    common = _common_settings([group["settings"] for group in groups])
    yield "settings", _settings(common)
    if len(groups) == 1:
        return
    for group in groups:
        own = {name: value for name, value in group["settings"].items() if name not in common}
        yield "  group", f"of {group['parameters']}: {_settings(own)}"


def _common_settings(each: Sequence[Report]) -> Report:
    """Settings that all groups have, with the same value."""
    first, *others = each
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def _settings(values: Report) -> str:
    return ", ".join(
        f"{name} {value}"
        for name, value in values.items()
        if value is not None and value is not False
    )


def skipped_reasons(items: Iterable[Report]) -> list[tuple[str, str, str]]:
    """How many items of an inventory are skipped, why, and one of them; each reason once."""
    skipped = [(item["reason"], item["where"]) for item in items if item["status"] == "skipped"]
    return counted((_reason(*item), item[1]) for item in skipped)


# The name of an array in a sentence; those of files have fewer dots.
_NAME = re.compile(r"\w+(?:\.\w+){2,}")


def _reason(reason: str, where: str) -> str:
    """The reason without names of arrays, which differ from one item to the next."""
    name = re.split(r"[:/]", where)[-1]
    return _NAME.sub("...", reason.replace(name, "...") if name else reason)


def counted(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Of pairs (reason, name): of how many each reason is, the reason, and the first of the names.

    >>> counted([("too long", "a"), ("empty", "b"), ("too long", "c")])
    [('2', 'too long', 'a'), ('1', 'empty', 'b')]
    """
    names: dict[str, list[str]] = {}
    for reason, name in reasons:
        names.setdefault(reason, []).append(name)
    most_first = sorted(names.items(), key=lambda pair: -len(pair[1]))
    return [(str(len(several)), reason, several[0]) for reason, several in most_first]


def changes(found: Difference) -> Iterator[tuple[str, str, str, str]]:
    """Leaves that differ but for elements: label, what, and what it is in the first and second."""
    for what, several in (
        ("reshaped", found.reshaped),
        ("recast", found.recast),
        ("replaced", found.replaced),
    ):
        yield from (_change_row(what, change) for change in several)
    yield from ((label, "missing", "here", "") for label in found.missing)
    yield from ((label, "added", "", "here") for label in found.added)


def told(found: Difference) -> Iterator[tuple[str, str, str]]:
    """What the checkpoints say of themselves that differs, such as the step."""
    yield from ((fact.label, fact.first, fact.second) for fact in found.facts)


def _change_row(what: str, change: Change) -> tuple[str, str, str, str]:
    return change.label, what, change.first, change.second


def spec_words(spec: Iterable[Axes]) -> str:
    """A PartitionSpec as `--rule` takes it.

    >>> spec_words(["data", None, ["replica", "model"]])
    'data,None,replica+model'
    """
    return ",".join(_axes_words(axes) for axes in spec)


def _axes_words(axes: Axes) -> str:
    return axes if isinstance(axes, str) else "+".join(axes or ("None",))


def several(n: int, one: str, many: str = "") -> str:
    """A number of things.

    >>> several(1, "leaf", "leaves"), several(1200, "file")
    ('1 leaf', '1,200 files')
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(nbytes: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return several(nbytes, "byte")
