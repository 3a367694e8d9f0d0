"""Experts: the ranks that share them, and the names in the whole model of those on one rank.

Native experts (`deepspeed.moe`) have one name for each, local to the expert-parallel rank; they get
their global number. AutoEP's are fused: `w1` of a rank has its experts along the first axis.

Facts: `_get_expert_ckpt_name` and `_save_moe_checkpoint` in `runtime/engine.py`, `utils/groups.py`,
`checkpoint/autoep_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax_ucp.codecs.unpickle import known
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.deepspeed.files import Rank, StateFile, TagFiles
from jax_ucp.formats.deepspeed.tensor_parallel import affine_layout
from jax_ucp.formats.nested import as_dict
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Shape, box_part
from jax_ucp.layout.patterns import Sharded

# No model has so many; each is listed.
MAX_EXPERTS = 1 << 20
_NATIVE = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


def teams(
    index: int, ranks: Sequence[Rank], models: Sequence[StateFile]
) -> list[tuple[int | None, list[Rank]]]:
    """The ranks that share a group, in order, by expert-parallel rank (None if dense)."""
    entries = [rank.state.get("ds_zero_partition_groups") or () for rank in ranks]
    metadata = [next((e for e in of if e.get("sub_group") == index), None) for of in entries]
    lacking = [rank for rank, entry in zip(ranks, metadata, strict=True) if entry is None]
    having = [rank for rank, entry in zip(ranks, metadata, strict=True) if entry is not None]
    if lacking and having:
        few, many = sorted((lacking, having), key=len)
        says = "does not say" if few is lacking else "says"
        raise FormatError(
            f"{few[0].file.path} {says} in ds_zero_partition_groups which ranks share sub-group"
            f" {index}, unlike {many[0].name}: one of the two is of another run"
        )
    if having:
        return _zero3_teams(index, ranks, metadata, models)
    counts, world = ranks[0].state.get("partition_count"), len(ranks)
    share = counts[index] if isinstance(counts, list) else world
    if ranks[0].settings(index).get("moe"):
        # For each expert-parallel rank the positions of the `share` ranks of its experts.
        ep = world // share
        by_ep = [range(e, world, ep) for e in range(ep)]
        if _data_before_experts(ranks[0]):
            by_ep = [range(e * share, (e + 1) * share) for e in range(ep)]
        return [(e, [ranks[r] for r in team]) for e, team in enumerate(by_ep)]
    if share != world:
        raise FormatError(
            f"{ranks[0].file.path}: group {index} is shared by {share} of {world} ranks, but"
            " is not a group of experts: it is of another world size, or of a sharding over some of"
            " the ranks (MiCS), which is not read. weights_only opens what the model states hold"
        )
    return [(None, list(ranks))]


def _data_before_experts(stored: StateFile | Rank) -> bool:
    """Whether neighbouring ranks have the same experts, by the run's settings."""
    config = as_dict(known(as_dict(stored.file.tree).get("ds_config")))
    return bool(config.get("use_data_before_expert_parallelism"))


def _zero3_teams(
    index: int, ranks: Sequence[Rank], metadata: Sequence[Any], models: Sequence[StateFile]
) -> list[tuple[int | None, list[Rank]]]:
    """The ranks that share a sub-group of ZeRO-3, in order. Raises FormatError for other ranks."""
    teams_by_ep: dict[int | None, list[int]] = {}
    first_model: dict[int | None, str] = {}
    for dp, (rank, entry) in enumerate(zip(ranks, metadata, strict=True)):
        team, place = list(entry["partition_ranks"]), entry["partition_rank"]
        counted = entry["partition_count"] == len(team) > place and max(team) < len(ranks)
        if not counted or team[place] != dp:
            raise FormatError(
                f"{rank.file.path}: sub-group {index} says it is part {place} of the"
                f" ranks {team}, but the file is that of rank {dp}: it was renamed, or belongs to"
                " another run"
            )
        ep = None
        if len(team) < len(ranks):
            numbers = {int(layer["ep_rank"]) for layer in autoep_layers(models[dp])}
            if len(numbers) != 1:
                raise FormatError(
                    f"{models[dp].file.path}: ds_autoep_layers should give one ep_rank, but gives"
                    f" {sorted(numbers)}"
                )
            (ep,) = numbers
        first = first_model.setdefault(ep, models[dp].name)
        if teams_by_ep.setdefault(ep, team) != team:
            raise FormatError(
                f"{rank.file.path}: sub-group {index} is shared by the ranks {team}, but"
                f" {models[dp].name} says it is expert-parallel rank {ep}, as {first} does for"
                " other ranks; one of the files was renamed"
            )
    by_ep = sorted(teams_by_ep.items(), key=lambda item: item[0] or 0)
    return [(ep, [ranks[dp] for dp in team]) for ep, team in by_ep]


