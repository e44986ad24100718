"""The leading singular triplet of a matrix, from scratch or from the vector of the last call.

This is a thick-restart Lanczos iteration on `W^T W` (Wu and Simon, 2000). It proves no bound; `bounds` does.
`leading_maps` has the functions that move the leading singular value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.matrix._checks import Matrices, check_finite, check_matrix, finite_scale

_EXPAND = 4  # basis vectors added between two Rayleigh-Ritz tests, and so the least number of iterations
_KEEP = 8  # Ritz vectors kept at a restart: with 1 a Gaussian matrix needs 144 vectors, with 2, 4 and 8: 44, 32, 32
_MIXED_IN = 0.3
"""Share of the fixed vector in a warm start. Measured at 128 and 512, with the exact second singular vector as the
start: a share of 0.3 finds a leading value that is 5% larger in one call always, 0.1 in 11 of 16 cases, 0.001 never;
the cost is the same."""


class Triplet(NamedTuple):
    """Approximate leading singular triplet: unit vectors with `W v = s u`; all zero for a zero matrix.

    Shape: `u (*batch, m)`, `s (*batch,)`, `v (*batch, n)`.
    """

    u: Tensor
    s: Tensor
    v: Tensor


@torch.no_grad()
def leading_singular_triplet(
    w: Matrices, start: Tensor | None = None, tolerance: float = 1e-3, max_iterations: int = 128
) -> Triplet:
    """The largest singular value and its vectors, by products with `w` and its transpose only.

    An iteration is one product with each. With the default tolerance, matrices of 256 x 256 to 768 x 768 need 8
    iterations if one singular value stands out, about 24 if they are Gaussian, and half of that when started from the
    vector before a step of 1e-3 of the norm.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30; float16 and bfloat16 are computed in float32.
        start: The `v` of an earlier call, `(*batch, n)`, of any length, or zero. A fixed vector is mixed in, so that
            the iteration leaves a start that is another singular vector. With None it starts at the fixed vector.
        tolerance: Stop when `|W^T u - s v| <= tolerance s` in every matrix of the batch. Then a singular value lies
            within `tolerance s` of `s`, and if the largest exceeds the others by `gap`, `s` is exact to about
            `(tolerance s)^2 / gap`.
        max_iterations: The largest number of iterations, after which the best triplet so far is returned.

    Returns:
        `u`, `s`, `v` in `w`'s dtype, without gradients (`spectral_norm` has one). `s = |W v|` is a **lower** bound on
        the norm, within rounding, and proves nothing: `spectral_norm_upper_bound` does.

    Example:
        >>> u, s, v = leading_singular_triplet(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
        >>> s, v.abs().round(decimals=3)
        (tensor(3.), tensor([0., 1., 0.]))
    """
    check_matrix(w, "w")
    require_numbers("", {"tolerance": tolerance}, POSITIVE)
    require_numbers("", {"max_iterations": max_iterations}, POSITIVE, whole=True)
    batch, (m, n) = w.shape[:-2], w.shape[-2:]
    if start is not None and start.shape != (*batch, n):
        raise ValueError(
            f"start has shape {tuple(start.shape)}, but the leading right vectors of w {tuple(w.shape)} have "
            f"{(*batch, n)}; pass the `v` of an earlier call on matrices of this shape, or None"
        )
    if w.numel() == 0:
        return Triplet(w.new_zeros(*batch, m), w.new_zeros(batch), w.new_zeros(*batch, n))
    work = w if w.dtype == torch.float64 else w.float()
    scale = finite_scale(work, "w")
    work = work / scale
    v = _iterate(work, _first_vector(work, start), tolerance, max_iterations)
    # From here on `W v = s u` holds, whatever the rounding errors of the iteration.
    image = work @ v
    s = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
    u = image / torch.where(s > 0, s, 1)
    v = torch.where(s > 0, v, 0)
    return Triplet(u[..., 0].to(w.dtype), (s * scale)[..., 0, 0].to(w.dtype), v[..., 0].to(w.dtype))


def _first_vector(w: Tensor, start: Tensor | None) -> Tensor:
    fixed = torch.randn(w.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    fixed = (fixed / fixed.norm()).to(w)[:, None].expand(*w.shape[:-2], -1, 1)
    if start is None:
        return fixed
    warm = start.detach().to(w)[..., None]
    largest = warm.abs().amax((-2, -1), keepdim=True)
    check_finite(largest, "start")
    warm = warm / torch.where(largest > 0, largest, 1)
    warm = warm / torch.linalg.vector_norm(warm, dim=-2, keepdim=True).clamp_min(1)
    mixed = warm + _MIXED_IN * fixed
    return mixed / torch.linalg.vector_norm(mixed, dim=-2, keepdim=True)


def _iterate(w: Tensor, v: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """The unit vector `(*batch, n, 1)` of the largest Ritz value, for `w` of entries at most 1.

    `basis` is orthonormal and `image = W basis`, so the Rayleigh-Ritz matrix is `image^T image`, and all remainders lie
    along the next basis vector (Krylov-Schur form, also after a restart).
    """
    basis, image = v, w @ v
    for used in range(1, max_iterations + 1):
        remainder, size = _remainder(w, basis, image)
        if used % _EXPAND == 0 or used == max_iterations:
            values, rotation = torch.linalg.eigh(image.mT @ image)
            top = rotation[..., -1:]
            # |W^T u - s v| s = |remainder| |last entry of top|
            residual = (size * top[..., -1:, :].abs())[..., 0, 0]
            if used == max_iterations or bool((residual <= tolerance * values[..., -1]).all()):
                v = basis @ top
                break
            kept = rotation[..., -_KEEP:]
            basis, image = basis @ kept, image @ kept
        basis = torch.cat([basis, remainder], -1)
        image = torch.cat([image, w @ remainder], -1)
    return v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)


def _remainder(w: Tensor, basis: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """The part of `W^T W b` outside the basis, where b is its last vector: a unit vector, or zero; and its length."""
    vector = w.mT @ image[..., -1:]
    whole = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    for _ in range(2):  # twice is enough (Kahan; Parlett)
        vector = vector - basis @ (basis.mT @ vector)
    size = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    new = size > 16 * torch.finfo(w.dtype).eps * whole
    return torch.where(new, vector / torch.where(new, size, 1), 0), torch.where(new, size, 0)
