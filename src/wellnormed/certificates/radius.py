"""The radius within which a prediction cannot change, from the gap of two logits and a certificate's bound."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellnormed.proof.decimals import float_up, root, rounding_up

if TYPE_CHECKING:
    from wellnormed.certificates.certificate import Certificate

_ROUNDING = 1e-9
"""The share by which a radius is reduced: it exceeds the rounding errors, so that no radius ends in a tie."""


def certified_radius(certificate: "Certificate", logits: Tensor, std: float | Sequence[float] = 1.0) -> Tensor:
    """See `Certificate.certified_radius`."""
    deviations = [float(each) for each in (std if isinstance(std, Sequence) else [std])]
    if not deviations or not all(0 < each < math.inf for each in deviations):
        raise ValueError(f"certified_radius: std={std} must be positive and finite: what every channel was divided by")
    classes = certificate.rows[-1].shape[-1]
    if not logits.is_floating_point() or not logits.ndim or logits.shape[-1] != classes or classes < 2:
        raise ValueError(
            f"certified_radius: logits of shape {tuple(logits.shape)} and {logits.dtype} must be floats, of which the "
            f"last axis has the {classes} entries of the certified result, at least 2"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("certified_radius: logits have entries that are not finite; no prediction follows from them")
    first, second = logits.detach().double().topk(2, dim=-1).values.unbind(-1)
    gap, slope = first - second, _slope_of_a_gap(certificate)
    return torch.where(gap > 0, gap / slope, 0.0) * (min(deviations) * (1 - _ROUNDING))


def _slope_of_a_gap(certificate: "Certificate") -> float:
    """Most by which the difference of two logits changes, over the Euclidean norm of a change of an input's group."""
    with rounding_up():
        slopes = [root(2) * certificate.lipschitz.exact]
        if (margin := certificate.margin) is not None:
            slopes.append(margin.exact)
        return float_up(min(slopes))
