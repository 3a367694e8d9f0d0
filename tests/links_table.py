"""The table of docs/links.md, from all cases in tests/data: `python tests/links_table.py`."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from cases import every

PAGE = Path(__file__).parents[1] / "docs" / "links.md"
HEAD = "| format | checkpoints | arrays linked | their bytes | arrays copied | their bytes | why |"
HEAD += "\n|---|---|---|---|---|---|---|"


def rows() -> list[str]:
    """A line for each format, of all of its cases."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        for case in every():
            if case.about.get("kind", "").startswith("torch_save"):
                continue  # a folder of files, each a checkpoint
            checkpoint = case.open()
            plan = checkpoint.plan_link(f"{folder}/link")
            counts = {"linked": len(plan.linked.arrays), "linked_bytes": plan.linked_bytes}
            counts |= {"copied": len(plan.copied), "copied_bytes": plan.copied_bytes}
            sums[checkpoint.format] += Counter(cases=1, **counts)
            for reason, count in plan.reasons.items():
                reasons[checkpoint.format][reason.partition("(")[0].strip()] += count
    return [
        f"| {format} | {n['cases']} | {n['linked']:,} | {n['linked_bytes']:,} |"
        f" {n['copied']:,} | {n['copied_bytes']:,} |"
        f" {'; '.join(reason for reason, _ in reasons[format].most_common(2))} |"
        for format, n in sorted(sums.items())
    ]


if __name__ == "__main__":
    print("\n".join([HEAD, *rows()]))
