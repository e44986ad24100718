"""From what an oracle sees to the direction of a step: the oracle itself, and two published changes to it.

*Spectral clipping as the duality map* (Spectral Clipping, section 4): with a gain `k` the singular values of `k g` are
capped at one unit of the norm. It solves `max <k g, d> - |d|_F^2 / 2` over the ball, so directions of little gradient
move little. As `k` grows it tends to `dualize(g)` (section 1.1), and below the cap it is gradient descent of rate `k`.

*NorMuon* (Li et al., 2025, algorithm 1): the oracle's output `o` is divided, neuron by neuron, by the root of a running
average of `o`'s mean squares, and brought back to the Frobenius norm of `o`. As in the authors' code the
longer side counts the neurons, and the squares of each are averaged along the shorter one. The step is then no longer
bounded by the oracle's: `update_norm` is None.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix import spectral_hardcap
from wellnormed.norms import MatrixNorm, Norm
from wellnormed.optim.settings import Group

_FLOOR = 1e-8
"""Least mean square of a neuron that NorMuon divides by (the published epsilon)."""


def oracle(norm: Norm, group: Group) -> Callable[[Tensor], Tensor]:
    """From a batch of gradients to a batch of directions, by the settings of a group."""
    gain, sizes = group["clip_gain"], (..., *(None,) * norm.ndim)
    if gain is not None and isinstance(norm, MatrixNorm):
        return lambda batch: norm.on_slices(gain * batch, spectral_hardcap)
    if group["step_rule"] == "sharp":
        return lambda batch: norm.dualize(batch) * norm.dual_norm(batch)[sizes]
    return norm.dualize


def second_moment_like(parameter: Tensor, norm: MatrixNorm) -> Tensor:
    """Zeros for NorMuon's averages of one parameter: one number for every neuron of every slice, in a row."""
    slices = norm.slices(torch.empty(parameter.shape, device="meta"))
    return parameter.new_zeros(sum(x.numel() // min(x.shape[-2:]) for x in slices))


def normalize_neurons(directions: Tensor, second: Tensor, norm: MatrixNorm, keep: float) -> tuple[Tensor, Tensor]:
    """NorMuon's normalised directions of a batch, and its averages brought up to date.

    From the oracle's outputs `(batch, *shape)`, whose slices by the norm are the matrices, and the averages of mean
    squares of `second_moment_like`, stacked, of which the fraction `keep` is kept (the paper's `beta2`).
    """
    batches, averages = norm.slices(directions), []
    parts = second.split([x[0].numel() // min(x.shape[-2:]) for x in batches], -1)
    for i, (slices, part) in enumerate(zip(batches, parts, strict=True)):
        shorter = -1 if slices.shape[-2] >= slices.shape[-1] else -2
        squares = slices.square().mean(shorter, keepdim=True)
        average = part.reshape(squares.shape).lerp(squares, 1 - keep)
        divided = slices * average.clamp(min=_FLOOR).rsqrt()
        before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (slices, divided))
        batches[i] = divided * (before / after.clamp(min=_FLOOR))
        averages.append(average.flatten(1))
    return norm.from_slices(batches, directions), torch.cat(averages, -1)
