"""The config of a PEFT adapter, checked: its method, and its scale.

Facts: `LoraConfig` and `get_pattern_key` of peft 0.13 to 0.21 (`tuners/lora/`, `utils/other.py`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import FormatError, TreeMismatch
from jax_ucp.formats.nested import config_in
from jax_ucp.layout.fragments import Shape
from jax_ucp.name_patterns import NamePatterns
from jax_ucp.text import visible

CONFIG = "adapter_config.json"
LORA = "LORA"  # the one `peft_type` that is merged
_A = ".lora_A.weight"
PREFIX = "base_model.model."  # what the names of a model's modules have before them

# No adapter has so large a rank, nor an alpha.
_MOST_RANK, _MOST_ALPHA = 1 << 20, 1e9

# What is decided by here, and what says nothing of the numbers that an adapter's tensors stand for:
# how it was trained, or which modules it has, which its tensors say.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out"}
_READ |= {"rank_pattern", "alpha_pattern", "target_parameters", "init_lora_weights"}
_READ |= {"modules_to_save", "trainable_token_indices"}
_INERT = {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"}
_INERT |= {"target_modules", "exclude_modules", "lora_dropout", "bias", "layers_to_transform"}
_INERT |= {"layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"}
_INERT |= {"corda_config", "lora_ga_config", "runtime_config", "lora_bias", "peft_version"}
_INERT |= {"ensure_weight_tying", "velora_config", "qalora_group_size"}

# With any other, peft changes the base before it trains: what is stored is to be added to that.
_LEAVE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """The config of a LoRA adapter.

    `where` is the file, for errors. `tokens` are the numbers of tokens by the end of a module's
    name, which is empty if the config has one list for all. `version` has the first three numbers
    of peft's version, and is empty if the config has none.
    """

    where: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    dora: bool
    fan_in_fan_out: bool
    target_parameters: Sequence[str]
    modules_to_save: Sequence[str]
    tokens: Mapping[str, Sequence[int]]
    patterns: NamePatterns
    version: tuple[int, ...]

    @classmethod
    def of(cls, config: Any, where: str) -> LoraConfig:
        """The config in a file. Raises FormatError for another method or an unknown setting."""
        if not isinstance(config, Mapping):
            raise FormatError(f"{where} is not a config of an adapter, but {config!r:.80}")
        _require_lora(config, where)
        settings = _settings(config, where)
        ranks, alphas = settings["rank_pattern"], settings["alpha_pattern"]
        remedy = "Say in rank_pattern and alpha_pattern the names of modules"
        tokens = settings["trainable_token_indices"]
        return cls(
            where,
            int(settings["r"]),
            settings["lora_alpha"],
            ranks,
            alphas,
            settings["use_rslora"],
            settings["use_dora"],
            settings["fan_in_fan_out"],
            settings["target_parameters"],
            settings["modules_to_save"],
            tokens if isinstance(tokens, Mapping) else {"": tokens},
            NamePatterns(map(_pattern, {**ranks, **alphas}), where, remedy),
            tuple(map(int, re.findall(r"\d{1,4}", str(config.get("peft_version") or ""))[:3])),
        )

    def scale(self, module: str, rank: int) -> float:
        """The scale of the factors of a module. Raises FormatError if it is not certain."""
        config_rank = self.rank_pattern.get(self._key(self.rank_pattern, module), self.rank)
        if config_rank != rank:
            raise FormatError(
                f"{self.where} says that {module} has rank {config_rank:g}, and its factors have"
                f" {rank}"
            )
        alpha = self.alpha_pattern.get(self._key(self.alpha_pattern, module), self.alpha)
        first = self._key({**self.rank_pattern, **self.alpha_pattern}, module)
        if self.alpha_pattern.get(first, self.alpha) != alpha and not self.version:
            raise FormatError(
                f"{self.where}: {module} matches {first!r} in rank_pattern and another pattern in"
                " alpha_pattern: the peft of 2024 took another alpha for it than later ones. Write"
                " the same patterns in both"
            )
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def _key(self, pattern: Mapping[str, float], module: str) -> str:
        """The first key that matches the end of a module's name, by peft's rules, or empty."""
        matching = self.patterns.matching(module) if pattern else ()
        return next((key for key in pattern if _pattern(key) in matching), "")


def _pattern(key: str) -> str:
    return rf"(.*\.)?({key})$"


def method_of(config: Mapping[str, Any]) -> str:
    """The name of an adapter's method, for messages; empty if the config has none."""
    method = config.get("peft_type")
    return visible(str(method))[:80] if method else ""


