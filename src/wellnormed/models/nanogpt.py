"""The unconstrained peers of LT's table 1: the speedrun of GPT-2 and the two models that LT makes of it.

Shape suffixes: B batch, T tokens, D width, H heads, K entries of a head (D = H K).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wellnormed.models.base import TokenModel
from wellnormed.models.config import NanoGPTConfig
from wellnormed.nn import CausalAttention, HalfRotary, MergeHeads, Scale, ScaledGELU
from wellnormed.nn.starting import Start, drawn, zeros
from wellnormed.norms import Gain, Norm


class LearnedSum(nn.Module):
    """`sum_i weight_i x_i` of tensors of one shape, with one learned number each; of fewer tensors, the first numbers.

    Example:
        >>> LearnedSum(1.0, 0.5)(torch.ones(2), torch.full((2,), 4.0)).detach()
        tensor([3., 3.])
    """

    def __init__(self, *start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.tensor(start))

    def starts(self) -> Iterator[Start]:
        """The numbers that were passed."""
        yield self.weight, lambda weight, _: weight.copy_(torch.tensor(self.start))

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest number."""
        return {"weight": Gain()}

    def forward(self, *xs: Tensor) -> Tensor:
        total = self.weight[0] * xs[0]
        for number, x in enumerate(xs[1:], 1):
            total = total + self.weight[number] * x
        return total


class SquaredReLU(nn.Module):
    """`max(0, x)^2`: of no Lipschitz constant, but for inputs that are bounded."""

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
    """Causal attention with normed queries and keys, turned by their positions.

    Args:
        config: Of the model.
        mixes_values: Whether values are `a v + b u` with learned a and b, and u of a table where one is passed.
    """

    def __init__(self, config: NanoGPTConfig, mixes_values: bool) -> None:
        super().__init__()
        entries, modula = config.width // config.heads, config.variant == "modula"
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )
        self.split, self.merge = SplitHeads(config.heads), MergeHeads()
        self.norm = nn.RMSNorm(entries, config.epsilon, elementwise_affine=False)
        self.rotary = HalfRotary(entries, config.rotary_base)
        self.mix = LearnedSum(0.5, 0.5) if mixes_values else None
        self.attend = CausalAttention(config.heads, 1.0 if modula else config.attention_scale * entries)
        self.factor = Scale(config.output_factor) if modula else nn.Identity()

    def forward(self, x_BTD: Tensor, table_BTD: Tensor | None) -> Tensor:
        q_BHTK, k_BHTK = (self.rotary(self.norm(self.split(part(x_BTD)))) for part in (self.query, self.key))
        v_BTD = self.value(x_BTD)
        if self.mix is not None:
            v_BTD = self.mix(v_BTD) if table_BTD is None else self.mix(v_BTD, table_BTD)
        heads_BHTK = self.attend(q_BHTK, k_BHTK, self.split(v_BTD))
        return self.factor(self.output(self.merge(heads_BHTK)))


class FeedForward(nn.Sequential):
    """Linear, squared ReLU or scaled GELU, linear."""

    def __init__(self, config: NanoGPTConfig) -> None:
        hidden = config.expansion * config.width
        super().__init__()
        self.input = nn.Linear(config.width, hidden, bias=False)
        self.activation = ScaledGELU() if config.variant == "modula" else SquaredReLU()
        self.output = nn.Linear(hidden, config.width, bias=False)


class Block(nn.Module):
    """Attention and a feed-forward layer on a residual stream, each behind an RMS norm.

    Args:
        config: Of the model.
        number: Of the block, from 0.
    """

    def __init__(self, config: NanoGPTConfig, number: int) -> None:
        super().__init__()
        speedrun = config.variant == "speedrun"
        self.mix = LearnedSum(1.0, 0.0) if speedrun else None
        self.norm = nn.RMSNorm(config.width, config.epsilon, elementwise_affine=False)
        self.attention = None if speedrun and number == config.without_attention else Attention(config, speedrun)
        self.feed_forward = FeedForward(config)
        # LT equation 1, where L counts attention and feed-forward layers
        count = 2 * config.blocks
        self.kept, self.added = ((count - 1) / count, 1 / count) if config.variant == "modula" else (1.0, 1.0)

    def forward(self, x_BTD: Tensor, first_BTD: Tensor, table_BTD: Tensor | None) -> Tensor:
        if self.mix is not None:
            x_BTD = self.mix(x_BTD, first_BTD)
        if self.attention is not None:
            x_BTD = self.kept * x_BTD + self.added * self.attention(self.norm(x_BTD), table_BTD)
        return self.kept * x_BTD + self.added * self.feed_forward(self.norm(x_BTD))

    def extra_repr(self) -> str:
        return f"kept={self.kept}, added={self.added}"


