"""Optimizers that treat every parameter alike, whatever its layer: one norm for all, then the engine."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from wellnormed.norms import AssignedParameter, Assignment, Euclidean, Norm, Sign
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.routing import named
from wellnormed.optim.settings import EngineSettings


class _Uniform(ConditionalGradient):
    recommended_lr: ClassVar[float]

    def __init__(
        self, params: nn.Module | Iterable[Any], lr: float | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        if given := settings.keys() & {"norms", "recipe", "overrides"}:
            raise ValueError(
                f"{type(self).__name__}: every parameter has one norm here, so {', '.join(sorted(given))} would say "
                "nothing; leave it out, or use Scion"
            )
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        groups = named(params)
        entries = [AssignedParameter(n, p, self.norm_of(p), "every parameter") for g in groups for n, p in g["params"]]
        settings["norms"] = Assignment(tuple(entries), lr=self.recommended_lr)
        super().__init__(groups, lr, **settings)

    def _known_later(self, members: list[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, AssignedParameter]:
        return {p: AssignedParameter(name, p, self.norm_of(p), "every parameter") for name, p in members}

    @staticmethod
    @abstractmethod
    def norm_of(parameter: Tensor) -> Norm:
        """The norm of any parameter."""


class Signum(_Uniform):
    """The sign of the momentum, for every entry of every parameter (Bernstein et al., 2018).

    Args:
        params: The model; or parameters, named parameters or groups, as any torch optimizer takes them.
        lr: How far every entry moves.
        settings: The keywords of `EngineSettings` but those that choose norms. Momentum 0 is signSGD; a weight decay
            bounds every entry by `1 / weight_decay`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -0.1])
        >>> Signum([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.5000,  0.5000])
    """

    recommended_lr: ClassVar[float] = 1e-3

    @staticmethod
    def norm_of(parameter: Tensor) -> Norm:
        return Sign(ndim=parameter.ndim)


class NormalizedSGD(_Uniform):
    """The momentum divided by its l2 norm, parameter by parameter (LMO section 4; Cutkosky and Mehta, 2020).

    Args:
        params: The model; or parameters, named parameters or groups, as any torch optimizer takes them.
        lr: How far, in l2, every parameter moves.
        settings: The keywords of `EngineSettings` but those that choose norms. A weight decay bounds the l2 norm of
            every parameter by `1 / weight_decay`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, -4.0])
        >>> NormalizedSGD([w], lr=0.5).step()
        >>> w.detach()
        tensor([-0.3000,  0.4000])
    """

    recommended_lr: ClassVar[float] = 0.1

    @staticmethod
    def norm_of(parameter: Tensor) -> Norm:
        return Euclidean(ndim=parameter.ndim)
