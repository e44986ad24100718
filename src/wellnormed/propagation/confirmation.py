"""Compare a model with the program that was captured from it.

A certificate is a proof about the program. That the Python code of the model computes the same is not proved but
tested, on inputs drawn from the domain, in the circumstances that `CIRCUMSTANCES` lists. A circumstance other than the
first is left out if the model raises an error in it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wellnormed.propagation.batch_size import batch_axis
from wellnormed.propagation.capture import (
    Captured,
    Example,
    any_batch,
    export,
    map_tensors,
    running,
    select,
    tensors_of,
)
from wellnormed.propagation.domain import Domain
from wellnormed.propagation.drawing import Drawing
from wellnormed.propagation.errors import UncertifiableError
from wellnormed.propagation.in_double import run_in_double, vendor_kernels
from wellnormed.propagation.model_state import ModelState
from wellnormed.propagation.places import first_line, line_of

BATCHES = (1, 2, 7)
"""The sizes of the batch at which a model is compared if its certificate holds for a batch of any size."""
NOT_COMPARED = (
    "autocast", "torch.compile", "other devices", "other dtypes", "other numbers of threads",
    "inputs that are parameters",
)  # fmt: skip
"""Circumstances that the code of a model can depend on, and in which it is not compared."""
_TOLERANCE = 1e-9
"""The largest difference of an entry of the result, as a share of the change of that entry between drawn inputs."""
_ROUNDING = 2**-46
"""The largest further difference, as a share of the entry itself. It is 64 times the machine epsilon of float64, and is
for kernels that sum in another order."""
_SPREADS = 8
"""Where a model cannot be computed in float64: the largest relative difference of an entry, as a multiple of that of
two evaluations of the program, or of the machine epsilon if this is larger."""


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
    """The number of drawn inputs."""
    circumstances: tuple[str, ...]
    """The names of the circumstances."""
    batches: tuple[int, ...]
    """The sizes of the batch besides that of the example."""


class Confirmed(NamedTuple):
    """What `confirm` found."""

    comparison: Comparison
    """What was compared."""
    any_batch: Captured | None
    """The program for a batch of any size; None if no such program was confirmed."""
    twice: Captured | None
    """The program for twice the batch of the example; None where `any_batch` is."""


def confirm(
    model: nn.Module,
    captured: Captured,
    bounded: Captured | None,
    domain: Domain | None,
    output: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Confirmed:
    """Compare a model with its captured program on inputs drawn from the domain.

    Both run in their own arithmetic, and their results are computed in float64 beside it and compared entry by entry.
    A model for which float64 cannot be computed beside it is compared in its own arithmetic, with a larger tolerance.

    Args:
        model: The model that was captured. It is left as it was.
        captured: What `capture` returned for the model.
        bounded: The same with the operations that the certificate bounds; None without a certificate.
        domain: The inputs that the certificate holds for. Without a certificate it is None; the inputs are then drawn
            with a root mean square of at most 1, and results may be NaN.
        output: The argument `output` of `capture`.
        progress: A function that is called with the number of steps that are done, and of all steps.

    Raises:
        UncertifiableError: The model computes something else than the program, cannot be run on an input of the domain,
            gives NaN there, or is in another state after a run.
    """
    with running(model) as state:
        try:
            comparing = _Comparing(model, output, in_double=True)
            circumstances = _compare_circumstances(comparing, captured, bounded, domain, state)
        except _FewerDigitsError:
            state.restore()
            comparing = _Comparing(model, output, in_double=False)
            circumstances = _compare_circumstances(comparing, captured, bounded, domain, state)
        state.restore()
        progress(1, 4)
        symbolic, twice = any_batch(model, captured, output), None
        progress(2, 4)
        if symbolic is not None and not _compare_batches(comparing, symbolic, domain):
            symbolic = None
        progress(3, 4)
        if symbolic is not None:
            twice = export(model, symbolic.example, output)
        progress(4, 4)
        batches = () if symbolic is None else BATCHES
        return Confirmed(Comparison(comparing.arithmetic, comparing.inputs, circumstances, batches), symbolic, twice)


def _compare_circumstances(
    comparing: "_Comparing", captured: Captured, bounded: Captured | None, domain: Domain | None, state: ModelState
) -> tuple[str, ...]:
    """Compare at the shape of the example; return the names of the circumstances in which the model runs."""
    drawn = Drawing(captured, 1.0 if domain is None else domain).scaled()
    expected = comparing.expected(captured.program.module(check_guards=False), drawn, domain is not None)
    if bounded is not None and bounded is not captured:
        comparing.require_parts(bounded.program.module(check_guards=False), drawn, expected)
    plain, *others = CIRCUMSTANCES
    states = [state]
    try:
        for number in range(len(drawn)):
            comparing.compare(plain, drawn, expected, number)
            states += [ModelState(comparing.model)] if number < 2 else []
        compared = [each.words for each in others if comparing.compare(each, drawn, expected, 0, may_fail=True)]
        comparing.compare(plain, drawn, expected, 0)
    except UncertifiableError:
        states[-1].require(ModelState(comparing.model))  # a changed model is the better reason
        raise
    for before in states[1:]:  # the first call may fill caches, so the state before it does not count
        before.require(ModelState(comparing.model))
    return (plain.words, *compared)


def _compare_batches(comparing: "_Comparing", symbolic: Captured, domain: Domain | None) -> bool:
    """Whether a model computes the same as its program at each size in `BATCHES`, and for every sample as if alone."""
    program = symbolic.program.module(check_guards=False)
    try:
        for batch in BATCHES:
            drawn = Drawing(symbolic, 1.0 if domain is None else domain).scaled(batch)[:2]
            expected = comparing.expected(program, drawn, domain is not None)
            for number in range(len(drawn)):
                comparing.compare(CIRCUMSTANCES[0], drawn, expected, number)
            if batch > 1 and not comparing.is_as_if_alone(program, drawn[0], expected, batch_axis(symbolic.result)):
                return False
    except Exception:  # whatever the model or its program raises at another size
        return False
    return True


@dataclass(frozen=True)
class _Expected:
    """The results of the program at some inputs, `(inputs, *shape)`, and the tolerance of every entry, `(*shape)`."""

    values: Tensor
    tolerance: Tensor

    @property
    def change(self) -> Tensor:
        """The largest difference of every entry between two inputs, `(*shape)`; 0 where this is not finite."""
        return (self.values.amax(0) - self.values.amin(0)).nan_to_num(0.0, 0.0, 0.0)

    def agrees(self, found: Tensor, number: int) -> bool:
        """Whether a result at one of the inputs is the expected one, up to the tolerance; NaN agrees with NaN."""
        wanted, tolerance = self.values[number], self.tolerance.nan_to_num(0.0)
        if found.shape != wanted.shape:
            return False
        equal = (found == wanted) | (found.isnan() & wanted.isnan())
        return bool((equal | ((found - wanted).abs() <= tolerance)).all())

    @property
    def size(self) -> Tensor:
        """The largest absolute value of every entry over the inputs, `(*shape)`; 0 where this is not finite."""
        return self.values.abs().amax(0).nan_to_num(0.0, 0.0, 0.0)


class _Comparing:
    """Runs a model and its programs, in float64 or in their own arithmetic, and compares the results."""

    def __init__(self, model: nn.Module, output: Any, in_double: bool) -> None:
        self.model, self._output, self._in_double = model, output, in_double
        self.arithmetic, self.inputs = "float64", 0

    def expected(self, program: nn.Module, drawn: list[Example], defined: bool) -> _Expected:
        """Run the program on drawn inputs without gradients; if `defined`, refuse results with NaN."""
        self.inputs += len(drawn)
        with torch.no_grad():
            results = [self._run(lambda example: program(*example), inputs) for inputs in drawn]
        found = _Expected(torch.stack([each.double() for each in results]), torch.zeros(()))
        if defined and bool(found.values.isnan().any()):
            raise UncertifiableError(
                f"{type(self.model).__name__} gives NaN at an input of the domain, where a bound says nothing; pass a "
                "smaller radius, and let every row of an attention mask allow at least one token"
            )
        if self._in_double:
            return _Expected(found.values, _TOLERANCE * found.change + _ROUNDING * found.size)
        dtype = results[0].dtype
        self.arithmetic = str(dtype).removeprefix("torch.")
        with torch.enable_grad(), vendor_kernels(False):
            again = [program(*CIRCUMSTANCES[0].prepare(inputs)).detach().double() for inputs in drawn]
        size = found.size.clamp(min=torch.finfo(torch.float64).tiny)
        spread = ((found.values - torch.stack(again)).abs() / size).nan_to_num(0.0)
        most = max([torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, *spread.flatten().tolist()])
        return _Expected(found.values, _SPREADS * most * size)

    def require_parts(self, program: nn.Module, drawn: list[Example], expected: _Expected) -> None:
        """Require that a program whose operations are replaced by torch's parts of them computes what is expected."""
        with torch.no_grad():
            for number, inputs in enumerate(drawn):
                if not expected.agrees(self._run(lambda example: program(*example), inputs).double(), number):
                    raise UncertifiableError(
                        f"an operation of {type(self.model).__name__} has no bound, and torch's parts of it compute "
                        "something else; write the operation in another way, or certify the model in float32"
                    )

    def is_as_if_alone(self, program: nn.Module, drawn: Example, expected: _Expected, axis: int | None) -> bool:
        """Whether a program computes for every sample of the first input what it computes for this sample alone.

        Args:
            program: The program, for a batch of any size.
            drawn: The first input.
            expected: The results for several inputs, of which this is the first.
            axis: The axis of the result whose size is a multiple of that of the batch; None if there is none.
        """
        count = len(tensors_of(drawn)[0])
        if axis is None:
            return False
        with torch.no_grad():
            alone = [
                self._run(
                    lambda example: program(*example),
                    map_tensors(lambda each, place=place: each[place : place + 1].clone(), drawn),
                )
                for place in range(count)
            ]
        return expected.agrees(torch.cat(alone, axis).double(), 0)

    def compare(
        self,
        circumstance: _Circumstance,
        drawn: list[Example],
        expected: _Expected,
        number: int,
        may_fail: bool = False,
    ) -> bool:
        """Require that the model computes what is expected at one of the drawn inputs.

        The result is True, or False if the model raises an error and `may_fail` is set.
        """
        wanted = expected.values[number]
        try:
            with circumstance.gradients():
                found = self._run(self._called, circumstance.prepare(drawn[number])).double()
            if expected.agrees(found, number):
                return True
        except _FewerDigitsError:
            raise
        except Exception as error:  # whatever the model raises
            if may_fail:
                return False
            raise UncertifiableError(
                f"{type(self.model).__name__} cannot be run on an input drawn from its domain{line_of(error)}: "
                f"{first_line(error)}"
            ) from error
        if found.shape != wanted.shape:
            how = f"its result has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        else:
            by, change = float((found - wanted).abs().max()), float(expected.change.max())
            how = f"its result differs by {by:.3g}, where results for several inputs differ by {change:.3g}"
        raise UncertifiableError(
            f"{type(self.model).__name__} does not compute what was captured {circumstance.words}: {how}. It depends "
            "on something else than its input and its stored tensors, such as randomness, an earlier call, whether "
            "gradients are recorded, or the strides of tensors that it overwrites"
        )

    def _called(self, inputs: Example) -> Tensor:
        return select(self.model(*inputs[0], **inputs[1]), self._output)

    def _run(self, function: Callable[[Example], Tensor], inputs: Example) -> Tensor:
        if not self._in_double:
            return function(inputs).detach()
        result = run_in_double(lambda: function(inputs), tensors_of(inputs))
        if result is None:
            raise _FewerDigitsError
        return result


class _FewerDigitsError(Exception):
    """The model or its program cannot be computed in float64."""
