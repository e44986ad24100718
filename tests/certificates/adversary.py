"""The other side of a bound: the largest gain, norm and entry that a search finds, in float64."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellnormed.certificates import capture
from wellnormed.lowering.ledger import Ledger
from wellnormed.lowering.operations.source import source
from wellnormed.lowering.walk import Walk
from wellnormed.program.domain import default_axes
from wellnormed.proof import Bounds
from wellnormed.proof.value import Value

ROUNDING = 1e-9
"""Relative share of a measured number that float64 may have added to it: the rounding of a few hundred operations."""


class Net(nn.Module):
    """A function of itself and its inputs; holds tensors as buffers, and modules."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, each in held.items():
            self.register_buffer(name, each) if type(each) is Tensor else setattr(self, name, each)

    def forward(self, x: Tensor, *others: Any, **keywords: Any) -> Any:
        return self.function(self, x, *others, **keywords)


def random_weights(model: nn.Module, size: float = 0.5, seed: int = 1) -> nn.Module:
    """The model in evaluation mode with random weights and biases of this size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def drawn(seed: int = 0) -> torch.Generator:
    """A generator with this seed."""
    return torch.Generator().manual_seed(seed)


def walked(model: nn.Module, example: Any, radius: float = 1.0) -> tuple[Walk, Value]:
    """A model's certificate: the walk, and the result."""
    walk = Walk(capture(model, example, whole_batch=True), radius)
    return walk, walk.run()


def bounds_of(model: nn.Module, example: Any, radius: float = 1.0) -> Bounds:
    """The bounds of a model's result, group by group."""
    walk, out = walked(model, example, radius)
    bounds = walk.ledger.proof.rows[out.name].bounds
    assert bounds is not None
    return bounds


def begin(shape: tuple[int, ...], radius: float = 1.0) -> tuple[Ledger, Value]:
    """A ledger with an input, to which operations are applied by hand."""
    ledger = Ledger(radius)
    return ledger, source(ledger, shape, "x")


@dataclass
class Found:
    """What a search found, for every group of the result; axes of a group have size 1."""

    radius: np.ndarray
    gain: np.ndarray
    largest: np.ndarray


