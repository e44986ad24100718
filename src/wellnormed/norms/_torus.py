"""A proved bound on the l2 -> l2 norm of a convolution, from a circular one that contains it.

With `r = dilation (k - 1)`, a zero-padded convolution on `n` pixels is a compression (fewer inputs, fewer
outputs) of the circular one on a torus of `N >= n + r` pixels, where nothing wraps onto the image. Fourier transform
makes that one block diagonal, with the symbol `S(m) = sum_t W_t exp(2 pi i m t dilation / N)` for every frequency `m`
(Sedghi, Gupta and Long, ICLR 2019, theorem 6). A stride `s` that divides `N` folds the `s` frequencies that differ by
`N / s` onto each other: the blocks become `[S(m), S(m + N/s), ...] / sqrt(s)`, up to unit factors. So the largest
spectral norm of the blocks bounds the operator. With circular padding the torus is the image itself.

Each symbol is bounded by `spectral_norm_upper_bound`; to this comes the rounding of the symbol itself, for which the
library's sines and cosines are taken to be right within 2^-50.
"""

import math
from itertools import product

import torch
from torch import Tensor

from wellnormed.matrix import spectral_norm_upper_bound

_UNIT = 2.0**-53


def torus_bound(weight: Tensor, torus: list[tuple[int, int]], dilation: tuple[int, ...], groups: int) -> float:
    """Bound the circular convolution with a kernel `(d_out, d_in / groups, *k)`, hence every compression of it.

    `torus` holds the pixels, and the stride that divides them, along each dimension.
    """
    outputs, inputs, *kernel = weight.shape
    outputs //= groups
    taps = [d * torch.arange(k) for k, d in zip(kernel, dilation, strict=True)]
    flat = weight.flatten(2).movedim(-1, 0).reshape(math.prod(kernel), -1).to(torch.complex128)
    folds = math.prod(s for _, s in torus)
    counts = [n // s for n, s in torus]
    worst = 0.0
    for coarse in product(*(range(n) for n in counts)):
        if coarse > tuple(-i % n for i, n in zip(coarse, counts, strict=True)):
            continue  # the symbol of a real kernel is here the conjugate of one that was seen
        turns = torch.zeros(1, 1, dtype=torch.float64)  # (frequencies that fold onto each other, taps)
        for m, tap, (n, s) in zip(coarse, taps, torus, strict=True):
            frequencies = m + n // s * torch.arange(s)
            part = (frequencies[:, None] * tap % n).double() / n  # exact before the division
            turns = (turns[:, None, :, None] + part[:, None, :]).flatten(2).flatten(0, 1)
        angle = 2 * math.pi * turns
        symbol = torch.complex(angle.cos(), angle.sin()) @ flat
        blocks = symbol.reshape(folds, groups, outputs, inputs).permute(1, 2, 0, 3).flatten(2)
        worst = max(worst, _largest_block_bound(blocks))
    rounding = 1e-13 + 8 * (math.prod(kernel) + 8) * _UNIT  # of a symbol's entry, relative to sum_t |W_t|
    sums = weight.abs().flatten(2).sum(-1).reshape(groups, -1)
    error = math.sqrt(2) * rounding * float(torch.linalg.vector_norm(sums, dim=-1).max())
    return (worst / math.sqrt(folds) + error) * (1 + 1e-12)


def _largest_block_bound(blocks: Tensor) -> float:
    """Proved bound on the spectral norms of complex `(groups, m, n)`, through real matrices of twice the size."""
    if min(blocks.shape[1:]) == 1:  # rank one: the l2 norm, a sum of squares
        count = blocks[0].numel()
        return float(torch.linalg.vector_norm(blocks, dim=(1, 2)).max()) * (1 + 8 * (count + 8) * _UNIT)
    real = torch.cat([torch.cat([blocks.real, -blocks.imag], -1), torch.cat([blocks.imag, blocks.real], -1)], -2)
    return float(torch.as_tensor(spectral_norm_upper_bound(real)).max())
