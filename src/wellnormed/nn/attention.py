"""Causal attention with the 1/d scale as separate layers, each of which has a bound of its own.

The 1/d scale is that of LT (Newhouse et al., 2025, equation 2). RMS is the root mean square.

Names of tensors end in their axes: B is the batch, T the tokens, D the width of a token, H the heads, and K the entries
of a head, so that D = H K. For example, `x_BHTK` has the shape `(B, H, T, K)`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_numbers, require_sizes
from wellnormed._ranges import NOT_NEGATIVE, POSITIVE
from wellnormed.norms import Norm, PerHead, Sign


class HeadProjection(nn.Module):
    """Applies a linear map without a bias to every token, and splits its result into heads.

    The norm of its weight is taken head by head, because heads may attend to different tokens.

    Args:
        width: The number D of entries of a token.
        heads: The number H of heads, which must divide `width`.

    Shape: `(B, T, D)` -> `(B, H, T, K)`.

    Raises:
        ValueError: A size is not a positive integer, or `heads` does not divide `width`.

    Example:
        >>> HeadProjection(8, heads=2)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 2, 5, 4])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        require_sizes(self, width=width, heads=heads)
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}; choose a divisor")
        self.width = width
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(width, width))
        PerHead(heads).initialize_(self.weight)

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of the weight: the largest RMS -> RMS operator norm of the `(K, D)` slices of the heads."""
        return {"weight": PerHead(self.heads)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.weight).unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}"


class CausalAttention(nn.Module):
    """Computes `softmax((scale / K) q k^T + bias) v`, where each token attends to itself and to the tokens before it.

    Args:
        heads: The number H of heads.
        scale: The factor on the logits besides 1 / K; it is 1 in LT's 1/d attention (equation 2). The Lipschitz bound
            grows with it.
        length: The largest number of tokens. It is needed with `relative_bias` only.
        relative_bias: Whether to add a learned number to the logits, one for each head and each distance between two
            tokens, initially 0. These numbers do not depend on the input, so they leave the Lipschitz bound as it is.
            They let a head attend sharply to a position without large queries and keys.

    Shape: queries q, keys k and values v, each `(B, H, T, K)` -> `(B, H, T, K)`.

    Raises:
        ValueError: `heads` is not a positive integer, `scale` is no number, negative or not finite, `relative_bias` is
            given without a positive `length`, or a layer with `relative_bias` gets more than `length` tokens.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> v = torch.tensor([[[[0.0], [1.0]]]])
        >>> CausalAttention(heads=1)(q, k, v)[0, 0]  # equal logits: every token takes the mean of what it sees
        tensor([[0.0000],
                [0.5000]])
    """

    def __init__(self, heads: int, scale: float = 1.0, length: int = 0, relative_bias: bool = False) -> None:
        super().__init__()
        require_sizes(self, heads=heads)
        require_numbers("CausalAttention: ", {"scale": scale}, NOT_NEGATIVE)
        if relative_bias:
            require_sizes(self, length=length)
        self.heads = heads
        self.scale = scale
        self.length = length
        self.bias_HT = nn.Parameter(torch.zeros(heads, length)) if relative_bias else None

    def parameter_norms(self) -> dict[str, Norm]:
        """The norm of `bias_HT`: its largest absolute entry, which bounds what it can add to a logit."""
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
    """Rotates each pair of entries `(i, i + K / 2)` of token t by the angle `t base^(-2 i / K)` (Su et al., 2021).

    The inner product of a rotated query and a rotated key depends on the positions of their tokens only through the
    distance between them. A rotation keeps the Euclidean norm of every vector, so the bounds on the sizes of queries
    and keys still hold. The tightest bound of attention no longer applies, because the rotation differs by token.

    Args:
        entries: The number K of entries of a head, which must be even.
        base: It sets the angles. The smallest rotation from one token to the next is `base^(2 / K - 1)` radians.

    Shape: `(B, H, T, K)` -> `(B, H, T, K)`.

    Raises:
        ValueError: `entries` is not even and positive, or `base` is not positive and finite.

    Example:
        >>> turned = Rotary(2)(torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]))
        >>> turned[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """

    def __init__(self, entries: int, base: float = 10_000.0) -> None:
        super().__init__()
        require_sizes(self, entries=entries)
        require_numbers(f"{type(self).__name__}: ", {"base": base}, POSITIVE)
        if entries % 2:
            raise ValueError(f"entries={entries} must be even and positive; choose a width of 2 x heads x an integer")
        self.entries, self.base = entries, base

    def angles(self, device: torch.device | str) -> Tensor:
        """The angles, in radians and of shape `(K / 2,)`, by which each pair is rotated from one token to the next."""
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
    """Rotates the first half of the pairs of `Rotary`, and leaves the others as they are.

    With `n = K / 4`, pair i of token t is rotated by the angle `t base^(-i / (n - 1))` for i < n; the other n pairs do
    not depend on the position. The speedruns of GPT-2 use this layer with the base 1024 (modded-nanogpt, 2025).

    Args:
        entries: The number K of entries of a head, which must be a multiple of 4.
        base: The ratio of the largest rotation from one token to the next, which is 1 radian, to the smallest.

    Shape: `(B, H, T, K)` -> `(B, H, T, K)`.

    Raises:
        ValueError: `entries` is not a positive multiple of 4, or `base` is not positive and finite.

    Example:
        >>> HalfRotary(8).angles("cpu")
        tensor([1.0000e+00, 9.7656e-04, 0.0000e+00, 0.0000e+00])
    """

    def __init__(self, entries: int, base: float = 1024.0) -> None:
        super().__init__(entries, base)
        if entries % 4:
            raise ValueError(f"entries={entries} must be a multiple of 4; choose a width of 4 x heads x an integer")

    def angles(self, device: torch.device | str) -> Tensor:
        turned = self.entries // 4
        angle_K = self.base ** -torch.linspace(0, 1, turned, device=device)
        return torch.cat([angle_K, torch.zeros_like(angle_K)])


class MergeHeads(nn.Module):
    """Concatenates the heads of every token.

    Shape: `(B, H, T, K)` -> `(B, T, H K)`.

    Example:
        >>> MergeHeads()(torch.zeros(2, 3, 5, 4)).shape
        torch.Size([2, 5, 12])
    """

    def forward(self, x_BHTK: Tensor) -> Tensor:
        return x_BHTK.transpose(-3, -2).flatten(-2)
