"""The meaning of torch's distributed tensors in a pickle: all their names are inert records.

A DTensor is pickled as its local tensor and its spec: the mesh of ranks, a placement for each axis
of the mesh, and the shape of the whole. Facts: `torch/distributed/tensor/_dtensor_spec.py`,
`placement_types.py`, `device_mesh.py` and `_mesh_layout.py` of torch 2.13; torch 2.4 has the same
classes in `torch.distributed._tensor`.
"""

from __future__ import annotations

from jax_ucp.codecs.unpickle import Name, Record, inert, table

DTENSOR_TYPES = frozenset(
    Name(f"torch.distributed.{name}")
    for name in ("tensor.DTensor", "tensor._api.DTensor", "_tensor.DTensor", "_tensor.api.DTensor")
)
# Of a mesh the ranks and the place of the rank that wrote the file. The rest names groups of
# processes, repeats the ranks, or leads to other meshes and from there back.
_KEPT_OF_MESH = ("mesh", "_layout", "_rank_map", "_coordinate_on_dim", "mesh_dim_names")
_KEPT_OF_MESH += ("_mesh_dim_names",)
_SPEC_MODULES = ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
_PLACEMENT_MODULES = ("tensor.placement_types", "_tensor.placement_types")


def _keep_mesh(made: object, state: object) -> object:
    if not isinstance(made, Record) or not isinstance(state, dict):
        return NotImplemented
    made.state = {name: state[name] for name in _KEPT_OF_MESH if name in state}
    return None


NAMES: dict[str, Name] = table(
    *DTENSOR_TYPES,
    inert("torch.distributed.device_mesh.DeviceMesh", _keep_mesh),
    inert("torch.distributed._mesh_layout._MeshLayout"),
    inert("torch.distributed._mesh_layout._FlatLayout"),
    *(
        inert(f"torch.distributed.{module}.{name}")
        for module in _SPEC_MODULES
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    ),
    *(
        inert(f"torch.distributed.{module}.{name}")
        for module in _PLACEMENT_MODULES
        for name in ("Shard", "_StridedShard", "Replicate", "Partial", "_Partial", "MaskPartial")
    ),
)
