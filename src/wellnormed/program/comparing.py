"""Test that a model's code and its program compute the same, at inputs drawn from the domain. It is not a proof."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed.program.constants import draws
from wellnormed.program.domain import Domain
from wellnormed.program.drawing import draw
from wellnormed.program.errors import DRAWS, UncertifiableError
from wellnormed.program.places import first_line, line_of, place
from wellnormed.program.program import Example, Program, map_tensors, select
from wellnormed.program.shaking import Shaken
from wellnormed.program.snapshot import Snapshot

BATCHES = (2, 7)
"""The sizes of drawn batches at which a model is compared with a program of one sample, beside the example."""
OF_EXAMPLE = 32
"""The most samples of the example, from the first on, that are compared."""
WITH_GRADIENTS, WITHOUT_GRADIENTS, TRANSPOSED = "with gradients", "without gradients", "with transposed inputs"
CIRCUMSTANCES = (WITH_GRADIENTS, WITHOUT_GRADIENTS, TRANSPOSED)
"""The ways to call a model; the last one changes the memory layout of its inputs."""
NOT_COMPARED = (
    "autocast", "inference mode", "torch.compile", "other devices", "other dtypes", "other numbers of threads",
)  # fmt: skip
"""Circumstances that a model's code can depend on, and that the comparison does not vary."""
_ROUNDINGS, _ROUNDINGS_OF_SHORT = 16, 4
"""The largest difference of an entry, as a multiple of its estimated rounding error: by how much a rounding more of
every computed number, by other kernels, moves it, plus the median relative change (at least half the machine epsilon)
of a typical entry. Of 120 random transformers, convolutional and recurrent models in float32 and bfloat16, none differs
by more than .83 of such an estimate; float32 maps of 65,536 inputs, whose transposed rows are summed one after the
other, by 10 of it. Floats of 16 bits are summed in float32, so that long sums differ by fewer units."""
_MOVED = 2
"""How often the program is run with other roundings."""
_VISIBLE = 1 / 2
"""An entry that is not bitwise equal counts as compared if its tolerance is at most this share of its change."""


@dataclass(frozen=True)
class Comparison:
    """The extent of a comparison that found a model's code to compute the same as its program."""

    arithmetic: str
    """The dtype of the result. Model and program run in their own arithmetic."""
    inputs: int
    """The number of drawn samples."""
    circumstances: tuple[str, ...]
    """Those of `CIRCUMSTANCES` that were tried."""
    batches: tuple[int, ...]
    """The batch sizes; empty for a program of a whole batch."""
    hidden: int = 0
    """The number of entries of the result that could not be compared: they change less than their rounding errors."""


class BatchError(UncertifiableError):
    """The model computes something else for a batch than the program for its samples."""


def compare(
    program: Program, model: nn.Module, domain: Domain | None = None, sizes: Sequence[int] = BATCHES
) -> Comparison:
    """Compare a model with its program at its example, and at samples drawn from the domain.

    A program of one sample is compared with the model's results for batches. Model and program run in the model's
    dtype, and every entry may differ by as much as rounding explains.

    Args:
        program: The program that `capture` returned for the model.
        model: The model; its state is restored afterwards.
        domain: The inputs that the certificate holds for. With None, for no certificate, samples are drawn with a root
            mean square of at most 1, and results may be NaN.
        sizes: Sizes of a batch.

    Raises:
        UncertifiableError: The model computes something else than the program, cannot be run on an input of the domain,
            gives NaN there, draws random numbers, or overwrites one of its tensors.

    Example:
        >>> import wellnormed as wn
        >>> model = nn.Linear(2, 3)
        >>> compare(wn.capture(model, torch.zeros(4, 2)), model).batches
        (4, 2, 7)
    """
    name = type(model).__name__
    for node in program.nodes:
        if draws(node):
            raise UncertifiableError(f"{place(node)}: {DRAWS}")
    drawn = draw(program, 1.0 if domain is None else domain, max(sizes))
    if program.each_sample and all(all(map(torch.equal, drawn[0], other)) for other in drawn[1:]):
        raise BatchError(f"{name} cannot be compared: inputs or rows that it looks up are alike in all samples")
    comparing = _Comparing(program, model, drawn)
    if domain is not None and bool(comparing.expected[: len(drawn)].isnan().any()):
        for stored, each in program.stored.items():
            if not bool(each.tensor.isfinite().all()):
                raise UncertifiableError(f"{name} gives NaN: {stored} has entries that are not finite")
        raise UncertifiableError(
            f"{name} gives NaN at an input of the domain, where a bound says nothing; pass a smaller radius, and let "
            "every row of an attention mask allow at least one token"
        )
    calls = [range(len(drawn), len(comparing.samples))]
    calls += [range(size) for size in sizes] if program.each_sample else [range(n, n + 1) for n in range(len(drawn))]
    before = Snapshot(model)
    try:
        for call in calls:
            comparing.require(call, WITH_GRADIENTS)
        comparing.require(calls[0], WITHOUT_GRADIENTS)
        transposed = comparing.require(calls[1], TRANSPOSED, may_fail=True)
        before.require(model)
    finally:
        before.restore()
    arithmetic = str(program.result.meta["val"].dtype).removeprefix("torch.")
    batches = tuple(dict.fromkeys(map(len, calls))) if program.each_sample else ()
    return Comparison(arithmetic, len(drawn), CIRCUMSTANCES[: 2 + transposed], batches, comparing.hidden())


