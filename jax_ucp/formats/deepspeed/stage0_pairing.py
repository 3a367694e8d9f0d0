"""ZeRO-0: the optimizer in each file, and the parameter of each of its numbers, if one is certain.

In fp32 the optimizer is torch's own. In fp16 and bf16 DeepSpeed wraps it: the unfused wrapper keeps
a list of masters for each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).

States have numbers, groups list the numbers of their parameters, and nothing has a name, unless
torch was given named parameters: then groups have `param_names`. Which order a group has is the
training script's choice. A pairing is taken where names are stored, where shapes, or the bits of
masters, leave one, or where the user says it (`optimizer_groups`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import flattened
from jax_ucp.formats.deepspeed.files import StateFile
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Shape
from jax_ucp.options import MODULE_ORDER, SaidGroups
from jax_ucp.states.assign import SAME_BITS, Slot, SlotGroup, assign
from jax_ucp.states.pairing import Undecided, only_division, only_filling

_OTHER_RUN = (
    "it is of another run, or was saved before the first step. Put that rank's own file in its"
    " place; weights_only opens the module's weights"
)
# So many elements at the most are compared first.
SAMPLE = 64
# Elements of masters that are rounded at once.
_BLOCK = 1 << 20

# Of a parameter its number, and the elements of that number's tensors that are its own.
Places = dict[str, tuple[int, Box]]


@dataclass(frozen=True)
class StageZero:
    """The optimizer in one file, and its possible parameters; `masters` by number, or `flat`."""

    stored: StateFile
    mp: int
    ep: int
    ranks: int
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    shapes: Mapping[str, Shape]
    masters: Mapping[int, StoredTensor]
    flat: bool

    @property
    def named(self) -> bool:
        return all("param_names" in group for group in self.groups)

    def kinds(self) -> list[tuple[list[int], dict[str, Shape]]]:
        """(groups, parameters that they may have): of dense groups, and of experts'.

        Masters are all in the first, because files of experts have none.
        """
        if self.masters:
            return [([*range(len(self.groups))], dict(self.shapes))]
        ranks = max(1, self.ranks)
        kinds: list[tuple[list[int], dict[str, Shape]]] = []
        for owner in (None, self.ep):
            experts = owner is not None
            groups = [i for i, group in enumerate(self.groups) if bool(group.get("moe")) == experts]
            owned = {
                name: shape
                for name, shape in self.shapes.items()
                if moe.expert_rank(name, self.shapes, ranks) == owner
            }
            kinds.append((groups, owned))
        return kinds

    def state_shapes(self, number: int) -> dict[str, Shape]:
        """The shapes of a number's states that are tensors."""
        states = self.states.get(number, {}).items()
        return {str(name): t.shape for name, t in states if isinstance(t, StoredTensor)}


def optimizers_of(slices: Slices, mp: int) -> list[StageZero]:
    """The optimizers that model-parallel rank `mp` saved: of experts, then of its model states,
    if those have one. Raises FormatError for an expert file without one, and if they differ.
    """
    by_experts = slices.files.expert_optimizers.items()
    files = sorted((ep, stored) for (ep, rank), stored in by_experts if rank == mp)
    ranks = len(files)
    for _, stored in files:
        if not isinstance(stored.state.get("optimizer"), dict):
            raise FormatError(
                f"{stored.file.path} has no optimizer, which expert-parallel ranks save in such a"
                f" file without ZeRO: {_OTHER_RUN}"
            )
    files.append((0, slices.files.models[mp][0]))
    optimizers = [
        _optimizer(slices, stored, mp, ep, ranks)
        for ep, stored in files
        if stored.state.get("optimizer") is not None
    ]
    forms = [
        (
            [list(group["params"]) for group in one.groups],
            {number: one.state_shapes(number) for number in one.states},
        )
        for one in optimizers
    ]
    for one, form in zip(optimizers, forms, strict=True):
        if form != forms[0]:
            raise FormatError(
                f"{one.stored.file.path} has an optimizer with {len(one.states)} states in"
                f" {sizes_of(one)}, which in their shapes are not those of"
                f" {optimizers[0].stored.name}: {_OTHER_RUN}"
            )
    return optimizers


