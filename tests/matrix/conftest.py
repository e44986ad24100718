"""The zoo of matrices every spectral function must survive, and dense float64 truths."""

import pytest
import torch


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def with_singular_values(values, m, n, seed=0, dtype=torch.float64):
    """An (m, n) matrix with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator))[0]
    return ((u * torch.as_tensor(values, dtype=torch.float64)) @ v.mT).to(dtype)


@pytest.fixture
def spectrum():
    return with_singular_values
