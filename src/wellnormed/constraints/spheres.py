"""Weights that keep the norm they start with, so that only their direction is learned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.constraints.base import Constraint, State
from wellnormed.norms import Norm


@dataclass(frozen=True)
class NormSphere(Constraint):
    """After every step a weight is scaled back to the norm that it had when it was constrained (MuonHyperball).

    In the weight's own norm, or in the Frobenius norm as published (Wen et al., 2025), where the step is projected too:
    a step of `lr` turns the weight by a share `lr * radius * |direction| / |weight|` of its norm. It keeps an estimated
    norm, from below as from above, and promises no proved bound. A weight of zero stays zero.

    Args:
        frobenius: Measure the root of the sum of squares of all entries instead of the weight's own norm.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> before = layer.weight.norm().item()
        >>> optimizer = wn.Scion(layer, lr=0.5)
        >>> _ = wn.constrain(optimizer, {"*": NormSphere(frobenius=True)})
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> abs(layer.weight.norm().item() - before) < 1e-5
        True
    """

    frobenius: bool = False

    def acts_on(self, norm: Norm) -> bool:
        return True

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        return {"radius": self._norm(weights, norm)}

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        size = self._norm(weights, norm)
        scale = state["radius"] / size.clamp(min=torch.finfo(size.dtype).tiny)
        return weights * scale.reshape(scale.shape + (1,) * norm.ndim), state

    def _norm(self, weights: Tensor, norm: Norm) -> Tensor:
        if not self.frobenius:
            return norm.norm(weights)
        return torch.linalg.vector_norm(weights, dim=tuple(range(weights.ndim - norm.ndim, weights.ndim)))
