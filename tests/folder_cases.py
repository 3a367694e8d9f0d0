"""The folders of data/folders, and what is right of each: its truth, or a refusal that names the
cause.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CASES = Path(__file__).parent / "data" / "folders"
INDEX = "model.safetensors.index.json"
_OTHER_TOTAL = r".*\.index\.json says that the tensors have 1 bytes, and they have 320"


@dataclass(frozen=True)
class Opens:
    """The folder holds the truth; each of its notes matches one of these, in order. `at` is
    below the case.
    """

    notes: tuple[str, ...] = ()
    at: str = "ckpt"


@dataclass(frozen=True)
class Refused:
    """The folder is refused with this cause; of what the message says to open, `remedy` holds
    the truth.
    """

    cause: str
    remedy: str = ""
    at: str = "ckpt"


# Every folder, and what is right of it.
RIGHT: dict[str, Opens | Refused] = {
    # accelerate saved two models: the first is the one that a folder is asked for, the other is
    # named.
    "accel_two_models": Opens(("not read: model_1.safetensors: another model of the same save",)),
    "accel_two_models_disjoint": Opens(
        ("not read: model_1.safetensors: another model of the same save",)
    ),
    "adapter_beside": Opens(("not read: adapter_model.safetensors: an adapter.*is not applied",)),
    "diffusers_idx": Opens((_OTHER_TOTAL,)),
    "diffusers_variants": Opens(
        (r"not read: diffusion_pytorch_model\.fp16\.safetensors: the variant fp16",)
    ),
    "hf_bin_and_st": Opens(
        (_OTHER_TOTAL, r"not read: pytorch_model\.bin: model\.safetensors\.index\.json is read")
    ),
    "hf_bin_noindex": Opens(),
    "hf_cache": Refused(
        "holds abc123: open one, .*/snapshots/abc123", "snapshots/abc123", "models--org--name"
    ),
    "hf_lfs": Refused(
        r"model-00002-of-00002\.safetensors: it is a git-lfs pointer .*: run `git lfs pull`"
    ),
    "hf_lfs_bin": Refused(r"pytorch_model\.bin: it is a git-lfs pointer .*: run `git lfs pull`"),
    "hf_macos": Opens((_OTHER_TOTAL,)),
    "hf_macos_noindex": Opens(),
    # Mistral's own file beside transformers' parts.
    "hf_noindex_dup": Opens((r"not read: consolidated\.safetensors: weights under another name",)),
    "hf_noindex_dup_differs": Refused(
        r"two saves of one model, model\.safetensors and model-00001.*they differ"
    ),
    "hf_noindex_missing2": Refused(
        r"of 2 files, of which 1 are not beside it: 'model-00002-of-00002\.safetensors'"
    ),
    # transformers loads the whole file, and leaves it there when it saves parts: nothing says which
    # is the newer.
    "hf_stale_index": Refused(
        rf"two saves of one model, model\.safetensors and {INDEX}, and they differ", INDEX
    ),
    "hf_two_families": Opens(
        (r"not read: model-00001-of-00003\.safetensors: belongs to a save of which 2 files",)
    ),
    "llama_consolidated": Refused(
        r"consolidated\.00\.pth is named after a rank, and there are others: consolidated\.01"
    ),
    "pth_folder": Refused(
        r"is not a checkpoint itself, but holds model\.pth: open one, .*/model\.pth", "model.pth"
    ),
    "quant_fp4": Refused(r"1 weights are quantised: param/w \(F4, several to a byte"),
    "quant_fp8block": Refused(
        r"3 weights are quantised: param/w\.weight .*param/g\.weight .*param/e "
    ),
    # An index whose parts are gone, beside the file that replaced them; and two saves that are
    # equal.
    "hf_resave": Opens((rf"not read: {INDEX}: belongs to a save of which 6 files are missing",)),
    "hf_resave2": Opens((rf"{INDEX} holds the same weights as model\.safetensors, which is read",)),
    "accf_full": Opens((r"a training checkpoint of accelerate",)),
    "acc_fsdp2sharded": Opens(
        (
            r"a training checkpoint of accelerate",
            r"18 optimizer states in optimizer are kept under `other`: they go by numbers",
            r"to map them, say which parameters the optimizer was given",
        )
    ),
}


def truth(case: str) -> dict[str, np.ndarray]:
    """The weights as bits, by our labels."""
    with np.load(CASES / case / "truth.npz") as arrays:
        return {key.replace("::", "/"): arrays[key] for key in arrays if key.startswith("param::")}
