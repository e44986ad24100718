"""Caps on the singular values of a weight, in plain spectral (l2 -> l2) units.

`spectral_hardcap` and `spectral_normalize` are exact projections of two kinds; the polynomial soft cap and
the rule for its strength are in `soft_cap`. Units of a layer (RMS -> RMS) and schedules belong to `norms` and
`constraints`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import check_finite, check_matrix, positive_over_batch, power_of_two_scale
from wellnormed.matrix._spectral_function import Clip, attach_gradient

_METHODS = ("auto", "gram", "svd")
_EIGENVALUE_ERROR = 1e-13  # relative, of the largest eigenvalue of a float64 Gram matrix; some hundred roundings

_UNDECIDED = 1e-5
"""Relative distance from the cap within which float32 cannot tell inside from outside (measured error 5e-6)."""
_FAR_OUTSIDE = 2.0
"""Largest singular value over the cap up to which float32 rounding stays below 1e-6 of the cap."""

_SAFE_SQUARES = (1e-12, 1e12)
"""Caps whose squares, and those of singular values worth keeping, stay within the range of float32."""


def spectral_hardcap(
    w: Float[Tensor, "*batch m n"], max_norm: float | Tensor, method: str = "auto"
) -> Float[Tensor, "*batch m n"]:
    """Replace every singular value `s` by `min(s, max_norm)`: the nearest matrix in the spectral ball.

    Computed as `W f(W^T W)` with `f(g) = min(1, max_norm / sqrt g)` on the smaller side, which has no
    cancellation where a singular value is close to the bound, unlike the nested matrix signs of Spectral
    clipping (SC), sections 2 and 3. In float64, unless float32 is known to suffice.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        max_norm: Cap in spectral units, a number or one per matrix; no gradient flows to it.
        method: "gram" (eigendecomposition of the small Gram matrix), "svd" (the readable version), or "auto"
            (gram).

    Returns:
        Same shape and dtype. A matrix inside the ball comes back bit for bit. Otherwise the spectral norm
        ends at or below `max_norm` in float32 and float64: the cap is lowered by what rounding to the dtype
        can add (below 1e-5); in bfloat16 and float16 within rounding. Differentiable once, with the exact
        gradient.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity, `max_norm` not positive or not
            broadcastable, unknown method.

    Example:
        >>> spectral_hardcap(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(_METHODS)}; 'auto' is 'gram'")
    bound = positive_over_batch(max_norm, w, "max_norm")
    if w.numel() == 0:
        return w.clone()
    with torch.no_grad():
        value = _hardcap(w.detach(), bound, method)
    return attach_gradient(w, value, Clip(bound))


def _hardcap(w: Tensor, bound: Tensor, method: str) -> Tensor:
    if w.shape[-2] < w.shape[-1]:
        return _hardcap(w.mT, bound, method).mT.contiguous()
    if method != "svd" and w.dtype == torch.float32 and (fast := _hardcap_single(w, bound)) is not None:
        return fast
    wide, scale = _scaled_double(w)
    bound = bound / scale
    if method == "svd":
        u, s, vh = torch.linalg.svd(wide, full_matrices=False)
        s = s[..., None, :]
        capped = (u * s.minimum(_lowered(bound, s, w.dtype))) @ vh
    else:
        g, v = torch.linalg.eigh(wide.mT @ wide)
        s = g.clamp_min(0).sqrt()[..., None, :]
        shrink = _lowered(bound, s, w.dtype) / s.clamp_min(torch.finfo(torch.float64).tiny)
        capped = wide @ ((v * shrink.clamp_max(1)) @ v.mT)
    inside = s.amax(-1, keepdim=True) <= bound
    return torch.where(inside, w, (capped * scale).to(w.dtype))


