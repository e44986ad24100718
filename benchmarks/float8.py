"""Training with products in emulated 8-bit floats without scales, against float32: loss, and what becomes zero.

The preset `caps` at half its width and length, with rotary positions and no normalisation or projection of activations
(LT section 4.4). The linear layers of attention and feed-forward layers are converted before the first step, by the
ranges that a certificate of the initial weights proves. Runs of one seed share initial weights and batches.

After training: the shares of the entries, none zero before, that rounding makes zero, over all converted layers and one
batch; and the largest entry of an input to them, proved and observed.

    python -m benchmarks.float8
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import wellnormed as wn
from papers._tokens import token_task
from papers.float8_layers import BACKWARD, FORWARD, Float8Linear, to_float8_
from papers.header import header, write_result
from wellnormed.certificates import largest_entries, number_formats
from wellnormed.data import Corpus, load_corpus
from wellnormed.models.config import GPTConfig
from wellnormed.train import PRESETS, TrainConfig
from wellnormed.train.config import CHARACTERS
from wellnormed.train.language import LanguageTask
from wellnormed.train.task import fit

SEEDS = (0, 1, 2)
OUTPUT = Path(__file__).parents[1] / "results" / "float8.json"


def settings(steps: int, corpus: Corpus) -> TrainConfig:
    """A transformer without anything that normalises activations."""
    preset = PRESETS["caps"]
    assert isinstance(preset.model, GPTConfig)
    shape = {"width": 64, "length": 32, "expansion": 4, "vocabulary_size": corpus.vocabulary}
    model = replace(preset.model, rotary=True, stream_radius=None, relative_bias=False, **shape)
    return replace(preset, model=model, steps=steps, device="cpu")


def vanished(task: LanguageTask, layers: Sequence[str], gradient_scale: float) -> dict[str, float]:
    """Shares of inputs, weights and gradients that become zero, on one batch."""
    zeroed: Counter[str] = Counter()
    present: Counter[str] = Counter()

    def count(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entries = tensor.detach()[tensor.detach() != 0]
        zeroed[what] += int((entries.to(dtype).float() == 0).sum())
        present[what] += entries.numel()

    def forward(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        count("inputs", given[0], FORWARD)
        count("weights", module.get_parameter("weight"), FORWARD)
        result.register_hook(lambda gradient: count("gradients", gradient * gradient_scale, BACKWARD))

    handles = [task.model.get_submodule(name).register_forward_hook(forward) for name in layers]
    task.batch_loss().backward()
    task.optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return {f"{what} that become 0": zeroed[what] / present[what] for what in present}


def run(config: TrainConfig, gradient_scale: float | None, corpus: Corpus) -> dict:
    """Train in float32 if the scale is None, and measure."""
    task = token_task(config, corpus, torch.device("cpu"))
    inputs = number_formats(wn.certify(task.model)).inputs
    names = [name for name in inputs if name.startswith("layers")]
    if gradient_scale is not None:
        names = to_float8_(task.model, inputs, ["layers"], gradient_scale=gradient_scale)
    losses: list[float] = []
    fit(task, lambda task, loss: losses.append(loss))
    shares = vanished(task, names, gradient_scale or 1.0)
    loss, length = task.evaluate(last=True)["validation_loss"], config.model.length
    seen = largest_entries(task.model, corpus.validation.windows(torch.arange(config.batch) * length, length))
    plain = task.copy(task.whole_weights())  # a certificate is of nn.Linear
    proved = number_formats(wn.certify(plain)).inputs
    assert (gradient_scale is None) == (not any(isinstance(m, Float8Linear) for m in task.model.modules()))
    return {
        "products": "float32" if gradient_scale is None else "float8",
        "gradients times": gradient_scale or "-",
        "seed": config.seed,
        "validation loss": loss,
        "training loss, last 50 steps": sum(losses[-50:]) / len(losses[-50:]),
        **shares,
        "largest input, proved": max(proved[name] for name in names),
        "largest input, observed": max(seen[f"input of {name}"] for name in names),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every pair, and write and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = load_corpus(CHARACTERS)
    config, rows = settings(options.steps, corpus), []
    for seed in SEEDS:
        for scale in (None, 1.0, float(config.batch * config.model.length)):
            rows.append(run(replace(config, seed=seed), scale, corpus))
            print(rows[-1], flush=True)
    content = header("python -m benchmarks.float8", seed=list(SEEDS))
    write_result(options.output, {**content, "text": corpus.name, "config": asdict(config), "rows": rows})


if __name__ == "__main__":
    main()
