"""The mappings of the package, and which of them fit a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_ucp.errors import LayoutError
from jax_ucp.inspection.report import Report
from jax_ucp.mapping.binding import bind, takes_buffer
from jax_ucp.mapping.model_config import given_config, joined
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import shipped

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint

_HUB_NAMES = "Hugging Face's names"


def mapping_list(
    checkpoint: Checkpoint | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> list[Report]:
    """The mappings that come with the package, as `jax-ucp mappings --json` prints them.

    Args:
        checkpoint: of which it is said which mappings fit; those for other models are left out.
        config: as of `Checkpoint.map`.

    Returns:
        For each its name, `model`, `target` and `variants` (with layouts), and with a checkpoint
        `fits`, and `why` it does not.
    """
    mappings = [LeafMapping.load(name) for name in shipped()]
    if checkpoint is None:
        return [_entry(mapping) for mapping in mappings]
    return list(_entries(checkpoint, given_config(config or {}), mappings))


def _entries(
    checkpoint: Checkpoint, given: Mapping[str, Any], mappings: Sequence[LeafMapping]
) -> Iterator[Report]:
    """The mappings for models of the checkpoint's class, with the first thing that does not fit.

    Where the config names no class, those of which every requirement is met. One that fits and
    leads to Hugging Face's names is followed by those that go on from there, `FIRST,SECOND`.
    """
    weights = {name: param.shape for name, param in checkpoint.params.items()}
    buffers = {leaf.param: leaf.shape for leaf in checkpoint.leaves if leaf.state == "buffer"}
    for mapping in mappings:
        known = joined(checkpoint.config, given, mapping.config_keys)
        named = {name: shape for name, shape in buffers.items() if takes_buffer(mapping, name)}
        try:
            bind(mapping, weights | named, {}, known)
            leads_on = mapping.about["target"] == _HUB_NAMES
            mapped = checkpoint.map(mapping, config=given or None) if leads_on else None
        except LayoutError as error:
            if mapping.about["model"] in known.get("architectures", ()):
                why = error.faults[0] if error.faults else str(error)
                yield {**_entry(mapping), "fits": False, "why": why}
            continue
        yield {**_entry(mapping), "fits": True, "why": ""}
        further = {} if mapping.config else given
        for entry in _entries(mapped, further, mappings) if mapped else ():
            yield {**entry, "name": f"{_entry(mapping)['name']},{entry['name']}"}


def _entry(mapping: LeafMapping) -> Report:
    name = mapping.name.removesuffix(".yaml")
    return {"name": name, **mapping.about, "variants": [*mapping.variants, *mapping.layouts]}