def _optimizer(slices: Slices, stored: StateFile, mp: int, ep: int, ranks: int) -> StageZero:
    """The optimizer in a file. Raises FormatError for other classes, or missing experts' ranks."""
    optimizer = stored.state["optimizer"]
    inner, masters = unwrapped(optimizer)
    match inner:
        case {"state": stored_states, "param_groups": list(groups)}:
            states = {number: flattened(state) for number, state in stored_states.items()}
        case _:
            raise FormatError(
                f"{stored.file.path} has no optimizer state of torch's form, so that its parts"
                " cannot be told apart; open with weights_only to leave the optimizer aside"
            )
    shapes = slices.shapes_on(mp)
    experts = list(filter(moe.expert_number, shapes))
    local = sum(len(group["params"]) for group in groups if group.get("moe"))
    if local and len(experts) > ranks * local:
        lost = f"expp_rank_{ranks}_mp_rank_{mp:02d}_optim_states.pt"
        raise FormatError(
            f"{slices.files.folder}/{lost} is missing: {ranks} ranks have {local} of {len(experts)}"
            " experts' states"
        )
    flat = masters == "fp32_groups_flat"
    tensors = optimizer[masters] if masters else []
    if masters and not flat:
        tensors = itertools.chain.from_iterable(tensors)
    numbers = [number for group in groups for number in group["params"]] if masters else []
    by_number = dict(zip(numbers, tensors, strict=True))
    return StageZero(stored, mp, ep, ranks, states, groups, shapes, by_number, flat)


def sizes_of(one: StageZero) -> str:
    """The size of each group in elements or parameters, in words for messages."""
    if one.flat:
        elements = [str(math.prod(master.shape)) for master in one.masters.values()]
        return f"groups of {' + '.join(elements)} elements"
    experts = (
        ", those of experts on each rank, with all ranks' experts in one list" if one.ranks else ""
    )
    counts = [str(len(group["params"])) for group in one.groups]
    return f"groups of {' + '.join(counts)} parameters{experts}"


def unwrapped(optimizer: Any) -> tuple[Any, str]:
    """Torch's own optimizer, and the key of DeepSpeed's masters beside it, or an empty text."""
    if isinstance(optimizer, dict):
        for masters in ("fp32_groups", "fp32_groups_flat"):
            if masters in optimizer:
                return optimizer.get("optimizer_state_dict"), masters
    return optimizer, ""


def places_of(slices: Slices, one: StageZero, said: SaidGroups | None) -> Places:
    """Each parameter's place: by names in the file, what is `said`, or proof. Raises Undecided."""
    said = None if one.named else said
    copies = None
    if one.masters:
        if any(map(moe.expert_number, one.shapes)):
            raise Undecided(
                "there are experts, whose masters are not told apart; ZeRO-1 stores them with names"
            )
        place = slices.place(one.mp)
        keys = {name: slices.label(place, "param", name) for name in one.shapes}
        copies = Copies(slices.builder.shards, keys, one.shapes)
        if one.flat:
            return _places_in_buffers(one, copies, said)
    names: dict[int, str] = {}
    for indices, shapes in one.kinds():
        names |= _names_of_numbers(one, indices, shapes, said, copies)
    return {name: (number, Box.whole(one.shapes[name])) for number, name in names.items()}


