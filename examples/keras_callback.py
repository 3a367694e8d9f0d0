"""Keras saves with its own callback, in the universal format, and goes on from there.

    pip install keras orbax-checkpoint                    # beside jax_ucp
    KERAS_BACKEND=jax python examples/keras_callback.py

A small model is trained for six epochs. The same training is then done in two parts: three epochs
with `keras.callbacks.OrbaxCheckpoint`, and three more by a new model whose `load_weights` is given
the directory. `ucp.orbax_everywhere()` around them is the only change. The losses must be equal,
bit for bit. Then a kernel is read without Keras, and outside of `orbax_everywhere` stock Orbax
alone loads the weights.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras  # pyright: ignore[reportMissingImports]
import numpy as np

import jax_ucp as ucp

EPOCHS, STOP = 6, 3


def new_model(seed: int = 0) -> Any:
    """A model whose layers and optimizer have names, by which Keras finds what it loads."""
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="tanh", name="hidden"),
        keras.layers.Dense(1, name="out"),
    ]
    model = keras.Sequential(layers, name="net")
    model.compile(keras.optimizers.AdamW(1e-2, name="adamw"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: Any, epochs: range, callbacks: list[Any] | None = None) -> list[float]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    history = model.fit(
        x,
        y,
        batch_size=16,
        initial_epoch=epochs.start,
        epochs=epochs.stop,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return history.history["loss"]


def main() -> int:
    want = fit(new_model(), range(EPOCHS))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        model = new_model()
        with ucp.orbax_everywhere():
            callback = keras.callbacks.OrbaxCheckpoint(str(directory), max_to_keep=2)
            first = fit(model, range(STOP), [callback])
            resumed = new_model(seed=1)
            resumed.load_weights(str(directory))
        second = fit(resumed, range(STOP, EPOCHS))
        checkpoint = ucp.open(directory / str(STOP - 1) / "pytree")
        kernel = checkpoint.read("trainable_variables/net/hidden/kernel")
        by_stock = new_model(seed=1)
        by_stock.load_weights(str(directory))
    weights = model.get_weights()
    stock_equal = all(map(np.array_equal, by_stock.get_weights(), weights))
    steps = list(zip(want, [*first, *second], strict=True))
    for epoch, (whole, parts) in enumerate(steps):
        print(f"epoch {epoch}: uninterrupted {whole:.6f}, in two parts {parts:.6f}")
    equal = all(whole == parts for whole, parts in steps)
    equal &= bool(np.array_equal(kernel, weights[0]))
    print(f"{checkpoint.format} format; stock Orbax loads the same weights: {stock_equal}")
    print("The losses are equal." if equal else "The losses differ.")
    return 0 if equal and stock_equal and checkpoint.format == "universal" else 1


if __name__ == "__main__":
    sys.exit(main())
