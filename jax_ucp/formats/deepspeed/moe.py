"""Experts: which ranks share them, and what the names on one rank are in the whole model.

Native experts (`deepspeed.moe`) have one name for each, local to the expert-parallel rank; they get
their global number. AutoEP's are fused: `w1` of a rank has its experts along the first axis.

Facts: `_get_expert_ckpt_name` and `_save_moe_checkpoint` in `runtime/engine.py`, `utils/groups.py`,
`checkpoint/autoep_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.deepspeed.files import Files, Rank, Stored
from jax_ucp.formats.deepspeed.tensor_parallel import affine_layout
from jax_ucp.formats.deepspeed.zero import param_group
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.torch_save.unpickle import known
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Sharded

# No model has so many; each is listed.
MAX_EXPERTS = 1 << 20
_NATIVE = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


def teams(
    index: int, ranks: Sequence[Rank], models: Sequence[Stored]
) -> list[tuple[int | None, list[Rank]]]:
    """The ranks that share a group, in order, by expert-parallel rank, or None."""
    metadata = [_sub_group(rank, index) for rank in ranks]
    _check_alike(index, ranks, metadata)
    if metadata[0] is not None:
        return _zero3_teams(index, ranks, metadata, models)
    counts = ranks[0].state.get("partition_count")
    share = counts[index] if isinstance(counts, list) else len(ranks)
    if param_group(ranks[0], index).get("moe"):
        by_ep = enumerate(_expert_ranks(ranks, share))
        return [(ep, [ranks[r] for r in team]) for ep, team in by_ep]
    if share != len(ranks):
        raise FormatError(
            f"{ranks[0].file.path}: group {index} is shared by {share} of {len(ranks)} ranks, but"
            " is not a group of experts: it is of another world size, or of a sharding over some of"
            " the ranks (MiCS), which is not read. weights_only opens what the model states hold"
        )
    return [(None, list(ranks))]


def _expert_ranks(ranks: Sequence[Rank], share: int) -> list[range]:
    """For each expert-parallel rank the positions of the `share` ranks of its experts."""
    ep, world = len(ranks) // share, len(ranks)
    if _data_before_experts(ranks[0]):
        return [range(e * share, (e + 1) * share) for e in range(ep)]
    return [range(e, world, ep) for e in range(ep)]


def _data_before_experts(stored: Stored | Rank) -> bool:
    """Whether neighbouring ranks have the same experts, by the settings of the run."""
    config = as_dict(known(as_dict(stored.file.tree).get("ds_config")))
    return bool(config.get("use_data_before_expert_parallelism"))


def _sub_group(rank: Rank, index: int) -> Mapping[str, Any] | None:
    entries = rank.state.get("ds_zero_partition_groups") or ()
    return next((entry for entry in entries if entry.get("sub_group") == index), None)


def _check_alike(
    index: int, ranks: Sequence[Rank], metadata: Sequence[Mapping[str, Any] | None]
) -> None:
    """Raise FormatError where only some ranks' files say who shares a sub-group."""
    lacking = [rank for rank, entry in zip(ranks, metadata, strict=True) if entry is None]
    having = [rank for rank, entry in zip(ranks, metadata, strict=True) if entry is not None]
    if not lacking or not having:
        return
    few, many = sorted((lacking, having), key=len)
    says = "does not say" if few is lacking else "says"
    raise FormatError(
        f"{few[0].file.path} {says} in ds_zero_partition_groups which ranks share sub-group"
        f" {index}, unlike {many[0].name}: one of the two is of another run"
    )


def _zero3_teams(
    index: int, ranks: Sequence[Rank], metadata: Sequence[Any], models: Sequence[Stored]
) -> list[tuple[int | None, list[Rank]]]:
    """ZeRO-3 says of each sub-group and rank which ranks share it, and in what order."""
    teams_by_ep: dict[int | None, list[int]] = {}
    first_model: dict[int | None, str] = {}
    for dp, (rank, entry) in enumerate(zip(ranks, metadata, strict=True)):
        team = _team(index, dp, rank, entry, len(ranks))
        ep = _ep_rank(models[dp]) if len(team) < len(ranks) else None
        first = first_model.setdefault(ep, models[dp].name)
        if teams_by_ep.setdefault(ep, team) != team:
            raise FormatError(
                f"{rank.file.path}: sub-group {index} is shared by the ranks {team}, but"
                f" {models[dp].name} says it is expert-parallel rank {ep}, as {first} does for"
                " other ranks; one of the files was renamed"
            )
    by_ep = sorted(teams_by_ep.items(), key=lambda item: item[0] or 0)
    return [(ep, [ranks[dp] for dp in team]) for ep, team in by_ep]


