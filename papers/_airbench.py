"""The convolutional network of airbench (Jordan, 2024) on CIFAR-10, as a task, with what its training does to images.

A fixed layer that whitens 2 x 2 patches, three groups of two convolutions with batch norm (biases, no gains) and GELU,
and a linear head on 3 x 3 maxima; labels smoothed by 0.2, shifts by up to two pixels, and a flip of half of the images
that is the other half's in every second epoch. The first layer has no bias, as Norm-Constrained LMOs (LMO) trains it.
Kernels start as the identity, beside torch's start where they have more outputs than inputs.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers._cifar import CifarTask, pixels_and_labels
from wellnormed.nn import Scale
from wellnormed.routing import assign_norms

CHANNELS = (64, 256, 256)
WHITENED = 24
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SMOOTHING, SHIFT = 0.2, 2


@dataclass(frozen=True)
class AirbenchRun:
    """One training run of constrained Scion (SCG)."""

    width: float
    """Channels over those of airbench."""
    lr: float
    steps: int
    batch: int
    seed: int
    averaged: bool = False
    """Whether the logits of a test image are averaged over its mirror image and two shifts, as airbench does."""
    tested: int = 10_000
    """Test images."""


class Standardize(nn.Module):
    """Pixels in [0, 1] to mean 0 and deviation 1 over CIFAR-10, channel by channel."""

    def forward(self, pixels: Tensor) -> Tensor:
        mean, std = (pixels.new_tensor(values)[:, None, None] for values in (MEAN, STD))
        return (pixels - mean) / std


def airbench(width: float, images: Tensor) -> nn.Sequential:
    """The network at its start, its first layer from these images `(N, 3, 32, 32)` in [0, 1]."""
    whitening = nn.Conv2d(3, WHITENED, 2, bias=False)
    whitening.weight = nn.Parameter(whitening_kernels(Standardize()(images)), requires_grad=False)
    channels = [WHITENED, *(round(width * count) for count in CHANNELS)]
    groups = [_group(d_in, d_out) for d_in, d_out in pairwise(channels)]
    head = nn.Sequential(nn.MaxPool2d(3), nn.Flatten(), nn.Linear(channels[-1], 10, bias=False), Scale(1 / 9))
    return nn.Sequential(Standardize(), whitening, nn.GELU(), *groups, *head)


def _group(d_in: int, d_out: int) -> nn.Sequential:
    def norm() -> nn.BatchNorm2d:
        layer = nn.BatchNorm2d(d_out, eps=1e-12, momentum=0.4)
        layer.weight.requires_grad_(False)
        return layer

    first, second = (nn.Conv2d(count, d_out, 3, padding=1, bias=False) for count in (d_in, d_out))
    for layer in (first, second):
        nn.init.dirac_(layer.weight.data[: layer.in_channels])
    return nn.Sequential(first, nn.MaxPool2d(2), norm(), nn.GELU(), second, norm(), nn.GELU())


@torch.no_grad()
def whitening_kernels(images: Tensor, floor: float = 5e-4) -> Tensor:
    """`(24, 3, 2, 2)`: the principal directions of 2 x 2 patches over their deviations, and their negatives."""
    patches = F.unfold(images, 2).movedim(1, -1).flatten(0, 1)
    variances, directions = torch.linalg.eigh(patches.mT @ patches / len(patches))
    kernels = (directions / (variances + floor).sqrt()).mT.flip(0).reshape(-1, 3, 2, 2)
    return torch.cat((kernels, -kernels))


class AirbenchTask(CifarTask):
    """Rates that fall linearly to 0; norms, radii and momentum (0.4 is kept) are those of LMO's released code."""

    def __init__(self, run: AirbenchRun, device: torch.device) -> None:
        torch.manual_seed(run.seed)
        images = pixels_and_labels("train", device)[0][:5000]
        model = airbench(run.width, images).to(device)
        self.run, self.assigned = run, assign_norms(model, "scion-cnn")
        optimizer = wn.Scion(self.assigned, run.lr, unconstrained=False, momentum=0.4)
        super().__init__(model, optimizer, None, steps=run.steps, batch=run.batch, seed=run.seed, device=device)
        self.mirrored = torch.randint(2, self.train[1].shape, generator=self.generator)

    def batch_loss(self) -> Tensor:
        """Cross entropy with smoothed labels, of images that are flipped and shifted."""
        drawn = self.next_numbers()
        pixels, labels = (part[drawn.to(part.device)] for part in self.train)
        pixels = augmented(pixels, (self.mirrored[drawn] + self.epoch) % 2, self.generator)
        return F.cross_entropy(self.model(pixels), labels, label_smoothing=SMOOTHING)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy on test images, and the largest norm of a kernel or the head over its radius."""
        pixels, labels = (part[: self.run.tested] for part in self.test)
        self.model.eval()
        logits = torch.cat([self.logits(part) for part in pixels.split(1000)])
        ratios = [float(a.norm.norm(a.parameter)) / a.radius for a in self.assigned if a.norm and a.parameter.ndim > 1]
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(accuracy), "norm": max(ratios)}

    def logits(self, pixels: Tensor) -> Tensor:
        """The logits of images, averaged over their views if the run says so."""
        if not self.run.averaged:
            return self.model(pixels)
        shifted = F.pad(pixels, (1, 1, 1, 1), "reflect")
        views = [(pixels, 0.5), (shifted[..., :-2, :-2], 0.25), (shifted[..., 2:, 2:], 0.25)]
        logits = [share / 2 * (self.model(view) + self.model(view.flip(-1))) for view, share in views]
        return torch.stack(logits).sum(0)


def augmented(pixels: Tensor, mirrored: Tensor, generator: torch.Generator, shift: int = SHIFT) -> Tensor:
    """Images `(N, C, H, W)`, flipped where `mirrored`, `(N,)`, is 1, moved by at most `shift`, borders reflected."""
    count, side = len(pixels), pixels.shape[-1]
    shifts = torch.randint(2 * shift + 1, (2, count, 1), generator=generator)
    places = torch.arange(side)
    columns = torch.where(mirrored[:, None] == 1, side - 1 - places, places)
    rows, columns = (part.to(pixels.device) for part in (shifts[0] + places, shifts[1] + columns))
    padded = F.pad(pixels, (shift,) * 4, "reflect").movedim(1, -1)
    number = torch.arange(count, device=pixels.device)[:, None, None]
    return padded[number, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
