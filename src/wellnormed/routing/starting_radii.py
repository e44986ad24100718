"""The radii of vectors, tables and kernels: how far they may move.

The radius of a kernel on images is its number of positions K, if its windows overlap. Its norm, `K max_t |W_t|`, bounds
the stretching of an image if all positions add up; with radius K each of the matrices `W_t` moves as far as that of a
linear layer. Kernels along one axis, and those that cut an image into patches, as in transformers, keep radius 1.

The radius of a vector is its size at the start of training, or that of its layer. A step of norm 1 has RMS 1 in
`BiasRMS`, and in every row of a table of embeddings, just like the output of a layer of norm 1 for an input of RMS 1. A
layer that starts smaller has a smaller output, and vectors that move by RMS 1 would drown it within a few steps. So
their radius is a size at the start:

- The size of a weight `W` is `|W|_F / sqrt(d_out)`: the RMS of `W x` for an input `x` of independent entries of RMS 1.
  The size of a kernel is K times that, as it moves K times as far. The size of a module is the geometric mean over all
  nonzero weights in it.
- A bias beside a weight has the size of the weight, to whose output it is added; beside a weight of zeros, that of the
  nearest module around it that has one.
- Another vector (a class token, a table of positions, the bias of a norm layer) has its own RMS, and at least a quarter
  of the size of the nearest module around it that has one, since many start at zero.
- A gain has half the size of the weight beside it, or of the nearest module around it that has one. Its start says
  nothing about this: gains start at 1, layer scales at 1e-6, gains that are added to 1 at 0.
- A table of embeddings has its own RMS, and at least twice the size of the nearest module around it that has one.

A size is at most the radius of these weights, which is 1 except for kernels. All sizes are rounded to powers of two, so
that the digits of a step depend neither on the layout of weights over processes nor on the random start.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed._inputs import is_quantized
from wellnormed.norms.base import widened
from wellnormed.norms.convolution import SpectralConv
from wellnormed.norms.entries import Gain
from wellnormed.norms.root_mean_square import BiasRMS
from wellnormed.routing.assignment import Assignment
from wellnormed.routing.roles import module_path

LEAST_OF_VECTOR, LEAST_OF_TABLE, OF_GAIN = 0.25, 2.0, 0.5
"""Radii in units of the size of the module around, chosen on half of the public models of `docs/rates.md`.

A vector does as well with 1/16, and worse with 1. A table with 1 costs nanoGPT's model 0.06 on Shakespeare. A gain of
radius 1 ends in noise, T5 at 2.68 after 300 steps (2.18 now, with 1/16 it is 2.62), and one of radius 1/4 leaves ViT at
0.22 after 40 steps of three times the default rate, where 1/16, which it has now, leaves 0.07.
"""


@torch.no_grad()
def starting_radii(assignment: Assignment, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, float]:
    """The radii that depend on the start, from the present weights: name of a parameter -> radius.

    `whole` assembles a number that is computed on a tensor cut over several processes; the call is then collective.

    Example:
        >>> from torch import nn
        >>> from wellnormed.routing import assign_norms
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> _ = nn.init.normal_(model[0].weight, std=0.02)  # the RMS of its output is 0.02 * 8 = 0.16
        >>> starting_radii(assign_norms(model))
        {'0.bias': 0.125, '1.weight': 0.0625, '1.bias': 0.03125}
    """

    def size(tensor: Tensor, count: int) -> float:
        """The root of the sum of all squares over a count; 0 for meta tensors and quantized codes."""
        plain = tensor.is_floating_point() and tensor.layout is torch.strided and not is_quantized(tensor)
        if tensor.is_meta or not plain:
            return 0.0
        return float(whole(torch.linalg.vector_norm(widened(tensor.detach())))) / math.sqrt(count)

    moved = {a.parameter: a for a in assignment if a.by_start and not isinstance(a.norm, SpectralConv)}
    counted = [a for a in assignment if isinstance(a.norm, SpectralConv) and a.norm.mode == "positions"]
    kernels = {a.parameter: a for a in counted if a.by_start}
    beside: dict[str, list[tuple[float, float]]] = defaultdict(list)  # logarithms of a size and of a radius
    around: dict[str, list[tuple[float, float]]] = defaultdict(list)
    weights = [weight for weight in assignment.weights if moved and weight.parameter not in moved]  # not tied tables
    for weight in weights:
        weight_size = size(weight.parameter, weight.outputs)
        radius = math.log(kernels[weight.parameter].radius) if weight.parameter in kernels else 0.0
        for path in map(module_path, weight.names) if weight_size else ():
            beside[path].append((math.log(weight_size) + radius, radius))
            for module in _upwards(path):
                around[module].append(beside[path][-1])
    layers = {module_path(name) for weight in weights for name in weight.names}
    radii = {a.name: a.radius for a in kernels.values()}
    for a in moved.values():
        path = module_path(a.name)
        logs = beside.get(path) or next((around[module] for module in _upwards(path) if module in around), [(0.0, 0.0)])
        (layer, most), vector = map(statistics.fmean, zip(*logs, strict=True)), isinstance(a.norm, BiasRMS)
        layer = math.exp(layer)
        if isinstance(a.norm, Gain):
            sizes = [layer * OF_GAIN]
        elif vector and path in layers:
            sizes = [layer]
        else:
            sizes = [layer * (LEAST_OF_VECTOR if vector else LEAST_OF_TABLE), size(a.parameter, a.parameter.numel())]
        finite = all(number < math.inf for number in sizes)  # uninitialised memory may hold anything
        most = round(most / math.log(2))
        radii[a.name] = 2.0 ** min(most, round(math.log2(max(sizes)))) if finite else 1.0
    return radii


def _upwards(path: str) -> list[str]:
    """A module's path and those of the modules around it, the model's last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
