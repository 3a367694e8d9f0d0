"""Contents that are made of other contents: mapped, or with another config."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jax_ucp.arrays.contents import Contents, parts_as_parameters, require_weights
from jax_ucp.errors import LayoutError, TreeMismatch
from jax_ucp.files.path import file_path
from jax_ucp.formats.huggingface.companions import companions_in
from jax_ucp.formats.huggingface.given_config import described
from jax_ucp.formats.peft.config import notes_of_alphas, saved_modules
from jax_ucp.mapping import rules as mappings
from jax_ucp.mapping.adapters import PREFIX, mapping_of
from jax_ucp.mapping.binding import bind, given_before, mapping_record, takes_buffer
from jax_ucp.mapping.mapped_tree import map_contents
from jax_ucp.mapping.model_config import CONFIG, config_from, config_of, given_config, joined
from jax_ucp.mapping.states import states_of, top_labels
from jax_ucp.options import Sizes


def mapped(
    contents: Contents,
    mapping: mappings.Mapping | str | os.PathLike[str],
    sizes: Mapping[str, int] | None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    assume: Sequence[str],
    params: str | None,
) -> Contents:
    """The contents with a mapping applied; arguments are `Checkpoint.map`'s."""
    if isinstance(assume, str):
        raise TypeError(f"assume is a list of names of requirements, not {assume!r}")
    rules = mapping if isinstance(mapping, mappings.Mapping) else mappings.Mapping.load(mapping)
    given = None if config is None else given_config(config)
    contents = parts_as_parameters(contents) if rules.takes_parts else contents
    require_weights(contents)
    mapped_at = partial(_mapped, contents, rules, sizes or {}, given, assume)
    try:
        return mapped_at(params)
    except (LayoutError, TreeMismatch) as error:
        for label in top_labels(contents):
            with suppress(LayoutError, TreeMismatch):
                mapped_at(label)
                break
        else:
            raise
        raise type(error)(
            f"{contents.path} does not fit {rules.name} as it was given; perhaps"
            f" params={label!r} (--params {label}) is meant, where it fits"
        ) from error


def _mapped(
    contents: Contents,
    mapping: mappings.Mapping,
    sizes: Mapping[str, int],
    config: Mapping[str, Any] | None,
    assume: Sequence[str],
    params: str | None,
) -> Contents:
    """The contents with a mapping applied, whose parameters are below the label `params`."""
    states = states_of(contents, params)
    rules = mapping_of(mapping, states.weights, saved_modules(contents.extras))
    states = states.with_buffers(partial(takes_buffer, rules))
    shapes = {name: leaf.shape for name, leaf in states.weights.items()}
    before = given_before(rules, contents.source.get("mapping", {}))
    given = before.config if config is None else config
    assumed = sorted({*before.assumed, *assume})
    # A config that the undone mapping made is not of this model; the former one is remembered.
    has_made_config = before.undone is not None and bool(before.undone.config)
    own = before.config if has_made_config else config_of(contents.extras)
    known = joined(own, given, rules.config_keys)
    lengths = before.lengths | dict(Sizes(sizes))
    bound = bind(rules, shapes, lengths, known, assumed)
    # A config that the leaves' model has instead of this one must be found again to go back.
    lost = known if rules.config else given
    record = mapping_record(rules, bound, assumed, lost, before.earlier)
    extras = dict(contents.extras)
    if rules.config:
        extras[CONFIG] = {"config": config_from(rules.config, known, bound.sizes)}
    elif has_made_config:
        extras.pop(CONFIG, None)
    contents = replace(contents, extras=extras)
    origin = {**contents.origin, "mapping": record}
    notes = list(bound.notes)
    if any(name.startswith(PREFIX) for name in shapes):
        notes += notes_of_alphas(contents, shapes)
    return map_contents(contents, states, bound.leaves, bound.skipped, notes, origin)


# Settings in which null has no meaning, so that a given config may replace it.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def with_model_config(
    contents: Contents, config: Mapping[str, Any] | str | os.PathLike[str]
) -> Contents:
    """The contents with the config of their model among the extras, and if that is given as a
    folder, with the other files there that belong to the model.
    """
    given, own = given_config(config), config_of(contents.extras)
    meant = {key: value for key, value in own.items() if value is not None or key not in _TOKENS}
    known = own | joined(meant, given, frozenset(given))
    beside = {} if isinstance(config, Mapping) else companions_in(file_path(config))
    return replace(described(contents, known), companions={**beside, **contents.companions})


def of_run(contents: Contents, run: Mapping[str, Mapping[str, Any]]) -> Contents:
    """The contents with the extras `run` of a Megatron run in place of their own arguments."""
    own = {
        file: named
        for file, named in contents.extras.items()
        if file not in run and "args" not in named
    }
    return replace(contents, extras={**run, **own})
