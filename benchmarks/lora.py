"""Adapters of low rank (LoRA): AdamW, Scion and Muon on both factors, and Muon on B with AdamW on A.

A GPT-2 of `transformers` learns a Markov chain, and is frozen. Adapters of rank 4 on all of its hidden matrices then
learn a chain of another table, in 300 steps at rates that fall to zero. Every arm runs at its rates; where the best, by
the mean over the seeds, is the largest or the least, a further one runs, three times as far. The figure is the mean
loss of 20 further batches.

    python -m benchmarks.lora
"""

import copy
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

import wellnormed as wn
from benchmarks.public_defaults import cases, chain, fit
from papers.header import Stored

OUTPUT = Path("results/lora.json")
RANK, STEPS, BEFORE, SEEDS, MOST = 4, 300, 1000, (0, 1, 2), 7
Optimizers = Callable[[nn.Module, float], torch.optim.Optimizer]


class Adapted(nn.Module):
    """A matrix that is frozen, stored with its inputs first as GPT-2's are, and `B A` beside it; B starts at zero."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        inputs, outputs = base.weight.shape
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def muon_and_adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Muon's step for B, and AdamW's for A."""
    return wn.Muon(model, lr=rate, overrides={"*.lora_A": None}, adamw=wn.optim.AdamWSettings(lr=rate / 10))


ARMS: dict[str, tuple[Optimizers, tuple[float, ...]]] = {
    "AdamW on A and B": (lambda model, rate: torch.optim.AdamW(trained(model), lr=rate), (0.003, 0.01, 0.03)),
    "Scion on A and B": (lambda model, rate: wn.Scion(model, lr=rate), (0.02, 0.06, 0.18)),
    "Muon on A and B": (lambda model, rate: wn.Muon(model, lr=rate), (0.02, 0.06, 0.18)),
    "Muon on B, AdamW on A at a tenth": (muon_and_adamw, (0.02, 0.06, 0.18)),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapted(base: nn.Module, seed: int) -> nn.Module:
    """A copy whose hidden matrices have adapters, and whose other weights are frozen."""
    torch.manual_seed(seed)
    model = copy.deepcopy(base).requires_grad_(False)
    for module in list(model.transformer.h.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                setattr(module, name, Adapted(child))
    return model


def main() -> None:
    """Run what has no row, and print the mean loss of every arm at its rates."""
    torch.set_num_threads(1)
    case = cases()["GPT-2"]
    first, second = (chain(torch.Generator().manual_seed(seed)) for seed in (1234, 4321))
    torch.manual_seed(0)
    base = case.model()
    before = fit(base, case, first, [torch.optim.AdamW(base.parameters(), lr=0.01)], BEFORE, 0)
    print(f"before: {before:.3f}", flush=True)
    stored = Stored(OUTPUT, "python -m benchmarks.lora", steps=STEPS, rank=RANK, before=before)
    for name, (make, own) in ARMS.items():
        tried = sorted({*own, *(row["rate"] for row in stored.rows if row["arm"] == name)})
        while True:
            for rate, seed in ((rate, seed) for rate in tried for seed in SEEDS):
                if not stored.has(arm=name, rate=rate, seed=seed):
                    model = adapted(base, seed)
                    loss = fit(model, case, second, [make(model, rate)], STEPS, seed)
                    stored.add({"arm": name, "rate": rate, "seed": seed, "loss": round(loss, 6)})
            own_rows = [row for row in stored.rows if row["arm"] == name]
            means = {rate: fmean(row["loss"] for row in own_rows if row["rate"] == rate) for rate in tried}
            best = min(means, key=means.__getitem__)
            if best not in (tried[0], tried[-1]) or len(tried) == MOST:
                break
            tried = sorted({*tried, best / 3 if best == tried[0] else best * 3})
        print(name, {f"{rate:.3g}": round(loss, 4) for rate, loss in means.items()}, flush=True)


if __name__ == "__main__":
    main()