def check_expert_ranks(files: TagFiles) -> None:
    """Raise FormatError if, by its AutoEP layers, a file of model states is of another rank."""
    every = [(dp, model) for models in files.models for dp, model in enumerate(models)]
    layers = [(dp, model, as_dict(layer)) for dp, model in every for layer in autoep_layers(model)]
    for dp, model, layer in layers if files.zero3 else ():
        ep, team = layer.get("ep_rank"), layer.get("expert_data_parallel_rank")
        ep_size, teams = layer.get("ep_size"), layer.get("expert_data_parallel_world_size")
        if type(ep_size) is not int or type(teams) is not int or min(ep_size, teams) < 1:
            continue  # another version of AutoEP does not say
        mine = divmod(dp, teams)[::-1] if _data_before_experts(model) else divmod(dp, ep_size)
        if None not in (team, ep) and (team, ep) != mine:
            raise FormatError(
                f"{model.file.path}: ds_autoep_layers says that it is of expert-parallel rank {ep}"
                f" and expert-data-parallel rank {team}, but the file is that of data-parallel rank"
                f" {dp}, which has {mine[1]} and {mine[0]}: it was renamed, or copied from another"
                " rank's. Put that rank's own file in its place"
            )


def autoep_layers(model: StateFile) -> list[Mapping[str, Any]]:
    return list(model.state.get("ds_autoep_layers") or model.state.get("autoep_layers") or ())


def expert_number(name: str) -> str | None:
    """The number of a native expert in the name of its tensor, as text, or None."""
    match = _NATIVE.fullmatch(name)
    return match[2] if match else None


def without_number(name: str) -> str:
    """The name of an expert's tensor, the same for all experts of its layer.

    >>> without_number("mlp.deepspeed_moe.experts.deepspeed_experts.5.fc.bias")
    'mlp.deepspeed_moe.experts.deepspeed_experts.*.fc.bias'
    >>> without_number("mlp.experts.w1.5")
    'mlp.experts.w1'
    """
    match = _NATIVE.fullmatch(name)
    if match:
        return f"{match[1]}*{match[3]}"
    fused, _, number = name.rpartition(".")
    return fused if number.isdigit() else name


def is_fused(name: str, model: StateFile) -> bool:
    return _find_layer(name, model) is not None


def router_aliases(
    names: Collection[str], owned: Collection[str], model: StateFile
) -> dict[str, str]:
    """The names of AutoEP's routers before it replaced the layer, with the parameters they are."""
    owner_of: dict[str, str] = {}
    for layer in autoep_layers(model):
        path = f"{layer['module_path']}."
        for name in names:
            if name in owned or not name.startswith(path):
                continue
            inner = name.removeprefix(path).partition(".")[2]
            owner = f"{path}router.{inner}"
            if inner and owner in owned:
                owner_of[name] = owner
    return owner_of


def global_name(name: str, ep: int | None, shapes: Mapping[str, Shape]) -> str:
    """The name of a rank's native expert in the whole model; other names as they are.

    >>> prefix = "mlp.deepspeed_moe.experts.deepspeed_experts."
    >>> global_name(prefix + "1.fc.bias", 2,
    ...     {prefix + "0.fc.bias": (4,), prefix + "1.fc.bias": (4,)})
    'mlp.deepspeed_moe.experts.deepspeed_experts.5.fc.bias'
    """
    match = _NATIVE.fullmatch(name)
    if ep is None or match is None:
        return name
    return f"{match[1]}{ep * _count_experts(match[1], shapes) + int(match[2])}{match[3]}"


