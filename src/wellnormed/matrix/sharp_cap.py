"""A soft cap of a high power: a cap by few products, for matrices of which it is known that they are hardly above it.

With the Gram matrix `H = W^T W / cap^2` of the smaller side and an even power m,

    f(W) = W (I - c H^(m/2)),   c = (m / (m + 1))^m / (m + 1),

takes a singular value of s caps to `s (1 - c s^m)`, whose largest value, at `s = (m + 1) / m`, is 1. LT's soft cap is
two such steps of the power 2. The larger the power, the less of what is below the cap is lost (at 0.9 caps .4% with
the power 16, at 0.8 caps .06%), and the nearer to the cap the matrix must be. It takes `log2(m) + 1` products, where
an eigendecomposition of a small matrix takes the time of forty.
"""

from functools import partial

import torch
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed.matrix._checks import as_bound, working_dtype
from wellnormed.matrix._symmetric import CALL, full_product, times_symmetric
from wellnormed.matrix.clips import spectral_hardcap

_POWERS = (64, 32, 16, 8)
_WIDEST = 2.1
"""The largest excess over the cap, times the power: there values end about twice as far below the cap as at it."""
_BELOW = 0.99
"""The size of `H^(m/2)` up to which a matrix is below the cap, whatever the roundings of the products."""
_FAR = 1.6
"""From `c s^m` of this size on, a value may end beyond the cap, on the other side of 0."""


def power_for(side: int, most: float) -> int:
    """The power that caps matrices of a norm of at most `most` caps, by their smaller side; 0 if there is none.

    The Frobenius norm of `H^(m/2)` shows for small sides only that none of the values was farther above the cap.
    """
    return next((m for m in _POWERS if (most - 1) * m <= _WIDEST), 0) if side**3 < CALL else 0


def sharp_cap(w: Tensor, upper: float | Tensor, power: int) -> Tensor:
    """Matrices `(*batch, m, n)` brought to a norm of at most `upper`, a number or one per matrix.

    Those that are found to be below it come back bit for bit. If any is so far above it that a power cannot cap it,
    all are capped by `spectral_hardcap`.

    Example:
        >>> sharp_cap(torch.diag(torch.tensor([1.1, 0.5])), 1.0, 16).diagonal()
        tensor([0.9873, 0.5000])
    """
    return in_batches(partial(_capped, power=power), w, as_bound(upper, w, "upper"))


def _capped(w: Tensor, upper: Tensor, power: int) -> Tensor:
    if w.shape[-2] < w.shape[-1]:
        return _capped(w.mT, upper, power).mT
    c = (power / (power + 1)) ** power / (power + 1)
    work = w.to(working_dtype(w))
    scaled = work / upper[..., None, None].to(work.dtype)
    h = full_product(scaled.mT, scaled)
    for _ in range(power.bit_length() - 2):
        h = full_product(h, h)
    largest = torch.linalg.matrix_norm(h, keepdim=True)
    if bool((c * largest > _FAR).any()):
        return spectral_hardcap(w, upper)
    return torch.where(largest <= _BELOW, w, times_symmetric(work, h, work, alpha=-c).to(w.dtype))
