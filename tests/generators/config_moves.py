"""`python tests/generators/config_moves.py TABLE.json [CASE...]`: which config keys move a model's
logits in the version of transformers that is installed, added to a table.

The models are those of `tests/data` that mappings are for. Every key is tried which the config's
class has, or which any code reads while the model is loaded and run, the code that all models share
included (`is_causal`, `per_layer_config`); each with several values, and some keys together. What
is called `moved` gives other logits, `same` the same ones for all its values, and `failed` none,
because transformers refuses the config or the weights. Each model has its config as transformers 5
writes it, and as 4 did (`v4`); 4 is run with the second alone, and 5 with only the keys of the
second that differ.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from config_changes import ABSENT, CASES, DATA, ONE_STYLE, SINCE_5, changed, v4_style

Config = dict[str, Any]
IGNORED = ("_attn_implementation", "_experts_implementation", "_name_or_path", "model_type")
# The last tokens of a text are read one by one: the cache of the keys and values before them is
# made by what the config says of layers.
STEPS, SHORT = 4, 24
ROUNDING = 1e-6  # of the scale of logits: the same sums in another order
TOKENS = torch.arange(40)[None] * 7 % 61
BASE = transformers.PretrainedConfig


class Reads:
    """The names of attributes that are read of configs, while it is entered."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> Reads:
        self._plain = BASE.__getattribute__

        def noted(config: Any, name: str) -> Any:
            self.names.add(name)
            return self._plain(config, name)

        BASE.__getattribute__ = noted
        return self

    def __exit__(self, *_: object) -> None:
        BASE.__getattribute__ = self._plain


def logits(folder: Path, config: Config) -> torch.Tensor:
    (folder / "config.json").write_text(json.dumps(config))
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    model.eval()
    tokens = TOKENS[:, :SHORT] if config["model_type"] == "gpt2" else TOKENS
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        begun = model(tokens[:, :-STEPS], use_cache=True)
        steps, cache = [begun.logits], begun.past_key_values
        for token in tokens[:, -STEPS:].split(1, dim=1):
            steps.append(model(token, past_key_values=cache, use_cache=True).logits)
    return torch.cat([whole, *steps], dim=1)


def keys(folder: Path, config: Config) -> dict[str, bool]:
    """Those that the class has, and those that are read; which are."""
    with Reads() as reads:
        logits(folder, config)
    plain = transformers.AutoConfig.for_model(config["model_type"])
    kind = type(plain)
    names = {*vars(plain), *reads.names, *config, *SPECIAL} - {*IGNORED}
    return {
        name: name in reads.names
        for name in sorted(names)
        if not name.startswith("__") and not callable(getattr(kind, name, None))
    }


def values(name: str, value: Any, layers: int) -> list[Any]:
    """Others than a key has."""
    if name in SPECIAL:
        return SPECIAL[name](layers)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1, None]
    if isinstance(value, float):
        return [value * 2 + 0.25, None]
    if isinstance(value, str):
        return ["relu", "gelu", None]
    return [True, False, 8, "other"]


def _layer_types(layers: int) -> list[Any]:
    kinds = ("full_attention", "sliding_attention", "chunked_attention")
    mixed = [kinds[layer % 2] for layer in range(layers)]
    return [*([kind] * layers for kind in kinds), mixed, None]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
NUMBERS = {"rope_theta": 5000.0, "factor": 3.0, "original_max_position_embeddings": 24,
    "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.5, "mscale_all_dim": 0.25,
    "attention_factor": 2.0, "truncate": False, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
    "partial_rotary_factor": 0.5}  # fmt: skip
ROPES: list[Config] = [
    YARN,
    {**YARN, "rope_theta": 5000.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 5000.0},
]
KINDS = ("full_attention", "sliding_attention")
OF_KINDS: list[Config] = [{kind: {"rope_theta": 1e4, **rope}} for rope in ROPES for kind in KINDS]


def _ropes(layers: int) -> list[Any]:
    # of the models here, Gemma 3 has more than four layers, of two kinds
    return [*ROPES, *(OF_KINDS if layers > 4 else OF_KINDS[:2]), {}, None]


