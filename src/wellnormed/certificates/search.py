"""A lower bound of the Lipschitz constant: the largest gain that a search finds, in the certificate's norms.

A point is a dictionary from the name of each variable to its value. In the search itself, tensors have one more axis in
front, for S searches at once.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.certificates.arguments import domain_from, example_of, require_model_or_program, with_keywords
from wellnormed.certificates.continuous import Continuous
from wellnormed.program.capturing import capture
from wellnormed.program.domain import Box, Domain
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.program import Program
from wellnormed.proof.decimals import shown

_ROUNDING = 1e-9
"""The share by which a measured gain is reduced: it exceeds the float64 rounding errors of a few hundred operations."""
_ROUNDING_OF_OPERATIONS = 2.0**-46
"""The assumed relative error of every operation's result, 64 times the machine epsilon of float64. A measured
difference of two results is reduced by the change that such errors can cause, as numbers may nearly cancel."""

Point = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class LowerBound:
    """The gains of a model between two inputs; no Lipschitz constant in the same norms is smaller.

    The gain is the difference of two results over the difference of two inputs. To measure it again, let
    `double = wellnormed.capture(model, example_input).double()` and
    `moved[name] = inputs[name] + step * directions[name]`: the largest RMS over the groups of
    `double(**moved) - double(**inputs)` is `rms_value * step`.
    """

    value: float
    """Largest Euclidean norm of a change of a group of the output, over the largest of a change of a group of the
    inputs: a lower bound of `Certificate.lipschitz`."""
    rms_value: float
    """The same with RMS, a lower bound of `Certificate.rms_lipschitz`; the search looks for the largest."""
    inputs: Point
    """The first of the two inputs, with the example's shapes."""
    directions: Point
    """The direction of the change of the input, with RMS at most 1 in every group."""
    step: float
    """Length of the change; 0 if the search met no change of the input that changes the output."""

    def __repr__(self) -> str:
        return f"LowerBound({shown(self.value, '.5g', up=False)}: the largest gain found)"


@dataclass(frozen=True, eq=False)
class _Tangent:
    """The largest gain of a Jacobian so far, with its point and direction."""

    value: float
    x: Point
    direction: Point
    u: Tensor
    """The unit vector in the output along which the gain was measured, `(1, *output)`."""


def lower_bound(
    model: nn.Module | Program,
    example_input: Any = None,
    radius: float = 1.0,
    steps: int = 100,
    generator: torch.Generator | None = None,
    batch: int = 4,
    *,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
    **inputs: Any,
) -> LowerBound:
    """Search the domain for the input and the direction with the largest gain, in float64.

    The result is a lower bound of the model's Lipschitz constant, which shows how far a certificate is from tight. The
    variables are those of a certificate: the floats of the input, and the vectors that an embedding looks up; other
    integers keep their values. The size of a change is its largest RMS over the groups of all variables: tokens, or
    whole samples of tensors with four axes or more.

    Every step does one alternation of the power method for the norm "largest group -> largest group" (the dual of a
    direction has RMS 1 in every group of the input; the dual of an output change is one unit vector in one group) and
    one ascent step on the inputs, both by double backward passes; the ascent is left out if an operation of the model
    has no second derivative. The same number of steps of a random search around the best input follows, which can cross
    the edges of piecewise linear functions. At the end the gain in the best direction is measured over finite
    distances, so that a wrong derivative cannot make a wrong bound.

    Args:
        model: As for `certify`.
        example_input: A tensor, a tuple of arguments, or a dictionary of keywords; its first sample is searched. By
            default the result of the model's method `example_input`; leave it out for a program.
        radius: Largest RMS of a group of the input; finite.
        box: Two numbers between which all entries of the input lie, in the place of `radius`.
        steps: Number of iterations.
        generator: Source of the starting points.
        batch: Number of starting points that are searched at once.
        output: Key, attribute or position of the result, where the model returns several.
        inputs: Further arguments of the call, by keyword, as for `certify`.

    Raises:
        UncertifiableError: The model cannot be captured, its input has no variable, or one of its operations has no
            derivative.
        ValueError: The example is missing, or a number is not positive.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(layer.weight)
        >>> round(lower_bound(layer, torch.zeros(1, 2), steps=5).value, 6)
        1.0
    """
    require_model_or_program("lower_bound", model, example_input=example_input, output=output, **inputs)
    if not isinstance(model, Program):
        settings = {"radius": radius, "steps": steps, "generator": generator, "batch": batch, "box": box}
        example_input = with_keywords("lower_bound", model, example_input, settings | {"output": output}, inputs)
    require_numbers("lower_bound: ", {"radius": radius}, POSITIVE)
    require_numbers("lower_bound: ", {"steps": steps, "batch": batch}, POSITIVE, whole=True)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"lower_bound: generator must be a torch.Generator or None, got {generator!r}; pass one")
    domain = domain_from("lower_bound", radius, box)
    if not isinstance(model, Program):
        model = capture(model, example_of(model, example_input, "lower_bound"), output, domain=domain)
    with torch.inference_mode(False), torch.enable_grad():
        search = _Search(Continuous(model.double()), domain, batch, generator)
        return search.measure(search.wander(search.climb(steps), steps))


