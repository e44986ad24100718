"""The eigenvectors of `W^T W`, with an estimate of what is wrong with them: how clips come to singular values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wellnormed.matrix._symmetric import symmetric_product

_ROUNDS = 3
"""Power iterations of the estimate. An error along one direction that is three times as large as the rest has grown
by 27 then, and is seen from any start in 768 dimensions."""


class GramEigen(NamedTuple):
    """`W^T W = V diag(values) V^T` up to an error."""

    values: Tensor  # (*batch, n), ascending, not negative
    vectors: Tensor  # (*batch, n, n), the columns of V
    error: Tensor  # (*batch,) in float64: the spectral norm of what is missing, over the largest eigenvalue


def gram_eigens(w: Tensor, gram: Tensor) -> Iterator[GramEigen]:
    """Decompositions of rising accuracy and cost, for float32 matrices `(*batch, m, n)` with entries of at most 1.

    In float32 the error is measured. LAPACK's float32 vectors miss orthogonality by up to `n u` where a matrix has
    structure, since its roundings then point the same way; one Newton-Schulz step squares that.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, wide = values.clamp_min(0), w.double()
    yield GramEigen(values, vectors, _error(wide, values.double(), vectors.double()))
    vectors = 1.5 * vectors - 0.5 * (vectors @ symmetric_product(vectors.mT, vectors))
    yield GramEigen(values, vectors, _error(wide, values.double(), vectors.double()))


def wide_gram_eigen(w: Tensor) -> GramEigen:
    """The same in float64, where the error is `n u` (Higham, Accuracy and Stability, section 3.5)."""
    values, vectors = torch.linalg.eigh(symmetric_product(w.mT, w))
    unit = w.shape[-1] * torch.finfo(w.dtype).eps / 2
    return GramEigen(values.clamp_min(0), vectors, torch.full_like(values[..., 0], unit))


def _error(w: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Norm of `W^T W - V diag(values) V^T` over the largest value, by a power iteration in thin float64 products."""
    start = torch.randn(w.shape[-1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    x, size = start.to(w.device).expand(*w.shape[:-2], -1, 1), torch.linalg.vector_norm(start)
    for _ in range(_ROUNDS):
        x = x / size.clamp_min(torch.finfo(w.dtype).tiny)
        x = w.mT @ (w @ x) - vectors @ (values[..., None] * (vectors.mT @ x))
        size = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return size[..., 0, 0] / values[..., -1].clamp_min(torch.finfo(w.dtype).tiny)


def largest_eigenvalue_estimate(g: Tensor) -> Tensor:
    """From below: two power iterations from the longest row of semidefinite `(*batch, n, n)`."""
    lengths = torch.linalg.vector_norm(g, dim=-1)
    start = lengths.argmax(-1)[..., None, None].expand(*g.shape[:-1], 1)
    v = g.gather(-1, start)
    for _ in range(2):
        v = g @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny))
    return torch.linalg.vector_norm(v, dim=-2)[..., 0]
