"""Matrices with known singular values, for every test of this room."""

import torch


def normal(*shape, seed=0, dtype=torch.float32):
    """Gaussian entries, the same in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_singular_values(values, m, n, seed=0, dtype=torch.float64):
    """An (m, n) matrix with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator))[0]
    return ((u * torch.as_tensor(values, dtype=torch.float64)) @ v.mT).to(dtype)


def polar(x):
    """The exact sign."""
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def error(value, truth):
    """The largest spectral norm of a difference."""
    return float(torch.linalg.matrix_norm(value.double() - truth, 2).max())
