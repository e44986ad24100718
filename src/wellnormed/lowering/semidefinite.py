"""The semidefinite program whose solution are multipliers for the joint bound that `proof.lipsdp` states and proves.

With squares t of the multipliers in the place of these, the form there is linear in t and in L^2. The least L^2 for
which it is positive semidefinite is found in floats, by the primal-dual interior-point method of Helmberg, Rendl,
Vanderbei and Wolkowicz (1996) with Mehrotra's corrector. An iteration costs about 8 n^3 operations for n entries of the
start and of all functions; 10 to 25 of them reach the tolerance. Every iterate has multipliers that prove a bound.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from wellnormed.proof.lipsdp import Function, Map

_TOLERANCE = 5e-4
"""The part of L^2 by which its least value may be missed, so that the bound is at most 0.025% above the best one."""
_MOST_STEPS = 60
_TO_BOUNDARY = 0.95
"""The part of the way to the boundary of the positive semidefinite matrices that a step goes at most."""
_COST = 1e-7
"""What all squares of multipliers cost together: those of dead neurons would grow without end."""
_VECTORS = 24
"""The number of Lanczos vectors that estimate a smallest eigenvalue."""


def solve(functions: Sequence[Function], end: Mapping[int, Map], inputs: int) -> tuple[list[np.ndarray], float]:
    """The best multipliers of every function of a network, and the bound L of its end that they give in floats.

    Args:
        functions: The functions of every entry, as `proof.lipsdp.Network` has them.
        end: The maps of the network's end.
        inputs: Number of entries of the network's start.

    Example:
        >>> w = np.eye(2)
        >>> relu = [Function(0.5, 0.5, {j: Map(w, w, 1)}) for j in range(2)]
        >>> multipliers, bound = solve(relu, {2: Map(w, w, 1)}, 2)  # of relu(relu(x))
        >>> [each.shape for each in multipliers], round(bound, 3)
        ([(2,), (2,)], 1.0)
    """
    program = _Program(functions, end, inputs)
    t = program.solution() if functions else program.first
    roots = (t.sqrt() * program.scales).split(program.widths)
    return [each.numpy() for each in roots], program.bound(t)


class _Program:
    """The program in unknowns that are scaled so that at first L^2 is 1 and t is about 1.

    For M and N from Q = diag(z) - diag(high) A and P = diag(z) - diag(low) A, the form is
    `L^2 |z_0|^2 + sum_i t_i (P z)_i (Q z)_i - |C z|^2`.
    """

    def __init__(self, functions: Sequence[Function], end: Mapping[int, Map], inputs: int) -> None:
        maps = [
            {j: torch.from_numpy(each.matrix.copy()) for j, each in own.items()}
            for own in (*(function.maps for function in functions), end)
        ]
        inputs = _compress(maps, inputs)
        steepest = [abs(each.centre) + each.radius for each in functions]
        start, *scales = (math.sqrt(each) for each in _first_weights(maps, steepest))
        self.widths = [len(next(iter(own.values()))) for own in maps[:-1]]
        ends = np.cumsum([0, inputs, *self.widths]).tolist()
        places = [slice(*pair) for pair in pairwise(ends)]
        self.start, self.inputs, n = start, inputs, ends[-1]

        def spread(values: list[float]) -> Tensor:
            """A number for every entry of each function."""
            return torch.tensor(values).double().repeat_interleave(torch.tensor(self.widths).long())

        self.scales = spread(scales)
        self.first = spread([s / each.radius for s, each in zip(steepest, functions, strict=True)])
        self.low = spread([each.centre - each.radius for each in functions])[:, None]
        self.high = spread([each.centre + each.radius for each in functions])[:, None]
        self.a, self.blocks = torch.zeros(n - inputs, n).double(), list[tuple[slice, slice]]()
        for i, own in enumerate(maps[:-1]):
            rows = slice(ends[i + 1] - inputs, ends[i + 2] - inputs)
            for j, each in own.items():
                self.a[rows, places[j]] = each * (scales[i] / (start, *scales)[j])
                self.blocks.append((rows, places[j]))
        c = torch.zeros(len(next(iter(maps[-1].values()))), n).double()
        for j, each in maps[-1].items():
            c[:, places[j]] = each / (start, *scales)[j]
        self.gram = c.T @ c

    def apply(self, x: Tensor) -> Tensor:
        """`A x`."""
        result = x.new_zeros(len(self.a), x.shape[1])
        for rows, columns in self.blocks:
            result[rows] += self.a[rows, columns] @ x[columns]
        return result

    def adjoint(self, y: Tensor) -> Tensor:
        """`A^T y`."""
        result = y.new_zeros(self.a.shape[1], y.shape[1])
        for rows, columns in self.blocks:
            result[columns] += self.a[rows, columns].T @ y[rows]
        return result

    def change(self, y: Tensor) -> Tensor:
        """The part of the form that is linear in the unknowns y, which are all t and L^2."""
        t, x = y[:-1, None], self.inputs
        result = self.adjoint((self.low * self.high * t) * self.a)
        across = -(self.low + self.high) / 2 * t * self.a
        result[x:] += across
        result[:, x:] += across.T
        result.diagonal()[:x] += y[-1]
        result.diagonal()[x:] += y[:-1]
        return result

    def form(self, y: Tensor) -> Tensor:
        """The form of the unknowns."""
        return self.change(y) - self.gram

    def slopes(self, d: Tensor) -> Tensor:
        """The product of a symmetric matrix with the form's derivative by every unknown."""
        x, p = self.inputs, d[self.inputs :] - self.low * self.apply(d)
        own = p[:, x:].diagonal() - self.high[:, 0] * (p * self.a).sum(1)
        return torch.cat([own, d.diagonal()[:x].sum()[None]])

    def hessian(self, dual: Tensor, inverse: Tensor) -> Tensor:
        """`<N_i, dual N_j inverse>`, symmetrised, for the derivatives N of the form."""
        x, k = self.inputs, len(self.a)
        (p, q, pp, pq, qq), (p2, q2, pp2, pq2, qq2) = self._products(dual), self._products(inverse)
        result = torch.empty(k + 1, k + 1).double()
        mixed = pq.T * pq2
        result[:k, :k] = (mixed + mixed.T + pp * qq2 + qq * pp2) / 4
        result[k, :k] = result[:k, k] = (p * q2 + q * p2).sum(1) / 2
        result[k, k] = (dual[:x, :x] * inverse[:x, :x]).sum()
        return result

    def _products(self, d: Tensor) -> tuple[Tensor, ...]:
        """Columns of the start of `P D` and `Q D`; `P D P^T`, `P D Q^T` and `Q D Q^T`."""
        x, ad = self.inputs, self.apply(d)
        own, across, both = d[x:, x:], ad[:, x:], self.apply(ad.T)
        starts = (d[x:, :x] - side * ad[:, :x] for side in (self.low, self.high))
        pairs = ((self.low, self.low), (self.low, self.high), (self.high, self.high))
        return *starts, *(own - a * across - (b * across).T + a * both * b.T for a, b in pairs)

    def solution(self) -> Tensor:
        """The best t."""
        y = torch.cat([self.first, torch.ones(1)]).double()
        t, count = y[:-1], len(y) - 1 + len(self.gram)
        costs = torch.full_like(y, _COST / len(t))
        costs[-1] = 1
        factor = torch.linalg.cholesky(self.form(y))
        inverse = torch.cholesky_inverse(factor)
        mean = 1 / float(inverse.diagonal()[: self.inputs].sum())
        dual, dual_t = mean * inverse, mean / t  # the variables of the dual program
        for _ in range(_MOST_STEPS):
            mean = float((dual * self.form(y)).sum() + dual_t @ t) / count
            hessian = self.hessian(dual, inverse)
            hessian.diagonal()[:-1] += dual_t / t
            newton, singular = torch.linalg.cholesky_ex(hessian)
            dual_factor, indefinite = torch.linalg.cholesky_ex(dual)
            if mean * count < _TOLERANCE * float(y[-1]) or int(singular) or int(indefinite):
                break
            slopes = self.slopes(inverse)
            slopes[:-1] += 1 / t
            towards, second, second_t = 0.0, torch.zeros_like(dual), torch.zeros_like(t)
            for corrects in (False, True):
                right = towards * slopes - costs - self.slopes(second)
                right[:-1] -= second_t
                step = torch.cholesky_solve(right[:, None], newton)[:, 0]
                moved = self.change(step)
                turned = moved @ inverse
                across = dual @ turned
                dual_step = towards * inverse - dual - (across + across.T) / 2 - second
                dual_t_step = towards / t - dual_t - dual_t * step[:-1] / t - second_t
                part = _TO_BOUNDARY if corrects else 1.0
                a = min(_largest_step(factor, moved, part), _to_zero(t, step[:-1], part))
                b = min(_largest_step(dual_factor, dual_step, part), _to_zero(dual_t, dual_t_step, part))
                if not corrects:
                    reached = float(((dual + b * dual_step) * (self.form(y) + a * moved)).sum())
                    reached += float((dual_t + b * dual_t_step) @ (t + a * step[:-1]))
                    ratio = min(max(reached / (mean * count), 0.0), 1.0)
                    towards = mean * max(ratio ** max(1.0, 3 * min(a, b) ** 2), 1e-3)
                    second = dual_step @ turned
                    second, second_t = (second + second.T) / 2, dual_t_step * step[:-1] / t
            while int((tried := torch.linalg.cholesky_ex(self.form(y + a * step)))[1]):
                a *= 0.9
                if a < 1e-9:
                    return t
            while int(torch.linalg.cholesky_ex(dual + b * dual_step)[1]) and b > 1e-9:
                b *= 0.9
            y, dual, dual_t, factor = y + a * step, dual + b * dual_step, dual_t + b * dual_t_step, tried[0]
            t, inverse = y[:-1], torch.cholesky_inverse(factor)
        return t

    def bound(self, t: Tensor) -> float:
        """The least L for some t, unscaled."""
        form, x = self.form(torch.cat([t, torch.zeros(1).double()])), self.inputs
        least = form[:x, :x] - form[:x, x:] @ torch.linalg.solve(form[x:, x:], form[x:, :x])
        return math.sqrt(max(-float(torch.linalg.eigvalsh((least + least.T) / 2)[0]), 0.0)) * self.start


