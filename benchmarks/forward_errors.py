"""Bounds of rounding errors (`Certificate.forward_error`) of ten models, beside the largest errors that a search finds.

README's classifier and the two GPTs of `benchmarks.settled` are trained, the others are as they start. An error is the
Euclidean norm of the difference to the result in float64, in the group of a result where it is largest. The search
executes the model on this machine: at random inputs of the domain, at inputs that climb the gradient of the size of the
result, and at random changes of the worst input; inputs of language models are tokens. A model without a bound has the
row where it ends.

    python -m benchmarks.forward_errors
"""

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.public_models import SIZES, LSTMClassifier
from benchmarks.settled import CALIBRATED, PROVED, executions, trained
from docs.run_examples import ROOT, run
from papers.certified_vision import built, cells
from papers.header import Stored
from papers.one_lipschitz import folded
from wellnormed.program.domain import default_axes

OUTPUT = Path("results/forward-errors.json")
SEED, BATCH, STEPS = 0, 16, 20
CHARACTERS = 65
"""Every vocabulary has so many tokens."""
Case = tuple[nn.Module, Tensor, dict[str, Any]]
"""A model from one tensor to one tensor, an example of its input, and the domain."""


class Selected(nn.Module):
    """A model of `transformers` as a function of one tensor."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.model(**{self.argument: x}).logits


def mlp() -> Case:
    """Three hidden layers."""
    hidden = [layer for width in (784, 256, 256) for layer in (nn.Linear(width, 256), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(256, 10)), torch.rand(1, 784), {"box": (0.0, 1.0)}


def cnn() -> Case:
    """Three convolutions."""
    layers = [nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, torch.rand(1, 3, 32, 32), {"box": (0.0, 1.0)}


def resnet() -> Case:
    """Three stages with batch norm, whose statistics are of 20 batches."""
    import transformers as tf

    config = tf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")
    model = Selected(tf.ResNetForImageClassification(config), "pixel_values").train()
    for _ in range(20):
        model(torch.rand(BATCH, 3, 64, 64))
    return model, torch.rand(1, 3, 64, 64), {"box": (0.0, 1.0)}


def vit() -> Case:
    """Four layers with LayerNorms."""
    import transformers as tf

    model = tf.ViTForImageClassification(tf.ViTConfig(**SIZES, image_size=64, patch_size=8))
    return Selected(model, "pixel_values"), torch.rand(1, 3, 64, 64), {"box": (0.0, 1.0)}


def llama() -> Case:
    """Four layers with RMSNorms."""
    import transformers as tf

    config = tf.LlamaConfig(**SIZES, vocab_size=1000, num_key_value_heads=4, use_cache=False)
    return Selected(tf.LlamaForCausalLM(config), "input_ids"), torch.randint(1000, (1, 16)), {}


def lstm() -> Case:
    """Two bidirectional layers."""
    return LSTMClassifier(), torch.randint(1000, (1, 16)), {}


def gpt(name: str) -> Case:
    """A model of `benchmarks.settled`, after its training."""
    task = trained(name)
    return task.model, task.validation_windows(1), {}


def cifar() -> Case:
    """The network of docs/certified-vision.md with the most steps."""
    cell = max((each for each in cells("cpu") if each.network == "wellnormed"), key=lambda each: each.steps)
    model, *_ = built(cell, (3, 32, 32), torch.device("cpu"))
    return folded(model), torch.rand(1, 3, 32, 32), {"box": (0.0, 1.0)}


def readme() -> Case:
    """The classifier of README.md, trained by its lines."""
    names: dict[str, Any] = {}
    for _ in run(ROOT / "README.md", names):
        pass
    return names["model"], names["images"][:1], {"box": (0.0, 1.0)}


CASES: dict[str, Callable[[], Case]] = {
    "README's classifier": readme,
    "MLP": mlp,
    "CNN": cnn,
    "ResNet with batch norm": resnet,
    "certified vision, CIFAR-10": cifar,
    "ViT": vit,
    "LSTM": lstm,
    "Llama-shaped": llama,
    "GPT at a proved 10": lambda: gpt(PROVED),
    "GPT-2, LayerNorms calibrated": lambda: gpt(CALIBRATED),
}


def errors(model: nn.Module, double: nn.Module, x: Tensor) -> Tensor:
    """The error of every sample of a batch, in its worst group."""
    true = double(x.double() if x.is_floating_point() else x)
    return (model(x).double() - true).norm(dim=default_axes(true.shape), keepdim=True).flatten(1).amax(1)


def starts(double: nn.Module, example: Tensor) -> Iterator[Tensor]:
    """Batches: tokens at random, or pixels, first at random and then on the way to larger results."""
    if not example.is_floating_point():
        yield from (torch.randint(CHARACTERS, (BATCH, *example.shape[1:])) for _ in range(STEPS))
        return
    x = torch.rand(BATCH, *example.shape[1:]).double()
    for step in range(STEPS):
        yield x.to(example.dtype)
        x.requires_grad_()
        (uphill,) = torch.autograd.grad(double(x).square().sum(), x)
        x = (x + 0.3 * (1 - step / STEPS) * uphill.sign()).clamp(0, 1).detach()


def largest_error(model: nn.Module, double: nn.Module, example: Tensor) -> float:
    """The largest error that a search finds."""
    worst, most = example, 0.0
    changes = (2.0 ** -(1 + step % 8) for step in range(2 * STEPS))
    for x in (*starts(double, example), *changes):
        if isinstance(x, float):  # a share of the entries of the worst input, which change
            moved = torch.rand(BATCH, *example.shape[1:]) < x
            x = torch.where(moved, next(starts(double, example)), worst)
        found = errors(model, double, x)
        if float(found.max()) > most:
            worst, most = x[found.argmax()], float(found.max())
    return most


def measure(make: Callable[[], Case]) -> dict[str, Any]:
    """Bounds and, but for float64, what was found, in all arithmetics."""
    torch.manual_seed(SEED)
    model, example, domain = make()
    model.eval().requires_grad_(False)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    row |= {"forward_error": {}, "found": {}, "no_bound_at": {}}
    start = time.process_time()
    for execution, executed, x, certificate in executions(model, example, **domain):
        row["forward_error"][execution] = certificate.forward_error
        row["no_bound_at"][execution] = certificate.unbounded_at
        row.setdefault("seconds", time.process_time() - start)  # of the first, in float32
        if execution in ("float32", "bfloat16"):
            row["found"][execution] = largest_error(executed, copy.deepcopy(executed).double(), x)
    return row


def main() -> None:
    """Measure what has no row yet."""
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.forward_errors")
    for name, make in CASES.items():
        if not stored.has(model=name):
            stored.add({"model": name, **measure(make)} | stored.commit)


if __name__ == "__main__":
    main()
