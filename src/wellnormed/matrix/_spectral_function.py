"""Exact derivatives of `F(W) = U f(S) V^T`, shared by the matrix sign, the clips and the caps.

With `M = U^T G V`, the derivative of `F` along `G` (its own adjoint, so it serves forward and reverse mode) is
`U (core + outside) V^T` (Higham, Functions of Matrices, chapter 3; Noferini 2017), where

    core_ij = [f(s_i) - f(s_j)] / (s_i - s_j) * (M_ij + M_ji) / 2
            + [f(s_i) + f(s_j)] / (s_i + s_j) * (M_ij - M_ji) / 2

and `outside`, the part of G outside the column spaces of U and V, is multiplied by `f(s)/s`. Each function below states
the finite limit of every quotient, so repeated and zero singular values need no special case.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed._precision import all_digits


class Derivative(ABC):
    """The derivative of a function of matrices, made from the tensors (bounds) that the function depends on."""

    def __init__(self, *bounds: Tensor) -> None:  # noqa: B027
        """Subclasses whose derivative depends on the bounds keep them."""

    @abstractmethod
    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Derivative at `x`, `(*batch, m, n)`, along a tangent of the same shape."""

    @abstractmethod
    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The adjoint of `along`, applied to a gradient of the shape of the function's value."""


