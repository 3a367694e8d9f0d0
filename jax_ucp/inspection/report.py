"""Reports of the commands, as JSON values: `--json` prints them, and tables are made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ucp.arrays.protocol import Piece
from jax_ucp.tree import Leaf

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint
    from jax_ucp.formats.exporting import ExportPlan
    from jax_ucp.sharding.fit import Fit, Rule
    from jax_ucp.sharding.reads import HostMesh
    from jax_ucp.universal.copy import CopyPlan
    from jax_ucp.universal.linking import LinkPlan

Report = dict[str, Any]


def inspection(checkpoint: Checkpoint) -> Report:
    """The summary of a checkpoint, its leaves with shardings and places, and its inventory."""
    pieces = pieces_of(checkpoint)
    return {
        **head(checkpoint, pieces),
        "leaves": [_leaf(leaf, pieces[leaf.label]) for leaf in checkpoint.leaves],
        "inventory": inventory_of(checkpoint),
        "extras": dict(checkpoint.extras),
    }


def copy_plan(checkpoint: Checkpoint, target: str | None, plan: CopyPlan) -> Report:
    """The summary of a checkpoint, and what a conversion would read, write and hold in memory."""
    largest = max((block.nbytes for block in plan.blocks), default=0)
    pieces = pieces_of(checkpoint)
    return {
        **head(checkpoint, pieces),
        "target": target,
        "read_bytes": checkpoint.nbytes,
        "write_bytes": plan.write_bytes,
        "blocks": len(plan.blocks),
        "largest_block_bytes": largest,
        "budget_bytes": plan.budget_bytes,
        "opening": asdict(checkpoint.asked),
        "peak_bytes_in_flight": plan.peak_bytes,
        "leaves": [
            {
                "leaf": leaf.label,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "pieces": len(pieces[leaf.label]),
                "outer_chunk": list(plan.chunks[leaf.name].outer),
                "inner_chunk": list(plan.chunks[leaf.name].inner),
            }
            for leaf in checkpoint.leaves
            if leaf.has_array
        ],
        "not_mapped": [item for item in inventory_of(checkpoint) if item["status"] != "mapped"],
    }


def link_plan(checkpoint: Checkpoint, target: str, plan: LinkPlan) -> Report:
    """The counts of arrays and bytes that a link leaves in place, and copies, with the reasons."""
    return {
        "path": checkpoint.path,
        "target": target,
        "linked": {
            "arrays": len(plan.linked.arrays),
            "bytes": plan.linked_bytes,
            "chunks": sum(len(array.places) for array in plan.linked.arrays.values()),
            "files": len(plan.files),
        },
        "copied": {"arrays": len(plan.copied), "bytes": plan.copied_bytes, "reasons": plan.reasons},
        "notes": list(checkpoint.notes),
    }


def export_plan(plan: ExportPlan, target: str) -> Report:
    """The counts of files, tensors and bytes that an export writes."""
    return {
        "path": target,
        "format": plan.format,
        "files": len(plan.files),
        "tensors": sum(len(file.tensors) for file in plan.files),
        "bytes": plan.write_bytes,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes_in_flight": plan.peak_bytes,
        "notes": list(plan.notes),
    }


def mesh_plan(checkpoint: Checkpoint, mesh: HostMesh, rules: Sequence[Rule]) -> Report:
    """The sharding of every leaf on a mesh, and each host's bytes; no devices are needed."""
    from jax_ucp.sharding.fit import unused_rules  # brings in jax, which nothing else here needs
    from jax_ucp.sharding.reads import planned_fit

    arrays = [leaf for leaf in checkpoint.leaves if leaf.has_array]
    leaves = [_placed(leaf, planned_fit(leaf, mesh, rules), mesh.sizes) for leaf in arrays]
    reads = checkpoint.plan_reads(mesh.sizes, rules=rules, hosts=mesh.hosts)
    columns = (reads.read, reads.needed, reads.files, reads.requests)
    return {
        "mesh": mesh.sizes,
        "devices": mesh.devices,
        "device_bytes": sum(leaf["device_bytes"] for leaf in leaves),
        "hosts": [
            {
                "read_bytes": read,
                "needed_bytes": needed,
                "files": files,
                "requests": requests if checkpoint.is_remote else 0,
                "amplification": read / max(1, needed),
            }
            for read, needed, files, requests in np.stack(columns, axis=1).tolist()
        ],
        "amplification": reads.amplification,
        "balance": reads.balance,
        "requests": int(reads.requests.sum()) if checkpoint.is_remote else 0,
        "leaves": leaves,
        "notes": unused_rules(rules, checkpoint.leaves),
    }


