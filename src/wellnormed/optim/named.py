"""Published optimizers: choices of momentum, norm and step rule, never a `step` of their own."""

from dataclasses import replace
from typing import ClassVar, Literal, Unpack

from wellnormed._inputs import require_flags
from wellnormed.norms import Assignment, Norm
from wellnormed.norms.spectral import Units
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.routing import Params
from wellnormed.optim.settings import EngineSettings, Group


class Scion(ConditionalGradient):
    """Scion (LMO, algorithms 1 and 2): every parameter moves by the oracle of its own norm.

    Args:
        params: See `ConditionalGradient`.
        lr: Step size in units of each parameter's norm; with `unconstrained=False` a convex weight in [0, 1].
        unconstrained: uSCG if True, else SCG, which keeps every weight in its ball of `radius`.
        settings: The keywords of `EngineSettings`.

    Raises:
        ValueError: See `ConditionalGradient`.

    Example:
        >>> import torch
        >>> print(Scion(torch.nn.Linear(2, 2, bias=False), lr=0.1))
        Scion(momentum=0.9, nesterov=False, step_rule=unconstrained, weight_decay=0.0)
        parameter  shape   norm  ...
        weight     (2, 2)  Spectral(...)  1       0.1  nn.Linear
    """

    def __init__(
        self, params: Params, lr: float | None = None, *, unconstrained: bool = True, **settings: Unpack[EngineSettings]
    ) -> None:
        if "step_rule" in settings:
            raise ValueError(
                f"Scion: step_rule={settings['step_rule']!r} contradicts unconstrained=; use ConditionalGradient"
            )
        require_flags("Scion: ", {"unconstrained": unconstrained})
        settings["step_rule"] = "unconstrained" if unconstrained else "constrained"
        super().__init__(params, lr, **settings)


class Muon(ConditionalGradient):
    """Muon: Nesterov momentum 0.95 and Jordan's five Newton-Schulz steps for every spectral norm of the assignment.

    With `recipe="muon"` it is `torch.optim.Muon` on hidden matrices and AdamW on the rest; with another recipe the
    other norms keep their own oracles.

    Args:
        params: See `ConditionalGradient`.
        lr: Step size in units of each parameter's norm; without it, the rate recommended with the recipe.
        adjust_lr_fn: The unit of a spectral step: None for the assignment's own, `sqrt(d_out / d_in)` (MD);
            "original" for `max(1, sqrt(d_out / d_in))` (Jordan; torch's default), "match_rms_adamw" for
            `0.2 sqrt(max(d_out, d_in))` (Liu et al., 2025). Constraints and certificates then measure in that unit.
        coefficients: Set of the registry.
        settings: The keywords of `EngineSettings`.

    Raises:
        ValueError: See `ConditionalGradient`; or an unknown `adjust_lr_fn` or set.

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
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        coefficients: str = "jordan-5",
        **settings: Unpack[EngineSettings],
    ) -> None:
        if adjust_lr_fn not in (None, *_UNITS):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} must be None or one of {', '.join(_UNITS)}")
        self._units, self._coefficients = _UNITS.get(adjust_lr_fn or ""), coefficients
        super().__init__(params, lr, **settings)

    def _resolve(self, params: Params, settings: EngineSettings) -> tuple[list[Group], Assignment]:
        groups, assignment = super()._resolve(params, settings)
        return groups, replace(assignment, assigned=tuple(replace(a, norm=self._adjusted(a.norm)) for a in assignment))

    def _adjusted(self, norm: Norm | None) -> Norm | None:
        if norm is None:
            return None
        norm = norm.with_coefficients(self._coefficients)
        return norm if self._units is None else norm.with_units(self._units)


_UNITS: dict[str, Units] = {"original": "pixels", "match_rms_adamw": "match-rms-adamw"}
