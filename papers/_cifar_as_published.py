"""LT's AdamW on CIFAR-10 as its released code has it, where that code is not what is usual."""

import torch
from torch import Tensor, nn

from papers._cifar import BETAS, CifarRun, CifarTask, lt_adamw, lt_start


class AdamWAsPublished(CifarTask):
    """AdamW without bias correction, on batches that come in the same order in every epoch.

    torch's AdamW divides its averages in step t by `1 - beta^t`; a learning rate times `(1 - beta_1^t) / sqrt(1 -
    beta_2^t)` takes that back, up to Adam's eps. It changes the weight decay as well, which LT's code leaves
    alone: by -55, -39, -28 and -14% in steps 1, 2, 3 and 5, by up to a tenth more from step 9 to 100, and the weights
    by less than 0.1% in all.
    """

    order_of_all: Tensor | None = None

    def rate_factor(self, step: int) -> float:
        """A linear fall to 0, without what torch corrects."""
        first, second = (1 - beta ** (step + 1) for beta in BETAS)
        return super().rate_factor(step) * first / second**0.5

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        if self.order_of_all is None:
            self.order_of_all = torch.randperm(len(self.train[1]), generator=self.generator)
        if len(self.order) < self.batch:
            self.order = self.order_of_all
        return super().next_batch()


class HalfSlope(nn.Module):
    """ReLU with the slope 1/2 at zero."""

    def forward(self, x: Tensor) -> Tensor:
        """The larger of x and 0; torch shares the gradient between two that are equal."""
        return torch.maximum(x, torch.zeros_like(x))


def adamw_as_published(run: CifarRun, device: torch.device) -> AdamWAsPublished:
    """A run of LT's AdamW: its first matrix starts at zero and the others orthogonal."""
    model = lt_start(run, zero=0)
    model[2] = model[4] = HalfSlope()
    optimizer = lt_adamw(model.to(device), run)
    return AdamWAsPublished(model, optimizer, steps=run.steps, batch=run.batch, seed=run.seed, device=device)
