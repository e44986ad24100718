"""Clips of the singular values, in plain spectral (l2 -> l2) units: caps, floors, bands and clipped weight decay.

They are exact by default; the methods are in `_clip_methods`. Units of a layer (RMS -> RMS), schedules and promises
belong to `norms` and `constraints`. SC is Spectral clipping (Cesista, 2025); its listings have the same defaults.
"""

import math
from functools import partial

import torch
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed._inputs import require_choice, require_numbers
from wellnormed.matrix import _clip_methods
from wellnormed.matrix._checks import (
    OTHER_METHODS,
    Matrices,
    as_bound,
    check_matrix,
    check_positive,
    check_share,
    fails,
    shown,
    to_check,
)
from wellnormed.matrix._spectral_function import Clip, differentiable

METHODS = ("auto", "gram", "products")


def spectral_clip(
    w: Matrices, lower: float | Tensor = -1.0, upper: float | Tensor = 1.0, method: str = "auto"
) -> Matrices:
    """Clip every nonzero singular value to `[lower, upper]` (SC definition 1).

    The other functions of this module are special cases of this one; its statements on results and gradients hold for
    them too. The page on matrix functions compares the methods in cost and error.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        lower: Least singular value, a number or one per matrix; a negative number counts as 0. Zero singular values
            have no directions to be raised in, and stay zero.
        upper: Largest singular value, positive, `inf` for none, a number or one per matrix.
        method: "gram" uses the smaller Gram matrix, in float32 where a check finds that accurate, else in float64, or
            an SVD. "products" uses matrix products alone if there is no floor and the norm is at most about 1.9 caps,
            else "gram". "auto" is "gram" on a CPU and "products" elsewhere. While a CUDA graph is recorded, the norm is
            not checked, and the result for a matrix further above its cap is arbitrary.

    Returns:
        Same shape and dtype. The error is at most 5e-6 of the largest singular value in float32 and 1e-12 in float64,
        and so is the relative excess over `upper`; bfloat16 and float16 add the rounding of the result. A floor
        magnifies the rounding of float64, in every dtype: if `s` is the least singular value that it raises, it adds
        an error of `max(m, n) 2^-52 lower / s` of the largest one, as an SVD does, but nothing to the excess. Values at
        or below `max(m, n) 2^-52` of the largest one count as zero. A matrix that is within the bounds by more than
        these errors is returned bit for bit. The gradient (reverse mode, forward mode once, `torch.func.vmap`) is
        exact, whatever the method; none flows to the bounds.

    Example:
        >>> w = torch.diag(torch.tensor([4.0, 0.5, 0.1]))
        >>> spectral_clip(w, 0.25, 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000, 0.2500])
    """
    return _clipped(w, lower, upper, 1.0, method)


def spectral_hardcap(
    w: Matrices, upper: float | Tensor = 1.0, method: str = "auto", *, most: float = math.inf, blur: float = 0.0
) -> Matrices:
    """Replace every singular value `s` by `min(s, upper)`: the nearest matrix in the spectral ball (SC section 3.3).

    The method "products" takes 104 `n^3` operations for a square matrix, and 44 with `most=1.1` and `blur=0.02`, which
    is enough where a cap leaves room for some steps, as `HardCap(every=8)` does. Other methods ignore `most` and
    `blur`.

    Args:
        w: As in `spectral_clip`, like all results and errors.
        upper: Largest singular value, positive, `inf` for none, a number or one per matrix.
        method: As in `spectral_clip`.
        most: A known bound on the singular values of `w`, in units of `upper`. A value that exceeds it may stay above
            `upper`.
        blur: From 0 to 1. Singular values above `(1 - blur) * upper` may end anywhere between there and `upper`.

    Example:
        >>> spectral_hardcap(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    require_numbers("", {"most": most, "blur": blur})
    if not most > 0:
        raise ValueError(f"most={most} must be positive; leave it out if no bound is known")
    if not 0 <= blur < 1:
        raise ValueError(f"blur={blur} must be at least 0 and less than 1; 0.02 is usual, and 0 is exact")
    return _clipped(w, 0.0, upper, 1.0, method, most=most, blur=blur)


def spectral_relu(w: Matrices, lower: float | Tensor = 1.0, method: str = "auto") -> Matrices:
    """Replace every nonzero singular value `s` by `max(s, lower)` (SC section 3.2).

    Everything else is as in `spectral_clip`, including the larger error for small singular values. Errors are relative
    to the larger of `lower` and the largest singular value.

    Example:
        >>> spectral_relu(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=5)
        tensor([4., 1.])
    """
    return _clipped(w, lower, torch.inf, 1.0, method)


def spectral_clipped_weight_decay(
    w: Matrices, upper: float | Tensor = 1.0, decay: float | Tensor = 0.5, method: str = "auto"
) -> Matrices:
    """Decay only what exceeds `upper`: `s -> upper + (1 - decay)(s - upper)` above it (SC section 3.4).

    It does not bound the norm by itself; with steps of bounded norm it has an equilibrium, see
    `clipped_weight_decay_equilibrium`. `decay`, a number or one per matrix, is the part of the excess that is removed,
    from 0 (`w` is returned bit for bit) to 1 (`spectral_hardcap`); SC's decoupled form is `decay * lr`. Everything else
    is as in `spectral_clip`.

    Example:
        >>> spectral_clipped_weight_decay(torch.diag(torch.tensor([4.0, 0.5])), 1.0, 0.5).diagonal()
        tensor([2.5000, 0.5000])
    """
    return _clipped(w, 0.0, upper, decay, method)


def _clipped(
    w: Tensor, lower: float | Tensor, upper: float | Tensor, decay: float | Tensor, method: str, **known: float
) -> Tensor:
    check_matrix(w, "w")
    require_choice("method", method, METHODS, OTHER_METHODS)
    bounds = as_bound(lower, w, "lower").clamp(min=0), as_bound(upper, w, "upper"), as_bound(decay, w, "decay")
    if method == "auto":
        method = "gram" if w.device.type == "cpu" else "products"
    raises = isinstance(lower, Tensor) or lower > 0  # a tensor's values are not read here
    clip = partial(in_batches, partial(_clip_methods.clip, method=method, raises=raises, **known))

    def compute(w: Tensor, *bounds: Tensor) -> Tensor:
        least, most, share = map(to_check, (lower, upper, decay), bounds)
        check_positive(most, "upper")
        if fails((least <= most) & (least < math.inf)):
            raise ValueError(
                f"lower={shown(least)} must be finite and at most upper={shown(most)}; "
                "choose a lower bound that is not above the upper one"
            )
        check_share(share, "decay", "the excess")
        return clip(w, *bounds) if w.numel() else w.clone()

    return differentiable(w, compute, Clip, *bounds)
