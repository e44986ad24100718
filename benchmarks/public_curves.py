"""Validation loss of a public model by AdamW, by torch's Muon and by `wn.Scion`: the curves of README.md.

The model is GPT-2 of Hugging Face's `transformers` with random weights, at the size written here, on characters of Tiny
Shakespeare. AdamW and Muon (which leaves vectors and tables to AdamW, at AdamW's best) are tried at three rates each,
`wn.Scion` at its default alone. Every rate falls linearly to zero, but for the average of Scion's iterates, which knows
no end (`wn.Averaged`). The best of three rates is the one of the lowest
mean over the seeds at the end of the run, so the search favours the others. A finished run is one row, and is not run
again.

    python -m benchmarks.public_curves            # the rows that are missing, then the figure
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import wellnormed as wn
from papers.header import Stored
from wellnormed.data import load_shakespeare

OUTPUT = Path("results/public-curves.json")
STEPS, EVERY, BATCH, LENGTH, SEEDS = 200, 20, 12, 64, (0, 1, 2)
SIZE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
SCION, AVERAGED, ADAMW = "wn.Scion, as it comes", "wn.Scion, averaged, no schedule", 0.003


def with_muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon of torch on the matrices of the blocks, with the step sizes of AdamW, which moves the rest."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".h." not in name]
    muon = torch.optim.Muon(hidden, lr=rate, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=ADAMW)]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module, float], list[torch.optim.Optimizer]], tuple[float, ...]]] = {
    "AdamW, best of three rates": (
        lambda m, rate: [torch.optim.AdamW(m.parameters(), lr=rate)],
        (0.0015, 0.003, 0.006),
    ),
    "Muon with AdamW, best of three rates": (with_muon, (0.006, 0.012, 0.024)),
    SCION: (lambda m, rate: [wn.Scion(m, lr=rate)], (0.02,)),
    AVERAGED: (lambda m, rate: [wn.Averaged(wn.Scion(m, lr=rate, momentum=0.5))], (0.02,)),
}
"""Name -> how it is made, and its rates."""


def windows(tokens: Tensor, count: int) -> Tensor:
    """Windows of `LENGTH + 1` characters, spread evenly over a text."""
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, count).long()
    return torch.stack([tokens[start : start + LENGTH + 1] for start in starts])


def train(name: str, rate: float, seed: int) -> list[tuple[int, float]]:
    """Step and validation loss on 100 windows, before the first step and after every `EVERY`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    data = load_shakespeare("tiny-shakespeare")
    text, seen = data.train.long(), windows(data.validation.long(), 100)
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(data.symbols), bos_token_id=0, eos_token_id=0, **SIZE)).train()
    optimizers = OPTIMIZERS[name][0](model, rate)
    falls = (lambda step: 1.0) if name == AVERAGED else (lambda step: 1 - step / STEPS)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, falls) for each in optimizers]
    averages = [each for each in optimizers if isinstance(each, wn.Averaged)]
    draws, curve = torch.Generator().manual_seed(seed), []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            for each in (model, *averages):
                each.eval()
            with torch.no_grad():
                curve.append((step, round(loss_of(model, seen).item(), 5)))
            for each in (model, *averages):
                each.train()
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draws)
        loss_of(model, torch.stack([text[start : start + LENGTH + 1] for start in starts])).backward()
        for each, schedule in zip(optimizers, schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()
    return curve


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next character, in nats."""
    logits = model(input_ids=batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def best(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Name -> the rows of the rate whose mean loss at the end is lowest, in the order of `OPTIMIZERS`."""
    found = {}
    for name, (_, rates) in OPTIMIZERS.items():
        own = {rate: [row for row in rows if (row["optimizer"], row["rate"]) == (name, rate)] for rate in rates}
        found[name] = min(own.values(), key=lambda each: fmean(row["curve"][-1][1] for row in each))
    return found


def draw_on(axis: Any, rows: list[dict[str, Any]]) -> None:
    """The curves: means over the seeds, with bands from the least to the largest."""
    styles = (("#777777", ":"), ("#D55E00", "--"), ("#0072B2", "-"), ("#009E73", "-."))
    for (name, each), (colour, style) in zip(best(rows).items(), styles, strict=True):
        steps = [step for step, _ in each[0]["curve"]]
        losses = [[row["curve"][place][1] for row in each] for place in range(len(steps))]
        means = [fmean(values) for values in losses]
        axis.plot(steps, means, style, color=colour, label=f"{name} ({each[0]['rate']:g}): {means[-1]:.2f}")
        axis.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="step", ylabel="validation loss (nats a character)", ylim=(2.3, 3.2), xlim=(0, STEPS))
    axis.grid(alpha=0.3)
    axis.legend()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The figure of README.md."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    draw_on(figure.subplots(), rows)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    """Run what has no row yet, and draw the figure."""
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.public_curves", model=f"GPT2LMHeadModel {SIZE}", steps=STEPS)
    for seed in SEEDS:
        for name, (_, rates) in OPTIMIZERS.items():
            for rate in rates:
                cell = {"optimizer": name, "rate": rate, "seed": seed}
                if not stored.has(**cell):
                    stored.add(cell | stored.commit | {"curve": train(name, rate, seed)})
    draw(stored.rows, OUTPUT.with_suffix(".png"))


if __name__ == "__main__":
    main()