def short_search(program: Program, domain: Domain, steps: int = 4) -> float:
    """The largest slope, from RMS to RMS, that a few steps from the same points as always find; a measurement."""
    finite = domain if isinstance(domain, Box) or domain < math.inf else 1.0
    with torch.inference_mode(False), torch.enable_grad():
        return _Search(Continuous(program.double()), finite, 2, torch.Generator().manual_seed(0)).climb(steps).value


def rms(x: Tensor, axes: int | tuple[int, ...] = -1) -> Tensor:
    """RMS over some axes, by default the last, which keep size 1."""
    return x.square().mean(axes, keepdim=True).sqrt()


def over(x: Tensor, size: Tensor) -> Tensor:
    """`x / size`, and 0 where both are 0."""
    return x / size.clamp(min=1e-300)


def gains(function: Continuous, x: Point, u: Tensor) -> tuple[Point, Tensor, Point]:
    """One alternation of the power method with the Jacobian J of `function` at S points, and the gradient of the gain.

    Args:
        function: The function, whose `many` evaluates S points at once.
        x: S points: each variable has shape `(S, *variable)`.
        u: Output directions `(S, *output)`: a unit vector in one group of each search, zeros elsewhere.

    Returns:
        The input directions of RMS 1 in every group that maximise `<u, J direction>`, of the shapes of x; J times
        these, `(S, *output)`; and the gradient of the maxima with respect to x.
    """
    names, values = tuple(x), [each.detach().requires_grad_() for each in x.values()]
    u = u.detach().requires_grad_()
    result = function.many(dict(zip(names, values, strict=True)))
    pulled = torch.autograd.grad((result * u).sum(), values, create_graph=True, materialize_grads=True)
    # max over directions of RMS 1 per group of <J^T u, direction>; its derivative by u is J direction
    maximum = u.new_zeros(())
    for name, each in zip(names, pulled, strict=True):
        axes = function.axes[name]
        size = math.prod(each.shape[axis] for axis in axes)
        maximum = maximum + torch.linalg.vector_norm(each, dim=axes).sum() * math.sqrt(size)
    if not maximum.requires_grad:  # J^T u depends neither on x nor on u, as for u = 0
        nothing = {name: torch.zeros_like(each) for name, each in x.items()}
        return nothing, torch.zeros_like(u), nothing
    *uphill, pushed = torch.autograd.grad(maximum, (*values, u), allow_unused=True, materialize_grads=True)
    directions = {n: over(p, rms(p, function.axes[n])).detach() for n, p in zip(names, pulled, strict=True)}
    return directions, pushed, {n: torch.nan_to_num(each) for n, each in zip(names, uphill, strict=True)}


