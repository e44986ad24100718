"""Classifiers of images whose body has the constant 1 by construction: ours, and those of two libraries.

Each is a sequence that ends with an `nn.Linear` without bias, whose rows have the Euclidean norm 1 (last layer
normalisation; Singla, Singla and Feizi, ICLR 2022): `papers._attacks.certified_radii` reads the rows, and proves the
constant of all before. Ours has the parts of LipNeXt (Hu, Hu and Fredrikson, ICLR 2026): orthogonal maps of patches and
of pixels, which the optimizer keeps orthogonal, shifts between them, and beta-Abs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wellnormed as wn
from wellnormed.constraints import Constraint, Constraints
from wellnormed.constraints.base import State
from wellnormed.norms import Norm

BIASES = 0.1
"""The radius of biases: the RMS of their step over the rate."""
CLASSES = 10


class BetaAbs(nn.Module):
    """The absolute value of the first half of the channels; the others stay.

    Between orthogonal maps it does what MaxMin does, `((a + b) + |a - b|) / 2` and `((a + b) - |a - b|) / 2`, in one
    operation.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.ones(channels))
        self.slopes[: channels // 2] = -1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Reflected.apply(x) if x.requires_grad else F.prelu(x, self.slopes)


class _Reflected(torch.autograd.Function):
    """`BetaAbs` without the gradient of its slopes, which takes most of the time of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.clone()
        y[:, : x.shape[1] // 2].abs_()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore
        (x,) = ctx.saved_tensors
        half, gradient = x.shape[1] // 2, gradient.clone()
        gradient[:, :half].mul_(x[:, :half].sign())
        return gradient


class Shift(nn.Module):
    """Four eighths of the channels move by one pixel, each in a direction of its own; images wrap around.

    Entries are only permuted. With an orthogonal map of each pixel before and after, it stands for an orthogonal
    convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        part = x.shape[1] // 8
        *moved, rest = x.split([part, part, part, part, x.shape[1] - 4 * part], 1)
        moves = ((1, 2), (-1, 2), (1, 3), (-1, 3))
        return torch.cat([*(each.roll(*move) for each, move in zip(moved, moves, strict=True)), rest], 1)


def network(
    shape: Sequence[int], channels: Sequence[int], depths: Sequence[int], hidden: Sequence[int] = ()
) -> nn.Sequential:
    """Ours: stages, each of which halves the side of the image by maps of its patches, and then maps its pixels.

    Args:
        shape: Of an image, `(colours, side, side)`.
        channels: Of every stage, each a multiple of 8.
        depths: Maps of pixels in every stage, each after a shift. A stage without any has none before it, either.
        hidden: Widths of linear layers, between the stages and the last layer.
    """
    layers: list[nn.Module] = []
    before, side = shape[0], shape[1]
    for number, (count, depth) in enumerate(zip(channels, depths, strict=True)):
        layers += [Shift()] * (number > 0 and depth > 0)
        layers += [nn.Conv2d(before, count, 2, stride=2), BetaAbs(count)]
        for _ in range(depth):
            layers += [Shift(), nn.Conv2d(count, count, 1), BetaAbs(count)]
        before, side = count, side // 2
    entries = before * side**2
    layers.append(nn.Flatten())
    return _with_linear_layers(layers, entries, hidden)


def _with_linear_layers(layers: list[nn.Module], entries: int, hidden: Sequence[int]) -> nn.Sequential:
    for width in hidden:
        layers += [nn.Linear(entries, width), BetaAbs(width)]
        entries = width
    return nn.Sequential(*layers, nn.Linear(entries, CLASSES, bias=False))


class Attention(nn.Module):
    """`(1 - share) x + share softmax(q k^T) v` of the vectors x of all pixels, with q, k, v linear in them.

    Queries, keys and values read x in a ball, so that `strength` bounds the logits. With orthogonal maps the change of
    every attended vector is at most `sqrt(1 + strength^2) + strength` times that of the image, whatever the number of
    vectors; all n of them together may change by `sqrt(n)` times as much.
    """

    def __init__(self, width: int, share: float = 0.5, strength: float = 0.5, radius: float = 3.0) -> None:
        super().__init__()
        self.share, self.scale = share, strength / radius**2
        self.ball = wn.nn.BallProjection(radius / math.sqrt(width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.flatten(2).mT
        inside = self.ball(vectors)
        q, k, v = (each(inside) for each in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return ((1 - self.share) * vectors + self.share * seen).mT


def attending(shape: Sequence[int], width: int, hidden: Sequence[int]) -> nn.Sequential:
    """Ours with dot-product attention between the four quarters of an image, each mapped to a vector of that width.

    The constant of its body is at most `1 + sqrt(5) / 2`, and not 1.
    """
    patch = shape[1] // 2
    first = nn.Conv2d(shape[0], width, patch, stride=patch)
    return _with_linear_layers([first, BetaAbs(width), Attention(width), nn.Flatten()], 4 * width, hidden)


@dataclass(frozen=True)
class NearlyOrthogonal(Constraint):
    """All singular values stay near `cap` as by `Orthogonal`, with products in bfloat16: within 0.2%, and unproved.

    They are for training alone: `Orthogonal`, attached afterwards, brings them to the cap and proves it.
    """

    cap: float

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        """Project as `Orthogonal` does."""
        return wn.constraints.Orthogonal(self.cap).project(weights, norm)

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        """One Newton-Schulz step, whose rounding is a share of the change."""
        return norm.on_slices(weights, lambda slices, unit: _newton_schulz_step(slices, self.cap * unit)), state


def _newton_schulz_step(x: Tensor, size: float) -> Tensor:
    """Singular values `s` of `(*batch, m, n)` become `s (3 - (s / size)^2) / 2`."""
    if x.shape[-2] > x.shape[-1]:
        return _newton_schulz_step(x.mT, size).mT
    unit = (x / size).bfloat16()
    missing = torch.eye(x.shape[-2], device=x.device) - unit @ unit.mT
    return x.add(missing.bfloat16() @ unit, alpha=size / 2)


def optimizer_of(
    model: nn.Sequential, lr: float, momentum: float = 0.9, proved: bool = True
) -> tuple[wn.Scion, Constraints]:
    """Spectral steps, after each of which every map is orthogonal again, and no row of the last one longer than 1.

    That is not `proved` of maps with products in bfloat16, until they are given to this function again.
    """
    orthogonal = wn.constraints.Orthogonal if proved else NearlyOrthogonal
    norms: dict[str, Norm] = {}
    radii: dict[str, float] = {}
    constraints: dict[str, Constraint] = {}
    *_, last = model
    for name, layer in model.named_modules():
        match layer:
            case nn.Conv2d():  # the norm of a kernel with K positions is K times its matrix's largest singular value
                norm: Norm = wn.norms.SpectralConv(2, "patches", inner=wn.Spectral(units="l2"))
                constraint: Constraint = orthogonal(radius := float(math.prod(layer.kernel_size)))
            case nn.Linear() if layer is last:
                norm, constraint = wn.norms.RowNorm(), wn.ColumnCap(radius := math.sqrt(layer.in_features))
            case nn.Linear():
                norm, constraint = wn.Spectral(units="l2"), orthogonal(radius := 1.0)
            case _:
                continue
        weight = f"{name}.weight"
        norms[weight], radii[weight], constraints[weight] = norm, radius, constraint
        if layer.bias is not None:
            radii[f"{name}.bias"] = BIASES
    optimizer = wn.Scion(model, lr=lr, momentum=momentum, overrides=norms, radii=radii)
    return optimizer, wn.constrain(optimizer, constraints)


def of_torchlip(shape: Sequence[int], width: int) -> nn.Sequential:
    """The convolutional classifier of deel-torchlip's examples, whose first layer has `width` channels there 16.

    Its layers have their default settings; the last one normalises its rows.
    """
    from deel import torchlip as lip  # pyrefly: ignore[missing-import]

    return lip.Sequential(
        lip.SpectralConv2d(shape[0], width, (3, 3), padding=1),
        lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)),
        lip.SpectralConv2d(width, 2 * width, (3, 3), padding=1),
        lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)),
        nn.Flatten(),
        lip.SpectralLinear(2 * width * (shape[1] // 4) ** 2, 4 * width),
        lip.GroupSort2(),
        lip.FrobeniusLinear(4 * width, CLASSES, bias=False),
    )


def of_orthogonium(shape: Sequence[int], width: int) -> nn.Sequential:
    """The classifier of 2 x 2 patches of orthogonium's model factory, four adaptive orthogonal convolutions deep."""
    from orthogonium.layers import UnitNormLinear  # pyrefly: ignore[missing-import]
    from orthogonium.model_factory.classparam import ClassParam  # pyrefly: ignore[missing-import]
    from orthogonium.model_factory.models_factory import PatchBasedCNN  # pyrefly: ignore[missing-import]

    last = ClassParam(UnitNormLinear, bias=False)
    return PatchBasedCNN(img_shape=tuple(shape), dim=width, depth=4, norm=None, lin=last, n_classes=CLASSES)


def folded(model: nn.Sequential) -> nn.Sequential:
    """The model with plain weights as they are now, in the place of parametrizations, which compute them anew."""
    model.eval()
    for module in model.modules():
        for name in list(getattr(module, "parametrizations", ())):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return model.requires_grad_(False)
