"""Which gradients are rounding errors and nothing else, so that an oracle does not turn them into whole steps.

Some parameters have no influence on the loss: softmax does not see the bias of the keys, nor a batch norm the bias of
the convolution before it. The terms of their gradient cancel, and what is left is the rounding of the terms. SGD
hardly notices; an oracle, which does not see the size of a gradient, moves such a parameter as far as any other.

**Size.** A gradient is a sum of `n` terms, one for each position of a batch. Let them have size `t`. If they point one
way the sum is about `n t`, if they point everywhere `sqrt(n) t`. Rounding errors add up like a random walk (Higham and
Mary, 2019): `n` errors of up to `u n t`, with the unit roundoff `u`, make at most `sqrt(n) u (n t)`. The largest entry
of all gradients stands for a sum whose terms point one way: an error is at most `sqrt(n) u` of it. The largest entry in
the other gradients of the same module, which sum the same terms times inputs of order one, may stand for either: an
error is at most `n u` of it. So a vector *may* be an error if it is below both. With `n = 2^16` positions that is 2e-5
of all gradients and 4e-3 of its module's in float32, 3e-14 and 7e-12 in float64; random walks of a larger batch seldom
go as far as their bound. The vanishing gradients of a deep layer are not below the second. A matrix, whose terms seldom
cancel, may be an error only below `sqrt(n) u` of its module's other gradients.

**Direction.** Errors have no direction: the gradient of the next step agrees with the average of those before it, in
the sign of their product, as often as a fair coin says. Let `a` be the running average of these signs with factor `b`
per step. By Hoeffding's inequality a fair coin brings `a` to 1/2 or above with a probability of at most
`exp(-(1 + b) / (1 - b) / 8)`; `b` is chosen so that this is one rounding, 6e-8 in float32. A gradient whose sign
persists is there after `log 2 / log(1 / b)` steps, 46 in float32 and 102 in float64, and so is one that agrees three
times in four. So a parameter is held back while its gradients are small **and** have no direction; nothing else in a
step changes.

A gradient is judged as a whole, and entry by entry for vectors whose oracle is the sign, which is not continuous: so
the middle third of the bias of `nn.MultiheadAttention`, which belongs to the keys, stays under `Signum`. Both tests
compare gradients of one step with each other, or signs: they do not change if all gradients are multiplied by a factor,
as by clipping. What is not seen: a module whose gradients are all errors, or that has one parameter alone; errors of a
precision lower than the parameter's, as from autocast; a step that is compiled; parameters that AdamW moves; errors
that repeat exactly, step after step, because neither the data nor the other weights change.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wellnormed.norms import Gain, Norm, Sign
from wellnormed.parallel.layout import like, local, whole

POSITIONS = 2**16
"""Terms that a gradient sums at most, `n`."""


def rounding_level(dtype: torch.dtype) -> float:
    """Largest error of a sum, relative to one whose terms point one way: `sqrt(n) u`.

    Gradients of 16 bits are summed in float32 and rounded once.

    Example:
        >>> rounding_level(torch.float32) == 2**-16, rounding_level(torch.float64) == 2**-45
        (True, True)
    """
    summed = min(_rounding(dtype), 2.0**-24)
    return math.sqrt(POSITIONS) * summed + (_rounding(dtype) - summed)


def memory_of_signs(dtype: torch.dtype) -> float:
    """The factor `b` per step of the average of signs: a fair coin reaches 1/2 with the probability of one rounding."""
    window = 8 * math.log(1 / _rounding(dtype))
    return (window - 1) / (window + 1)


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def doubtful_sizes(sizes: Mapping[str, float], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """For every parameter that is compared, the size at or below which its gradient may be an error.

    Left out are parameters whose module, with the modules inside it, holds no other, and matrices that have no name
    but a number.

    Args:
        sizes: The largest entry of every gradient there is.
        parameters: The parameters by their names.

    Example:
        >>> parameters = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.weight": torch.ones(2, 2)}
        >>> sizes = doubtful_sizes({"a.weight": 2.0, "a.bias": 3.0, "b.weight": 5.0}, parameters)
        >>> {name: size * 2**16 for name, size in sizes.items()}
        {'a.weight': 3.0, 'a.bias': 5.0}
    """
    inside: dict[str, list[tuple[float, str]]] = {name.rpartition(".")[0]: [] for name in sizes} | {"": []}
    for name, size in sizes.items():
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in inside:
                inside[module].append((size, name))
    largest = {module: sorted(members)[:-3:-1] for module, members in inside.items()}  # the two largest of every module

    def others(name: str, module: str) -> float | None:
        return next((size for size, other in largest[module] if other != name), None)

    found = {}
    for name in sizes:
        beside, level = others(name, name.rpartition(".")[0]), rounding_level(parameters[name].dtype)
        if beside is None:
            continue
        if parameters[name].ndim < 2:  # a module whose other gradients are zero does not tell
            found[name] = level * min(others(name, "") or 0.0, math.sqrt(POSITIONS) * beside or math.inf)
        elif not name.isdigit():
            found[name] = level * beside
    return found


def by_entries(parameter: Tensor, norm: Norm) -> bool:
    """Whether a gradient is judged entry by entry."""
    return parameter.ndim < 2 and isinstance(norm, Sign | Gain)


def count_agreement(
    agreements: list[Tensor], gradients: list[Tensor], averages: list[Tensor], *, entries: bool
) -> None:
    """Bring the averages of signs up to date, before the gradients enter their averages; shapes are all equal."""
    if entries:
        signs = torch._foreach_sign([local(g) for g in gradients])
        torch._foreach_mul_(signs, torch._foreach_sign([local(m) for m in averages]))
    else:
        least = torch.finfo(gradients[0].dtype).tiny  # divided by its size a small gradient makes no product underflow
        sizes = [whole(g.abs().max()).clamp(min=least) for g in gradients]
        products = [(g / n * m).sum() for g, n, m in zip(gradients, sizes, averages, strict=True)]
        signs = [whole(product).sign() for product in products]
    torch._foreach_lerp_([local(a) for a in agreements], signs, 1 - memory_of_signs(gradients[0].dtype))


class Rounding:
    """What is held back in one step.

    Args:
        sizes: The largest entry of every gradient there is.
        parameters: The parameters by their names.
    """

    def __init__(self, sizes: Mapping[str, float], parameters: Mapping[str, Tensor]) -> None:
        below = doubtful_sizes(sizes, parameters)
        self._below = {parameters[name]: size for name, size in below.items() if size > 0}
        self._sizes = {parameters[name]: sizes[name] for name in below}
        self._factors: dict[Tensor, Tensor] = {}

    def doubtful(self, parameters: list[Tensor], entries: bool) -> list[int]:
        """The indices of those of which an entry, or the whole, may be an error."""
        known = [(i, p) for i, p in enumerate(parameters) if p in self._below]
        return [i for i, p in known if entries or self._sizes[p] <= self._below[p]]

    def judge(
        self,
        parameters: list[Tensor],
        seen: list[Tensor],
        share: float,
        agreements: list[Tensor] | None,
        *,
        entries: bool,
    ) -> None:
        """Remember one where a parameter moves and zero where not, for every entry or the whole.

        Args:
            parameters: Doubtful ones, all of one shape.
            seen: What their oracles see.
            share: How much of the gradients `seen` holds: an average that starts at zero does not hold all of them.
            agreements: The averages of signs; None if none are kept, where size alone decides.
            entries: Whether entry by entry.
        """
        above = [local(s).abs() if entries else whole(s.abs().max()) for s in seen]
        torch._foreach_sub_(above, [self._below[p] * share for p in parameters])
        torch._foreach_clamp_min_(above, 0.0)
        if agreements is not None:
            agreed = list(torch._foreach_sub([local(a) for a in agreements], 0.5))
            torch._foreach_clamp_min_(agreed, 0.0)
            torch._foreach_add_(above, torch._foreach_sign(agreed))
        self._factors |= zip(parameters, torch._foreach_sign(above), strict=True)

    def held_back(self, parameters: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """The directions, with zeros where a parameter does not move."""
        return [
            like(local(d) * self._factors[p], p) if p in self._factors else d
            for p, d in zip(parameters, directions, strict=True)
        ]
