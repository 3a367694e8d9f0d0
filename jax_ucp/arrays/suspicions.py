"""Notes on what may be wrong with a checkpoint, and what no checksum or second copy shows: files of
two steps, and files of which the end was never written.

They are notes, not faults, because a sound checkpoint can look the same. A sample is read for them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from jax_ucp.arrays.budget import in_threads
from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import FormatError
from jax_ucp.files.protocol import FileInfo, Files, read_bytes
from jax_ucp.layout.box import Box
from jax_ucp.tree import Leaf

T = TypeVar("T")

MAX_READS, MAX_REMOTE_READS = 512, 64
# A file is looked at in windows, one at its end and one at the start of each sixteenth of it.
_WINDOW, _SIXTEENTHS = 4096, 16
_SECTOR = 512  # bytes of which a disk has all or none
_MIN_ZEROS = 4  # sixteenths; shorter ends may be biases that were never trained
_SHOWN = 4
_UNPAIRED_STEP = re.compile(r"(^|\.)state\..+\.step$")


def suspicions(contents: Contents) -> list[str]:
    """Notes on steps that differ between parameters, and on files that end in zeros."""
    notes = [*_several_steps(contents)]
    # files of which a long end is zeros, though not all of it
    long = [(of, file) for of, file in contents.files.seen if file.size > _SECTOR]
    files = _sample(long, contents.files.is_remote)
    jobs = [partial(_sixteenths_of_zeros, of, file) for of, file in files]
    for (of, file), zeros in zip(files, in_threads(jobs, contents.files.is_remote), strict=True):
        if _MIN_ZEROS <= zeros < _SIXTEENTHS:
            notes.append(
                f"{of.url(file.name)} ends in zeros: they are {zeros} sixteenths of it or more, by"
                " a sample. An interrupted copy or download leaves such a file; compare it with"
                " the original, unless arrays at its end are zeros"
            )
    return notes


def _several_steps(contents: Contents) -> Iterator[str]:
    """A note if the parameters are not of one step, with where each step is stored."""
    paths = [leaf.path for leaf in contents.leaves if len(leaf.path) > 1]
    parameters = {path[1:] for path in paths if str(path[0]) == "param"}
    # the steps of parameters, or of numbers in an optimizer of torch's whose parameters are unknown
    steps = [
        leaf
        for leaf in filter(_is_number, contents.leaves)
        if (str(leaf.path[0]) == "step" and leaf.path[1:] in parameters)
        or (str(leaf.path[0]) == "other" and _UNPAIRED_STEP.search(str(leaf.path[-1])))
    ]

    def step_of(leaf: Leaf) -> float | None:
        try:
            return float(contents.arrays.read(leaf.name, Box.whole(leaf.shape)).item())
        except (FormatError, OSError):
            return None  # which `verify` and `restore` say

    sample = _sample(steps, contents.files.is_remote)
    read = in_threads([partial(step_of, leaf) for leaf in sample], contents.files.is_remote)
    leaves_at: dict[float, list[Leaf]] = defaultdict(list)
    for leaf, number in zip(sample, read, strict=True):
        if number is not None:
            leaves_at[number].append(leaf)
    if len(leaves_at) < 2:
        return
    # how many sampled parameters have each step, the first of them, and its file
    shown: list[str] = []
    for step in sorted(leaves_at)[:_SHOWN]:
        first, *others = leaves_at[step]
        name = "/".join(map(str, first.path[1:]))
        files = sorted({piece.file for piece in contents.locate(first)})
        shown.append(f"{step:.17g} of {1 + len(others)}, as {name} in {', '.join(files[:1])}")
    more = f"; and {len(leaves_at) - _SHOWN} other steps" if len(leaves_at) > _SHOWN else ""
    yield (
        f"the optimizer's steps differ between parameters: {'; '.join(shown)}{more}. That is right"
        " for parameters that were added later, or had no gradient in some steps; otherwise files"
        " of several saves are mixed here"
    )


def _is_number(leaf: Leaf) -> bool:
    if not leaf.has_array or len(leaf.path) < 2:
        return False
    return math.prod(leaf.shape) == 1 and np.dtype(leaf.dtype).kind != "c"


def _sixteenths_of_zeros(files: Files, file: FileInfo) -> int:
    """How many sixteenths at the end of a file are zeros, as far as windows of them show."""
    window = min(_WINDOW, -(-file.size // _SIXTEENTHS))
    starts = [file.size * i // _SIXTEENTHS for i in reversed(range(_SIXTEENTHS))]
    if not _is_zero(files, file, file.size - window, window):
        return 0
    zeros = itertools.takewhile(lambda start: _is_zero(files, file, start, window), starts)
    return sum(1 for _ in zeros)


def _is_zero(files: Files, file: FileInfo, start: int, nbytes: int) -> bool:
    try:
        return not any(read_bytes(files, file, start, min(file.size, start + nbytes)))
    except (FormatError, OSError):
        return False  # it is gone or another one, which is said where it is read


def _sample(things: Sequence[T], remote: bool) -> Sequence[T]:
    """All of few things; of many so many, at even distances."""
    most = MAX_REMOTE_READS if remote else MAX_READS
    return [things[i * len(things) // most] for i in range(most)] if len(things) > most else things