SPECIAL = {
    "layer_types": _layer_types,
    "rope_scaling": lambda layers: _ropes(layers),
    "rope_parameters": lambda layers: _ropes(layers),
    "per_layer_config": lambda _: [{"0": {"sliding_window": 8}}, {"0": {"rms_norm_eps": 0.5}}],
    "mlp_only_layers": lambda layers: [[0], [layers - 1], None],
    "pruned_heads": lambda _: [{"0": [0]}],
    "text_config": lambda _: [{"hidden_act": "relu"}, {"rms_norm_eps": 0.5}, {}],
    "quantization_config": lambda _: [None],
    "rope_theta": lambda _: [5000.0, None],
    "rope_local_base_freq": lambda _: [500.0],
    "sliding_window": lambda _: [4, 8, 64, 4096, None],
    "hidden_activation": lambda _: ["relu", "gelu", "silu", None],
    "sliding_window_pattern": lambda _: [2, 3],
}
TOGETHER: list[Config] = [
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"sliding_window": 8, "attention_chunk_size": 8},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    {"rope_scaling": YARN, "rope_theta": 10000.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000.0},
    {"is_decoder": True, "add_cross_attention": True},
    {"is_causal": False, "is_decoder": False},
    {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
]


def changes(name: str, config: Config) -> Iterator[Config]:
    layers = config.get("num_hidden_layers", config.get("n_layer", 1))
    for value in values(name, config.get(name), layers):
        if name not in config or config[name] != value or type(config[name]) is not type(value):
            yield {name: value}
    rope = config.get(name)
    if name in ("rope_parameters", "rope_scaling") and isinstance(rope, dict):
        yield from ({name: one} for one in _inner(rope))


def _inner(rope: Config) -> Iterator[Config]:
    """A rotation with one other number, or of one kind of layers."""
    kinds = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    for kind, of_kind in kinds.items():
        yield from ({**rope, kind: one} for one in _inner(of_kind))
    for key, value in {} if kinds else {**NUMBERS, **rope}.items():
        yield from ({**rope, key: one} for one in (NUMBERS.get(key), value) if one != rope.get(key))
        if isinstance(value, float):
            yield {**rope, key: value * 2 + 0.25}


def effect(folder: Path, config: Config, plain: torch.Tensor) -> str:
    try:
        found = logits(folder, config)
    except Exception:
        return "failed"
    if found.shape != plain.shape:
        return "moved"
    is_same = (found - plain).abs().max() <= ROUNDING * plain.abs().max()
    return "same" if is_same else "moved"


def measured(case: str, style: str, version: str) -> Config:
    """What every change of one model's config does."""
    source = DATA / case / "ckpt"
    stored = json.loads((source / "config.json").read_text())
    config = v4_style(stored) if style == "v4" else stored
    outcome: Config = {"moved": [], "failed": [], "same": []}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(shutil.copytree(source, Path(work) / "model"))
        plain = logits(folder, config)
        names = {**keys(folder, config), "": True}
        if style == "v4" and version >= "5":
            names = {key: names[key] for key in names if key in SPECIAL or key not in stored}
        for name, is_read in names.items():
            tried = list(changes(name, config)) if name else TOGETHER
            tried = tried if is_read or name in config or name in SPECIAL else tried[:1]
            tried += [{name: ABSENT}] if name in config else []
            kinds: list[str] = []
            for change in tried:
                kinds.append(effect(folder, changed(config, change), plain))
                if kinds[-1] != "same":
                    outcome[kinds[-1]].append(change)
            if name and set(kinds) == {"same"}:
                outcome["same"].append(name)
    return outcome


def dumped(table: Config) -> str:
    """A table with a line for each change."""
    lines: list[str] = []
    for case, runs in table.items():
        lines.append(f'"{case}": {{')
        for run, outcome in runs.items():
            lines.append(f' "{run}": {{')
            for kind, items in outcome.items():
                texts = ",\n".join(f"   {json.dumps(one)}" for one in items)
                lines += [f'  "{kind}": [', texts, "  ],"]
            lines[-1] = "  ]"
            lines.append(" },")
        lines[-1] = " }"
        lines.append("},")
    return "\n".join(["{", *lines[:-1], "}", "}", ""])


def main(table: Path, cases: list[str]) -> None:
    transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    content = json.loads(table.read_text()) if table.exists() else {}
    version = transformers.__version__
    known = [case for case in CASES if version >= "5" or case not in SINCE_5]
    for case in cases or known:
        styles = ("v5", "v4") if version >= "5" else ("v4",)
        for style in styles[:1] if case in ONE_STYLE else styles:
            torch.manual_seed(0)
            content.setdefault(case, {})[f"{version} {style}"] = measured(case, style, version)
            table.write_text(dumped(content))
            print(case, style, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
