"""Processes that do one thing together: a request in JSON to each, an answer in JSON from each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.race import Sample

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class GroupSample(Sample):
    """The wall clock of the slowest, the sums of CPU and of page faults, and what each said."""

    answers: Sequence[dict[str, Any]]


class Group:
    """A process for each command, which answers every line of its stdin with `{"wall_s": ...,
    "cpu_s": ..., "page_faults": ...}`.
    """

    def __init__(self, commands: Sequence[Sequence[str]]):
        pipe = subprocess.PIPE
        self._ranks = [
            subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            for line in commands
        ]

    def ask(self, **what: Any) -> GroupSample:
        """Let every process do something, and wait for all. Raises RuntimeError if one ends
        instead.
        """
        for rank in self._ranks:
            print(json.dumps(what), file=rank.stdin, flush=True)
        lines = [rank.stdout.readline() for rank in self._ranks]
        if not all(lines):
            raise RuntimeError(f"process {lines.index('')} of {len(lines)} ended, asked for {what}")
        answers = [json.loads(line) for line in lines]
        wall = max(answer["wall_s"] for answer in answers)
        cpu, faults = (sum(answer[key] for answer in answers) for key in ("cpu_s", "page_faults"))
        return GroupSample(wall, cpu, answers, page_faults=faults)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            if kind:
                rank.kill()
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(60)
            rank.stdout.close()
