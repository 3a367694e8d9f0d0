from jax_ucp.checkpoint.checkpoint import Checkpoint, open_with
from jax_ucp.checkpoint.opening import diff, open

__all__ = ["Checkpoint", "diff", "open", "open_with"]
