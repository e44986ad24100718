"""What caps that keep a constant cost before the first step: the result's range, and how far weights are moved."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from wellnormed._warnings import warn
from wellnormed.certificates.sizes import largest_rms
from wellnormed.certificates.within import Caps, Within
from wellnormed.proof.decimals import shown

LEAST_SHARE, SMALL_SHARE = 0.1, 0.25
"""The shares of its range below which a result can hardly move, so that `constrain` refuses, and at which it warns.

A norm layer has the slope 1 / sqrt(eps) at vectors near 0, and a range of 2: a constant pays for the slope, and the
result has the range. A loss follows the range. A GPT of two pre-norm blocks on a Markov chain, where uniform guesses
have 3.47, ends 100 steps at 1.83 without caps; with a share of .009 at 3.44, of .05 at 3.33, of .09 at 3.22, of .14 at
3.06, of .23 at 2.85, of .36 at 2.55. MLPs and convolutions with batch norm have a share of 1 at any constant.
"""
_TINY = 1e-6
"""The cap of what only shifts results, while their range is looked at."""


@dataclass(frozen=True)
class Cost:
    """The change of the result between two inputs, in RMS, and the weights that the caps move at once."""

    before: float
    """The largest change for weights of the norms at the start (at least 1 each), or what the constant allows."""
    after: float
    """The largest change within the caps."""
    moved: int
    """How many parameters lie above their caps."""
    most: str
    """The parameter that is moved most, with its norm and its cap."""

    @property
    def share(self) -> float:
        """What is left of the range; 1 where it has no end."""
        return self.after / self.before if 0 < self.before < math.inf else 1.0

    def judge(self, lipschitz: float, accept: bool) -> None:
        """Refuse a result that can hardly move, unless that is accepted; warn of one that has lost most of its range.

        Raises:
            ValueError: It says what the caps cost, and what to do.
        """
        remedy = (
            "wn.calibrate(model, data) puts floors under norm layers, and layers of constant 1 by form, as in "
            "wellnormed.models.GPT, need no range"
        )
        if self.share < LEAST_SHARE and not accept:
            raise ValueError(
                f"constrain: with lipschitz={lipschitz} the result can hardly move: {self}. {remedy}; or pass a larger "
                "constant, or accept_small_range=True for this one"
            )
        if self.share < SMALL_SHARE:
            warn(f"constrain: lipschitz={lipschitz} costs range: {self}. {remedy}")

    def __str__(self) -> str:
        after, share = shown(self.after, ".3g"), shown(self.share, ".2g")
        return (
            f"two inputs change the result by an RMS of at most {after}, {share} of what it could be, for norm layers, "
            f"and all else that is steep and has a small range, take the rest; {self.moved} weights are above their "
            f"caps{self.most}"
        )


def cost_of(within: Within, start: Caps, caps: Caps, free: Collection[str], norms: Caps, lipschitz: float) -> Cost:
    """The cost of caps.

    Args:
        within: The proof.
        start: The caps that the search began with.
        caps: The caps.
        free: Parameters that the constant does not depend on.
        norms: The norms of the parameters now.
        lipschitz: The constant.
    """

    def reach(these: Caps) -> float:
        last = within.rows({**these, **dict.fromkeys(free, _TINY)})[-1]
        return min(float(largest_rms(last, "gain")) * within.distance, 2 * float(largest_rms(last, "radius")))

    above = {name: norms[name] / cap for name, cap in caps.items() if norms[name] > cap}
    most = max(above, key=above.__getitem__, default="")
    words = f", the most {most}, of norm {shown(norms[most], '.3g')} for {shown(caps[most], '.3g')}" if most else ""
    before = min(reach({**start, **within.tables()}), lipschitz * within.distance)
    return Cost(before, reach(caps), len(above), words)
