"""A layer that mixes tokens by causal averages over positions, and is 1-Lipschitz if its gains are constrained.

Names of tensors end in their axes: B is the batch, T the tokens, H the heads, and K the entries of a token. An axis
that is 1 stands for one entry.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_sizes
from wellnormed.constraints import ColumnCap, Constraint, Sphere
from wellnormed.nn.starting import Start, start_, zeros
from wellnormed.norms import BiasRMS, ColNorm, Norm, Sign

_NEAR = 6
"""The number of heads that start at single distances 0, 1, 2, ...; the others start as means over windows."""
_SHARP = 6.0
"""The logit with which such a head starts at its distance. Its other logits are 0, so that its distance starts with a
weight of 0.87 if there are 64 distances."""


class PositionAverages(nn.Module):
    """Computes `z_i = [c_h sum_d p_h(d) x_(i-d)]_h`: H averages of the tokens up to token i, concatenated.

    Head h averages by the distance d to token i: its weights `p_h` are the softmax of learned logits over all
    distances, and do not depend on the tokens. Where `i - d` lies before the first token, a learned vector stands for
    `x_(i-d)`. The gains `c_h` are learned. The layer is 1-Lipschitz in the largest root mean square (RMS) of a token
    if `mean(c^2) <= 1`, since `|z_i|^2 = sum_h c_h^2 |sum_d p_h(d) x_(i-d)|^2 <= sum_h c_h^2 max_j |x_j|^2`, and z_i
    has H times as many entries as x_j. A constraint must keep the gains so; `constraints_of` says which.

    Args:
        length: The largest number of tokens, and the number of distances.
        width: The number K of entries of a token.
        heads: The number H of heads.

    Shape: `(B, T, K)` -> `(B, T, H K)`.

    Raises:
        ValueError: A size is not a positive integer, or an input has more than `length` tokens.

    Example:
        >>> PositionAverages(8, 4, 3)(torch.ones(2, 5, 4)).shape
        torch.Size([2, 5, 12])
    """

    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        require_sizes(self, length=length, width=width, heads=heads)
        self.length, self.width, self.heads = length, width, heads
        self.logits_HT = nn.Parameter(torch.empty(heads, length))
        self.gain_H = nn.Parameter(torch.empty(heads))
        self.before_1K = nn.Parameter(torch.empty(1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to the start that `starts` describes."""
        start_(self.starts(), None)

    def starts(self) -> Iterator[Start]:
        """Every parameter with the function that sets its start, in order.

        The first heads start near averages of a single token, at the distances 0, 1, 2, ...; the others start as means
        over windows, each about four times as long as the one before. The gains start in proportion to
        `(h + 1)^(-1/2)`, with a mean square of 1. The vector before the first token starts at zero.
        """
        yield self.gain_H, self._start_gains
        yield self.before_1K, zeros
        yield self.logits_HT, self._start_logits

    def _start_gains(self, gain_H: Tensor, _: torch.Generator | None) -> None:
        gain_H.copy_((torch.arange(self.heads) + 1.0).rsqrt())
        gain_H.div_(gain_H.square().mean().sqrt())

    def _start_logits(self, logits_HT: Tensor, _: torch.Generator | None) -> None:
        near = min(_NEAR, self.heads, self.length)
        logits_HT.zero_()[:near, :near].diagonal().fill_(_SHARP)
        # the window of the last head is everything, that of the head before it a quarter of that, and so on
        for number, head in enumerate(reversed(range(near, self.heads))):
            logits_HT[head, max(1, self.length >> 2 * number) :] = -_SHARP

    def parameter_norms(self) -> dict[str, Norm]:
        """The norms: the largest absolute logit, the RMS of the gains, and the RMS of the vector before the text."""
        return {"logits_HT": Sign(), "gain_H": BiasRMS(), "before_1K": ColNorm(input_axis=0)}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The constraints: the gains have a mean square of 1, and the vector before the text an RMS of at most 1."""
        return {"gain_H": Sphere(1.0), "before_1K": ColumnCap(1.0)}

    def forward(self, x_BTK: Tensor) -> Tensor:
        tokens = x_BTK.shape[-2]
        if tokens > self.length:
            raise ValueError(f"{tokens} tokens exceed the {self.length} distances that were learned; shorten the input")
        share_HT = self.logits_HT.softmax(-1)
        position = torch.arange(tokens, device=x_BTK.device)
        distance_TT = position[:, None] - position[None, :]
        share_HTT = torch.where(distance_TT >= 0, share_HT[:, distance_TT.clamp(min=0)], 0.0)
        past_HTK = (1.0 - share_HT.cumsum(-1)[:, :tokens, None]) * self.before_1K
        mixed_BHTK = share_HTT @ x_BTK.unsqueeze(-3) + past_HTK
        return (self.gain_H[:, None, None] * mixed_BHTK).transpose(-3, -2).flatten(-2)

    def extra_repr(self) -> str:
        return f"length={self.length}, {self.width}, heads={self.heads}"
