"""The clips of Spectral clipping (SC) as published: compositions of matrix signs, kept for comparison.

Each is one or more Newton-Schulz iterations with the six steps of the paper's code, in the dtype of the weight. What
is wrong with them is measured in `benchmarks/matrix/`: a sign of anything below some 0.5% of the Frobenius norm, be it
a singular value or its distance from a bound, has not converged, and its error is multiplied by the norm of the weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._msign_methods import newton_schulz
from wellnormed.matrix._symmetric import full_product
from wellnormed.matrix.coefficients import REGISTRY

_STEPS = REGISTRY["spectral-clipping-6"].steps


def nested(w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """SC equation 7, or the two-sign forms of sections 3.2 and 3.3 where one bound is absent.

    Two or three matrix signs, and two products `2 m n^2` more for each bound.
    """
    if w.shape[-2] > w.shape[-1]:
        return nested(w.mT, lower, upper).mT
    if lower is None and upper is None:
        return w
    sign = _sign(w)
    low = 0 if lower is None else _bound(lower, w)
    if upper is None:
        return (low * sign + w + _times_sign(low * sign - w, sign)) / 2
    high = _bound(upper, w)
    capped = -_times_sign(high * sign - w, sign)
    if lower is None:
        return (high * sign + w + capped) / 2
    return ((low + high) * sign + _times_sign(low * sign - w, sign) + capped) / 2


def block(w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """SC section 4.2: one matrix sign of the dense `[[I, W], [W^T, I]]` of side `m + n`."""
    return _by_caps(w, lower, upper, _block_cap)


def blockwise(w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """SC section 4.3: the same through the blocks P, Q, R, nine products in each of three multiplications a step."""
    return _by_caps(w, lower, upper, _blockwise_cap)


def _bound(value: Tensor, w: Tensor) -> Tensor:
    return value.to(w.dtype)[..., None, None]


def _sign(x: Tensor) -> Tensor:
    largest = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(largest > 0, largest, 1)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1)
    return newton_schulz(x.mT.flatten(0, -3) if x.ndim > 3 else x.mT, _STEPS, full_product).reshape(x.mT.shape).mT


def _times_sign(gap: Tensor, sign: Tensor) -> Tensor:
    return (gap @ _sign(gap).mT) @ sign


def _by_caps(w: Tensor, lower: Tensor | None, upper: Tensor | None, cap: Callable[[Tensor], Tensor]) -> Tensor:
    """These forms need an odd function without a jump: `clip(s) = min(s, upper) + lower - min(s, lower)`."""
    value = w
    if upper is not None:
        high = _bound(upper, w)
        value = high * cap(w / high)
    if lower is not None:
        low = _bound(lower, w)
        value = value + low * (_sign(w) - cap(w / low))
    return value


def _block_cap(w: Tensor) -> Tensor:
    m, n = w.shape[-2:]
    left, right = (torch.eye(k, dtype=w.dtype, device=w.device).expand(*w.shape[:-2], k, k) for k in (m, n))
    sign = _sign(torch.cat((torch.cat((left, w), -1), torch.cat((w.mT, right), -1)), -2))
    return sign[..., :m, m:] + sign[..., :m, :m] @ w


def _blockwise_cap(w: Tensor) -> Tensor:
    m, n = w.shape[-2:]
    left, right = (torch.eye(k, dtype=w.dtype, device=w.device) for k in (m, n))
    frobenius = torch.sqrt(m + n + 2 * torch.linalg.matrix_norm(w, keepdim=True) ** 2)
    blocks = left / frobenius, w / frobenius, right / frobenius
    for a, b, c in _STEPS:
        square = _multiply(blocks, blocks)
        fourth = _multiply(square, square)
        p, q, r = (b * two + c * four for two, four in zip(square, fourth, strict=True))
        blocks = _multiply(blocks, (a * left + p, q, a * right + r))
    return blocks[1] + blocks[0] @ w


def _multiply(x: tuple[Tensor, Tensor, Tensor], y: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return x[0] @ y[0] + x[1] @ y[1].mT, x[0] @ y[1] + x[1] @ y[2], x[1].mT @ y[1] + x[2] @ y[2]
