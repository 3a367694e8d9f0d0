"""Quantised weights, recognised in any format: tensors that mean something only together.

A table has the schemes: which tensor holds the codes, which others they need, what the weight is
called that they stand for. With a quantisation declared by a model's config, a tensor of codes that
no scheme explains is not taken for a weight either. Names are labels joined by dots, in any format.

Sources: `quantizers/` and `integrations/` of transformers 4.57 (fp8, mxfp4, gptq, awq, eetq, hqq,
quanto), bitsandbytes 0.48 `functional.py` (QuantState.as_dict), compressed-tensors 0.12
`compressors/`, TensorRT Model Optimizer `export/` (NVFP4), torchao 0.14 `prototype/safetensors`,
MLX `nn/layers/quantized.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.contents import STORED, Contents, QuantizedWeight, how_to_open
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.arrays.value import Array
from jax_ucp.formats.huggingface import conv1d
from jax_ucp.formats.nested import config_in
from jax_ucp.formats.packed_experts import with_own_scales
from jax_ucp.formats.quantized.names import ABOUT_ACTIVATIONS, GGML
from jax_ucp.json_text import decode_json
from jax_ucp.options import Dequantize
from jax_ucp.tree import Key, Leaf

# Dtypes, by how their names begin: codes of a few bits, codes packed into wider integers, numbers.
_FEW_BITS = ("float8_", "float6_", "float4_", "int8", "uint8", "int4", "uint4", "int2", "uint2")
_PACKED = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
_FLOATING = ("float", "bfloat")
_SCALES = (*_FLOATING, "uint8")  # 8 bits hold an exponent (E8M0), or are quantised themselves
_ANY = ("",)

# Of the module whose weight is quantised. They are about activations and caches, and mean nothing
# without it.
_OF_THE_MODULE = (*sorted(ABOUT_ACTIVATIONS), "pre_quant_scale")

# Scales of a cache of keys and values that is quantised when the model runs; the weights need not
# be.
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")

# Where configs declare such a cache (compressed-tensors and AutoFP8, ModelOpt).
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")

# Integers that models have beside weights.
_NO_CODES = ("bias", "mask", "_ids", "_index", "_indices", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one method names what it stores of a weight.

    The codes are called `base + codes`, the weight `base + weight`. Each of `needs` is one part
    without which there is no weight, under any of the names (`base + name`) given for it; `may` are
    others. `dtypes` are those of the codes, `scales` those of the first part needed, by how their
    names begin. `fits(codes, scales)` compares shapes, where other tensors may have the same names.
    """

    name: str
    codes: str
    weight: str
    needs: tuple[tuple[str, ...], ...]
    may: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = _FEW_BITS
    scales: tuple[str, ...] = _SCALES
    fits: Callable[[tuple[int, ...], tuple[int, ...]], bool] = lambda codes, scales: True


