"""AdamW, by torch itself, for parameters that have no norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from wellnormed._devices import recording
from wellnormed._inputs import require_numbers
from wellnormed._ranges import KEPT, NOT_NEGATIVE


@dataclass(frozen=True)
class AdamWSettings:
    """What AdamW does to parameters without a norm; the fields are arguments of `torch.optim.AdamW`.

    The learning rate is a number of its own, for its unit is another than that of the oracles. Its default is the one
    that did best beside a Muon of 0.02 on small public models, with rates that fall to zero (`docs/rates.md`).
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        numbers = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        require_numbers("AdamWSettings: ", numbers, NOT_NEGATIVE)
        if not (isinstance(self.betas, Sequence) and len(self.betas) == 2):
            raise ValueError(f"AdamWSettings: betas={self.betas!r} must be two numbers, such as (0.9, 0.95)")
        require_numbers("AdamWSettings: ", {f"betas[{i}]": beta for i, beta in enumerate(self.betas)}, KEPT)


def refuse_lost_eps(name: str, parameter: Tensor, eps: float) -> None:
    """Refuse an eps that is zero in a parameter's dtype, where the first small gradient would be divided by zero."""
    if eps > 0 and not torch.tensor(eps, dtype=parameter.dtype, device="cpu"):
        raise ValueError(
            f"AdamW moves {name!r} of {parameter.dtype}, in which its eps={eps} is 0; keep the parameter in float32 "
            "(autocast computes in 16 bits), or pass adamw=AdamWSettings(eps=1e-4)"
        )


class AdamWStep(NamedTuple):
    """A step of torch's own AdamW on the parameters of a group that have a gradient."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    group: dict[str, Any]
    lr: float | Tensor

    @classmethod
    def of(cls, group: dict[str, Any], compiled: bool) -> "AdamWStep":
        """The step of a group."""
        lr = torch.as_tensor(group["lr"], dtype=torch.float64, device="cpu") if compiled else float(group["lr"])
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        return cls(moving, [parameter.grad for parameter in moving], group, lr)

    def make_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Make the state of parameters that have none yet, as `torch.optim.AdamW` keeps it."""
        for parameter in self.parameters:
            if not (state := states[parameter]):
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def __call__(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move the parameters, and bring their state up to date."""
        if self.parameters and recording(self.parameters[0].device):
            raise RuntimeError("a CUDA graph cannot record AdamW, whose counters would stand still in a replay")
        own, group = [states[parameter] for parameter in self.parameters], self.group
        averages, squares, steps = ([state[key] for state in own] for key in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        adamw(
            self.parameters, self.gradients, averages, squares, [], steps, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=self.lr, weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip
