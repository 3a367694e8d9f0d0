"""The mappings of the package, and which of them fit a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_ucp.errors import LayoutError
from jax_ucp.inspection.report import Report
from jax_ucp.mapping.binding import bind
from jax_ucp.mapping.model_config import given_config, joined
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import shipped

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint


def mapping_list(
    checkpoint: Checkpoint | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> list[Report]:
    """What `jax-ucp mappings --json` prints: the mappings that come with the package.

    Args:
        checkpoint: of which it is said which mappings fit; those for other models are left out.
        config: as of `Checkpoint.map`.

    Returns:
        For each its name, `model`, `target` and `variants`, and with a checkpoint `fits`, and
        `why` it does not.
    """
    mappings = [LeafMapping.load(name) for name in shipped()]
    if checkpoint is None:
        return [_entry(mapping) for mapping in mappings]
    return list(_verdicts(checkpoint, mappings, given_config(config or {})))


def _entry(mapping: LeafMapping) -> Report:
    name = mapping.name.removesuffix(".yaml")
    return {"name": name, **mapping.about, "variants": list(mapping.variants)}


def _verdicts(
    checkpoint: Checkpoint, mappings: Sequence[LeafMapping], given: Mapping[str, Any]
) -> Iterator[Report]:
    """The mappings for models of the checkpoint's class, each with what does not fit, if anything.

    Where the config names no class, those of which every requirement is met.
    """
    shapes = {name: param.shape for name, param in checkpoint.params.items()}
    for mapping in mappings:
        config = joined(checkpoint.config, given, mapping.config_keys)
        try:
            bind(mapping, shapes, {}, config)
        except LayoutError as error:
            if mapping.about["model"] in config.get("architectures", ()):
                _, *faults = str(error).split("\n  ")
                yield {**_entry(mapping), "fits": False, "why": faults[0] if faults else str(error)}
        else:
            yield {**_entry(mapping), "fits": True, "why": ""}
