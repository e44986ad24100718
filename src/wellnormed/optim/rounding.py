"""Which gradients are rounding errors and nothing else, so that an oracle does not turn them into whole steps.

Softmax does not see the bias of the keys, nor a batch norm the bias of the convolution before it. The terms of their
gradient cancel, and an oracle, which does not see its size, would make a whole step of the rounding that is left.

A parameter is held back while its gradient, and the average of those before it, are small **and** have no direction;
nothing else in a step changes. `docs/optimizers.md` derives what is small and what is a direction:

- a vector is small below `sqrt(n) u` of all other gradients and `n u` of those of its module, a matrix below
  `sqrt(n) u` of those of its module, for sums of `n` terms and the unit roundoff `u`;
- a gradient has a direction while the running average of its signs, relative to the average before it, is above 1/2,
  where a fair coin comes with the probability of one rounding (Hoeffding).

A gradient is judged as a whole, and entry by entry for vectors whose oracle is the sign, which is not continuous: so
the middle third of the bias of `nn.MultiheadAttention`, which belongs to the keys, stays under `Signum`. What is not
seen: a module whose gradients are all errors, or that has one parameter alone; errors of a precision lower than the
parameter's, as from autocast; a step that is compiled; parameters that AdamW moves; errors that repeat exactly, step
after step, because neither the data nor the other weights change.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from wellnormed.norms import Gain, Norm, Sign
from wellnormed.parallel.layout import like, local, whole

State = dict[str, Tensor]
POSITIONS = 2**16
"""Terms that a gradient sums at most, `n`."""


def rounding_level(dtype: torch.dtype) -> float:
    """Largest error of a sum, relative to one whose terms point one way: `sqrt(n) u`.

    Gradients of 16 bits are summed in float32 and rounded once.

    Example:
        >>> rounding_level(torch.float32) == 2**-16, rounding_level(torch.float64) == 2**-45
        (True, True)
    """
    rounding = torch.finfo(dtype).eps / 2
    summed = min(rounding, 2.0**-24)
    return math.sqrt(POSITIONS) * summed + (rounding - summed)


def memory_of_signs(dtype: torch.dtype) -> float:
    """The factor `b` per step of the average of signs: a fair coin reaches 1/2 with the probability of one rounding."""
    window = 8 * math.log(2 / torch.finfo(dtype).eps)
    return (window - 1) / (window + 1)


def doubtful_sizes(sizes: Mapping[str, float], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """For every parameter that is compared, the size at or below which its gradient may be an error.

    `sizes` holds the largest entry of every gradient there is. Left out are parameters whose module, with the modules
    inside it, holds no other, and matrices that have no name but a number.

    Example:
        >>> parameters = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.weight": torch.ones(2, 2)}
        >>> sizes = doubtful_sizes({"a.weight": 2.0, "a.bias": 3.0, "b.weight": 5.0}, parameters)
        >>> {name: size * 2**16 for name, size in sizes.items()}
        {'a.weight': 3.0, 'a.bias': 5.0}
    """
    inside: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, size in sizes.items():
        module = name
        while module:
            module = module.rpartition(".")[0]
            inside[module].append((size, name))
    largest = {module: heapq.nlargest(2, members) for module, members in inside.items()}
    found = {}
    for name in sizes:
        level, vector = rounding_level(parameters[name].dtype), parameters[name].ndim < 2
        beside = [size for size, other in largest[name.rpartition(".")[0]] if other != name]
        if beside and vector:  # a module whose other gradients are zero does not tell
            most = next(size for size, other in largest[""] if other != name)
            found[name] = level * min(most, math.sqrt(POSITIONS) * beside[0] or math.inf)
        elif beside and not name.isdigit():
            found[name] = level * beside[0]
    return {name: size for name, size in found.items() if size > 0}


def by_entries(parameter: Tensor, norm: Norm | None) -> bool:
    """Whether a gradient is judged entry by entry."""
    return parameter.ndim < 2 and isinstance(norm, Sign | Gain)


class Rounding:
    """What is held back in one step; the arguments are those of `doubtful_sizes`."""

    def __init__(self, sizes: Mapping[str, float], parameters: Mapping[str, Tensor]) -> None:
        below = doubtful_sizes(sizes, parameters)
        self._below = {parameters[name]: (size, sizes[name] <= size) for name, size in below.items()}
        self._factors: dict[Tensor, Tensor] = {}

    def judge(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], norm: Norm, sized: bool
    ) -> None:
        """Remember one where a parameter moves and zero where not, and bring its average of signs up to date.

        The parameters share the norm. `states` hold that average, and what the step has averaged before these
        gradients; `sized` says that it averaged gradients, so that their size tells too. Without states the size of
        the gradient alone decides.
        """
        entries = by_entries(parameters[0], norm)
        doubted = [i for i, p in enumerate(parameters) if p in self._below and (entries or self._below[p][1])]
        if not doubted:
            return
        below = [self._below[parameters[i]][0] for i in doubted]
        part = local if entries else lambda tensor: tensor
        size = Tensor.abs if entries else lambda tensor: whole(tensor.abs().max())
        found = [part(gradients[i]) for i in doubted]
        sizes = [size(g) for g in found]
        above = torch._foreach_sub(sizes, below)
        if states:
            averages = [part(states[i]["momentum_buffer"]) for i in doubted]
            agreements = [local(states[i]["agreement"]) for i in doubted]
            if entries:
                signs = torch._foreach_mul(torch._foreach_sign(found), torch._foreach_sign(averages))
            else:
                least = torch.finfo(found[0].dtype).tiny  # divided by its size a small gradient makes no underflow
                triples = zip(found, sizes, averages, strict=True)
                signs = [whole((g / n.clamp(min=least) * m).sum()).sign() for g, n, m in triples]
            torch._foreach_lerp_(agreements, signs, 1 - memory_of_signs(found[0].dtype))
            torch._foreach_maximum_(above, torch._foreach_sub(agreements, 0.5))
            if sized:
                torch._foreach_maximum_(above, torch._foreach_sub([size(m) for m in averages], below))
        torch._foreach_clamp_min_(above, 0.0)
        self._factors |= zip((parameters[i] for i in doubted), torch._foreach_sign(above), strict=True)

    def held_back(self, parameters: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """The directions, with zeros where a parameter does not move."""
        return [
            like(local(d) * self._factors[p], p) if p in self._factors else d
            for p, d in zip(parameters, directions, strict=True)
        ]
