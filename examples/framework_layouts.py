"""There and back with the frameworks' own code: a Hugging Face model into the layouts that tunix
and MaxText load, and what tunix saved out again into transformers.

    python examples/framework_layouts.py DIRECTORY

needs what `maxtext_logits.py` and `equal_logits.py` need, in one environment, and torch. Each step
is a command of jax-ucp, and then the framework's own loader on what it wrote.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import equal_logits
import maxtext_logits

DATA = Path(__file__).parent.parent / "tests" / "data"
TOLERANCE = 1e-5


def main(folder: Path) -> int:
    jax.config.update("jax_platforms", "cpu")
    folder.mkdir(parents=True)
    errors = {"tunix's manager": into_tunix(folder / "tunix", "convert")}
    errors["tunix's manager, from a link"] = into_tunix(folder / "tunix_link", "link")
    errors["tunix' save, in transformers"] = out_of_tunix(folder, folder / "tunix_link")
    errors["MaxText's load_params_from_path"] = into_maxtext(folder / "maxtext", "convert")
    errors["MaxText's, from a link"] = into_maxtext(folder / "maxtext_link", "link")
    for name, error in errors.items():
        print(f"{name}: logits differ by {error:.1e} of their scale")
    return int(max(errors.values()) > TOLERANCE)


def command(*arguments: object) -> None:
    words = ["jax-ucp", *map(str, arguments)]
    print("$", " ".join(word or '""' for word in words), flush=True)
    subprocess.run([sys.executable, "-m", "jax_ucp", *words[1:]], check=True)


def off(got: Any, want: np.ndarray) -> float:
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


def into_tunix(run: Path, verb: str) -> float:
    """A step that tunix's own manager restores."""
    case = DATA / "torch" / "hf_qwen2"
    layout = ("--root", "", "--variables", "--to-step", 0, "--item", "model_params")
    command(verb, case / "ckpt", run, "--mapping", "hf-qwen2-to-tunix", *layout)
    model, logits = tunix_qwen2(case)
    step, _ = manager(run).maybe_restore(model)
    assert step == 0, step
    (tokens,), want = equal_logits.truth(case)
    return off(logits(model, tokens), want)


def out_of_tunix(folder: Path, run: Path) -> float:
    """What tunix's manager saved, as a folder that transformers loads."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    case = DATA / "torch" / "hf_qwen2"
    model, logits = tunix_qwen2(case)
    manager(run).maybe_restore(model)
    trained = jax.tree.map(lambda value: value * 1.01, nnx.state(model))
    nnx.update(model, trained)
    saver = manager(folder / "tuned")
    saver.save(7, model, force=True)
    saver.close()
    exported = folder / "published"
    words = ("--params", "model_params", "--mapping", "hf-qwen2-to-tunix", "--inverse")
    command("export", folder / "tuned" / "7", exported, *words, "--config", case / "ckpt")
    (tokens,), _ = equal_logits.truth(case)
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        got = loaded(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    return off(got, np.asarray(logits(model, tokens)))


def manager(run: Path) -> Any:
    from tunix.sft import checkpoint_manager  # pyright: ignore[reportMissingImports]

    return checkpoint_manager.CheckpointManager(str(run.resolve()))


def tunix_qwen2(case: Path) -> tuple[Any, Any]:
    config = json.loads((case / "ckpt" / "config.json").read_text())
    module = equal_logits.tunix_module("qwen2", config, [])
    model = module.Qwen2(equal_logits.model_config(module, config), rngs=nnx.Rngs(0))

    def logits(model: Any, tokens: np.ndarray) -> Any:
        batch, length = tokens.shape
        causal = np.broadcast_to(np.tril(np.ones((length, length), bool)), (batch, length, length))
        found, _ = model(tokens, equal_logits.positions(tokens), None, causal)
        return found

    return model, logits


def into_maxtext(run: Path, verb: str) -> float:
    """Steps that MaxText's `load_parameters_path` names, of layers that are scanned, and not."""
    from maxtext.utils.model_creation_utils import (  # pyright: ignore[reportMissingImports]
        verify_and_sync_scan_layers,
    )

    case = DATA / "maxtext" / "gemma3"
    config = json.loads((case / "ckpt" / "config.json").read_text())
    (tokens,), want = equal_logits.truth(case)
    said = maxtext_logits.settings(config)
    errors: list[float] = []
    for step, variant in enumerate(("", ":unscanned")):
        words = ("--root", "params", "--to-step", step, "--item", "items", "--custom-metadata")
        scan = json.dumps({"scan_layers": not variant})
        mapping = f"hf-gemma3-to-maxtext{variant}"
        command(verb, case / "ckpt", run, "--mapping", mapping, *words, scan)
        path = str(run / str(step) / "items")
        settings = {**said, "load_parameters_path": path}
        config_of_run = maxtext_logits.configured(settings, tokens.shape, None)
        scanned = verify_and_sync_scan_layers(config_of_run).scan_layers
        assert scanned is not bool(variant), (variant, scanned)
        errors.append(off(maxtext_logits.maxtext_logits(said, path, tokens, scanned), want))
    return max(errors)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