def _placed(leaf: Leaf, fit: Fit, mesh: Mapping[str, int]) -> Report:
    """The part of a leaf that each device would hold."""
    local = list(leaf.shape)
    for i, axes in enumerate(fit.spec):
        names = (axes,) if isinstance(axes, str) else axes or ()
        local[i] //= math.prod(mesh[axis] for axis in names)
    return {
        "leaf": leaf.label,
        "shape": list(leaf.shape),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in fit.spec],
        "device_shape": local,
        "device_bytes": math.prod(local) * np.dtype(leaf.dtype).itemsize,
        "notes": list(fit.notes),
    }


def inventory_of(checkpoint: Checkpoint) -> list[Report]:
    return [
        {"where": item.where, "what": item.what, "status": item.status, "reason": item.reason}
        for item in checkpoint.inventory
    ]


_Pieces = Mapping[str, Sequence[Piece]]


def pieces_of(checkpoint: Checkpoint) -> _Pieces:
    return {leaf.label: checkpoint.where(leaf) for leaf in checkpoint.leaves}


def head(checkpoint: Checkpoint, pieces: _Pieces) -> Report:
    """The summary of a checkpoint."""
    statuses = Counter(item.status for item in checkpoint.inventory)
    arrays = [leaf for leaf in checkpoint.leaves if leaf.has_array]
    about = checkpoint.about
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "writer": about.writer,
        "step": about.step,
        "parallelism": dict(about.parallelism),
        "source": dict(checkpoint.source),
        "bytes": checkpoint.nbytes,
        "files": len({piece.file for several in pieces.values() for piece in several}),
        "arrays": len(arrays),
        "elements": sum(math.prod(leaf.shape) for leaf in arrays),
        "dtypes": dict(Counter(map(_dtype_words, arrays)).most_common()),
        "states": _states(checkpoint),
        "groups": [
            {"parameters": len(group.params), "settings": group.settings}
            for group in checkpoint.groups
        ],
        "items": {status: statuses[status] for status in ("mapped", "extra", "skipped")},
        "notes": list(checkpoint.notes),
    }


def _dtype_words(leaf: Leaf) -> str:
    return f"key {leaf.key_impl}" if leaf.kind == "prng_key" else leaf.dtype


def _states(checkpoint: Checkpoint) -> Report:
    """Counts, elements and dtypes of parameters by state; empty if the tree has no parameters."""
    of: dict[str, list[Leaf]] = {}
    for parameter in checkpoint.params.values():
        for state, leaf in parameter.states.items():
            of.setdefault(state, []).append(leaf)
    if "param" not in of:
        return {}
    return {
        state: {
            "parameters": len(leaves),
            "elements": sum(math.prod(leaf.shape) for leaf in leaves),
            "dtypes": sorted({leaf.dtype for leaf in leaves}),
        }
        for state, leaves in of.items()
    }


def _leaf(leaf: Leaf, pieces: Sequence[Piece]) -> Report:
    entry: Report = {"leaf": leaf.label, "kind": leaf.kind}
    if not leaf.has_array:
        return entry | {"value": leaf.value}
    entry |= {"shape": list(leaf.shape), "dtype": leaf.dtype}
    if leaf.kind == "prng_key":
        entry["key"] = _dtype_words(leaf)  # shape and dtype are those of its data, as stored
    if leaf.sharding:
        entry["mesh"] = dict(zip(leaf.sharding.axis_names, leaf.sharding.axis_sizes, strict=True))
        entry["spec"] = [
            list(axes) if isinstance(axes, tuple) else axes for axes in leaf.sharding.spec
        ]
    entry["stored"] = [
        {
            "file": p.file,
            "item": p.item,
            "from": str(p.source),
            "to": str(p.target),
            **({"rule": p.rule} if p.rule else {}),
        }
        for p in pieces
    ]
    return entry
