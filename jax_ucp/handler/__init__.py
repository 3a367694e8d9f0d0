"""Orbax: our format behind its managers, v0 and v1. The only room that imports orbax.

Whole handlers of our own, so that nothing lies between the tree and the store; what they write says
that stock Orbax's PyTree handler wrote it, so stock reads it where jax_ucp is not installed.
"""

from jax_ucp.handler.buckets import in_bucket as in_bucket
from jax_ucp.handler.items import Restore as Restore
from jax_ucp.handler.items import Save as Save
from jax_ucp.handler.v0 import CheckpointHandler as CheckpointHandler
from jax_ucp.handler.v0 import handler_registry as handler_registry
from jax_ucp.handler.v1 import CheckpointableHandler as CheckpointableHandler
from jax_ucp.handler.v1 import orbax_context as orbax_context
