"""Published optimizers: choices of momentum, norm and step rule, never a `step` of their own."""

from collections.abc import Mapping
from dataclasses import replace

from wellnormed.norms import Assignment, PerHead, Spectral
from wellnormed.norms.base import Norm
from wellnormed.optim.conditional_gradient import ConditionalGradient


class Scion(ConditionalGradient):
    """Scion (LMO, algorithms 1 and 2): every parameter moves by the oracle of its own norm.

    Args:
        assignment: What `assign_norms` returned.
        lr: Step size in units of each parameter's norm; with `unconstrained=False` a convex weight in [0, 1].
        momentum: Fraction of the buffer that is kept; the paper's alpha is `1 - momentum`.
        nesterov: See `ConditionalGradient`; the paper has none.
        unconstrained: uSCG if True, else SCG, which keeps every weight in its ball of `radius`.
        radius: Radius of the ball.
        lr_scales: Name pattern -> factor on `lr`.

    Example:
        >>> import torch, wellnormed as wn
        >>> print(Scion(wn.assign_norms(torch.nn.Linear(2, 2, bias=False)), lr=0.1))
        Scion(lr=0.1, momentum=0.9, nesterov=False, step_rule=unconstrained, radius=1.0)
        weight  (2, 2)  Spectral(coefficients='you-5-nanogpt', method='auto')  nn.Linear
    """

    def __init__(
        self,
        assignment: Assignment,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        unconstrained: bool = True,
        radius: float = 1.0,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        rule = "unconstrained" if unconstrained else "constrained"
        super().__init__(
            assignment,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            step_rule=rule,
            radius=radius,
            lr_scales=lr_scales,
        )


class Muon(ConditionalGradient):
    """Muon: Nesterov momentum and Jordan's five Newton-Schulz steps for every spectral norm of the assignment.

    Steps are measured in the RMS -> RMS norm (`lr sqrt(d_out / d_in)` times a near-orthogonal matrix), as in Modular
    Duality; the other norms of the assignment keep their own oracles.

    Args:
        assignment: What `assign_norms` returned.
        lr: Step size in units of each parameter's norm.
        momentum: Fraction of the buffer that is kept.
        nesterov: Look one step ahead.
        coefficients: Set of the registry.
        lr_scales: Name pattern -> factor on `lr`.
    """

    def __init__(
        self,
        assignment: Assignment,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        coefficients: str = "jordan-5",
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        assigned = tuple(replace(a, norm=_with_coefficients(a.norm, coefficients)) for a in assignment)
        super().__init__(
            Assignment(assigned, assignment.frozen),
            lr,
            momentum=momentum,
            nesterov=nesterov,
            lr_scales=lr_scales,
        )


def _with_coefficients(norm: Norm, coefficients: str) -> Norm:
    if isinstance(norm, PerHead):
        return replace(norm, inner=replace(norm.inner, coefficients=coefficients))
    return replace(norm, coefficients=coefficients) if isinstance(norm, Spectral) else norm
