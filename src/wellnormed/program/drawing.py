"""Draws samples from the domain of a certificate, at which a model is compared with its captured program."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from wellnormed.program.domain import Box, Domain, default_axes
from wellnormed.program.integers import Integers
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


def draw(program: Program, domain: Domain, count: int) -> tuple[list[list[Tensor]], bool]:
    """Draw samples, each a list of its tensors. The same program, domain and count always give the same samples.

    Floats are drawn at random from the domain, in three sizes and, every fourth time, with a single entry in each group
    that is not 0. Integers from which the index of a lookup is computed are replaced by others, as far as the constants
    that the program makes of them, such as masks, keep their values: the certificate holds only for these. All other
    inputs stay as they are in the example. What all samples of a batch share is drawn once.

    Returns:
        The samples, and whether they differ in all that may differ from sample to sample. If not, they cannot show
        that a model mixes the samples of a batch.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = _SIZES if domain == math.inf else _SHARES
    integers, samples = _IntegerDraws(program, generator), list[list[Tensor]]()
    for number in range(count):
        size, single = (*sizes, sizes[0])[number % 4], number % 4 == 3
        sample = [example.clone() for _, example in program.inputs.values()]
        own = [not (number and program.each_sample) or batched for batched in program.batched]
        for place, example in enumerate(sample):
            if not own[place]:
                sample[place] = samples[0][place]
            elif example.is_floating_point():
                sample[place] = _floats(example.shape, domain, size, single, generator).to(example)
        samples.append(integers.draw(sample, own))
    alike = all(all(map(torch.equal, samples[0], other)) for other in samples[1:])
    return samples, not alike and not integers.unseen(samples)


class _IntegerDraws:
    """Replaces integers from which the index of a lookup is computed, and keeps the constants of a certificate."""

    def __init__(self, program: Program, generator: torch.Generator) -> None:
        self._program, self._integers, self._generator = program, Integers(program), generator
        self._pools: dict[int, list[Tensor]] = {}
        """Position of an input -> numbers to draw from: those of rows of its tables, and the entries of the example."""
        self._refused = set[fx.Node]()
        """The lookups whose index was another one in samples that did not keep the constants."""
        rows_from = [self._integers.rows_from(lookup) for lookup in self._integers.lookups]
        for place, (name, (_, example)) in enumerate(program.inputs.items()):
            rows = {count for count, names in rows_from if name in names and count > 1}
            if rows and example.numel():
                counts = {2} if example.dtype == torch.bool else {min(_SPECIAL, *rows), *rows}
                self._pools[place] = [*map(torch.arange, sorted(counts)), program.given[place].flatten().cpu().long()]
        example = [example for _, example in program.inputs.values()]
        self._values = self._integers.values(example) if self._pools else {}

    def unseen(self, samples: Sequence[list[Tensor]]) -> bool:
        """Whether some lookup has the same index in all samples of a batch, though nothing shows that it must.

        It must where it depends on no input that has samples, or where its index changes only if the constants do.
        """
        if not self._pools:
            return False
        first, *others = map(self._integers.values, samples)
        varied = set[fx.Node]().union(*(self._integers.changed(first, each) for each in others))
        own = {name for name, batched in zip(self._program.inputs, self._program.batched, strict=True) if batched}
        for lookup in self._integers.lookups:
            rows, names = self._integers.rows_from(lookup)
            if rows > 1 and not own.isdisjoint(names) and lookup not in varied | self._refused:
                return True
        return False

    def draw(self, sample: list[Tensor], own: Sequence[bool]) -> list[Tensor]:
        """The sample with other integers in the inputs that are its own.

        If not all entries can be replaced at once, halves of them are tried, and halves of these; if none can, all are
        permuted.
        """
        places = [place for place in self._pools if own[place]]
        if not places:
            return sample
        entries = torch.cat([sample[place].flatten().cpu().long() for place in places])
        drawn = torch.cat([self._proposals(place, sample[place].numel()) for place in places])
        before, parts = entries, [torch.arange(len(entries))]
        for part in parts:  # which grows
            trial = entries.index_copy(0, part, drawn[part])
            if self._keeps(sample, places, trial):
                entries = trial
            elif len(part) > 1 and len(parts) < _TRIALS:
                parts += part.chunk(2)
        if torch.equal(entries, before):
            trial = entries[torch.randperm(len(entries), generator=self._generator)]
            entries = trial if self._keeps(sample, places, trial) else entries
        return self._with(sample, places, entries)

    def _proposals(self, place: int, count: int) -> Tensor:
        pools = self._pools[place]
        drawn = [pool[torch.randint(len(pool), (count,), generator=self._generator)] for pool in pools]
        return torch.stack(drawn)[torch.randint(len(pools), (count,), generator=self._generator), torch.arange(count)]

    def _keeps(self, sample: list[Tensor], places: list[int], entries: Tensor) -> bool:
        try:
            values = self._integers.values(self._with(sample, places, entries))
        except Exception:  # whatever an operation raises for integers that it does not take
            return False
        if self._integers.keep(self._values, values):
            return True
        self._refused |= self._integers.changed(self._values, values)
        return False

    def _with(self, sample: list[Tensor], places: list[int], entries: Tensor) -> list[Tensor]:
        """A sample with the given entries in some of its inputs, one behind the other."""
        parts = dict(zip(places, entries.split([sample[place].numel() for place in places]), strict=True))
        return [parts[n].view(each.shape).to(each) if n in parts else each for n, each in enumerate(sample)]


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
