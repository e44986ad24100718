"""How far a vector may move: as far as it, or the layer that it is added to, is large at the start of training.

A step of norm 1 in `BiasRMS` has RMS 1: as much as what a layer of norm 1 makes of an input of RMS 1. A layer that
starts smaller makes less, and such a vector would drown it within a few steps. So its radius is a size at the start:

- of a bias beside a weight `W`, that of what it is added to: `|W|_F / sqrt(d_out)`, the RMS of `W x` for an input `x`
  of independent entries of RMS 1 (the geometric mean over several weights);
- of another vector, as a class token or a table of positions, its own RMS;
- where that is zero, as of the bias of a norm layer, a token of zeros, or beside a weight of zeros: the geometric mean
  of the first over all weights but zeros in the nearest module around it that holds one.

A size above 1 is 1, the norm's own unit. All are rounded to powers of two, so that neither the layout of a weight over
processes nor the draw of a start decides the digits of a step.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.norms.assignment import Assignment
from wellnormed.norms.base import widened
from wellnormed.norms.roles import module_path


@torch.no_grad()
def starting_radii(assignment: Assignment, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, float]:
    """The radius of every vector whose radius the recipe leaves to the start, by name, as the weights are now.

    `whole` assembles a number of a tensor that lies over several processes; the call is then a collective one.

    Example:
        >>> from torch import nn
        >>> from wellnormed.norms import assign_norms
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> _ = nn.init.normal_(model[0].weight, std=0.02)  # the RMS of its output is 0.02 * 8 = 0.16
        >>> starting_radii(assign_norms(model))
        {'0.bias': 0.125, '1.bias': 0.125}
    """

    def size(tensor: Tensor, count: int) -> float:
        return float(whole(torch.linalg.vector_norm(widened(tensor.detach())))) / math.sqrt(count)

    vectors = [a for a in assignment if a.by_start]
    beside: dict[str, list[float]] = defaultdict(list)
    around: dict[str, list[float]] = defaultdict(list)
    for weight in assignment.weights if vectors else ():
        own = size(weight.parameter, weight.outputs)
        for path in map(module_path, weight.names) if own else ():
            beside[path].append(math.log(own))
            for module in _upwards(path):
                around[module].append(math.log(own))
    layers = {module_path(name) for weight in assignment.weights for name in weight.names}
    found = {}
    for a in vectors:
        path = module_path(a.name)
        own = 0.0 if path in layers else size(a.parameter, a.parameter.numel())
        logs = beside[path] or next((around[module] for module in _upwards(path) if module in around), [0.0])
        found[a.name] = _power_of_two(own or math.exp(statistics.fmean(logs)))
    return found


def _upwards(path: str) -> list[str]:
    """A module's path and those of the modules around it, the model's last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


def _power_of_two(size: float) -> float:
    return 2.0 ** min(0, round(math.log2(size))) if size < math.inf else 1.0