class _Comparing:
    """The program's results for drawn samples and for its example's, and the tolerances of the model's results."""

    def __init__(self, program: Program, model: nn.Module, drawn: list[list[Tensor]]) -> None:
        self._program, self._model, self._name = program, model, type(model).__name__
        self._executed: Tensor = program.result.meta["val"]
        given = program.samples[:OF_EXAMPLE]
        self.samples = drawn + given
        with torch.no_grad():
            self.expected = torch.cat([self._run(drawn), self._run(given)])
            some = drawn[:2]
            vendor = torch.backends.mkldnn.enabled
            torch.backends.mkldnn.set_flags(False)  # other kernels, and one sample after the other
            try:
                others = [Shaken(program, seed=seed) for seed in range(_MOVED)]
                moved = [torch.cat([self._run([each], other) for each in some]) for other in others]
            finally:
                torch.backends.mkldnn.set_flags(vendor)
        change, size, spread = (
            each.nan_to_num(0.0, 0.0, 0.0)
            for each in (
                self.expected.amax(0) - self.expected.amin(0),
                self.expected.abs().amax(0),
                (torch.stack(moved) - self.expected[: len(some)]).nan_to_num(0.0, 0.0, 0.0).abs().amax((0, 1)),
            )
        )
        epsilon = torch.finfo(self._executed.dtype).eps if self._executed.dtype.is_floating_point else 0.0
        # entries that are 0, as behind a ReLU, do not round
        share = (spread / size)[size > 0].median().nan_to_num(0.0).clamp(min=epsilon / 2)
        typical = size[size > 0].median().nan_to_num(0.0)
        roundings = _ROUNDINGS if self._executed.dtype.itemsize > 2 else _ROUNDINGS_OF_SHORT
        tolerance = roundings * (spread + share * size.clamp(min=typical))
        constant = (change == 0) & self.expected.isfinite().all(0)
        # where no rounding moves a constant either, nothing explains an error
        self._change, self._tolerance = change, torch.where(constant & (spread == 0), 0.0, tolerance)
        self._noise = constant & (self._tolerance > size)
        """Which entries no input moves, and roundings by more than themselves."""
        self._rounded = torch.zeros_like(change, dtype=torch.bool)
        """Which entries were not bitwise equal in some call."""

    def _run(self, samples: list[list[Tensor]], module: Callable[..., Tensor] | None = None) -> Tensor:
        calls = [self._program.batch(samples)] if self._program.each_sample else samples
        results = torch.stack([self._program.run(each, module).double() for each in calls])
        return results.reshape(len(samples), *self._executed.shape)

    def require(self, call: range, circumstance: str, may_fail: bool = False) -> bool:
        """Compare the model's results for a batch of samples; False if the model fails and `may_fail`."""
        kind = BatchError if len(call) > 1 and circumstance != TRANSPOSED else UncertifiableError
        inputs = self._program.call(self._program.batch([self.samples[number] for number in call]))
        try:
            found = _called(self._model, inputs, circumstance, self._program.output)
        except Exception as error:  # whatever the model raises
            if may_fail:
                return False
            raise kind(
                f"{self._name} cannot be run on an input drawn from its domain{line_of(error)}: {first_line(error)}"
            ) from error
        wanted = self.expected[call.start : call.stop]
        shape = wanted.flatten(0, 1).shape if wanted.ndim > 1 and self._program.each_sample else self._executed.shape
        if found.shape != shape:
            how = f"its result has shape {tuple(found.shape)} instead of {tuple(shape)}"
        else:
            found = found.reshape(wanted.shape)
            same = (found == wanted) | (found.isnan() & wanted.isnan())
            self._rounded |= ~same.all(0)
            wrong = ~(same | ((found - wanted).abs() <= self._tolerance))
            if not bool(wrong.any()):
                return True
            explained = self._tolerance.expand(wanted.shape)[wrong]
            by, most = float((found - wanted)[wrong].abs().max()), float(explained.max())
            how = f"its result differs by {by:.3g}, and rounding explains {most:.3g}"
        size = f" for a batch of {len(call)}" if len(call) > 1 else ""
        raise kind(
            f"{self._name} does not compute what was captured{size} {circumstance}: {how}. It depends on something "
            "else than its input and its stored tensors, such as randomness, an earlier call, the order in memory of "
            "tensors that it overwrites, or whether gradients are recorded: where they are not, nn.TransformerEncoder "
            "leaves out padding, unless it is given enable_nested_tensor=False"
        )

    def hidden(self) -> int:
        """The number of entries in which rounding may hide a difference; if in all, a batch shows nothing."""
        changed = self._change > 0
        unseen = changed & self._rounded & (self._tolerance > _VISIBLE * self._change) | self._noise
        if (hidden := int(unseen.sum())) == int((changed | unseen).sum()) > 0 and self._program.each_sample:
            raise BatchError(
                f"{self._name} cannot be compared on batches: its result changes by less than its rounding errors in "
                f"{self._executed.dtype}"
            )
        return hidden


def _called(model: nn.Module, inputs: Example, circumstance: str, output: Any) -> Tensor:
    """The model's result in double precision, for copies of the inputs."""
    gradients = circumstance == WITH_GRADIENTS

    def copied(each: Tensor) -> Tensor:
        if circumstance == TRANSPOSED and each.ndim > 1:
            axes = tuple(reversed(range(each.ndim)))
            return each.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)
        return each.clone().requires_grad_(gradients and each.is_floating_point())

    with torch.set_grad_enabled(gradients):
        prepared = map_tensors(copied, inputs)
        return select(model(*prepared.arguments, **prepared.keywords), output).detach().double()
