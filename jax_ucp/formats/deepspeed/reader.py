"""DeepSpeed checkpoints as its engine writes them: ZeRO 0 to 3, tensor and pipeline parallelism.

Stored partitions form slices (`partitions`), and slices form parameters (`parameters`). Masters are
the parameters; the module's own tensors are copies of slices, compared by verify (`modules`).
"""

from __future__ import annotations

from dataclasses import replace

from jax_ucp.arrays.beside import items_beside
from jax_ucp.arrays.contents import About, Contents
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.extras import OPTIMIZER_FILES, add_extras
from jax_ucp.formats.deepspeed.files import (
    TagFiles,
    check_facts,
    open_files,
    zero_config,
)
from jax_ucp.formats.deepspeed.marks import tag_folder
from jax_ucp.formats.deepspeed.modules import add_module, names_in
from jax_ucp.formats.deepspeed.parameters import Joins, make_parameters
from jax_ucp.formats.deepspeed.partitions import add_partitions, teams
from jax_ucp.formats.deepspeed.slices import ASIDE, Slices
from jax_ucp.formats.deepspeed.stage0 import add_numbered_states
from jax_ucp.formats.deepspeed.swapped import with_swapped
from jax_ucp.options import Options

_SWAPPED = "swapped out to NVMe: the elements are in offloaded_tensors"


# `runtime/zenflow/zenflow_stage_1_and_2.py` of DeepSpeed 0.19.8
_ZENFLOW = (
    "the run used ZenFlow, which updates chosen columns of the module's weights in steps where"
    " their masters stay behind, and saves no moments of those columns: on_conflict='master' takes"
    " the masters, from which DeepSpeed resumes, on_conflict='copy' the weights that the model"
    " computed with"
)


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory (with `latest`) or a tag's folder. Raises FormatError."""
    folder = tag_folder(path) or path
    if not folder.is_dir():
        raise NotACheckpoint(
            f"{path / 'latest'} names {folder.name}, but there is no such folder beside it"
        )
    files = open_files(folder, options.weights_only)
    moe.check_expert_ranks(files)
    files, swap_files, emptied = with_swapped(files, options.weights_only)
    if options.weights_only and any(files.ranks):
        try:
            for _ in teams(files, weights_only=True):
                pass  # each is checked as it is made
            check_facts(files, weights_only=True)
        except FormatError as error:
            if files.zero3:  # the weights are in no other file
                raise
            files = replace(files, ranks=[[] for _ in files.ranks], unusable=str(error))
    check_facts(files, options.weights_only)
    # first slices, then parameters of them, then the rest
    slices, joins = Slices(files, options, swap_files), Joins.of(files, options)
    builder, has_optimizer = slices.builder, any(files.ranks)
    builder.about = _about(files)
    slices.skip(emptied, "placeholder", _SWAPPED)
    if has_optimizer and "zenflow" in zero_config(files.models[0][0]):
        builder.cause = _ZENFLOW
        builder.notes.append(_ZENFLOW)
    if not has_optimizer:
        _check_without_partitions(slices)
    add_partitions(slices)
    add_module(slices)
    if not has_optimizer and not options.weights_only:
        add_numbered_states(slices)
    joins.bind(slices)
    names = {name for _, name in slices.states} | names_in(files, "module")
    for patterns in joins.stages:
        patterns.check_used(names)
    make_parameters(slices, joins)
    add_extras(slices)
    read_files = {file.name for file in files.all()} | {*swap_files}
    for item in items_beside(folder, read_files):
        left_aside = options.weights_only and item.where.endswith(OPTIMIZER_FILES)
        reason = ASIDE if left_aside else "not one that DeepSpeed's engine reads"
        builder.skip(item.where, item.what, reason)
    return builder.contents()


def _about(files: TagFiles) -> About:
    first = files.models[0][0]
    version, step = first.state.get("ds_version"), first.state.get("global_steps")
    stage = 3 if files.zero3 else zero_config(first).get("stage", 0)
    ranks = {"dp": len(files.ranks[0]), "tp": files.tp, "pp": files.pp}
    return About(
        f"DeepSpeed{f' {version:.20}' if isinstance(version, str) else ''}, ZeRO-{stage}",
        step if isinstance(step, int) else None,
        {axis: n for axis, n in ranks.items() if n},
    )


def _check_without_partitions(slices: Slices) -> None:
    """Raise FormatError if missing optimizer files are needed; else note that they are missing."""
    files, first = slices.files, slices.files.models[0][0]
    stage = 3 if files.zero3 else zero_config(first).get("stage", 0)
    missing = f"{files.folder} has no *_optim_states.pt"
    if files.zero3 or (stage and not slices.options.weights_only):
        remedy = "weights_only opens the module's"
        if files.zero3:
            remedy = "its weights are in no other file"
        raise FormatError(
            f"{missing}, but {first.name} was written by ZeRO-{stage}: masters and optimizer state"
            f" are missing; {remedy}"
        )
    why = files.unusable or (missing if stage else "")
    if files.layers:
        first_layer = min(layer.name for layer in files.layers.values())
        instead = f"without optimizer files ({why})" if why else "of ZeRO-0"
        remedy = "" if why else ". Save with ZeRO-1"
        raise FormatError(
            f"{files.folder} has pipeline layers, as in {first_layer}, {instead}: nothing else says"
            f" which parameters a pipeline stage has, nor the names of tied ones{remedy}"
        )
    if why:
        slices.builder.notes.append(
            "the weights are the module's own, as the model computes with them, and no second"
            f" copy proves them: their masters were left aside, because {why}"
        )
