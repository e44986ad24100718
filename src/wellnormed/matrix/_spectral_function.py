"""Exact gradient of `F(W) = U f(S) V^T` for odd `f`, shared by the matrix sign and the hard cap.

With `M = U^T G V`, the adjoint of the derivative applies to `G` (Higham, Functions of Matrices, chapter 3;
Noferini 2017)

    core_ij = [f(s_i) - f(s_j)] / (s_i - s_j) * (M_ij + M_ji) / 2  +  [f(s_i) + f(s_j)] / (s_i + s_j) * (M_ij
    - M_ji) / 2

plus `f(s)/s` on what lies outside the column space of U and V. Every quotient has a finite limit that each
function below states, so repeated and zero singular values need no special case.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class OddFunction(Protocol):
    """An odd scalar function through its quotients, on singular values in float64."""

    def symmetric(self, s: Tensor, t: Tensor) -> Tensor:
        """`(f(s) - f(t)) / (s - t)`, or its limit."""
        ...

    def antisymmetric(self, s: Tensor, t: Tensor) -> Tensor:
        """`(f(s) + f(t)) / (s + t)`, or its limit; at `t = s` it is the ratio `f(s) / s`."""
        ...


class Sign:
    """`f(s) = 1` for `s > 0` and `f(0) = 0`: the polar factor.

    The derivative is infinite at zero; there, the one along matrices of constant rank is taken (zero inside
    the null space), which is finite and is the gradient of the pseudo-inverse form `W (W^T W)^{-1/2}`.
    """

    def symmetric(self, s: Tensor, t: Tensor) -> Tensor:
        one_zero = (s > 0) != (t > 0)
        return torch.where(one_zero, 1 / torch.where(one_zero, s + t, 1), 0)

    def antisymmetric(self, s: Tensor, t: Tensor) -> Tensor:
        total = s + t
        value = (s > 0).to(s.dtype) + (t > 0).to(s.dtype)
        return value / torch.where(total > 0, total, 1)


class Clip:
    """`f(s) = min(s, bound)`; at `s = bound` the derivative is that of the identity.

    Args:
        bound: float64 tensor `(*batch, 1, 1)`, in the units of the singular values.
    """

    def __init__(self, bound: Tensor) -> None:
        self.bound = bound

    def symmetric(self, s: Tensor, t: Tensor) -> Tensor:
        gap = s - t
        mixed = (s > self.bound) != (t > self.bound)
        ratio = (s.minimum(self.bound) - t.minimum(self.bound)) / torch.where(mixed, gap, 1)
        both_inside = (s <= self.bound) & (t <= self.bound)
        return torch.where(mixed, ratio, both_inside.to(s.dtype))

    def antisymmetric(self, s: Tensor, t: Tensor) -> Tensor:
        total = s + t
        value = s.minimum(self.bound) + t.minimum(self.bound)
        return torch.where(total > 0, value / torch.where(total > 0, total, 1), 1)


def zero_tolerance(s: Tensor, m: int, n: int) -> Tensor:
    """Singular values at or below this are rounding of zero, by the rule of `torch.linalg.matrix_rank`."""
    return max(m, n) * torch.finfo(s.dtype).eps * s[..., :1]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, function: OddFunction) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # pyrefly: ignore
        (x,) = ctx.saved_tensors
        return apply_derivative(x, gradient, ctx.function), None, None


def attach_gradient(x: Tensor, value: Tensor, function: OddFunction) -> Tensor:
    """Give `value`, computed from `x` by any method, the exact gradient of `U f(S) V^T`.

    Args:
        x: Matrices `(*batch, m, n)`.
        value: `F(x)`, same shape and dtype, without a graph.
        function: The quotients of `f`.

    Returns:
        `value`, differentiable once with respect to `x`.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    return _WithGradient.apply(x, value, function)  # pyrefly: ignore


def apply_derivative(x: Tensor, direction: Tensor, function: OddFunction) -> Tensor:
    """Derivative of `F` at `x` along `direction`; self-adjoint, so it serves forward and backward.

    Args:
        x: Matrices `(*batch, m, n)`.
        direction: Same shape.
        function: The quotients of `f`.

    Returns:
        Same shape and dtype as `direction`; computed by a float64 SVD.
    """
    if x.numel() == 0:
        return torch.zeros_like(direction)
    if x.shape[-2] < x.shape[-1]:
        return apply_derivative(x.mT, direction.mT, function).mT
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = torch.where(s > zero_tolerance(s, *x.shape[-2:]), s, 0)
    g = direction.double() @ vh.mT
    m = u.mT @ g
    row, column = s[..., :, None], s[..., None, :]
    core = function.symmetric(row, column) * (m + m.mT) / 2 + function.antisymmetric(row, column) * (m - m.mT) / 2
    outside = (g - u @ m) * function.antisymmetric(column, column)
    return ((u @ core + outside) @ vh).to(direction.dtype)
