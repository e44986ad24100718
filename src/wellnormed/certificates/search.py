"""The other side of a certificate: the largest gain that a search finds, in the certificate's own norms."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellnormed._inputs import require_module, require_numbers
from wellnormed.certificates.tracing import trace
from wellnormed.certificates.walker import embedding_node
from wellnormed.nn import CausalAttention, HeadProjection, PositionMix, PositionMixing

_DEFAULT_LENGTH = 16
_ROUNDING = 1e-9
"""Relative share taken off a measured gain: more than the float64 rounding of a few hundred operations."""


@dataclass(frozen=True)
class LowerBound:
    """A gain that the model has: no Lipschitz constant in this norm is smaller."""

    value: float
    """Largest RMS change of an output token over largest RMS change of an input token."""
    x_TD: Tensor
    """Where it was measured: T tokens of the domain."""
    direction_TD: Tensor
    """The input change that attains it, of token RMS 1 before scaling."""
    step: float
    """Length of the change; 0 means a Jacobian-vector product."""


def lower_bound(
    model: nn.Module,
    radius: float = 1.0,
    steps: int = 100,
    generator: torch.Generator | None = None,
    batch: int = 4,
    length: int | None = None,
    width: int | None = None,
) -> LowerBound:
    """Search the domain for the input and the direction with the largest gain, in float64.

    Every step does one alternation of the power method for the norm "largest token RMS -> largest token RMS" (the dual
    of a direction has RMS 1 at every input token; the dual of an output change is one unit vector at one token) and one
    ascent step on the inputs, all by double backward passes. As many steps of a random search around the best input
    follow, which cross the edges of piecewise linear functions; at the end it measures the same direction over finite
    distances.

    Args:
        model: As for `certify`.
        radius: Largest RMS of an input token.
        steps: Iterations.
        generator: Source of the starting points.
        batch: How many starting points are searched at once.
        length: Tokens of an input; by default 16, or fewer if the model holds fewer.
        width: Entries of an input token; found out if the model begins with an embedding or a matrix.

    Raises:
        ValueError: `width` is needed, a number is not positive, or the model cannot be traced.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(layer.weight)
        >>> round(lower_bound(layer, steps=5).value, 6)
        1.0
    """
    require_module("lower_bound", model)
    sizes = {"steps": steps, "batch": batch, "length": length, "width": width}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    require_numbers("lower_bound: ", {"radius": radius})
    require_numbers("lower_bound: ", sizes, whole=True)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"lower_bound: generator={generator!r} is no torch.Generator; pass one, or None")
    for name, value in {"radius": radius, **sizes}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"lower_bound: {name}={value} must be positive and finite")
    function, found_width = continuous(model)
    width = width or found_width
    if width is None:
        raise ValueError(
            "width=None, and the model begins with neither an embedding nor a matrix; pass its input's width"
        )
    shape = (batch, length or _length(model), width)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = x / rms(x)  # on the sphere, where attention is sharpest
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        best = _search(function, x * radius, radius, steps, generator)
        best = _wander(function, best, radius, steps, batch, generator)
        best = _lengthen(function, best, radius)
    return replace(best, value=best.value * (1 - _ROUNDING))


def continuous(model: nn.Module) -> tuple[nn.Module, int | None]:
    """A float64 copy of the model on its certificate's input variable, and that variable's width if known."""
    graph = trace(copy.deepcopy(model).double().requires_grad_(False))
    embedding = embedding_node(graph)
    (placeholder,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    if embedding is None:
        return graph, _width(graph, placeholder)
    table = graph.get_submodule(str(embedding.target)).weight
    assert isinstance(table, Tensor)
    embedding.replace_all_uses_with(placeholder)
    graph.graph.erase_node(embedding)
    graph.recompile()
    return graph, table.shape[1]


def rms(x: Tensor) -> Tensor:
    """RMS over the last dimension, kept."""
    return x.square().mean(-1, keepdim=True).sqrt()


def over(x: Tensor, size: Tensor) -> Tensor:
    """`x / size`, and 0 where both are."""
    return x / size.clamp(min=1e-300)


def gains(function: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Jacobian J of `function` at x `(batch, T, D)`, seen from both sides, and which way its gain grows.

    `u` holds output directions: one unit vector at one token of each sample, zeros elsewhere. Returns the input
    directions of RMS 1 at every token that maximise `<u, J direction>`; J times them, at all output tokens; and the
    gradient of the maximum with respect to x.
    """
    x = x.detach().requires_grad_()
    u = u.detach().requires_grad_()
    (pulled,) = torch.autograd.grad((function(x) * u).sum(), x, create_graph=True)
    # max over directions of RMS 1 per token of <J^T u, direction>; its derivative by u is J direction
    maximum = torch.linalg.vector_norm(pulled, dim=-1).sum() * math.sqrt(x.shape[-1])
    if not maximum.requires_grad:  # J^T u does not depend on x or u: u was zero
        return torch.zeros_like(x), torch.zeros_like(u), torch.zeros_like(x)
    uphill, pushed = torch.autograd.grad(maximum, (x, u), allow_unused=True, materialize_grads=True)
    return over(pulled, rms(pulled)).detach(), pushed, torch.nan_to_num(uphill)


