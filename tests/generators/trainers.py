"""Training checkpoints of transformers' Trainer, accelerate, peft and Lightning, with the truth.

    python tests/generators/trainers.py OUT [--only PART ...]

Run by a Python that has the writers. `OUT/<case>/ckpt` is what they saved, `truth.npz` has
`<state>/<parameter>` of the live process that trained, by the names that the writer gives what it
stores; `case.json` has the versions, and the options with which the checkpoint opens to that, or the
words by which it is refused.
"""

import copy
import inspect
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import writing
from tiny_models import COMMON, TINY

sys.path.remove(str(Path(__file__).parent))  # it has files called like packages
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from torch import nn

Truth = dict[str, Any]
Written = tuple[Truth, dict[str, Any]]  # the truth of a case, and what is said of it
CASES: dict[str, Callable[[Path], Written]] = {}
WRITERS = ("torch", "transformers", "accelerate", "peft", "lightning", "bitsandbytes")


def case(function: Callable[..., Written], name: str, *args: Any, **options: Any) -> None:
    CASES[name] = lambda out: function(out, *args, **options)


def hf_model(model_type: str, head: str = "CausalLM", seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = config_class(**COMMON | TINY[model_type] | changes)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).float()


class Data(torch.utils.data.Dataset):
    """Tokens, and labels of the head."""

    def __init__(self, head: str, n: int = 64):
        rows = np.random.default_rng(1).integers(3, 16, (n, 12))
        self.rows, self.head = torch.from_numpy(rows), head

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        labels = self.rows[i, 0] % 2 if self.head == "SequenceClassification" else self.rows[i]
        return {"input_ids": self.rows[i], "labels": labels}


def states_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The live states, by state and name; `names` by the parameter's id."""
    found: dict[str, Any] = {}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool):
                found[f"{key}/{names[id(param)]}"] = value
    return found