def _compress(maps: list[dict[int, Tensor]], inputs: int) -> int:
    """Turn the start and the end, where all maps of them have a smaller rank; returns the start's number of entries."""
    end = torch.cat([*maps[-1].values()], 1)
    if len(end) > end.shape[1]:
        triangle = torch.linalg.qr(end, mode="r")[1]
        maps[-1] = dict(zip(maps[-1], triangle.split([each.shape[1] for each in maps[-1].values()], 1), strict=True))
    reading = [own[0] for own in maps if 0 in own]
    rows = [len(each) for each in reading]
    if sum(rows) >= inputs:
        return inputs
    blocks = iter(torch.linalg.qr(torch.cat(reading).T, mode="r")[1].T.split(rows))
    for own in maps:
        if 0 in own:
            own[0] = next(blocks)
    return sum(rows)


def _first_weights(maps: list[dict[int, Tensor]], steepest: list[float]) -> list[float]:
    """Weights w, one for every z_j, such that the form is positive definite with `t_i = w_i steepest_i / radius_i`.

    As `(z - low y)(z - high y) steepest / radius >= z^2 - (steepest y)^2`, it is enough that each is larger than what
    all later ones need, with `|sum_j A_j z_j|^2 <= n sum_j |A_j|^2 |z_j|^2`.
    """
    weights, squared = [0.0] * len(maps), [*(each**2 for each in steepest), 1.0]
    norms = [{j: float(torch.linalg.matrix_norm(a, 2)) for j, a in own.items()} for own in maps]
    for j in reversed(range(len(maps))):
        needed = sum(
            (weights[i] if i < len(maps) else 1.0) * squared[i - 1] * len(own) * own[j] ** 2
            for i, own in enumerate(norms, 1)
            if j in own
        )
        weights[j] = 1.1 * needed or 1e-30
    return weights


