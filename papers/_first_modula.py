"""The optimizer of the first Modula: Large et al., Scalable Optimization in the Modular Norm, and its released code."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wellnormed.norms import ColNorm
from wellnormed.routing import Assignment

BETAS = (0.9, 0.99)


class NormalizedAdam(torch.optim.Optimizer):
    """Adam's direction, scaled to the norm that is each weight's share of a step of modular norm `lr`.

    A matrix's largest singular value is tracked by one power iteration a step, from below. Averages keep
    `1 - (1 - beta)^(k / (k + 1))` in step k, the first of which is the first gradient.

    Args:
        norms: Of every weight: `ColNorm` for a table, whose rows have RMS 1 after every step, or RMS to RMS.
        factors: Name -> share of the step.
        lr: Length of a step in the modular norm.
        decay: Of matrices, per unit of a weight's own step.
    """

    def __init__(self, norms: Assignment, factors: dict[str, float], lr: float, decay: float) -> None:
        groups = [{"params": [a.parameter], "norm": a.norm, "factor": factors[a.name]} for a in norms]
        super().__init__(groups, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """One step; tables have vectors of RMS 1 after it, and matrices decay."""
        assert closure is None
        for group in self.param_groups:
            (weight,), size = group["params"], group["lr"] * group["factor"]
            state, gradient = self.state[weight], weight.grad
            if not state:
                state |= {
                    "step": torch.zeros(()),
                    "first": torch.zeros_like(weight),
                    "second": torch.zeros_like(weight),
                }
                state["input"] = torch.ones_like(weight[0])
            power = float(state["step"] / (state["step"] + 1))
            state["first"].lerp_(gradient, (1 - BETAS[0]) ** power)
            state["second"].lerp_(gradient.square(), (1 - BETAS[1]) ** power)
            state["step"] += 1
            update = (state["first"] / state["second"].sqrt()).nan_to_num(0.0, 0.0, 0.0)
            if isinstance(group["norm"], ColNorm):
                weight -= size * (update / rms(update)).nan_to_num(0.0, 0.0, 0.0)
                weight /= rms(weight)
            else:
                output = nn.functional.normalize(update @ state["input"], dim=0)
                state["input"] = update.T @ output
                unit = math.sqrt(len(weight) / weight.shape[1])
                weight -= size * unit * update / state["input"].norm()
                weight *= 1 - group["decay"] * size


def rms(vectors: Tensor) -> Tensor:
    """Of every row."""
    return vectors.square().mean(1, keepdim=True).sqrt()
