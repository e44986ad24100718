"""Attacks on a classifier of images in the Euclidean ball of a budget, and what a certificate rules out beforehand.

An attack sees the gradient, and returns images that lie in the ball about the originals and have pixels in [0, 1].
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.certificates import certify

Loss = Callable[[Tensor, Tensor], Tensor]
"""The loss of every image, from logits `(N, classes)` and labels `(N,)`; an attack makes it large."""
_ROUNDING = 1e-9
"""Relative share taken off a certified radius: more than the rounding of a few sums of float64 numbers."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of every image."""
    return F.cross_entropy(logits, labels, reduction="none")


def difference_of_logits_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """DLR (Croce and Hein, 2020, equation 6): the margin over the gap of the first and the third logit, negated.

    Unlike the cross entropy it does not change with the scale of the logits, and so never saturates.
    """
    ordered = logits.sort(descending=True).values
    gap = (ordered[:, 0] - ordered[:, 2]).clamp(min=torch.finfo(logits.dtype).tiny)
    return -margins(logits, labels) / gap


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The right logit minus the largest other one."""
    right = logits.gather(1, labels[:, None])
    return right[:, 0] - logits.scatter(1, labels[:, None], -math.inf).amax(1)


def pgd(model: nn.Module, images: Tensor, labels: Tensor, budget: float, steps: int) -> Tensor:
    """Projected gradient ascent on the cross entropy from the image itself, in steps of 2.5 budgets over their number.

    Returns the images of the largest cross entropy on the way.
    """
    points, best = images.clone(), images.clone()
    largest = torch.full_like(labels, -math.inf, dtype=images.dtype)
    for step in range(steps + 1):
        losses, _, gradient = _losses(model, points, labels, cross_entropy)
        better = losses > largest
        best[better], largest = points[better], torch.maximum(losses, largest)
        if step < steps:
            points = _inside(points + 2.5 * budget / steps * _unit(gradient), images, budget)
    return best


def apgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    budget: float,
    steps: int,
    generator: torch.Generator,
    loss: Loss = difference_of_logits_ratio,
) -> Tensor:
    """Auto-PGD (Croce and Hein, 2020, algorithm 1): momentum, and steps of 2 budgets that are halved when they stall.

    Returns for every image a point that is classified otherwise, if one was met, else the image.
    """
    start = torch.randn(images.shape, generator=generator).to(images)
    points = last = _inside(images + budget * _unit(start), images, budget)
    found, best, best_gradient = images.clone(), points.clone(), torch.zeros_like(points)
    rate = torch.full_like(labels, 2 * budget, dtype=images.dtype)
    largest = at_check = before = torch.full_like(rate, -math.inf)
    rises, kept = torch.zeros_like(rate), torch.ones_like(labels, dtype=torch.bool)
    period, since = max(1, int(0.22 * steps)), 0
    for step in range(steps + 1):
        losses, wrong, gradient = _losses(model, points, labels, loss)
        found[wrong] = points[wrong]
        better = losses > largest
        best[better], best_gradient[better] = points[better], gradient[better]
        largest = torch.maximum(losses, largest)
        if step == 0:
            at_check = before = losses
        rises, before, since = rises + (losses > before), losses, since + bool(step)
        if since == period:
            stalled = (rises < 0.75 * period) | (kept & (largest <= at_check))
            rate, kept = torch.where(stalled, rate / 2, rate), ~stalled
            points[stalled], gradient[stalled] = best[stalled], best_gradient[stalled]
            at_check, rises, since = largest, torch.zeros_like(rises), 0
            period = max(period - max(1, int(0.03 * steps)), max(1, int(0.06 * steps)))
        ahead = _inside(points + _each(rate, points) * _unit(gradient), images, budget)
        if step:
            ahead = _inside(points + 0.75 * (ahead - points) + 0.25 * (points - last), images, budget)
        points, last = ahead, points
    return found


@torch.no_grad()
def certified_radii(model: nn.Sequential, images: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The constant of all layers but the last, and the radius about every image within which its class stays.

    Both are Euclidean, for images with pixels in [0, 1]. A wrong class has the radius 0.

    The model applies layers that `certify` knows, and a last `nn.Linear` without bias. The logit of class a minus that
    of b moves by at most `|w_a - w_b|` times the change of what the last layer reads, and that by the certificate of
    the layers before. From each gap, twice that is taken which executing the model in float64 may add to it.

    Raises:
        ValueError: An operation has no bound of rounding errors, so no radius holds for the executed network.
    """
    model = copy.deepcopy(model).double()
    body, head = model[:-1], model[-1]
    assert isinstance(head, nn.Linear)
    assert head.bias is None
    bound = certify(body, images[:1].double(), box=(0, 1)).lipschitz
    whole = certify(model, images[:1].double(), box=(0, 1))
    if (error := whole.forward_error) is None:
        raise ValueError(f"{whole.unbounded_at} has no bound of rounding errors; replace the operation")
    logits = torch.cat([model(part.double()) for part in images.split(500)])
    gaps, weight = logits.gather(1, labels[:, None]) - logits - 2 * math.sqrt(2) * error, head.weight
    rows = (weight[labels][:, None] - weight).norm(dim=2) * bound
    radii = (gaps / rows).scatter(1, labels[:, None], math.inf).amin(1)
    return bound, radii.clamp(min=0) * (1 - _ROUNDING)


def _losses(model: nn.Module, points: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """The loss at every point, whether it is classified otherwise, and the gradient."""
    points = points.detach().requires_grad_()
    logits = model(points)
    losses = loss(logits, labels)
    (gradient,) = torch.autograd.grad(losses.sum(), points)
    return losses.detach(), logits.argmax(1) != labels, gradient


def _unit(directions: Tensor) -> Tensor:
    sizes = directions.flatten(1).norm(dim=1).clamp(min=torch.finfo(directions.dtype).tiny)
    return directions / _each(sizes, directions)


def _inside(points: Tensor, images: Tensor, budget: float) -> Tensor:
    """Brought into the ball, then to pixels in [0, 1]: as the image has such pixels, that only shortens the change."""
    change = points - images
    sizes = change.flatten(1).norm(dim=1).clamp(min=torch.finfo(points.dtype).tiny)
    return (images + change * _each((budget / sizes).clamp(max=1), change)).clamp(0, 1)


def _each(numbers: Tensor, images: Tensor) -> Tensor:
    return numbers.reshape(-1, *[1] * (images.ndim - 1))
