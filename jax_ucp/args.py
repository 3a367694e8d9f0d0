"""Arguments of `CheckpointManager.save` and `.restore` for `jax_ucp.CheckpointHandler`."""

from jax_ucp.handler import Restore as Restore
from jax_ucp.handler import Save as Save
