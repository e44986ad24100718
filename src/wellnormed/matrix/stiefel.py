"""All singular values at one value: the Stiefel manifold, and its multiples, for square and other matrices."""

from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import as_bound, check_finite, check_matrix, check_positive
from wellnormed.matrix.coefficients import CoefficientSet
from wellnormed.matrix.msign import msign


def stiefel_project(
    w: Float[Tensor, "*batch m n"],
    scale: float | Tensor = 1.0,
    coefficients: str | CoefficientSet = "you-6",
    method: str = "auto",
) -> Float[Tensor, "*batch m n"]:
    """Push every nonzero singular value to `scale`: `scale * msign(w)`, square or not (LT section 3.1).

    LT follows J. You's set, with which values end within 0.9955 and 0.9994 of `scale`. `scale` is positive, in spectral
    units, a number or one per matrix; no gradient flows to it. Everything else is as in `msign`.

    Example:
        >>> import torch
        >>> stiefel_project(torch.diag(torch.tensor([4.0, 0.5])), 2.0, method="svd").diagonal().round(decimals=4)
        tensor([2., 2.])
    """
    check_matrix(w, "w")
    size = as_bound(scale, w, "scale")
    check_positive(size, "scale")
    check_finite(size, "scale")
    return msign(w, coefficients, method) * size[..., None, None].to(w.dtype)
