"""Directions that are ready to use: `directions={"*": NorMuon()}`. `docs/directions.md` has others.

Parameters on whose norm a direction does not act keep the direction of the step rule.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._ranges import KEPT, POSITIVE
from wellnormed.matrix import spectral_hardcap
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.optim.parts import Direction, DirectionInput, Oracle


class _OfMatrices(Direction):
    def acts_on(self, norm: Norm) -> bool:
        """Whether the norm measures singular values."""
        return norm.measures == "singular values"


@dataclass(frozen=True)
class ClippedOracle(_OfMatrices):
    """The momentum times a gain, with singular values capped at one unit of the norm (Spectral Clipping, section 4).

    It solves `max <k m, d> - |d|_F^2 / 2` over the unit ball for the gain `k`, so that directions of little gradient
    move little. As `k` grows it tends to `dualize(m)` (section 1.1); below the cap it is gradient descent of rate `k`.
    A step keeps its bound.

    Args:
        gain: Positive and finite.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> clip = wn.optim.directions.ClippedOracle(gain=100.0)
        >>> wn.Scion(layer, lr=0.1, directions={"*": clip}).update_norm("weight") == wn.Scion(
        ...     layer, lr=0.1
        ... ).update_norm("weight")
        True
    """

    gain: float
    same_at_any_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_numbers("ClippedOracle: ", {"gain": self.gain}, POSITIVE, "100 is nearly the oracle")

    def bound(self, norm: Norm) -> float:
        return norm.overshoot

    def __call__(self, seen: DirectionInput) -> Tensor:
        def clipped(slices: Tensor, unit: float) -> Tensor:
            return self.gain * spectral_hardcap(slices, unit / self.gain)

        # in 32 bits, where the gain leads to no infinity
        return seen.norm.on_slices(widened(seen.momentum), clipped).to(seen.momentum.dtype)


_FLOOR = 1e-8
"""Least mean square of a neuron that NorMuon divides by (the published epsilon)."""
_ORACLE = Oracle()


@dataclass(frozen=True)
class NorMuon(_OfMatrices):
    """Another direction, each of whose neurons is divided by the root of a running average of its mean squares.

    Li et al., 2025, algorithm 1. The result is brought back to the Frobenius norm of that direction. As in the authors'
    code the longer side counts the neurons, and the squares of each are averaged along the shorter one. Of kernels,
    heads and experts every slice is treated alone. A step has no bound.

    Args:
        kept: The fraction of the average that is kept, the paper's `beta2`; in [0, 1).
        inner: The direction whose neurons are normalised, which sees the momentum alone and keeps nothing; the oracle.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> print(wn.Scion(layer, lr=0.1, directions={"*": wn.optim.directions.NorMuon()}).update_norm("weight"))
        None
    """

    kept: float = 0.95
    inner: Direction = _ORACLE
    keeps: ClassVar[tuple[str, ...]] = ("second_moment",)

    def __post_init__(self) -> None:
        require_numbers("NorMuon: ", {"kept": self.kept}, KEPT, "0.95 is published")
        if not isinstance(self.inner, Direction) or self.inner.sees or self.inner.keeps:
            raise ValueError(
                f"NorMuon: inner must be a Direction that sees the momentum alone and keeps nothing, got "
                f"{self.inner!r}; pass one such as ClippedOracle(100.0)"
            )

    @property
    def same_at_any_rate(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.inner.same_at_any_rate

    def start(self, name: str, weight: Tensor, norm: Norm) -> Tensor:
        """Zeros: one number for every neuron of every slice, in a row."""
        slices = norm.slices(torch.empty(weight.shape, device="meta"))
        return weight.new_zeros(sum(x.numel() // min(x.shape[-2:]) for x in slices))

    def __call__(self, seen: DirectionInput) -> Tensor:
        directions = widened(self.inner(seen))  # in float16 the floor is 0, and small squares are
        batches, averages = seen.norm.slices(directions), []
        moments = seen.state["second_moment"]
        kept = widened(moments).split([x[0].numel() // min(x.shape[-2:]) for x in batches], -1)
        for i, (slices, before) in enumerate(zip(batches, kept, strict=True)):
            shorter = -1 if slices.shape[-2] >= slices.shape[-1] else -2
            squares = slices.square().mean(shorter, keepdim=True)
            average = before.reshape(squares.shape).lerp(squares, 1 - self.kept)
            divided = slices * average.clamp(min=_FLOOR).rsqrt()
            old, new = (torch.linalg.matrix_norm(x, keepdim=True) for x in (slices, divided))
            batches[i] = divided * (old / new.clamp(min=_FLOOR))
            averages.append(average.flatten(1))
        seen.state["second_moment"] = torch.cat(averages, -1).to(moments.dtype)
        return seen.norm.from_slices(batches, directions).to(seen.momentum.dtype)


@dataclass(frozen=True)
class BoundedAdam(Direction):
    """Adam's direction, no entry of which exceeds the ball of the norm: for vectors, gains, tables and heads by signs.

    `clamp(m / (sqrt(v) + 1e-8), -1, 1)` times the entry of a step whose entries are all alike, where `v` is the average
    of squared gradients. That lies in the unit balls of `Sign`, `Gain`, `BiasRMS` and `ColNorm`, so a step keeps its
    bound; unlike their oracles' it becomes short where the gradient is noise, as near the end of training at a constant
    rate. Neither average is corrected for its start at zero.

    Args:
        kept: The fraction of the average of squares that is kept, Adam's `beta2`; in [0, 1).

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(4, 4)
        >>> optimizer = wn.Scion(layer, lr=0.1, directions={"bias": wn.optim.directions.BoundedAdam()})
        >>> optimizer.update_norm("bias") == wn.Scion(layer, lr=0.1).update_norm("bias")
        True
    """

    kept: float = 0.95
    sees: ClassVar[tuple[Literal["gradient", "weight"], ...]] = ("gradient",)
    keeps: ClassVar[tuple[str, ...]] = ("second_moment",)
    same_at_any_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_numbers("BoundedAdam: ", {"kept": self.kept}, KEPT)

    def acts_on(self, norm: Norm) -> bool:
        """Whether the norm measures entries, or lengths of vectors."""
        return norm.measures in ("entries", "lengths")

    def bound(self, norm: Norm) -> float:
        return 1.0

    def start(self, name: str, weight: Tensor, norm: Norm) -> Tensor:
        """Zeros in 32 bits or more: squares of small gradients leave the range of float16."""
        return torch.zeros_like(widened(weight))

    def __call__(self, seen: DirectionInput) -> Tensor:
        assert seen.gradient is not None  # it sees it
        momentum, squares = widened(seen.momentum), widened(seen.gradient).square()
        average = seen.state["second_moment"].lerp(squares, 1 - self.kept)
        seen.state["second_moment"] = average
        parts, unit = seen.norm.blocks(momentum)[0]  # vectors of one length, or entries
        most = unit / math.sqrt(parts.shape[1] * parts.shape[2])
        return (momentum / (average.sqrt() + _FLOOR)).clamp(-1, 1).mul(most).to(seen.momentum.dtype)
