"""LipsFormer as a language model (LT appendix E), and its Lipschitz bound as LT evaluates it.

LipsFormer is "LipsFormer: Introducing Lipschitz Continuity to Vision Transformers" (Qi et al., 2023).

Shape suffixes: B batch, T tokens, D width, H heads, K entries of a head (D = H K).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from papers.as_published import cosine_attention, lipsformer
from wellnormed.matrix import spectral_norm
from wellnormed.models.files import BUILDERS
from wellnormed.models.nanogpt import SplitHeads
from wellnormed.nn import CausalAttention, HalfRotary, MergeHeads, Scale, ScaledGELU
from wellnormed.norms import ColNorm, Gain, Norm


@dataclass(frozen=True)
class LipsFormerConfig:
    """LipsFormer as a language model (LT appendix E), another peer of table 1."""

    architecture: Literal["lipsformer"] = "lipsformer"
    """The kind of model that this configures."""
    vocabulary_size: int = 50304
    """Symbols."""
    length: int = 1024
    """Tokens of context."""
    width: int = 768
    """Entries of a token's vector; a multiple of 4 x heads."""
    heads: int = 6
    """Attention heads."""
    blocks: int = 12
    """Pairs of attention and feed-forward layers."""
    expansion: int = 4
    """Hidden width of the feed-forward layer over the width."""
    epsilon: float = 1e-6
    """Added to the squared length of queries, keys and values."""
    temperature: float = 12.0
    """Factor tau on the cosine of a query and a key."""
    value_scale: float = 1.0
    """Length nu of values."""
    drop_path: float = 0.5
    """Probability that training leaves out a layer's branch for a sample, in [0, 1)."""
    rotary_base: float = 1024.0
    """Ratio of the largest angle by which a token's position turns queries and keys to the smallest."""


class CenterNorm(nn.Module):
    """`D/(D - 1) (x - mean(x)) weight + bias`: a layer norm that does not divide by the deviation.

    Example:
        >>> CenterNorm(3)(torch.tensor([1.0, 2.0, 6.0])).detach()
        tensor([-3.0000, -1.5000,  4.5000])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"width={width} must be at least 2: one entry is its own mean")
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.factor = width / (width - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class CosineAttention(nn.Module):
    """`softmax(tau cos(q, k)) v` with values of length nu, over the number of heads, and an output projection.

    Every head's queries, keys and values are divided by `sqrt(|x|^2 + epsilon)`, of which `1/sqrt(epsilon)` is the
    Lipschitz constant. Positions turn queries and keys, which keep their lengths.
    """

    def __init__(self, config: LipsFormerConfig) -> None:
        super().__init__()
        entries = config.width // config.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )
        self.split, self.merge = SplitHeads(config.heads), MergeHeads()
        # x / sqrt(mean(x^2) + epsilon / K) = sqrt(K) x / sqrt(|x|^2 + epsilon); attention divides <q, k> by K
        self.norm = nn.RMSNorm(entries, config.epsilon / entries, elementwise_affine=False)
        self.rotary = HalfRotary(entries, config.rotary_base)
        self.attend = CausalAttention(config.heads, config.temperature)
        self.factor = Scale(config.value_scale / (config.heads * math.sqrt(entries)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (self.norm(self.split(part(x_BTD))) for part in (self.query, self.key, self.value))
        return self.output(self.factor(self.merge(self.attend(self.rotary(q), self.rotary(k), v))))


class FeedForward(nn.Sequential):
    """Linear, scaled GELU, linear."""

    def __init__(self, config: LipsFormerConfig) -> None:
        hidden = config.expansion * config.width
        super().__init__()
        self.input = nn.Linear(config.width, hidden, bias=False)
        self.activation = ScaledGELU()
        self.output = nn.Linear(hidden, config.width, bias=False)


class LearnedResidual(nn.Module):
    """`x + alpha block(x)` with a learned alpha for every entry; training drops the branch of some samples.

    Args:
        block: The module on the branch.
        width: D.
        strength: The alpha to start with.
        drop_path: Probability p that a sample does without the branch, in training mode; otherwise the branch is
            divided by 1 - p, so that its expectation is that of evaluation mode. Torch's global generator draws.

    Shape: `(B, *, D)` -> the same.
    """

    def __init__(self, block: nn.Module, width: int, strength: float, drop_path: float = 0.0) -> None:
        super().__init__()
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path={drop_path} must lie in [0, 1): it is the probability of doing without")
        self.block, self.drop_path = block, drop_path
        self.strength = nn.Parameter(torch.full((width,), strength))

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest alpha."""
        return {"strength": Gain()}

    def forward(self, x: Tensor) -> Tensor:
        branch = self.strength * self.block(x)
        if self.training:
            kept = branch.new_ones(len(x), *[1] * (x.ndim - 1))
            branch = branch * nn.functional.dropout(kept, self.drop_path)
        return x + branch

    def extra_repr(self) -> str:
        return f"drop_path={self.drop_path}"


