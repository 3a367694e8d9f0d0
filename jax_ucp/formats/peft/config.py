"""The config of a PEFT adapter, checked: its method, and its scale.

Facts: `LoraConfig` and `get_pattern_key` of peft 0.13 to 0.21 (`tuners/lora/`, `utils/other.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import FormatError, TreeMismatch
from jax_ucp.name_patterns import NamePatterns
from jax_ucp.text import visible

CONFIG = "adapter_config.json"
LORA = "LORA"  # the one `peft_type` that is merged
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
    """The config of a LoRA adapter. `where` is the file, for errors; `version` that of peft, empty
    where the config has none.
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
        checked = _Checked(config, where)
        ranks = checked.pattern("rank_pattern", whole=True)
        alphas = checked.pattern("alpha_pattern")
        remedy = "Say in rank_pattern and alpha_pattern the names of modules"
        return cls(
            where,
            int(checked.number("r", 8, whole=True)),
            checked.number("lora_alpha", 8),
            ranks,
            alphas,
            checked.switch("use_rslora"),
            checked.switch("use_dora"),
            checked.switch("fan_in_fan_out"),
            checked.names("target_parameters"),
            checked.names("modules_to_save"),
            checked.tokens("trainable_token_indices"),
            NamePatterns(map(_pattern, {**ranks, **alphas}), where, remedy),
            checked.version("peft_version"),
        )

    def scale(self, module: str, rank: int) -> float:
        """The scale of the factors of a module. Raises FormatError if it is not certain."""
        said = self._said(self.rank_pattern, module, self.rank)
        if said != rank:
            raise FormatError(
                f"{self.where} says that {module} has rank {said:g}, and its factors have {rank}"
            )
        alpha = self._said(self.alpha_pattern, module, self.alpha)
        first = self._first({**self.rank_pattern, **self.alpha_pattern}, module)
        as_before = self.alpha_pattern.get(first or "", self.alpha)
        if as_before != alpha and not self.version:
            raise FormatError(
                f"{self.where}: {module} matches {first!r} in rank_pattern and another pattern in"
                " alpha_pattern: the peft of 2024 took another alpha for it than later ones. Write"
                " the same patterns in both"
            )
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def _said(self, pattern: Mapping[str, float], module: str, otherwise: float) -> float:
        key = self._first(pattern, module)
        return otherwise if key is None else pattern[key]

    def _first(self, pattern: Mapping[str, float], module: str) -> str | None:
        """The first key that matches the end of a module's name, as peft has it."""
        if not pattern:
            return None
        matching = self.patterns.matching(module)
        return next((key for key in pattern if _pattern(key) in matching), None)


def _pattern(key: str) -> str:
    return rf"(.*\.)?({key})$"


def method_of(config: Any) -> str:
    said = config.get("peft_type") if isinstance(config, Mapping) else None
    return visible(str(said))[:80] if said else ""


def saved_modules(extras: Mapping[str, Any]) -> Sequence[str]:
    """The modules that were trained whole beside an adapter, by its config among the extras."""
    config = extras.get(CONFIG, {}).get("config")
    named = config.get("modules_to_save") if isinstance(config, Mapping) else None
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def with_config(contents: Contents, config: Mapping[str, Any]) -> Contents:
    """A checkpoint of factors with peft's config. Raises FormatError or TreeMismatch."""
    checked = LoraConfig.of(config, CONFIG)
    for leaf in contents.leaves:
        name = leaf.path[-1].name
        if leaf.path[0].name == "param" and not str(name).startswith(PREFIX):
            raise TreeMismatch(
                f"{contents.path}: {leaf.label} is not a parameter of an adapter of peft: map it"
                " back by the mapping of its base (--mapping)"
            )
        if leaf.path[0].name == "param" and str(name).endswith(".lora_A.weight"):
            module = str(name).removeprefix(PREFIX).removesuffix(".lora_A.weight")
            checked.scale(module, leaf.shape[0])
    extras = {**contents.extras, CONFIG: {"config": dict(config)}}
    return replace(contents, extras=extras)


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


@dataclass(frozen=True)
class _Checked:
    """Values of a config; each raises FormatError for what cannot be meant."""

    config: Mapping[str, Any]
    where: str

    def number(self, key: str, otherwise: float, whole: bool = False) -> float:
        value = self.config.get(key)
        return otherwise if value is None else self._number(key, value, whole)

    def version(self, key: str) -> tuple[int, ...]:
        """The first numbers of a version, as many as are numbers."""
        return tuple(map(int, re.findall(r"\d{1,4}", str(self.config.get(key) or ""))[:3]))

    def switch(self, key: str) -> bool:
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise FormatError(f"{self.where}: {key} should be true or false, not {value!r:.80}")
        return bool(value)

    def names(self, key: str) -> Sequence[str]:
        value = self.config.get(key) or ()
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in value):
            raise FormatError(f"{self.where}: {key} should be a list of names, not {value!r:.80}")
        return tuple(value)

    def tokens(self, key: str) -> Mapping[str, Sequence[int]]:
        """Numbers of tokens by the end of a module's name; of a list it is empty."""
        value = self.config.get(key) or {}
        by_module = value if isinstance(value, Mapping) else {"": value}
        for name, numbers in by_module.items():
            is_list = isinstance(numbers, list | tuple) and isinstance(name, str)
            if not is_list or not all(type(n) is int and n >= 0 for n in numbers):
                raise FormatError(
                    f"{self.where}: {key} should be a list of tokens' numbers, or one for each"
                    f" module, not {value!r:.80}"
                )
            if len(set(numbers)) < len(numbers):
                raise FormatError(f"{self.where}: {key} has a number twice")
        return by_module

    def pattern(self, key: str, whole: bool = False) -> Mapping[str, float]:
        value = self.config.get(key) or {}
        if not isinstance(value, Mapping):
            raise FormatError(
                f"{self.where}: {key} should map names to numbers, but is {value!r:.80}"
            )
        return {name: self._number(f"{key} of {name!r:.80}", n, whole) for name, n in value.items()}

    def _number(self, what: str, value: Any, whole: bool) -> float:
        """A number; a rank is a `whole` one."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and abs(value) <= _MOST_ALPHA
        if whole:
            fits = fits and 0 < value <= _MOST_RANK and value == int(value)
        if not fits:
            kind = "a whole number from 1" if whole else "a number"
            raise FormatError(f"{self.where}: {what} is {value!r:.80}, where it should be {kind}")
        return value
