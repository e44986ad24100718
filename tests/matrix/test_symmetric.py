"""One triangle of a symmetric product is all of it."""

import pytest
import torch

from wellnormed.matrix._symmetric import _WIDE_ENOUGH, full_product, symmetric_product, times_symmetric

from .conftest import normal


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():  # where autograd records, the product is the plain one
        yield


@pytest.mark.parametrize(
    ("n", "batch"),
    [(1, (2, 2)), (_WIDE_ENOUGH - 1, ()), (_WIDE_ENOUGH, (1,)), (_WIDE_ENOUGH + 1, (1, 2)), (_WIDE_ENOUGH + 45, ())],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_symmetric_product_is_the_product(n, batch, transposed):
    x = normal(*batch, n, 40, dtype=torch.float64).mT if transposed else normal(*batch, 40, n, dtype=torch.float64)
    gram = symmetric_product(x.mT, x)
    torch.testing.assert_close(gram, x.mT @ x, rtol=1e-13, atol=1e-12)  # forty terms of order 1, summed in any order
    gram = gram.flatten(0, -3) if gram.ndim > 3 else gram  # with a third term, one batch dimension
    affine = symmetric_product(gram, gram, gram, beta=0.5, alpha=-2.0)
    expected = 0.5 * gram - 2 * gram @ gram
    torch.testing.assert_close(affine, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert affine.is_contiguous()


def test_panels_save_operations():
    """What is above the diagonal blocks is copied from below: a wrong upper triangle of `b` is never read for it."""
    a = normal(_WIDE_ENOUGH, _WIDE_ENOUGH)
    a = a + a.mT
    b, last = a.clone(), 3 * -(-_WIDE_ENOUGH // 4)
    b[:, last:] = float("nan")  # the last panel's columns, for entries (i, j >= last) of the product with i < last
    value = symmetric_product(a, b)
    assert not value[:last, :last].isnan().any()
    assert not value[:last, last:].isnan().any()
    assert value[last:, last:].isnan().all()


def test_autograd_goes_through_the_plain_product():
    x = normal(300, 8, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        symmetric_product(x, x.mT).square().sum().backward()
    torch.testing.assert_close(x.grad, 4 * x @ x.mT @ x)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_times_symmetric_keeps_the_layout(batch):
    s = normal(*batch, 12, 12, dtype=torch.float64)
    s = s + s.mT
    for x in (normal(*batch, 20, 12, dtype=torch.float64), normal(*batch, 12, 20, dtype=torch.float64).mT):
        value = times_symmetric(x, s, x, beta=2.0, alpha=-1.0)
        torch.testing.assert_close(value, full_product(x, s, x, beta=2.0, alpha=-1.0))
        assert value.stride() == x.stride()
