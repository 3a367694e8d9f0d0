"""Arguments of `CheckpointManager.save` and `.restore` for items kept by
`jax_ucp.CheckpointHandler`.
"""

from jax_ucp.handler import Restore as Restore
from jax_ucp.handler import Save as Save