def lengths(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Euclidean norms of groups."""
    return torch.linalg.vector_norm(x, dim=axes, keepdim=True)


def over(x: Tensor, size: Tensor) -> Tensor:
    """`x / size`, and 0 where both are."""
    return x / size.clamp(min=1e-300)


def directions(pulled: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The change of unit size (root mean square 1 in every group) on which a functional is largest."""
    entries = math.prod(pulled.shape[a] for a in axes)
    return over(pulled, lengths(pulled, axes)) * math.sqrt(entries)


def within(x: Tensor, radius: float) -> Tensor:
    """The nearest point of the domain."""
    axes = default_axes(x.shape)
    entries = math.prod(x.shape[a] for a in axes)
    return x * (radius * math.sqrt(entries) / lengths(x, axes).clamp(min=1e-300)).clamp(max=1.0)


def search(
    model: nn.Module,
    example: Tensor,
    radius: float = 1.0,
    steps: int = 25,
    restarts: int = 3,
    seed: int = 0,
    starts: tuple[Tensor, ...] = (),
    axes: tuple[int, ...] | None = None,
) -> Found:
    """Climb the gain and the norm of the result from random points of the domain.

    Each step does one alternation of the power method for the norm "largest RMS of an input group -> largest norm of a
    group of the result" and one ascent step of the input. Finite differences of random pairs see jumps.
    """
    generator = torch.Generator().manual_seed(seed)
    function = copy.deepcopy(model).double().requires_grad_(False)
    inner = default_axes(example.shape)
    found: Found | None = None
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        outputs = function(example.double())
        outer = (default_axes(outputs.shape) if axes is None else axes) if outputs.ndim else ()
        for number in range(restarts + len(starts)):
            if number < len(starts):
                x = within(starts[number].double(), radius)
            else:
                x = directions(torch.randn(example.shape, generator=generator, dtype=torch.float64), inner) * radius
                x = x * (1.0, 0.3, 1e-3)[number % 3]
            u = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
            velocity = torch.zeros_like(x)
            for step in range(steps):
                y, gain, u, uphill = _alternate(function, x, u, inner, outer)
                found = _keep(found, y, gain, outer)
                velocity = 0.8 * velocity + over(uphill, uphill.abs().max())
                rate = 0.5 * radius * (1 - step / steps) * (0.1 if step % 3 == 2 else 1.0)
                x = within(x + over(rate * velocity, velocity.abs().max()), radius)
            for size in (1e-4, 1e-2, 1.0):
                change = size * radius * directions(torch.randn(x.shape, generator=generator).double(), inner)
                other = within(x + change, radius)
                distance = float((lengths(other - x, inner) / math.sqrt(math.prod(x.shape[a] for a in inner))).max())
                if distance > 1e-6 * radius:
                    y = function(other)
                    found = _keep(found, y, lengths(y - function(x), outer) / distance, outer)
            x = _longest(function, x, radius, inner, outer, steps)
            y = function(x)
            found = _keep(found, y, torch.zeros_like(lengths(y, outer)), outer)
    assert found is not None
    return found


def _alternate(
    function: nn.Module, x: Tensor, u: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result, gains, the output direction of the group with the largest gain, and which way the gain grows."""
    x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
    y = function(x)
    if not y.requires_grad:
        return y, torch.zeros_like(lengths(y, outer)), u.detach(), torch.zeros_like(x)
    root = math.sqrt(math.prod(x.shape[a] for a in inner))
    (pulled,) = torch.autograd.grad((y * u).sum(), x, create_graph=True)
    try:
        uphill, pushed = torch.autograd.grad(
            lengths(pulled, inner).sum() * root, (x, u), allow_unused=True, materialize_grads=True
        )
    except RuntimeError:  # a few operations have no second derivative: a secant instead, and a random step
        change = 1e-6 * directions(pulled.detach(), inner)
        pushed = (function(x + change) - function(x)).detach() * 1e6 * (1 - ROUNDING)
        uphill = change * 1e6
    gain = lengths(pushed, outer)
    chosen = gain == gain.max()
    return y.detach(), gain, over(torch.where(chosen, pushed, 0.0), gain.max()), torch.nan_to_num(uphill)


def _longest(
    function: nn.Module, x: Tensor, radius: float, inner: tuple[int, ...], outer: tuple[int, ...], steps: int
) -> Tensor:
    """Climb the norm of the longest group of the result."""
    for step in range(steps):
        x = x.detach().requires_grad_()
        y = function(x)
        if not y.requires_grad:
            return x
        (uphill,) = torch.autograd.grad(lengths(y, outer).max(), x)
        x = within(x + radius * 2.0 ** (-step / 4) * directions(uphill, inner), radius)
    return x.detach()


def _keep(found: Found | None, y: Tensor, gain: Tensor, outer: tuple[int, ...]) -> Found:
    y = y.detach()
    entry = y.abs().amax(outer, keepdim=True) if outer else y.abs()
    new = Found(lengths(y, outer).numpy(), gain.detach().numpy(), entry.numpy())
    if found is None:
        return new
    return Found(*(np.fmax(getattr(found, k), getattr(new, k)) for k in ("radius", "gain", "largest")))


def attained(bounds: Bounds, found: Found) -> float:
    """Share of the proved gain that was found; an error if anything exceeds its bound."""
    for kind in ("radius", "gain", "largest"):
        proved, measured = getattr(bounds, kind), getattr(found, kind)
        assert np.isfinite(measured).all()
        for limit, size in zip(np.broadcast_to(proved, measured.shape).flat, measured.flat, strict=True):
            assert Decimal(float(size)) * Decimal(1 - ROUNDING) <= limit, f"{kind} {size} exceeds {float(limit)}"
    proved = max(bounds.gain.flat)
    return float(found.gain.max()) / float(proved) if proved else 1.0


def attack(model: nn.Module, example: Tensor, radius: float = 1.0, **settings: Any) -> float:
    """Bound a model and search against the bound; the share of the proved gain that was found."""
    return attained(bounds_of(model, example, radius), search(model, example, radius, **settings))


def largest_gain_of_matrix(matrix: Tensor, groups: list[list[int]], seed: int = 0, restarts: int = 8) -> float:
    """Largest `|A x|` over x with every group of entries in its unit ball times `sqrt` of its size, from below.

    Exact for one group; the power method of mixed norms otherwise.
    """
    weights = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for group in groups:
        weights[group] = math.sqrt(len(group))
    scaled = matrix * weights
    if len(groups) == 1:
        return float(torch.linalg.matrix_norm(scaled, 2))
    number = torch.empty(matrix.shape[1], dtype=torch.long)
    for i, group in enumerate(groups):
        number[group] = i
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(restarts, len(matrix), generator=generator, dtype=torch.float64)
    best = 0.0
    for _ in range(60):
        pulled = u @ scaled
        squares = torch.zeros(restarts, len(groups), dtype=torch.float64).index_add_(1, number, pulled.square())
        x = pulled / squares.sqrt().clamp(min=1e-300)[:, number]
        y = x @ scaled.mT
        sizes = torch.linalg.vector_norm(y, dim=1)
        best = max(best, float(sizes.max()))
        u = y / sizes.clamp(min=1e-300)[:, None]
    return best


def groups_of(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[list[int]]:
    """Flat positions of the entries of every group along the given axes."""
    outer = [1 if a in axes else n for a, n in enumerate(shape)]
    numbers = np.broadcast_to(np.arange(math.prod(outer)).reshape(outer), shape).reshape(-1)
    return [np.flatnonzero(numbers == i).tolist() for i in range(math.prod(outer))]
