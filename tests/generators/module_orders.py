"""Write jax_ucp/formats/huggingface/module_orders.json: in which order the classes of transformers
have their modules.

    python tests/generators/module_orders.py names OUT.json     (needs torch and transformers)
    python tests/generators/module_orders.py merge OUT.json ... (needs neither)

The first is run with each release of transformers that is to be known; it makes each model without
data and writes the names of `named_parameters`, and those of buffers. The second makes the table of
all of them: for a model type the orders of modules that lie side by side, those that all major
releases have and those of one alone. Where two minor releases differ, both orders are in the table,
and the reader takes neither.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TABLE = Path(__file__).parents[2] / "jax_ucp/formats/huggingface/module_orders.json"
# fmt: off
TYPES = """
    albert bart beit bert big_bird biogpt blenderbot blip blip-2 bloom camembert clip
    clip_text_model clip_vision_model codegen cohere cohere2 convnext deberta deberta-v2 deepseek_v2
    deepseek_v3 deit dinov2 distilbert electra ernie ernie4_5 exaone4 falcon gemma gemma2 gemma3
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe
    helium hubert idefics3 led llama llava longformer longt5 m2m_100 marian mbart mistral mixtral
    modernbert mpnet mpt mt5 olmo olmo2 olmo3 olmoe opt paligemma pegasus persimmon phi phi3
    prophetnet qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe resnet roberta rwkv segformer
    siglip smollm3 smolvlm stablelm starcoder2 swin swinv2 t5 umt5 vit wav2vec2 wavlm whisper xglm
    xlm xlm-roberta
""".split()  # noqa: SIM905
HEADS = """
    MODEL_MAPPING MODEL_FOR_CAUSAL_LM_MAPPING MODEL_FOR_MASKED_LM_MAPPING
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING MODEL_FOR_QUESTION_ANSWERING_MAPPING
    MODEL_FOR_PRETRAINING_MAPPING MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING MODEL_FOR_CTC_MAPPING MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING
""".split()  # noqa: SIM905
# fmt: on
VARIANTS = (
    {},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": True},
    {"feed_forward_proj": "gated-gelu"},
)
LAYERS = (
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers",
)  # fmt: skip


def names_of_classes(out: Path) -> None:
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    names: dict[str, list[list[str]]] = {}
    buffers: dict[str, list[str]] = {}
    for model_type in TYPES:
        known = model_type in transformers.CONFIG_MAPPING
        config_class = transformers.CONFIG_MAPPING[model_type] if known else None
        for mapping in filter(None, (getattr(modeling_auto, head, None) for head in HEADS)):
            if config_class is None or config_class not in mapping:
                continue
            made = mapping[config_class]
            classes = made if isinstance(made, tuple | list) else [made]
            for model_class, options in itertools.product(classes, VARIANTS):
                with contextlib.suppress(Exception), torch.device("meta"):
                    model = model_class(few_layers(config_class(**options)))
                    found = [name for name, _ in model.named_parameters()]
                    stored = {name for name in model.state_dict()} - {
                        name for name, _ in model.named_parameters(remove_duplicate=False)
                    }
                    of_type = {*buffers.get(model_type, ()), *map(last, stored)}
                    buffers[model_type] = sorted(of_type)
                    known_names = names.setdefault(model_type, [])
                    for own in (found, as_stored(model)):
                        if own not in known_names:
                            known_names.append(own)
    found = {"transformers": transformers.__version__, "names": names, "buffers": buffers}
    out.write_text(json.dumps(found))
    print(f"{len(names)} of {len(TYPES)} model types")


def as_stored(model) -> list[str]:
    """The names of parameters in files of `save_pretrained`: transformers 5 may give them others."""
    names = []
    for name, param in model.named_parameters():
        renamed = [name]
        with contextlib.suppress(Exception):
            from transformers.core_model_loading import revert_weight_conversion

            renamed = list(revert_weight_conversion(model, {name: param}))
        names.append(renamed[0] if len(renamed) == 1 else name)  # experts are stored one by one
    return names


def last(name: str) -> str:
    return name.rpartition(".")[2]


def few_layers(config):
    for key in LAYERS:
        if isinstance(getattr(config, key, None), int):
            with contextlib.suppress(Exception):
                setattr(config, key, 2)
    if getattr(config, "layer_types", None):
        with contextlib.suppress(Exception):
            config.layer_types = config.layer_types[:2]
    return config


def sibling_orders(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Of every dict of names the order of what lies in it; a number is `*`."""
    children: dict[tuple[str, ...], dict[str, None]] = {}
    for name in names:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            child = "*" if part.isdigit() else part
            children.setdefault(tuple(parts[:depth]), {})[child] = None
    return (tuple(order) for order in children.values() if len(order) > 1)


def merge(files: list[Path]) -> None:
    read = [json.loads(file.read_text()) for file in files]
    lines = [f'"transformers": {json.dumps(sorted(one["transformers"] for one in read))}']
    for model_type in TYPES:
        if about := about_type(model_type, read):
            lines.append(f"{json.dumps(model_type)}: {json.dumps(about)}")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{TABLE}: {len(lines) - 1} model types, {TABLE.stat().st_size} bytes")


def about_type(model_type: str, read: list[dict]) -> dict[str, list[str]]:
    """The orders of a type in all major releases, under `all`, and of each that differs."""
    by_major: dict[str, set[tuple[str, ...]]] = {}
    buffers: set[str] = set()
    for one in filter(lambda one: model_type in one["names"], read):
        orders = by_major.setdefault(one["transformers"].partition(".")[0], set())
        for names in one["names"][model_type]:
            orders |= set(sibling_orders(names))
        buffers |= {*one["buffers"].get(model_type, ())}
    kept = {major: longest(orders) for major, orders in by_major.items()}
    common = set.intersection(*kept.values()) if kept else set()
    about = {"all": common} | {major: orders - common for major, orders in kept.items()}
    found = {key: sorted(map(" ".join, orders)) for key, orders in about.items() if orders}
    return found | ({"buffers": sorted(buffers)} if buffers and found else {})


def longest(orders: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {order for order in orders if not any(within(order, other) for other in orders)}


def within(order: tuple[str, ...], other: tuple[str, ...]) -> bool:
    rest = iter(other)
    return order != other and all(part in rest for part in order)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if command == "names":
        names_of_classes(Path(paths[0]))
    else:
        merge([Path(path) for path in paths])