def _team(index: int, dp: int, rank: Rank, entry: Mapping[str, Any], world: int) -> list[int]:
    """The ranks that share a sub-group. Raises FormatError if the file is not that of `dp`."""
    team, place = list(entry["partition_ranks"]), entry["partition_rank"]
    counted = entry["partition_count"] == len(team) > place and max(team) < world
    if not counted or team[place] != dp:
        raise FormatError(
            f"{rank.file.path}: sub-group {index} says it is part {place} of the"
            f" ranks {team}, but the file is that of rank {dp}: it was renamed, or belongs to"
            " another run"
        )
    return team


def _ep_rank(model: Stored) -> int:
    ranks = {int(layer["ep_rank"]) for layer in autoep_layers(model)}
    if len(ranks) != 1:
        raise FormatError(
            f"{model.file.path}: ds_autoep_layers should give one ep_rank, but gives"
            f" {sorted(ranks)}"
        )
    return ranks.pop()


def check_expert_ranks(files: Files) -> None:
    """Raise FormatError where a rank's model states are, by their AutoEP layers, another rank's.

    Only under ZeRO-3 has each data-parallel rank a file of its own.
    """
    for models in files.models if files.zero3 else ():
        for dp, model in enumerate(models):
            for layer in autoep_layers(model):
                _check_expert_rank(dp, model, as_dict(layer))


def _check_expert_rank(dp: int, model: Stored, layer: Mapping[str, Any]) -> None:
    ep, team = layer.get("ep_rank"), layer.get("expert_data_parallel_rank")
    ep_size, teams = layer.get("ep_size"), layer.get("expert_data_parallel_world_size")
    if type(ep_size) is not int or type(teams) is not int or min(ep_size, teams) < 1:
        return  # another version of AutoEP does not say
    mine = divmod(dp, teams)[::-1] if _data_before_experts(model) else divmod(dp, ep_size)
    if None not in (team, ep) and (team, ep) != mine:
        raise FormatError(
            f"{model.file.path}: ds_autoep_layers says that it is of expert-parallel rank {ep} and"
            f" expert-data-parallel rank {team}, but the file is that of data-parallel rank {dp},"
            f" which has {mine[1]} and {mine[0]}: it was renamed, or copied from another rank's."
            " Put that rank's own file in its place"
        )


def autoep_layers(model: Stored) -> list[Mapping[str, Any]]:
    return list(model.state.get("ds_autoep_layers") or model.state.get("autoep_layers") or ())


def is_native(name: str) -> bool:
    return _NATIVE.fullmatch(name) is not None


def expert_number(name: str) -> str | None:
    """The number of a native expert in the name of its tensor; None for what is no expert."""
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


def is_fused(name: str, model: Stored) -> bool:
    return _find_layer(name, model) is not None


def router_aliases(names: Collection[str], owned: Collection[str], model: Stored) -> dict[str, str]:
    """AutoEP's second names of routers, those before it replaced the layer, and their owners."""
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
    """How many native experts of one layer there are among names."""
    matches = filter(None, map(_NATIVE.fullmatch, names))
    return len({int(match[2]) for match in matches if match[1] == prefix})


def expert_layout(name: str, slices: Mapping[int, Shape], model: Stored) -> ParamLayout:
    """The parameter that slices of fused experts form, by `ds_autoep_layers`.

    Without a placement (older versions) each rank has the experts after those of the rank before
    it.
    """
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
    fragments = [
        Fragment(ep, _row(place, shapes[ep]), _row(expert, shapes[ep]))
        for ep, experts in placement(name, model).items()
        for place, expert in enumerate(experts)
    ]
    return ParamLayout((int(layer["num_experts"]), *shapes[0][1:]), tuple(shapes), tuple(fragments))


def placement(name: str, model: Stored) -> dict[int, list[int]]:
    """By expert-parallel rank, the global numbers of the experts along the first axis."""
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


def _layer_of(name: str, model: Stored) -> Mapping[str, Any]:
    layer = _find_layer(name, model)
    if layer is None:
        raise FormatError(
            f"{model.file.path}: {name} is cut over expert-parallel ranks, but no layer of"
            " ds_autoep_layers has its prefix"
        )
    return layer


def _find_layer(name: str, model: Stored) -> Mapping[str, Any] | None:
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
    """Which of `ep` ranks has a native expert, by its global name; None for other names."""
    match = _NATIVE.fullmatch(name)
    return int(match[2]) // (_count_experts(match[1], shapes) // ep) if match else None
