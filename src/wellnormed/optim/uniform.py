"""Optimizers that treat every parameter alike, whatever its layer: one norm for all, then the engine."""

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

from torch import nn

from wellnormed.norms import Euclidean, Sign
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.groups import named
from wellnormed.optim.settings import EngineSettings
from wellnormed.optim.validation import others
from wellnormed.routing import AssignedParameter, Assignment
from wellnormed.routing.places import Weak


class _Uniform(ConditionalGradient):
    """One norm for all parameters: the arguments are those of `ConditionalGradient` except what chooses norms."""

    norm: ClassVar[type[Sign | Euclidean]]
    recommended_lr: ClassVar[float]
    decides: ClassVar = {"norms", "recipe", "overrides", "per_head"}

    def __init__(
        self, params: nn.Module | Iterable[Any], lr: float | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        if unused := settings.keys() & self.decides:
            raise ValueError(
                f"{type(self).__name__}: every parameter has one norm here, so {', '.join(sorted(unused))} would say "
                "nothing; leave it out, or use Scion"
            )
        model = params if isinstance(params, nn.Module) else None
        groups = named(others(params, ()).items() if isinstance(params, nn.Module) else params)
        entries = [a for group in groups for a in self._known_later(group["params"])]
        settings["norms"] = Assignment(tuple(entries), lr=self.recommended_lr, model=Weak(model))
        super().__init__(groups, lr, **settings)

    def _known_later(self, members: list[tuple[str, nn.Parameter]]) -> Assignment:
        entries = (AssignedParameter(name, p, self.norm(ndim=p.ndim), "every parameter") for name, p in members)
        return Assignment(tuple(entries))


class Signum(_Uniform):
    """The sign of the momentum, for every entry of every parameter (Bernstein et al., 2018).

    Parameters need no names and no norms; `lr` says how far every entry moves, 0.001 unless given. Momentum 0 is
    signSGD, and a weight decay bounds every entry by `1 / weight_decay`. Arguments are those of `ConditionalGradient`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -0.1])
        >>> Signum([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.5000,  0.5000])
    """

    norm, recommended_lr = Sign, 1e-3


class NormalizedSGD(_Uniform):
    """The momentum divided by its l2 norm, parameter by parameter (LMO section 4; Cutkosky and Mehta, 2020).

    Parameters need no names and no norms; `lr` says how far, in l2, every one moves, 0.1 unless given. A weight decay
    bounds the l2 norm of every parameter by `1 / weight_decay`. Arguments are those of `ConditionalGradient`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -4.0])
        >>> NormalizedSGD([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.3000,  0.4000])
    """

    norm, recommended_lr = Euclidean, 0.1
