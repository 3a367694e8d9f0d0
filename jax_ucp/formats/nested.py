"""Dicts and lists of unpickled files, read where another writer may have put something else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax_ucp.codecs.unpickle import what_is
from jax_ucp.errors import FormatError, UCPError


@contextmanager
def as_written(fault: str) -> Iterator[None]:
    """A context that raises FormatError with `fault` where an entry is missing, or of another type
    than its writers give it.
    """
    try:
        yield
    except UCPError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FormatError(f"{fault} ({type(error).__name__}: {error})") from error


def as_dict(tree: Any) -> dict[Any, Any]:
    """The dict, or an empty one in place of anything else."""
    return tree if isinstance(tree, dict) else {}


def require_dict(tree: Any, what: str) -> dict[Any, Any]:
    """The dict. Raises FormatError for anything else, and calls it `what`."""
    if not isinstance(tree, dict):
        raise FormatError(f"{what} should be a dict, but is {what_is(tree)}")
    return tree


def as_list(tree: Any) -> list[Any]:
    """The list, or an empty one in place of anything else."""
    return tree if isinstance(tree, list) else []


def config_in(extras: Mapping[str, Any], file: str = "config.json") -> Mapping[str, Any]:
    """The config that was kept from a file among the extras; empty if there is none.

    >>> config_in({"config.json": {"config": {"model_type": "llama"}}})["model_type"]
    'llama'
    """
    config = extras.get(file, {}).get("config")
    return config if isinstance(config, Mapping) else {}


def group_with(groups: Iterable[Mapping[str, Any]], number: int) -> Mapping[str, Any]:
    """The first of an optimizer's groups that has the parameter of this number, or nothing.

    >>> group_with([{"lr": 1.0, "params": [0]}, {"lr": 2.0, "params": [1]}], 1)["lr"]
    2.0
    """
    return next((group for group in groups if number in group.get("params", ())), {})
