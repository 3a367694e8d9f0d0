"""Conversion of torch's optimizer states to optax's and back, by the types of optax's states.

An optax state is a tree of named tuples. For each known type, a table says what each field holds: a
moment of every parameter, the number of steps, zeros, or a value that the optimizer was made with.
An unknown type is refused, because its meaning would be a guess. The position in the tree does not
matter, so that `chain`, `masked`, `partition`, `inject_hyperparams` and `MultiSteps` may be nested
in any way.

Facts, by torch 2.13 (`torch/optim/adam.py`, `sgd.py`) and optax 0.2.8 (`optax/_src/transform.py`,
`_accumulation.py`):

- Adam, AdamW: `exp_avg`, `exp_avg_sq` are optax's `mu`, `nu`: both keep b * m + (1 - b) * g
  uncorrected. `step` is optax's `count`: both count the updates done, and correct the bias of an
  update by that number and one. Torch adds eps to the corrected root, which is optax's `eps`, not
  `eps_root`. Weight decay has no state in either; that of torch's Adam is a term of the gradient,
  `chain(add_decayed_weights(...), scale_by_adam(...), ...)`.
- SGD: `momentum_buffer` is optax's `trace`: both are decay * t + g, with or without Nesterov. With
  dampening torch's is another sum, which is refused.
- Lion (DeepSpeed's, `deepspeed/ops/lion`): `exp_avg` is optax's `mu`; its `count` is not used in an
  update.
- AMSGrad: torch keeps the maximum of the second moments as they are, optax of the corrected ones.
  Refused, as is every optimizer of which `tx` does not take all states.
- RAdam, LAMB and Muon keep states under names of Adam's or SGD's. Their settings tell them apart,
  where the files have any.
- A schedule of optax is asked for the count of updates done, which is torch's `last_epoch` of a
  scheduler that is stepped with the optimizer.
"""

from __future__ import annotations

from jax_ucp.optimizers.plan import OptimizerPlan, plan_optimizer
from jax_ucp.optimizers.states import torch_states

__all__ = ["OptimizerPlan", "plan_optimizer", "torch_states"]
