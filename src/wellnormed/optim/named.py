"""Published optimizers: choices of momentum, norm and step rule, never a `step` of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch.distributed import ProcessGroup

from wellnormed.norms import Assignment
from wellnormed.norms.base import Norm
from wellnormed.norms.spectral import Scaling
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
        weight_decay: With `unconstrained=True`, bounds every norm by `overshoot * radius / weight_decay`.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
        memory: "gradient" is the paper's memory-light form, without any state.
        process_group: See `ConditionalGradient`.

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
        process_group: ProcessGroup | None = None,
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
            process_group=process_group,
        )


class Muon(ConditionalGradient):
    """Muon: Nesterov momentum and Jordan's five Newton-Schulz steps for every spectral norm of the assignment.

    With `assign_norms(model, recipe="muon")` it is `torch.optim.Muon` on hidden matrices and AdamW on the rest; with
    another recipe the other norms keep their own oracles.

    Args:
        params: What `assign_norms` returned, or parameters as any torch optimizer takes them, with `norms`.
        lr: Step size in units of each parameter's norm.
        norms: The assignment, when `params` is not one.
        momentum: Fraction of the buffer that is kept.
        nesterov: Look one step ahead.
        weight_decay: Fraction of the weight, per unit of learning rate, removed before the step.
        adjust_lr_fn: The unit of a spectral step: None for the assignment's own, `sqrt(d_out / d_in)` (MD);
            "original" for `max(1, sqrt(d_out / d_in))` (Jordan; torch's default), "match_rms_adamw" for
            `0.2 sqrt(max(d_out, d_in))` (Liu et al., 2025). Constraints and certificates then measure in that unit.
        coefficients: Set of the registry.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
        process_group: See `ConditionalGradient`.
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
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        coefficients: str = "jordan-5",
        lr_scales: Mapping[str, float] | None = None,
        adamw: AdamWSettings | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        groups, assignment = resolve(params, norms)
        if adjust_lr_fn not in (None, *_SCALINGS):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} must be None or one of {', '.join(_SCALINGS)}")
        assigned = tuple(replace(a, norm=_adjusted(a.norm, coefficients, adjust_lr_fn)) for a in assignment)
        super().__init__(
            groups,
            lr,
            norms=Assignment(assigned, assignment.frozen),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            lr_scales=lr_scales,
            adamw=adamw,
            process_group=process_group,
        )


_SCALINGS: dict[str, Scaling] = {"original": "pixels", "match_rms_adamw": "match-rms-adamw"}


def _adjusted(norm: Norm | None, coefficients: str, adjust_lr_fn: str | None) -> Norm | None:
    if norm is None:
        return None
    norm = norm.with_coefficients(coefficients)
    return norm if adjust_lr_fn is None else norm.with_scaling(_SCALINGS[adjust_lr_fn])