class LipsFormer(nn.Module):
    """A language model with LipsFormer's layers, on NanoGPT's positions and shapes, as LT trains it.

    Of the eleven changes of LT appendix E, six make the model: CenterNorm, scaled cosine attention with a positive
    epsilon, the factor 1/heads, learned residual strengths that start at one over the number of residual connections,
    Xavier normal matrices divided by their spectral norms, and drop path. The others say how it is trained: no cap on
    any weight, weight decay 0.1 on matrices, Muon for them, Adam with rate 0.001 and betas 0.9 and 0.999 for the rest,
    and a cosine schedule to 0. `python -m papers train --variant lipsformer` does so, with embedding and head among
    the rest, which does not decay.

    LT does not say where CenterNorm stands; here it is before every layer, on the branch, and before the head. There
    its published bound, a product of `1 + alpha L`, can hold; in LipsFormer's released code it is on the stream.
    Embeddings start at RMS 1. The generator decides all draws but those of drop path; None is torch's default.

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.

    Example:
        >>> model = LipsFormer(LipsFormerConfig(vocabulary_size=65, width=16, heads=2, blocks=1))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 65])
    """

    def __init__(self, config: LipsFormerConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.width % (4 * config.heads):
            raise ValueError(
                f"width={config.width} must be a multiple of 4 x heads={config.heads}: the rotary positions turn pairs "
                "of a quarter of a head's entries; choose another width"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        layers: list[nn.Module] = []
        for _ in range(config.blocks):
            for layer in (CosineAttention(config), FeedForward(config)):
                branch = nn.Sequential(CenterNorm(config.width), layer)
                layers.append(LearnedResidual(branch, config.width, 1 / (2 * config.blocks), config.drop_path))
        self.layers = nn.Sequential(*layers)
        self.norm = CenterNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """As the class says; weights that are neither matrices nor embeddings stay."""
        ColNorm(0).initialize_(self.embedding.weight, generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, generator=generator)
                module.weight.div_(spectral_norm(module.weight))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens_BT))))

    def example_input(self) -> Tensor:
        """Integers `(1, length)`: what a certificate of this model is captured with."""
        return torch.zeros(1, self.config.length, dtype=torch.long)


@torch.no_grad()
def lipsformer_bound_as_published(model: LipsFormer, tokens: int = 128) -> float:
    """Decimal logarithm of LT's bound of a LipsFormer (appendix E): theorem 1 in equation 19, mistakes included.

    The product over all residual connections of `1 + alpha L`, with the largest absolute entry of alpha. For attention
    L is `papers.as_published.cosine_attention` of the l2 norms of whole matrices, for a feed-forward layer that of its
    two norms. Output projections, 1/heads, CenterNorm, the embedding and the head do not occur in it, and it says
    nothing of several heads.

    Args:
        model: In any state of training.
        tokens: N of theorem 1, the length of the softmax, so the number of tokens: `model.config.length`. LT evaluates
            it with 128, the entries of a head, which is the default here: its 10^130 is of that number. For 1,024
            tokens the leading term is 64 times larger in every attention layer.

    Example:
        >>> model = LipsFormer(LipsFormerConfig(vocabulary_size=5, width=16, heads=2, blocks=1))
        >>> lipsformer_bound_as_published(model) < lipsformer_bound_as_published(model, tokens=1024)
        True
    """
    config, blocks = model.config, []
    for residual in model.layers:
        assert isinstance(residual, LearnedResidual)
        assert isinstance(residual.block, nn.Sequential)
        layer = residual.block[1]
        matrices = {name: part.weight for name, part in layer.named_children() if isinstance(part, nn.Linear)}
        norm = {name: float(spectral_norm(matrix)) for name, matrix in matrices.items()}
        if isinstance(layer, CosineAttention):
            constant = cosine_attention(
                norm["query"],
                norm["key"],
                norm["value"],
                tokens=tokens,
                tau=config.temperature,
                nu=config.value_scale,
                eps=config.epsilon,
            )
        else:
            constant = norm["input"] * norm["output"]
        blocks.append((float(residual.strength.abs().max()), constant))
    return lipsformer(blocks)


BUILDERS[LipsFormerConfig] = LipsFormer
