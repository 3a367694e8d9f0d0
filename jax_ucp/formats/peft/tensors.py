"""The changes that a LoRA adapter makes to the weights of its base, by names and shapes.

Facts: names are those of the modules of a `PeftModel`, which has the model at `base_model.model`;
`get_peft_model_state_dict` (peft 0.13 to 0.21) leaves the adapter's name out of them. A module that
is wrapped is at `base_layer` in its wrapper, one wrapper for each parameter of `target_parameters`.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from jax_ucp.errors import FormatError, UCPError
from jax_ucp.formats.packed_experts import is_packed
from jax_ucp.formats.peft.config import PREFIX, LoraConfig
from jax_ucp.formats.peft.names import GRANITE_MOE, Memory, in_memory

_ROLE = re.compile(
    r"(?P<module>.+)\.(?P<role>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]"
    r"|lora_magnitude_vector)(\.weight)?"
)
_A, _B, _BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
_EMBEDDING_A, _EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
_MAGNITUDE = "lora_magnitude_vector"
_TOKENS = ".token_adapter.trainable_tokens_delta"
_WRAPPED = ".base_layer"
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
# Models whose experts have inputs before outputs: `is_transposed` in transformers 5.23, which 4 had
# not. peft decides by it from 0.19.1 on, and the wrong way round in 0.19.0; older ones took every
# model's experts so.
_INPUTS_FIRST = ("aria", "gpt_oss", "openai_privacy_filter")
_BY_MODEL, _AS_MODEL = (0, 19), (0, 19, 1)  # the first of these releases
MERGED_BY_PEFT = (
    "merge the adapter into its base with peft (merge_and_unload), resized as in training, and open"
    " what the merged model's save_pretrained writes"
)
# What peft calls tensors that are no weights of the model, and are none of these.
_UNKNOWN = re.compile(
    r"\.(lora_\w+|token_adapter|trainable_tokens\w*|modules_to_save|original_module)(\.|$)"
)

# By how many axes a parameter has, which of them may be its outputs and its inputs: with three,
# experts come first.
_OUT_AND_IN = {2: ((0, 1),), 3: ((1, 2), (2, 1))}

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class WeightChange:
    """A change that an adapter makes to one weight of the base.

    `a` and `b` name its factors, read as `shapes`, with an axis of `experts`. `magnitude` is
    DoRA's. With `b` alone, a vector is added. Without factors, `replaced` takes the weight's place,
    or that of its rows of these numbers.
    """

    weight: str
    scale: float = 1.0
    a: str = ""
    b: str = ""
    magnitude: str = ""
    replaced: str = ""
    out_axis: int = 0
    experts: bool = False
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    rows: Sequence[int] = ()

    @property
    def tensors(self) -> Iterator[tuple[str, str]]:
        """The names of its tensors, each with its role in words."""
        roles = {"A": self.a, "B": self.b, "the magnitude": self.magnitude}
        roles["the new value"] = self.replaced
        return ((name, role) for role, name in roles.items() if name)


def changes(
    tensors: Shapes, stored: Shapes, config: LoraConfig, model_type: str = ""
) -> tuple[list[WeightChange], Memory]:
    """The changes that an adapter makes to a base, whose weights have the shapes `stored` and which
    transformers calls `model_type`, and its weights in memory. A change has the name by which all
    adapters of the base know its weight. Raises FormatError with all misfits.
    """
    modules, replacements, faults = _by_role(tensors)
    whole = {name.rpartition(".")[0] for name in replacements}
    known = {module.replace(_WRAPPED, "") for module in modules}
    new = {module for module in whole if module.endswith(tuple(config.modules_to_save))}
    memory = in_memory(known | whole - new, stored, model_type, new)
    base = memory.shapes(stored)
    whole_tensors = {
        name: tensors[tensor]
        for name, tensor in replacements.items()
        if not tensor.endswith(_TOKENS)
    }
    base |= _resized(whole_tensors, base)
    all_changes: list[WeightChange] = []

    def attempt(make: Callable[[], Sequence[WeightChange]]) -> None:
        try:
            all_changes.extend(make())
        except UCPError as fault:
            faults.append(str(fault))

    reader = _AdapterReader(tensors, base, config, model_type)
    wrappers: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for module, roles in modules.items():
        below = (name.startswith(f"{module}.") for name in base)
        # factors for a parameter of a module that is no `weight`
        if f"{module}.weight" not in base and (module.endswith(_WRAPPED) or any(below)):
            wrappers[module.replace(_WRAPPED, "")].append(roles)
        else:
            attempt(partial(reader.of_module, module, roles))
    for module, several in wrappers.items():
        attempt(partial(reader.of_parameters, module, several))
    for name, tensor in replacements.items():
        attempt(partial(reader.replaced, name, tensor))
    counts = Counter((change.weight, bool(change.replaced)) for change in all_changes)
    twice = sorted({name for (name, _), count in counts.items() if count > 1})
    of_rows = {change.weight for change in all_changes if change.rows}
    twice += [name for name in of_rows if (name, False) in counts]
    faults += [f"{name} is changed twice" for name in twice]
    if faults:
        raise FormatError(
            f"{config.where}: the adapter does not fit the base, in {len(faults)} places:", faults
        )
    names = memory.names
    renamed = [replace(one, weight=names.get(one.weight, one.weight)) for one in all_changes]
    return renamed, memory


def _resized(whole: Shapes, base: Shapes) -> dict[str, Shape]:
    """The shapes of embedding and head if the adapter replaces all of them, with one number of
    tokens; else empty.
    """
    of_tokens = [name for name in base if name == HEAD or name.endswith(EMBEDDINGS)]
    resized = {name: whole[name] for name in of_tokens if name in whole}
    same = {(len(shape), *shape[1:]) == (2, *base[name][1:]) for name, shape in resized.items()}
    sizes = {shape[:1] for shape in resized.values()}
    return resized if len(resized) == len(of_tokens) and same == {True} and len(sizes) == 1 else {}


def _by_role(
    tensors: Shapes,
) -> tuple[dict[str, dict[str, str]], dict[str, str], list[str]]:
    """The tensors of each module by role, the tensor that replaces each parameter or rows of it,
    and a fault for each other tensor.
    """
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    replacements: dict[str, str] = {}
    faults: list[str] = []
    for tensor in tensors:
        name = tensor.removeprefix(PREFIX)
        match = _ROLE.fullmatch(name)
        if name.endswith(_TOKENS):
            replacements[f"{name.removesuffix(_TOKENS)}.weight"] = tensor
        elif name == tensor or (not match and _UNKNOWN.search(f".{name}")):
            why = "is not a tensor of a LoRA adapter that is known here"
            # `get_peft_model_state_dict` of peft 0.21.2 takes every name with that of the embedding
            if name.endswith((".modules_to_save.weight", ".original_module.weight")):
                why = (
                    "is what peft writes of a module to save whose vocabulary was resized, beside"
                    " its new value (save_embedding_layers), and is not read here:"
                    f" {MERGED_BY_PEFT}"
                )
            faults.append(f"{tensor} {why}")
        elif match:
            modules[match["module"]][match["role"]] = tensor
        else:
            replacements[name.replace(f"{_WRAPPED}.", ".")] = tensor
    return modules, replacements, faults


def _fit(ways: int, names: str) -> str:
    """The end of a message: factors fit the parameters of a module in no way, or in several."""
    match ways:
        case 0:
            return f"no parameters {names}, by their shapes: the adapter is not for this base"
        case 1:
            return (
                f"{names}, which are square: nothing stored tells whether rows are inputs or"
                f" outputs; {MERGED_BY_PEFT}"
            )
    return (
        f"the parameters {names} in {ways} orders, by their shapes, and nothing stored tells which"
        f" is for which; {MERGED_BY_PEFT}"
    )


@dataclass(frozen=True)
class _AdapterReader:
    """The changes of each module or parameter. Methods raise FormatError for a misfit."""

    tensors: Shapes
    base: Shapes
    config: LoraConfig
    model_type: str

    def of_module(self, module: str, roles: Mapping[str, str]) -> Sequence[WeightChange]:
        """The changes by the factors of a module to its weight, and by their bias to its bias."""
        weight = f"{module}.weight"
        shape = self._shape(weight, roles)
        embeds = _EMBEDDING_A in roles or _EMBEDDING_B in roles
        names = (_EMBEDDING_A, _EMBEDDING_B) if embeds else (_A, _B)
        if strays := {*roles} - {*names, _MAGNITUDE, _BIAS}:
            raise FormatError(f"{module} has {min(strays)} beside {', '.join(names)}")
        if lacking := [name for name in names if name not in roles]:
            raise FormatError(f"{module} has no {lacking[0]}: the adapter is not whole")
        for name in names:
            if len(self.tensors[roles[name]]) < 2 or 0 in self.tensors[roles[name]]:
                raise FormatError(
                    f"{roles[name]} has shape {list(self.tensors[roles[name]])}, which no factor"
                    " has: the tensors were not gathered before they were saved"
                )
        a, b = (roles[names[0]], roles[names[1]])
        rank = self.tensors[a][0]
        # patterns have the name of a parameter where that, and not its module, is the target
        scale = self.config.scale(weight if weight in self._targets(module) else module, rank)
        out_axis = self._out_axis(weight, shape, a, b, embeds)
        outputs = shape[out_axis]
        shapes = {a: self.tensors[a], b: (outputs, rank)}
        magnitude = roles.get(_MAGNITUDE, "")
        if bool(magnitude) != self.config.dora:
            said = "asks for DoRA" if self.config.dora else "asks for no DoRA"
            raise FormatError(
                f"{module} has {'a' if magnitude else 'no'} {_MAGNITUDE}, and the config {said}"
            )
        if magnitude:
            stored_shape = self.tensors[magnitude]
            if sorted(n for n in stored_shape if n != 1) != [n for n in (outputs,) if n != 1]:
                raise FormatError(
                    f"{magnitude} has shape {list(stored_shape)}, not one for {outputs} outputs"
                )
            shapes[magnitude] = (outputs,)
        changes = [WeightChange(weight, scale, a, b, magnitude, "", out_axis, False, shapes)]
        if _BIAS in roles:
            bias, tensor = f"{module}.bias", roles[_BIAS]
            of_bias = self._shape(bias, roles)
            self._require(tensor, of_bias, bias)
            changes.append(WeightChange(bias, scale, b=tensor, shapes={tensor: of_bias}))
        return changes

    def of_parameters(
        self, module: str, several: Sequence[Mapping[str, str]]
    ) -> Sequence[WeightChange]:
        """Changes by wrappers of a module's parameters; shapes say which wrapper is for which."""
        names = self._targets(module)
        if not names:
            first = next(iter(several[0].values()))
            if any(name.startswith(f"{module}.0.") for name in self.base):
                raise FormatError(
                    f"{first} is of all experts of {module} together, and the base has them one by"
                    f" one: how transformers packs those of {self.model_type} is not known here;"
                    f" {MERGED_BY_PEFT}"
                )
            self._shape(f"{module}.weight", {"": first})
        fitting = [
            changes
            for order in itertools.permutations(names[:4], len(several))
            for changes in itertools.product(*map(self._of_parameter, order, several))
            if len({change.out_axis for change in changes if change.experts}) < 2
        ]
        if len(fitting) > 1 and self._expert_axis:
            axes = {0, self._expert_axis}  # 0 is of parameters without experts
            fitting = [found for found in fitting if {one.out_axis for one in found} <= axes]
        if len(fitting) != 1:
            shown = ", ".join(names) or "that target_parameters names"
            orders = {tuple(change.weight for change in changes) for changes in fitting}
            raise FormatError(f"{module}: its factors fit {_fit(len(orders), shown)}")
        return fitting[0]

    @property
    def _expert_axis(self) -> int:
        """The axis of the outputs of experts whose shapes do not tell it; 0 if nothing does."""
        if self.model_type in _INPUTS_FIRST:
            return 2 if self.config.version < _BY_MODEL else 0
        is_known = is_packed(self.model_type) or self.model_type in GRANITE_MOE
        return 1 if is_known and self.config.version >= _AS_MODEL else 0

    def _targets(self, module: str) -> list[str]:
        """The parameters of a module that `target_parameters` name, with the module or without."""
        names: dict[str, None] = {}
        for target in self.config.target_parameters:
            of_module, dot, name = target.rpartition(".")
            if not dot or f".{module}".endswith(f".{of_module}"):
                names[f"{module}.{name}"] = None
        return list(filter(self.base.__contains__, names))

    def _of_parameter(self, name: str, roles: Mapping[str, str]) -> list[WeightChange]:
        """The ways in which factors can be those of a parameter, by their shapes."""
        if {*roles} != {_A, _B}:
            raise FormatError(f"{name} has the factors {', '.join(sorted(roles))}, not A and B")
        a, b, shape = roles[_A], roles[_B], self.base[name]
        of_a, of_b = self.tensors[a], self.tensors[b]
        ways = _OUT_AND_IN.get(len(shape), ())
        experts = max(1, math.prod(shape[:-2]))
        are_factors = len(of_a) == len(of_b) == 2 and of_a[0] == of_b[1]
        if not (are_factors and ways) or of_a[0] % experts:
            return []
        outputs, inputs, rank = of_b[0], of_a[1], of_a[0] // experts
        many = len(shape) == 3
        shapes = {a: (rank, inputs), b: (outputs, rank)}
        if many:
            shapes = {a: (experts, rank, inputs), b: (outputs, rank, experts)}
        axes = [out for out, into in ways if (shape[out], shape[into]) == (outputs, inputs)]
        scale = self.config.scale(name, rank) if axes else 1.0
        return [WeightChange(name, scale, a, b, "", "", axis, many, shapes) for axis in axes]

    def replaced(self, name: str, tensor: str) -> Sequence[WeightChange]:
        """The change by a tensor that is a whole parameter, trained or the base's own, or the rows
        of some tokens.
        """
        if tensor.endswith(_TOKENS):
            shape, module = self._shape(name, {"": tensor}), name.removesuffix(".weight")
            ends = [e for e in self.config.tokens if f".{module}".endswith(f".{e}") or not e]
            rows = self.config.tokens[ends[0]] if len(ends) == 1 else ()
            want = (len(rows), *shape[1:])
            if not rows or max(rows) >= shape[0] or self.tensors[tensor] != want:
                raise FormatError(
                    f"{tensor} has shape {list(self.tensors[tensor])}, {name} of the base"
                    f" {list(shape)}, and {self.config.where} names {len(rows)} tokens of it, up to"
                    f" {max(rows, default=0)}"
                )
            return [WeightChange(name, replaced=tensor, shapes={tensor: want}, rows=rows)]
        if name in self.base:
            self._require(tensor, self.base[name], name)
        # of a module that was trained whole, it may be new, as a head is, but not in a layer
        elif not name.rpartition(".")[0].endswith(
            tuple(self.config.modules_to_save)
        ) or self._is_in_layer(name):
            self._shape(name, {"": tensor})
        return [WeightChange(name, replaced=tensor, shapes={tensor: self.tensors[tensor]})]

    def _is_in_layer(self, name: str) -> bool:
        """Whether a parameter is inside a numbered module that the base has."""
        layer = re.match(r".*\.\d+\.", name)
        return layer is not None and any(own.startswith(layer[0]) for own in self.base)

    def _shape(self, weight: str, roles: Mapping[str, str]) -> Shape:
        """The shape of a weight of the base, which the tensors in `roles` are for."""
        if weight in self.base:
            return self.base[weight]
        near = difflib.get_close_matches(weight, self.base, 1)
        hint = f"; it has {near[0]}" if near else ""
        raise FormatError(f"{next(iter(roles.values()))}: the base has no {weight}{hint}")

    def _out_axis(self, weight: str, shape: Shape, a: str, b: str, embeds: bool) -> int:
        """The axis of the outputs of a weight, by the shapes of its factors `a` and `b`."""
        of_a, of_b = self.tensors[a], self.tensors[b]
        outputs, inputs = of_b[0], of_a[1:]
        is_turned = shape == (*inputs, outputs) and len(shape) == 2
        is_plain = shape == (outputs, *inputs) and not embeds
        if of_b[1:] != (of_a[0], *(1,) * (len(of_b) - 2)) or not (is_turned or is_plain):
            raise FormatError(
                f"{weight} has shape {list(shape)}, and its factors {list(of_a)} and {list(of_b)}:"
                " the adapter is not for this base"
            )
        if not (is_turned and is_plain):
            return int(is_turned)
        if 1 in self._output_axes and not self.config.fan_in_fan_out:
            raise FormatError(
                f"{weight} is square, and nothing tells whether its rows are inputs: the base has"
                " Conv1D modules, of which fan_in_fan_out=false does not hold. If this is one of"
                f" them, write fan_in_fan_out=true in {self.config.where}"
            )
        if self.config.fan_in_fan_out and self._output_axes == {0}:
            raise FormatError(
                f"{weight} is square, and fan_in_fan_out=true says that its rows are inputs, but"
                " the base's biases show Linear modules alone: the adapter was trained on Conv1D"
                " modules, and is not for weights in this order"
            )
        return int(self.config.fan_in_fan_out)

    @cached_property
    def _output_axes(self) -> set[int]:
        """The axes that outputs have in the base's weights that are not square, as biases count
        them: the first in Linear modules, the last in Conv1D.

        Where some come last, `fan_in_fan_out` decides nothing: peft writes what the last module is,
        also where others are Linear, as GPT-2's head (`dispatch_default`, `lora/layer.py`).
        """
        biases = {name: self.base.get(f"{name.removesuffix('weight')}bias") for name in self.base}
        shapes = {
            name: shape for name, shape in self.base.items() if len({*shape}) == len(shape) == 2
        }
        return {a for name, n in shapes.items() for a in (0, 1) if biases[name] == (n[a],)}

    def _require(self, tensor: str, shape: Shape, weight: str) -> None:
        if self.tensors[tensor] != shape:
            raise FormatError(
                f"{tensor} has shape {list(self.tensors[tensor])}, {weight} of the base"
                f" {list(shape)}; if tokens were added, {MERGED_BY_PEFT}"
            )
