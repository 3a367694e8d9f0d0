"""The config of a checkpoint's model: config.json, Megatron's arguments, or a given one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.errors import FormatError, LayoutError, SpecError
from jax_ucp.json_text import decode_json
from jax_ucp.shard_spec.expressions import MAX_SIZE, setting

_MAX_BYTES = 16 << 20
_NAMES = ("config", "args")
_OF_OTHERS = ("adapter_config.json",)  # items with a config that is not the model's
CONFIG = "config.json"  # the item that is preferred as the model's config
_OTHERS = "..."  # in the section `config` of a mapping, the settings that it does not name
_WHOLE = "config"  # in a setting, the whole config


def config_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config in a checkpoint's extras: config.json, or else the first item with a
    config or arguments.

    Several configs are not joined: a setting that one leaves out has the default of its model.
    """
    config: dict[str, Any] = {}
    for item, records in sorted(extras.items(), key=lambda item: item[0] != CONFIG):
        if item in _OF_OTHERS or config or not isinstance(records, dict):
            continue
        for name in _NAMES:
            record = records.get(name)
            fields = record.get("fields", record) if isinstance(record, dict) else None
            if isinstance(fields, dict) and fields:
                config = dict(fields)
                break
    return _with_counts(config)


def _with_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with counts that follow from Megatron's arguments.

    `query_groups` is the number of query groups; `num_query_groups` is 1 if there are none
    (`group_query_attention`), and `query_groups` is then the number of heads. `dense_layers` is the
    number of layers before the first with experts, by `moe_layer_freq`, or null if a layer without
    experts follows it. `window_keys` is the number of keys that a query attends to, itself
    included, by `window_size`, or null without a window or with one that does not end at the query.
    """
    counted = dict(config)
    if "num_query_groups" in counted and "num_attention_heads" in counted:
        grouped = counted.get("group_query_attention", False)
        counted.setdefault(
            "query_groups", counted["num_query_groups" if grouped else "num_attention_heads"]
        )
    if "moe_layer_freq" in counted and "num_layers" in counted:
        counted.setdefault("dense_layers", _dense_layers(counted["moe_layer_freq"]))
    if "window_size" in counted:
        counted.setdefault("window_keys", _window_keys(counted["window_size"]))
    return counted


def _dense_layers(frequency: object) -> int | None:
    """The number of dense layers before those of experts; None if they alternate.

    >>> _dense_layers([0, 0, 1, 1])
    2
    >>> _dense_layers(1)
    0
    """
    if not isinstance(frequency, list):
        return 0 if frequency == 1 else None
    count = frequency.count(0)
    return count if frequency == [0] * count + [1] * (len(frequency) - count) else None


def _window_keys(sides: object) -> int | None:
    """The number of positions that a query of Megatron attends to, itself included, by the sides of
    its window to the left and to the right; None without a window, or with one that looks ahead.

    >>> _window_keys({"!tuple": [127, 0]})
    128
    """
    match sides.get("!tuple") if isinstance(sides, Mapping) else sides:
        case [int(left), 0] if left >= 0:
            return left + 1
    return None


def settings_in(section: object) -> frozenset[str]:
    """The keys that the section `config` of a mapping uses. Raises SpecError if it is not valid."""
    if isinstance(section, str):
        return frozenset(setting(section).keys)
    if not isinstance(section, Mapping):
        return frozenset()
    if not all(isinstance(key, str) for key in section):
        raise SpecError(f"a config has names, not {', '.join(map(repr, section)):.80}")
    if not isinstance(section.get(_OTHERS, ""), str):
        raise SpecError(f"`{_OTHERS}` is a key of the config, or `{_WHOLE}` for all of it")
    return frozenset[str]().union(*map(settings_in, section.values()))


def config_from(
    section: Mapping[str, Any], config: Mapping[str, Any], lengths: Mapping[str, int]
) -> dict[str, Any]:
    """The config that the section `config` of a mapping makes of another config and lengths.

    A setting whose value is null is left out, unless the section itself has null. `...` keeps all
    settings that the section does not name. Raises LayoutError with every setting that lacks a
    value.
    """
    faults: list[str] = []
    of_leaves = _settings(section, {**config, **lengths, _WHOLE: config}, faults)
    if faults:
        raise LayoutError("the config of the leaves' model is not known:", faults)
    return of_leaves


def _settings(
    section: Mapping[str, Any], values: Mapping[str, Any], faults: list[str]
) -> dict[str, Any]:
    """The settings of a section, evaluated; a message for each that fails is added."""
    config: dict[str, Any] = {}
    others: Mapping[str, Any] = {}
    for key, content in section.items():
        value = content
        if isinstance(content, Mapping):
            value = _settings(content, values, faults) or None
        elif isinstance(content, str):
            try:
                value = setting(content).of(values)
            except SpecError as error:
                faults.append(f"config: {key}: {error}; give it, config= (--config)")
                continue
        if key == _OTHERS:
            if isinstance(value, Mapping):
                others = value
            else:
                faults.append(f"config: {content} is {value!r:.60}, and not a config")
        elif value is not None or content is None:
            config[key] = value
    return {**{key: value for key, value in others.items() if key not in section}, **config}


def numbers_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a config that may be lengths, by key, also as `text_config.num_layers`."""
    numbers: dict[str, int] = {}
    for key, value in config.items():
        if is_length(value):
            numbers[key] = value
        elif isinstance(value, Mapping):
            numbers |= {f"{key}.{name}": number for name, number in numbers_of(value).items()}
    return numbers


def is_length(value: object) -> bool:
    """Whether a config's value may be a length, as opposed to, say, -1 for "not set"."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def given_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A config that the user gives as a dict, a JSON file, or a folder with a config.json; counts
    are added. Raises FormatError for a bad file.
    """
    if isinstance(config, Mapping):
        return _with_counts(config)
    path = local_path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        content = decode_json(text) if len(text) <= _MAX_BYTES else None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read as a model's config: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(
            f"{path} is not a model's config, a JSON object of at most {_MAX_BYTES >> 20} MiB"
        )
    return _with_counts(content)


def joined(
    stored: Mapping[str, Any], given: Mapping[str, Any], used: frozenset[str]
) -> dict[str, Any]:
    """The stored config, with settings that only the given one has. Raises LayoutError if they
    differ in a used key, or in any key if the whole config is used.
    """
    both = stored.keys() & given.keys()
    compared = both if _WHOLE in used else both & used
    differ = [key for key in sorted(compared) if stored[key] != given[key]]
    if differ:
        key = differ[0]
        raise LayoutError(
            f"the given config has {key} = {given[key]!r:.60}, the checkpoint's own"
            f" {stored[key]!r:.60}: config= is for what a checkpoint does not say of its model"
        )
    return {**given, **stored}
