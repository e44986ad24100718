"""Draws samples from the domain of a certificate, at which a model is compared with its captured program."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from wellnormed.program.domain import Box, Domain, default_axes
from wellnormed.program.operation import kind_of
from wellnormed.program.program import Program

_SHARES = (1.0, 0.03, 1e-3)
"""The sizes of drawn samples, as shares of the largest size in the domain."""
_SIZES = (1e3, 1.0, 1e-3)
"""The sizes of drawn samples, as root mean squares, if the domain is every finite input."""
_INSIDE = 1 - 2**-7
"""A factor that keeps drawn samples in the domain when they are rounded to bfloat16."""


def draw(program: Program, domain: Domain, count: int) -> list[list[Tensor]]:
    """Draw samples, each a list of its tensors. The same program, domain and count always give the same samples.

    Floats are drawn at random from the domain, in three sizes and, every fourth time, with a single entry in each group
    that is not 0. Integers that only look up rows of a table are drawn from the numbers of its rows, and those from
    which an index is computed from the entries of the example. All other inputs stay as they are in the example, since
    the certificate holds only for their values there. What all samples of a batch share is drawn once.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = _SIZES if domain == math.inf else _SHARES
    samples: list[list[Tensor]] = []
    for number in range(count):
        size, single = (*sizes, sizes[0])[number % 4], number % 4 == 3
        sample = []
        for place, (placeholder, (_, example)) in enumerate(program.inputs.items()):
            if number and program.each_sample and not program.batched[place]:
                sample.append(samples[0][place])
            elif example.is_floating_point():
                sample.append(_floats(example.shape, domain, size, single, generator).to(example))
            elif (rows := _rows(program, placeholder)) is not None:
                sample.append(torch.randint(rows, example.shape, generator=generator).to(example))
            elif program.inputs[placeholder][0] in program.fixed or not example.numel():
                sample.append(example.clone())
            else:  # integers from which an index is computed: any of those that the example has
                entries = program.given[place].flatten()
                drawn = torch.randint(len(entries), example.shape, generator=generator)
                sample.append(entries[drawn.to(entries.device)])
        samples.append(sample)
    return samples


def _floats(shape: Sequence[int], domain: Domain, size: float, single: bool, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    axes = default_axes(shape) if len(shape) else ()
    if single:
        largest = drawn.abs().amax(axes, keepdim=True) if drawn.numel() else drawn
        drawn = torch.where(drawn.abs() == largest, drawn, 0.0)
    if isinstance(domain, Box):
        middle, half = (domain.high + domain.low) / 2, (domain.high - domain.low) / 2
        return middle + _INSIDE * half * size * torch.erf(drawn)
    rms = drawn.square().mean(axes, keepdim=True).sqrt() if drawn.numel() else drawn
    radius = size if domain == math.inf else size * domain
    return _INSIDE * radius * drawn / rms.clamp(min=1e-300)


def _rows(program: Program, placeholder: str) -> int | None:
    """The number of rows of the smallest table that an input of integers looks up.

    The result is None if the input looks up no table, or is used for anything else as well.
    """
    depends, tables = program.depends, list[int]()
    front = [node for node in program.nodes if node.name == placeholder]
    for node in front:
        for user in node.users:
            if user in depends.lookups:
                assert isinstance(user.args[0], fx.Node)  # the table is the first argument of all lookups
                tables.append(user.args[0].meta["val"].shape[0])
            elif kind_of(user) not in ("move", "copy") or len(user.all_input_nodes) > 1:
                return None
            elif user not in front:
                front.append(user)
    return min(tables, default=None)
