"""Optimizer settings of parameters: the groups of torch's `param_groups`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from jax_ucp.text import html_table, is_encodable, visible


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """Parameters that a trainer's optimizer treated alike, and how: torch's `param_groups`, lr,
    betas, weight_decay.

    `params` are named as below `param`; of the settings those that are tensors are left out.
    """

    params: tuple[str, ...]
    settings: dict[str, Any]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return visible(f"<{len(self.params)} parameters: {settings}>")

    def _repr_html_(self) -> str:
        settings = [(name, str(value)) for name, value in self.settings.items()]
        return html_table(f"{len(self.params)} parameters", ("setting", "value"), settings)


def settings_by_parameter(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    return {name: group.settings for group in groups for name in group.params}


def groups_of(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Group, ...]:
    """Parameters with the same settings together, in the order in which they come; those without
    any are left out.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name, values in settings.items():
        if values:
            alike[msgspec.json.encode(values, order="sorted").decode()].append(name)
    return tuple(Group(tuple(names), dict(settings[names[0]])) for names in alike.values())


def common_settings(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all of several have with equal values."""
    first, *others = several
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a torch group that JSON can hold, with tuples as lists, and without its
    parameters.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        if isinstance(value, str):
            return is_encodable(value)
        return (
            value is None
            or isinstance(value, bool | int)
            or (isinstance(value, float) and isfinite(value))
        )

    kept = {
        key: value
        for key, value in values.items()
        if key not in ("params", "param_names") and plain(value)
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}
