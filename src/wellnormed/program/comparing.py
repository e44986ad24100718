"""Compare a model with its program: a test, and no proof.

A certificate is a proof about the program. That the Python code of the model computes the same, for every sample of a
batch, is tested on samples drawn from the domain, in the circumstances that `CIRCUMSTANCES` lists. A circumstance other
than the first is left out if the model raises an error in it. A model whose code answers differently because it is
being tested can deceive the test.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wellnormed.program.capturing import capture, running, select
from wellnormed.program.domain import Domain
from wellnormed.program.drawing import draw
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.in_double import run_in_double, vendor_kernels
from wellnormed.program.model_state import ModelState
from wellnormed.program.places import first_line, line_of
from wellnormed.program.program import Example, Program, map_tensors, tensors_of

BATCHES = (1, 2, 7)
"""The sizes of the batch, besides that of the example, at which a model is compared with a program of one sample."""
OF_EXAMPLE = 32
"""The most samples of the example, from the first on, that are compared; its own batch is cut to so many as well."""
NOT_COMPARED = (
    "autocast", "torch.compile", "other devices", "other dtypes", "other numbers of threads",
    "inputs that are parameters",
)  # fmt: skip
"""Circumstances that the code of a model can depend on, and in which it is not compared."""
_TOLERANCE = 1e-9
"""The largest difference of an entry of the result, as a share of the change of that entry between drawn samples."""
_ROUNDING = 2**-46
"""The largest further difference, as a share of the entry itself. It is 64 times the machine epsilon of float64, and is
for kernels that sum in another order."""
_SPREADS = 8
"""Where a model cannot be computed in float64: the largest difference of an entry, as a multiple of the difference of
two evaluations of the program there, and of the machine epsilon times the entry."""
_VISIBLE = 1 / 8
"""An entry is compared if its tolerance is at most this share of its change between drawn samples."""


def _strided(tensor: Tensor) -> Tensor:
    """Copy a tensor so that the copy is not contiguous and does not begin where its memory begins."""
    if tensor.ndim == 0:
        return tensor.clone()
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    wide[..., 1::2] = tensor
    return wide[..., 1::2]


def _transposed(tensor: Tensor) -> Tensor:
    """Copy a tensor so that its axes lie in memory in the reverse order, without gaps."""
    axes = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)


def _channels_last(tensor: Tensor) -> Tensor:
    """Copy a tensor so that the second of three or more axes lies last in memory, as for images in channels_last."""
    if tensor.ndim < 3:
        return tensor.clone()
    return tensor.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


class _Circumstance(NamedTuple):
    """A way to call a model."""

    words: str
    """Its name in a certificate."""
    gradients: Callable[[], AbstractContextManager[None]]
    """The context in which the model is called, which says whether gradients are recorded."""
    requires_grad: bool = False
    """Whether the inputs require gradients."""
    computed: bool = False
    """Whether inputs that require gradients are results of operations, and not leaves of the graph of gradients."""
    laid_out: Callable[[Tensor], Tensor] = torch.clone
    """Copies an input, in the order in which its entries lie in memory."""

    def prepare(self, inputs: Example) -> Example:
        """Return copies of drawn inputs with the properties of this circumstance."""

        def copied(each: Tensor) -> Tensor:
            copy = self.laid_out(each)
            if self.requires_grad and each.is_floating_point():
                copy.requires_grad_()
                copy = copy * 1 if self.computed else copy
            return copy

        with torch.enable_grad():
            return map_tensors(copied, inputs)


CIRCUMSTANCES = (
    _Circumstance("with gradients", torch.enable_grad, requires_grad=True),
    _Circumstance("with gradients of other tensors", torch.enable_grad),
    _Circumstance("with computed inputs", torch.enable_grad, requires_grad=True, computed=True),
    _Circumstance("without gradients", torch.no_grad),
    _Circumstance("with strided inputs", torch.no_grad, laid_out=_strided),
    _Circumstance("with transposed inputs", torch.no_grad, laid_out=_transposed),
    _Circumstance("with channels last", torch.no_grad, laid_out=_channels_last),
    _Circumstance("in inference mode", torch.inference_mode),
)


@dataclass(frozen=True)
class Comparison:
    """What was compared before a model was found to compute what its program computes."""

    arithmetic: str
    """`float64`, or the dtype of the result where the model does not run in float64."""
    inputs: int
    """The number of drawn samples."""
    circumstances: tuple[str, ...]
    """The names of the circumstances."""
    batches: tuple[int, ...]
    """The sizes of the batch; empty for a program that is not of each sample."""
    hidden: int = 0
    """The number of entries of the result that change by less than their rounding errors, and are not compared."""


def captured(
    model: nn.Module,
    example: Any,
    output: Any = None,
    domain: Domain | None = None,
    bound: Callable[[Program], Any] = lambda program: None,
) -> tuple[Program, Comparison]:
    """Capture a model and compare it with its program: that of each sample or, where they differ, of the whole example.

    Args:
        model: Any module; it is left as it was.
        example: As for `capture`.
        output: As for `capture`.
        domain: As for `compare`.
        bound: It is called with every captured graph before it is compared, and raises an `UncertifiableError` to
            refuse it.

    Raises:
        UncertifiableError: It cannot be captured, or computes something else than what is captured.
    """
    program = capture(model, example, output)
    try:
        bound(program)
        return program, compare(program, model, domain)
    except UncertifiableError as error:
        # a single sample is the whole example, so that only batches of other sizes can be what differs
        if not program.each_sample or (program.size == 1 and not isinstance(error, _BatchError)):
            raise
    if program.size > 1:
        program = capture(model, example, output, whole_batch=True)
        bound(program)
    else:  # it is the same graph, which is bounded already
        program = replace(program, batched=(False,) * len(program.batched))
    return program, compare(program, model, domain)


def compare(
    program: Program, model: nn.Module, domain: Domain | None = None, sizes: Sequence[int] = BATCHES
) -> Comparison:
    """Compare a model with its program on samples drawn from the domain.

    A program of each sample is compared with the model's result for batches of the example's size, or of 32 if the
    example has more samples, and of the given sizes. Both run in their own arithmetic, and their results are computed
    in float64 beside it and compared entry by entry. A model for which float64 cannot be computed beside it is compared
    in its own arithmetic, with a larger tolerance.

    Args:
        program: What `capture` returned for the model.
        model: The model. It is left as it was.
        domain: The inputs that the certificate holds for. Without a certificate it is None; the samples are then drawn
            with a root mean square of at most 1, and results may be NaN.
        sizes: Sizes of a batch.

    Raises:
        UncertifiableError: The model computes something else than the program, cannot be run on an input of the domain,
            gives NaN there, or is in another state after a run.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> compare(capture(model, torch.zeros(4, 2)), model).batches
        (4, 1, 2, 7)
    """
    with running(model) as state:
        try:
            return _Comparing(program, model, domain, sizes, in_double=True).compare(state)
        except _FewerDigitsError:
            state.restore()
            return _Comparing(program, model, domain, sizes, in_double=False).compare(state)


class _Comparing:
    """Runs a model and its program, in float64 or in their own arithmetic, and compares the results."""

    def __init__(
        self, program: Program, model: nn.Module, domain: Domain | None, sizes: Sequence[int], in_double: bool
    ) -> None:
        self.program, self.model, self._in_double = program, model, in_double
        self.sizes = tuple(dict.fromkeys((min(program.size, OF_EXAMPLE), *sizes))) if program.each_sample else ()
        drawn, vary = draw(program, 1.0 if domain is None else domain, max(self.sizes, default=4))
        self.count = len(drawn)
        own = program.samples[:OF_EXAMPLE]
        self.samples = drawn + own
        if program.each_sample and not vary:
            raise _BatchError(
                f"{type(model).__name__} cannot be compared: inputs or rows that it looks up are alike in all samples"
            )
        with torch.no_grad():
            self.values, self.own_values = self._expected(drawn), self._expected(own)
        dtype = program.result.meta["val"].dtype
        self.arithmetic = "float64" if in_double else str(dtype).removeprefix("torch.")
        if domain is not None and bool(self.values.isnan().any()):
            raise UncertifiableError(
                f"{type(model).__name__} gives NaN at an input of the domain, where a bound says nothing; pass a "
                "smaller radius, and let every row of an attention mask allow at least one token"
            )
        size = self.values.abs().amax(0).nan_to_num(0.0, 0.0, 0.0)
        self.change = (self.values.amax(0) - self.values.amin(0)).nan_to_num(0.0, 0.0, 0.0)
        if in_double:
            self.tolerance, self.share = _TOLERANCE * self.change + _ROUNDING * size, _TOLERANCE
        else:
            with torch.enable_grad(), vendor_kernels(False):
                again = self._expected(drawn)
            spread = (self.values - again).abs().amax(0).nan_to_num(0.0, 0.0, 0.0)
            epsilon = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            self.tolerance, self.share = _SPREADS * torch.maximum(spread, epsilon * size), _SPREADS * epsilon
        hidden = (self.change > 0) & (self.tolerance > _VISIBLE * self.change)
        self.hidden = int(hidden.sum())
        if self.hidden and self.hidden == int((self.change > 0).sum()):
            raise UncertifiableError(
                f"{type(model).__name__} cannot be compared with what was captured: its result changes by less "
                f"than its rounding errors in {self.arithmetic}; take out what hides the input, or pass a larger radius"
            )

    def _expected(self, samples: list[list[Tensor]]) -> Tensor:
        """The program's result for every sample, `(samples, *result)`."""
        calls = [self.program.batch(samples)] if self.program.each_sample else samples
        found = [self._run(lambda each=each: self.program.run(each), each).double() for each in calls]
        return torch.stack(found).reshape(len(samples), *self.program.result.meta["val"].shape)

    def compare(self, state: ModelState) -> Comparison:
        """Require that the model computes what is expected, in all circumstances and sizes, and changes no state."""
        plain, *others = CIRCUMSTANCES
        calls = [range(size) for size in self.sizes] or [range(each, each + 1) for each in range(self.count)]
        calls.append(range(self.count, len(self.samples)))  # the samples of the example
        states = [state]
        try:
            for number, call in enumerate(calls):
                self._require(plain, call)
                states += [ModelState(self.model)] if number < 2 else []
            compared = [each.words for each in others if self._require(each, calls[0], may_fail=True)]
            self._require(plain, calls[0])
        except UncertifiableError:
            states[-1].require(ModelState(self.model))  # a changed model is the better reason
            raise
        for before in states[1:]:  # the first call may fill caches, so the state before it does not count
            before.require(ModelState(self.model))
        return Comparison(self.arithmetic, self.count, (plain.words, *compared), self.sizes, self.hidden)

    def _require(self, circumstance: _Circumstance, call: range, may_fail: bool = False) -> bool:
        """Require that the model computes what is expected for some of the samples at once.

        The result is True, or False if the model raises an error and `may_fail` is set.
        """
        own = call.start == self.count
        wanted = self.own_values if own else self.values[call.start : call.stop]
        if len(call) == 1:
            wanted = wanted[0]
        elif wanted.ndim > 1:
            wanted = wanted.flatten(0, 1)
        inputs = self.program.call(self.program.batch([self.samples[number] for number in call]))
        try:
            with circumstance.gradients():
                prepared = circumstance.prepare(inputs)
                found = self._run(lambda: self._called(prepared), tensors_of(prepared)).double()
        except _FewerDigitsError:
            raise
        except Exception as error:  # whatever the model raises
            if may_fail:
                return False
            raise (_BatchError if len(call) > 1 else UncertifiableError)(
                f"{type(self.model).__name__} cannot be run on an input drawn from its domain{line_of(error)}: "
                f"{first_line(error)}"
            ) from error
        if found.shape != wanted.shape:
            how = f"its result has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        else:
            tolerance, change = (
                each.expand(len(call), *each.shape).reshape(wanted.shape) for each in (self.tolerance, self.change)
            )
            tolerance = tolerance + self.share * wanted.abs().nan_to_num(0.0) if own else tolerance
            equal = (found == wanted) | (found.isnan() & wanted.isnan()) | ((found - wanted).abs() <= tolerance)
            if bool(equal.all()):
                return True
            by, most = float((found - wanted)[~equal].abs().max()), float(change[~equal].max())
            how = f"its result differs by {by:.3g}, where results for several inputs differ by {most:.3g}"
        size = f" for a batch of {len(call)}" if len(call) > 1 else ""
        raise (_BatchError if len(call) > 1 else UncertifiableError)(
            f"{type(self.model).__name__} does not compute what was captured{size} {circumstance.words}: {how}. It "
            "depends on something else than its input and its stored tensors, such as randomness, an earlier call, "
            "whether gradients are recorded, or the strides of tensors that it overwrites"
        )

    def _called(self, inputs: Example) -> Tensor:
        return select(self.model(*inputs.arguments, **inputs.keywords), self.program.output)

    def _run(self, function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Tensor:
        if not self._in_double:
            return function().detach()
        result = run_in_double(function, inputs)
        if result is None:
            raise _FewerDigitsError
        return result


class _BatchError(UncertifiableError):
    """The model computes something else for a batch than the program for its samples."""


class _FewerDigitsError(Exception):
    """The model or its program cannot be computed in float64."""
