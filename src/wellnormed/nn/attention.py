"""Causal attention with the 1/d scale and per-head projections, in pieces that each have a bound.

Shape suffixes: B batch, T tokens, D width, H heads, K entries of a head (D = H K).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.norms import Norm, PerHead, Sign


class HeadProjection(nn.Module):
    """A linear map into `heads` heads, `(B, T, D) -> (B, H, T, K)`, with a norm of its own for every head.

    Args:
        width: D, entries of an input token.
        heads: H; must divide `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}; choose a divisor")
        self.width = width
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(width, width))
        PerHead(heads).initialize_(self.weight)

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest RMS -> RMS norm of a head's own slice."""
        return {"weight": PerHead(self.heads)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.weight).unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}"


class CausalAttention(nn.Module):
    """`softmax((scale / K) q k^T + bias) v` over the tokens up to one's own.

    Args:
        heads: H.
        scale: The paper's 1/d attention has `scale = 1` (LT equation 2). The bound grows with it.
        length: Largest number of tokens, needed with `relative_bias`.
        relative_bias: Learn one additive bias per head and distance, initially 0. It does not depend on the input, so
            it costs nothing in the Lipschitz bound, and makes attention to positions sharp without large queries and
            keys.

    Shape: three of `(B, H, T, K)` -> `(B, H, T, K)`.
    """

    def __init__(self, heads: int, scale: float = 1.0, length: int = 0, relative_bias: bool = False) -> None:
        super().__init__()
        if not 0 <= scale < float("inf"):
            raise ValueError(f"scale={scale} must be finite and not negative")
        if relative_bias and length < 1:
            raise ValueError(f"length={length} must be positive when relative_bias is on")
        self.heads = heads
        self.scale = scale
        self.length = length
        self.bias_HT = nn.Parameter(torch.zeros(heads, length)) if relative_bias else None

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest entry: what one distance can add to a logit."""
        return {"bias_HT": Sign()}

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        tokens, entries = q_BHTK.shape[-2:]
        if self.bias_HT is None:
            return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=self.scale / entries)
        if tokens > self.length:
            raise ValueError(f"{tokens} tokens exceed the {self.length} distances that were learned; shorten the input")
        position = torch.arange(tokens, device=q_BHTK.device)
        distance = position[:, None] - position[None, :]
        future = torch.full((tokens, tokens), float("-inf"), dtype=q_BHTK.dtype, device=q_BHTK.device).triu(1)
        bias_HTT = self.bias_HT[:, distance.clamp(min=0)] + future
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias_HTT, scale=self.scale / entries)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, scale={self.scale}, relative_bias={self.bias_HT is not None}"


class Rotary(nn.Module):
    """Turn the pairs of entries `(i, i + K / 2)` of token t by the angle `t base^(-2 i / K)` (Su et al., 2021).

    Turned queries and keys compare by the distance of their tokens. Every vector keeps its length, so the bound of
    attention keeps its size, but not its tightest form: the Jacobian differs from token to token.

    Args:
        entries: K, even.
        base: The smallest angle of a step is about 1 / base.

    Shape: `(B, H, T, K)` -> the same.

    Example:
        >>> turned = Rotary(2)(torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]))
        >>> turned[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """

    def __init__(self, entries: int, base: float = 10_000.0) -> None:
        super().__init__()
        if entries % 2 or entries < 2:
            raise ValueError(f"entries={entries} must be even and positive; choose a width of 2 x heads x an integer")
        if not 0 < base < float("inf"):
            raise ValueError(f"base={base} must be positive and finite")
        self.entries, self.base = entries, base

    def angles(self, device: torch.device | str) -> Tensor:
        """By how much one step turns each of the K / 2 pairs."""
        half = self.entries // 2
        return self.base ** (-torch.arange(half, device=device) / half)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        half = self.entries // 2
        position = torch.arange(x_BHTK.shape[-2], device=x_BHTK.device)
        angle_TK = position[:, None] * self.angles(x_BHTK.device)
        cosine_TK, sine_TK = angle_TK.cos().to(x_BHTK.dtype), angle_TK.sin().to(x_BHTK.dtype)
        a, b = x_BHTK[..., :half], x_BHTK[..., half:]
        return torch.cat([cosine_TK * a - sine_TK * b, sine_TK * a + cosine_TK * b], -1)

    def extra_repr(self) -> str:
        return f"{self.entries}, base={self.base}"


class HalfRotary(Rotary):
    """Turn half of the pairs: the i-th of n = K / 4 by `t base^(-i / (n - 1))`; the others do not see positions.

    This is what the speedruns of GPT-2 do, with the base 1024 (modded-nanogpt, 2025).

    Args:
        entries: K, a multiple of 4.
        base: Ratio of the largest angle of a step, which is 1, to the smallest.

    Shape: `(B, H, T, K)` -> the same.

    Example:
        >>> HalfRotary(8).angles("cpu")
        tensor([1.0000e+00, 9.7656e-04, 0.0000e+00, 0.0000e+00])
    """

    def __init__(self, entries: int, base: float = 1024.0) -> None:
        if entries % 4:
            raise ValueError(f"entries={entries} must be a multiple of 4; choose a width of 4 x heads x an integer")
        super().__init__(entries, base)

    def angles(self, device: torch.device | str) -> Tensor:
        turned = self.entries // 4
        angle_K = self.base ** -torch.linspace(0, 1, turned, device=device)
        return torch.cat([angle_K, torch.zeros_like(angle_K)])


class MergeHeads(nn.Module):
    """`(B, H, T, K) -> (B, T, H K)`: the heads side by side."""

    def forward(self, x_BHTK: Tensor) -> Tensor:
        return x_BHTK.transpose(-3, -2).flatten(-2)
