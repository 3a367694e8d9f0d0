"""Files of torch.save as checkpoints: a model's state dict, or what a trainer saves;
`weight_folder` has folders.

Which tensor is a weight and which an optimizer's state follows from where it lies in the nested
dicts, by the rules of `state_paths`. `torch.optim.Optimizer.state_dict` numbers the parameters;
which number is which parameter is stored only if the optimizer was given names (`param_names` in
its groups). Without them the states are kept by number, under `other`, unless shapes prove the
pairing or the user says it: the order of `model.parameters()` is not that of a state dict, which
has buffers and tied weights too. Everything that is no tensor is an extra.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents
from jax_ucp.codecs.torch_file import TorchFile, has_dtensors, is_torch_file
from jax_ucp.errors import FormatError
from jax_ucp.files.in_flight import opened_files
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.moments import settle_moments
from jax_ucp.formats.state_dicts import Tree, keep_extras
from jax_ucp.formats.weight_files import (
    RANK_STATES,
    index_save,
    keep_index,
    one_ranks,
    refuse_part,
    refuse_rank_of_llama,
    refuse_stand_in,
)
from jax_ucp.layout.patterns import Replicated
from jax_ucp.options import Options
from jax_ucp.states.opaque import weights_place

INDEX_SUFFIX = ".bin.index.json"  # what `transformers` calls the index of several files

LIGHTNING = "pytorch-lightning_version"  # the version that wrote a checkpoint

_NUMBERED = re.compile(r"\w+_\d+\.pt")


def recognise(path: FilePath) -> bool:
    return path.is_file() and (path.name.endswith(INDEX_SUFFIX) or is_torch_file(path))


def parse(path: FilePath, options: Options) -> Contents:
    """The tensors of a file, or of the files that an index names. Raises FormatError."""
    if path.name.endswith(INDEX_SUFFIX):
        index, names = index_save(path)
        builder = read_weights(path, path.parent, names, options)
        keep_index(builder, path, index)
    else:
        refuse_part(path)
        builder = read_weights(path, path.parent, [path.name], options)
        refuse_rank_of_llama(builder, path)
    return builder.contents()


def _opened(path: FilePath) -> TorchFile:
    refuse_stand_in(path)
    refuse_distributed(path)
    return TorchFile(path, lenient=True)


def read_weights(
    path: FilePath, folder: FilePath, names: Sequence[str], options: Options
) -> ContentsBuilder:
    """The tensors of files, each under its state, and other objects as extras."""
    files = opened_files(folder, names, _opened)
    for name, file in files.items():
        of_deepspeed = isinstance(file.tree, dict) and "ds_version" in file.tree
        if of_deepspeed or RANK_STATES.search(name):
            raise one_ranks(file.path)
    builder = ContentsBuilder("torch", path, Combined.of_files(files))
    tree = Tree()
    for name, file in files.items():
        keep_extras(builder, name, file)
        tree.add(name, file)
        builder.unknown |= file.unknown
    for label, tensor in tree.tensors.items():
        if tensor.node.attributes:
            builder.extra(tensor.file, f"attributes of {label}", tensor.node.attributes)
    builder.about = About("torch.save")
    for name, file in reversed(files.items()):
        if isinstance(file.tree, dict) and LIGHTNING in file.tree:
            writer, step = f"Lightning {file.tree[LIGHTNING]}", file.tree.get("global_step")
            builder.notes.append(f"{name} is a checkpoint of {writer} at step {step}")
            builder.about = About(writer, step if isinstance(step, int) else None)
    tensors, objects = tree.described()
    if builder.about.writer != "torch.save":  # Lightning's callbacks are no optimizer's
        tensors = {
            label: replace(stored, trainable=stored.trainable and stored.path[0] != "callbacks")
            for label, stored in tensors.items()
        }
    places = builder.placed(tensors, objects, options)
    paths = {label: tensor.path for label, tensor in tree.tensors.items()}
    tree.check(builder, weights_place(paths, places.at, places.in_optimizers))
    for label, tensor in tree.tensors.items():
        builder.place(places, label, [tensor.key], Replicated().join([tensor.node.shape]))
        state, name = places.at[label]
        if state == "param":
            builder.ties[name] = tensor.described().tie
    settle_moments(builder, options)
    builder.notes += places.notes
    return builder


def refuse_distributed(path: FilePath) -> None:
    """Raises FormatError for a file that is called after a rank and has parts of DTensors."""
    if _NUMBERED.fullmatch(path.name) and has_dtensors(path):
        raise FormatError(
            f"{path} has what one rank had of DTensors, as torch.distributed.checkpoint."
            "_experimental (checkpoint_RANK.pt) and torch_checkpointing (NAME_RANK.pt) write them:"
            " open its folder, with the files of all ranks"
        )
