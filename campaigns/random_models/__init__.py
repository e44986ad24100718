"""Small random models over all operations that a certificate bounds; model k of seed s is the same everywhere.

A model is a chain of layers, drawn one after another from those that fit the shape at hand: vectors `(B, D)`, tokens
`(B, T, D)`, images `(B, C, H, W)` and volumes. `campaigns.soundness` attacks their certificates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from campaigns.random_models import entries as entries  # registers layers
from campaigns.random_models import images as images
from campaigns.random_models import tokens as tokens
from campaigns.random_models.draw import FAMILIES, OFTEN, Draw, Shape, draw_layer


@dataclass(frozen=True)
class Drawn:
    """A model with its example input and domain."""

    number: int
    model: nn.Module
    example: Tensor
    radius: float
    layers: tuple[str, ...]
    """Names of its layers."""


LAYERS = {f"{family}: {name}": entry for family, members in FAMILIES.items() for name, entry in members.items()}
"""All layers, under their family and name."""


def _input_shape(draw: Draw, ranks: Sequence[int]) -> Shape:
    rank, batch = draw.choice(ranks), 1 if draw.chance(0.7) else 2
    if rank == 2:
        return batch, draw.width()
    if rank == 3:
        return batch, draw.width(8), draw.width()
    sizes = (
        (draw.whole(1, 6), draw.whole(1, 6)) if rank == 4 else (draw.whole(1, 3), draw.whole(1, 4), draw.whole(1, 4))
    )
    return batch, draw.width(6), *sizes


def draw_model(seed: int, number: int) -> Drawn:
    """Model `number` of a seed: every fourth is one layer alone, all in turn; the others are chains of 1 to 8."""
    draw = Draw(seed, number)
    radius = draw.between(0.1, 10.0)
    alone = list(LAYERS)[number // 4 % len(LAYERS)] if number % 4 == 3 else ""
    while True:
        draw.products = 0
        shape = _input_shape(draw, LAYERS[alone][1] if alone else (2, 3, 3, 3, 3, 4, 4, 4, 5))
        modules: list[nn.Module] = []
        names: list[str] = []
        example = torch.zeros(shape)
        if len(shape) == 3 and not alone and draw.chance(0.15):
            table = draw.tensor(7, shape[-1], size=1.0)
            table *= 0.999 * radius / table.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).amax()
            modules.append(nn.Embedding.from_pretrained(table))
            names.append("input: embedding")
            example = torch.arange(math.prod(shape[:2])).reshape(shape[:2]) % 7
        depth = draw.whole(1, 8)
        for _ in range(1 if alone else 12 * depth):
            family, _, name = alone.partition(": ")
            one = draw_layer(draw, shape, family or draw.choice(OFTEN), name)
            if one is not None:
                names.append(one[0])
                modules.append(one[1])
                shape = one[2]
            if len(modules) >= depth:
                break
        if names and names[-1] != "input: embedding":
            return Drawn(number, nn.Sequential(*modules).eval(), example, radius, tuple(names))