class SpectralFunction(Derivative):
    """A function of the singular values, linear in pieces; its derivative is its own adjoint."""

    @abstractmethod
    def pieces(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For falling `s`, `(*batch, k)`: `f(s)`, its slope, and the number of the linear piece on which `s` lies.

        A zero lies on a piece of its own, where the slope is that of the derivative inside the null space.
        """

    def quotients(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Symmetric and antisymmetric, `(*batch, k, k)`, and `f(s)/s`, of falling `s`, `(*batch, k)`."""
        value, slope, piece = self.pieces(s)
        gap, total = s[..., :, None] - s[..., None, :], s[..., :, None] + s[..., None, :]
        differs = (piece[..., :, None] != piece[..., None, :]) & (gap != 0)
        ratio = (value[..., :, None] - value[..., None, :]) / torch.where(differs, gap, 1)
        symmetric = torch.where(differs, ratio, slope[..., :, None])
        ratio = (value[..., :, None] + value[..., None, :]) / torch.where(total > 0, total, 1)
        antisymmetric = torch.where(total > 0, ratio, slope[..., :, None])
        return symmetric, antisymmetric, antisymmetric.diagonal(dim1=-2, dim2=-1)

    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        """The derivative in the dtype of the tangent, by a float64 SVD."""
        if x.numel() == 0:
            return torch.zeros_like(tangent)
        if x.shape[-2] < x.shape[-1]:
            return self.along(x.mT, tangent.mT).mT
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        s = torch.where(s > zero_tolerance(s[..., :1], *x.shape[-2:]), s, 0)
        g = tangent.double() @ vh.mT
        m = u.mT @ g
        symmetric, antisymmetric, ratio = self.quotients(s)
        core = symmetric * (m + m.mT) / 2 + antisymmetric * (m - m.mT) / 2
        outside = (g - u @ m) * ratio[..., None, :]
        return ((u @ core + outside) @ vh).to(tangent.dtype)

    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        return self.along(x, gradient)


class Clip(SpectralFunction):
    """`f(0) = 0`, `f(s) = lower` below `lower`, `s` up to `upper`, then `upper + (1 - decay)(s - upper)`.

    At a corner the derivative is that of the identity, unless `lower = upper`. With `lower > 0` the function jumps at
    zero, where its derivative is infinite. There the derivative along matrices of constant rank is taken (zero inside
    the null space): it is finite, and the gradient of the pseudo-inverse form `W (W^T W)^{-1/2}`. All three bounds are
    float64 tensors that broadcast to the batch.
    """

    def __init__(self, lower: Tensor, upper: Tensor, decay: Tensor) -> None:
        self.lower, self.upper, self.decay = (bound[..., None] for bound in (lower, upper, decay))

    def values(self, s: Tensor) -> Tensor:
        """`f(s)`, for `s` of shape `(*batch, k)`."""
        clipped = s.maximum(self.lower).minimum(self.upper) + (1 - self.decay) * (s - self.upper).clamp_min(0)
        return torch.where(s > 0, clipped, 0)

    def pieces(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        band = (s >= self.lower) & (self.lower < self.upper)
        slope = torch.where(s > self.upper, 1 - self.decay, band.to(s.dtype))
        return self.values(s), slope, (s > 0).int() + (s >= self.lower).int() + (s > self.upper).int()

    def quotients(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        symmetric, antisymmetric, ratio = super().quotients(s)
        # next to a corner the difference cancels; every slope but that of the jump lies between 0 and 1
        both = (s[..., :, None] > 0) & (s[..., None, :] > 0)
        return torch.where(both, symmetric.clamp(0, 1), symmetric), antisymmetric, ratio


class Sign(SpectralFunction):
    """`f = 1` for nonzero singular values, and `f(0) = 0`.

    At its jump at zero, the derivative along matrices of constant rank is taken, as in `Clip`.
    """

    def pieces(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (s > 0).to(s.dtype), torch.zeros_like(s), s > 0


def zero_tolerance(largest: Tensor, m: int, n: int) -> Tensor:
    """Singular values at or below this count as zero, as in `torch.linalg.matrix_rank`."""
    return max(m, n) * torch.finfo(largest.dtype).eps * largest


def differentiable(x: Tensor, compute: Callable[..., Tensor], derivative: type[Derivative], *bounds: Tensor) -> Tensor:
    """`compute(x, *bounds)`, whose derivative is the exact `derivative(*bounds)`, whatever method computes the value.

    It supports reverse mode, forward mode once, and `torch.func.vmap` over `x` and the bounds: `compute` gets a batch
    of plain tensors, whose values it may read. Second derivatives (reverse over reverse, forward over reverse)
    differentiate the SVD of the first: they are right where singular values are distinct and not zero, NaN elsewhere.
    Forward over forward mode gives zero, since torch switches forward mode off in custom functions. The result of
    `compute` starts with the batch dimensions of `x`, to which the bounds broadcast; no gradient flows to the bounds.
    """
    if not torch.compiler.is_compiling():
        if _nobody_differentiates(x):  # an autograd function takes 40 microseconds more
            return _Exact.forward(x, compute, derivative, *bounds)
        return _Exact.apply(x, compute, derivative, *bounds)  # pyrefly: ignore
    # The compiler does not trace custom forward-mode and vmap rules, so only reverse mode is supported there.
    with torch.no_grad():
        value = compute(x.detach(), *bounds)
    if torch.is_grad_enabled() and x.requires_grad:
        return _ReverseOnly.apply(x, value, derivative, *bounds)  # pyrefly: ignore
    return value


def _nobody_differentiates(x: Tensor) -> bool:
    """Whether x is a plain tensor: without a gradient or a tangent, and in no transformation such as `vmap`."""
    asked = torch.is_grad_enabled() and x.requires_grad
    plain = not asked and not torch._C._are_functorch_transforms_active()
    return plain and torch.autograd.forward_ad.unpack_dual(x).tangent is None


class _ReverseOnly(torch.autograd.Function):
    @staticmethod
    def forward(x, value, derivative, *bounds):  # pyrefly: ignore
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):  # pyrefly: ignore
        x, _, derivative, *bounds = inputs
        ctx.save_for_backward(x, *bounds)
        ctx.derivative = derivative

    @staticmethod
    def backward(ctx, gradient):  # pyrefly: ignore
        x, *bounds = ctx.saved_tensors
        return ctx.derivative(*bounds).adjoint(x, gradient), None, None, *(None for _ in bounds)


class _Exact(_ReverseOnly):
    @staticmethod
    def forward(x, compute, derivative, *bounds):  # pyrefly: ignore
        with all_digits():
            value = compute(x, *bounds)
        return value.clone() if value is x else value.contiguous()

    @staticmethod
    def setup_context(ctx, inputs, output):  # pyrefly: ignore
        _ReverseOnly.setup_context(ctx, inputs, output)
        x, _, _, *bounds = inputs
        ctx.save_for_forward(x, *bounds)

    @staticmethod
    def jvp(ctx, tangent, *_):  # pyrefly: ignore
        x, *bounds = ctx.saved_tensors
        return ctx.derivative(*bounds).along(x, tangent).contiguous()  # the layout of the value, as torch demands

    @staticmethod
    def vmap(info, in_dims, x, compute, derivative, *bounds):  # pyrefly: ignore
        x_dim, _, _, *bound_dims = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        moved = []
        for bound, dim in zip(bounds, bound_dims, strict=True):
            if dim is not None:
                bound = bound.movedim(dim, 0)
                padding = (1,) * (x.ndim - 2 - bound.ndim)
                bound = bound.reshape(bound.shape[0], *padding, *bound.shape[1:])
            moved.append(bound)
        return _Exact.apply(x, compute, derivative, *moved), 0