def _count_experts(prefix: str, names: Iterable[str]) -> int:
    """The number of native experts of one layer among the names."""
    matches = filter(None, map(_NATIVE.fullmatch, names))
    return len({int(match[2]) for match in matches if match[1] == prefix})


def cut_twice(files: TagFiles, name: str) -> FormatError:
    """The error for fused experts under tensor parallelism."""
    return FormatError(
        f"{files.folder}: {name} is cut over both expert- and tensor-parallel ranks, which is not"
        " read"
    )


def expert_layout(name: str, slices: Mapping[int, Shape], model: StateFile) -> ParamLayout:
    """The layout of fused experts over slices: by `ds_autoep_layers`, or in the order of ranks."""
    shapes = [slices[ep] for ep in sorted(slices)]
    layer = _layer_of(name, model)
    if sorted(slices) != list(range(len(slices))) or len(slices) != int(layer["ep_size"]):
        raise FormatError(
            f"{model.file.path}: {name} is cut over {layer['ep_size']} expert-parallel ranks, but"
            f" there are files of the ranks {sorted(slices)}"
        )
    affine_map = _entry(layer, "affine_maps", "params", name)
    if affine_map is not None:
        return affine_layout(affine_map, shapes, f"{model.file.path}: the affine map of {name}")
    if _entry(layer, "expert_placement", "ranks") is None:
        try:
            return Sharded(0).join(shapes)
        except LayoutError as error:
            raise LayoutError(
                f"{model.file.path}: {name}, cut over expert-parallel ranks: {error}"
            ) from error
    parts = [
        box_part(ep, _row(place, shapes[ep]), _row(expert, shapes[ep]))
        for ep, experts in placement(name, model).items()
        for place, expert in enumerate(experts)
    ]
    return ParamLayout((int(layer["num_experts"]), *shapes[0][1:]), tuple(shapes), tuple(parts))


def placement(name: str, model: StateFile) -> dict[int, list[int]]:
    """The global numbers of the experts in a slice, by expert-parallel rank."""
    layer = _layer_of(name, model)
    ranks = _entry(layer, "expert_placement", "ranks")
    if ranks is not None:
        return {int(entry["rank"]): list(map(int, entry["experts"])) for entry in ranks}
    local, ep_size = int(layer["num_local_experts"]), int(layer["ep_size"])
    if local * ep_size > MAX_EXPERTS:
        raise FormatError(
            f"{model.file.path}: {name} would have {local} experts on each of {ep_size} ranks"
        )
    return {ep: list(range(ep * local, (ep + 1) * local)) for ep in range(ep_size)}


def _layer_of(name: str, model: StateFile) -> Mapping[str, Any]:
    layer = _find_layer(name, model)
    if layer is None:
        raise FormatError(
            f"{model.file.path}: {name} is cut over expert-parallel ranks, but no layer of"
            " ds_autoep_layers has its prefix"
        )
    return layer


def _find_layer(name: str, model: StateFile) -> Mapping[str, Any] | None:
    prefix = name.rpartition(".")[0]
    return next(
        (layer for layer in autoep_layers(model) if layer.get("expert_key_prefix") == prefix), None
    )


def _entry(layer: Mapping[str, Any], *keys: str) -> Any:
    """The value under nested keys; None where one is missing or empty."""
    value: Any = layer
    for key in keys:
        value = (value or {}).get(key)
    return value


def _row(row: int, shape: Shape) -> Box:
    return Box((row, *(0,) * (len(shape) - 1)), (row + 1, *shape[1:]))


def expert_rank(name: str, shapes: Mapping[str, Shape], ep: int) -> int | None:
    """The one of `ep` ranks that has a native expert with this global name, or None."""
    match = _NATIVE.fullmatch(name)
    return int(match[2]) // (_count_experts(match[1], shapes) // ep) if match else None