def _names_of_numbers(
    one: StageZero,
    indices: Sequence[int],
    shapes: Mapping[str, Shape],
    said: SaidGroups | None,
    copies: Copies | None,
) -> Mapping[int, str]:
    """The parameter's name by number, for groups whose parameters have these `shapes`."""
    groups = [one.groups[i] for i in indices]
    numbers: list[Sequence[int]] = [group["params"] for group in groups]
    if all("param_names" in group for group in groups):
        said = tuple(tuple(group["param_names"]) for group in groups)
    elif isinstance(said, tuple):
        said = _own_lists(one, said, indices)
    elif said is not None:
        said = MODULE_ORDER
        numbers = list(itertools.chain.from_iterable(_in_module_order(one, g) for g in groups))

    def slot_group(numbers: Sequence[int]) -> SlotGroup[int]:
        # where bits tell, shapes of states are compared with the names of lists alone
        by_shape = copies is None or isinstance(said, tuple)
        states = [one.state_shapes(number) if by_shape else {} for number in numbers]
        slots = [Slot(n, shapes, f"number {n}") for n, shapes in zip(numbers, states, strict=True)]
        first = f" from number {numbers[0]} on" if numbers else ""
        return SlotGroup(f"the group{first}", slots)

    if copies is None:
        return assign(list(map(slot_group, numbers)), shapes, said).names

    def unfit(slot: Slot[int], name: str) -> str:
        master = one.masters[slot.key]
        if master.shape == shapes[name] and copies.begins(name, one.stored.key(master), 0):
            return ""
        return f"the master of {slot.label} is not that of {name}, by its shape or bits"

    def bits(slot: Slot[int]) -> Sequence[str]:
        master = one.masters[slot.key]
        names = copies.candidates_at(one.stored.key(master), 0)
        return [name for name in names if shapes[name] == master.shape]

    if said is None:  # masters without elements have no bits
        numbers = [[n for n in group if math.prod(one.masters[n].shape)] for group in numbers]
    return assign(list(map(slot_group, numbers)), shapes, said, unfit=unfit, bits=bits).names


def _in_module_order(one: StageZero, group: Mapping[str, Any]) -> list[list[int]]:
    """The numbers in a group, as lists that each follow the order of the module.

    Muon sorts parameters by shape (`runtime/zero/muon/original_muon.py`): one list for each shape.
    """
    if one.masters or not group.get("use_muon"):
        return [list(group["params"])]
    by_shape: dict[Shape | None, list[int]] = {}
    for number in group["params"]:
        by_shape.setdefault(one.state_shapes(number).get("momentum_buffer"), []).append(number)
    return list(by_shape.values())


