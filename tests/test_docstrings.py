"""What a public docstring says of arguments and errors is what the code has."""

import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jax_ucp as ucp


def sections(text: str) -> dict[str, list[str]]:
    """The names that begin the items of each section (`Args:`, `Raises:`) of a docstring."""
    found: dict[str, list[str]] = {}
    items: list[str] = []
    for line in text.splitlines():
        if heading := re.fullmatch(r"([A-Z][a-z]+):", line):
            items = found.setdefault(heading[1], [])
        elif item := re.match(r" {4}(\w+):(?: |$)", line):
            items.append(item[1])
    return found


# A docstring may leave out arguments that another has, whose name it gives.
ELSEWHERE = re.compile(r"arguments\s+are\s+those\s+of\s+`([\w.]+)`")


def parameters(function: Callable[..., Any]) -> list[str]:
    each = inspect.signature(function).parameters.values()
    return [one.name for one in each if one.name not in ("self", "cls")]


def wrong(function: Callable[..., Any]) -> list[str]:
    """What the docstring of a function or class has too much or too little."""
    text = inspect.getdoc(function) or ""
    said = sections(text)
    names = parameters(function)
    faults = []
    described: list[str] = said.get("Args", [])
    if other := ELSEWHERE.search(text):
        place = other[1] if other[1] in PUBLIC else f"Checkpoint.{other[1]}"
        theirs = sections(inspect.getdoc(PUBLIC[place]) or "")["Args"]
        if lacking := [name for name in names if name not in {*described, *theirs}]:
            faults.append(f"Args are those of {place}, which lacks {lacking}")
        names = [name for name in names if name in described]
    if names and described != names:
        faults.append(f"Args are {said.get('Args')}, and it takes {names}")
    for error in said.get("Raises", []):
        if not hasattr(ucp.errors, error) and not hasattr(builtins, error):
            faults.append(f"there is no {error}")
    return faults


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What `jax_ucp` exports, and the methods of its classes."""
    exported = {name: getattr(ucp, name) for name in ucp.__all__}
    exported |= {f"args.{name}": getattr(ucp.args, name) for name in ("Save", "Restore")}
    for name, value in exported.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        for method in vars(value):
            bound = getattr(value, method)
            if (method == "__getitem__" or method[0] != "_") and callable(bound):
                yield f"{name}.{method}", bound


PUBLIC = dict(public())


@pytest.mark.fast
@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_says_every_argument_in_order_and_errors_that_there_are(name):
    assert wrong(PUBLIC[name]) == []


@pytest.mark.fast
def test_a_docstring_that_says_otherwise_is_seen():
    def restore(target: int, mesh: int) -> None:
        """It.

        Args:
            mesh: a mesh.

        Raises:
            TreeMissmatch: never.
        """

    def plan(target: int, mesh: int, colour: int) -> None:
        """It, whose arguments are those of `restore`."""

    arguments = "Args are ['mesh'], and it takes ['target', 'mesh']"
    assert wrong(restore) == [arguments, "there is no TreeMissmatch"]
    assert wrong(plan) == ["Args are those of Checkpoint.restore, which lacks ['colour']"]


@pytest.mark.fast
@pytest.mark.parametrize("name", ["open", "diff", "Checkpoint.restore", "Checkpoint.save"])
def test_what_is_called_first_has_an_example(name):
    assert {"Example", "Examples"}.intersection(sections(inspect.getdoc(PUBLIC[name]) or ""))
