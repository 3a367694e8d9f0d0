"""Levanter or EasyDeL trains, its state is saved by a manager with our handler, and goes on on
another mesh.

    pip install levanter==1.2.dev1644 gitpython chex jax==0.7.2 jaxlib==0.7.2  # Python 3.12
    python examples/own_trainers.py levanter
    pip install easydel==0.3.0 pillow torch==2.13.0 torchvision                # Python 3.13
    python examples/own_trainers.py easydel
    python examples/own_trainers.py easydel --negative-control

Neither saves with Orbax: each writes TensorStore's arrays by code of its own, for its own loader.
The state of either's trainer is a pytree, which a hook, or the loop, gives to `manager.save`. A
Llama of two layers trains for six steps on eight devices of the CPU, four of which share the rows
and two the columns of each matrix. The state after step 3 is restored into a fresh one, made by the
framework on the same mesh and on two by four: every leaf must have the bits that were saved. Then
the framework's own loop goes on. On the same mesh its losses must be those of the run that was not
interrupted, bit for bit. On the other numbers are added in another order: they must be as near to
it as the uninterrupted run there is, or ten times as far at most, since that is one sample of what
rounding does. `--negative-control` sets AdamW's moments to zero in what was restored; the losses
must then part, and it fails if they do not: they do by a thousand times as much.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jax_ucp as ucp

Mesh = tuple[int, int]  # devices along what FSDP shards, along tensor parallelism
SAVED, OTHER = (4, 2), (2, 4)
STOP, STEPS = 3, 6
BATCH, LENGTH, VOCAB = 8, 16, 64
STARTS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, BATCH, 1))
TOKENS = ((STARTS + np.arange(LENGTH) * 3) % VOCAB).astype(np.int32)


class EasyDeL:
    """EasyDeL's trainer on a mesh, with a fresh `state`; what follows has its losses by step, and
    its state after STOP.
    """

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        import easydel  # pyright: ignore[reportMissingImports]
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from flax import nnx

        config = easydel.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            sharding_axis_dims=(1, mesh[0], 1, mesh[1], 1),
        )
        exact = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        model = easydel.LlamaForCausalLM(config=config, **exact, rngs=nnx.Rngs(0))
        arguments = easydel.TrainingArguments(
            model_name="tiny",
            save_directory=str(folder),
            max_training_steps=STEPS,
            num_train_epochs=1,
            total_batch_size=BATCH,
            max_length=LENGTH,
            learning_rate=1e-2,
            shuffle_train_dataset=False,
            do_last_save=False,
            use_wandb=False,
        )
        rows = TOKENS.reshape(-1, LENGTH)
        columns = {"input_ids": rows, "attention_mask": np.ones_like(rows), "labels": rows}
        losses, saved = {}, []

        class Trainer(easydel.Trainer):
            def on_step_end(self, state, metrics, step):  # its next step donates the state
                losses[step] = float(metrics.loss)
                saved.extend([jax.tree.map(jnp.copy, state)] if step == STOP else [])
                return state, metrics

        data = Dataset.from_dict(columns)
        self.trainer = Trainer(arguments=arguments, model=model, dataset_train=data)
        self.state, self.losses, self.saved = self.trainer.model_state, losses, saved

    def train(self, state: Any) -> Mapping[int, float]:
        """The losses from a state on, by step."""
        self.trainer.model_state = state
        self.trainer.train()
        return self.losses


class Levanter:
    """Levanter's trainer, in the same way. Its state has parts that are no arrays, beside which
    arrays alone are saved and restored.
    """

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        import equinox as eqx  # pyright: ignore[reportMissingImports]
        import haliax  # pyright: ignore[reportMissingImports]
        from levanter.main.train_lm import (  # pyright: ignore[reportMissingImports]
            compute_next_token_loss,
        )
        from levanter.models.llama import LlamaConfig  # pyright: ignore[reportMissingImports]
        from levanter.models.lm_model import LmExample  # pyright: ignore[reportMissingImports]
        from levanter.optim import AdamConfig  # pyright: ignore[reportMissingImports]
        from levanter.tracker import NoopConfig  # pyright: ignore[reportMissingImports]
        from levanter.trainer import Trainer, TrainerConfig  # pyright: ignore[reportMissingImports]

        config = TrainerConfig(
            model_axis_size=mesh[1],
            tensor_parallel_axes=["mlp", "heads"],
            train_batch_size=BATCH,
            num_train_steps=STEPS,
            tracker=NoopConfig(),
            log_dir=folder,
            load_checkpoint=False,
            require_accelerator=False,
        )
        config.ray = dataclasses.replace(config.ray, auto_start_cluster=False)
        config.initialize()
        optimizer = AdamConfig(learning_rate=1e-2, warmup=0).build(STEPS)
        self.trainer = Trainer(config, optimizer, compute_next_token_loss)
        llama = LlamaConfig(
            seq_len=LENGTH,
            hidden_dim=32,
            intermediate_dim=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
        )
        vocab, key = haliax.Axis("vocab", VOCAB), jax.random.PRNGKey(0)
        with self.trainer:
            state = self.trainer.initial_state(key, model_init=lambda: llama.build(vocab, key=key))
            batch = self.trainer.TrainBatch
            tokens = [haliax.named(jnp.asarray(rows), (batch, llama.Pos)) for rows in TOKENS]
            self.batches = [haliax.vmap(LmExample.causal, batch)(each) for each in tokens]
        self.state, self.rest = eqx.partition(state, eqx.is_array)
        self.combined, self.arrays = eqx.combine, lambda state: eqx.filter(state, eqx.is_array)
        self.saved: list[Any] = []

    def train(self, state: Any) -> Mapping[int, float]:
        """The losses from a state on, by step."""
        losses: dict[int, float] = {}
        state = self.combined(state, self.rest)
        batches = itertools.islice(self.batches, int(state.step), None)
        with self.trainer:
            for step in self.trainer.training_steps(state, batches):
                done = step.step + 1
                losses[done] = float(step.loss)
                if done == STOP:
                    self.saved.append(jax.tree.map(jnp.copy, self.arrays(step.state)))
        return losses


def is_equal(some: jax.Array, other: jax.Array) -> bool:
    """Whether two leaves have the same bits."""
    if jnp.issubdtype(some.dtype, jax.dtypes.prng_key):
        some, other = jax.random.key_data(some), jax.random.key_data(other)
    return np.asarray(some).tobytes() == np.asarray(other).tobytes()


def without_moments(state: Any) -> Any:
    """The state, with each of AdamW's moments set to zero."""

    def zeroed(path: tuple[Any, ...], leaf: Any) -> Any:
        is_moment = {"mu", "nu"} & {getattr(key, "name", None) for key in path}
        return leaf * 0 if is_moment else leaf

    return jax.tree_util.tree_map_with_path(zeroed, state)


