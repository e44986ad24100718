"""The price of caps that keep a constant, before the first step: lost range of the result, and moved weights."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from wellnormed._warnings import warn
from wellnormed.certificates.printing import NORMALIZATIONS
from wellnormed.certificates.sizes import largest_rms
from wellnormed.certificates.within import Caps, Within
from wellnormed.proof.decimals import shown

LEAST_SHARE, SMALL_SHARE = 0.1, 0.25
"""`constrain` refuses caps that leave the result less than the first share of its range, and warns below the second.

A norm layer has the slope 1 / sqrt(eps) at vectors near 0, but a result of RMS at most 1. The constant counts the
slope, so the caps behind it must be small, and shrink the range. The loss follows the range: a GPT of two pre-norm
blocks on a Markov chain, where uniform guesses have the loss 3.47, ends 100 steps at 1.83 without caps; at 3.44 with a
share of .009, 3.33 with .05, 3.22 with .09, 3.06 with .14, 2.85 with .23, 2.55 with .36. MLPs and convolutions with
batch norm have a share of 1 at any constant.
"""
LEAST_GAIN = 0.2
"""`constrain` refuses caps within which a model, whose gain the constant allows, keeps less than this share of it.

The constant is a product of norms, and where the truth is far below it, as in residual networks with batch norm, caps
take most of what passes an input on. On digits of 8 x 8, 120 steps in evaluation mode, with constants of 1 to 1000:
MLPs of 3 and 8 layers keep all of their gain, and learn as without caps; a convolutional network learns 10% (chance)
with a share of .14, 71% with .86, 84% with 1; a residual network of two blocks with batch norm 62% without caps, and at
most 11% with shares from .05 to .27. Attention on few tokens learns with a share of .26.
"""
_TINY = 1e-6
"""The cap of parameters that only shift the result, such as biases, while its range is computed."""


@dataclass(frozen=True)
class Cost:
    """The largest change of the result between two inputs, in RMS, and the weights that the caps shrink at once."""

    before: float
    """The largest change with the norms at the start (at least 1 each) as caps, or allowed by the constant if less."""
    after: float
    """The largest change within the caps."""
    moves: str
    """Which weights are projected as soon as the caps are attached; empty if none is above its cap."""
    floorless: bool
    """Whether the model has norm layers without a floor."""
    gains: tuple[float, float] = (0.0, 0.0)
    """The largest gains that a short search finds, from RMS to RMS, with the weights as they are and as projected."""

    @property
    def share_of_gain(self) -> float:
        """The share of the gain that the projected weights keep."""
        before, after = self.gains
        return after / before if before else 1.0

    @property
    def share(self) -> float:
        """The share of the range that is left; 1 for an infinite range."""
        return self.after / self.before if 0 < self.before < math.inf else 1.0

    def judge(self, lipschitz: float, accept: bool) -> None:
        """Refuse a result that can hardly move, unless that is accepted; warn of one that has lost most of its range.

        Raises:
            ValueError: It says what the caps cost, and what to do.
        """
        remedy = f"{NORMALIZATIONS}. " * self.floorless + "Layers of constant 1 by form (wn.models.GPT) need no range"
        if self.share < LEAST_SHARE and not accept:
            raise ValueError(
                f"constrain: with lipschitz={lipschitz} the result can hardly move: {self}. {remedy}; or pass a larger "
                "constant, or accept_small_range=True for this one"
            )
        if self.share < SMALL_SHARE:
            warn(f"constrain: lipschitz={lipschitz} costs range: {self}. {remedy}")
        if self.share_of_gain < LEAST_GAIN and not accept:
            before, after = (shown(each, ".3g", up=False) for each in self.gains)
            raise ValueError(
                f"constrain: with lipschitz={lipschitz} the result can hardly move: a short search finds a gain of "
                f"{before}, from RMS to RMS, which the constant allows, and {after} within its caps, since the product "
                f"of norms that is proved is far above the truth here; {self.moves}. Take layers that the proof bounds "
                "closely, without batch norm; or pass a larger constant, or accept_small_range=True for this one"
            )

    def __str__(self) -> str:
        after, share = shown(self.after, ".3g"), shown(self.share, ".2g")
        return (
            f"two inputs change the result by an RMS of at most {after}, {share} of what it could be: norm layers, and "
            f"all else that is steep and has a small range, cost the rest{self.moves and '; '}{self.moves}"
        )


def cost_of(
    within: Within, start: Caps, caps: Caps, free: Collection[str], norms: Caps, lipschitz: float,
    projected: Callable[[], Mapping[str, Tensor]],
) -> Cost:  # fmt: skip
    """The cost of caps.

    Args:
        within: The constant as a function of the caps.
        start: The caps that the search began with.
        caps: The caps that it ended with.
        free: Parameters that the constant does not depend on.
        norms: The norms of the parameters now.
        lipschitz: The constant, from RMS to RMS.
        projected: Makes the weights that the caps shrink, projected, by their names.
    """

    def reach(these: Caps) -> float:
        last = within.rows({**these, **dict.fromkeys(free, _TINY)})[-1]
        return min(float(largest_rms(last, "gain")) * within.distance, 2 * float(largest_rms(last, "radius")))

    before = min(reach({**start, **within.tables()}), lipschitz * within.distance)
    floorless = any(row.operation == "normalization" for row in within.rows(caps))
    cost = Cost(before, reach(caps), shrunk(norms, caps), floorless)
    if not cost.moves or cost.share < LEAST_SHARE or not (gain := within.gain({})) <= lipschitz:
        return cost
    return replace(cost, gains=(gain, within.gain(projected())))


def shrunk(norms: Caps, caps: Caps) -> str:
    """How many parameters are above their caps, and which most, so that `constrain` projects them; empty for none."""
    above = {name: norms[name] / cap for name, cap in caps.items() if norms[name] > cap}
    if not above:
        return ""
    most = max(above, key=above.__getitem__)
    return (
        f"at once the caps shrink {len(above)} weight{'s' * (len(above) > 1)}, the most {most}, of norm "
        f"{norms[most]:#.3g} for {shown(caps[most], '.3g')}"
    )
