"""Models of the attack on rounding errors: random ones in a dtype, mixed with layers that round much."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from campaigns.random_models import Drawn, draw_model
from campaigns.random_models.draw import Draw, Layer

UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Dtype -> the largest relative error of one rounding."""
DTYPES = {str(each).removeprefix("torch."): each for each in UNITS}


def _chosen(x: Tensor) -> Tensor:
    """Every other entry along the last axis."""
    return torch.arange(x.shape[-1]) % 2 == 0


def twists(draw: Draw, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Layers for any shape that round more than they change."""
    other, size = draw.choice([each for each in UNITS if each != dtype]), draw.between(1.0, 1e4)
    c, tiny, tenth = math.ldexp(round(size * 256), -8), torch.finfo(dtype).tiny, torch.tensor(0.1, dtype=torch.float64)
    parts = {"a": draw.tensor(1), "b": draw.tensor(1, size=draw.between(0.1, 1e3))}
    functions: dict[str, Callable[..., Tensor]] = {
        "there and back": lambda s, x: (x + c) - c, "added and taken": lambda s, x: x + size * x - size * x,
        "conversion": lambda s, x: x.to(other).to(x.dtype), "far shift": lambda s, x: x + size,
        "small and large": lambda s, x: (x * 1e-3) * 1e3, "least": lambda s, x: x * (tiny * size) * (0.5 / tiny),
        "very small and large": lambda s, x: (x * 1e-30) * 1e30, "thirds": lambda s, x: x / 3 + x / 7 - x,
        "written": lambda s, x: torch.cat([x[..., :1] * 0 + 0.1, x], -1), "limits": lambda s, x: x.clamp(-0.1, 0.7),
        "stored": lambda s, x: x * s.a + s.b, "subtracted from": lambda s, x: torch.rsub(x, 0.3, alpha=0.7),
        "mixed": lambda s, x: (x.float() + 0.1 * x.to(other)).to(x.dtype),
        "twice": lambda s, x: x.tanh() - 0.9 * x.tanh(),
        "assigned": lambda s, x: torch.slice_scatter(x, x[..., :1] * 0.7, -1, 0, 1),
        "linked": lambda s, x: x.lerp(-x, 0.3), "lengths": lambda s, x: x.norm(dim=-1, keepdim=True) + x,
        "summed": lambda s, x: x + x.sum(-1, keepdim=True), "centred": lambda s, x: x - x.mean(-1, keepdim=True),
        "running": lambda s, x: x.cumsum(-1), "where": lambda s, x: torch.where(_chosen(x), x, 0.1),
        "filled": lambda s, x: x.masked_fill(_chosen(x), 0.1),
        "of its shape": lambda s, x: torch.ones_like(x) * 0.7 * x + torch.full_like(x, 0.1),
        "wide": lambda s, x: x * tenth, "wide divisor": lambda s, x: x / (3 * tenth),
        "long mean": lambda s, x: x.mean(-1, True, dtype=torch.float64).to(x.dtype),
        "polynomial": lambda s, x: x * x * 0.3 - 0.7 * x + 0.1, "steep": lambda s, x: (100 * x).tanh(),
        "smooth": lambda s, x: F.softmax(3 * x, -1) + F.log_softmax(x, -1),
        "far cosine": lambda s, x: (x + 1e3).cos(),
        "root": lambda s, x: x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
        "near": lambda s, x: F.normalize(x, dim=-1), "added part": lambda s, x: torch.add(x, x.flip(-1), alpha=-0.3),
        "products": lambda s, x: torch.addcmul(x, x, s.a, value=0.3), "elu": lambda s, x: F.elu(x, 0.7),
        "leaky": lambda s, x: F.leaky_relu(x, 0.1), "number": lambda s, x: F.pad(x, (1, 1), value=0.1),
    }  # fmt: skip
    return {name: Layer(function, **parts) for name, function in functions.items()}


def autocast(inner: nn.Module) -> nn.Module:
    """A module under autocast to bfloat16."""

    def forward(layer: Layer, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer.inner(x)

    return Layer(forward, inner=inner)


def draw_case(seed: int, number: int) -> Drawn:
    """Case `number` of a seed: every other one has one layer or two, where a missing term is seen best."""
    draw, drawn = Draw(seed + 77, number), draw_model(seed, number)
    dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    example, names, modules = drawn.example, list(drawn.layers), list(drawn.model)
    if draw.chance():
        count = draw.choice([1, 1, 2])
        names, modules = names[:count], modules[:count]
    for _ in range(draw.choice([0, 1, 1, 2])):
        known, place = twists(draw, dtype), draw.whole(0 if example.is_floating_point() else 1, len(modules))
        twist = draw.choice(list(known))
        modules.insert(place, known[twist])
        names.insert(place, f"twist: {twist}")
    model = nn.Sequential(*modules)
    if draw.chance(0.15):
        for each in (*model.parameters(), *model.buffers()):
            if each.is_floating_point():
                size = draw.choice([1.0, 1.0, 1e-30, 1e30, 1e-38, 100.0, 1e-3])
                each.data = each.data * (0.01 if dtype == torch.float16 else size)
    model = model.to(dtype).eval()
    if dtype == torch.float32 and draw.chance(0.2):
        names.append("autocast")
        model = autocast(model)
    radius = drawn.radius * draw.choice([1.0, 1.0, 1.0, 0.1, 1e-3, 30.0])
    return Drawn(number, model, example.to(dtype) if example.is_floating_point() else example, radius, tuple(names))