class _Search:
    """S searches at once for the largest gain of one function, in a ball or box with this centre and radius (RMS)."""

    def __init__(
        self, function: Continuous, domain: Domain, batch: int, generator: torch.Generator | None = None
    ) -> None:
        self.function, self.batch, self.generator = function, batch, generator
        self.box, ends = (domain, (domain.low, domain.high)) if isinstance(domain, Box) else (None, (-domain, domain))
        self.centre, self.radius = ends[1] / 2 + ends[0] / 2, ends[1] / 2 - ends[0] / 2
        self._twice = True

    def climb(self, steps: int) -> _Tangent:
        """Power method and ascent from random points on the sphere (where attention is sharpest), or in the box."""
        x = {name: self._draw(shape) for name, shape in self.function.shapes.items()}
        x = {name: each / rms(each, self.function.axes[name]) * self.radius for name, each in x.items()}
        x = self._inside({name: self.centre + each for name, each in x.items()})
        u = self._draw(tuple(self.function.many(x).shape[1:]))
        best = _Tangent(0.0, _one(x, 0), {name: torch.zeros_like(each[0]) for name, each in x.items()}, u[:1])
        velocity = {name: torch.zeros_like(each) for name, each in x.items()}
        for step in range(steps):
            direction, pushed, uphill = self._gains(x, u)
            value, u = self._largest(pushed)
            best = _better(best, value, u, x, direction)
            slope, rate = self._size(uphill), 0.3 * self.radius * (1 - step / steps)
            velocity = {name: 0.8 * velocity[name] + over(uphill[name], _like(slope, x[name])) for name in x}
            speed = self._size(velocity)
            x = self._inside({name: x[name] + over(rate * velocity[name], _like(speed, x[name])) for name in x})
        return best

    def wander(self, best: _Tangent, rounds: int) -> _Tangent:
        """Random changes of the best input, longer after a success and shorter after a failure."""
        size = 0.3 * self.radius
        for _ in range(rounds if best.value else 0):
            x = self._inside({name: each + size * self._draw(each.shape) for name, each in best.x.items()})
            direction, pushed, _ = self._gains(x, best.u.expand(self.batch, *best.u.shape[1:]))
            better = _better(best, *self._largest(pushed), x, direction)
            size *= 0.95 if better is best else 1.3
            best = better
        return best

    @torch.no_grad()
    def measure(self, tangent: _Tangent) -> LowerBound:
        """The largest gain over finite distances, from the point and in the direction of the best Jacobian.

        Over long distances a secant may be steeper than the tangent. Over short distances the gain equals the
        derivative's up to the rounding error of a small difference, so the smaller of the two counts.
        """
        best = LowerBound(0.0, 0.0, tangent.x, tangent.direction, 0.0)
        for step in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7):
            # moved towards the centre, so that both ends lie in the ball; a box may still cut off the longer one
            inner = {name: each + step * (self.centre - each) for name, each in tangent.x.items()}
            for sign in (1, -1):
                best = self._better_secant(best, inner, sign * step, tangent)
        for step in (2.0, 1.0, 0.3, 0.1, 0.03, -0.03, -0.1, -0.3, -1.0, -2.0):
            best = self._better_secant(best, tangent.x, step, tangent)
        return best

    def _better_secant(self, best: LowerBound, x: Point, length: float, tangent: _Tangent) -> LowerBound:
        """The gain between x and the point at a length, in radii, in the tangent's direction, if it is the best yet."""
        moved = {name: each + length * self.radius * tangent.direction[name] for name, each in x.items()}
        moved = _one(self._inside(_many(moved)), 0)
        change = {name: moved[name] - each for name, each in x.items()}
        step = float(self._size(_many(change)))
        end, start = self.function(moved), self.function(x)
        gain = float(rms(end - start, self.function.output_axes).max()) / max(step, 1e-300)
        if gain > best.rms_value:
            gain -= sum(map(self._uncertain, (x, moved), (start, end))) / max(step, 1e-300)
        if step < 1e-3 * self.radius:
            gain = min(gain, tangent.value)
        gain *= 1 - _ROUNDING
        if not best.rms_value < gain < math.inf:
            return best
        directions, axes = {name: each / step for name, each in change.items()}, self.function.axes
        longest = max(float(torch.linalg.vector_norm(d, dim=axes[name]).max()) for name, d in directions.items())
        entries = math.prod(end.shape[axis] for axis in self.function.output_axes)
        return LowerBound(gain * math.sqrt(entries) / longest, gain, x, directions, step)

    def _uncertain(self, x: Point, result: Tensor) -> float:
        """How far rounding errors may move the result at a point, in the RMS of its largest group."""
        return float(rms(self.function.shaken(x, _ROUNDING_OF_OPERATIONS) - result, self.function.output_axes).max())

    def _gains(self, x: Point, u: Tensor) -> tuple[Point, Tensor, Point]:
        """As `gains`, but without batching or ascent for operations for which torch lacks such derivatives."""
        while True:
            at_once = self.function.at_once
            try:
                return gains(self.function, x, u) if self._twice else self._gains_without_ascent(x, u)
            except RuntimeError as error:  # torch lacks a derivative: for several inputs, the second, or the first
                if at_once:
                    self.function.at_once = False
                elif self._twice:
                    self._twice = False
                else:
                    message = f"the search needs derivatives: {str(error).splitlines()[0]}"
                    raise UncertifiableError(message) from error

    def _gains_without_ascent(self, x: Point, u: Tensor) -> tuple[Point, Tensor, Point]:
        """As `gains`, for a function without second derivatives: J times a direction is a difference quotient."""
        values = {name: each.detach().requires_grad_() for name, each in x.items()}
        result = self.function.many(values)
        pulled = torch.autograd.grad((result * u).sum(), list(values.values()), materialize_grads=True)
        axes, step = self.function.axes, 1e-5 * self.radius
        direction = {name: over(each, rms(each, axes[name])) for name, each in zip(values, pulled, strict=True)}
        with torch.no_grad():
            ends = [self.function.many({n: x[n] + s * direction[n] for n in x}) for s in (step, -step)]
        return direction, (ends[0] - ends[1]) / (2 * step), {n: torch.zeros_like(each) for n, each in x.items()}

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        device = None if self.generator is None else self.generator.device
        drawn = torch.randn((self.batch, *shape), dtype=torch.float64, generator=self.generator, device=device)
        return drawn.to(self.function.device)

    def _size(self, x: Point) -> Tensor:
        """Each search's largest RMS over the groups of all variables."""
        return torch.stack([rms(each, self.function.axes[name]).flatten(1).amax(1) for name, each in x.items()]).amax(0)

    def _inside(self, x: Point) -> Point:
        """Project every group into the ball, or every entry into the box."""
        if self.box is not None:
            return {name: each.clamp(self.box.low, self.box.high) for name, each in x.items()}
        axes, radius = self.function.axes, self.radius
        return {name: each * (radius / rms(each, axes[name])).clamp(max=1.0) for name, each in x.items()}

    def _largest(self, pushed: Tensor) -> tuple[Tensor, Tensor]:
        """RMS of each search's largest group, `(S,)`, and the next u: that group with the norm that makes gains RMS."""
        axes = self.function.output_axes
        sizes = rms(pushed, axes)
        value, group = sizes.flatten(1).nan_to_num(0.0, 0.0, 0.0).max(1)
        chosen = torch.nn.functional.one_hot(group, sizes[0].numel()).view_as(sizes)
        entries = math.prod(pushed.shape[axis] for axis in axes)
        return value, torch.where(chosen == 1, over(pushed, sizes * entries), 0.0)


def _better(best: _Tangent, value: Tensor, units: Tensor, x: Point, direction: Point) -> _Tangent:
    """The best of the searches, if it is better than the best so far."""
    leader = int(value.argmax())
    if float(value[leader]) <= best.value:
        return best
    return _Tangent(float(value[leader]), _one(x, leader), _one(direction, leader), units[leader][None])


def _one(x: Point, number: int) -> Point:
    return {name: each[number].clone() for name, each in x.items()}


def _many(x: Point) -> Point:
    return {name: each[None] for name, each in x.items()}


def _like(sizes: Tensor, x: Tensor) -> Tensor:
    """View numbers `(S,)` so that they broadcast against the entries of x."""
    return sizes.view(-1, *[1] * (x.ndim - 1))
