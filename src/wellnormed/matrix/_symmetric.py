"""Products of symmetric matrices, of which a CPU computes one triangle."""

import torch
from torch import Tensor

CALL = 2**21
"""The multiplications that a processor does while Python starts one product: 10 microseconds at 2e11 a second. Using
more products to save operations, or 16 bits to save time, pays only for larger products: of matrices from side 128 on,
and in 16 bits of batches, as of eight of side 64. The number is assumed and not measured at run time, so that machines
of one kind compute the same bits, whatever else they do."""
_PANELS = 4
_WIDE_ENOUGH = round((32 * _PANELS * CALL) ** (1 / 3))
"""The side from which panels of columns are used on a CPU. Starting the product of a panel, `n^3 / 4` multiplications,
then takes 1/32 of its time, which is little beside the 3/8 of all operations that are saved. (Measured on one machine,
in float32: no time is saved at 512, a tenth at 768, and three tenths for a Gram matrix of four times as many rows.)"""


def symmetric_product(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """`beta c + alpha a b` of `(*batch, n, k)` and `(*batch, k, n)`, where both terms are symmetric up to rounding.

    On a CPU, four panels of columns are computed from their diagonal block down, 5/8 of the operations, and mirrored.
    Elsewhere, for small sides and under `torch.compile`, it is the full product. With a `c`, at most one batch
    dimension is allowed.
    """
    n = a.shape[-2]
    if n < _WIDE_ENOUGH or a.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return full_product(a, b, c, beta=beta, alpha=alpha)
    value = a.new_empty(*a.shape[:-1], n)
    panel = -(-n // _PANELS)
    for i in range(0, n, panel):
        j = min(i + panel, n)
        start = None if c is None else c[..., i:, i:j]
        value[..., i:, i:j] = full_product(a[..., i:, :], b[..., i:j], start, beta=beta, alpha=alpha)
        value[..., i:j, j:] = value[..., j:, i:j].mT
    return value


def full_product(a: Tensor, b: Tensor, c: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`beta c + alpha a b` in one pass over memory; a `c` allows at most one batch dimension."""
    if c is None:
        value = torch.bmm(a, b) if a.ndim == 3 else a @ b  # which `@` does after five views
        return value if alpha == 1 else alpha * value
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(c, a, b, beta=beta, alpha=alpha)


def times_symmetric(x: Tensor, s: Tensor, c: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`beta c + alpha x s` for symmetric `s`, in the memory layout of `x`, so that no transposed view is copied."""
    if not x.is_contiguous() and x.mT.is_contiguous():
        return full_product(s, x.mT, None if c is None else c.mT, beta=beta, alpha=alpha).mT
    return full_product(x, s, c, beta=beta, alpha=alpha)
