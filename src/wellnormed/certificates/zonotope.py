"""Sets of values around a point: zonotopes over a ball of the input, and lines between which functions lie.

The arithmetic is that of multi-norm zonotopes (Bonaert et al., PLDI 2021): the symbols of the input lie in Euclidean
balls, those of later operations in [-1, 1]. `around` has the rules of operations.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 2.0**-53
"""The largest relative error of one operation of float64."""
SHARE = 2.0**-46
"""The largest error of an elementary function of torch, such as exp, as a share of its argument and its result."""
TINY = 1e-150
"""More than the squares of smaller numbers, which underflow, add to a Euclidean norm."""


@dataclass(frozen=True, eq=False)
class Zonotope:
    """Values of one tensor `(*shape)` for B balls: `centre + sum_k generators[k] e_k`, up to `rest` in every entry."""

    centre: Tensor
    """`(B, *shape)`; minus infinity where a mask allows nothing."""
    generators: Tensor
    """`(symbols, B, *shape)`, or `(symbols, 1, *shape)` if it is linear."""
    rest: Tensor
    """`(B,)`: rounding errors so far; infinity if the bound has failed."""
    largest: Tensor
    """`(B,)`: no entry is larger in absolute value, but for masks."""
    linear: bool = False
    """Whether it is an affine function of the input, so that its generators are the same for all balls of all calls."""


@dataclass(eq=False)
class Ball:
    """The symbols: groups of entries of the input, each in a ball, and behind them numbers in [-1, 1]."""

    radius: Tensor
    """`(B,)`"""
    groups: tuple[int, int]
    """Number of groups, and symbols of each."""
    symbols: int
    """How many there are by now."""

    def reach(self, generators: Tensor) -> Tensor:
        """How fast the entries change with the radius, `(B or 1, *shape)`: the dual norm over the input's symbols."""
        count = self.groups[0] * self.groups[1]
        own = generators[:count].unflatten(0, self.groups)
        return torch.linalg.vector_norm(own, dim=1).sum(0) * _up(count) + TINY

    def noise(self, generators: Tensor) -> Tensor:
        """How far the other symbols move the entries, `(B or 1, *shape)`."""
        others = generators[self.groups[0] * self.groups[1] :]
        return torch.linalg.vector_norm(others, 1, dim=0) * _up(len(others))

    def extent(self, x: Zonotope) -> Tensor:
        """The most by which an entry differs from the centre, `(B, *shape)`."""
        moved = along(self.radius, x.centre) * self.reach(x.generators) + self.noise(x.generators)
        return (moved + along(x.rest, x.centre)) * _up(8) + 4 * UNIT * x.centre.abs()


class Curve(NamedTuple):
    """What is known of a function of one number."""

    least: float
    """Its smallest slope."""
    most: float
    """Its largest slope."""
    curvature: float
    """Its largest absolute second derivative, away from kinks."""
    kinks: tuple[float, ...] = ()
    """Where its slope jumps."""
    bend: int = 0
    """1 if it is convex, -1 if it is concave; its slopes are then those at the ends of an interval."""


BENT = Curve(-torch.inf, torch.inf, torch.inf, bend=1)
CURVES = {
    **dict.fromkeys(("relu", "abs", "exp", "square", "rsqrt", "reciprocal"), BENT),
    **dict.fromkeys(("log_sigmoid", "log", "sqrt"), BENT._replace(bend=-1)),
    **dict.fromkeys(("hardtanh", "clamp", "clamp_min", "clamp_max", "relu6"), Curve(0, 1, torch.inf)),
    "softshrink": Curve(0, 1, torch.inf),
    "hardsigmoid": Curve(0, 0.1666667164, torch.inf),
    "hardswish": Curve(-0.5, 1.5, 0.33334, (-3, 3)),
    "selu": Curve(0, 1.7581, 1.7581, (0,)),
    "tanh": Curve(0, 1, 0.7699),
    "sigmoid": Curve(0, 0.25, 0.09623),
    "erf": Curve(0, 1.1283792, 0.96789),
    "atan": Curve(0, 1, 0.64953),
    "asinh": Curve(0, 1, 0.38491),
    "sin": Curve(-1, 1, 1),
    "cos": Curve(-1, 1, 1),
    "gelu": Curve(-0.129, 1.129, 0.8),
    "silu": Curve(-0.09984, 1.09984, 0.50001),
    "mish": Curve(-0.11253, 1.0885, 0.6443),
}
"""Name -> shape of the functions that one curve describes whatever their settings are."""


class Line(NamedTuple):
    """`slope x + shift`, from which a function differs by at most `noise` and the rounding error `rest`."""

    slope: Tensor
    shift: Tensor
    noise: Tensor
    rest: Tensor


def line(low: Tensor, high: Tensor, values: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], curve: Curve) -> Line:
    """The middle between the chord of a function and its furthest parallel, on intervals.

    A function whose slopes lie in [a, b] leaves a chord of slope s over a width w by at most
    `w (b - s) (s - a) / (b - a)`, and by `curvature w^2 / 8`; a convex one lies below its chord. For ReLU that is the
    triangle with its lower side parallel to the upper one.

    Args:
        low: Lower ends.
        high: Upper ends.
        values: The function there.
        slopes: Its slopes there, for convex and concave functions.
        curve: What is known of it.
    """
    width, first, last = high - low, *values
    if curve.bend:
        least, most = torch.minimum(*slopes), torch.maximum(*slopes)
    else:
        least, most = (torch.full_like(low, each) for each in (curve.least, curve.most))
    slope = torch.where(width > 0, (last - first) / width, least)
    slope = torch.minimum(torch.maximum(slope, least), most)
    between = torch.where(most > least, most - least, 1.0)
    away = width * (most - slope) * (slope - least) / between
    smooth = torch.stack([(high <= kink) | (low >= kink) for kink in (torch.inf, *curve.kinks)]).all(0)
    bent = torch.where(width > 0, curve.curvature * width.square() / 8, 0.0)
    away = torch.where(smooth, torch.minimum(away, bent), away)
    ends = first - slope * low, last - slope * high
    top, bottom = torch.maximum(*ends), torch.minimum(*ends)
    top, bottom = top + away * (curve.bend <= 0), bottom - away * (curve.bend >= 0)
    shift, noise = (top + bottom) / 2, (top - bottom) / 2
    steps = slope.abs() + least.abs() + most.abs()
    rest = 4 * SHARE * (first.abs() + last.abs() + steps * (low.abs() + high.abs()) + noise)
    flat = (least >= 0) & ((last - first) / 2 < noise)  # one that rises lies between its values at the ends
    shift, noise = torch.where(flat, (first + last) / 2, shift), torch.where(flat, (last - first) / 2, noise)
    return Line(torch.where(flat, 0.0, slope), shift, noise, rest)


def along(numbers: Tensor, x: Tensor) -> Tensor:
    """View numbers `(B,)` so that they broadcast against the entries of x, `(B, *shape)`."""
    return numbers.view(-1, *[1] * (x.ndim - 1))


def most(x: Tensor) -> Tensor:
    """The largest entry of each of B tensors, `(B,)`; infinity for NaN."""
    return x.flatten(1).amax(1).nan_to_num(torch.inf, torch.inf)


def gamma(count: int) -> float:
    """The relative error of sums of so many products, in any order, with 16 further operations (Higham, lemma 3.1)."""
    share = (count + 16) * UNIT
    return share / (1 - share)


def _up(count: int) -> float:
    """A factor that exceeds the rounding errors of a norm of so many numbers."""
    return 1 + 2 * gamma(count)