class NanoGPT(TokenModel):
    """The speedrun of GPT-2, or LT's "NanoGPT" or "Modula" baseline, by `config.variant`.

    - `speedrun`: the record of modded-nanogpt from February to May 2025. RMS norms without gains before every layer and
      before the head, and of queries and keys; rotary positions in half of the pairs; squared ReLU; logits capped by a
      sigmoid. Every block begins with a learned mix of the stream and the first activation. The i-th block after the
      middle gets the output of the i-th before it, times a learned number; of an odd number of blocks the one in the
      middle gets none. Embeddings of the tokens are mixed into the values of the first and the last three blocks, or
      of fewer if there are not six blocks. One block has no attention.
    - `nanogpt`: the same without these shortcuts, tables and learned numbers, with attention in every block.
    - `modula`: `nanogpt` with residuals `(L - 1)/L x + 1/L layer(x)`, L being twice the number of blocks, attention
      with <q, k>/d_head and an output factor of 1/3, and GELU with slope at most 1 in the place of squared ReLU. The
      norms and the capped logits stay.

    Two things differ from the record. Attention is causal over the whole window, not over sliding windows within a
    document. Weights and activations have one dtype, where the record multiplies the head in 8 bits.

    Matrices start as in the record: uniform of standard deviation `1 / (2 sqrt(width))`, output projections and the
    head at zero, embeddings standard normal. The generator decides the draws; None is torch's default.

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.

    Example:
        >>> model = NanoGPT(NanoGPTConfig(vocabulary_size=65, width=16, heads=2, blocks=3))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 65])
    """

    def __init__(self, config: NanoGPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.variant not in ("speedrun", "nanogpt", "modula"):
            raise ValueError(f"variant must be speedrun, nanogpt or modula, got {config.variant!r}")
        if config.width % (4 * config.heads):
            raise ValueError(
                f"width={config.width} must be a multiple of 4 x heads={config.heads}: the rotary positions turn "
                "pairs of a quarter of a head's entries; choose another width"
            )
        self.config = config
        skips = tables = 0
        if config.variant == "speedrun":
            skips = config.blocks // 2
            tables = min(config.value_tables, skips)
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.norm = nn.RMSNorm(config.width, config.epsilon, elementwise_affine=False)
        self.tables = nn.ModuleList(nn.Embedding(config.vocabulary_size, config.width) for _ in range(tables))
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.blocks))
        self.skips = nn.ModuleList(LearnedSum(1.0) for _ in range(skips))
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.cap = LogitSoftCap(config.logit_cap, config.logit_width)
        self.reset_parameters(generator)

    def starts(self) -> Iterator[Start]:
        """The start that the class describes; learned numbers start where their layer says."""
        bound = math.sqrt(3) / (2 * math.sqrt(self.config.width))
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                yield module.weight, drawn(lambda values, generator: values.normal_(generator=generator))
            elif isinstance(module, nn.Linear) and name.endswith((".output", "head")):
                yield module.weight, zeros
            elif isinstance(module, nn.Linear):
                yield module.weight, drawn(lambda values, own: values.uniform_(-bound, bound, generator=own))
            elif isinstance(module, LearnedSum):
                yield from module.starts()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = first_BTD = self.norm(self.embedding(tokens_BT))
        tables = [table(tokens_BT) for table in self.tables]
        between = len(self.blocks) - 2 * len(tables)
        outputs: list[Tensor] = []
        for number, (block, table) in enumerate(zip(self.blocks, [*tables, *[None] * between, *tables], strict=True)):
            after = number - (len(self.blocks) - len(self.skips))  # of the blocks that get a skip connection
            if after >= 0:
                x_BTD = x_BTD + self.skips[after](outputs.pop())
            x_BTD = block(x_BTD, first_BTD, table)
            if number < len(self.skips):
                outputs.append(x_BTD)
        return self.cap(self.head(self.norm(x_BTD)))
