"""Causal averages of tokens by position, side by side: the mixing layer that is 1-Lipschitz by its form.

Shape suffixes: B batch, T tokens, H heads, K entries of a token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_sizes
from wellnormed.constraints import ColumnCap, Constraint, Sphere
from wellnormed.nn.starting import Start, start_, zeros
from wellnormed.norms import BiasRMS, ColNorm, Norm, Sign

_NEAR = 6
"""Heads that start at the distances 0, 1, 2, ...; the others start as windows."""
_SHARP = 6.0
"""Logit at which a head starts at its own distance, the others being 0: a share of 0.87 among 64 distances."""


class PositionMixing(nn.Module):
    """`z_i = [c_h sum_d p_h(d) x_(i-d)]_h`: every head averages the past by distance, and all stand side by side.

    The averages do not read the content: `p_h` is the softmax of learned logits over all distances. What would lie
    before the first token is a learned vector. With `mean(c^2) <= 1` the layer is 1-Lipschitz in the largest RMS of a
    token, since `|z_i|^2 = sum_h c_h^2 |sum_d p_h(d) x_(i-d)|^2 <= sum_h c_h^2 max_j |x_j|^2`.

    Args:
        length: Largest number of tokens; more are refused.
        width: K.
        heads: H.

    Shape: `(B, T, K)` -> `(B, T, H K)`.

    Example:
        >>> PositionMixing(8, 4, 3)(torch.ones(2, 5, 4)).shape
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
        """The start that `starts` describes."""
        start_(self.starts(), None)

    def starts(self) -> Iterator[Start]:
        """Heads at single distances, then wider and wider windows; gains `(h + 1)^(-1/2)`; zero before the text."""
        yield self.gain_H, self._start_gains
        yield self.before_1K, zeros
        yield self.logits_HT, self._start_logits

    def _start_gains(self, gain_H: Tensor, _: torch.Generator | None) -> None:
        gain_H.copy_((torch.arange(self.heads) + 1.0).rsqrt())
        gain_H.div_(gain_H.square().mean().sqrt())

    def _start_logits(self, logits_HT: Tensor, _: torch.Generator | None) -> None:
        near = min(_NEAR, self.heads, self.length)
        logits_HT.zero_()[:near, :near].diagonal().fill_(_SHARP)
        # the last head sees all, the one before it a quarter of that, ...
        for number, head in enumerate(reversed(range(near, self.heads))):
            logits_HT[head, max(1, self.length >> 2 * number) :] = -_SHARP

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest logit, the RMS of the gains, and that of the vector before the first token."""
        return {"logits_HT": Sign(), "gain_H": BiasRMS(), "before_1K": ColNorm(input_axis=0)}

    def parameter_constraints(self) -> dict[str, Constraint]:
        """The gains have a mean square of 1; what lies before the first token has an RMS of at most 1."""
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