def _a_scale_for_each_row(codes: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    return codes[:-1] == scales


_NF4 = (
    *(".nested_absmax", ".nested_quant_map"),
    *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
)
_TORCHAO = (
    *("_zero_point", "_per_tensor_scale", "_act_pre_scale"),
    *("_act_quant_scale", "_act_quant_zero_point", "_act_per_tensor_scale"),
)
_SCALED = "fp8, int8 or NVFP4 with scales"
_MORE = ("_scale_2", "_global_scale", "_zero_point", "_g_idx", "_shape")

# The first that fits tensors takes them.
SCHEMES = (
    # Codes may have any dtype (`bnb_4bit_quant_storage`).
    Scheme("bitsandbytes 4-bit", "", "", ((".absmax",), (".quant_map",)), _NF4, _ANY),
    Scheme("bitsandbytes int8", ".weight", ".weight", ((".SCB",),), (".weight_format",), ("int8",)),
    # Codes in 16 bits are those that somebody cast without their scales.
    Scheme("fp8 with block scales", "", "", (("_scale_inv",),), (), (*_FEW_BITS, *_FLOATING)),
    Scheme("compressed-tensors, packed", "_packed", "", (("_scale",),), _MORE, _PACKED),
    Scheme(_SCALED, "", "", (("_scale", "_scales"),), _MORE),
    Scheme(_SCALED, ".weight", ".weight", ((".scale",),), (".zero_point",)),
    Scheme("GPTQ or AWQ", ".qweight", ".weight", ((".scales",),),
           (".qzeros", ".g_idx", ".scaled_zeros"), _PACKED),
    Scheme("MXFP4", "_blocks", "", (("_scales",),), (), ("uint8",), fits=_a_scale_for_each_row),
    Scheme("MXFP4", ".blocks", "", ((".scales",),), (), ("uint8",), fits=_a_scale_for_each_row),
    Scheme("MLX", ".weight", ".weight", ((".scales",),), (".biases", ".global_scale"), ("uint32",),
           fits=lambda codes, scales: len(codes) > 1 and codes[:-1] == scales[:-1]),
    Scheme("quanto", "._data", "", (("._scale",),), ("._shift",), _ANY),
    Scheme("HQQ", ".W_q", ".weight", ((".scale", ".meta.scale"),), (".zero", ".meta.zero"), _ANY),
    Scheme("torchao", "_qdata", "", (("_scale", "_scale_and_zero"),), _TORCHAO, _ANY),
)  # fmt: skip

# llm-compressor's `save_pretrained` with save_compressed=False writes the parameters of a module as
# they are (compressed-tensors 0.20 `quantization/lifecycle/initialize.py`). Where nobody speaks of
# quantisation, these names are anybody's.
_DENSE = Scheme("numbers with scales", "", "", (("_scale",),), _MORE, _FLOATING, _FLOATING)


def settle(contents: Contents, dequantize: Dequantize) -> Contents:
    """The checkpoint with quantised weights marked, kept as parts (False), or dequantised.

    Parts in imports are kept under the state `stored`; a JAX program's tree stays as it was saved.
    Raises QuantizedWeights and FormatError if weights cannot be dequantised.
    """
    if contents.source.get("dequantize") is False and "mapping" in contents.source:
        return contents  # a mapping has put the parts where a model has them
    method, settings = declaration(contents.extras)
    if method == "fp8" and dequantize is not False and _imported(contents):
        match settings.get("weight_block_size"):
            case [int(rows), int(columns)]:
                contents = with_own_scales(contents, (rows, columns))
    weights = [*quantized_weights(contents, method, bool(dequantize))]
    if dequantize or (dequantize is None and not weights):
        contents = _without_cache_scales(contents, weights)
    if not weights:
        notes = [*contents.notes]
        if method and contents.source.get("dequantize") is None:
            notes.append(
                f"the config declares weights quantised with {method}, but none is stored so: they"
                " are taken as they are"
            )
        if scales := _cache_scales(contents):
            notes.append(
                f"{len(scales)} tensors, the first {scales[0].label}, are named as scales of a"
                " quantised cache of keys and values: they say nothing of weights"
            )
        return replace(contents, notes=notes)
    # which only weights that are quantised need
    from jax_ucp.formats.quantized.schemes import why_unread
    from jax_ucp.formats.quantized.settled import Declared, dequantized

    if dequantize:
        # the settings of single weights in the headers of safetensors, by name (torchao)
        every = [own for own in contents.extras.values() if isinstance(own, Mapping)]
        headers = [own for own in every if "tensor_names" in own]
        of_weights: dict[str, Mapping[str, Any]] = {}
        for name, text in itertools.chain.from_iterable(own.items() for own in headers):
            with suppress(ValueError, TypeError):
                value = decode_json(text)
                if isinstance(value, dict) and "_type" in value:
                    of_weights[name] = value
        said = Declared(method, settings, of_weights)
        made = dequantized(contents, weights, said, dequantize)
        # The config declares no quantisation any more; what it declared is in `source`.
        source, notes = {**made.source, "quantization": settings}, [*made.notes]
        extras = undeclared(made.extras)
        if turned := conv1d.turned(method, extras, [weight.name for weight in weights]):
            source[conv1d.MARK] = turned
            notes.append(conv1d.note(turned, method))
        return replace(made, extras=extras, source=source, notes=notes)
    weights = [replace(weight, unread=why_unread(method, weight)) for weight in weights]
    reasons = {
        label: f"{role} of the quantised weight {weight.name} ({weight.scheme})"
        for weight in weights
        for role, label in weight.parts.items()
    }
    inventory = contents.with_reasons(reasons)
    marked = replace(contents, inventory=inventory, quantized=weights)
    if dequantize is False:
        return _kept(marked)
    note = (
        f"{len(weights)} weights are quantised, the first {weights[0]}: they are refused as"
        f" weights; {how_to_open(weights)}"
    )
    return replace(marked, notes=[*contents.notes, note])


def quantized_weights(contents: Contents, method: str, is_asked: bool) -> Iterator[QuantizedWeight]:
    """Every weight stored as codes, with parts; `method` is what a config declares, `is_asked` that
    they are to be dequantised.
    """
    # the leaves with an array, but for parts that are kept as such, by their labels with dots
    arrays = [leaf for leaf in contents.leaves if leaf.has_array]
    if _imported(contents):
        arrays = [leaf for leaf in arrays if leaf.path[0].name != STORED]
    # ggml's blocks have their type in the file, whatever else is called as a scale is
    of_ggml = [each for each in contents.quantized if each.scheme.startswith(GGML)]
    described = {label for weight in of_ggml for label in weight.parts.values()}
    leaves = {leaf.label.replace("/", "."): leaf for leaf in arrays if leaf.label not in described}
    claimed: set[str] = set()
    is_dense = method == "compressed-tensors" or (is_asked and not method)
    dense = (_DENSE,) * is_dense
    for weight in _by_names(leaves, (*SCHEMES, *dense)):
        claimed |= set(weight.parts.values())
        yield _labelled(weight, leaves)
    for weight in contents.quantized:
        name = weight.name.replace("/", ".")
        if name not in claimed:
            claimed.add(name)
            yield weight
    if method:
        for weight in _unexplained(leaves, claimed, method):
            yield _labelled(weight, leaves)


# Where a quantisation is declared: the file, and the key in it.
_DECLARED = (
    ("config.json", "quantization_config"),
    ("config.json", "compression_config"),
    ("config.json", "quantization"),
    ("hf_quant_config.json", "quantization"),
    ("quantize_config.json", ""),
    ("quant_config.json", ""),
    ("params.json", "quantization"),
)
_METHODS = ("quant_method", "quant_algo", "qformat_weight", "format")
# The settings of MLX's `convert`, which names no method (mlx-lm 0.28 `utils.py`, `quantize_model`).
_MLX = {"group_size", "bits"}


def declared(extras: Mapping[str, Any]) -> str:
    """The quantisation that a config among the extras declares; empty if none does.

    >>> declared({"config.json": {"config": {"quantization_config": {"quant_method": "fp8"}}}})
    'fp8'
    """
    return declaration(extras)[0]


def declaration(extras: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The method that a config among the extras declares, or an empty text, and its settings."""
    for settings, otherwise in _settings(extras):
        if not isinstance(settings, Mapping):
            continue
        is_mlx = settings.keys() >= _MLX and not otherwise.endswith(".json")
        named = (str(settings[key] or "") for key in _METHODS if key in settings)
        if method := next(named, "MLX" if is_mlx else otherwise):
            # DeepSeek-V4 has it beside the settings, and V4.1 among them
            experts = config_in(extras).get("expert_dtype")
            return method, settings if experts is None else {"expert_dtype": experts, **settings}
    return "", {}


def _settings(extras: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """The value at each place where a config may declare its quantisation, which may be None, with
    the key or the file of the place.
    """
    for file, key in _DECLARED:
        config = extras.get(file, {}).get("config")
        for inner in (config, _item(config, "text_config")):
            yield (_item(inner, key) if key else inner), key or file


def undeclared(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The extras with configs that declare no quantisation."""
    left = {file: {**named} for file, named in extras.items()}
    for file, key in _DECLARED:
        config = left.get(file, {}).get("config")
        if isinstance(config, Mapping) and key:
            own = {name: value for name, value in config.items() if name != key}
            if isinstance(own.get("text_config"), Mapping):
                own["text_config"] = {n: v for n, v in own["text_config"].items() if n != key}
            left[file]["config"] = own
        elif not key:
            left.pop(file, None)
    return left


def _item(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _by_names(leaves: Mapping[str, Leaf], schemes: Sequence[Scheme]) -> Iterator[QuantizedWeight]:
    # Of thousands of arrays few are called as the first part is that a scheme needs beside codes.
    marks = tuple(itertools.chain.from_iterable(scheme.needs[0] for scheme in schemes))
    marked = [name for name in leaves if name.endswith(marks)]
    if not marked:
        return
    claimed: set[str] = set()
    for scheme in schemes:
        bases = {
            name.removesuffix(suffix)
            for suffix in scheme.needs[0]
            for name in marked
            if name.endswith(suffix)
        }
        codes = {base + scheme.codes for base in bases}
        for name in leaves:
            if name not in codes or name in claimed:
                continue
            base = name.removesuffix(scheme.codes)
            parts = _parts(scheme, name, base, leaves)
            if parts is not None:
                claimed |= set(parts.values())
                weight = base + scheme.weight
                if scheme.name == "torchao":
                    # `layer._weight_qdata` has the codes of `layer.weight`
                    module, _, last = base.rpartition(".")
                    weight = f"{module}.{last.removeprefix('_')}"
                yield QuantizedWeight(scheme.name, weight, parts)


def _parts(
    scheme: Scheme, name: str, base: str, leaves: Mapping[str, Leaf]
) -> dict[str, str] | None:
    """The stored parts of the weight with codes `name`, if all that it needs are there and fit."""
    codes = leaves[name]
    if not codes.dtype.startswith(scheme.dtypes):
        return None
    needed: dict[str, str] = {}
    for alternatives in scheme.needs:
        suffix = next((suffix for suffix in alternatives if base + suffix in leaves), None)
        if suffix is None:
            return None
        needed[_role(suffix)] = base + suffix
    scales = leaves[next(iter(needed.values()))]
    if not scales.dtype.startswith(scheme.scales) or not scheme.fits(codes.shape, scales.shape):
        return None
    module = base if scheme.weight else base.rpartition(".")[0]
    may = {_role(suffix): base + suffix for suffix in scheme.may}
    may |= {role: f"{module}.{role}" for role in _OF_THE_MODULE}
    optional = {role: other for role, other in may.items() if other in leaves}
    return {"codes": name} | optional | needed


def _role(suffix: str) -> str:
    return suffix.lstrip("._")


def _unexplained(
    leaves: Mapping[str, Leaf], claimed: set[str], method: str
) -> Iterator[QuantizedWeight]:
    """The codes that no scheme explains, with other tensors of their modules except biases."""
    unknown = f"the config declares {method}, and no scale that is known here lies beside it"
    codes: dict[str, list[str]] = defaultdict(list)  # by module
    others: dict[str, dict[str, str]] = defaultdict(dict)  # by module and role
    for name, leaf in leaves.items():
        if name in claimed:
            continue
        module = name.rpartition(".")[0]
        of_module = codes[module]
        is_whole = leaf.dtype.startswith((*_FEW_BITS, *_PACKED))
        is_code = is_whole and leaf.shape and np.dtype(leaf.dtype).itemsize < 8
        if is_code and not name.endswith(_NO_CODES):
            of_module.append(name)
        elif not name.endswith("bias"):
            others[module][name.removeprefix(f"{module}.")] = name
    for module, names in codes.items():
        for name in names:
            yield QuantizedWeight(method, name, {"codes": name} | others[module], unknown)


def _labelled(weight: QuantizedWeight, leaves: Mapping[str, Leaf]) -> QuantizedWeight:
    """The weight and parts named by the labels of leaves; the weight need not be a leaf."""
    parts = {role: leaves[name].label for role, name in weight.parts.items()}
    depth = parts["codes"].count("/")
    steps = weight.name.split(".")
    made = "/".join([*steps[:depth], ".".join(steps[depth:])])
    named = leaves[weight.name].label if weight.name in leaves else made
    return replace(weight, name=named, parts=parts)


def _imported(contents: Contents) -> bool:
    """Whether an importer made the tree, rather than a JAX program, which knows its leaves."""
    return contents.source.get("format", contents.format) not in ("universal", "orbax", "memory")


def _cache_scales(contents: Contents) -> list[Leaf]:
    """The leaves whose names are those of scales of a cache of keys and values."""
    leaves = [leaf for leaf in contents.leaves if leaf.path]
    named = [leaf for leaf in leaves if str(leaf.path[-1]).endswith("_scale")]
    # of a path of one key the name has the module's in front of it
    return [
        leaf
        for leaf in named
        if f"{'.' * (len(leaf.path) > 1)}{leaf.path[-1]}".endswith(_CACHE_SCALES)
    ]


def _without_cache_scales(contents: Contents, weights: Sequence[QuantizedWeight]) -> Contents:
    """The checkpoint without scales of a cache that its config declares: no model has them.

    Those that are parts of a quantised weight are left out with its other parts.
    """
    declared = [settings for settings, _ in _settings(contents.extras)]
    is_declared = any(_item(own, key) for own in declared for key in _CACHE_KEYS)
    if not is_declared or not _imported(contents):
        return contents
    parts = {label for weight in weights for label in weight.parts.values()}
    out = [leaf for leaf in _cache_scales(contents) if leaf.label not in parts]
    if not out:
        return contents
    labels = {leaf.label for leaf in out}
    left = [leaf for leaf in contents.leaves if leaf.label not in labels]
    stored = expressions(contents.arrays)
    reason = "a scale of a quantised cache of keys and values: it changes no weight"
    inventory = contents.with_reasons(dict.fromkeys(labels, reason), labels)
    without = contents.with_leaves([(leaf, stored.get(leaf.name)) for leaf in left], stored)
    return replace(without, inventory=inventory)


def _kept(contents: Contents) -> Contents:
    """The checkpoint with the parts of quantised weights, imported ones under `stored`."""
    note = (
        f"{len(contents.quantized)} quantised weights are kept as the parts that are stored, as"
        " asked"
    )
    kept = replace(contents, quantized=(), notes=[*contents.notes, note])
    if not _imported(contents):
        return kept
    parts = {label for weight in contents.quantized for label in weight.parts.values()}
    stored = expressions(contents.arrays)
    leaves: list[tuple[Leaf, Array | None]] = []
    for leaf in contents.leaves:
        array = stored.get(leaf.name)
        if leaf.label in parts and leaf.path[0].name == "param":
            leaf = replace(leaf, path=(Key("dict", STORED), *leaf.path[1:]))
        leaves.append((leaf, array))
    source = {**contents.first_source, "dequantize": False}
    return replace(kept.with_leaves(leaves, stored), source=source)