def _hardcap_single(w: Tensor, bound: Tensor) -> Tensor | None:
    """The cap of tall float32 matrices with both large products in float32; None where that is not accurate enough.

    Half the time at 2048 x 128. A float32 Gram matrix knows its eigenvalues to some 1e-6 of the largest, so no
    matrix may be near the decision (inside or outside) nor much above the cap: the usual case after a step.
    """
    low, high = _SAFE_SQUARES
    if not bool(((bound > low) & (bound < high)).all()):
        return None
    gram = w.mT @ w
    if not bool(gram.isfinite().all()):
        return None  # NaN, infinity or a square that overflowed: float64 tells them apart
    g, v = torch.linalg.eigh(gram)
    s = g.clamp_min(0).sqrt()[..., None, :]
    ratio = s.amax(-1, keepdim=True) / bound
    if bool(((ratio > _FAR_OUTSIDE) | ((ratio - 1).abs() < _UNDECIDED)).any()):
        return None
    target = bound * (1 - _UNDECIDED / 2)
    shrink = (target / s.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1)
    capped = w @ ((v * shrink.to(v.dtype)) @ v.mT)
    return capped if bool((ratio > 1).all()) else torch.where(ratio < 1, w, capped)


def spectral_normalize(w: Float[Tensor, "*batch m n"], max_norm: float | Tensor) -> Float[Tensor, "*batch m n"]:
    """Divide a matrix that is too large by its spectral norm: `w * min(1, max_norm / upper)`.

    `upper` is the largest eigenvalue of the float64 Gram matrix plus its rounding, not a power iteration,
    which stays below the norm and lets the result exceed the cap (about 10% in the runs of Training
    Transformers with Enforced Lipschitz Bounds, LT).

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        max_norm: Cap in spectral units, a number or one per matrix.

    Returns:
        Same shape and dtype, spectral norm at or below `max_norm` (bfloat16 and float16: within rounding);
        bit for bit `w` when it is inside the ball. The gradient is that of the scaling with the scale held
        constant.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity, `max_norm` not positive or not
            broadcastable.

    Example:
        >>> spectral_normalize(torch.diag(torch.tensor([4.0, 2.0])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    bound = positive_over_batch(max_norm, w, "max_norm")
    if w.numel() == 0:
        return w.clone()
    with torch.no_grad():
        wide, scale = _scaled_double(w.detach())
        gram = wide.mT @ wide if w.shape[-2] >= w.shape[-1] else wide @ wide.mT
        top = torch.linalg.eigvalsh(gram)[..., -1:, None].clamp_min(0)
        upper = (top * (1 + _EIGENVALUE_ERROR) + gram.shape[-1] * 1e-16 * top).sqrt()
        bound = bound / scale
        rounding = _rounding(w.dtype, torch.linalg.matrix_norm(wide, keepdim=True), upper)
        factor = bound / upper.clamp_min(torch.finfo(torch.float64).tiny) * (1 - rounding)
        inside = upper <= bound
    return torch.where(inside, w, (w.double() * factor).to(w.dtype))


def _scaled_double(w: Tensor) -> tuple[Tensor, Tensor]:
    """`w / scale` in float64 with entries below 1, and the power of two `scale` `(*batch, 1, 1)`."""
    wide = w.double()
    check_finite(wide.abs().amax((-2, -1)), "w")
    scale = power_of_two_scale(wide)
    return wide / scale, scale


def _rounding(dtype: torch.dtype, frobenius: Tensor, norm: Tensor) -> Tensor:
    """Relative growth of the spectral norm when every entry is rounded to `dtype`.

    `u |W|_F / |W|_2` is the worst case (entry errors are at most `u |w_ij|`). In 16 bits it would cost up to
    `sqrt(n) / 256`, so there the typical size of the error of independent roundings, `4 u`, is taken.
    """
    unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return unit * frobenius / norm.clamp_min(torch.finfo(torch.float64).tiny) + _EIGENVALUE_ERROR
    return torch.full_like(norm, 4 * unit)


def _lowered(bound: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """The cap less the rounding of the result to `dtype`; `s` are the singular values `(*batch, 1, n)`."""
    capped = torch.linalg.vector_norm(s.minimum(bound), dim=-1, keepdim=True)
    return bound * (1 - _rounding(dtype, capped, bound))
