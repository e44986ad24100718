"""Published optimizers: choices of momentum, norm and step rule, never a `step` of their own."""

from dataclasses import replace
from typing import ClassVar, Literal, Unpack

from wellnormed._inputs import require_choice, require_flags
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.groups import Params
from wellnormed.optim.settings import EngineSettings, Group
from wellnormed.routing import Assignment


class Scion(ConditionalGradient):
    """Scion (LMO, algorithms 1 and 2): in every step each parameter moves a fixed length, measured in its own norm.

    `Scion(model, lr=0.1)` assigns a norm to each parameter by its role, such as `Spectral` to the matrix of a linear
    layer; `print` shows all of them. The direction of a step is the vector of norm 1 that decreases the loss most, to
    first order, for the momentum of the gradients (the norm's linear minimization oracle), and its length is
    `lr * radius`. With `unconstrained=False` weights also shrink by `1 - lr`: a weight in its ball of `radius` stays
    there, as those that `initialize_` has started do, and one outside comes nearer by that factor in every step.

    Args:
        params: The model; or what `ConditionalGradient` takes.
        lr: Step size in units of each parameter's norm; with `unconstrained=False` a convex weight in [0, 1].
        unconstrained: uSCG if True, else SCG, which keeps every weight that starts in its ball of `radius` there.

    Example:
        >>> import torch
        >>> print(Scion(torch.nn.Linear(2, 2, bias=False), lr=0.1))
        Scion(lr=0.1)
        parameter  shape   norm      radius  why
        weight     (2, 2)  Spectral  1       nn.Linear
    """

    decides: ClassVar = {"step_rule"}

    def __init__(
        self, params: Params, lr: float | None = None, *, unconstrained: bool = True, **settings: Unpack[EngineSettings]
    ) -> None:
        if rule := settings.get("step_rule"):
            raise ValueError(f"Scion: step_rule={rule!r} contradicts unconstrained=; use ConditionalGradient")
        require_flags("Scion: ", {"unconstrained": unconstrained})
        settings["step_rule"] = "unconstrained" if unconstrained else "constrained"
        super().__init__(params, lr, **settings)


class Muon(ConditionalGradient):
    """Muon's step in every spectral norm; other weights move in their own norms. The classic one is one keyword away.

    What most people call Muon, `torch.optim.Muon` on hidden matrices and AdamW on the rest, is
    `wn.Muon(model, recipe="muon")`. Without it embeddings, the last layer and vectors move by the oracles of the
    default recipe too, as under `Scion`, with Nesterov momentum 0.95 and Jordan's five Newton-Schulz steps.

    Args:
        params: The model; or what `ConditionalGradient` takes.
        lr: Step size in units of each parameter's norm; 0.02 unless given.
        adjust_lr_fn: The unit of a spectral step: None for the assignment's own, `sqrt(d_out / d_in)` (MD);
            "original" for `max(1, sqrt(d_out / d_in))` (Jordan; torch's default), "match_rms_adamw" for
            `0.2 sqrt(max(d_out, d_in))` (Liu et al., 2025), "spectral_unclamped" for `sqrt(d_out / d_in)` of every
            matrix (torch from 2.14 on). Constraints and certificates then measure in that unit.
        coefficients: Set of the registry.

    Example:
        >>> import torch
        >>> Muon(torch.nn.Linear(2, 2, bias=False)).param_groups[0]["lr"]
        0.02
    """

    preset: ClassVar[EngineSettings] = {"momentum": 0.95, "nesterov": True}

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        *,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        coefficients: str = "jordan-5",
        **settings: Unpack[EngineSettings],
    ) -> None:
        require_choice("Muon: adjust_lr_fn", adjust_lr_fn, list(_UNITS))
        self._of_oracles = {"coefficients": coefficients, **_UNITS[adjust_lr_fn]}
        super().__init__(params, lr, **settings)

    def _resolve(self, params: Params, settings: EngineSettings) -> tuple[list[Group], Assignment]:
        groups, assignment = super()._resolve(params, settings)
        assigned = (replace(a, norm=a.norm and a.norm.with_settings(**self._of_oracles)) for a in assignment)
        return groups, replace(assignment, assigned=tuple(assigned))


_UNITS = {
    None: {}, "original": {"units": "pixels"}, "match_rms_adamw": {"units": "match-rms-adamw"},
    "spectral_unclamped": {"units": "rms"},
}  # fmt: skip


class Almond(ConditionalGradient):
    """ALMOND: averages what the oracle returns instead of the gradients (LMO, appendix; Zhao et al., 2020, for l2).

    `d <- momentum d + (1 - momentum) lmo(g)`, `w <- w + lr radius d`. It suits large batches: an oracle of one noisy
    gradient is biased, and averaging its outputs does not mend that. Steps are no longer than Scion's. With
    `momentum=0` it is Scion without momentum. Errors are those of `ConditionalGradient`.

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
    as in the paper. Steepest descent in the largest norm over all parameters (LMO equation 6) is another method, whose
    one length is the sum of these dual norms: `unconstrained` steps at `lr` times that sum.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = SpectralDescent(layer, lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    preset: ClassVar[EngineSettings] = {"step_rule": "sharp", "momentum": 0.0}
