"""Constraints that hold a norm at a value, and not only below it.

Layers whose bound is exact need `Orthogonal` and `Sphere`; with `FixedNorm` only the direction of a weight is learned.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed._inputs import require_flags
from wellnormed.constraints.base import SLACK, TARGET, Constraint, State, scaled
from wellnormed.constraints.caps import Cap
from wellnormed.matrix import msign, overshoot, stiefel_project
from wellnormed.matrix._symmetric import symmetric_product, times_symmetric
from wellnormed.norms import Norm


class _AllAtCap(Cap):
    """Constraints that hold every singular value at the cap, to which they bring weights exactly."""

    def _start(self, weights: Tensor, norm: Norm) -> Tensor:
        size, _ = self._work(None)
        return norm.on_slices(weights, lambda slices, unit: stiefel_project(slices, size * unit, method="svd"))


@dataclass(frozen=True)
class Orthogonal(_AllAtCap):
    """All singular values stay near `cap`, by one Newton-Schulz step `s -> s (3 - s^2) / 2` after every step.

    Measured in caps, that step maps all of [0, 2] into [0, 1], so it promises `norm(weight) <= cap`; a step of the
    optimizer of `e` caps leaves singular values of at least `1 - 1.5 e^2` for small `e`. It costs two products, where
    `Stiefel` costs a whole `msign`. Singular values that are zero stay zero.

    Args:
        cap: In units of the weight's norm. Weights are brought there at once, exactly. A step whose norm may be
            larger than 0.9999 of this is refused.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> optimizer = wn.Scion(layer, lr=0.01)
        >>> _ = wn.constrain(optimizer, {"*": Orthogonal(1.0)})
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> (layer.weight @ layer.weight.mT / 0.5).diagonal().detach().round(decimals=3)  # (d_out / d_in) of norm 1
        tensor([1., 1., 1., 1.])
    """

    uses_update_norm: ClassVar[bool] = True
    tolerance: ClassVar[float] = 0.5  # which steps of up to a third of the norm leave
    bears_any: ClassVar[str] = "Stiefel"

    @property
    def longest_step(self) -> float:
        # a weight of norm 1 and this step, both longer by rounding, together reach 2 TARGET at most
        return (TARGET - 4 * SLACK) * self.cap

    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return in_batches(partial(_newton_schulz_step, size=cap), slices)


def _newton_schulz_step(x: Tensor, size: float) -> Tensor:
    """Singular values `s` of `(m, n)` or `(batch, m, n)` become `s (3 - (s / size)^2) / 2`."""
    if x.shape[-2] < x.shape[-1]:
        return _newton_schulz_step(x.mT, size).mT
    unit = x / size
    return times_symmetric(x, symmetric_product(unit.mT, unit), x, beta=1.5, alpha=-0.5)


@dataclass(frozen=True)
class Stiefel(_AllAtCap):
    """All singular values move to `cap` after every step (LT section 3.1); those that are zero stay.

    By `msign`, as LT has it; `SpectralInterval(cap, cap)` has the same aim, exactly.

    Promises `norm(weight) <= cap`: where the coefficient set overshoots, it aims below by as much. With J. You's
    set, which LT follows, singular values end within 0.5% of the aim.

    Args:
        cap: In units of the weight's norm. Weights are brought there at once, exactly.
        coefficients: Set of the registry for `msign`.
        method: Method of `msign`.
    """

    tolerance: ClassVar[float] = 0.5  # some coefficient sets end there

    coefficients: str = "you-6"
    method: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        msign(torch.empty(0, 0, device="cpu"), self.coefficients, self.method)  # refuses what it does not know

    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        aim = cap / overshoot(self.coefficients, self.method)
        return stiefel_project(slices, aim, self.coefficients, self.method)


_LARGEST_FACTOR = 1e30
"""What a weight is multiplied by at most, so that zero stays zero."""


@dataclass(frozen=True)
class Sphere(Cap):
    """After every step a weight is scaled to `cap`, in its own norm, and provably not above it.

    Where the norm is the largest of vectors, as `ColNorm` of an embedding, every vector is scaled (LT appendix F).
    Unlike `FixedNorm`, which keeps the norm that a weight started with and proves nothing, it says which norm that is.
    What is zero stays zero.

    Example:
        >>> import torch, wellnormed as wn
        >>> gains = torch.nn.Module()
        >>> gains.bias = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = wn.constrain(wn.Scion(gains, lr=0.01), {"bias": Sphere(1.0)})
        >>> gains.bias.detach().square().mean().round(decimals=3)
        tensor(1.)
    """

    tolerance: ClassVar[float] = 1e-4  # float32

    def acts_on(self, norm: Norm) -> bool:
        return True

    def _start(self, weights: Tensor, norm: Norm) -> Tensor:
        return self._after_step(weights, norm, None)

    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        wide = weights.double()
        factors = (self._work(None)[0] / norm.group_norms(wide)).clamp(max=_LARGEST_FACTOR)
        return (wide * factors.to(wide.device)).to(weights.dtype)


@dataclass(frozen=True)
class FixedNorm(Constraint):
    """After every step a weight is scaled back to the norm that it had when it was constrained.

    In the weight's own norm, or in the Frobenius norm. It keeps an estimated norm, from below as from above, and
    promises no proved bound. A weight of zero stays zero. Hyperball (MuonH; Wen et al., 2026) is the Frobenius norm
    with a direction that gives the step the weight's size, so that the rate is an angle: `docs/directions.md` has it.
    The length of a step under this constraint alone is the optimizer's, in units of the weight's norm.

    Args:
        frobenius: Measure the root of the sum of squares of all entries instead of the weight's own norm.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> before = layer.weight.norm().item()
        >>> optimizer = wn.Scion(layer, lr=0.5)
        >>> _ = wn.constrain(optimizer, {"*": FixedNorm(frobenius=True)})
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> abs(layer.weight.norm().item() - before) < 1e-5
        True
    """

    frobenius: bool = False

    def __post_init__(self) -> None:
        require_flags("FixedNorm: ", {"frobenius": self.frobenius})

    def acts_on(self, norm: Norm) -> bool:
        return True

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        return {"radius": self._norm(weights, norm)}

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        size = self._norm(weights, norm)
        scale = torch.where(size > 0, state["radius"].double() / size, 0.0)
        return scaled(weights, scale, norm).to(weights.dtype), state

    def _norm(self, weights: Tensor, norm: Norm) -> Tensor:
        if not self.frobenius:
            return norm.norm(weights)
        dims = tuple(range(weights.ndim - norm.ndim, weights.ndim))
        return torch.linalg.vector_norm(weights, dim=dims, dtype=torch.float64)  # whose squares hold 1e-30 and 1e30
