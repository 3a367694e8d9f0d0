"""Types of options: sizes, meshes, rules, renames, orders of optimizers, shares."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jax_ucp.options import rule_of

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_AXIS = re.compile(r"\w+=(?=0*[1-9])[0-9]{1,9}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class TextType(click.ParamType):
    """A type of option, by a function that parses a text, or raises ValueError with the fault."""

    def __init__(self, name: str, parse: Callable[[str], Any]):
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


def _nbytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if nbytes < 1:
        raise ValueError("is not a size; write 512MiB or 2G")
    return nbytes


def _named_size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not re.fullmatch(r"[0-9]{1,18}", number):
        raise ValueError("is not a name with a size; write vocab=50257")
    return name, int(number)


def _mesh(text: str) -> dict[str, int]:
    axes = text.split(",")
    sizes = dict(axis.split("=") for axis in axes if _AXIS.fullmatch(axis))
    if len(sizes) != len(axes):
        raise ValueError("is not a mesh; write data=4,model=2")
    return {name: int(size) for name, size in sizes.items()}


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def _rule(text: str) -> Rule:
    from jax.sharding import PartitionSpec

    pattern, equals, axes = text.rpartition("=")
    if not equals:
        raise ValueError("is not a rule; write 'kernel$=data,None'")
    _regex(pattern)
    names = [tuple(axis.split("+")) if "+" in axis else axis for axis in axes.split(",")]
    return pattern, PartitionSpec(*[None if name in ("None", "") else name for name in names])


def _rename(text: str) -> tuple[str, str]:
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise ValueError("renames nothing; write param=params")
    return first, second


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"is not an object of JSON: {error}") from None


def _optimizer_groups(text: str) -> str | list[list[str]]:
    if rule_of(text):
        return text
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=list[list[str]])
    except OSError as error:
        raise ValueError(
            f"is neither module-order nor hf-decay nor a file that can be read ({error.strerror})"
        ) from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"is not a JSON file of lists of names: {error}") from None


def _share(text: str) -> tuple[int, int]:
    word, _, count = text.partition("/")
    if word == "auto":
        word, default = _from_scheduler(os.environ)
        count = count or default
    if not (word.isdecimal() and count.isdecimal() and int(word) < int(count)):
        raise ValueError(
            "is not a share: give I/N with I from 0 to N - 1, or auto if SLURM or MPI started this"
            " process (auto/N for an indexed job of Kubernetes)"
        )
    return int(word), int(count)


SIZE = TextType("bytes", _nbytes)
NAMED_SIZE = TextType("name=n", _named_size)
MESH_SIZES = TextType("axis=size,...", _mesh)
REGEX = TextType("regex", _regex)
RULE = TextType("regex=axis,...", _rule)
RENAME = TextType("first=second", _rename)
JSON_OBJECT = TextType("json", _json_object)
OPTIMIZER_GROUPS = TextType("module-order|hf-decay|file.json", _optimizer_groups)
SHARE_OF = TextType("share", _share)


def _from_scheduler(environment: Mapping[str, str]) -> tuple[str, str]:
    """The index of this process, from 0 on, among those that a scheduler started together, and
    their number; empty texts if the environment does not have them.

    Sources: sbatch(1) and srun(1) of SLURM 24.05; "Indexed Job" of Kubernetes 1.31, which lacks the
    number; mpirun(1) of Open MPI 5; PMI of MPICH 4.
    """
    for index, count, first in _SCHEDULERS:
        begin = environment.get(first, "0")
        if environment.get(index, "").isdecimal() and begin.isdecimal():
            return str(int(environment[index]) - int(begin)), environment.get(count, "")
    return "", ""


# Index, count, first index.
_SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
)
