"""Upper bounds on the spectral norm, proved in floating point: by the kernel of certificates, or on a device."""

import torch
from torch import Tensor

from wellnormed.matrix._checks import Matrices, as_bound, check_matrix, finite_scale
from wellnormed.matrix._symmetric import full_product
from wellnormed.proof.matrices import proved_norm, shift


def spectral_norm_upper_bound(w: Matrices) -> float | Tensor:
    """A number that the spectral norm provably does not exceed, within 1e-8 of it.

    A float64 Cholesky factorisation that completes proves it; `proof.matrices.norms_below` has the theorem. Runs on the
    CPU, where float64 is never emulated.

    Every floating dtype converts to float64 exactly, and a power of two is divided out first, so 1e-30 to 1e30 are
    alike. A single matrix gives a Python float, a batch a float64 CPU tensor of the batch shape, in plain spectral
    (l2 -> l2) units; zero and empty matrices give 0.0. Not differentiable.

    Example:
        >>> bound = spectral_norm_upper_bound(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        >>> 5.0 <= bound <= 5.0 * (1 + 1e-8)
        True
    """
    check_matrix(w, "w")
    wide = w.detach().to(device="cpu", dtype=torch.float64)
    if not wide.numel():
        return 0.0 if w.ndim == 2 else torch.zeros(w.shape[:-2], dtype=torch.float64)
    finite_scale(wide, "w")  # refuses what is not finite
    bounds = [proved_norm(matrix[None]) for matrix in wide.reshape(-1, *w.shape[-2:]).numpy()]
    return bounds[0] if w.ndim == 2 else torch.tensor(bounds, dtype=torch.float64).reshape(w.shape[:-2])


@torch.no_grad()
def spectral_norm_within(w: Matrices, upper: float | Tensor) -> Tensor:
    """Whether a proof on `w`'s device finds that the spectral norm is at most `upper`: booleans of the batch shape.

    A float64 Cholesky factorisation that completes is the proof (`proof.matrices.norms_below` has the theorem). It
    costs `m n^2 + n^3 / 3` multiplications and no eigenvalues, and needs a device whose float64 is IEEE's. The answer
    is `False` also where the norm is less than 1e-8 below `upper`. NaN and infinity are refused.

    Example:
        >>> w = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
        >>> bool(spectral_norm_within(w, 5.001)), bool(spectral_norm_within(w, 4.999))
        (True, False)
    """
    check_matrix(w, "w")
    bound = as_bound(upper, w, "upper").expand(w.shape[:-2])
    if not w.numel():
        return bound >= 0
    wide = (w if w.shape[-2] >= w.shape[-1] else w.mT).double()
    scale = finite_scale(wide, "w")
    wide, target = wide / scale, bound / scale[..., 0, 0]
    m, n = wide.shape[-2:]
    gram = full_product(wide.mT, wide)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    frobenius = diagonal.sum(-1)
    c = shift(target, m, n, frobenius, diagonal.amax(-1))
    factor, failed = torch.linalg.cholesky_ex(c[..., None, None] * torch.eye(n, dtype=c.dtype, device=c.device) - gram)
    completes = (failed == 0) & factor.isfinite().all(-1).all(-1)
    # A bound above the Frobenius norm needs no factorisation, whose numbers might overflow.
    return (bound >= 0) & (completes | (target * target > frobenius * (1 + 1e-6)) | (frobenius == 0))
