"""Write tests/data/pairings/torch_*: what torch saves of runs whose optimizers are built as real
scripts build them.

    python tests/write_pairing_cases.py        (needs torch; the tests do not)

Beside each file lie the live state by parameter (`truth.npz`), and the names that each group was
given (`case.json`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

DATA = Path(__file__).parent / "data" / "pairings"
Names = list[list[str]]


class Blocks(nn.Module):
    """Twelve equal layers, so that `layers.10` sorts before `layers.2`; norms; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Batch norms, with buffers of their weights' shapes; a frozen part, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.second, self.bn2 = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.unused = nn.Linear(5, 5)
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn2(self.second(torch.relu(self.bn1(self.first(x)))))


def by_decay_sorted(model: nn.Module) -> Names:
    """As minGPT's `configure_optimizers`: sets of names, sorted."""
    decay = {n for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n}
    return [sorted(decay), sorted({n for n, _ in model.named_parameters()} - decay)]


def reversed_order(model: nn.Module) -> Names:
    return [[name for name, _ in reversed(list(model.named_parameters()))]]


def by_module(model: nn.Module) -> Names:
    """A group for each module, the last first, as for learning rates that fall with the depth."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return [*reversed(groups.values())]


def in_order(model: nn.Module) -> Names:
    return [[name for name, _ in model.named_parameters()]]


def batches(kind: type[nn.Module]) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(0, 6, (3, 5)) if kind is Blocks else torch.randn(7, 5)


Optimizer = Callable[[Sequence[Mapping[str, object]]], torch.optim.Optimizer]


def trained(kind: type[nn.Module], grouping: Callable[[nn.Module], Names], make: Optimizer):
    """A model after three steps, its optimizer, and the names of its groups."""
    model = kind()
    names = grouping(model)
    params = dict(model.named_parameters())
    own = [[params[n] for n in group] for group in names]
    optimizer = make([{"params": some, "lr": 0.01 * (i + 1)} for i, some in enumerate(own)])
    for _, batch in zip(range(3), batches(kind), strict=False):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model, optimizer, names


def write(
    name: str,
    tree: Mapping[str, object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Names,
):
    folder = DATA / f"torch_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tree, folder / "ckpt.pt")
    truth = {f"param/{key}": value.numpy() for key, value in model.state_dict().items()}
    for key, param in model.named_parameters():
        for state, value in optimizer.state.get(param, {}).items():
            truth[f"{state}/{key}"] = value.numpy()
    np.savez_compressed(folder / "truth.npz", **truth)
    about = {"options": {"optimizer_groups": names}, "at": "ckpt.pt"}
    (folder / "case.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    torch.manual_seed(0)
    adam: Optimizer = torch.optim.AdamW
    for name, kind, grouping, make in (
        ("sorted", Blocks, by_decay_sorted, adam),
        ("reversed", Blocks, reversed_order, adam),
        ("by_module", Blocks, by_module, lambda groups: torch.optim.SGD(groups, momentum=0.9)),
        ("adafactor", Blocks, by_decay_sorted, torch.optim.Adafactor),
        ("plain", Blocks, in_order, adam),
        ("buffers", Convolutions, in_order, adam),
    ):
        model, optimizer, names = trained(kind, grouping, make)
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        write(name, tree, model, optimizer, names)
    model, first, names = trained(Blocks, in_order, adam)
    critic, second, _ = trained(Blocks, in_order, adam)
    tree = {"model": model.state_dict(), "critic": critic.state_dict()}
    tree |= {"optimizer": first.state_dict(), "critic_optimizer": second.state_dict()}
    write("two_models", tree, model, first, [[f"model.{n}" for n in names[0]], []])


if __name__ == "__main__":
    main()
