"""An upper bound on the spectral norm that is proved in floating point, by the kernel of certificates."""

import torch
from torch import Tensor

from wellnormed.matrix._checks import Matrices, check_matrix, finite_scale
from wellnormed.proof.matrices import proved_norm


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
