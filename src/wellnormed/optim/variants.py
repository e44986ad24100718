"""Optimizers of the assignment's norms with another step rule than Scion's."""

from typing import ClassVar

from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.settings import EngineSettings


class Almond(ConditionalGradient):
    """ALMOND: averages what the oracle returns instead of the gradients (LMO, appendix; Zhao et al., 2020, for l2).

    `d <- momentum d + (1 - momentum) lmo(g)`, `w <- w + lr radius d`. It suits large batches: an oracle of one noisy
    gradient is biased, and averaging its outputs does not mend that. Steps are no longer than Scion's. With
    `momentum=0` it is Scion without momentum. Arguments and errors are those of `ConditionalGradient`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = Almond(layer, lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    preset: ClassVar[EngineSettings] = {"step_rule": "averaged"}


class SpectralDescent(ConditionalGradient):
    """Stochastic spectral descent (Carlson et al., 2015): steepest descent in every parameter's own norm.

    `w <- w - lr |m|_* dualize(m)` with the dual norm of the momentum as length (MD, proposition 1), so the step shrinks
    with the gradient and `lr` is the inverse of a sharpness. There is no bound on a step: of the constraints only those
    that need none can hold. Arguments and errors are those of `ConditionalGradient`; there is no momentum by default,
    as in the paper.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = SpectralDescent(layer, lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    preset: ClassVar[EngineSettings] = {"step_rule": "sharp", "momentum": 0.0}
