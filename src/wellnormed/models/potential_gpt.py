"""A transformer with a chosen Lipschitz constant: blocks whose form gives the constant 1, and a capped head."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.models.base import TokenModel
from wellnormed.models.config import PotentialConfig
from wellnormed.nn import (
    BallProjection,
    CappedEmbedding,
    CausalAttention,
    ConvexPotential,
    HeadProjection,
    MergeHeads,
    OrthogonalJoin,
    PositionAverages,
)
from wellnormed.nn.starting import Start, zeros


class ContentAttention(nn.Module):
    """Attention whose constant in the ball of RMS 1 is `sqrt(1 + t^2) + t`, for logits of at most `t` and a bias.

    The projections to queries, keys and values are orthogonal in every head, so the certificate proves this constant.
    """

    def __init__(self, config: PotentialConfig) -> None:
        super().__init__()
        heads, width = config.attention_heads, config.width
        self.query, self.key, self.value = (HeadProjection(width, heads) for _ in range(3))
        self.attend = CausalAttention(heads, config.attention_logit, config.length, relative_bias=True)
        self.merge = MergeHeads()
        self.join = OrthogonalJoin(width, config.attention_share)

    def parameter_constraints(self) -> dict[str, Constraint]:
        """Every projection has norm 1, in every direction."""
        return {f"{name}.weight": Orthogonal(1.0) for name in ("query", "key", "value")}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.join(x_BTD, self.merge(self.attend(self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))))


class PotentialGPT(TokenModel):
    """Token vectors, causal averages of them side by side, convex potentials and attention, and a map to logits.

    Everything before the head has the constant `config.body_lipschitz`, so that a head of norm `L / body_lipschitz`
    gives the model the constant L. The head starts at zero; the generator decides all other weights (None is torch's
    default).

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.

    Example:
        >>> model = PotentialGPT(PotentialConfig(blocks=1, hidden=32))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 65])
    """

    def __init__(self, config: PotentialConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = CappedEmbedding(config.vocabulary_size, config.token_width)
        self.mixing = PositionAverages(config.length, config.token_width, config.mixing_heads)
        layers: list[nn.Module] = []
        for number in range(config.blocks):
            if number < config.attention_blocks:
                layers += [BallProjection(1.0), ContentAttention(config)]
            layers.append(ConvexPotential(config.width, config.hidden))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(config.width, config.vocabulary_size)
        self.reset_parameters(generator)

    def starts(self) -> Iterator[Start]:
        """The starts of all layers; the biases of attention and the head start at zero."""
        for module in self.modules():
            if isinstance(module, CappedEmbedding | HeadProjection):
                yield module.weight, module.parameter_norms()["weight"].initialize_
            elif isinstance(module, ConvexPotential | OrthogonalJoin | PositionAverages):
                yield from module.starts()
            elif isinstance(module, CausalAttention) and module.bias_HT is not None:
                yield module.bias_HT, zeros
        yield self.head.weight, zeros
        yield self.head.bias, zeros

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.layers(self.mixing(self.embedding(tokens_BT))))
