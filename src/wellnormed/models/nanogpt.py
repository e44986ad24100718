"""NanoGPT, the unconstrained peer of LT's table 1: the speedrun of GPT-2 without its shortcuts and learned factors.

Shape suffixes: B batch, T tokens, D width, H heads, K entries of a head (D = H K).
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wellnormed.models.base import TokenModel
from wellnormed.models.config import NanoGPTConfig
from wellnormed.nn import CausalAttention, HalfRotary, MergeHeads
from wellnormed.nn.starting import Start, drawn, zeros


class SquaredReLU(nn.Module):
    """`max(0, x)^2`, which is Lipschitz only on bounded inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


class LogitSoftCap(nn.Module):
    """`cap sigmoid(x / width)`, between 0 and `cap`."""

    def __init__(self, cap: float, width: float) -> None:
        super().__init__()
        self.cap, self.width = cap, width

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * (x / self.width).sigmoid()

    def extra_repr(self) -> str:
        return f"{self.cap}, width={self.width}"


class SplitHeads(nn.Module):
    """`(B, T, H K) -> (B, H, T, K)`: the inverse of `MergeHeads`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class Attention(nn.Module):
    """Causal attention with RMS-normalized queries and keys, which are rotated by their positions."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        entries = config.width // config.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )
        self.split, self.merge = SplitHeads(config.heads), MergeHeads()
        self.norm = nn.RMSNorm(entries, config.epsilon, elementwise_affine=False)
        self.rotary = HalfRotary(entries, config.rotary_base)
        self.attend = CausalAttention(config.heads, config.attention_scale * entries)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attended(x_BTD, self.value(x_BTD))

    def attended(self, x_BTD: Tensor, v_BTD: Tensor) -> Tensor:
        """The output for these values; queries and keys are those of the input."""
        q_BHTK, k_BHTK = (self.rotary(self.norm(self.split(part(x_BTD)))) for part in (self.query, self.key))
        return self.output(self.merge(self.attend(q_BHTK, k_BHTK, self.split(v_BTD))))


class FeedForward(nn.Sequential):
    """Linear, squared ReLU, linear."""

    def __init__(self, config: NanoGPTConfig) -> None:
        hidden = config.expansion * config.width
        super().__init__()
        self.input = nn.Linear(config.width, hidden, bias=False)
        self.activation: nn.Module = SquaredReLU()
        self.output = nn.Linear(hidden, config.width, bias=False)


class Block(nn.Module):
    """Attention and a feed-forward layer on a residual stream, each behind an RMS norm.

    Args:
        config: The config of the model.
        number: The number of the block, from 0. Blocks of NanoGPT do not use it; those of `papers.peers` do.
    """

    def __init__(self, config: NanoGPTConfig, number: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, config.epsilon, elementwise_affine=False)
        self.attention: Any = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm(x_BTD))
        return x_BTD + self.feed_forward(self.norm(x_BTD))


class NanoGPT(TokenModel):
    """LT's "NanoGPT": modded-nanogpt's record of February 2025 without its shortcuts, tables and learned numbers.

    RMS norms without gains before every layer and before the head, and of queries and keys; rotary positions in half of
    the pairs; squared ReLU; logits capped by a sigmoid. `papers.peers` has the record itself.

    Two things differ from the record's layers. Attention is causal over the whole window, not over sliding windows
    within a document. Weights and activations have one dtype, where the record multiplies the head in 8 bits.

    Matrices start as in the record: uniform of standard deviation `1 / (2 sqrt(width))`, output projections and the
    head at zero, embeddings standard normal. The generator decides the draws; None is torch's default.

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.

    Example:
        >>> model = NanoGPT(NanoGPTConfig(vocabulary_size=65, width=16, heads=2, blocks=3))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 65])
    """

    block: ClassVar[type[Block]] = Block

    def __init__(self, config: NanoGPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.width % (4 * config.heads):
            raise ValueError(
                f"width={config.width} must be a multiple of 4 x heads={config.heads}: the rotary positions turn "
                "pairs of a quarter of a head's entries; choose another width"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.norm = nn.RMSNorm(config.width, config.epsilon, elementwise_affine=False)
        self.add_beside(config)
        self.blocks = nn.ModuleList(self.block(config, number) for number in range(config.blocks))
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.cap = LogitSoftCap(config.logit_cap, config.logit_width)
        self.reset_parameters(generator)

    def add_beside(self, config: NanoGPTConfig) -> None:
        """Add the layers of a subclass beside the blocks; they are drawn before these."""

    def starts(self) -> Iterator[Start]:
        """The start that the docstring of the class describes."""
        bound = math.sqrt(3) / (2 * math.sqrt(self.config.width))
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                yield module.weight, drawn(lambda values, generator: values.normal_(generator=generator))
            elif isinstance(module, nn.Linear) and name.endswith((".output", "head")):
                yield module.weight, zeros
            elif isinstance(module, nn.Linear):
                yield module.weight, drawn(lambda values, own: values.uniform_(-bound, bound, generator=own))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.norm(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.cap(self.head(self.norm(x_BTD)))