def apart(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """The largest difference between two runs at any step that both did."""
    return max(abs(some[step] - others[step]) for step in some.keys() & others.keys())


def main(framework: type[EasyDeL] | type[Levanter], negative_control: bool) -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {mesh: framework(mesh, folder / f"whole{mesh[0]}") for mesh in (SAVED, OTHER)}
        whole = {mesh: dict(run.train(run.state)) for mesh, run in runs.items()}
        [saved] = runs[SAVED].saved
        resumed, equal = {}, True
        handler = ucp.CheckpointHandler()
        with ocp.CheckpointManager(folder / "saved", item_handlers=handler) as manager:
            manager.save(STOP, args=ucp.args.Save(saved))
            manager.wait_until_finished()
            for mesh in (SAVED, OTHER):
                fresh = framework(mesh, folder / f"resumed{mesh[0]}")
                state = manager.restore(STOP, args=ucp.args.Restore(fresh.state))
                pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(state), strict=True)
                found = [is_equal(*pair) for pair in pairs]
                print(f"mesh {mesh}: {sum(found)} of {len(found)} leaves have the bits of the save")
                equal &= all(found)
                if negative_control:
                    state = without_moments(state)
                resumed[mesh] = fresh.train(state)
    for mesh, losses in resumed.items():
        if min(losses) != STOP + 1:
            raise RuntimeError(f"{mesh} began at step {min(losses)}, not at {STOP + 1}")
    spread = apart(whole[SAVED], whole[OTHER])
    same, other = (apart(resumed[mesh], whole[SAVED]) for mesh in (SAVED, OTHER))
    print(f"losses {' '.join(f'{loss:.4f}' for loss in whole[SAVED].values())}")
    print(f"spread of the uninterrupted runs:       {spread:.2e}")
    print(f"resumed on the same mesh, difference:   {same:.2e}")
    print(f"resumed on the other mesh, difference:  {other:.2e}")
    agree = equal and same == 0 and other <= 10 * spread
    print("The runs agree." if agree else "The runs part.")
    return 0 if agree != negative_control else 1


if __name__ == "__main__":
    frameworks = {"easydel": EasyDeL, "levanter": Levanter}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=frameworks)
    parser.add_argument("--negative-control", action="store_true")
    given = parser.parse_args()
    sys.exit(main(frameworks[given.framework], given.negative_control))
