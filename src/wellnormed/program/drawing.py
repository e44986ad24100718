"""Draws samples from the domain of a certificate, at which a model is compared with its captured program."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wellnormed.program.domain import Box, Domain, default_axes
from wellnormed.program.integers import Integers, equal
from wellnormed.program.program import Program

_SHARES = (1.0, 0.03, 1e-3)
"""The sizes of drawn samples, as shares of the largest size in the domain."""
_SIZES = (1e3, 1.0, 1e-3)
"""The sizes of drawn samples, as root mean squares, if the domain is every finite input."""
_INSIDE = 1 - 2**-7
"""A factor that keeps drawn samples in the domain when they are rounded to bfloat16."""
_SPECIAL = 4
"""The number of small integers that are drawn more often: those of padding and of other special tokens."""
_TRIALS = 64
"""The number of sets of entries of one sample that are tried to replace."""


def draw(program: Program, domain: Domain, count: int) -> list[list[Tensor]]:
    """Draw samples, each a list of its tensors. The same program, domain and count always give the same samples.

    Floats are drawn at random from the domain, in three sizes; every fourth sample has a single nonzero entry in each
    group. Integers that index tables are replaced by other ones, but only if the constants that the program computes
    from them, such as masks, keep their values, since the certificate holds only for these. All other inputs keep the
    example's values. Inputs that all samples of a batch share are drawn once.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = _SIZES if domain == math.inf else _SHARES
    integers, samples = Integers(program), list[list[Tensor]]()
    rows = [integers.rows(name) for name in program.inputs]
    pools = [
        [*map(torch.arange, sorted({min(_SPECIAL, *sizes), *sizes})), given.flatten().cpu()] if sizes else []
        for sizes, given in zip(rows, program.given, strict=True)
    ]
    kept = integers.constants([example for _, example in program.inputs.values()]) if any(rows) else []

    def keeps(sample: list[Tensor]) -> bool:
        try:
            return equal(kept, integers.constants(sample))
        except Exception:  # whatever an operation raises for integers that it does not take
            return False

    for number in range(count):
        size, single = (*sizes, sizes[0])[number % 4], number % 4 == 3
        sample = [example.clone() for _, example in program.inputs.values()]
        for place, example in enumerate(sample):
            if number and program.each_sample and not program.batched[place]:
                sample[place] = samples[0][place]
            elif example.is_floating_point():
                sample[place] = _floats(example.shape, domain, size, single, generator).to(example)
            elif pools[place] and example.numel():
                sample = _with_other_integers(sample, place, pools[place], keeps, generator)
        samples.append(sample)
    return samples


def _with_other_integers(
    sample: list[Tensor], place: int, pools: Sequence[Tensor], keeps: Callable[..., bool], generator: torch.Generator
) -> list[Tensor]:
    """Replace the integers of one input: all at once or, if constants change, halves of them, and so on."""
    before = sample[place]
    drawn = [pool[torch.randint(len(pool), (before.numel(),), generator=generator)] for pool in pools]
    choice = torch.randint(len(pools), (before.numel(),), generator=generator)
    entries = torch.stack([each.to(before) for each in drawn])[choice, torch.arange(before.numel())]
    parts = [torch.arange(before.numel())]
    for part in parts:  # the list grows in the loop
        changed = sample[place].flatten().index_copy(0, part, entries[part]).view_as(before)
        trial = [*sample[:place], changed, *sample[place + 1 :]]
        if keeps(trial):
            sample = trial
        elif len(part) > 1 and len(parts) < _TRIALS:
            parts += part.chunk(2)
    return sample


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
