"""Published optimizers: choices of momentum, norm and step rule, never a `step` of their own."""

from collections.abc import Mapping
from dataclasses import replace

from wellnormed.norms import Assignment, PerHead, Spectral
from wellnormed.norms.base import Norm
from wellnormed.optim.conditional_gradient import ConditionalGradient, Memory
from wellnormed.optim.fallback import AdamWSettings
from wellnormed.optim.routing import Params, resolve


class Scion(ConditionalGradient):
    """Scion (LMO, algorithms 1 and 2): every parameter moves by the oracle of its own norm.

    Args:
        params: What `assign_norms` returned, or parameters as any torch optimizer takes them, with `norms`.
        lr: Step size in units of each parameter's norm; with `unconstrained=False` a convex weight in [0, 1].
        norms: The assignment, when `params` is not one.
        momentum: Fraction of the buffer that is kept; the paper's alpha is `1 - momentum`.
        nesterov: See `ConditionalGradient`; the paper has none.
        unconstrained: uSCG if True, else SCG, which keeps every weight in its ball of `radius`.
        radius: Radius of the ball.
        weight_decay: With `unconstrained=True`, bounds every norm by `radius / weight_decay`.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
        memory: "gradient" is the paper's memory-light form, without any state.

    Example:
        >>> import torch, wellnormed as wn
        >>> print(Scion(wn.assign_norms(torch.nn.Linear(2, 2, bias=False)), lr=0.1))
        Scion(lr=0.1, momentum=0.9, nesterov=False, step_rule=unconstrained, radius=1.0)
        weight  (2, 2)  ...
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        norms: Assignment | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        unconstrained: bool = True,
        radius: float = 1.0,
        weight_decay: float = 0.0,
        lr_scales: Mapping[str, float] | None = None,
        adamw: AdamWSettings | None = None,
        memory: Memory = "buffer",
    ) -> None:
        super().__init__(
            params,
            lr,
            norms=norms,
            momentum=momentum,
            nesterov=nesterov,
            step_rule="unconstrained" if unconstrained else "constrained",
            radius=radius,
            weight_decay=weight_decay,
            lr_scales=lr_scales,
            adamw=adamw,
            memory=memory,
        )


class Muon(ConditionalGradient):
    """Muon: Nesterov momentum and Jordan's five Newton-Schulz steps for every spectral norm of the assignment.

    Steps are measured in the RMS -> RMS norm (`lr sqrt(d_out / d_in)` times a near-orthogonal matrix), as in Modular
    Duality; the other norms of the assignment keep their own oracles, and what has none is left to AdamW
    (`assign_norms(model, recipe="muon")`).

    Args:
        params: What `assign_norms` returned, or parameters as any torch optimizer takes them, with `norms`.
        lr: Step size in units of each parameter's norm.
        norms: The assignment, when `params` is not one.
        momentum: Fraction of the buffer that is kept.
        nesterov: Look one step ahead.
        weight_decay: Fraction of the weight, per unit of learning rate, removed before the step.
        coefficients: Set of the registry.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.02,
        *,
        norms: Assignment | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        coefficients: str = "jordan-5",
        lr_scales: Mapping[str, float] | None = None,
        adamw: AdamWSettings | None = None,
    ) -> None:
        groups, assignment = resolve(params, norms)
        assigned = tuple(replace(a, norm=_with_coefficients(a.norm, coefficients)) for a in assignment)
        super().__init__(
            groups,
            lr,
            norms=Assignment(assigned, assignment.frozen),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            lr_scales=lr_scales,
            adamw=adamw,
        )


def _with_coefficients(norm: Norm, coefficients: str) -> Norm:
    if isinstance(norm, PerHead):
        return replace(norm, inner=replace(norm.inner, coefficients=coefficients))
    return replace(norm, coefficients=coefficients) if isinstance(norm, Spectral) else norm