def _search(function: nn.Module, x: Tensor, radius: float, steps: int, generator: torch.Generator | None) -> LowerBound:
    u = torch.randn(function(x).shape, dtype=torch.float64, generator=generator)
    best = LowerBound(0.0, x[0], torch.ones_like(x[0]), 0.0)
    velocity = torch.zeros_like(x)
    for step in range(steps):
        direction, pushed, uphill = gains(function, x, u)
        value, u = _largest(pushed)
        best = _better(best, value, x, direction)
        velocity = 0.8 * velocity + over(uphill, rms(uphill).amax(-2, keepdim=True))
        rate = 0.3 * radius * (1 - step / steps)
        x = x + over(rate * velocity, rms(velocity).amax(-2, keepdim=True))
        x = x * (radius / rms(x)).clamp(max=1.0)
    return best


def _wander(
    function: nn.Module, best: LowerBound, radius: float, rounds: int, batch: int, generator: torch.Generator | None
) -> LowerBound:
    """Random changes of the best input, longer after a success and shorter after a failure."""
    pushed = torch.func.jvp(function, (best.x_TD[None],), (best.direction_TD[None],))[1]
    u, size = _largest(pushed)[1], 0.3 * radius
    for _ in range(rounds):
        x = best.x_TD + size * torch.randn((batch, *best.x_TD.shape), dtype=torch.float64, generator=generator)
        x = x * (radius / rms(x)).clamp(max=1.0)
        direction, pushed, _ = gains(function, x, u.expand(batch, *u.shape[1:]))
        value, units = _largest(pushed)
        found = _better(best, value, x, direction)
        if found is best:
            size *= 0.95
        else:
            best, size = found, 1.3 * size
            u = units[value.argmax()][None]
    return best


def _better(best: LowerBound, value: Tensor, x: Tensor, direction: Tensor) -> LowerBound:
    """What is best of a batch, where that is finite and more than the best so far."""
    leader = int(value.argmax())
    if not best.value < float(value[leader]) < math.inf:
        return best
    return LowerBound(float(value[leader]), x[leader].clone(), direction[leader].clone(), 0.0)


def _largest(pushed: Tensor) -> tuple[Tensor, Tensor]:
    """RMS of each sample's largest output token; that token, zeros elsewhere, in units that make gains RMS -> RMS."""
    value, token = rms(pushed).flatten(1).max(1)
    flat = pushed.flatten(1, -2)
    chosen = torch.nn.functional.one_hot(token, flat.shape[1]).to(flat.dtype)[..., None]
    return value, (over(flat, rms(flat) * flat.shape[-1]) * chosen).view_as(pushed)


def _lengthen(function: nn.Module, found: LowerBound, radius: float) -> LowerBound:
    """Try finite changes along the direction found; a secant may be steeper than the tangent."""
    best = found
    with torch.no_grad():
        for step in (2.0, 1.0, 0.3, 0.1, 0.03, -0.03, -0.1, -0.3, -1.0, -2.0):
            moved = found.x_TD + step * radius * found.direction_TD
            moved = moved * (radius / rms(moved)).clamp(max=1.0)
            change = moved - found.x_TD
            size = float(rms(change).max())
            if size < 1e-3 * radius:
                continue
            outputs = function(torch.stack((found.x_TD, moved)))
            gain = float(rms(outputs[1] - outputs[0]).max()) / size
            if gain > best.value:
                best = LowerBound(gain, found.x_TD, change / size, size)
    return best


def _length(model: nn.Module) -> int:
    held = [m.length for m in model.modules() if isinstance(m, PositionMix | PositionMixing)]
    held += [m.length for m in model.modules() if isinstance(m, CausalAttention) and m.bias_HT is not None]
    return min([_DEFAULT_LENGTH, *held])


def _width(graph: fx.GraphModule, value: fx.Node) -> int | None:
    """Columns of the first matrix behind a value, looking through operations that keep the width."""
    for user in value.users:
        module = graph.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(module, nn.Linear | HeadProjection):
            return int(module.weight.shape[1])
        if user.op != "output" and (width := _width(graph, user)) is not None:
            return width
    return None