def truth_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Truth:
    names = {id(param): name for name, param in model.named_parameters()}
    truth: dict[str, Any] = {f"param/{name}": param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        truth |= states_of(optimizer, names)
    return truth


def stored_truth(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.Tensor]
) -> tuple[Truth, dict[int, str]]:
    """The truth of what `stored` has, and the names there of parameters by id."""
    first: dict[int, str] = {}
    for name, tensor in stored.items():
        first.setdefault(tensor.data_ptr(), name)  # tied weights have one, and its states
    params = dict(model.named_parameters())
    names = {id(param): first.get(param.data_ptr(), name) for name, param in params.items()}
    shapes = {names[id(param)]: param.shape for param in params.values()}
    numbers = {name: torch.full(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    order, numbered = list(shapes), as_stored(model, numbers).items()
    of = {name: order[number.view(-1)[0]] for name, number in numbered}
    truth: dict[str, Any] = {f"param/{k}": tensor for k, tensor in as_stored(model, stored).items()}
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for label, value in states_of(optimizer, names).items():
        state, _, name = label.partition("/")
        if getattr(value, "shape", ()) == shapes[name]:
            whole.setdefault(state, {})[name] = value
        else:
            truth |= {f"{state}/{key}": value for key in of if of[key] == name}
    for state, own in whole.items():
        truth |= {f"{state}/{name}": value for name, value in as_stored(model, own).items()}
    if len(of) == len(shapes):  # each is stored as one
        names_stored = {name: key for key, name in of.items()}
        names = {param: names_stored[name] for param, name in names.items()}
    return truth, names


def as_stored(model: nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors of the parameters of a model as `save_pretrained` of transformers 5 stores them, with
    names of its own, and experts, which it trains as one parameter, one by one.
    """
    convert = getattr(transformers.core_model_loading, "revert_weight_conversion", None)
    is_converted = convert and isinstance(model, transformers.PreTrainedModel)
    return convert(model, dict(tensors)) if is_converted else tensors


def trainer_case(
    out: Path,
    model_type: str,
    head: str = "CausalLM",
    options: Mapping[str, Any] = {"optimizer_groups": "hf-decay"},
    freeze: Callable[[str], bool] = lambda name: False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    adapter: Mapping[str, Any] | None = None,
    keep_root: bool = False,
    arguments: Mapping[str, Any] = {},
    shard: str = "",
    torch_files: bool = False,
    remove_config: bool = False,
    further: int = 0,
    refused: str = "",
    **changes: Any,
) -> Written:
    model = hf_model(model_type, head, **changes)
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and not freeze(name))
    if adapter is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**adapter))
    run = Path(tempfile.mkdtemp())
    said = dict(
        output_dir=str(run),
        max_steps=4,
        save_steps=2,
        save_strategy="steps",
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=100,
        seed=3,
    )
    known = inspect.signature(transformers.TrainingArguments.__init__).parameters
    if torch_files and "save_safetensors" in known:
        said["save_safetensors"] = False
    args = transformers.TrainingArguments(**said | arguments)
    optimizers = (optimizer(model), None) if optimizer else (None, None)

    class Trainer(transformers.Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            if shard:
                for file in Path(str(output_dir)).glob("model*.safetensors"):
                    file.unlink()
                self.model.save_pretrained(output_dir, max_shard_size=shard)

    trainer = Trainer(model=model, args=args, train_dataset=Data(head), optimizers=optimizers)
    trainer.train()
    inner = trainer.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    last = run / "checkpoint-4"
    if torch_files and not list(last.glob("*.bin"))[1:]:
        (last / "model.safetensors").unlink()
        torch.save(model.state_dict(), last / "pytorch_model.bin")
    if remove_config:
        (last / "config.json").unlink()
    if keep_root:
        shutil.copytree(run, out / "ckpt")
    else:
        shutil.copytree(last, out / "ckpt")
    stored = model.state_dict()
    if adapter is not None:
        stored = peft.get_peft_model_state_dict(model)
    elif not torch_files:  # safetensors have a tied weight once
        by_memory = {tensor.data_ptr(): name for name, tensor in reversed(stored.items())}
        stored = {name: stored[name] for name in by_memory.values()}
    truth, names = stored_truth(model, inner, stored)
    groups = [[names[id(p)] for p in g["params"]] for g in inner.param_groups]
    about: dict[str, Any] = {"options": dict(options), "groups": groups}
    about |= {"refused": refused} if refused else {}
    if about["options"].get("optimizer_groups") == "lists":
        about["options"]["optimizer_groups"] = groups
    if further:
        truth = copy.deepcopy(truth) | next_losses(model, inner, further)
    return truth, about


def next_losses(model: nn.Module, optimizer: torch.optim.Optimizer, n) -> dict[str, np.ndarray]:
    """The losses of further steps, at a constant rate."""
    tokens = torch.from_numpy(np.random.default_rng(7).integers(3, 16, (n, 4, 12)))
    losses: list[float] = []
    model.train()
    for batch in tokens:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"io/tokens": tokens.numpy(), "io/losses": np.array(losses)}


# transformers' Trainer.
for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi", "olmo2", "gpt2", "gpt_neox",
             "opt", "bloom", "gpt_oss"):  # fmt: skip
    case(trainer_case, f"trainer_{kind}", kind)
case(trainer_case, "trainer_mixtral", "mixtral")
for kind in ("bert", "roberta", "distilbert"):
    case(trainer_case, f"trainer_{kind}_mlm", kind, "MaskedLM")
    case(trainer_case, f"trainer_{kind}_cls", kind, "SequenceClassification")
for kind in ("t5", "bart"):
    case(trainer_case, f"trainer_{kind}", kind, "Seq2SeqLM")
case(trainer_case, "trainer_t5_gated", "t5", "Seq2SeqLM", feed_forward_proj="gated-gelu",
     tie_word_embeddings=False)  # fmt: skip
case(trainer_case, "trainer_llama_seed", "llama", seed=5, hidden_size=24, intermediate_size=40)
case(trainer_case, "trainer_llama_square", "llama", num_key_value_heads=4, intermediate_size=16)
case(trainer_case, "trainer_llama_12_layers", "llama", num_hidden_layers=12)
case(trainer_case, "trainer_llama_tied", "llama", tie_word_embeddings=True)
case(trainer_case, "trainer_llama_cls", "llama", "SequenceClassification")
case(trainer_case, "trainer_llama_no_config", "llama", remove_config=True)
case(trainer_case, "trainer_llama_no_config_typed", "llama", remove_config=True,
     options={"optimizer_groups": "hf-decay:llama"})  # fmt: skip
case(trainer_case, "trainer_gpt2_tied_cls", "gpt2", "SequenceClassification")
case(trainer_case, "trainer_root", "llama", keep_root=True)
case(trainer_case, "trainer_shards", "llama", shard="10KB")
case(trainer_case, "trainer_bin", "llama", torch_files=True)
case(trainer_case, "trainer_bin_tied", "gpt2", torch_files=True)
case(trainer_case, "trainer_bin_order", "llama", torch_files=True, remove_config=True,
     options={"optimizer_groups": "module-order"})  # fmt: skip
case(trainer_case, "trainer_frozen_embed", "llama", freeze=lambda name: "embed" in name)
case(trainer_case, "trainer_frozen_head_only", "bert", "SequenceClassification",
     freeze=lambda name: not name.startswith("classifier"),
     refused="in the order of the model they fit it in several ways")  # fmt: skip
case(trainer_case, "trainer_frozen_layer", "qwen3", freeze=lambda name: "layers.0." in name,
     options={"optimizer_groups": "lists"})  # fmt: skip
case(trainer_case, "trainer_optim_sgd", "llama", options={}, arguments={"optim": "sgd"})
for name in ("adafactor", "adamw_torch_fused", "adagrad", "rmsprop", "adamw_torch"):
    case(trainer_case, f"trainer_optim_{name}", "llama", arguments={"optim": name})
WIDE = dict(hidden_size=64, intermediate_size=96, vocab_size=128, num_key_value_heads=2)
for name in ("adamw_bnb_8bit", "lion_8bit", "ademamix", "ademamix_8bit"):
    case(trainer_case, f"trainer_optim_{name}", "llama", arguments={"optim": name}, **WIDE)
case(trainer_case, "trainer_sgd_momentum", "llama", arguments={"optim": "sgd",
     "optim_args": "momentum=0.9"})  # fmt: skip
case(trainer_case, "trainer_bf16", "llama", arguments={"bf16": True})
case(trainer_case, "trainer_gradient_accumulation", "qwen2",
     arguments={"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"})  # fmt: skip


def layerwise(model: nn.Module) -> torch.optim.Optimizer:
    """A learning rate for each layer, the last first."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        groups.setdefault(layer, []).append(param)
    return torch.optim.AdamW(
        [{"params": params, "lr": 1e-3 * (i + 1)} for i, params in
         enumerate(reversed(groups.values()))]
    )  # fmt: skip


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters()), lr=1e-3)


case(trainer_case, "trainer_layerwise", "llama", optimizer=layerwise,
     options={"optimizer_groups": "lists"})  # fmt: skip
case(trainer_case, "trainer_layerwise_order", "llama", optimizer=layerwise,
     options={"optimizer_groups": "module-order"},
     refused="in the order of the model they fit it in several ways")  # fmt: skip
case(trainer_case, "trainer_one_group", "gpt2", optimizer=one_group,
     options={"optimizer_groups": "module-order"})  # fmt: skip
case(trainer_case, "trainer_named", "llama", optimizer=named, options={})

# Small enough to be kept with the tests.
SMALL = dict(hidden_size=8, intermediate_size=12, vocab_size=16, num_hidden_layers=1)
case(trainer_case, "small_llama", "llama", further=3, **SMALL)
case(trainer_case, "small_gpt_neox", "gpt_neox", **SMALL | {"hidden_size": 16})
FEW = {"vocab_size": 16, "hidden_size": 8, "max_position_embeddings": 16}
# Transformers 5 trains the experts of a layer packed; those of two are in tests/data/packed_experts.
case(trainer_case, "packed_qwen3_moe", "qwen3_moe", **FEW)
case(trainer_case, "packed_mixtral", "mixtral", intermediate_size=8, **FEW)
case(trainer_case, "packed_adafactor", "qwen3_moe", arguments={"optim": "adafactor"},
     refused="only states of the parameter's shape", **FEW)  # fmt: skip
case(trainer_case, "small_adafactor", "llama", arguments={"optim": "adafactor"}, **SMALL)
case(trainer_case, "small_gpt2_bin", "gpt2", torch_files=True, n_embd=8, n_layer=1, vocab_size=16,
     n_positions=16)  # fmt: skip
case(trainer_case, "small_peft", "llama", adapter={"r": 2, "target_modules": ["q_proj", "v_proj"]},
     **SMALL)  # fmt: skip

# peft.
LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
case(trainer_case, "peft_llama", "llama", adapter=LORA)
case(trainer_case, "peft_llama_task", "llama", adapter=LORA | {"task_type": "CAUSAL_LM"})
case(trainer_case, "peft_llama_all", "llama", adapter=LORA | {"target_modules": "all-linear"})
case(trainer_case, "peft_llama_square", "llama", num_key_value_heads=4, adapter=LORA)
case(trainer_case, "peft_llama_task_square", "llama", num_key_value_heads=4,
     adapter=LORA | {"task_type": "CAUSAL_LM"},
     options={"optimizer_groups": "hf-decay:llama"})  # fmt: skip
case(trainer_case, "peft_dora", "qwen2", adapter=LORA | {"use_dora": True})
case(trainer_case, "peft_modules_to_save", "llama",
     adapter=LORA | {"modules_to_save": ["lm_head", "embed_tokens"]})  # fmt: skip
case(trainer_case, "peft_embeddings", "llama",
     adapter=LORA | {"target_modules": ["embed_tokens", "o_proj"]})  # fmt: skip
case(trainer_case, "peft_bias", "qwen2", adapter=LORA | {"bias": "lora_only"})
case(trainer_case, "peft_gpt2", "gpt2", adapter={"r": 2, "target_modules": ["c_attn", "c_proj"]})
case(trainer_case, "peft_bert", "bert", "SequenceClassification",
     adapter={"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"})  # fmt: skip


# accelerate.
class Net(nn.Module):
    """Every shape once, so that shapes prove whose states are; or not."""

    def __init__(self, sizes: Iterable[int]):
        super().__init__()
        sizes = list(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def steps(model: nn.Module, optimizer: Any, width: int, n: int = 3, step: Any = None) -> None:
    for i in range(n):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(i))
        loss = model(x).square().mean()
        step.backward(loss) if step else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate_case(
    out: Path,
    sizes: list[list[int]],
    options: Mapping[str, Any],
    which: int = 0,
    safe: bool = True,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Written:
    from accelerate import Accelerator

    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True)
    models = [Net(size) for size in sizes]
    optimizers = [kind(model.parameters(), lr=1e-2) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers)
    for i, size in enumerate(sizes):
        steps(prepared[i], prepared[len(sizes) + i], size[0], step=accelerator)
    accelerator.save_state(str(out / "ckpt"), safe_serialization=safe)
    accelerator.free_memory()
    said = dict(options)
    if said.get("optimizer_groups") == "lists":
        said["optimizer_groups"] = [[n for n, _ in models[which].named_parameters()]]
    return truth_of(models[which], optimizers[which]), {"options": said}


case(accelerate_case, "accelerate_proof", [[3, 4, 5]], {})
case(accelerate_case, "accelerate_lists", [[4, 4, 4]], {"optimizer_groups": "lists"})
case(accelerate_case, "accelerate_bin", [[4, 4, 4]], {"optimizer_groups": "module-order"},
     safe=False)  # fmt: skip
case(accelerate_case, "accelerate_two_proof", [[3, 4], [5, 6]], {"model": "model_1"}, 1)
case(accelerate_case, "accelerate_two_first", [[3, 4], [5, 6]], {}, 0)
case(accelerate_case, "accelerate_sgd", [[3, 4, 5]], {}, kind=lambda p, lr: torch.optim.SGD(
     p, lr, momentum=0.9))  # fmt: skip


# Lightning, and files of torch.save.
def lightning_case(out: Path, kind: str, options: Mapping[str, Any]) -> Written:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 4):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(4)
            if kind == "gan":
                self.automatic_optimization = False
                self.generator, self.discriminator = Net([3, 4, 3]), Net([3, 5, 1])
            else:
                self.net = Net([3, 4, 3] if kind == "proof" else [4, 4, 4])

        def training_step(self, batch: Any, i: int) -> torch.Tensor | None:
            (x,) = batch
            if kind != "gan":
                return self.net(x).square().mean()
            nets = self.generator, self.discriminator
            for net, optimizer in zip(nets, self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(net(x).square().mean())
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            nets = [self.generator, self.discriminator] if kind == "gan" else [self.net]
            self.made = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
            if kind == "gan":
                return self.made
            return self.made, [torch.optim.lr_scheduler.StepLR(self.made[0], 2)]

    width = 3 if kind != "order" else 4
    data = torch.utils.data.TensorDataset(torch.randn(16, width))
    module = Module()
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(out / "ckpt")
    trained = module.generator if kind == "gan" else module
    return truth_of(trained, module.made[0]), {"options": dict(options)}


case(lightning_case, "lightning_proof", "proof", {})
case(lightning_case, "lightning_order", "order", {"optimizer_groups": "module-order"})
case(lightning_case, "lightning_gan", "gan", {"model": "generator"})


def student_case(out: Path, options: Mapping[str, Any], numbered: bool) -> Written:
    torch.manual_seed(6)
    teacher, student = Net([4, 4, 4]), Net([4, 4, 4])
    params = student.parameters() if numbered else list(student.named_parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    steps(student, optimizer, 4)
    saved = {"model": teacher.state_dict(), "student": student.state_dict()}
    torch.save(saved | {"optimizer": optimizer.state_dict()}, out / "ckpt")
    said = dict(options)
    if said.get("optimizer_groups") == "lists":
        said["optimizer_groups"] = [[n for n, _ in student.named_parameters()]]
    return truth_of(student, optimizer), {"options": said}


for numbered in (False, True):
    about = "numbered" if numbered else "named"
    case(student_case, f"student_{about}_order",
         {"model": "student", "optimizer_groups": "module-order"}, numbered)  # fmt: skip
    case(student_case, f"student_{about}_lists",
         {"model": "student", "optimizer_groups": "lists"}, numbered)  # fmt: skip


def main() -> None:
    given = writing.arguments(__doc__).parse_args()

    def write(name: str, folder: Path) -> None:
        random.seed(0)
        about = {"about": name.replace("_", " "), "writer": writing.versions(*WRITERS)}
        truth, more = CASES[name](folder)
        writing.write_case(folder, truth, about | more)

    writing.write_each(writing.chosen(CASES, given.only), given.out, write)


if __name__ == "__main__":
    main()
