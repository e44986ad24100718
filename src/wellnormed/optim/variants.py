"""Optimizers of the assignment's norms with another step rule than Scion's."""

from collections.abc import Mapping

from torch.distributed import ProcessGroup

from wellnormed.norms import Assignment
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.fallback import AdamWSettings
from wellnormed.optim.routing import Params


class Almond(ConditionalGradient):
    """ALMOND: averages what the oracle returns instead of the gradients (LMO, appendix; Zhao et al., 2020, for l2).

    `d <- momentum d + (1 - momentum) lmo(g)`, `w <- w + lr radius d`. It suits large batches: an oracle of one noisy
    gradient is biased, and averaging its outputs does not mend that. Steps are no longer than Scion's.

    Args:
        params: What `assign_norms` returned, or parameters as any torch optimizer takes them, with `norms`.
        lr: Step size in units of each parameter's norm.
        norms: The assignment, when `params` is not one.
        momentum: Fraction of the average that is kept; the paper's alpha is `1 - momentum`. At 0 it is uSCG without
            momentum.
        radius: Radius of the ball.
        weight_decay: Bounds every norm by `overshoot * radius / weight_decay`.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
        process_group: See `ConditionalGradient`.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = Almond(wn.assign_norms(layer), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        norms: Assignment | None = None,
        momentum: float = 0.9,
        radius: float = 1.0,
        weight_decay: float = 0.0,
        lr_scales: Mapping[str, float] | None = None,
        adamw: AdamWSettings | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            norms=norms,
            momentum=momentum,
            step_rule="averaged",
            radius=radius,
            weight_decay=weight_decay,
            lr_scales=lr_scales,
            adamw=adamw,
            process_group=process_group,
        )


class SpectralDescent(ConditionalGradient):
    """Stochastic spectral descent (Carlson et al., 2015): steepest descent in every parameter's own norm.

    `w <- w - lr |m|_* dualize(m)` with the dual norm of the momentum as length (MD, proposition 1), so the step shrinks
    with the gradient and `lr` is the inverse of a sharpness. There is no bound on a step: of the constraints only those
    that need none can hold.

    Args:
        params: What `assign_norms` returned, or parameters as any torch optimizer takes them, with `norms`.
        lr: Inverse sharpness.
        norms: The assignment, when `params` is not one.
        momentum: Fraction of the buffer that is kept; the paper has none.
        weight_decay: Fraction of the weight, per unit of learning rate, removed before the step.
        lr_scales: Name pattern -> factor on `lr`.
        adamw: Settings for parameters without a norm.
        process_group: See `ConditionalGradient`.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = SpectralDescent(wn.assign_norms(layer), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        norms: Assignment | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        lr_scales: Mapping[str, float] | None = None,
        adamw: AdamWSettings | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            norms=norms,
            momentum=momentum,
            step_rule="sharp",
            weight_decay=weight_decay,
            lr_scales=lr_scales,
            adamw=adamw,
            process_group=process_group,
        )
