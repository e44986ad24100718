"""Optimizers that treat every parameter alike, whatever its layer: one norm for all, then the engine."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from wellnormed.norms import AssignedParameter, Assignment, Euclidean, Norm, Sign
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.routing import named


class _Uniform(ConditionalGradient):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        groups = named(params)
        entries = [AssignedParameter(n, p, self.norm_of(p), "every parameter") for g in groups for n, p in g["params"]]
        norms = Assignment(tuple(entries))
        super().__init__(groups, lr, norms=norms, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    @staticmethod
    @abstractmethod
    def norm_of(parameter: Tensor) -> Norm:
        """The norm of any parameter."""


class Signum(_Uniform):
    """The sign of the momentum, for every entry of every parameter (Bernstein et al., 2018).

    Args:
        params: Parameters, named parameters or groups of either, as any torch optimizer takes them.
        lr: How far every entry moves.
        momentum: Fraction of the buffer that is kept; 0 is signSGD.
        nesterov: See `ConditionalGradient`.
        weight_decay: Bounds every entry by `1 / weight_decay`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -0.1])
        >>> Signum([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.5000,  0.5000])
    """

    @staticmethod
    def norm_of(parameter: Tensor) -> Norm:
        return Sign(ndim=parameter.ndim)


class NormalizedSGD(_Uniform):
    """The momentum divided by its l2 norm, parameter by parameter (LMO section 4; Cutkosky and Mehta, 2020).

    Args:
        params: Parameters, named parameters or groups of either, as any torch optimizer takes them.
        lr: How far, in l2, every parameter moves.
        momentum: Fraction of the buffer that is kept.
        nesterov: See `ConditionalGradient`.
        weight_decay: Bounds the l2 norm of every parameter by `1 / weight_decay`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -4.0])
        >>> NormalizedSGD([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.3000,  0.4000])
    """

    @staticmethod
    def norm_of(parameter: Tensor) -> Norm:
        return Euclidean(ndim=parameter.ndim)