def saved_modules(extras: Mapping[str, Any]) -> Sequence[str]:
    """The modules that were trained whole beside an adapter, by its config among the extras."""
    named = config_in(extras, CONFIG).get("modules_to_save")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def with_config(contents: Contents, config: Mapping[str, Any]) -> Contents:
    """A checkpoint of factors with peft's config. Raises FormatError or TreeMismatch."""
    checked = LoraConfig.of(config, CONFIG)
    params = [leaf for leaf in contents.leaves if leaf.path[0].name == "param"]
    for leaf in params:
        if not str(leaf.path[-1].name).startswith(PREFIX):
            raise TreeMismatch(
                f"{contents.path}: {leaf.label} is not a parameter of an adapter of peft: map it"
                " back by the mapping of its base (--mapping)"
            )
    _alphas(checked, {str(leaf.path[-1].name): leaf.shape for leaf in params})
    extras = {**contents.extras, CONFIG: {"config": dict(config)}}
    return replace(contents, extras=extras)


def notes_of_alphas(contents: Contents, factors: Mapping[str, Shape]) -> list[str]:
    """A note with the alphas by which qwix gives an opened adapter's factors their scales, if they
    are not all the config's `lora_alpha`. Raises FormatError for a config that is not of LoRA.
    """
    said = contents.extras.get(CONFIG, {}).get("config")
    if said is None:
        return []
    config = LoraConfig.of(said, f"{contents.path}/{CONFIG}")
    alphas = _alphas(config, factors)
    if not {*alphas} - {config.alpha}:
        return []
    listed = [
        f"{alpha:g} for {modules[0]}" + f" and {len(modules) - 1} more" * (len(modules) > 1)
        for alpha, modules in alphas.items()
    ]
    return [
        "no leaf has the scales of factors: for them a trainer that multiplies by alpha / rank, as"
        f" qwix does, needs alpha {', '.join(listed[:4])}{', ...' * (len(listed) > 4)}"
    ]


def _alphas(config: LoraConfig, factors: Mapping[str, Shape]) -> dict[float, list[str]]:
    """The modules by their scale times their rank. Raises FormatError if a scale is not certain."""
    alphas: dict[float, list[str]] = defaultdict(list)
    for name, shape in factors.items():
        if name.endswith(_A):
            module = name.removeprefix(PREFIX).removesuffix(_A)
            alpha = config.scale(module, shape[0]) * shape[0]
            alphas[float(f"{alpha:.9g}")].append(module)
    return dict(alphas)


def _require_lora(config: Mapping[str, Any], where: str) -> None:
    method = method_of(config)
    if method != LORA:
        raise FormatError(
            f"{where} is of an adapter of the kind {method or 'that it does not name'}: only LORA"
            " (with rsLoRA and DoRA) is merged; merge it with peft"
        )
    init = config.get("init_lora_weights")
    if not any(init is known or init == known for known in _LEAVE_THE_BASE):
        raise FormatError(
            f"{where} says init_lora_weights={init!r:.80}: the base was changed before it was"
            " trained, and what is stored is to be added to that. Let peft write it as plain LoRA"
            " (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    others = {key for key, value in config.items() if value} - _READ - _INERT
    if others:
        named = ", ".join([f"{key}={config[key]!r:.60}" for key in sorted(others)][:4])
        raise FormatError(
            f"{where} says {named:.400}, and what that makes of the weights is not known here:"
            " merge it with peft"
        )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_ALPHA


def _is_rank(value: Any) -> bool:
    return _is_number(value) and 0 < value <= _MOST_RANK and value == int(value)


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


def _is_table_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(fits, value.values()))


def _are_tokens(value: Any) -> bool:
    is_list = _is_list_of(value, lambda number: type(number) is int and number >= 0)
    return is_list and len(set(value)) == len(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


_SWITCH = lambda value: isinstance(value, bool), "true or false", False
_NAMES = lambda value: _is_list_of(value, _is_name), "a list of names", ()
# The settings that are read: whether a value can be meant, what it should be, and the default.
_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str, Any]] = {
    "r": (_is_rank, "a whole number from 1", 8),
    "lora_alpha": (_is_number, "a number", 8),
    "rank_pattern": (lambda v: _is_table_of(v, _is_rank), "whole numbers from 1 by name", {}),
    "alpha_pattern": (lambda v: _is_table_of(v, _is_number), "numbers by name", {}),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), _SWITCH),
    **dict.fromkeys(("target_parameters", "modules_to_save"), _NAMES),
    "trainable_token_indices": (
        lambda value: _are_tokens(value) or _is_table_of(value, _are_tokens),
        "a list of tokens' numbers, each once, or such a list for each module",
        {},
    ),
}


def _settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a config, with defaults. Raises FormatError if one cannot be meant."""
    settings: dict[str, Any] = {}
    for name, (fits, kind, default) in _SETTINGS.items():
        value = config.get(name)
        if value is not None and not fits(value):
            raise FormatError(f"{where}: {name} is {value!r:.80}, where it should be {kind}")
        settings[name] = default if value is None else value
    return settings
