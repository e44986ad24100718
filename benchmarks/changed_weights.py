"""How far changed weights move the results of five small models: certified beside found.

Four models classify MNIST's digits at half the resolution; one is a GPT of one block at a proved constant of 10, on 16
characters of Tiny Shakespeare. Weights are rounded to int8 or E4M3 with a scale for each row, or to bfloat16; a tenth
is pruned; they are averaged over checkpoints; or tuned at a twentieth of the rate on other data. The search follows
gradients from test images and from noise, within the domain; of the GPT it takes 6,971 pieces of the text, and changes
tokens of the worst of them.

    python -m benchmarks.changed_weights          # the rows that are missing
"""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from papers.header import Stored
from papers.mnist import load_mnist
from wellnormed.data import load_shakespeare
from wellnormed.models import GPT, GPTConfig

OUTPUT = Path("results/changed-weights.json")
BATCH, STEPS, LAST, TUNED = 128, 600, 100, 60
STARTS, ASCENT, TOKENS = 32, 300, 65
RADIUS = 0.6
"""The largest RMS of an image in the domain; of all that are used here it is less."""


@cache
def images(split: Any) -> tuple[Tensor, Tensor]:
    """Images of 14 x 14 pixels from 0 to 1, and their classes."""
    data = load_mnist(split)
    return F.avg_pool2d(data.pixels[:20000].float() / 255, 2), data.labels[:20000]


@cache
def text(split: str) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the next characters."""
    characters = getattr(load_shakespeare("tiny-shakespeare"), split)
    count = min(20000, (len(characters) - 1) // 16)
    return characters[: 16 * count].view(-1, 16), characters[1 : 16 * count + 1].view(-1, 16)


class Kind(NamedTuple):
    """A model, and how it is trained."""

    make: Callable[[], nn.Module]
    rate: float
    cap: float = 0.0
    """The largest norm of a weight; 0 for none, and AdamW in the place of Scion."""
    data: Callable[[Any], tuple[Tensor, Tensor]] = images
    within: float | None = RADIUS
    """The largest RMS of the inputs; None for tokens, whose domain is the table's."""


def mlp() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(196, 64), wn.nn.MaxMin(), nn.Linear(64, 64), wn.nn.MaxMin(), nn.Linear(64, 10)
    )


def convolutions(*norms: nn.Module) -> nn.Module:
    """Two convolutions, with MaxMin, or with normalizations and ReLU."""
    after = [[each, nn.ReLU()] for each in norms] or [[wn.nn.MaxMin(dim=1)]] * 2
    first, second = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    return nn.Sequential(first, *after[0], second, *after[1], nn.Flatten(), nn.Linear(512, 10))


def gpt() -> nn.Module:
    """One block."""
    return GPT(GPTConfig(length=16, width=64, blocks=1))


KINDS = {
    "capped MLP": Kind(mlp, 0.05, cap=1.0), "MLP": Kind(mlp, 2e-3), "capped CNN": Kind(convolutions, 0.03, cap=2.0),
    "CNN with batch norm": Kind(lambda: convolutions(nn.BatchNorm2d(16), nn.BatchNorm2d(32)), 2e-3),
    "GPT": Kind(gpt, 0.05, cap=10.0, data=text, within=None),
}  # fmt: skip


def training(model: nn.Module, kind: Kind) -> Callable[[int, float, slice], list[dict[str, Tensor]]]:
    """A function that trains for some steps at a rate on a part of the data, and returns weights of four of them."""
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=kind.rate)
    if kind.cap:
        optimizer = wn.Scion(model, lr=kind.rate)
        if kind.within is None:
            wn.constrain(optimizer, lipschitz=kind.cap, example_input=kind.data("train")[0][:1])
        else:
            wn.constrain(optimizer, {"*": wn.HardCap(kind.cap), "*bias": wn.ColumnCap(kind.cap)})

    def train(count: int, rate: float, part: slice) -> list[dict[str, Tensor]]:
        x, classes = (each[part] for each in kind.data("train"))
        checkpoints = []
        for group in optimizer.param_groups:
            group["lr"] = rate
        for step in range(count):
            chosen = torch.randint(len(x), (BATCH,))
            scale = 8 if kind.cap and kind.within else 1
            loss = F.cross_entropy(model(x[chosen]).flatten(0, -2) * scale, classes[chosen].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % (count // 4) == 0:
                checkpoints.append(copy.deepcopy(model.state_dict()))
        return checkpoints

    return train


def by_row(round_to: Callable[[Tensor], Tensor], largest: float) -> Callable[[Tensor], Tensor]:
    """Round a matrix or kernel with a scale for each row; vectors stay."""

    def change(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return weight
        scale = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.ndim - 1)) / largest
        return round_to(weight / scale) * scale

    return change


def pruned(weight: Tensor) -> Tensor:
    """A tenth of the entries is 0, the smallest ones."""
    return weight if weight.ndim < 2 else weight * (weight.abs() >= weight.abs().quantile(0.1))


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": by_row(torch.round, 127.0), "E4M3": by_row(lambda t: t.to(torch.float8_e4m3fn).float(), 448.0),
    "bfloat16": lambda t: t.bfloat16().float(), "pruned": pruned,
}  # fmt: skip


