"""Lipschitz bounds as papers state them, mistakes included: to be shown beside ours, never to be relied on.

LT is "Training Transformers with Enforced Lipschitz Constants". A search exceeds `attention` for several heads and
`transformer` with it (the test suite keeps such searches); `docs/sound-bounds.md` says what is wrong and what holds.
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal

import torch
from torch import nn

from wellnormed.models.gpt import GPT
from wellnormed.norms import Spectral

Formula = Literal["text", "9c3c1b4", "16cccff"]
"""LT's: that of appendix D, and those of its code from 7 May and from 12 June 2025, named by their commits."""
_ONE = Decimal(1)


def attention(query: float, key: float, value: float, scale: float = 1.0, radius: float = 1.0) -> float:
    """LT theorem D.1 with equations 20 to 23: `sqrt(s) max(1, v max(q, k) r^2) (q + k + v) / 3`.

    From RMS -> RMS norms of whole matrices, for inputs of RMS at most `radius`, times the block's own factor of 1/3. It
    is no bound for several heads, nor for a scale above 1.

    Example:
        >>> attention(1.0, 1.0, 1.0)
        1.0
    """
    return math.sqrt(scale) * max(1.0, value * max(query, key) * radius**2) * (query + key + value) / 3


@torch.no_grad()
def whole_norms(model: nn.Module) -> dict[str, float]:
    """Name -> proved RMS -> RMS norm of every whole matrix, from which any formula of norms follows without a run."""
    return {name: float(Spectral().upper_bound(p)) for name, p in model.named_parameters() if p.ndim == 2}


def transformer(model: GPT, equation_20: bool = True, norms: Mapping[str, float] | None = None) -> float:
    """`of_norms` of a `GPT`'s `whole_norms`, which may be passed where they are known, by the text's formula.

    Example:
        >>> from wellnormed.models import GPTConfig
        >>> model = GPT(GPTConfig(width=16, blocks=1, length=8))
        >>> nn.init.orthogonal_(model.head.weight).shape
        torch.Size([65, 16])
        >>> transformer(model) < 1
        True
    """
    norms, config = whole_norms(model) if norms is None else norms, model.config
    return of_norms(norms, config.residual_strength, config.attention_scale, equation_20)


def of_norms(
    norms: Mapping[str, float], share: float, scale: float = 1.0, equation_20: bool = True, formula: Formula = "text"
) -> float:
    """Decimal logarithm of what LT says of a `GPT` whose matrices have these norms, and vectors of the embedding 1.

    Appendix D divides feed-forward layers by 1.1289 although their activation is scaled by that already, and takes the
    norm of a whole projection for that of every head. Each formula takes every residual connection for a convex one,
    also in a model with plain ones (`GPTConfig.residual`). In the code of May the constant of a block is added to that
    of the stream instead of multiplying it, and is the product of its matrices' norms. That of June compounds, and has
    another attention than the text.

    Args:
        norms: The `whole_norms` of the model.
        share: Of a block in its residual connection, `GPTConfig.residual_strength`.
        scale: Of attention, `GPTConfig.attention_scale`.
        equation_20: Whether an attention scale other than 1 multiplies attention by its root, as LT prints it. The
            "at most 10" of LT's table 1 follows neither with it nor without: at cap 1, attention scale sqrt(128) and
            logit scale 8 the formula says 23.3 and 7.6. Only the text's formula knows it.
        formula: Which one.
    """
    blocks: dict[int, dict[str, Decimal]] = {}
    for name, norm in norms.items():
        if found := re.fullmatch(r"layers\.(\d+)\.block\.(\w+)\..*weight", name):
            blocks.setdefault(int(found[1]), {})[found[2]] = Decimal(norm)
    constant, a, root = Decimal("1.1289"), Decimal(share), Decimal(scale if equation_20 else 1).sqrt()
    radius = lipschitz = _ONE
    for _, block in sorted(blocks.items()):
        if "query" in block:
            query, key, value, output = (block[part] for part in ("query", "key", "value", "output"))
            size, product = output * value, query * key * value * output
            own = root * max(_ONE, value * max(query, key) * radius**2) * (query + key + value) * output / 3
            if formula == "16cccff":
                own = Decimal(scale) * (size + 2 * product * radius**2) / 3
                size /= 3
        else:
            product = block["input"] * block["output"]
            size = own = product / constant
        lipschitz = (1 - a) * lipschitz + a * (product if formula == "9c3c1b4" else lipschitz * own)
        radius *= 1 - a + a * size
    return float((lipschitz * Decimal(norms["head.weight"])).log10())


def cosine_attention(
    query: float, key: float, value: float, *, tokens: int = 128, tau: float = 12.0, nu: float = 1.0, eps: float = 1e-6
) -> float:
    """LipsFormer's theorem 1 of scaled cosine attention, from l2 norms of whole matrices (LT appendix E).

    `2 N (N - 1) nu tau |K| / sqrt(eps) + 2 (N - 1) nu tau |Q| / sqrt(eps) + 2 N nu |V| / sqrt(eps)`. LT puts 128, the
    width of a head, for N, which is the number of tokens; with its 1,024 tokens the first term is 64 times larger.

    Example:
        >>> f"{cosine_attention(1.0, 1.0, 1.0):.4g}"
        '3.934e+08'
    """
    n, root = tokens, math.sqrt(eps)
    return (2 * n * (n - 1) * nu * tau * key + 2 * (n - 1) * nu * tau * query + 2 * n * nu * value) / root


def lipsformer(blocks: Sequence[tuple[float, float]]) -> float:
    """Decimal logarithm of LipsFormer's equation 19, `prod (1 + alpha L)`, of the (alpha, L) of all residual blocks.

    LT finds 1.97e129 with its trained norms, which it does not print; alpha is about 0.5 for attention and 0.15 for
    feed-forward blocks.

    Example:
        Norms near 12 in every matrix of 12 blocks would give the published number:

        >>> block = [(0.5, cosine_attention(12.0, 12.0, 12.0)), (0.15, 12.0**2)]
        >>> round(lipsformer(block * 12))
        129
    """
    return math.fsum(math.log10(1 + alpha * constant) for alpha, constant in blocks)
