"""From what an oracle sees to the direction of a step: the oracle itself, and two published changes to it.

*Spectral clipping as the duality map* (Spectral Clipping, section 4): with a gain `k` the singular values of `k g` are
capped at one unit of the norm. It solves `max <k g, d> - |d|_F^2 / 2` over the ball, so directions of little gradient
move little. As `k` grows it tends to `dualize(g)` (section 1.1), and below the cap it is gradient descent of rate `k`.

*NorMuon* (Li et al., 2025, algorithm 1): the oracle's output `o` is divided, neuron by neuron, by the root of a running
average of `o`'s mean squares, and brought back to the Frobenius norm of `o`. As in the authors' code a neuron is what
the shorter side counts. The step is then no longer bounded by the oracle's: `update_norm` is None.
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
        return lambda batch: spectral_hardcap(gain * norm.matrices(batch), norm.unit(batch)).reshape(batch.shape)
    if group["step_rule"] == "sharp":
        return lambda batch: norm.dualize(batch) * norm.dual_norm(batch)[sizes]
    return norm.dualize


def second_moment_like(parameter: Tensor, norm: MatrixNorm) -> Tensor:
    """Zeros of the shape of NorMuon's average for one parameter: one number for every neuron of every slice."""
    shape = list(norm.matrices(torch.empty(parameter.shape, device="meta")).shape)
    shape[_averaged(shape)] = 1
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def normalize_neurons(directions: Tensor, second: Tensor, norm: MatrixNorm, keep: float) -> tuple[Tensor, Tensor]:
    """NorMuon's normalised directions of a batch, and its averages brought up to date.

    Args:
        directions: The oracle's outputs, `(batch, *shape)`.
        second: The averages of mean squares, from `second_moment_like`, stacked.
        norm: The norm, whose slices are the matrices.
        keep: Fraction of the averages that is kept, `beta2`.
    """
    slices = norm.matrices(directions)
    second = second.lerp(slices.square().mean(_averaged(slices.shape), keepdim=True), 1 - keep)
    divided = slices * second.clamp(min=_FLOOR).rsqrt()
    sizes = (torch.linalg.matrix_norm(x, keepdim=True) for x in (slices, divided))
    before, after = sizes
    return (divided * (before / after.clamp(min=_FLOOR))).reshape(directions.shape), second


def _averaged(shape: torch.Size | list[int]) -> int:
    """The longer side, over which the squares of a neuron are averaged."""
    return -1 if shape[-2] >= shape[-1] else -2
