"""The speedrun of GPT-2 and LT's "Modula" baseline, peers of table 1 beside the library's `NanoGPT`.

LT is Training Transformers with Enforced Lipschitz Bounds. Shape suffixes: B batch, T tokens, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wellnormed.models.config import NanoGPTConfig
from wellnormed.models.files import BUILDERS
from wellnormed.models.nanogpt import Attention, Block, NanoGPT
from wellnormed.nn import CausalAttention, Scale, ScaledGELU
from wellnormed.nn.starting import Start
from wellnormed.norms import Gain, Norm


@dataclass(frozen=True)
class SpeedrunConfig(NanoGPTConfig):
    """The record of modded-nanogpt from February to May 2025."""

    architecture: Literal["speedrun"] = "speedrun"  # pyrefly: ignore[bad-override]
    value_tables: int = 3
    """Embeddings that are mixed into the values of as many first and as many last blocks; at most half of the blocks
    have one."""
    without_attention: int = 7
    """Number of the block, from 0, that has no attention; with fewer blocks all have it."""


@dataclass(frozen=True)
class ModulaConfig(NanoGPTConfig):
    """LT's "Modula" baseline."""

    architecture: Literal["modula"] = "modula"  # pyrefly: ignore[bad-override]
    output_factor: float = 1 / 3
    """Factor on the output of attention."""


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
        """Weights start at the numbers that were passed."""
        yield self.weight, lambda weight, _: weight.copy_(torch.tensor(self.start))

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest number."""
        return {"weight": Gain()}

    def forward(self, *xs: Tensor) -> Tensor:
        total = self.weight[0] * xs[0]
        for number, x in enumerate(xs[1:], 1):
            total = total + self.weight[number] * x
        return total


class MixedAttention(Attention):
    """Attention whose values are `a v + b u` with learned a and b, and u of a table where one is passed."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__(config)
        self.mix = LearnedSum(0.5, 0.5)

    def forward(self, x_BTD: Tensor, table_BTD: Tensor | None) -> Tensor:  # pyrefly: ignore[bad-override]
        v_BTD = self.value(x_BTD)
        return self.attended(x_BTD, self.mix(v_BTD) if table_BTD is None else self.mix(v_BTD, table_BTD))


class SpeedrunBlock(Block):
    """A block that begins with a learned mix of the stream and the first activation; one block has no attention."""

    def __init__(self, config: SpeedrunConfig, number: int) -> None:
        super().__init__(config, number)
        self.mix = LearnedSum(1.0, 0.0)
        self.attention = None if number == config.without_attention else MixedAttention(config)

    def forward(self, x_BTD: Tensor, first_BTD: Tensor, table_BTD: Tensor | None) -> Tensor:  # pyrefly: ignore
        x_BTD = self.mix(x_BTD, first_BTD)
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(self.norm(x_BTD), table_BTD)
        return x_BTD + self.feed_forward(self.norm(x_BTD))


class Speedrun(NanoGPT):
    """The record of modded-nanogpt from February to May 2025.

    As `NanoGPT`, and every block begins with a learned mix of the stream and the first activation. The i-th block after
    the middle gets the output of the i-th before it, times a learned number; of an odd number of blocks the one in the
    middle gets none. Embeddings of the tokens are mixed into the values of the first and the last three blocks, or of
    fewer if there are not six blocks. One block has no attention.
    """

    block = SpeedrunBlock

    def add_beside(self, config: SpeedrunConfig) -> None:  # pyrefly: ignore[bad-override]
        """Tables of values, and the factors of the connections from blocks before the middle to those after it."""
        count = config.blocks // 2
        tables = range(min(config.value_tables, count))
        self.tables = nn.ModuleList(nn.Embedding(config.vocabulary_size, config.width) for _ in tables)
        self.skips = nn.ModuleList(LearnedSum(1.0) for _ in range(count))

    def starts(self) -> Iterator[Start]:
        """The start of `NanoGPT`; learned numbers start where their layer says."""
        yield from super().starts()
        for module in self.modules():
            if isinstance(module, LearnedSum):
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


class ModulaAttention(Attention):
    """Attention with <q, k>/d_head, and a factor on its output."""

    def __init__(self, config: ModulaConfig) -> None:
        super().__init__(config)
        self.attend = CausalAttention(config.heads, 1.0)
        self.factor = Scale(config.output_factor)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.factor(super().forward(x_BTD))


class ModulaBlock(Block):
    """Residuals `(L - 1)/L x + 1/L layer(x)` (LT equation 1), L being twice the number of blocks, and scaled GELU."""

    def __init__(self, config: ModulaConfig, number: int) -> None:
        super().__init__(config, number)
        self.attention, self.feed_forward.activation = ModulaAttention(config), ScaledGELU()
        self.added = 1 / (2 * config.blocks)  # L counts attention and feed-forward layers
        self.kept = (2 * config.blocks - 1) / (2 * config.blocks)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.kept * x_BTD + self.added * self.attention(self.norm(x_BTD))
        return self.kept * x_BTD + self.added * self.feed_forward(self.norm(x_BTD))

    def extra_repr(self) -> str:
        return f"kept={self.kept}, added={self.added}"


class Modula(NanoGPT):
    """LT's "Modula" baseline.

    `NanoGPT` with residuals `(L - 1)/L x + 1/L layer(x)`, L being twice the number of blocks, attention with
    <q, k>/d_head and an output factor of 1/3, and GELU with slope at most 1 in the place of squared ReLU. The norms and
    the capped logits stay.
    """

    block = ModulaBlock


BUILDERS.update({SpeedrunConfig: Speedrun, ModulaConfig: Modula})