def _to_zero(x: Tensor, step: Tensor, part: float) -> float:
    """How much of a step, at most 1, goes a part of the way to where an entry of x is zero."""
    return min(1.0, part / max(float(-(step / x).min()), 1e-30))


def _largest_step(factor: Tensor, step: Tensor, part: float) -> float:
    """The same for the smallest eigenvalue of a matrix, of which the Cholesky factor is given."""

    def product(v: Tensor) -> Tensor:
        solved = torch.linalg.solve_triangular(factor.T, v[:, None], upper=True)
        return torch.linalg.solve_triangular(factor, step @ solved, upper=False)[:, 0]

    n = len(step)
    basis = torch.zeros(min(n, _VECTORS), n).double()
    across = torch.zeros(len(basis), len(basis)).double()
    v = torch.ones(n).double() + torch.arange(n) % 7
    for i in range(len(basis)):
        basis[i] = v / v.norm()
        v = product(basis[i])
        across[: i + 1, i] = across[i, : i + 1] = basis[: i + 1] @ v
        v = v - basis[: i + 1].T @ (basis[: i + 1] @ v)
        v = v - basis[: i + 1].T @ (basis[: i + 1] @ v)
        if float(v.norm()) < 1e-12 * float(across.abs().max()):
            across = across[: i + 1, : i + 1]
            break
    least, vectors = torch.linalg.eigh(across)
    error = float(v.norm()) * abs(float(vectors[-1, 0]))
    return min(1.0, part / max(error - float(least[0]), 1e-30))
