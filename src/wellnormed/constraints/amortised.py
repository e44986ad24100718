"""Caps that leave room for some steps, so that they need not act after each: in between nothing is computed.

**Proof.** A step of bound `b` moves a weight of norm `n` to a norm of at most `n + b`. A weight that was brought to a
target is therefore at or below the target plus the bounds of the steps since then. While that sum is at most the cap
the weight is left as it is, and the first step whose bound leads beyond is followed by a projection, before anything
sees the weight.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed.constraints.base import SpectralCap

UPDATE_ROOM = 0.02
"""By how much an update may exceed its bound, relatively: what `msign` states for 16 bits, and so for float32 products
that torch was allowed to compute with fewer bits; else it is far less."""


@dataclass(frozen=True)
class AmortisedCap(SpectralCap):
    """A cap that acts after about every few steps. See the proof above.

    The room that a projection leaves is that of `every - 1` steps like the one before it, but at most half of the cap.
    A rate that rises, or steps that are long beside the cap, make projections more frequent, and a rate that falls
    makes them rarer. Steps without a bound, and weights of 16 bits, are followed by a projection each.

    Args:
        max_norm: The cap, in units of the weight's norm. Weights above it are brought below it at once.
        every: Steps of one learning rate from one projection to the next. With 1, the default, no room is left.
    """

    every: int = 1
    _method: ClassVar[str] = "auto"
    """Of the matrix function: by the device. What measures the ways of other devices overrides it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(f"{type(self).__name__}: ", {"every": self.every}, whole=True)
        if self.every < 1:
            raise ValueError(f"{type(self).__name__}: every={self.every} must be at least 1, for after every step")

    def __repr__(self) -> str:
        every = f", every={self.every}" if self.every > 1 else ""
        return f"{type(self).__name__}(max_norm={self.max_norm!r}{every})"

    def seen_step(self, update_norm: float | None, weight: Tensor) -> float | None:
        """A bound on the growth of the norm by a step in floating point; None without one, or if none is looked at.

        A step rounds `(1 - decay) W` and the sum with the update, entry by entry. The share `u` of every entry is at
        most the share `u sqrt(r)` of the norm of a slice whose short side is `r`, and `r^2` is at most the number of
        entries. Roundings of the update are within `UPDATE_ROOM`. In 16 bits those of the weight alone may add a fifth
        of its norm at `r = 768`, which leaves nothing to wait for.
        """
        if self.every == 1 or update_norm is None or weight.dtype.itemsize < 4:
            return None
        rounding = 2 * (torch.finfo(weight.dtype).eps / 2) * weight.numel() ** 0.25
        return update_norm * (1 + UPDATE_ROOM) + rounding * self.max_norm

    def first_reach(self) -> Tensor | None:
        return None if self.every == 1 else torch.tensor(self.max_norm, dtype=torch.float64, device="cpu")

    def may_wait(self, reach: Tensor, step: float | None) -> bool:
        reach += math.inf if step is None else step
        if float(reach) <= self.max_norm:
            return True
        reach.fill_(self._aim(step))
        return False

    def _aim(self, update_norm: float | None) -> float:
        if update_norm is None:
            return self.max_norm
        steps = min(self.every - 1, int(self.max_norm / 2 / update_norm))
        rounding = 2.0**-52 * self.max_norm  # of each float64 sum, so that exactly so many steps fit
        return self.max_norm - steps * (update_norm + rounding)