def _own_lists(
    one: StageZero, lists: Sequence[Sequence[str]], indices: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """The user's lists for some groups; those of experts without other ranks' experts."""
    if len(lists) != len(one.groups):
        raise Undecided(f"{len(lists)} lists for {len(one.groups)} groups ({sizes_of(one)})")
    for name in itertools.chain.from_iterable(lists):
        if name not in one.shapes:
            raise Undecided(
                f"{name} is not a parameter here; the first are {', '.join([*one.shapes][:3])}"
            )
    own = {name for _, shapes in one.kinds() for name in shapes}
    return tuple(tuple(filter(own.__contains__, lists[i])) for i in indices)


def _places_in_buffers(one: StageZero, copies: Copies, said: SaidGroups | None) -> Places:
    """The place of each parameter in the flat buffers of masters, of which each group has one."""
    numbers, masters = [*one.masters], [*one.masters.values()]
    keys = [one.stored.key(master) for master in masters]
    lengths = [math.prod(master.shape) for master in masters]
    sizes = copies.sizes

    def begins(name: str, group: int, at: int) -> bool:
        return copies.begins(name, keys[group], at)

    def candidates(group: int, at: int) -> Sequence[str]:
        names = copies.candidates_at(keys[group], at)
        if len({sizes[name] for name in names}) != len(names):
            raise Undecided(SAME_BITS)
        return names

    match said:
        case tuple():
            starts = _listed_in_buffers(one, lengths, sizes, said, begins)
        case str():
            starts = only_division(sizes, lengths, begins)
        case _:
            starts = only_filling(sizes, lengths, candidates)
    return {
        name: (numbers[group], Box((at,), (at + sizes[name],)))
        for name, (group, at) in starts.items()
    }


def _listed_in_buffers(
    one: StageZero,
    lengths: Sequence[int],
    sizes: Mapping[str, int],
    lists: Sequence[Sequence[str]],
    begins: Callable[[str, int, int], bool],
) -> dict[str, tuple[int, int]]:
    """The (group, offset) of each name in the lists, one list for each buffer."""
    if len(lists) != len(lengths):
        raise Undecided(f"{len(lists)} lists for {len(lengths)} groups ({sizes_of(one)})")
    places: dict[str, tuple[int, int]] = {}
    for group, names in enumerate(lists):
        at, length = 0, lengths[group]
        for name in names:
            if name not in sizes:
                raise Undecided(f"{name} is not a parameter of the module")
            if at + sizes[name] > length or not begins(name, group, at):
                raise Undecided(
                    f"group {group} does not have the master of {name} at {at} of its {length}"
                )
            places[name] = group, at
            at += sizes[name]
        if at != length:
            raise Undecided(
                f"group {group} has {length} elements, the parameters listed for it {at}"
            )
    return places


class Copies:
    """The module's 16-bit weights on one rank, to be found by the bits of rounded masters."""

    def __init__(self, shards: ArraySource, keys: Mapping[str, str], shapes: Mapping[str, Shape]):
        self._shards, self._keys, self._shapes = shards, keys, shapes
        self._dtypes = {name: shards.arrays()[key].dtype for name, key in keys.items()}
        self.sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._starts: dict[tuple[np.dtype, int], dict[bytes, list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for name, size in self.sizes.items():
            length = min(SAMPLE, size)
            if length:
                self._starts[self._dtypes[name], length][self._start(name)].append(name)
        self._digests: dict[tuple[object, ...], bytes] = {}
        # Whole comparisons together may read the masters a few times, and no more.
        self._left = 4 * sum(self.sizes.values()) + _BLOCK

    def candidates_at(self, key: str, offset: int) -> list[str]:
        """The parameters whose bits the tensor of masters `key` has at `offset`."""
        shape = self._shards.arrays()[key].shape
        room = math.prod(shape) - offset
        candidates: list[str] = []
        for (dtype, length), names in self._starts.items():
            if length <= room:
                bits = self._bits(key, shape, offset, length, dtype)
                candidates += [n for n in names.get(bits, ()) if self.sizes[n] <= room]
        if len(candidates) <= 1:
            return candidates
        agreeing: list[str] = []
        for name in candidates:
            size, dtype = self.sizes[name], self._dtypes[name]
            copy = self._digest(self._keys[name], self._shapes[name], 0, size, dtype)
            if copy == self._digest(key, shape, offset, size, dtype):
                agreeing.append(name)
        return agreeing

    def begins(self, name: str, key: str, offset: int) -> bool:
        """Whether the masters have at `offset` the first elements of the module's parameter."""
        length = min(SAMPLE, self.sizes[name])
        if not length:
            return True
        shape = self._shards.arrays()[key].shape
        return self._bits(key, shape, offset, length, self._dtypes[name]) == self._start(name)

    def _start(self, name: str) -> bytes:
        length = min(SAMPLE, self.sizes[name])
        return self._bits(self._keys[name], self._shapes[name], 0, length, self._dtypes[name])

    def _digest(self, key: str, shape: Shape, start: int, size: int, dtype: np.dtype) -> bytes:
        asked = key, start, size, dtype
        if asked not in self._digests:
            self._left -= size
            if self._left < 0:
                raise Undecided("too many parameters have the same bits to compare them all")
            digest = xxhash.xxh3_128()
            for at in range(start, start + size, _BLOCK):
                digest.update(self._bits(key, shape, at, min(_BLOCK, start + size - at), dtype))
            self._digests[asked] = digest.digest()
        return self._digests[asked]

    def _bits(self, key: str, shape: Shape, start: int, count: int, dtype: np.dtype) -> bytes:
        """The bits of elements in row-major order, rounded to a dtype; they may overflow in it."""
        parts = [
            np.asarray(self._shards.read(key, box))
            for box in range_boxes(shape, start, start + count)
        ]
        with np.errstate(all="ignore"):
            return b"".join(part.astype(dtype).tobytes() for part in parts)