def searched(changed: nn.Module, original: nn.Module) -> float:
    """The largest difference that gradients find in the domain, from test images and from fine and coarse noise."""
    noise = [F.interpolate(torch.randn(2 * STARTS, 1, size, size), size=14, mode="bilinear") for size in (14, 7, 4)]
    x, best, step = 9 * torch.cat([images("test")[0][:STARTS], *noise]), 0.0, torch.zeros(())
    for number in range(ASCENT):
        x = (x * (RADIUS * 14 / x.flatten(1).norm(dim=1)).clamp(max=1 - 1e-6).view(-1, 1, 1, 1)).requires_grad_()
        apart = (changed(x) - original(x)).norm(dim=1)
        best = max(best, float(apart.detach().max()))
        (gradient,) = torch.autograd.grad(apart.sum(), x)
        step = 0.9 * step + F.normalize(gradient.flatten(1))
        x = x.detach() + 4 * (1 - number / ASCENT) * F.normalize(step).view_as(x)
    return best


@torch.no_grad()
def of_tokens(changed: nn.Module, original: nn.Module, x: Tensor) -> float:
    """The largest difference for any token of some pieces of text, of which the worst change token by token."""
    apart = torch.cat([(changed(some) - original(some)).norm(dim=-1).amax(1) for some in x.split(500)])
    worst, best = x[apart.topk(8).indices], apart.max()
    for place in torch.cat([torch.randperm(x.shape[1]) for _ in range(3)]):
        tried = worst[:, None].repeat(1, TOKENS, 1)
        tried[..., place] = torch.arange(TOKENS)
        apart = (changed(tried.flatten(0, 1)) - original(tried.flatten(0, 1))).norm(dim=-1).amax(1).view(-1, TOKENS)
        worst, best = tried[torch.arange(len(tried)), apart.argmax(1)], torch.maximum(best, apart.max())
    return float(best)


def measure(kind: Kind, changed: nn.Module, original: nn.Module) -> dict[str, float]:
    """The change as certified and as found, and shares of predictions that are proved and found unchanged."""
    x, classes = (each[:10000] for each in kind.data("test" if kind.within else "validation"))
    domain: dict[str, Any] = {"margins": True} | ({"radius": kind.within} if kind.within else {})
    certificate = wn.certify(changed, x[:1], original=original, **domain)
    real = wn.certify(changed, x[:1], original=original, arithmetic="real", **domain)
    logits, others = (torch.cat([each(some).detach() for some in x.split(500)]) for each in (changed, original))
    found = searched(changed, original) if kind.within else of_tokens(changed, original, x)
    return {
        "certified": float(certificate.change), "without_rounding": float(real.change), "found": found,
        "ratio": float(certificate.change) / found, "unchanged": float(certificate.unchanged(logits).float().mean()),
        "same": float((logits.argmax(-1) == others.argmax(-1)).float().mean()),
        "accuracy": float((others.argmax(-1) == classes).float().mean()), "lipschitz": float(certificate.lipschitz),
    }  # fmt: skip


def changes(kind: Kind) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Name -> changed model and original."""
    torch.manual_seed(0)
    model = kind.make()
    train = training(model, kind)
    train(STEPS, kind.rate, slice(0, 16000))
    checkpoints = train(LAST, kind.rate / 4, slice(0, 16000))
    original = copy.deepcopy(model).eval()
    train(TUNED, kind.rate / 20, slice(16000, None))
    pairs = {}
    for name, change in ROUNDED.items():
        changed = copy.deepcopy(original)
        with torch.no_grad():
            for each in changed.parameters():
                each.copy_(change(each))
        pairs[name] = changed, original
    averaged = copy.deepcopy(original)
    averaged.load_state_dict(
        {name: torch.stack([x[name].double() for x in checkpoints]).mean(0) for name in checkpoints[0]}
    )
    return {**pairs, "averaged": (averaged, original), "tuned": (model.eval(), original)}


def main() -> None:
    """Measure the models whose rows are missing."""
    stored = Stored(OUTPUT, "python -m benchmarks.changed_weights", runs=1)
    for name, kind in KINDS.items():
        if not stored.has(model=name):
            pairs = changes(kind)
            stored.add(*({"model": name, "change": each, **measure(kind, *pair)} for each, pair in pairs.items()))


if __name__ == "__main__":
    main()
